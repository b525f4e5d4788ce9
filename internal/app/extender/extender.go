// Package extender is the program "divvy-control extender": its options, and
// how its parts are put together, started and stopped.
package extender

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/platform/certs"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/scheduler/claimreview"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
	"github.com/divvy-gpu/divvy/internal/scheduler/leader"
	"github.com/divvy-gpu/divvy/internal/scheduler/reasons"
)

const (
	// shutdownTimeout is what requests under way get when the program stops;
	// a bind takes decision.BindTimeout, and 2 s to ask what became of it.
	shutdownTimeout = decision.BindTimeout + 3*time.Second
	// sharedBytes is what callers that may not bind may hold together, reservedBytes the
	// same for those that may: 1000 binds in flight over plain HTTP take 47 MiB. With these
	// and the ledger of 5000 nodes the process has about half of the container's 512 MiB.
	sharedBytes   = 24 << 20
	reservedBytes = 48 << 20
	// memoryLimit is the size in bytes from which on the Go runtime collects garbage more often
	// instead of growing. Without it the heap may become twice what callers hold, which is
	// nearly all of the container's 512 MiB ("make abuse").
	memoryLimit = 224 << 20
)

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
	return flags.Program(&cobra.Command{
		Use:   "extender",
		Short: "Serve kube-scheduler's extender calls and the allocations of all devices",
		Long: "Serve kube-scheduler's extender calls (filter, prioritize, preempt and bind) and report the allocations " +
			"of all devices." +
			flags.EnvironmentHelp,
	}, &o, &o.Log, nil, func(ctx context.Context, _ io.Writer) error { return Run(ctx, o) })
}

// Run answers until the context ends or an error occurs that cannot be recovered from. It returns
// when all that it started has ended.
func Run(ctx context.Context, o Options) error {
	if err := o.Validate(); err != nil {
		return err
	}
	log := klog.FromContext(ctx)
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit)
	}
	clients, err := kube.Connect(o.Kubeconfig, "divvy-extender/"+version.Version)
	if err != nil {
		return err
	}
	program, err := assemble(o, clients)
	if err != nil {
		return err
	}
	log.Info("Starting", "version", version.String("divvy-extender"), "listen", o.Listen, "tlsListen", cmp.Or(o.TLS.Listen, "none"),
		"policy", program.placement.policy.Name(), "resources", o.Placement.Resources, "leaderElect", o.Election.Enabled)
	return program.run(ctx)
}

type program struct {
	options   Options
	placement placement
	replica   replica
	clients   kube.Clients
	ledger    *ledger.Ledger
	recorder  *decision.Recorder
	keys      *kube.Keyring
	books     *cluster.State
	binder    *cluster.Binder
	events    *events.Recorder
	limits    *limit.Limiter
	extender  *extender.Extender
	registry  *prometheus.Registry
	servers   []serve.Server
	// certs keeps the certificates; nil without TLS.
	certs *certs.Manager
	// election is nil where there is one replica.
	election *leader.Elector
	// claims decides about ResourceClaims; nil unless they are reviewed.
	claims *claimreview.Reviews
	// parts run beside what every extender has.
	parts []func(context.Context) error
	// stopping is true, and ending closed, as soon as the program is to end.
	stopping atomic.Bool
	ending   chan struct{}
}

func assemble(o Options, clients kube.Clients) (*program, error) {
	var m mistakes
	p := &program{
		options: o, placement: o.Placement.parse(&m), replica: o.replica(), clients: clients,
		keys: kube.NewKeyring(o.GrantKeyFile), ending: make(chan struct{}),
	}
	bindFrom, err := o.bindFrom()
	units, unitsErr := o.claimUnits()
	if err := errors.Join(append(m, err, unitsErr)...); err != nil {
		return nil, err
	}
	resources, counts := p.placement.resources, needsCapacity(p.placement.policy)
	p.ledger = ledger.New(ledger.Options{
		Policy: p.placement.policy, Policies: []place.Policy{p.placement.weights},
		ReservationTTL: o.ReservationTTL, MaxBindDelay: o.MaxBindDelay,
		// kube-scheduler has looked at CPU and memory when it asks.
		CapacityChecked: counts,
	})
	p.recorder = &decision.Recorder{Ledger: p.ledger, Log: history.NewLog(time.Now()), Now: time.Now}
	p.binder = cluster.NewBinder(clients.Kubernetes, resources, counts)
	booksConfig := cluster.Config{
		Ledger: p.recorder, Grants: p.keys, Resources: resources, NodeLabels: p.placement.labels, ConfigLabels: nodeconfig.Labels,
		Learner: p.placement.weights, KeepOveruse: o.Eviction.Enabled,
	}
	if counts {
		booksConfig.Capacity = p.ledger
	}
	p.books = cluster.NewState(booksConfig)

	p.registry = metrics.Registry(metrics.Extender, clients.Requests)
	p.events = events.NewRecorder(context.Background(), clients.Kubernetes, events.Extend, "")
	p.events.Anew() // the chart's role lets it change none, of anybody's pods
	p.registry.MustRegister(p.events, p.placement.weights, cluster.Collector{
		Size: p.books.Size, Ledger: p.ledger, Resources: resources, Devices: o.MetricsDevices,
		Ready: func() bool { return p.ready() == nil }, Leading: p.leading,
	})
	if p.election, err = p.newElection(); err != nil {
		return nil, err
	}
	if p.election != nil {
		p.registry.MustRegister(metrics.ExtenderTerms.NewCounterFunc(nil, func() float64 { return float64(p.election.Terms()) }))
	}
	p.addPart(p.newTeller())
	if evictor := p.newEvictor(); evictor != nil {
		p.addPart(evictor)
	}
	if len(units) > 0 {
		p.claims = claimreview.New(clients.Kubernetes, units, p.leading)
		p.addPart(p.claims)
	}
	if o.TLS.Listen != "" {
		if p.certs, err = newCertificates(o.TLS, clients.Kubernetes, p.registry); err != nil {
			return nil, err
		}
	}
	p.extender, err = extender.New(p.withElection(extender.Config{
		Config: decision.Config{
			Ledger:     p.ledger,
			Cluster:    p.books,
			Binder:     p.binder,
			Waker:      o.waker(p.binder),
			Signer:     p.keys.Signer,
			Ready:      p.ready,
			Resources:  resources,
			Capacity:   counts,
			ChooseNode: o.Placement.ChooseNode,
			Registry:   p.registry,
			Recorder:   p.recorder,
			Tell:       func(pod accel.PodRef, kind events.Kind, message string) { p.tell(pod, kind, message) },
		},
		Version:  version.Version,
		BindFrom: bindFrom,
	}))
	if err != nil {
		return nil, err
	}
	p.limits = limit.New(limit.Config{Shared: sharedBytes, Reserved: reservedBytes, HasReserve: p.extender.MayBindFrom})
	if err := p.registry.Register(p.limits); err != nil {
		return nil, fmt.Errorf("metrics of the servers: %w", err)
	}
	if err := p.addServers(); err != nil {
		return nil, err
	}
	return p, nil
}

// addPart adds what runs until the program ends.
func (p *program) addPart(part interface{ Run(ctx context.Context) }) {
	p.parts = append(p.parts, func(ctx context.Context) error { part.Run(ctx); return nil })
}

// tell makes an event on a pod, once for each text; of a reason that is also said by a
// condition, once whatever the text. It is false for one that cannot be made now.
func (p *program) tell(pod accel.PodRef, kind events.Kind, message string) bool {
	key := message
	if kind == events.NeverFits || kind == events.IsolationNotStated {
		key = ""
	}
	return p.events.Once(events.OnPod(pod.Namespace, pod.Name, pod.UID), kind, key, message)
}

// newTeller returns what says why pods wait.
func (p *program) newTeller() *reasons.Teller {
	t := reasons.New(reasons.Config{
		Hindered: func() []cluster.Pod { return cluster.Hindered(p.books) }, Offering: p.books.Offering,
		Ledger: p.ledger, Writer: p.binder, Tell: p.tell,
		Leading: func() bool { return !p.options.ReportsOnly && p.leading() && p.ready() == nil },
	})
	p.registry.MustRegister(t)
	return t
}

// addServers adds what answers kube-scheduler, Prometheus and, over TLS, the API server.
func (p *program) addServers() error {
	handler := p.handler()
	p.servers = []serve.Server{
		{Name: serve.Plain, Address: p.options.Listen, For: "kube-scheduler", HTTP: serve.NewServer(handler)},
		{Name: serve.MetricsPort, Address: p.options.MetricsListen, For: "metrics", HTTP: serve.NewServer(serve.Metrics(p.registry))},
	}
	if p.certs == nil {
		return nil
	}
	handler, err := p.withReviews(handler, p.registry)
	if err != nil {
		return err
	}
	p.servers = append(p.servers, serve.Server{
		Name: serve.TLS, Address: p.options.TLS.Listen, For: "kube-scheduler over TLS",
		HTTP: serve.NewTLSServer(handler, p.certs, func(s *tls.ConnectionState) bool { return extender.CheckCertificate(s) == nil }),
	})
	return nil
}

// needsCapacity reports whether the policy looks at the CPU and memory of nodes.
// Only then are all pods of the cluster counted; for the others kube-scheduler's
// own count does.
func needsCapacity(policy place.Policy) bool {
	p, ok := policy.(interface{ NeedsCapacity() bool })
	return ok && p.NeedsCapacity()
}

// ready returns nil when the answers of this replica are right, if it leads.
func (p *program) ready() error {
	switch {
	case p.stopping.Load():
		return errors.New("shutting down")
	case !p.books.Synced():
		return errors.New("the ledger is still being read from the API server")
	case !p.placement.weights.Ready():
		return errors.New("the weights of the placement policy are being computed")
	}
	_, err := p.keys.Signer()
	return err
}

// run starts everything and waits for all of it to end. Binds under way are
// finished before what they need ends.
func (p *program) run(ctx context.Context, more ...func(context.Context) error) error {
	p.events.Start()
	defer p.events.Shutdown()
	program := serve.Program{
		Parts: []func(context.Context) error{
			func(ctx context.Context) error { p.books.Run(ctx, p.clients); return nil },
			func(ctx context.Context) error { p.keys.Run(ctx, p.books.KeyChanged); return nil },
			func(ctx context.Context) error { p.sweeper().Run(ctx); return nil },
			func(ctx context.Context) error { p.extender.Run(ctx); return nil },
			func(ctx context.Context) error { return p.placement.weights.Run(ctx, p.ledger, p.books.Synced) },
			serve.Announce(p.ready, p.size),
		},
		Servers:  p.servers,
		Limits:   p.limits,
		Stopping: func() { p.stopping.Store(true); close(p.ending) },
		Delay:    p.options.ShutdownDelay,
		Drain:    shutdownTimeout,
	}
	program.Parts = slices.Concat(program.Parts, p.parts, more)
	if p.certs != nil {
		program.Parts = append(program.Parts, p.certs.Run)
	}
	if p.election != nil {
		program.Parts = append(program.Parts, p.elect)
	}
	return program.Run(ctx)
}

func (p *program) sweeper() cluster.Sweeper {
	return cluster.Sweeper{Ledger: p.ledger, State: p.books, Binder: p.binder, BindLimit: unfinished}
}

// size is what the log says of the ledger when the program becomes ready.
func (p *program) size() []any {
	size := p.books.Size()
	return []any{"nodes", size.Nodes, "podsWaiting", size.Waiting, "podsOnDevices", size.Granted, "podsElsewhere", size.Ungranted}
}
