// Package device is the subcommand "kubectl-divvy device": its flags. What it does is in
// internal/report/devices.
package device

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/devices"
)

// Command returns the subcommand.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "device",
		Short: "List devices, quarantine them and release them",
		Long: "List the devices of nodes, quarantine devices and release them.\n\n" +
			"No new pods are placed on a device in quarantine until it is released, regardless of its health and across restarts.\n" +
			"Running pods stay. divvy-node quarantines a device automatically after an error that requires a reset or a\n" +
			"replacement. See docs/quarantine.md.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(listCommand(), quarantineCommand(), releaseCommand())
	return cmd
}

// connected adds the flags of a Kubernetes client to a command, which runs with the
// clients.
func connected(cmd *cobra.Command, run func(cmd *cobra.Command, clients kube.Clients, args []string) error) *cobra.Command {
	c := kubectl.New()
	c.AddFlags(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		clients, err := c.Clients()
		if err != nil {
			return err
		}
		return run(cmd, clients, args)
	}
	return cmd
}

func quarantineCommand() *cobra.Command {
	return requestCommand(wire.QuarantineDevices, &cobra.Command{
		Use:   "quarantine NODE UUID...",
		Short: "Quarantine devices until they are released",
		Long: "Quarantine devices of a node: no new pods are placed on them until they are released, across restarts\n" +
			"and configuration changes. Running pods stay.\n\n" +
			"Requires permission to get and patch nodes.",
		Example: "  kubectl divvy device quarantine node-1 GPU-3b1f0000-0000-4000-8000-000000000000 --reason 'fan replacement'",
	})
}

func releaseCommand() *cobra.Command {
	return requestCommand(wire.ReleaseDevices, &cobra.Command{
		Use:   "release NODE UUID...",
		Short: "Release devices from quarantine",
		Long: "Release devices of a node from quarantine, after a repair or a reset, or to use them anyway. A device that\n" +
			"still has the error is quarantined again.\n\n" +
			"Requires permission to get and patch nodes.",
		Example: "  kubectl divvy device release node-1 GPU-3b1f0000-0000-4000-8000-000000000000",
	})
}

func requestCommand(verb string, cmd *cobra.Command) *cobra.Command {
	r := devices.Request{Verb: verb}
	cmd.Args = cobra.MinimumNArgs(2)
	cmd.PreRunE = func(*cobra.Command, []string) error {
		switch {
		case r.Timeout <= 0:
			return fmt.Errorf("--timeout %s: must be above zero", r.Timeout)
		case len(r.Reason) > wire.MaxReason:
			return fmt.Errorf("--reason has %d bytes, and may have %d", len(r.Reason), wire.MaxReason)
		}
		return nil
	}
	if verb == wire.QuarantineDevices {
		cmd.Flags().StringVar(&r.Reason, "reason", "", "reason for the quarantine, shown with the device")
	}
	cmd.Flags().DurationVar(&r.Timeout, "timeout", 30*time.Second, "how long to wait for divvy-node on the node")
	return connected(cmd, func(cmd *cobra.Command, clients kube.Clients, args []string) error {
		return r.Run(cmd.Context(), clients.Kubernetes, args[0], args[1:], cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
}

func listCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "list [NODE]",
		Short: "List devices with their state, including those in quarantine",
		Long: "List the devices of all nodes or of one node with their uuid and state: healthy, unhealthy, or in quarantine, with\n" +
			"the time and the reason. Devices in quarantine that are no longer on the node are included.\n\n" +
			"Requires permission to list nodes.",
		Example: "  kubectl divvy device list\n  kubectl divvy device list node-1 -o json",
		Args:    cobra.MaximumNArgs(1),
	}
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	return connected(cmd, func(cmd *cobra.Command, clients kube.Clients, args []string) error {
		return devices.List(cmd.Context(), clients.Metadata, strings.Join(args, ""), output, cmd.OutOrStdout())
	})
}
