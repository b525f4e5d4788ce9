// Package node is the program divvy-node: its flags, how its parts are put
// together, and what it does when its configuration changes.
package node

import (
	"context"
	"errors"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/app/about"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/handover"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/node/runtimesetup"
	"github.com/divvy-gpu/divvy/internal/node/supervisor"
	"github.com/divvy-gpu/divvy/internal/node/usagefile"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// Options are the flags of divvy-node and what the environment says. Everything
// else is in the configuration files.
type Options struct {
	// Places say where the configuration is; without any the defaults hold.
	Places nodeconfig.Places
	// Overrides are what flags and variables say of the configuration.
	Overrides nodeconfig.Overrides
	// Warnings are logged at the start.
	Warnings []string
	// NodeName is the name of this node's object.
	NodeName string
	// PodNamespace and PodUID are those of the pod that the process runs in, "" where
	// it runs in none.
	PodNamespace, PodUID string
	// Kubeconfig says how to reach the API server, "" for the way that a pod
	// has.
	Kubeconfig string
	// Limits say how containers get limits in the driver.
	Limits agent.LimitOptions
}

// Command returns the command line of divvy-node.
func Command(name string) *cobra.Command {
	var o Options
	cmd := &cobra.Command{
		Use:   name,
		Short: "Offer the accelerators of this node to its pods",
		Long: "Offer the accelerators of this node to its pods.\n\n" +
			"Configuration files define what is offered. They are reloaded when they change and on SIGHUP. Flags take precedence\n" +
			"over environment variables, environment variables over files, and files over defaults.",
		Args:          noArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Places, o.Warnings = o.Places.Find(os.LookupEnv)
			o.Overrides = nodeconfig.Collect(cmd.Flags(), os.LookupEnv, vendors.Names())
			return Run(cmd.Context(), o)
		},
	}
	cmd.Flags().StringArrayVar(&o.Places.Files, "config", nil,
		"configuration file, in the format of divvy-node or of NVIDIA's or Iluvatar's device plugin; may be repeated, later files "+
			"override earlier ones (environment DIVVY_CONFIG, separated by commas)")
	cmd.Flags().StringVar(&o.Places.Dir, "config-dir", "", "folder of named configurations; the node's label divvy.dev/config selects "+
		"one, which overrides --config "+
		"(environment DIVVY_CONFIG_DIR)")
	cmd.Flags().StringVar(&o.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of this node in the cluster (environment NODE_NAME)")
	cmd.Flags().StringVar(&o.PodNamespace, "pod-namespace", os.Getenv("POD_NAMESPACE"),
		"namespace of this pod; the process takes over from a "+
			"running divvy-node of the same namespace, and waits for any other one to exit (environment POD_NAMESPACE)")
	cmd.Flags().StringVar(&o.PodUID, "pod-uid", os.Getenv("POD_UID"), "UID of this pod (environment POD_UID)")
	cmd.Flags().StringVar(&o.Kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"),
		"kubeconfig file; the pod's service account if empty (environment KUBECONFIG)")
	cmd.Flags().StringVar(&o.Limits.ProcRoot, "proc-root", "", "for memory limits on a simulated host: folder of the kernel's processes, "+
		"at the same path on the host and here; the host's own if empty")
	cmd.Flags().StringVar(&o.Limits.CgroupRoot, "cgroup-root", "", "for memory limits on a simulated host: folder of the control groups, "+
		"at the same path on the host and here; the host's own if empty")
	nodeconfig.AddFlags(cmd.Flags(), vendors.Names())
	cmd.AddCommand(configCommand(), waitCommand(), poolCommand(), uninstallCommand(), usageCommand(usagefile.Dir), generateCDICommand(),
		mpsCommand())
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError(err) })
	about.Version(cmd, apis()...)
	return cmd
}

// Run runs the node daemon until ctx ends.
func Run(ctx context.Context, o Options) error {
	if o.NodeName == "" {
		return errors.New("the node's name is missing; give --node-name or set NODE_NAME")
	}
	if o.Places.Dir == "" {
		// Mistakes are told before anything is reached for.
		if _, err := nodeconfig.Load(o.Places.Files, o.Overrides, vendors.Names()); err != nil {
			return err
		}
	}
	output := logging.NewOutput(os.Stderr)
	defer output.Close() //nolint:errcheck // the last line is written; nobody is left to tell
	var level slog.LevelVar
	log, _ := logging.Setup(logging.Options{Stderr: output, Level: &level})
	ctx = klog.NewContext(ctx, log)
	for _, w := range o.Warnings {
		log.Info("Warning about the configuration", "warning", w)
	}
	clients, err := kube.Connect(o.Kubeconfig, "divvy-node/"+version.Version)
	if err != nil {
		return err
	}
	var setup runtimesetup.Resolver
	source, err := nodeconfig.NewSource(nodeconfig.SourceOptions{
		Places: o.Places, Overrides: o.Overrides, Vendors: vendors.Names(), Node: o.NodeName, Client: clients.Kubernetes,
		Resolve: setup.Resolve,
	})
	if err != nil {
		return err
	}
	defer source.Close() //nolint:errcheck // the watches end with the program
	return supervisor.Run(ctx, source, supervisor.Options{
		Node: o.NodeName, Self: o.identity(), Clients: clients, Log: supervisor.Log{Output: output, Level: &level}, Setup: setup.Report,
		Limits: o.Limits,
	})
}

// identity is who this process is in a handover.
func (o Options) identity() handover.Identity {
	if o.PodUID == "" {
		return handover.Identity{} // without a group it does not take over
	}
	return handover.Identity{Group: o.PodNamespace, ID: o.PodUID}
}
