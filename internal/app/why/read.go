package why

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/simulate/live"
	"github.com/divvy-gpu/divvy/internal/report/why"
)

// target is what is to be explained.
type target struct {
	kind string // one of kinds
	name string
}

const kindPod = "pod"

// kinds are the names of kinds, with the shorter ones that kubectl takes.
var kinds = map[string]string{
	"pod": kindPod, "pods": kindPod, "po": kindPod,
	"job": "job", "jobs": "job",
	"deployment": "deployment", "deployments": "deployment", "deploy": "deployment",
	"statefulset": "statefulset", "statefulsets": "statefulset", "sts": "statefulset",
}

func parseTarget(text string) (target, error) {
	kind, name, named := strings.Cut(text, "/")
	if !named {
		kind, name = kindPod, text
	}
	known, ok := kinds[strings.ToLower(kind)]
	if !ok {
		return target{}, fmt.Errorf("%q: the kind %q cannot be explained; use a pod, job, deployment or statefulset", text, kind)
	}
	if name == "" || strings.Contains(name, "/") {
		return target{}, fmt.Errorf("%q: it must be POD or KIND/NAME", text)
	}
	return target{known, name}, nil
}

// unknownError is the error of a target that does not exist.
type unknownError struct{ error }

func exitOf(err error) error {
	var unknown unknownError
	if errors.As(err, &unknown) {
		return &kubectl.ExitError{Code: ExitUsage, Err: err}
	}
	return &kubectl.ExitError{Code: ExitUnknown, Err: err}
}

// read returns the snapshot, the namespace, and the owner that is to be explained, nil for
// a pod.
func (o *Options) read(ctx context.Context, t target, connect connector, now func() time.Time, in io.Reader) (*why.Snapshot, string,
	*why.Owner, error) {
	if o.FromDump != "" {
		namespace := cmp.Or(o.Namespace, metav1.NamespaceDefault)
		s, owner, err := o.readDump(t, namespace, in)
		return s, namespace, owner, err
	}
	clients, namespace, err := connect()
	if err != nil {
		return nil, "", nil, err
	}
	namespace = cmp.Or(o.Namespace, namespace)
	s, owner, err := readCluster(ctx, clients.Kubernetes, t, namespace)
	if s != nil {
		s.Taken = now()
	}
	return s, namespace, owner, err
}

// readCluster lists what is needed. What may not be read is noted in the snapshot.
func readCluster(ctx context.Context, client kubernetes.Interface, t target, namespace string) (*why.Snapshot, *why.Owner, error) {
	s := &why.Snapshot{}
	// noted notes what may not be read. The note names the source itself.
	noted := func(source string, err error) error {
		if !apierrors.IsForbidden(err) {
			return err
		}
		s.Failed = append(s.Failed, why.Failure{Source: source, Reason: errors.Unwrap(err).Error()})
		return nil
	}
	core := client.CoreV1()
	owner, err := readOwner(ctx, client, t, namespace)
	if err != nil {
		return nil, nil, err
	}
	err = noted(why.SourceNodes, kube.EachItem(ctx, "nodes", metav1.ListOptions{}, core.Nodes().List, s.Add))
	if err != nil {
		return nil, nil, err
	}
	err = noted(why.SourcePods, kube.EachItem(ctx, "pods", metav1.ListOptions{}, core.Pods(metav1.NamespaceAll).List, s.Add))
	if err != nil {
		return nil, nil, err
	}
	if slices.ContainsFunc(s.Failed, func(f why.Failure) bool { return f.Source == why.SourcePods }) {
		err := kube.EachItem(ctx, "pods of namespace "+namespace, metav1.ListOptions{}, core.Pods(namespace).List, s.Add)
		if err != nil {
			return nil, nil, err
		}
	}
	events := core.Events(namespace).List
	err = noted(why.SourceEvents, kube.EachItem(ctx, "events of namespace "+namespace, metav1.ListOptions{}, events, s.Add))
	if err != nil {
		return nil, nil, err
	}
	everywhere := mayDelete(ctx, client, metav1.NamespaceAll)
	here := everywhere || mayDelete(ctx, client, namespace)
	s.MayDelete = func(in string) bool { return everywhere || here && in == namespace }
	return s, owner, nil
}

// mayDelete reports whether the person may delete pods. Without an answer they may not.
func mayDelete(ctx context.Context, client kubernetes.Interface, namespace string) bool {
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Verb: "delete", Resource: "pods"},
	}}
	answer, err := client.AuthorizationV1().SelfSubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	return err == nil && answer.Status.Allowed
}

// readOwner gets a controller, nil for a pod.
func readOwner(ctx context.Context, client kubernetes.Interface, t target, namespace string) (*why.Owner, error) {
	var obj runtime.Object
	var err error
	switch t.kind {
	case "job":
		obj, err = client.BatchV1().Jobs(namespace).Get(ctx, t.name, metav1.GetOptions{})
	case "deployment":
		obj, err = client.AppsV1().Deployments(namespace).Get(ctx, t.name, metav1.GetOptions{})
	case "statefulset":
		obj, err = client.AppsV1().StatefulSets(namespace).Get(ctx, t.name, metav1.GetOptions{})
	default:
		return nil, nil
	}
	switch {
	case apierrors.IsNotFound(err):
		return nil, unknownError{fmt.Errorf("namespace %s has no %s %q", namespace, t.kind, t.name)}
	case err != nil:
		return nil, fmt.Errorf("get %s %s/%s: %w", t.kind, namespace, t.name, err)
	}
	return ownerOf(obj), nil
}

// ownerOf is the part of a controller that is explained, nil for another object.
func ownerOf(obj runtime.Object) *why.Owner {
	replicas := func(n *int32) int32 {
		if n == nil {
			return 1
		}
		return *n
	}
	switch c := obj.(type) {
	case *batchv1.Job:
		o := &why.Owner{Kind: "job", Namespace: c.Namespace, Name: c.Name, Wanted: replicas(c.Spec.Parallelism)}
		o.Suspended = c.Spec.Suspend != nil && *c.Spec.Suspend
		for _, condition := range c.Status.Conditions {
			if condition.Status == corev1.ConditionTrue && (condition.Type == batchv1.JobComplete || condition.Type == batchv1.JobFailed) {
				o.Wanted, o.Suspended = 0, false
			}
		}
		return o
	case *appsv1.Deployment:
		o := &why.Owner{Kind: "deployment", Namespace: c.Namespace, Name: c.Name, Wanted: replicas(c.Spec.Replicas)}
		for _, condition := range c.Status.Conditions {
			if condition.Type == appsv1.DeploymentReplicaFailure && condition.Status == corev1.ConditionTrue {
				o.Problem = condition.Message
			}
		}
		return o
	case *appsv1.StatefulSet:
		return &why.Owner{Kind: "statefulset", Namespace: c.Namespace, Name: c.Name, Wanted: replicas(c.Spec.Replicas)}
	}
	return nil
}

// readDump reads a list of objects. Every command is shown, since nothing is known of rights.
func (o *Options) readDump(t target, namespace string, in io.Reader) (*why.Snapshot, *why.Owner, error) {
	f, name, err := live.Open(o.FromDump, in)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	s := &why.Snapshot{MayDelete: func(string) bool { return true }}
	var owner *why.Owner
	items, err := live.ReadList(f, name, func(kind string) runtime.Object {
		switch kind {
		case "Node":
			return &corev1.Node{}
		case "Pod":
			return &corev1.Pod{}
		case "Event":
			return &corev1.Event{}
		case "Job":
			return &batchv1.Job{}
		case "Deployment":
			return &appsv1.Deployment{}
		case "StatefulSet":
			return &appsv1.StatefulSet{}
		}
		return nil
	}, func(obj runtime.Object) {
		if c := ownerOf(obj); c != nil && c.Kind == t.kind && c.Name == t.name && c.Namespace == namespace {
			owner = c
		}
		s.Add(obj)
	})
	switch {
	case err != nil:
		return nil, nil, err
	case len(s.Nodes) == 0:
		return nil, nil, fmt.Errorf("%s: no nodes among its %d items", name, items)
	case !slices.ContainsFunc(s.Nodes, func(n corev1.Node) bool { return len(n.Status.Conditions) > 0 }):
		return nil, nil, fmt.Errorf("%s: its nodes have no conditions, as in a dump of \"kubectl divvy simulate\"; write it with "+
			"\"kubectl get nodes,pods,events -A -o json\"", name)
	case t.kind != kindPod && t.kind != "" && owner == nil:
		return nil, nil, unknownError{fmt.Errorf("%s: namespace %s has no %s %q", name, namespace, t.kind, t.name)}
	}
	s.Taken = s.Newest()
	return s, owner, nil
}
