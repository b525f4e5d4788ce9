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
	// CPU and Memory are the pod's peak, in millicores and MiB; 0 where they are not
	// counted. The latest of a pod count, whatever the resource.
	CPU, Memory int64
	// Priority is the pod's: one of higher priority may have it evicted.
	Priority int32
	// Ending is true when the deletion of the pod has begun: it holds its units
	// until it is gone, and evicting it costs nothing any more.
	Ending bool
	// Gone is true for a pod that only its node knows any more, as its containers
	// still run: it cannot be evicted, and frees its units by itself.
	Gone bool
}

// SetDevices makes the holding one of these devices, of which it keeps a copy.
func (h *Holding) SetDevices(ids []accel.DeviceID) {
	h.Device, h.More = ids[0], nil
	if len(ids) > 1 {
		h.More = slices.Clone(ids[1:])
	}
}

// holding is a Holding that the ledger counts.
type holding struct {
	Holding
	on   placement
	next *holding // of the same pod, of another resource

	// at is the time of the grant that was handed out, zero for pods that were
	// observed without a reservation here.
	at time.Time
	// reservation is nil for a pod that was observed.
	reservation *reservation
}

// placement is where a holding is counted.
type placement struct {
	node *node // nil once it counts nowhere
	pos  int   // in node.pods
	// slot and more are the positions of Device and More in node.slots, -1 when
	// the device is not (or no longer) known.
	slot int
	more []int
}

// pods are all holdings.
type pods struct {
	// byUID maps a pod's UID to its holdings, a list over resources.
	byUID map[string]*holding
	// pending are the holdings of pods that are not bound yet as far as known.
	pending map[*holding]struct{}
	nodes   *nodes
	freed   uint64 // see Counts
}

// reservation is what is known of a pod that was not observed yet.
type reservation struct {
	// since is when the latest call of Reserve or Expect was, and binds how many of
	// Reserve share the reservation that were not undone.
	since time.Time
	binds int
	// expected is not nil until a bind takes over what Expect reserved.
	expected *expectation
	// held is true until Begin: what Hold reserved does not expire.
	held bool
}

// observed reports whether the API server has shown the pod bound.
func (h *holding) observed() bool { return h.reservation == nil }

// expects reports whether a bind has still to take over what Expect reserved.
func (h *holding) expects() bool { return h.reservation != nil && h.reservation.expected != nil }

// Observe counts a pod that is bound and has not ended, as the API server shows
// it. It is idempotent, confirms a reservation of the same pod, and moves the
// pod when its device or node is another than before; the package comment says
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
	l.state.nominations.drop(o.Pod.UID, func(*nomination) bool { return true }) // it is where it was to go, or elsewhere
	l.state.pods.observe(o)
}

func (ps *pods) observe(o Holding) {
	h := ps.on(o.Pod.UID, o.Resource)
	switch {
	case h == nil && o.Units <= 0:
		return
	case h == nil:
		ps.add(&holding{Holding: o})
		ps.nodes.hosts.charge(o.Pod.UID, o.Node, o.CPU, o.Memory)
		return
	case o.Units <= 0:
		ps.drop(h)
		return
	}
	if o.Node == h.Node && (o.Device == "" || h.Confirmed && !o.Confirmed) {
		o.Device, o.More, o.Confirmed = h.Device, h.More, h.Confirmed
	}
	moved := o.Node != h.Node || o.Device != h.Device || o.Units != h.Units || !slices.Equal(o.More, h.More)
	if moved {
		ps.unplace(h)
	}
	if o.Node != h.Node {
		h.at = time.Time{} // it was the time of a grant on the other node
	}
	if !moved {
		h.on.node.index.count(h.Priority, -1)
		h.on.node.index.count(o.Priority, 1)
	}
	h.Holding = o
	h.reservation = nil
	delete(ps.pending, h)
	if moved {
		ps.nodes.get(o.Resource, o.Node).put(h)
	}
	ps.nodes.hosts.charge(o.Pod.UID, o.Node, o.CPU, o.Memory)
}

// Forget frees all that a pod holds, of every resource, and its CPU and memory: the pod ended, or is
// gone from the API server. A pod that is being deleted still holds its units.
func (l *Ledger) Forget(podUID string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.nominations.drop(podUID, func(*nomination) bool { return true })
	l.state.pods.dropAll(podUID, func(*holding) bool { return true })
	l.state.nodes.hosts.charge(podUID, "", 0, 0)
}

// on returns what the pod holds of the resource, nil for nothing.
func (ps *pods) on(podUID string, res accel.Resource) *holding {
	h := ps.byUID[podUID]
	for h != nil && h.Resource != res {
		h = h.next
	}
	return h
}

// reserved returns what is reserved for a pod that was not observed, nil for nothing.
func (ps *pods) reserved(podUID string, res accel.Resource) *holding {
	if podUID == "" {
		return nil
	}
	if h := ps.on(podUID, res); h != nil && !h.observed() {
		return h
	}
	return nil
}

// expected returns the reservation of a pod whose bind is expected, nil for none.
func (ps *pods) expected(podUID string) *holding {
	h := ps.byUID[podUID]
	for h != nil && !h.expects() {
		h = h.next
	}
	return h
}

func (ps *pods) add(h *holding) {
	h.next = ps.byUID[h.Pod.UID]
	ps.byUID[h.Pod.UID] = h
	if !h.observed() {
		ps.pending[h] = struct{}{}
	}
	ps.nodes.get(h.Resource, h.Node).put(h)
}

// dropAll removes those holdings of a pod that are chosen, and reports whether any was.
func (ps *pods) dropAll(podUID string, chosen func(*holding) bool) (some bool) {
	for h := ps.byUID[podUID]; h != nil; {
		next := h.next
		if chosen(h) {
			ps.drop(h)
			some = true
		}
		h = next
	}
	if some {
		ps.freed++
	}
	return some
}

func (ps *pods) drop(h *holding) {
	ps.unplace(h)
	delete(ps.pending, h)
	if ps.byUID[h.Pod.UID] == h {
		if h.next == nil {
			delete(ps.byUID, h.Pod.UID)
			ps.nodes.hosts.charge(h.Pod.UID, "", 0, 0)
		} else {
			ps.byUID[h.Pod.UID] = h.next
		}
		return
	}
	for p := ps.byUID[h.Pod.UID]; p != nil; p = p.next {
		if p.next == h {
			p.next = h.next
			return
		}
	}
}

func (ps *pods) unplace(h *holding) {
	n := h.on.node
	n.remove(h)
	ps.nodes.sweep(h.Resource, n)
}

// devices counts those that the holding names; one that names none counts as
// one that is not known.
func (h *holding) devices() int { return 1 + len(h.More) }

func (h *holding) device(i int) accel.DeviceID {
	if i == 0 {
		return h.Device
	}
	return h.More[i-1]
}

// slotOf is the position of a device in node.slots, -1 when it is not known.
func (h *holding) slotOf(i int) int {
	if i == 0 {
		return h.on.slot
	}
	return h.on.more[i-1]
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

func (h *holding) locate() {
	h.on.slot, h.on.more = h.on.node.find(h.Device), h.on.more[:0]
	for _, d := range h.More {
		h.on.more = append(h.on.more, h.on.node.find(d))
	}
}

func (h *holding) located() bool { return h.on.slot >= 0 && !slices.Contains(h.on.more, -1) }
