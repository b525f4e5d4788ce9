// kubectl-divvy is what a person uses: "kubectl divvy inspect" shows which pods
// hold how much of which device, "kubectl divvy doctor" what is wrong with the
// installation, "kubectl divvy pool" brings in and checks the token of a remote
// pool.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/app/about"
	"github.com/divvy-gpu/divvy/internal/app/doctor"
	"github.com/divvy-gpu/divvy/internal/app/inspect"
	"github.com/divvy-gpu/divvy/internal/app/pool"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		// Some have said all in what they printed.
		if text := err.Error(); text != "" {
			fmt.Fprintln(os.Stderr, "error:", text)
		}
		os.Exit(doctor.ExitCode(err)) //nolint:gocritic // the one exit of the program; stop has nothing left to do
	}
}

func command() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "kubectl-divvy",
		Short:         "See how accelerators are shared",
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl divvy"},
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(inspect.Command(), doctor.Command(), pool.Command())
	about.Version(cmd, inspect.APIs()...)
	return cmd
}
