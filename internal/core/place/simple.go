package place

import (
	"cmp"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// The policies that look at nothing but the free units.
var (
	// Binpack takes the devices with the least free units that still suffice,
	// so that large requests find a whole device later.
	Binpack Policy = ordered{name: "binpack", order: 1}
	// Spread takes the devices with the most free units, so that pods disturb
	// each other least.
	Spread Policy = ordered{name: "spread", order: -1}
)

// ordered prefers devices by what they have free.
type ordered struct {
	name string
	// order is 1 when the least free amount that suffices is best, -1 when the
	// largest is: of two amounts a and b, a is better when order*a < order*b.
	order accel.Units
}

func (p ordered) Name() string { return p.name }

// Epoch implements Policy: ratings depend on the node and the ask alone.
func (p ordered) Epoch() uint64 { return 0 }

// Choose implements Policy. Several devices are those that are connected best;
// of equally good ones, and where connections are not known, those that come
// first by free units, then by Index and ID, so that the order of the slots
// does not matter. A node is rated by the connections of the devices, then by
// what is left on them.
func (p ordered) Choose(n *Node, a *Ask, buf []int) (slots []int, rating int64, ok bool) {
	slots = buf[:0]
	if !a.FitsBeside(n) {
		return slots, NoRating, false
	}
	switch {
	case a.Devices <= 0:
		return slots, 0, true
	case a.Devices > 1:
		return p.chooseSeveral(n, a, slots)
	}
	best := -1
	for i := range n.Slots {
		if a.Fits(&n.Slots[i]) && (best < 0 || p.compare(&n.Slots[i], &n.Slots[best]) < 0) {
			best = i
		}
	}
	if best < 0 {
		return slots, NoRating, false
	}
	return append(slots, best), p.rate(n.Slots[best].Free - a.Units), true
}

// compare orders slots, the best first.
func (p ordered) compare(s, t *Slot) int {
	if c := cmp.Compare(p.order*s.Free, p.order*t.Free); c != 0 {
		return c
	}
	if s.Index != t.Index {
		return cmp.Compare(s.Index, t.Index)
	}
	return cmp.Compare(s.ID, t.ID)
}

// rate rates a node by the units that are left on the chosen devices.
func (p ordered) rate(left accel.Units) int64 { return int64(-p.order * left) }

func (p ordered) chooseSeveral(n *Node, a *Ask, slots []int) ([]int, int64, bool) {
	for i := range n.Slots {
		if a.Fits(&n.Slots[i]) {
			slots = append(slots, i)
		}
	}
	if len(slots) < a.Devices {
		return slots[:0], NoRating, false
	}
	slices.SortStableFunc(slots, func(i, j int) int { return p.compare(&n.Slots[i], &n.Slots[j]) })
	var connected int64
	if n.Graph != nil {
		var space [32]int
		preferred := append(space[:0], slots...)
		slots, connected = n.Graph.Best(preferred, a.Devices, slots)
	} else {
		slots = slots[:a.Devices]
		slices.Sort(slots)
	}
	var left accel.Units
	for _, i := range slots {
		left = min(left+n.Slots[i].Free-a.Units, maxLeft)
	}
	return slots, min(connected, maxConnected)<<connectedAt + p.rate(left), true
}

// What is left on several devices and the sum of their connections are bounded
// so that both fit into one rating: 40 bits and a sign for the first, 22 for the
// second, which is beyond 40 devices with 20 lanes between any two.
const (
	connectedAt  = 41
	maxLeft      = accel.MaxUnits - 1
	maxConnected = 1<<22 - 1
)

// Connections is the part of a rating of several devices by Binpack or Spread that
// stands for their connections, without what is left on them.
func Connections(rating int64) int64 {
	return (rating + 1<<(connectedAt-1)) >> connectedAt << connectedAt
}
