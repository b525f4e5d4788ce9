package simnodes

import (
	"context"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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
