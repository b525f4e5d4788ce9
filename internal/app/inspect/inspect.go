// Package inspect is the subcommand "kubectl-divvy inspect": its flags. What it shows is collected
// by internal/report/inspect/collect.
package inspect

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect/collect"
	"github.com/divvy-gpu/divvy/internal/report/inspect/nodeusage"
)

// addFlags adds a flag for every option, with its present value as default.
func addFlags(fs *pflag.FlagSet, o *collect.Options) {
	fs.StringVarP(&o.Output, "output", "o", o.Output, "table, wide, json or yaml")
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace, "namespace of Divvy")
	fs.StringVar(&o.Service, "service", o.Service, "service of the extender")
	fs.IntVar(&o.Port, "port", o.Port, "port of the extender's service")
	fs.StringVar(&o.Resource, "resource", o.Resource, "extended resource to show, or \"all\"; if empty, all resources in a table and "+
		collect.GuideResource+" in JSON and YAML")
	fs.DurationVar(&o.Timeout, "extender-timeout", o.Timeout, "how long to wait for the extender")
}

// Command returns the subcommand. What it shows goes to cmd's output, what it
// has to say about that to cmd's error output.
func Command() *cobra.Command {
	o := collect.DefaultOptions()
	c := kubectl.New()
	usage := false
	cmd := &cobra.Command{
		Use:   "inspect [NODE]",
		Short: "Show device allocations by pod",
		Long: "Show device allocations by pod, on all nodes or on one.\n\n" +
			"Allocations of shared memory come from the extender, through the API server. If the extender does not answer,\n" +
			"they are read from the nodes' inventories and the pods' signed allocations, with a note on standard\n" +
			"error. Whole devices and time slices are always read from nodes and pods.\n\n" +
			"For a remote pool, the requests and quotas of each namespace are shown.\n\n" +
			"With --usage, what is in use of each device is shown beside the allocations, on all nodes or on those that are named.\n" +
			"It is measured where usage.enabled is set. The command runs \"divvy-node usage\" in the daemon's pod of each node, which\n" +
			"takes the rights to list pods and to create pods/exec in Divvy's namespace.",
		Args: func(cmd *cobra.Command, args []string) error {
			if usage {
				return nil
			}
			return cobra.MaximumNArgs(1)(cmd, args)
		},
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if usage {
				return checkUsage(cmd.Flags(), o)
			}
			return o.Validate()
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if usage {
				return runUsage(cmd, c, o, args)
			}
			clients, err := c.Clients()
			if err != nil {
				return err
			}
			node := ""
			if len(args) == 1 {
				node = args[0]
			}
			return collect.Run(cmd.Context(), o, clients, node, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	addFlags(cmd.Flags(), &o)
	cmd.Flags().BoolVar(&usage, "usage", false, "show what is in use of each device, and by which containers")
	c.AddFlags(cmd.Flags())
	return cmd
}

// checkUsage reports all mistakes of flags beside --usage.
func checkUsage(fs *pflag.FlagSet, o collect.Options) error {
	var errs []error
	if o.Output != "table" && o.Output != "json" {
		errs = append(errs, fmt.Errorf("output format %q: with --usage it must be one of table, json", o.Output))
	}
	if o.Namespace == "" {
		errs = append(errs, errors.New("--namespace must not be empty"))
	}
	for _, flag := range []string{"service", "port", "resource", "extender-timeout"} {
		if fs.Changed(flag) {
			errs = append(errs, fmt.Errorf("--%s has no effect with --usage; leave it out", flag))
		}
	}
	return errors.Join(errs...)
}

// runUsage prints what is in use on the nodes.
func runUsage(cmd *cobra.Command, c *kubectl.Cluster, o collect.Options, nodes []string) error {
	config, err := c.Config()
	if err != nil {
		return err
	}
	clients, err := kube.NewClients(config, kubectl.Agent())
	if err != nil {
		return err
	}
	config.UserAgent = kubectl.Agent()
	return nodeusage.Run(cmd.Context(), nodeusage.Options{JSON: o.Output == "json", Namespace: o.Namespace, Nodes: nodes},
		clients.Kubernetes, nodeusage.Remote(config, clients.Kubernetes), cmd.OutOrStdout())
}
