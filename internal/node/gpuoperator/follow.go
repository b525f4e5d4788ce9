package gpuoperator

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Follow sets the pause as the labels of the node say, until ctx ends. Without the API
// server the labels that it reported last hold.
func Follow(ctx context.Context, client kubernetes.Interface, node string, pause *backend.Pause) {
	kube.FollowNode(ctx, "the operator's labels of the node", client, node, func(n *corev1.Node) {
		why := Pause(n.Labels)
		before, _ := pause.Now()
		switch {
		case !pause.Set(why):
		case why.Unhealthy:
			klog.FromContext(ctx).Info("Leaving NVIDIA's driver alone", "because", why.Reason, "cause", why.Cause)
		case before.Cause != CauseLabelsUnknown:
			klog.FromContext(ctx).Info("Using NVIDIA's driver again; the operator is done", "was", before.Cause)
		}
	})
}
