package doors

import (
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

// member begins an attempt for a pod of a group.
func (p *compiled) member(tb testing.TB, pod *v1.Pod) *framework.CycleState {
	tb.Helper()
	state := framework.NewCycleState()
	state.SetPodGroupSchedulingCycle(framework.NewCycleState())
	if _, status, _ := p.RunPreFilterPlugins(tb.Context(), state, pod); !status.IsSuccess() {
		tb.Fatal(status)
	}
	return state
}

// TestGroupIsTriedOutWithoutPods goes through what kube-scheduler does to find victims for a pod group: the
// devices of pods that it takes out are free, those of the group's pods are not, and the ledger keeps out of it.
func TestGroupIsTriedOutWithoutPods(t *testing.T) {
	c := &cluster{}
	c.node("node-a", nil, 16, 16)
	c.runs(podOf("low-0", 10, 1, 1), "node-a", 0)
	c.runs(podOf("low-1", 10, 1, 1), "node-a", 1)
	p := c.plugin(t, true, false)
	group := []*v1.Pod{podOf("high-0", 12, 1, 100), podOf("high-1", 12, 1, 100), podOf("high-2", 12, 1, 100)}
	fits := func(state *framework.CycleState, pod *v1.Pod) bool {
		node, err := p.snapshot.NodeInfos().Get("node-a")
		if err != nil {
			t.Fatal(err)
		}
		return p.RunFilterPluginsWithNominatedPods(t.Context(), state, pod, node).IsSuccess()
	}
	take := func(pod *v1.Pod) {
		if err := p.snapshot.RemovePod(klog.Background(), pod, "node-a"); err != nil {
			t.Fatal(err)
		}
	}
	put := func(pod *v1.Pod) fwk.PodInfo {
		info, err := framework.NewPodInfo(pod)
		if err == nil {
			err = p.snapshot.AddPod(info, "node-a")
		}
		if err != nil {
			t.Fatal(err)
		}
		return info
	}
	if state := p.member(t, group[0]); fits(state, group[0]) {
		t.Fatal("the group fits as it is")
	}

	if err := p.snapshot.StartMutations(); err != nil {
		t.Fatal(err)
	}
	take(c.pods[0])
	take(c.pods[1])
	var states []*framework.CycleState
	reserve := func(i int) {
		if status := p.RunReservePluginsReserve(t.Context(), states[i], group[i], "node-a"); !status.IsSuccess() {
			t.Fatal(status)
		}
	}
	unreserve := func(i int) { p.RunReservePluginsUnreserve(t.Context(), states[i], group[i], "node-a") }
	for i, pod := range group {
		states = append(states, p.member(t, pod))
		if got, want := fits(states[i], pod), i < 2; got != want {
			t.Fatalf("pod %d fits: %t", i, got)
		}
		if i < 2 {
			reserve(i)
		}
	}
	if n := p.ledger.Counts().Reservations; n != 0 {
		t.Errorf("the ledger has %d reservations", n)
	}
	unreserve(1)
	unreserve(0)

	// Each of the two is put back alone, and taken out again, as the second pod of the group does not fit then.
	node, err := p.snapshot.NodeInfos().Get("node-a")
	if err != nil {
		t.Fatal(err)
	}
	for _, victim := range slices.Backward(c.pods) {
		info := put(victim)
		for i := range 2 {
			if status := p.RunPreFilterExtensionAddPod(t.Context(), states[i], group[i], info, node); !status.IsSuccess() {
				t.Fatal(status)
			}
		}
		if !fits(states[0], group[0]) {
			t.Errorf("with %s the first pod does not fit", victim.Name)
		}
		reserve(0)
		if fits(states[1], group[1]) {
			t.Errorf("with %s the second pod fits", victim.Name)
		}
		unreserve(0)
		take(victim)
		for i := range 2 {
			if status := p.RunPreFilterExtensionRemovePod(t.Context(), states[i], group[i], info, node); !status.IsSuccess() {
				t.Fatal(status)
			}
		}
	}
	if !fits(states[0], group[0]) {
		t.Error("without both again, the first pod does not fit")
	}

	// What follows would be about another state of the node, and evict all pods.
	p.ledger.Observe(ledger.Holding{Pod: decisiontest.PodOf(newPod("new", 1)).Ref, Node: "node-a", Resource: memory, Units: 1,
		Device: "node-a-0", Confirmed: true})
	if status := p.RunPreFilterExtensionAddPod(t.Context(), states[0], group[0], put(c.pods[0]), node); status.Code() != fwk.Error ||
		!strings.Contains(status.Message(), "changed") {
		t.Errorf("after the node has changed: %v", status)
	}
	if err := p.snapshot.EndMutations(); err != nil {
		t.Fatal(err)
	}

	// A bind needs a reservation, whatever was tried out.
	states[0].SetPodGroupSchedulingCycle(nil)
	if status := p.RunReservePluginsReserve(t.Context(), states[0], group[0], "node-a"); status.Code() != fwk.Unschedulable {
		t.Errorf("devices that are in use are reserved: %v", status)
	}
}
