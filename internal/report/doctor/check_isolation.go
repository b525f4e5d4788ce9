package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// checkLimits reports the nodes that cannot prove that all containers have their memory limits.
func checkLimits(s *Snapshot, f *findings) {
	for i := range s.Nodes {
		n := &s.Nodes[i]
		for _, c := range n.Status.Conditions {
			if c.Type == wire.IsolationCondition && c.Status == corev1.ConditionTrue {
				f.add(Warning, "Node "+n.Name, c.Message,
					"Remove the reason; docs/isolation.md has a table of them. A container that was without its limit keeps its device at "+
						"tier none until it ends. This command shows the tiers of all devices.",
					"kubectl divvy inspect -o wide")
			}
		}
	}
}

// checkIsolation reports the pods that require a tier of isolation that no device of any node
// states. Pods of which some node has devices with the tier wait for capacity.
func checkIsolation(s *Snapshot, f *findings) {
	stated := map[accel.Resource]map[string]accel.TierSet{} // by node
	for node, memory := range memoryInventories(s) {
		for resource, in := range memory {
			var tiers accel.TierSet
			for _, share := range in.Shares {
				tiers.Add(share.Isolation.At(s.Taken).Memory)
			}
			if stated[resource] == nil {
				stated[resource] = map[string]accel.TierSet{}
			}
			stated[resource][node] = tiers
		}
	}
	resources := slices.Sorted(maps.Keys(stated))
	for i := range s.Pods {
		p := &s.Pods[i]
		if p.Spec.NodeName != "" || p.DeletionTimestamp != nil || ended(p) {
			continue
		}
		requests, err := kube.RequestsOf(p, resources)
		if err != nil || len(requests) != 1 || requests[0].Selection == nil {
			continue // mistakes have events of their own
		}
		required, of := requests[0].Selection.Isolation, stated[requests[0].Resource]
		if required == accel.TierNone ||
			slices.ContainsFunc(slices.Collect(maps.Values(of)), func(t accel.TierSet) bool { return t.Highest().Meets(required) }) {
			continue
		}
		f.add(Warning, podObject(p), fmt.Sprintf("it requires isolation %s, and no node with %s states it: %s", required,
			requests[0].Resource, nodesByTier(of)),
			"Configure the isolation of the resource, or lower the pod's annotation divvy.dev/isolation; see docs/isolation.md. This "+
				"command shows the tiers of all devices.",
			"kubectl divvy inspect -o wide")
	}
}

// nodesByTier says which nodes state what: "none: a, b".
func nodesByTier(of map[string]accel.TierSet) string {
	nodes := map[string][]string{}
	for _, node := range slices.Sorted(maps.Keys(of)) {
		tiers := of[node].String()
		nodes[tiers] = append(nodes[tiers], node)
	}
	var parts []string
	for _, tiers := range slices.Sorted(maps.Keys(nodes)) {
		parts = append(parts, tiers+": "+list(nodes[tiers]))
	}
	return strings.Join(parts, "; ")
}
