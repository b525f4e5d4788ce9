// Package doctor is the subcommand "kubectl-divvy doctor": it examines an
// installation and says how to mend what it finds.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	readwhy "github.com/divvy-gpu/divvy/internal/app/why"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/report/doctor"
)

// Exit codes of the program, besides 0: nothing is wrong.
const (
	// ExitFindings: something is wrong.
	ExitFindings = 1
	// ExitUnknown: nothing was found wrong, and not everything could be looked at.
	ExitUnknown = 2
)

// Options are what a user may choose.
type Options struct {
	// Namespace is that of the installation; "" for the one that is found.
	Namespace string
	// Output is the name of a format of package doctor.
	Output string
	// Timeout bounds the whole examination.
	Timeout time.Duration
	// Settle is how long findings that may mend themselves are given; then the
	// cluster is read once more. 0 for no second look.
	Settle time.Duration
	// Verbose shows the checks that found nothing as well.
	Verbose bool
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	// Kubelet tells the API server every 10 seconds what it has.
	return Options{Output: string(doctor.Text), Timeout: time.Minute, Settle: 12 * time.Second}
}

// AddFlags adds a flag for every option, with its present value as default.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.Namespace, "namespace", "n", o.Namespace, "namespace of the installation; detected if empty")
	fs.StringVarP(&o.Output, "output", "o", o.Output, "text, json or yaml")
	fs.DurationVar(&o.Timeout, "timeout", o.Timeout, "maximum duration of all checks")
	fs.DurationVar(&o.Settle, "settle", o.Settle, "how long to wait before checking again, if there are findings that may resolve "+
		"themselves; 0 disables the second check")
	fs.BoolVarP(&o.Verbose, "verbose", "v", o.Verbose, "also show checks that found no problem")
}

const maxTimeout = time.Hour

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	var errs []error
	if _, err := doctor.ParseFormat(o.Output); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, kubectl.CheckNamespace(o.Namespace))
	if o.Timeout <= 0 || o.Timeout > maxTimeout {
		errs = append(errs, fmt.Errorf("--timeout %s: must be above zero and at most %s", o.Timeout, maxTimeout))
	}
	if o.Settle < 0 || o.Settle >= o.Timeout && o.Timeout > 0 {
		errs = append(errs, fmt.Errorf("--settle %s: must be zero or more, and below --timeout", o.Settle))
	}
	return errors.Join(errs...)
}

// Command returns the subcommand. The report goes to cmd's output.
func Command() *cobra.Command {
	o := DefaultOptions()
	c := kubectl.New()
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the installation and report how to fix problems",
		Long: "Check the whole installation: its objects, programs, nodes, the configuration of kube-scheduler, webhooks,\n" +
			"certificates, permissions, waiting pods and the remote pool. Each finding gives the object, the problem and\n" +
			"how to fix it; lines that begin with $ can be run as they are. Nothing is changed.\n\n" +
			"Exit status: 0 no problems, 1 errors or warnings, 2 no problems but some checks could not run.",
		Example: "  kubectl divvy doctor\n" +
			"  kubectl divvy doctor --verbose\n" +
			"  kubectl divvy doctor -o json",
		Args:    cobra.NoArgs,
		PreRunE: func(*cobra.Command, []string) error { return unknown(o.Validate()) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			clients, err := connect(c)
			if err != nil {
				return unknown(err)
			}
			at := func(r doctor.Report) doctor.Report { return r.At(c.Context(), c.Kubeconfig()) }
			return Run(cmd.Context(), o, clients, at, cmd.OutOrStdout())
		},
	}
	o.AddFlags(cmd.Flags())
	c.AddFlagsWithoutTimeout(cmd.Flags()) // --timeout is about the whole examination
	return cmd
}

func connect(c *kubectl.Cluster) (doctor.Clients, error) {
	clients, err := readwhy.Connect(c)
	if err != nil {
		return doctor.Clients{}, err
	}
	return doctor.Clients{Kubernetes: clients.Kubernetes, Objects: clients.Objects,
		Explain: func(ctx context.Context, pods []*corev1.Pod) ([]doctor.Waits, error) {
			return explain(ctx, clients, pods)
		},
	}, nil
}

// unknown is the error of an examination that was not made.
func unknown(err error) error {
	if err == nil {
		return nil
	}
	return &kubectl.ExitError{Code: ExitUnknown, Err: err}
}

// programTimeout bounds a request to one of Divvy's programs.
const programTimeout = 5 * time.Second

// Run examines the cluster and prints the report, as at returns it. Its error is
// a *kubectl.ExitError, nil when nothing is wrong.
func Run(ctx context.Context, o Options, clients doctor.Clients, at func(doctor.Report) doctor.Report, out io.Writer) error {
	if err := o.Validate(); err != nil {
		return unknown(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.Timeout, fmt.Errorf("it took longer than --timeout %s", o.Timeout))
	defer cancel()
	report, err := examine(ctx, o, clients)
	if err != nil {
		return unknown(err)
	}
	if o.Settle > 0 && report.Transient() {
		select {
		case <-time.After(o.Settle):
		case <-ctx.Done():
			return unknown(context.Cause(ctx))
		}
		if report, err = examine(ctx, o, clients); err != nil {
			return unknown(err)
		}
	}
	if err := doctor.Print(out, at(report), doctor.Format(o.Output), o.Verbose); err != nil {
		return unknown(err)
	}
	switch {
	case report.Count(doctor.Error)+report.Count(doctor.Warning) > 0:
		return &kubectl.ExitError{Code: ExitFindings}
	case report.Count(doctor.Unknown) > 0:
		return &kubectl.ExitError{Code: ExitUnknown}
	}
	return nil
}

func examine(ctx context.Context, o Options, clients doctor.Clients) (doctor.Report, error) {
	s, err := doctor.Collect(ctx, clients, doctor.Options{Tool: version.Version, Namespace: o.Namespace, Timeout: programTimeout})
	if err != nil {
		return doctor.Report{}, err
	}
	return doctor.Examine(s), nil
}
