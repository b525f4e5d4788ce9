// Package decisiontest has what tests of package decision and of its callers share: pods,
// devices, and a cluster that is known, and true, as a test says.
package decisiontest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// Memory is the resource of the tests.
const Memory accel.Resource = "enflame.com/gcu-memory"

// NewKeys returns a keyring with a key.
func NewKeys(tb testing.TB) *kube.Keyring {
	tb.Helper()
	file := filepath.Join(tb.TempDir(), "key")
	if err := os.WriteFile(file, bytes.Repeat([]byte("k"), 32), 0o600); err != nil {
		tb.Fatal(err)
	}
	return kube.NewKeyring(file)
}

// Cards are devices of these sizes, whose IDs begin with the prefix.
func Cards(res accel.Resource, prefix string, units ...accel.Units) accel.Inventory {
	inv := accel.Inventory{Resource: res, Unit: "1"}
	for i, u := range units {
		inv.Shares = append(inv.Shares, accel.Share{Units: u, Device: accel.Device{
			Index: i, ID: accel.DeviceID(fmt.Sprintf("%s%d", prefix, i)), Model: "S60", NUMANode: accel.NoNUMA,
		}})
	}
	return inv
}

// PodOf is what the cluster state shows of a pod.
func PodOf(pod *v1.Pod, resources ...accel.Resource) cluster.Pod {
	if len(resources) == 0 {
		resources = []accel.Resource{Memory}
	}
	requests, mistake := kube.RequestsOf(pod, resources)
	return cluster.Pod{
		Ref:     accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name},
		Created: pod.CreationTimestamp.Time, Node: pod.Spec.NodeName,
		Requests: requests, Mistake: mistake,
	}
}

// NewPod asks for amounts of gcu-memory, one container each.
func NewPod(name string, amounts ...int64) *v1.Pod {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "team", Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.Unix(1662450043, 0),
	}}
	for i, amount := range amounts {
		pod.Spec.Containers = append(pod.Spec.Containers, NewContainer(fmt.Sprintf("c%d", i), Memory, amount))
	}
	if len(amounts) == 0 {
		pod.Spec.Containers = []v1.Container{{Name: "main"}}
	}
	return pod
}

// NewContainer asks for an amount.
func NewContainer(name string, res accel.Resource, amount int64) v1.Container {
	list := v1.ResourceList{v1.ResourceName(res): *resource.NewQuantity(amount, resource.DecimalSI)}
	return v1.Container{Name: name, Resources: v1.ResourceRequirements{Limits: list, Requests: list}}
}

// NewCluster returns one without pods.
func NewCluster() *Cluster {
	return &Cluster{Known: map[string]cluster.Pod{}, Actual: map[string]cluster.Pod{}, Problems: map[string]string{}}
}

// Cluster is the recorded state of a cluster and the actual one, which may differ.
type Cluster struct {
	Mu       sync.Mutex             // guards what follows
	Known    map[string]cluster.Pod // by namespace/name: what the watch has shown
	Actual   map[string]cluster.Pod // what the API server has
	Problems map[string]string
	Single   map[string]bool // nodes that can give a pod one device only
	// BindError, when set, decides what a bind answers; it may change Actual.
	BindError func(ctx context.Context, ref accel.PodRef, node string) error
	GetError  error
	// Annotations of the binds that were written, by pod.
	Annotations map[string]map[string]string
	Gets        int
}

// Pod implements decision.Cluster.
func (c *Cluster) Pod(namespace, name string) (cluster.Pod, bool) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	p, ok := c.Known[namespace+"/"+name]
	return p, ok
}

// Problem implements decision.Cluster.
func (c *Cluster) Problem(node string) string { return c.Problems[node] }

// Offering implements decision.Cluster.
func (c *Cluster) Offering() []string { return []string{"node-a", "node-b"} }

// Several implements decision.Cluster.
func (c *Cluster) Several(node string, _ accel.Resource) bool { return !c.Single[node] }

// Get implements decision.Binder.
func (c *Cluster) Get(_ context.Context, namespace, name string) (cluster.Pod, error) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.Gets++
	if c.GetError != nil {
		return cluster.Pod{}, c.GetError
	}
	p, ok := c.Actual[namespace+"/"+name]
	if !ok {
		return cluster.Pod{}, fmt.Errorf("pod %s/%s: %w", namespace, name, cluster.ErrPodGone)
	}
	return p, nil
}

// Bind implements decision.Binder.
func (c *Cluster) Bind(ctx context.Context, ref accel.PodRef, node string, annotations map[string]string) error {
	if c.BindError != nil {
		if err := c.BindError(ctx, ref, node); err != nil {
			return err
		}
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	p, ok := c.Actual[ref.String()]
	if !ok || p.Ref.UID != ref.UID {
		return cluster.ErrPodGone
	}
	p.Node = node
	c.Actual[ref.String()] = p
	if c.Annotations == nil {
		c.Annotations = map[string]map[string]string{}
	}
	c.Annotations[ref.String()] = annotations
	return nil
}

// Add makes the pod exist, and seen.
func (c *Cluster) Add(pod *v1.Pod, resources ...accel.Resource) {
	p := PodOf(pod, resources...)
	c.Mu.Lock()
	defer c.Mu.Unlock()
	c.Known[p.Ref.String()], c.Actual[p.Ref.String()] = p, p
}
