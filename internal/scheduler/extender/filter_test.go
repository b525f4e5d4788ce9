package extender

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

func TestFilter(t *testing.T) {
	sidecarPod := newPod("sidecars", 4)
	sidecarPod.Spec.InitContainers = []v1.Container{newContainer("init", gcuMemory, 9), newContainer("side", gcuMemory, 5)}
	sidecarPod.Spec.InitContainers[1].RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)

	tests := map[string]struct {
		pod          *v1.Pod
		nodes        []string
		fit          []string
		failed       extenderv1.FailedNodesMap
		unresolvable extenderv1.FailedNodesMap
	}{
		"fits both": {pod: newPod("p", 4), nodes: []string{"node-a", "node-b"}, fit: []string{"node-a", "node-b"}},
		"larger than the card of one node": {
			pod: newPod("p", 9), nodes: []string{"node-a", "node-b"}, fit: []string{"node-a"},
			unresolvable: extenderv1.FailedNodesMap{"node-b": noRoom},
		},
		"the guide's 20 GB": {
			pod: newPod("p", 20), nodes: []string{"node-a", "node-b"}, fit: []string{},
			unresolvable: extenderv1.FailedNodesMap{"node-a": noRoom, "node-b": noRoom},
		},
		"never across cards, whatever is free in all": {
			pod: newPod("p", 14), nodes: []string{"node-full"}, fit: []string{},
			failed: extenderv1.FailedNodesMap{"node-full": noRoom},
		},
		"the sum of containers counts": {
			pod: newPod("p", 5, 4), nodes: []string{"node-b"}, fit: []string{},
			unresolvable: extenderv1.FailedNodesMap{"node-b": noRoom},
		},
		"the peak of init and sidecar containers counts": {
			pod: sidecarPod, nodes: []string{"node-b", "node-a"}, fit: []string{"node-a"},
			unresolvable: extenderv1.FailedNodesMap{"node-b": noRoom},
		},
		"unknown, unlabelled and odd names": {
			pod: newPod("p", 1), nodes: []string{"nowhere", "unlabelled", "", "na\"me\n", "node-a"}, fit: []string{"node-a"},
			unresolvable: extenderv1.FailedNodesMap{
				"nowhere": "the node offers no enflame.com/gcu-memory", "unlabelled": "the node is not labelled x=y",
				"": "the node offers no enflame.com/gcu-memory", "na\"me\n": "the node offers no enflame.com/gcu-memory",
			},
		},
		"asks for nothing of ours": {pod: newPod("p"), nodes: []string{"nowhere", "node-a"}, fit: []string{"nowhere", "node-a"}},
		"no candidates":            {pod: newPod("p", 1), nodes: []string{}, fit: []string{}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.cluster.Problems["unlabelled"] = "the node is not labelled x=y"
			w.ledger.SetNode("node-full", []accel.Inventory{cards(gcuMemory, "f", 16, 16)})
			for i := range 2 {
				w.ledger.Observe(ledger.Holding{
					Pod: accel.PodRef{UID: fmt.Sprint(i)}, Node: "node-full", Resource: gcuMemory, Units: 8,
					Device: accel.DeviceID(fmt.Sprintf("f%d", i)),
				})
			}
			got := w.filter(extenderv1.ExtenderArgs{Pod: tt.pod, NodeNames: &tt.nodes})
			want := extenderv1.ExtenderFilterResult{NodeNames: &tt.fit, FailedNodes: tt.failed, FailedAndUnresolvableNodes: tt.unresolvable}
			if want.FailedNodes == nil {
				want.FailedNodes = extenderv1.FailedNodesMap{}
			}
			if want.FailedAndUnresolvableNodes == nil {
				want.FailedAndUnresolvableNodes = extenderv1.FailedNodesMap{}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("answer (-want +got):\n%s", diff)
			}

			// Whoever sends whole nodes gets whole nodes back.
			list := &v1.NodeList{}
			for _, n := range tt.nodes {
				if n == "" {
					return // a Node has a name
				}
				list.Items = append(list.Items, v1.Node{
					ObjectMeta: metav1.ObjectMeta{Name: n, Labels: map[string]string{"zone": "z"}},
					Status:     v1.NodeStatus{Addresses: []v1.NodeAddress{{Type: v1.NodeHostName, Address: n}}},
				})
			}
			got = w.filter(extenderv1.ExtenderArgs{Pod: tt.pod, Nodes: list})
			fit := []v1.Node{}
			for _, item := range list.Items {
				for _, n := range tt.fit {
					if n == item.Name {
						fit = append(fit, item)
					}
				}
			}
			want.NodeNames, want.Nodes = nil, &v1.NodeList{Items: fit}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("answer with whole nodes (-want +got):\n%s", diff)
			}
		})
	}
}

// Each resource has its own books and its own words, and Enflame's alone has
// the annotations of before.
func TestMemoryOfEveryVendor(t *testing.T) {
	vendors := map[accel.Resource]string{
		gcuMemory:                 noRoom,
		"nvidia.com/gpu-memory":   "insufficient GPU Memory in one nvidia device",
		"iluvatar.com/gpu-memory": "insufficient GPU Memory in one iluvatar device",
		otherMem:                  "insufficient example.com/other-memory in one device",
	}
	w := newWorld(t, func(c *Config) {
		c.Resources = []accel.Resource{gcuMemory, "nvidia.com/gpu-memory", "iluvatar.com/gpu-memory", otherMem}
	})
	nodes := []string{"mixed", "node-b"}
	inventories := []accel.Inventory{ // the first two are not the extender's business
		{Resource: "nvidia.com/gpu", Shares: cards("nvidia.com/gpu", "n", 1, 1).Shares},
		{Resource: "nvidia.com/gpu.shared", Shares: cards("nvidia.com/gpu.shared", "n", 4).Shares},
	}
	for resource := range vendors {
		inventories = append(inventories, cards(resource, string(resource[0]), 4, 16))
	}
	w.ledger.SetNode("mixed", inventories)
	for resource, text := range vendors {
		pod := newPod("p-" + string(resource[0]))
		pod.Spec.Containers = []v1.Container{newContainer("c", resource, 17)}
		got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes})
		want := extenderv1.FailedNodesMap{"mixed": text, "node-b": "the node offers no " + string(resource)}
		if resource == gcuMemory {
			want["node-b"] = text
		}
		if diff := cmp.Diff(want, got.FailedAndUnresolvableNodes); diff != "" {
			t.Errorf("%s (-want +got):\n%s", resource, diff)
		}

		pod.Spec.Containers = []v1.Container{newContainer("c", resource, 3)}
		var scores extenderv1.HostPriorityList
		w.ask("/prioritize", extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes}, &scores)
		if scores[0].Score != 10 {
			t.Errorf("%s: the one node with room scores %d, want 10", resource, scores[0].Score)
		}
		w.add(pod, resource)
		if text := w.bind(pod, "mixed"); text != "" {
			t.Errorf("%s: bind: %s", resource, text)
		}
		usage, _ := w.ledger.Node(resource, "mixed")
		if usage.Used != 3 || usage.Devices[0].Used != 3 {
			t.Errorf("%s: after the bind %+v", resource, usage)
		}
		annotations := w.cluster.Annotations["team/"+pod.Name]
		if n := len(annotations); n != map[bool]int{true: 6, false: 1}[resource == gcuMemory] {
			t.Errorf("%s: annotations %v", resource, annotations)
		}
	}
}

// A pod that asks for several shared resources is told so before it waits for
// a node for ever, and what to do about it.
func TestSeveralSharedResourcesAreRefusedAtFilter(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Resources = []accel.Resource{gcuMemory, otherMem} })
	w.ledger.SetNode("both", []accel.Inventory{cards(gcuMemory, "g", 16), cards(otherMem, "o", 4)})
	pod := newPod("p", 4)
	pod.Spec.Containers = append(pod.Spec.Containers, newContainer("o", otherMem, 1))
	nodes := []string{"both", "node-a"}
	const text = "the pod requests enflame.com/gcu-memory and example.com/other-memory: a pod can have only one shared resource, request " +
		"the others in separate pods"
	want := extenderv1.ExtenderFilterResult{NodeNames: &[]string{}, FailedNodes: extenderv1.FailedNodesMap{},
		FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{"both": text, "node-a": text}}
	if diff := cmp.Diff(want, w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	w.add(pod, gcuMemory, otherMem)
	mustContain(t, w.bind(pod, "both"), text)
	if used := w.used("both"); used[0] != 0 {
		t.Errorf("%d units are held after the refusal", used[0])
	}
	// Beside a resource of whole devices, the shared one is the only one here.
	pod.Spec.Containers[1] = newContainer("o", "nvidia.com/gpu", 1)
	if got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes}); len(*got.NodeNames) != 2 {
		t.Errorf("with a whole GPU beside it: %+v", got)
	}
}

// An unhealthy card takes no new pods but may come back, so its node is not
// beyond help.
func TestFilterUnhealthy(t *testing.T) {
	w := newWorld(t)
	sick := cards(gcuMemory, "s", 16)
	sick.Shares[0].Health = accel.Health{Unhealthy: true, Reason: "ECC"}
	w.ledger.SetNode("sick", []accel.Inventory{sick})
	nodes := []string{"sick"}
	got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("p", 1), NodeNames: &nodes})
	if diff := cmp.Diff(extenderv1.FailedNodesMap{"sick": noRoom}, got.FailedNodes); diff != "" {
		t.Errorf("while it is unhealthy (-want +got):\n%s", diff)
	}
	w.ledger.SetNode("sick", []accel.Inventory{cards(gcuMemory, "s", 16)})
	if got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("p", 1), NodeNames: &nodes}); len(*got.NodeNames) != 1 {
		t.Errorf("after it recovered: %+v", got)
	}
}

func TestPrioritize(t *testing.T) {
	w := newWorld(t)
	nodes := []string{"node-a", "node-b", "nowhere"}
	var got extenderv1.HostPriorityList
	w.ask("/prioritize", extenderv1.ExtenderArgs{Pod: newPod("p", 4), NodeNames: &nodes}, &got)
	if len(got) != 3 {
		t.Fatalf("answer %+v, want a score for each node", got)
	}
	for i, hp := range got {
		if hp.Host != nodes[i] || hp.Score < extenderv1.MinExtenderPriority || hp.Score > extenderv1.MaxExtenderPriority {
			t.Errorf("score %+v of %s", hp, nodes[i])
		}
	}
	// binpack: 8 units are a tighter fit for 4 than 16.
	if got[1].Score <= got[0].Score || got[2].Score != 0 {
		t.Errorf("scores %+v, want node-b above node-a and none for nowhere", got)
	}

	w.ask("/prioritize", extenderv1.ExtenderArgs{Pod: newPod("p"), NodeNames: &nodes}, &got)
	for _, hp := range got {
		if hp.Score != 0 {
			t.Errorf("a pod that asks for nothing got the score %+v", hp)
		}
	}
}

// The answer is what marshalling kube-scheduler's own type gives.
func TestFilterResultFields(t *testing.T) {
	body := appendFilterResult(nil, filterArgs{names: []string{"fits", "full", "tiny"}}, &decision.Answer{
		Fits: []int{0}, Refusals: []decision.Refusal{{Node: "full", Reason: "a"}, {Node: "tiny", Reason: "b", Unresolvable: true}},
	})
	want, err := json.Marshal(extenderv1.ExtenderFilterResult{
		NodeNames: &[]string{"fits"}, FailedNodes: extenderv1.FailedNodesMap{"full": "a"},
		FailedAndUnresolvableNodes: extenderv1.FailedNodesMap{"tiny": "b"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(body)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A pod that cannot be followed is refused everywhere, by filter and by bind,
// with the key that is wrong, and told so in an event.
func TestMistakesAreRefusedWithTheirKey(t *testing.T) {
	var told []string
	w := newWorld(t, func(c *Config) {
		c.Tell = func(pod accel.PodRef, kind events.Kind, message string) {
			told = append(told, pod.String()+" "+kind.Reason+": "+message)
		}
	})
	const reason = "annotation divvy.dev/devices: container c0 requests 5 of enflame.com/gcu-memory, which cannot be divided equally " +
		"among 2 devices; use 4 or 6" +
		"; annotation divvy.dev/placement-policy: \"best\" is not a placement policy; use one of binpack, spread, fragmentation"
	pod := newPod("p", 5)
	pod.Annotations = map[string]string{wire.CountAnnotation: "2", wire.PolicyAnnotation: "best"}
	nodes := []string{"node-a", "node-b"}
	got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes})
	for _, node := range nodes {
		text := got.FailedAndUnresolvableNodes[node]
		for _, part := range strings.Split(reason, "; annotation") {
			if !strings.Contains(text, strings.TrimPrefix(part, "annotation")) || strings.Contains(text, "\n") {
				t.Errorf("%s: %q does not say %q", node, text, part)
			}
		}
	}
	if len(told) != 1 || !strings.HasPrefix(told[0], "team/p RequestRefused: annotation divvy.dev/") {
		t.Errorf("events %q", told)
	}
	w.add(pod)
	if text := w.bind(pod, "node-a"); !strings.Contains(text, "cannot be divided equally among 2 devices") {
		t.Errorf("bind: %q", text)
	}
	if n := w.ledger.Counts().Reservations; n != 0 {
		t.Errorf("%d reservations are left", n)
	}
}

// A node daemon of an earlier release would serve such a pod with one device.
func TestSeveralDevicesOnlyFromNodesThatGiveThem(t *testing.T) {
	w := newWorld(t)
	w.ledger.SetNode("old", []accel.Inventory{cards(gcuMemory, "o", 16, 16)})
	w.ledger.SetNode("new", []accel.Inventory{cards(gcuMemory, "n", 16, 16)})
	w.cluster.Single = map[string]bool{"old": true}
	pod := newPod("p", 8)
	pod.Annotations = map[string]string{wire.CountAnnotation: "2"}
	nodes, want := []string{"old", "new"}, []string{"new"}
	got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes})
	if diff := cmp.Diff(&want, got.NodeNames); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	const text = "divvy-node on this node does not support several devices per pod; upgrade it"
	if got.FailedAndUnresolvableNodes["old"] != text {
		t.Errorf("refused %q", got.FailedAndUnresolvableNodes)
	}
	w.add(pod)
	if got := w.bind(pod, "old"); !strings.Contains(got, text) {
		t.Errorf("bind: %q", got)
	}
	pod.Annotations = nil
	if got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes}); len(*got.NodeNames) != 2 {
		t.Errorf("a pod of one device fits on %q", *got.NodeNames)
	}
}
