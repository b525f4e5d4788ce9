package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/events"
)

const (
	// writeTimeout bounds one write. An admission webhook of the cluster may take
	// 30 seconds.
	writeTimeout = 35 * time.Second
	// A write that was rejected is tried again after rejectedPause, then after
	// twice as long, up to rejectedPauseMax: the reason may be gone.
	rejectedPause    = 4 * time.Second
	rejectedPauseMax = time.Minute
)

// podWriter writes annotations into pods of this node. What the API server rejects
// is the matter of that pod alone: it is reported on the pod, once, and tried again
// less and less often. Only one goroutine uses it.
type podWriter struct {
	client  kubernetes.Interface
	metrics *metrics
	// event tells the users of a pod.
	event func(pod *corev1.Pod, kind events.Kind, message string)
	// rejected has the pods, by UID, of which the last write was rejected.
	rejected *flowcontrol.Backoff
}

func newPodWriter(client kubernetes.Interface, m *metrics, event func(*corev1.Pod, events.Kind, string)) *podWriter {
	return &podWriter{client: client, metrics: m, event: event, rejected: flowcontrol.NewBackOff(rejectedPause, rejectedPauseMax)}
}

// write sets annotations of a pod and reports whether they are written. An error
// means that nothing is known of the pod's own: it is to be tried again.
func (w *podWriter) write(ctx context.Context, pod *corev1.Pod, annotations map[string]string) (bool, error) {
	uid := string(pod.UID)
	w.rejected.GC() // pods that are gone
	if w.rejected.IsInBackOffSinceUpdate(uid, w.rejected.Clock.Now()) {
		return false, nil
	}
	// The uid makes the patch fail on another pod of the same name.
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID, "annotations": annotations}})
	if err != nil {
		return false, fmt.Errorf("encode the annotations of pod %s: %w", klog.KObj(pod), err)
	}
	bounded, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	_, err = w.client.CoreV1().Pods(pod.Namespace).Patch(bounded, pod.Name, types.MergePatchType, patch,
		metav1.PatchOptions{FieldManager: "divvy-node"})
	switch {
	case err == nil:
		w.rejected.DeleteEntry(uid)
		return true, nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return false, nil // gone, or another of the same name: the watch shows it
	case ctx.Err() != nil:
		return false, ctx.Err()
	}
	w.metrics.patchErrors.Inc()
	if !rejection(err) && bounded.Err() == nil {
		return false, fmt.Errorf("write what pod %s holds: %w", klog.KObj(pod), err)
	}
	first := w.rejected.Get(uid) == 0
	w.rejected.Next(uid, w.rejected.Clock.Now())
	if first {
		w.event(pod, events.GrantNotWritten, fmt.Sprintf("the allocation of the pod cannot be written into its annotations: %v", err))
		klog.FromContext(ctx).Error(err, "What a pod holds cannot be written into its annotations; trying again less often",
			"pod", klog.KObj(pod))
	}
	return false, nil
}

// rejection reports whether the API server, or an admission policy or webhook that
// it asked, rejected a request as such. It could not be reached or was busy
// otherwise.
func rejection(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && !apierrors.IsTooManyRequests(err) && !apierrors.IsServerTimeout(err) &&
		!apierrors.IsTimeout(err) && !apierrors.IsServiceUnavailable(err) && !apierrors.IsUnauthorized(err)
}
