package nodeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/accel/wire"
)

// annotator writes wire.HeldAnnotation. Only the agent's loop uses it.
type annotator struct {
	client  kubernetes.Interface
	metrics *metrics
	// unwritable are the pods, by UID, whose annotations the API server would
	// not take.
	unwritable map[types.UID]bool
}

func newAnnotator(client kubernetes.Interface, m *metrics) *annotator {
	return &annotator{client: client, metrics: m, unwritable: map[types.UID]bool{}}
}

// annotate writes into the pods what they hold of the pools.
func (a *annotator) annotate(ctx context.Context, pods []*corev1.Pod, pools []*slotPool) error {
	held := map[podKey]map[string][]string{}
	for _, p := range pools {
		_, listings := p.heldSlots()
		for key, ids := range listings {
			if held[key] == nil {
				held[key] = map[string][]string{}
			}
			ids = slices.Concat(held[key][string(p.resource)], ids)
			slices.Sort(ids)
			held[key][string(p.resource)] = slices.Compact(ids)
		}
	}
	var failed []error
	for _, pod := range pods {
		devices := held[podKey{pod.Namespace, pod.Name}]
		if devices == nil || terminal(pod) || a.unwritable[pod.UID] {
			continue
		}
		want, err := json.Marshal(devices)
		if err != nil {
			return fmt.Errorf("encode what pod %s holds: %w", klog.KObj(pod), err)
		}
		if pod.Annotations[wire.HeldAnnotation] == string(want) {
			continue
		}
		failed = append(failed, a.write(ctx, pod, string(want)))
	}
	return errors.Join(failed...)
}

func (a *annotator) write(ctx context.Context, pod *corev1.Pod, value string) error {
	// The uid makes the patch fail on another pod of the same name.
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": map[string]string{wire.HeldAnnotation: value}}})
	if err != nil {
		return fmt.Errorf("pod %s: %w", klog.KObj(pod), err)
	}
	_, err = a.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: "divvy-node"})
	switch {
	case err == nil, apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // written, gone, or another of the same name
	case apierrors.IsInvalid(err):
		// Its author left no room for annotations.
		a.unwritable[pod.UID] = true
		klog.FromContext(ctx).Error(err, "What a pod holds cannot be written into it", "pod", klog.KObj(pod))
		return nil
	}
	a.metrics.patchErrors.Inc()
	return fmt.Errorf("write what pod %s holds: %w", klog.KObj(pod), err)
}
