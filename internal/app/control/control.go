// Package control is the program divvy-control: its subcommands.
package control

import (
	"slices"

	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/app/about"
	"github.com/divvy-gpu/divvy/internal/app/extender"
	"github.com/divvy-gpu/divvy/internal/app/proxy"
	"github.com/divvy-gpu/divvy/internal/app/schedconf"
	"github.com/divvy-gpu/divvy/internal/app/uninstall"
	"github.com/divvy-gpu/divvy/internal/app/webhook"
)

// Command returns the command line of divvy-control.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:           "divvy-control",
		Short:         "Run Divvy's control-plane programs",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(extender.Command(), proxy.Command(), schedconf.Command(), uninstall.Command(), webhook.Command())
	about.Version(cmd, slices.Concat(extender.APIs(), webhook.APIs(), schedconf.APIs())...)
	return cmd
}
