package fragmentation

import (
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// maxCPU bounds CPU in millicores, and memory in MiB, so that no product
// overflows: four million cores, or 4 PiB.
const maxCPU = 1 << 32

// cell is a healthy device of a node.
type cell struct {
	free  accel.Units
	class uint8
}

// state is all of a node that its potential depends on.
type state struct {
	// cpu and memory are what is left, maxCPU where nobody counts.
	cpu, memory int64
	// cells are in ascending order of class and free units, so that equal nodes
	// have equal states.
	cells []cell
}

// bounded is CPU or memory that is left.
func bounded(v int64) int64 { return min(max(v, 0), maxCPU) }

func (c cell) less(d cell) bool { return c.class < d.class || c.class == d.class && c.free < d.free }

func insert(cells []cell, c cell) []cell {
	cells = append(cells, c)
	for i := len(cells) - 1; i > 0 && c.less(cells[i-1]); i-- {
		cells[i], cells[i-1] = cells[i-1], cells[i]
	}
	return cells
}

// take takes units from the i-th cell and keeps the order.
func take(cells []cell, i int, units accel.Units) {
	c := cells[i]
	c.free -= units
	for ; i > 0 && c.less(cells[i-1]); i-- {
		cells[i] = cells[i-1]
	}
	cells[i] = c
}

// stateOf translates a node, into buf.
func (s *statics) stateOf(n *place.Node, buf []cell) state {
	cells := buf[:0]
	last := 0 // most nodes have devices of one class
	for i := range n.Slots {
		slot := &n.Slots[i]
		if slot.Unhealthy {
			continue
		}
		if last >= len(s.classes) || s.classes[last].total != slot.Total || s.classes[last].model != slot.Model {
			last = int(classOf(s.classes, slot))
		}
		cells = insert(cells, cell{min(max(slot.Free, 0), slot.Total), uint8(last)})
	}
	return state{bounded(n.CPU), bounded(n.Memory), cells}
}

// potential is what the free units of a node lack for what usually comes. It
// is zero where nothing is free; a good placement lowers it much, as it uses up
// what is good for little else. It is
//
//	wasteWeight * waste + mismatch - slots - models
//
// in which waste are the free parts of devices that no mixture of usual pieces
// fills; mismatch is what is free beside the CPU and memory that usual pods would
// take with it; slots is what whole slots for pods of several devices are worth,
// and models what the free units of sought-after models are, at the prices of the
// moment.
func (p *snapshot) potential(st *state) int64 {
	r := p.memo.of(p.statics, st)
	return r.value - p.slotsWorth(r) - p.modelsWorth(st)
}

// slotsWorth is what the whole slots of a state are worth.
func (p *snapshot) slotsWorth(r *remembered) (worth int64) {
	for i, price := range p.slotPrice {
		if price != 0 {
			worth += price*r.slots[i].whole + price*r.slots[i].begun/one*p.unfinished/256
		}
	}
	return worth
}

// modelsWorth is what the free units of sought-after models are worth.
func (p *snapshot) modelsWorth(st *state) (worth int64) {
	for i := range st.cells {
		c := &st.cells[i]
		if price := p.modelPrice[c.class]; price != 0 {
			worth += price * p.value(c.free) / levels
		}
	}
	return worth
}

// fixed is the part of the potential that does not depend on prices.
func (s *statics) fixed(st *state) int64 {
	waste, mismatch := s.fixedParts(st)
	return waste + mismatch
}

// fixedParts are the two parts of fixed, each with its weight.
func (s *statics) fixedParts(st *state) (weighed, mismatch int64) {
	var free, waste int64
	var classes uint64
	for _, c := range st.cells {
		v := s.value(c.free)
		free += v
		if c.class != unknown {
			waste += v - s.tables[s.classes[c.class].cut].of(c.free)
			classes |= 1 << c.class
		}
	}
	if free == 0 {
		return 0, 0
	}
	return wasteWeight * waste, s.mismatch(st, free, classes)
}

// buckets are the parts of a node's free units by which kinds are sorted.
const buckets = 64

// mismatch is the mean, over the usual kinds of a single device that suit the
// node best, of what is free and would stay so if the node was filled with pods
// of the kind until devices, CPU or memory run out.
func (s *statics) mismatch(st *state, free int64, classes uint64) int64 {
	// Kinds by what stays free, coarsely: the weight in a bucket and the sum of
	// weight times what stays free.
	var weight, sum [buckets + 1]int64
	var total int64
	for i := range s.pieces {
		p := &s.pieces[i]
		if p.classes&classes == 0 {
			continue
		}
		var room, pods int64
		for _, c := range st.cells {
			if c.free >= p.units && p.classes&(1<<c.class) != 0 {
				room += s.value(c.free)
				pods += min(int64(c.free/p.units), maxPods)
			}
		}
		pods = min(pods, maxPods)
		for j := range p.kinds {
			k := &p.kinds[j]
			stays := free
			if pods > 0 && st.cpu >= k.cpu && st.memory >= k.memory {
				stays = free - min(part(room, st.cpu, k.cpu*pods), part(room, st.memory, k.memory*pods))
			}
			at := stays * buckets / free
			weight[at] += k.weight
			sum[at] += k.weight * stays
			total += k.weight
		}
	}
	left := total * kept / 256
	if left == 0 {
		return 0
	}
	all, out := left, int64(0)
	for i := range weight {
		if weight[i] >= left {
			if left > 0 {
				out += sum[i] / weight[i] * left
			}
			break
		}
		left -= weight[i]
		out += sum[i]
	}
	return out / all
}

// maxPods bounds the pods that a node is taken to hold.
const maxPods = 1 << 20

// part is have/need of room, at most all of it.
func part(room, have, need int64) int64 {
	if have >= need || have >= maxCPU {
		return room
	}
	return room * have / need
}

// slotCount is for how many pods of a group a node has slots, and the square of the part
// that there is of another one, in parts of one.
type slotCount struct{ whole, begun int64 }

// slots returns those of each group.
func (s *statics) slots(st *state) []slotCount {
	if len(s.groups) == 0 {
		return nil
	}
	out := make([]slotCount, len(s.groups))
	var fitting, cells int64
	for i := range s.groups {
		g := &s.groups[i]
		if i == 0 || g.units != s.groups[i-1].units {
			fitting, cells = s.fitting(st, g.units)
		}
		if cells < int64(g.devices) {
			continue // never
		}
		x := fitting * one / int64(g.devices)
		if g.cpu > 0 && st.cpu < maxCPU {
			x = min(x, st.cpu*one/g.cpu)
		}
		if g.memory > 0 && st.memory < maxCPU {
			x = min(x, st.memory*one/g.memory)
		}
		rest := x % one
		out[i] = slotCount{x / one, rest * rest / one}
	}
	return out
}

// fitting is how many devices of a node have so many units free, and how many have them
// at all.
func (s *statics) fitting(st *state, units accel.Units) (fitting, cells int64) {
	for _, c := range st.cells {
		if c.class != unknown && s.classes[c.class].total >= units {
			cells++
			if c.free >= units {
				fitting++
			}
		}
	}
	return fitting, cells
}

// surplus rates a node for a pod that takes only CPU and memory, beside the
// drop of the potential: rather on a node with more CPU than its devices need,
// and there where little is left, so that large pods find room elsewhere.
func (s *statics) surplus(n *place.Node, a *place.Ask) int64 {
	if n.CPU == place.Unlimited {
		return 0
	}
	spare := int64(maxCPU)
	if devices := int64(len(n.Slots)); devices > 0 {
		spare = max(0, bounded(n.Cores)/devices-s.cpu)
	}
	if n.Cores <= 0 {
		spare = 0
	}
	left := bounded(n.CPU - max(a.CPU, 0))
	return spare*one/(spare+s.cpu) - left*(one/cpuPerValue)/s.cpu
}

// cpuPerValue is how many times the mean CPU of a device must be left on a node
// to matter as much as a device.
const cpuPerValue = 128

func (st *state) equal(r *remembered) bool {
	return st.cpu == r.cpu && st.memory == r.memory && slices.Equal(st.cells, r.cells)
}

func (st *state) hash() uint64 {
	h := uint64(st.cpu)*0x9e3779b97f4a7c15 ^ uint64(st.memory)*0xc2b2ae3d27d4eb4f //nolint:gosec // any bits do
	for _, c := range st.cells {
		h = (h ^ uint64(c.free)<<6 ^ uint64(c.class)) * 0xff51afd7ed558ccd //nolint:gosec // as above
		h ^= h >> 32
	}
	return h
}
