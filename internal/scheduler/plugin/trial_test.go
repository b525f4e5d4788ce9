package plugin

import (
	"maps"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

// A pod that another plugin keeps away is decided about; what remains is asked for again, with it as going.
func TestTrialDecidesAgainForAnotherPluginsVictim(t *testing.T) {
	a, b, c := decisiontest.NewPod("a", 4), decisiontest.NewPod("b", 4), decisiontest.NewPod("c", 4)
	var asked [][]ledger.Candidate
	answers := [][]string{{string(b.UID)}, nil}
	fewest := func(candidates []ledger.Candidate) []string {
		asked = append(asked, candidates)
		return answers[len(asked)-1]
	}
	none := func() []*policy.PodDisruptionBudget { return nil }
	var trial trial
	away := func(removed []*v1.Pod) (out []string) {
		for _, p := range removed {
			out = append(out, string(p.UID))
		}
		return out
	}
	for _, p := range []*v1.Pod{a, b, c} {
		trial.remove(p)
	}
	if !trial.spares(away(trial.removed)) {
		t.Error("nothing is decided until the first is put back")
	}
	if trial.putBack(decisiontest.NewPod("other", 4), fewest, none) {
		t.Error("another pod was not taken away")
	}
	if !trial.putBack(a, fewest, none) || !trial.spares(away(trial.removed)) {
		t.Error("pod a may be back: b is away")
	}
	trial.remove(a) // its CPU is needed
	clone := trial.clone()
	if !trial.putBack(b, fewest, none) || !trial.spares(away(trial.removed)) {
		t.Error("since a is evicted, b may be back")
	}
	if len(asked) != 2 || len(asked[0]) != 3 || len(asked[1]) != 3 {
		t.Fatalf("asked for %v", asked)
	}
	for _, candidate := range asked[1] {
		if candidate.Going != (candidate.Pod == string(a.UID)) {
			t.Errorf("the second time: %+v", candidate)
		}
	}
	if clone.putBack(c, func([]ledger.Candidate) []string { return []string{string(c.UID)} }, none); clone.spares(away(clone.removed)) {
		t.Error("in the clone c must go, and is back")
	}
}

func TestViolatingCountsAsKubeSchedulerDoes(t *testing.T) {
	pod := func(name, app string, priority int32, started int64) *v1.Pod {
		p := decisiontest.NewPod(name, 1)
		p.Labels, p.Spec.Priority = map[string]string{"app": app}, &priority
		if started > 0 {
			p.Status.StartTime = &metav1.Time{Time: time.Unix(started, 0)}
		}
		return p
	}
	budget := func(namespace string, allowed int32, selector *metav1.LabelSelector, disrupted ...string) *policy.PodDisruptionBudget {
		b := &policy.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: namespace}}
		b.Spec.Selector, b.Status.DisruptionsAllowed = selector, allowed
		b.Status.DisruptedPods = map[string]metav1.Time{}
		for _, name := range disrupted {
			b.Status.DisruptedPods[name] = metav1.Time{}
		}
		return b
	}
	web := &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}
	pods := []*v1.Pod{
		pod("starts", "web", 1, 0), pod("young", "web", 1, 20), pod("old", "web", 1, 10), pod("first", "web", 5, 30),
		pod("other", "db", 0, 1),
	}
	type budgets = []*policy.PodDisruptionBudget
	for name, tc := range map[string]struct {
		budgets budgets
		want    []string
	}{
		"none":                          {},
		"the more important come first": {budgets{budget("team", 2, web)}, []string{"starts", "young"}},
		"nothing is allowed":            {budgets{budget("team", 0, web)}, []string{"first", "old", "starts", "young"}},
		"of another namespace":          {budgets{budget("elsewhere", 0, web)}, nil},
		"an empty selector":             {budgets{budget("team", 0, &metav1.LabelSelector{})}, nil},
		"no selector":                   {budgets{budget("team", 0, nil)}, nil},
		"disrupted already":             {budgets{budget("team", 1, web, "first", "old")}, []string{"starts"}},
		"two budgets": {budgets{budget("team", 3, web), budget("team", 0,
			&metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}})}, []string{"other", "starts"}},
	} {
		var got []string
		for _, uid := range slices.Sorted(maps.Keys(violating(pods, tc.budgets))) {
			got = append(got, uid[len("uid-"):])
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v violate a budget, want %v", name, got, tc.want)
		}
	}
}
