package extender

import (
	"context"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// lookEvery is how often Await looks.
const lookEvery = 10 * time.Millisecond

// Embedding is a scheduler that has the decisions compiled in. All of it is required.
type Embedding struct {
	// Waker has the scheduler try a pod again.
	Waker decision.Waker
	// Quiesce waits until no bind is under way, and lets none begin.
	Quiesce func(ctx context.Context)
	// CatchUp returns nil when the scheduler's own cache has everything that was written to any
	// pod before. It is called when this replica has the Lease, and its ledger has it all. The
	// pod is this replica's.
	CatchUp func(ctx context.Context, client kubernetes.Interface, namespace, pod string) error
}

// Embedded is the program as a part of a scheduler: the same ledger, reports, reviews, metrics
// and election, without the calls of kube-scheduler.
type Embedded struct{ program *program }

// Embed puts it together, for a program of that name.
func Embed(o Options, name string, in Embedding) (*Embedded, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.embedding = &in
	clients, err := kube.Connect(o.Kubeconfig, name+"/"+version.Version)
	if err != nil {
		return nil, err
	}
	p, err := assemble(o, clients)
	if err != nil {
		return nil, err
	}
	return &Embedded{p}, nil
}

// Inside is what decides.
func (e *Embedded) Inside() *decision.Inside {
	return decision.NewInside(e.program.extender.Decider(), e.program.ledger)
}

// Resources are those that are shared.
func (e *Embedded) Resources() []accel.Resource { return e.program.placement.resources }

// Policy is the placement policy of the cluster.
func (e *Embedded) Policy() place.Policy { return e.program.placement.policy }

// Register adds to what the program's metrics show.
func (e *Embedded) Register(c prometheus.Collector) error { return e.program.registry.Register(c) }

// Lead bounds what is done in ctx by the time in which this replica may act.
func (e *Embedded) Lead(ctx context.Context) (context.Context, context.CancelFunc, error) {
	return e.program.extender.Lead(ctx)
}

// Run runs the program, and schedule as a part of it: its context ends first.
func (e *Embedded) Run(ctx context.Context, schedule func(context.Context) error) error {
	p := e.program
	klog.FromContext(ctx).Info("Starting", "version", version.String("divvy-scheduler"), "listen", p.options.Listen,
		"policy", p.placement.policy.Name(), "resources", p.options.Placement.Resources, "leaderElect", p.options.Election.Enabled)
	return p.run(ctx, func(ctx context.Context) error {
		err := p.untilEnding(ctx, func(context.Context) {}, schedule)
		// The servers wait for no bind of a scheduler's.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		p.quiesce(ctx)
		return err
	})
}

// Await returns when this replica leads and can decide, and a function that reports whether it
// still leads and what is closed when that may have changed.
func (e *Embedded) Await(ctx context.Context) (leads func() (bool, <-chan struct{}), err error) {
	p := e.program
	leads = func() (bool, <-chan struct{}) {
		if p.election == nil {
			return true, nil
		}
		_, changed := p.election.Leader()
		return p.election.Leading(), changed
	}
	able := func(context.Context) (bool, error) { return p.leading() && p.ready() == nil, nil }
	return leads, wait.PollUntilContextCancel(ctx, lookEvery, true, able)
}

func (o *Options) waker(otherwise decision.Waker) decision.Waker {
	if o.embedding != nil {
		return o.embedding.Waker
	}
	return otherwise
}

func (p *program) handler() http.Handler {
	if p.options.embedding != nil || p.options.ReportsOnly {
		return p.extender.Reports()
	}
	return p.extender.Handler()
}

func (p *program) quiesce(ctx context.Context) {
	if e := p.options.embedding; e != nil {
		e.Quiesce(ctx)
		return
	}
	p.extender.Quiesce(ctx)
}
