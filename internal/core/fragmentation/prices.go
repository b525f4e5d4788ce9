package fragmentation

import (
	"cmp"
	"maps"
	"math"
	"math/bits"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// The weights of the parts of the potential, and how demand is translated to
// prices. They were found on the workloads of the public trace that are marked for
// tuning, and hardly matter within a factor of two.
const (
	// wasteWeight is how much more a part of a device that no usual piece fills
	// counts than one for which the CPU may be missing: the first is certain.
	wasteWeight = 16
	// covered is the part of the pods that the usual kinds cover: rarer ones say
	// nothing about what will come next.
	covered = 0.95
	// rare is the part of the pieces below which a size does not count: pods of that
	// size were forgotten, or will not come in time to fill a hole.
	rare = 5e-5
	// kept is the part of the kinds, by pods, of which the mismatch with a node
	// counts, in 1/256: the ones that suit the node best. In a large cluster the
	// others go elsewhere.
	kept = 205
	// crowd is the demand at which parts of devices are rated, in clusters: a bit
	// more than one holds, so that room is what is short, also where all pods fit
	// without a rest.
	crowd = 1.02
	// maxKinds bounds the usual kinds.
	maxKinds = 160
	// maxGroups bounds the kinds of several devices that slots are kept for. The workloads
	// of the trace have up to 9.
	maxGroups = 24
	// alike is how many leading bits of the CPU of pods of several devices are equal where
	// these are of one group.
	alike = 2
	// ahead is how many times the usual share of what is free is expected to be
	// asked for before as much as that is free again.
	ahead = 2
	// unfinished is what an unfinished slot counts where pods leave, in 1/256: others
	// end, and it is whole again. Where none leave it never is, and to keep it costs
	// room for other pods.
	unfinished = 128
	// spareModels is how many standard deviations of the number of pieces that
	// only some models take are kept free on these.
	spareModels = 2
	// scarceFrom and scarceTo are the ratios of supply to demand between which
	// the price of a model falls from one to zero.
	scarceTo, scarceFrom = 0.9, 1.1
	// modelWeight is the price of a sought-after model at its highest, in parts of
	// what is free on it. At 1 the CPU that a node lacks often weighs more, and
	// pods that could go elsewhere take a model that others need. From 2 to 4
	// it gains a tenth of a point; more was not tried.
	modelWeight = 4
	// levels are the steps of a price that depends on what is free. Coarse ones
	// change rarely, and so do the ratings that others remember.
	levels = 32
	// maxUnions bounds the sets of models that are looked at.
	maxUnions = 256
	// maxClasses bounds the models times sizes that are told apart.
	maxClasses = 64
	// unknown is the class of a device that the prices do not know.
	unknown = maxClasses
)

// class is devices of one model and size.
type class struct {
	model string
	total accel.Units
	// cut is the position in tables.
	cut int
}

// kind is a usual ask of a single device.
type kind struct {
	cpu, memory int64
	weight      int64
}

// piece is all usual kinds of one size that the same classes take.
type piece struct {
	units   accel.Units
	classes uint64
	kinds   []kind
}

// group is a usual ask of several devices, of pods that need about as much CPU.
type group struct {
	devices int
	units   accel.Units
	// cpu suffices for each of its pods; memory is their mean.
	cpu, memory int64
	// share is of the units that are asked for, the part of this group and of those of as
	// many devices that need more CPU: all of them need slots like these.
	share float64
}

// restricted is a set of classes and the share of the units asked for that can
// go to no others.
type restricted struct {
	classes uint64
	share   float64
}

// statics are all that depends on demand and on what hardware there is, and not
// on who holds what. They do not change.
type statics struct {
	scale
	classes []class
	tables  []table
	pieces  []piece
	groups  []group
	unions  []restricted
	// capacity is all units of the cluster.
	capacity float64
	// cpu is the mean CPU of pods per value of one that they ask for, at least 1.
	cpu int64
	// err says why the tables do not tell useful parts from others; nil when they
	// do.
	err  error
	memo *memo
}

// snapshot is statics and the prices of a moment. It does not change.
type snapshot struct {
	*statics
	// slotPrice is per group, what a slot of it is worth. One for pods that need more CPU
	// is a slot of other groups as well, and worth the sum.
	slotPrice []int64
	// modelPrice is per class, in 1/levels, and zero for unknown.
	modelPrice [maxClasses + 1]int64
	// unfinished is what an unfinished slot counts, in 1/256 of a whole one times the
	// square of how much of it is there.
	unfinished int64
	epoch      uint64
}

// census is what there is in the cluster at a moment.
type census struct {
	classes []class
	count   []float64 // of devices, per class
	nodes   []node
}

// node is a node in a census.
type node struct {
	cpu, memory int64
	first, end  int // of cells
}

// classOf returns the class of a device, unknown for one that is not listed.
func classOf(classes []class, s *place.Slot) uint8 {
	for i := range classes {
		if classes[i].total == s.Total && classes[i].model == s.Model {
			return uint8(i)
		}
	}
	return unknown
}

// newStatics makes tables for devices of these classes, of each so many, and the
// demand. The kinds come in the order of their number.
func newStatics(classes []class, count []float64, counts []demand.Count) *statics {
	s := &statics{classes: slices.Clone(classes), memo: newMemo()}
	s.largest = 1
	for i, c := range classes {
		s.largest = max(s.largest, c.total)
		s.capacity += count[i] * float64(c.total)
	}
	s.cut(count, counts)
	s.usual(counts)
	s.several(counts)
	s.restrict(counts)
	return s
}

// cut makes the tables of useful parts.
func (s *statics) cut(count []float64, counts []demand.Count) {
	bySize, bins := map[accel.Units]float64{}, map[accel.Units]float64{}
	asked, sum := 0.0, 0.0
	for i := range counts {
		c := &counts[i]
		if c.Devices > 0 && c.Units > 0 && c.Units <= s.largest {
			n := c.Pods * float64(c.Devices)
			bySize[c.Units] += n
			asked += n * float64(c.Units)
			sum += n
		}
	}
	maps.DeleteFunc(bySize, func(_ accel.Units, n float64) bool { return n < rare*sum })
	for i, c := range s.classes {
		bins[c.total] += count[i]
	}
	devices, pieces := lots(bins, maxClasses), lots(bySize, maxSizes)
	for i := range pieces {
		pieces[i].count *= crowd * s.capacity / asked
	}
	value, err := worth(devices, pieces)
	if err != nil {
		// All that is free is useful: the other parts of the potential still count.
		s.err, pieces, value = err, nil, nil
	}
	for i := range s.classes {
		c := &s.classes[i]
		c.cut = slices.IndexFunc(s.tables, func(t table) bool { return t.total == c.total })
		if c.cut < 0 {
			c.cut = len(s.tables)
			s.tables = append(s.tables, newTable(c.total, pieces, value, s.scale))
		}
	}
}

// takes are the classes that a kind takes.
func (s *statics) takes(k *demand.Count) uint64 {
	var out uint64
	for i, c := range s.classes {
		if k.Models.Names("", c.model) && k.Units <= c.total {
			out |= 1 << i
		}
	}
	return out
}

// usual sets the pieces, from the kinds that cover most pods.
func (s *statics) usual(counts []demand.Count) {
	total, cpu, value := 0.0, 0.0, 0.0
	for i := range counts {
		c := &counts[i]
		total += c.Pods
		if c.Devices > 0 {
			cpu += c.Pods * float64(c.CPU)
			value += c.Pods * float64(c.Devices) * float64(s.value(c.Units)) / one
		}
	}
	s.cpu = 1
	if value > 0 {
		s.cpu = max(1, int64(min(cpu/value, maxCPU)))
	}
	type key struct {
		units   accel.Units
		classes uint64
	}
	at := map[key]int{}
	seen, kinds := 0.0, 0
	for i := range counts {
		c := &counts[i]
		if seen >= covered*total || kinds == maxKinds {
			break
		}
		seen += c.Pods
		weight := int64(math.Round(c.Pods / total * one))
		if c.Devices != 1 || c.Units <= 0 || weight == 0 {
			continue
		}
		k := key{c.Units, s.takes(c)}
		p, known := at[k]
		if !known {
			p = len(s.pieces)
			at[k] = p
			s.pieces = append(s.pieces, piece{units: k.units, classes: k.classes})
		}
		s.pieces[p].kinds = append(s.pieces[p].kinds, kind{min(c.CPU, maxCPU), min(c.Memory, maxCPU), weight})
		kinds++
	}
}

// several sets the groups: those of the greatest shares, of as many devices beside each
// other, by CPU.
func (s *statics) several(counts []demand.Count) {
	type key struct {
		devices int
		units   accel.Units
		cpu     int64
	}
	type sum struct {
		group
		asked, pods, memory float64
	}
	at := map[key]int{}
	var sums []sum
	asked := 0.0
	for i := range counts {
		c := &counts[i]
		units := c.Asked()
		asked += units
		if c.Devices < 2 || c.Units <= 0 {
			continue
		}
		cpu := bounded(c.CPU)
		k := key{c.Devices, c.Units, leading(cpu)}
		g, known := at[k]
		if !known {
			g = len(sums)
			at[k] = g
			sums = append(sums, sum{group: group{devices: c.Devices, units: c.Units}})
		}
		sums[g].asked += units
		sums[g].pods += c.Pods
		sums[g].cpu = max(sums[g].cpu, cpu)
		sums[g].memory += c.Pods * float64(c.Memory)
	}
	size := func(a, b sum) int {
		return cmp.Or(cmp.Compare(a.devices, b.devices), cmp.Compare(a.units, b.units), cmp.Compare(a.cpu, b.cpu))
	}
	slices.SortFunc(sums, func(a, b sum) int { return cmp.Or(cmp.Compare(b.asked, a.asked), size(a, b)) })
	sums = sums[:min(len(sums), maxGroups)]
	slices.SortFunc(sums, size)
	for i := range sums {
		g := &sums[i]
		g.group.memory = int64(min(g.memory/g.pods, maxCPU))
		share := 0.0
		for j := i; j < len(sums) && sums[j].devices == g.devices && sums[j].units == g.units; j++ {
			share += sums[j].asked
		}
		g.share = share / asked
		s.groups = append(s.groups, g.group)
	}
}

// leading is CPU without the bits in which pods of one group differ.
func leading(cpu int64) int64 {
	rest := max(bits.Len64(uint64(cpu))-alike, 0) //nolint:gosec // not below zero
	return cpu >> rest << rest
}

// restrict sets the unions: by Hall's theorem there is enough for all that is
// restricted when there is for every union of the sets that are asked for.
func (s *statics) restrict(counts []demand.Count) {
	all := uint64(1)<<len(s.classes) - 1 // 64 classes: 1<<64 is 0, less one is all
	sets := map[uint64]float64{}
	var order []uint64
	asked := 0.0
	for i := range counts {
		c := &counts[i]
		units := c.Asked()
		asked += units
		if set := s.takes(c); units > 0 && set != 0 && set != all {
			if sets[set] == 0 {
				order = append(order, set)
			}
			sets[set] += units
		}
	}
	slices.SortFunc(order, func(a, b uint64) int { return cmp.Or(cmp.Compare(sets[b], sets[a]), cmp.Compare(a, b)) })
	known := map[uint64]bool{all: true}
	var unions []uint64
	for _, set := range order {
		for _, u := range append([]uint64{0}, unions...) {
			if u |= set; !known[u] && len(unions) < maxUnions {
				known[u] = true
				unions = append(unions, u)
			}
		}
	}
	for _, u := range unions {
		r := restricted{classes: u}
		for _, set := range order {
			if set&^u == 0 {
				r.share += sets[set] / asked
			}
		}
		s.unions = append(s.unions, r)
	}
}

// at returns the prices when so much is useful of what is free per class, and
// there are so many slots of each group.
func (s *statics) at(useful []float64, slots []int64) *snapshot {
	p := &snapshot{statics: s, slotPrice: make([]int64, len(s.groups))}
	free := 0.0
	for _, f := range useful {
		free += f
	}
	for i := range s.groups {
		g := &s.groups[i]
		n, each := float64(slots[i]), float64(g.devices)*float64(g.units)
		short := max(atLeast(n, ahead*free*g.share/each), strays(n, s.capacity*g.share/each))
		p.slotPrice[i] = level(short) * int64(g.devices) * s.value(g.units) / levels
	}
	for c := range s.classes {
		ratio := math.Inf(1)
		for _, u := range s.unions {
			if u.classes&(1<<c) == 0 {
				continue
			}
			supply := 0.0
			for set := u.classes; set != 0; set &= set - 1 {
				supply += useful[bits.TrailingZeros64(set)]
			}
			// In pieces of the size of the largest device: with smaller ones the
			// deviation is smaller too.
			deviation := math.Sqrt(u.share*s.capacity/float64(s.largest)) * float64(s.largest)
			ratio = min(ratio, supply/max(u.share*free, spareModels*deviation))
		}
		p.modelPrice[c] = modelWeight * level((scarceFrom-ratio)/(scarceFrom-scarceTo))
	}
	return p
}

// level is a price from 0 to 1 in levels.
func level(price float64) int64 {
	return int64(math.Round(min(1, max(0, price)) * levels))
}

// atLeast is the probability that at least n pods come when mean are expected,
// of a Poisson distribution approached by a normal one.
func atLeast(n, mean float64) float64 {
	if mean <= 0 {
		return 0
	}
	return 0.5 * math.Erfc((n-0.5-mean)/math.Sqrt(2*mean))
}

// strays is the probability that the number of pods of a kind strays from its mean by n or
// more, up or down. Where pods come and go independently it has a Poisson distribution,
// here approached by a normal one.
func strays(n, mean float64) float64 {
	if mean <= 0 {
		return 0
	}
	return math.Erfc(n / math.Sqrt(2*mean))
}

// same reports whether nodes are rated the same by both.
func (p *snapshot) same(q *snapshot) bool {
	return q != nil && p.statics == q.statics && slices.Equal(p.slotPrice, q.slotPrice) && p.modelPrice == q.modelPrice &&
		p.unfinished == q.unfinished
}
