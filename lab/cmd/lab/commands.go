package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/host"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// geteuid is replaced by tests, which may run as root.
var geteuid = os.Geteuid

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "lab",
		Short:         "A real Kubernetes with simulated accelerators on this machine",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(
		newBuildCommand(), newUpCommand(), newInstallCommand(), newDownCommand(), newStatusCommand(),
		newControlCommand("start", "Start a component and wait until it is ready", (*cluster.Cluster).Start),
		newControlCommand("stop", "Stop a component gracefully and leave it down", (*cluster.Cluster).Stop),
		newControlCommand("restart", "Restart a component and wait until it is ready", (*cluster.Cluster).Restart),
		newControlCommand("kill", "Kill a component with SIGKILL and leave it down", (*cluster.Cluster).Kill),
	)
	return root
}

// exclusive wraps what needs root and must not run twice at once.
func exclusive(run func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) (err error) {
		if err := host.RequireRoot(geteuid(), cmd.CommandPath()); err != nil {
			return err
		}
		unlock, err := cluster.Lock(cmd.Context(), cmd.OutOrStdout())
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, unlock()) }()
		return run(cmd, args)
	}
}

func newBuildCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "build",
		Short: "Build the programs of a Kubernetes into the cache",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			// Packages may have to be installed. The builder takes turns by itself.
			if err := host.RequireRoot(geteuid(), cmd.CommandPath()); err != nil {
				return err
			}
			_, bin, err := testenv.BuildPrograms(cmd.Context(), cmd.OutOrStdout())
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "The programs are in", bin)
			return nil
		},
	}
}

func newUpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Bring the cluster up, or what is missing of it",
		Long: "Bring a one-node Kubernetes up on this machine: etcd, the control plane, containerd and kubelet.\n" +
			"What has to be built is built first. Where the cluster is up already, nothing changes.",
		Args: cobra.NoArgs,
		RunE: exclusive(func(cmd *cobra.Command, _ []string) error {
			started := time.Now()
			out := cmd.OutOrStdout()
			labDir, binDir, err := testenv.BuildPrograms(cmd.Context(), out)
			if err != nil {
				return err
			}
			c, err := cluster.Up(cmd.Context(), cluster.UpOptions{LabDir: labDir, BinDir: binDir, Out: out})
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "The lab is up after %s. kubectl is in %s:\n  export PATH=$PATH:%s\n",
				progress.Elapsed(time.Since(started)), c.BinDir, c.BinDir)
			fmt.Fprintf(out, "export KUBECONFIG=%s\n", layout.AdminKubeconfig)
			return nil
		}),
	}
}

func newDownCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Take the cluster away without a trace; the built programs stay",
		Args:  cobra.NoArgs,
		RunE: exclusive(func(cmd *cobra.Command, _ []string) error {
			return cluster.Down(cmd.Context(), cmd.OutOrStdout())
		}),
	}
}

func newStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show what runs and whether it is ready",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := host.RequireRoot(geteuid(), cmd.CommandPath()); err != nil {
				return err
			}
			c, err := cluster.Open()
			if err != nil {
				return err
			}
			return c.PrintStatus(cmd.Context(), cmd.OutOrStdout())
		},
	}
}

func newControlCommand(verb, short string, act func(*cluster.Cluster, context.Context, cluster.Component) error) *cobra.Command {
	var names []string
	for _, component := range cluster.Components() {
		names = append(names, string(component))
	}
	return &cobra.Command{
		Use:       verb + " COMPONENT...",
		Short:     short,
		Long:      short + ".\nComponents: " + strings.Join(names, ", ") + ".",
		ValidArgs: names,
		Args:      cobra.MinimumNArgs(1),
		RunE: exclusive(func(cmd *cobra.Command, args []string) error {
			c, err := cluster.Open()
			if err != nil {
				return err
			}
			var components []cluster.Component
			for _, name := range args {
				component, err := cluster.ParseComponent(name)
				if err != nil {
					return err
				}
				components = append(components, component)
			}
			for _, component := range components {
				started := time.Now()
				if err := act(c, cmd.Context(), component); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s %s: done in %s\n", verb, component, progress.Elapsed(time.Since(started)))
			}
			return nil
		}),
	}
}
