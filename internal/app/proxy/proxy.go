// Package proxy is the program "divvy-control proxy": its options, and how its parts
// are put together.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/scheduler/localproxy"
)

// Options are the settings of the proxy. A flag wins over its environment variable, and
// that over the default.
type Options struct {
	// Listen is host:port for kube-scheduler.
	Listen string
	// Service is namespace/name of the extender's Service.
	Service string
	// Kubeconfig is a file, "" for the pod's service account.
	Kubeconfig string

	Log flags.Log
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	return Options{Listen: "127.0.0.1:32764", Service: "divvy-system/divvy-extender", Log: flags.DefaultLog()}
}

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Listen, "listen", o.Listen, "address that kube-scheduler on this node connects to")
	fs.StringVar(&o.Service, "extender-service", o.Service,
		"namespace/name of the extender's Service; connections are forwarded to its replicas")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", o.Kubeconfig, "kubeconfig file; the pod's service account if empty")
	o.Log.AddFlags(fs)
}

// settings are options that were checked.
type settings struct {
	Options
	namespace, name string
	logging         logging.Options
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	_, err := o.settings()
	return err
}

func (o Options) settings() (settings, error) {
	s := settings{Options: o}
	var err error
	s.logging, err = o.Log.Options()
	errs := []error{err, flags.Mistake("listen", flags.CheckAddress(o.Listen))}
	namespace, name, ok := strings.Cut(o.Service, "/")
	if !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		errs = append(errs, flags.Mistake("extender-service", fmt.Errorf("%q: must be NAMESPACE/NAME", o.Service)))
	}
	s.namespace, s.name = namespace, name
	return s, errors.Join(errs...)
}

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Forward connections of this node's kube-scheduler to a replica of the extender",
		Long: "Forward connections of this node's kube-scheduler to a replica of the extender that responds, preferably the leader.\n" +
			"Connections to a replica that stops responding are closed, and new connections are rejected if no replica responds, so\n" +
			"kube-scheduler never waits for an unavailable machine.\n\n" +
			"Every flag can be given as an environment variable: --log-level as " + flags.EnvPrefix + "LOG_LEVEL.\n" +
			"Flags take precedence over variables, variables over defaults.",
		Args: cobra.NoArgs,
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return errors.Join(flags.FromEnvironment(cmd.Flags(), os.LookupEnv, nil), o.Validate())
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return Run(cmd.Context(), o) },
	}
	o.AddFlags(cmd.Flags())
	return cmd
}

// Run serves until the context ends. It returns when all that it started has ended.
func Run(ctx context.Context, o Options) error {
	s, err := o.settings()
	if err != nil {
		return err
	}
	logger, closeLog := logging.Setup(s.logging)
	defer closeLog() //nolint:errcheck // lines are written one by one, nothing is lost
	ctx = klog.NewContext(ctx, logger)
	clients, err := kube.Connect(s.Kubeconfig, "divvy-proxy/"+version.Version)
	if err != nil {
		return err
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", s.Listen)
	if err != nil {
		return fmt.Errorf("listen for kube-scheduler: %w", err)
	}
	logger.Info("Starting", "version", version.String("divvy-proxy"), "listen", listener.Addr().String(), "service", s.Service)
	replicas := newEndpoints(clients.Kubernetes, s.namespace, s.name)
	p := localproxy.New(localproxy.Config{Replicas: replicas.addresses, Probe: newProbe()})
	return serve.Program{Parts: []func(context.Context) error{
		func(ctx context.Context) error { replicas.run(ctx); return nil },
		func(ctx context.Context) error { return p.Serve(ctx, listener) },
	}}.Run(ctx)
}
