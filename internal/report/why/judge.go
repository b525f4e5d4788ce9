package why

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
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

func (w *world) judge(a *ask) []judged {
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
		w.judgeResource(a, &out[i], verdicts[i])
	}
	return out
}

// judgeResource sets what the resource lacks on the node, of which the ledger says v.
func (w *world) judgeResource(a *ask, j *judged, v ledger.Verdict) {
	about := a.resource()
	if about == "" {
		return
	}
	n := j.n
	j.sum = accel.Units(max(a.free(n, about), 0))
	want := a.requests[about]
	set := func(code Code, format string, args ...any) { j.code, j.detail = code, fmt.Sprintf(format, args...) }
	if a.shared.Resource == "" {
		switch {
		case n.allocatable[about] == 0:
			set(NoSuchResource, "offers no %s", about)
		case want > int64(j.sum) && want <= n.free(about):
			set(CapacityReserved, "free capacity is reserved for %s", listed(namesOf(a.after(n)), 3))
		case want > int64(j.sum):
			set(InsufficientCapacity, "%d of %d %s free", j.sum, n.allocatable[about], about)
			if held := n.holders(about); len(held) > 0 {
				j.evidence = []string{"held by " + listed(held, 3)}
			}
		}
		return
	}
	in := n.inventory(a.shared.Resource)
	switch {
	case n.broken != nil:
		set(InventoryBroken, "its inventory cannot be read")
		j.evidence = []string{n.broken.Error()}
	case in == nil:
		w.judgeAbsent(a, j)
	case a.wrong() != "":
		set(a.wrong(), "cannot serve the request")
	case a.shared.Devices > 1 && !in.Several:
		set(OldRelease, "divvy-node there does not support several devices per pod; upgrade it")
	case n.allocatable[about] == 0 && slices.ContainsFunc(in.Shares, usable):
		set(NotRegistered, "kubelet does not offer the units that its inventory has")
	default:
		w.judgeDevices(a, j, in, v)
	}
}

func usable(s accel.Share) bool { return !s.Health.Unhealthy && s.Units > s.Withheld }

// judgeAbsent says why a node without an inventory of the resource has none.
func (w *world) judgeAbsent(a *ask, j *judged) {
	n, about := j.n, a.resource()
	j.code, j.detail = NoSuchResource, "offers no "+string(about)
	v := accel.VendorOfMemory(a.shared.Resource)
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
	case !labelled && has:
		j.code, j.detail = NodeNotLabelled, "lacks the label "+v.NodeLabel+"=true"
	}
}

// judgeDevices puts the ledger's verdict into words.
func (w *world) judgeDevices(a *ask, j *judged, in *accel.Inventory, v ledger.Verdict) {
	r, n := a.shared, j.n
	set := func(code Code, format string, args ...any) { j.code, j.detail = code, fmt.Sprintf(format, args...) }
	usage, _ := w.ledger.Node(r.Resource, n.Name)
	for i := range usage.Devices {
		if d := &usage.Devices[i]; !d.Health.Unhealthy && r.Selection.Names(d.ID, d.Model) {
			j.largest = max(j.largest, d.Units-d.Withheld-d.Used)
		}
	}
	each := r.Peak() / accel.Units(max(r.Devices, 1))
	largestDevice := accel.Units(0)
	for i := range in.Shares {
		largestDevice = max(largestDevice, in.Shares[i].Units)
	}
	switch v.Code {
	case accel.Fits:
		switch want := r.Peak(); {
		case want > j.sum && int64(want) <= n.free(a.resource()):
			set(CapacityReserved, "free capacity is reserved for %s", listed(namesOf(a.after(n)), 3))
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
		w.judgeFree(a, j, in)
	default:
		set(AnnotationWrong, "cannot serve the request")
	}
}

// judgeFree says why no device has as much free as the pod requests.
func (w *world) judgeFree(a *ask, j *judged, in *accel.Inventory) {
	r, name := a.shared, j.n.Name
	set := func(code Code, format string, args ...any) { j.code, j.detail = code, fmt.Sprintf(format, args...) }
	alone := []string{name}
	if reserved := w.record.nominated[name]; len(reserved) > 0 {
		if fits(w.copyOf(alone, nil, false), r, name).Code == accel.Fits {
			var names []string
			for _, n := range reserved {
				names = append(names, w.nameOf(n.pod))
			}
			set(CapacityReserved, "free capacity is reserved for %s", listed(names, 3))
			return
		}
	}
	if ending := endingOn(w, name, r.Resource); len(ending) > 0 {
		if fits(w.copyOf(alone, isEnding, true), r, name).Code == accel.Fits {
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
	case len(other) > 0 && w.fitsHealthy(a, name, in, func(h accel.Health) bool {
		return strings.HasPrefix(h.Reason, accel.ReasonGivenOut)
	}):
		set(HeldAsOther, "%s", strings.Join(other, ", "))
	case len(ill) > 0 && w.fitsHealthy(a, name, in, func(h accel.Health) bool {
		return !strings.HasPrefix(h.Reason, accel.ReasonGivenOut)
	}):
		set(UnhealthyDevice, "%s", strings.Join(ill, ", "))
	case r.Peak() > j.sum:
		set(InsufficientCapacity, "%d of %d units free", j.sum, j.n.allocatable[a.resource()])
	default:
		set(NoDeviceFits, "largest free %d, sum %d", max(j.largest, 0), j.sum)
	}
}

// fitsHealthy reports whether the pod would fit if some unhealthy devices were healthy.
func (w *world) fitsHealthy(a *ask, node string, in *accel.Inventory, heals func(accel.Health) bool) bool {
	l := w.copyOf([]string{node}, nil, true)
	healed := *in
	healed.Shares = slices.Clone(in.Shares)
	for i := range healed.Shares {
		if s := &healed.Shares[i]; heals(s.Health) {
			s.Health = accel.Health{}
		}
	}
	l.SetNode(node, []accel.Inventory{healed})
	return fits(l, a.shared, node).Code == accel.Fits
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
	for i := range w.snapshot.Pods {
		if p := &w.snapshot.Pods[i]; string(p.UID) == uid {
			return p.Namespace + "/" + p.Name
		}
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
