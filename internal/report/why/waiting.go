package why

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// backOff is kube-scheduler's longest time between two attempts to place a pod, by default.
const backOff = 10 * time.Second

// explainWaiting explains a pod without a node.
func (x *Explainer) explainWaiting(e *Explanation, a *ask) {
	p := a.pod
	e.State = StateWaits
	condition := scheduled(p)
	x.explainScheduler(e, p, condition)
	message := ""
	if condition != nil {
		message = condition.Message
	}
	if message == "" {
		message = x.lastFailure(p)
	}
	reasons := reasonsOf(message)
	if x.snapshot.failed(SourceNodes) || x.snapshot.failed(SourcePods) {
		e.Partial = true
		for _, r := range reasons {
			e.Causes = append(e.Causes, Cause{Code: r.code, Object: podText(p), Detail: r.text, Evidence: evidence(message)})
		}
		e.Waiting.Why = "unknown without the nodes and the pods of all namespaces"
		e.Notes = append(e.Notes, "Nodes are not judged and no change is computed: what is shown is kube-scheduler's message. "+
			"An administrator who runs the same command sees more.")
		return
	}
	if a.shared.Resource != "" && len(x.world.record.inventories) == 0 {
		e.Notes = append(e.Notes, "No node publishes devices that Divvy shares; kubectl divvy doctor examines the installation.")
	}
	x.explainRequest(e, a)
	blocked := len(e.Causes) > 0 // whatever nodes have
	nodes := x.world.judge(a)
	x.explainNodes(e, a, nodes)
	x.explainMessage(e, p, nodes, reasons, message)
	x.explainPriority(e, a, nodes)
	x.explainAutoscaler(e, a, nodes)
	if slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == ForeignScheduler || c.Code == UnknownScheduler }) {
		blocked = true
	}
	x.explainChanges(e, a, nodes, blocked)
	x.explainHope(e, a, nodes)
}

// explainScheduler says if no scheduler places the pod.
func (x *Explainer) explainScheduler(e *Explanation, p *v1.Pod, condition *v1.PodCondition) {
	name := p.Spec.SchedulerName
	shares := len(x.world.newAsk(p).shared.Containers) > 0
	system, foreign := foreignSchedulers[name]
	seen := condition != nil || p.Status.NominatedNodeName != ""
	switch {
	case foreign && shares:
		e.Causes = append(e.Causes, Cause{Code: ForeignScheduler, Object: podText(p), Evidence: []string{"spec.schedulerName: " + name},
			Detail: fmt.Sprintf("%s (schedulerName %s) does not ask Divvy which device has free memory; create the pod again with the "+
				"scheduler that serves Divvy", system, name)})
	case !seen && x.snapshot.Taken.Sub(p.CreationTimestamp.Time) > unseenAfter:
		e.Causes = append(e.Causes, Cause{Code: UnknownScheduler, Object: podText(p), Evidence: []string{"spec.schedulerName: " + name},
			Detail: fmt.Sprintf("no scheduler has processed the pod; check that a scheduler named %q runs", name)})
	}
}

// lastFailure is the message of the newest event FailedScheduling, "" for none.
func (x *Explainer) lastFailure(p *v1.Pod) string {
	message, at := "", time.Time{}
	for i := range x.snapshot.Events {
		ev := &x.snapshot.Events[i]
		when := cmp.Or(ev.LastTimestamp.Time, ev.EventTime.Time)
		if ev.Reason == "FailedScheduling" && isAbout(ev, p) && !when.Before(at) {
			message, at = ev.Message, when
		}
	}
	return message
}

// explainRequest says what is wrong with the request itself.
func (x *Explainer) explainRequest(e *Explanation, a *ask) {
	p := a.pod
	add := func(code Code, evidence []string, format string, args ...any) {
		e.Causes = append(e.Causes, Cause{Code: code, Object: podText(p), Detail: fmt.Sprintf(format, args...), Evidence: evidence})
	}
	if len(a.several) > 0 {
		var names []accel.Resource
		for _, r := range a.several {
			names = append(names, r.Resource)
		}
		add(SeveralResources, nil, "the pod requests %s: a pod can have only one shared resource, request the others in separate pods",
			accel.JoinResources(names))
	}
	for _, mistake := range mistakes(a.mistake) {
		add(codeOfMistake(mistake), []string{mistake.Key + ": " + p.Annotations[mistake.Key]}, "%s", mistake.Error())
	}
	offered := x.world.offeredNames()
	for _, name := range sortedNames(a.requests) {
		if !strings.Contains(string(name), "/") || a.requests[name] <= 0 || slices.Contains(offered, string(name)) {
			continue
		}
		near := nearest(string(name), offered)
		switch system := foreignSystem(name); {
		case system != "":
			add(ForeignName, nil, "%s is a resource of %s, which no node offers; see docs/migrating.md for the request to use", name,
				system)
		case near != "":
			add(Misspelt, []string{"offered: " + near}, "no node offers %s; the nearest name that nodes offer is %s", name, near)
		default:
			like := kin(string(name), offered)
			x.explainAbsent(e, a, name, like)
		}
	}
	x.explainUnit(e, a)
}

// explainAbsent says that no node offers a resource, unless nodes say why they do not.
func (x *Explainer) explainAbsent(e *Explanation, a *ask, name v1.ResourceName, like []string) {
	if name == a.resource() {
		for _, n := range x.world.nodes {
			if j := (judged{n: n}); a.shared.Resource != "" {
				if x.world.judgeAbsent(a, &j); j.offers() {
					return // the node's own cause says more
				}
			}
		}
	}
	c := Cause{Code: NoSuchResource, Object: podText(a.pod), Detail: fmt.Sprintf("no node offers %s", name)}
	if len(like) > 0 {
		c.Detail += "; similar resources: " + listed(like, 3)
	}
	e.Causes = append(e.Causes, c)
}

// explainUnit says if a request looks like MiB.
func (x *Explainer) explainUnit(e *Explanation, a *ask) {
	if n, largest := x.mebibytes(a); n > 0 {
		e.Causes = append(e.Causes, Cause{Code: UnitMismatch, Object: podText(a.pod), Detail: fmt.Sprintf(
			"%d units of %s are more than any device has (%d), and look like MiB: %d MiB are %s", a.shared.Peak(), a.shared.Resource,
			largest, a.shared.Peak(), count(int(n), "unit"))})
	}
}

// leastMebibytes is the least request that is taken for MiB.
const leastMebibytes = 1024

// mebibytes returns the units of a request that was written in MiB, 0 where it was not,
// and the units of the largest device.
func (x *Explainer) mebibytes(a *ask) (units, largest accel.Units) {
	r := a.shared
	unit, err := sharing.ParseMemoryUnit(x.world.unitOf(r.Resource))
	if err != nil || a.mistake != nil || r.Peak() > math.MaxInt64>>20 {
		return 0, 0
	}
	var memory int64 // of the largest device
	for _, n := range x.world.nodes {
		if in := n.inventory(r.Resource); in != nil {
			for _, s := range in.Shares {
				if s.Units > largest {
					largest, memory = s.Units, s.MemoryBytes
				}
			}
		}
	}
	units = unit.Holding(uint64(r.Peak())<<20, memory) //nolint:gosec // not below 0
	k := accel.Units(max(r.Devices, 1))
	if units = (units + k - 1) / k * k; r.Peak() < leastMebibytes || r.Peak()/k <= largest || units/k > largest {
		return 0, largest
	}
	return units, largest
}

func sortedNames(a amounts) []v1.ResourceName {
	var out []v1.ResourceName
	for name := range a {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// wrong is the code of a request that no node can serve as it is written, "" for others.
func (a *ask) wrong() Code {
	if len(a.several) > 0 {
		return SeveralResources
	}
	for _, mistake := range mistakes(a.mistake) {
		return codeOfMistake(mistake)
	}
	return ""
}

func codeOfMistake(mistake *kube.AskError) Code {
	if mistake.Key == wire.CountAnnotation && strings.Contains(mistake.Err.Error(), "divided") {
		return NotDivisible
	}
	return AnnotationWrong
}

// mistakes are the *kube.AskError of an error.
func mistakes(err error) []*kube.AskError {
	if err == nil {
		return nil
	}
	var one *kube.AskError
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var out []*kube.AskError
		for _, e := range joined.Unwrap() {
			out = append(out, mistakes(e)...)
		}
		return out
	}
	if errors.As(err, &one) {
		return []*kube.AskError{one}
	}
	return nil
}

// explainNodes adds a cause for each code of nodes, and the list of nodes.
func (x *Explainer) explainNodes(e *Explanation, a *ask, nodes []judged) {
	causes := map[Code]*Cause{}
	details := map[Code][]string{}
	offering := 0
	for i := range nodes {
		j := &nodes[i]
		if !j.offers() {
			continue
		}
		offering++
		code, detail := j.first()
		e.Nodes = append(e.Nodes, Node{Name: j.n.Name, Code: code, LargestFree: max(j.largest, 0), Sum: j.sum, Missing: detail})
		if code == "" {
			continue
		}
		c := causes[code]
		if c == nil {
			c = &Cause{Code: code}
			causes[code] = c
		}
		c.Nodes = append(c.Nodes, j.n.Name)
		if len(j.evidence) > 0 && len(c.Evidence) < 3 {
			c.Evidence = append(c.Evidence, "Node "+j.n.Name+": "+strings.Join(j.evidence, "; "))
		}
		if !slices.Contains(details[code], detail) {
			details[code] = append(details[code], detail)
		}
	}
	known := func(code Code) bool {
		return slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == code })
	}
	if anyFits(nodes) {
		return // what the others lack does not keep the pod waiting
	}
	if len(e.Nodes) == 0 && len(x.world.nodes) == 0 {
		e.Causes = append(e.Causes, Cause{Code: NoSuchResource, Detail: "the cluster has no nodes"})
	}
	for _, code := range codes {
		c := causes[code]
		if c == nil || known(code) {
			continue
		}
		c.Object = count(len(c.Nodes), "node")
		c.Detail = x.nodesDetail(a, code, details[code])
		e.Causes = append(e.Causes, *c)
	}
}

// nodesDetail is the clause of a cause of nodes.
func (x *Explainer) nodesDetail(a *ask, code Code, details []string) string {
	r := a.shared
	units, about := r.Peak(), string(a.resource())
	size := fmt.Sprintf("%d units of %s", units, about)
	if r.Resource == "" {
		size = fmt.Sprintf("%d of %s", a.requests[a.resource()], about)
	} else if b := bytesOf(x.world.unitOf(r.Resource), units); b > 0 {
		size += " (" + gigabytes(b) + ")"
	}
	devices := "no device has " + size + " free"
	if r.Devices > 1 {
		devices = fmt.Sprintf("no node has %d devices with %d units of %s free on each", r.Devices, units/accel.Units(r.Devices), about)
	}
	switch code {
	case NoDeviceFits:
		return devices
	case InsufficientCapacity:
		return "no node has " + size + " free"
	case LargerThanDevice:
		return size + " are more than any device has"
	case TooFewDevices:
		return fmt.Sprintf("no node has %d suitable devices of %d units or more", r.Devices, units/accel.Units(max(r.Devices, 1)))
	case HeldAsOther, UnhealthyDevice, CapacityReserved, Ending:
		return devices + ": " + listed(details, 3)
	case SelectionEmpty:
		return "no device is one that " + strings.Join(selectionKeys(a.pod), " with ") + " allows"
	}
	return listed(details, 3)
}

// selectionKeys are the annotations by which the pod chooses among devices.
func selectionKeys(p *v1.Pod) []string {
	var out []string
	for _, key := range []string{
		wire.UseModelsAnnotation, wire.AvoidModelsAnnotation, wire.UseDevicesAnnotation, wire.AvoidDevicesAnnotation,
	} {
		if _, ok := p.Annotations[key]; ok {
			out = append(out, key)
		}
	}
	return out
}

// explainMessage adds what only kube-scheduler knows, and what is left where nothing was
// found.
func (x *Explainer) explainMessage(e *Explanation, p *v1.Pod, nodes []judged, reasons []reason, message string) {
	for _, r := range reasons {
		if quoted(r.code) || r.code == NodeNotLabelled && !slices.ContainsFunc(nodes, func(j judged) bool { return j.code == r.code }) {
			e.Causes = append(e.Causes, Cause{Code: r.code, Object: podText(p), Detail: "kube-scheduler: " + r.text,
				Evidence: evidence(message)})
		}
	}
	var fit []string
	for i := range nodes {
		if nodes[i].fits() {
			fit = append(fit, nodes[i].n.Name)
		}
	}
	if len(fit) == 0 && len(e.Causes) == 0 {
		e.Causes = append(e.Causes, Cause{Code: Unknown, Object: podText(p), Detail: "no cause was found", Evidence: evidence(message)})
	}
	if len(fit) == 0 || len(e.Causes) > 0 && slices.ContainsFunc(e.Causes, func(c Cause) bool { return len(c.Nodes) == 0 }) {
		return
	}
	e.Causes = append(e.Causes, Cause{Code: Backoff, Object: count(len(fit), "node"), Nodes: fit, Evidence: evidence(message),
		Detail: "the pod fits now on " + listed(fit, 3) + "; kube-scheduler tries a pod again after a back-off of up to 10 s"})
}

func anyFits(nodes []judged) bool {
	return slices.ContainsFunc(nodes, func(j judged) bool { return j.fits() })
}

// explainPriority says if priorities stand against the pod.
func (x *Explainer) explainPriority(e *Explanation, a *ask, nodes []judged) {
	r := a.shared
	if r.Resource == "" || a.mistake != nil || anyFits(nodes) {
		return
	}
	var higher, lower []string
	for i := range nodes {
		j := &nodes[i]
		if len(j.hindrances) > 0 || j.code != NoDeviceFits && j.code != InsufficientCapacity {
			continue
		}
		name := j.n.Name
		less := func(h *heldUnits) bool { return h.Resource == r.Resource && h.Priority < r.Priority }
		var some, most bool
		for k := range x.world.record.held[name] {
			h := &x.world.record.held[name][k]
			some, most = some || less(h), most || h.Resource == r.Resource && h.Priority > r.Priority
		}
		switch {
		case some && fits(x.world.copyOf([]string{name}, less, true), r, name).Code == accel.Fits:
			lower = append(lower, name)
		case most:
			higher = append(higher, name)
		}
	}
	never := a.pod.Spec.PreemptionPolicy != nil && *a.pod.Spec.PreemptionPolicy == v1.PreemptNever
	switch {
	case len(lower) > 0 && never:
		e.Causes = append(e.Causes, Cause{Code: PreemptNever, Object: count(len(lower), "node"), Nodes: lower,
			Evidence: []string{"spec.preemptionPolicy: Never"},
			Detail:   "pods of lower priority hold enough, but the pod's priority class does not preempt"})
	case len(lower) == 0 && len(higher) > 0:
		e.Causes = append(e.Causes, Cause{Code: LowPriority, Object: count(len(higher), "node"), Nodes: higher,
			Detail: fmt.Sprintf("pods of higher priority than %d hold the devices", r.Priority)})
	}
}

// explainAutoscaler says what an autoscaler makes of the pod: it counts sums.
func (x *Explainer) explainAutoscaler(e *Explanation, a *ask, nodes []judged) {
	if a.resource() == "" {
		return
	}
	for i := range x.snapshot.Events {
		if ev := &x.snapshot.Events[i]; isAbout(ev, a.pod) && (ev.Reason == "TriggeredScaleUp" || ev.Reason == "NotTriggerScaleUp") {
			e.Autoscaler = &Autoscaler{Sees: true, Why: ev.Reason + ": " + ev.Message}
			return
		}
	}
	enough := 0
	for i := range nodes {
		if j := &nodes[i]; len(j.hindrances) == 0 && j.n.free(a.resource()) >= a.requests[a.resource()] {
			enough++
		}
	}
	if enough > 0 {
		e.Autoscaler = &Autoscaler{Why: fmt.Sprintf("the sums of %s are enough", count(enough, "node"))}
		return
	}
	e.Autoscaler = &Autoscaler{Sees: true, Why: "an autoscaler sees that no node has enough, if one runs and a group has such nodes"}
}

// explainHope says whether waiting helps.
func (x *Explainer) explainHope(e *Explanation, a *ask, nodes []judged) {
	var first *Code
	for i := range e.Causes {
		if c := e.Causes[i].Code; c == Backoff || c == Ending || c == CapacityReserved {
			first = &c
			break
		}
	}
	var wait *Change
	for i := range e.Changes {
		if e.Changes[i].Kind == ChangeWait {
			wait = &e.Changes[i]
		}
	}
	stuck := slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code.rank() < CapacityReserved.rank() && len(c.Nodes) == 0 })
	switch {
	case stuck:
		e.Waiting.Why = "what is named above must change first"
	case x.othersPlace(e, a.pod):
		e.Waiting.Why = fmt.Sprintf("the scheduler %q decides about the pod", a.pod.Spec.SchedulerName)
	case first != nil && *first == Backoff:
		e.Waiting = Waiting{Helps: true, Until: x.snapshot.Taken.Add(backOff), Why: "the pod fits, and is tried again after a back-off"}
	case wait != nil && wait.stuck != "":
		e.Waiting.Why = wait.stuck
	case wait != nil && wait.Verified:
		e.Waiting = Waiting{Helps: true, Until: wait.until, Why: "pods that are ending free enough"}
	case wait != nil:
		e.Waiting.Why = "pods that are ending free enough, but kube-scheduler also looks at what is not judged here"
	case first != nil && *first == CapacityReserved:
		e.Waiting = Waiting{Helps: true, Why: "the capacity is reserved for a pod that is being placed, which may leave some"}
	case !slices.ContainsFunc(nodes, func(j judged) bool { return j.code == NoDeviceFits || j.code == InsufficientCapacity }):
		e.Waiting.Why = "waiting alone does not resolve this"
	case slices.ContainsFunc(nodes, func(j judged) bool { return x.world.ends(j.n, a) }):
		e.Waiting.Why = "pods that are ending do not free enough"
	default:
		e.Waiting.Why = "nothing is ending; it helps only if pods end by themselves"
	}
}

// ends reports whether a pod that holds the resource is ending on a node.
func (w *world) ends(n *nodeView, a *ask) bool {
	return len(endingOn(w, n.Name, a.shared.Resource)) > 0 || slices.ContainsFunc(n.pods, func(p placedPod) bool {
		return p.DeletionTimestamp != nil && p.requests[a.resource()] > 0
	})
}

// othersPlace reports whether a scheduler that is not known to decide as kube-scheduler does
// places the pod.
func (x *Explainer) othersPlace(e *Explanation, p *v1.Pod) bool {
	_, foreign := foreignSchedulers[p.Spec.SchedulerName]
	return foreign || slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == UnknownScheduler })
}
