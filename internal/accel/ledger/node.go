package ledger

import (
	"slices"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

// node is one node's part of one resource's book.
type node struct {
	// What Check reads comes first and is small: with thousands of nodes, the
	// time goes into fetching memory.

	// known is true while the node publishes the resource. A node that does
	// not stays in the book as long as pods hold something on it.
	known bool
	// largestFree is the most free units of any healthy slot, at least 0;
	// largestTotal the size of the largest slot, healthy or not.
	largestFree, largestTotal accel.Units
	// free are the free units of the healthy slots, in few where they fit.
	free []accel.Units
	few  [8]accel.Units

	name string
	unit string
	// published is what SetNode was given last, to notice that nothing changed.
	published []accel.Share
	// shares are the published ones that can be used, see usable; slots are the
	// same devices, at the same positions, with what is free now.
	shares []accel.Share
	slots  []place.Slot
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
		if n := b[name]; n != nil && !slices.ContainsFunc(inv, func(in accel.Inventory) bool { return in.Resource == res }) {
			l.retire(res, n)
		}
	}
	for i, in := range inv {
		if slices.ContainsFunc(inv[:i], func(earlier accel.Inventory) bool { return earlier.Resource == in.Resource }) {
			continue
		}
		n := l.node(in.Resource, name)
		n.unit = in.Unit
		if n.known && slices.Equal(n.published, in.Shares) {
			continue
		}
		n.known = true
		n.published = slices.Clone(in.Shares)
		n.setShares(usable(n.published))
	}
}

// DeleteNode takes the node's inventories out of the books. Its pods stay
// until they are forgotten, so a node that returns has them again.
func (l *Ledger) DeleteNode(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for res, b := range l.books {
		if n := b[name]; n != nil {
			l.retire(res, n)
		}
	}
}

// retire makes the node one that does not publish the resource.
func (l *Ledger) retire(res accel.Resource, n *node) {
	n.known, n.unit, n.published = false, "", nil
	n.setShares(nil)
	l.sweep(res, n)
}

// node returns the node's part of the resource's book, made if need be.
func (l *Ledger) node(res accel.Resource, name string) *node {
	b := l.books[res]
	if b == nil {
		b = make(book)
		l.books[res] = b
	}
	n := b[name]
	if n == nil {
		n = &node{name: name}
		b[name] = n
	}
	return n
}

// sweep takes a node out of the book that has nothing to say any more.
func (l *Ledger) sweep(res accel.Resource, n *node) {
	if n.known || len(n.pods) > 0 {
		return
	}
	delete(l.books[res], n.name)
	if len(l.books[res]) == 0 {
		delete(l.books, res)
	}
}

// usable returns the shares that can be counted on, see SetNode. It does not
// change its argument.
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
	return out
}

// setShares replaces the devices and books the node's pods on them.
func (n *node) setShares(shares []accel.Share) {
	n.shares = shares
	n.slots = make([]place.Slot, len(shares))
	n.free = n.few[:0]
	for i, s := range shares {
		n.slots[i] = place.Slot{ID: s.ID, Index: s.Index, Model: s.Model, Total: s.Units, Free: s.Units, Unhealthy: s.Health.Unhealthy}
	}
	for _, h := range n.pods {
		h.slot = n.find(h.Device)
		if h.slot >= 0 {
			n.slots[h.slot].Free -= h.Units
		}
	}
	n.summarize()
}

// find returns the position of the device's slot, -1 when the node has none.
// A node has a handful of devices, for which a map would be slower.
func (n *node) find(id accel.DeviceID) int {
	return slices.IndexFunc(n.slots, func(s place.Slot) bool { return s.ID == id })
}

// add books the holding on this node.
func (n *node) add(h *holding) {
	h.node, h.pos = n, len(n.pods)
	n.pods = append(n.pods, h)
	h.slot = n.find(h.Device)
	n.charge(h, h.Units)
}

// remove is the inverse of add.
func (n *node) remove(h *holding) {
	n.charge(h, -h.Units)
	last := len(n.pods) - 1
	n.pods[h.pos] = n.pods[last]
	n.pods[h.pos].pos = h.pos
	n.pods[last] = nil
	n.pods = n.pods[:last]
	h.node = nil
}

// charge books units (given back when below zero) where the holding is.
func (n *node) charge(h *holding, units accel.Units) {
	n.used += units
	if h.slot >= 0 {
		n.slots[h.slot].Free -= units
		n.summarize()
	}
}

// summarize derives from the slots what Check reads.
func (n *node) summarize() {
	n.largestFree, n.largestTotal, n.free = 0, 0, n.free[:0]
	for i := range n.slots {
		s := &n.slots[i]
		n.largestTotal = max(n.largestTotal, s.Total)
		if !s.Unhealthy {
			n.largestFree = max(n.largestFree, s.Free)
			n.free = append(n.free, s.Free)
		}
	}
}
