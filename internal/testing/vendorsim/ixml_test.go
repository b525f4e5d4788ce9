package vendorsim_test

import (
	"testing"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Codes of libixml.
const (
	ixmlSuccess          = 0
	ixmlUninitialized    = 1
	ixmlInvalidArgument  = 2
	ixmlNotSupported     = 3
	ixmlNotFound         = 6
	ixmlInsufficientSize = 7
	ixmlDriverNotLoaded  = 9
	ixmlTimeout          = 10
	ixmlLost             = 15
	ixmlUnknown          = 999
)

// ixml is a copy of the stand-in for libixml with a topology of its own, loaded
// as Divvy loads it.
type ixml struct {
	nvmlABI

	LibraryVersion func(*byte, uint32) int32
	CUDAv1         func(*int32) int32
	BySerial       func(string, *uintptr) int32
	PartNumber     func(uintptr, *byte, uint32) int32
	BoardID        func(uintptr, *uint32) int32
	MultiGPU       func(uintptr, *uint32) int32
	Power          func(uintptr, *uint32) int32
	Position       func(uintptr, *uint32) int32
	Health         func(uintptr, *uint64) int32
	ECC            func(uintptr, *uint32, *uint32) int32
	Voltage        func(uintptr, *uint32, *uint32) int32
	Utilization    func(uintptr, *[2]uint32) int32
	Temperature    func(uintptr, int32, *uint32) int32
	Processes      func(uintptr, *uint32, *ixmlProcessV1) int32
	AllProcesses   func(uintptr, *uint32, *ixmlProcess) int32
	SameBoard      func(a, b uintptr, _ *int32) int32
}

func loadIXML(t *testing.T, topology vendorsim.Topology) *ixml {
	t.Helper()
	const deepBind = 0x8
	l := &ixml{}
	l.load(t, vendorsim.Iluvatar, purego.RTLD_LAZY|purego.RTLD_LOCAL|deepBind, topology, map[string]any{
		"nvmlSystemGetNVMLVersion":             &l.LibraryVersion,
		"nvmlSystemGetCudaDriverVersion":       &l.CUDAv1,
		"nvmlDeviceGetHandleBySerial":          &l.BySerial,
		"nvmlDeviceGetBoardPartNumber":         &l.PartNumber,
		"nvmlDeviceGetBoardId":                 &l.BoardID,
		"nvmlDeviceGetMultiGpuBoard":           &l.MultiGPU,
		"nvmlDeviceGetPowerUsage":              &l.Power,
		"ixmlDeviceGetBoardPosition":           &l.Position,
		"ixmlDeviceGetHealth":                  &l.Health,
		"ixmlDeviceGetEccErros":                &l.ECC,
		"ixmlDeviceGetGPUVoltage":              &l.Voltage,
		"nvmlDeviceGetUtilizationRates":        &l.Utilization,
		"nvmlDeviceGetTemperature":             &l.Temperature,
		"nvmlDeviceGetComputeRunningProcesses": &l.Processes,
		"ixmlDeviceGetComputeAllProcesses":     &l.AllProcesses,
		"nvmlDeviceOnSameBoard":                &l.SameBoard,
	})
	return l
}

// The structs of processes that the library fills.
type (
	ixmlProcessV1 struct {
		PID  uint32
		Used uint64
	}
	ixmlProcess struct {
		PID                          uint32
		Used                         uint64
		GPUInstance, ComputeInstance uint32
		Protected                    uint64
	}
)

func TestIXMLProcesses(t *testing.T) {
	topology := vendorsim.Topology{Cards: append(vendorsim.GPUs(1, 1024), vendorsim.IXBoards(1, 2, 32768)...)}
	l := loadIXML(t, topology)
	chip := l.chips(t, 2)[1]
	n := uint32(0)
	wantCode(t, "nvmlDeviceGetComputeRunningProcesses of none", l.Processes(chip, &n, nil), ixmlSuccess)
	topology.Processes = []vendorsim.Process{
		{Card: 2, PID: 4711, MemoryMiB: 300}, {Card: 1, PID: 9, MemoryMiB: 1}, {Card: 2, PID: 4712, MemoryMiB: vendorsim.UnknownMemory},
	}
	l.write(t, topology)
	var v1 [2]ixmlProcessV1
	var all [2]ixmlProcess
	for _, room := range []uint32{0, 1} {
		n = room
		wantCode(t, "nvmlDeviceGetComputeRunningProcesses into too little", l.Processes(chip, &n, &v1[0]), ixmlInsufficientSize)
		m := room
		wantCode(t, "ixmlDeviceGetComputeAllProcesses into too little", l.AllProcesses(chip, &m, &all[0]), ixmlSuccess)
		if n != 2 || m != 2 || all[1] != (ixmlProcess{}) {
			t.Errorf("with room for %d, there are %d and %d processes, want 2; the second is %+v", room, n, m, all[1])
		}
	}
	wantCode(t, "nvmlDeviceGetComputeRunningProcesses", l.Processes(chip, &n, &v1[0]), ixmlSuccess)
	if want := [2]ixmlProcessV1{{4711, 300 << 20}, {4712, ^uint64(0)}}; n != 2 || v1 != want {
		t.Errorf("%d processes: %+v, want %+v", n, v1, want)
	}
	wantCode(t, "ixmlDeviceGetComputeAllProcesses", l.AllProcesses(chip, &n, &all[0]), ixmlSuccess)
	none := ^uint32(0)
	if want := [2]ixmlProcess{{4711, 300 << 20, none, none, 0}, {4712, ^uint64(0), none, none, 0}}; n != 2 || all != want {
		t.Errorf("%d processes: %+v, want %+v", n, all, want)
	}
	var memory nvmlMemory
	wantCode(t, "nvmlDeviceGetMemoryInfo", l.Memory(chip, &memory), ixmlSuccess)
	if memory.Used != 300<<20 {
		t.Errorf("%d bytes are used, want the processes' among them", memory.Used)
	}
	wantCode(t, "nvmlDeviceGetComputeRunningProcesses without a list", l.Processes(chip, &n, nil), ixmlInvalidArgument)
	wantCode(t, "ixmlDeviceGetComputeAllProcesses without a list", l.AllProcesses(chip, &n, nil), ixmlInvalidArgument)
}

// chips initialises the library and returns the handles of n chips.
func (l *ixml) chips(t *testing.T, n int) []uintptr {
	t.Helper()
	wantCode(t, "nvmlInit_v2", l.Init(), ixmlSuccess)
	chips := make([]uintptr, n)
	for i := range chips {
		wantCode(t, "nvmlDeviceGetHandleByIndex_v2", l.At(uint32(i), &chips[i]), ixmlSuccess)
	}
	return chips
}

func TestIXMLStructSizes(t *testing.T) {
	for name, sizes := range map[string][2]uintptr{
		"PCI info":  {unsafe.Sizeof(nvmlPCI{}), 68},
		"memory":    {unsafe.Sizeof(nvmlMemory{}), 24},
		"memory v2": {unsafe.Sizeof(nvmlMemoryV2{}), 40},
		"event":     {unsafe.Sizeof(nvmlEvent{}), 32},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s has %d bytes, want %d", name, sizes[0], sizes[1])
		}
	}
}

func TestIXMLDescribesChips(t *testing.T) {
	cards := vendorsim.IXBoards(2, 2, 32768)
	cards[1].PCI, cards[1].Minor, cards[1].UsedMiB = "0001:3b:00.2", new(7), 512
	topology := vendorsim.Topology{
		Drivers: map[string]vendorsim.Driver{vendorsim.Iluvatar: {Version: "4.3.0", CUDA: "10.2"}},
		Cards:   append(vendorsim.GPUs(1, 1024), cards...),
	}
	l := loadIXML(t, topology)
	chips := l.chips(t, 4)
	chip := chips[1]

	var count uint32
	wantCode(t, "nvmlDeviceGetCount_v2", l.Count(&count), ixmlSuccess)
	if count != 4 {
		t.Errorf("%d chips, want the 4 of Iluvatar", count)
	}
	for call, tt := range map[string]struct {
		get  func(*byte, uint32) int32
		want string
	}{
		"nvmlSystemGetDriverVersion":   {l.Driver, "4.3.0"},
		"nvmlDeviceGetUUID":            {func(b *byte, n uint32) int32 { return l.UUID(chip, b, n) }, cards[1].UUID},
		"nvmlDeviceGetName":            {func(b *byte, n uint32) int32 { return l.Name(chip, b, n) }, "Iluvatar BI-V150"},
		"nvmlDeviceGetSerial":          {func(b *byte, n uint32) int32 { return l.Serial(chip, b, n) }, cards[1].Serial},
		"nvmlDeviceGetBoardPartNumber": {func(b *byte, n uint32) int32 { return l.PartNumber(chip, b, n) }, "Iluvatar BI-V150"},
		"nvmlSystemGetNVMLVersion":     {l.LibraryVersion, "1.0.0-divvy"},
	} {
		var b [80]byte
		wantCode(t, call, tt.get(&b[0], uint32(len(b))), ixmlSuccess)
		if got := text(b[:]); got != tt.want {
			t.Errorf("%s says %q, want %q", call, got, tt.want)
		}
		wantCode(t, call, tt.get(&b[0], uint32(len(tt.want))), ixmlInsufficientSize)
		wantCode(t, call, tt.get(nil, 80), ixmlInvalidArgument)
	}
	var cuda int32
	for call, get := range map[string]func(*int32) int32{"without suffix": l.CUDAv1, "_v2": l.CUDA} {
		if code := get(&cuda); code != ixmlSuccess || cuda != 10020 {
			t.Errorf("nvmlSystemGetCudaDriverVersion %s = %d with %d, want 10020", call, code, cuda)
		}
	}
	for call, tt := range map[string]struct {
		get  func(uintptr, *uint32) int32
		want uint32
	}{
		"nvmlDeviceGetMinorNumber":   {l.Minor, 7},
		"nvmlDeviceGetIndex":         {l.Index, 1},
		"nvmlDeviceGetMultiGpuBoard": {l.MultiGPU, 1},
		"ixmlDeviceGetBoardPosition": {l.Position, 1},
		"nvmlDeviceGetPowerUsage":    {l.Power, 75000},
		"nvmlDeviceGetTemperature":   {func(c uintptr, out *uint32) int32 { return l.Temperature(c, 0, out) }, 40},
	} {
		var got uint32
		wantCode(t, call, tt.get(chip, &got), ixmlSuccess)
		if got != tt.want {
			t.Errorf("%s says %d, want %d", call, got, tt.want)
		}
	}
	var pci nvmlPCI
	wantCode(t, "nvmlDeviceGetPciInfo_v3", l.PCI(chip, &pci), ixmlSuccess)
	if want := [16]byte([]byte("0001:3B:00.2\x00\x00\x00\x00")); pci.BusIDLegacy != want || text(pci.BusID[:]) != "00000001:3B:00.2" {
		t.Errorf("PCI address is %q and %q", pci.BusIDLegacy, pci.BusID)
	}
	if pci.Domain != 1 || pci.Bus != 0x3b || pci.Device != 0 {
		t.Errorf("PCI numbers are %+v", pci)
	}
	var memory nvmlMemory
	wantCode(t, "nvmlDeviceGetMemoryInfo", l.Memory(chip, &memory), ixmlSuccess)
	if want := (nvmlMemory{Total: 32768 << 20, Free: 32256 << 20, Used: 512 << 20}); memory != want {
		t.Errorf("memory is %+v, want %+v", memory, want)
	}
	var v2 nvmlMemoryV2
	wantCode(t, "nvmlDeviceGetMemoryInfo_v2 without a version", l.MemoryV2(chip, &v2), 25)
	v2.Version = 40 | 2<<24
	wantCode(t, "nvmlDeviceGetMemoryInfo_v2", l.MemoryV2(chip, &v2), ixmlSuccess)
	if v2.Total != memory.Total || v2.Used != memory.Used || v2.Free != memory.Free {
		t.Errorf("memory v2 is %+v, want the same as %+v", v2, memory)
	}
	var use [2]uint32
	wantCode(t, "nvmlDeviceGetUtilizationRates", l.Utilization(chip, &use), ixmlSuccess)
	var volts, thousandths uint32
	wantCode(t, "ixmlDeviceGetGPUVoltage", l.Voltage(chip, &volts, &thousandths), ixmlSuccess)
	if use != [2]uint32{} || volts != 0 || thousandths == 0 {
		t.Errorf("utilization %v, %d.%03d V", use, volts, thousandths)
	}

	var found uintptr
	for call, code := range map[string]int32{
		"nvmlDeviceGetHandleByUUID":        l.ByUUID(cards[1].UUID, &found),
		"nvmlDeviceGetHandleByPciBusId_v2": l.ByAddress("00000001:3B:00.2", &found),
	} {
		wantCode(t, call, code, ixmlSuccess)
	}
	if found != chip {
		t.Error("a search does not find the chip")
	}
	wantCode(t, "nvmlDeviceGetHandleBySerial", l.BySerial(cards[2].Serial, &found), ixmlSuccess)
	if found != chips[2] {
		t.Error("a search by serial number does not find the first chip that has it")
	}
	wantCode(t, "nvmlDeviceGetHandleByUUID of another vendor's", l.ByUUID(topology.Cards[0].UUID, &found), ixmlNotFound)
	wantCode(t, "nvmlDeviceGetMinorNumber of no chip", l.Minor(0, &count), ixmlInvalidArgument)
}

func TestIXMLBoardsAndNearness(t *testing.T) {
	topology := vendorsim.Topology{Cards: append(vendorsim.IXBoards(1, 3, 1024), vendorsim.IXBoards(4, 1, 1024)[1:]...)}
	topology.Cards[3].Switch, topology.Cards[4].Switch = "one", "one"
	topology.Cards[5].NUMA = 1
	topology.Links = []vendorsim.Link{{A: 0, B: 3, Lanes: 1, OneWay: true}}
	l := loadIXML(t, topology)
	chips := l.chips(t, 6)
	var n uint32
	wantCode(t, "ixmlDeviceGetBoardPosition of a card with one chip", l.Position(chips[3], &n), ixmlNotSupported)
	wantCode(t, "nvmlDeviceGetMultiGpuBoard of a card with one chip", l.MultiGPU(chips[3], &n), ixmlSuccess)
	if n != 0 {
		t.Error("a card with one chip is said to have several")
	}
	boards := make([]uint32, len(chips))
	for i := range chips {
		wantCode(t, "nvmlDeviceGetBoardId", l.BoardID(chips[i], &boards[i]), ixmlSuccess)
	}
	if boards[0] != boards[1] || boards[0] != boards[2] || boards[0] == boards[3] || boards[3] == boards[4] {
		t.Errorf("numbers of the boards are %v", boards)
	}
	for _, tt := range []struct{ a, b, same, level int }{
		{0, 1, 1, 0}, {2, 0, 1, 0}, {3, 4, 0, 10}, {0, 4, 0, 30}, {0, 5, 0, 50}, {0, 3, 0, 30},
	} {
		var same, level int32
		wantCode(t, "nvmlDeviceOnSameBoard", l.SameBoard(chips[tt.a], chips[tt.b], &same), ixmlSuccess)
		wantCode(t, "nvmlDeviceGetTopologyCommonAncestor", l.Ancestor(chips[tt.a], chips[tt.b], &level), ixmlSuccess)
		if (same != 0) != (tt.same != 0) || int(level) != tt.level {
			t.Errorf("chips %d and %d: same board %d, ancestor %d; want %d and %d", tt.a, tt.b, same, level, tt.same, tt.level)
		}
	}
	var level int32
	wantCode(t, "nvmlDeviceGetTopologyCommonAncestor the other way", l.Ancestor(chips[3], chips[0], &level), ixmlUnknown)
}

func TestIXMLHealth(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.IXBoards(1, 2, 1024)}
	l := loadIXML(t, topology)
	chip := l.chips(t, 2)[1]
	check := func(mask uint64, doubleBit uint32) {
		t.Helper()
		var got uint64
		wantCode(t, "ixmlDeviceGetHealth", l.Health(chip, &got), ixmlSuccess)
		var single, double uint32
		wantCode(t, "ixmlDeviceGetEccErros", l.ECC(chip, &single, &double), ixmlSuccess)
		if got != mask || double != doubleBit {
			t.Errorf("health is %#x with %d double-bit errors, want %#x with %d", got, double, mask, doubleBit)
		}
	}
	check(0, 0)
	topology.Cards[1].HealthBits = 0x14
	l.write(t, topology)
	check(0x14, 1)
	topology.Cards[1].HealthBits, topology.Cards[1].Unhealthy = 0, true
	l.write(t, topology)
	check(1, 0)
}

func TestIXMLStates(t *testing.T) {
	topology := vendorsim.Topology{Cards: vendorsim.IXBoards(1, 2, 1024)}
	l := loadIXML(t, topology)
	var n uint32
	wantCode(t, "nvmlDeviceGetCount_v2 before nvmlInit_v2", l.Count(&n), ixmlUninitialized)
	chips := l.chips(t, 2)
	set := func(change func(*vendorsim.Topology)) {
		t.Helper()
		next := topology.Clone()
		change(&next)
		l.write(t, next)
	}
	set(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverAbsent })
	wantCode(t, "nvmlDeviceGetCount_v2 without driver", l.Count(&n), ixmlDriverNotLoaded)
	set(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverBroken })
	wantCode(t, "nvmlInit_v2 with a broken driver", l.Init(), ixmlUnknown)
	set(func(*vendorsim.Topology) {})
	wantCode(t, "nvmlDeviceGetCount_v2 with the driver loaded anew", l.Count(&n), ixmlUninitialized)
	wantCode(t, "nvmlInit_v2", l.Init(), ixmlSuccess)
	set(func(topology *vendorsim.Topology) { topology.Cards[0].Lost = true })
	wantCode(t, "nvmlDeviceGetCount_v2 with a chip lost", l.Count(&n), ixmlSuccess)
	if n != 2 {
		t.Errorf("%d chips, want a lost one counted", n)
	}
	wantCode(t, "nvmlDeviceGetHandleByIndex_v2 of the lost one", l.At(0, &chips[0]), ixmlLost)
	wantCode(t, "nvmlDeviceGetMinorNumber of the lost one", l.Minor(chips[0], &n), ixmlLost)
	wantCode(t, "nvmlDeviceGetMinorNumber of the other", l.Minor(chips[1], &n), ixmlSuccess)
	var same int32
	wantCode(t, "nvmlDeviceOnSameBoard with the lost one", l.SameBoard(chips[1], chips[0], &same), ixmlLost)
	set(func(topology *vendorsim.Topology) {
		topology.Cards[1].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetMinorNumber": 6}
	})
	wantCode(t, "a call that is told to fail", l.Minor(chips[1], &n), 6)
	wantCode(t, "the same about another chip", l.Minor(chips[0], &n), ixmlSuccess)
	set(func(topology *vendorsim.Topology) { topology.Library.Delay = 100 * time.Millisecond })
	start := time.Now()
	wantCode(t, "a slow call", l.Minor(chips[1], &n), ixmlSuccess)
	if d := time.Since(start); d < 100*time.Millisecond {
		t.Errorf("a call that takes 100 ms took %v", d)
	}
	set(func(*vendorsim.Topology) {})
	wantCode(t, "nvmlShutdown", l.Shutdown(), ixmlSuccess)
	wantCode(t, "nvmlShutdown again", l.Shutdown(), ixmlUninitialized)
}

func TestIXMLEvents(t *testing.T) {
	const xidCritical, doubleBit = 8, 2
	topology := vendorsim.Topology{Cards: vendorsim.IXBoards(1, 2, 1024)}
	l := loadIXML(t, topology)
	chips := l.chips(t, 2)
	var all, one uintptr
	wantCode(t, "nvmlEventSetCreate", l.NewSet(&all), ixmlSuccess)
	wantCode(t, "nvmlEventSetCreate", l.NewSet(&one), ixmlSuccess)
	var types uint64
	wantCode(t, "nvmlDeviceGetSupportedEventTypes", l.EventTypes(chips[0], &types), ixmlSuccess)
	for _, c := range chips {
		wantCode(t, "nvmlDeviceRegisterEvents", l.Register(c, types, all), ixmlSuccess)
	}
	wantCode(t, "nvmlDeviceRegisterEvents", l.Register(chips[1], xidCritical, one), ixmlSuccess)
	var e nvmlEvent
	wantCode(t, "nvmlEventSetWait_v2 without events", l.Wait(all, &e, 20), ixmlTimeout)

	topology.Cards[0].XID = vendorsim.XID{Code: 62}
	l.write(t, topology)
	topology.Cards[1].HealthBits = 0x10
	wantCode(t, "nvmlEventSetWait_v2", l.Wait(all, &e, 5000), ixmlSuccess)
	if e.Device != chips[0] || e.Type != xidCritical || e.Data != 62 {
		t.Errorf("event is %+v, want XID 62 of chip 0", e)
	}
	l.write(t, topology)
	wantCode(t, "nvmlEventSetWait_v2", l.Wait(all, &e, 5000), ixmlSuccess)
	if e.Device != chips[1] || e.Type != doubleBit {
		t.Errorf("event is %+v, want a double-bit error of chip 1", e)
	}
	// The other set listens to one chip and one kind alone.
	wantCode(t, "nvmlEventSetWait_v2 of the other set", l.Wait(one, &e, 20), ixmlTimeout)
	topology.Cards[1].Lost = true
	l.write(t, topology)
	wantCode(t, "nvmlEventSetWait_v2 of the other set", l.Wait(one, &e, 5000), ixmlSuccess)
	if e.Device != chips[1] || e.Data != 79 {
		t.Errorf("event is %+v, want that chip 1 fell off the bus", e)
	}
	for _, set := range []uintptr{all, one} {
		wantCode(t, "nvmlEventSetFree", l.FreeSet(set), ixmlSuccess)
	}
}
