// Package backendtest has the suite that every vendor's backend passes, on the
// vendor's simulated hardware. A vendor's test is one line:
//
//	backendtest.Run(t, harness)
//
// What a vendor need not have (boards, links, labels, events) is tested where it
// is there: the harness says so, or the backend has the methods.
//
//nolint:thelper // the functions with a Harness are tests, which Run names
package backendtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Harness is what the suite must know of a vendor.
type Harness struct {
	// Cards returns n good cards of the vendor with memoryMiB MiB each.
	Cards func(n int, memoryMiB int64) []vendorsim.Card
	// Boards returns the chips of boards of the vendor, board by board and in
	// the order of their positions. It is nil for a vendor whose cards have one
	// chip each.
	Boards func(boards, chips int, memoryMiB int64) []vendorsim.Card
	// ID is the identity of the card with that uuid.
	ID func(uuid string) accel.DeviceID
	// CardCall is a function of the vendor's library without which a card
	// cannot be described, and FailCode a code that it can fail with.
	CardCall string
	FailCode int
	// LinkCall is the function of the vendor's library that tells how near two
	// cards are to each other over PCIe, "" for a library that does not tell. It
	// may be asked about either of the two first.
	LinkCall string
	// Open returns a new backend with hardware of its own, whose topology is
	// the file at the returned path. It sets DriverRoot and leaves the other
	// options, which are the suite's, as they are. The suite closes the backend;
	// Open may do so as well when the test ends.
	Open func(t *testing.T, first vendorsim.Topology, o backend.Options) (b backend.Backend, topologyPath string)
}

// Run tests the vendor's backend.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, one := range []struct {
		name string
		test func(*testing.T, Harness)
	}{
		{"describes devices", testDescribes},
		{"order and ids are stable", testStable},
		{"health changes and recovers", testHealth},
		{"causes are ignored and heeded", testIgnore},
		{"a lost device leaves the others", testLost},
		{"a failing call concerns one device", testFailingCall},
		{"a swapped device is seen", testSwapped},
		{"devices come and go", testHotPlug},
		{"driver absent, then there", testDriverLate},
		{"driver goes and comes back", testDriverReload},
		{"broken driver", testDriverBroken},
		{"duplicate uuids are named", testDuplicates},
		{"impossible devices are named", testImpossible},
		{"boards", testBoards},
		{"links", testLinks},
		{"a slow library is waited for", testSlow},
		{"a hung library keeps nobody", testHung},
		{"a card that hangs is a fault of its own", testHungCard},
		{"a card that hangs with the library's lock", testHungLock},
		{"watched while a card hangs", testWatchHungCard},
		{"a canceled context ends a discovery", testCanceled},
		{"edits name the devices", testEdits},
		{"edits follow the options", testEditsOptions},
		{"edits refuse what was never found", testEditsRefuse},
		{"edits need no library", testEditsWhileHung},
		{"labels describe the node", testLabels},
		{"measures what is in use", testMeasure},
		{"measures beside a card that hangs", testMeasureHungCard},
		{"measures while the library comes and goes", testMeasureInUse},
		{"close is final", testClose},
		{"close while in use", testCloseInUse},
		{"safe for concurrent use", testConcurrent},
		{"a change wakes whoever waits for one", testNotifier},
		{"watched from absence to recovery", testWatch},
		{"watched until trusted again", testRecovery},
	} {
		t.Run(one.name, func(t *testing.T) { one.test(t, h) })
	}
}

// patience is how long the suite waits for what must happen, generous so that
// a loaded machine does not fail it.
const patience = 20 * time.Second

// callLimit is how long a call may take where one hangs. Each that does costs that much;
// a busy machine gives a test no processor for some 100 ms.
const callLimit = 2 * time.Second

// node is a backend and the hardware that it finds.
type node struct {
	backend.Backend
	t        *testing.T
	path     string
	topology vendorsim.Topology
}

func open(t *testing.T, h Harness, topology vendorsim.Topology) *node {
	t.Helper()
	return openWith(t, h, topology, backend.Options{})
}

func openWith(t *testing.T, h Harness, topology vendorsim.Topology, o backend.Options) *node {
	t.Helper()
	if o.CallTimeout == 0 {
		o.CallTimeout = patience
	}
	o.SysfsRoot = sysfs(t, topology.Cards)
	n := &node{t: t, topology: topology.Clone()}
	n.Backend, n.path = h.Open(t, topology, o)
	t.Cleanup(func() {
		// A library that hangs is brought back, so that it can be closed.
		n.change(calm)
		if err := n.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return n
}

// sysfs returns a folder that tells of the cards what the kernel would, for
// vendors whose library does not tell a card's NUMA node.
func sysfs(t *testing.T, cards []vendorsim.Card) string {
	t.Helper()
	root := t.TempDir()
	for _, c := range cards {
		if c.PCI == "" {
			continue
		}
		dir := filepath.Join(root, "bus/pci/devices", c.PCI)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "numa_node"), fmt.Appendf(nil, "%d\n", c.NUMA), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
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
	return machine(h.Cards(cards, 16384))
}

// machine is a machine with these cards, each in a slot of its own.
func machine(cards []vendorsim.Card) vendorsim.Topology {
	for i := range cards {
		cards[i].PCI = fmt.Sprintf("%04x:%02x:00.0", i/0x80, 0x10+i%0x80)
	}
	return vendorsim.Topology{Driver: vendorsim.Driver{Version: "1.3.0"}, Cards: cards}
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

func testDescribes(t *testing.T, h Harness) {
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
			PCI:         c.PCI,
			Health:      accel.Health{Unhealthy: c.Unhealthy},
		})
	}
	for i := range found.Devices {
		d := &found.Devices[i]
		if d.Health.Unhealthy != (d.Health.Reason != "") || d.Health.Unhealthy != (d.Health.Cause != "") {
			t.Errorf("device %d: unhealthy %v with reason %q and cause %q", i, d.Health.Unhealthy, d.Health.Reason, d.Health.Cause)
		}
		d.Health.Reason, d.Health.Cause = "", "" // theirs are for the vendor to word
	}
	if diff := cmp.Diff(want, found.Devices); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

func testStable(t *testing.T, h Harness) {
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

func testHealth(t *testing.T, h Harness) {
	n := open(t, h, h.topology(2))
	before := n.found()
	for range 2 {
		n.change(func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = true })
		sick := n.found()
		if h := sick.Devices[1].Health; sick.Devices[0].Health.Unhealthy || !h.Unhealthy || h.Reason == "" || h.Cause == "" {
			t.Errorf("health is %+v and %+v, want the second unhealthy with reason and cause", sick.Devices[0].Health, h)
		}
		n.change(func(topology *vendorsim.Topology) { topology.Cards[1].Unhealthy = false })
		if after := n.found(); !after.Equal(before) {
			t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
		}
	}
}

// sickCause returns the cause of the ill health that a topology can give a card.
func (h Harness) sickCause(t *testing.T) string {
	t.Helper()
	n := open(t, h, h.topology(1))
	n.found()
	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Unhealthy = true })
	return n.found().Devices[0].Health.Cause
}

func testIgnore(t *testing.T, h Harness) {
	cause := h.sickCause(t)
	for name, tt := range map[string]struct {
		options backend.Options
		sick    bool
	}{
		"the cause is ignored":           {backend.Options{Ignore: []string{cause}}, false},
		"another cause is ignored":       {backend.Options{Ignore: []string{"another-cause"}}, true},
		"all are ignored":                {backend.Options{Ignore: []string{"all"}}, false},
		"all but this cause are ignored": {backend.Options{Ignore: []string{"all"}, Heed: []string{cause}}, true},
		"none is ignored":                {backend.Options{Ignore: []string{}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			n := openWith(t, h, h.topology(1), tt.options)
			n.found()
			n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Unhealthy = true })
			if got := n.found().Devices[0].Health; got.Unhealthy != tt.sick {
				t.Errorf("health with cause %s is %+v, want unhealthy %v", cause, got, tt.sick)
			}
		})
	}
}

func testLost(t *testing.T, h Harness) {
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

func testFailingCall(t *testing.T, h Harness) {
	topology := h.topology(3)
	n := open(t, h, topology)
	before := n.found()
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[2].Calls.Fail = vendorsim.Failures{h.CardCall: h.FailCode}
	})
	found := n.found()
	wantIDs(t, h, found, topology.Cards[0], topology.Cards[1])
	wantFault(t, found, 2, h.ID(topology.Cards[2].UUID), h.CardCall, fmt.Sprint(h.FailCode))
	n.change(func(topology *vendorsim.Topology) { topology.Cards[2].Calls.Fail = nil })
	if after := n.found(); !after.Equal(before) {
		t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
	}
}

// testSwapped puts another card into the place of one: as many cards as before,
// with another uuid.
func testSwapped(t *testing.T, h Harness) {
	cards := h.topology(4).Cards
	topology := machine(cards[:3])
	n := open(t, h, topology)
	old := n.found().Devices[1].ID
	n.change(func(topology *vendorsim.Topology) { topology.Cards[1].UUID = cards[3].UUID })
	found := n.found()
	wantIDs(t, h, found, topology.Cards[0], cards[3], topology.Cards[2])
	if len(found.Faults) != 0 {
		t.Errorf("faults are %v, want none", found.Faults)
	}
	for _, l := range found.Links {
		if l.A == old || l.B == old {
			t.Errorf("a link of the card that is gone: %+v", l)
		}
	}
	if _, err := n.Edits(h.ID(cards[3].UUID)); err != nil {
		t.Errorf("Edits of the card that came: %v", err)
	}
	if _, err := n.Edits(old); err == nil {
		t.Error("Edits of the card that is gone")
	}
}

func testHotPlug(t *testing.T, h Harness) {
	topology := h.topology(3)
	three := topology.Cards
	topology.Cards = three[:1]
	n := open(t, h, topology)
	for _, count := range []int{1, 3, 2, 3} {
		n.change(func(topology *vendorsim.Topology) { topology.Cards = slices.Clone(three[:count]) })
		wantIDs(t, h, n.found(), three[:count]...)
	}
}

func testDriverLate(t *testing.T, h Harness) {
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

func testDriverReload(t *testing.T, h Harness) {
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

func testDriverBroken(t *testing.T, h Harness) {
	topology := h.topology(1)
	topology.Driver.State = vendorsim.DriverBroken
	n := open(t, h, topology)
	n.unavailable()
	n.change(func(topology *vendorsim.Topology) { topology.Driver.State = vendorsim.DriverLoaded })
	wantIDs(t, h, n.found(), topology.Cards...)
}

func testDuplicates(t *testing.T, h Harness) {
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

func testImpossible(t *testing.T, h Harness) {
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

func testBoards(t *testing.T, h Harness) {
	if h.Boards == nil {
		for _, d := range open(t, h, h.topology(2)).found().Devices {
			if d.Board != "" || d.Chip != 0 {
				t.Errorf("device %d is chip %d of board %q, the vendor has no boards", d.Index, d.Chip, d.Board)
			}
		}
		return
	}
	for _, chips := range []int{1, 2, 4} {
		t.Run(fmt.Sprintf("of %d", chips), func(t *testing.T) {
			topology := machine(h.Boards(2, chips, 16384))
			slices.Reverse(topology.Cards) // the chip that names the board is not the first to be met
			n := open(t, h, topology)
			check := func(gone ...int) {
				t.Helper()
				for _, d := range n.found().Devices {
					if slices.Contains(gone, d.Index) {
						t.Errorf("device %d is listed", d.Index)
					}
					position := chips - 1 - d.Index%chips
					first := d.Index - d.Index%chips + chips - 1
					want := ""
					if chips > 1 {
						want = string(h.ID(topology.Cards[first].UUID))
					}
					if d.Board != want || d.Chip != position || d.Health.Unhealthy {
						t.Errorf("device %d is chip %d of board %q with health %+v, want chip %d of board %q, healthy",
							d.Index, d.Chip, d.Board, d.Health, position, want)
					}
				}
			}
			check()
			// The board keeps its name without the chip that it has it from.
			lost := chips - 1
			n.change(func(topology *vendorsim.Topology) { topology.Cards[lost].Lost = true })
			check(lost)
			n.change(func(topology *vendorsim.Topology) { topology.Cards[lost].Lost = false })
			check()
		})
	}
}

func testLinks(t *testing.T, h Harness) {
	if h.LinkCall == "" {
		if found := open(t, h, h.topology(2)).found(); len(found.Links) != 0 {
			t.Errorf("links are %v, the library tells of none", found.Links)
		}
		return
	}
	topology := h.topology(4)
	slices.Reverse(topology.Cards) // ids are not in the order of the cards
	topology = machine(topology.Cards)
	topology.Cards[0].Switch, topology.Cards[1].Switch = "one", "one"
	topology.Cards[3].NUMA = 1
	score := func(found backend.Found, a, b int) int {
		t.Helper()
		one, two := h.ID(topology.Cards[a].UUID), h.ID(topology.Cards[b].UUID)
		for _, l := range found.Links {
			if l.A == min(one, two) && l.B == max(one, two) {
				return l.Score
			}
		}
		t.Errorf("no link between cards %d and %d", a, b)
		return 0
	}
	check := func(found backend.Found) {
		t.Helper()
		if len(found.Links) != 6 {
			t.Fatalf("%d links between 4 cards, want 6: %v", len(found.Links), found.Links)
		}
		for i, l := range found.Links {
			if l.A >= l.B || i > 0 && (found.Links[i-1].A > l.A || found.Links[i-1].A == l.A && found.Links[i-1].B >= l.B) {
				t.Errorf("links are not in order, lower ids first: %v", found.Links)
			}
		}
		if one, bridge, far := score(found, 0, 1), score(found, 0, 2), score(found, 2, 3); one <= bridge || bridge <= far ||
			far < accel.LinkSystem {
			t.Errorf("scores behind one switch, on one NUMA node and on two are %d, %d and %d", one, bridge, far)
		}
	}
	n := open(t, h, topology)
	first := n.found()
	check(first)

	// How cards are connected is asked once.
	n.change(func(topology *vendorsim.Topology) { topology.Library.Fail = vendorsim.Failures{h.LinkCall: h.FailCode} })
	if again := n.found(); !again.Equal(first) {
		t.Errorf("links are not remembered:\n%s", cmp.Diff(first.Links, again.Links))
	}

	// A library that knows a connection from one side alone, whichever it is.
	oneWay := topology.Clone()
	oneWay.Links = []vendorsim.Link{{A: 0, B: 2, Lanes: 1, OneWay: true}, {A: 3, B: 2, Lanes: 1, OneWay: true}}
	found := open(t, h, oneWay).found()
	if len(found.Links) != 6 || score(found, 0, 2) < accel.LinkSystem || score(found, 2, 3) < accel.LinkSystem {
		t.Errorf("with connections known from one side alone, links are %v", found.Links)
	}

	// A library that fails to tell leaves the devices.
	failing := topology.Clone()
	failing.Library.Fail = vendorsim.Failures{h.LinkCall: h.FailCode}
	n = open(t, h, failing)
	found = n.found()
	wantIDs(t, h, found, topology.Cards...)
	if len(found.Links) != 0 {
		t.Errorf("links are %v though the library fails to tell", found.Links)
	}
	n.change(func(topology *vendorsim.Topology) { topology.Library.Fail = nil })
	check(n.found())
}

func testSlow(t *testing.T, h Harness) {
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

// calm takes all delays back.
func calm(topology *vendorsim.Topology) {
	topology.Library.Delay, topology.Library.OneLock = 0, false
	for i := range topology.Cards {
		topology.Cards[i].Calls.Delay, topology.Cards[i].Calls.Slow = 0, nil
	}
}

// revive lets calls return at once again, and discovers until that works: the
// call that hung has to return first.
func (n *node) revive() backend.Found {
	n.t.Helper()
	n.change(calm)
	end := time.Now().Add(patience)
	for {
		found, err := n.Discover(n.t.Context())
		if err == nil && !slices.ContainsFunc(found.Faults,
			func(f backend.Fault) bool { return strings.Contains(f.Err.Error(), "did not answer") }) {
			return found
		}
		if time.Now().After(end) {
			n.t.Fatalf("Discover, with the library answering again: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func testHung(t *testing.T, h Harness) {
	topology := h.topology(2)
	n := openWith(t, h, topology, backend.Options{CallTimeout: callLimit})
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
	if d := time.Since(start); d > more*callLimit/2 {
		t.Errorf("%d discoveries after the first took %v, they waited for a library that hangs", more, d)
	}
	if g := runtime.NumGoroutine(); g > goroutines+more/2 {
		t.Errorf("%d goroutines became %d over %d discoveries", goroutines, g, more)
	}
	if after := n.revive(); !after.Equal(before) {
		t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
	}
}

// hangs hangs a card, all calls about it or those of one function.
func (h Harness) hangs(card int) map[string]func(*vendorsim.Topology) {
	return map[string]func(*vendorsim.Topology){
		"every call": func(topology *vendorsim.Topology) { topology.Cards[card].Calls.Delay = time.Hour },
		"one function": func(topology *vendorsim.Topology) {
			topology.Cards[card].Calls.Slow = vendorsim.Delays{h.CardCall: time.Hour}
		},
	}
}

// testHungCard hangs one card: the others are described, their health is asked,
// and discoveries do not wait for the card again.
func testHungCard(t *testing.T, h Harness) {
	for name, hang := range h.hangs(1) {
		t.Run(name, func(t *testing.T) {
			topology := h.topology(4)
			n := openWith(t, h, topology, backend.Options{CallTimeout: callLimit})
			before := n.revive()
			n.change(hang)
			for range 3 {
				found := n.found()
				wantIDs(t, h, found, topology.Cards[0], topology.Cards[2], topology.Cards[3])
				wantFault(t, found, 1, h.ID(topology.Cards[1].UUID), "did not answer within "+callLimit.String())
			}
			n.change(func(topology *vendorsim.Topology) { topology.Cards[2].Unhealthy = true })
			if found := n.found(); !found.Devices[1].Health.Unhealthy || found.Devices[0].Health.Unhealthy {
				t.Errorf("health of the others is %+v and %+v, want the second unhealthy", found.Devices[0].Health, found.Devices[1].Health)
			}
			n.change(func(topology *vendorsim.Topology) { topology.Cards[2].Unhealthy = false })
			if _, err := n.Edits(before.Devices[3].ID); err != nil {
				t.Errorf("Edits of a device beside one that hangs: %v", err)
			}
			if after := n.revive(); !after.Equal(before) {
				t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
			}
		})
	}
}

// testHungLock hangs one card in a library that answers nothing else meanwhile. The
// card is a fault; nothing is said against the others.
func testHungLock(t *testing.T, h Harness) {
	topology := h.topology(4)
	n := openWith(t, h, topology, backend.Options{CallTimeout: callLimit})
	before := n.revive()
	n.change(func(topology *vendorsim.Topology) {
		topology.Library.OneLock = true
		topology.Cards[1].Calls.Slow = vendorsim.Delays{h.CardCall: time.Hour}
	})
	found := n.found()
	wantIDs(t, h, found, topology.Cards[0])
	wantFault(t, found, 1, h.ID(topology.Cards[1].UUID), h.CardCall+"(1) did not answer within "+callLimit.String())
	for i, card := range []int{2, 3} {
		if len(found.Unasked) != 2 || found.Unasked[i].ID != h.ID(topology.Cards[card].UUID) {
			t.Errorf("not asked are %v, want cards 2 and 3", found.Unasked)
		}
	}
	for range 2 {
		if _, err := n.Discover(t.Context()); backend.Unavailable(err) == nil || !backend.Unavailable(err).Silent {
			t.Errorf("Discover = %v, want that the library does not answer", err)
		}
	}
	if after := n.revive(); !after.Equal(before) {
		t.Errorf("after recovery:\n%s", cmp.Diff(before.Devices, after.Devices))
	}
}

// testWatchHungCard watches while one card hangs: alone, with the library's lock,
// and again soon after it was trusted.
func testWatchHungCard(t *testing.T, h Harness) {
	const limit, dwell = 5 * time.Second, 500 * time.Millisecond // a busy machine must not look like a card that hangs
	topology := h.topology(3)
	n := openWith(t, h, topology, backend.Options{CallTimeout: limit})
	n.revive()
	reports := make(chan string, 1000) // far more than changes here
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() {
		backend.Watch(ctx, n, 50*time.Millisecond, backend.Recovery{After: dwell}, func(found backend.Found, err error) {
			if err != nil {
				t.Errorf("found nothing: %v", err)
				return
			}
			var states []string
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
	// until waits for a report, and wants no other one but these before it.
	until := func(want string, before ...string) time.Time {
		t.Helper()
		for end := time.After(patience); ; {
			select {
			case got := <-reports:
				if got == want {
					return time.Now()
				}
				if !slices.Contains(before, got) {
					t.Fatalf("report is %q, want %q, or before that %q", got, want, before)
				}
			case <-end:
				t.Fatalf("no report, want %q", want)
			}
		}
	}
	until("0, 1, 2")
	for range 2 {
		n.change(func(topology *vendorsim.Topology) { topology.Cards[1].Calls.Delay = time.Hour })
		until("0, 2", "0, 1, 2")
		n.change(func(topology *vendorsim.Topology) { topology.Cards[2].Unhealthy = true })
		until("0, 2 unhealthy", "0, 2")
		n.change(func(topology *vendorsim.Topology) { topology.Cards[2].Unhealthy = false })
		until("0, 2", "0, 2 unhealthy")
		n.change(func(topology *vendorsim.Topology) { topology.Library.OneLock = true })
		time.Sleep(limit + time.Second) // nothing is answered; the others count as they were
		n.change(calm)
		well := until("0, 1 unhealthy, 2", "0, 2")
		if d := until("0, 1, 2", "0, 1 unhealthy, 2").Sub(well); d < dwell-100*time.Millisecond {
			t.Errorf("a card that hung is trusted again after %v, want %v at least", d, dwell)
		}
	}
}

func testCanceled(t *testing.T, h Harness) {
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

func testEdits(t *testing.T, h Harness) {
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

func testEditsOptions(t *testing.T, h Harness) {
	n := openWith(t, h, h.topology(2), backend.Options{
		HostDriverRoot: "/run/driver", DevRoot: t.TempDir(), IndexInEnv: true, CDIKind: "example.com/device",
	})
	found := n.found()
	e, err := n.Edits(found.Devices[1].ID)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range e.Env {
		if v != "1" {
			t.Errorf("%s=%s of device 1, want its index", k, v)
		}
	}
	for _, d := range e.DeviceNodes {
		if d.HostPath != "/run/driver"+d.Path {
			t.Errorf("device node %s is %s on the host, want it in the host's driver root", d.Path, d.HostPath)
		}
	}
	for _, d := range e.CDIDevices {
		if d.Kind != "example.com/device" {
			t.Errorf("CDI device %s is not of the kind that was asked for", d)
		}
	}
	if !slices.IsSorted(e.ReplicaEnv) {
		t.Errorf("variables for unit ids are not in order: %v", e.ReplicaEnv)
	}
}

func testEditsRefuse(t *testing.T, h Harness) {
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

func testEditsWhileHung(t *testing.T, h Harness) {
	n := openWith(t, h, h.topology(1), backend.Options{CallTimeout: callLimit})
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

var (
	labelKey   = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	labelValue = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
)

func testLabels(t *testing.T, h Harness) {
	topology := h.topology(3)
	topology.Cards[1].Model = "Another (model) with a name of its own, and a long one at that"
	topology.Cards[2].Unhealthy = true
	n := open(t, h, topology)
	labeler, ok := n.Backend.(backend.Labeler)
	if !ok {
		return // the ability is optional
	}
	unshared := backend.Sharing{Replicas: 1}
	if labels := labeler.Labels(unshared); len(labels) != 0 {
		t.Errorf("labels before any discovery: %v", labels)
	}
	n.found()
	first := labeler.Labels(unshared)
	if len(first) == 0 {
		t.Error("no labels")
	}
	vendor := accel.VendorNamed(n.Vendor())
	permitted, choosing := regexp.MustCompile("^("+vendor.Labels+")$"), regexp.MustCompile("^("+vendor.ChoosingLabels+")$")
	check := func(labels map[string]string) {
		t.Helper()
		for k, v := range labels {
			if !labelKey.MatchString(k) || !labelValue.MatchString(v) {
				t.Errorf("%s=%q is no label", k, v)
			}
			if !permitted.MatchString(k) || choosing.MatchString(k) {
				t.Errorf("the table of vendors does not permit label %s", k)
			}
		}
	}
	check(first)
	check(labeler.Labels(backend.Sharing{Replicas: 4}))
	check(labeler.Labels(backend.Sharing{Replicas: 4, Renamed: true}))
	if !slices.Contains(slices.Collect(maps.Values(first)), "3") {
		t.Errorf("no label tells how many devices there are, healthy or not: %v", first)
	}
	for range 5 {
		n.found()
		if diff := cmp.Diff(first, labeler.Labels(unshared)); diff != "" {
			t.Errorf("labels change though nothing has changed:\n%s", diff)
		}
	}
	// They are those of a node whatever the order of its models.
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[0].Model, topology.Cards[1].Model = topology.Cards[1].Model, topology.Cards[0].Model
	})
	n.found()
	if diff := cmp.Diff(first, labeler.Labels(unshared)); diff != "" {
		t.Errorf("labels follow the model that the fewest devices are of:\n%s", diff)
	}
	n.change(func(topology *vendorsim.Topology) { topology.Cards = nil })
	n.found()
	if labels := labeler.Labels(unshared); len(labels) != 0 {
		t.Errorf("labels of a node without devices: %v", labels)
	}
}

func testClose(t *testing.T, h Harness) {
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

func testCloseInUse(t *testing.T, h Harness) {
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

func testConcurrent(t *testing.T, h Harness) {
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

func testNotifier(t *testing.T, h Harness) {
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

func testWatch(t *testing.T, h Harness) {
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

// testRecovery watches a device that is ill for a moment.
func testRecovery(t *testing.T, h Harness) {
	const dwell = 500 * time.Millisecond
	type report struct {
		driver string
		health accel.Health
	}
	watch := func(t *testing.T, policy backend.Recovery) (n *node, next func() report) {
		t.Helper()
		n = open(t, h, h.topology(1))
		reports := make(chan report, 100) // far more than changes here
		ctx, cancel := context.WithCancel(t.Context())
		var watching sync.WaitGroup
		watching.Go(func() {
			backend.Watch(ctx, n, 50*time.Millisecond, policy, func(found backend.Found, err error) {
				if err != nil || len(found.Devices) != 1 {
					t.Errorf("found %v, %v", found, err)
					return
				}
				reports <- report{found.Driver, found.Devices[0].Health}
			})
		})
		t.Cleanup(watching.Wait)
		t.Cleanup(cancel)
		return n, func() report {
			t.Helper()
			select {
			case r := <-reports:
				return r
			case <-time.After(patience):
				t.Fatal("no report")
				return report{}
			}
		}
	}
	// fall makes the device ill and well again, and returns the cause.
	fall := func(t *testing.T, n *node, next func() report) string {
		t.Helper()
		if r := next(); r.health.Unhealthy {
			t.Fatalf("ill from the start: %+v", r.health)
		}
		n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Unhealthy = true })
		r := next()
		if !r.health.Unhealthy {
			t.Fatal("the device is not reported as ill")
		}
		n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Unhealthy = false })
		return r.health.Cause
	}
	t.Run("after a while", func(t *testing.T) {
		n, next := watch(t, backend.Recovery{After: dwell})
		cause := fall(t, n, next)
		start := time.Now()
		for r := next(); r.health.Unhealthy; r = next() {
			if r.health.Cause != cause {
				t.Errorf("cause became %q, was %q", r.health.Cause, cause)
			}
		}
		if d := time.Since(start); d < dwell {
			t.Errorf("trusted again after %v, want %v at least", d, dwell)
		}
	})
	t.Run("never", func(t *testing.T) {
		n, next := watch(t, backend.Recovery{Never: []string{"*"}})
		fall(t, n, next)
		time.Sleep(dwell)
		n.change(func(topology *vendorsim.Topology) { topology.Driver.Version = "2.0.0" }) // for one more report
		for r := (report{}); r.driver != "2.0.0"; {
			if r = next(); !r.health.Unhealthy {
				t.Fatal("the device is trusted again")
			}
		}
	})
}
