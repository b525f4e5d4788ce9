package why

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// Labels and annotations of Divvy's pods and kube-scheduler's.
const (
	labelName     = "app.kubernetes.io/name"
	nameSchedconf = "divvy-schedconf"
	nameExtender  = "divvy-extender"
	// nameScheduler is the scheduler of mode dedicated, whose pods have the extender in them.
	nameScheduler = "divvy-scheduler"
	// annotationWired is on kube-scheduler's pod once divvy-schedconf has configured it.
	annotationWired = "divvy.dev/scheduler-config-hash"
	grantKey        = "divvy-grant-key"
)

// explainWiring says if a kube-scheduler of a cluster that divvy-schedconf configures does not
// call the extender.
func explainWiring(e *Explanation, s *Snapshot) {
	configures := slices.ContainsFunc(s.Pods, func(p v1.Pod) bool { return p.Labels[labelName] == nameSchedconf })
	for i := range s.Pods {
		p := &s.Pods[i]
		if !configures || p.Namespace != "kube-system" || p.Labels["component"] != "kube-scheduler" ||
			p.Annotations[annotationWired] != "" {
			continue
		}
		e.Causes = append(e.Causes, Cause{Code: SchedulerNotWired, Object: podText(p), Evidence: []string{"no annotation " +
			annotationWired},
			Detail: "kube-scheduler does not call the extender; kubectl divvy doctor says why"})
		return
	}
}

// explainKey says if the extender does not start because the key of planned allocations is
// missing.
func explainKey(e *Explanation, s *Snapshot) {
	for i := range s.Pods {
		p := &s.Pods[i]
		if name := p.Labels[labelName]; name != nameExtender && name != nameScheduler {
			continue
		}
		for _, c := range p.Status.ContainerStatuses {
			if w := c.State.Waiting; w != nil && strings.Contains(w.Message, grantKey) {
				e.Causes = append(e.Causes, Cause{Code: KeyMissing, Object: podText(p), Evidence: evidence(w.Reason, w.Message),
					Detail: "the extender does not start: the secret " + grantKey +
						" is missing; kubectl divvy doctor says how to restore it"})
				return
			}
		}
	}
}
