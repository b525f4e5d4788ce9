package nodeconfig

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Labels are the labels of a node that name its configuration, the first that
// is set decides. The second is that of NVIDIA's device plugin.
var Labels = []string{"divvy.dev/config", "nvidia.com/device-plugin.config"}

// patience is how long the API server may take before the log says what is
// waited for.
const patience = 5 * time.Second

// nodeLabel follows the label that names the configuration of a node, and which container runtime
// the node reports. Without the API server the last value that it gave holds. It is safe for concurrent use.
type nodeLabel struct {
	client kubernetes.Interface
	node   string
	// changed has an element when the value may have changed.
	changed chan struct{}
	// known is closed once the API server has answered.
	known chan struct{}
	once  sync.Once

	mu          sync.Mutex // guards what follows
	label, name string
	runtime     string
}

func newNodeLabel(client kubernetes.Interface, node string) *nodeLabel {
	return &nodeLabel{client: client, node: node, changed: make(chan struct{}, 1), known: make(chan struct{})}
}

// Run follows the API server until ctx ends.
func (l *nodeLabel) Run(ctx context.Context) {
	kube.FollowNode(ctx, "the label of the node", l.client, l.node, l.see)
}

// await returns once the API server has said what the label is. Which devices a
// node offers, and how, is not to be guessed, so there is no limit.
func (l *nodeLabel) await(ctx context.Context) error {
	slow := time.NewTimer(patience)
	defer slow.Stop()
	for {
		select {
		case <-l.known:
			return nil
		case <-slow.C:
			klog.FromContext(ctx).Info("Waiting for the API server to report the label that selects the configuration", "node", l.node,
				"labels", Labels)
		case <-ctx.Done():
			return fmt.Errorf("get labels of node %s: %w", l.node, ctx.Err())
		}
	}
}

// chosen returns the label that decides and its value, both "" for none.
func (l *nodeLabel) chosen() (label, name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.label, l.name
}

// containerRuntime returns the name and version of the container runtime as kubelet reports them,
// such as "containerd://2.1.4"; "" where that is not known.
func (l *nodeLabel) containerRuntime() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.runtime
}

// see takes in what the node reports.
func (l *nodeLabel) see(n *corev1.Node) {
	label, name := "", ""
	for _, key := range Labels {
		if value := n.Labels[key]; value != "" {
			label, name = key, value
			break
		}
	}
	runtime := n.Status.NodeInfo.ContainerRuntimeVersion
	l.mu.Lock()
	same := l.label == label && l.name == name && l.runtime == runtime
	l.label, l.name, l.runtime = label, name, runtime
	l.mu.Unlock()
	l.once.Do(func() { close(l.known) })
	if same {
		return
	}
	select {
	case l.changed <- struct{}{}:
	default:
	}
}
