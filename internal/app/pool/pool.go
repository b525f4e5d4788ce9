// Package pool is the subcommand "kubectl-divvy pool", for administrators of a
// remote pool: it brings the pool's token into the cluster, and checks whether
// the token's servers can be reached.
package pool

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/version"
)

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
		Short: "Bring in and check the token of a remote pool of GPUs",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(importCommand(), checkCommand())
	return cmd
}

// cluster are the flags that kubectl has to choose a cluster and a user, from
// client-go alone.
type cluster struct {
	rules     *clientcmd.ClientConfigLoadingRules
	overrides *clientcmd.ConfigOverrides
}

func newCluster() cluster {
	return cluster{clientcmd.NewDefaultClientConfigLoadingRules(), &clientcmd.ConfigOverrides{}}
}

// addFlags adds the flags without kubectl's --namespace: the secrets are not in
// the user's own.
func (c cluster) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.rules.ExplicitPath, "kubeconfig", "", "kubeconfig file; empty for that of $KUBECONFIG or ~/.kube/config")
	flags := clientcmd.RecommendedConfigOverrideFlags("")
	flags.ContextOverrideFlags.Namespace.LongName = ""
	clientcmd.BindOverrideFlags(c.overrides, fs, flags)
}

// client makes the client. It does not contact the API server.
func (c cluster) client() (kubernetes.Interface, error) {
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(c.rules, c.overrides).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("configuration of the Kubernetes client: %w", err)
	}
	clients, err := kube.NewClients(config, "kubectl-divvy/"+version.Version)
	if err != nil {
		return nil, err
	}
	return clients.Kubernetes, nil
}
