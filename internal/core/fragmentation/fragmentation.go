// Package fragmentation is the placement policy that weighs what each placement
// does to the cluster's ability to take the pods that usually come.
//
// Each node has a potential: how much of what is free on it is good for little,
// because no usual piece fills it or because the CPU or memory for it is missing,
// less what it is worth as a place for pods of several devices or as one of the
// models that some pods need. A pod goes where the potential drops most. So
// the policy is one function of a node, an ask and a snapshot of tables and prices;
// Renew makes the snapshot from a histogram of asks and from the state of the
// cluster, off the path of decisions.
//
// The idea that a placement should be rated by what it does to a measure of
// fragmentation under the usual demand is that of "Beware of Fragmentation:
// Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (USENIX
// ATC 2023). What differs: the parts of devices are measured by a cutting-stock
// program; CPU is charged for all pods that would fill a node; and rare things, whole
// nodes and sought-after models, cost something only when they run short.
package fragmentation

import (
	"iter"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Name is the name of the policy.
const Name = place.Fragmentation

// When those who use a Policy renew its prices: in the extender and in simulations
// alike, or these would not say what the extender does.
const (
	// RenewAfter is after how many pods that came prices are renewed, and RenewFirst the
	// same while fewer than RenewAfter were seen.
	RenewAfter = 100
	RenewFirst = 10
	// MinPods is how many pods must have been seen, or be expected, before the policy
	// differs from binpack. So few tell little, yet the kinds that are most of a workload
	// and the models that it insists on.
	MinPods = 10
	// RefreshedAsks is how many kinds of pods are rated anew after a renewal.
	RefreshedAsks = 64
)

// Policy implements place.Policy.
type Policy struct {
	demand  *demand.Histogram
	minPods float64
	prices  atomic.Pointer[snapshot] // nil until there are some

	renewing sync.Mutex // guards what follows
	census   census
	cells    []cell
	free     []float64 // devices per node
	traffic  traffic
	// counted is how many pods the histogram counted when the tables were made, and
	// seen how many it had seen.
	counted float64
	seen    uint64
	status  Status
}

// New returns a policy that is binpack until Renew made its first prices. The options
// say how the histogram of asks is learned, and what it starts from.
func New(o demand.Options) *Policy { return &Policy{demand: demand.New(o), minPods: MinPods} }

// Name implements place.Policy.
func (*Policy) Name() string { return Name }

// Epoch implements place.Policy.
func (f *Policy) Epoch() uint64 {
	if p := f.prices.Load(); p != nil {
		return p.epoch
	}
	return 0
}

// Observe counts what a pod asks for. It should be called once for each pod.
func (f *Policy) Observe(a *place.Ask) { f.demand.Observe(a) }

// Status says where the policy stands.
type Status struct {
	// Kinds and Pods are what the histogram counts, as of the last renewal.
	Kinds int
	Pods  float64
	// Renewals counts calls of Renew, Tables how often tables were made anew, and
	// Epoch how often ratings may have changed.
	Renewals, Tables, Epoch uint64
	// Leaving is true where pods also leave, and not only come.
	Leaving bool
	// Err says why parts of devices are not told apart; nil when they are.
	Err error
}

// Status returns where the policy stands.
func (f *Policy) Status() Status {
	f.renewing.Lock()
	defer f.renewing.Unlock()
	status := f.status
	status.Leaving = f.traffic.leaving
	return status
}

// Renew computes the prices again, from the histogram and the nodes by name, which it does not
// keep. Decisions go on meanwhile. Tables are computed again when the nodes have other
// devices or the histogram has changed by a tenth.
func (f *Policy) Renew(nodes iter.Seq2[string, *place.Node]) {
	f.renewing.Lock()
	defer f.renewing.Unlock()
	f.status.Renewals++
	counted, seen := f.demand.Pods()
	f.status.Pods = counted
	f.count(nodes)
	if len(f.census.classes) == 0 || max(counted, float64(seen)) < f.minPods { // counted pods lose weight at once
		return
	}
	old := f.prices.Load()
	var s *statics
	if old != nil && float64(seen-f.seen) < f.counted/10 && f.census.fits(old.statics) {
		s = old.statics
	} else {
		counts := f.demand.Counts()
		s = newStatics(f.census.classes, f.census.count, counts)
		f.counted, f.seen = counted, seen
		f.status.Tables++
		f.status.Kinds, f.status.Err = len(counts), s.err
	}
	next := s.at(f.supply(s))
	if f.traffic.leaving {
		next.unfinished = unfinished
	}
	if next.same(old) {
		return
	}
	if old != nil {
		next.epoch = old.epoch
	}
	next.epoch++
	f.status.Epoch = next.epoch
	f.prices.Store(next)
}

func (f *Policy) count(nodes iter.Seq2[string, *place.Node]) {
	c := &f.census
	// Classes keep their order as long as there are devices of all of them.
	counted := make([]float64, len(c.classes), maxClasses)
	c.nodes, f.cells = c.nodes[:0], f.cells[:0]
	f.free = f.free[:0]
	var buf [16]cell
	for _, n := range nodes {
		sorted, free := buf[:0], 0.0
		for i := range n.Slots {
			s := &n.Slots[i]
			if s.Unhealthy || s.Total <= 0 {
				continue
			}
			at := classOf(c.classes, s)
			if at == unknown && len(c.classes) < maxClasses {
				at = uint8(len(c.classes)) //nolint:gosec // below maxClasses
				c.classes = append(c.classes, class{model: s.Model, total: s.Total})
				counted = append(counted, 0)
			}
			if at != unknown {
				counted[at]++
			}
			sorted = insert(sorted, cell{min(max(s.Free, 0), s.Total), at})
			free += float64(s.Free) / float64(s.Total) // below 0 as well: a pod that leaves counts
		}
		f.free = append(f.free, free)
		first := len(f.cells)
		f.cells = append(f.cells, sorted...)
		c.nodes = append(c.nodes, node{bounded(n.CPU), bounded(n.Memory), first, len(f.cells)})
	}
	c.count = counted
	f.traffic.look(f.free)
	if slices.Contains(counted, 0) { // next time without those that are gone
		c.classes, c.count = nil, nil
	}
}

// fits reports whether the tables were made for the classes of the census, and
// for about as many devices.
func (c *census) fits(s *statics) bool {
	if len(c.classes) != len(s.classes) {
		return false
	}
	capacity := 0.0
	for i := range c.classes {
		if c.classes[i].model != s.classes[i].model || c.classes[i].total != s.classes[i].total {
			return false
		}
		capacity += c.count[i] * float64(c.classes[i].total)
	}
	return math.Abs(capacity-s.capacity) <= s.capacity/20
}

// supply is what of the free units is useful, per class, and how many slots
// there are of each group.
func (f *Policy) supply(s *statics) (useful []float64, slots []int64) {
	useful, slots = make([]float64, len(s.classes)), make([]int64, len(s.groups))
	perValue := float64(s.largest) / one
	for _, c := range f.cells {
		if c.class != unknown {
			useful[c.class] += float64(s.tables[s.classes[c.class].cut].of(c.free)) * perValue
		}
	}
	for _, n := range f.census.nodes {
		st := state{n.cpu, n.memory, f.cells[n.first:n.end]}
		for i, of := range s.memo.of(s, &st).slots {
			slots[i] += of.whole
		}
	}
	return useful, slots
}

// Choose implements place.Policy. Several devices are those that are connected
// best and, of equally good ones, those with the least free units. A node is
// rated by the connections of the devices, then by the drop of its potential.
func (f *Policy) Choose(n *place.Node, a *place.Ask, buf []int) (slots []int, rating int64, ok bool) {
	p := f.prices.Load()
	if p == nil {
		return place.Binpack.Choose(n, a, buf)
	}
	slots = buf[:0]
	if !a.FitsBeside(n) {
		return slots, place.NoRating, false
	}
	var before, after [16]cell
	st := p.stateOf(n, before[:0])
	then := st.charged(n, a)
	switch {
	case a.Devices <= 0:
		return slots, p.potential(&st) - p.potential(&then) + p.surplus(n, a), true
	case a.Devices == 1:
		return p.one(n, a, &st, &then, after[:0], slots)
	}
	slots, rating, ok = place.Binpack.Choose(n, a, slots)
	if !ok {
		return slots, rating, false
	}
	p.take(&then, n, a, slots, after[:0])
	return slots, place.Connections(rating) + p.potential(&st) - p.potential(&then), true
}

// charged is a state less the CPU and memory of a pod on its node.
func (st state) charged(n *place.Node, a *place.Ask) state {
	if n.CPU != place.Unlimited {
		st.cpu = bounded(n.CPU - max(a.CPU, 0))
	}
	if n.Memory != place.Unlimited {
		st.memory = bounded(n.Memory - max(a.Memory, 0))
	}
	return st
}

// take copies the cells of a state into space, and takes the units of a pod from those of these
// slots.
func (p *snapshot) take(st *state, n *place.Node, a *place.Ask, slots []int, space []cell) {
	st.cells = append(space, st.cells...)
	for _, i := range slots {
		take(st.cells, st.find(p.cell(&n.Slots[i])), a.Units)
	}
}

// one chooses a single device: the one with which the potential drops most, then
// the one with the least free units, then the lowest Index and ID.
func (p *snapshot) one(n *place.Node, a *place.Ask, st, then *state, space []cell, slots []int) ([]int, int64, bool) {
	best, rating := -1, place.NoRating
	var bestCell cell
	before := p.potential(st)
	for i := range n.Slots {
		s := &n.Slots[i]
		if !a.Fits(s) {
			continue
		}
		c := p.cell(s)
		if best >= 0 && c == bestCell { // as good
			if first(s, &n.Slots[best]) {
				best = i
			}
			continue
		}
		if tried(p, n, a, i, c) {
			continue
		}
		then.cells = space[:0]
		then.cells = append(then.cells, st.cells...)
		take(then.cells, st.find(c), a.Units)
		drop := before - p.potential(then)
		if best < 0 || drop > rating || drop == rating && (c.free < bestCell.free || c.free == bestCell.free && first(s, &n.Slots[best])) {
			best, rating, bestCell = i, drop, c
		}
	}
	if best < 0 {
		return slots, place.NoRating, false
	}
	return append(slots, best), rating, true
}

// tried reports whether a device like the i-th one was looked at before and found
// worse than another.
func tried(p *snapshot, n *place.Node, a *place.Ask, i int, c cell) bool {
	for j := range i {
		s := &n.Slots[j]
		if s.Free == n.Slots[i].Free && a.Fits(s) && p.cell(s) == c {
			return true
		}
	}
	return false
}

// first reports whether s comes before t among equals.
func first(s, t *place.Slot) bool {
	return s.Index < t.Index || s.Index == t.Index && s.ID < t.ID
}

func (s *statics) cell(slot *place.Slot) cell {
	return cell{min(max(slot.Free, 0), slot.Total), classOf(s.classes, slot)}
}

// find returns the position of a cell that is there.
func (st *state) find(c cell) int {
	i, _ := slices.BinarySearchFunc(st.cells, c, func(a, b cell) int {
		switch {
		case a == b:
			return 0
		case a.less(b):
			return -1
		}
		return 1
	})
	return i
}
