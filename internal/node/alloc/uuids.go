package alloc

import (
	"cmp"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// uuids are the ids of a pool of slots: they name their device, as "<uuid>" or
// "<uuid>::<n>".
type uuids struct {
	pool *pool
	held *slotAccount
	// buffer is what ids returned.
	buffer []string
	boards *sharing.Boards
	links  []accel.Link
	// remembered describes the cards that were ever offered, by id.
	remembered map[accel.DeviceID]StoredCard
	stored     State
}

func newSlots(p *pool) {
	ids := &uuids{pool: p, remembered: map[accel.DeviceID]StoredCard{}, boards: sharing.NewBoards(nil)}
	ids.held = &slotAccount{pool: p, ids: ids, holds: map[string]*slotHold{}}
	p.ids, p.held, p.pick = ids, ids.held, &byPolicy{pool: p, ids: ids, held: ids.held}
	saved := p.config.State
	if saved == nil {
		return
	}
	ids.boards, ids.stored, ids.held.sure = sharing.NewBoards(saved.Boards), *saved, !saved.Partial
	for _, c := range saved.Cards {
		ids.remembered[c.ID] = c
	}
	held := map[accel.DeviceID]bool{}
	for _, h := range saved.Held {
		ids.held.holds[h.ID] = &slotHold{chips: h.Chips, inits: h.Inits, unasked: h.Unasked, guessed: h.Unasked, seen: true, pod: h.Pod}
		for _, c := range h.Chips {
			held[c] = true
		}
	}
	p.taken.known, p.taken.held = ids.held.sure, held
}

func (u *uuids) persist() State {
	next := State{Boards: u.boards.Known(), Partial: !u.held.sure}
	for _, c := range u.remembered {
		next.Cards = append(next.Cards, c)
	}
	slices.SortFunc(next.Cards, func(a, b StoredCard) int { return cmp.Compare(a.ID, b.ID) })
	for id, h := range u.held.holds {
		next.Held = append(next.Held, HeldSlot{ID: id, Chips: h.chips, Inits: h.inits, Unasked: h.open(), Pod: h.pod})
	}
	slices.SortFunc(next.Held, func(a, b HeldSlot) int { return cmp.Compare(a.ID, b.ID) })
	if len(next.Boards) == 0 {
		next.Boards = nil
	}
	return next
}

func (u *uuids) saved(state State) { u.stored = state }

func (u *uuids) isSaved(it *item) bool {
	return slices.ContainsFunc(u.stored.Cards, func(c StoredCard) bool { return c.ID == it.ID && slices.Equal(c.Chips, it.Chips) })
}

// replicas returns how many slices a card has, 0 for one that is given out as a
// whole.
func (u *uuids) replicas(c sharing.Card) int {
	if u.pool.config.Cut.Replicas == nil {
		return 0
	}
	return u.pool.config.Cut.Replicas(c)
}

func (u *uuids) itemOf(c sharing.Card) item {
	n := u.replicas(c)
	return item{Card: c, replicas: n, units: accel.Units(max(n, 1))}
}

func (u *uuids) early() []Unit {
	nodes := map[string][]int{}
	for _, c := range u.remembered {
		card := c.card()
		for _, id := range sharing.SlotIDs(nil, card.ID, u.replicas(card)) {
			nodes[id] = card.NUMANodes
		}
	}
	for id := range u.held.holds {
		nodes[id] = u.numaOf(id)
	}
	var out []Unit
	for id, numa := range nodes {
		out = append(out, Unit{ID: id, NUMANodes: numa})
	}
	slices.SortFunc(out, func(a, b Unit) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// numaOf returns the NUMA nodes of the device that an id names.
func (u *uuids) numaOf(id string) []int {
	slot, err := sharing.ParseSlotID(id)
	if err != nil {
		return nil
	}
	return u.remembered[slot.Device].NUMANodes
}

func (u *uuids) idsOf(it *item) []string {
	u.buffer = sharing.SlotIDs(u.buffer[:0], it.ID, it.replicas)
	return u.buffer
}

func (u *uuids) deviceOf(id string) (accel.DeviceID, bool) {
	slot, err := sharing.ParseSlotID(id)
	if err != nil {
		return "", u.held.holds[id] != nil
	}
	_, remembered := u.remembered[slot.Device]
	return slot.Device, u.held.holds[id] != nil || remembered || u.pool.here(slot.Device)
}

func (u *uuids) unchanged() bool { return false } // the list is short

func (u *uuids) reoffer() {}

func (u *uuids) known() bool { return true }

// arrange derives the cards from the discovery and from what is remembered.
func (u *uuids) arrange(time.Time) (keep bool, problem error) {
	p := u.pool
	draining := p.config.Draining != ""
	var present []item
	here, covered := map[accel.DeviceID]bool{}, map[accel.DeviceID]bool{} // cards; chips
	fresh := false
	if p.found.Err == nil && !draining {
		cards := sharing.Split(p.found.Devices)
		if !p.config.Cut.SplitBoards {
			cards = u.boards.Group(p.found.Devices)
		}
		cards = p.chosen(cards)
		u.links = sharing.CardLinks(cards, p.found.Links)
		for _, c := range cards {
			_, before := u.remembered[c.ID]
			fresh = fresh || !before
			present = append(present, u.itemOf(c))
			u.remembered[c.ID] = storeCard(c)
			here[c.ID] = true
			for _, chip := range c.Chips {
				covered[chip] = true
			}
		}
	}
	held := map[accel.DeviceID]bool{}
	for id := range u.held.holds {
		if slot, err := sharing.ParseSlotID(id); err == nil {
			held[slot.Device] = true
		}
	}
	var gone []StoredCard
	for id, c := range u.remembered {
		switch {
		case here[id]:
		case p.found.Err != nil && !draining && (p.listed[id] || held[id]):
			gone = append(gone, c)
		case !held[id] && (fresh || !p.listed[id] || draining || p.here(c.Chips[0]) ||
			c.Parent != "" && p.here(c.Parent) && !p.faulty(id)):
			// Another has come in its place, or the configuration takes it out, or it was a
			// partition that was deleted: the device that it was cut from is listed.
			delete(u.remembered, id)
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
		it := u.itemOf(c.card())
		it.Health = accel.Health{Unhealthy: true, Reason: p.whyAway(c.Chips...), Cause: accel.CauseLost}
		away = append(away, it)
	}
	p.items = apart(present, away)
	return false, nil
}
