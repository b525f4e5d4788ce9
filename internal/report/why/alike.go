package why

import (
	"encoding/json"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// alike returns a text that is the same for pods which one search answers: those of one
// controller and of one revision of its template, with the same annotations, tolerations and
// requests, about which kube-scheduler says the same. It is "" for a pod of which nothing says
// that others are like it.
func (x *Explainer) alike(a *ask) string {
	p := a.pod
	o := metav1.GetControllerOfNoCopy(p)
	if o == nil {
		return ""
	}
	revision := p.Labels["pod-template-hash"]
	if revision == "" {
		revision = p.Labels["controller-revision-hash"]
	}
	if revision == "" && o.Kind != "Job" || o.Kind == "DaemonSet" { // a pod of a DaemonSet is for one node
		return ""
	}
	annotations := map[string]string{}
	for key, value := range p.Annotations {
		if key != "batch.kubernetes.io/job-completion-index" {
			annotations[key] = value
		}
	}
	seen := scheduled(p) != nil || p.Status.NominatedNodeName != ""
	text, err := json.Marshal([]any{p.Namespace, o, revision, annotations, p.Spec.Tolerations,
		p.Labels[labelPodGroup], p.Spec.SchedulingGroup, a.requests, p.Spec.Priority,
		p.Spec.SchedulerName, p.Status.NominatedNodeName, seen, x.snapshot.Taken.Sub(p.CreationTimestamp.Time) > unseenAfter,
		x.snapshot.messageOf(p), x.snapshot.autoscalerSays(p), x.world.repelled(p)})
	if err != nil {
		return "" // of texts and numbers
	}
	return string(text)
}

// explainAlike explains a pod without a node, by the answer about one like it where there is
// one.
func (x *Explainer) explainAlike(e *Explanation, a *ask) {
	key := x.alike(a)
	had := x.explained[key]
	if key == "" || had == nil {
		before := len(e.Notes)
		d := &diagnosis{snapshot: x.snapshot, world: x.world, a: a, e: e}
		d.explain()
		if key != "" {
			kept := *e
			kept.Notes = slices.Clone(e.Notes[before:])
			x.explained[key] = &kept
		}
		return
	}
	e.State, e.Nodes, e.Waiting, e.Autoscaler, e.Partial = had.State, had.Nodes, had.Waiting, had.Autoscaler, had.Partial
	e.Notes = append(e.Notes, had.Notes...)
	for _, c := range had.Causes {
		if c.Object == "Pod "+had.Pod.Namespace+"/"+had.Pod.Name {
			c.Object = podText(a.pod)
		}
		e.Causes = append(e.Causes, c)
	}
	for i := range had.Changes {
		c := had.Changes[i].renamed(a.pod.Namespace, had.Pod.Name, a.pod.Name)
		if strings.Contains(strings.Join(c.Commands, "\n"), a.pod.Name) && !named(a.pod.Name) {
			c.Commands, c.Patch = nil, nil
		}
		e.Changes = append(e.Changes, c)
	}
}
