// Package why is the subcommand "kubectl-divvy why": it explains why pods wait, and what
// would admit them. It reads the cluster, or a dump of one; what the answer is decides
// package why of internal/report.
package why

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

// Exit codes of the program, besides 0: nothing keeps a pod waiting.
const (
	// ExitWaits: a pod waits, has failed or was not created.
	ExitWaits = 1
	// ExitUsage: the command line is wrong, or names something that does not exist.
	ExitUsage = 2
	// ExitUnknown: rights or the API server do not allow an answer.
	ExitUnknown = 3
)

const (
	formatText = "text"
	formatJSON = "json"
)

// Options are what a user may choose.
type Options struct {
	// Namespace is that of the pods; "" for the one of the context, and of a dump "default".
	Namespace string
	// All explains every pod of the namespace that waits, a line each.
	All bool
	// FromDump is a file to read instead of the cluster, "-" for standard input.
	FromDump string
	Output   string
	// Timeout bounds all requests together.
	Timeout time.Duration
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options { return Options{Output: formatText, Timeout: time.Minute} }

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace, "namespace of the pods; that of the context if empty")
	fs.BoolVar(&o.All, "all", o.All, "explain all waiting pods of the namespace, one line each")
	fs.StringVar(&o.FromDump, "from-dump", o.FromDump, "read the cluster from a file written by \"kubectl get nodes,pods,events,"+
		"deployments,statefulsets,jobs,poddisruptionbudgets -A -o json\"; \"-\" for standard input")
	fs.StringVarP(&o.Output, "output", "o", o.Output, "text or json")
	fs.DurationVar(&o.Timeout, "timeout", o.Timeout, "maximum duration of reading the cluster")
}

// Validate reports all mistakes at once.
func (o Options) Validate(args []string) error {
	var errs []error
	switch {
	case o.All && len(args) > 0:
		errs = append(errs, errors.New("--all explains all pods of the namespace; do not name one"))
	case !o.All && len(args) != 1:
		errs = append(errs,
			errors.New("exactly one POD, job/NAME, deployment/NAME, statefulset/NAME or workload/NAME is required, or --all"))
	}
	if !o.All && len(args) == 1 {
		if _, err := parseTarget(args[0]); err != nil {
			errs = append(errs, err)
		}
	}
	errs = append(errs, kubectl.CheckNamespace(o.Namespace))
	if o.Output != formatText && o.Output != formatJSON {
		errs = append(errs, fmt.Errorf("--output %q: must be text or json", o.Output))
	}
	if o.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--timeout %s: must be above zero", o.Timeout))
	}
	return errors.Join(errs...)
}

const about = `Explain why a pod waits, and list the smallest changes that would admit it.

The argument is a pod, or a Job, Deployment, StatefulSet or Workload of Kueue, whose oldest waiting pod is
explained. Each change is applied to a copy of the cluster in memory first, with the extender's own code; it is listed as
"not verified" if kube-scheduler also looks at something that is not judged here. Nothing is changed in
the cluster.

Requires permission to list nodes, pods and events, and to get the named controller. With less, the answer
is based on what can be read, and says what is missing.

Exit status: 0 nothing keeps the pod waiting, 1 it waits, 2 wrong usage, 3 no answer possible.`

const examples = `  kubectl divvy why train-0
  kubectl divvy why deployment/web -n team-a
  kubectl divvy why --all -n team-a
  kubectl divvy why train-0 -o json
  kubectl divvy why train-0 --from-dump cluster.json`

// Command returns the subcommand. The answer goes to cmd's output.
func Command() *cobra.Command {
	c := kubectl.New()
	cmd := command(func() (Clients, string, error) {
		namespace, err := c.Namespace()
		if err != nil {
			return Clients{}, "", err
		}
		clients, err := Connect(c)
		return clients, namespace, err
	}, time.Now)
	c.AddFlagsWithoutTimeout(cmd.Flags()) // --timeout is about all requests
	return cmd
}

// Connect makes clients of the chosen cluster. It does not contact the API server.
func Connect(c *kubectl.Cluster) (Clients, error) {
	clients, err := c.Clients()
	if err != nil {
		return Clients{}, err
	}
	objects, err := c.Objects()
	return Clients{Kubernetes: clients.Kubernetes, Objects: objects}, err
}

// connector makes clients, and names the namespace of the context.
type connector func() (Clients, string, error)

// command is Command without the flags that choose a cluster.
func command(connect connector, now func() time.Time) *cobra.Command {
	o := DefaultOptions()
	usage := func(err error) error {
		if err == nil {
			return nil
		}
		return &kubectl.ExitError{Code: ExitUsage, Err: err}
	}
	cmd := &cobra.Command{
		Use:     "why POD | job/NAME | deployment/NAME | statefulset/NAME | workload/NAME | --all",
		Short:   "Explain why a pod waits, and what would admit it",
		Long:    about,
		Example: examples,
		Args:    cobra.ArbitraryArgs,
		PreRunE: func(_ *cobra.Command, args []string) error { return usage(o.Validate(args)) },
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), o.Timeout, fmt.Errorf("it took longer than --timeout %s", o.Timeout))
			defer cancel()
			name := ""
			if len(args) > 0 {
				name = args[0]
			}
			return Run(ctx, o, name, connect, now, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	o.AddFlags(cmd.Flags())
	return cmd
}

// Run explains what is named, or all of the namespace. Its error is a *kubectl.ExitError,
// nil when nothing keeps a pod waiting.
func Run(ctx context.Context, o Options, name string, connect connector, now func() time.Time, in io.Reader, out io.Writer) error {
	target := target{}
	if !o.All {
		var err error
		if target, err = parseTarget(name); err != nil {
			return &kubectl.ExitError{Code: ExitUsage, Err: err}
		}
	}
	s, namespace, owner, err := o.read(ctx, target, connect, now, in)
	if err != nil {
		return exitOf(err)
	}
	x := why.New(s)
	var all []why.Explanation
	switch {
	case o.All:
		for _, p := range s.Waiting(namespace) {
			all = append(all, x.Pod(p))
		}
	case target.kind == kindWorkload:
		all = append(all, x.Workload(s.Workload(namespace, target.name), owner))
	case owner != nil:
		all = append(all, x.Owner(owner))
	default:
		p := s.Pod(namespace, target.name)
		if p == nil {
			return &kubectl.ExitError{Code: ExitUsage, Err: fmt.Errorf("namespace %s has no pod %q", namespace, target.name)}
		}
		all = append(all, x.Pod(p))
	}
	if err := o.print(out, all, namespace); err != nil {
		return &kubectl.ExitError{Code: ExitUnknown, Err: err}
	}
	code := 0
	for i := range all {
		switch e := &all[i]; {
		case e.Partial:
			code = ExitUnknown
		case e.State != why.StateRuns:
			code = max(code, ExitWaits)
		}
	}
	if code != 0 {
		return &kubectl.ExitError{Code: code}
	}
	return nil
}

func (o *Options) print(out io.Writer, all []why.Explanation, namespace string) error {
	switch {
	case o.Output == formatJSON:
		return why.PrintJSON(out, all, o.All)
	case len(all) == 0:
		_, err := fmt.Fprintf(out, "No pod waits in namespace %s.\n", namespace)
		return err
	case o.All:
		return why.PrintLines(out, all)
	}
	return why.Print(out, &all[0])
}
