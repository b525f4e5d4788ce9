// Package uninstall removes in a fixed order, before and after the objects of an
// installation are deleted, what they leave, so that a cluster is afterwards as it was
// before Divvy.
//
// It deletes the objects that are named, and on nodes what Divvy itself has listed
// there as its own. Pods of users, and what administrators wrote, are left alone.
// Every step has a limit: a node that does not respond holds nothing up, and what
// remains on it is named with the command that removes it.
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

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
)

const (
	askEvery  = time.Second
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
	cleaningLimit  = 40 * time.Second
	requestTimeout = 10 * time.Second
	// insistLimit is how long one request is made again and again while the API server
	// does not answer it.
	insistLimit = 30 * time.Second
	// MinTimeout of the time is kept for saying what remains.
	MinTimeout = 5 * time.Second
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

// CheckRemove reports all mistakes in Remove.
func (o Options) CheckRemove() error {
	_, err := parseObjects(o.Remove)
	return err
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
	u := &uninstaller{options: o, client: client, out: &progress{to: out}, objects: objects}
	if o.After {
		err = u.after(ctx)
	} else {
		err = u.before(ctx)
	}
	u.out.conclude()
	return err
}

// uninstaller is one run. It is not safe for concurrent use.
type uninstaller struct {
	options Options
	client  kubernetes.Interface
	out     *progress
	objects []object
}

// progress prints what is done, what is waited for, and at the end what remains.
type progress struct {
	to io.Writer
	// remains are lines about what is still there.
	remains []string
}

func (p *progress) say(format string, args ...any) { fmt.Fprintf(p.to, format+"\n", args...) }

// remain notes what is still there, and the command that mends it.
func (p *progress) remain(what, command string) {
	line := what
	if command != "" {
		line += "; to fix it: " + command
	}
	if !slices.Contains(p.remains, line) {
		p.remains = append(p.remains, line)
	}
}

func (p *progress) conclude() {
	if len(p.remains) == 0 {
		return
	}
	p.say("remains:")
	for _, line := range p.remains {
		p.say("- %s", line)
	}
}

// wait asks until nothing is pending, for no longer than limit. It tells what is
// pending when that changes and from time to time, and returns the last of it.
func (p *progress) wait(ctx context.Context, limit time.Duration, ask func(context.Context) (pending string, err error)) string {
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
			p.say("waiting: %s", pending)
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
		return max(askEvery, min(limit, time.Until(deadline)-cleaningLimit-MinTimeout))
	}
	return limit
}

func call(ctx context.Context, request func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return request(ctx)
}

// insist makes one request until it is answered, for as long as an API server takes
// to start again: nobody makes it later.
func (p *progress) insist(ctx context.Context, request func(context.Context) error) error {
	var last error
	p.wait(ctx, spared(ctx, insistLimit), func(ctx context.Context) (string, error) {
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

type object struct{ kind, namespace, name string }

func (o object) String() string {
	if o.namespace == "" {
		return o.kind + " " + o.name
	}
	return fmt.Sprintf("%s %s/%s", o.kind, o.namespace, o.name)
}

func (o object) command() string {
	if o.namespace == "" {
		return fmt.Sprintf("kubectl delete %s %s", o.kind, o.name)
	}
	return fmt.Sprintf("kubectl delete %s %s -n %s", o.kind, o.name, o.namespace)
}

func parseObjects(list []string) ([]object, error) {
	var out []object
	var errs []error
	for _, text := range list {
		o, err := parseObject(text)
		if err != nil {
			errs = append(errs, err)
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
