package claims

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Rated is a node that has what a pod's claims ask for.
type Rated struct {
	Node   string
	Rating int64
}

// State is a cluster at one moment.
type State struct {
	// Slices are all of the cluster.
	Slices []*resourceapi.ResourceSlice
	// Held is what claims hold, those included whose allocation is not written yet. It must not be changed.
	Held *structured.AllocatedState
	// Hosts returns what is left of a node beside devices. It is called for a policy that learns.
	Hosts func(node string) Host
}

// Host is what a node has left for pods, in millicores and MiB, and all CPU that it has for them.
type Host struct{ CPU, Memory, Cores int64 }

// uncounted is a host that is not looked at.
var uncounted = Host{CPU: place.Unlimited, Memory: place.Unlimited}

// Rank returns the nodes that have what is asked for, the best first and equal ones by name.
func (c *Catalog) Rank(ctx context.Context, of State, d Demand, policy place.Policy) ([]Rated, error) {
	if d.Empty() {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, selectFor)
	defer cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read(of.Slices)
	var units *unitAsk
	if learning, ok := policy.(perResource); ok {
		c.look(of)
		var err error
		if units, err = c.ask(ctx, &d); err != nil {
			return nil, err
		}
		if policy = place.Binpack; units != nil {
			policy = learning.For(units.resource)
		}
	}
	key := fmt.Sprintf("%s\x00%d\x00%s", policy.Name(), policy.Epoch(), d.key)
	if units != nil {
		key += fmt.Sprintf("%d\x00%d", d.CPU, d.Memory)
	}
	idle := c.idle[key]
	if idle == nil {
		if len(c.idle) >= maxSelectors {
			clear(c.idle)
		}
		idle = make([]outcome, len(c.nodes))
		c.idle[key] = idle
	}
	busy := c.busy(of.Held)
	out := make([]Rated, 0, len(c.nodes))
	var s sheet
	for i := range c.nodes {
		node, host, is := &c.nodes[i], uncounted, idle[i]
		if units != nil {
			host = c.hosts[i]
		}
		if busy[i] || !is.known || is.host != host {
			var err error
			if s.start(node, of.Held); units != nil {
				is.rating, is.fits = units.rate(node, host, policy, &s)
			} else if is.rating, is.fits, err = c.rate(ctx, node, d.requests, policy, &s); err != nil {
				return nil, err
			}
		}
		if !busy[i] {
			is.known, is.host = true, host
			idle[i] = is
		}
		if is.fits {
			out = append(out, Rated{node.name, is.rating})
		}
	}
	slices.SortStableFunc(out, func(a, b Rated) int { return cmp.Compare(b.Rating, a.Rating) })
	return out, nil
}

// outcome is what came of rating a node, once it is known.
type outcome struct {
	known, fits bool
	rating      int64
	host        Host
}

// busy returns, by position, of which nodes claims hold something.
func (c *Catalog) busy(held *structured.AllocatedState) []bool {
	busy := make([]bool, len(c.nodes))
	mark := func(id structured.DeviceID) {
		if i, known := c.owner[id]; known {
			busy[i] = true
		}
	}
	for id := range held.AllocatedDevices {
		mark(id)
	}
	for id := range held.AggregatedCapacity {
		mark(id)
	}
	return busy
}

// sheet is what is left of a node as requests are placed on it. Its space is used again for each node.
type sheet struct {
	// left is by device, and inUse says whether it draws on its counters already.
	left  []int64
	inUse []bool
	drawn []map[counter]int64 // by pool
	// slots are the devices that one request may have, and candidates what they are.
	slots      []place.Slot
	candidates []candidate
	chosen     []int
	node       place.Node
}

// candidate is a device of which a request would take so much. at is its position in the sheet.
type candidate struct {
	device   *device
	pool, at int
	need     int64
}

// rate places the requests one after the other. Among several, the sum of the ratings counts.
func (c *Catalog) rate(ctx context.Context, n *node, requests []request, policy place.Policy, s *sheet) (
	rating int64, fits bool, err error) {
	for i := range requests {
		ask, err := c.fill(ctx, n, &requests[i], s)
		if err != nil {
			return 0, false, err
		}
		chosen, one, ok := policy.Choose(&place.Node{Slots: s.slots, CPU: place.Unlimited, Memory: place.Unlimited}, &ask, s.chosen)
		if s.chosen = chosen; !ok {
			return 0, false, nil
		}
		rating += one
		for _, k := range chosen {
			if !s.take(n, s.candidates[k]) {
				return 0, false, nil
			}
		}
	}
	return rating, true, nil
}

// start fills the sheet with what claims have left of a node.
func (s *sheet) start(n *node, held *structured.AllocatedState) {
	s.left, s.inUse, s.drawn = s.left[:0], s.inUse[:0], s.drawn[:0]
	for i := range n.pools {
		p := &n.pools[i]
		var drawn map[counter]int64
		if len(p.counters) > 0 {
			drawn = map[counter]int64{}
		}
		for _, of := range p.slices {
			for j := range of.devices {
				d := &of.devices[j]
				used := d.used(held)
				s.inUse = append(s.inUse, used > 0)
				if used > 0 {
					d.draw(drawn)
				}
				if !d.free || !d.shared && used > 0 {
					used = d.total
				}
				s.left = append(s.left, max(d.total-used, 0))
			}
		}
		s.drawn = append(s.drawn, drawn)
	}
}

// take gives a request what it takes, unless a device that was taken before overlaps.
func (s *sheet) take(n *node, c candidate) bool {
	if !s.inUse[c.at] {
		if !n.pools[c.pool].allows(c.device, s.drawn[c.pool]) {
			return false
		}
		c.device.draw(s.drawn[c.pool])
		s.inUse[c.at] = true
	}
	s.left[c.at] -= c.need
	return true
}

// fill makes slots of the devices that a request selects, and returns what it asks of each.
func (c *Catalog) fill(ctx context.Context, n *node, r *request, s *sheet) (place.Ask, error) {
	ask := place.Ask{Units: 1, Devices: r.count}
	s.slots, s.candidates = s.slots[:0], s.candidates[:0]
	at := -1
	for i := range n.pools {
		p := &n.pools[i]
		for _, of := range p.slices {
			selected, err := c.selects(ctx, of, r)
			if err != nil {
				return ask, err
			}
			for j := range of.devices {
				at++
				d := &of.devices[j]
				need, ok := r.need(d)
				if !selected[j] || !ok || need <= 0 || !s.inUse[at] && !p.allows(d, s.drawn[i]) {
					continue
				}
				slot := place.Slot{ID: accel.DeviceID(d.api.Name), Index: at}
				if len(r.amounts) == 0 {
					// Such a request takes another amount of each device, which is its unit then.
					slot.Total, slot.Free = accel.Units(d.total/need), accel.Units(s.left[at]/need)
				} else {
					unit := d.unit()
					ask.Units = max(ask.Units, accel.Units((need+unit-1)/unit))
					slot.Total, slot.Free = accel.Units(d.total/unit), accel.Units(s.left[at]/unit)
				}
				s.slots, s.candidates = append(s.slots, slot), append(s.candidates, candidate{d, i, at, need})
			}
		}
	}
	return ask, nil
}

// unit is in what a device's capacity is rated. Policies count in units that are fewer than bytes.
func (d *device) unit() int64 {
	if d.capacity == wire.MemoryCapacity {
		return wire.MemoryStep
	}
	return 1
}

// used is what claims hold of a device.
func (d *device) used(held *structured.AllocatedState) int64 {
	if held.AllocatedDevices.Has(d.id) {
		return d.total
	}
	if !d.shared {
		return 0
	}
	if amount := held.AggregatedCapacity[d.id][d.capacity]; amount != nil {
		return amount.Value()
	}
	return 0
}

// counter is one of a pool. By counters overlapping devices exclude each other.
type counter struct{ set, name string }

// draw adds what the device draws on counters, which it does once, however many claims hold it.
func (d *device) draw(on map[counter]int64) {
	if on == nil {
		return
	}
	for _, from := range d.api.ConsumesCounters {
		for name, amount := range from.Counters {
			on[counter{from.CounterSet, name}] += amount.Value.Value()
		}
	}
}

// allows reports whether the counters have left what a device draws that no claim holds.
func (p *pool) allows(d *device, drawn map[counter]int64) bool {
	for _, from := range d.api.ConsumesCounters {
		i := slices.IndexFunc(p.counters, func(s resourceapi.CounterSet) bool { return s.Name == from.CounterSet })
		if i < 0 {
			return false
		}
		for name, amount := range from.Counters {
			total := p.counters[i].Counters[name]
			if drawn[counter{from.CounterSet, name}]+amount.Value.Value() > total.Value.Value() {
				return false
			}
		}
	}
	return true
}
