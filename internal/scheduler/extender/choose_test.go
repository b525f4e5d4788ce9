package extender

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

func choosing(c *Config) { c.ChooseNode = true }

// fitting are the nodes that filter names for the pod.
func (w *world) fitting(pod *v1.Pod, nodes ...string) []string {
	w.tb.Helper()
	result := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes})
	if result.Error != "" || result.NodeNames == nil {
		w.tb.Fatalf("filter of pod %s: %+v", pod.Name, result)
	}
	return *result.NodeNames
}

func TestChooseNode(t *testing.T) {
	w := newWorld(t, choosing)
	w.ledger.SetNode("node-c", w.inventory("c", 16, 16))
	all := []string{"node-c", "node-b", "node-a"}

	// binpack: the smallest card that has room, and of equal ones the first by name.
	small, large := w.add(newPod("small", 8)), w.add(newPod("large", 16))
	if got := w.fitting(small, all...); !slices.Equal(got, []string{"node-b"}) {
		t.Errorf("8 units: %v, want node-b alone", got)
	}
	if got := w.fitting(large, all...); !slices.Equal(got, []string{"node-a"}) {
		t.Errorf("16 units: %v, want node-a alone", got)
	}
	// The same question has the same answer: the card that was chosen is this pod's own.
	for range 3 {
		if got := w.fitting(small, all...); !slices.Equal(got, []string{"node-b"}) {
			t.Errorf("the same question: %v, want node-b alone", got)
		}
	}
	// After a bind a question is the first one again.
	if text := w.bind(large, "node-a"); text != "" {
		t.Fatal(text)
	}
}

// Once an attempt with the node that was named has failed, something that
// kube-scheduler knows stands against it, and it gets all nodes, until the pod is bound
// or fits nowhere.
func TestChooseNodeAfterAFailedAttempt(t *testing.T) {
	all := []string{"node-a", "node-b", "node-c"}
	for name, fail := range map[string]func(w *world, pod *v1.Pod){
		"the bind fails": func(w *world, pod *v1.Pod) {
			w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return errors.New("no") }
			if text := w.bind(pod, "node-b"); text == "" {
				t.Fatal("it did not")
			}
			w.cluster.BindError = nil
		},
		"kube-scheduler says so": func(w *world, pod *v1.Pod) {
			w.clock = w.clock.Add(time.Second)
			w.ledger.Unbound(string(pod.UID), "", ledger.Attempt{Outcome: 1})
		},
		"kube-scheduler asks again after a while": func(w *world, _ *v1.Pod) {
			w.clock = w.clock.Add(10 * time.Second) // as long as it waits for an answer
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, choosing)
			w.ledger.SetNode("node-c", w.inventory("c", 16, 16))
			pod := w.add(newPod("pod", 8))
			if got := w.fitting(pod, all...); !slices.Equal(got, []string{"node-b"}) {
				t.Fatalf("at first: %v", got)
			}
			fail(w, pod)
			for range 3 {
				if got := w.fitting(pod, all...); !slices.Equal(got, all) || w.ledger.Counts().Expected != 0 {
					t.Errorf("afterwards: %v, and %d binds are expected", got, w.ledger.Counts().Expected)
				}
				w.clock = w.clock.Add(time.Minute)
			}
			// It fits nowhere, and then the cluster is another one.
			w.fitting(pod, "elsewhere")
			if got := w.fitting(pod, all...); len(got) != 1 {
				t.Errorf("after it fitted nowhere: %v", got)
			}
			w.clock = w.clock.Add(time.Minute)
			w.fitting(pod, all...)
			if text := w.bind(pod, "node-c"); text != "" || w.ledger.Counts().Expected != 0 {
				t.Errorf("bind: %q; %d binds are expected", text, w.ledger.Counts().Expected)
			}
		})
	}
}

// What filter promised a pod is no other pod's, however long kube-scheduler waits for
// a volume of it: also where one node is named because no other has room.
func TestCapacityWaitsForALateBind(t *testing.T) {
	for name, names := range map[string][]string{"one of several nodes": {"node-a", "node-b"}, "the only node": {"node-b"}} {
		for _, change := range []func(*Config){choosing, func(*Config) {}} {
			w := newWorld(t, change)
			if len(names) > 1 && !w.extender.config.ChooseNode {
				continue // all are named, and which one kube-scheduler takes is not known
			}
			first, second := w.add(newPod("first", 8)), w.add(newPod("second", 8))
			if got := w.fitting(first, names...); !slices.Equal(got, []string{"node-b"}) {
				t.Fatalf("%s: %v", name, got)
			}
			for range 20 {
				w.clock = w.clock.Add(30 * time.Second)
				w.ledger.Expire()
				if got := w.fitting(second, "node-b"); len(got) != 0 {
					t.Fatalf("%s: another pod is given the same card after %s", name, w.clock)
				}
			}
			if text := w.bind(first, "node-b"); text != "" {
				t.Errorf("%s: %s", name, text)
			}
		}
	}
}

// A pod that prefers nodes is weighed by kube-scheduler among all of them; an earlier
// promise is not kept beside.
func TestNothingIsReservedWhereSeveralNodesAreNamed(t *testing.T) {
	w := newWorld(t, choosing)
	pod := w.add(newPod("pod", 8))
	w.fitting(pod, "node-b")
	if w.ledger.Counts().Expected != 1 {
		t.Fatal("nothing is reserved")
	}
	pod.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{MaxSkew: 1,
		TopologyKey: "zone", WhenUnsatisfiable: v1.ScheduleAnyway}}
	if got := w.fitting(pod, "node-a", "node-b"); len(got) != 2 || w.ledger.Counts().Expected != 0 {
		t.Errorf("%v, and %d binds are expected", got, w.ledger.Counts().Expected)
	}
	w.fitting(pod, "node-b")
	if w.fitting(pod, "elsewhere"); w.ledger.Counts().Expected != 0 {
		t.Error("it fits nowhere, and its bind is expected")
	}
}

// kube-scheduler's own filters are at work between the question and the bind of a pod
// that the watch has not shown, which may not exist: it is expected for a moment.
func TestUnknownPodsAreNotExpectedForLong(t *testing.T) {
	w := newWorld(t, choosing)
	w.fitting(newPod("stranger", 8), "node-b")
	if w.ledger.Counts().Expected != 1 {
		t.Fatal("nothing is reserved")
	}
	w.clock = w.clock.Add(5 * time.Second)
	if w.ledger.Expire(); w.ledger.Counts().Expected != 0 {
		t.Error("it is reserved still")
	}
}

// A bind whose outcome is not known leaves a reservation behind, which does not keep
// the pod itself away from the only node with room.
func TestFilterAfterAnUnknownOutcome(t *testing.T) {
	w := newWorld(t, choosing)
	pod, other := w.add(newPod("pod", 8)), w.add(newPod("other", 8))
	w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return cluster.ErrOutcomeUnknown }
	if text := w.bind(pod, "node-b"); text == "" {
		t.Fatal("the outcome is known")
	}
	w.cluster.BindError = nil
	if got := w.fitting(other, "node-b"); len(got) != 0 {
		t.Error("another pod gets what may be the first one's")
	}
	if got := w.fitting(pod, "node-b"); !slices.Equal(got, []string{"node-b"}) {
		t.Fatalf("the pod itself: %v", got)
	}
	if text := w.bind(pod, "node-b"); text != "" {
		t.Error(text)
	}
}

// inventory is that of a node with cards of these units.
func (w *world) inventory(prefix string, units ...accel.Units) []accel.Inventory {
	return []accel.Inventory{cards(gcuMemory, prefix, units...)}
}

// Pods that kube-scheduler asks about before it binds the one before do not get the
// same room.
func TestChosenRoomIsKept(t *testing.T) {
	w := newWorld(t, choosing)
	w.ledger.SetNode("node-c", w.inventory("c", 8))
	first, second, third := w.add(newPod("first", 8)), w.add(newPod("second", 8)), w.add(newPod("third", 8))
	for _, one := range []struct {
		pod  *v1.Pod
		node string
	}{{first, "node-b"}, {second, "node-c"}, {third, "node-a"}} {
		if got := w.fitting(one.pod, "node-a", "node-b", "node-c"); !slices.Equal(got, []string{one.node}) {
			t.Errorf("pod %s: %v, want %s alone", one.pod.Name, got, one.node)
		}
	}
	for pod, node := range map[*v1.Pod]string{third: "node-a", second: "node-c", first: "node-b"} {
		if text := w.bind(pod, node); text != "" {
			t.Errorf("bind %s to %s: %s", pod.Name, node, text)
		}
	}
}

// What the pod itself prefers is for kube-scheduler to weigh.
func TestChooseNodeLeavesPreferences(t *testing.T) {
	term := v1.PodAffinityTerm{TopologyKey: "zone"}
	weighted := []v1.WeightedPodAffinityTerm{{Weight: 1, PodAffinityTerm: term}}
	spread := func(action v1.UnsatisfiableConstraintAction) []v1.TopologySpreadConstraint {
		return []v1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: "zone", WhenUnsatisfiable: action}}
	}
	tests := map[string]struct {
		change func(*v1.PodSpec)
		chosen bool
	}{
		"nothing":       {func(*v1.PodSpec) {}, true},
		"affinity null": {func(s *v1.PodSpec) { s.Affinity = &v1.Affinity{} }, true},
		"a node that it needs": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{}}}
		}, true},
		"a node that it prefers": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []v1.PreferredSchedulingTerm{{Weight: 1}},
			}}
		}, false},
		"pods that it likes": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{PodAffinity: &v1.PodAffinity{PreferredDuringSchedulingIgnoredDuringExecution: weighted}}
		}, false},
		"pods that it avoids": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{PreferredDuringSchedulingIgnoredDuringExecution: weighted}}
		}, false},
		"pods that it must avoid": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{term},
			}}
		}, true},
		"zones where possible":  {func(s *v1.PodSpec) { s.TopologySpreadConstraints = spread(v1.ScheduleAnyway) }, false},
		"zones in all cases":    {func(s *v1.PodSpec) { s.TopologySpreadConstraints = spread(v1.DoNotSchedule) }, true},
		"a priority is no such": {func(s *v1.PodSpec) { s.Priority = ptr.To[int32](7) }, true},
		"several in both fields": {func(s *v1.PodSpec) {
			s.TopologySpreadConstraints = append(spread(v1.DoNotSchedule), spread(v1.ScheduleAnyway)...)
		}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, choosing)
			pod := newPod("pod", 8)
			test.change(&pod.Spec)
			if got := w.fitting(pod, "node-a", "node-b"); (len(got) == 1) != test.chosen {
				t.Errorf("the answer names %v; chosen: %t, want %t", got, len(got) == 1, test.chosen)
			}
		})
	}
}

// Nodes that refuse are named where none has room, or one alone is asked about.
func TestChooseNodeNamesRefusals(t *testing.T) {
	w := newWorld(t, choosing)
	names := []string{"node-a", "node-b"}
	result := w.filter(extenderv1.ExtenderArgs{Pod: newPod("half", 16), NodeNames: &names})
	if len(*result.NodeNames) != 1 || len(result.FailedAndUnresolvableNodes) != 1 {
		t.Errorf("one node has room: %+v", result)
	}
	result = w.filter(extenderv1.ExtenderArgs{Pod: newPod("none", 17), NodeNames: &names})
	if len(*result.NodeNames) != 0 || len(result.FailedAndUnresolvableNodes) != 2 {
		t.Errorf("no node has room: %+v", result)
	}
}

// Who may not bind can have no room kept, and hears of all nodes.
func TestChooseNodeForStrangers(t *testing.T) {
	w := newWorld(t, choosing)
	names := []string{"node-a", "node-b"}
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: newPod("pod", 8), NodeNames: &names})
	if err != nil {
		t.Fatal(err)
	}
	answer, err := w.extender.filter(t.Context(), body, nil) // with no caller
	var result extenderv1.ExtenderFilterResult
	if err == nil {
		err = json.Unmarshal(answer, &result)
	}
	if err != nil || !slices.Equal(*result.NodeNames, names) || w.ledger.Counts().Expected != 0 {
		t.Errorf("answer %s, %v; room is kept for %d pods", answer, err, w.ledger.Counts().Expected)
	}
	if status, _ := w.post("/filter", body); status != http.StatusOK || w.ledger.Counts().Expected != 1 {
		t.Errorf("status %d; room is kept for %d pods, want that one", status, w.ledger.Counts().Expected)
	}
}

// A pod that the watch has not shown yet is bound as kube-scheduler showed it, without
// a question to the API server.
func TestBindAheadOfTheWatch(t *testing.T) {
	w := newWorld(t, choosing)
	pod := newPod("p", 4)
	pod.CreationTimestamp = metav1.NewTime(w.clock.Add(-time.Minute))
	w.cluster.Actual["team/p"] = podOf(pod) // and not known
	names := []string{"node-a", "node-b"}
	if got := w.fitting(pod, names...); len(got) != 1 || got[0] != "node-b" {
		t.Fatalf("it fits on %v, want node-b alone", got)
	}
	// Another pod's UID, or another name for this one's, is of no use.
	other := newPod("other", 4)
	other.UID = pod.UID
	if text := w.bind(other, "node-b"); text == "" || w.cluster.Gets != 1 {
		t.Errorf("under another name: %q after %d questions", text, w.cluster.Gets)
	}
	if text := w.bind(pod, "node-b"); text != "" || w.cluster.Gets != 1 {
		t.Fatalf("%q; the API server was asked %d times, want once, before", text, w.cluster.Gets)
	}
	usage, ok := w.ledger.Node(gcuMemory, "node-b")
	if !ok || len(usage.Devices) != 1 || len(usage.Devices[0].Pods) != 1 {
		t.Fatalf("node-b: %+v", usage)
	}
	if got := usage.Devices[0].Pods[0]; got.Units != 4 || !got.Created.Equal(pod.CreationTimestamp.Time) {
		t.Errorf("on the card: %+v", got)
	}
}
