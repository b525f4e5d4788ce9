package iluvatar

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func wantSeats(t *testing.T, n *node, want map[int]seat) {
	t.Helper()
	if diff := cmp.Diff(want, n.seats(), cmp.AllowUnexported(seat{})); diff != "" {
		t.Errorf("seats (-want +got):\n%s", diff)
	}
}

func TestBoardsOfAnyNumberOfChips(t *testing.T) {
	for _, chips := range []int{2, 3, 4, 8} {
		n := start(t, boards(2, chips), backend.Options{})
		want := map[int]seat{}
		for i := range 2 * chips {
			want[i] = seat{string(n.id(i - i%chips)), i % chips}
		}
		wantSeats(t, n, want)
		for _, d := range n.found().Devices {
			if d.Health.Unhealthy {
				t.Errorf("a chip of a board with %d chips is unhealthy: %s", chips, d.Health.Reason)
			}
		}
	}
}

func TestSingleChipCardHasNoBoard(t *testing.T) {
	n := start(t, boards(2, 1), backend.Options{})
	wantSeats(t, n, map[int]seat{0: {}, 1: {}})
	// One that has a position nevertheless, and nobody beside it.
	topology := boards(1, 1)
	topology.Cards[0].Board = "alone"
	n = start(t, topology, backend.Options{})
	wantSeats(t, n, map[int]seat{0: {}})
}

func TestOrphanChipIsListedWithItsBoard(t *testing.T) {
	n := start(t, boards(2, 2), backend.Options{})
	first, second := string(n.id(0)), string(n.id(2))
	all := map[int]seat{0: {first, 0}, 1: {first, 1}, 2: {second, 0}, 3: {second, 1}}
	wantSeats(t, n, all)
	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Lost = true })
	for range 2 {
		wantSeats(t, n, map[int]seat{1: {first, 1}, 2: {second, 0}, 3: {second, 1}})
	}
	if h := n.found().Devices[0].Health; h.Unhealthy {
		t.Errorf("the chip that is there is unhealthy: %s", h.Reason)
	}
	n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Lost = false })
	wantSeats(t, n, all)
}

// The chip that names the board answers to its name, though it cannot be used.
func TestBoardIsNamedAfterAFaultyFirstChip(t *testing.T) {
	topology := boards(1, 2)
	fails(&topology.Cards[0], "nvmlDeviceGetMemoryInfo", codeUnknown)
	n := start(t, topology, backend.Options{})
	wantSeats(t, n, map[int]seat{1: {string(n.id(0)), 1}})
}

func TestOrphanChipOfABoardThatWasNeverKnown(t *testing.T) {
	lost := func(chips int) vendorsim.Topology {
		topology := boards(2, chips)
		topology.Cards[0].Lost = true
		return topology
	}
	t.Run("by the board's number", func(t *testing.T) {
		n := start(t, lost(3), backend.Options{})
		second := string(n.id(3))
		wantSeats(t, n, map[int]seat{1: {"board-256", 1}, 2: {"board-256", 2}, 3: {second, 0}, 4: {second, 1}, 5: {second, 2}})
		n.change(func(topology *vendorsim.Topology) { topology.Cards[0].Lost = false })
		first := string(n.id(0))
		wantSeats(t, n, map[int]seat{
			0: {first, 0}, 1: {first, 1}, 2: {first, 2}, 3: {second, 0}, 4: {second, 1}, 5: {second, 2},
		})
	})
	t.Run("by the chips beside it", func(t *testing.T) {
		topology := lost(3)
		topology.Library.Fail = vendorsim.Failures{"nvmlDeviceGetBoardId": codeNotSupported}
		n := start(t, topology, backend.Options{})
		first, second := string(n.id(1)), string(n.id(3))
		wantSeats(t, n, map[int]seat{1: {first, 1}, 2: {first, 2}, 3: {second, 0}, 4: {second, 1}, 5: {second, 2}})
	})
}

// Some drivers have one number for all boards, which must not make one board of
// them.
func TestBoardNumbersThatSayNothing(t *testing.T) {
	members := func(position int, ids ...uint32) []member {
		var out []member
		for i, id := range ids {
			c := &chip{}
			c.ID = accel.DeviceID(rune('a' + i))
			out = append(out, member{chip: c, position: position, id: id, hasID: true})
		}
		return out
	}
	b := newRoot(t).open(backend.Options{})
	orphans := members(1, 7, 7, 8)
	if err := b.seatOrphans(t.Context(), &library{}, orphans); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range orphans {
		got = append(got, m.chip.Board)
	}
	if diff := cmp.Diff([]string{"a", "b", "board-8"}, got); diff != "" {
		t.Errorf("boards of chips at one position (-want +got):\n%s", diff)
	}
	if h := orphans[1].chip.Health; !h.Unhealthy {
		t.Error("a chip whose board cannot be told takes pods")
	}
}

// A first chip that is alone because the other one is lost from the start is
// not taken for a card of one chip.
func TestFirstChipKnowsItsBoardAlone(t *testing.T) {
	topology := boards(1, 2)
	topology.Cards[1].Lost = true
	n := start(t, topology, backend.Options{})
	wantSeats(t, n, map[int]seat{0: {string(n.id(0)), 0}})
}

func TestSameBoardErrorsAreNotSwallowed(t *testing.T) {
	const call = "nvmlDeviceOnSameBoard"
	t.Run("one way", func(t *testing.T) {
		topology := boards(1, 2)
		fails(&topology.Cards[1], call, codeUnknown) // the second about the first
		n := start(t, topology, backend.Options{})
		wantSeats(t, n, map[int]seat{0: {string(n.id(0)), 0}, 1: {string(n.id(0)), 1}})
	})
	t.Run("by the board's number instead", func(t *testing.T) {
		topology := boards(2, 2)
		topology.Library.Fail = vendorsim.Failures{call: codeUnknown}
		n := start(t, topology, backend.Options{})
		first, second := string(n.id(0)), string(n.id(2))
		wantSeats(t, n, map[int]seat{0: {first, 0}, 1: {first, 1}, 2: {second, 0}, 3: {second, 1}})
	})
	both := vendorsim.Failures{call: codeUnknown, "nvmlDeviceGetBoardId": codeUnknown}
	t.Run("known from before", func(t *testing.T) {
		n := start(t, boards(1, 2), backend.Options{})
		want := n.seats()
		n.change(func(topology *vendorsim.Topology) { topology.Library.Fail = both })
		wantSeats(t, n, want)
	})
	t.Run("never known", func(t *testing.T) {
		topology := boards(1, 2)
		topology.Library.Fail = both
		n := start(t, topology, backend.Options{})
		found := n.found()
		if len(found.Devices) != 2 {
			t.Fatalf("devices are %v, want both chips", found.Devices)
		}
		h := found.Devices[1].Health
		if !h.Unhealthy || h.Cause != "unreachable" || !strings.Contains(h.Reason, call+"(1, 0): unknown error (999)") {
			t.Errorf("health is %+v, want one that tells of the call", h)
		}
		n.change(func(topology *vendorsim.Topology) { topology.Library.Fail = nil })
		wantSeats(t, n, map[int]seat{0: {string(n.id(0)), 0}, 1: {string(n.id(0)), 1}})
	})
	t.Run("position", func(t *testing.T) {
		topology := boards(1, 2)
		fails(&topology.Cards[1], "ixmlDeviceGetBoardPosition", codeUnknown)
		n := start(t, topology, backend.Options{})
		h := n.found().Devices[1].Health
		if !h.Unhealthy || !strings.Contains(h.Reason, "ixmlDeviceGetBoardPosition(1)") {
			t.Errorf("health is %+v, want one that tells of the call", h)
		}
	})
}
