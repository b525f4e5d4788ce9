// Package inspect is the subcommand "kubectl-divvy inspect": it asks the
// extender, through the API server, what every device holds, and when the
// extender does not answer it reads the same from nodes and pods itself.
package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/ledger"
	"github.com/divvy-gpu/divvy/internal/accel/wire"
	"github.com/divvy-gpu/divvy/internal/inspect"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/version"
)

// maxNames is how many nodes an error lists.
const maxNames = 20

// Options are what a person may choose.
type Options struct {
	// Output is the name of a format of package inspect.
	Output string
	// Namespace, Service and Port say where the extender is.
	Namespace, Service string
	Port               int
	// Resource is the one to show.
	Resource string
	// Timeout bounds the wait for the extender. Reading nodes and pods after
	// it takes as long as it takes.
	Timeout time.Duration
}

// DefaultOptions returns the defaults, those of the chart.
func DefaultOptions() Options {
	return Options{
		Output:    string(inspect.Table),
		Namespace: "divvy-system", Service: "divvy-extender", Port: 32766,
		Resource: "enflame.com/gcu-memory",
		Timeout:  5 * time.Second,
	}
}

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.Output, "output", "o", o.Output, "table, wide, json or yaml")
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace, "namespace of the extender")
	fs.StringVar(&o.Service, "service", o.Service, "service of the extender")
	fs.IntVar(&o.Port, "port", o.Port, "port of the extender's service")
	fs.StringVar(&o.Resource, "resource", o.Resource, "extended resource to show")
	fs.DurationVar(&o.Timeout, "extender-timeout", o.Timeout, "how long to wait for the extender")
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	var errs []error
	if _, err := inspect.ParseFormat(o.Output); err != nil {
		errs = append(errs, err)
	}
	for _, f := range []struct{ flag, value string }{{"namespace", o.Namespace}, {"service", o.Service}, {"resource", o.Resource}} {
		if f.value == "" {
			errs = append(errs, fmt.Errorf("--%s must not be empty", f.flag))
		}
	}
	if o.Port < 1 || o.Port > 65535 {
		errs = append(errs, fmt.Errorf("--port %d: must be from 1 to 65535", o.Port))
	}
	if o.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--extender-timeout %s: must be above zero", o.Timeout))
	}
	return errors.Join(errs...)
}

// Command returns the subcommand. What it shows goes to cmd's output, what it
// has to say about that to cmd's error output.
func Command() *cobra.Command {
	o := DefaultOptions()
	// The flags that kubectl has, from client-go alone: cli-runtime has them as
	// well, and brings kustomize along.
	rules, overrides := clientcmd.NewDefaultClientConfigLoadingRules(), &clientcmd.ConfigOverrides{}
	cmd := &cobra.Command{
		Use:   "inspect [NODE]",
		Short: "Show which pods hold how much of which device",
		Long: "Show which pods hold how much of which device, on all nodes or on one.\n\n" +
			"The extender is asked through the API server. When it does not answer, the same is\n" +
			"read from the nodes' inventories and the pods' grants, which is said on standard error.",
		Args:    cobra.MaximumNArgs(1),
		PreRunE: func(*cobra.Command, []string) error { return o.Validate() },
		RunE: func(cmd *cobra.Command, args []string) error {
			config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides).ClientConfig()
			if err != nil {
				return fmt.Errorf("configuration of the Kubernetes client: %w", err)
			}
			clients, err := kube.NewClients(config, "kubectl-divvy/"+version.Version)
			if err != nil {
				return err
			}
			node := ""
			if len(args) == 1 {
				node = args[0]
			}
			return Run(cmd.Context(), o, clients, node, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	o.AddFlags(cmd.Flags())
	cmd.Flags().StringVar(&rules.ExplicitPath, "kubeconfig", "", "kubeconfig file; empty for that of $KUBECONFIG or ~/.kube/config")
	flags := clientcmd.RecommendedConfigOverrideFlags("")
	// The usual --namespace is about the user's objects; there are none here.
	flags.ContextOverrideFlags.Namespace.LongName = ""
	clientcmd.BindOverrideFlags(overrides, cmd.Flags(), flags)
	return cmd
}

// Run prints the report of one node, or of all when node is "".
func Run(ctx context.Context, o Options, clients kube.Clients, node string, out, errOut io.Writer) error {
	if err := o.Validate(); err != nil {
		return err
	}
	report, err := fromExtender(ctx, o, clients, node)
	var unanswered *unansweredError
	if errors.As(err, &unanswered) {
		fmt.Fprintf(errOut, "The extender does not answer (%v).\nShown is what nodes and pods carry; a pod that is being bound at this moment may be missing.\n", unanswered.cause)
		report, err = fromCluster(ctx, o, clients, node)
	}
	if err != nil {
		return err
	}
	return inspect.Print(out, report, inspect.Format(o.Output))
}

// unansweredError says that the extender gave no answer that could be used.
type unansweredError struct{ cause error }

func (e *unansweredError) Error() string { return "the extender does not answer: " + e.cause.Error() }
func (e *unansweredError) Unwrap() error { return e.cause }

// fromExtender asks the extender. Its error is an *unansweredError when
// somebody else should be asked.
func fromExtender(ctx context.Context, o Options, clients kube.Clients, node string) (inspect.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	report, err := ask(ctx, o, clients, node)
	if err == nil || !apierrors.IsNotFound(err) || report.Error == "" {
		if err != nil {
			err = &unansweredError{err}
		}
		return report, err
	}
	// The extender itself said that there is no such node, or resource.
	if node == "" {
		return inspect.Report{}, errors.New(report.Error)
	}
	all, err := ask(ctx, o, clients, "")
	if err != nil {
		return inspect.Report{}, errors.New(report.Error)
	}
	return inspect.Report{}, unknownNode(report.Error, all)
}

// ask sends one request. A report with an Error comes with an error as well.
func ask(ctx context.Context, o Options, clients kube.Clients, node string) (inspect.Report, error) {
	path := inspect.Route
	if node != "" {
		path += "/" + node
	}
	body, err := clients.Kubernetes.CoreV1().RESTClient().Get().
		Namespace(o.Namespace).Resource("services").Name(net.JoinSchemeNamePort("", o.Service, strconv.Itoa(o.Port))).SubResource("proxy").Suffix(path).
		Param("details", "true").Param("resource", o.Resource).
		// The client prefers protobuf, in which the API server would word its
		// own errors as well.
		SetHeader("Accept", runtime.ContentTypeJSON).
		DoRaw(ctx)
	var report inspect.Report
	decodeErr := json.Unmarshal(body, &report)
	switch {
	case err == nil && decodeErr != nil:
		return inspect.Report{}, fmt.Errorf("it answered something else than a report: %w", decodeErr)
	case err == nil && report.Nodes == nil:
		return inspect.Report{}, errors.New("it answered something else than a report")
	case err != nil && decodeErr == nil && report.Error != "" && !apierrors.IsNotFound(err):
		// Its own words say more than the status.
		return report, errors.New(report.Error)
	case err != nil:
		// So do those of the API server, which a raw answer leaves unread.
		var status metav1.Status
		if json.Unmarshal(body, &status) == nil && status.Kind == "Status" && status.Message != "" {
			err = fmt.Errorf("%s: %w", status.Message, err)
		}
	}
	return report, err
}

// fromCluster makes a report from what nodes publish and pods carry. The key of
// the grants is not at hand, so they are taken for true: this is a report.
func fromCluster(ctx context.Context, o Options, clients kube.Clients, node string) (inspect.Report, error) {
	resource := accel.Resource(o.Resource)
	l := ledger.New(ledger.Options{})
	books := kube.NewBooks(kube.BooksConfig{Ledger: l, Grants: trusting{}, Resources: []accel.Resource{resource}})
	if err := books.Load(ctx, clients); err != nil {
		return inspect.Report{}, err
	}
	all := inspect.FromUsage(resource, l.Nodes(resource))
	if node == "" {
		return all, nil
	}
	usage, ok := l.Node(resource, node)
	if !ok {
		return inspect.Report{}, unknownNode(fmt.Sprintf("node %q is not known or offers no %s", node, resource), all)
	}
	return inspect.FromUsage(resource, []ledger.NodeUsage{usage}), nil
}

// trusting reads grants without a key.
type trusting struct{}

// DecodeGrant implements kube.Grants.
func (trusting) DecodeGrant(_, value string) (accel.Grant, error) {
	return wire.DecodeGrantUnverified(value)
}

// unknownNode adds to the text which nodes there are.
func unknownNode(text string, all inspect.Report) error {
	if len(all.Nodes) == 0 {
		return fmt.Errorf("%s; no node does", text)
	}
	names := make([]string, 0, maxNames)
	for _, n := range all.Nodes {
		if len(names) == maxNames {
			return fmt.Errorf("%s; there are %s and %d more", text, strings.Join(names, ", "), len(all.Nodes)-maxNames)
		}
		names = append(names, n.Name)
	}
	return fmt.Errorf("%s; there are: %s", text, strings.Join(names, ", "))
}
