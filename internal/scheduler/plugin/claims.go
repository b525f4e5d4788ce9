package plugin

import (
	"context"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/claims"
)

const claimsKey fwk.StateKey = Name + "/claims"

// claimed is what is known in one attempt to place a pod with ResourceClaims, which kube-scheduler's
// DynamicResources allocates. Clones share it.
type claimed struct {
	rated []claims.Rated
	// units are what the claims ask for as units; nil where they cannot be expressed so, or no policy learns.
	units *accel.Request
	// named is true where PreFilter named one node.
	named  bool
	scores map[string]int64
}

// Clone implements fwk.StateData.
func (c *claimed) Clone() fwk.StateData { return c }

// claimedOf returns nil for a pod for whose claims no node was rated.
func claimedOf(from fwk.CycleState) *claimed {
	data, err := from.Read(claimsKey)
	if err != nil {
		return nil
	}
	c, _ := data.(*claimed)
	return c
}

// preFilterClaims rates nodes for a pod with claims. It names the best one where all that the claims
// ask for is counted and the pod leaves the choice to the policy: DynamicResources then looks at that
// node alone. Whatever is in the way of rating is left to DynamicResources, which says it.
func (p *Plugin) preFilterClaims(ctx context.Context, cs fwk.CycleState, pod *v1.Pod) (*fwk.PreFilterResult, *fwk.Status) {
	skip := fwk.NewStatus(fwk.Skip)
	manager := p.handle.SharedDRAManager()
	if len(pod.Spec.ResourceClaims) == 0 || manager == nil {
		return nil, skip
	}
	c, counted, err := p.core.rate(ctx, manager, p.handle.SnapshotSharedLister().NodeInfos(), pod)
	if err != nil {
		klog.FromContext(ctx).V(3).Info("Nodes are not rated for the claims of the pod", "pod", klog.KObj(pod), "err", err)
		return nil, skip
	}
	if len(c.rated) == 0 && c.units == nil {
		return nil, skip
	}
	cs.Write(claimsKey, c)
	if !counted {
		return nil, skip
	}
	name := p.choose(cs, pod, func(yield func(string) bool) {
		for _, r := range c.rated {
			if !yield(r.Node) {
				return
			}
		}
	})
	if name == "" {
		return nil, skip
	}
	c.named = true
	return only(name), nil
}

// gatherTries is how often what claims hold is read, which fails where they change meanwhile.
const gatherTries = 100

// rate rates nodes by what DynamicResources knows at the moment. counted is false where the claims
// ask for more than was rated.
func (c *Core) rate(ctx context.Context, manager fwk.SharedDRAManager, nodes fwk.NodeInfoLister, pod *v1.Pod) (
	out *claimed, counted bool, err error) {
	asked, err := claimsOf(manager, pod)
	if err != nil {
		return nil, false, err
	}
	demand, err := claims.DemandOf(asked, manager.DeviceClasses().Get)
	if err != nil {
		return nil, false, err
	}
	out = &claimed{}
	if demand.Empty() {
		return out, false, nil
	}
	slices, err := manager.ResourceSlices().ListWithDeviceTaintRules()
	if err != nil {
		return nil, false, fmt.Errorf("resource slices: %w", err)
	}
	var held *structured.AllocatedState
	for range gatherTries {
		if held, err = manager.ResourceClaims().GatherAllocatedState(); err == nil {
			break
		}
	}
	if err != nil || held == nil {
		return nil, false, errors.Join(errors.New("what claims hold is not known"), err)
	}
	demand.CPU, demand.Memory = kube.PeakOf(pod)
	if c.learning != nil {
		if out.units, err = c.unitsOf(ctx, slices, demand); err != nil {
			return nil, false, err
		}
	}
	of := claims.State{Slices: slices, Held: held, Hosts: func(node string) claims.Host { return hostOf(nodes, node) }}
	out.rated, err = c.catalog.Rank(ctx, of, demand, c.policyFor(pod))
	return out, demand.Counted, err
}

// claimsOf are the claims of a pod.
func claimsOf(manager fwk.SharedDRAManager, pod *v1.Pod) (asked []*resourceapi.ResourceClaim, err error) {
	for i := range pod.Spec.ResourceClaims {
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return nil, fmt.Errorf("name of a claim: %w", err)
		}
		if name == nil {
			continue // none is needed
		}
		claim, err := manager.ResourceClaims().Get(pod.Namespace, *name)
		if err != nil {
			return nil, fmt.Errorf("claim %s: %w", *name, err)
		}
		asked = append(asked, claim)
	}
	return asked, nil
}

// hostOf is what kube-scheduler counts of a node; nothing for one that it does not know.
func hostOf(nodes fwk.NodeInfoLister, name string) claims.Host {
	info, err := nodes.Get(name)
	if err != nil || info.Node() == nil {
		return claims.Host{}
	}
	has, used := info.GetAllocatable(), info.GetRequested()
	const mebibyte = 1 << 20
	return claims.Host{CPU: has.GetMilliCPU() - used.GetMilliCPU(), Memory: (has.GetMemory() - used.GetMemory()) / mebibyte,
		Cores: has.GetMilliCPU()}
}

// policyFor is the one that the pod names, or the cluster's. One that learns is the cluster's alone.
func (c *Core) policyFor(pod *v1.Pod) place.Policy {
	if name := pod.Annotations[wire.PolicyAnnotation]; name != "" {
		if policy, err := place.Parse(name); err == nil {
			return policy
		}
	}
	return c.config.Policy
}

// scoresOf are scores by node, from 0 to the highest that a plugin may give.
func scoresOf(nodes []string, scores []int64) map[string]int64 {
	of := make(map[string]int64, len(nodes))
	for i, score := range scores {
		of[nodes[i]] = score * (fwk.MaxNodeScore / place.MaxScore) //nolint:staticcheck // 1.35 has no MaxScore
	}
	return of
}

// preScore scores nodes against each other by their ratings.
func (c *claimed) preScore(nodes []string) {
	ratings := make(map[string]int64, len(c.rated))
	for _, r := range c.rated {
		ratings[r.Node] = r.Rating
	}
	scores := make([]int64, len(nodes))
	for i, name := range nodes {
		scores[i] = place.NoRating
		if rating, fits := ratings[name]; fits {
			scores[i] = rating
		}
	}
	place.Scores(scores)
	c.scores = scoresOf(nodes, scores)
}
