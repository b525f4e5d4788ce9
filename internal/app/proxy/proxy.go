// Package proxy is the program "divvy-control proxy": its options, and how its parts
// are put together.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/scheduler/localproxy"
)

// Options are the settings of the proxy. A flag wins over
// its environment variable, and that over the default.
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
	flags.AddKubeconfig(fs, &o.Kubeconfig)
	o.Log.AddFlags(fs)
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	_, err := o.Log.Options()
	errs := []error{err, flags.Mistake("listen", flags.CheckAddress(o.Listen))}
	if namespace, name, ok := strings.Cut(o.Service, "/"); !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
		errs = append(errs, flags.Mistake("extender-service", fmt.Errorf("%q: must be NAMESPACE/NAME", o.Service)))
	}
	return errors.Join(errs...)
}

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
	return flags.Program(&cobra.Command{
		Use:   "proxy",
		Short: "Forward connections of this node's kube-scheduler to a replica of the extender",
		Long: "Forward connections of this node's kube-scheduler to a replica of the extender that responds, preferably the leader.\n" +
			"Connections to a replica that stops responding are closed, and new connections are rejected if no replica responds, so\n" +
			"kube-scheduler never waits for an unavailable machine." + flags.EnvironmentHelp,
	}, &o, &o.Log, nil, func(ctx context.Context, _ io.Writer) error { return Run(ctx, o) })
}

// Run serves until the context ends. It returns when all that it started has ended.
func Run(ctx context.Context, o Options) error {
	clients, err := kube.Connect(o.Kubeconfig, "divvy-proxy/"+version.Version)
	if err != nil {
		return err
	}
	listener, err := serve.Listen(ctx, "kube-scheduler", o.Listen)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).Info("Starting", "version", version.String("divvy-proxy"), "listen", listener.Addr().String(), "service",
		o.Service)
	namespace, name, _ := strings.Cut(o.Service, "/")
	replicas := localproxy.NewEndpoints(clients.Kubernetes, namespace, name)
	p := localproxy.New(localproxy.Config{Replicas: replicas.Addresses, Probe: localproxy.NewProbe()})
	return serve.Program{Parts: []func(context.Context) error{
		func(ctx context.Context) error { replicas.Run(ctx); return nil },
		func(ctx context.Context) error { return p.Serve(ctx, listener) },
	}}.Run(ctx)
}
