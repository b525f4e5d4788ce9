package cluster

import (
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// Overuse reads what nodes list of memory overuse, and what the cluster says of the pods
// on those lists. The State must keep the lists (Config.KeepOveruse). It is safe for
// concurrent use.
type Overuse struct {
	State  *State
	Ledger *ledger.Ledger
}

// OverusingPod is what a decision about a listed pod needs beside the list.
type OverusingPod struct {
	Priority int32
	// Static is as in Pod.
	Static bool
}

// Lists returns the annotation wire.OveruseAnnotation of each node that has one, as it
// was written.
func (o Overuse) Lists() map[string]string {
	o.State.mu.RLock()
	defer o.State.mu.RUnlock()
	out := map[string]string{}
	for name, n := range o.State.nodes {
		if n.overuse != "" {
			out[name] = n.overuse
		}
	}
	return out
}

// Pod returns the pod of an entry of the node's list. It returns false unless the pod of
// that name and UID is on that node, has not ended, is not being deleted, and holds that
// device of that resource by the ledger: a node can accuse only pods that hold the device,
// and only its own.
func (o Overuse) Pod(node string, ref accel.PodRef, resource accel.Resource, device accel.DeviceID) (OverusingPod, bool) {
	pod, ok := o.State.Pod(ref.Namespace, ref.Name)
	if !ok || pod.Ref.UID != ref.UID || pod.Node != node || pod.Ended || pod.Ending ||
		!ledger.Holds(o.Ledger, ref.UID, node, resource, device) {
		return OverusingPod{}, false
	}
	out := OverusingPod{Static: pod.Static}
	if len(pod.Requests) > 0 {
		out.Priority = pod.Requests[0].Priority // the pod's own, the same in each
	}
	return out, true
}
