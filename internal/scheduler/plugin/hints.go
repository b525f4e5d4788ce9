package plugin

import (
	"context"
	"maps"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// EventsToRegister implements fwk.EnqueueExtensions. Hints run under the lock of kube-scheduler's
// queue and look at the objects alone. In doubt they say that the pod may fit: what they miss, as
// where the ledger learns of something later, is left to the loop that wakes pods.
func (p *Plugin) EventsToRegister(context.Context) ([]fwk.ClusterEventWithHint, error) {
	return []fwk.ClusterEventWithHint{
		{
			Event: fwk.ClusterEvent{Resource: fwk.Node, ActionType: fwk.Add | fwk.UpdateNodeAnnotation | fwk.UpdateNodeLabel |
				fwk.UpdateNodeAllocatable},
			QueueingHintFn: p.nodeChanged,
		},
		// Update is also of the pod's own annotations.
		{Event: fwk.ClusterEvent{Resource: fwk.Pod, ActionType: fwk.Delete | fwk.Update}, QueueingHintFn: p.podChanged},
	}, nil
}

// nodeChanged is for a node that publishes devices, when something of it changed that counts.
func (*Plugin) nodeChanged(_ klog.Logger, _ *v1.Pod, before, after any) (fwk.QueueingHint, error) {
	node, ok := after.(*v1.Node)
	if !ok {
		return fwk.Queue, nil
	}
	old, _ := before.(*v1.Node)
	published := node.Annotations[wire.InventoryAnnotation]
	if old == nil {
		return hint(published != ""), nil
	}
	if old.Annotations[wire.InventoryAnnotation] != published {
		return fwk.Queue, nil
	}
	return hint(published != "" && !sameNode(old, node)), nil
}

// sameNode compares the labels, which may be required of nodes, and what nodes have besides devices.
func sameNode(a, b *v1.Node) bool {
	return maps.Equal(a.Labels, b.Labels) && maps.EqualFunc(a.Status.Allocatable, b.Status.Allocatable, resource.Quantity.Equal)
}

// podChanged is for a pod that held units and is gone or has ended, and for the waiting pod itself,
// of which other annotations may ask otherwise.
func (p *Plugin) podChanged(_ klog.Logger, waiting *v1.Pod, before, after any) (fwk.QueueingHint, error) {
	old, _ := before.(*v1.Pod)
	if old == nil {
		return fwk.Queue, nil
	}
	if now, updated := after.(*v1.Pod); updated && now != nil {
		if now.UID != waiting.UID {
			return fwk.QueueSkip, nil
		}
		return hint(p.asks(old) != p.asks(now)), nil
	}
	holds := old.Spec.NodeName != "" || old.Status.NominatedNodeName != ""
	return hint(holds && old.UID != waiting.UID && p.asks(old) != ""), nil
}

// asks is what a pod asks of the shared resources, "" for nothing.
func (p *Plugin) asks(pod *v1.Pod) string {
	requests, mistake := kube.RequestsOf(pod, p.core.config.Resources)
	out := ""
	for i := range requests {
		out += requests[i].Key() + "\n"
	}
	if mistake != nil {
		out += mistake.Error()
	}
	return out
}

func hint(may bool) fwk.QueueingHint {
	if may {
		return fwk.Queue
	}
	return fwk.QueueSkip
}
