// Package simnodes makes nodes with shared cards that exist in the API server
// alone: no kubelet stands behind them, so pods are bound to them and never run.
// They are for what depends on the number of nodes and on nothing that a node
// does: the speed of scheduling, and what an extender keeps of its decisions.
//
// A node is published as Divvy's daemon and kubelet publish one together: the
// label, the inventory, and the counted resource in its status. Nobody renews
// its heartbeat. Without a kube-controller-manager, as under package
// controlplane, that matters to nobody; where one runs, it takes such nodes for
// lost after about a minute and evicts their pods.
package simnodes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Label marks every simulated node, with the group's name as its value.
const Label = "divvy-lab/simulated"

// Group is a number of equal nodes. The zero value of a field but Count stands for
// the default that is named with it.
type Group struct {
	// Name is the beginning of the nodes' names, "sim" by default.
	Name string
	// Count is how many nodes there are.
	Count int
	// Cards are how many cards a node has, 8 by default, and Units how many units
	// each card has, 16 by default.
	Cards int
	Units accel.Units
	// Resource is what the cards' units are counted as, enflame.com/gcu-memory by
	// default.
	Resource accel.Resource
	// Labels are further labels of the nodes; that which Divvy's extender asks of a
	// node by default is always there.
	Labels map[string]string
	// CPU in cores, Memory in GiB and Pods are what a node has for pods: 128, 1024
	// and 250 by default.
	CPU, Memory, Pods int64
	// Claims offers the cards to ResourceClaims, with a GiB of memory for each unit, and not as the
	// resource: the nodes publish no inventory, and Create makes slices and the DeviceClass.
	Claims bool
	// Parallel is how many requests are under way at once, 32 by default.
	Parallel int
}

// ShareLabel is the label, with the value "true", that Divvy's extender asks of a
// node by default.
const ShareLabel = "enflame.com/gcushare"

func (g Group) withDefaults() Group {
	set(&g.Name, "sim")
	set(&g.Cards, 8)
	set(&g.Units, 16)
	set(&g.Resource, "enflame.com/gcu-memory")
	set(&g.CPU, 128)
	set(&g.Memory, 1024)
	set(&g.Pods, 250)
	set(&g.Parallel, 32)
	return g
}

func set[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// NodeName is the name of the node with this number, from 0 on.
func (g Group) NodeName(number int) string {
	return fmt.Sprintf("%s-%05d", g.withDefaults().Name, number)
}

// Node returns the node with this number, from 0 on, as Create sends it. Its cards
// have ids that no other node of the group has.
func (g Group) Node(number int) (*corev1.Node, error) {
	g = g.withDefaults()
	inventory := accel.Inventory{Resource: g.Resource, Unit: "1", Several: true}
	for card := range g.Cards {
		inventory.Shares = append(inventory.Shares, accel.Share{Units: g.Units, Device: g.device(number, card)})
	}
	annotation, err := wire.EncodeInventory([]accel.Inventory{inventory})
	if err != nil {
		return nil, fmt.Errorf("simulated node %d: %w", number, err)
	}
	name := g.NodeName(number)
	labels := map[string]string{Label: g.Name, ShareLabel: "true", corev1.LabelHostname: name}
	for key, value := range g.Labels {
		labels[key] = value
	}
	amounts := corev1.ResourceList{
		corev1.ResourceCPU:              *resource.NewQuantity(g.CPU, resource.DecimalSI),
		corev1.ResourceMemory:           *resource.NewQuantity(g.Memory<<30, resource.BinarySI),
		corev1.ResourcePods:             *resource.NewQuantity(g.Pods, resource.DecimalSI),
		corev1.ResourceName(g.Resource): *resource.NewQuantity(int64(g.Cards)*int64(g.Units), resource.DecimalSI),
	}
	annotations := map[string]string{wire.InventoryAnnotation: annotation}
	if g.Claims {
		annotations = nil
		delete(amounts, corev1.ResourceName(g.Resource))
	}
	now := metav1.NewTime(time.Now())
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: annotations},
		Status: corev1.NodeStatus{
			Capacity: amounts, Allocatable: amounts,
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Simulated",
				LastHeartbeatTime: now, LastTransitionTime: now,
			}},
		},
	}, nil
}

func (g Group) device(number, card int) accel.Device {
	return accel.Device{Index: card, ID: g.DeviceID(number, card), Model: "S60", MemoryBytes: int64(g.Units) << 30,
		NUMANode: card * 2 / g.Cards}
}

// Create makes all nodes of the group. One that exists is left as it is. Where the
// API server marks new nodes as not ready, which it does by an admission plugin that
// is on by default, Create takes the mark away.
func (g Group) Create(ctx context.Context, client kubernetes.Interface) error {
	if g.Claims {
		if err := g.createSlices(ctx, client); err != nil {
			return err
		}
	}
	nodes := client.CoreV1().Nodes()
	err := g.each(ctx, func(ctx context.Context, number int) error {
		node, err := g.Node(number)
		if err != nil {
			return err
		}
		made, err := nodes.Create(ctx, node, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		if err != nil || len(made.Spec.Taints) == 0 {
			return err
		}
		made.Spec.Taints = nil
		_, err = nodes.Update(ctx, made, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("make simulated nodes: %w", err)
	}
	return nil
}

// Delete removes all nodes of the group. Pods on them stay.
func (g Group) Delete(ctx context.Context, client kubernetes.Interface) error {
	err := g.each(ctx, func(ctx context.Context, number int) error {
		err := client.CoreV1().Nodes().Delete(ctx, g.NodeName(number), metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("remove simulated nodes: %w", err)
	}
	return nil
}

// each calls do for every number, several at once, until one fails.
func (g Group) each(ctx context.Context, do func(context.Context, int) error) error {
	if g.Count < 0 {
		return fmt.Errorf("%d nodes", g.Count)
	}
	group, working := errgroup.WithContext(ctx)
	group.SetLimit(g.withDefaults().Parallel)
	for number := range g.Count {
		if working.Err() != nil {
			break
		}
		group.Go(func() error { return do(working, number) })
	}
	return errors.Join(group.Wait(), context.Cause(ctx))
}

// Pod returns a pod that asks for units of the group's resource, and for a little
// CPU and memory as pods do.
func (g Group) Pod(namespace, name string, units accel.Units) *corev1.Pod {
	amounts := corev1.ResourceList{
		corev1.ResourceCPU:                             resource.MustParse("100m"),
		corev1.ResourceMemory:                          resource.MustParse("128Mi"),
		corev1.ResourceName(g.withDefaults().Resource): *resource.NewQuantity(int64(units), resource.DecimalSI),
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "example.com/app:1", Resources: corev1.ResourceRequirements{Requests: amounts, Limits: amounts},
		}}},
	}
}
