// Package inspect is the subcommand "kubectl-divvy inspect": its flags. What it shows is collected
// by internal/report/inspect/collect.
package inspect

import (
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/report/inspect/collect"
)

// addFlags adds a flag for every option, with its present value as default.
func addFlags(fs *pflag.FlagSet, o *collect.Options) {
	fs.StringVarP(&o.Output, "output", "o", o.Output, "table, wide, json or yaml")
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace, "namespace of the extender")
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
	cmd := &cobra.Command{
		Use:   "inspect [NODE]",
		Short: "Show device allocations by pod",
		Long: "Show device allocations by pod, on all nodes or on one.\n\n" +
			"Allocations of shared memory come from the extender, through the API server. If the extender does not answer,\n" +
			"they are read from the nodes' inventories and the pods' signed allocations, with a note on standard\n" +
			"error. Whole devices and time slices are always read from nodes and pods.\n\n" +
			"For a remote pool, the requests and quotas of each namespace are shown.",
		Args:    cobra.MaximumNArgs(1),
		PreRunE: func(*cobra.Command, []string) error { return o.Validate() },
		RunE: func(cmd *cobra.Command, args []string) error {
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
	c.AddFlags(cmd.Flags())
	return cmd
}
