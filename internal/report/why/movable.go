package why

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/cause"
)

// Rule is why a pod is not moved. The codes are stable.
type Rule string

// The rules.
const (
	// RuleNode: a DaemonSet's or a static pod, which belongs to its node.
	RuleNode Rule = "belongsToNode"
	// RuleNoController: nothing makes another one.
	RuleNoController Rule = "noController"
	// RuleController: the controller may not make another one, or counts the end as a
	// failure, as a Job does.
	RuleController Rule = "controller"
	// RuleSystem: the pod is of namespace kube-system, or has a critical priority class.
	RuleSystem Rule = "system"
	// RuleEnding: the pod is being deleted.
	RuleEnding Rule = "ending"
	// RuleBudget: a PodDisruptionBudget allows no disruption at the moment.
	RuleBudget Rule = "disruptionBudget"
	// RuleAnnotated: an annotation asks autoscalers not to disrupt it.
	RuleAnnotated Rule = "annotated"
	// RuleNotJudged: kube-scheduler also looks at what is not judged here, or another
	// scheduler places the pod.
	RuleNotJudged Rule = "notJudged"
	// RuleToleratesCordon: a cordon does not keep the pod off a node.
	RuleToleratesCordon Rule = "toleratesCordon"
	// RuleUnknownDevice: it is not known on which devices the pod is.
	RuleUnknownDevice Rule = "unknownDevice"
)

// ruleTexts describe the pods that are not moved by a rule.
var ruleTexts = map[Rule]string{
	RuleNode:            "of a DaemonSet or static",
	RuleNoController:    "without a controller",
	RuleController:      "of a controller other than a ReplicaSet, ReplicationController or StatefulSet",
	RuleSystem:          "of the system (kube-system or a critical priority class)",
	RuleEnding:          "being deleted",
	RuleBudget:          "with a PodDisruptionBudget that allows no disruption",
	RuleAnnotated:       "with an annotation against disruption",
	RuleNotJudged:       "with constraints that are not judged",
	RuleToleratesCordon: "with a toleration of cordons",
	RuleUnknownDevice:   "on unknown devices",
}

// Rules are all of them, in the order in which they are looked at.
func Rules() []Rule {
	return []Rule{RuleNode, RuleEnding, RuleSystem, RuleNoController, RuleController, RuleBudget, RuleAnnotated, RuleNotJudged,
		RuleToleratesCordon, RuleUnknownDevice}
}

// criticalPriority is that of system-cluster-critical; priority classes of users are lower.
const criticalPriority = 2_000_000_000

// ofSystem reports whether the cluster itself needs a pod.
func ofSystem(p *v1.Pod) bool {
	return p.Namespace == metav1.NamespaceSystem || corev1helpers.PodPriority(p) >= criticalPriority
}

// doNotDisrupt are the annotations by which autoscalers are asked to leave a pod where it is.
var doNotDisrupt = map[string]string{
	"cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
	"karpenter.sh/do-not-disrupt":                    "true",
}

// rule returns why a pod on a node is not moved, "" for one that may be moved.
func (l *layout) rule(p *v1.Pod) Rule {
	controller := metav1.GetControllerOfNoCopy(p)
	a := l.again(p)
	_, protected := l.snapshot.budgetOf(p)
	switch {
	case stays(p):
		return RuleNode
	case p.DeletionTimestamp != nil:
		return RuleEnding
	case ofSystem(p):
		return RuleSystem
	case controller == nil:
		return RuleNoController
	case !slices.Contains([]string{"ReplicaSet", "ReplicationController", "StatefulSet"}, controller.Kind):
		return RuleController
	case protected:
		return RuleBudget
	case slices.ContainsFunc(slices.Collect(maps.Keys(doNotDisrupt)), func(key string) bool {
		return p.Annotations[key] == doNotDisrupt[key]
	}):
		return RuleAnnotated
	case l.unknown(a) != "":
		return RuleNotJudged
	case corev1helpers.TolerationsTolerateTaint(klog.Logger{}, p.Spec.Tolerations,
		&v1.Taint{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule}, false):
		return RuleToleratesCordon
	case a.shared.Resource != "":
		if ids, _ := l.devicesOf(p); len(ids) != max(a.shared.Devices, 1) {
			return RuleUnknownDevice
		}
	}
	return ""
}

// budgetOf names a budget that allows no pod like this one to be disrupted, if there is one.
func (s *Snapshot) budgetOf(p *v1.Pod) (name string, protects bool) {
	for i := range s.Budgets {
		b := &s.Budgets[i]
		if b.Namespace != p.Namespace || b.Status.DisruptionsAllowed > 0 {
			continue
		}
		if selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err != nil || selector.Matches(labels.Set(p.Labels)) {
			return b.Name, true
		}
	}
	return "", false
}

// again is a pod as its controller makes it again.
func (l *layout) again(p *v1.Pod) *ask {
	fresh := *p
	fresh.Spec.NodeName = ""
	return l.askOf(&fresh)
}

// askOf reads a pod. Its devices are chosen by the layout's policy: its own may be one that
// learns.
func (l *layout) askOf(p *v1.Pod) *ask {
	a := l.newAsk(p)
	a.shared.Policy = ""
	return a
}

// unknown says why it cannot be known where a pod would be placed, "" where it can.
func (l *layout) unknown(a *ask) string {
	p := a.pod
	switch why := l.unjudged(p); {
	case a.mistake != nil || len(a.several) > 0:
		return "its request cannot be served"
	case cause.ForeignScheduler(p.Spec.SchedulerName) != "":
		return cause.ForeignScheduler(p.Spec.SchedulerName) + " places it"
	case p.Status.NominatedNodeName != "" && p.Spec.NodeName == "" && waits(p):
		return "it preempts others on node " + p.Status.NominatedNodeName
	case len(why) > 0:
		return "kube-scheduler also looks at " + listed(why, 3)
	}
	if c := scheduled(p); c != nil && p.Spec.NodeName == "" && waits(p) {
		for _, r := range reasonsOf(c.Message) {
			if quoted(r.code) {
				return "kube-scheduler: " + r.text
			}
		}
	}
	return ""
}
