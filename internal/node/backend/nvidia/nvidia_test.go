package nvidia_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// patience is for machines that do other things as well.
const patience = 2 * time.Minute

// machine is a backend and the hardware that it finds.
type machine struct {
	*nvidia.Backend
	t        *testing.T
	topology vendorsim.Topology
}

func newMachine(t *testing.T, o backend.Options, cards ...vendorsim.Card) *machine {
	t.Helper()
	m := &machine{t: t, topology: vendorsim.Topology{Cards: cards}}
	m.change(func(*vendorsim.Topology) {})
	if o.DriverRoot == "" {
		o.DriverRoot = driverRoot
	}
	if o.SysfsRoot == "" {
		o.SysfsRoot = t.TempDir()
	}
	var err error
	if m.Backend, err = nvidia.New(o); err != nil {
		t.Fatal(err)
	}
	backendtest.CloseAtEnd(t, m)
	return m
}

func (m *machine) change(f func(*vendorsim.Topology)) {
	m.t.Helper()
	f(&m.topology)
	write(m.t, m.topology)
}

// raise makes an error happen to a GPU.
func (m *machine) raise(card, code int) {
	m.t.Helper()
	m.change(func(topology *vendorsim.Topology) {
		x := &topology.Cards[card].XID
		x.Code, x.Number = code, x.Number+1
	})
}

func (m *machine) found() backend.Found {
	m.t.Helper()
	return backendtest.Found(m.t, m)
}

// reason discovers and returns why that is not possible.
func (m *machine) reason() string {
	m.t.Helper()
	return backendtest.Reason(m.t, m)
}

// causes discovers and returns why the GPUs are unhealthy, "-" for those that
// are well.
func (m *machine) causes() string {
	m.t.Helper()
	var out []string
	for _, d := range m.found().Devices {
		if d.Health.Unhealthy != (d.Health.Reason != "" && d.Health.Cause != "") {
			m.t.Errorf("health is %+v", d.Health)
		}
		cause := d.Health.Cause
		if cause == "" {
			cause = "-"
		}
		out = append(out, cause)
	}
	return strings.Join(out, " ")
}

func (m *machine) wantCauses(what, want string) {
	m.t.Helper()
	if got := m.causes(); got != want {
		m.t.Errorf("%s: causes are %q, want %q", what, got, want)
	}
}

// await calls AwaitChange in the background.
func (m *machine) await() <-chan error {
	done := make(chan error, 1)
	go func() { done <- m.AwaitChange(m.t.Context()) }()
	return done
}

// listening waits until the events of all GPUs are heard.
func (m *machine) listening() <-chan error {
	m.t.Helper()
	done := m.await()
	select {
	case err := <-done:
		m.t.Fatalf("AwaitChange = %v before any change", err)
	case <-time.After(100 * time.Millisecond):
	}
	return done
}

func (m *machine) wantWoken(done <-chan error) {
	m.t.Helper()
	select {
	case err := <-done:
		if err != nil {
			m.t.Fatalf("AwaitChange: %v", err)
		}
	case <-time.After(patience):
		m.t.Fatal("AwaitChange did not return")
	}
}

func TestReasons(t *testing.T) {
	backendtest.RunBroken(t, harness, map[string]backendtest.Broken{
		"no driver":     {func(t *vendorsim.Topology) { t.Driver.State = vendorsim.DriverAbsent }, "nvmlInit_v2: driver not loaded (9)"},
		"broken driver": {func(t *vendorsim.Topology) { t.Driver.State = vendorsim.DriverBroken }, "nvmlInit_v2: unknown error (999)"},
		"count fails": {func(t *vendorsim.Topology) { t.Library.Fail = vendorsim.Failures{"nvmlDeviceGetCount_v2": 4} },
			"nvmlDeviceGetCount_v2: insufficient permissions (4)"},
		"other releases": {func(t *vendorsim.Topology) { t.Library.Fail = vendorsim.Failures{"nvmlInit_v2": 18} },
			"nvmlInit_v2: driver/library version mismatch (18)"},
	})
}

func TestDescribes(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(1, 40960)...)
	m.change(func(topology *vendorsim.Topology) {
		topology.Driver = vendorsim.Driver{Version: "550.54.15", CUDA: "12.4"}
		topology.Cards = append(topology.Cards, vendorsim.Card{Vendor: vendorsim.NVIDIA, Model: "NVIDIA DGX Display",
			UUID: "GPU-screen", MemoryMiB: 4096})
		topology.Cards = append(topology.Cards, vendorsim.IXBoards(1, 2, 1024)...)
	})
	want := backend.Found{
		Driver: "550.54.15", CUDA: "12.4",
		Devices: []accel.Device{{
			ID: "GPU-a1000000-0000-4000-8000-000000000000", Model: "NVIDIA A100-SXM4-40GB",
			MemoryBytes: 40960 << 20, NUMANode: 0, PCI: "0000:10:00.0",
		}},
	}
	if diff := cmp.Diff(want, m.found()); diff != "" {
		t.Errorf("found (-want +got):\n%s", diff)
	}
}

// Whatever fails about one GPU, from the start or later, the others are offered
// with all that is known of them.
func TestOneGPUThatCannotBeAskedLeavesTheOthers(t *testing.T) {
	for call, offered := range map[string]string{
		"nvmlDeviceGetHandleByIndex_v2":       "- -",
		"nvmlDeviceGetUUID":                   "- -",
		"nvmlDeviceGetName":                   "- -",
		"nvmlDeviceGetMinorNumber":            "- -",
		"nvmlDeviceGetMemoryInfo":             "- -",
		"nvmlDeviceGetPciInfo_v3":             "- -",
		"nvmlDeviceGetRemappedRows":           "- unreachable -",
		"nvmlDeviceGetMemoryAffinity":         "- - -",
		"nvmlDeviceGetCudaComputeCapability":  "- - -",
		"nvmlDeviceGetMigMode":                "- - -",
		"nvmlDeviceGetNvLinkState":            "- - -",
		"nvmlDeviceGetTopologyCommonAncestor": "- - -",
	} {
		t.Run(call, func(t *testing.T) {
			cards := vendorsim.GPUs(3, 1024)
			cards[1].Calls.Fail = vendorsim.Failures{call: 999}
			m := newMachine(t, backend.Options{}, cards...)
			m.change(func(topology *vendorsim.Topology) { topology.Links = vendorsim.AllLinked(0, 3, 2) })
			m.wantCauses("from the start", offered)
			found := m.found()
			if missing := 3 - len(found.Devices); len(found.Faults) != missing {
				t.Errorf("faults are %v, want %d", found.Faults, missing)
			}
			want := accel.Link{A: accel.DeviceID(cards[0].UUID), B: accel.DeviceID(cards[2].UUID), Score: 230}
			if !slices.Contains(found.Links, want) {
				t.Errorf("links are %v, want %v among them", found.Links, want)
			}
			m.change(func(topology *vendorsim.Topology) { topology.Cards[1].Calls.Fail = nil })
			m.wantCauses("after the repair", "- - -")
			m.change(func(topology *vendorsim.Topology) { topology.Cards[1].Calls.Fail = vendorsim.Failures{call: 15} })
			if got := m.causes(); !strings.HasPrefix(got, "-") || !strings.HasSuffix(got, "-") {
				t.Errorf("when it is lost: causes are %q", got)
			}
		})
	}
}

// A GPU that shares the CPU's memory has no size of its own to tell, and is good
// as a whole all the same.
func TestGPUWithoutMemoryOfItsOwnIsListed(t *testing.T) {
	cards := vendorsim.GPUs(1, 1024)
	cards[0].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetMemoryInfo": 3}
	m := newMachine(t, backend.Options{}, cards...)
	found := m.found()
	if len(found.Devices) != 1 || found.Devices[0].MemoryBytes != 0 || found.Devices[0].Health.Unhealthy {
		t.Fatalf("found %+v, want one healthy GPU without memory", found)
	}
	if got, is := m.Labels(backend.Sharing{})["nvidia.com/gpu.memory"]; is {
		t.Errorf("its memory is told as %q", got)
	}
}

// A bus id ends in NULs and has eight digits of domain; the kernel writes both
// otherwise, and a wrong name there is a lost NUMA node.
func TestNUMANodeOfLongBusIDs(t *testing.T) {
	cards := vendorsim.GPUs(4, 1024)
	for i, address := range []string{"00000000:3B:00.0", "00010000:e1:00.0", "0000:5e:00.0", "0000:5f:00.0"} {
		cards[i].PCI, cards[i].NUMA = address, -1
	}
	cards[2].NUMA = 0 // NVML has node 0 where the kernel says that there is none
	cards[3].NUMA = 2 // the kernel's files do not show the GPU
	dir := t.TempDir()
	put(t, dir, "bus/pci/devices/0000:3b:00.0/numa_node", "1\n")
	put(t, dir, "bus/pci/devices/10000:e1:00.0/numa_node", "3\n")
	put(t, dir, "bus/pci/devices/0000:5e:00.0/numa_node", "-1\n")
	m := newMachine(t, backend.Options{SysfsRoot: dir}, cards...)
	var got []int
	for _, d := range m.found().Devices {
		got = append(got, d.NUMANode)
	}
	if diff := cmp.Diff([]int{1, 3, accel.NoNUMA, 2}, got); diff != "" {
		t.Errorf("NUMA nodes (-want +got):\n%s", diff)
	}
}

func TestXIDIsToldOnceAndTheGPURecovers(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(3, 1024)...)
	m.found()
	woken := m.listening()
	m.raise(1, 79)
	m.wantWoken(woken)
	m.wantCauses("after the error", "- xid-79 -")
	m.wantCauses("later", "- - -")
	woken = m.await()
	m.raise(1, 79) // the same once more
	m.wantWoken(woken)
	m.wantCauses("after another error", "- xid-79 -")
}

// An error after which a GPU is to stay away is not hidden by one before it, nor
// by what the library tells when it is asked.
func TestErrorThatNeverRecoversIsNotHiddenByOthers(t *testing.T) {
	m := newMachine(t, backend.Options{NeverRecover: []string{"xid-79"}}, vendorsim.GPUs(2, 1024)...)
	m.found()
	for _, code := range []int{94, 79, 63} {
		woken := m.listening()
		m.raise(0, code)
		m.wantWoken(woken)
	}
	m.wantCauses("after three errors", "xid-79 -")
	woken := m.listening()
	m.raise(1, 79)
	m.wantWoken(woken)
	m.change(func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = true })
	m.wantCauses("with a bad row", "- xid-79")
	m.wantCauses("later", "- row-remap-failure")
}

func TestDoubleBitErrorsCount(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(2, 1024)...)
	m.found()
	woken := m.listening()
	m.raise(0, 48)
	m.wantWoken(woken)
	m.wantCauses("after an error in memory", "ecc-double-bit -")
}

// The driver numbers that error 48, and NVIDIA's own plugin knows it by that
// number alone.
func TestDoubleBitErrorsAreKnownByTheirNumberToo(t *testing.T) {
	for name, tt := range map[string]struct {
		options backend.Options
		want    string
	}{
		"never recovers": {backend.Options{NeverRecover: []string{"xid-48"}}, "xid-48"},
		"ignored":        {backend.Options{Ignore: []string{"default", "xid-48"}}, "-"},
		"heeded alone":   {backend.Options{Ignore: []string{"all"}, Heed: []string{"xid-48"}}, "xid-48"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, tt.options, vendorsim.GPUs(1, 1024)...)
			m.found()
			woken := m.listening()
			m.raise(0, 48)
			m.wantWoken(woken)
			m.wantCauses("after an error in memory", tt.want)
		})
	}
}

func TestErrorsOfApplicationsDoNotCount(t *testing.T) {
	for name, tt := range map[string]struct {
		options backend.Options
		want    map[int]string
	}{
		"by default":       {backend.Options{}, map[int]string{13: "-", 31: "-", 43: "-", 45: "-", 68: "-", 109: "-", 94: "xid-94"}},
		"ignored too":      {backend.Options{Ignore: []string{"default", "xid-94"}}, map[int]string{13: "-", 94: "-", 79: "xid-79"}},
		"a list of one":    {backend.Options{Ignore: []string{"xid-94"}}, map[int]string{13: "xid-13", 94: "-"}},
		"heeded again":     {backend.Options{Heed: []string{"xid-13"}}, map[int]string{13: "xid-13", 31: "-"}},
		"all but one":      {backend.Options{Ignore: []string{"all"}, Heed: []string{"xid-94"}}, map[int]string{79: "-", 94: "xid-94"}},
		"all":              {backend.Options{Ignore: []string{"all"}}, map[int]string{79: "-", 48: "-"}},
		"double bit alone": {backend.Options{Ignore: []string{"ecc-*"}}, map[int]string{48: "-", 79: "xid-79"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, tt.options, vendorsim.GPUs(1, 1024)...)
			m.found()
			woken := m.listening()
			for code, want := range tt.want {
				m.raise(0, code)
				m.wantWoken(woken) // whoever waits looks, also for what does not count
				m.wantCauses(fmt.Sprintf("XID %d", code), want)
				woken = m.await()
			}
			m.raise(0, 1)
			m.wantWoken(woken)
		})
	}
}

func TestFailedRowRemappingIsAState(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(2, 1024)...)
	m.change(func(topology *vendorsim.Topology) { topology.Cards[0].Unhealthy = true })
	for range 2 {
		m.wantCauses("bad row", "row-remap-failure -")
	}
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Unhealthy = false
		topology.Cards[1].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetRemappedRows": 999}
	})
	m.wantCauses("no answer", "- unreachable")
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[1].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetRemappedRows": 3}
	})
	m.wantCauses("older GPU", "- -")
}

// An event that happens while discoveries fail is told by the first that works.
func TestEventsOutliveAFailedDiscovery(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(2, 1024)...)
	m.found()
	woken := m.listening()
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[1].XID.Code = 79
		topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetCount_v2": 4}
	})
	m.wantWoken(woken)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := m.Discover(ctx); err == nil {
		t.Error("Discover with a context that has ended")
	}
	m.change(func(topology *vendorsim.Topology) { topology.Library.Fail = nil })
	m.wantCauses("in the end", "- xid-79")
}

// A GPU that has an error and falls off the bus is not as good as new when it
// is back, also if this program was started again in the meantime: the fault says why.
func TestErrorOfALostGPUIsToldWhenItIsBack(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(2, 1024)...)
	m.found()
	woken := m.listening()
	m.raise(1, 79)
	m.wantWoken(woken)
	m.change(func(topology *vendorsim.Topology) { topology.Cards[1].Lost = true })
	for range 2 {
		found := m.found()
		if len(found.Devices) != 1 || len(found.Faults) != 1 || found.Faults[0].Cause != "xid-79" ||
			!strings.HasPrefix(found.Faults[0].Err.Error(), "critical error XID 79; nvml") {
			t.Errorf("lost: %d devices, faults %+v", len(found.Devices), found.Faults)
		}
	}
	all := m.topology.Cards
	m.change(func(topology *vendorsim.Topology) { topology.Cards = all[:1] }) // it is not even counted
	if found := m.found(); len(found.Faults) != 1 || found.Faults[0].Cause != "xid-79" || found.Faults[0].Index != 1 {
		t.Errorf("not counted: faults %+v", found.Faults)
	}
	m.change(func(topology *vendorsim.Topology) { topology.Cards = all })
	m.change(func(topology *vendorsim.Topology) { topology.Cards[1].Lost = false })
	m.wantCauses("back", "- xid-79")
	m.wantCauses("later", "- -")
}

// The set of GPUs that are listened to changes at the worst moment.
func TestEventsOutliveTheLossOfAnotherGPU(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(3, 1024)...)
	m.found()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.AwaitChange(ctx) }()
	time.Sleep(100 * time.Millisecond) // they are listened to
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("AwaitChange = %v", err)
	}
	time.Sleep(time.Second) // and the wait in the library is over
	m.raise(2, 79)
	m.change(func(topology *vendorsim.Topology) { topology.Cards[0].Lost = true })
	m.wantCauses("before anybody listens again", "- -")
	m.wantWoken(m.await())
	m.wantCauses("in the end", "- xid-79")
}

func TestWaitingEndsWhenAsked(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(1, 1024)...)
	soon := func(what string, done <-chan error, want error) {
		t.Helper()
		select {
		case err := <-done:
			if !errors.Is(err, want) {
				t.Errorf("AwaitChange %s = %v, want %v", what, err, want)
			}
		case <-time.After(patience):
			t.Fatalf("AwaitChange %s did not end", what)
		}
	}
	for _, what := range []string{"before any discovery", "while it listens"} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- m.AwaitChange(ctx) }()
		time.Sleep(20 * time.Millisecond)
		cancel()
		soon(what, done, context.Canceled)
		m.found()
	}
	done := m.listening()
	if err := m.Close(); err != nil {
		t.Errorf("Close while somebody waits: %v", err)
	}
	soon("of a closed backend", done, backend.ErrClosed)
}

// A GPU that is lost makes the wait for events fail at once, again and again.
func TestLostGPUDoesNotMakeTheWaitSpin(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(3, 1024)...)
	m.found()
	woken := m.listening()
	m.change(func(topology *vendorsim.Topology) { topology.Cards[1].Lost = true })
	m.wantWoken(woken)
	// Nobody discovers; yet the others are listened to, and quietly.
	woken = m.listening()
	m.raise(2, 79)
	m.wantWoken(woken)
	found := m.found()
	if len(found.Devices) != 2 || len(found.Faults) != 1 || found.Devices[1].Health.Cause != "xid-79" {
		t.Errorf("found %+v", found)
	}
	m.listening()
}

func TestGPUWhoseEventsCannotBeHeardIsUnhealthyAlone(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(3, 1024)...)
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetSupportedEventTypes": 3}
		topology.Cards[1].Calls.Fail = vendorsim.Failures{"nvmlDeviceRegisterEvents": 4}
	})
	m.wantCauses("before anybody listens", "- - -")
	m.wantWoken(m.await())
	m.wantCauses("not heard", "- unreachable -") // the first has none to hear, and is asked only
	m.change(func(topology *vendorsim.Topology) { topology.Cards[1].Calls.Fail = nil })
	m.wantWoken(m.await()) // tried again after a while
	m.wantCauses("heard again", "- - -")
}

func TestEventSetThatCannotBeMadeIsReported(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(2, 1024)...)
	m.found()
	m.change(func(topology *vendorsim.Topology) {
		topology.Library.Fail = vendorsim.Failures{"nvmlEventSetCreate": 4}
	})
	m.wantWoken(m.await())
	m.wantCauses("nobody listens", "unreachable unreachable")
	if err := <-m.await(); err == nil || !strings.Contains(err.Error(), "nvmlEventSetCreate") {
		t.Errorf("AwaitChange = %v, want the call that fails", err)
	}
	m.change(func(topology *vendorsim.Topology) { topology.Library.Fail = nil })
	m.wantWoken(m.await())
	m.wantCauses("somebody listens", "- -")
}

func TestLinks(t *testing.T) {
	cards := vendorsim.GPUs(5, 1024)
	cards[0].Switch, cards[1].Switch = "s", "s"
	cards[4].NUMA = 1
	m := newMachine(t, backend.Options{}, cards...)
	m.change(func(topology *vendorsim.Topology) {
		topology.Links = []vendorsim.Link{{A: 0, B: 1, Lanes: 12}, {A: 3, B: 1, Lanes: 2, OneWay: true}}
	})
	id := func(i int) accel.DeviceID { return accel.DeviceID(cards[i].UUID) }
	link := func(a, b, score int) accel.Link { return accel.Link{A: id(a), B: id(b), Score: score} }
	want := []accel.Link{
		link(0, 1, 1250), link(0, 2, 30), link(0, 3, 30), link(0, 4, 10),
		link(1, 2, 30), link(1, 3, 230), link(1, 4, 10),
		link(2, 3, 30), link(2, 4, 10), link(3, 4, 10),
	}
	if diff := cmp.Diff(want, m.found().Links); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}

	// What was answered is not asked again.
	m.change(func(topology *vendorsim.Topology) {
		topology.Library.Fail = vendorsim.Failures{
			"nvmlDeviceGetTopologyCommonAncestor": 999, "nvmlDeviceGetNvLinkState": 999, "nvmlDeviceGetNvLinkRemotePciInfo_v2": 999,
		}
	})
	if diff := cmp.Diff(want, m.found().Links); diff != "" {
		t.Errorf("links that cannot be asked again (-want +got):\n%s", diff)
	}

	// A lost GPU costs its own links.
	m.change(func(topology *vendorsim.Topology) {
		topology.Library.Fail = nil
		topology.Cards[1].Lost = true
	})
	others := slices.DeleteFunc(slices.Clone(want), func(l accel.Link) bool { return l.A == id(1) || l.B == id(1) })
	if diff := cmp.Diff(others, m.found().Links); diff != "" {
		t.Errorf("links without the lost GPU (-want +got):\n%s", diff)
	}
}

// A question that fails in one direction is asked in the other, and what fails
// in both is asked again later.
func TestLinksOfGPUsThatDoNotAnswer(t *testing.T) {
	m := newMachine(t, backend.Options{}, vendorsim.GPUs(3, 1024)...)
	m.change(func(topology *vendorsim.Topology) {
		topology.Links = vendorsim.AllLinked(0, 3, 2)
		topology.Cards[0].Calls.Fail = vendorsim.Failures{"nvmlDeviceGetTopologyCommonAncestor": 999, "nvmlDeviceGetNvLinkState": 999}
		topology.Cards[1].Calls.Fail = topology.Cards[0].Calls.Fail
	})
	scores := func() (out []int) {
		for _, l := range m.found().Links {
			out = append(out, l.Score)
		}
		return out
	}
	if diff := cmp.Diff([]int{230, 230}, scores()); diff != "" {
		t.Errorf("scores (-want +got):\n%s", diff)
	}
	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Calls.Fail, topology.Cards[1].Calls.Fail = nil, nil
	})
	if diff := cmp.Diff([]int{230, 230, 230}, scores()); diff != "" {
		t.Errorf("scores later (-want +got):\n%s", diff)
	}
}

func TestEditsAreInTheOrderOfIndices(t *testing.T) {
	cards := vendorsim.GPUs(12, 1024)
	slices.Reverse(cards) // ids are not in the order of indices
	cards[2].Minor = new(20)
	ask := []accel.DeviceID{accel.DeviceID(cards[10].UUID), accel.DeviceID(cards[2].UUID), accel.DeviceID(cards[10].UUID)}
	uuids := cards[2].UUID + "," + cards[10].UUID
	for _, index := range []bool{false, true} {
		m := newMachine(t, backend.Options{IndexInEnv: index, HostDriverRoot: "/run/nvidia/driver", DevRoot: t.TempDir()}, cards...)
		m.found()
		e, err := m.Edits(ask...)
		if err != nil {
			t.Fatal(err)
		}
		names := []string{cards[2].UUID, cards[10].UUID}
		visible := uuids
		if index {
			names, visible = []string{"2", "10"}, "2,10"
		}
		const folder = "/var/run/nvidia-container-devices"
		want := backend.Edits{
			Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": visible},
			ByMounts: &backend.ByMounts{
				Env: map[string]string{"NVIDIA_VISIBLE_DEVICES": folder},
				Mounts: []backend.Mount{
					{Path: folder + "/" + names[0], HostPath: "/dev/null"},
					{Path: folder + "/" + names[1], HostPath: "/dev/null"},
				},
			},
			DeviceNodes: []backend.DeviceNode{
				{Path: "/dev/nvidia20", HostPath: "/run/nvidia/driver/dev/nvidia20", Permissions: "rw"},
				{Path: "/dev/nvidia10", HostPath: "/run/nvidia/driver/dev/nvidia10", Permissions: "rw"},
			},
			CDIDevices: []backend.CDIDevice{
				{Kind: "nvidia.divvy.dev/gpu", Name: cards[2].UUID},
				{Kind: "nvidia.divvy.dev/gpu", Name: cards[10].UUID},
			},
			FormerCDIDevices: []backend.CDIDevice{
				{Kind: "k8s.device-plugin.nvidia.com/gpu", Name: cards[2].UUID},
				{Kind: "k8s.device-plugin.nvidia.com/gpu", Name: cards[10].UUID},
			},
		}
		if diff := cmp.Diff(want, e); diff != "" {
			t.Errorf("edits (-want +got):\n%s", diff)
		}
	}
}

func TestControlDevicesOfTheNode(t *testing.T) {
	for _, file := range []string{"dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-modeset", "dev/nvidia-caps/nvidia-cap1"} {
		put(t, driverRoot, file, "")
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(filepath.Join(driverRoot, "dev")); err != nil {
			t.Error(err)
		}
	})
	m := newMachine(t, backend.Options{CDIKind: "nvidia.com/gpu"}, vendorsim.GPUs(1, 1024)...)
	e, err := m.Edits(m.found().Devices[0].ID)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, d := range e.DeviceNodes {
		paths = append(paths, d.Path)
	}
	if diff := cmp.Diff([]string{"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset"}, paths); diff != "" {
		t.Errorf("device nodes (-want +got):\n%s", diff)
	}
	if got, want := e.CDIDevices[0].String(), "nvidia.com/gpu=GPU-a1000000-0000-4000-8000-000000000000"; got != want {
		t.Errorf("CDI name is %s, want %s", got, want)
	}
}

func TestLabels(t *testing.T) {
	cards := vendorsim.GPUs(3, 40960)
	cards[0].Model, cards[0].MemoryMiB, cards[0].Compute = "Tesla T4", 15360, "7.5"
	cards[1].MIG = vendorsim.MIGEnabled
	dir := t.TempDir()
	put(t, dir, "class/dmi/id/product_name", "PowerEdge R740 (rev. 2)\n")
	for i := range cards {
		put(t, dir, fmt.Sprintf("bus/pci/devices/0000:%02x:00.0/class", 0x10+i), "0x030200\n")
	}
	m := newMachine(t, backend.Options{SysfsRoot: dir}, cards...)
	if labels := m.Labels(backend.Sharing{Replicas: 1}); labels != nil {
		t.Errorf("labels before any discovery: %v", labels)
	}
	m.change(func(topology *vendorsim.Topology) {
		topology.Driver = vendorsim.Driver{Version: "550.107.02", CUDA: "12.4"}
	})
	if found := m.found(); len(found.Devices) != 3 {
		t.Fatalf("found %v: a GPU in MIG mode is offered whole", found.Devices)
	}
	want := map[string]string{
		"nvidia.com/cuda.driver-version.full":     "550.107.02",
		"nvidia.com/cuda.driver-version.major":    "550",
		"nvidia.com/cuda.driver-version.minor":    "107",
		"nvidia.com/cuda.driver-version.revision": "02",
		"nvidia.com/cuda.driver.major":            "550",
		"nvidia.com/cuda.driver.minor":            "107",
		"nvidia.com/cuda.driver.rev":              "02",
		"nvidia.com/cuda.runtime-version.full":    "12.4",
		"nvidia.com/cuda.runtime-version.major":   "12",
		"nvidia.com/cuda.runtime-version.minor":   "4",
		"nvidia.com/cuda.runtime.major":           "12",
		"nvidia.com/cuda.runtime.minor":           "4",
		"nvidia.com/gpu.compute.major":            "8",
		"nvidia.com/gpu.compute.minor":            "0",
		"nvidia.com/gpu.count":                    "3",
		"nvidia.com/gpu.family":                   "ampere",
		"nvidia.com/gpu.machine":                  "PowerEdge-R740--rev.-2",
		"nvidia.com/gpu.memory":                   "40960",
		"nvidia.com/gpu.mode":                     "compute",
		"nvidia.com/gpu.present":                  "true",
		"nvidia.com/gpu.product":                  "NVIDIA-A100-SXM4-40GB",
		"nvidia.com/gpu.replicas":                 "1",
		"nvidia.com/gpu.sharing-strategy":         "none",
		"nvidia.com/mig.capable":                  "true",
		"nvidia.com/mig.strategy":                 "none",
	}
	if diff := cmp.Diff(want, m.Labels(backend.Sharing{Replicas: 1})); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	want["nvidia.com/gpu.replicas"], want["nvidia.com/gpu.sharing-strategy"] = "4", "time-slicing"
	if diff := cmp.Diff(want, m.Labels(backend.Sharing{Replicas: 4, Renamed: true})); diff != "" {
		t.Errorf("labels of renamed slices (-want +got):\n%s", diff)
	}
	want["nvidia.com/gpu.product"] = "NVIDIA-A100-SXM4-40GB-SHARED"
	if diff := cmp.Diff(want, m.Labels(backend.Sharing{Replicas: 4})); diff != "" {
		t.Errorf("labels of slices (-want +got):\n%s", diff)
	}

	m.change(func(topology *vendorsim.Topology) {
		topology.Cards[1].Model = strings.Repeat("long model", 6) // three models: the first decides
	})
	m.found()
	if got := m.Labels(backend.Sharing{})["nvidia.com/gpu.product"]; got != "Tesla-T4" {
		t.Errorf("product of a node with three models is %q, want the first", got)
	}
	m.change(func(topology *vendorsim.Topology) { topology.Cards[0].Model = topology.Cards[1].Model })
	m.found()
	if got := m.Labels(backend.Sharing{Replicas: 2})["nvidia.com/gpu.product"]; len(got) > 63 || !strings.HasSuffix(got, "-SHARED") {
		t.Errorf("long product is %q", got)
	}
}

// NVML counts its GPUs when it is initialised. The kernel says when that is to
// be done again.
func TestLibraryStartsAnewWhenGPUsComeAndGo(t *testing.T) {
	dir := t.TempDir()
	const driver = "bus/pci/drivers/nvidia"
	put(t, dir, driver+"/0000:10:00.0", "")
	m := newMachine(t, backend.Options{SysfsRoot: dir}, vendorsim.GPUs(2, 1024)...)
	m.found()
	woken := m.listening()
	m.change(func(topology *vendorsim.Topology) { topology.Library.Fail = vendorsim.Failures{"nvmlInit_v2": 4} })
	m.wantCauses("nothing has changed", "- -")
	put(t, dir, driver+"/0000:11:00.0", "")
	if got, want := m.reason(), "nvmlInit_v2: insufficient permissions (4)"; got != want {
		t.Errorf("reason is %q, want %q", got, want)
	}
	m.change(func(topology *vendorsim.Topology) { topology.Library.Fail = nil })
	for range 3 {
		m.wantCauses("in the end", "- -")
	}
	// Whoever waits for an event does not notice.
	time.Sleep(100 * time.Millisecond)
	m.raise(1, 79)
	m.wantWoken(woken)
	m.wantCauses("after the error", "- xid-79")
}

func TestRestartIsAskedForWhenOnlyThatHelps(t *testing.T) {
	var restart *backend.RestartNeededError
	t.Run("the driver was replaced", func(t *testing.T) {
		m := newMachine(t, backend.Options{}, vendorsim.GPUs(1, 1024)...)
		m.found()
		m.change(func(topology *vendorsim.Topology) {
			topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetCount_v2": 18, "nvmlInit_v2": 18}
		})
		if _, err := m.Discover(t.Context()); !errors.As(err, &restart) || backend.Unavailable(err) == nil {
			t.Errorf("Discover = %v, want a RestartNeededError", err)
		}
		if got := m.reason(); !strings.Contains(got, "divvy-node must be restarted") || !strings.Contains(got, "mismatch") {
			t.Errorf("reason is %q", got)
		}
		m.change(func(topology *vendorsim.Topology) { topology.Library.Fail = nil })
		m.wantCauses("the old one is back", "-")
	})
	t.Run("they never went together", func(t *testing.T) {
		m := newMachine(t, backend.Options{}, vendorsim.GPUs(1, 1024)...)
		m.change(func(topology *vendorsim.Topology) { topology.Library.Fail = vendorsim.Failures{"nvmlInit_v2": 18} })
		if _, err := m.Discover(t.Context()); err == nil || errors.As(err, &restart) {
			t.Errorf("Discover = %v: a restart finds the same", err)
		}
	})
}

// Files that are replaced are for a process of its own, in which no other test uses a library.
func TestLibraryFile(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	root := t.TempDir()
	folder := filepath.Join(root, "usr/lib64")
	m := newMachine(t, backend.Options{DriverRoot: root}, vendorsim.GPUs(1, 1024)...)
	want := "libnvidia-ml.so.1 not found; looked in ROOT/usr/lib64, ROOT/usr/lib/x86_64-linux-gnu, " +
		"ROOT/usr/lib/aarch64-linux-gnu, ROOT/lib64, ROOT/lib/x86_64-linux-gnu, ROOT/lib/aarch64-linux-gnu for libnvidia-ml.so.1"
	if got := strings.ReplaceAll(m.reason(), root, "ROOT"); got != want {
		t.Errorf("reason is\n%s\nwant\n%s", got, want)
	}

	if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder, vendorsim.Without(
		"nvmlDeviceGetUUID", "nvmlInit_v2", "nvmlDeviceGetRemappedRows")); err != nil {
		t.Fatal(err)
	}
	if got, want := m.reason(), "lacks nvmlInit_v2, nvmlDeviceGetUUID"; !strings.HasSuffix(got, want) {
		t.Errorf("reason is %q, want ...%s", got, want)
	}

	if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder, vendorsim.Without(
		"nvmlDeviceGetRemappedRows", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetMemoryAffinity",
		"nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMigMode",
		"nvmlEventSetCreate", "nvmlSystemGetDriverVersion")); err != nil {
		t.Fatal(err)
	}
	if err := m.topology.Write(filepath.Join(folder, vendorsim.TopologyName)); err != nil {
		t.Fatal(err)
	}
	found := m.found()
	if len(found.Devices) != 1 || found.Devices[0].Health.Unhealthy || found.Driver != "" || found.CUDA != "" {
		t.Errorf("found %+v by a library that lacks what is not needed", found)
	}
	if err := m.AwaitChange(t.Context()); err == nil || !strings.Contains(err.Error(), "does not report events") {
		t.Errorf("AwaitChange = %v", err)
	}

	// Another release is installed, and its driver loaded.
	if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder); err != nil {
		t.Fatal(err)
	}
	m.wantCauses("as long as the old driver serves", "-")
	m.topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetCount_v2": 1}
	m.topology.Drivers = map[string]vendorsim.Driver{vendorsim.NVIDIA: {Version: "570.1"}}
	topology := filepath.Join(folder, vendorsim.TopologyName)
	if err := m.topology.Write(topology); err != nil {
		t.Fatal(err)
	}
	if got, want := m.reason(), "nvmlDeviceGetCount_v2: uninitialized (1)"; got != want {
		t.Errorf("reason is %q, want %q", got, want)
	}
	m.topology.Library.Fail = nil
	if err := m.topology.Write(topology); err != nil {
		t.Fatal(err)
	}
	if found := m.found(); len(found.Devices) != 1 || found.Driver != "570.1" {
		t.Errorf("found %+v by the new library", found)
	}

	// Another backend of the process uses the library, so it stays.
	other := newMachine(t, backend.Options{DriverRoot: root}, m.topology.Cards...)
	other.found()
	if _, err := vendorsim.Build(t.Context(), vendorsim.NVIDIA, folder); err != nil {
		t.Fatal(err)
	}
	m.topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetCount_v2": 1}
	if err := m.topology.Write(topology); err != nil {
		t.Fatal(err)
	}
	backendtest.WantRestart(t, m)
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	m.topology.Library.Fail = nil
	if err := m.topology.Write(topology); err != nil {
		t.Fatal(err)
	}
	m.wantCauses("once it is the only one", "-")

	m.topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetCount_v2": 1}
	if err := m.topology.Write(topology); err != nil {
		t.Fatal(err)
	}
	m.reason()
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if got := m.reason(); !strings.HasPrefix(got, "libnvidia-ml.so.1 not found") {
		t.Errorf("reason with the driver uninstalled is %q", got)
	}
}
