package simulate

import (
	"iter"
	"math/rand"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

// world is the cluster during a run. Nodes are in the order in which they win
// ties.
type world struct {
	nodes  []place.Node
	policy place.Policy
	// ties is nil where the first of equally rated nodes is taken.
	ties *rand.Rand

	// changed lists the nodes that were changed, oldest first. Each cache knows
	// up to where it has seen it.
	changed []int32
	caches  map[place.Ask]*ratings
	// allocated is what pods hold.
	allocated accel.Units
	buf       []int
}

// ratings is what a policy says of all nodes for one ask.
type ratings struct {
	ratings []int64
	// seen is the length of world.changed up to which ratings are right, epoch
	// the policy's when they were made.
	seen  int
	epoch uint64
}

func newWorld(c *Cluster, order []int, p place.Policy, ties *rand.Rand) *world {
	w := &world{nodes: make([]place.Node, len(order)), policy: p, ties: ties, caches: map[place.Ask]*ratings{}}
	for at, i := range order {
		n := &c.Nodes[i]
		node := place.Node{CPU: n.CPU, Memory: n.Memory, Slots: make([]place.Slot, len(n.Devices))}
		ids := make([]accel.DeviceID, len(n.Devices))
		for j, d := range n.Devices {
			node.Slots[j] = place.Slot{ID: d.ID, Index: d.Index, Model: d.Model, Total: d.Units, Free: d.Units, Unhealthy: d.Health.Unhealthy}
			ids[j] = d.ID
		}
		if len(n.Links) > 0 {
			node.Graph = place.NewGraph(ids, n.Links)
		}
		w.nodes[at] = node
	}
	return w
}

// all goes through the nodes.
func (w *world) all() iter.Seq[*place.Node] {
	return func(yield func(*place.Node) bool) {
		for i := range w.nodes {
			if !yield(&w.nodes[i]) {
				return
			}
		}
	}
}

// best returns the node with the best rating, -1 where the pod fits nowhere.
func (w *world) best(a *place.Ask) int {
	r := w.rated(a)
	best, rating, equal := -1, place.NoRating, 0
	for i, v := range r.ratings {
		if v > rating {
			best, rating, equal = i, v, 1
		} else if v == rating && best >= 0 {
			equal++
		}
	}
	if w.ties == nil || equal <= 1 {
		return best
	}
	for skip := w.ties.Intn(equal); ; best++ {
		if r.ratings[best] != rating {
			continue
		}
		if skip == 0 {
			return best
		}
		skip--
	}
}

// rated returns the ratings of all nodes, made anew where something changed.
func (w *world) rated(a *place.Ask) *ratings {
	r := w.caches[*a]
	epoch := w.policy.Epoch()
	if r == nil {
		r = &ratings{ratings: make([]int64, len(w.nodes)), epoch: epoch + 1}
		w.caches[*a] = r
	}
	if news := w.changed[r.seen:]; r.epoch != epoch || len(news) > len(w.nodes) {
		for i := range w.nodes {
			r.ratings[i] = w.rate(i, a)
		}
	} else {
		for _, i := range news {
			r.ratings[i] = w.rate(int(i), a)
		}
	}
	r.seen, r.epoch = len(w.changed), epoch
	return r
}

func (w *world) rate(i int, a *place.Ask) int64 {
	var ok bool
	var rating int64
	w.buf, rating, ok = w.policy.Choose(&w.nodes[i], a, w.buf)
	if !ok {
		return place.NoRating
	}
	return rating
}

// placement is where a pod is.
type placement struct {
	node  int
	slots []int
}

// clone returns a copy that stays valid.
func (p placement) clone() placement { return placement{p.node, slices.Clone(p.slots)} }

// timed is place, and how long it took by the clock, if there is one.
func (w *world) timed(a *place.Ask, clock func() time.Duration) (placement, time.Duration, bool) {
	if clock == nil {
		p, ok := w.place(a)
		return p, 0, ok
	}
	began := clock()
	p, ok := w.place(a)
	return p, clock() - began, ok
}

// place puts a pod on the best node, false where it fits nowhere. The slots are
// valid until the next call.
func (w *world) place(a *place.Ask) (placement, bool) {
	i := w.best(a)
	if i < 0 {
		return placement{}, false
	}
	var ok bool
	if w.buf, _, ok = w.policy.Choose(&w.nodes[i], a, w.buf); !ok {
		return placement{}, false
	}
	p := placement{i, w.buf}
	w.book(p, a, 1)
	return p, true
}

// remove takes a pod away.
func (w *world) remove(p placement, a *place.Ask) { w.book(p, a, -1) }

// book takes what the ask says, sign times.
func (w *world) book(p placement, a *place.Ask, sign int64) {
	n := &w.nodes[p.node]
	for _, s := range p.slots {
		n.Slots[s].Free -= accel.Units(sign) * a.Units
		w.allocated += accel.Units(sign) * a.Units
	}
	if n.CPU != place.Unlimited {
		n.CPU -= sign * a.CPU
	}
	if n.Memory != place.Unlimited {
		n.Memory -= sign * a.Memory
	}
	w.changed = append(w.changed, int32(p.node))
}
