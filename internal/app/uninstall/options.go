package uninstall

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/flags"
)

// Options are the settings of one run.
type Options struct {
	// Before and After say which part; exactly one is set.
	Before, After bool
	// Kubeconfig is a file, "" for the pod's service account.
	Kubeconfig string
	// Namespace is that of the DaemonSets that follow.
	Namespace string
	// SchedulerDaemon keeps kube-scheduler wired, SchedulerHook undoes that on the
	// nodes of the control plane; both "" where nobody does.
	SchedulerDaemon, SchedulerHook string
	// NodeHook cleans the nodes' hosts; "" for none.
	NodeHook string
	// Remove are the objects to delete, KIND/NAMESPACE/NAME or KIND/NAME. Webhook
	// configurations go first, then DaemonSets, Deployments, and the rest.
	Remove []string
	// TokenCopies deletes the copies of the token of a remote pool.
	TokenCopies bool
	// Counts are resources of numbers of devices, besides those that a node lists
	// as Divvy's own; Resources are those that kubelet was offered.
	Counts, Resources []string
	// Hold is how long Before lasts at least after the daemons have ended. It takes
	// from the time that After needs, each of which helm limits.
	Hold time.Duration
	// Timeout bounds the run.
	Timeout time.Duration
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options {
	return Options{Namespace: os.Getenv("POD_NAMESPACE"), Timeout: 270 * time.Second}
}

// AddFlags adds the flags, with the present values as defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&o.Before, "before", o.Before, "run the steps before Divvy's objects are deleted")
	fs.BoolVar(&o.After, "after", o.After, "run the steps after Divvy's objects were deleted")
	fs.StringVar(&o.Kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"),
		"kubeconfig file; the pod's service account if empty (environment KUBECONFIG)")
	fs.StringVar(&o.Namespace, "namespace", o.Namespace, "namespace of the DaemonSets (environment POD_NAMESPACE)")
	fs.StringVar(&o.SchedulerDaemon, "scheduler-daemon", o.SchedulerDaemon, "DaemonSet that keeps kube-scheduler configured; deleted first")
	fs.StringVar(&o.SchedulerHook, "scheduler-hook", o.SchedulerHook,
		"DaemonSet whose pods are ready once kube-scheduler no longer calls the extender; nothing else is removed "+
			"before")
	fs.StringVar(&o.NodeHook, "node-hook", o.NodeHook, "DaemonSet whose pods are ready once their host is clean")
	fs.StringArrayVar(&o.Remove, "remove", o.Remove, "object to delete, as KIND/NAMESPACE/NAME or KIND/NAME; may be repeated")
	fs.BoolVar(&o.TokenCopies, "token-copies", o.TokenCopies, "delete the copies of the remote pool's token in all namespaces")
	fs.StringSliceVar(&o.Counts, "counts", o.Counts, "resources that show a device count, in addition to those listed on nodes")
	fs.StringSliceVar(&o.Resources, "resources", o.Resources, "resources that kubelet was offered")
	fs.DurationVar(&o.Hold, "hold", o.Hold, "minimum time that --before waits after the daemons have exited, so that --after has less to "+
		"wait for")
	fs.DurationVar(&o.Timeout, "timeout", o.Timeout, "maximum duration of the run")
}

// Validate reports all mistakes at once.
func (o *Options) Validate() error {
	var errs []error
	if o.Before == o.After {
		errs = append(errs, errors.New("set either --before or --after"))
	}
	if o.Namespace == "" && (o.SchedulerDaemon != "" || o.SchedulerHook != "" || o.NodeHook != "") {
		errs = append(errs, errors.New("--namespace (or POD_NAMESPACE) is required for --scheduler-daemon, --scheduler-hook and "+
			"--node-hook"))
	}
	if o.SchedulerDaemon != "" && o.SchedulerHook == "" {
		errs = append(errs, errors.New("--scheduler-daemon requires --scheduler-hook, or kube-scheduler would continue to call an "+
			"extender that no longer exists"))
	}
	_, err := parseObjects(o.Remove)
	errs = append(errs, err)
	for _, list := range []struct {
		flag  string
		names []string
	}{{"counts", o.Counts}, {"resources", o.Resources}} {
		for _, name := range list.names {
			errs = append(errs, flags.Mistake(list.flag, flags.CheckResource(name)))
		}
	}
	if o.Hold < 0 {
		errs = append(errs, flags.Mistake("hold", fmt.Errorf("%v is negative", o.Hold)))
	}
	if o.Timeout <= reserve {
		errs = append(errs, flags.Mistake("timeout", fmt.Errorf("%v: must be more than %v", o.Timeout, reserve)))
	}
	return errors.Join(errs...)
}
