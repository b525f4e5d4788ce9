package node

import (
	"github.com/spf13/cobra"

	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/cdispec"
)

// generateCDICommand is what the daemon runs itself as to have a CDI specification
// generated: it is no command for people.
func generateCDICommand() *cobra.Command {
	return &cobra.Command{
		Use:    cdispec.Command,
		Short:  "Generate the CDI specification of NVIDIA's GPUs for the daemon",
		Hidden: true,
		Args:   noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cdispec.Serve(cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
}
