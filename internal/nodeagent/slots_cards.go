package nodeagent

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// assemble derives the cards from the discovery and from what is remembered.
// The caller holds mu.
func (p *slotPool) assemble() {
	p.cards = nil
	taken := map[int]bool{}
	present := map[accel.DeviceID]bool{}
	covered := map[accel.DeviceID]bool{} // chips
	fresh := false
	if p.foundErr == nil && p.draining == "" {
		cards := sharing.Split(p.found.Devices)
		if !p.rules.splitBoards {
			cards = p.boards.Group(p.found.Devices)
		}
		cards = sharing.Select(cards, p.rules.selector)
		p.links = sharing.CardLinks(cards, p.found.Links)
		for _, c := range cards {
			_, before := p.remembered[c.ID]
			fresh = fresh || !before
			p.cards = append(p.cards, slotCard{Card: c, replicas: p.rules.replicasOf(c)})
			p.remembered[c.ID] = stored(c)
			taken[c.Index], present[c.ID] = true, true
			for _, chip := range c.Chips {
				covered[chip] = true
			}
		}
	}
	held := map[accel.DeviceID]bool{}
	for id := range p.holds {
		if s, err := sharing.ParseSlotID(id); err == nil {
			held[s.Device] = true
		}
	}
	var away []sharing.StoredCard
	for id, c := range p.remembered {
		switch {
		case present[id]:
		case p.foundErr != nil && p.draining == "" && (p.listed[id] || held[id]):
			away = append(away, c)
		case !held[id] && (fresh || !p.listed[id] || p.draining != "" || p.here(c)):
			// Another has come in its place, or the configuration takes it out.
			delete(p.remembered, id)
		case covered[c.Chips[0]]:
			// What it was made of is offered in another form.
		default:
			away = append(away, c)
		}
	}
	slices.SortFunc(away, func(a, b sharing.StoredCard) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID))
	})
	for _, c := range away {
		card := unstored(c)
		// The library may have given its index to another device.
		for taken[card.Index] {
			card.Index++
		}
		taken[card.Index] = true
		card.Health = accel.Health{Unhealthy: true, Reason: p.whyAway(c), Cause: accel.CauseLost}
		p.cards = append(p.cards, slotCard{Card: card, replicas: p.rules.replicasOf(card)})
	}
	slices.SortFunc(p.cards, func(a, b slotCard) int { return cmp.Compare(a.Index, b.Index) })
}

// here reports whether the vendor's library lists the card's first chip.
func (p *slotPool) here(c sharing.StoredCard) bool {
	return slices.ContainsFunc(p.found.Devices, func(d accel.Device) bool { return d.ID == c.Chips[0] })
}

// whyAway is the reason of a card that is remembered and not offered.
func (p *slotPool) whyAway(c sharing.StoredCard) string {
	switch {
	case p.draining != "":
		return p.draining
	case p.foundErr != nil:
		return p.foundErr.Error()
	case p.here(c):
		return fmt.Sprintf("the configuration does not give it to %s", p.resource)
	}
	for _, f := range p.found.Faults {
		if f.ID != "" && slices.Contains(c.Chips, f.ID) && f.Err != nil {
			return f.Err.Error()
		}
	}
	return "the vendor's library does not list the device any more"
}

func stored(c sharing.Card) sharing.StoredCard {
	return sharing.StoredCard{
		ID: c.ID, Index: c.Index, Model: c.Model, MemoryBytes: c.MemoryBytes, NUMANode: c.NUMANode,
		NUMANodes: c.NUMANodes, Board: c.Board, Chips: c.Chips,
	}
}

func unstored(c sharing.StoredCard) sharing.Card {
	return sharing.Card{Chips: c.Chips, NUMANodes: c.NUMANodes, Device: accel.Device{
		ID: c.ID, Index: c.Index, Model: c.Model, MemoryBytes: c.MemoryBytes, NUMANode: c.NUMANode, Board: c.Board,
	}}
}

// save makes the file hold the state. The caller holds mu.
func (p *slotPool) save() error {
	next := sharing.SlotState{Vendor: p.vendor, Boards: p.boards.Known()}
	for _, c := range p.remembered {
		next.Cards = append(next.Cards, c)
	}
	slices.SortFunc(next.Cards, func(a, b sharing.StoredCard) int { return cmp.Compare(a.ID, b.ID) })
	for id, h := range p.holds {
		next.Held = append(next.Held, sharing.HeldSlot{ID: id, Chips: h.chips, Inits: h.inits})
	}
	slices.SortFunc(next.Held, func(a, b sharing.HeldSlot) int { return cmp.Compare(a.ID, b.ID) })
	if len(next.Boards) == 0 {
		next.Boards = nil
	}
	nothing := len(next.Cards)+len(next.Boards)+len(next.Held) == 0 && p.saved.Vendor == ""
	if nothing || p.draining != "" && len(next.Held) == 0 {
		return nil
	}
	if err := p.store.Save(next); err != nil {
		return err
	}
	p.saved = next
	return nil
}

// isSaved reports whether the state that was saved last says what the card's slots
// are. The caller holds mu.
func (p *slotPool) isSaved(c *slotCard) bool {
	return slices.ContainsFunc(p.saved.Cards, func(s sharing.StoredCard) bool { return s.ID == c.ID && slices.Equal(s.Chips, c.Chips) })
}

// fits reports whether a slot that is held is one of the card's as it is offered
// now. Another one may stand for other chips or for all of the device's time.
func (c *slotCard) fits(id string, h *slotHold) bool {
	s, err := sharing.ParseSlotID(id)
	return err == nil && s.Device == c.ID && (s.Replica == sharing.WholeDevice) == (c.replicas == 0) &&
		(len(h.chips) == 0 || slices.Equal(h.chips, c.Chips))
}

// unusable returns why no container gets slots of the card, "" when it may. The
// caller holds mu.
func (p *slotPool) unusable(c *slotCard) string {
	if c.Health.Unhealthy {
		return c.Health.Reason
	}
	if why := p.written.withheld(p.isSaved(c), c.Chips...); why != "" {
		return why
	}
	if r, taken := p.tenant.elsewhere(c.Chips...); taken {
		return givenOutAs(r)
	}
	for id, h := range p.holds {
		if c.fits(id, h) {
			continue
		}
		if slices.ContainsFunc(h.chips, func(chip accel.DeviceID) bool { return slices.Contains(c.Chips, chip) }) {
			return fmt.Sprintf("%s (%s, before the configuration changed)", givenOutAs(p.resource), id)
		}
	}
	return ""
}

// free returns the slots of the card that nobody holds, without those that would
// be more than its replicas: after their number was lowered, slots beyond it may
// still be held. The caller holds mu.
func (p *slotPool) free(c *slotCard) []string {
	left := max(c.replicas, 1)
	for id, h := range p.holds {
		if c.fits(id, h) {
			left--
		}
	}
	var out []string
	for _, id := range sharing.SlotIDs(nil, c.ID, c.replicas) {
		if _, held := p.holds[id]; !held && len(out) < left {
			out = append(out, id)
		}
	}
	return out
}

// units lists what kubelet is told: all slots of all cards, and those that
// containers hold of what is not offered any more. All that is made of one card
// changes together. The caller holds mu.
func (p *slotPool) units() []deviceplugin.Unit {
	out := []deviceplugin.Unit{}
	listed := map[string]bool{}
	for i := range p.cards {
		c := &p.cards[i]
		healthy := map[string]bool{}
		if !p.certain || p.unusable(c) == "" {
			for _, id := range p.free(c) {
				healthy[id] = true
			}
		}
		for _, id := range sharing.SlotIDs(nil, c.ID, c.replicas) {
			_, held := p.holds[id]
			if p.draining != "" && !held {
				continue
			}
			listed[id] = true
			out = append(out, deviceplugin.Unit{ID: id, Unhealthy: !held && !healthy[id], NUMANodes: c.NUMANodes})
		}
	}
	var others []string
	for id := range p.holds {
		if !listed[id] {
			others = append(others, id)
		}
	}
	slices.Sort(others)
	for _, id := range others {
		u := deviceplugin.Unit{ID: id}
		if s, err := sharing.ParseSlotID(id); err == nil {
			u.NUMANodes = p.remembered[s.Device].NUMANodes
		}
		out = append(out, u)
	}
	return out
}

// chips implements part.
func (p *slotPool) chips() []accel.Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.devices()
}

// devices is chips for a caller that holds mu.
func (p *slotPool) devices() []accel.Device {
	if p.draining != "" {
		return nil
	}
	here := map[accel.DeviceID]accel.Device{}
	for _, d := range p.found.Devices {
		here[d.ID] = d
	}
	var out []accel.Device
	for _, c := range p.cards {
		for _, id := range c.Chips {
			if d, ok := here[id]; ok {
				out = append(out, d)
				continue
			}
			lost := c.Device
			lost.ID = id
			if last, seen := p.chipIndex[id]; seen {
				lost.Index = last
			}
			lost.Health = accel.Health{Unhealthy: true, Cause: accel.CauseLost, Reason: p.whyAway(sharing.StoredCard{Chips: []accel.DeviceID{id}})}
			out = append(out, lost)
		}
	}
	return out
}
