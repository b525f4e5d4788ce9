package ledger

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// NodeUsage is a node as a person sees it. All amounts are in units of the
// resource.
type NodeUsage struct {
	Name string
	// Unit is the size of one unit as the node is configured, such as "0.1".
	Unit string
	// Total is the sum over the devices, unhealthy ones included. Used is the
	// sum over the pods, unplaced ones included; so it may exceed the sum over
	// the devices, and even Total when a device was lost under its pods.
	Total, Used accel.Units
	// Devices are in the order in which the node publishes them.
	Devices []DeviceUsage
	// Unplaced are pods on no device that the node has now: their device is not
	// known yet, was lost, or has no units left for them, see DeviceUsage.
	Unplaced []PodUsage
}

// DeviceUsage is a device and the pods on it. Kubelet gives no unit twice: where the
// units of all pods are more than the device has, those that kubelet did not give any
// yet will get others, and those that are gone have given theirs back. The node
// says so a moment later; until then they are unplaced. Used exceeds the units only
// by what pods hold that are confirmed. Units that are withheld are not in it.
// Isolation is what counts of it at the time.
type DeviceUsage struct {
	accel.Share
	Used accel.Units
	Pods []PodUsage
}

// PodUsage is a pod and what it holds.
type PodUsage struct {
	Pod     accel.PodRef
	Units   accel.Units
	Created time.Time
	// Confirmed is true once the node has seen kubelet hand the units out.
	Confirmed bool
	// Gone is true for a pod that only its node knows any more.
	Gone bool
	// Device is the device that the ledger names, also where the node does not
	// have it any more; "" when none was ever known. A pod on several devices is
	// listed with each, and Units are what it holds of that one.
	Device accel.DeviceID
}

// usageChunk is how many nodes are copied before writers get a turn.
const usageChunk = 16

// Nodes returns the nodes that publish the resource, sorted by name. Each node
// is consistent in itself; nodes may be from moments that lie a little apart.
// The ledger may be used meanwhile.
func (l *Ledger) Nodes(res accel.Resource) iter.Seq[NodeUsage] {
	return func(yield func(NodeUsage) bool) {
		var usages []NodeUsage
		for chunk := range slices.Chunk(namesOf(l, res), usageChunk) {
			usages = appendUsage(l, usages[:0], res, chunk)
			for _, u := range usages {
				u.arrange()
				if !yield(u) {
					return
				}
			}
		}
	}
}

// Node returns one node, and false when it does not publish the resource.
func (l *Ledger) Node(res accel.Resource, name string) (NodeUsage, bool) {
	out := appendUsage(l, nil, res, []string{name})
	if len(out) == 0 {
		return NodeUsage{}, false
	}
	out[0].arrange()
	return out[0], true
}

// Holds reports whether a pod that was observed on the node has units of that device of the
// resource there, planned or confirmed.
func Holds(l *Ledger, podUID, node string, res accel.Resource, device accel.DeviceID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	h := l.state.pods.on(podUID, res)
	if h == nil || !h.observed() || h.Gone || h.Node != node || device == "" {
		return false
	}
	return h.Device == device || slices.Contains(h.More, device)
}

// namesOf returns the names of the nodes of a resource, sorted.
func namesOf(l *Ledger, res accel.Resource) []string {
	l.mu.RLock()
	var out []string
	if x := l.state.nodes.byResource[res]; x != nil {
		out = slices.AppendSeq(make([]string, 0, len(x.numbers)), maps.Keys(x.numbers))
	}
	l.mu.RUnlock()
	slices.Sort(out)
	return out
}

func appendUsage(l *Ledger, out []NodeUsage, res accel.Resource, names []string) []NodeUsage {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, name := range names {
		if n := l.state.nodes.publishing(res, name); n != nil {
			out = append(out, n.usage())
		}
	}
	return out
}

// usage copies the node, with the pods in no order.
func (n *node) usage() NodeUsage {
	u := NodeUsage{Name: n.host.name, Unit: n.unit, Used: n.used, Devices: make([]DeviceUsage, len(n.shares))}
	for i, s := range n.shares {
		u.Total += s.Units
		if n.slots[i].Tier != s.Isolation.Memory {
			s.Isolation = s.Isolation.Lapsed()
		}
		u.Devices[i] = DeviceUsage{Share: s, Used: s.Units - s.Withheld - n.slots[i].Free}
	}
	for _, h := range n.pods {
		for i := range h.devices() {
			p := PodUsage{Pod: h.Pod, Units: h.part(i), Created: h.Created, Confirmed: h.Confirmed, Gone: h.Gone, Device: h.device(i)}
			if at := h.slotOf(i); at >= 0 {
				d := &u.Devices[at]
				d.Pods = append(d.Pods, p)
			} else {
				u.Unplaced = append(u.Unplaced, p)
			}
		}
	}
	return u
}

// arrange orders the pods by age, so that equal states print equal, and takes those off
// each device that have no place there.
func (u *NodeUsage) arrange() {
	for i := range u.Devices {
		d := &u.Devices[i]
		slices.SortFunc(d.Pods, comparePods)
		u.displace(d, func(p PodUsage) bool { return p.Gone })
		u.displace(d, func(p PodUsage) bool { return !p.Confirmed })
	}
	slices.SortFunc(u.Unplaced, comparePods)
}

// displace takes pods that may be off a device, the youngest first, as long as its
// pods have more units than it has.
func (u *NodeUsage) displace(d *DeviceUsage, may func(PodUsage) bool) {
	for i := len(d.Pods) - 1; i >= 0 && d.Used > d.Units; i-- {
		if p := d.Pods[i]; may(p) {
			d.Used -= p.Units
			d.Pods = slices.Delete(d.Pods, i, i+1)
			u.Unplaced = append(u.Unplaced, p)
		}
	}
}

func comparePods(a, b PodUsage) int {
	return cmp.Or(
		a.Created.Compare(b.Created),
		cmp.Compare(a.Pod.Namespace, b.Pod.Namespace),
		cmp.Compare(a.Pod.Name, b.Pod.Name),
		cmp.Compare(a.Pod.UID, b.Pod.UID),
		cmp.Compare(a.Device, b.Device), // one pod
	)
}

// Each returns the nodes that publish the resource, by name, as policies see
// them: for the renewal of weights, which needs them all. A node is valid until
// the next one, and must not be changed; the ledger may be used meanwhile. Nodes
// may be from moments that lie a little apart.
func (l *Ledger) Each(res accel.Resource) iter.Seq2[string, *place.Node] {
	return func(yield func(string, *place.Node) bool) {
		var copies [usageChunk]place.Node
		for chunk := range slices.Chunk(namesOf(l, res), usageChunk) {
			known := copyNodes(l, res, chunk, &copies)
			for i, name := range chunk {
				if known[i] && !yield(name, &copies[i]) {
					return
				}
			}
		}
	}
}

// copyNodes copies nodes, those that publish the resource, into space that is
// used again.
func copyNodes(l *Ledger, res accel.Resource, names []string, into *[usageChunk]place.Node) (known [usageChunk]bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for i, name := range names {
		n := l.state.nodes.publishing(res, name)
		if n == nil {
			continue
		}
		known[i] = true
		c := &into[i]
		c.Slots, c.Graph = append(c.Slots[:0], n.slots...), n.graph
		c.CPU, c.Memory = n.host.left()
		c.Cores = n.host.cpu
	}
	return known
}
