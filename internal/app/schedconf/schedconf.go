// Package schedconf is the program "divvy-control schedconf": it makes the
// kube-scheduler of a control-plane node call Divvy's extender, and reverts that. Here are its
// flags; the rest is in internal/install/schedconf.
package schedconf

import (
	"context"
	"io"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/wiring"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// Command returns the subcommand with its own subcommands.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "schedconf",
		Short: "Configure the kube-scheduler of a control-plane node to call the extender, or revert that",
		Long: "Configure the kube-scheduler of a control-plane node to call Divvy's extender, or revert that. Run it on the node, as " +
			"root:\n" +
			"it edits the static pod in /etc/kubernetes/manifests, and writes a configuration next to the existing one." +
			flags.EnvironmentHelp,
	}
	cmd.AddCommand(installCommand(), uninstallCommand(), statusCommand(), planCommand(), watchCommand())
	return cmd
}

func subcommand(o *Options, use, short, long string, add func(*pflag.FlagSet),
	run func(context.Context, wiring.Node, *metrics.API, io.Writer) error) *cobra.Command {
	o.add = add
	return flags.Program(&cobra.Command{Use: use, Short: short, Long: short + "." + long}, o, &o.Log, nil,
		func(ctx context.Context, out io.Writer) error {
			clients, err := connect(o.Kubeconfig)
			if err != nil {
				return err
			}
			n, err := o.node(clients.Kubernetes)
			if err != nil {
				return err
			}
			return run(ctx, n, clients.Requests, out)
		})
}

// quiet are defaults for commands that answer a person.
func quiet() *Options {
	o := DefaultOptions()
	o.Log.Level = "warn"
	return &o
}

func installCommand() *cobra.Command {
	o := DefaultOptions()
	return subcommand(&o, "install", "Configure kube-scheduler on this node to call the extender", "\n\n"+
		"The command returns when kube-scheduler is healthy with the change. If it does not become healthy in time, the previous\n"+
		"state is restored and the command fails with the reason. A second run changes nothing.",
		o.addExtenderFlags, func(ctx context.Context, n wiring.Node, _ *metrics.API, out io.Writer) error {
			return wiring.Install(ctx, n, o.Extender, out)
		})
}

func uninstallCommand() *cobra.Command {
	o, stay := DefaultOptions(), false
	return subcommand(&o, "uninstall", "Restore the original kube-scheduler on this node", "\n\n"+
		"The original manifest is restored byte for byte. If other parts of it were edited since, only Divvy's changes are removed.\n"+
		"Divvy's files are deleted once kube-scheduler runs without them.",
		func(fs *pflag.FlagSet) {
			o.addListenFlag(fs)
			fs.BoolVar(&stay, "stay", stay, "keep running and ready when done, so that no watch on this node reverts it")
		}, func(ctx context.Context, n wiring.Node, _ *metrics.API, out io.Writer) error {
			if stay {
				return wiring.UninstallAndStay(ctx, n, o.Listen, out)
			}
			return wiring.Uninstall(ctx, n, out)
		})
}

func statusCommand() *cobra.Command {
	o := quiet()
	return subcommand(o, "status", "Show whether kube-scheduler on this node calls the extender and is healthy",
		" The command fails if not.", o.addExtenderFlags,
		func(ctx context.Context, n wiring.Node, _ *metrics.API, out io.Writer) error {
			return wiring.Status(ctx, n, o.Extender, out)
		})
}

func planCommand() *cobra.Command {
	o, uninstall := quiet(), false
	return subcommand(o, "plan", "Show what install would change, as a diff without keys", " Nothing is changed.",
		func(fs *pflag.FlagSet) {
			o.addExtenderFlags(fs)
			fs.BoolVar(&uninstall, "uninstall", uninstall, "show what uninstall would change")
		}, func(ctx context.Context, n wiring.Node, _ *metrics.API, out io.Writer) error {
			return wiring.Plan(ctx, n, o.Extender, uninstall, out)
		})
}

func watchCommand() *cobra.Command {
	o := DefaultOptions()
	o.Listen = "127.0.0.1:9402"
	return subcommand(&o, "watch", "Install, and repeat whenever something it depends on changes", "\n\n"+
		"It configures the scheduler again after kubeadm upgrade and after changes of the scheduler's own configuration, and\n"+
		"follows the extender's address and certificates. It is ready while kube-scheduler is configured and healthy.",
		func(fs *pflag.FlagSet) {
			o.addExtenderFlags(fs)
			o.addListenFlag(fs)
			fs.DurationVar(&o.Resync, "resync", o.Resync, "interval of checks when nothing is known to have changed")
		}, func(ctx context.Context, n wiring.Node, requests *metrics.API, _ io.Writer) error {
			return wiring.Watch(ctx, n, o.Extender, o.Listen, o.Resync, metrics.Registry(metrics.Schedconf, requests))
		})
}
