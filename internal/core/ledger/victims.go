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

// harm says how bad it is to evict some pods: first by how many they are, then by
// the one of the highest priority, then by their priorities together. What decides
// of the rest is of less weight: pods that were proposed are rather taken than
// others, and of equal sets that which frees least.
type harm struct {
	pods     int   // without those that are ending
	priority int32 // the highest; counts where pods is not 0
	sum      int64 // of the priorities
	others   int   // of pods, those that were not proposed
	freed    accel.Units
}

func (h harm) compare(o harm) int {
	if h.pods == 0 && o.pods == 0 {
		return cmp.Compare(h.freed, o.freed)
	}
	return cmp.Or(cmp.Compare(h.pods, o.pods), cmp.Compare(h.priority, o.priority), cmp.Compare(h.sum, o.sum),
		cmp.Compare(h.others, o.others), cmp.Compare(h.freed, o.freed))
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
// chosen one after the other, each the least harmful beside those before it. In
// the end no pod is in the set without which there would be room as well.
//
// The cost is that of sorting the pods of each slot, once for each device that is
// asked for.
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
			if slices.Contains(room, i) || s.Unhealthy || s.Total < ask.Units || !ask.Only.Allows(s.ID, s.Model, s.Tier) {
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
	spare(ask.Units, free, room, pods, taken)
	for v, gone := range taken {
		if gone {
			victims = append(victims, v)
		}
	}
	slices.Sort(room)
	return victims, room, true
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
	if n, enough := fewest(slot, missing, pods, going); enough {
		c.victims = largest(slot, n, pods, going)
		exchange(slot, missing, pods, going, c.victims)
	} else {
		c.victims = slices.Clone(going)
		for _, v := range going {
			missing -= pods[v].on(slot)
		}
		n, enough := fewest(slot, missing, pods, staying)
		if !enough {
			return choice{}, false
		}
		// Of sets of so many pods one in which the highest priority is lowest.
		end := n
		for {
			for end < len(staying) && pods[staying[end]].priority == pods[staying[end-1]].priority {
				end++
			}
			if m, enough := fewest(slot, missing, pods, staying[:end]); enough && m == n {
				break
			}
			end++
		}
		chosen := largest(slot, n, pods, staying[:end])
		exchange(slot, missing, pods, staying[:end], chosen)
		c.victims = append(c.victims, chosen...)
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
	h.pods++
	h.sum += int64(o.priority)
	if !o.proposed {
		h.others++
	}
}

// largest returns the n pods that hold most of the slot; of equal ones those that
// come first.
func largest(slot, n int, pods []occupant, of []int) []int {
	sorted := slices.Clone(of)
	slices.SortStableFunc(sorted, func(a, b int) int { return cmp.Compare(pods[b].on(slot), pods[a].on(slot)) })
	return sorted[:n]
}

// fewest returns how many pods it takes at least to free so many units of the
// slot, and whether all together do.
func fewest(slot int, missing accel.Units, pods []occupant, of []int) (n int, enough bool) {
	for _, v := range largest(slot, len(of), pods, of) {
		if missing <= 0 {
			break
		}
		missing -= pods[v].on(slot)
		n++
	}
	return n, missing <= 0
}

// exchange lets each of the chosen pods in turn give way to the first one, in the
// order of the pods that it is chosen from, that is enough in its place.
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
			if !slices.Contains(chosen, w) && pods[w].on(slot) >= need {
				chosen[i], missing = w, need-pods[w].on(slot)
				break
			}
		}
	}
}

// compare orders pods by how much harm it does to evict them: one that is ending
// none; otherwise by priority, proposed ones first, those that hold less, and
// the younger ones, as kube-scheduler spares the one that ran longer.
func (o *occupant) compare(p *occupant, slot int) int {
	return cmp.Or(trueFirst(o.ending, p.ending), cmp.Compare(o.priority, p.priority), trueFirst(o.proposed, p.proposed),
		cmp.Compare(o.on(slot), p.on(slot)), p.created.Compare(o.created), cmp.Compare(o.uid, p.uid))
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
