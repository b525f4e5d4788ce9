// Package explain is the subcommand "kubectl-divvy explain": it shows why a pod was placed
// where it is, and exports the extender's decisions. What it shows is the extender's, see
// package history.
package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
	"github.com/divvy-gpu/divvy/internal/report/inspect/collect"
	"github.com/divvy-gpu/divvy/internal/report/simulate/live"
)

const (
	formatText = "text"
	formatJSON = "json"
)

// Options are what a user may choose.
type Options struct {
	// Namespace is that of the pod; "" for the one of the context.
	Namespace string
	// Export is a file to write all decisions to, "-" for standard output.
	Export string
	Output string
	// Extender says where the extender is.
	Extender collect.Options
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options { return Options{Output: formatText, Extender: collect.DefaultOptions()} }

// Validate reports all mistakes at once.
func (o Options) Validate(args []string) error {
	var errs []error
	switch {
	case o.Export != "" && len(args) > 0:
		errs = append(errs, errors.New("--export writes the decisions about all pods; do not name one"))
	case o.Export == "" && len(args) != 1:
		errs = append(errs, errors.New("exactly one POD is required, or --export FILE"))
	case o.Export == "":
		for _, problem := range validation.IsDNS1123Subdomain(args[0]) {
			errs = append(errs, fmt.Errorf("pod %q: %s", args[0], problem))
		}
	}
	errs = append(errs, kubectl.CheckNamespace(o.Namespace))
	if o.Output != formatText && o.Output != formatJSON {
		errs = append(errs, fmt.Errorf("--output %q: must be text or json", o.Output))
	}
	if o.Extender.Namespace == "" || o.Extender.Service == "" {
		errs = append(errs, errors.New("--extender-namespace and --service must not be empty"))
	}
	if o.Extender.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--extender-timeout %s: must be above zero", o.Extender.Timeout))
	}
	return errors.Join(errs...)
}

const about = `Show why a pod was placed where it is: the nodes and devices that were considered, why the others were not,
what each term of the placement policy gave, and what won.

The answer comes from the extender, through the API server, and needs the same permission as inspect. The extender
keeps the decisions of the last hours, up to 8 MiB, since its start; decisions that another replica made, or that were
made before a restart, are not known, and the command says so. For a pod that waits, use "kubectl divvy why".

With --export, all decisions that the extender keeps are written to a file, with the nodes and pods of the cluster,
for "kubectl divvy simulate --replay FILE".`

const examples = `  kubectl divvy explain train-0
  kubectl divvy explain train-0 -n team-a -o json
  kubectl divvy explain --export decisions.json`

// Command returns the subcommand. What it shows goes to cmd's output.
func Command() *cobra.Command {
	c := kubectl.New()
	cmd := command(c.Clients, c.Namespace)
	c.AddFlags(cmd.Flags())
	return cmd
}

// command is Command without the flags that choose a cluster.
func command(connect func() (kube.Clients, error), namespace func() (string, error)) *cobra.Command {
	o := DefaultOptions()
	cmd := &cobra.Command{
		Use:     "explain POD | --export FILE",
		Short:   "Show why a pod was placed on its device",
		Long:    about,
		Example: examples,
		Args:    cobra.ArbitraryArgs,
		PreRunE: func(_ *cobra.Command, args []string) error { return o.Validate(args) },
		RunE: func(cmd *cobra.Command, args []string) error {
			clients, err := connect()
			if err != nil {
				return err
			}
			if o.Export != "" {
				return o.export(cmd.Context(), clients, cmd.OutOrStdout())
			}
			if o.Namespace == "" {
				if o.Namespace, err = namespace(); err != nil {
					return err
				}
			}
			return o.explain(cmd.Context(), clients, args[0], cmd.OutOrStdout())
		},
	}
	fs := cmd.Flags()
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace, "namespace of the pod; that of the context if empty")
	fs.StringVar(&o.Export, "export", o.Export, "write all decisions that the extender keeps to this file; \"-\" for standard output")
	fs.StringVarP(&o.Output, "output", "o", o.Output, "text or json")
	fs.StringVar(&o.Extender.Namespace, "extender-namespace", o.Extender.Namespace, "namespace of Divvy")
	fs.StringVar(&o.Extender.Service, "service", o.Extender.Service, "service of the extender")
	fs.IntVar(&o.Extender.Port, "port", o.Extender.Port, "port of the extender's service")
	fs.DurationVar(&o.Extender.Timeout, "extender-timeout", o.Extender.Timeout,
		"how long to wait for the extender; with --export at least 5m")
	return cmd
}

func (o *Options) explain(ctx context.Context, clients kube.Clients, pod string, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, o.Extender.Timeout)
	defer cancel()
	body, err := o.ask(ctx, clients, inspect.ExplainRoute+"/"+o.Namespace+"/"+pod)
	if err != nil {
		return err
	}
	var e history.Explanation
	if err := json.Unmarshal(body, &e); err != nil || e.Kind != history.Kind {
		return errors.New("the extender's response is not an explanation; it may be of an earlier release")
	}
	if o.Output == formatJSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(&e)
	}
	return e.Print(out)
}

// ask asks the extender. Its error is what the extender says, where it says something.
func (o *Options) ask(ctx context.Context, clients kube.Clients, path string) ([]byte, error) {
	body, err := collect.Get(ctx, o.Extender, clients, path, nil)
	if err == nil {
		return body, nil
	}
	var said struct{ Error string }
	if json.Unmarshal(body, &said) == nil && said.Error != "" {
		return nil, errors.New(said.Error)
	}
	return nil, fmt.Errorf("ask the extender: %w", collect.Reworded(body, err))
}

// exportTimeout is the least time for making and sending all decisions, up to 26 MB.
const exportTimeout = 5 * time.Minute

// export writes what the extender keeps, with the cluster that it is about.
func (o *Options) export(ctx context.Context, clients kube.Clients, out io.Writer) error {
	asking, cancel := context.WithTimeout(ctx, max(o.Extender.Timeout, exportTimeout))
	defer cancel()
	record, err := o.ask(asking, clients, inspect.DecisionsRoute)
	if err != nil {
		return err
	}
	cluster, err := live.Read(ctx, func() (kube.Clients, error) { return clients, nil })
	if err != nil {
		return err
	}
	if o.Export == "-" {
		return cluster.WriteExport(out, record)
	}
	f, err := os.OpenFile(o.Export, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(cluster.WriteExport(f, record), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", o.Export, err)
	}
	return nil
}
