package why

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// Labels that the chart gives meaning.
const (
	labelEnabled = "divvy.dev/enabled"
)

// judged is what one node says of a pod.
type judged struct {
	n *nodeView
	// hindrances are those that do not come from the resource.
	hindrances []hindrance
	// code and detail are what the resource lacks there; "" for nothing.
	code     Code
	detail   string
	evidence []string
	// largest is the most free units of one device, sum what kube-scheduler counts as free.
	largest, sum accel.Units
}

// offers reports whether the node has the resource, or should.
func (j *judged) offers() bool { return j.code != NoSuchResource }

func (j *judged) fits() bool { return j.code == "" && len(j.hindrances) == 0 }

// startsUp reports whether the pod fits there once the node has started.
func (j *judged) startsUp() bool {
	return j.code == "" && len(j.hindrances) > 0 &&
		!slices.ContainsFunc(j.hindrances, func(h hindrance) bool { return h.code != StartupTaint })
}

// first is the code under which the node is counted: what keeps pods of any kind off it,
// then the resource, then CPU and the like.
func (j *judged) first() (code Code, detail string) {
	if !j.offers() {
		return j.code, j.detail
	}
	beside := slices.IndexFunc(j.hindrances, func(h hindrance) bool { return h.code.rank() >= Selector.rank() })
	switch {
	case beside >= 0:
		// Of several, the one that says most of the node.
		h := slices.MaxFunc(j.hindrances, func(a, b hindrance) int { return a.code.rank() - b.code.rank() })
		return h.code, h.text
	case j.code != "":
		return j.code, j.detail
	case len(j.hindrances) > 0:
		return j.hindrances[0].code, j.hindrances[0].text
	}
	return "", ""
}

// judge finds out what the nodes say of a pod.
type judge struct {
	world *world
	a     *ask
}

// judge asks all nodes about a pod.
func (w *world) judge(a *ask) []judged {
	o := &judge{w, a}
	out := make([]judged, len(w.nodes))
	verdicts := make([]ledger.Verdict, len(out))
	if a.shared.Resource != "" { // at once: a question about one node costs as much as one about all
		names := make([]string, len(out))
		for i, n := range w.nodes {
			names[i] = n.Name
		}
		w.ledger.Fits(a.shared, names, verdicts)
	}
	for i, n := range w.nodes {
		out[i] = judged{n: n, hindrances: a.hindrances(n)}
		o.resource(&out[i], verdicts[i])
	}
	return out
}

// resource sets what the resource lacks on the node, of which the ledger says v.
func (o *judge) resource(j *judged, v ledger.Verdict) {
	about := o.a.resource()
	if about == "" {
		return
	}
	n := j.n
	j.sum = accel.Units(max(o.a.free(n, about), 0))
	want := o.a.requests[about]
	set := func(code Code, format string, args ...any) { j.code, j.detail = code, fmt.Sprintf(format, args...) }
	if o.a.shared.Resource == "" {
		switch {
		case n.allocatable[about] == 0:
			set(NoSuchResource, "offers no %s", about)
		case want > int64(j.sum) && want <= n.free(about):
			set(CapacityReserved, "free capacity is reserved for %s", listed(namesOf(o.a.after(n)), 3))
		case want > int64(j.sum):
			set(InsufficientCapacity, "%d of %d %s free", j.sum, n.allocatable[about], about)
			if held := n.holders(about); len(held) > 0 {
				j.evidence = []string{"held by " + listed(held, 3)}
			}
		}
		return
	}
	in := n.inventory(o.a.shared.Resource)
	switch {
	case n.broken != nil:
		set(InventoryBroken, "its inventory cannot be read")
		j.evidence = []string{n.broken.Error()}
	case in == nil:
		o.absent(j)
	case o.a.wrong() != "":
		set(o.a.wrong(), "cannot serve the request")
	case o.a.shared.Devices > 1 && !in.Several:
		set(OldRelease, "divvy-node there does not support several devices per pod; upgrade it")
	case n.allocatable[about] == 0 && slices.ContainsFunc(in.Shares, usable):
		set(NotRegistered, "kubelet does not offer the units that its inventory has")
		o.notOffered(j)
	default:
		o.devices(j, in, v)
	}
}

// notOffered says why divvy-node does not offer the resource, where its event does.
func (o *judge) notOffered(j *judged) {
	for i := range o.world.snapshot.Events {
		ev := &o.world.snapshot.Events[i]
		message, ours := strings.CutPrefix(ev.Message, string(o.a.resource())+": ")
		if ev.Reason != events.ResourceNotOffered.Reason || ev.InvolvedObject.Kind != "Node" || ev.InvolvedObject.Name != j.n.Name ||
			!ours {
			continue
		}
		switch {
		case strings.Contains(message, "kubelet accepts") && strings.Contains(message, "memoryUnit"):
			j.code, j.detail = ListTooLong, "kubelet does not accept the list of its units; choose a larger memoryUnit"
		case strings.Contains(message, " not found"):
			j.code, j.detail = DriverMissing, "the library of the vendor's driver was not found there"
		}
		j.evidence = []string{"event " + ev.Reason + ": " + message}
	}
}

func usable(s accel.Share) bool { return !s.Health.Unhealthy && s.Units > s.Withheld }

// absent says why a node without an inventory of the resource has none.
func (o *judge) absent(j *judged) {
	n, about := j.n, o.a.resource()
	j.code, j.detail = NoSuchResource, "offers no "+string(about)
	v := accel.VendorOfMemory(o.a.shared.Resource)
	if v == nil {
		return
	}
	labelled := n.Labels[labelEnabled] == "true" || n.Labels[v.NodeLabel] == "true"
	has := n.allocatable[v1.ResourceName(v.Devices)] > 0
	for key := range n.Labels {
		has = has || v.Owns(key)
	}
	switch {
	case n.Labels[labelEnabled] == "false" && has:
		j.code, j.detail = Disabled, "label "+labelEnabled+"=false"
	case n.allocatable[about] > 0 || labelled && len(n.inventories) == 0:
		j.code, j.detail = DaemonMissing, "publishes no inventory of "+string(about)
		o.notOffered(j)
	case !labelled && has:
		j.code, j.detail = NodeNotLabelled, "lacks the label "+v.NodeLabel+"=true"
	}
}

// devices puts the ledger's verdict into words.
func (o *judge) devices(j *judged, in *accel.Inventory, v ledger.Verdict) {
	r, n := o.a.shared, j.n
	set := func(code Code, format string, args ...any) { j.code, j.detail = code, fmt.Sprintf(format, args...) }
	usage, _ := o.world.ledger.Node(r.Resource, n.Name)
	for i := range usage.Devices {
		if d := &usage.Devices[i]; !d.Health.Unhealthy && r.Selection.Names(d.ID, d.Model) {
			j.largest = max(j.largest, d.Units-d.Withheld-d.Used)
		}
	}
	each := r.Each()
	largestDevice := accel.Units(0)
	for i := range in.Shares {
		largestDevice = max(largestDevice, in.Shares[i].Units)
	}
	switch v.Code {
	case accel.Fits:
		switch want := r.Peak(); {
		case want > j.sum && int64(want) <= n.free(o.a.resource()):
			set(CapacityReserved, "free capacity is reserved for %s", listed(namesOf(o.a.after(n)), 3))
		case want > j.sum:
			set(InsufficientCapacity, "kube-scheduler counts %d units as free", j.sum)
		}
	case accel.LargerThanDevice:
		set(LargerThanDevice, "its largest device has %d units", largestDevice)
	case accel.TooFewDevices:
		fit := 0
		for _, s := range in.Shares {
			if s.Units >= each && r.Selection.Names(s.ID, s.Model) {
				fit++
			}
		}
		set(TooFewDevices, "%s of %d units or more", count(fit, "suitable device"), each)
	case accel.TooSmall:
		set(BelowContext, "%s; request at least %d units for each", accel.WhyTooSmall(r.Resource), in.Least)
	case accel.NotSelected:
		var have []string
		for _, s := range in.Shares {
			if !slices.Contains(have, s.Model) && s.Model != "" {
				have = append(have, s.Model)
			}
		}
		set(SelectionEmpty, "the pod's selection allows none of its devices")
		if len(have) > 0 {
			j.evidence = []string{"models: " + strings.Join(have, ", ")}
		}
	case accel.NotIsolated:
		set(IsolationNotStated, "%s", accel.WhyNotIsolated(r.Selection.Isolation, v.Stated))
	case accel.NoDeviceFits:
		o.free(j, in)
	default:
		set(AnnotationWrong, "cannot serve the request")
	}
}

// free says why no device has as much free as the pod requests.
func (o *judge) free(j *judged, in *accel.Inventory) {
	r, name := o.a.shared, j.n.Name
	set := func(code Code, format string, args ...any) { j.code, j.detail = code, fmt.Sprintf(format, args...) }
	alone := []string{name}
	if reserved := o.world.record.nominated[name]; len(reserved) > 0 {
		if fits(o.world.copyOf(alone, nil, false), r, name).Code == accel.Fits {
			var names []string
			for _, n := range reserved {
				names = append(names, o.world.nameOf(n.pod))
			}
			set(CapacityReserved, "free capacity is reserved for %s", listed(names, 3))
			return
		}
	}
	if ending := endingOn(o.world, name, r.Resource); len(ending) > 0 {
		if fits(o.world.copyOf(alone, isEnding, true), r, name).Code == accel.Fits {
			set(Ending, "%s will free enough", listed(ending, 3))
			return
		}
	}
	var other, ill []string
	for _, s := range in.Shares {
		reason, isOther := strings.CutPrefix(s.Health.Reason, accel.ReasonGivenOut)
		switch {
		case !s.Health.Unhealthy:
		case isOther:
			text := fmt.Sprintf("device %s is allocated as %s", accel.IndexText(s.Index), reason)
			if holder := j.n.holderOf(s.ID); holder != "" {
				text += " to " + holder
			}
			other = append(other, text)
		default:
			text := fmt.Sprintf("device %s is unhealthy", accel.IndexText(s.Index))
			if !s.Health.Quarantined.IsZero() {
				text = fmt.Sprintf("device %s is in quarantine", accel.IndexText(s.Index))
			}
			if s.Health.Reason != "" {
				text += ": " + s.Health.Reason
			}
			ill = append(ill, text)
		}
	}
	switch {
	case len(other) > 0 && o.fitsHealthy(name, in, func(h accel.Health) bool {
		return strings.HasPrefix(h.Reason, accel.ReasonGivenOut)
	}):
		set(HeldAsOther, "%s", strings.Join(other, ", "))
	case len(ill) > 0 && o.fitsHealthy(name, in, func(h accel.Health) bool {
		return !strings.HasPrefix(h.Reason, accel.ReasonGivenOut)
	}):
		set(UnhealthyDevice, "%s", strings.Join(ill, ", "))
	case r.Peak() > j.sum:
		set(InsufficientCapacity, "%d of %d units free", j.sum, j.n.allocatable[o.a.resource()])
	default:
		set(NoDeviceFits, "largest free %d, sum %d", max(j.largest, 0), j.sum)
	}
}

// fitsHealthy reports whether the pod would fit if some unhealthy devices were healthy.
func (o *judge) fitsHealthy(node string, in *accel.Inventory, heals func(accel.Health) bool) bool {
	l := o.world.copyOf([]string{node}, nil, true)
	healed := *in
	healed.Shares = slices.Clone(in.Shares)
	for i := range healed.Shares {
		if s := &healed.Shares[i]; heals(s.Health) {
			s.Health = accel.Health{}
		}
	}
	l.SetNode(node, []accel.Inventory{healed})
	return fits(l, o.a.shared, node).Code == accel.Fits
}

func isEnding(h *ledger.Holding) bool { return h.Ending || h.Gone }

// endingOn names the pods on a node that are ending and hold the resource.
func endingOn(w *world, node string, r accel.Resource) []string {
	var out []string
	for i := range w.record.held[node] {
		if h := &w.record.held[node][i]; h.Resource == r && isEnding(h) {
			out = append(out, h.Pod.String())
		}
	}
	return out
}

// nameOf is the pod of that UID.
func (w *world) nameOf(uid string) string {
	if p := w.pod(uid); p != nil {
		return p.Namespace + "/" + p.Name
	}
	return "another pod"
}

func namesOf(pods []placedPod) []string {
	out := make([]string, len(pods))
	for i, p := range pods {
		out[i] = p.Namespace + "/" + p.Name
	}
	return out
}

// holders are the pods on a node that request a resource.
func (n *nodeView) holders(r v1.ResourceName) []string {
	var out []string
	for _, p := range n.pods {
		if p.requests[r] > 0 {
			out = append(out, p.Namespace+"/"+p.Name)
		}
	}
	return out
}

// holderOf is the pod on a node that the device is allocated to as another resource, ""
// where the node has not noted it.
func (n *nodeView) holderOf(id accel.DeviceID) string {
	for _, p := range n.pods {
		held, err := wire.DecodeDevices(wire.HeldOf(p.Annotations))
		if err != nil {
			continue
		}
		for _, ids := range held {
			if slices.ContainsFunc(ids, func(one string) bool { return strings.HasPrefix(one, string(id)) }) {
				return p.Namespace + "/" + p.Name
			}
		}
	}
	return ""
}
