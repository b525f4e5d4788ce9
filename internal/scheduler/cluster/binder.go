package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/cause"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Errors of a Binder that a caller acts on; test with errors.Is.
var (
	// ErrPodGone: no pod of that name, or another one by now.
	ErrPodGone = errors.New("the pod no longer exists")
	// ErrOutcomeUnknown: the pod may or may not have been bound.
	ErrOutcomeUnknown = errors.New("the outcome of the bind is unknown")
)

// confirmTimeout bounds the question what became of a binding whose answer was
// lost.
const confirmTimeout = 2 * time.Second

// Pod is what scheduling needs to know of a pod.
type Pod struct {
	Ref     accel.PodRef
	Created time.Time
	// Node is where the pod is bound, "" before.
	Node string
	// Requests are what it asks of the configured resources, without those
	// that it asks nothing of.
	Requests []accel.Request
	// Mistake says which annotations by which the pod chooses devices cannot be
	// followed; nil for most. See RequestsOf.
	Mistake error
	// Ended is true when the pod Succeeded or Failed.
	Ended bool
	// Ending is true when the deletion of the pod has begun.
	Ending bool
	// Static is true for the mirror of a pod that kubelet runs from a file: it cannot be
	// evicted, and deleting the mirror ends no container.
	Static bool
	// Nominated is the node that kube-scheduler wants to bind the pod to once
	// there is room, "" for none.
	Nominated string
	// Said is what its conditions say of why it waits.
	Said Said
}

// Waits is the condition of a pod that says why it waits where kube-scheduler's sums hide it.
const Waits v1.PodConditionType = "divvy.dev/Waits"

// Said is what conditions say of a pod.
type Said struct {
	// Message is what kube-scheduler says of a pod that it found too little for on devices,
	// among other reasons; zero for a pod that has a node.
	cause.Message
	// Reason is that of the condition Waits, "" where the pod has none, and At when it was written.
	Reason string
	At     time.Time
}

// hinders sets what conditions say of a pod that waits, or that did.
func (p *Pod) hinders(pod *v1.Pod) {
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		switch {
		case c.Type == Waits:
			p.Said.Reason, p.Said.At = strings.Clone(c.Reason), c.LastTransitionTime.Time
		case c.Type == v1.PodScheduled && c.Status == v1.ConditionFalse && c.Reason == v1.PodReasonUnschedulable && p.Node == "":
			// A pod that waits for one of several resources is not explained.
			if len(p.Requests) == 1 && cause.ForeignScheduler(pod.Spec.SchedulerName) == "" {
				p.Said.Message = cause.MessageOf(c.Message, p.Requests[0].Resource)
			}
		}
	}
}

// Binder reads single pods and binds them. It is safe for concurrent use.
type Binder struct {
	client    kubernetes.Interface
	resources []accel.Resource
	capacity  bool
}

// NewBinder returns a binder whose Pods tell about the given resources and, with
// capacity, about their CPU and memory.
func NewBinder(client kubernetes.Interface, resources []accel.Resource, capacity bool) *Binder {
	return &Binder{client: client, resources: resources, capacity: capacity}
}

// Get asks the API server for the newest state of a pod. ErrPodGone says that
// there is none of that name.
func (b *Binder) Get(ctx context.Context, namespace, name string) (Pod, error) {
	pod, err := b.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return Pod{}, fmt.Errorf("pod %s/%s: %w", namespace, name, ErrPodGone)
	}
	if err != nil {
		return Pod{}, fmt.Errorf("read pod %s/%s: %w", namespace, name, err)
	}
	return podOf(pod, b.resources, b.capacity), nil
}

// Bind binds the pod to the node and sets the annotations on it, in one write:
// the API server merges a Binding's annotations into the pod. It only ever
// touches the pod with the UID of ref.
//
// Nil means that the pod is bound to the node, ErrOutcomeUnknown that nobody
// can tell; any other error that this call did not bind it there.
func (b *Binder) Bind(ctx context.Context, ref accel.PodRef, node string, annotations map[string]string) error {
	err := b.client.CoreV1().Pods(ref.Namespace).Bind(ctx, &v1.Binding{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ref.Namespace,
			Name:      ref.Name,
			// A precondition: a pod re-created under the same name is refused.
			UID:         types.UID(ref.UID),
			Annotations: annotations,
		},
		Target: v1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	switch {
	case err == nil:
		return nil
	case apierrors.IsNotFound(err):
		return fmt.Errorf("bind pod %s to %s: %w: %w", ref, node, ErrPodGone, err)
	case refused(err):
		return fmt.Errorf("bind pod %s to %s: %w", ref, node, err)
	}
	// The answer was lost on the way, or says that the pod is bound, which a
	// repeated request whose first answer was lost hears as well.
	return b.confirm(ctx, ref, node, err)
}

// refused reports whether the error says for certain that nothing was written.
// A conflict does not: client-go and proxies repeat requests.
func refused(err error) bool {
	return apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsForbidden(err) ||
		apierrors.IsUnauthorized(err) || apierrors.IsTooManyRequests(err) || apierrors.IsMethodNotSupported(err)
}

// Refused reports whether an error says that one pod cannot be written as it is, or by this
// account; other errors concern all pods.
func Refused(err error) bool {
	return errors.Is(err, ErrPodGone) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsForbidden(err)
}

// confirm asks what became of the pod after cause. It has its own time, since
// that of ctx may be what ran out.
func (b *Binder) confirm(ctx context.Context, ref accel.PodRef, node string, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), confirmTimeout)
	defer cancel()
	pod, err := b.Get(ctx, ref.Namespace, ref.Name)
	switch {
	case errors.Is(err, ErrPodGone), err == nil && pod.Ref.UID != ref.UID:
		return fmt.Errorf("bind pod %s to %s: %w: %w", ref, node, ErrPodGone, cause)
	case err != nil:
		return fmt.Errorf("bind pod %s to %s: %w: %w; then %w", ref, node, ErrOutcomeUnknown, cause, err)
	case pod.Node == node:
		return nil
	case pod.Node != "":
		return fmt.Errorf("bind pod %s to %s: it is bound to %s: %w", ref, node, pod.Node, cause)
	}
	return fmt.Errorf("bind pod %s to %s: %w", ref, node, cause)
}

// podOf takes from the object what a Pod holds, its CPU and memory only with
// capacity.
func podOf(pod *v1.Pod, resources []accel.Resource, capacity bool) Pod {
	requests, mistake := kube.RequestsOf(pod, resources)
	if capacity {
		kube.AddPeak(pod, requests)
	}
	p := Pod{
		Ref:      accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name},
		Created:  pod.CreationTimestamp.Time,
		Node:     pod.Spec.NodeName,
		Requests: requests,
		Mistake:  mistake,
		Ended:    pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed,
		Ending:   pod.DeletionTimestamp != nil,
		Static:   metav1.HasAnnotation(pod.ObjectMeta, v1.MirrorPodAnnotationKey),

		Nominated: pod.Status.NominatedNodeName,
	}
	if len(requests) > 0 {
		p.hinders(pod)
	}
	return p
}

// Wake changes an annotation of a pod that waits for a node, which makes
// kube-scheduler look at it again. It writes through the status, so that nobody has
// to be allowed to change pods for it. It only ever touches the pod with the UID of
// ref; ErrPodGone says that there is none.
func (b *Binder) Wake(ctx context.Context, ref accel.PodRef) error {
	// The uid makes the patch fail on another pod of the same name.
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": ref.UID, "annotations": map[string]string{wire.RetryAnnotation: time.Now().UTC().Format(time.RFC3339Nano)},
	}})
	if err != nil {
		return fmt.Errorf("request another scheduling attempt for pod %s: %w", ref, err)
	}
	_, err = b.client.CoreV1().Pods(ref.Namespace).Patch(ctx, ref.Name, types.MergePatchType, patch,
		metav1.PatchOptions{FieldManager: "divvy-extender"}, "status")
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return fmt.Errorf("request another scheduling attempt for pod %s: %w: %w", ref, ErrPodGone, err)
	case err != nil:
		return fmt.Errorf("request another scheduling attempt for pod %s: %w", ref, err)
	}
	return nil
}

// Say writes the condition Waits of a pod, or removes it where the reason is "". It only ever
// touches the pod with the UID of ref; ErrPodGone says that there is none.
func (b *Binder) Say(ctx context.Context, ref accel.PodRef, reason, message string) error {
	condition := map[string]any{"type": Waits, "$patch": "delete"}
	if reason != "" {
		condition = map[string]any{"type": Waits, "status": v1.ConditionTrue, "reason": reason, "message": message,
			"lastTransitionTime": metav1.NewTime(time.Now())}
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": ref.UID}, "status": map[string]any{"conditions": []any{condition}},
	})
	if err != nil {
		return fmt.Errorf("write why pod %s waits: %w", ref, err)
	}
	_, err = b.client.CoreV1().Pods(ref.Namespace).Patch(ctx, ref.Name, types.StrategicMergePatchType, patch,
		metav1.PatchOptions{FieldManager: "divvy-extender"}, "status")
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return fmt.Errorf("write why pod %s waits: %w: %w", ref, ErrPodGone, err)
	case err != nil:
		return fmt.Errorf("write why pod %s waits: %w", ref, err)
	}
	return nil
}
