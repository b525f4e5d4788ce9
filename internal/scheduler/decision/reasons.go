package decision

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
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

// statedTiers are the tiers of nodes that have no device with the one that a pod requires.
type statedTiers struct {
	// texts are the reasons that were given, by what is stated.
	texts map[accel.TierSet]string
	// nodes are those whose highest tier it is.
	nodes map[accel.Tier]*namedNodes
}

// namedNodes are some nodes, of which the first few have a name.
type namedNodes struct {
	first []string
	count int
}

// maxNamed is how many nodes of one tier the message of an event names.
const maxNamed = 3

// add notes a node, and returns the reason why the pod does not fit there.
func (t *statedTiers) add(node string, required accel.Tier, stated accel.TierSet) string {
	if t.texts == nil {
		t.texts, t.nodes = map[accel.TierSet]string{}, map[accel.Tier]*namedNodes{}
	}
	highest := stated.Highest()
	if t.nodes[highest] == nil {
		t.nodes[highest] = &namedNodes{}
	}
	of := t.nodes[highest]
	if of.count++; len(of.first) < maxNamed {
		of.first = append(of.first, strings.Clone(node))
	}
	if t.texts[stated] == "" {
		t.texts[stated] = accel.WhyNotIsolated(required, stated)
	}
	return t.texts[stated]
}

// String says which nodes state what, the highest tier first: "cooperative on a; none on b, c,
// d and 2 more".
func (t *statedTiers) String() string {
	var parts []string
	for _, name := range slices.Backward(accel.TierNames()) {
		tier, _ := accel.ParseTier(name) // it is one
		if of := t.nodes[tier]; of != nil {
			part := name + " on " + strings.Join(of.first, ", ")
			if more := of.count - len(of.first); more > 0 {
				part += fmt.Sprintf(" and %d more", more)
			}
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "; ")
}

// neverFits says that waiting does not help a pod, by what the nodes said that
// it may run on, and of which kind that event is; "" when it may.
func neverFits(request accel.Request, counts *[codes]int, tiers *statedTiers) (events.Kind, string) {
	larger, few, other := counts[accel.LargerThanDevice], counts[accel.TooFewDevices], counts[accel.NotSelected]
	isolated, small := counts[accel.NotIsolated], counts[accel.TooSmall]
	nodes := larger + few + other + isolated + small + counts[accel.Unservable]
	if nodes == 0 || nodes != nodesOf(counts)-counts[accel.NodeUnknown] {
		return events.Kind{}, ""
	}
	required := ""
	if isolated > 0 {
		required = request.Selection.Isolation.String()
	}
	if isolated == nodes {
		return events.IsolationNotStated, fmt.Sprintf("the pod requires isolation %s, and none of the %d candidate nodes that offer %s "+
			"has a device that states it: %s", required, nodes, request.Resource, tiers)
	}
	each := "on one device"
	if request.Devices > 1 {
		each = fmt.Sprintf("on each of %d devices", request.Devices)
	}
	asks := fmt.Sprintf("the pod requests %d units of %s %s", request.Each(), request.Resource, each)
	if small == nodes {
		return events.NeverFits, fmt.Sprintf("%s on each of the %d candidate nodes that offer it; request more for it",
			accel.WhyTooSmall(request.Resource), nodes)
	}
	if larger == nodes {
		return events.NeverFits, fmt.Sprintf("%s, more than any device has on the %d candidate nodes that offer it", asks, larger)
	}
	var why []string
	for _, one := range []struct {
		nodes int
		text  string
	}{
		{larger, "have no device of that size"},
		{few, fmt.Sprintf("have fewer than %d suitable devices", request.Devices)},
		{other, "have no device that " + selectionKeys(request.Selection) + " allows"},
		{isolated, fmt.Sprintf("have no device that states isolation %s (%s)", required, tiers)},
		{small, "have contexts that are as large as what a container requests"},
		{counts[accel.Unservable], "cannot serve the request"},
	} {
		if one.nodes > 0 {
			why = append(why, fmt.Sprintf("%d %s", one.nodes, one.text))
		}
	}
	return events.NeverFits, fmt.Sprintf("%s; of the %d candidate nodes that offer it, %s", asks, nodes, strings.Join(why, ", "))
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
	case accel.TooSmall:
		return accel.WhyTooSmall(request.Resource)
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
	case accel.NotIsolated:
		return "notIsolated"
	case accel.TooSmall:
		return "tooSmall"
	case accel.NoCapacity:
		return "noCapacity"
	case accel.Unservable:
		return "unservable"
	}
	return "other"
}
