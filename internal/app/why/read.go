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
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
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

const (
	kindPod      = "pod"
	kindWorkload = "workload"
)

// kinds are the names of kinds, with the shorter ones that kubectl takes.
var kinds = map[string]string{
	"pod": kindPod, "pods": kindPod, "po": kindPod,
	"job": "job", "jobs": "job",
	"deployment": "deployment", "deployments": "deployment", "deploy": "deployment",
	"statefulset": "statefulset", "statefulsets": "statefulset", "sts": "statefulset",
	"workload": kindWorkload, "workloads": kindWorkload, "wl": kindWorkload,
}

func parseTarget(text string) (target, error) {
	kind, name, named := strings.Cut(text, "/")
	if !named {
		kind, name = kindPod, text
	}
	known, ok := kinds[strings.ToLower(kind)]
	if !ok {
		return target{}, fmt.Errorf("%q: the kind %q cannot be explained; use a pod, job, deployment, statefulset or workload", text, kind)
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

// Clients are what the cluster is read with.
type Clients struct {
	Kubernetes kubernetes.Interface
	// Objects reads what other programs queue pods by.
	Objects dynamic.Interface
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
	owner, err := readOwner(ctx, clients.Kubernetes, t, namespace)
	if err != nil {
		return nil, "", nil, err
	}
	s, err := Read(ctx, clients, namespace, now)
	if err != nil {
		return nil, "", nil, err
	}
	if t.kind == kindWorkload {
		of, known := ownerOfWorkload(s, namespace, t.name)
		if !known {
			return nil, "", nil, noWorkload(s, namespace, t.name)
		}
		// One that may not be read, or is gone, is known by its pods.
		owner, _ = readOwner(ctx, clients.Kubernetes, of, namespace)
	}
	return s, namespace, owner, nil
}

// ownerOfWorkload returns the controller of a Workload, if it is one whose kind is known;
// known is false where there is no such Workload.
func ownerOfWorkload(s *why.Snapshot, namespace, name string) (of target, known bool) {
	w := s.Workload(namespace, name)
	if w == nil {
		return target{}, false
	}
	for _, o := range w.OwnerReferences {
		if kind := kinds[strings.ToLower(o.Kind)]; kind != "" && kind != kindPod && kind != kindWorkload {
			of = target{kind, o.Name}
		}
	}
	return of, true
}

// noWorkload is the error about a Workload that was not found, or could not be read.
func noWorkload(s *why.Snapshot, namespace, name string) error {
	for _, f := range s.Failed {
		if f.Source == why.SourceWorkloads {
			return fmt.Errorf("the %s cannot be read: %s", f.Source, f.Reason)
		}
	}
	return unknownError{fmt.Errorf("namespace %s has no workload %q", namespace, name)}
}

// Read lists what is needed to explain pods of a namespace. What may not be read is noted in
// the snapshot.
func Read(ctx context.Context, clients Clients, namespace string, now func() time.Time) (*why.Snapshot, error) {
	s := &why.Snapshot{}
	// noted notes what may not be read. The note names the source itself.
	noted := func(source string, err error) error {
		if !apierrors.IsForbidden(err) {
			return err
		}
		s.Failed = append(s.Failed, why.Failure{Source: source, Reason: errors.Unwrap(err).Error()})
		return nil
	}
	all := metav1.ListOptions{}
	core, policy := clients.Kubernetes.CoreV1(), clients.Kubernetes.PolicyV1()
	pods := noted(why.SourcePods, kube.EachItem(ctx, "pods", all, core.Pods(metav1.NamespaceAll).List, s.Add))
	if len(s.Failed) > 0 {
		pods = kube.EachItem(ctx, "pods of namespace "+namespace, all, core.Pods(namespace).List, s.Add)
	}
	err := errors.Join(pods,
		noted(why.SourceNodes, kube.EachItem(ctx, "nodes", all, core.Nodes().List, s.Add)),
		noted(why.SourceEvents, kube.EachItem(ctx, "events of namespace "+namespace, all, core.Events(namespace).List, s.Add)),
		noted(why.SourceBudgets, kube.EachItem(ctx, why.SourceBudgets, all, policy.PodDisruptionBudgets(metav1.NamespaceAll).List, s.Add)))
	if err != nil {
		return nil, err
	}
	if namespace != metav1.NamespaceDefault && namespace != metav1.NamespaceAll { // those of nodes say more, where they may be read
		ofNodes := metav1.ListOptions{FieldSelector: "involvedObject.kind=Node"}
		_ = kube.EachItem(ctx, "events of nodes", ofNodes, core.Events(metav1.NamespaceDefault).List, s.Add)
	}
	if err := readClaims(ctx, clients.Kubernetes, namespace, s, noted); err != nil {
		return nil, err
	}
	readQueues(ctx, clients.Objects, namespace, s)
	s.Controller = func(kind, namespace, name string) (runtime.Object, error) {
		return kube.Controller(ctx, clients.Kubernetes, kind, namespace, name)
	}
	s.MayDelete = kube.MayDeletePods(ctx, clients.Kubernetes, namespace)
	s.Taken = now()
	return s, nil
}

// readClaims reads what pods of a namespace may wait for by ResourceClaims, if one does. An API server
// before 1.34 has none of the API.
func readClaims(ctx context.Context, client kubernetes.Interface, namespace string, s *why.Snapshot,
	noted func(string, error) error) error {
	waits := func(p corev1.Pod) bool {
		return (namespace == metav1.NamespaceAll || p.Namespace == namespace) && s.MayClaim(&p)
	}
	if !slices.ContainsFunc(s.Pods, waits) {
		return nil
	}
	all, api := metav1.ListOptions{}, client.ResourceV1()
	s.Claims.Selects = selects()
	err := cmp.Or(kube.EachItem(ctx, "deviceclasses", all, api.DeviceClasses().List, s.Add),
		kube.EachItem(ctx, "resourceslices", all, api.ResourceSlices().List, s.Add),
		kube.EachItem(ctx, "resourceclaims", all, api.ResourceClaims(metav1.NamespaceAll).List, s.Add))
	if err == nil || apierrors.IsNotFound(err) {
		return nil
	}
	s.Claims = why.Claims{} // a part of them would mislead
	return noted(why.SourceClaims, err)
}

// versions are those of an API, the newest first. Each Kueue and Kubernetes serves some.
var (
	workloadVersions = []string{"v1beta2", "v1beta1"}
	pluginVersions   = []string{"v1alpha1"}
	groupVersions    = []string{"v1beta1", "v1alpha3", "v1alpha2"}
)

// readQueues reads what other programs queue pods by. Answers about other pods do not need it,
// so it does not fail.
func readQueues(ctx context.Context, objects dynamic.Interface, namespace string, s *why.Snapshot) {
	list := func(group, resource string, versions []string) error {
		err := errors.New("it is not installed")
		for _, version := range versions {
			in := objects.Resource(schema.GroupVersionResource{Group: group, Version: version, Resource: resource}).Namespace(namespace)
			listed := kube.EachItem(ctx, resource, metav1.ListOptions{}, in.List, s.Add)
			if !apierrors.IsNotFound(listed) {
				return listed
			}
		}
		return err
	}
	if err := list(why.GroupKueue, "workloads", workloadVersions); err != nil {
		s.Failed = append(s.Failed, why.Failure{Source: why.SourceWorkloads, Reason: err.Error()})
	}
	for group, versions := range map[string][]string{why.GroupPlugins: pluginVersions, why.GroupScheduling: groupVersions} {
		if err := list(group, "podgroups", versions); err != nil {
			s.Failed = append(s.Failed, why.Failure{Source: why.SourceGroups, Reason: group + ": " + err.Error()})
		}
	}
	s.Queues.Place = func(w *why.Workload) (why.Place, error) { return placeOf(ctx, objects, w) }
}

// placeOf asks Kueue for the place of a Workload in its queue.
func placeOf(ctx context.Context, objects dynamic.Interface, w *why.Workload) (why.Place, error) {
	var last error
	for _, version := range workloadVersions {
		queues := schema.GroupVersionResource{Group: why.VisibilityKueue, Version: version, Resource: "localqueues"}
		answer, err := objects.Resource(queues).Namespace(w.Namespace).Get(ctx, w.Spec.QueueName, metav1.GetOptions{}, "pendingworkloads")
		if last = err; apierrors.IsNotFound(err) {
			continue
		} else if err != nil {
			return why.Place{}, err
		}
		items, _, err := unstructured.NestedSlice(answer.Object, "items")
		if err != nil {
			return why.Place{}, fmt.Errorf("pending workloads of queue %s: %w", w.Spec.QueueName, err)
		}
		for _, item := range items {
			var p struct {
				metav1.ObjectMeta `json:"metadata"`
				why.Place         `json:",inline"`
			}
			of, _ := item.(map[string]any)
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(of, &p); err == nil && p.Name == w.Name {
				return p.Place, nil
			}
		}
		return why.Place{}, fmt.Errorf("queue %s does not list it as pending", w.Spec.QueueName)
	}
	return why.Place{}, last
}

// readOwner gets a controller, nil for a pod.
func readOwner(ctx context.Context, client kubernetes.Interface, t target, namespace string) (*why.Owner, error) {
	obj, err := kube.Controller(ctx, client, t.kind, namespace, t.name)
	switch {
	case obj == nil && err == nil:
		return nil, nil
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
	s := &why.Snapshot{MayDelete: func(string) bool { return true }, Claims: why.Claims{Selects: selects()}}
	var owners []*why.Owner
	controllers := map[target]runtime.Object{}
	s.Controller = func(kind, namespace, name string) (runtime.Object, error) {
		return controllers[target{kind, namespace + "/" + name}], nil
	}
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
		case "PodDisruptionBudget":
			return &policyv1.PodDisruptionBudget{}
		case "ResourceClaim":
			return &resourceapi.ResourceClaim{}
		case "DeviceClass":
			return &resourceapi.DeviceClass{}
		case "ResourceSlice":
			return &resourceapi.ResourceSlice{}
		case "Workload", "PodGroup": // of several groups
			return &unstructured.Unstructured{}
		}
		return nil
	}, func(obj runtime.Object) {
		if c := ownerOf(obj); c != nil {
			owners = append(owners, c)
			controllers[target{c.Kind, c.Namespace + "/" + c.Name}] = obj
		}
		s.Add(obj)
	})
	wanted := t
	if t.kind == kindWorkload {
		wanted, _ = ownerOfWorkload(s, namespace, t.name)
	}
	var owner *why.Owner
	for _, c := range owners {
		if c.Kind == wanted.kind && c.Name == wanted.name && c.Namespace == namespace {
			owner = c
		}
	}
	switch {
	case err != nil:
		return nil, nil, err
	case len(s.Nodes) == 0:
		return nil, nil, fmt.Errorf("%s: no nodes among its %d items", name, items)
	case !slices.ContainsFunc(s.Nodes, func(n corev1.Node) bool { return len(n.Status.Conditions) > 0 }):
		return nil, nil, fmt.Errorf("%s: its nodes have no conditions, as in a dump of \"kubectl divvy simulate\"; write it with "+
			"\"kubectl get nodes,pods,events -A -o json\"", name)
	case t.kind == kindWorkload && s.Workload(namespace, t.name) == nil,
		t.kind != kindPod && t.kind != kindWorkload && t.kind != "" && owner == nil:
		return nil, nil, unknownError{fmt.Errorf("%s: namespace %s has no %s %q", name, namespace, t.kind, t.name)}
	}
	s.Taken = s.Newest()
	return s, owner, nil
}
