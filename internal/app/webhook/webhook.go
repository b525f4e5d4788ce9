// Package webhook is the program "divvy-control webhook": its options, and how
// its parts are put together, started and stopped.
package webhook

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/platform/certs"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/admission"
	"github.com/divvy-gpu/divvy/internal/pool/secrets"
	"github.com/divvy-gpu/divvy/internal/pool/sources"
)

const (
	// drainTimeout is what reviews under way get when the program stops, after
	// the delay. The API server waits no longer for one.
	drainTimeout = 10 * time.Second
	// clientBytes is what all clients may hold. The container has 512 MiB.
	clientBytes = 48 << 20
)

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
	return flags.Program(&cobra.Command{
		Use:   "webhook",
		Short: "Convert and validate pods that use GPUs of the remote pool, and copy its credentials to their namespaces",
		Long: "Convert and validate pods that use GPUs of the remote pool, and copy its credentials to their namespaces. The program\n" +
			"creates and renews its serving certificate itself." + flags.EnvironmentHelp,
	}, &o, &o.Log, theirVariables, func(ctx context.Context, _ io.Writer) error { return Run(ctx, o) })
}

// Run answers until the context ends or an error occurs that cannot be recovered from. It returns
// when all that it started has ended.
func Run(ctx context.Context, o Options) error {
	if err := o.Validate(); err != nil {
		return err
	}
	catalog, err := sources.OpenCatalog(o.CatalogFile, o.ClientImage)
	if err != nil {
		return err
	}
	clients, err := kube.Connect(o.Kubeconfig, "divvy-webhook/"+version.Version)
	if err != nil {
		return err
	}
	p, err := assemble(o, catalog, clients)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting", "version", version.String("divvy-webhook"), "listen", o.Listen,
		"clients", len(catalog.Current().Clients), "totalGPUMemoryMB", p.admission.TotalMemoryMB,
		"ignoredNamespaces", p.admission.IgnoredNamespaces, "namespaceSelector", o.NamespaceSelector)
	return p.run(ctx)
}

// certificates keeps the certificate. *certs.Manager is one.
type certificates interface {
	Run(context.Context) error
	GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error)
	Ready() error
}

// keeper brings credentials. *secrets.Keeper is one.
type keeper interface {
	Run(context.Context) error
	Ready() error
	Allowed(namespace string, secrets []string) error
}

type program struct {
	options   Options
	admission admission.Settings
	client    kubernetes.Interface
	catalog   *sources.CatalogFile
	certs     certificates
	keeper    keeper
	cluster   *sources.Cluster
	reloads   *prometheus.CounterVec
	events    *events.Recorder
	limits    *limit.Limiter
	servers   []serve.Server
	// provisional is served until there is a certificate, so that probes are
	// answered when the API server is away.
	provisional *tls.Certificate
	stopping    atomic.Bool
}

// assemble makes the parts; none of them runs yet.
func assemble(o Options, catalog *sources.CatalogFile, clients kube.Clients) (*program, error) {
	client := clients.Kubernetes
	registry := metrics.Registry(metrics.Webhook, clients.Requests)
	manager, err := certs.New(certs.Config{
		Client: client, Namespace: o.namespace(), Secret: o.Secret, DNSNames: o.dnsNames(),
		Mutating: o.MutatingConfig, Validating: o.ValidatingConfig,
	})
	if err != nil {
		return nil, fmt.Errorf("certificate of the webhooks: %w", err)
	}
	selector, err := parseSelector(o.NamespaceSelector)
	if err != nil {
		return nil, err
	}
	keeper := secrets.New(secrets.Config{Client: client, SourceNamespace: o.SourceNamespace, Selector: selector})
	if err := errors.Join(manager.Register(registry), keeper.Register(registry)); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return newProgram(o, catalog, client, manager, keeper, registry)
}

func newProgram(o Options, catalog *sources.CatalogFile, client kubernetes.Interface, c certificates, k keeper,
	registry *prometheus.Registry) (*program, error) {
	p := &program{
		options: o, client: client, catalog: catalog, certs: c, keeper: k, cluster: sources.NewCluster(k.Allowed),
		limits: limit.New(limit.Config{Shared: clientBytes}),
	}
	var err error
	if p.admission, err = o.admission(); err != nil {
		return nil, err
	}
	if p.provisional, err = selfSigned(o.dnsNames()[0]); err != nil {
		return nil, err
	}
	p.events = events.NewRecorder(context.Background(), client, events.Webhook, "")
	p.events.Anew() // the chart's role lets it change none
	p.register(registry)
	reviews, err := admission.Handler(admission.Config{
		Catalog:  catalog.Current,
		Settings: func() admission.Settings { return p.admission },
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
			http.Error(w, "shutting down", http.StatusServiceUnavailable)
			return
		}
		reviews.ServeHTTP(w, r)
	})
	p.servers = []serve.Server{
		{Name: serve.TLS, Address: o.Listen, For: "the API server", HTTP: serve.NewServer(mux)},
		{Name: serve.MetricsPort, Address: o.MetricsListen, For: "metrics", HTTP: serve.NewServer(serve.Metrics(registry))},
	}
	p.servers[0].HTTP.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: p.certificate}
	return p, nil
}

// The results of a reload of the catalog.
const (
	accepted = "accepted"
	rejected = "rejected"
)

func (p *program) register(registry prometheus.Registerer) {
	p.reloads = metrics.WebhookCatalogReloads.NewCounters()
	for _, result := range []string{accepted, rejected} {
		p.reloads.WithLabelValues(result) // so that both are there from the start
	}
	registry.MustRegister(
		p.reloads, p.events, p.limits,
		metrics.WebhookCatalogClients.NewGaugeFunc(nil, func() float64 { return float64(len(p.catalog.Current().Clients)) }),
		metrics.WebhookCatalogStale.NewGaugeFunc(nil, func() float64 { return metrics.Bool(p.catalog.Problem() != nil) }),
		metrics.WebhookReady.NewGaugeFunc(nil, func() float64 { return metrics.Bool(p.ready() == nil) }),
	)
}

// ready returns nil when the answers of this replica are right and the API server
// can call it. There is always a catalog.
func (p *program) ready() error {
	if err := p.certs.Ready(); err != nil {
		return err
	}
	if err := p.cluster.Ready(); err != nil {
		return err
	}
	return p.keeper.Ready()
}

// run starts everything and waits for all of it to end: first the server, when
// nobody sends reviews any more, then what it needs.
func (p *program) run(ctx context.Context) error {
	// Parts tell of events as long as they run, which is longer than ctx.
	p.events.Start()
	defer p.events.Shutdown()

	return serve.Program{
		Parts: []func(context.Context) error{
			p.certs.Run,
			p.keeper.Run,
			func(ctx context.Context) error { p.cluster.Run(ctx, p.client); return nil },
			func(ctx context.Context) error { p.catalog.Run(ctx, p.accept(ctx), p.reject(ctx)); return nil },
			serve.Announce(p.ready, nil),
		},
		Servers:  p.servers,
		Limits:   p.limits,
		Stopping: func() { p.stopping.Store(true) },
		Delay:    p.options.ShutdownDelay,
		Drain:    drainTimeout,
	}.Run(ctx)
}

// certificate returns what to show to whoever connects.
func (p *program) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	if c, err := p.certs.GetCertificate(hello); err == nil {
		return c, nil
	}
	return p.provisional, nil
}

func (p *program) accept(ctx context.Context) func(*pool.Catalog) {
	return func(c *pool.Catalog) {
		klog.FromContext(ctx).Info("The new catalog is in use", "file", p.options.CatalogFile, "clients", len(c.Clients))
		p.reloads.WithLabelValues(accepted).Inc()
		p.tell(events.CatalogReloaded, fmt.Sprintf("the new catalog is in use; number of clients: %d", len(c.Clients)))
	}
}

func (p *program) reject(ctx context.Context) func(error) {
	return func(err error) {
		klog.FromContext(ctx).Error(err, "The new catalog is invalid; keeping the previous one")
		p.reloads.WithLabelValues(rejected).Inc()
		p.tell(events.CatalogRejected, "the new catalog is invalid, the previous one stays in use: "+
			strings.Join(strings.Fields(err.Error()), " "))
	}
}

// tell records an event on the program's own pod. Without its name there is none, which the log
// has too.
func (p *program) tell(kind events.Kind, message string) {
	pod := os.Getenv("POD_NAME")
	if pod == "" {
		pod, _ = os.Hostname()
	}
	if pod != "" {
		p.events.Tell(&corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.options.namespace(), Name: pod}, kind, message)
	}
}
