package extender

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/kube"
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
	// kube-scheduler asks again: it did not take the node, so it hears of all. The
	// card that was chosen is this pod's own still.
	if got := w.fitting(small, all...); !slices.Equal(got, all) {
		t.Errorf("the second question: %v, want %v", got, all)
	}
	if got := w.fitting(small, all...); len(got) != 1 {
		t.Errorf("the third question: %v, want one node", got)
	}
	// After a bind a question is the first one again.
	if text := w.bind(large, "node-a"); text != "" {
		t.Fatal(text)
	}
	if !w.extender.chosen.first(podOf(large)) {
		t.Error("a pod that was bound is remembered")
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
			s.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []v1.PreferredSchedulingTerm{{Weight: 1}}}}
		}, false},
		"pods that it likes": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{PodAffinity: &v1.PodAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []v1.WeightedPodAffinityTerm{{Weight: 1, PodAffinityTerm: term}}}}
		}, false},
		"pods that it avoids": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []v1.WeightedPodAffinityTerm{{Weight: 1, PodAffinityTerm: term}}}}
		}, false},
		"pods that it must avoid": {func(s *v1.PodSpec) {
			s.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{term}}}
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
	if err != nil || !slices.Equal(*result.NodeNames, names) || w.ledger.Nominations() != 0 {
		t.Errorf("answer %s, %v; room is kept for %d pods", answer, err, w.ledger.Nominations())
	}
	if status, _ := w.post("/filter", body); status != http.StatusOK || w.ledger.Nominations() != 1 {
		t.Errorf("status %d; room is kept for %d pods, want that one", status, w.ledger.Nominations())
	}
}

func TestChosenPodsAreBounded(t *testing.T) {
	var c chosenPods
	pod := func(i int) kube.Pod { return kube.Pod{Ref: accel.PodRef{UID: strconv.Itoa(i)}} }
	for i := range 3 * maxChosen {
		if !c.first(pod(i)) {
			t.Fatalf("pod %d was noted before", i)
		}
		if len(c.pods) > maxChosen {
			t.Fatalf("%d pods are remembered", len(c.pods))
		}
	}
	if c.first(pod(3*maxChosen - 1)) {
		t.Error("the last one was forgotten")
	}
}

// A pod that the watch has not shown yet is bound as kube-scheduler showed it, without
// a question to the API server.
func TestBindAheadOfTheWatch(t *testing.T) {
	w := newWorld(t, choosing)
	pod := newPod("p", 4)
	pod.CreationTimestamp = metav1.NewTime(w.clock.Add(-time.Minute))
	w.cluster.actual["team/p"] = podOf(pod) // and not known
	names := []string{"node-a", "node-b"}
	if got := w.fitting(pod, names...); len(got) != 1 || got[0] != "node-b" {
		t.Fatalf("it fits on %v, want node-b alone", got)
	}
	// Another pod's UID, or another name for this one's, is of no use.
	other := newPod("other", 4)
	other.UID = pod.UID
	if text := w.bind(other, "node-b"); text == "" || w.cluster.gets != 1 {
		t.Errorf("under another name: %q after %d questions", text, w.cluster.gets)
	}
	if text := w.bind(pod, "node-b"); text != "" || w.cluster.gets != 1 {
		t.Fatalf("%q; the API server was asked %d times, want once, before", text, w.cluster.gets)
	}
	usage, ok := w.ledger.Node(gcuMemory, "node-b")
	if !ok || len(usage.Devices) != 1 || len(usage.Devices[0].Pods) != 1 {
		t.Fatalf("node-b: %+v", usage)
	}
	if got := usage.Devices[0].Pods[0]; got.Units != 4 || !got.Created.Equal(pod.CreationTimestamp.Time) {
		t.Errorf("on the card: %+v", got)
	}
}
