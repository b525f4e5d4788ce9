package schedconf

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// kubeconfigs are what kubeadm leaves on a control-plane node, the one that may
// do more first.
var kubeconfigs = []string{"/etc/kubernetes/admin.conf", "/etc/kubernetes/scheduler.conf"}

// connect returns clients of the API server.
func connect(kubeconfig string) (kube.Clients, error) {
	if kubeconfig == "" {
		if _, err := rest.InClusterConfig(); errors.Is(err, rest.ErrNotInCluster) {
			for _, file := range kubeconfigs {
				if _, err := os.Stat(file); err == nil {
					kubeconfig = file
					break
				}
			}
			if kubeconfig == "" {
				return kube.Clients{}, fmt.Errorf("not running in a pod, and %s does not exist; set --kubeconfig",
					strings.Join(kubeconfigs, " or "))
			}
		}
	}
	return kube.Connect(kubeconfig, "divvy-schedconf/"+version.Version)
}

// maxEvent is how long the message of an event may be; the API server takes 1024
// bytes.
const maxEvent = 1000

// tell puts an event on the node, and returns when the API server has it. Each is
// about one change, so there is nothing to count up or to bound.
func tell(ctx context.Context, client kubernetes.Interface, node string, k events.Kind, message string) {
	if len(message) > maxEvent {
		message = strings.ToValidUTF8(message[:maxEvent], "") + "..."
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	on := events.OnNode(node)
	// As kubelet's own events have it: kubectl describe node looks for it.
	on.UID = types.UID(node)
	now := metav1.Now()
	_, err := client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{GenerateName: node + ".", Namespace: metav1.NamespaceDefault},
		InvolvedObject: *on, Type: k.Type, Reason: k.Reason, Message: message,
		Count: 1, FirstTimestamp: now, LastTimestamp: now, Source: corev1.EventSource{Component: k.By, Host: node},
	}, metav1.CreateOptions{})
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not write an event on the node", "reason", k.Reason)
	}
}
