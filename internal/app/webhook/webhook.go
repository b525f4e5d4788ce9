// Package webhook is the program "divvy-control webhook": its options, and how
// its parts are put together, started and stopped.
package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/admission"
	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/certs"
	"github.com/divvy-gpu/divvy/internal/credentials"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/logging"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/version"
)

const (
	// drainTimeout is what reviews under way get when the program stops, after
	// the delay. The API server waits no longer for one.
	drainTimeout = 10 * time.Second
	// maxStreams bounds the reviews under way on one connection. The API server
	// opens another connection for more.
	maxStreams = 100
	// maxEvent is how long the message of an event may be.
	maxEvent = 1000
)

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
	cmd := &cobra.Command{
		Use:   "webhook",
		Short: "Convert and check pods that use GPUs of the remote pool, and bring them its credentials",
		Long: "Convert and check pods that use GPUs of the remote pool, and bring them its credentials. The certificate that the\n" +
			"API server trusts is made and renewed by the program itself.\n\n" +
			"Every flag can be given as an environment variable: --log-level as " + flags.EnvPrefix + "LOG_LEVEL.\n" +
			"A flag wins over the variable, the variable over the default.",
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return errors.Join(flags.FromEnvironment(cmd.Flags(), os.LookupEnv, theirVariables), o.Validate())
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
	catalog, err := openCatalog(s.CatalogFile, s.ClientImage)
	if err != nil {
		return err
	}
	logger, closeLog := logging.Setup(s.logging)
	defer closeLog() //nolint:errcheck // lines are written one by one, nothing is lost
	ctx = klog.NewContext(ctx, logger)

	clients, err := kube.Connect(s.Kubeconfig, "divvy-webhook/"+version.Version)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", s.Listen)
	if err != nil {
		return fmt.Errorf("listen for the API server: %w", err)
	}
	defer listener.Close() //nolint:errcheck // closed by the server; this is for the ways out before
	var metricsListener net.Listener
	if s.MetricsListen != "" {
		if metricsListener, err = net.Listen("tcp", s.MetricsListen); err != nil {
			return fmt.Errorf("listen for metrics: %w", err)
		}
		defer metricsListener.Close() //nolint:errcheck // as above
	}
	logger.Info("Starting", "version", version.String("divvy-webhook"), "listen", listener.Addr().String(),
		"clients", len(catalog.current().Clients), "totalGPUMemoryMB", s.admission.TotalMemoryMB,
		"ignoredNamespaces", s.admission.IgnoredNamespaces, "namespaceSelector", s.selector.String())

	p, err := assemble(s, catalog, clients.Kubernetes)
	if err != nil {
		return err
	}
	return p.run(ctx, listener, metricsListener)
}

// certificates keeps the certificate. *certs.Manager is one.
type certificates interface {
	Run(context.Context) error
	GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error)
	Ready() error
}

// keeper brings credentials. *credentials.Keeper is one.
type keeper interface {
	Run(context.Context) error
	Ready() error
	Allowed(namespace string, secrets []string) error
}

// program is the parts, put together.
type program struct {
	settings settings
	client   kubernetes.Interface
	catalog  *catalogFile
	certs    certificates
	keeper   keeper
	cluster  *cluster
	reloads  *prometheus.CounterVec
	recorder record.EventRecorder // nil until run
	handler  http.Handler
	metrics  http.Handler
	// provisional is served until there is a certificate, so that probes are
	// answered when the API server is away.
	provisional *tls.Certificate
	stopping    atomic.Bool
}

// assemble makes the parts; none of them runs yet.
func assemble(s settings, catalog *catalogFile, client kubernetes.Interface) (*program, error) {
	registry := prometheus.NewRegistry()
	manager, err := certs.New(certs.Config{
		Client: client, Namespace: s.Namespace, Secret: s.Secret, DNSNames: s.dnsNames(),
		Mutating: s.MutatingConfig, Validating: s.ValidatingConfig,
	})
	if err != nil {
		return nil, fmt.Errorf("certificate of the webhooks: %w", err)
	}
	keeper := credentials.New(credentials.Config{Client: client, SourceNamespace: s.SourceNamespace, Selector: s.selector})
	if err := errors.Join(manager.Register(registry), keeper.Register(registry)); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return newProgram(s, catalog, client, manager, keeper, registry)
}

func newProgram(s settings, catalog *catalogFile, client kubernetes.Interface, c certificates, k keeper, registry *prometheus.Registry) (*program, error) {
	p := &program{settings: s, client: client, catalog: catalog, certs: c, keeper: k, cluster: newCluster(k.Allowed)}
	var err error
	if p.provisional, err = selfSigned(s.dnsNames()[0]); err != nil {
		return nil, err
	}
	p.register(registry)
	reviews, err := admission.Handler(admission.Config{
		Catalog:  catalog.current,
		Settings: func() admission.Settings { return s.admission },
		Cluster:  p.cluster,
		Ready:    p.ready,
		Registry: registry,
	})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/", reviews)
	// A program that stops is not ready although its answers are right.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if p.stopping.Load() {
			http.Error(w, "it is stopping", http.StatusServiceUnavailable)
			return
		}
		reviews.ServeHTTP(w, r)
	})
	p.handler = mux
	metrics := http.NewServeMux()
	metrics.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	p.metrics = metrics
	return p, nil
}

// The results of a reload of the catalog.
const (
	accepted = "accepted"
	rejected = "rejected"
)

// register adds the program's own metrics.
func (p *program) register(registry prometheus.Registerer) {
	p.reloads = prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: "divvy", Subsystem: "webhook", Name: "catalog_reloads_total",
		Help: "Changes of the catalog's file, by whether they were accepted or rejected.",
	}, []string{"result"})
	for _, result := range []string{accepted, rejected} {
		p.reloads.WithLabelValues(result) // so that both are there from the start
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "divvy", Subsystem: "webhook", Name: name, Help: help}, value)
	}
	registry.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), p.reloads,
		gauge("catalog_clients", "Clients in the catalog that is in use.", func() float64 { return float64(len(p.catalog.current().Clients)) }),
		gauge("catalog_stale", "1 while the catalog's file cannot be used and the one before is, else 0.", func() float64 { return boolean(p.catalog.problem() != nil) }),
		gauge("ready", "1 while answers are right, else 0.", func() float64 { return boolean(p.ready() == nil) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: "divvy", Name: "build_info", Help: "Always 1; the labels say what runs.", ConstLabels: prometheus.Labels{"version": version.Version},
		}, func() float64 { return 1 }),
	)
}

func boolean(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// ready returns nil when the answers of this replica are right and the API server
// can call it. There is always a catalog.
func (p *program) ready() error {
	if err := p.certs.Ready(); err != nil {
		return err
	}
	if err := p.cluster.ready(); err != nil {
		return err
	}
	return p.keeper.Ready()
}

// run starts everything and waits for all of it to end. The first part that
// fails, or the end of ctx, ends the others: first the server, when nobody sends
// reviews any more, then what it needs.
func (p *program) run(ctx context.Context, listener, metricsListener net.Listener) error {
	logger := klog.FromContext(ctx)
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	// The parts outlive ctx until the server has finished.
	partsCtx, stopParts := context.WithCancel(context.WithoutCancel(ctx))
	defer stopParts()

	events := record.NewBroadcaster(record.WithContext(partsCtx))
	defer events.Shutdown()
	events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: p.client.CoreV1().Events("")})
	p.recorder = events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "divvy-webhook"})

	var parts sync.WaitGroup
	part := func(run func(context.Context) error) {
		parts.Go(func() {
			if err := run(partsCtx); err != nil {
				fail(err)
			}
		})
	}
	part(p.certs.Run)
	part(p.keeper.Run)
	parts.Go(func() { p.cluster.run(partsCtx, p.client) })
	parts.Go(func() { p.catalog.run(partsCtx, p.accept(partsCtx), p.reject(partsCtx)) })
	parts.Go(func() { p.announce(partsCtx) })

	server := newServer(partsCtx, p.handler)
	server.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: p.certificate}
	server.HTTP2 = &http.HTTP2Config{MaxConcurrentStreams: maxStreams}
	servers := []*http.Server{server}
	var serving sync.WaitGroup
	serve := func(l net.Listener, serve func() error) {
		serving.Go(func() {
			if err := serve(); !errors.Is(err, http.ErrServerClosed) {
				fail(fmt.Errorf("serve on %s: %w", l.Addr(), err))
			}
		})
	}
	serve(listener, func() error { return server.ServeTLS(listener, "", "") })
	if metricsListener != nil {
		metrics := newServer(partsCtx, p.metrics)
		servers = append(servers, metrics)
		serve(metricsListener, func() error { return metrics.Serve(metricsListener) })
	}

	<-ctx.Done()
	cause := context.Cause(ctx)
	logger.Info("Stopping", "cause", cause.Error(), "delay", p.settings.ShutdownDelay)
	p.stopping.Store(true)
	if errors.Is(cause, context.Canceled) {
		// It takes a while until everybody knows that this replica is gone.
		<-time.After(p.settings.ShutdownDelay)
	}
	shutdown, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
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
	if !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// certificate returns what to show to whoever connects.
func (p *program) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	if c, err := p.certs.GetCertificate(hello); err == nil {
		return c, nil
	}
	return p.provisional, nil
}

// accept tells of a new catalog.
func (p *program) accept(ctx context.Context) func(*pool.Catalog) {
	return func(c *pool.Catalog) {
		klog.FromContext(ctx).Info("The new catalog is in use", "file", p.catalog.path, "clients", len(c.Clients))
		p.reloads.WithLabelValues(accepted).Inc()
		p.tell(corev1.EventTypeNormal, "CatalogReloaded", fmt.Sprintf("the new catalog is in use; clients: %d", len(c.Clients)))
	}
}

// reject tells why a catalog cannot be used.
func (p *program) reject(ctx context.Context) func(error) {
	return func(err error) {
		klog.FromContext(ctx).Error(err, "The new catalog cannot be used; the one before stays")
		p.reloads.WithLabelValues(rejected).Inc()
		p.tell(corev1.EventTypeWarning, "CatalogRejected", "the catalog before stays in use: "+strings.Join(strings.Fields(err.Error()), " "))
	}
}

// tell records an event on the program's own pod.
func (p *program) tell(kind, reason, message string) {
	if p.settings.pod == "" {
		return
	}
	if len(message) > maxEvent {
		message = strings.ToValidUTF8(message[:maxEvent], "") + "..."
	}
	p.recorder.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.settings.Namespace, Name: p.settings.pod}, kind, reason, message)
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
			if state == "ready" {
				logger.Info("Ready")
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
