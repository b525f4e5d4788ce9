package extender

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// severalResources says why a pod is rejected that requests several shared
// resources: a grant names devices of one resource.
func severalResources(requests []accel.Request) string {
	names := make([]string, len(requests))
	for i, r := range requests {
		names[i] = string(r.Resource)
	}
	return "the pod requests " + strings.Join(names, " and ") +
		": a pod can have only one shared resource, request the others in separate pods"
}

// mistaken is the reason of a pod whose annotations cannot be followed, on one
// line.
func mistaken(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// neverFits says that waiting does not help a pod, by what the nodes said that
// it may run on, "" when it may.
func neverFits(request accel.Request, counts *[codes]int) string {
	larger, few, other := counts[accel.LargerThanDevice], counts[accel.TooFewDevices], counts[accel.NotSelected]
	nodes := larger + few + other + counts[accel.Unservable]
	if nodes == 0 || nodes != nodesOf(counts)-counts[accel.NodeUnknown] {
		return ""
	}
	each := "on one device"
	if request.Devices > 1 {
		each = fmt.Sprintf("on each of %d devices", request.Devices)
	}
	asks := fmt.Sprintf("the pod requests %d units of %s %s", request.Peak()/accel.Units(max(request.Devices, 1)), request.Resource, each)
	if larger == nodes {
		return fmt.Sprintf("%s, more than any device has on the %d candidate nodes that offer it", asks, larger)
	}
	var why []string
	for _, one := range []struct {
		nodes int
		text  string
	}{
		{larger, "have no device of that size"},
		{few, fmt.Sprintf("have fewer than %d suitable devices", request.Devices)},
		{other, "have no device that " + selectionKeys(request.Selection) + " allows"},
		{counts[accel.Unservable], "cannot serve the request"},
	} {
		if one.nodes > 0 {
			why = append(why, fmt.Sprintf("%d %s", one.nodes, one.text))
		}
	}
	return fmt.Sprintf("%s; of the %d candidate nodes that offer it, %s", asks, nodes, strings.Join(why, ", "))
}

func nodesOf(counts *[codes]int) int {
	n := 0
	for _, c := range counts {
		n += c
	}
	return n
}

// selectionKeys are the annotations by which a pod chooses among devices.
func selectionKeys(s *accel.Selection) string {
	if s == nil {
		return "the pod"
	}
	var keys []string
	for _, one := range []struct {
		key   string
		names []string
	}{
		{wire.UseModelsAnnotation, s.UseModels}, {wire.AvoidModelsAnnotation, s.AvoidModels},
		{wire.UseDevicesAnnotation, s.UseIDs}, {wire.AvoidDevicesAnnotation, s.AvoidIDs},
	} {
		if len(one.names) > 0 {
			keys = append(keys, one.key)
		}
	}
	return strings.Join(keys, " with ")
}

// reasonOf says why a pod does not fit on a node. A request that is larger than any device
// reads the same as one that does not fit now, as it always did; that eviction
// cannot help is told by the list in which the node stands.
func reasonOf(c Cluster, request accel.Request, code accel.ReasonCode, node string) string {
	switch code {
	case accel.NodeUnknown:
		if problem := c.Problem(node); problem != "" {
			return problem
		}
		return "the node offers no " + string(request.Resource)
	case accel.TooFewDevices:
		return fmt.Sprintf("fewer than %d devices that are large enough and allowed for the pod", request.Devices)
	case accel.NotSelected:
		return "no device that " + selectionKeys(request.Selection) + " allows"
	case accel.NoCapacity:
		return "insufficient cpu or memory for a pod with a device"
	case accel.Unservable:
		if onlyOne(c, request, node) {
			return "divvy-node on this node does not support several devices per pod; upgrade it"
		}
		return "the extender does not support " + wire.PolicyAnnotation + " " + strconv.Quote(request.Policy)
	}
	memory, device := string(request.Resource), "device"
	if v := accel.VendorOfMemory(request.Resource); v != nil {
		memory, device = v.MemoryText, v.DeviceText
	}
	if request.Devices > 1 {
		return fmt.Sprintf("insufficient %s in %d %ss", memory, request.Devices, device)
	}
	return "insufficient " + memory + " in one " + device
}

// onlyOne reports whether the pod needs several devices and the node's daemon
// cannot give them.
func onlyOne(c Cluster, request accel.Request, node string) bool {
	return request.Devices > 1 && !c.Several(node, request.Resource)
}

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
