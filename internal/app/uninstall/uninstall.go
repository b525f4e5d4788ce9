// Package uninstall is the program "divvy-control uninstall": its flags. What it does is in
// internal/install/uninstall.
package uninstall

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/install/uninstall"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

type options struct{ uninstall.Options }

// AddFlags adds the flags, with the present values as defaults.
func (o *options) AddFlags(fs *pflag.FlagSet) {
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
func (o *options) Validate() error {
	var errs []error
	if o.Before == o.After {
		errs = append(errs, errors.New("set either --before or --after"))
	}
	if o.Namespace == "" && (o.SchedulerDaemon != "" || o.SchedulerHook != "" || o.NodeHook != "") {
		errs = append(errs, errors.New("--namespace (or POD_NAMESPACE) is required for --scheduler-daemon, "+
			"--scheduler-hook and --node-hook"))
	}
	if o.SchedulerDaemon != "" && o.SchedulerHook == "" {
		errs = append(errs, errors.New("--scheduler-daemon requires --scheduler-hook, or kube-scheduler would continue to call an "+
			"extender that no longer exists"))
	}
	errs = append(errs, flags.Mistake("remove", o.CheckRemove()))
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
	if o.Timeout <= uninstall.MinTimeout {
		errs = append(errs, flags.Mistake("timeout", fmt.Errorf("%v: must be more than %v", o.Timeout, uninstall.MinTimeout)))
	}
	return errors.Join(errs...)
}

// Command returns the subcommand.
func Command() *cobra.Command {
	o := options{uninstall.Options{Namespace: os.Getenv("POD_NAMESPACE"), Timeout: 270 * time.Second}}
	cmd := &cobra.Command{
		Use:   "uninstall --before | --after",
		Short: "Remove what Divvy left in the cluster, before and after its objects are deleted",
		Long: "Remove what Divvy left in the cluster. The chart runs this twice as a Job while the release is uninstalled:\n\n" +
			"--before stops Divvy's programs in an order that does not disturb other pods: kube-scheduler stops calling the extender,\n" +
			"webhooks are deleted, and daemons and servers exit. It then removes Divvy's labels and annotations from nodes, device\n" +
			"counts from their status, and objects that the programs created at run time.\n\n" +
			"--after waits until kubelet has dropped the resources, which takes five minutes after divvy-node exited, and removes\n" +
			"them from the status of the nodes.\n\n" +
			"Running pods are not affected. The command fails, before it removes anything else, if a kube-scheduler on a node that\n" +
			"responds still calls the extender. Anything else that remains is listed with the command that removes it.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return err
			}
			clients, err := kube.Connect(o.Kubeconfig, "divvy-uninstall/"+version.Version)
			if err != nil {
				return err
			}
			return uninstall.Run(cmd.Context(), o.Options, clients.Kubernetes, cmd.OutOrStdout())
		},
	}
	o.AddFlags(cmd.Flags())
	return cmd
}
