package agent

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// healthyUnits counts what the offering has told kubelet is healthy, false when
// it has told nothing yet.
func (r *offering) healthyUnits() (int, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	told, n := false, 0
	for _, list := range r.lists {
		told = told || list != nil
		for _, u := range list {
			if !u.Unhealthy {
				n++
			}
		}
	}
	return n, told
}

// takesIn is how often kubelet is asked again, with askAgain between, for a list
// that it was just sent.
const takesIn = 5

func agrees(kubelet, ours map[accel.Resource]int) bool {
	for name, n := range ours {
		if kubelet[name] != n {
			return false
		}
	}
	return true
}

// publishAllocatable writes how much of whole devices and time slices is
// allocatable, as soon as kubelet knows: by itself it tells the API server every
// 10 seconds only, and for so long the scheduler would send pods to a device
// that is lost or withdrawn, which fail for good.
//
// It writes nothing but what kubelet has said that it would write, so it never
// shows more than kubelet admits; where the two meet, kubelet's next report has
// the last word. Units of memory are left to kubelet: there may be hundreds of
// thousands, and the extender, which decides about them, follows the inventory.
func (a *Agent) publishAllocatable(ctx context.Context) error {
	node, err := a.publisher.current()
	if err != nil {
		return err
	}
	differ := map[accel.Resource]int{}
	for _, r := range a.offerings {
		if r.parts[0].Kind != alloc.Slots {
			continue
		}
		_, known := node.Status.Capacity[corev1.ResourceName(r.name)]
		shown := node.Status.Allocatable[corev1.ResourceName(r.name)]
		if n, told := r.healthyUnits(); told && known && shown.Value() != int64(n) {
			differ[r.name] = n
		}
	}
	if len(differ) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	kubelet, err := a.kubelet.Allocatable(ctx)
	// It may be taking in the list just now.
	for range takesIn {
		if err != nil || agrees(kubelet, differ) || !sleep(ctx, askAgain) {
			break
		}
		kubelet, err = a.kubelet.Allocatable(ctx)
	}
	if err != nil {
		// Kubelet tells the API server itself, only later.
		klog.FromContext(ctx).V(1).Info("Leaving what is allocatable to kubelet", "reason", err.Error())
		return nil
	}
	write := map[string]string{}
	for name := range differ {
		capacity := node.Status.Capacity[corev1.ResourceName(name)]
		shown := node.Status.Allocatable[corev1.ResourceName(name)]
		n := min(int64(kubelet[name]), capacity.Value())
		if shown.Value() != n {
			write[string(name)] = resource.NewQuantity(n, resource.DecimalSI).String()
		}
	}
	if len(write) == 0 {
		return nil
	}
	if err := a.publisher.patch(ctx, "status", map[string]any{"status": map[string]any{"allocatable": write}}); err != nil {
		return fmt.Errorf("publish what is allocatable: %w", err)
	}
	klog.FromContext(ctx).Info("Published what is allocatable", "allocatable", write)
	return nil
}
