package picture

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const (
	gcuMemory = "enflame.com/gcu-memory"
	gpuMemory = "nvidia.com/gpu-memory"
	gpu       = "nvidia.com/gpu"
)

func share(index int, id string, units accel.Units) accel.Share {
	return accel.Share{Units: units, Device: accel.Device{Index: index, ID: accel.DeviceID(id), Model: "M", NUMANode: accel.NoNUMA}}
}

// chip is one of a board of two, which is given out as a resource unless that is "".
func chip(givenOut, id string, at int) accel.Share {
	s := share(at, id, 16)
	s.Board, s.Chip = "X", at
	if givenOut != "" {
		s.Health = accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + givenOut}
	}
	return s
}

// board is the two of which the first has this id, as one device.
func board(givenOut, id string) accel.Share {
	s := chip(givenOut, id, 0)
	s.Units, s.Chips = 1, 2
	return s
}

func nodeOf(t *testing.T, inventories ...accel.Inventory) *v1.Node {
	t.Helper()
	text, err := wire.EncodeInventory(inventories)
	if err != nil {
		t.Fatal(err)
	}
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Annotations: map[string]string{wire.InventoryAnnotation: text}}}
}

var created = time.Unix(1790000000, 0)

func podOf(name, res string, units int64) *v1.Pod {
	amount := v1.ResourceList{v1.ResourceName(res): *resource.NewQuantity(units, resource.DecimalSI)}
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name),
		CreationTimestamp: metav1.NewTime(created)},
		Spec: v1.PodSpec{Containers: []v1.Container{{Resources: v1.ResourceRequirements{Limits: amount, Requests: amount}}}}}
}

// on puts a pod on devices of node n.
func on(t *testing.T, pod *v1.Pod, res string, units accel.Units, devices ...string) *v1.Pod {
	t.Helper()
	signer, err := wire.NewSigner(make([]byte, wire.MinKeyBytes))
	if err != nil {
		t.Fatal(err)
	}
	grant := accel.Grant{Resource: accel.Resource(res), Node: "n", Device: accel.DeviceID(devices[0]), DeviceUnits: 16, Units: units,
		At: created, Confirmed: true}
	for i, d := range devices[1:] {
		grant.More = append(grant.More, accel.GrantedDevice{Device: accel.DeviceID(d), Index: i + 1, DeviceUnits: 16})
	}
	text, err := signer.EncodeGrant(string(pod.UID), grant)
	if err != nil {
		t.Fatal(err)
	}
	pod.Annotations = map[string]string{wire.GrantAnnotation: text}
	pod.Spec.NodeName, pod.Status.Phase = "n", v1.PodRunning
	return pod
}

// whole is a pod that holds a whole device of node n.
func whole(name, device string) *v1.Pod {
	pod := podOf(name, gpu, 1)
	pod.Annotations = map[string]string{wire.HeldAnnotation: fmt.Sprintf(`{%q:[%q]}`, gpu, device)}
	pod.Spec.NodeName, pod.Status.Phase = "n", v1.PodRunning
	return pod
}

func TestNodeOf(t *testing.T) {
	bad := share(2, "C", 16)
	bad.Health = accel.Health{Unhealthy: true, Reason: "hot"}
	kept := share(3, "D", 16)
	kept.Health = accel.Health{Unhealthy: true, Reason: "XID 79", Quarantined: created.UTC()}
	kept.Model = "other"
	given := share(0, "G", 1)
	given.Health = accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + gpuMemory}
	withheld := share(1, "B", 16)
	withheld.Withheld = 2
	for name, tt := range map[string]struct {
		node *v1.Node
		pods []*v1.Pod
		want Node
	}{
		"memory": {
			node: nodeOf(t, accel.Inventory{Resource: gcuMemory, Unit: "1", Several: true, Shares: []accel.Share{share(0, "A", 16),
				withheld, bad, kept}}),
			pods: []*v1.Pod{on(t, podOf("two", gcuMemory, 8), gcuMemory, 8, "A", "B"), on(t, podOf("one", gcuMemory, 3), gcuMemory, 3,
				"A")},
			want: Node{Name: "n", Kinds: []Kind{{gcuMemory, "in units of 1 GB"}}, Model: "M", Devices: []Device{
				{ID: "A", Index: "0", Offers: []Offer{{Total: 16, Used: 7}}, Pods: []Allocation{
					{Namespace: "team", Name: "one", Units: 3, Since: created.Unix()},
					{Namespace: "team", Name: "two", Units: 4, Holds: "4 of 8", Since: created.Unix()}}},
				{ID: "B", Index: "1", Offers: []Offer{{Total: 16, Used: 4, Withheld: 2}},
					Pods: []Allocation{{Namespace: "team", Name: "two", Units: 4, Holds: "4 of 8", Since: created.Unix()}}},
				{ID: "C", Index: "2", State: StateUnhealthy, Reason: "hot", Offers: []Offer{{Total: 16}}},
				{ID: "D", Index: "3", Model: "other", State: StateQuarantine, Reason: "XID 79", Offers: []Offer{{Total: 16}}},
			}},
		},
		"a device that is offered as two resources is one": {
			node: nodeOf(t, accel.Inventory{Resource: gpu, Shares: []accel.Share{given}},
				accel.Inventory{Resource: gpuMemory, Unit: "1", Shares: []accel.Share{share(0, "G", 80)}}),
			pods: []*v1.Pod{on(t, podOf("holds", gpuMemory, 20), gpuMemory, 20, "G")},
			want: Node{Name: "n", Kinds: []Kind{{gpu, "as whole devices"}, {gpuMemory, "in units of 1 GB"}}, Model: "M", Devices: []Device{
				{ID: "G", Index: "0", Offers: []Offer{{Total: 1, Other: 1}, {Kind: 1, Total: 80, Used: 20}},
					Pods: []Allocation{{Namespace: "team", Name: "holds", Kind: 1, Units: 20, Since: created.Unix()}}},
			}},
		},
		"a board that is offered by chip as well is its chips": {
			node: nodeOf(t, accel.Inventory{Resource: gpu, Shares: []accel.Share{board("", "A")}},
				accel.Inventory{Resource: gpuMemory, Unit: "1", Shares: []accel.Share{chip("", "A", 0), chip("", "B", 1)}}),
			want: Node{Name: "n", Kinds: []Kind{{gpu, "as whole devices"}, {gpuMemory, "in units of 1 GB"}}, Model: "M", Devices: []Device{
				{ID: "A", Index: "0", Board: "X", Offers: []Offer{{Kind: 1, Total: 16}, {Total: 1}}},
				{ID: "B", Index: "1", Board: "X", Offers: []Offer{{Kind: 1, Total: 16}, {Total: 1}}},
			}},
		},
		"a board that a pod holds whole is one device": {
			node: nodeOf(t, accel.Inventory{Resource: gpu, Shares: []accel.Share{board("", "A")}},
				accel.Inventory{Resource: gpuMemory, Unit: "1", Shares: []accel.Share{chip(gpu, "A", 0), chip(gpu, "B", 1)}}),
			pods: []*v1.Pod{whole("holds", "A")},
			want: Node{Name: "n", Kinds: []Kind{{gpu, "as whole devices"}, {gpuMemory, "in units of 1 GB"}}, Model: "M", Devices: []Device{
				{ID: "A", Index: "0", Board: "X", Chips: 2, Offers: []Offer{{Total: 1, Used: 1}},
					Pods: []Allocation{{Namespace: "team", Name: "holds", Units: 1, Holds: "whole", Since: created.Unix()}}},
			}},
		},
		"a board of which a pod holds a chip is its chips": {
			node: nodeOf(t, accel.Inventory{Resource: gpu, Shares: []accel.Share{board(gpuMemory, "A")}},
				accel.Inventory{Resource: gpuMemory, Unit: "1", Shares: []accel.Share{chip("", "A", 0), chip("", "B", 1)}}),
			pods: []*v1.Pod{on(t, podOf("holds", gpuMemory, 4), gpuMemory, 4, "B")},
			want: Node{Name: "n", Kinds: []Kind{{gpu, "as whole devices"}, {gpuMemory, "in units of 1 GB"}}, Model: "M", Devices: []Device{
				{ID: "A", Index: "0", Board: "X", Offers: []Offer{{Kind: 1, Total: 16}, {Total: 1, Other: 1}}},
				{ID: "B", Index: "1", Board: "X", Offers: []Offer{{Kind: 1, Total: 16, Used: 4}, {Total: 1, Other: 1}},
					Pods: []Allocation{{Namespace: "team", Name: "holds", Kind: 1, Units: 4, Since: created.Unix()}}},
			}},
		},
		"a node that is closed": {
			node: &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{v1.LabelTopologyZone: "z"},
				Annotations: map[string]string{wire.InventoryAnnotation: "{"}}, Spec: v1.NodeSpec{Unschedulable: true},
				Status: v1.NodeStatus{Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionUnknown}}}},
			want: Node{Name: "n", Zone: "z", Closed: []string{"cordoned", "not ready"}, Problem: "inventory", Devices: []Device{}},
		},
		"a pod without a device yet": {
			node: nodeOf(t, accel.Inventory{Resource: gcuMemory, Unit: "1", Shares: []accel.Share{share(0, "A", 16)}}),
			pods: []*v1.Pod{on(t, podOf("lost", gcuMemory, 8), gcuMemory, 8, "gone")},
			want: Node{Name: "n", Kinds: []Kind{{gcuMemory, "in units of 1 GB"}}, Model: "M",
				Devices:  []Device{{ID: "A", Index: "0", Offers: []Offer{{Total: 16}}}},
				Unplaced: []Allocation{{Namespace: "team", Name: "lost", Units: 8, Since: created.Unix()}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := NodeOf(tt.node, tt.pods)
			if tt.want.Problem != "" && strings.Contains(got.Problem, tt.want.Problem) {
				got.Problem = tt.want.Problem
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestMeasure(t *testing.T) {
	n := NodeOf(nodeOf(t, accel.Inventory{Resource: gcuMemory, Unit: "1", Shares: []accel.Share{share(0, "A", 16), share(1, "B", 16)}}),
		[]*v1.Pod{on(t, podOf("p", gcuMemory, 8), gcuMemory, 8, "A")})
	number := func(n uint64) *uint64 { return &n }
	use := &wire.UsageReport{Devices: []wire.DeviceUsage{{Device: "A", MemoryBytes: 16, UsedBytes: 9, SystemBytes: 1, ForeignBytes: 2,
		UnknownBytes: 3,
		Containers: []wire.ContainerUsage{
			{Namespace: "team", Pod: "p", Container: "a", AllocatedBytes: number(5), UsedBytes: number(1)},
			{Namespace: "team", Pod: "p", Container: "b", AllocatedBytes: number(3), UsedBytes: number(2)},
			{Namespace: "other", Pod: "p", UsedBytes: number(100)},
		}}, {Device: "B", MemoryBytes: 16, Problem: "lost"}}}
	n.Measure(use)
	if diff := cmp.Diff(&Use{Total: 16, Used: 9, Others: 6}, n.Devices[0].Use); diff != "" {
		t.Error(diff)
	}
	if p := n.Devices[0].Pods[0]; *p.AllocatedBytes != 8 || *p.UsedBytes != 3 {
		t.Errorf("the pod uses %d of %d", *p.UsedBytes, *p.AllocatedBytes)
	}
	if n.Devices[1].Use.Problem != "lost" {
		t.Errorf("device B: %+v", n.Devices[1].Use)
	}
	use.Devices[0].Containers[0].UsedBytes = nil
	n.Measure(use)
	if p := n.Devices[0].Pods[0]; p.UsedBytes != nil || *p.AllocatedBytes != 8 {
		t.Errorf("the pod uses %v, want an unknown amount", p.UsedBytes)
	}
}

// TestMeasureBoard: what is measured of a board's first chip is not that of the board.
func TestMeasureBoard(t *testing.T) {
	n := NodeOf(nodeOf(t, accel.Inventory{Resource: gpu, Shares: []accel.Share{board("", "A")}}),
		[]*v1.Pod{whole("p", "A")})
	n.Measure(&wire.UsageReport{Devices: []wire.DeviceUsage{{Device: "A", MemoryBytes: 16, UsedBytes: 9}}})
	if d := n.Devices[0]; d.Use != nil || d.Pods[0].UsedBytes != nil {
		t.Errorf("the board uses %+v", d.Use)
	}
}

func TestRequests(t *testing.T) {
	c := NewCluster(false)
	c.SetPod(podOf("zero", gcuMemory, 0))
	pod := podOf("init", gcuMemory, 10)
	pod.Spec.InitContainers = podOf("", gcuMemory, 12).Spec.Containers
	pod.Spec.Containers = append(pod.Spec.Containers, podOf("", gpu, 1).Spec.Containers...)
	pod.Spec.Containers[1].Resources.Limits[gpuMemory] = resource.MustParse("0")
	c.SetPod(pod)
	change, _ := c.Since(0)
	if len(change.Waiting) != 1 || change.Waiting[0].Request != "12 "+gcuMemory+", 1 "+gpu {
		t.Errorf("waiting: %+v", change.Waiting)
	}
}

// names are those of the nodes in a change.
func names(t *testing.T, c Change) []string {
	t.Helper()
	var out []string
	for _, raw := range c.Nodes {
		var n Node
		if err := json.Unmarshal(raw, &n); err != nil {
			t.Fatal(err)
		}
		out = append(out, n.Name)
	}
	return out
}

func TestCluster(t *testing.T) {
	c := NewCluster(false)
	revision := uint64(0)
	since := func() Change {
		t.Helper()
		change, next := c.Since(revision)
		revision = next
		return change
	}
	inventory := accel.Inventory{Resource: gcuMemory, Unit: "1", Shares: []accel.Share{share(0, "A", 16)}}
	n := nodeOf(t, inventory)
	c.SetNode(n)
	c.SetNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "without"}})
	if got := since(); fmt.Sprint(names(t, got)) != "[n]" || got.Waiting == nil {
		t.Errorf("first: %s, waiting %v", names(t, got), got.Waiting)
	}
	changed := c.Changed()
	heartbeat := n.DeepCopy()
	heartbeat.Status.Conditions = []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}}
	c.SetNode(heartbeat)
	<-changed
	if got := since(); got.Nodes != nil || got.Waiting != nil || got.Gone != nil {
		t.Errorf("a heartbeat changes %+v", got)
	}
	waits := podOf("p", gcuMemory, 8)
	waits.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Message: "0/1 nodes"}}
	c.SetPod(waits)
	if got := since(); got.WaitingTotal != 1 || got.Waiting[0].Reason != "0/1 nodes" || got.Waiting[0].Request != "8 "+gcuMemory ||
		got.Nodes != nil {
		t.Errorf("a pod that waits: %+v", got)
	}
	c.SetReason(waits, "too large")
	again := waits.DeepCopy()
	again.Labels = map[string]string{"a": "b"}
	c.SetPod(again) // it is still explained
	other := waits.DeepCopy()
	other.UID = "another of that name"
	c.SetReason(other, "wrong")
	if got := since(); got.Waiting[0].Reason != "too large" || !got.Waiting[0].Explained {
		t.Errorf("an explained pod: %+v", got)
	}
	s, pods := c.Snapshot()
	if len(s.Nodes) != 2 || len(s.Pods) != 1 || len(pods) != 1 || !c.Waits() {
		t.Errorf("the snapshot has %d nodes, %d pods, %d that wait", len(s.Nodes), len(s.Pods), len(pods))
	}
	c.SetPod(on(t, again.DeepCopy(), gcuMemory, 8, "A"))
	if got := since(); fmt.Sprint(names(t, got)) != "[n]" || got.WaitingTotal != 0 || got.Waiting == nil ||
		!strings.Contains(string(got.Nodes[0]), `"used":8`) {
		t.Errorf("a pod that runs: %+v", got)
	}
	plain := podOf("plain", "cpu", 1)
	plain.Spec.NodeName = "n"
	c.SetPod(plain)
	c.SetPod(podOf("plain-waits", "cpu", 1))
	c.SetPod(podOf("huge", "hugepages.kubernetes.io/x", 1))
	if got := since(); got.Nodes != nil || got.Waiting != nil {
		t.Errorf("pods without devices change %+v", got)
	}
	c.SetUse("n", &wire.UsageReport{Devices: []wire.DeviceUsage{{Device: "A", MemoryBytes: 4, UsedBytes: 2}}})
	c.SetUse("unknown", &wire.UsageReport{})
	if got := since(); len(got.Nodes) != 1 || !strings.Contains(string(got.Nodes[0]), `"use":{"total":4,"used":2}`) {
		t.Errorf("use changes %+v", got)
	}
	c.DeletePod("team", "p")
	if got := since(); !strings.Contains(string(got.Nodes[0]), `"offers":[{"total":16}]`) || !strings.Contains(string(got.Nodes[0]),
		`"use"`) {
		t.Errorf("a pod that is gone: %s", got.Nodes)
	}
	c.DeleteNode("n")
	if got := since(); fmt.Sprint(got.Gone) != "[n]" || got.Nodes != nil {
		t.Errorf("a node that is gone: %+v", got)
	}
	c.SetNode(n)
	if got := since(); fmt.Sprint(names(t, got)) != "[n]" || got.Gone != nil {
		t.Errorf("a node that is back: %+v", got)
	}
	for i := range MaxWaiting + 1 {
		c.SetPod(podOf(fmt.Sprint("w", i), gcuMemory, 1))
	}
	if got := since(); len(got.Waiting) != MaxWaiting || got.WaitingTotal != MaxWaiting+1 {
		t.Errorf("%d of %d pods that wait", len(got.Waiting), got.WaitingTotal)
	}
}

// TestHiddenNodes: a person who may not read nodes sees what the pods say of them.
func TestHiddenNodes(t *testing.T) {
	c := NewCluster(true)
	c.SetPod(on(t, podOf("p", gcuMemory, 8), gcuMemory, 8, "A", "B"))
	c.SetPod(on(t, podOf("q", gcuMemory, 4), gcuMemory, 4, "A"))
	change, revision := c.Since(0)
	var got Node
	if len(change.Nodes) != 1 || json.Unmarshal(change.Nodes[0], &got) != nil {
		t.Fatalf("%s", change.Nodes)
	}
	want := Node{Name: "n", Kinds: []Kind{{Resource: gcuMemory}}, Devices: []Device{
		{ID: "A", Index: "0", Offers: []Offer{{Total: 16, Used: 8}}, Pods: []Allocation{
			{Namespace: "team", Name: "p", Units: 4, Holds: "4 of 8", Since: created.Unix()},
			{Namespace: "team", Name: "q", Units: 4, Since: created.Unix()}}},
		{ID: "B", Index: "1", Offers: []Offer{{Total: 16, Used: 4}},
			Pods: []Allocation{{Namespace: "team", Name: "p", Units: 4, Holds: "4 of 8", Since: created.Unix()}}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	c.DeletePod("team", "p")
	c.DeletePod("team", "q")
	if change, _ = c.Since(revision); fmt.Sprint(change.Gone) != "[n]" {
		t.Errorf("a node without pods: %+v", change)
	}
}
