package ledger

import (
	"cmp"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// An occupant is a pod on a node that may have to make room.
type occupant struct {
	uid      string
	priority int32
	created  time.Time
	// ending is true for a pod whose deletion has begun: it makes room by itself.
	ending bool
	// proposed is true for a pod that kube-scheduler itself would evict.
	proposed bool
	// violates is true for a pod whose eviction would violate a disruption budget.
	violates bool
	// parts are what it holds, on slots that the node has.
	parts []part
}

// A part is what a pod holds of one slot.
type part struct {
	slot  int
	units accel.Units
}

func (o *occupant) on(slot int) accel.Units {
	var sum accel.Units
	for _, p := range o.parts {
		if p.slot == slot {
			sum += p.units
		}
	}
	return sum
}

// harm says how bad it is to evict some pods: first by how many of them violate a
// disruption budget, then by how many they are, then by the one of the highest
// priority, then by their priorities together. What decides of the rest is of less
// weight: pods that were proposed are rather taken than others, and of equal sets
// that which frees least.
type harm struct {
	violations int   // as pods
	pods       int   // without those that are ending
	priority   int32 // the highest; counts where pods is not 0
	sum        int64 // of the priorities
	others     int   // of pods, those that were not proposed
	freed      accel.Units
}

func (h harm) compare(o harm) int {
	if h.pods == 0 && o.pods == 0 {
		return cmp.Compare(h.freed, o.freed)
	}
	return cmp.Or(cmp.Compare(h.violations, o.violations), cmp.Compare(h.pods, o.pods), cmp.Compare(h.priority, o.priority),
		cmp.Compare(h.sum, o.sum), cmp.Compare(h.others, o.others), cmp.Compare(h.freed, o.freed))
}

// choice is what to evict so that one slot has room.
type choice struct {
	slot    int
	victims []int // positions in the occupants
	harm    harm
}

// makeRoom returns which of the pods have to go, as positions in pods, ascending,
// so that the slots have room for the ask, and which slots they make room on. ok
// is false where not even all of them would be enough.
//
// Of one slot the set is the least harmful, see harm; for several, slots are
// chosen one after the other, each the least harmful beside those before it. Where pods
// are on several slots themselves, a set that is less harmful is looked for then, see
// search. In the end no pod is in the set without which there would be room as well.
//
// The cost is that of sorting the pods of each slot, once for each device that is
// asked for, and of maxLooks.
func makeRoom(slots []place.Slot, ask *place.Ask, pods []occupant) (victims, room []int, ok bool) {
	free := make([]accel.Units, len(slots))
	for i := range slots {
		free[i] = slots[i].Free
	}
	taken := make([]bool, len(pods))
	for range ask.Devices {
		best, found := choice{}, false
		for i := range slots {
			s := &slots[i]
			if slices.Contains(room, i) || !ask.FitsEmpty(s) {
				continue
			}
			c, enough := roomOn(i, ask.Units-free[i], pods, taken)
			if enough && (!found || cmp.Or(c.harm.compare(best.harm), cmp.Compare(s.Index, slots[best.slot].Index),
				cmp.Compare(s.ID, slots[best.slot].ID)) < 0) {
				best, found = c, true
			}
		}
		if !found {
			return nil, nil, false
		}
		room = append(room, best.slot)
		for _, v := range best.victims {
			taken[v] = true
			for _, p := range pods[v].parts {
				free[p.slot] += p.units
			}
		}
	}
	if ask.Devices > 1 && slices.ContainsFunc(pods, func(o occupant) bool { return len(o.parts) > 1 }) {
		if less := lessHarm(slots, ask, pods, taken); less != nil {
			taken, room = less, room[:0]
			for i := range slots {
				s := &slots[i]
				if free[i] = freeWithout(s, i, pods, taken); len(room) < ask.Devices && ask.FitsEmpty(s) && free[i] >= ask.Units {
					room = append(room, i)
				}
			}
		}
	}
	spare(ask.Units, free, room, pods, taken)
	for v, gone := range taken {
		if gone {
			victims = append(victims, v)
		}
	}
	slices.Sort(room)
	return victims, room, true
}

// freeWithout is what a slot has free once the pods that are taken are gone.
func freeWithout(s *place.Slot, slot int, pods []occupant, taken []bool) accel.Units {
	free := s.Free
	for v, gone := range taken {
		if gone {
			free += pods[v].on(slot)
		}
	}
	return free
}

// maxLooks bounds a search, to less than a millisecond. A node with so many pods that it
// ends before it is through keeps the set that was found so far.
const maxLooks = 4000

// search goes through sets of pods, and leaves out those that cannot be less harmful than the
// best one so far.
type search struct {
	units   accel.Units
	devices int
	pods    []occupant
	order   []int           // of pods: those that are not ending
	free    []accel.Units   // by slot that is able, without the pods that are taken
	slots   []int           // those that are able
	rest    [][]accel.Units // by position in order: what it and those after it hold of the slots
	taken   []bool          // by pod
	looks   int
	least   harm
	best    []bool // nil until one is found
}

// lessHarm returns a set that is less harmful than the one that is taken, or nil.
func lessHarm(slots []place.Slot, ask *place.Ask, pods []occupant, taken []bool) []bool {
	s := search{units: ask.Units, devices: ask.Devices, pods: pods, taken: make([]bool, len(pods)), looks: maxLooks}
	for v := range pods {
		if s.taken[v] = pods[v].ending; !pods[v].ending {
			s.order = append(s.order, v)
		}
		if taken[v] {
			s.least.add(&pods[v])
		}
	}
	for i := range slots {
		if ask.FitsEmpty(&slots[i]) {
			s.slots = append(s.slots, i)
			s.free = append(s.free, freeWithout(&slots[i], i, pods, s.taken))
		}
	}
	s.rest = make([][]accel.Units, len(s.order)+1)
	s.rest[len(s.order)] = make([]accel.Units, len(s.slots))
	for at := len(s.order) - 1; at >= 0; at-- {
		s.rest[at] = slices.Clone(s.rest[at+1])
		for k, slot := range s.slots {
			s.rest[at][k] += pods[s.order[at]].on(slot)
		}
	}
	s.from(0, harm{})
	return s.best
}

// from decides about the pods from a position of the order on, beside those that are taken.
func (s *search) from(at int, h harm) {
	if s.looks--; s.looks < 0 || cmp.Or(cmp.Compare(h.violations, s.least.violations), cmp.Compare(h.pods, s.least.pods),
		cmp.Compare(h.priority, s.least.priority)) >= 0 {
		return
	}
	has, may := 0, 0
	for k, free := range s.free {
		if free >= s.units {
			has++
		}
		if free+s.rest[at][k] >= s.units {
			may++
		}
	}
	if has >= s.devices {
		s.least, s.best = h, slices.Clone(s.taken)
		return
	}
	if may < s.devices {
		return
	}
	v := s.order[at]
	take := func(is bool, sign accel.Units) {
		s.taken[v] = is
		for k, slot := range s.slots {
			s.free[k] += sign * s.pods[v].on(slot)
		}
	}
	take(true, 1)
	with := h
	with.add(&s.pods[v])
	s.from(at+1, with)
	take(false, -1)
	s.from(at+1, h)
}

// roomOn returns the least harmful set of pods that holds at least so many units
// of the slot.
func roomOn(slot int, missing accel.Units, pods []occupant, taken []bool) (choice, bool) {
	c := choice{slot: slot}
	var going, staying []int
	for v := range pods {
		switch {
		case taken[v] || pods[v].on(slot) <= 0:
		case pods[v].ending:
			going = append(going, v)
		default:
			staying = append(staying, v)
		}
	}
	order := func(a, b int) int { return pods[a].compare(&pods[b], slot) }
	slices.SortFunc(going, order)
	slices.SortFunc(staying, order)
	if chosen, _, enough := fewest(slot, missing, pods, going); enough {
		c.victims = chosen
		exchange(slot, missing, pods, going, c.victims)
	} else {
		c.victims = slices.Clone(going)
		for _, v := range going {
			missing -= pods[v].on(slot)
		}
		least, violations, enough := fewest(slot, missing, pods, staying)
		if !enough {
			return choice{}, false
		}
		// Of sets of so many pods one in which the highest priority is lowest.
		for _, highest := range priorities(pods, staying) {
			lower := slices.DeleteFunc(slices.Clone(staying), func(v int) bool { return pods[v].priority > highest })
			if chosen, n, enough := fewest(slot, missing, pods, lower); enough && n == violations && len(chosen) == len(least) {
				exchange(slot, missing, pods, lower, chosen)
				c.victims = append(c.victims, chosen...)
				break
			}
		}
	}
	for _, v := range c.victims {
		c.harm.add(&pods[v])
	}
	return c, true
}

func (h *harm) add(o *occupant) {
	for _, p := range o.parts {
		h.freed += p.units
	}
	if o.ending {
		return
	}
	if h.pods == 0 || o.priority > h.priority {
		h.priority = o.priority
	}
	if o.violates {
		h.violations++
	}
	h.pods++
	h.sum += int64(o.priority)
	if !o.proposed {
		h.others++
	}
}

// priorities are those of some pods, ascending.
func priorities(pods []occupant, of []int) (out []int32) {
	for _, v := range of {
		out = append(out, pods[v].priority)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// fewest returns which pods at least it takes to free so many units of the slot, and
// how many of these violate a disruption budget: as few of such as possible, those
// that hold most of the slot; of equal ones those that come first. enough is false
// where all together do not free that much.
func fewest(slot int, missing accel.Units, pods []occupant, of []int) (chosen []int, violations int, enough bool) {
	sorted := slices.Clone(of)
	slices.SortStableFunc(sorted, func(a, b int) int { return cmp.Compare(pods[b].on(slot), pods[a].on(slot)) })
	short := missing // beside all that violate no budget
	for _, v := range sorted {
		if !pods[v].violates {
			short -= pods[v].on(slot)
		}
	}
	for _, v := range sorted {
		if pods[v].violates && short > 0 {
			chosen = append(chosen, v)
			short -= pods[v].on(slot)
			missing -= pods[v].on(slot)
		}
	}
	if violations = len(chosen); short > 0 {
		return nil, 0, false
	}
	for _, v := range sorted {
		if !pods[v].violates && missing > 0 {
			chosen = append(chosen, v)
			missing -= pods[v].on(slot)
		}
	}
	return chosen, violations, true
}

// exchange lets each of the chosen pods in turn give way to the first one, in the
// order of the pods that it is chosen from, that is enough in its place and violates as
// few budgets.
func exchange(slot int, missing accel.Units, pods []occupant, from, chosen []int) {
	for _, v := range chosen {
		missing -= pods[v].on(slot)
	}
	for i, v := range chosen {
		need := missing + pods[v].on(slot)
		for _, w := range from {
			if w == v {
				break
			}
			if !slices.Contains(chosen, w) && pods[w].violates == pods[v].violates && pods[w].on(slot) >= need {
				chosen[i], missing = w, need-pods[w].on(slot)
				break
			}
		}
	}
}

// compare orders pods by how much harm it does to evict them: one that is ending
// none; otherwise by budgets, priority, proposed ones first, those that hold less, and
// the younger ones, as kube-scheduler spares the one that ran longer.
func (o *occupant) compare(p *occupant, slot int) int {
	return cmp.Or(trueFirst(o.ending, p.ending), trueFirst(p.violates, o.violates), cmp.Compare(o.priority, p.priority),
		trueFirst(o.proposed, p.proposed), cmp.Compare(o.on(slot), p.on(slot)), p.created.Compare(o.created),
		cmp.Compare(o.uid, p.uid))
}

func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// spare takes out of the set, the most important first, each pod without which
// the slots have room as well: one that was taken for the second slot may have
// made the one for the first superfluous.
func spare(units accel.Units, free []accel.Units, room []int, pods []occupant, taken []bool) {
	var order []int
	for v, gone := range taken {
		if gone {
			order = append(order, v)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return pods[b].compare(&pods[a], -1) })
	for _, v := range order {
		enough := true
		for _, p := range pods[v].parts {
			free[p.slot] -= p.units
		}
		for _, i := range room {
			enough = enough && free[i] >= units
		}
		if enough {
			taken[v] = false
			continue
		}
		for _, p := range pods[v].parts {
			free[p.slot] += p.units
		}
	}
}
