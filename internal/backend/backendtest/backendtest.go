// Package backendtest has the suite that every vendor's backend passes, on the
// vendor's simulated hardware. A vendor's test is one line:
//
//	backendtest.Run(t, harness)
package backendtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/vendorsim"
)

// Harness is what the suite must know of a vendor.
type Harness struct {
	// Cards returns n good cards of the vendor with memoryMiB MiB each.
	Cards func(n int, memoryMiB int64) []vendorsim.Card
	// ID is the identity of the card with that uuid.
	ID func(uuid string) accel.DeviceID
	// CardCall is a function of the vendor's library without which a card
	// cannot be described, and FailCode a code that it can fail with.
	CardCall string
	FailCode int
	// Open returns a new backend with hardware of its own, whose topology is
	// the file at the returned path. Calls of the library are to be limited to
	// callTimeout. The suite closes the backend.
	Open func(t *testing.T, first vendorsim.Topology, callTimeout time.Duration) (b backend.Backend, topologyPath string)
}

// Run tests the vendor's backend.
func Run(t *testing.T, h Harness) {
	t.Helper()
	t.Run("describes devices", h.testDescribes)
	t.Run("order and ids are stable", h.testStable)
	t.Run("health changes and recovers", h.testHealth)
	t.Run("a lost device leaves the others", h.testLost)
	t.Run("a failing call concerns one device", h.testFailingCall)
	t.Run("driver absent, then there", h.testDriverLate)
	t.Run("driver goes and comes back", h.testDriverReload)
	t.Run("broken driver", h.testDriverBroken)
	t.Run("duplicate uuids are named", h.testDuplicates)
	t.Run("impossible devices are named", h.testImpossible)
	t.Run("a slow library is waited for", h.testSlow)
	t.Run("a hung library keeps nobody", h.testHung)
	t.Run("a canceled context ends a discovery", h.testCanceled)
	t.Run("edits name the devices", h.testEdits)
	t.Run("edits refuse what was never found", h.testEditsRefuse)
	t.Run("edits need no library", h.testEditsWhileHung)
	t.Run("close is final", h.testClose)
	t.Run("close while in use", h.testCloseInUse)
	t.Run("safe for concurrent use", h.testConcurrent)
	t.Run("a change wakes whoever waits for one", h.testNotifier)
	t.Run("watched from absence to recovery", h.testWatch)
}

// patience is how long the suite waits for what must happen, generous so that
// a loaded machine does not fail it.
const patience = 20 * time.Second

// node is a backend and the hardware that it finds.
type node struct {
	backend.Backend
	t        *testing.T
	path     string
	topology vendorsim.Topology
}

func open(t *testing.T, h Harness, topology vendorsim.Topology) *node {
	t.Helper()
	return openLimited(t, h, topology, patience)
}

func openLimited(t *testing.T, h Harness, topology vendorsim.Topology, callTimeout time.Duration) *node {
	t.Helper()
	n := &node{t: t, topology: topology.Clone()}
	n.Backend, n.path = h.Open(t, topology, callTimeout)
	t.Cleanup(func() {
		// A library that hangs is brought back, so that it can be closed.
		n.change(func(topology *vendorsim.Topology) { topology.Library.Delay = 0 })
		if err := n.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return n
}

// change changes the hardware.
func (n *node) change(f func(*vendorsim.Topology)) {
	n.t.Helper()
	f(&n.topology)
	if err := n.topology.Write(n.path); err != nil {
		n.t.Fatal(err)
	}
}

// found discovers and wants no error.
func (n *node) found() backend.Found {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	found, err := n.Discover(ctx)
	if err != nil {
		n.t.Fatalf("Discover: %v", err)
	}
	return found
}

// unavailable discovers, wants the state to be reported and returns its reason.
func (n *node) unavailable() (reason string) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	found, err := n.Discover(ctx)
	u := backend.Unavailable(err)
	if u == nil {
		n.t.Fatalf("Discover = %v, %v; want an UnavailableError", found, err)
	}
	if u.Vendor != n.Vendor() || u.Reason() == "" {
		n.t.Errorf("UnavailableError of vendor %q with reason %q", u.Vendor, u.Reason())
	}
	return u.Reason()
}

func (h Harness) topology(cards int) vendorsim.Topology {
	return vendorsim.Topology{
		Driver: vendorsim.Driver{Version: "1.3.0"},
		Cards:  h.Cards(cards, 16384),
	}
}

func ids(found backend.Found) []accel.DeviceID {
	var out []accel.DeviceID
	for _, d := range found.Devices {
		out = append(out, d.ID)
	}
	return out
}

func wantIDs(t *testing.T, h Harness, found backend.Found, cards ...vendorsim.Card) {
	t.Helper()
	var want []accel.DeviceID
	for _, c := range cards {
		want = append(want, h.ID(c.UUID))
	}
	if diff := cmp.Diff(want, ids(found)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// wantFault wants exactly one fault, of that device, whose text has all words.
func wantFault(t *testing.T, found backend.Found, index int, id accel.DeviceID, words ...string) {
	t.Helper()
	if len(found.Faults) != 1 {
		t.Fatalf("faults are %v, want one", found.Faults)
	}
	f := found.Faults[0]
	if f.Index != index || f.ID != id {
		t.Errorf("fault of device %d %q, want %d %q", f.Index, f.ID, index, id)
	}
	for _, w := range words {
		if !strings.Contains(f.Err.Error(), w) {
			t.Errorf("fault is %q, want one with %q", f.Err, w)
		}
	}
}

func (h Harness) testDescribes(t *testing.T) {
	topology := h.topology(3)
	topology.Cards[1].MemoryMiB = 49152
	topology.Cards[1].NUMA = 1
	topology.Cards[2].NUMA = -1
	topology.Cards[2].Unhealthy = true
	n := open(t, h, topology)
	found := n.found()
	if found.Driver != "1.3.0" {
		t.Errorf("driver is %q, want 1.3.0", found.Driver)
	}
	if len(found.Faults) != 0 {
		t.Errorf("faults are %v, want none", found.Faults)
	}
	var want []accel.Device
	for i, c := range topology.Cards {
		want = append(want, accel.Device{
			Index:       i,
			ID:          h.ID(c.UUID),
			Model:       c.Model,
			MemoryBytes: c.MemoryMiB << 20,
			NUMANode:    []int{0, 1, accel.NoNUMA}[i],
			Health:      accel.Health{Unhealthy: c.Unhealthy},
		})
	}
	pci := map[string]bool{}
	for i := range found.Devices {
		d := &found.Devices[i]
		if pci[d.PCI] {
			t.Errorf("PCI address %q twice", d.PCI)
		}
		pci[d.PCI] = d.PCI != ""
		if d.Health.Unhealthy != (d.Health.Reason != "") {
			t.Errorf("device %d: unhealthy %v with reason %q", i, d.Health.Unhealthy, d.Health.Reason)
		}
		d.PCI, d.Health.Reason = "", "" // theirs are for the vendor to word
	}
	if diff := cmp.Diff(want, found.Devices); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

func (h Harness) testStable(t *testing.T) {
	topology := h.topology(8)
	slices.Reverse(topology.Cards) // ids are not in the order of the cards
	n := open(t, h, topology)
	first := n.found()
	wantIDs(t, h, first, topology.Cards...)
	for range 3 {
		if again := n.found(); !again.Equal(first) {
			t.Errorf("another discovery differs:\n%s", cmp.Diff(first.Devices, again.Devices))
		}
	}
	if restarted := open(t, h, topology).found(); !restarted.Equal(first) {
		t.Errorf("another backend finds others:\n%s", cmp.Diff(first.Devices, restarted.Devices))
	}
}

func (h Harness) testHealth(t *testing.T) {
	n := open(t, h, h.topology(2))
	before := n.found()
	for range 2 {
		n.change(func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = true })
		sick := n.found()
		if sick.Devices[0].Health.Unhealthy || !sick.Devices[1].Health.Unhealthy || sick.Devices[1].Health.Reason == "" {
			t.Errorf("health is %+v and %+v, want the second unhealthy with a reason", sick.Devices[0].Health, sick.Devices[1].Health)
		}
		n.change(func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = false })
		if after := n.found(); !after.Equal(before) {
			t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
		}
	}
}

func (h Harness) testLost(t *testing.T) {
	topology := h.topology(3)
	n := open(t, h, topology)
	before := n.found()
	n.change(func(topology *vendorsim.Topology) { topology.Cards[1].Lost = true })
	for range 2 { // it stays so
		found := n.found()
		wantIDs(t, h, found, topology.Cards[0], topology.Cards[2])
		wantFault(t, found, 1, h.ID(topology.Cards[1].UUID))
	}
	n.change(func(topology *vendorsim.Topology) {
		for i := range topology.Cards {
			topology.Cards[i].Lost = true
		}
	})
	for range 2 {
		if found := n.found(); len(found.Devices) != 0 || len(found.Faults) != 3 {
			t.Errorf("with all lost: %v, %v", found.Devices, found.Faults)
		}
	}
	n.change(func(topology *vendorsim.Topology) {
		for i := range topology.Cards {
			topology.Cards[i].Lost = false
		}
	})
	if after := n.found(); !after.Equal(before) {
		t.Errorf("when all are back:\n%s", cmp.Diff(before.Devices, after.Devices))
	}

	// One that was never seen has no identity.
	topology.Cards[0].Lost = true
	found := open(t, h, topology).found()
	wantIDs(t, h, found, topology.Cards[1], topology.Cards[2])
	wantFault(t, found, 0, "")
}

func (h Harness) testFailingCall(t *testing.T) {
	topology := h.topology(3)
	n := open(t, h, topology)
	before := n.found()
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[2].Fail = vendorsim.Failures{h.CardCall: h.FailCode}
	})
	found := n.found()
	wantIDs(t, h, found, topology.Cards[0], topology.Cards[1])
	wantFault(t, found, 2, h.ID(topology.Cards[2].UUID), h.CardCall, fmt.Sprint(h.FailCode))
	n.change(func(topology *vendorsim.Topology) { topology.Cards[2].Fail = nil })
	if after := n.found(); !after.Equal(before) {
		t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
	}
}

func (h Harness) testDriverLate(t *testing.T) {
	topology := h.topology(1)
	topology.Driver.State = vendorsim.DriverAbsent
	n := open(t, h, topology)
	first := n.unavailable()
	if again := n.unavailable(); again != first {
		t.Errorf("the reason changes from %q to %q, so it would be reported again and again", first, again)
	}
	n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
	wantIDs(t, h, n.found(), topology.Cards...)
}

func (h Harness) testDriverReload(t *testing.T) {
	topology := h.topology(2)
	n := open(t, h, topology)
	for range 3 {
		wantIDs(t, h, n.found(), topology.Cards...)
		n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverAbsent })
		n.unavailable()
		n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
	}
	wantIDs(t, h, n.found(), topology.Cards...)
}

func (h Harness) testDriverBroken(t *testing.T) {
	topology := h.topology(1)
	topology.Driver.State = vendorsim.DriverBroken
	n := open(t, h, topology)
	n.unavailable()
	n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
	wantIDs(t, h, n.found(), topology.Cards...)
}

func (h Harness) testDuplicates(t *testing.T) {
	topology := h.topology(4)
	topology.Cards[3].UUID = topology.Cards[1].UUID
	n := open(t, h, topology)
	found := n.found()
	wantIDs(t, h, found, topology.Cards[0], topology.Cards[2])
	if len(found.Faults) != 2 || found.Faults[0].Index != 1 || found.Faults[1].Index != 3 {
		t.Fatalf("faults are %v, want those of 1 and 3", found.Faults)
	}
	twice := h.ID(topology.Cards[1].UUID)
	for _, f := range found.Faults {
		if f.ID != twice || !strings.Contains(f.Err.Error(), string(twice)) {
			t.Errorf("fault of %q: %q; want it to name %q", f.ID, f.Err, twice)
		}
	}
	if _, err := n.Edits(twice); err == nil {
		t.Error("Edits gives one of two devices with the same id")
	}
	n.change(func(topology *vendorsim.Topology) { topology.Cards[3].UUID = "another" })
	if found := n.found(); len(found.Devices) != 4 || len(found.Faults) != 0 {
		t.Errorf("after the repair: %v, %v", found.Devices, found.Faults)
	}
}

func (h Harness) testImpossible(t *testing.T) {
	for name, spoil := range map[string]func(*vendorsim.Card){
		"empty uuid":       func(c *vendorsim.Card) { c.UUID = "" },
		"garbage for uuid": func(c *vendorsim.Card) { c.UUID = "two words/and\x1b[31m" },
		"no memory":        func(c *vendorsim.Card) { c.MemoryMiB, c.UsedMiB = 0, 0 },
	} {
		t.Run(name, func(t *testing.T) {
			topology := h.topology(2)
			spoil(&topology.Cards[0])
			found := open(t, h, topology).found()
			wantIDs(t, h, found, topology.Cards[1])
			if len(found.Faults) != 1 || found.Faults[0].Index != 0 {
				t.Fatalf("faults are %v, want that of device 0", found.Faults)
			}
			if text := found.Faults[0].Err.Error(); strings.ContainsAny(text, "\x1b\n") {
				t.Errorf("the library's garbage is in the fault's text: %q", text)
			}
		})
	}
}

func (h Harness) testSlow(t *testing.T) {
	topology := h.topology(1)
	topology.Library.Delay = 50 * time.Millisecond
	n := open(t, h, topology)
	start := time.Now()
	wantIDs(t, h, n.found(), topology.Cards...)
	if d := time.Since(start); d < topology.Library.Delay {
		t.Errorf("a discovery with calls of 50 ms took %v", d)
	}
}

// hang makes every call take an hour.
func (n *node) hang() {
	n.t.Helper()
	n.change(func(topology *vendorsim.Topology) { topology.Library.Delay = time.Hour })
}

// revive lets calls return at once again, and discovers until that works: the
// call that hung has to return first.
func (n *node) revive() backend.Found {
	n.t.Helper()
	n.change(func(topology *vendorsim.Topology) { topology.Library.Delay = 0 })
	end := time.Now().Add(patience)
	for {
		found, err := n.Discover(n.t.Context())
		if err == nil {
			return found
		}
		if time.Now().After(end) {
			n.t.Fatalf("Discover, with the library answering again: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (h Harness) testHung(t *testing.T) {
	const limit = 200 * time.Millisecond
	topology := h.topology(2)
	n := openLimited(t, h, topology, limit)
	before := n.revive()
	n.hang()
	first := n.unavailable()
	goroutines := runtime.NumGoroutine()
	start := time.Now()
	const more = 100
	for range more {
		if again := n.unavailable(); again != first {
			t.Fatalf("the reason changes from %q to %q, so it would be reported again and again", first, again)
		}
	}
	if d := time.Since(start); d > more*limit/2 {
		t.Errorf("%d discoveries after the first took %v, they waited for a library that hangs", more, d)
	}
	if g := runtime.NumGoroutine(); g > goroutines+more/2 {
		t.Errorf("%d goroutines became %d over %d discoveries", goroutines, g, more)
	}
	if after := n.revive(); !after.Equal(before) {
		t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
	}
}

func (h Harness) testCanceled(t *testing.T) {
	n := open(t, h, h.topology(1))
	before := n.found()
	n.hang()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	for range 2 { // the second waits for the first one's call
		_, err := n.Discover(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || backend.Unavailable(err) != nil {
			t.Errorf("Discover = %v, want the context's error", err)
		}
	}
	if d := time.Since(start); d > patience/2 {
		t.Errorf("Discover took %v after its context had ended", d)
	}
	if after := n.revive(); !after.Equal(before) {
		t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
	}
}

func (h Harness) testEdits(t *testing.T) {
	n := open(t, h, h.topology(3))
	all := ids(n.found())

	edits := func(of ...accel.DeviceID) backend.Edits {
		t.Helper()
		e, err := n.Edits(of...)
		if err != nil {
			t.Fatal(err)
		}
		if len(e.CDIDevices) != len(of) {
			t.Errorf("%d CDI devices for %d devices", len(e.CDIDevices), len(of))
		}
		for _, d := range e.CDIDevices {
			if _, _, _, err := parser.ParseQualifiedName(d.String()); err != nil {
				t.Errorf("CDI name %s: %v", d, err)
			}
		}
		return e
	}
	// Each device has nodes, CDI name and environment of its own.
	seen := map[string]accel.DeviceID{}
	mine := func(id accel.DeviceID, what string) {
		t.Helper()
		if other, ok := seen[what]; ok {
			t.Errorf("%s stands for %s and for %s", what, other, id)
		}
		seen[what] = id
	}
	var nodes []backend.DeviceNode
	var names []backend.CDIDevice
	for _, id := range all {
		e := edits(id)
		if len(e.Env) == 0 || len(e.DeviceNodes) == 0 {
			t.Fatalf("edits of %s are %+v, want an environment and device nodes", id, e)
		}
		for _, k := range slices.Sorted(maps.Keys(e.Env)) {
			mine(id, k+"="+e.Env[k])
		}
		for _, d := range e.DeviceNodes {
			mine(id, d.Path)
		}
		mine(id, e.CDIDevices[0].String())
		nodes = append(nodes, e.DeviceNodes...)
		names = append(names, e.CDIDevices...)
	}
	// Together they are in the order of their index, however they are asked for.
	slices.Reverse(all)
	e := edits(all...)
	if diff := cmp.Diff(nodes, e.DeviceNodes); diff != "" {
		t.Errorf("device nodes of all (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(names, e.CDIDevices); diff != "" {
		t.Errorf("CDI devices of all (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(edits(all[1], all[2]), edits(all[2], all[1])); diff != "" {
		t.Errorf("edits depend on the order of the ids:\n%s", diff)
	}
}

func (h Harness) testEditsRefuse(t *testing.T) {
	n := open(t, h, h.topology(1))
	good := h.ID(n.topology.Cards[0].UUID)
	if _, err := n.Edits(good); err == nil {
		t.Error("Edits before any discovery")
	}
	n.found()
	if _, err := n.Edits(); err == nil {
		t.Error("Edits of nothing")
	}
	if _, err := n.Edits(good, "no-such"); err == nil || !strings.Contains(err.Error(), "no-such") {
		t.Errorf("Edits of an unknown device: %v, want an error that names it", err)
	}
	// Another card in the place of the first.
	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].UUID = "another" })
	n.found()
	if e, err := n.Edits(good); err == nil {
		t.Errorf("Edits of a card whose place another has taken: %+v", e)
	}
}

func (h Harness) testEditsWhileHung(t *testing.T) {
	n := openLimited(t, h, h.topology(1), 200*time.Millisecond)
	id := ids(n.revive())[0]
	want, err := n.Edits(id)
	if err != nil {
		t.Fatal(err)
	}
	n.hang()
	n.unavailable()
	got, err := n.Edits(id)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("edits (-want +got):\n%s", diff)
	}
	// A lost card still has its edits: kubelet may ask for it in that moment.
	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Lost = true })
	if found := n.revive(); len(found.Devices) != 0 {
		t.Errorf("devices are %v, want none", found.Devices)
	}
	if _, err := n.Edits(id); err != nil {
		t.Errorf("Edits of a lost card: %v", err)
	}
}

func (h Harness) testClose(t *testing.T) {
	n := open(t, h, h.topology(1))
	id := ids(n.found())[0]
	for range 3 {
		if err := n.Close(); err != nil {
			t.Fatalf("Close: %v", err)
		}
	}
	if _, err := n.Discover(t.Context()); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Discover after Close: %v", err)
	}
	if _, err := n.Edits(id); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Edits after Close: %v", err)
	}
	if notifier, ok := n.Backend.(backend.Notifier); ok {
		if err := notifier.AwaitChange(t.Context()); !errors.Is(err, backend.ErrClosed) {
			t.Errorf("AwaitChange after Close: %v", err)
		}
	}
	if err := open(t, h, h.topology(1)).Close(); err != nil {
		t.Errorf("Close of a backend that was not used: %v", err)
	}
}

func (h Harness) testCloseInUse(t *testing.T) {
	for range 10 {
		n := open(t, h, h.topology(4))
		var users sync.WaitGroup
		for range 4 {
			users.Go(func() {
				for {
					_, err := n.Discover(t.Context())
					if errors.Is(err, backend.ErrClosed) {
						return
					}
					if err != nil {
						t.Errorf("Discover beside Close: %v", err)
						return
					}
				}
			})
		}
		time.Sleep(5 * time.Millisecond)
		if err := n.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		users.Wait()
	}
}

func (h Harness) testConcurrent(t *testing.T) {
	topology := h.topology(4)
	n := open(t, h, topology)
	want := ids(n.found())
	ctx, cancel := context.WithCancel(t.Context())
	var users sync.WaitGroup
	for i := range 4 {
		users.Go(func() {
			for ctx.Err() == nil {
				found, err := n.Discover(ctx)
				if ctx.Err() != nil {
					return
				}
				if err != nil || !slices.Equal(ids(found), want) {
					t.Errorf("Discover = %v, %v", ids(found), err)
					return
				}
			}
		})
		users.Go(func() {
			for ctx.Err() == nil {
				if _, err := n.Edits(want[i]); err != nil {
					t.Errorf("Edits: %v", err)
					return
				}
				time.Sleep(100 * time.Microsecond)
			}
		})
	}
	if notifier, ok := n.Backend.(backend.Notifier); ok {
		users.Go(func() {
			for ctx.Err() == nil {
				if err := notifier.AwaitChange(ctx); err != nil && ctx.Err() == nil {
					t.Errorf("AwaitChange: %v", err)
					return
				}
			}
		})
	}
	for i := range 100 {
		n.change(func(topology *vendorsim.Topology) {
			c := &topology.Cards[i%4]
			c.Unhealthy = !c.Unhealthy
		})
		time.Sleep(time.Millisecond)
	}
	cancel()
	users.Wait()
}

func (h Harness) testNotifier(t *testing.T) {
	n := open(t, h, h.topology(2))
	notifier, ok := n.Backend.(backend.Notifier)
	if !ok {
		return // the ability is optional
	}
	n.found()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, change := range map[string]func(*vendorsim.Topology){
		"unhealthy": func(topology *vendorsim.Topology) { topology.Cards[0].Unhealthy = true },
		"lost":      func(topology *vendorsim.Topology) { topology.Cards[1].Lost = true },
	} {
		woken := make(chan error, 1)
		go func() { woken <- notifier.AwaitChange(ctx) }()
		time.Sleep(50 * time.Millisecond)
		select {
		case err := <-woken:
			t.Fatalf("AwaitChange = %v before any change", err)
		default:
		}
		n.change(change)
		if err := <-woken; err != nil {
			t.Errorf("AwaitChange, card %s: %v", name, err)
		}
	}

	ended, end := context.WithTimeout(ctx, 50*time.Millisecond)
	defer end()
	if err := notifier.AwaitChange(ended); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("AwaitChange whose context ended: %v", err)
	}
}

func (h Harness) testWatch(t *testing.T) {
	topology := h.topology(2)
	topology.Driver.State = vendorsim.DriverAbsent
	n := open(t, h, topology)

	reports := make(chan string, 100) // far more than changes here
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		backend.Watch(ctx, n, 100*time.Millisecond, backend.Recovery{}, func(found backend.Found, err error) {
			if err != nil {
				reports <- "unavailable"
				return
			}
			states := []string{}
			for _, d := range found.Devices {
				state := fmt.Sprint(d.Index)
				if d.Health.Unhealthy {
					state += " unhealthy"
				}
				states = append(states, state)
			}
			reports <- strings.Join(states, ", ")
		})
	})
	defer watching.Wait()
	defer cancel()

	step := func(want string, change func(*vendorsim.Topology)) {
		t.Helper()
		if change != nil {
			n.change(change)
		}
		select {
		case got := <-reports:
			if got != want {
				t.Fatalf("report is %q, want %q", got, want)
			}
		case <-time.After(patience):
			t.Fatalf("no report, want %q", want)
		}
	}
	step("unavailable", nil)
	step("0, 1", func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
	step("0, 1 unhealthy", func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = true })
	step("0, 1", func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = false })
	step("1", func(topology *vendorsim.Topology) { topology.Cards[0].Lost = true })
	step("0, 1", func(topology *vendorsim.Topology) { topology.Cards[0].Lost = false })
	step("unavailable", func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverBroken })
	step("0, 1", func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
	time.Sleep(300 * time.Millisecond)
	if len(reports) > 0 {
		t.Errorf("report %q though nothing has changed", <-reports)
	}
}
