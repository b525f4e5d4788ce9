package extender

import (
	"fmt"
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// noFit is what the event of a pod says when no single device of a node has
// room for it. The texts are part of the interface: users and scripts look for
// them. A resource that is not listed gets a text made of its name.
var noFit = map[accel.Resource]string{
	"enflame.com/gcu-memory":  "insufficient GCU Memory in one gcu device",
	"nvidia.com/gpu-memory":   "insufficient GPU Memory in one nvidia device",
	"iluvatar.com/gpu-memory": "insufficient GPU Memory in one iluvatar device",
}

// severalResources says why a pod is refused that asks for several shared
// resources: a grant names one device of one resource, and units of a second
// one would be nobody's.
func severalResources(requests []accel.Request) string {
	names := make([]string, len(requests))
	for i, r := range requests {
		names[i] = string(r.Resource)
	}
	return "the pod asks for " + strings.Join(names, " and ") + ": a pod can have one shared resource, ask for the others in pods of their own"
}

// neverFits says that waiting does not help a pod that asks for more than any of
// the nodes' devices has.
func neverFits(request accel.Request, nodes int) string {
	return fmt.Sprintf("the pod asks for %d units of %s on one device, more than any device has of the %d nodes that offer it and that it may run on",
		request.Peak(), request.Resource, nodes)
}

// reason says why a node was refused. A request that is larger than any device
// reads the same as one that does not fit now, as it always did; that eviction
// cannot help is told by the list in which the node stands.
func (e *Extender) reason(resource accel.Resource, code accel.ReasonCode, node string) string {
	if code == accel.NodeUnknown {
		if problem := e.config.Cluster.Problem(node); problem != "" {
			return problem
		}
		return "the node offers no " + string(resource)
	}
	if text, ok := noFit[resource]; ok {
		return text
	}
	return "insufficient " + string(resource) + " in one device"
}

// codeName is the label of a code in the metrics.
func codeName(code accel.ReasonCode) string {
	switch code {
	case accel.Fits:
		return "fits"
	case accel.NodeUnknown:
		return "nodeUnknown"
	case accel.NoDeviceFits:
		return "noDeviceFits"
	case accel.LargerThanDevice:
		return "largerThanDevice"
	case accel.TooFewDevices:
		return "tooFewDevices"
	case accel.NotSelected:
		return "notSelected"
	case accel.NoCapacity:
		return "noCapacity"
	case accel.Unservable:
		return "unservable"
	}
	return "other"
}
