package ledger

import (
	"fmt"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Reserve chooses the devices of the node for a pod that is about to be bound and
// holds the pod's peak on them, and its CPU and memory on the node. The caller then binds the pod, with no lock held,
// and calls undo when that failed; undo does nothing when it was called before
// or the pod was observed meanwhile. It is never nil.
//
// A pod that is booked on that node already gets its grant again, so a repeated
// bind gets the same answer; such calls share one reservation, which goes when
// all of them were undone. Only a reservation on a device that was lost or
// became unhealthy meanwhile is made anew.
//
// The error is a *accel.NoFitError when there is no room, or wraps
// ErrNodeUnknown, ErrHeldElsewhere, ErrNothingAsked, ErrPolicyUnknown or
// ErrIndivisible.
func (l *Ledger) Reserve(pod accel.PodRef, created time.Time, nodeName string, req accel.Request) (accel.Grant, func(), error) {
	need := req.Peak()
	req.Pod = pod.UID
	ask, policy, askErr := l.ask(req)
	switch {
	case pod.UID == "":
		return refuse(fmt.Errorf("reserve for pod %s: it has no UID", pod))
	case need <= 0:
		return refuse(fmt.Errorf("reserve %s for pod %s: %w", req.Resource, pod, ErrNothingAsked))
	case askErr != nil:
		return refuse(fmt.Errorf("reserve %s for pod %s: %w", req.Resource, pod, askErr))
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.holding(pod.UID, req.Resource)
	if h != nil && h.expects() && !l.holds(h, nodeName, &ask) {
		l.drop(h) // kube-scheduler chose otherwise, or the devices are not there any more
		h = nil
	}
	if h != nil {
		switch {
		case h.Node != nodeName:
			return refuse(fmt.Errorf("reserve on node %s for pod %s: %w: on node %s", nodeName, pod, ErrHeldElsewhere, h.Node))
		case h.observed() && !h.located():
			return refuse(fmt.Errorf("reserve on node %s for pod %s: %w: the pod is bound to the node, on an unknown device", nodeName, pod,
				ErrHeldElsewhere))
		case h.observed():
			return h.grant(), func() {}, nil
		case h.expects():
			h.expected = nil
			return l.begin(h), l.undo(h), nil
		case h.serves(&ask):
			h.binds++
			h.since = l.now()
			return h.grant(), l.undo(h), nil
		}
	}

	n := l.books[req.Resource].node(nodeName)
	if n == nil || !n.known {
		return refuse(fmt.Errorf("reserve %s on node %s for pod %s: %w", req.Resource, nodeName, pod, ErrNodeUnknown))
	}
	chosen, refusal := l.choose(n, &req, &ask, policy)
	if refusal != nil {
		return refuse(refusal)
	}
	if h == nil {
		h = l.hold(pod, created, n, chosen, &req)
	} else {
		l.takeOff(h)
		h.Units = need
		h.SetDevices(names(n.slots, chosen))
		l.put(n, h)
		l.setCharge(pod.UID, nodeName, req.CPU, req.Memory)
	}
	return l.begin(h), l.undo(h), nil
}

// begin starts the first bind of a reservation, or one on other devices than before.
// l.mu is held.
func (l *Ledger) begin(h *holding) accel.Grant {
	h.since = l.now()
	h.at = l.stamp(h.since)
	h.binds++
	return h.grant()
}

// hold adds a reservation of these slots. l.mu is held.
func (l *Ledger) hold(pod accel.PodRef, created time.Time, n *node, slots []int, req *accel.Request) *holding {
	h := &holding{reservation: &reservation{}, Holding: Holding{
		Pod: pod, Node: n.host.name, Resource: req.Resource, Units: req.Peak(), Created: created, Priority: req.Priority,
	}}
	h.SetDevices(names(n.slots, slots))
	l.add(h)
	l.setCharge(pod.UID, h.Node, req.CPU, req.Memory)
	return h
}

// choose returns the slots of the node for a pod as if it had nothing reserved yet.
// The error is a *accel.NoFitError.
func (l *Ledger) choose(n *node, req *accel.Request, ask *place.Ask, policy place.Policy) ([]int, error) {
	slots := l.slotsFor(n, req)
	var view place.Node
	l.view(&view, n, slots, ask, req.Pod)
	chosen, _, ok := policy.Choose(&view, ask, nil)
	if !ok {
		return nil, &accel.NoFitError{
			Node: n.host.name, Resource: req.Resource, Code: refusal(slots, ask), Devices: ask.Devices, Need: ask.Units,
			Largest: freest(slots),
		}
	}
	return chosen, nil
}

// reserved returns what is reserved for a pod that was not observed, nil for nothing.
func (l *Ledger) reserved(podUID string, res accel.Resource) *holding {
	if podUID == "" {
		return nil
	}
	if h := l.holding(podUID, res); h != nil && !h.observed() {
		return h
	}
	return nil
}

// deadline is when a reservation ends.
func (l *Ledger) deadline(h *holding) time.Time {
	switch {
	case h.expected == nil:
		return h.since.Add(l.ttl)
	case h.expected.seen:
		return h.since.Add(l.bindDelay)
	}
	return h.since.Add(planTTL)
}

// serves reports whether a reservation still is what the ask needs.
func (h *holding) serves(a *place.Ask) bool {
	if !h.located() || h.devices() != a.Devices || h.Units != a.Units*accel.Units(a.Devices) {
		return false
	}
	for i := range h.devices() {
		if s := &h.node.slots[h.slotOf(i)]; s.Unhealthy || !a.Only.Allows(s.ID, s.Model) {
			return false
		}
	}
	return true
}

func refuse(err error) (accel.Grant, func(), error) { return accel.Grant{}, func() {}, err }

// Expire drops the reservations whose pods were not observed in time, and what was
// kept for pods for too long, and returns how many reservations. Its cost depends on
// the number of those that wait, not on the pods in the books.
func (l *Ledger) Expire() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, n := l.now(), 0
	l.expirePlans(now)
	for h := range l.pending {
		if !now.Before(l.deadline(h)) {
			l.drop(h)
			n++
		}
	}
	return n
}

// Unseen returns up to limit pods whose latest bind began at least age ago
// and that were not observed since. A watch usually shows a pod bound within
// milliseconds; one that was bound and deleted while the watch was away is never
// shown. The order is not defined.
func (l *Ledger) Unseen(age time.Duration, limit int) []accel.PodRef {
	l.mu.RLock()
	defer l.mu.RUnlock()
	before := l.now().Add(-age)
	var out []accel.PodRef
	for h := range l.pending {
		if len(out) < limit && !h.expects() && !h.since.After(before) {
			out = append(out, h.Pod)
		}
	}
	return out
}

// Release drops the reservation of a pod that has no node, unless a bind of it began
// less than age ago: a younger one may still be under way.
func (l *Ledger) Release(podUID string, age time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	before, released := l.now().Add(-age), false
	for h := l.pods[podUID]; h != nil; {
		next := h.next
		if !h.observed() && !h.expects() && !h.since.After(before) {
			l.drop(h)
			released = true
		}
		h = next
	}
	if released {
		l.freed.Add(1)
	}
	return released
}

// Reservations counts the reservations of binds whose pods were not observed yet.
func (l *Ledger) Reservations() int { return l.countPending(false) }

func (l *Ledger) countPending(expected bool) (n int) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for h := range l.pending {
		if h.expects() == expected {
			n++
		}
	}
	return n
}

// undo returns the function that gives back one call's part of a reservation.
func (l *Ledger) undo(h *holding) func() {
	done := false // guarded by l.mu
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if done || h.node == nil || h.observed() {
			return
		}
		done = true
		h.binds--
		if h.binds == 0 {
			l.drop(h)
		}
	}
}

// stamp returns now without its monotonic part, or the next nanosecond after
// the latest grant where now is not later: a node serves grants in the order of
// their times, and a clock may be coarse or step back.
func (l *Ledger) stamp(now time.Time) time.Time {
	now = now.Round(0).UTC()
	if !now.After(l.lastAt) {
		now = l.lastAt.Add(1)
	}
	l.lastAt = now
	return now
}

// grant says what the books hold. All devices must be known.
func (h *holding) grant() accel.Grant {
	s := &h.node.slots[h.slot]
	g := accel.Grant{
		Resource: h.Resource, Node: h.Node, Device: h.Device, Index: s.Index,
		DeviceUnits: s.Total, Units: h.Units, At: h.at, Confirmed: h.Confirmed,
	}
	for _, at := range h.more {
		s := &h.node.slots[at]
		g.More = append(g.More, accel.GrantedDevice{Device: s.ID, Index: s.Index, DeviceUnits: s.Total})
	}
	if g.At.IsZero() {
		g.At = h.Created
	}
	return g
}
