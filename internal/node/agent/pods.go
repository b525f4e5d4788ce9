package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// nodePods are the pods bound to this node. It is safe for concurrent use.
type nodePods struct {
	client   kubernetes.Interface
	selector string
	objects  *objects
}

// newNodePods makes the copy of a node's pods, which Run keeps; changed is
// called after each change.
func newNodePods(client kubernetes.Interface, node string, changed func()) *nodePods {
	return &nodePods{
		client:   client,
		selector: fields.OneTermEqualSelector("spec.nodeName", node).String(),
		objects:  newObjects(strip, changed),
	}
}

// Run follows the API server until ctx ends.
func (p *nodePods) Run(ctx context.Context) {
	pods := p.client.CoreV1().Pods(metav1.NamespaceAll)
	kube.NewReflector("pods of the node", &corev1.Pod{}, p.objects, kube.ListWatch(p.client, p.selector, pods.List,
		pods.Watch)).RunWithContext(ctx)
}

// strip drops what nobody here reads; a node's pods may carry megabytes of it.
func strip(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	pod.ManagedFields = nil
	maps.DeleteFunc(pod.Annotations, func(key, _ string) bool {
		return key != wire.GrantAnnotation && key != wire.HeldAnnotation && !wire.IsLegacyAnnotation(key) &&
			!slices.Contains(wire.AskAnnotations(), key) && key != mirrorAnnotation && key != hashAnnotation
	})
	pod.Spec.Volumes = hostPaths(pod.Spec.Volumes)
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			c := &containers[i]
			c.Env, c.EnvFrom, c.VolumeMounts, c.Command, c.Args = nil, nil, nil, nil, nil
		}
	}
	return pod, nil
}

// Cached returns what the watch has delivered. The pods must not be changed.
func (p *nodePods) Cached() []*corev1.Pod {
	objects := p.objects.List()
	pods := make([]*corev1.Pod, 0, len(objects))
	for _, o := range objects {
		if pod, ok := o.(*corev1.Pod); ok {
			pods = append(pods, pod)
		}
	}
	return pods
}

// Synced reports whether the watch has delivered all pods once.
func (p *nodePods) Synced() bool { return p.objects.synced.Load() }

// Fresh asks the API server.
func (p *nodePods) Fresh(ctx context.Context) ([]*corev1.Pod, error) {
	list, err := p.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: p.selector})
	if err != nil {
		return nil, fmt.Errorf("list the node's pods: %w", err)
	}
	pods := make([]*corev1.Pod, len(list.Items))
	for i := range list.Items {
		pods[i] = &list.Items[i]
	}
	return pods, nil
}

// started reports whether kubelet must have admitted the pod already, or never
// will.
func started(pod *corev1.Pod) bool {
	if pod.Status.Phase != corev1.PodPending && pod.Status.Phase != "" {
		return true
	}
	for _, statuses := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range statuses {
			if statuses[i].ContainerID != "" || statuses[i].State.Running != nil || statuses[i].State.Terminated != nil {
				return true
			}
		}
	}
	return false
}

// terminal reports whether the pod's containers have ended for good.
func terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// keyOf is how kubelet names a pod in its list.
func keyOf(pod *corev1.Pod) alloc.PodKey {
	return alloc.PodKey{Namespace: pod.Namespace, Name: pod.Name}
}
