package vendorsim_test

import (
	"bytes"
	"maps"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Structs of NVML's interface, which libixml has as well.
type (
	nvmlPCI struct {
		BusIDLegacy                                    [16]byte
		Domain, Bus, Device, PCIDeviceID, PCISubSystem uint32
		BusID                                          [32]byte
	}
	nvmlMemory   struct{ Total, Free, Used uint64 }
	nvmlMemoryV2 struct {
		Version                     uint32
		Total, Reserved, Free, Used uint64
	}
	nvmlEvent struct {
		Device                       uintptr
		Type, Data                   uint64
		GPUInstance, ComputeInstance uint32
	}
	nvmlProcess struct {
		PID                          uint32
		Used                         uint64
		GPUInstance, ComputeInstance uint32
	}
	nvmlUtilization struct {
		PID                                       uint32
		Timestamp                                 uint64
		Multiprocessors, Memory, Encoder, Decoder uint32
	}
)

// nvmlABI is a stand-in for a library with NVML's functions.
type nvmlABI struct {
	standIn

	Init       func() int32
	Shutdown   func() int32
	Driver     func(*byte, uint32) int32
	CUDA       func(*int32) int32
	Count      func(*uint32) int32
	At         func(uint32, *uintptr) int32
	ByUUID     func(string, *uintptr) int32
	ByAddress  func(string, *uintptr) int32
	Index      func(uintptr, *uint32) int32
	UUID       func(uintptr, *byte, uint32) int32
	Name       func(uintptr, *byte, uint32) int32
	Serial     func(uintptr, *byte, uint32) int32
	Minor      func(uintptr, *uint32) int32
	PCI        func(uintptr, *nvmlPCI) int32
	Memory     func(uintptr, *nvmlMemory) int32
	MemoryV2   func(uintptr, *nvmlMemoryV2) int32
	Ancestor   func(uintptr, uintptr, *int32) int32
	NewSet     func(*uintptr) int32
	FreeSet    func(uintptr) int32
	Register   func(uintptr, uint64, uintptr) int32
	EventTypes func(uintptr, *uint64) int32
	Wait       func(uintptr, *nvmlEvent, uint32) int32
}

// load loads the stand-in, with functions that the others lack.
func (l *nvmlABI) load(t testing.TB, vendor string, flags int, topology vendorsim.Topology, functions map[string]any) {
	t.Helper()
	maps.Copy(functions, map[string]any{
		"nvmlInit_v2":                         &l.Init,
		"nvmlShutdown":                        &l.Shutdown,
		"nvmlSystemGetDriverVersion":          &l.Driver,
		"nvmlSystemGetCudaDriverVersion_v2":   &l.CUDA,
		"nvmlDeviceGetCount_v2":               &l.Count,
		"nvmlDeviceGetHandleByIndex_v2":       &l.At,
		"nvmlDeviceGetHandleByUUID":           &l.ByUUID,
		"nvmlDeviceGetHandleByPciBusId_v2":    &l.ByAddress,
		"nvmlDeviceGetIndex":                  &l.Index,
		"nvmlDeviceGetUUID":                   &l.UUID,
		"nvmlDeviceGetName":                   &l.Name,
		"nvmlDeviceGetSerial":                 &l.Serial,
		"nvmlDeviceGetMinorNumber":            &l.Minor,
		"nvmlDeviceGetPciInfo_v3":             &l.PCI,
		"nvmlDeviceGetMemoryInfo":             &l.Memory,
		"nvmlDeviceGetMemoryInfo_v2":          &l.MemoryV2,
		"nvmlDeviceGetTopologyCommonAncestor": &l.Ancestor,
		"nvmlEventSetCreate":                  &l.NewSet,
		"nvmlEventSetFree":                    &l.FreeSet,
		"nvmlDeviceRegisterEvents":            &l.Register,
		"nvmlDeviceGetSupportedEventTypes":    &l.EventTypes,
		"nvmlEventSetWait_v2":                 &l.Wait,
	})
	l.standIn = loadStandIn(t, vendor, flags, topology, functions)
}

// nvml is a copy of the stand-in with a topology of its own, loaded.
type nvml struct {
	nvmlABI

	ErrorString func(int32) string
	Affinity    func(uintptr, uint32, *uint64, uint32) int32
	Compute     func(uintptr, *int32, *int32) int32
	MIG         func(uintptr, *uint32, *uint32) int32
	Mode        func(uintptr, *int32) int32
	Persistence func(uintptr, *int32) int32
	Processes   func(uintptr, *uint32, *nvmlProcess) int32
	Graphics    func(uintptr, *uint32, *nvmlProcess) int32
	MPS         func(uintptr, *uint32, *nvmlProcess) int32
	Utilization func(_ uintptr, _ *nvmlUtilization, count *uint32, since uint64) int32
	Rows        func(_ uintptr, _, _, _, _ *uint32) int32
	LaneState   func(uintptr, uint32, *int32) int32
	LanePCI     func(uintptr, uint32, *nvmlPCI) int32
}

func loadNVML(t testing.TB, topology vendorsim.Topology) *nvml {
	t.Helper()
	l := &nvml{}
	l.load(t, vendorsim.NVIDIA, purego.RTLD_LAZY|purego.RTLD_LOCAL, topology, map[string]any{
		"nvmlErrorString":                            &l.ErrorString,
		"nvmlDeviceGetMemoryAffinity":                &l.Affinity,
		"nvmlDeviceGetCudaComputeCapability":         &l.Compute,
		"nvmlDeviceGetMigMode":                       &l.MIG,
		"nvmlDeviceGetComputeMode":                   &l.Mode,
		"nvmlDeviceGetPersistenceMode":               &l.Persistence,
		"nvmlDeviceGetComputeRunningProcesses_v3":    &l.Processes,
		"nvmlDeviceGetGraphicsRunningProcesses_v3":   &l.Graphics,
		"nvmlDeviceGetMPSComputeRunningProcesses_v3": &l.MPS,
		"nvmlDeviceGetProcessUtilization":            &l.Utilization,
		"nvmlDeviceGetRemappedRows":                  &l.Rows,
		"nvmlDeviceGetNvLinkState":                   &l.LaneState,
		"nvmlDeviceGetNvLinkRemotePciInfo_v2":        &l.LanePCI,
	})
	return l
}

// at returns the handle of a GPU.
func (l *nvml) at(t testing.TB, index uint32) uintptr {
	t.Helper()
	var handle uintptr
	wantCode(t, "nvmlDeviceGetHandleByIndex_v2", l.At(index, &handle), 0)
	return handle
}

func TestNVMLStructSizes(t *testing.T) {
	if p, m, e := unsafe.Sizeof(nvmlPCI{}), unsafe.Sizeof(nvmlMemory{}), unsafe.Sizeof(nvmlEvent{}); p != 68 || m != 24 || e != 32 {
		t.Errorf("PCI, memory and event have %d, %d and %d bytes, want 68, 24 and 32", p, m, e)
	}
}

func TestNVMLDescribesGPUs(t *testing.T) {
	cards := append(vendorsim.GCUs(1, 1024), vendorsim.GPUs(2, 40960)...)
	cards[1].PCI, cards[1].NUMA, cards[1].UsedMiB, cards[1].Compute = "00010000:3b:1f.1", 70, 512, "9.0"
	cards[1].MIG, cards[1].Minor = vendorsim.MIGEnabled, new(7)
	cards[2].MIG, cards[2].NUMA, cards[2].Serial, cards[2].Unhealthy = vendorsim.MIGNotSupported, -1, "", true
	l := loadNVML(t, vendorsim.Topology{
		Drivers: map[string]vendorsim.Driver{vendorsim.NVIDIA: {Version: "550.54.15", CUDA: "12.9"}},
		Cards:   cards,
	})
	var count uint32
	wantCode(t, "nvmlDeviceGetCount_v2 before nvmlInit_v2", l.Count(&count), 1)
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	wantCode(t, "nvmlDeviceGetCount_v2", l.Count(&count), 0)
	if count != 2 {
		t.Errorf("%d GPUs, want the 2 of NVIDIA", count)
	}
	gpu, other := l.at(t, 0), l.at(t, 1)
	var b [96]byte
	wantCode(t, "nvmlSystemGetDriverVersion", l.Driver(&b[0], 80), 0)
	if got := text(b[:]); got != "550.54.15" {
		t.Errorf("driver is %q", got)
	}
	read := func(call string, f func(uintptr, *byte, uint32) int32, want string) {
		t.Helper()
		wantCode(t, call, f(gpu, &b[0], 96), 0)
		if text(b[:]) != want {
			t.Errorf("%s is %q, want %q", call, text(b[:]), want)
		}
		wantCode(t, call+" into too little", f(gpu, &b[0], uint32(len(want))), 7)
	}
	read("nvmlDeviceGetUUID", l.UUID, cards[1].UUID)
	read("nvmlDeviceGetName", l.Name, cards[1].Model)
	read("nvmlDeviceGetSerial", l.Serial, cards[1].Serial)
	wantCode(t, "nvmlDeviceGetSerial of none", l.Serial(other, &b[0], 96), 3)

	var n, m int32
	wantCode(t, "nvmlSystemGetCudaDriverVersion_v2", l.CUDA(&n), 0)
	if n != 12090 {
		t.Errorf("CUDA is %d, want 12090", n)
	}
	wantCode(t, "nvmlDeviceGetCudaComputeCapability", l.Compute(gpu, &n, &m), 0)
	if n != 9 || m != 0 {
		t.Errorf("compute capability is %d.%d, want 9.0", n, m)
	}
	var u, v uint32
	wantCode(t, "nvmlDeviceGetMinorNumber", l.Minor(gpu, &u), 0)
	if u != 7 {
		t.Errorf("minor is %d, want 7", u)
	}
	wantCode(t, "nvmlDeviceGetMigMode", l.MIG(gpu, &u, &v), 0)
	if u != 1 || v != 1 {
		t.Errorf("MIG mode is %d, %d; want 1", u, v)
	}
	wantCode(t, "nvmlDeviceGetMigMode of a GPU without", l.MIG(other, &u, &v), 3)
	var pci nvmlPCI
	wantCode(t, "nvmlDeviceGetPciInfo_v3", l.PCI(gpu, &pci), 0)
	if got := text(pci.BusID[:]); got != "00010000:3B:1F.1" || pci.Domain != 0x10000 || pci.Bus != 0x3b || pci.Device != 0x1f {
		t.Errorf("PCI is %q, %+v", got, pci)
	}
	wantCode(t, "nvmlDeviceGetPciInfo_v3", l.PCI(other, &pci), 0)
	if !bytes.Equal(pci.BusID[:], append([]byte("00000000:12:00.0"), make([]byte, 16)...)) || text(pci.BusIDLegacy[:]) != "0000:12:00.0" {
		t.Errorf("bus ids are %q and %q, want NULs at the end", pci.BusID, pci.BusIDLegacy)
	}
	var memory nvmlMemory
	wantCode(t, "nvmlDeviceGetMemoryInfo", l.Memory(gpu, &memory), 0)
	if memory != (nvmlMemory{Total: 40960 << 20, Free: 40448 << 20, Used: 512 << 20}) {
		t.Errorf("memory: %+v", memory)
	}
	var nodes [2]uint64
	wantCode(t, "nvmlDeviceGetMemoryAffinity", l.Affinity(gpu, 2, &nodes[0], 0), 0)
	if nodes != [2]uint64{0, 1 << 6} {
		t.Errorf("NUMA nodes are %b, want 70", nodes)
	}
	wantCode(t, "nvmlDeviceGetMemoryAffinity of an unknown node", l.Affinity(other, 2, &nodes[0], 0), 3)
	var rows [4]uint32
	for handle, failed := range map[uintptr]uint32{gpu: 0, other: 1} {
		wantCode(t, "nvmlDeviceGetRemappedRows", l.Rows(handle, &rows[0], &rows[1], &rows[2], &rows[3]), 0)
		if rows[3] != failed {
			t.Errorf("remapping failed: %d, want %d", rows[3], failed)
		}
	}
	var same uintptr
	wantCode(t, "nvmlDeviceGetHandleByUUID", l.ByUUID(cards[2].UUID, &same), 0)
	if same != other {
		t.Error("nvmlDeviceGetHandleByUUID finds another GPU")
	}
	wantCode(t, "nvmlDeviceGetHandleByPciBusId_v2", l.ByAddress("0000:12:00.0", &same), 0)
	if same != other {
		t.Error("nvmlDeviceGetHandleByPciBusId_v2 finds another GPU")
	}
	wantCode(t, "nvmlDeviceGetHandleByUUID of none", l.ByUUID("GPU-none", &same), 6)
	wantCode(t, "nvmlDeviceGetIndex", l.Index(other, &u), 0)
	if u != 1 {
		t.Errorf("index is %d, want 1", u)
	}
	wantCode(t, "nvmlDeviceGetIndex of no handle", l.Index(12345, &u), 2)
	wantCode(t, "nvmlDeviceGetHandleByIndex_v2 of none", l.At(2, &same), 2)
	wantCode(t, "nvmlShutdown", l.Shutdown(), 0)
	wantCode(t, "nvmlDeviceGetIndex after nvmlShutdown", l.Index(other, &u), 1)
}

func TestNVMLProcessLists(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GPUs(1, 40960), Processes: []vendorsim.Process{
		{PID: 1, MemoryMiB: 1}, {PID: 2, Lists: vendorsim.ListGraphics}, {PID: 3, Lists: vendorsim.ListCompute | vendorsim.ListMPS},
	}}
	l := loadNVML(t, topology)
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	gpu := l.at(t, 0)
	for _, list := range []struct {
		call string
		f    func(uintptr, *uint32, *nvmlProcess) int32
		want []uint32
	}{{"compute", l.Processes, []uint32{1, 3}}, {"graphics", l.Graphics, []uint32{2}}, {"MPS", l.MPS, []uint32{3}}} {
		var got [4]nvmlProcess
		n := uint32(len(got))
		wantCode(t, list.call, list.f(gpu, &n, &got[0]), 0)
		var pids []uint32
		for _, p := range got[:n] {
			pids = append(pids, p.PID)
		}
		if !slices.Equal(pids, list.want) {
			t.Errorf("%s: processes %v, want %v", list.call, pids, list.want)
		}
	}
}

func TestNVMLProcessUtilization(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.GPUs(1, 40960), Processes: []vendorsim.Process{
		{PID: 1, Utilization: 70}, {PID: 2}, {PID: 3, Utilization: 1, Lists: vendorsim.ListMPS},
	}}
	l := loadNVML(t, topology)
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	gpu := l.at(t, 0)
	var got [2]nvmlUtilization
	n := uint32(9)
	wantCode(t, "nvmlDeviceGetProcessUtilization without a list", l.Utilization(gpu, nil, &n, 0), 7)
	if n != 2 {
		t.Fatalf("there are %d samples, want 2", n)
	}
	n = 1
	wantCode(t, "nvmlDeviceGetProcessUtilization into too little", l.Utilization(gpu, &got[0], &n, 0), 7)
	n = 2
	wantCode(t, "nvmlDeviceGetProcessUtilization", l.Utilization(gpu, &got[0], &n, 0), 0)
	at := got[0].Timestamp
	if age := time.Since(time.UnixMicro(int64(at))); age < 0 || age > time.Minute {
		t.Errorf("the sample is %v old", age)
	}
	if want := [2]nvmlUtilization{{1, at, 70, 0, 0, 0}, {3, at, 1, 0, 0, 0}}; n != 2 || got != want {
		t.Errorf("%d samples: %+v, want %+v", n, got, want)
	}
	wantCode(t, "nvmlDeviceGetProcessUtilization of later", l.Utilization(gpu, &got[0], &n, at+uint64(time.Hour.Microseconds())), 6)
	time.Sleep(200 * time.Millisecond) // for the next sample
	n = 2
	wantCode(t, "nvmlDeviceGetProcessUtilization again", l.Utilization(gpu, &got[0], &n, at), 0)
	if got[0].Timestamp <= at {
		t.Errorf("a sample of %d is not newer than %d", got[0].Timestamp, at)
	}
	wantCode(t, "nvmlDeviceGetProcessUtilization without a count", l.Utilization(gpu, &got[0], nil, 0), 2)
	topology.Cards[0] = vendorsim.Partition(topology.Cards[0], "7g.40gb")
	l.write(t, topology)
	wantCode(t, "nvmlDeviceGetProcessUtilization in MIG mode", l.Utilization(gpu, &got[0], &n, 0), 3)
}

func TestNVMLProcesses(t *testing.T) {
	cards := append(vendorsim.GCUs(1, 1024), vendorsim.GPUs(2, 40960)...)
	cards[2].UsedMiB = 100
	topology := vendorsim.Topology{Cards: cards, Processes: []vendorsim.Process{
		{Card: 2, PID: 4711, MemoryMiB: 300}, {Card: 1, PID: 9, MemoryMiB: 1}, {Card: 2, PID: 4712, MemoryMiB: vendorsim.UnknownMemory},
	}}
	l := loadNVML(t, topology)
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	gpu := l.at(t, 1)
	var got [3]nvmlProcess
	for _, room := range []uint32{0, 1} {
		n := room
		wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3 into too little", l.Processes(gpu, &n, &got[0]), 7)
		if n != 2 {
			t.Errorf("with room for %d, the call says that there are %d processes, want 2", room, n)
		}
	}
	n := uint32(len(got))
	wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3", l.Processes(gpu, &n, &got[0]), 0)
	none := ^uint32(0)
	want := [3]nvmlProcess{{4711, 300 << 20, none, none}, {4712, ^uint64(0), none, none}}
	if n != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("%d processes: %+v, want %+v", n, got, want)
	}
	for call, f := range map[string]func(uintptr, *uint32, *nvmlProcess) int32{
		"nvmlDeviceGetGraphicsRunningProcesses_v3": l.Graphics, "nvmlDeviceGetMPSComputeRunningProcesses_v3": l.MPS,
	} {
		n = 0
		wantCode(t, call, f(gpu, &n, nil), 0)
		if n != 0 {
			t.Errorf("%s: %d processes", call, n)
		}
	}
	wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3 without a count", l.Processes(gpu, nil, nil), 2)
	n = 1
	wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3 without a list", l.Processes(gpu, &n, nil), 2)
	memory := nvmlMemoryV2{Version: uint32(unsafe.Sizeof(nvmlMemoryV2{})) | 2<<24}
	wantCode(t, "nvmlDeviceGetMemoryInfo_v2", l.MemoryV2(gpu, &memory), 0)
	if memory.Used != 400<<20 || memory.Free != 40560<<20 {
		t.Errorf("memory: %+v, want the processes' in it", memory)
	}
	for call, f := range map[string]func(uintptr, *int32) int32{
		"nvmlDeviceGetComputeMode": l.Mode, "nvmlDeviceGetPersistenceMode": l.Persistence,
	} {
		mode := int32(7)
		wantCode(t, call, f(gpu, &mode), 0)
		if mode != 0 {
			t.Errorf("%s: %d, want 0", call, mode)
		}
	}
}

func TestNVMLDriverStates(t *testing.T) {
	topology := vendorsim.Topology{
		Cards:   vendorsim.GPUs(2, 1024),
		Drivers: map[string]vendorsim.Driver{vendorsim.NVIDIA: {State: vendorsim.DriverAbsent}},
	}
	l := loadNVML(t, topology)
	wantCode(t, "nvmlInit_v2 without a driver", l.Init(), 9)
	if got := l.ErrorString(9); got != "Driver Not Loaded" {
		t.Errorf("nvmlErrorString(9) = %q", got)
	}
	topology.Drivers = nil
	l.write(t, topology)
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	gpu := l.at(t, 1)
	topology.Cards[1].Lost = true
	l.write(t, topology)
	var u uint32
	wantCode(t, "nvmlDeviceGetMinorNumber of a lost GPU", l.Minor(gpu, &u), 15)
	wantCode(t, "nvmlDeviceGetHandleByIndex_v2 of a lost GPU", l.At(1, &gpu), 15)
	wantCode(t, "nvmlDeviceGetCount_v2", l.Count(&u), 0)
	if u != 2 {
		t.Errorf("%d GPUs, want 2: a lost one is still counted", u)
	}
	topology.Driver.State = vendorsim.DriverBroken
	l.write(t, topology)
	wantCode(t, "nvmlDeviceGetCount_v2 of a broken driver", l.Count(&u), 999)
	topology.Driver.State = vendorsim.DriverLoaded
	l.write(t, topology)
	wantCode(t, "nvmlDeviceGetCount_v2 of a driver that was away", l.Count(&u), 1)
	topology.Library.Fail = vendorsim.Failures{"nvmlInit_v2": 18}
	l.write(t, topology)
	wantCode(t, "nvmlInit_v2, ordered to fail", l.Init(), 18)
}

func TestNVMLLinks(t *testing.T) {
	cards := vendorsim.GPUs(5, 1024)
	cards[0].Board, cards[1].Board = "b", "b"
	cards[1].Switch, cards[2].Switch = "s", "s"
	cards[4].NUMA = 1
	l := loadNVML(t, vendorsim.Topology{
		Cards: cards,
		Links: []vendorsim.Link{{A: 0, B: 1, Lanes: 2}, {A: 2, B: 0, Lanes: 1, OneWay: true}},
	})
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	var level int32
	for _, c := range []struct {
		a, b        uint32
		code, level int32
	}{
		{0, 1, 0, 0}, {1, 2, 0, 10}, {0, 3, 0, 30}, {0, 4, 0, 50}, {2, 0, 0, 30}, {0, 2, 999, 0},
	} {
		code := l.Ancestor(l.at(t, c.a), l.at(t, c.b), &level)
		if code != c.code || code == 0 && level != c.level {
			t.Errorf("ancestor of %d and %d: code %d, level %d; want %d, %d", c.a, c.b, code, level, c.code, c.level)
		}
	}
	// Lanes of GPU 0: two to GPU 1, and one to GPU 2 that it knows nothing of.
	lanes := func(index uint32) (peers string) {
		for lane := range uint32(18) {
			var up int32
			var pci nvmlPCI
			code := l.LaneState(l.at(t, index), lane, &up)
			if code != 0 {
				wantCode(t, "nvmlDeviceGetNvLinkState", code, 3)
				continue
			}
			if up == 0 {
				wantCode(t, "nvmlDeviceGetNvLinkRemotePciInfo_v2 of a lane that is down", l.LanePCI(l.at(t, index), lane, &pci), 3)
				peers += "- "
				continue
			}
			wantCode(t, "nvmlDeviceGetNvLinkRemotePciInfo_v2", l.LanePCI(l.at(t, index), lane, &pci), 0)
			peers += text(pci.BusIDLegacy[5:7]) + " "
		}
		return peers
	}
	for index, want := range []string{"11 11 - ", "10 10 ", "10 ", ""} {
		if got := lanes(uint32(index)); got != want {
			t.Errorf("lanes of GPU %d lead to %q, want %q", index, got, want)
		}
	}
	var up int32
	wantCode(t, "nvmlDeviceGetNvLinkState of lane 18", l.LaneState(l.at(t, 0), 18, &up), 2)
}

func TestNVMLEvents(t *testing.T) {
	const ecc, xid = 2, 8
	topology := vendorsim.Topology{Cards: vendorsim.GPUs(3, 1024)}
	l := loadNVML(t, topology)
	wantCode(t, "nvmlInit_v2", l.Init(), 0)
	change := func(f func([]vendorsim.Card)) {
		f(topology.Cards)
		l.write(t, topology)
	}
	raise := func(card, code, number int) {
		change(func(c []vendorsim.Card) { c[card].XID = vendorsim.XID{Code: code, Number: number} })
	}
	raise(0, 13, 0) // before anybody listens
	var one, two uintptr
	wantCode(t, "nvmlEventSetCreate", l.NewSet(&one), 0)
	wantCode(t, "nvmlEventSetCreate", l.NewSet(&two), 0)
	var types uint64
	wantCode(t, "nvmlDeviceGetSupportedEventTypes", l.EventTypes(l.at(t, 0), &types), 0)
	for _, index := range []uint32{0, 1} {
		wantCode(t, "nvmlDeviceRegisterEvents", l.Register(l.at(t, index), types, one), 0)
	}
	wantCode(t, "nvmlDeviceRegisterEvents", l.Register(l.at(t, 0), xid, two), 0)
	var e nvmlEvent
	wantCode(t, "nvmlEventSetWait_v2 of calm", l.Wait(one, &e, 20), 10)

	expect := func(set uintptr, card uint32, kind, data uint64) {
		t.Helper()
		wantCode(t, "nvmlEventSetWait_v2", l.Wait(set, &e, 10_000), 0)
		if e.Device != l.at(t, card) || e.Type != kind || e.Data != data || e.GPUInstance != 1<<32-1 {
			t.Errorf("event %+v, want GPU %d, type %d, data %d", e, card, kind, data)
		}
	}
	raise(2, 79, 0) // nobody listens to that one
	raise(0, 79, 0)
	raise(1, 79, 0)
	expect(one, 0, xid, 79)
	expect(one, 1, xid, 79)
	expect(two, 0, xid, 79) // each set hears it
	wantCode(t, "nvmlEventSetWait_v2 of calm", l.Wait(two, &e, 20), 10)
	raise(0, 79, 1) // once more
	expect(one, 0, xid, 79)
	raise(0, 48, 0)
	expect(one, 0, ecc, 0)
	expect(two, 0, xid, 79)
	expect(two, 0, xid, 48) // by those who do not hear the type of their own
	change(func(c []vendorsim.Card) { c[1].Unhealthy = true })
	expect(one, 1, xid, 63)

	got := make(chan int32)
	go func() { got <- l.Wait(one, &e, 10_000) }()
	time.Sleep(30 * time.Millisecond)
	change(func(c []vendorsim.Card) { c[1].Lost = true })
	wantCode(t, "nvmlEventSetWait_v2 with a lost GPU", <-got, 15)
	wantCode(t, "nvmlEventSetWait_v2 without it", l.Wait(two, &e, 20), 10)
	wantCode(t, "nvmlEventSetFree", l.FreeSet(one), 0)
	wantCode(t, "nvmlEventSetFree again", l.FreeSet(one), 2)
	wantCode(t, "nvmlEventSetWait_v2 of no set", l.Wait(one, &e, 20), 2)
	topology.Driver.State = vendorsim.DriverAbsent
	l.write(t, topology)
	wantCode(t, "nvmlEventSetWait_v2 without a driver", l.Wait(two, &e, 10_000), 9)
}
