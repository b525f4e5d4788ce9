package collect

import (
	"context"
	"errors"
	"fmt"
	"math"

	v1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
)

// poolResource is what pods are given of a remote pool. Nobody publishes it but
// kubelet, so all about it is read from the API server's own objects.
const poolResource accel.Resource = pool.Resource

// unfinished selects the pods that have not ended.
const unfinished = "status.phase!=" + string(v1.PodSucceeded) + ",status.phase!=" + string(v1.PodFailed)

// errNoPool says that nothing of a pool is in the cluster.
var errNoPool = fmt.Errorf("no node offers %s, no pod requests it and no quota limits it", poolResource)

// pool reads what nodes offer of the remote pool, what pods request and what
// quotas allow; of the one node alone when one was asked for, and then without
// quotas. It returns errNoPool when there is nothing.
func (q *question) pool(ctx context.Context) (*inspect.Pool, error) {
	books := inspect.NewPoolBooks(poolResource, pool.UnitsPerGPU)
	core := q.clients.Kubernetes.CoreV1()
	ofNode, onNode := "", ""
	if q.node != "" {
		ofNode, onNode = "metadata.name="+q.node, ",spec.nodeName="+q.node
	}
	err := kube.EachItem(ctx, "nodes", metav1.ListOptions{FieldSelector: ofNode}, core.Nodes().List, func(obj runtime.Object) {
		if node, ok := obj.(*v1.Node); ok {
			if units := amount(node.Status.Allocatable, pool.Resource); units > 0 {
				books.Node(node.Name, units)
			}
		}
	})
	if err != nil {
		return nil, err
	}
	var quotaErr error
	if q.node == "" {
		const key = v1.DefaultResourceRequestsPrefix + pool.Resource
		quotas := core.ResourceQuotas(metav1.NamespaceAll).List
		quotaErr = kube.EachItem(ctx, "resource quotas", metav1.ListOptions{}, quotas, func(obj runtime.Object) {
			quota, ok := obj.(*v1.ResourceQuota)
			if !ok {
				return
			}
			if _, limits := quota.Spec.Hard[key]; limits {
				books.Quota(quota.Namespace, inspect.PoolQuota{
					Name: quota.Name, Hard: amount(quota.Spec.Hard, key), Used: amount(quota.Status.Used, key),
					Scoped: len(quota.Spec.Scopes) > 0 || quota.Spec.ScopeSelector != nil,
				})
			}
		})
	}
	// Where nothing hints at a pool, the pods that the webhook has converted are
	// looked for alone: a large cluster has many others.
	options := metav1.ListOptions{FieldSelector: unfinished + onNode}
	if books.Empty() {
		options.LabelSelector = pool.ConvertedLabel + "=true"
	}
	err = kube.EachItem(ctx, "pods", options, core.Pods(metav1.NamespaceAll).List, func(obj runtime.Object) {
		if pod, ok := obj.(*v1.Pod); ok {
			if units := kube.RequestOf(pod, poolResource).Peak(); units > 0 {
				books.Pod(pod.Namespace, pod.Spec.NodeName, units)
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if books.Empty() {
		return nil, errors.Join(errNoPool, quotaErr)
	}
	if quotaErr != nil {
		fmt.Fprintf(q.errOut, "Quotas of %s are not shown: %v.\n", poolResource, quotaErr)
	}
	return books.Pool(), nil
}

// poolIfAny is pool for a report on more than the pool: what cannot be read is
// said, and left out.
func (q *question) poolIfAny(ctx context.Context) *inspect.Pool {
	p, err := q.pool(ctx)
	if err != nil && !errors.Is(err, errNoPool) {
		fmt.Fprintf(q.errOut, "Requests of %s are not shown: %v.\n", poolResource, err)
	}
	return p
}

// amount is one entry of a list of resources; 0 when it has none.
func amount(list v1.ResourceList, name v1.ResourceName) accel.Units {
	quantity, ok := list[name]
	if !ok || quantity.Sign() <= 0 {
		return 0
	}
	return bounded(quantity)
}

// bounded is the quantity, rounded up, and at most accel.MaxUnits, so that sums
// stay far from overflow.
func bounded(quantity apiresource.Quantity) accel.Units {
	if n, ok := quantity.AsInt64(); ok {
		return min(accel.Units(n), accel.MaxUnits)
	}
	// Exact methods build numbers of as many digits as an exponent says.
	return accel.Units(min(math.Ceil(quantity.AsApproximateFloat64()), float64(accel.MaxUnits)))
}
