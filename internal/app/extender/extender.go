// Package extender is the program "divvy-control extender": its options, and
// how its parts are put together, started and stopped.
package extender

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/app/serve"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/platform/certs"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
	"github.com/divvy-gpu/divvy/internal/scheduler/heaptarget"
	"github.com/divvy-gpu/divvy/internal/scheduler/leader"
	"github.com/divvy-gpu/divvy/internal/scheduler/schedbatch"
)

const (
	// expireEvery is how often reservations are looked through.
	expireEvery = time.Second
	// unseenFor is how long the watch may take to show a bound pod before the
	// API server is asked about it, for up to verifyAtOnce pods a time.
	unseenFor    = 1500 * time.Millisecond
	verifyAtOnce = 50
	// shutdownTimeout is what requests under way get when the program stops;
	// a bind takes extender.DefaultBindTimeout, and 2 s to ask what became of it.
	shutdownTimeout = extender.DefaultBindTimeout + 3*time.Second
	// sharedBytes is what callers that may not bind may hold together, reservedBytes the
	// same for those that may: 1000 binds in flight over plain HTTP take 47 MiB. With these
	// and the ledger of 5000 nodes the process has about half of the container's 512 MiB.
	sharedBytes   = 24 << 20
	reservedBytes = 48 << 20
)

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
	cmd := &cobra.Command{
		Use:   "extender",
		Short: "Serve kube-scheduler's extender calls and the allocations of all devices",
		Long: "Serve kube-scheduler's extender calls (filter, prioritize, preempt and bind) and report the allocations of all devices.\n\n" +
			"Every flag can be given as an environment variable: --log-level as " + flags.EnvPrefix + "LOG_LEVEL.\n" +
			"Flags take precedence over variables, variables over defaults.",
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return errors.Join(flags.FromEnvironment(cmd.Flags(), os.LookupEnv, nil), o.Validate())
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return Run(cmd.Context(), o)
		},
	}
	o.AddFlags(cmd.Flags())
	return cmd
}

// Run answers until the context ends or something that cannot be mended
// happens. It returns when all that it started has ended.
func Run(ctx context.Context, o Options) error {
	s, err := o.settings()
	if err != nil {
		return err
	}
	logger, closeLog := logging.Setup(s.logging)
	defer closeLog() //nolint:errcheck // lines are written one by one, nothing is lost
	ctx = klog.NewContext(ctx, logger)

	if err := schedbatch.Enter(); err != nil {
		logger.Info("Could not set SCHED_BATCH; continuing with the default policy", "reason", err.Error())
	}
	clients, err := kube.Connect(s.Kubeconfig, "divvy-extender/"+version.Version, kube.Corked)
	if err != nil {
		return err
	}
	program, err := assemble(s, clients)
	if err != nil {
		return err
	}
	var open listeners
	if open.plain, open.metrics, err = serve.Listen(ctx, "kube-scheduler", s.Listen, s.MetricsListen); err != nil {
		return err
	}
	tlsAddress := "none"
	if s.TLSListen != "" {
		if open.tls, _, err = serve.Listen(ctx, "kube-scheduler over TLS", s.TLSListen, ""); err != nil {
			return errors.Join(err, open.close())
		}
		tlsAddress = open.tls.Addr().String()
	}
	logger.Info("Starting", "version", version.String("divvy-extender"), "listen", open.plain.Addr().String(), "tlsListen", tlsAddress,
		"policy", s.policy.Name(), "resources", s.Resources, "leaderElect", s.LeaderElect)
	return program.run(ctx, open)
}

// program is the parts, put together.
type program struct {
	settings settings
	clients  kube.Clients
	ledger   *ledger.Ledger
	keys     *kube.Keyring
	books    *cluster.State
	binder   *cluster.Binder
	events   *events.Recorder
	limits   *limit.Limiter
	handler  http.Handler
	registry *prometheus.Registry
	metrics  http.Handler
	extender *extender.Extender
	// certs keeps the certificates, and secured answers over TLS; nil without.
	certs   *certs.Manager
	secured http.Handler
	// election is nil where there is one replica.
	election *leader.Elector
	// stopping is true, and ending closed, as soon as the program is to end.
	stopping atomic.Bool
	ending   chan struct{}
}

func assemble(s settings, clients kube.Clients) (*program, error) {
	p := &program{
		settings: s,
		clients:  clients,
		keys:     kube.NewKeyring(s.GrantKeyFile),
		ending:   make(chan struct{}),
	}
	counts := needsCapacity(s.policy)
	p.ledger = ledger.New(ledger.Options{
		Policy: s.policy, Policies: []place.Policy{s.prices}, ReservationTTL: s.ReservationTTL, MaxBindDelay: s.MaxBindDelay,
		// kube-scheduler has looked at CPU and memory when it asks.
		CapacityChecked: counts,
	})
	p.binder = cluster.NewBinder(clients.Kubernetes, s.resources, counts)
	booksConfig := cluster.Config{
		Ledger: p.ledger, Grants: p.keys, Resources: s.resources, NodeLabels: s.labels, ConfigLabels: nodeconfig.Labels,
		Learner: s.prices,
	}
	if counts {
		booksConfig.Capacity = p.ledger
	}
	p.books = cluster.NewState(booksConfig)

	registry := metrics.Registry(metrics.Extender, clients.Requests)
	p.events = events.NewRecorder(context.Background(), clients.Kubernetes, events.Extend, "")
	p.events.Anew() // the chart's role lets it change none, of anybody's pods
	registry.MustRegister(p.events, booksCollector{
		size: p.books.Size, ledger: p.ledger, resources: s.resources, devices: s.MetricsDevices,
		ready: func() bool { return p.ready() == nil }, leading: p.leading,
	}, s.prices)
	var err error
	if s.TLSListen != "" {
		if p.certs, err = newCertificates(s, clients.Kubernetes, registry); err != nil {
			return nil, err
		}
	}
	if p.election, err = p.newElection(); err != nil {
		return nil, err
	}
	if p.election != nil {
		registry.MustRegister(termsCollector{p.election.Terms})
	}
	e, err := extender.New(p.withElection(extender.Config{
		Ledger:     p.ledger,
		Cluster:    p.books,
		Binder:     p.binder,
		Waker:      p.binder,
		Signer:     p.keys.Signer,
		Ready:      p.ready,
		Resources:  s.resources,
		Capacity:   counts,
		ChooseNode: s.ChooseNode,
		Version:    version.Version,
		BindFrom:   s.bindFrom,
		Registry:   registry,
		Tell: func(pod accel.PodRef, kind events.Kind, message string) {
			p.events.Once(events.OnPod(pod.Namespace, pod.Name, pod.UID), kind, message, message)
		},
	}))
	if err != nil {
		return nil, err
	}
	p.limits = limit.New(limit.Config{Shared: sharedBytes, Reserved: reservedBytes, HasReserve: e.MayBindFrom})
	if err := registry.Register(p.limits); err != nil {
		return nil, fmt.Errorf("metrics of the servers: %w", err)
	}
	p.extender, p.handler = e, e.Handler()
	p.registry, p.metrics = registry, serve.Metrics(registry)
	if p.certs != nil {
		if p.secured, err = p.withReviews(p.handler, registry); err != nil {
			return nil, err
		}
	}
	return p, nil
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
	case !p.settings.prices.made():
		return errors.New("the weights of the placement policy are being computed")
	}
	_, err := p.keys.Signer()
	return err
}

// run starts everything and waits for all of it to end. Binds under way are
// finished before what they need ends.
func (p *program) run(ctx context.Context, open listeners) error {
	p.events.Start()
	defer p.events.Shutdown()
	program := serve.Program{
		Parts: []func(context.Context) error{
			func(ctx context.Context) error { p.books.Run(ctx, p.clients); return nil },
			func(ctx context.Context) error { p.keys.Run(ctx, p.books.KeyChanged); return nil },
			func(ctx context.Context) error { p.expire(ctx); return nil },
			func(ctx context.Context) error { p.extender.Run(ctx); return nil },
			func(ctx context.Context) error { heaptarget.Keep(ctx, extender.HeapBudget); return nil },
			func(ctx context.Context) error { return p.settings.prices.run(ctx, p.ledger, p.books.Synced) },
			serve.Announce(p.ready, p.size),
		},
		Servers: []serve.Server{
			{Name: serve.Plain, Listener: open.plain, Cork: true, HTTP: serve.NewServer(p.handler)},
			{Name: serve.MetricsPort, Listener: open.metrics, HTTP: serve.NewServer(p.metrics)},
		},
		Limits:   p.limits,
		Stopping: func() { p.stopping.Store(true); close(p.ending) },
		Delay:    p.settings.ShutdownDelay,
		Drain:    shutdownTimeout,
	}
	if p.certs != nil {
		program.Parts = append(program.Parts, p.certs.Run)
		program.Servers = append(program.Servers, serve.Server{Name: serve.TLS, Listener: open.tls, Cork: true,
			HTTP: secure(p.secured, p.certs)})
	}
	if p.election != nil {
		program.Parts = append(program.Parts, p.elect)
	}
	return program.Run(ctx)
}

// size is what the log says of the books when the program becomes ready.
func (p *program) size() []any {
	size := p.books.Size()
	return []any{"nodes", size.Nodes, "podsWaiting", size.Waiting, "podsOnDevices", size.Granted, "podsElsewhere", size.Ungranted}
}

// expire drops reservations that were never confirmed.
func (p *program) expire(ctx context.Context) {
	ticker := time.NewTicker(expireEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			p.verify(ctx)
			p.books.Settle()
			if n := p.ledger.Expire(); n > 0 {
				klog.FromContext(ctx).Info("Dropped reservations of pods that were not observed as bound", "count", n)
			}
		}
	}
}

// verify asks the API server about pods that were bound and that the watch has
// not shown since: a pod that was deleted while the watch was away, as it is
// when the API server restarts, is in no list and no event, and neither is one whose
// bind came to nothing.
func (p *program) verify(ctx context.Context) {
	for _, ref := range p.ledger.Unseen(unseenFor, verifyAtOnce) {
		lookup, cancel := context.WithTimeout(ctx, time.Second)
		pod, err := p.binder.Get(lookup, ref.Namespace, ref.Name)
		cancel()
		switch {
		case errors.Is(err, cluster.ErrPodGone), err == nil && (pod.Ref.UID != ref.UID || pod.Ended):
			p.ledger.Forget(ref.UID)
			klog.FromContext(ctx).Info("Dropped the reservation of a deleted pod", "pod", ref.String())
		case err != nil:
			return // the API server is away: nothing is known, and nothing is bound meanwhile
		case pod.Node == "" && p.ledger.Release(ref.UID, unfinished+time.Second): // as old when it was read
			klog.FromContext(ctx).Info("Dropped the reservation of a pod that was not bound", "pod", ref.String())
		}
	}
}
