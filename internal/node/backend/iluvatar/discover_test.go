package iluvatar

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func TestStructSizes(t *testing.T) {
	for name, sizes := range map[string][2]uintptr{
		"PCI info":  {unsafe.Sizeof(pciInfo{}), 68},
		"memory":    {unsafe.Sizeof(memoryInfo{}), 24},
		"memory v2": {unsafe.Sizeof(memoryInfoV2{}), 40},
		"event":     {unsafe.Sizeof(event{}), 32},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s has %d bytes, want %d", name, sizes[0], sizes[1])
		}
	}
}

func TestNUMANodeThoughBusIDIsPaddedWithNULs(t *testing.T) {
	sys := t.TempDir()
	// As the kernel has it: the device's folder is a link to where it is.
	for address, node := range map[string]string{"0000:3b:00.0": "1", "10000:d8:1f.3": "2", "0000:af:00.0": "-1"} {
		dir := filepath.Join(sys, "devices/pci0000:3a", address)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "numa_node"), []byte(node+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		links := filepath.Join(sys, "bus/pci/devices")
		if err := os.MkdirAll(links, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("../../../devices/pci0000:3a/"+address, filepath.Join(links, address)); err != nil {
			t.Fatal(err)
		}
	}
	topology := boards(4, 1)
	for i, address := range []string{"0000:3b:00.0", "0000:af:00.0", "10000:d8:1f.3"} {
		topology.Cards[i].PCI = address
	}
	fails(&topology.Cards[3], "nvmlDeviceGetPciInfo_v3", codeNotSupported)
	var got []string
	for _, d := range start(t, topology, backend.Options{SysfsRoot: sys}).found().Devices {
		got = append(got, fmt.Sprintf("%s %d", d.PCI, d.NUMANode))
	}
	want := []string{"0000:3b:00.0 1", "0000:af:00.0 -1", "10000:d8:1f.3 2", " -1"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("PCI addresses and NUMA nodes (-want +got):\n%s", diff)
	}
}

func TestAddressOfEitherText(t *testing.T) {
	var p pciInfo
	copy(p.BusIDLegacy[:], "0000:3B:00.0")
	if got := p.address(); got != "0000:3b:00.0" {
		t.Errorf("address is %q, want that of the one text there is", got)
	}
	copy(p.BusID[:], "00010000:3B:00.0")
	if got := p.address(); got != "10000:3b:00.0" {
		t.Errorf("address is %q, want that of the longer text", got)
	}
	if got := (pciInfo{BusID: [32]byte{'?'}}).address(); got != "" {
		t.Errorf("address of nonsense is %q", got)
	}
}

func TestFailingMinorIsAFaultAndNoMadeUpNumber(t *testing.T) {
	topology := boards(1, 2)
	fails(&topology.Cards[1], "nvmlDeviceGetMinorNumber", codeUnknown)
	n := start(t, topology, backend.Options{})
	found := n.found()
	if len(found.Devices) != 1 || len(found.Faults) != 1 {
		t.Fatalf("devices %v, faults %v; want one of each", found.Devices, found.Faults)
	}
	f := found.Faults[0]
	if want := "nvmlDeviceGetMinorNumber(1): unknown error (999)"; f.Index != 1 || f.ID != n.id(1) || f.Err.Error() != want {
		t.Errorf("fault is %+v, want %s of chip 1", f, want)
	}
	if e, err := n.Edits(n.id(1)); err == nil {
		t.Errorf("Edits of a chip without a number: %+v", e)
	}
}

func TestSameMinorTwice(t *testing.T) {
	topology := boards(3, 1)
	topology.Cards[2].Minor = new(0)
	found := start(t, topology, backend.Options{}).found()
	if len(found.Devices) != 1 || len(found.Faults) != 2 {
		t.Fatalf("devices %v, faults %v; want one and two", found.Devices, found.Faults)
	}
	if got, want := found.Faults[1].Err.Error(), "chip 2: chips [0 2] have the same device file number 0"; got != want {
		t.Errorf("fault is %q, want %q", got, want)
	}
}

func TestMemoryIsInBytes(t *testing.T) {
	d := start(t, boards(1, 1), backend.Options{}).found().Devices[0]
	if d.MemoryBytes != 32768<<20 {
		t.Errorf("memory is %d bytes, want %d", d.MemoryBytes, 32768<<20)
	}
}

func TestMemoryByEitherFunction(t *testing.T) {
	topology := boards(1, 1)
	topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetMemoryInfo": codeNotSupported}
	if d := start(t, topology, backend.Options{}).found().Devices[0]; d.MemoryBytes != 32768<<20 {
		t.Errorf("with the first function not supported, memory is %d bytes, want %d", d.MemoryBytes, 32768<<20)
	}
	file, _ := build(t, one("a"), "nvmlDeviceGetMemoryInfo")
	if got := uuids(t, newRoot(t).open(backend.Options{LibraryPath: file})); got != "a" {
		t.Errorf("with the first function missing: %q, want a", got)
	}
	file, _ = build(t, one("a"), "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
	if got := reason(t, newRoot(t).open(backend.Options{LibraryPath: file})); !strings.HasSuffix(got, " lacks nvmlDeviceGetMemoryInfo") {
		t.Errorf("with both missing, the reason is %q", got)
	}
}

func TestSwappedChipOfABoard(t *testing.T) {
	n := start(t, boards(1, 2), backend.Options{})
	before := n.found()
	// Another board in the slot, with as many chips.
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].UUID, topology.Cards[1].UUID = "GPU-new-0", "GPU-new-1"
	})
	after := n.found()
	if after.Equal(before) {
		t.Error("the other board is not seen")
	}
	wantSeats(t, n, map[int]seat{0: {"GPU-new-0", 0}, 1: {"GPU-new-0", 1}})
	want := []accel.Link{{A: "GPU-new-0", B: "GPU-new-1", Score: accel.LinkBoard}}
	if diff := cmp.Diff(want, after.Links); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
}

// A library that counts its chips when it is initialised is initialised anew
// when the kernel lists others.
func TestHotPlugInitialisesAnew(t *testing.T) {
	sys := t.TempDir()
	driver := filepath.Join(sys, "bus/pci/drivers/iluvatar")
	bind := func(address string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(driver, address), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	bind("0000:10:00.0")
	n := start(t, boards(2, 1), backend.Options{SysfsRoot: sys})
	inits := func() bool {
		t.Helper()
		// The stand-in refuses to be initialised when told so: a discovery
		// that works has not tried.
		n.change(func(topology *vendorsim.Topology) {
			topology.Library.Fail = vendorsim.Failures{"nvmlInit_v2": codeUnknown}
		})
		_, err := n.Discover(t.Context())
		n.change(func(topology *vendorsim.Topology) { topology.Library.Fail = nil })
		if err != nil {
			n.found()
		}
		return err != nil
	}
	n.found()
	if inits() {
		t.Error("initialised anew though nothing has changed")
	}
	bind("0000:11:00.0")
	if !inits() {
		t.Error("not initialised anew when a chip came")
	}
	n.found() // and once more, when the driver has settled
	if inits() {
		t.Error("initialised anew again and again")
	}
	if err := os.Remove(filepath.Join(driver, "0000:10:00.0")); err != nil {
		t.Fatal(err)
	}
	if !inits() {
		t.Error("not initialised anew when a chip went")
	}
}

// Nothing is called while the library is shut down and initialised anew.
func TestLibraryIsNotShutDownDuringACall(t *testing.T) {
	sys := t.TempDir()
	driver := filepath.Join(sys, "bus/pci/drivers/iluvatar")
	n := start(t, boards(2, 2), backend.Options{SysfsRoot: sys})
	n.found()
	ctx, cancel := context.WithCancel(t.Context())
	var users sync.WaitGroup
	for range 3 {
		users.Go(func() {
			for ctx.Err() == nil {
				if found, err := n.Discover(ctx); ctx.Err() == nil && (err != nil || len(found.Devices) != 4) {
					t.Errorf("Discover = %v, %v", found, err)
					return
				}
			}
		})
	}
	users.Go(func() {
		for ctx.Err() == nil {
			if err := n.AwaitChange(ctx); libloader.HasCode(err, codeUninitialised) {
				t.Errorf("AwaitChange: %v", err)
				return
			}
		}
	})
	for i := range 30 { // each makes the library be initialised anew, twice
		if err := os.MkdirAll(filepath.Join(driver, fmt.Sprintf("0000:%02x:00.0", i)), 0o755); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	cancel()
	users.Wait()
}

func TestLinkScores(t *testing.T) {
	topology := boards(2, 2)
	topology.Cards = append(topology.Cards, vendorsim.IXBoards(4, 1, 32768)[2:]...)
	for i := range topology.Cards {
		topology.Cards[i].UUID = fmt.Sprintf("GPU-%d", i)
		topology.Cards[i].NUMA = i / 4
	}
	topology.Cards[4].Switch, topology.Cards[5].Switch = "one", "one"
	n := start(t, topology, backend.Options{})
	got := map[string]int{}
	for _, l := range n.found().Links {
		got[strings.ReplaceAll(string(l.A+" "+l.B), "GPU-", "")] = l.Score
	}
	want := map[string]int{
		"0 1": accel.LinkBoard, "2 3": accel.LinkBoard, "4 5": accel.LinkSwitch,
		"0 2": accel.LinkHostBridge, "0 3": accel.LinkHostBridge, "1 2": accel.LinkHostBridge, "1 3": accel.LinkHostBridge,
		"0 4": accel.LinkSystem, "0 5": accel.LinkSystem, "1 4": accel.LinkSystem, "1 5": accel.LinkSystem,
		"2 4": accel.LinkSystem, "2 5": accel.LinkSystem, "3 4": accel.LinkSystem, "3 5": accel.LinkSystem,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("scores (-want +got):\n%s", diff)
	}
}

func TestOneWayLinkErrorLeavesTheLink(t *testing.T) {
	for _, failing := range []int{0, 1} {
		topology := boards(2, 1)
		fails(&topology.Cards[failing], "nvmlDeviceGetTopologyCommonAncestor", codeUnknown)
		links := start(t, topology, backend.Options{}).found().Links
		if len(links) != 1 || links[0].Score != accel.LinkHostBridge {
			t.Errorf("with chip %d failing to tell, links are %v", failing, links)
		}
	}
}

func TestVersions(t *testing.T) {
	topology := boards(1, 1)
	topology.Driver = vendorsim.Driver{Version: "4.3.0", CUDA: "10.2"}
	n := start(t, topology, backend.Options{})
	if found := n.found(); found.Driver != "4.3.0" || found.CUDA != "10.2" {
		t.Errorf("driver %q with CUDA %q, want 4.3.0 and 10.2", found.Driver, found.CUDA)
	}
	n.change(func(topology *vendorsim.Topology) {
		topology.Library.Fail = vendorsim.Failures{
			"nvmlSystemGetDriverVersion": codeUnknown, "nvmlSystemGetCudaDriverVersion_v2": codeNotSupported,
		}
	})
	if found := n.found(); found.Driver != "" || found.CUDA != "" || len(found.Devices) != 1 {
		t.Errorf("driver %q with CUDA %q and devices %v; want neither version, and the chip", found.Driver, found.CUDA, found.Devices)
	}
}

func TestReasons(t *testing.T) {
	backendtest.RunBroken(t, harness, map[string]backendtest.Broken{
		"no driver": {
			func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverAbsent },
			"nvmlInit_v2: driver not loaded (9)",
		},
		"broken driver": {
			func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverBroken },
			"nvmlInit_v2: unknown error (999)",
		},
		"count fails": {
			func(topology *vendorsim.Topology) {
				topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetCount_v2": codeTimeout}
			},
			"nvmlDeviceGetCount_v2: timeout (10)",
		},
		"a code of its own": {
			func(topology *vendorsim.Topology) { topology.Library.Fail = vendorsim.Failures{"nvmlInit_v2": 77} },
			"nvmlInit_v2: unknown code (77)",
		},
		"too many chips": {
			func(topology *vendorsim.Topology) { topology.Cards = vendorsim.IXBoards(257, 1, 1024) },
			"nvmlDeviceGetCount_v2 says 257 chips, more than the 256 that can be",
		},
	})
}

// build compiles a stand-in that lacks functions.
func build(t *testing.T, topology vendorsim.Topology, without ...string) (file, topologyPath string) {
	t.Helper()
	dir := t.TempDir()
	file, err := vendorsim.Build(t.Context(), vendorsim.Iluvatar, dir, vendorsim.Without(without...))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, vendorsim.TopologyName)
	write(t, path, topology)
	return file, path
}

func TestMissingRequiredSymbolsAreAllNamed(t *testing.T) {
	file, _ := build(t, one("a"), "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber", "ixmlDeviceGetHealth")
	b := newRoot(t).open(backend.Options{LibraryPath: file})
	want := "libixml.so cannot be loaded: " + file + " lacks nvmlDeviceGetUUID, nvmlDeviceGetMinorNumber"
	if got := reason(t, b); got != want {
		t.Errorf("reason is %q, want %q", got, want)
	}
}

func TestMissingOptionalSymbolsAreNotSupported(t *testing.T) {
	file, path := build(t, boards(1, 2),
		"nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2",
		"nvmlDeviceGetName", "nvmlDeviceGetPciInfo_v3", "ixmlDeviceGetHealth", "ixmlDeviceGetBoardPosition",
		"nvmlDeviceGetBoardId", "nvmlDeviceGetMultiGpuBoard", "nvmlDeviceOnSameBoard",
		"nvmlDeviceGetTopologyCommonAncestor", "nvmlEventSetCreate", "nvmlEventSetFree",
		"nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2",
	)
	b := newRoot(t).open(backend.Options{LibraryPath: file})
	for range 2 {
		found, err := b.Discover(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		want := backend.Found{}
		for i, c := range vendorsim.IXBoards(1, 2, 32768) {
			want.Devices = append(want.Devices, accel.Device{
				Index: i, ID: accel.DeviceID(c.UUID), MemoryBytes: 32768 << 20, NUMANode: accel.NoNUMA,
			})
		}
		if diff := cmp.Diff(want, found); diff != "" {
			t.Errorf("found (-want +got):\n%s", diff)
		}
	}
	if err := b.AwaitChange(t.Context()); err == nil || !strings.Contains(err.Error(), "does not report events") {
		t.Errorf("AwaitChange = %v, want that the library tells of none", err)
	}
	// What it has still works.
	topology := boards(1, 2)
	topology.Cards[1].Lost = true
	write(t, path, topology)
	if found, err := b.Discover(t.Context()); err != nil || len(found.Devices) != 1 || len(found.Faults) != 1 {
		t.Errorf("with a chip lost: %+v, %v", found, err)
	}
}

func TestFindsLibrary(t *testing.T) {
	name := vendorsim.LibraryName(vendorsim.Iluvatar)
	tests := map[string]struct {
		prepare func(root)
		want    string
	}{
		"where the vendor's package puts it": {func(r root) { r.Install("/usr/local/corex/lib64", one("a")) }, "a"},
		"in its other folder":                {func(r root) { r.Install("/usr/local/corex/lib", one("a")) }, "a"},
		"in a usual folder":                  {func(r root) { r.Install("/usr/lib/x86_64-linux-gnu", one("a")) }, "a"},
		"the vendor's folder before the usual ones": {func(r root) {
			r.Install("/usr/lib64", one("old"))
			r.Install("/usr/local/corex/lib64", one("new"))
		}, "new"},
		"the newest of several releases": {func(r root) {
			r.Install("/usr/local/corex-4.2.0/lib64", one("old"))
			r.Install("/usr/local/corex-4.10.0/lib64", one("new"))
		}, "new"},
		"a link that leads out of the root stays in": {func(r root) {
			r.Install("/opt/corex", one("inside"))
			r.Link("/usr/lib/"+name, "../../../../../../../../opt/corex/"+name)
		}, "inside"},
	}
	for test, tt := range tests {
		t.Run(test, func(t *testing.T) {
			r := newRoot(t)
			tt.prepare(r)
			if got := uuids(t, r.open(backend.Options{})); got != tt.want {
				t.Errorf("found the library of %q, want %q", got, tt.want)
			}
		})
	}
	t.Run("not there, then there", func(t *testing.T) {
		r := newRoot(t)
		b := r.open(backend.Options{})
		want := libfile.Places.NotFound(places(backend.Options{DriverRoot: r.Dir})).Error()
		if got := reason(t, b); got != want || !strings.Contains(got, r.Dir+"/usr/local/corex/lib64") {
			t.Errorf("reason is %q, want %q", got, want)
		}
		r.Install(installFolder, one("late"))
		if got := uuids(t, b); got != "late" {
			t.Errorf("after it was installed: %q, want late", got)
		}
	})
}

// A driver is replaced by a newer release while the daemon runs: a library that was
// never initialised is too, another one is kept until a restart.
func TestLibraryReplaced(t *testing.T) {
	r := newRoot(t)
	topology := one("first")
	topology.Driver.State = vendorsim.DriverAbsent
	r.Install(installFolder, topology)
	b := r.open(backend.Options{})
	reason(t, b)
	path := r.Install(installFolder, one("old"))
	if got := uuids(t, b); got != "old" {
		t.Fatalf("found %q, want old", got)
	}
	topology = one("old")
	topology.Driver.State = vendorsim.DriverAbsent
	write(t, path, topology)
	reason(t, b)
	r.Install(installFolder, one("new"))
	backendtest.WantRestart(t, b)
}

func TestLibraryStaysLoaded(t *testing.T) {
	r := newRoot(t)
	r.Install(installFolder, one("a"))
	backendtest.StaysLoaded(t, r.Root, New)
}
