package sharing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// chip is position n of a board named after its position 0.
func chip(index int, board string, n int) accel.Device {
	d := accel.Device{Index: index, ID: accel.DeviceID(board), Model: "MR-V100", MemoryBytes: 16 << 30, NUMANode: n % 2, Board: board,
		Chip: n,
		PCI:  fmt.Sprintf("0000:%02x:00.0", index)}
	if n > 0 {
		d.ID = accel.DeviceID(fmt.Sprintf("%s-%d", board, n))
	}
	return d
}

// board returns so many chips, with indexes from first on.
func board(first int, name string, chips int) []accel.Device {
	var out []accel.Device
	for n := range chips {
		out = append(out, chip(first+n, name, n))
	}
	return out
}

func TestBoardsOfAnyChipCount(t *testing.T) {
	for chips := 1; chips <= 8; chips++ {
		devices := append(board(0, "GPU-a", chips), board(chips, "GPU-b", 2)...)
		cards := NewBoards(nil).Group(devices)
		if len(cards) != 2 {
			t.Fatalf("%d chips: got %d cards, want 2", chips, len(cards))
		}
		a := cards[0]
		if a.ID != "GPU-a" || a.Index != 0 || a.Health.Unhealthy || a.MemoryBytes != int64(chips)*16<<30 || len(a.Chips) != chips ||
			a.Chips[0] != "GPU-a" {
			t.Errorf("%d chips: got %+v", chips, a)
		}
		if cards[1].ID != "GPU-b" || cards[1].Index != chips {
			t.Errorf("%d chips: the second board is %+v", chips, cards[1])
		}
		if split := Split(devices); len(split) != chips+2 || !slices.Equal(split[0].Chips, []accel.DeviceID{"GPU-a"}) {
			t.Errorf("%d chips: split into %v", chips, split)
		}
	}
}

func TestBoardHasTheNUMANodesOfAllItsChips(t *testing.T) {
	devices := board(0, "GPU-a", 4)
	devices[3].NUMANode = accel.NoNUMA
	c := NewBoards(nil).Group(devices)[0]
	if c.NUMANode != 0 || !slices.Equal(c.NUMANodes, []int{0, 1}) {
		t.Errorf("got node %d, nodes %v; want 0 and [0 1]", c.NUMANode, c.NUMANodes)
	}
	alone := accel.Device{ID: "x", NUMANode: accel.NoNUMA}
	if c := Split([]accel.Device{alone})[0]; c.NUMANodes != nil {
		t.Errorf("an unknown node is listed: %v", c.NUMANodes)
	}
}

func TestBoardIsAsIllAsItsWorstChip(t *testing.T) {
	devices := board(0, "GPU-a", 2)
	devices[1].Health = accel.Health{Unhealthy: true, Reason: "ECC errors", Cause: "ecc"}
	want := accel.Health{Unhealthy: true, Reason: "chip 1 (GPU-a-1): ECC errors", Cause: "ecc"}
	boards := NewBoards(nil)
	if got := boards.Group(devices)[0].Health; got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	devices[1].Health = accel.Health{}
	if got := boards.Group(devices)[0].Health; got.Unhealthy {
		t.Errorf("all chips are well again, the board is not: %+v", got)
	}
}

// A chip that is lost leaves a board that takes no pods, whichever chip it is,
// over a restart too; the others do not vanish with it.
func TestOrphanChipStaysVisible(t *testing.T) {
	for _, lost := range []int{0, 1} {
		t.Run(fmt.Sprint("chip ", lost), func(t *testing.T) {
			devices := append(board(0, "GPU-a", 2), board(2, "GPU-b", 2)...)
			before := NewBoards(nil)
			was := before.Group(devices)[0]
			boards := NewBoards(before.Known())
			cards := boards.Group(slices.Delete(slices.Clone(devices), lost, lost+1))
			if len(cards) != 2 {
				t.Fatalf("got %d cards, want both boards", len(cards))
			}
			a := cards[0]
			if a.ID != was.ID || a.Index != was.Index+[]int{1, 0}[lost] || a.Model != was.Model || a.MemoryBytes != was.MemoryBytes ||
				!slices.Equal(a.Chips, was.Chips) || !slices.Equal(a.NUMANodes, was.NUMANodes) {
				t.Errorf("the board is now %+v, was %+v", a, was)
			}
			want := accel.Health{Unhealthy: true, Cause: accel.CauseLost,
				Reason: fmt.Sprintf("chip %d (%s) is missing: 1 of the board's 2 chips are present", lost, was.Chips[lost])}
			if a.Health != want {
				t.Errorf("got %+v, want %+v", a.Health, want)
			}
			if cards[1].Health.Unhealthy {
				t.Errorf("the other board is ill: %+v", cards[1].Health)
			}
			if got := boards.Group(devices); got[0].Health.Unhealthy {
				t.Errorf("the chip is back, the board is not: %+v", got[0].Health)
			}
		})
	}
}

// A backend that was made while the chip at position 0 was away knows the board
// by another name, or by the name of the chip that is there.
func TestBoardKeepsItsNameWhileItsFirstChipIsAway(t *testing.T) {
	for _, name := range []string{"board-7", "GPU-a-1"} {
		devices := append(board(0, "GPU-a", 3), board(3, "GPU-b", 2)...)
		before := NewBoards(nil)
		before.Group(devices)
		boards := NewBoards(before.Known())
		left := slices.Clone(devices[1:])
		left[0].Board, left[1].Board = name, name
		cards := boards.Group(left)
		if len(cards) != 2 || cards[0].ID != "GPU-a" || !cards[0].Health.Unhealthy || len(cards[0].Chips) != 3 {
			t.Errorf("%s: got %+v, want the board GPU-a, ill, and GPU-b", name, cards)
		}
		if cards = boards.Group(devices); len(cards) != 2 || cards[0].ID != "GPU-a" || cards[0].Health.Unhealthy {
			t.Errorf("%s: when the chip is back, got %+v", name, cards)
		}
		if diff := cmp.Diff(before.Known(), boards.Known()); diff != "" {
			t.Errorf("%s: remembered (-want +got):\n%s", name, diff)
		}
	}
}

// The other way round: the chip at position 0 comes later, and gives the board
// its name.
func TestMadeUpNameOfABoardIsForgotten(t *testing.T) {
	for _, name := range []string{"board-7", "GPU-a-1"} {
		devices := board(0, "GPU-a", 2)
		boards := NewBoards(nil)
		orphan := devices[1]
		orphan.Board = name
		if cards := boards.Group([]accel.Device{orphan}); len(cards) != 1 || !cards[0].Health.Unhealthy {
			t.Errorf("%s: got %+v", name, cards)
		}
		if cards := boards.Group(devices); len(cards) != 1 || cards[0].ID != "GPU-a" || cards[0].Health.Unhealthy {
			t.Errorf("%s: when the first chip comes, got %+v", name, cards)
		}
		if known := boards.Known(); len(known) != 1 || known[0].ID != "GPU-a" {
			t.Errorf("%s: remembered %+v", name, known)
		}
	}
}

func TestChipWithoutItsBoardsFirstIsIll(t *testing.T) {
	c := NewBoards(nil).Group([]accel.Device{chip(1, "GPU-a", 1)})
	if len(c) != 1 || c[0].ID != "GPU-a" || !c[0].Health.Unhealthy || !slices.Equal(c[0].Chips, []accel.DeviceID{"GPU-a", "GPU-a-1"}) {
		t.Errorf("got %+v", c)
	}
}

// The vendor sees the rest of a board as a card of its own.
func TestBoardThatLooksLikeASingleChip(t *testing.T) {
	boards := NewBoards(nil)
	boards.Group(board(0, "GPU-a", 2))
	rest := chip(0, "GPU-a", 0)
	rest.Board = ""
	c := boards.Group([]accel.Device{rest})
	if len(c) != 1 || !c[0].Health.Unhealthy || len(c[0].Chips) != 2 {
		t.Errorf("got %+v", c)
	}
}

func TestReplacedChipTakesThePlace(t *testing.T) {
	boards := NewBoards(nil)
	devices := board(0, "GPU-a", 2)
	boards.Group(devices)
	devices[1].ID = "GPU-new"
	c := boards.Group(devices)[0]
	if c.Health.Unhealthy || !slices.Equal(c.Chips, []accel.DeviceID{"GPU-a", "GPU-new"}) {
		t.Errorf("got %+v", c)
	}
	if got := boards.Known(); len(got) != 1 || len(got[0].Chips) != 2 {
		t.Errorf("remembered %+v", got)
	}
}

func TestGroupingDoesNotDependOnTheOrder(t *testing.T) {
	devices := append(board(0, "GPU-b", 3), board(3, "GPU-a", 2)...)
	devices = append(devices, accel.Device{Index: 9, ID: "GPU-alone", NUMANode: accel.NoNUMA})
	want := NewBoards(nil).Group(devices)
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		r.Shuffle(len(devices), func(i, j int) { devices[i], devices[j] = devices[j], devices[i] })
		if diff := cmp.Diff(want, NewBoards(nil).Group(slices.Clone(devices))); diff != "" {
			t.Fatal(diff)
		}
	}
}

func TestBoardsAreAsCloseAsTheirClosestChips(t *testing.T) {
	cards := NewBoards(nil).Group(append(board(0, "GPU-a", 2), board(2, "GPU-b", 2)...))
	got := CardLinks(cards, []accel.Link{
		{A: "GPU-a", B: "GPU-a-1", Score: accel.LinkBoard},
		{A: "GPU-a", B: "GPU-b", Score: accel.LinkSystem},
		{A: "GPU-a-1", B: "GPU-b", Score: accel.LinkSwitch},
		{A: "GPU-a-1", B: "GPU-gone", Score: accel.LinkSwitch},
	})
	if want := []accel.Link{{A: "GPU-a", B: "GPU-b", Score: accel.LinkSwitch}}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
