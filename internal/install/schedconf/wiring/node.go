package wiring

import (
	"context"
	"path/filepath"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// Node is the control-plane node whose kube-scheduler is configured.
type Node struct {
	// Name is that of the node's object.
	Name string
	// Manifest, Dir, HostPaths and KubeVersion are those of host.Config.
	Manifest, Dir string
	HostPaths     []string
	KubeVersion   string
	// Timeout and Settle are those of host.MirrorConfig, PodLogDir its LogDir.
	Timeout, Settle time.Duration
	PodLogDir       string
	Client          kubernetes.Interface
}

// open returns the host, which does not wait for other nodes where the turn is nil.
func (n Node) open(turn host.Turn) (*host.Host, error) {
	return host.New(host.Config{
		Manifest: n.Manifest, Dir: n.Dir, Version: n.KubeVersion, Visible: n.HostPaths,
		Turn: turn,
		Scheduler: host.NewMirror(host.MirrorConfig{
			Client: n.Client, Node: n.Name, Timeout: n.Timeout, Settle: n.Settle, LogDir: n.PodLogDir,
		}),
	})
}

func (n Node) folders() []string {
	return append([]string{n.Dir, filepath.Dir(n.Manifest)}, n.HostPaths...)
}

// tell puts an event on the node, and returns when the API server has it. Each is
// about one change, so there is nothing to count up or to bound.
func (n Node) tell(ctx context.Context, k events.Kind, message string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	on := events.OnNode(n.Name)
	// As kubelet's own events have it: kubectl describe node looks for it.
	on.UID = types.UID(n.Name)
	e := events.New(*on, k, message)
	e.Namespace, e.GenerateName, e.Source.Host = metav1.NamespaceDefault, n.Name+".", n.Name
	_, err := n.Client.CoreV1().Events(metav1.NamespaceDefault).Create(ctx, e, metav1.CreateOptions{})
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not write an event on the node", "reason", k.Reason)
	}
}
