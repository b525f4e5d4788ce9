package doctor

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/wire"
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
	for i := range s.Waiting {
		if w := &s.Waiting[i]; w.Code == codeIsolation {
			f.add(Warning, "Pod "+w.Namespace+"/"+w.Name, "it waits: "+w.Problem,
				"Configure the isolation of the resource, or lower the pod's annotation divvy.dev/isolation; see docs/isolation.md. This "+
					"command shows the tiers of all devices.",
				"kubectl divvy inspect -o wide")
		}
	}
}
