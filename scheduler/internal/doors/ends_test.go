package doors

import (
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

// postFilter is how an attempt ends that found no node.
func (p *compiled) postFilter(tb testing.TB, pod *v1.Pod) (*fwk.PostFilterResult, *fwk.Status) {
	tb.Helper()
	state, fits, why := p.attempt(tb, pod)
	if len(fits) > 0 {
		tb.Fatalf("the pod fits on %v", fits)
	}
	return p.RunPostFilterPlugins(tb.Context(), state, pod, framework.NewNodeToStatus(why, fwk.NewStatus(fwk.UnschedulableAndUnresolvable)))
}

// A pod is nominated to a node where its victim is ending. While the node is open it waits for that; once
// the node is closed it may have others evicted.
func TestNominatedNodeThatIsClosed(t *testing.T) {
	for name, closed := range map[string]bool{"open": false, "cordoned": true} {
		t.Run(name, func(t *testing.T) {
			c := &cluster{}
			for _, node := range []string{"node-a", "node-b"} {
				c.node(node, nil, 8)
				c.runs(podOf("low-"+node, 8, 1, 1), node, 0)
			}
			c.pods[0].DeletionTimestamp = &metav1.Time{}
			c.nodes[0].Spec.Unschedulable = closed
			pod := podOf("high", 8, 1, 100)
			pod.Status.NominatedNodeName = "node-a"
			c.pods = append(c.pods, pod)
			p := c.plugin(t, true, false)
			result, status := p.postFilter(t, pod)
			switch {
			case closed && (!status.IsSuccess() || result == nil || result.NominatedNodeName != "node-b"):
				t.Errorf("it is nominated to %+v (%v), want node-b", result, status)
			case !closed && (status.Code() != fwk.UnschedulableAndUnresolvable || !strings.Contains(status.Message(), "make room")):
				t.Errorf("the attempt ends with %+v, %v", result, status)
			}
		})
	}
}

// A victim without a grace period is gone before the ledger hears of it: no other pod is evicted.
func TestVictimIsGoneBeforeTheLedgerKnows(t *testing.T) {
	for name, priority := range map[string]int32{"a victim": 1, "a pod that may not be evicted": 100} {
		t.Run(name, func(t *testing.T) {
			c := &cluster{}
			for node, priority := range map[string]int32{"node-a": priority, "node-b": 1} {
				c.node(node, nil, 8)
				c.runs(podOf("low-"+node, 8, 1, priority), node, 0)
			}
			pod := podOf("high", 8, 1, 100)
			pod.Status.NominatedNodeName = "node-a"
			p := c.plugin(t, true, false)
			info, err := p.snapshot.NodeInfos().Get("node-a")
			if err != nil {
				t.Fatal(err)
			}
			if err := info.(*framework.NodeInfo).RemovePod(klog.Background(), info.GetPods()[0].GetPod()); err != nil {
				t.Fatal(err)
			}
			waits := priority < 100
			if result, status := p.postFilter(t, pod); waits != (status.Code() == fwk.UnschedulableAndUnresolvable) {
				t.Errorf("the attempt ends with %+v, %v", result, status)
			}
		})
	}
}

// After a node that was named came to nothing, whatever stood against it, the next attempt is over all nodes.
func TestAttemptAfterANodeThatWasNamed(t *testing.T) {
	c := &cluster{}
	c.node("node-a", nil, 16)
	c.node("node-b", nil, 8)
	for name, fails := range map[string]func(*compiled, fwk.CycleState, *v1.Pod){
		"a filter rejects it": func(p *compiled, state fwk.CycleState, pod *v1.Pod) {
			if _, status := p.RunPostFilterPlugins(t.Context(), state, pod, framework.NewNodeToStatus(nil,
				fwk.NewStatus(fwk.Unschedulable))); status.Code() != fwk.UnschedulableAndUnresolvable {
				t.Errorf("the attempt ends with %v: pods may be evicted for it", status)
			}
		},
		"it is reserved, and what follows fails": func(p *compiled, state fwk.CycleState, pod *v1.Pod) {
			if status := p.RunReservePluginsReserve(t.Context(), state, pod, "node-b"); !status.IsSuccess() {
				t.Fatal(status)
			}
			p.RunReservePluginsUnreserve(t.Context(), state, pod, "node-b")
			if n := p.ledger.Counts().Reservations; n != 0 {
				t.Errorf("%d reservations are left", n)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := c.plugin(t, true, false)
			pod := podOf("p", 8, 1, 1)
			state, fits, _ := p.attempt(t, pod)
			if want := []string{"node-b"}; !slices.Equal(fits, want) {
				t.Fatalf("the first attempt is over %v, want %v", fits, want)
			}
			fails(p, state, pod)
			if _, fits, _ := p.attempt(t, pod); len(fits) != 2 {
				t.Errorf("the next attempt is over %v", fits)
			}
			if _, fits, _ := p.attempt(t, podOf("other", 8, 1, 1)); len(fits) != 1 {
				t.Errorf("that of another pod is over %v", fits)
			}
		})
	}
}

// Victims are searched only where one may help: else kube-scheduler would try each node. What is said is of
// preemption, so that it is not read as a reason of the last node.
func TestNoVictimsOfLowerPriority(t *testing.T) {
	for name, tc := range map[string]struct {
		priority  int32
		nominated string
		searched  bool
	}{
		"equal priority":                    {priority: 1},
		"higher priority":                   {priority: 2, searched: true},
		"a nomination that came to nothing": {priority: 1, nominated: "node-a", searched: true},
	} {
		t.Run(name, func(t *testing.T) {
			c := &cluster{}
			c.node("node-a", nil, 8)
			c.runs(podOf("holds", 8, 1, 1), "node-a", 0)
			pod := podOf("p", 8, 1, tc.priority)
			pod.Status.NominatedNodeName = tc.nominated
			_, status := c.plugin(t, true, false).postFilter(t, pod)
			if ended := status.Code() == fwk.UnschedulableAndUnresolvable && strings.HasPrefix(status.Message(),
				"preemption: no pod of lower priority"); ended == tc.searched {
				t.Errorf("the attempt ends with %v", status)
			}
		})
	}
}
