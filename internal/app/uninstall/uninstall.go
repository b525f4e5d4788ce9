// Package uninstall is the program "divvy-control uninstall": what is taken away
// in a fixed order before and after the objects of an installation are deleted,
// so that a cluster is afterwards as it was before Divvy.
//
// It deletes what it is told by name, and on nodes what Divvy itself has listed
// there as its own. Pods of users, and what administrators wrote, are left alone.
// Every step has a limit: a node that does not answer holds nothing up, and what
// remains on it is named with the command that mends it.
package uninstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// Limits and pauses.
const (
	// askEvery is the pause between two questions to the API server.
	askEvery = 2 * time.Second
	// tellEvery is how often a wait that goes on is told.
	tellEvery = 20 * time.Second
	// schedulerLimit is how long the control plane may take to be without the
	// extender: a kube-scheduler is started again for that on each node.
	schedulerLimit = 2 * time.Minute
	// workloadLimit is how long pods may take to end.
	workloadLimit = 75 * time.Second
	// unreachableAfter is how long pods on nodes that do not answer are waited for.
	unreachableAfter = 15 * time.Second
	// hostLimit is how long hosts may take to be clean after the daemons ended.
	hostLimit = 45 * time.Second
	// cleaningLimit is how long taking things off the nodes may take. Steps before
	// leave it that time.
	cleaningLimit = 40 * time.Second
	// requestTimeout bounds every request to the API server.
	requestTimeout = 10 * time.Second
	// insistLimit is how long one request is made again and again while the API server
	// does not answer it.
	insistLimit = 30 * time.Second
	// reserve of the time is kept for saying what remains.
	reserve = 5 * time.Second
)

// Command returns the subcommand.
func Command() *cobra.Command {
	o := DefaultOptions()
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
			return Run(cmd.Context(), o, clients.Kubernetes, cmd.OutOrStdout())
		},
	}
	o.AddFlags(cmd.Flags())
	return cmd
}

// Run does one of the two parts and prints each step. Its error is nil when what
// remains can be left; that is printed too.
func Run(ctx context.Context, o Options, client kubernetes.Interface, out io.Writer) error {
	objects, err := parseObjects(o.Remove)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	u := &uninstaller{options: o, client: client, out: out, objects: objects}
	if o.After {
		err = u.after(ctx)
	} else {
		err = u.before(ctx)
	}
	u.conclude()
	return err
}

// uninstaller is one run. It is not safe for concurrent use.
type uninstaller struct {
	options Options
	client  kubernetes.Interface
	out     io.Writer
	objects []object
	// remains are lines about what is still there.
	remains []string
}

func (u *uninstaller) say(format string, args ...any) { fmt.Fprintf(u.out, format+"\n", args...) }

// remain notes what is still there, and the command that mends it.
func (u *uninstaller) remain(what, command string) {
	line := what
	if command != "" {
		line += "; to fix it: " + command
	}
	if !slices.Contains(u.remains, line) {
		u.remains = append(u.remains, line)
	}
}

func (u *uninstaller) conclude() {
	if len(u.remains) == 0 {
		return
	}
	u.say("remains:")
	for _, line := range u.remains {
		u.say("- %s", line)
	}
}

// wait asks until nothing is pending, for no longer than limit. It tells what is
// pending when that changes and from time to time, and returns the last of it.
func (u *uninstaller) wait(ctx context.Context, limit time.Duration, ask func(context.Context) (pending string, err error)) string {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var told string
	var toldAt time.Time
	for pending := ""; ; {
		now, err := ask(ctx)
		switch {
		case err == nil && now == "":
			return ""
		case err == nil:
			pending = now
		case ctx.Err() == nil || pending == "": // one that was cut off says less than what was before
			pending = err.Error()
		}
		if pending != told || time.Since(toldAt) >= tellEvery {
			u.say("waiting: %s", pending)
			told, toldAt = pending, time.Now()
		}
		select {
		case <-ctx.Done():
			return pending
		case <-time.After(askEvery):
		}
	}
}

// spared is the limit, or less where the run has less time than what is to come
// needs.
func spared(ctx context.Context, limit time.Duration) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return max(askEvery, min(limit, time.Until(deadline)-cleaningLimit-reserve))
	}
	return limit
}

// call makes one request with a limit of its own.
func call(ctx context.Context, request func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return request(ctx)
}

// insist makes one request until it is answered, for as long as an API server takes
// to start again: nobody makes it later.
func (u *uninstaller) insist(ctx context.Context, request func(context.Context) error) error {
	var last error
	u.wait(ctx, spared(ctx, insistLimit), func(ctx context.Context) (string, error) {
		err := call(ctx, request)
		if err == nil || ctx.Err() == nil || last == nil { // one that was cut off says less than what was before
			last = err
		}
		if refused(err) {
			return "", nil
		}
		return "", err
	})
	return last
}

// refused reports whether the API server has answered that a request is wrong, so
// that it is in vain to make it again.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || apierrors.IsTooManyRequests(err) || apierrors.IsTimeout(err) {
		return false
	}
	code := status.Status().Code
	return code >= http.StatusBadRequest && code < http.StatusInternalServerError
}

// gone reports whether an object is not there.
func gone(err error) bool { return apierrors.IsNotFound(err) }

// join lists a few of the names, and how many more there are.
func join(names []string) string {
	const most = 10
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

// The kinds of objects that can be removed, by the name that kubectl has for one.
const (
	daemonSet  = "daemonset"
	deployment = "deployment"
	mutating   = "mutatingwebhookconfiguration"
	validating = "validatingwebhookconfiguration"
	lease      = "lease"
	secret     = "secret"
	configMap  = "configmap"
)

// clusterKinds are those of objects without a namespace, namespacedKinds the rest.
var (
	clusterKinds    = []string{mutating, validating}
	namespacedKinds = []string{daemonSet, deployment, lease, secret, configMap}
)

// object names an object.
type object struct{ kind, namespace, name string }

func (o object) String() string {
	if o.namespace == "" {
		return o.kind + " " + o.name
	}
	return fmt.Sprintf("%s %s/%s", o.kind, o.namespace, o.name)
}

// command deletes the object.
func (o object) command() string {
	if o.namespace == "" {
		return fmt.Sprintf("kubectl delete %s %s", o.kind, o.name)
	}
	return fmt.Sprintf("kubectl delete %s %s -n %s", o.kind, o.name, o.namespace)
}

// parseObjects reads KIND/NAME and KIND/NAMESPACE/NAME.
func parseObjects(list []string) ([]object, error) {
	var out []object
	var errs []error
	for _, text := range list {
		o, err := parseObject(text)
		if err != nil {
			errs = append(errs, flags.Mistake("remove", err))
			continue
		}
		out = append(out, o)
	}
	return out, errors.Join(errs...)
}

func parseObject(text string) (object, error) {
	parts := strings.Split(text, "/")
	switch {
	case slices.Contains(parts, ""):
	case len(parts) == 2 && slices.Contains(clusterKinds, parts[0]):
		return object{kind: parts[0], name: parts[1]}, nil
	case len(parts) == 3 && slices.Contains(namespacedKinds, parts[0]):
		return object{kind: parts[0], namespace: parts[1], name: parts[2]}, nil
	}
	return object{}, fmt.Errorf("%q: must be KIND/NAMESPACE/NAME with %s, or KIND/NAME with %s",
		text, strings.Join(namespacedKinds, ", "), strings.Join(clusterKinds, ", "))
}
