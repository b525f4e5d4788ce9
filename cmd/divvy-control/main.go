// divvy-control holds the parts of Divvy that serve the control plane, one
// subcommand each.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/app/about"
	"github.com/divvy-gpu/divvy/internal/app/extender"
	"github.com/divvy-gpu/divvy/internal/app/schedconf"
	"github.com/divvy-gpu/divvy/internal/app/uninstall"
	"github.com/divvy-gpu/divvy/internal/app/webhook"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "divvy-control:", err)
		os.Exit(1) //nolint:gocritic // the one exit of the program; stop has nothing left to do
	}
}

func command() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "divvy-control",
		Short:         "The parts of Divvy that serve the control plane",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(extender.Command(), schedconf.Command(), uninstall.Command(), webhook.Command())
	about.Version(cmd, slices.Concat(extender.APIs(), webhook.APIs())...)
	return cmd
}
