package plugin

import (
	"context"
	"iter"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/claims"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// learning is a policy that learns what pods usually ask for, such as fragmentation.
type learning interface {
	place.Policy
	// Follow adds resources and the nodes that have units of them. It is called once, by New.
	Follow(resources []accel.Resource, nodes func(accel.Resource) iter.Seq2[string, *place.Node])
	Learn(request accel.Request)
}

// LearnPlaced lets the policy learn from the claims of the pods that are placed already, the oldest first. It is
// for a scheduler that has followed the cluster and begins to place pods; from then on each pod counts when it is bound.
func (c *Core) LearnPlaced(ctx context.Context) {
	manager, pods := c.manager.Load(), c.config.Activator.lister()
	if c.learning == nil || manager == nil || pods == nil {
		return
	}
	all, err := pods.List(labels.Everything())
	if err == nil {
		err = c.learnFrom(ctx, *manager, all)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Could not learn from the claims of placed pods")
	}
}

func (c *Core) learnFrom(ctx context.Context, manager fwk.SharedDRAManager, pods []*v1.Pod) error {
	published, err := manager.ResourceSlices().ListWithDeviceTaintRules()
	if err != nil {
		return err //nolint:wrapcheck // the caller says what it is for
	}
	pods = slices.DeleteFunc(slices.Clone(pods), func(p *v1.Pod) bool {
		return p.Spec.NodeName == "" || len(p.Spec.ResourceClaims) == 0 || cluster.ComesWithNode(p)
	})
	slices.SortStableFunc(pods, func(a, b *v1.Pod) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	counted := map[types.UID]bool{} // pods may share a claim
	for _, pod := range pods {
		asked, err := claimsOf(manager, pod)
		if err != nil || slices.ContainsFunc(asked, func(a *resourceapi.ResourceClaim) bool { return counted[a.UID] }) {
			continue // a claim is gone, or counts already
		}
		for i, claim := range asked {
			counted[claim.UID] = true
			asked[i] = &resourceapi.ResourceClaim{Spec: claim.Spec} // as before it was allocated
		}
		demand, err := claims.DemandOf(asked, manager.DeviceClasses().Get)
		if err != nil {
			continue // its class is gone
		}
		demand.CPU, demand.Memory = kube.PeakOf(pod)
		units, err := c.unitsOf(ctx, published, demand)
		if err != nil {
			continue // a selector fails, and no pod is rated by it
		}
		if units != nil {
			c.learning.Learn(*units)
		}
	}
	return nil
}

// unitsOf is what claims ask for as units, nil where it cannot be expressed so.
func (c *Core) unitsOf(ctx context.Context, published []*resourceapi.ResourceSlice, d claims.Demand) (*accel.Request, error) {
	request, ok, err := c.catalog.Request(ctx, published, d)
	if !ok || err != nil {
		return nil, err
	}
	return &request, nil
}
