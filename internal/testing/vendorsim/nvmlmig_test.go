package vendorsim_test

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Structs of NVML's interface about MIG.
type (
	nvmlAttributes struct {
		SMs, Copy, Decoders, Encoders, JPEGs, OFAs, GPUSlices, ComputeSlices uint32
		MemoryMiB                                                            uint64
	}
	nvmlPlacement       struct{ Start, Size uint32 }
	nvmlGPUInstanceInfo struct {
		Device      uintptr
		ID, Profile uint32
		Placement   nvmlPlacement
	}
	nvmlComputeInstanceInfo struct {
		Device, GPUInstance uintptr
		ID, Profile         uint32
		Placement           nvmlPlacement
	}
	nvmlGPUCounts  struct{ Slices, Instances, SMs, Copy, Decoders, Encoders, JPEGs, OFAs uint32 }
	nvmlGPUProfile struct {
		ID, P2P   uint32
		Counts    nvmlGPUCounts
		MemoryMiB uint64
	}
	nvmlGPUProfileV2 struct {
		Version, ID, P2P uint32
		Counts           nvmlGPUCounts
		MemoryMiB        uint64
		Name             [96]byte
	}
	nvmlGPUProfileV3 struct {
		Version, ID  uint32
		Counts       nvmlGPUCounts
		MemoryMiB    uint64
		Name         [96]byte
		Capabilities uint32
	}
	nvmlComputeProfile   struct{ ID, Slices, Instances, SMs, Copy, Decoders, Encoders, JPEGs, OFAs uint32 }
	nvmlComputeProfileV3 struct {
		Version      uint32
		Profile      nvmlComputeProfile
		Name         [96]byte
		Capabilities uint32
	}
)

// The codes that the calls below return.
const (
	success         = 0
	invalidArgument = 2
	notSupported    = 3
	notFound        = 6
	gpuIsLost       = 15
)

// nvmlMIG is a copy of the stand-in, initialised.
type nvmlMIG struct {
	*nvml

	MaxMIG          func(uintptr, *uint32) int32
	MIGAt           func(uintptr, uint32, *uintptr) int32
	IsMIG           func(uintptr, *uint32) int32
	Parent          func(uintptr, *uintptr) int32
	GI, CI          func(uintptr, *uint32) int32
	Attributes      func(uintptr, *nvmlAttributes) int32
	GPUProfile      func(uintptr, uint32, *nvmlGPUProfile) int32
	GPUProfileV     func(uintptr, uint32, unsafe.Pointer) int32
	GPUInstance     func(uintptr, uint32, *uintptr) int32
	GPUInstanceInfo func(uintptr, *nvmlGPUInstanceInfo) int32
	ComputeProfile  func(uintptr, uint32, uint32, *nvmlComputeProfile) int32
	ComputeProfileV func(uintptr, uint32, uint32, *nvmlComputeProfileV3) int32
	ComputeInstance func(uintptr, uint32, *uintptr) int32
	ComputeInfo     func(uintptr, *nvmlComputeInstanceInfo) int32
}

func loadMIG(t testing.TB, cards ...vendorsim.Card) (*nvmlMIG, *vendorsim.Topology) {
	t.Helper()
	topology := vendorsim.Topology{Cards: cards}
	l := &nvmlMIG{nvml: &nvml{}}
	l.load(t, vendorsim.NVIDIA, purego.RTLD_LAZY|purego.RTLD_LOCAL, topology, map[string]any{
		"nvmlDeviceGetMigMode":                          &l.MIG,
		"nvmlDeviceGetMaxMigDeviceCount":                &l.MaxMIG,
		"nvmlDeviceGetMigDeviceHandleByIndex":           &l.MIGAt,
		"nvmlDeviceIsMigDeviceHandle":                   &l.IsMIG,
		"nvmlDeviceGetDeviceHandleFromMigDeviceHandle":  &l.Parent,
		"nvmlDeviceGetGpuInstanceId":                    &l.GI,
		"nvmlDeviceGetComputeInstanceId":                &l.CI,
		"nvmlDeviceGetAttributes_v2":                    &l.Attributes,
		"nvmlDeviceGetGpuInstanceProfileInfo":           &l.GPUProfile,
		"nvmlDeviceGetGpuInstanceProfileInfoV":          &l.GPUProfileV,
		"nvmlDeviceGetGpuInstanceById":                  &l.GPUInstance,
		"nvmlGpuInstanceGetInfo":                        &l.GPUInstanceInfo,
		"nvmlGpuInstanceGetComputeInstanceProfileInfo":  &l.ComputeProfile,
		"nvmlGpuInstanceGetComputeInstanceProfileInfoV": &l.ComputeProfileV,
		"nvmlGpuInstanceGetComputeInstanceById":         &l.ComputeInstance,
		"nvmlComputeInstanceGetInfo_v2":                 &l.ComputeInfo,
		"nvmlDeviceGetComputeRunningProcesses_v3":       &l.Processes,
	})
	wantCode(t, "nvmlInit_v2", l.Init(), success)
	return l, &topology
}

// mig returns the handle of a MIG device.
func (l *nvmlMIG) mig(t testing.TB, gpu, index uint32) uintptr {
	t.Helper()
	var handle uintptr
	wantCode(t, "nvmlDeviceGetMigDeviceHandleByIndex", l.MIGAt(l.at(t, gpu), index, &handle), success)
	return handle
}

// instance returns what the library says of a MIG device, without its caps.
func (l *nvmlMIG) instance(t testing.TB, gpu, index uint32) vendorsim.MIGInstance {
	t.Helper()
	handle := l.mig(t, gpu, index)
	var b [96]byte
	var number, gi, ci uint32
	var memory nvmlMemory
	wantCode(t, "nvmlDeviceGetUUID", l.UUID(handle, &b[0], 96), success)
	m := vendorsim.MIGInstance{UUID: text(b[:])}
	wantCode(t, "nvmlDeviceGetName", l.Name(handle, &b[0], 96), success)
	_, m.Profile, _ = strings.Cut(text(b[:]), " MIG ")
	wantCode(t, "nvmlDeviceGetIndex", l.Index(handle, &number), success)
	wantCode(t, "nvmlDeviceGetGpuInstanceId", l.GI(handle, &gi), success)
	wantCode(t, "nvmlDeviceGetComputeInstanceId", l.CI(handle, &ci), success)
	wantCode(t, "nvmlDeviceGetMemoryInfo", l.Memory(handle, &memory), success)
	m.Index, m.GI, m.CI, m.MemoryMiB = int(number), int(gi), int(ci), int64(memory.Total>>20)
	return m
}

func TestMIGProcesses(t *testing.T) {
	card := vendorsim.Partition(vendorsim.GPUs(1, 40960)[0], "3g.20gb", "1c.2g.10gb", "1c.2g.10gb")
	l, topology := loadMIG(t, card)
	topology.Processes = []vendorsim.Process{
		{MIG: new(0), PID: 10, MemoryMiB: 300}, {MIG: new(1), PID: 11, MemoryMiB: 20}, {MIG: new(2), PID: 12, MemoryMiB: 4},
	}
	l.write(t, *topology)
	var all []nvmlProcess
	for i, used := range []uint64{300, 24, 24} { // the last two have the memory of one GPU instance
		handle := l.mig(t, 0, uint32(i))
		m := topology.MIGInstances(0)[i]
		want := nvmlProcess{uint32(10 + i), uint64(topology.Processes[i].MemoryMiB) << 20, uint32(m.GI), uint32(m.CI)}
		all = append(all, want)
		var got [3]nvmlProcess
		n := uint32(len(got))
		wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3 of a MIG device", l.Processes(handle, &n, &got[0]), success)
		if n != 1 || got[0] != want {
			t.Errorf("MIG device %d: %d processes: %+v, want %+v", i, n, got, want)
		}
		var memory nvmlMemory
		wantCode(t, "nvmlDeviceGetMemoryInfo of a MIG device", l.Memory(handle, &memory), success)
		if memory.Used != used<<20 || memory.Free != memory.Total-memory.Used {
			t.Errorf("MIG device %d: memory is %+v, want %d MiB used", i, memory, used)
		}
	}
	gpu := l.at(t, 0)
	wantAll := func(what string, used uint64, want ...nvmlProcess) {
		t.Helper()
		got := make([]nvmlProcess, 4)
		n := uint32(len(got))
		wantCode(t, "nvmlDeviceGetComputeRunningProcesses_v3", l.Processes(gpu, &n, &got[0]), success)
		if !slices.Equal(got[:n], want) {
			t.Errorf("%s: processes %+v, want %+v", what, got[:n], want)
		}
		var memory nvmlMemory
		wantCode(t, "nvmlDeviceGetMemoryInfo", l.Memory(gpu, &memory), success)
		if memory.Used != used<<20 {
			t.Errorf("%s: %d bytes are used, want %d MiB", what, memory.Used, used)
		}
	}
	wantAll("the GPU", 324, all...)
	topology.Cards[0].MIG = vendorsim.MIGDisabled
	l.write(t, *topology)
	wantAll("the GPU out of MIG mode", 0)
}

// model returns a GPU that MIG can divide.
func model(name string, memoryMiB int64, compute string) vendorsim.Card {
	c := vendorsim.GPUs(1, memoryMiB)[0]
	c.Model, c.Compute = name, compute
	return c
}

func TestMIGStructSizes(t *testing.T) {
	for name, sizes := range map[string][2]uintptr{
		"attributes":            {unsafe.Sizeof(nvmlAttributes{}), 40},
		"GPU instance":          {unsafe.Sizeof(nvmlGPUInstanceInfo{}), 24},
		"compute instance":      {unsafe.Sizeof(nvmlComputeInstanceInfo{}), 32},
		"GPU profile":           {unsafe.Sizeof(nvmlGPUProfile{}), 48},
		"GPU profile, v2":       {unsafe.Sizeof(nvmlGPUProfileV2{}), 152},
		"GPU profile, v3":       {unsafe.Sizeof(nvmlGPUProfileV3{}), 152},
		"compute profile":       {unsafe.Sizeof(nvmlComputeProfile{}), 36},
		"compute profile, v3":   {unsafe.Sizeof(nvmlComputeProfileV3{}), 140},
		"placement of instance": {unsafe.Sizeof(nvmlPlacement{}), 8},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s has %d bytes, want %d", name, sizes[0], sizes[1])
		}
	}
}

// nvlibName is the name that NVIDIA's go-nvlib (NewMigProfile, getMigMemorySizeGB)
// gives a MIG device from the numbers of its profiles and from memory in MiB.
func nvlibName(gpuProfile, computeProfile int, migMiB, totalMiB uint64) string {
	gpuSlices := map[int]int{0: 1, 7: 1, 9: 1, 10: 1, 13: 1, 15: 1, 1: 2, 8: 2, 11: 2, 14: 2, 16: 2, 2: 3, 3: 4, 12: 4, 6: 6, 4: 7, 5: 8}
	computeSlices := map[int]int{0: 1, 7: 1, 1: 2, 2: 3, 3: 4, 6: 6, 4: 7, 8: 7, 5: 8}
	suffixes := map[int]string{7: "+me", 8: "+me", 15: "+me.all", 16: "+me.all", 10: "+gfx", 11: "+gfx", 12: "+gfx", 13: "-me", 14: "-me"}
	fraction := math.Ceil(float64(migMiB)*(1<<20)/float64(totalMiB<<20)*8) / 8
	gb := uint64(math.Round(fraction * float64((totalMiB+1023)/1024)))
	name := fmt.Sprintf("%dg.%dgb%s", gpuSlices[gpuProfile], gb, suffixes[gpuProfile])
	if c := computeSlices[computeProfile]; c != gpuSlices[gpuProfile] {
		name = fmt.Sprintf("%dc.%s", c, name)
	}
	return name
}

// TestMIGNames finds the name of each profile as go-nvlib does: by the ids of the
// instances' profiles, and from the memory.
func TestMIGNames(t *testing.T) {
	for name, tt := range map[string]struct {
		card     vendorsim.Card
		profiles string
	}{
		"A100 40GB": {model("NVIDIA A100-SXM4-40GB", 40960, "8.0"), "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb " +
			"1c.2g.10gb 1c.3g.20gb 2c.3g.20gb 2c.4g.20gb 1c.7g.40gb 2c.7g.40gb 3c.7g.40gb 4c.7g.40gb"},
		"A100 40GB, less what the firmware takes": {model("NVIDIA A100-PCIE-40GB", 40536, "8.0"), "1g.5gb 1g.5gb+me 1g.10gb 7g.40gb"},
		"A100 80GB": {model("NVIDIA A100-SXM4-80GB", 81920, "8.0"), "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb " +
			"1c.2g.20gb"},
		"H100 80GB": {model("NVIDIA H100 80GB HBM3", 81559, "9.0"),
			"1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb 1c.2g.20gb"},
		"H200": {model("NVIDIA H200", 143771, "9.0"), "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"},
		"A30":  {model("NVIDIA A30", 24576, "8.0"), "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb 1c.2g.12gb 2c.4g.24gb"},
		"RTX PRO 6000": {model("NVIDIA RTX PRO 6000 Blackwell", 97887, "12.0"),
			"1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 2g.48gb 4g.96gb+gfx"},
	} {
		t.Run(name, func(t *testing.T) {
			l, topology := loadMIG(t, tt.card)
			for profile := range strings.FieldsSeq(tt.profiles) {
				topology.Cards[0] = vendorsim.Partition(tt.card, profile)
				l.write(t, *topology)
				if got := l.nameOf(t, 0, 0, uint64(tt.card.MemoryMiB)); got != profile {
					t.Errorf("a MIG device of profile %s has the name %s", profile, got)
				}
			}
		})
	}
}

// nameOf finds the numbers of a MIG device's profiles and returns its name by the rule.
func (l *nvmlMIG) nameOf(t testing.TB, gpu, index uint32, totalMiB uint64) string {
	t.Helper()
	handle, parent := l.mig(t, gpu, index), l.at(t, gpu)
	var gi, ci uint32
	var a nvmlAttributes
	wantCode(t, "nvmlDeviceGetGpuInstanceId", l.GI(handle, &gi), success)
	wantCode(t, "nvmlDeviceGetComputeInstanceId", l.CI(handle, &ci), success)
	wantCode(t, "nvmlDeviceGetAttributes_v2", l.Attributes(handle, &a), success)
	var gpuInstance, computeInstance uintptr
	var gpuInfo nvmlGPUInstanceInfo
	var computeInfo nvmlComputeInstanceInfo
	wantCode(t, "nvmlDeviceGetGpuInstanceById", l.GPUInstance(parent, gi, &gpuInstance), success)
	wantCode(t, "nvmlGpuInstanceGetComputeInstanceById", l.ComputeInstance(gpuInstance, ci, &computeInstance), success)
	wantCode(t, "nvmlGpuInstanceGetInfo", l.GPUInstanceInfo(gpuInstance, &gpuInfo), success)
	wantCode(t, "nvmlComputeInstanceGetInfo_v2", l.ComputeInfo(computeInstance, &computeInfo), success)
	if gpuInfo.Device != parent || computeInfo.Device != parent || computeInfo.GPUInstance != gpuInstance || gpuInfo.ID != gi ||
		computeInfo.ID != ci || computeInfo.Placement.Size != a.ComputeSlices {
		t.Errorf("instances are %+v and %+v, want those of GPU %#x", gpuInfo, computeInfo, parent)
	}
	gpuProfile, computeProfile := -1, -1
	for number := range uint32(18) {
		var p nvmlGPUProfile
		if code := l.GPUProfile(parent, number, &p); code != success {
			wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfo", code, notSupported)
		} else if p.ID == gpuInfo.Profile {
			gpuProfile = int(number)
			if p.MemoryMiB != a.MemoryMiB || p.Counts.Slices != a.GPUSlices || p.Counts.Copy != a.Copy {
				t.Errorf("attributes %+v do not fit profile %+v", a, p)
			}
		}
	}
	for number := range uint32(9) {
		var p nvmlComputeProfile
		if code := l.ComputeProfile(gpuInstance, number, 0, &p); code != success {
			wantCode(t, "nvmlGpuInstanceGetComputeInstanceProfileInfo", code, notSupported)
		} else if p.ID == computeInfo.Profile {
			computeProfile = int(number)
			if p.SMs != a.SMs || p.Slices != a.ComputeSlices {
				t.Errorf("attributes %+v do not fit profile %+v", a, p)
			}
		}
	}
	return nvlibName(gpuProfile, computeProfile, a.MemoryMiB, totalMiB)
}

// TestMIGMemoryOfAnyGPU: the rule gives the name back for every size of GPU.
func TestMIGMemoryOfAnyGPU(t *testing.T) {
	for total := int64(8192); total < 300_000; total += 997 {
		gib := (total + 1023) / 1024
		for _, p := range []struct{ number, slices, eighths int64 }{{0, 1, 1}, {1, 2, 2}, {2, 3, 4}, {4, 7, 8}} {
			profile := fmt.Sprintf("%dg.%dgb", p.slices, (gib*p.eighths+4)/8)
			topology := vendorsim.Topology{Cards: []vendorsim.Card{vendorsim.Partition(model("NVIDIA X", total, "9.0"), profile)}}
			if err := topology.Validate(); err != nil {
				t.Fatal(err)
			}
			mib := topology.MIGInstances(0)[0].MemoryMiB
			if got := nvlibName(int(p.number), int(p.number), uint64(mib), uint64(total)); got != profile {
				t.Errorf("of %d MiB, %s has %d MiB and is called %s", total, profile, mib, got)
			}
		}
	}
}

func TestMIGAttributes(t *testing.T) {
	for name, tt := range map[string]struct {
		card    vendorsim.Card
		profile string
		want    nvmlAttributes
	}{
		"A100": {model("NVIDIA A100-SXM4-40GB", 40960, "8.0"), "3g.20gb",
			nvmlAttributes{SMs: 42, Copy: 3, Decoders: 2, GPUSlices: 3, ComputeSlices: 3, MemoryMiB: 19840}},
		"A100, media": {model("NVIDIA A100-SXM4-40GB", 40960, "8.0"), "1g.5gb+me",
			nvmlAttributes{SMs: 14, Copy: 1, Decoders: 1, JPEGs: 1, OFAs: 1, GPUSlices: 1, ComputeSlices: 1, MemoryMiB: 4960}},
		"H100": {model("NVIDIA H100 80GB HBM3", 81920, "9.0"), "3g.40gb",
			nvmlAttributes{SMs: 60, Copy: 3, Decoders: 3, JPEGs: 3, GPUSlices: 3, ComputeSlices: 3, MemoryMiB: 39680}},
		"a part of a GPU instance": {model("NVIDIA H100 80GB HBM3", 81920, "9.0"), "2c.3g.40gb",
			nvmlAttributes{SMs: 32, Copy: 3, Decoders: 3, JPEGs: 3, GPUSlices: 3, ComputeSlices: 2, MemoryMiB: 39680}},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := loadMIG(t, vendorsim.Partition(tt.card, tt.profile))
			handle := l.mig(t, 0, 0)
			var got nvmlAttributes
			wantCode(t, "nvmlDeviceGetAttributes_v2", l.Attributes(handle, &got), success)
			if got != tt.want {
				t.Errorf("attributes are %+v, want %+v", got, tt.want)
			}
			memory := nvmlMemoryV2{Version: uint32(unsafe.Sizeof(nvmlMemoryV2{})) | 2<<24}
			wantCode(t, "nvmlDeviceGetMemoryInfo_v2", l.MemoryV2(handle, &memory), success)
			if memory.Total != tt.want.MemoryMiB<<20 || memory.Used+memory.Free+memory.Reserved != memory.Total {
				t.Errorf("memory is %+v, want %d MiB", memory, tt.want.MemoryMiB)
			}
		})
	}
}

// TestMIGInstances: the library describes MIG devices as MIGInstances does.
func TestMIGInstances(t *testing.T) {
	plain := model("NVIDIA H100 80GB HBM3", 81920, "9.0")
	at := func(gi, ci int) string { return fmt.Sprintf("%d/%d", gi, ci) }
	for name, tt := range map[string]struct {
		card  vendorsim.Card
		where []string // GPU instance/compute instance
	}{
		"seven": {vendorsim.Partition(plain, "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"),
			[]string{at(7, 0), at(8, 0), at(9, 0), at(10, 0), at(11, 0), at(12, 0), at(13, 0)}},
		"mixed, with holes": {vendorsim.Partition(plain, "", "3g.40gb", "", "2g.20gb", "1g.10gb", "1g.10gb+me"),
			[]string{at(1, 0), at(3, 0), at(7, 0), at(8, 0)}},
		"parts share a GPU instance": {vendorsim.Partition(plain, "1c.2g.20gb", "1c.2g.20gb", "1c.2g.20gb", "2c.4g.40gb", "2c.4g.40gb"),
			[]string{at(3, 0), at(3, 1), at(4, 0), at(1, 0), at(1, 1)}},
		"given numbers are kept free": {func() vendorsim.Card {
			c := vendorsim.Partition(plain, "1g.10gb", "1g.10gb", "1c.2g.20gb", "1c.2g.20gb")
			c.MIGDevices[1].GI = new(7)
			c.MIGDevices[2].GI, c.MIGDevices[3].GI, c.MIGDevices[3].CI = new(3), new(3), new(0)
			return c
		}(), []string{at(8, 0), at(7, 0), at(3, 1), at(3, 0)}},
		"what cannot be": {func() vendorsim.Card {
			c := vendorsim.Partition(plain, "7g.80gb", "7g.80gb")
			c.MIGDevices[0] = vendorsim.MIGDevice{Profile: "7g.80gb", GI: new(14), CI: new(7), UUID: "MIG-GPU-x/14/7",
				MemoryMiB: new(int64(0))}
			c.MIGDevices[1].UUID = "MIG-GPU-x/14/7"
			return c
		}(), []string{at(14, 7), at(0, 0)}},
	} {
		t.Run(name, func(t *testing.T) {
			l, topology := loadMIG(t, vendorsim.GPUs(1, 40960)[0], tt.card)
			want := topology.MIGInstances(1)
			var got []vendorsim.MIGInstance
			var where []string
			for i := range want {
				m := l.instance(t, 1, uint32(want[i].Index))
				got = append(got, m)
				where = append(where, at(m.GI, m.CI))
				want[i].Caps = vendorsim.MIGCaps{}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("MIG devices (-Go +C):\n%s", diff)
			}
			if diff := cmp.Diff(tt.where, where); diff != "" {
				t.Errorf("instances (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMIGEnumeration(t *testing.T) {
	cards := vendorsim.GPUs(4, 40960)
	cards[1] = vendorsim.Partition(cards[1], "3g.20gb", "", "3g.20gb")
	cards[2] = vendorsim.Partition(cards[2], "1g.5gb")
	cards[2].MIG = vendorsim.MIGDisabled // which takes effect over the sections
	cards[3].MIG = vendorsim.MIGNotSupported
	l, _ := loadMIG(t, cards...)
	for gpu, tt := range []struct {
		mode, count uint32
		codes       []int32 // by index
	}{
		{0, 0, []int32{notSupported}},
		{1, 7, []int32{success, notFound, success, notFound, notFound, notFound, notFound, invalidArgument}},
		{0, 0, []int32{notSupported}},
		{mode: 2, codes: []int32{notSupported}},
	} {
		handle := l.at(t, uint32(gpu))
		var current, pending, count uint32
		if tt.mode == 2 {
			wantCode(t, "nvmlDeviceGetMigMode", l.MIG(handle, &current, &pending), notSupported)
		} else if code := l.MIG(handle, &current, &pending); code != success || current != tt.mode || pending != tt.mode {
			t.Errorf("MIG mode of GPU %d is %d, %d (%d), want %d", gpu, current, pending, code, tt.mode)
		}
		wantCode(t, "nvmlDeviceGetMaxMigDeviceCount", l.MaxMIG(handle, &count), success)
		if count != tt.count {
			t.Errorf("GPU %d may have %d MIG devices, want %d", gpu, count, tt.count)
		}
		for index, want := range tt.codes {
			var mig uintptr
			wantCode(t, fmt.Sprintf("nvmlDeviceGetMigDeviceHandleByIndex(%d, %d)", gpu, index), l.MIGAt(handle, uint32(index), &mig), want)
		}
	}
	gpu, one, two := l.at(t, 1), l.mig(t, 1, 0), l.mig(t, 1, 2)
	var parent, same uintptr
	for _, handle := range []uintptr{one, two} {
		wantCode(t, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", l.Parent(handle, &parent), success)
		if parent != gpu {
			t.Errorf("the GPU of MIG device %#x is %#x, want %#x", handle, parent, gpu)
		}
		uuid := [96]byte{}
		wantCode(t, "nvmlDeviceGetUUID", l.UUID(handle, &uuid[0], 96), success)
		wantCode(t, "nvmlDeviceGetHandleByUUID", l.ByUUID(text(uuid[:]), &same), success)
		if same != handle {
			t.Errorf("MIG device %s has the handles %#x and %#x", text(uuid[:]), handle, same)
		}
	}
	var b [96]byte
	wantCode(t, "nvmlDeviceGetName", l.Name(two, &b[0], 96), success)
	if got := text(b[:]); got != "NVIDIA A100-SXM4-40GB MIG 3g.20gb" {
		t.Errorf("name is %q", got)
	}
	wantCode(t, "nvmlDeviceGetHandleByUUID of none", l.ByUUID("MIG-none", &same), notFound)
}

// TestMIGHandles: a call on a handle of the wrong kind is no valid call.
func TestMIGHandles(t *testing.T) {
	l, topology := loadMIG(t, vendorsim.Partition(vendorsim.GPUs(1, 40960)[0], "1g.5gb", "2g.10gb"))
	gpu, mig := l.at(t, 0), l.mig(t, 0, 1)
	var gpuInstance, computeInstance, out uintptr
	wantCode(t, "nvmlDeviceGetGpuInstanceById", l.GPUInstance(gpu, 3, &gpuInstance), success)
	wantCode(t, "nvmlGpuInstanceGetComputeInstanceById", l.ComputeInstance(gpuInstance, 0, &computeInstance), success)
	var u, v uint32
	var n int32
	var kinds uint64
	var b [96]byte
	var set uintptr
	wantCode(t, "nvmlEventSetCreate", l.NewSet(&set), success)
	calls := map[string]struct {
		call     func(handle uintptr) int32
		gpu, mig int32
	}{
		"GetUUID":                {func(h uintptr) int32 { return l.UUID(h, &b[0], 96) }, success, success},
		"GetName":                {func(h uintptr) int32 { return l.Name(h, &b[0], 96) }, success, success},
		"GetIndex":               {func(h uintptr) int32 { return l.Index(h, &u) }, success, success},
		"GetMemoryInfo":          {func(h uintptr) int32 { return l.Memory(h, &nvmlMemory{}) }, success, success},
		"IsMigDeviceHandle":      {func(h uintptr) int32 { return l.IsMIG(h, &u) }, success, success},
		"GetMinorNumber":         {func(h uintptr) int32 { return l.Minor(h, &u) }, success, invalidArgument},
		"GetPciInfo":             {func(h uintptr) int32 { return l.PCI(h, &nvmlPCI{}) }, success, invalidArgument},
		"GetSerial":              {func(h uintptr) int32 { return l.Serial(h, &b[0], 96) }, success, invalidArgument},
		"GetMigMode":             {func(h uintptr) int32 { return l.MIG(h, &u, &v) }, success, invalidArgument},
		"GetMaxMigDeviceCount":   {func(h uintptr) int32 { return l.MaxMIG(h, &u) }, success, invalidArgument},
		"GetMigDeviceHandle":     {func(h uintptr) int32 { return l.MIGAt(h, 0, &out) }, success, invalidArgument},
		"GetGpuInstanceById":     {func(h uintptr) int32 { return l.GPUInstance(h, 3, &out) }, success, invalidArgument},
		"GetGpuInstanceProfile":  {func(h uintptr) int32 { return l.GPUProfile(h, 0, &nvmlGPUProfile{}) }, success, invalidArgument},
		"GetTopologyAncestor":    {func(h uintptr) int32 { return l.Ancestor(gpu, h, &n) }, success, invalidArgument},
		"GetSupportedEventTypes": {func(h uintptr) int32 { return l.EventTypes(h, &kinds) }, success, invalidArgument},
		"RegisterEvents":         {func(h uintptr) int32 { return l.Register(h, 8, set) }, success, invalidArgument},
		"GetDeviceHandleFromMig": {func(h uintptr) int32 { return l.Parent(h, &out) }, invalidArgument, success},
		"GetGpuInstanceId":       {func(h uintptr) int32 { return l.GI(h, &u) }, invalidArgument, success},
		"GetComputeInstanceId":   {func(h uintptr) int32 { return l.CI(h, &u) }, invalidArgument, success},
		"GetAttributes":          {func(h uintptr) int32 { return l.Attributes(h, &nvmlAttributes{}) }, invalidArgument, success},
		"GpuInstanceGetInfo": {func(h uintptr) int32 { return l.GPUInstanceInfo(h, &nvmlGPUInstanceInfo{}) }, invalidArgument,
			invalidArgument},
		"ComputeInstanceGetInfo": {func(h uintptr) int32 { return l.ComputeInfo(h, &nvmlComputeInstanceInfo{}) }, invalidArgument,
			invalidArgument},
		"GetComputeInstanceById": {func(h uintptr) int32 { return l.ComputeInstance(h, 0, &out) }, invalidArgument, invalidArgument},
		"GetComputeInstanceInfoV": {func(h uintptr) int32 { return l.ComputeProfile(h, 0, 0, &nvmlComputeProfile{}) }, invalidArgument,
			invalidArgument},
	}
	for name, c := range calls {
		wantCode(t, name+" of a GPU", c.call(gpu), c.gpu)
		wantCode(t, name+" of a MIG device", c.call(mig), c.mig)
		wantCode(t, name+" of nothing", c.call(12345), invalidArgument)
	}
	for handle, want := range map[uintptr]uint32{gpu: 0, mig: 1} {
		if l.IsMIG(handle, &u); u != want {
			t.Errorf("nvmlDeviceIsMigDeviceHandle says %d, want %d", u, want)
		}
	}
	wantCode(t, "GetGpuInstanceById of none", l.GPUInstance(gpu, 4, &out), notFound)
	wantCode(t, "GetGpuInstanceById of what cannot be", l.GPUInstance(gpu, 99, &out), notFound)
	wantCode(t, "GetComputeInstanceById of none", l.ComputeInstance(gpuInstance, 1, &out), notFound)

	// The card's own settings are about its MIG devices as well.
	topology.Cards[0].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetUUID": 999}
	l.write(t, *topology)
	wantCode(t, "nvmlDeviceGetUUID, ordered to fail", calls["GetUUID"].call(mig), 999)
	topology.Cards[0].Calls.Fail = nil
	topology.Cards[0].Lost = true
	l.write(t, *topology)
	wantCode(t, "nvmlDeviceGetUUID with a lost GPU", calls["GetUUID"].call(mig), gpuIsLost)
	topology.Cards[0].Lost = false

	// Handles end with what they stand for.
	topology.Cards[0] = vendorsim.Partition(topology.Cards[0], "1g.5gb")
	l.write(t, *topology)
	wantCode(t, "nvmlDeviceGetUUID of a MIG device that is gone", calls["GetUUID"].call(mig), invalidArgument)
	wantCode(t, "nvmlGpuInstanceGetInfo of one that is gone", l.GPUInstanceInfo(gpuInstance, &nvmlGPUInstanceInfo{}), invalidArgument)
	wantCode(t, "nvmlComputeInstanceGetInfo_v2 of one that is gone", l.ComputeInfo(computeInstance, &nvmlComputeInstanceInfo{}),
		invalidArgument)
	topology.Cards[0].MIG = vendorsim.MIGDisabled
	l.write(t, *topology)
	wantCode(t, "GetGpuInstanceById without MIG mode", l.GPUInstance(gpu, 7, &out), notSupported)
}

func TestMIGProfiles(t *testing.T) {
	rtx := model("NVIDIA RTX PRO 6000 Blackwell", 98304, "12.0")
	l, topology := loadMIG(t, vendorsim.Partition(vendorsim.GPUs(1, 40960)[0], "2g.10gb"), vendorsim.Partition(rtx, "2g.48gb+gfx"))
	var v1 nvmlGPUProfile
	gpu := l.at(t, 0)
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfo", l.GPUProfile(gpu, 1, &v1), success)
	want := nvmlGPUProfile{ID: 14, Counts: nvmlGPUCounts{Slices: 2, Instances: 3, SMs: 28, Copy: 2, Decoders: 1}, MemoryMiB: 9920}
	if v1 != want {
		t.Errorf("profile is %+v, want %+v", v1, want)
	}
	v2 := nvmlGPUProfileV2{Version: 152 | 2<<24}
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfoV, version 2", l.GPUProfileV(gpu, 1, unsafe.Pointer(&v2)), success)
	if v2.ID != 14 || v2.Counts != want.Counts || v2.MemoryMiB != 9920 || text(v2.Name[:]) != "MIG 2g.10gb" {
		t.Errorf("profile is %+v, named %q", v2, text(v2.Name[:]))
	}
	v3 := nvmlGPUProfileV3{Version: 152 | 3<<24}
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfoV, version 3", l.GPUProfileV(l.at(t, 1), 11, unsafe.Pointer(&v3)), success)
	if v3.ID != 35 || v3.Counts.Slices != 2 || v3.MemoryMiB != 47616 || text(v3.Name[:]) != "MIG 2g.48gb+gfx" || v3.Capabilities != 2 {
		t.Errorf("profile is %+v, named %q", v3, text(v3.Name[:]))
	}
	v3.Version = 152 | 4<<24
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfoV, version 4", l.GPUProfileV(gpu, 1, unsafe.Pointer(&v3)), invalidArgument)
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfo of 18", l.GPUProfile(gpu, 18, &v1), invalidArgument)
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfo of what it has not", l.GPUProfile(gpu, 5, &v1), notSupported)

	var instance uintptr
	wantCode(t, "nvmlDeviceGetGpuInstanceById", l.GPUInstance(l.at(t, 1), 1, &instance), success)
	var info nvmlGPUInstanceInfo
	wantCode(t, "nvmlGpuInstanceGetInfo", l.GPUInstanceInfo(instance, &info), success)
	if info.Placement != (nvmlPlacement{0, 4}) {
		t.Errorf("placement is %+v, want the first half", info.Placement)
	}
	compute := nvmlComputeProfileV3{Version: 140 | 3<<24}
	wantCode(t, "nvmlGpuInstanceGetComputeInstanceProfileInfoV, version 3", l.ComputeProfileV(instance, 0, 0, &compute), success)
	if p := compute.Profile; p.Slices != 1 || p.Instances != 2 || p.SMs != 46 || text(compute.Name[:]) != "MIG 1c.2g.48gb+gfx" ||
		compute.Capabilities != 1 {
		t.Errorf("compute profile is %+v, named %q", compute, text(compute.Name[:]))
	}
	compute = nvmlComputeProfileV3{Version: 136 | 2<<24, Capabilities: 77}
	wantCode(t, "nvmlGpuInstanceGetComputeInstanceProfileInfoV, version 2", l.ComputeProfileV(instance, 1, 0, &compute), success)
	if compute.Profile.SMs != 94 || compute.Capabilities != 77 {
		t.Errorf("compute profile is %+v", compute)
	}
	compute.Version = 1
	wantCode(t, "nvmlGpuInstanceGetComputeInstanceProfileInfoV, no version", l.ComputeProfileV(instance, 1, 0, &compute), invalidArgument)
	wantCode(t, "a compute profile that does not fit", l.ComputeProfile(instance, 2, 0, &compute.Profile), notSupported)
	wantCode(t, "a compute profile that is none", l.ComputeProfile(instance, 9, 0, &compute.Profile), invalidArgument)
	wantCode(t, "engines that are none", l.ComputeProfile(instance, 0, 1, &compute.Profile), invalidArgument)

	topology.Cards[0].MIG = vendorsim.MIGDisabled
	l.write(t, *topology)
	v2.Version = 152 | 2<<24
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfo without MIG mode", l.GPUProfile(gpu, 1, &v1), success)
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfoV without MIG mode", l.GPUProfileV(gpu, 1, unsafe.Pointer(&v2)), notSupported)
	topology.Cards[0].MIG, topology.Cards[0].MIGDevices = vendorsim.MIGNotSupported, nil
	l.write(t, *topology)
	wantCode(t, "nvmlDeviceGetGpuInstanceProfileInfo without MIG", l.GPUProfile(gpu, 1, &v1), notSupported)
}

func TestMIGEvents(t *testing.T) {
	const ecc, xid = 2, 8
	const whole = math.MaxUint32
	cards := vendorsim.GPUs(2, 40960)
	cards[0] = vendorsim.Partition(cards[0], "1g.5gb", "1g.5gb", "1c.2g.10gb", "1c.2g.10gb")
	cards[1] = vendorsim.Partition(cards[1], "7g.40gb")
	l, topology := loadMIG(t, cards...)
	var set uintptr
	wantCode(t, "nvmlEventSetCreate", l.NewSet(&set), success)
	for gpu := range uint32(2) {
		wantCode(t, "nvmlDeviceRegisterEvents", l.Register(l.at(t, gpu), xid|ecc, set), success)
	}
	type event struct {
		gpu        uint32
		kind, data uint64
		gi, ci     uint32
	}
	for _, step := range []struct {
		name   string
		change func(cards []vendorsim.Card)
		want   []event
	}{
		{"several instances of one GPU, and another GPU", func(c []vendorsim.Card) {
			for i, d := range c[0].MIGDevices {
				c[0].MIGDevices[i].XID = vendorsim.XID{Code: 94 + d.Index}
			}
			c[1].MIGDevices[0].XID.Code = 31
			c[1].XID.Code = 79
		}, []event{
			{0, xid, 94, 7, 0}, {0, xid, 95, 8, 0}, {0, xid, 96, 3, 0}, {0, xid, 97, 3, 1}, {1, xid, 79, whole, whole}, {1, xid, 31, 0, 0},
		}},
		{"once more", func(c []vendorsim.Card) { c[0].MIGDevices[1].XID.Number = 3 }, []event{{0, xid, 95, 8, 0}}},
		{"nothing", func(c []vendorsim.Card) { c[0].UsedMiB = 1 }, nil},
		{"an ECC error names no instance", func(c []vendorsim.Card) { c[0].MIGDevices[0].XID.Code = 48 },
			[]event{{0, ecc, 0, whole, whole}}},
		{"another index for the same instance", func(c []vendorsim.Card) {
			c[0].MIGDevices = c[0].MIGDevices[:1]
			c[0].MIGDevices[0].Index = 4
		}, nil},
		{"a MIG device appears with an old error", func(c []vendorsim.Card) {
			c[0].MIGDevices = append(c[0].MIGDevices, vendorsim.MIGDevice{Index: 5, Profile: "1g.5gb", XID: vendorsim.XID{Code: 13}})
		}, nil},
		{"MIG mode ends", func(c []vendorsim.Card) {
			c[0].MIG = vendorsim.MIGDisabled
			c[0].MIGDevices[0].XID.Code = 31
		}, nil},
	} {
		step.change(topology.Cards)
		l.write(t, *topology)
		var got []event
		for {
			var e nvmlEvent
			if code := l.Wait(set, &e, 20); code != success {
				wantCode(t, "nvmlEventSetWait_v2", code, 10)
				break
			}
			var gpu uint32
			wantCode(t, "nvmlDeviceGetIndex", l.Index(e.Device, &gpu), success)
			got = append(got, event{gpu, e.Type, e.Data, e.GPUInstance, e.ComputeInstance})
		}
		if diff := cmp.Diff(step.want, got, cmp.AllowUnexported(event{})); diff != "" {
			t.Errorf("%s: events (-want +got):\n%s", step.name, diff)
		}
	}
}
