// Package kubectl holds the flags by which kubectl's users choose a cluster and a user,
// for the subcommands of kubectl-divvy. They come from client-go alone: cli-runtime has
// them as well, and depends on kustomize.
package kubectl

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// Agent is the user agent of the clients.
func Agent() string { return "kubectl-divvy/" + version.Version }

// Cluster is what the flags choose.
type Cluster struct {
	rules     *clientcmd.ClientConfigLoadingRules
	overrides *clientcmd.ConfigOverrides
}

// New returns what kubectl chooses by default.
func New() *Cluster {
	return &Cluster{clientcmd.NewDefaultClientConfigLoadingRules(), &clientcmd.ConfigOverrides{}}
}

// AddFlags adds the flags, without kubectl's --namespace, which is about objects of the
// user.
func (c *Cluster) AddFlags(fs *pflag.FlagSet) {
	c.add(fs, clientcmd.RecommendedConfigOverrideFlags(""))
}

// AddFlagsWithoutTimeout is AddFlags for a subcommand that bounds all its requests
// together: without --request-timeout.
func (c *Cluster) AddFlagsWithoutTimeout(fs *pflag.FlagSet) {
	flags := clientcmd.RecommendedConfigOverrideFlags("")
	flags.Timeout.LongName = ""
	c.add(fs, flags)
}

func (c *Cluster) add(fs *pflag.FlagSet, flags clientcmd.ConfigOverrideFlags) {
	fs.StringVar(&c.rules.ExplicitPath, "kubeconfig", "", "kubeconfig file; $KUBECONFIG or ~/.kube/config if empty")
	flags.ContextOverrideFlags.Namespace.LongName = ""
	clientcmd.BindOverrideFlags(c.overrides, fs, flags)
}

// Context is what --context says, "" where it was not given.
func (c *Cluster) Context() string { return c.overrides.CurrentContext }

// Kubeconfig is what --kubeconfig says, "" where it was not given.
func (c *Cluster) Kubeconfig() string { return c.rules.ExplicitPath }

// Config returns the configuration of the chosen cluster's clients.
func (c *Cluster) Config() (*rest.Config, error) {
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(c.rules, c.overrides).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("configuration of the Kubernetes client: %w", err)
	}
	return config, nil
}

// Namespace is the one of the chosen context, as kubectl uses it by default.
func (c *Cluster) Namespace() (string, error) {
	namespace, _, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(c.rules, c.overrides).Namespace()
	if err != nil {
		return "", fmt.Errorf("configuration of the Kubernetes client: %w", err)
	}
	return namespace, nil
}

// CheckNamespace reports what is wrong with the value of a subcommand's own --namespace, which may be "".
func CheckNamespace(namespace string) error {
	if namespace == "" {
		return nil
	}
	var errs []error
	for _, problem := range validation.IsDNS1123Label(namespace) {
		errs = append(errs, fmt.Errorf("--namespace %q: %s", namespace, problem))
	}
	return errors.Join(errs...)
}

// Name is what the person calls the chosen cluster: the name of the context, else the API server's
// address. The context does not name a cluster that --cluster or --server chooses: then it is both.
func (c *Cluster) Name() (string, error) {
	client := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(c.rules, c.overrides)
	raw, err := client.RawConfig()
	if err != nil {
		return "", fmt.Errorf("configuration of the Kubernetes client: %w", err)
	}
	name := cmp.Or(c.overrides.CurrentContext, raw.CurrentContext)
	if name != "" && c.overrides.Context.Cluster == "" && c.overrides.ClusterInfo.Server == "" {
		return name, nil
	}
	config, err := c.Config()
	if err != nil {
		return "", err
	}
	if name == "" {
		return config.Host, nil
	}
	return fmt.Sprintf("%s, at %s", name, config.Host), nil
}

// Clients makes the clients. It does not contact the API server.
func (c *Cluster) Clients() (kube.Clients, error) {
	config, err := c.Config()
	if err != nil {
		return kube.Clients{}, err
	}
	return kube.NewClients(config, Agent())
}

// Objects makes a client of objects of any kind. It does not contact the API server.
func (c *Cluster) Objects() (dynamic.Interface, error) {
	config, err := c.Config()
	if err != nil {
		return nil, err
	}
	rest.AddUserAgent(config, Agent())
	config.QPS = -1
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client of objects of any kind: %w", err)
	}
	return objects, nil
}
