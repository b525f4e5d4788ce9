// Package pool is the subcommand "kubectl-divvy pool", for administrators of a
// remote pool: it brings the pool's token into the cluster, and checks whether
// the token's servers can be reached.
package pool

import "github.com/spf13/cobra"

// DefaultNamespace is where the pool's secrets are, as the guides have it.
const DefaultNamespace = "kube-system"

// Labels of the secrets.
const (
	// ImportedLabel is "true" on secrets that import has made.
	ImportedLabel = "divvy.dev/pool-import"
	// managedLabel is managedBy on copies that Divvy keeps in the namespaces of
	// pods.
	managedLabel = "divvy.dev/managed-by"
	managedBy    = "divvy-pool"
)

// Command returns the subcommand.
func Command() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Import and check the token of a remote pool of GPUs",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(importCommand(), checkCommand())
	return cmd
}
