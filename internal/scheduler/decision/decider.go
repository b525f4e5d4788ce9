package decision

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// Ledger is what a Decider asks of the ledger. *ledger.Ledger is one.
type Ledger interface {
	Check(request accel.Request, nodes []string, out []ledger.Verdict)
	Fits(request accel.Request, nodes []string, out []ledger.Verdict)
	Reserve(pod accel.PodRef, created time.Time, node string, request accel.Request) (grant accel.Grant, undo func(), err error)
	Evict(request accel.Request, proposals []ledger.Proposal) []ledger.Eviction
	MakesRoom(request accel.Request, node string, gone func(podUID string) bool) bool
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

// Cluster is what a Decider knows of pods and nodes without asking the API
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

// Config is what a Decider needs. All of it is required but where said.
type Config struct {
	Ledger  Ledger
	Cluster Cluster
	Binder  Binder
	// Signer returns the signer of grants, or why there is none yet.
	Signer func() (*wire.Signer, error)
	// Ready returns nil, or why nothing can be decided yet.
	Ready func() error
	// Resources are those that are shared, in the order in which they are checked.
	Resources []accel.Resource
	// Capacity makes requests carry the pods' CPU and memory, for a ledger that
	// counts them.
	Capacity bool
	// ChooseNode makes Filter name one node where the pod leaves the choice to the
	// policy.
	ChooseNode bool
	// Registry receives the metrics; nil for none.
	Registry prometheus.Registerer
	// Tell makes an event on a pod that cannot be placed, once for each pod and
	// kind of event; nil for none. It must not block.
	Tell func(pod accel.PodRef, kind events.Kind, message string)
	// Waker makes kube-scheduler ask again about a pod that waits; nil for none.
	Waker Waker
	// Recorder keeps decisions; nil for none. It is of the same ledger.
	Recorder *Recorder
	// Now is the clock, time.Now when nil.
	Now func() time.Time
}

// Decider decides. It is safe for concurrent use.
type Decider struct {
	config  Config
	metrics *metrics
	waker   waker
	// nominated are nodes that Filter rejected though pods wait for them.
	nominated nominatedNodes
	// catchUps bounds how often Preempt waits; see evictAfterWatch.
	catchUps *rate.Limiter
	attempts attempts
}

// New checks the configuration.
func New(c Config) (*Decider, error) {
	if len(c.Resources) == 0 {
		return nil, errors.New("there is no resource to decide about")
	}
	if c.Ledger == nil || c.Cluster == nil || c.Binder == nil || c.Signer == nil || c.Ready == nil {
		return nil, errors.New("the configuration of decisions is incomplete")
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	c.Resources = slices.Clone(c.Resources)
	w := newWaiting(maxWaiting, c.Now)
	m, err := newMetrics(c.Registry, c.Resources, w.size)
	if err != nil {
		return nil, fmt.Errorf("metrics of decisions: %w", err)
	}
	return &Decider{
		config: c, metrics: m, catchUps: rate.NewLimiter(rate.Every(catchUpEvery), catchUpsAtOnce),
		waker: waker{waiting: w, api: c.Waker, ledger: c.Ledger, cluster: c.Cluster, ready: c.Ready, woken: m.woken},
	}, nil
}

// Run wakes pods that wait until the context ends.
func (d *Decider) Run(ctx context.Context) { d.waker.run(ctx) }

// Question is what a scheduler asks about a pod.
type Question struct {
	// Pod needs its metadata, its status and the resources of its containers, no more.
	Pod *v1.Pod
	// Nodes are the candidates by name.
	Nodes []string
	// Prefers is true when the pod has wishes of its own as to where it runs, which
	// kube-scheduler weighs against each other.
	Prefers bool
	// Believed is true for a caller that may bind. One that may not could have made up the
	// pod.
	Believed bool
}

// Answer says where a pod fits. Its memory is used again by the next call that gets it: at
// 5000 nodes it is more than all else that an answer takes.
type Answer struct {
	// Fits are positions in Question.Nodes.
	Fits     []int
	Refusals []Refusal

	verdicts []ledger.Verdict
	scores   []int64
}

// Refusal is one node on which the pod does not fit.
type Refusal struct {
	Node, Reason string
	// Unresolvable is true where evicting pods cannot help.
	Unresolvable bool
}

// Reset drops what an answer says and keeps its memory.
func (a *Answer) Reset() {
	clear(a.Refusals) // they share memory with the question
	a.Fits, a.Refusals = a.Fits[:0], a.Refusals[:0]
}

// Cap is for how many nodes an answer has memory.
func (a *Answer) Cap() int {
	return max(cap(a.Fits), cap(a.Refusals), cap(a.verdicts), cap(a.scores))
}

// sized returns buf with n items of any value.
func sized[T any](buf *[]T, n int) []T {
	*buf = slices.Grow((*buf)[:0], n)[:n]
	return *buf
}

// check asks the ledger, if the pod asks for one resource: a.verdicts[i] is then for
// requests[0] on q.Nodes[i], and asked true. There are none for a pod that asks for
// nothing of ours, for several resources, or in a way that cannot be followed, which
// mistake says.
func (d *Decider) check(q *Question, a *Answer) (requests []accel.Request, asked bool, mistake error) {
	requests, mistake = kube.RequestsOf(q.Pod, d.config.Resources)
	if d.config.Capacity {
		kube.AddPeak(q.Pod, requests)
	}
	if len(requests) != 1 || mistake != nil {
		return requests, false, mistake
	}
	verdicts := sized(&a.verdicts, len(q.Nodes))
	if q.Believed {
		d.config.Ledger.Check(requests[0], q.Nodes, verdicts)
	} else {
		// Any client that reaches the port could make up requests, each of which would be
		// rated and remembered.
		d.config.Ledger.Fits(requests[0], q.Nodes, verdicts)
	}
	return requests, true, nil
}

// tell makes an event on a pod.
func (d *Decider) tell(q *Question, kind events.Kind, message string) {
	if d.config.Tell != nil && q.Believed {
		d.config.Tell(refOf(q.Pod), kind, message)
	}
}

func refOf(pod *v1.Pod) accel.PodRef {
	return accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name}
}
