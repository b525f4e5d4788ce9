package ledger

import (
	"fmt"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

// Reserve picks a device of the node for a pod that is about to be bound and
// holds the pod's peak on it. The caller then binds the pod, with no lock held,
// and calls undo when that failed; undo does nothing when it was called before
// or the pod was observed meanwhile. It is never nil.
//
// A pod that is booked on that node already gets its grant again, so a repeated
// bind gets the same answer; such calls share one reservation, which goes when
// all of them were undone. Only a reservation on a device that was lost or
// became unhealthy meanwhile is made anew.
//
// The error is a *accel.NoFitError when no device has room, or wraps
// ErrNodeUnknown, ErrHeldElsewhere or ErrNothingAsked.
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
	if h != nil {
		switch {
		case h.Node != nodeName:
			return refuse(fmt.Errorf("reserve on node %s for pod %s: %w: on node %s", nodeName, pod, ErrHeldElsewhere, h.Node))
		case h.observed && h.slot < 0:
			return refuse(fmt.Errorf("reserve on node %s for pod %s: %w: it is bound to the node, on a device that is not known", nodeName, pod, ErrHeldElsewhere))
		case h.observed:
			return h.grant(), func() {}, nil
		case h.slot >= 0 && !h.node.slots[h.slot].Unhealthy && h.Units == need:
			h.binds++
			h.deadline = l.now().Add(l.ttl)
			return h.grant(), l.undo(h), nil
		}
	}

	n := l.books[req.Resource][nodeName]
	if n == nil || !n.known {
		return refuse(fmt.Errorf("reserve %s on node %s for pod %s: %w", req.Resource, nodeName, pod, ErrNodeUnknown))
	}
	if h != nil {
		// Its own units must not stand in the way of the new choice.
		n.charge(h, -h.Units)
	}
	chosen, _, ok := policy.Choose(&place.Node{Slots: l.slotsFor(n, &req), CPU: place.Unlimited, Memory: place.Unlimited}, &ask, nil)
	largest := n.largestFree
	if h != nil {
		n.charge(h, h.Units)
	}
	if !ok {
		code := accel.NoDeviceFits
		if ask.Units > n.largestTotal {
			code = accel.LargerThanDevice
		}
		return refuse(&accel.NoFitError{Node: nodeName, Resource: req.Resource, Code: code, Devices: ask.Devices, Need: need, Largest: largest})
	}
	i := chosen[0]

	now := l.now()
	if h == nil {
		h = &holding{Holding: Holding{
			Pod: pod, Node: nodeName, Resource: req.Resource, Units: need, Device: n.slots[i].ID, Created: created, Priority: req.Priority,
		}}
		l.add(h)
	} else {
		n.remove(h)
		h.Device, h.Units = n.slots[i].ID, need
		n.add(h)
	}
	h.at = l.stamp(now)
	h.deadline = now.Add(l.ttl)
	h.binds++
	return h.grant(), l.undo(h), nil
}

func refuse(err error) (accel.Grant, func(), error) { return accel.Grant{}, func() {}, err }

// Expire drops the reservations that are older than the TTL and whose pods
// were never observed, and returns how many. Its cost depends on the number of
// reservations that wait, not on the pods in the books.
func (l *Ledger) Expire() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, n := l.now(), 0
	l.expirePlans(now)
	for h := range l.pending {
		if !now.Before(h.deadline) {
			l.drop(h)
			n++
		}
	}
	return n
}

// Unseen returns up to limit pods whose reservation was made at least age ago
// and that were not observed since. A watch usually shows a pod bound within
// milliseconds; one that was bound and deleted while the watch was away is never
// shown. The order is not defined.
func (l *Ledger) Unseen(age time.Duration, limit int) []accel.PodRef {
	l.mu.RLock()
	defer l.mu.RUnlock()
	before := l.now().Add(-age)
	var out []accel.PodRef
	for h := range l.pending {
		if len(out) < limit && !h.at.After(before) {
			out = append(out, h.Pod)
		}
	}
	return out
}

// Reservations counts the reservations whose pods were not observed yet.
func (l *Ledger) Reservations() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return len(l.pending)
}

// undo returns the function that gives back one call's part of a reservation.
func (l *Ledger) undo(h *holding) func() {
	done := false // guarded by l.mu
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if done || h.node == nil || h.observed {
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

// grant says what the books hold. The holding must have a slot.
func (h *holding) grant() accel.Grant {
	s := &h.node.slots[h.slot]
	g := accel.Grant{
		Resource: h.Resource, Node: h.Node, Device: h.Device, Index: s.Index,
		DeviceUnits: s.Total, Units: h.Units, At: h.at, Confirmed: h.Confirmed,
	}
	if g.At.IsZero() {
		g.At = h.Created
	}
	return g
}
