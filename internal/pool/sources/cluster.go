// Package sources follows what the webhooks of the remote pool decide from: the nodes and quotas
// of the cluster, and the file of the catalog.
package sources

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// poolQuota is the key of a ResourceQuota that limits the pool: Kubernetes knows
// quotas on extended resources by their requests alone.
const poolQuota corev1.ResourceName = "requests." + pool.Resource

// amounts are quantities in the integer units of their resources.
type amounts = map[corev1.ResourceName]int64

// Cluster is what reviews ask about nodes and quotas, from memory: of a node what
// pods may take, of a quota its limit on the pool. Its methods may be called by
// many goroutines.
type Cluster struct {
	nodes  *table[amounts]
	quotas *table[int64]
	// allowed is the rule about credentials.
	allowed func(namespace string, secrets []string) error

	mu      sync.Mutex // guards what follows
	version uint64     // of nodes, when largest was made
	largest amounts
}

// NewCluster returns a cluster of which nothing is known yet. allowed is the rule about
// credentials, see secrets.Keeper.
func NewCluster(allowed func(namespace string, secrets []string) error) *Cluster {
	return &Cluster{
		nodes:   newTable(nodeAmounts, maps.Equal[amounts, amounts]),
		quotas:  newTable(quotaLimit, func(a, b int64) bool { return a == b }),
		allowed: allowed,
	}
}

// nodeAmounts returns what pods may take of a node, or false when new pods do not
// get there.
func nodeAmounts(node *corev1.Node) (amounts, bool) {
	ready := false
	for _, c := range node.Status.Conditions {
		ready = ready || c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}
	if !ready || node.Spec.Unschedulable {
		return nil, false
	}
	out := amounts{}
	for name, quantity := range node.Status.Allocatable {
		value := quantity.Value()
		if name == corev1.ResourceCPU {
			value = quantity.MilliValue()
		}
		// Kubelet keeps the names of resources that have gone, with zero.
		if value > 0 {
			out[name] = value
		}
	}
	return out, true
}

// quotaLimit returns the limit of a quota on the pool, or false when it has none
// that every pod counts against.
func quotaLimit(quota *corev1.ResourceQuota) (int64, bool) {
	limit, ok := quota.Spec.Hard[poolQuota]
	if !ok || len(quota.Spec.Scopes) > 0 || quota.Spec.ScopeSelector != nil {
		return 0, false
	}
	return limit.Value(), true
}

// LargestAllocatable implements admission.Cluster.
func (c *Cluster) LargestAllocatable() map[corev1.ResourceName]int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if version := c.nodes.version.Load(); version != c.version {
		c.version, c.largest = version, nil
		for _, node := range c.nodes.kept(c.nodes.List()) {
			if c.largest == nil {
				c.largest = amounts{}
			}
			for name, value := range node {
				c.largest[name] = max(c.largest[name], value)
			}
		}
	}
	return maps.Clone(c.largest)
}

// QuotaLimits implements admission.Cluster.
func (c *Cluster) QuotaLimits(namespace string) map[string]int64 {
	inNamespace, err := c.quotas.ByIndex(cache.NamespaceIndex, namespace)
	if err != nil || len(inNamespace) == 0 {
		return nil
	}
	return maps.Collect(c.quotas.kept(inNamespace))
}

// CredentialsAllowed implements admission.Cluster.
func (c *Cluster) CredentialsAllowed(namespace string, secrets []string) error {
	return c.allowed(namespace, secrets)
}

// Ready returns nil once nodes and quotas were read.
func (c *Cluster) Ready() error {
	if !c.nodes.listed.Load() || !c.quotas.listed.Load() {
		return errors.New("nodes and quotas are still being read from the API server")
	}
	return nil
}

// Run follows the API server until ctx ends.
func (c *Cluster) Run(ctx context.Context, client kubernetes.Interface) {
	nodes, quotas := client.CoreV1().Nodes(), client.CoreV1().ResourceQuotas(metav1.NamespaceAll)
	var group wait.Group
	group.StartWithContext(ctx, kube.NewReflector("nodes", &corev1.Node{}, c.nodes, kube.ListWatch(client, "", nodes.List,
		nodes.Watch)).RunWithContext)
	group.StartWithContext(ctx, kube.NewReflector("resourcequotas", &corev1.ResourceQuota{}, c.quotas,
		kube.ListWatch(client, "", quotas.List, quotas.Watch)).RunWithContext)
	group.Wait()
}

// row is what is kept of an object.
type row[V any] struct {
	metav1.ObjectMeta
	value V
	// keep is false for objects that count for nothing.
	keep bool
}

// table is a store of rows, into which a reflector writes.
type table[V any] struct {
	cache.Indexer // of *row[V]
	trim          func(obj any) (*row[V], error)
	same          func(a, b V) bool
	version       atomic.Uint64 // grows with every change
	listed        atomic.Bool   // the first list was taken in
}

// newTable returns an empty table of what trim makes of objects of one type.
func newTable[T metav1.Object, V any](trim func(T) (V, bool), same func(a, b V) bool) *table[V] {
	return &table[V]{
		Indexer: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}),
		same:    same,
		trim: func(obj any) (*row[V], error) {
			if r, ok := obj.(*row[V]); ok {
				return r, nil
			}
			o, ok := obj.(T)
			if !ok {
				return nil, fmt.Errorf("a watch delivered a %T", obj)
			}
			r := &row[V]{ObjectMeta: metav1.ObjectMeta{Namespace: o.GetNamespace(), Name: o.GetName()}}
			r.value, r.keep = trim(o)
			return r, nil
		},
	}
}

// Transformer reduces the objects of a list that is streamed.
func (t *table[V]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return t.trim(obj) }
}

// Add takes in a new object.
func (t *table[V]) Add(obj any) error { return t.Update(obj) }

// Update takes in a changed object.
func (t *table[V]) Update(obj any) error {
	r, err := t.trim(obj)
	if err != nil {
		return err
	}
	known, _, err := t.Get(r)
	if old, ok := known.(*row[V]); ok && old.keep == r.keep && t.same(old.value, r.value) {
		return err // most updates of nodes are heartbeats
	}
	defer t.version.Add(1)
	return t.Indexer.Update(r)
}

// Delete takes out an object that is gone.
func (t *table[V]) Delete(obj any) error {
	defer t.version.Add(1)
	return t.Indexer.Delete(obj)
}

// Replace takes in a whole list; whatever is not in it is gone.
func (t *table[V]) Replace(list []any, resourceVersion string) error {
	rows := make([]any, len(list))
	for i, obj := range list {
		r, err := t.trim(obj)
		if err != nil {
			return err
		}
		rows[i] = r
	}
	defer t.listed.Store(true)
	defer t.version.Add(1)
	return t.Indexer.Replace(rows, resourceVersion)
}

// kept yields the rows among objects of the table that count.
func (t *table[V]) kept(objects []any) iter.Seq2[string, V] {
	return func(yield func(name string, value V) bool) {
		for _, obj := range objects {
			if r, ok := obj.(*row[V]); ok && r.keep && !yield(r.Name, r.value) {
				return
			}
		}
	}
}
