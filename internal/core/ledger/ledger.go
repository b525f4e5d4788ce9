// Package ledger counts which pods hold which devices, over all nodes of a cluster and
// all shared resources, and, where it is given them (SetCapacity, Charge), CPU and memory.
//
// Whoever watches the cluster reports nodes (SetNode, DeleteNode) and bound pods
// (Observe, Forget). Check says where a pod fits and how well. Reserve plans ahead of
// the watch: it chooses devices for a pod that is about to be bound and holds them until
// the pod is observed, the reservation is undone or it expires. A place.Policy chooses
// devices and rates nodes. The ledger writes nothing anywhere.
//
// # What is true
//
// The node is the authority. A pod is on the devices that its latest Holding
// names. A Holding without a device, of a pod whose annotation is missing or
// was tampered with, moves nothing: the device known for the pod on that node
// stays, be it reserved or observed. Once a Holding was Confirmed, only another
// confirmed one moves the pod, so an old grant of the same pod that is written
// back has no effect. A pod that was never on a known device is unplaced: its
// units count for the node as a whole and on no device.
//
// Pods are told apart by UID alone. A re-created pod of a StatefulSet counts
// beside the one of the same name until Forget is called for the old UID, as
// containers of both may run for a while.
//
// # Cost
//
// Observe, Forget and Reserve touch one node and cost the same in a cluster of any
// size. Each change gives the node a new generation. Check remembers its verdicts by
// the kind of request, and asks the policy only about nodes that changed since. With a
// new epoch of the policy all nodes are asked about again, see Refresh.
//
// # Concurrency
//
// All methods are safe for concurrent use. One lock guards the state: writers
// hold it for the change of one node, and readers (Check, Nodes) release it
// every few nodes, so a Check of many nodes is not a snapshot of one moment.
// Reserve decides again, on the newest state. The verdicts that are remembered
// of one kind of request have a lock of their own.
package ledger

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// DefaultReservationTTL is how long a reservation waits for its pod to be
// observed when Options do not say. It is several times the longest that
// kube-scheduler waits for a bind and that a healthy watch lags.
const DefaultReservationTTL = time.Minute

// DefaultMaxBindDelay is how long capacity stays reserved for a pod that kube-scheduler
// is placing when Options do not say. kube-scheduler waits up to 10 minutes for volumes by
// default, and for plugins of the extension point Permit up to 15.
const DefaultMaxBindDelay = 15 * time.Minute

var (
	// ErrNodeUnknown is the error of a reservation on a node that is not known
	// or has no inventory of the resource.
	ErrNodeUnknown = errors.New("the node is unknown or publishes no inventory of the resource")
	// ErrHeldElsewhere is the error of a reservation for a pod that holds units
	// on another node, or on this one with its device not known yet.
	ErrHeldElsewhere = errors.New("the pod already holds units")
	// ErrNothingAsked is the error of a reservation for a pod that asks for no
	// units.
	ErrNothingAsked = errors.New("the pod requests no units of the resource")
	// ErrPolicyUnknown is the error of a request that names a policy that the
	// ledger was not made with.
	ErrPolicyUnknown = errors.New("the placement policy is unknown")
	// ErrIndivisible is the error of a request whose units are not a multiple of
	// its devices.
	ErrIndivisible = errors.New("the units cannot be divided equally among the devices")
)

// Options are the choices at New; the zero value has good defaults.
type Options struct {
	// Policy chooses devices and rates nodes, for requests that name no other;
	// place.Binpack when nil.
	Policy place.Policy
	// Policies are those that requests may name besides Policy and the ones that
	// place.Table holds.
	Policies []place.Policy
	// CapacityChecked is true where the caller has checked CPU and memory itself, as
	// kube-scheduler does: then a node that seems to have too little is rated like one
	// that has just enough.
	CapacityChecked bool
	// ReservationTTL is how long an unobserved reservation lasts;
	// DefaultReservationTTL when it is not above zero.
	ReservationTTL time.Duration
	// MaxBindDelay is how long an expected bind may take, see Expect;
	// DefaultMaxBindDelay when it is not above zero.
	MaxBindDelay time.Duration
	// Now is the clock; time.Now when nil. It is mostly called under the ledger's lock,
	// must not call back, and is safe for concurrent use.
	Now func() time.Time
}

// PerResource is a policy that decides with another one for each resource: of a
// policy that learns, since units of two resources are not comparable. The name
// of all of them is the same.
type PerResource interface {
	place.Policy
	// For returns the policy of the resource, always the same one.
	For(resource accel.Resource) place.Policy
}

// Ledger is the state of a cluster's devices. Use New.
type Ledger struct {
	rules   rules
	ratings cache

	mu    sync.RWMutex // guards state
	state state
}

// rules are the choices at New. They do not change.
type rules struct {
	// policies are by name; "" is the one for requests that name none.
	policies        map[string]place.Policy
	ttl, bindDelay  time.Duration // Options.ReservationTTL and MaxBindDelay
	now             func() time.Time
	capacityChecked bool
}

// state is what changes, but for the ratings.
type state struct {
	rules *rules
	nodes *nodes
	pods  *pods
	// nominations are for pods that wait for capacity on a node.
	nominations nominations
	// lastAt is the time of the latest grant; the next one gets a later time,
	// because nodes serve grants in the order of their times.
	lastAt time.Time
}

// New returns an empty ledger.
func New(o Options) *Ledger {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Policy == nil {
		o.Policy = place.Binpack
	}
	l := &Ledger{
		rules: rules{
			policies: map[string]place.Policy{}, ttl: cmp.Or(max(o.ReservationTTL, 0), DefaultReservationTTL),
			bindDelay: cmp.Or(max(o.MaxBindDelay, 0), DefaultMaxBindDelay), now: o.Now, capacityChecked: o.CapacityChecked,
		},
		ratings: cache{byAsk: map[askKey]*ratings{}},
	}
	for _, p := range slices.Concat(place.Policies(), []place.Policy{o.Policy}, o.Policies) {
		l.rules.policies[p.Name()] = p
	}
	l.rules.policies[""] = o.Policy
	n := &nodes{
		byResource: map[accel.Resource]*index{}, graphs: map[string]*place.Graph{}, attested: attested{nodes: map[*node]struct{}{}},
		hosts: hosts{byName: map[string]*host{}, charges: map[string]charge{}},
	}
	l.state = state{
		rules: &l.rules, nodes: n, nominations: newNominations(),
		pods: &pods{byUID: map[string]*holding{}, pending: map[*holding]struct{}{}, nodes: n},
	}
	return l
}

// ask translates a request; the error says why no node serves it.
func (r *rules) ask(req accel.Request) (place.Ask, place.Policy, error) {
	ask := place.Ask{CPU: max(req.CPU, 0), Memory: max(req.Memory, 0)}
	policy, known := r.policies[req.Policy]
	if !known {
		return ask, nil, fmt.Errorf("%w: %q", ErrPolicyUnknown, req.Policy)
	}
	if p, split := policy.(PerResource); split {
		policy = p.For(req.Resource)
	}
	peak := req.Peak()
	if peak <= 0 {
		return ask, policy, nil
	}
	ask.Only = req.Selection
	ask.Devices = max(req.Devices, 1)
	ask.Units, ask.Least = peak/accel.Units(ask.Devices), req.Least()
	if peak%accel.Units(ask.Devices) != 0 {
		return ask, nil, fmt.Errorf("%w: %d units by %d devices", ErrIndivisible, peak, ask.Devices)
	}
	return ask, policy, nil
}

// Counts says how much is held for pods that are not bound.
type Counts struct {
	// Reservations are of binds whose pods were not observed yet, Expected of pods whose
	// binds are expected, see Expect.
	Reservations, Expected int
	// Nominations counts the pods for which capacity is reserved on a node, see Nominate.
	Nominations int
	// Freed counts the pods that were forgotten while they held something. It changes
	// when there may be more free capacity, and never goes down.
	Freed uint64
	// HeldSince is when the oldest reservation was made whose bind has not begun, see Hold;
	// zero where there is none.
	HeldSince time.Time
}

// Counts returns them.
func (l *Ledger) Counts() Counts {
	l.mu.RLock()
	defer l.mu.RUnlock()
	c := Counts{Nominations: len(l.state.nominations.pods), Freed: l.state.pods.freed}
	for h := range l.state.pods.pending {
		if h.expects() {
			c.Expected++
		}
		if r := h.reservation; r.held && (c.HeldSince.IsZero() || r.since.Before(c.HeldSince)) {
			c.HeldSince = r.since
		}
	}
	c.Reservations = len(l.state.pods.pending) - c.Expected
	return c
}
