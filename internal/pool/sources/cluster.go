// Package sources follows what the webhooks of the remote pool decide from: the nodes and quotas
// of the cluster, and the file of the catalog.
package sources

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
		nodes:   newTable("nodes", nodeAmounts, maps.Equal[amounts, amounts]),
		quotas:  newTable("resourcequotas", quotaLimit, func(a, b int64) bool { return a == b }),
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
	version := c.nodes.now()
	if version != c.version {
		var largest amounts
		c.nodes.each(func(_ string, node amounts) {
			if largest == nil {
				largest = amounts{}
			}
			for name, value := range node {
				largest[name] = max(largest[name], value)
			}
		})
		c.version, c.largest = version, largest
	}
	return maps.Clone(c.largest)
}

// QuotaLimits implements admission.Cluster.
func (c *Cluster) QuotaLimits(namespace string) map[string]int64 {
	return c.quotas.in(namespace)
}

// CredentialsAllowed implements admission.Cluster.
func (c *Cluster) CredentialsAllowed(namespace string, secrets []string) error {
	return c.allowed(namespace, secrets)
}

// Ready returns nil once nodes and quotas were read.
func (c *Cluster) Ready() error {
	if !c.nodes.synced() || !c.quotas.synced() {
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

// table is a store of objects of which little is kept. A reflector writes into
// it; everybody else reads.
type table[V any] struct {
	name string
	trim func(runtime.Object) (V, bool, error)
	same func(a, b V) bool

	mu      sync.RWMutex            // guards what follows
	rows    map[string]map[string]V // by namespace and name
	version uint64                  // counts the changes of rows
	listed  bool
}

// row is what is kept of an object, in the form in which a reflector that streams
// its first list holds it until the end.
type row[V any] struct {
	namespace, name string
	value           V
	// keep is false for objects that nothing is kept of.
	keep bool
}

// GetObjectMeta lets the reflector's first store find the name.
func (r *row[V]) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: r.namespace, Name: r.name}
}

// object is an API object of type T.
type object[T any] interface {
	*T
	runtime.Object
	metav1.Object
}

// newTable returns an empty table of what trim makes of objects of one type.
func newTable[T, V any, P object[T]](name string, trim func(P) (V, bool), same func(a, b V) bool) *table[V] {
	return &table[V]{
		name: name, same: same, rows: map[string]map[string]V{}, version: 1,
		trim: func(o runtime.Object) (V, bool, error) {
			typed, ok := o.(P)
			if !ok {
				var none V
				return none, false, fmt.Errorf("the watch of %s delivered a %T", name, o)
			}
			value, keep := trim(typed)
			return value, keep, nil
		},
	}
}

func (t *table[V]) row(obj any) (*row[V], error) {
	switch o := obj.(type) {
	case *row[V]:
		return o, nil
	case interface {
		runtime.Object
		metav1.Object
	}:
		value, keep, err := t.trim(o)
		return &row[V]{namespace: o.GetNamespace(), name: o.GetName(), value: value, keep: keep}, err
	}
	return nil, fmt.Errorf("the watch of %s delivered a %T", t.name, obj)
}

// Transformer reduces objects before they are kept.
func (t *table[V]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return t.row(obj) }
}

// Add takes in a new object.
func (t *table[V]) Add(obj any) error { return t.Update(obj) }

// Update takes in a changed object.
func (t *table[V]) Update(obj any) error {
	r, err := t.row(obj)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	old, known := t.rows[r.namespace][r.name]
	if known == r.keep && (!known || t.same(old, r.value)) {
		return nil // most updates of nodes are heartbeats
	}
	t.version++
	if !r.keep {
		t.remove(r)
		return nil
	}
	put(t.rows, r)
	return nil
}

// Delete takes out an object that is gone.
func (t *table[V]) Delete(obj any) error {
	r, err := t.row(obj)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.version++
	t.remove(r)
	return nil
}

// Replace takes in a whole list; whatever is not in it is gone.
func (t *table[V]) Replace(list []any, _ string) error {
	rows := map[string]map[string]V{}
	for _, obj := range list {
		r, err := t.row(obj)
		if err != nil {
			return err
		}
		if r.keep {
			put(rows, r)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rows, t.listed = rows, true
	t.version++
	return nil
}

// Resync has nothing to do: the table never lags behind what it was told.
func (*table[V]) Resync() error { return nil }

func put[V any](rows map[string]map[string]V, r *row[V]) {
	if rows[r.namespace] == nil {
		rows[r.namespace] = map[string]V{}
	}
	rows[r.namespace][r.name] = r.value
}

// remove takes a row out; t.mu is held.
func (t *table[V]) remove(r *row[V]) {
	delete(t.rows[r.namespace], r.name)
	if len(t.rows[r.namespace]) == 0 {
		delete(t.rows, r.namespace)
	}
}

// now returns the version, which grows with every change.
func (t *table[V]) now() uint64 {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.version
}

// each calls f with every value that is kept.
func (t *table[V]) each(f func(name string, value V)) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	for _, rows := range t.rows {
		for name, value := range rows {
			f(name, value)
		}
	}
}

// in returns what is kept in a namespace, by name.
func (t *table[V]) in(namespace string) map[string]V {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return maps.Clone(t.rows[namespace])
}

// synced reports whether the first list was taken in.
func (t *table[V]) synced() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.listed
}
