package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// countsAnnotation lists the resources that show a number of devices and that
// this program wrote into the node's status.
const countsAnnotation = wire.CountsAnnotation

// counts is what the configuration says of the resources that show a number of
// devices.
type counts struct {
	// devices is the number by resource, as far as it is known yet.
	devices map[string]int
	// named are those whose number is shown once it is known. What is not one of
	// them is taken off the node if this program put it there.
	named map[string]bool
	// served are the resources that kubelet is offered and writes by itself.
	served map[string]bool
}

// of returns which of the node's resources are to be listed as ours, which are
// those that were written and those that are about to be, and which of them are
// to be taken off.
func (c counts) of(node *corev1.Node) (ours, gone []string) {
	all := map[string]bool{}
	for _, name := range wire.CountedResources(node.Annotations[countsAnnotation]) {
		all[name] = true
	}
	for name := range c.devices {
		all[name] = true
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if c.served[name] {
			continue // kubelet's from now on
		}
		_, capacity := node.Status.Capacity[corev1.ResourceName(name)]
		_, allocatable := node.Status.Allocatable[corev1.ResourceName(name)]
		switch {
		case c.named[name]:
			ours = append(ours, name)
		case capacity || allocatable:
			// It stays listed until the node is seen without it.
			ours, gone = append(ours, name), append(gone, name)
		}
	}
	return ours, gone
}

// publishCounts writes the numbers of devices that differ and takes off the node
// what was written and is not configured any more.
func (p *publisher) publishCounts(ctx context.Context, node *corev1.Node, c counts, gone []string) error {
	write := map[string]any{}
	for name, n := range c.devices {
		have, set := node.Status.Capacity[corev1.ResourceName(name)]
		if q := resource.NewQuantity(int64(n), resource.DecimalSI); !set || have.Cmp(*q) != 0 {
			write[name] = q.String()
		}
	}
	for _, name := range gone {
		write[name] = nil
	}
	if len(write) == 0 {
		return nil
	}
	// Kubelet derives allocatable from capacity at its next heartbeat; setting
	// both spares users the time in which they differ.
	if err := p.patch(ctx, "status", map[string]any{"status": map[string]any{"capacity": write, "allocatable": write}}); err != nil {
		return fmt.Errorf("publish the number of devices: %w", err)
	}
	klog.FromContext(ctx).Info("Published the number of devices", "capacity", write, "removed", gone)
	return nil
}
