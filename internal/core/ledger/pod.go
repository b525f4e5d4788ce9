package ledger

import (
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Holding says what a bound pod holds of one resource.
type Holding struct {
	Pod      accel.PodRef
	Node     string
	Resource accel.Resource
	// Units are the pod's peak, from its specification.
	Units accel.Units
	// Device is the device of the pod's verified grant, "" when it has none.
	Device accel.DeviceID
	// More are the second device of the grant and those after; nil for a pod on
	// one. Each has the same part of Units.
	More []accel.DeviceID
	// Confirmed is true when the node has seen kubelet hand the units out. It
	// means nothing without Device.
	Confirmed bool
	// Created is when the pod was created.
	Created time.Time
	// CPU and Memory are the pod's peak, in millicores and MiB; 0 where nobody
	// counts them. What was said last of a pod counts, whatever the resource.
	CPU, Memory int64
	// Priority is the pod's: one of higher priority may have it evicted.
	Priority int32
	// Ending is true when the deletion of the pod has begun: it holds its units
	// until it is gone, and evicting it costs nothing any more.
	Ending bool
	// Gone is true for a pod that nobody but its node knows any more, as its
	// containers still run: it cannot be evicted, and makes room by itself.
	Gone bool
}

// SetDevices makes the holding one of these devices, of which it keeps a copy.
func (h *Holding) SetDevices(ids []accel.DeviceID) {
	h.Device, h.More = ids[0], nil
	if len(ids) > 1 {
		h.More = slices.Clone(ids[1:])
	}
}

// holding is a Holding in the books.
type holding struct {
	Holding
	// node is where it is booked, nil once it is out of the books.
	node *node
	pos  int // in node.pods
	// slot and more are the positions of Device and More in node.slots, -1 when
	// the device is not (or no longer) known.
	slot int
	more []int
	next *holding

	// at is the time of the grant that was handed out, zero for pods that were
	// observed without a reservation here.
	at time.Time
	// reservation is nil for a pod that was observed.
	*reservation
}

// reservation is what is known of a pod that was not observed yet.
type reservation struct {
	// since is when the latest call of Reserve or Expect was, and binds how many of
	// Reserve share the reservation that were not undone.
	since time.Time
	binds int
	// expected is not nil until a bind takes over what Expect reserved.
	expected *expectation
}

// observed reports whether the API server has shown the pod bound.
func (h *holding) observed() bool { return h.reservation == nil }

// expects reports whether a bind has still to take over what Expect reserved.
func (h *holding) expects() bool { return h.reservation != nil && h.expected != nil }

// Observe books a pod that is bound and has not ended, as the API server shows
// it. It is idempotent, confirms a reservation of the same pod, and moves the
// pod when its device or node is another than booked; the package comment says
// which of two devices counts. A holding without pod UID, node or resource is
// ignored, and one of no units is one that ended.
func (l *Ledger) Observe(o Holding) {
	if o.Pod.UID == "" || o.Node == "" || o.Resource == "" {
		return
	}
	o.Units = min(o.Units, accel.MaxUnits)
	if o.Device == "" {
		o.More, o.Confirmed = nil, false
	}
	o.More = slices.Clone(o.More)

	l.mu.Lock()
	defer l.mu.Unlock()
	l.nominations.drop(o.Pod.UID, func(*nomination) bool { return true }) // it is where it was to go, or elsewhere
	h := l.holding(o.Pod.UID, o.Resource)
	switch {
	case h == nil && o.Units <= 0:
		return
	case h == nil:
		l.add(&holding{Holding: o})
		l.setCharge(o.Pod.UID, o.Node, o.CPU, o.Memory)
		return
	case o.Units <= 0:
		l.drop(h)
		return
	}
	if o.Node == h.Node && (o.Device == "" || h.Confirmed && !o.Confirmed) {
		o.Device, o.More, o.Confirmed = h.Device, h.More, h.Confirmed
	}
	moved := o.Node != h.Node || o.Device != h.Device || o.Units != h.Units || !slices.Equal(o.More, h.More)
	if moved {
		l.unbook(h)
	}
	if o.Node != h.Node {
		h.at = time.Time{} // it was the time of a grant on the other node
	}
	if !moved {
		h.node.book.count(h.Priority, -1)
		h.node.book.count(o.Priority, 1)
	}
	h.Holding = o
	h.reservation = nil
	delete(l.pending, h)
	if moved {
		l.put(l.node(o.Resource, o.Node), h)
	}
	l.setCharge(o.Pod.UID, o.Node, o.CPU, o.Memory)
}

// Forget frees all that a pod holds, of every resource, and its CPU and memory: the pod ended, or is
// gone from the API server. A pod that is being deleted still holds its units.
func (l *Ledger) Forget(podUID string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nominations.drop(podUID, func(*nomination) bool { return true })
	if l.pods[podUID] != nil {
		l.freed.Add(1)
	}
	for h := l.pods[podUID]; h != nil; h = l.pods[podUID] {
		l.drop(h)
	}
	l.setCharge(podUID, "", 0, 0)
}

// Freed counts the pods that were forgotten while they held something. It changes
// when there may be more room, and never goes down.
func (l *Ledger) Freed() uint64 { return l.freed.Load() }

// holding returns what the pod holds of the resource, nil for nothing.
func (l *Ledger) holding(podUID string, res accel.Resource) *holding {
	h := l.pods[podUID]
	for h != nil && h.Resource != res {
		h = h.next
	}
	return h
}

// add puts a new holding into all books.
func (l *Ledger) add(h *holding) {
	h.next = l.pods[h.Pod.UID]
	l.pods[h.Pod.UID] = h
	if !h.observed() {
		l.pending[h] = struct{}{}
	}
	l.put(l.node(h.Resource, h.Node), h)
}

// drop takes a holding out of all books.
func (l *Ledger) drop(h *holding) {
	l.unbook(h)
	delete(l.pending, h)
	if l.pods[h.Pod.UID] == h {
		if h.next == nil {
			delete(l.pods, h.Pod.UID)
			l.setCharge(h.Pod.UID, "", 0, 0)
		} else {
			l.pods[h.Pod.UID] = h.next
		}
		return
	}
	for p := l.pods[h.Pod.UID]; p != nil; p = p.next {
		if p.next == h {
			p.next = h.next
			return
		}
	}
}

// unbook takes a holding off its node.
func (l *Ledger) unbook(h *holding) {
	n := h.node
	l.takeOff(h)
	l.sweep(h.Resource, n)
}

// devices counts those that the holding names; one that names none counts as
// one that is not known.
func (h *holding) devices() int { return 1 + len(h.More) }

// device is one of the devices.
func (h *holding) device(i int) accel.DeviceID {
	if i == 0 {
		return h.Device
	}
	return h.More[i-1]
}

// slotOf is the position of a device in node.slots, -1 when it is not known.
func (h *holding) slotOf(i int) int {
	if i == 0 {
		return h.slot
	}
	return h.more[i-1]
}

// part is what the holding has of a device: equal parts, and where the units
// cannot be divided so, one more of the first ones.
func (h *holding) part(i int) accel.Units {
	n := accel.Units(h.devices())
	if accel.Units(i) < h.Units%n {
		return h.Units/n + 1
	}
	return h.Units / n
}

// locate finds the slots of the devices on the node.
func (h *holding) locate() {
	h.slot, h.more = h.node.find(h.Device), h.more[:0]
	for _, d := range h.More {
		h.more = append(h.more, h.node.find(d))
	}
}

// located reports whether all devices are known.
func (h *holding) located() bool { return h.slot >= 0 && !slices.Contains(h.more, -1) }
