package ledger

import (
	"fmt"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Reserve chooses the devices of the node for a pod that is about to be bound and
// holds the pod's peak on them, and its CPU and memory on the node. The caller then
// binds the pod, with no lock held, and calls undo when that failed; undo does nothing
// when it was called before or the pod was observed meanwhile. It is never nil.
//
// A pod that is on that node already gets its grant again, so a repeated
// bind gets the same answer; such calls share one reservation, which goes when
// all of them were undone. Only a reservation on a device that was lost or
// became unhealthy meanwhile, or lost the tier that the pod requires, is replaced.
//
// The error is a *accel.NoFitError when the pod does not fit, or wraps
// ErrNodeUnknown, ErrHeldElsewhere, ErrNothingAsked, ErrPolicyUnknown or
// ErrIndivisible.
func (l *Ledger) Reserve(pod accel.PodRef, created time.Time, nodeName string, req accel.Request) (accel.Grant, func(), error) {
	req.Pod = pod.UID
	ask, policy, err := l.rules.ask(req)
	switch {
	case pod.UID == "":
		err = fmt.Errorf("reserve for pod %s: it has no UID", pod)
	case req.Peak() <= 0:
		err = fmt.Errorf("reserve %s for pod %s: %w", req.Resource, pod, ErrNothingAsked)
	case err != nil:
		err = fmt.Errorf("reserve %s for pod %s: %w", req.Resource, pod, err)
	}
	if err != nil {
		return accel.Grant{}, func() {}, err
	}
	expireTiers(l)
	l.mu.Lock()
	defer l.mu.Unlock()
	h, err := l.state.reserve(pod, created, nodeName, &req, &ask, policy)
	if err != nil {
		return accel.Grant{}, func() {}, err
	}
	if h.observed() {
		return h.grant(), func() {}, nil
	}
	return h.grant(), undo(l, h), nil
}

// reserve returns what the pod holds then, with one more bind where it was not observed.
func (s *state) reserve(pod accel.PodRef, created time.Time, nodeName string, req *accel.Request, ask *place.Ask,
	policy place.Policy) (*holding, error) {
	h := s.pods.on(pod.UID, req.Resource)
	if h != nil && h.expects() && !h.holds(nodeName, ask) {
		s.pods.drop(h) // kube-scheduler chose otherwise, or the devices are not there any more
		h = nil
	}
	if h != nil {
		switch {
		case h.Node != nodeName:
			return nil, fmt.Errorf("reserve on node %s for pod %s: %w: on node %s", nodeName, pod, ErrHeldElsewhere, h.Node)
		case h.observed() && !h.located():
			return nil, fmt.Errorf("reserve on node %s for pod %s: %w: the pod is bound to the node, on an unknown device", nodeName, pod,
				ErrHeldElsewhere)
		case h.observed():
			return h, nil
		case h.expects():
			h.reservation.expected = nil
			s.begin(h)
			return h, nil
		case h.serves(ask):
			h.reservation.binds++
			h.reservation.since = s.rules.now()
			return h, nil
		}
	}

	n := s.nodes.publishing(req.Resource, nodeName)
	if n == nil {
		return nil, fmt.Errorf("reserve %s on node %s for pod %s: %w", req.Resource, nodeName, pod, ErrNodeUnknown)
	}
	chosen, err := s.choose(n, req, ask, policy)
	if err != nil {
		return nil, err
	}
	if h == nil {
		h = s.hold(pod, created, n, chosen, req)
	} else {
		n.remove(h)
		h.Units = req.Peak()
		h.SetDevices(names(n.slots, chosen))
		n.put(h)
		s.nodes.hosts.charge(pod.UID, nodeName, req.CPU, req.Memory)
	}
	s.begin(h)
	return h, nil
}

// begin starts the first bind of a reservation, or one on other devices than before.
func (s *state) begin(h *holding) {
	r := h.reservation
	r.since = s.rules.now()
	r.binds++
	h.at = s.stamp(r.since)
}

func (s *state) hold(pod accel.PodRef, created time.Time, n *node, slots []int, req *accel.Request) *holding {
	h := &holding{reservation: &reservation{}, Holding: Holding{
		Pod: pod, Node: n.host.name, Resource: req.Resource, Units: req.Peak(), Created: created, Priority: req.Priority,
	}}
	h.SetDevices(names(n.slots, slots))
	s.pods.add(h)
	s.nodes.hosts.charge(pod.UID, h.Node, req.CPU, req.Memory)
	return h
}

// choose returns the slots of the node for a pod as if it had nothing reserved yet.
// The error is a *accel.NoFitError.
func (s *state) choose(n *node, req *accel.Request, ask *place.Ask, policy place.Policy) ([]int, error) {
	slots := s.slotsFor(n, req)
	var view place.Node
	s.view(&view, n, slots, ask, req.Pod)
	chosen, _, ok := policy.Choose(&view, ask, nil)
	if !ok {
		why := &accel.NoFitError{
			Node: n.host.name, Resource: req.Resource, Devices: ask.Devices, Need: ask.Units, Largest: freest(slots),
		}
		if why.Code, why.Stated = refusal(slots, ask); why.Code == accel.NotIsolated {
			why.Required = ask.Only.Isolation
		}
		return nil, why
	}
	return chosen, nil
}

func (r *reservation) deadline(by *rules) time.Time {
	switch {
	case r.expected == nil:
		return r.since.Add(by.ttl)
	case r.expected.seen:
		return r.since.Add(by.bindDelay)
	}
	return r.since.Add(planTTL)
}

// serves reports whether a reservation still is what the ask needs.
func (h *holding) serves(a *place.Ask) bool {
	if !h.located() || h.devices() != a.Devices || h.Units != a.Units*accel.Units(a.Devices) {
		return false
	}
	for i := range h.devices() {
		if s := &h.on.node.slots[h.slotOf(i)]; s.Unhealthy || !a.Only.Allows(s.ID, s.Model, s.Tier) {
			return false
		}
	}
	return true
}

// holds reports whether a reservation is on the node, what the ask needs, and on
// devices that have as much: others may have been observed on them since.
func (h *holding) holds(nodeName string, a *place.Ask) bool {
	if h.Node != nodeName || !h.serves(a) {
		return false
	}
	for i := range h.devices() {
		if h.on.node.slots[h.slotOf(i)].Free < 0 {
			return false
		}
	}
	return true
}

// Expire drops the reservations whose pods were not observed in time, what was kept for
// pods for too long, and the tiers whose attestations are too old, and returns how many
// reservations. Its cost depends on
// the number of those that wait, not on all pods.
func (l *Ledger) Expire() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, n := l.rules.now(), 0
	l.state.nodes.expireTiers(now)
	l.state.nominations.expire(now)
	for h := range l.state.pods.pending {
		if !h.reservation.held && !now.Before(h.reservation.deadline(&l.rules)) {
			l.state.pods.drop(h)
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
	before := l.rules.now().Add(-age)
	var out []accel.PodRef
	for h := range l.state.pods.pending {
		if len(out) < limit && !h.expects() && !h.reservation.held && !h.reservation.since.After(before) {
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
	before := l.rules.now().Add(-age)
	return l.state.pods.dropAll(podUID, func(h *holding) bool {
		return !h.observed() && !h.expects() && !h.reservation.held && !h.reservation.since.After(before)
	})
}

// undo returns the function that gives back one call's part of a reservation.
func undo(l *Ledger, h *holding) func() {
	done := false // guarded by l.mu
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if done || h.on.node == nil || h.observed() {
			return
		}
		done = true
		if h.reservation.binds--; h.reservation.binds == 0 {
			l.state.pods.drop(h)
		}
	}
}

// stamp returns now without its monotonic part, or the next nanosecond after
// the latest grant where now is not later: a node serves grants in the order of
// their times, and a clock may be coarse or step back.
func (s *state) stamp(now time.Time) time.Time {
	now = now.Round(0).UTC()
	if !now.After(s.lastAt) {
		now = s.lastAt.Add(1)
	}
	s.lastAt = now
	return now
}

// grant returns the holding as a grant. All devices must be known.
func (h *holding) grant() accel.Grant {
	s := &h.on.node.slots[h.on.slot]
	g := accel.Grant{
		Resource: h.Resource, Node: h.Node, Device: h.Device, Index: s.Index,
		DeviceUnits: s.Total, Units: h.Units, At: h.at, Confirmed: h.Confirmed,
	}
	for _, at := range h.on.more {
		s := &h.on.node.slots[at]
		g.More = append(g.More, accel.GrantedDevice{Device: s.ID, Index: s.Index, DeviceUnits: s.Total})
	}
	if g.At.IsZero() {
		g.At = h.Created
	}
	return g
}
