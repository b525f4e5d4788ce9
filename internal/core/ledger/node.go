package ledger

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// node is what one node has of one resource.
type node struct {
	host   *host
	index  *index
	number int // in index

	// known is true while the node publishes the resource. A node that does
	// not stays in the index as long as pods hold something on it.
	known bool
	// largestFree is the most free units of any healthy slot, at least 0.
	largestFree accel.Units

	unit string
	// least is the fewest units of a device that a container can have.
	least accel.Units
	// published and links are what SetNode was given last, to notice that
	// nothing changed.
	published []accel.Share
	links     []accel.Link
	// shares are the published ones that can be used, see usable; slots are the
	// same devices, at the same positions, with what is free now, and graph says
	// how they are connected.
	shares []accel.Share
	slots  []place.Slot
	graph  *place.Graph
	// until says of each slot when its tier ends to count, the zero time for never.
	until []time.Time
	// used sums the units of all pods, placed or not.
	used accel.Units
	// pods are in no order; a holding knows its position.
	pods []*holding
}

// nodes are all nodes, by resource.
type nodes struct {
	byResource map[accel.Resource]*index
	// graphs are those of the nodes, by their keys: most nodes are built alike.
	graphs map[string]*place.Graph
	// hosts are all nodes of any index and those that have a capacity or a charge.
	hosts hosts
	// generation is that of the latest change of a node.
	generation uint64
	// widest is the size of the largest index so far.
	widest   atomic.Int64
	attested attested
}

// SetNode replaces the inventories of a node, all its resources at once. What
// pods hold stays and is counted on the new devices, in work that depends on
// this node alone; an inventory that did not change costs a comparison, and one with newer
// attestations little more.
//
// An attestation counts for accel.MaxAttestationAge from its time on, or from now on if a
// node's clock is ahead.
//
// An inventory that a codec would reject is made usable: of
// devices with the same ID, and of inventories of the same resource, the first
// counts; a device without ID is left out; units are cut to 0..MaxUnits, and
// withheld ones to what the device has.
func (l *Ledger) SetNode(name string, inv []accel.Inventory) {
	if name == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.nodes.set(name, inv, l.rules.now())
}

func (ns *nodes) set(name string, inv []accel.Inventory, now time.Time) {
	for res := range ns.byResource {
		if !slices.ContainsFunc(inv, func(in accel.Inventory) bool { return in.Resource == res }) {
			ns.retire(res, name)
		}
	}
	for i, in := range inv {
		if slices.ContainsFunc(inv[:i], func(earlier accel.Inventory) bool { return earlier.Resource == in.Resource }) {
			continue
		}
		n := ns.get(in.Resource, name)
		n.unit = in.Unit
		same := n.known && n.least == in.Least && slices.Equal(n.links, in.Links)
		if same && slices.Equal(n.published, in.Shares) {
			continue
		}
		until := n.expiries(in.Shares, now)
		same = same && slices.EqualFunc(n.published, in.Shares, sameButAttested)
		n.known, n.least = true, in.Least
		n.published, n.links = slices.Clone(in.Shares), slices.Clone(in.Links)
		if shares := usable(n.published); same {
			n.shares = shares
		} else {
			ns.setShares(n, shares)
		}
		ns.attest(n, until, now)
	}
}

// DeleteNode removes the node's inventories and capacity. Its pods stay
// until they are forgotten, so a node that returns has them again.
func (l *Ledger) DeleteNode(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	ns := l.state.nodes
	for res := range ns.byResource {
		ns.retire(res, name)
	}
	if h := ns.hosts.byName[name]; h != nil {
		h.limit(place.Unlimited, place.Unlimited)
		ns.hosts.sweep(h)
	}
}

// retire makes the node one that does not publish the resource.
func (ns *nodes) retire(res accel.Resource, name string) {
	n := ns.byResource[res].node(name)
	if n == nil {
		return
	}
	n.known, n.unit, n.least, n.published, n.links = false, "", 0, nil, nil
	ns.setShares(n, nil)
	ns.attest(n, nil, time.Time{})
	ns.sweep(res, n)
}

// get returns the node in the index of the resource, made if need be.
func (ns *nodes) get(res accel.Resource, name string) *node {
	x := ns.byResource[res]
	if x == nil {
		x = &index{numbers: map[string]int{}, priorities: map[int32]int{}, generation: &ns.generation}
		ns.byResource[res] = x
	}
	n := x.node(name)
	if n == nil {
		n = &node{host: ns.hosts.get(name)}
		n.host.nodes = append(n.host.nodes, n)
		x.add(n)
		n.touch()
		ns.widest.Store(max(ns.widest.Load(), int64(x.size())))
	}
	return n
}

// publishing returns a node that publishes the resource, nil for any other.
func (ns *nodes) publishing(res accel.Resource, name string) *node {
	if n := ns.byResource[res].node(name); n != nil && n.known {
		return n
	}
	return nil
}

// sweep removes a node that neither publishes the resource nor has pods that hold some.
func (ns *nodes) sweep(res accel.Resource, n *node) {
	if n.known || len(n.pods) > 0 {
		return
	}
	n.index.remove(n)
	n.host.nodes = slices.DeleteFunc(n.host.nodes, func(o *node) bool { return o == n })
	ns.hosts.sweep(n.host)
	if len(n.index.numbers) == 0 {
		delete(ns.byResource, res)
	}
}

// touch gives the node a new generation: what is known of it changed.
func (n *node) touch() {
	*n.index.generation++
	n.index.generations[n.number] = *n.index.generation
}

// usable returns the shares that can be counted on, see SetNode. It does not
// change its argument, and returns it where that is all of them.
func usable(shares []accel.Share) []accel.Share {
	out := make([]accel.Share, 0, len(shares))
	seen := make(map[accel.DeviceID]bool, len(shares))
	for _, s := range shares {
		if s.ID == "" || seen[s.ID] {
			continue
		}
		seen[s.ID] = true
		s.Units = min(max(s.Units, 0), accel.MaxUnits)
		s.Withheld = min(max(s.Withheld, 0), s.Units)
		out = append(out, s)
	}
	if slices.Equal(out, shares) {
		return shares
	}
	return out
}

// setShares replaces the devices and counts the node's pods on them.
func (ns *nodes) setShares(n *node, shares []accel.Share) {
	n.shares = shares
	n.slots = make([]place.Slot, len(shares))
	n.graph = ns.graph(place.GraphOf(shares, n.links))
	for i, s := range shares {
		n.slots[i] = place.Slot{
			ID: s.ID, Index: s.Index, Model: s.Model, Total: s.Units, Free: s.Units - s.Withheld, Least: n.least,
			Unhealthy: s.Health.Unhealthy,
		}
	}
	for _, h := range n.pods {
		h.locate()
		for _, p := range h.parts() {
			n.slots[p.slot].Free -= p.units
		}
	}
	n.largestFree = freest(n.slots)
	n.touch()
}

// maxGraphs bounds the graphs that are kept for nodes to come.
const maxGraphs = 1 << 10

// graph returns the one graph of those connections.
func (ns *nodes) graph(g *place.Graph) *place.Graph {
	if g == nil {
		return nil
	}
	key := g.Key()
	if known := ns.graphs[key]; known != nil {
		return known
	}
	if len(ns.graphs) >= maxGraphs {
		clear(ns.graphs)
	}
	ns.graphs[key] = g
	return g
}

// find returns the position of the device's slot, -1 when the node has none.
// A node has a handful of devices, for which a map would be slower.
func (n *node) find(id accel.DeviceID) int {
	return slices.IndexFunc(n.slots, func(s place.Slot) bool { return s.ID == id })
}

// put adds a holding.
func (n *node) put(h *holding) {
	h.on.node, h.on.pos = n, len(n.pods)
	n.pods = append(n.pods, h)
	n.index.count(h.Priority, 1)
	h.locate()
	n.take(h, 1)
}

// remove is the inverse of put.
func (n *node) remove(h *holding) {
	n.take(h, -1)
	n.index.count(h.Priority, -1)
	last := len(n.pods) - 1
	n.pods[h.on.pos] = n.pods[last]
	n.pods[h.on.pos].on.pos = h.on.pos
	n.pods[last] = nil
	n.pods = n.pods[:last]
	h.on.node = nil
}

// take counts what the holding has, or gives it back where times is -1.
func (n *node) take(h *holding, times accel.Units) {
	n.used += times * h.Units
	changed := false
	for i := range h.devices() {
		if at := h.slotOf(i); at >= 0 {
			n.slots[at].Free -= times * h.part(i)
			changed = true
		}
	}
	if changed {
		n.largestFree = freest(n.slots)
		n.touch()
	}
}

// freest is the most free units of any healthy slot, at least 0.
func freest(slots []place.Slot) (free accel.Units) {
	for i := range slots {
		if s := &slots[i]; !s.Unhealthy {
			free = max(free, s.Free)
		}
	}
	return free
}
