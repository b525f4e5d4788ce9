package alloc

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// slots is the form of a pool that gives out whole devices or time slices: ids name
// their device, and a policy chooses. What an id meant when it was given out is
// remembered with it, as the configuration may change under a running pod.
type slots struct {
	pool *pool
	// single are the ids of one item, see ids.
	buffer []string
	boards *sharing.Boards
	links  []accel.Link
	// remembered describes the cards that were ever offered, by id.
	remembered map[accel.DeviceID]StoredCard
	stored     State

	holds map[string]*slotHold
	// sure is true once it is known which slots containers hold: they were
	// remembered, or kubelet told of all its pods. complete is true while kubelet's
	// last list has all pods that run.
	sure, complete bool
	listings       map[PodKey][]string       // slots by pod, of kubelet's last list
	served         map[PodKey]map[string]int // how many of them by container
	active         map[PodKey]bool

	// admitting are the pods (initHolder) that the last question of kubelet may
	// have been for and that have plain init containers; preferred is what it was
	// answered. asked is true when kubelet asked for what it wants to give out now.
	admitting []string
	preferred []string
	asked     bool
}

// slotHold is a slot that a container holds.
type slotHold struct {
	// chips are those that came with it, none when that is not known.
	chips []accel.DeviceID
	// inits are the pods (initHolder) whose plain init containers may hold it.
	inits []string
	// unasked is true when it is not known which pod it was given to: kubelet
	// chose it without asking.
	unasked bool
	// at is when it was given out by this process.
	at time.Time
	// seen is true once kubelet listed it.
	seen bool
}

func newSlots(p *pool) *slots {
	s := &slots{pool: p, remembered: map[accel.DeviceID]StoredCard{}, holds: map[string]*slotHold{}}
	saved := p.config.State
	if saved == nil {
		s.boards = sharing.NewBoards(nil)
		return s
	}
	s.boards, s.stored, s.sure = sharing.NewBoards(saved.Boards), *saved, true
	for _, c := range saved.Cards {
		s.remembered[c.ID] = c
	}
	held := map[accel.DeviceID]bool{}
	for _, h := range saved.Held {
		s.holds[h.ID] = &slotHold{chips: h.Chips, inits: h.Inits, seen: true}
		for _, c := range h.Chips {
			held[c] = true
		}
	}
	p.claims.known, p.claims.held = true, held
	return s
}

func (s *slots) persist() State {
	next := State{Boards: s.boards.Known()}
	for _, c := range s.remembered {
		next.Cards = append(next.Cards, c)
	}
	slices.SortFunc(next.Cards, func(a, b StoredCard) int { return cmp.Compare(a.ID, b.ID) })
	for id, h := range s.holds {
		next.Held = append(next.Held, HeldSlot{ID: id, Chips: h.chips, Inits: h.inits})
	}
	slices.SortFunc(next.Held, func(a, b HeldSlot) int { return cmp.Compare(a.ID, b.ID) })
	if len(next.Boards) == 0 {
		next.Boards = nil
	}
	return next
}

func (s *slots) saved(state State) { s.stored = state }

func (s *slots) isSaved(it *item) bool {
	return slices.ContainsFunc(s.stored.Cards, func(c StoredCard) bool { return c.ID == it.ID && slices.Equal(c.Chips, it.Chips) })
}

// replicas returns how many slices a card has, 0 for one that is given out as a
// whole.
func (s *slots) replicas(c sharing.Card) int {
	if s.pool.config.Cut.Replicas == nil {
		return 0
	}
	return s.pool.config.Cut.Replicas(c)
}

func (s *slots) itemOf(c sharing.Card) item {
	n := s.replicas(c)
	return item{Card: c, replicas: n, units: accel.Units(max(n, 1))}
}

func (s *slots) early() []Unit {
	nodes := map[string][]int{}
	for _, c := range s.remembered {
		card := c.card()
		for _, id := range sharing.SlotIDs(nil, card.ID, s.replicas(card)) {
			nodes[id] = card.NUMANodes
		}
	}
	for id := range s.holds {
		nodes[id] = s.numaOf(id)
	}
	var out []Unit
	for id, numa := range nodes {
		out = append(out, Unit{ID: id, NUMANodes: numa})
	}
	slices.SortFunc(out, func(a, b Unit) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// numaOf returns the NUMA nodes of the device that an id names.
func (s *slots) numaOf(id string) []int {
	slot, err := sharing.ParseSlotID(id)
	if err != nil {
		return nil
	}
	return s.remembered[slot.Device].NUMANodes
}

func (s *slots) ids(it *item) []string {
	s.buffer = sharing.SlotIDs(s.buffer[:0], it.ID, it.replicas)
	return s.buffer
}

func (s *slots) deviceOf(id string) (accel.DeviceID, bool) {
	slot, err := sharing.ParseSlotID(id)
	if err != nil {
		return "", s.holds[id] != nil
	}
	_, remembered := s.remembered[slot.Device]
	return slot.Device, s.holds[id] != nil || remembered || s.pool.here(slot.Device)
}

func (s *slots) held(id string) bool { return s.holds[id] != nil }
func (s *slots) certain(*item) bool  { return s.sure }
func (s *slots) unchanged() bool     { return false } // the list is short
func (s *slots) reoffer()            {}
func (s *slots) known() bool         { return true }
func (s *slots) idle() bool          { return s.complete && len(s.holds) == 0 }

func (s *slots) late(accel.Units, []Pod) bool { return false }

func (s *slots) ready() error {
	if !s.sure {
		return ErrNotAsked
	}
	return nil
}

// free leaves out slots that would be more than the card's replicas: after their
// number was lowered, slots beyond it may still be held.
func (s *slots) free(it *item) map[string]bool {
	left := max(it.replicas, 1)
	for id, h := range s.holds {
		if it.fits(id, h) {
			left--
		}
	}
	out := map[string]bool{}
	for _, id := range sharing.SlotIDs(nil, it.ID, it.replicas) {
		if s.holds[id] == nil && len(out) < left {
			out[id] = true
		}
	}
	return out
}

func (s *slots) strays(listed map[string]bool) []Unit {
	var out []Unit
	for id := range s.holds {
		if !listed[id] {
			out = append(out, Unit{ID: id, NUMANodes: s.numaOf(id)})
		}
	}
	slices.SortFunc(out, func(a, b Unit) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// fits reports whether a slot that is held is one of the card's as it is offered
// now. Another one may stand for other chips or for all of the device's time.
func (it *item) fits(id string, h *slotHold) bool {
	slot, err := sharing.ParseSlotID(id)
	return err == nil && slot.Device == it.ID && (slot.Replica == sharing.WholeDevice) == (it.replicas == 0) &&
		(len(h.chips) == 0 || slices.Equal(h.chips, it.Chips))
}

func (s *slots) conflict(it *item) string {
	for id, h := range s.holds {
		if it.fits(id, h) {
			continue
		}
		if slices.ContainsFunc(h.chips, func(chip accel.DeviceID) bool { return slices.Contains(it.Chips, chip) }) {
			return fmt.Sprintf("%s (%s, before the configuration changed)", givenOutAs(s.pool.config.Resource), id)
		}
	}
	return ""
}

// arrange derives the cards from the discovery and from what is remembered.
func (s *slots) arrange(time.Time) (problem error, keep bool) {
	p := s.pool
	draining := p.config.Draining != ""
	var present []item
	here, covered := map[accel.DeviceID]bool{}, map[accel.DeviceID]bool{} // cards; chips
	fresh := false
	if p.found.Err == nil && !draining {
		cards := sharing.Split(p.found.Devices)
		if !p.config.Cut.SplitBoards {
			cards = s.boards.Group(p.found.Devices)
		}
		cards = p.chosen(cards)
		s.links = sharing.CardLinks(cards, p.found.Links)
		for _, c := range cards {
			_, before := s.remembered[c.ID]
			fresh = fresh || !before
			present = append(present, s.itemOf(c))
			s.remembered[c.ID] = storeCard(c)
			here[c.ID] = true
			for _, chip := range c.Chips {
				covered[chip] = true
			}
		}
	}
	held := map[accel.DeviceID]bool{}
	for id := range s.holds {
		if slot, err := sharing.ParseSlotID(id); err == nil {
			held[slot.Device] = true
		}
	}
	var gone []StoredCard
	for id, c := range s.remembered {
		switch {
		case here[id]:
		case p.found.Err != nil && !draining && (p.listed[id] || held[id]):
			gone = append(gone, c)
		case !held[id] && (fresh || !p.listed[id] || draining || p.here(c.Chips[0])):
			// Another has come in its place, or the configuration takes it out.
			delete(s.remembered, id)
		case covered[c.Chips[0]]:
			// What it was made of is offered in another form.
		default:
			gone = append(gone, c)
		}
	}
	slices.SortFunc(gone, func(a, b StoredCard) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID))
	})
	var away []item
	for _, c := range gone {
		it := s.itemOf(c.card())
		it.Health = accel.Health{Unhealthy: true, Reason: p.whyAway(c.Chips...), Cause: accel.CauseLost}
		away = append(away, it)
	}
	p.items = apart(present, away)
	return nil, false
}
