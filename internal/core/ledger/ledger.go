// Package ledger keeps the books of who holds which devices, over all nodes of
// a cluster and all resources that are shared, and where it is told of them
// (SetCapacity, Charge) also of CPU and memory.
//
// It learns of nodes (SetNode, DeleteNode) and of bound pods (Observe, Forget)
// from whoever watches the cluster, answers where a pod fits and how well
// (Check), and plans ahead of the watch: Reserve chooses devices for a pod that
// is about to be bound and holds them until the pod is observed, the reservation
// is undone or it expires. Which devices and how well is for a place.Policy to
// say. Nothing is written anywhere; what the ledger hands out counts
// only because all that was handed out is in its books.
//
// # What is true
//
// The node is the authority. A pod is on the devices that its latest Holding
// names. A Holding without a device, of a pod whose annotation is missing or
// was tampered with, moves nothing: the device known for the pod on that node
// stays, be it reserved or observed. And once a Holding was Confirmed, only
// another confirmed one moves the pod, so an old grant of the same pod that is
// written back has no effect. A pod that was never on a known device is
// unplaced: its units count for the node as a whole and on no device.
//
// Pods are told apart by UID alone. A re-created pod of a StatefulSet counts
// beside the one of the same name until Forget is called for the old UID, as
// containers of both may run for a while.
//
// # Cost
//
// Every change is booked where it happens: Observe, Forget and Reserve touch
// one node and cost the same in a cluster of any size, with any number of pods.
// Each change gives the node a new generation. Check remembers its verdicts by
// the kind of request, and asks the policy only about nodes that changed since;
// for the others it compares a name and a generation. So it costs a policy that
// thinks for long little more than one that does not, as long as prices stay:
// with a new epoch of the policy all is asked again, see Refresh.
//
// # Concurrency
//
// All methods are safe for concurrent use. One lock guards the books: writers
// hold it for the change of one node, and readers (Check, Nodes) let it go
// every few nodes. So a Check of many nodes is not a snapshot of one moment.
// It need not be: Reserve decides again, on the newest state. What is remembered
// of one kind of request has a lock of its own, under which checks of that kind
// wait for each other.
package ledger

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
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
	// CapacityChecked is true where whoever asks has looked at CPU and memory
	// itself, as kube-scheduler does, which knows them better: then a node that
	// has too little by the books is rated like one that has just enough.
	CapacityChecked bool
	// ReservationTTL is how long an unobserved reservation lasts;
	// DefaultReservationTTL when it is not above zero.
	ReservationTTL time.Duration
	// MaxBindDelay is how long an expected bind may take, see Expect;
	// DefaultMaxBindDelay when it is not above zero.
	MaxBindDelay time.Duration
	// Now is the clock; time.Now when nil. It is called under the ledger's lock
	// and must not call back.
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

// Ledger is the books of a cluster. Use New.
type Ledger struct {
	// policies are by name; "" is the one for requests that name none.
	policies map[string]place.Policy
	ttl      time.Duration
	now      func() time.Time
	// bindDelay is Options.MaxBindDelay.
	bindDelay time.Duration

	capacityChecked bool
	// limited is true once the capacity of a node was told.
	limited atomic.Bool
	// freed counts the pods that were forgotten while they held something.
	freed atomic.Uint64
	// widest is the size of the largest book so far.
	widest atomic.Int64

	rating sync.Mutex // guards rated and ratingUses
	// rated are the ratings that are remembered. What they hold has a lock of its
	// own, see ratings.
	rated      map[askKey]*ratings
	ratingUses uint64

	mu sync.RWMutex // guards all below and everything reachable from it
	// generation is that of the latest change of a node.
	generation uint64
	// books has one book per resource, hosts all nodes of any book and those that
	// have a capacity or a charge.
	books map[accel.Resource]*book
	hosts map[string]*host
	// charges are by pod UID.
	charges map[string]charge
	// graphs are those of the nodes, by their keys: most nodes are built alike.
	graphs map[string]*place.Graph
	// pods maps a pod's UID to its holdings, a list over resources.
	pods map[string]*holding
	// pending are the holdings of pods that are not bound yet as far as known.
	pending map[*holding]struct{}
	// nominations are for pods that wait for room on a node.
	nominations nominations
	// lastAt is the time of the latest grant; the next one gets a later time,
	// because nodes serve grants in the order of their times.
	lastAt time.Time
}

// New returns an empty ledger.
func New(o Options) *Ledger {
	if o.ReservationTTL <= 0 {
		o.ReservationTTL = DefaultReservationTTL
	}
	if o.MaxBindDelay <= 0 {
		o.MaxBindDelay = DefaultMaxBindDelay
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Policy == nil {
		o.Policy = place.Binpack
	}
	policies := map[string]place.Policy{}
	for _, p := range slices.Concat(place.Policies(), []place.Policy{o.Policy}, o.Policies) {
		policies[p.Name()] = p
	}
	policies[""] = o.Policy
	return &Ledger{
		policies: policies,
		ttl:      o.ReservationTTL,
		now:      o.Now,
		rated:    make(map[askKey]*ratings),
		books:    make(map[accel.Resource]*book),
		hosts:    make(map[string]*host),
		charges:  make(map[string]charge),
		graphs:   make(map[string]*place.Graph),
		pods:     make(map[string]*holding),
		pending:  make(map[*holding]struct{}),

		bindDelay: o.MaxBindDelay, capacityChecked: o.CapacityChecked,

		nominations: newNominations(),
	}
}
