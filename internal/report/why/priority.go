package why

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// explainPriority says if priorities stand against the pod.
func (d *diagnosis) explainPriority() {
	e, a, nodes := d.e, d.a, d.nodes
	r := a.shared
	if r.Resource == "" || a.mistake != nil || anyFits(nodes) {
		return
	}
	var higher, lower []string
	for i := range nodes {
		j := &nodes[i]
		if len(j.hindrances) > 0 || j.code != NoDeviceFits && j.code != InsufficientCapacity {
			continue
		}
		name := j.n.Name
		less := func(h *heldUnits) bool { return h.Resource == r.Resource && h.Priority < r.Priority }
		var some, most bool
		for k := range d.world.record.held[name] {
			h := &d.world.record.held[name][k]
			some, most = some || less(h), most || h.Resource == r.Resource && h.Priority > r.Priority
		}
		switch {
		case some && fits(d.world.copyOf([]string{name}, less, true), r, name).Code == accel.Fits:
			lower = append(lower, name)
		case most:
			higher = append(higher, name)
		}
	}
	never := a.pod.Spec.PreemptionPolicy != nil && *a.pod.Spec.PreemptionPolicy == v1.PreemptNever
	switch {
	case len(lower) > 0 && never:
		e.Causes = append(e.Causes, Cause{Code: PreemptNever, Object: count(len(lower), "node"), Nodes: lower,
			Evidence: []string{"spec.preemptionPolicy: Never"},
			Detail:   "pods of lower priority hold enough, but the pod's priority class does not preempt"})
	case len(lower) > 0:
		if bySum := slices.DeleteFunc(slices.Clone(lower), func(name string) bool {
			i := slices.IndexFunc(nodes, func(j judged) bool { return j.n.Name == name })
			return nodes[i].sum < r.Peak()
		}); len(bySum) > 0 {
			e.Notes = append(e.Notes, fmt.Sprintf("Pods of lower priority hold enough on %s. kube-scheduler does not preempt them where "+
				"the sum of free units is enough; divvy-scheduler does.", listed(bySum, 3)))
		}
		d.explainBudget(lower)
	case len(higher) > 0:
		e.Causes = append(e.Causes, Cause{Code: LowPriority, Object: count(len(higher), "node"), Nodes: higher,
			Detail: fmt.Sprintf("pods of higher priority than %d hold the devices", r.Priority)})
	}
}

// explainBudget says if the pods of lower priority that hold enough are protected by a
// PodDisruptionBudget.
func (d *diagnosis) explainBudget(nodes []string) {
	if len(d.snapshot.Budgets) == 0 {
		return
	}
	var budgets []string
	for _, name := range nodes {
		spared := func(h *heldUnits) bool { // those that may be disrupted
			p := d.world.pod(h.Pod.UID)
			if p == nil || h.Resource != d.a.shared.Resource || h.Priority >= d.a.shared.Priority {
				return false
			}
			_, protected := d.snapshot.budgetOf(p)
			return !protected
		}
		if fits(d.world.copyOf([]string{name}, spared, true), d.a.shared, name).Code == accel.Fits {
			return
		}
		for i := range d.world.record.held[name] {
			if p := d.world.pod(d.world.record.held[name][i].Pod.UID); p != nil {
				if b, protected := d.snapshot.budgetOf(p); protected && !slices.Contains(budgets, b) {
					budgets = append(budgets, b)
				}
			}
		}
	}
	if len(budgets) == 0 {
		return
	}
	d.e.Causes = append(d.e.Causes, Cause{Code: Budget, Object: count(len(nodes), "node"), Nodes: nodes,
		Detail: "pods of lower priority hold enough, but no disruption of them is allowed by PodDisruptionBudget " + listed(budgets, 3)})
}
