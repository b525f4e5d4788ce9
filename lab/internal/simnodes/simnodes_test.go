package simnodes

import (
	"context"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

func TestNodeIsWhatDivvyReads(t *testing.T) {
	g := Group{Name: "big", Cards: 3, Units: 32, Labels: map[string]string{"zone": "a"}}
	node, err := g.Node(7)
	if err != nil {
		t.Fatal(err)
	}
	if node.Name != "big-00007" || node.Labels[Label] != "big" || node.Labels[ShareLabel] != "true" || node.Labels["zone"] != "a" {
		t.Errorf("node %s has the labels %v", node.Name, node.Labels)
	}
	inventory, err := wire.DecodeInventory(node.Annotations[wire.InventoryAnnotation])
	if err != nil || len(inventory) != 1 || len(inventory[0].Shares) != 3 {
		t.Fatalf("inventory: %v, %v", inventory, err)
	}
	var units accel.Units
	ids := map[accel.DeviceID]bool{}
	for _, share := range inventory[0].Shares {
		units += share.Units
		ids[share.ID] = true
	}
	counted := node.Status.Allocatable[corev1.ResourceName(inventory[0].Resource)]
	if int64(units) != 96 || counted.Value() != 96 || len(ids) != 3 {
		t.Errorf("the inventory has %d units on the devices %v, the status counts %s", units, ids, counted.String())
	}
	other, err := g.Node(8)
	if err != nil {
		t.Fatal(err)
	}
	if other.Annotations[wire.InventoryAnnotation] == node.Annotations[wire.InventoryAnnotation] {
		t.Error("two nodes have the same devices")
	}
}

// What the API server adds to new nodes must not keep pods away.
func TestCreateRemovesTaints(t *testing.T) {
	ctx := context.Background()
	client := fake.NewClientset()
	client.PrependReactor("create", "nodes", func(action clienttesting.Action) (bool, runtime.Object, error) {
		node := action.(clienttesting.CreateAction).GetObject().(*corev1.Node) //nolint:forcetypeassert // of a reactor for these
		node.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}}
		return false, nil, nil
	})
	g := Group{Count: 40, Parallel: 4}
	for range 2 { // a second time changes nothing
		if err := g.Create(ctx, client); err != nil {
			t.Fatal(err)
		}
	}
	nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: Label + "=sim"})
	if err != nil || len(nodes.Items) != 40 {
		t.Fatalf("%d nodes, %v", len(nodes.Items), err)
	}
	for _, node := range nodes.Items {
		if len(node.Spec.Taints) > 0 {
			t.Errorf("%s has the taints %v", node.Name, node.Spec.Taints)
		}
	}
	if err := g.Delete(ctx, client); err != nil {
		t.Fatal(err)
	}
	if nodes, err = client.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); err != nil || len(nodes.Items) != 0 {
		t.Errorf("%d nodes are left, %v", len(nodes.Items), err)
	}
}

func TestErrors(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("create", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("no more nodes")
	})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if err := (Group{Count: 3}).Create(ctx, client); err == nil || !strings.Contains(err.Error(), "no more nodes") {
		t.Errorf("a server that refuses: %v", err)
	}
	if err := (Group{Count: -1}).Create(ctx, client); err == nil {
		t.Error("fewer than no nodes were made")
	}
	cancel()
	if err := (Group{Count: 3}).Delete(ctx, client); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end: %v", err)
	}
}

// Nodes whose cards are for claims publish slices, and nothing for pods that request units.
func TestClaims(t *testing.T) {
	ctx := context.Background()
	client := fake.NewClientset()
	g := Group{Count: 2, Cards: 3, Units: 8, Claims: true}
	for range 2 { // a second time changes nothing
		if err := g.Create(ctx, client); err != nil {
			t.Fatal(err)
		}
	}
	node, err := client.CoreV1().Nodes().Get(ctx, g.NodeName(1), metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, counted := node.Status.Allocatable["enflame.com/gcu-memory"]; counted || len(node.Annotations) != 0 {
		t.Errorf("the node has %v and the annotations %v", node.Status.Allocatable, node.Annotations)
	}
	if pod := g.ClaimPod("team", "a", "small"); len(pod.Spec.Containers[0].Resources.Requests) != 2 || len(pod.Spec.ResourceClaims) != 1 {
		t.Errorf("pod: %+v", pod.Spec)
	}
	slices, err := client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil || len(slices.Items) != 2 || len(slices.Items[1].Spec.Devices) != 3 {
		t.Fatalf("slices %+v, %v", slices, err)
	}
	// claim holds an amount of a device, "" for all of it.
	claim := func(device, amount string) resourceapi.ResourceClaim {
		result := resourceapi.DeviceRequestAllocationResult{Pool: slices.Items[0].Spec.Pool.Name, Device: device}
		if amount != "" {
			result.ShareID = new(types.UID)
			result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{wire.MemoryCapacity: resource.MustParse(amount)}
		}
		return resourceapi.ResourceClaim{Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{result}}}}}
	}
	first, second := slices.Items[0].Spec.Devices[0].Name, slices.Items[0].Spec.Devices[1].Name
	held, err := g.Claimed([]resourceapi.ResourceClaim{{}, claim(first, "3Gi"), claim(first, "5Gi"), claim(second, "")})
	if err != nil || len(held) != 2 || held[g.DeviceID(0, 0)] != 8<<30 || held[g.DeviceID(0, 1)] != 8<<30 {
		t.Errorf("held: %v, %v", held, err)
	}
	for want, claims := range map[string][]resourceapi.ResourceClaim{
		"claims hold 9663676416": {claim(first, "4Gi"), claim(first, "5Gi")},
		"which does not exist":   {claim("another", "1Gi")},
	} {
		if _, err := g.Claimed(claims); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
