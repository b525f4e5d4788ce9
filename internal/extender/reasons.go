package extender

import "github.com/divvy-gpu/divvy/internal/accel"

// noFit is what the event of a pod says when no single device of a node has
// room for it. The texts are part of the interface: users and scripts look for
// them. A resource that is not listed gets a text made of its name.
var noFit = map[accel.Resource]string{
	"enflame.com/gcu-memory": "insufficient GCU Memory in one gcu device",
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
	}
	return "other"
}
