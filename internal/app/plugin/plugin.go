// Package plugin is the program kubectl-divvy, which kubectl finds as "kubectl
// divvy": its subcommands.
package plugin

import (
	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/app/about"
	"github.com/divvy-gpu/divvy/internal/app/device"
	"github.com/divvy-gpu/divvy/internal/app/doctor"
	"github.com/divvy-gpu/divvy/internal/app/explain"
	"github.com/divvy-gpu/divvy/internal/app/inspect"
	"github.com/divvy-gpu/divvy/internal/app/pool"
	"github.com/divvy-gpu/divvy/internal/app/simulate"
	"github.com/divvy-gpu/divvy/internal/app/ui"
	"github.com/divvy-gpu/divvy/internal/app/why"
)

// Command returns the command line of kubectl-divvy.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "kubectl-divvy",
		Short:         "Show and manage shared accelerators",
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl divvy"},
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(inspect.Command(), why.Command(), explain.Command(), ui.Command(), doctor.Command(), device.Command(), pool.Command(),
		simulate.Command())
	about.Version(cmd, inspect.APIs()...)
	return cmd
}
