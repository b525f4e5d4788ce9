// Package extender is the program "divvy-control extender": its options, and
// how its parts are put together, started and stopped.
package extender

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/accel/ledger"
	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/extender"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/logging"
	"github.com/divvy-gpu/divvy/internal/version"
)

const (
	// expireEvery is how often reservations are looked through.
	expireEvery = time.Second
	// unseenFor is how long the watch may take to show a bound pod before the
	// API server is asked about it, for up to verifyAtOnce pods a time.
	unseenFor    = 1500 * time.Millisecond
	verifyAtOnce = 50
	// shutdownTimeout is what requests under way get when the program stops;
	// a bind takes no longer than extender.DefaultBindTimeout.
	shutdownTimeout = extender.DefaultBindTimeout + time.Second
)

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
	cmd := &cobra.Command{
		Use:   "extender",
		Short: "Answer kube-scheduler's filter, prioritize and bind, and what every device holds",
		Long: "Answer kube-scheduler's filter, prioritize and bind, and what every device holds.\n\n" +
			"Every flag can be given as an environment variable: --log-level as " + flags.EnvPrefix + "LOG_LEVEL.\n" +
			"A flag wins over the variable, the variable over the default.",
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return errors.Join(flags.FromEnvironment(cmd.Flags(), os.LookupEnv, nil), o.Validate())
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return Run(cmd.Context(), o) },
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

	clients, err := kube.Connect(s.Kubeconfig, "divvy-extender/"+version.Version)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", s.Listen)
	if err != nil {
		return fmt.Errorf("listen for kube-scheduler: %w", err)
	}
	defer listener.Close() //nolint:errcheck // closed by the server; this is for the ways out before
	var metricsListener net.Listener
	if s.MetricsListen != "" {
		if metricsListener, err = net.Listen("tcp", s.MetricsListen); err != nil {
			return fmt.Errorf("listen for metrics: %w", err)
		}
		defer metricsListener.Close() //nolint:errcheck // as above
	}
	logger.Info("Starting", "version", version.String("divvy-extender"), "listen", listener.Addr().String(),
		"policy", s.policy.String(), "resources", s.Resources, "leaderElect", s.LeaderElect)

	program, err := assemble(s, clients)
	if err != nil {
		return err
	}
	return program.run(ctx, listener, metricsListener)
}

// program is the parts, put together.
type program struct {
	settings settings
	clients  kube.Clients
	ledger   *ledger.Ledger
	keys     *kube.Keyring
	books    *kube.Books
	binder   *kube.Binder
	handler  http.Handler
	metrics  http.Handler
	// leading is true while this replica may answer; always without election.
	leading  atomic.Bool
	stopping atomic.Bool
}

func assemble(s settings, clients kube.Clients) (*program, error) {
	p := &program{
		settings: s,
		clients:  clients,
		ledger:   ledger.New(ledger.Options{Policy: s.policy, ReservationTTL: s.ReservationTTL}),
		keys:     kube.NewKeyring(s.GrantKeyFile),
	}
	p.binder = kube.NewBinder(clients.Kubernetes, s.resources)
	p.leading.Store(!s.LeaderElect)
	p.books = kube.NewBooks(kube.BooksConfig{
		Ledger: p.ledger, Grants: p.keys, Resources: s.resources, NodeLabels: s.labels,
	})

	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		booksCollector{p.books})
	e, err := extender.New(extender.Config{
		Ledger:    p.ledger,
		Cluster:   p.books,
		Binder:    p.binder,
		Signer:    p.keys.Signer,
		Ready:     p.ready,
		Resources: s.resources,
		Version:   version.Version,
		BindFrom:  s.bindFrom,
		Registry:  registry,
	})
	if err != nil {
		return nil, err
	}
	p.handler = e.Handler()
	metrics := http.NewServeMux()
	metrics.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	p.metrics = metrics
	return p, nil
}

// ready returns nil when the answers of this replica are right.
func (p *program) ready() error {
	switch {
	case p.stopping.Load():
		return errors.New("it is stopping")
	case !p.leading.Load():
		return errors.New("another replica leads")
	case !p.books.Synced():
		return errors.New("the books are still being read from the API server")
	}
	_, err := p.keys.Signer()
	return err
}

// run starts everything and waits for all of it to end. The first part that
// fails, or the end of ctx, ends the others: first the server, so that binds
// under way are finished, then what they need.
func (p *program) run(ctx context.Context, listener, metricsListener net.Listener) error {
	logger := klog.FromContext(ctx)
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	// The parts outlive ctx until the server has finished.
	partsCtx, stopParts := context.WithCancel(context.WithoutCancel(ctx))
	defer stopParts()

	var parts sync.WaitGroup
	parts.Go(func() { p.books.Run(partsCtx, p.clients) })
	parts.Go(func() { p.keys.Run(partsCtx, p.books.KeyChanged) })
	parts.Go(func() { p.expire(partsCtx) })
	parts.Go(func() { p.announce(partsCtx) })
	if p.settings.LeaderElect {
		parts.Go(func() {
			if err := p.elect(partsCtx); err != nil {
				fail(err)
			}
		})
	}

	server := newServer(partsCtx, p.handler)
	servers := []*http.Server{server}
	var serving sync.WaitGroup
	serve := func(s *http.Server, l net.Listener) {
		serving.Go(func() {
			if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				fail(fmt.Errorf("serve on %s: %w", l.Addr(), err))
			}
		})
	}
	serve(server, listener)
	if metricsListener != nil {
		servers = append(servers, newServer(partsCtx, p.metrics))
		serve(servers[1], metricsListener)
	}

	<-ctx.Done()
	logger.Info("Stopping", "cause", context.Cause(ctx).Error())
	p.stopping.Store(true)
	shutdown, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	for _, s := range servers {
		if err := s.Shutdown(shutdown); err != nil {
			logger.Error(err, "Requests were cut off")
			s.Close() //nolint:errcheck // nothing is left to do about it
		}
	}
	serving.Wait()
	stopParts()
	parts.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
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
			if n := p.ledger.Expire(); n > 0 {
				klog.FromContext(ctx).Info("Dropped reservations of pods that were not seen bound", "count", n)
			}
		}
	}
}

// verify asks the API server about pods that were bound and that the watch has
// not shown since: a pod that was deleted while the watch was away, as it is
// when the API server restarts, is in no list and no event.
func (p *program) verify(ctx context.Context) {
	for _, ref := range p.ledger.Unseen(unseenFor, verifyAtOnce) {
		lookup, cancel := context.WithTimeout(ctx, time.Second)
		pod, err := p.binder.Get(lookup, ref.Namespace, ref.Name)
		cancel()
		switch {
		case errors.Is(err, kube.ErrPodGone), err == nil && (pod.Ref.UID != ref.UID || pod.Ended):
			p.ledger.Forget(ref.UID)
			klog.FromContext(ctx).Info("Dropped the reservation of a pod that is gone", "pod", ref.String())
		case err != nil:
			return // the API server is away: nothing is known, and nothing is bound meanwhile
		}
	}
}

// announce logs when the program becomes ready, and when it is no longer and
// why.
func (p *program) announce(ctx context.Context) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	last := ""
	for {
		state := "ready"
		if err := p.ready(); err != nil {
			state = err.Error()
		}
		if state != last {
			last = state
			if size := p.books.Size(); state == "ready" {
				logger.Info("Ready", "nodes", size.Nodes, "podsWaiting", size.Waiting, "podsOnDevices", size.Granted, "podsElsewhere", size.Ungranted)
			} else {
				logger.Info("Not ready", "reason", state)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// newServer bounds what a client can take of the process's time and memory.
func newServer(ctx context.Context, h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       15 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
}
