package plugin

import (
	"cmp"
	"math"
	"slices"

	v1 "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// trial is a dry run of preemption on one node. kube-scheduler takes all pods of lower priority
// away and then puts each back with which the pod still fits, the most important first. What
// comes last would have to go, however many pods that are. So when the first one is put back, it
// is decided which are the fewest that must stay away, and Filter rejects the node with any of
// them back. Pods that other plugins keep away come on top.
type trial struct {
	// removed are all pods that were taken away, also those that hold nothing of ours.
	removed []*v1.Pod
	// victims are UIDs of those that must stay away, once that is decided.
	victims []string
	decided bool
	// going are UIDs of those that were put back and taken away again: they are evicted.
	going []string
}

func (t trial) clone() trial {
	t.removed, t.victims, t.going = slices.Clone(t.removed), slices.Clone(t.victims), slices.Clone(t.going)
	return t
}

// remove notes a pod that is taken away.
func (t *trial) remove(pod *v1.Pod) {
	uid := string(pod.UID)
	if t.removed = append(t.removed, pod); !t.decided {
		return
	}
	t.going = append(t.going, uid)
	// One that goes for another reason, such as its CPU, may spare others.
	t.decided = slices.Contains(t.victims, uid)
}

// putBack notes a pod that is back on the node. It reports whether it had been taken away.
func (t *trial) putBack(pod *v1.Pod, fewest func([]ledger.Candidate) []string, budgets func() []*policy.PodDisruptionBudget) bool {
	at := slices.IndexFunc(t.removed, func(p *v1.Pod) bool { return p.UID == pod.UID })
	if at < 0 {
		return false
	}
	if !t.decided {
		t.decided = true
		violating := violating(t.removed, budgets())
		candidates := make([]ledger.Candidate, len(t.removed))
		for i, p := range t.removed {
			uid := string(p.UID)
			candidates[i] = ledger.Candidate{Pod: uid, Violates: violating[uid], Going: slices.Contains(t.going, uid)}
		}
		t.victims = fewest(candidates)
	}
	t.removed = slices.Delete(t.removed, at, at+1)
	return true
}

// spares reports whether all pods are away that must be.
func (t *trial) spares(away []string) bool {
	return !t.decided || !slices.ContainsFunc(t.victims, func(uid string) bool { return !slices.Contains(away, uid) })
}

// violating are the UIDs of pods whose eviction violates a disruption budget, as kube-scheduler
// counts: the more important pods use a budget up first, and those after them violate it.
func violating(pods []*v1.Pod, budgets []*policy.PodDisruptionBudget) map[string]bool {
	if len(budgets) == 0 {
		return nil
	}
	out := map[string]bool{}
	left := make([]int32, len(budgets))
	selectors := make([]labels.Selector, len(budgets))
	for i, b := range budgets {
		left[i] = b.Status.DisruptionsAllowed
		if s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err == nil && !s.Empty() {
			selectors[i] = s
		}
	}
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(a, b *v1.Pod) int {
		return cmp.Or(cmp.Compare(corev1helpers.PodPriority(b), corev1helpers.PodPriority(a)), cmp.Compare(started(a), started(b)))
	})
	for _, p := range pods {
		for i, b := range budgets {
			_, disrupted := b.Status.DisruptedPods[p.Name]
			if b.Namespace != p.Namespace || disrupted || len(p.Labels) == 0 || selectors[i] == nil ||
				!selectors[i].Matches(labels.Set(p.Labels)) {
				continue
			}
			if left[i]--; left[i] < 0 {
				out[string(p.UID)] = true
			}
		}
	}
	return out
}

// started is when a pod was, which counts as last for one that was not.
func started(pod *v1.Pod) int64 {
	if pod.Status.StartTime == nil {
		return math.MaxInt64
	}
	return pod.Status.StartTime.UnixNano()
}
