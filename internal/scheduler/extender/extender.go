package extender

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// DefaultBindTimeout bounds a bind. It is below the 10 s that Divvy has kube-scheduler
// wait for an extender, so that the scheduler hears what happened, and above the 5 s
// and more that a write takes in a slow control plane.
const DefaultBindTimeout = 9 * time.Second

// HeapBudget is how much memory the Go runtime of a process with an extender has, in
// bytes: enough for 5000 nodes of 8 devices and 50 000 pods. See package heaptarget.
const HeapBudget = 100 << 20

// Ledger is what the extender asks of the ledger. *ledger.Ledger is one.
type Ledger interface {
	Check(request accel.Request, nodes []string, out []ledger.Verdict)
	Fits(request accel.Request, nodes []string, out []ledger.Verdict)
	Reserve(pod accel.PodRef, created time.Time, node string, request accel.Request) (grant accel.Grant, undo func(), err error)
	Evict(request accel.Request, proposals []ledger.Proposal) []ledger.Eviction
	MakesRoom(request accel.Request, node string) bool
	LowestPriority(resource accel.Resource) (lowest int32, some bool)
	Expect(pod ledger.Expected, node string) bool
	Expects(podUID string) bool
	Withdraw(podUID string) bool
	Unbound(podUID, nominated string, attempt ledger.Attempt)
	Forget(podUID string)
	Counts() ledger.Counts
	Nodes(resource accel.Resource) iter.Seq[ledger.NodeUsage]
	Node(resource accel.Resource, name string) (ledger.NodeUsage, bool)
}

// Cluster is what the extender knows of pods and nodes without asking the API
// server. *cluster.State is one.
type Cluster interface {
	// Pod returns a pod that asks for something of ours, if it was seen.
	Pod(namespace, name string) (cluster.Pod, bool)
	// Problem says why nothing can be placed on the node, "" when unknown.
	Problem(node string) string
	// Several reports whether the node can give a pod several devices of the
	// resource.
	Several(node string, resource accel.Resource) bool
	// Offering are the nodes that publish something, in the order of their names.
	Offering() []string
}

// Binder reads and binds pods at the API server. *cluster.Binder is one; its
// errors are those that package kube names.
type Binder interface {
	Get(ctx context.Context, namespace, name string) (cluster.Pod, error)
	Bind(ctx context.Context, pod accel.PodRef, node string, annotations map[string]string) error
}

// Config is what an Extender needs. All of it is required but where said.
type Config struct {
	Ledger  Ledger
	Cluster Cluster
	Binder  Binder
	// Signer returns the signer of grants, or why there is none yet.
	Signer func() (*wire.Signer, error)
	// Ready returns nil, or why the extender cannot answer yet.
	Ready func() error
	// Election says which of several replicas answers; nil where there is one.
	Election Election
	// Forward reaches the replica that leads; nil where replicas do not reach each
	// other, and a request of one that does not lead waits until it does.
	Forward http.RoundTripper
	// Hold is how long a bind waits for a leader. It is below what kube-scheduler waits
	// for an answer.
	Hold time.Duration
	// Resources are those that the extender manages, in the order in which
	// they are checked; the first is what inspect shows unless asked otherwise.
	Resources []accel.Resource
	// Capacity makes requests carry the pods' CPU and memory, for a ledger that
	// counts them.
	Capacity bool
	// ChooseNode makes filter name one node where the pod leaves the choice to the
	// policy.
	ChooseNode bool
	// Version is what /version answers.
	Version string
	// BindFrom are addresses besides those of the extender's own host that may
	// ask for a bind.
	BindFrom []netip.Prefix
	// Registry receives the metrics; nil for none.
	Registry prometheus.Registerer
	// Tell makes an event on a pod that cannot be placed, once for each pod and
	// kind of event; nil for none. It must not block.
	Tell func(pod accel.PodRef, kind events.Kind, message string)
	// BindTimeout bounds a bind, 0 for DefaultBindTimeout.
	BindTimeout time.Duration
	// Waker makes kube-scheduler ask again about a pod that waits; nil for none.
	Waker Waker
	// Now is the clock, time.Now when nil.
	Now func() time.Time
}

// Extender holds what the handlers share. It is safe for concurrent use.
type Extender struct {
	config  Config
	metrics *metrics
	binds   *keyedLock
	callers callers
	replica replica
	reports reports
	waker   waker
	// nominated are nodes that filter rejected though pods wait for them.
	nominated nominatedNodes
	// catchUps bounds how often preempt waits; see evictAfterWatch.
	catchUps *rate.Limiter
	attempts attempts
	slots    *slots
}

// New checks the configuration.
func New(c Config) (*Extender, error) {
	if len(c.Resources) == 0 {
		return nil, errors.New("the extender manages no resource")
	}
	if c.Ledger == nil || c.Cluster == nil || c.Binder == nil || c.Signer == nil || c.Ready == nil {
		return nil, errors.New("the extender's configuration is incomplete")
	}
	if c.BindTimeout == 0 {
		c.BindTimeout = DefaultBindTimeout
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	c.Resources = slices.Clone(c.Resources)
	w := newWaiting(maxWaiting, c.Now)
	m, err := newMetrics(c.Registry, c.Resources, w.size)
	if err != nil {
		return nil, fmt.Errorf("metrics of the extender: %w", err)
	}
	e := &Extender{
		config: c, metrics: m, binds: newKeyedLock(), callers: callers{bindFrom: c.BindFrom}, slots: newSlots(),
		catchUps: rate.NewLimiter(rate.Every(catchUpEvery), catchUpsAtOnce),
	}
	e.replica = replica{
		election: c.Election, forward: c.Forward, state: c.Ready, patience: c.Hold, callers: &e.callers, forwarded: m.forwarded,
		held: make(chan struct{}, maxHeld),
	}
	e.reports = reports{ledger: c.Ledger, cluster: c.Cluster, resources: c.Resources, ready: e.replica.ready}
	e.waker = waker{waiting: w, api: c.Waker, ledger: c.Ledger, cluster: c.Cluster, ready: e.replica.ready, woken: m.woken}
	return e, nil
}

// Run wakes pods that wait, and probes the leader while another replica leads, until
// the context ends. Without it, requests to a leader that was cut off end by their own
// timeouts only.
func (e *Extender) Run(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { e.waker.run(ctx) })
	group.Go(func() { e.replica.watch(ctx) })
	group.Wait()
}
