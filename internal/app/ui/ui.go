// Package ui is the subcommand "kubectl-divvy ui": it serves a page about the cluster's devices to
// the person who started it. What the page shows is in package ui of internal/report.
package ui

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect/nodeusage"
	"github.com/divvy-gpu/divvy/internal/report/ui"
)

// Options are what a person may choose.
type Options struct {
	// Port is that of the page; 0 for any free one.
	Port int
	// Namespace is the one whose pods are shown to a person who may not list those of all; "" for
	// that of the context.
	Namespace string
	// Usage shows what is in use of devices, and DivvyNamespace is where the daemons are that know.
	Usage          bool
	DivvyNamespace string
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options { return Options{DivvyNamespace: "divvy-system"} }

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.IntVar(&o.Port, "port", o.Port, "port of the page on 127.0.0.1; any free one if 0")
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace, "namespace whose pods are shown if you may not list those of all; "+
		"that of the context if empty")
	fs.BoolVar(&o.Usage, "usage", o.Usage, "also show what is in use of each device; runs \"divvy-node usage\" on each node every 30 s")
	fs.StringVar(&o.DivvyNamespace, "divvy-namespace", o.DivvyNamespace, "namespace of Divvy, for --usage")
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	var errs []error
	if o.Port < 0 || o.Port > 65535 {
		errs = append(errs, fmt.Errorf("--port %d: must be from 0 to 65535", o.Port))
	}
	errs = append(errs, kubectl.CheckNamespace(o.Namespace))
	if o.DivvyNamespace == "" {
		errs = append(errs, errors.New("--divvy-namespace must not be empty"))
	}
	return errors.Join(errs...)
}

const about = `Show nodes, devices, allocations and pods that wait on a page in your browser.

The page is served by this program on 127.0.0.1, with your kubeconfig and your permissions, until you press
Ctrl-C. Nothing is installed in the cluster, and the page changes nothing. The printed address works once: if
it is opened in a second browser, the command ends, since one of the two may be another user's.

Requires permission to list and watch nodes and pods. With less, the page shows what you may read, and says
what is missing. --usage requires permission to list pods and to create pods/exec in Divvy's namespace.`

// Command returns the subcommand. The address goes to cmd's output.
func Command() *cobra.Command {
	o := DefaultOptions()
	c := kubectl.New()
	cmd := &cobra.Command{
		Use:     "ui",
		Short:   "Show nodes, devices, allocations and waiting pods in a browser",
		Long:    about,
		Args:    cobra.NoArgs,
		PreRunE: func(*cobra.Command, []string) error { return o.Validate() },
		RunE: func(cmd *cobra.Command, _ []string) error {
			feed, err := o.feed(cmd.Context(), c)
			if err != nil {
				return err
			}
			return Run(cmd.Context(), o.Port, feed, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	o.AddFlags(cmd.Flags())
	c.AddFlagsWithoutTimeout(cmd.Flags()) // which would end the watches
	return cmd
}

// feed follows the cluster that the flags choose.
func (o *Options) feed(ctx context.Context, c *kubectl.Cluster) (*ui.Feed, error) {
	name, err := c.Name()
	if err != nil {
		return nil, err
	}
	namespace, err := c.Namespace()
	if err != nil {
		return nil, err
	}
	config, err := c.Config()
	if err != nil {
		return nil, err
	}
	clients, err := kube.NewClients(config, kubectl.Agent())
	if err != nil {
		return nil, err
	}
	options := ui.Options{Client: clients.Kubernetes, Cluster: name, Namespace: cmp.Or(o.Namespace, namespace), Now: time.Now}
	if o.Usage {
		config.UserAgent = kubectl.Agent()
		exec := nodeusage.Remote(config, clients.Kubernetes)
		options.Usage = func(ctx context.Context, nodes []string) (nodeusage.Reports, error) {
			return nodeusage.Gather(ctx, nodeusage.Options{Namespace: o.DivvyNamespace, Nodes: nodes}, clients.Kubernetes, exec)
		}
	}
	return ui.NewFeed(ctx, options)
}

// Run serves the page until ctx ends, or the address is opened in a second browser. The address goes
// to out, alone, so that a script can read it.
func Run(ctx context.Context, port int, feed *ui.Feed, out, errOut io.Writer) error {
	s, err := ui.Listen(ctx, port, feed, errOut)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, s.URL()); err != nil {
		return fmt.Errorf("print the address: %w", err)
	}
	if _, err := fmt.Fprintln(errOut, "Open this address in a browser on this machine. It works once. Press Ctrl-C to stop."); err != nil {
		return fmt.Errorf("print how to open the page: %w", err)
	}
	return s.Run(ctx)
}
