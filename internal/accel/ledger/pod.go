package ledger

import (
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
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
	// Confirmed is true when the node has seen kubelet hand the units out. It
	// means nothing without Device.
	Confirmed bool
	// Created is when the pod was created.
	Created time.Time
	// Priority is the pod's: one of higher priority may have it evicted.
	Priority int32
	// Ending is true when the deletion of the pod has begun: it holds its units
	// until it is gone, and evicting it costs nothing any more.
	Ending bool
}

// holding is a Holding in the books.
type holding struct {
	Holding
	// node is where it is booked, nil once it is out of the books.
	node *node
	pos  int // in node.pods
	slot int // in node.slots, -1 when the device is not (or no longer) known
	next *holding

	// observed is false for a reservation.
	observed bool
	// at is the time of the grant that was handed out, zero for pods that were
	// observed without a reservation here.
	at time.Time
	// deadline and binds are those of a reservation: when it expires, and how
	// many calls of Reserve share it that were not undone.
	deadline time.Time
	binds    int
}

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
	o.Confirmed = o.Confirmed && o.Device != ""

	l.mu.Lock()
	defer l.mu.Unlock()
	l.nominations.drop(o.Pod.UID, func(*nomination) bool { return true }) // it is where it was to go, or elsewhere
	h := l.holding(o.Pod.UID, o.Resource)
	switch {
	case h == nil && o.Units <= 0:
		return
	case h == nil:
		l.add(&holding{Holding: o, observed: true})
		return
	case o.Units <= 0:
		l.drop(h)
		return
	}
	if o.Node == h.Node && (o.Device == "" || h.Confirmed && !o.Confirmed) {
		o.Device, o.Confirmed = h.Device, h.Confirmed
	}
	moved := o.Node != h.Node || o.Device != h.Device || o.Units != h.Units
	if moved {
		l.unbook(h)
	}
	if o.Node != h.Node {
		h.at = time.Time{} // it was the time of a grant on the other node
	}
	h.Holding = o
	if !h.observed {
		h.observed = true
		delete(l.pending, h)
	}
	if moved {
		l.node(o.Resource, o.Node).add(h)
	}
}

// Forget frees all that a pod holds, of every resource: the pod ended, or is
// gone from the API server. A pod that is being deleted still holds its units.
func (l *Ledger) Forget(podUID string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nominations.drop(podUID, func(*nomination) bool { return true })
	for h := l.pods[podUID]; h != nil; h = l.pods[podUID] {
		l.drop(h)
	}
}

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
	if !h.observed {
		l.pending[h] = struct{}{}
	}
	l.node(h.Resource, h.Node).add(h)
}

// drop takes a holding out of all books.
func (l *Ledger) drop(h *holding) {
	l.unbook(h)
	delete(l.pending, h)
	if l.pods[h.Pod.UID] == h {
		if h.next == nil {
			delete(l.pods, h.Pod.UID)
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
	n.remove(h)
	l.sweep(h.Resource, n)
}
