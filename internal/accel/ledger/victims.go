package ledger

import (
	"cmp"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
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

// on returns what the pod holds of a slot.
func (o *occupant) on(slot int) accel.Units {
	var sum accel.Units
	for _, p := range o.parts {
		if p.slot == slot {
			sum += p.units
		}
	}
	return sum
}

// harm says how bad it is to evict some pods. It is compared as kube-scheduler
// compares nodes: first by the pod of the highest priority, then by how many
// pods there are and by their priorities together. What decides of the rest is
// of less weight: pods that were proposed are rather taken than others, and of
// equal sets that which frees least.
type harm struct {
	priority int32 // the highest; counts where pods is not 0
	pods     int   // without those that are ending
	others   int   // of pods, those that were not proposed
	sum      int64 // of the priorities
	freed    accel.Units
}

func (h harm) compare(o harm) int {
	switch {
	case h.pods == 0 || o.pods == 0:
		return cmp.Or(cmp.Compare(h.pods, o.pods), cmp.Compare(h.freed, o.freed))
	default:
		return cmp.Or(cmp.Compare(h.priority, o.priority), cmp.Compare(h.pods, o.pods), cmp.Compare(h.sum, o.sum),
			cmp.Compare(h.others, o.others), cmp.Compare(h.freed, o.freed))
	}
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
			if slices.Contains(room, i) || s.Unhealthy || s.Total < ask.Units || !ask.Only.Allows(s.ID, s.Model) {
				continue
			}
			c, enough := roomOn(i, ask.Units-free[i], pods, taken)
			if enough && (!found || cmp.Or(c.harm.compare(best.harm), cmp.Compare(s.Index, slots[best.slot].Index), cmp.Compare(s.ID, slots[best.slot].ID)) < 0) {
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
	if missing <= 0 {
		return c, true
	}
	var on []int
	for v := range pods {
		if !taken[v] && pods[v].on(slot) > 0 {
			on = append(on, v)
		}
	}
	slices.SortFunc(on, func(a, b int) int { return pods[a].compare(&pods[b], slot) })

	// The pods up to which there is enough; the last of them says of which
	// priority there must be one.
	end, sum := 0, accel.Units(0)
	for end < len(on) && sum < missing {
		sum += pods[on[end]].on(slot)
		end++
	}
	if sum < missing {
		return choice{}, false
	}
	last := &pods[on[end-1]]
	for end < len(on) && pods[on[end]].ending == last.ending && pods[on[end]].priority == last.priority {
		end++
	}
	on = on[:end]

	// As few as possible: those that are ending, and then the largest.
	bySize := slices.Clone(on)
	slices.SortStableFunc(bySize, func(a, b int) int {
		return cmp.Or(endingFirst(&pods[a], &pods[b]), cmp.Compare(pods[b].on(slot), pods[a].on(slot)))
	})
	left := missing
	in := make([]bool, len(pods))
	for _, v := range bySize {
		if left <= 0 {
			break
		}
		c.victims = append(c.victims, v)
		in[v] = true
		left -= pods[v].on(slot)
	}
	// Each in turn gives way to the first one, in the order of harm, that is
	// enough in its place.
	for i, v := range c.victims {
		need := left + pods[v].on(slot)
		for _, w := range on {
			if w == v {
				break
			}
			if !in[w] && pods[w].on(slot) >= need {
				in[v], in[w] = false, true
				c.victims[i], left = w, need-pods[w].on(slot)
				break
			}
		}
	}
	for _, v := range c.victims {
		o := &pods[v]
		for _, p := range o.parts {
			c.harm.freed += p.units
		}
		if o.ending {
			continue
		}
		if c.harm.pods == 0 || o.priority > c.harm.priority {
			c.harm.priority = o.priority
		}
		c.harm.pods++
		c.harm.sum += int64(o.priority)
		if !o.proposed {
			c.harm.others++
		}
	}
	return c, true
}

// compare orders pods by how much harm it does to evict them: one that is ending
// none; otherwise by priority, proposed ones first, those that hold less, and
// the younger ones, as kube-scheduler spares the one that ran longer.
func (o *occupant) compare(p *occupant, slot int) int {
	if c := endingFirst(o, p); c != 0 {
		return c
	}
	c := cmp.Compare(o.priority, p.priority)
	if c == 0 && o.proposed != p.proposed {
		c = 1
		if o.proposed {
			c = -1
		}
	}
	return cmp.Or(c, cmp.Compare(o.on(slot), p.on(slot)), p.created.Compare(o.created), cmp.Compare(o.uid, p.uid))
}

func endingFirst(o, p *occupant) int {
	switch {
	case o.ending == p.ending:
		return 0
	case o.ending:
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
