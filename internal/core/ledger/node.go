package ledger

import (
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// node is one node's part of one resource's book.
type node struct {
	host   *host
	book   *book
	number int // in book

	// known is true while the node publishes the resource. A node that does
	// not stays in the book as long as pods hold something on it.
	known bool
	// largestFree is the most free units of any healthy slot, at least 0.
	largestFree accel.Units

	unit string
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
	// used sums the units of all pods, placed or not.
	used accel.Units
	// pods are in no order; a holding knows its position.
	pods []*holding
}

// SetNode replaces the inventories of a node, all its resources at once. What
// pods hold stays and is booked on the new devices, in work that depends on
// this node alone; an inventory that did not change costs a comparison.
//
// An inventory that a codec would refuse is made usable rather than refused: of
// devices with the same ID, and of inventories of the same resource, the first
// counts; a device without ID is left out; units are cut to 0..MaxUnits.
func (l *Ledger) SetNode(name string, inv []accel.Inventory) {
	if name == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for res, b := range l.books {
		if n := b.node(name); n != nil && !slices.ContainsFunc(inv, func(in accel.Inventory) bool { return in.Resource == res }) {
			l.retire(res, n)
		}
	}
	for i, in := range inv {
		if slices.ContainsFunc(inv[:i], func(earlier accel.Inventory) bool { return earlier.Resource == in.Resource }) {
			continue
		}
		n := l.node(in.Resource, name)
		n.unit = in.Unit
		if n.known && slices.Equal(n.published, in.Shares) && slices.Equal(n.links, in.Links) {
			continue
		}
		n.known = true
		n.published, n.links = slices.Clone(in.Shares), slices.Clone(in.Links)
		l.setShares(n, usable(n.published))
	}
}

// DeleteNode takes the node's inventories and capacity out of the books. Its pods stay
// until they are forgotten, so a node that returns has them again.
func (l *Ledger) DeleteNode(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for res, b := range l.books {
		if n := b.node(name); n != nil {
			l.retire(res, n)
		}
	}
	if h := l.hosts[name]; h != nil {
		l.setCapacity(h, place.Unlimited, place.Unlimited)
		l.sweepHost(h)
	}
}

// retire makes the node one that does not publish the resource.
func (l *Ledger) retire(res accel.Resource, n *node) {
	n.known, n.unit, n.published, n.links = false, "", nil, nil
	l.setShares(n, nil)
	l.sweep(res, n)
}

// node returns the node's part of the resource's book, made if need be.
func (l *Ledger) node(res accel.Resource, name string) *node {
	b := l.books[res]
	if b == nil {
		b = newBook()
		l.books[res] = b
	}
	n := b.node(name)
	if n == nil {
		n = &node{host: l.host(name)}
		n.host.nodes = append(n.host.nodes, n)
		b.add(n)
		l.touch(n)
		l.widest.Store(max(l.widest.Load(), int64(b.size())))
	}
	return n
}

// sweep takes a node out of the book that has nothing to say any more.
func (l *Ledger) sweep(res accel.Resource, n *node) {
	if n.known || len(n.pods) > 0 {
		return
	}
	n.book.remove(n)
	n.host.nodes = slices.DeleteFunc(n.host.nodes, func(o *node) bool { return o == n })
	l.sweepHost(n.host)
	if len(n.book.numbers) == 0 {
		delete(l.books, res)
	}
}

// touch says that what is known of the node changed.
func (l *Ledger) touch(n *node) {
	l.generation++
	n.book.generations[n.number] = l.generation
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
		out = append(out, s)
	}
	if slices.Equal(out, shares) {
		return shares
	}
	return out
}

// setShares replaces the devices and books the node's pods on them.
func (l *Ledger) setShares(n *node, shares []accel.Share) {
	n.shares = shares
	n.slots = make([]place.Slot, len(shares))
	n.graph = l.graph(place.GraphOf(shares, n.links))
	for i, s := range shares {
		n.slots[i] = place.Slot{ID: s.ID, Index: s.Index, Model: s.Model, Total: s.Units, Free: s.Units, Unhealthy: s.Health.Unhealthy}
	}
	for _, h := range n.pods {
		h.locate()
		for _, p := range h.parts() {
			n.slots[p.slot].Free -= p.units
		}
	}
	n.summarize()
	l.touch(n)
}

// maxGraphs bounds the graphs that are kept for nodes to come.
const maxGraphs = 1 << 10

// graph returns the one graph of those connections.
func (l *Ledger) graph(g *place.Graph) *place.Graph {
	if g == nil {
		return nil
	}
	key := g.Key()
	if known := l.graphs[key]; known != nil {
		return known
	}
	if len(l.graphs) >= maxGraphs {
		clear(l.graphs)
	}
	l.graphs[key] = g
	return g
}

// find returns the position of the device's slot, -1 when the node has none.
// A node has a handful of devices, for which a map would be slower.
func (n *node) find(id accel.DeviceID) int {
	return slices.IndexFunc(n.slots, func(s place.Slot) bool { return s.ID == id })
}

// put books the holding on a node.
func (l *Ledger) put(n *node, h *holding) {
	h.node, h.pos = n, len(n.pods)
	n.pods = append(n.pods, h)
	n.book.count(h.Priority, 1)
	h.locate()
	l.take(h, 1)
}

// takeOff is the inverse of put.
func (l *Ledger) takeOff(h *holding) {
	n := h.node
	l.take(h, -1)
	n.book.count(h.Priority, -1)
	last := len(n.pods) - 1
	n.pods[h.pos] = n.pods[last]
	n.pods[h.pos].pos = h.pos
	n.pods[last] = nil
	n.pods = n.pods[:last]
	h.node = nil
}

// take books what the holding has, or gives it back where times is -1.
func (l *Ledger) take(h *holding, times accel.Units) {
	n := h.node
	n.used += times * h.Units
	changed := false
	for i := range h.devices() {
		if at := h.slotOf(i); at >= 0 {
			n.slots[at].Free -= times * h.part(i)
			changed = true
		}
	}
	if changed {
		n.summarize()
		l.touch(n)
	}
}

// summarize derives from the slots what Check reads.
func (n *node) summarize() { n.largestFree = freest(n.slots) }

// freest is the most free units of any healthy slot, at least 0.
func freest(slots []place.Slot) (free accel.Units) {
	for i := range slots {
		if s := &slots[i]; !s.Unhealthy {
			free = max(free, s.Free)
		}
	}
	return free
}
