package sharing

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Card is what a resource gives out as one: a chip, or a board with all of its
// chips.
type Card struct {
	// Device describes the card. For a board, ID, Index, Model, PCI and
	// NUMANode are those of the chip at position 0, MemoryBytes is the sum over
	// all chips and Health the worst of them. While that chip is away, Index is
	// that of the first chip that is there: the vendor may have given the
	// number of the other to somebody else.
	accel.Device
	// Chips are the ids of the chips that the card is made of, in the order of
	// their positions; those of a board that are away as well. There is at
	// least one.
	Chips []accel.DeviceID
	// NUMANodes are the NUMA nodes of all chips, ascending, without those that
	// are not known.
	NUMANodes []int
}

// Split returns a card for each chip.
func Split(chips []accel.Device) []Card {
	out := make([]Card, 0, len(chips))
	for _, d := range chips {
		out = append(out, cardOf(d))
	}
	return out
}

func cardOf(d accel.Device) Card {
	c := Card{Device: d, Chips: []accel.DeviceID{d.ID}}
	if d.NUMANode >= 0 {
		c.NUMANodes = []int{d.NUMANode}
	}
	return c
}

// Board is what is remembered of a board.
type Board struct {
	// ID is the id of the chip at position 0, which is the board's.
	ID accel.DeviceID `json:"id"`
	// Model is that of this chip when it was last seen.
	Model string      `json:"model,omitempty"`
	Chips []BoardChip `json:"chips"`
}

// BoardChip is what is remembered of a chip on a board.
type BoardChip struct {
	Chip        int            `json:"chip"`
	ID          accel.DeviceID `json:"id"`
	MemoryBytes int64          `json:"memoryBytes,omitempty"`
	NUMANode    int            `json:"numa"`
}

// Boards groups chips into boards and remembers which chips a board had, so
// that a board that lost one is not taken for a smaller board. It is not safe
// for concurrent use.
type Boards struct {
	known map[accel.DeviceID]*Board
}

// NewBoards returns a Boards that remembers what Known of another returned, nil
// for nothing.
func NewBoards(known []Board) *Boards {
	b := &Boards{known: make(map[accel.DeviceID]*Board, len(known))}
	for _, k := range known {
		k.Chips = slices.Clone(k.Chips)
		b.known[k.ID] = &k
	}
	return b
}

// Known returns what is remembered, in ascending order of ID.
func (b *Boards) Known() []Board {
	out := make([]Board, 0, len(b.known))
	for _, k := range b.known {
		c := *k
		c.Chips = slices.Clone(k.Chips)
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b Board) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// Chips returns the chips that were seen on the board with that id, in the order
// of their positions, or the id alone when it is not a board's.
func (b *Boards) Chips(id accel.DeviceID) []accel.DeviceID {
	k := b.known[id]
	if k == nil {
		return []accel.DeviceID{id}
	}
	out := make([]accel.DeviceID, 0, len(k.Chips))
	for _, c := range k.Chips {
		out = append(out, c.ID)
	}
	return out
}

// Group returns a card for each board and for each chip that is alone on its
// board, in ascending order of Index and then ID, and remembers the boards. A
// board of which a remembered position is empty is unhealthy; a chip that
// stands where another one was has replaced it. A board of which no chip is
// there is not returned.
//
// While the chip at position 0 is away, a backend that has never seen it makes
// up a name for the board. The board keeps the name that is remembered then.
func (b *Boards) Group(chips []accel.Device) []Card {
	var out []Card
	firsts := map[accel.DeviceID]bool{}
	for _, d := range chips {
		if d.Chip == 0 {
			firsts[d.ID] = true
		}
	}
	homes := b.homes()
	boards := map[accel.DeviceID][]accel.Device{}
	for _, d := range chips {
		id := accel.DeviceID(d.Board)
		if id == "" && b.known[d.ID] != nil {
			// The other chips are away, so the vendor sees a chip on its own.
			id = d.ID
		}
		if home, ok := homes[d.ID]; ok && id != "" && !firsts[id] {
			id = home
		}
		if id == "" {
			out = append(out, cardOf(d))
			continue
		}
		boards[id] = append(boards[id], d)
	}
	for id, present := range boards {
		out = append(out, b.card(id, present))
	}
	// What was remembered under another name of a board that is here.
	for id, k := range b.known {
		if boards[id] == nil && slices.ContainsFunc(k.Chips, func(c BoardChip) bool {
			return slices.ContainsFunc(chips, func(d accel.Device) bool { return d.ID == c.ID })
		}) {
			delete(b.known, id)
		}
	}
	slices.SortFunc(out, func(a, b Card) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID)) })
	return out
}

// homes returns the remembered board of each chip.
func (b *Boards) homes() map[accel.DeviceID]accel.DeviceID {
	out := map[accel.DeviceID]accel.DeviceID{}
	for id, k := range b.known {
		for _, c := range k.Chips {
			// Files may hold a chip twice; of two names the lower counts.
			if other, twice := out[c.ID]; !twice || id < other {
				out[c.ID] = id
			}
		}
	}
	return out
}

// card returns the card of the board with that id, of which these chips are
// there.
func (b *Boards) card(id accel.DeviceID, present []accel.Device) Card {
	slices.SortFunc(present, func(a, b accel.Device) int {
		return cmp.Or(cmp.Compare(a.Chip, b.Chip), cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID))
	})
	first := present[0]
	c := Card{Device: first}
	c.ID, c.Board, c.Chip, c.MemoryBytes, c.Health = id, string(id), 0, 0, accel.Health{}
	k := b.known[id]
	if k == nil {
		k = &Board{ID: id, Model: first.Model}
		b.known[id] = k
	}
	if first.Chip == 0 {
		k.Model = first.Model
	} else { // what describes the board is away
		c.Model, c.PCI, c.NUMANode = cmp.Or(k.Model, first.Model), "", accel.NoNUMA
	}
	missing := slices.Clone(k.Chips)
	k.Chips = nil
	for _, d := range present {
		missing = slices.DeleteFunc(missing, func(m BoardChip) bool { return m.Chip == d.Chip || m.ID == d.ID })
		k.Chips = append(k.Chips, BoardChip{Chip: d.Chip, ID: d.ID, MemoryBytes: d.MemoryBytes, NUMANode: d.NUMANode})
		if d.Health.Unhealthy && !c.Health.Unhealthy {
			c.Health = d.Health
			c.Health.Reason = fmt.Sprintf("chip %d (%s): %s", d.Chip, d.ID, d.Health.Reason)
		}
	}
	if first.Chip != 0 && !slices.ContainsFunc(missing, func(m BoardChip) bool { return m.Chip == 0 }) {
		// Never seen, but the board is named after it.
		missing = append(missing, BoardChip{ID: id, NUMANode: accel.NoNUMA})
	}
	k.Chips = append(k.Chips, missing...)
	slices.SortStableFunc(k.Chips, func(a, b BoardChip) int { return cmp.Compare(a.Chip, b.Chip) })
	if len(missing) > 0 {
		m := slices.MinFunc(missing, func(a, b BoardChip) int { return cmp.Compare(a.Chip, b.Chip) })
		c.Health = accel.Health{
			Unhealthy: true,
			Reason: fmt.Sprintf("chip %d (%s) is missing: %d of the board's %d chips are present", m.Chip, m.ID, len(present),
				len(k.Chips)),
			Cause: accel.CauseLost,
		}
	}
	for _, chip := range k.Chips {
		c.Chips = append(c.Chips, chip.ID)
		c.MemoryBytes += chip.MemoryBytes
		if chip.NUMANode >= 0 {
			c.NUMANodes = append(c.NUMANodes, chip.NUMANode)
		}
	}
	slices.Sort(c.NUMANodes)
	c.NUMANodes = slices.Compact(c.NUMANodes)
	return c
}

// CardLinks returns the links between cards: the best one between any of their
// chips, in ascending order of A and then B.
func CardLinks(cards []Card, links []accel.Link) []accel.Link {
	cardOf := map[accel.DeviceID]accel.DeviceID{}
	for _, c := range cards {
		for _, chip := range c.Chips {
			cardOf[chip] = c.ID
		}
	}
	type pair struct{ a, b accel.DeviceID }
	best := map[pair]int{}
	for _, l := range links {
		a, okA := cardOf[l.A]
		b, okB := cardOf[l.B]
		if !okA || !okB || a == b {
			continue
		}
		p := pair{min(a, b), max(a, b)}
		if s, ok := best[p]; !ok || l.Score > s {
			best[p] = l.Score
		}
	}
	out := make([]accel.Link, 0, len(best))
	for p, s := range best {
		out = append(out, accel.Link{A: p.a, B: p.b, Score: s})
	}
	slices.SortFunc(out, func(x, y accel.Link) int { return cmp.Or(cmp.Compare(x.A, y.A), cmp.Compare(x.B, y.B)) })
	return out
}
