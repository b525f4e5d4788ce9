package why

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/cause"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// backOff is kube-scheduler's longest time between two attempts to place a pod, by default.
const backOff = 10 * time.Second

// diagnosis explains a pod without a node.
type diagnosis struct {
	snapshot *Snapshot
	world    *world
	a        *ask
	e        *Explanation
	// nodes are what the nodes say of the pod, once they are asked.
	nodes []judged
	// lacksClaim is true where a cause says what a claim of the pod lacks.
	lacksClaim bool
}

// explain writes the explanation.
func (d *diagnosis) explain() {
	p, a, e := d.a.pod, d.a, d.e
	e.State = StateWaits
	d.explainScheduler()
	message := d.snapshot.messageOf(p)
	reasons := reasonsOf(message)
	if d.snapshot.failed(SourceNodes) || d.snapshot.failed(SourcePods) {
		e.Partial = true
		for _, r := range reasons {
			e.Causes = append(e.Causes, Cause{Code: r.code, Object: podText(p), Detail: r.text, Evidence: evidence(message)})
		}
		e.Waiting.Why = "unknown without the nodes and the pods of all namespaces"
		e.Notes = append(e.Notes, "Nodes are not judged and no change is computed: what is shown is kube-scheduler's message. "+
			"An administrator who runs the same command sees more.")
		return
	}
	if a.shared.Resource != "" && len(d.world.record.inventories) == 0 {
		e.Notes = append(e.Notes, "No node publishes devices that Divvy shares; kubectl divvy doctor examines the installation.")
	}
	d.explainGang()
	d.explainRequest()
	blocked := len(e.Causes) > 0 // whatever nodes have
	d.nodes = d.world.judge(a)
	d.explainNodes()
	if d.explainClaims(); d.lacksClaim {
		reasons = slices.DeleteFunc(reasons, func(r reason) bool { return r.code == Claim }) // it says less
	}
	d.explainMessage(reasons, message)
	d.explainPriority()
	d.explainAutoscaler()
	if slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == ForeignScheduler || c.Code == UnknownScheduler }) {
		blocked = true
	}
	d.explainChanges(blocked)
	d.explainHope()
}

// explainScheduler says if no scheduler places the pod.
func (d *diagnosis) explainScheduler() {
	p, e := d.a.pod, d.e
	name := p.Spec.SchedulerName
	shares := len(d.a.shared.Containers) > 0
	system := cause.ForeignScheduler(name)
	seen := scheduled(p) != nil || p.Status.NominatedNodeName != ""
	switch {
	case system != "" && shares:
		e.Causes = append(e.Causes, Cause{Code: ForeignScheduler, Object: podText(p), Evidence: []string{"spec.schedulerName: " + name},
			Detail: fmt.Sprintf("%s (schedulerName %s) does not ask Divvy which device has free memory; create the pod again with the "+
				"scheduler that serves Divvy", system, name)})
	case !seen && d.snapshot.Taken.Sub(p.CreationTimestamp.Time) > unseenAfter:
		e.Causes = append(e.Causes, Cause{Code: UnknownScheduler, Object: podText(p), Evidence: []string{"spec.schedulerName: " + name},
			Detail: fmt.Sprintf("no scheduler has processed the pod; check that a scheduler named %q runs", name)})
	}
}

// explainRequest says what is wrong with the request itself.
func (d *diagnosis) explainRequest() {
	p, a, e := d.a.pod, d.a, d.e
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
	offered := d.world.offeredNames()
	for _, name := range sortedNames(a.requests) {
		if !strings.Contains(string(name), "/") || a.requests[name] <= 0 || slices.Contains(offered, string(name)) {
			continue
		}
		if explainUnconverted(e, p, name) || d.snapshot.Claims.classOf(name) != nil {
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
			d.explainAbsent(name, like)
		}
	}
	d.explainUnit()
	d.explainSelection()
}

// explainAbsent says that no node offers a resource, unless nodes say why they do not.
func (d *diagnosis) explainAbsent(name v1.ResourceName, like []string) {
	e, a := d.e, d.a
	if name == a.resource() {
		for _, n := range d.world.nodes {
			if j := (judged{n: n}); a.shared.Resource != "" {
				if (&judge{d.world, a}).absent(&j); j.offers() {
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
func (d *diagnosis) explainUnit() {
	e, a := d.e, d.a
	if n, largest := d.world.mebibytes(a); n > 0 {
		e.Causes = append(e.Causes, Cause{Code: UnitMismatch, Object: podText(a.pod), Detail: fmt.Sprintf(
			"%d units of %s are more than any device has (%d), and look like MiB: %d MiB are %s", a.shared.Peak(), a.shared.Resource,
			largest, a.shared.Peak(), count(int(n), "unit"))})
	}
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
	if mistake.Key == wire.PolicyAnnotation {
		return PolicyUnknown
	}
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
func (d *diagnosis) explainNodes() {
	e, nodes := d.e, d.nodes
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
	if len(e.Nodes) == 0 && len(d.world.nodes) == 0 {
		e.Causes = append(e.Causes, Cause{Code: NoSuchResource, Detail: "the cluster has no nodes"})
	}
	for _, code := range codes {
		c := causes[code]
		if c == nil || known(code) {
			continue
		}
		c.Object = count(len(c.Nodes), "node")
		c.Detail = d.nodesDetail(code, details[code])
		e.Causes = append(e.Causes, *c)
	}
}

// nodesDetail is the clause of a cause of nodes.
func (d *diagnosis) nodesDetail(code Code, details []string) string {
	a, r := d.a, d.a.shared
	units, about := r.Peak(), string(a.resource())
	memory := ""
	if b := bytesOf(d.world.unitOf(r.Resource), units); b > 0 {
		memory = gigabytes(b)
	}
	size := cause.Size(&r, memory)
	if r.Resource == "" {
		size = fmt.Sprintf("%d of %s", a.requests[a.resource()], about)
	}
	devices := cause.NoneFree(&r, size)
	switch code {
	case NoDeviceFits:
		return devices
	case InsufficientCapacity:
		return "no node has " + size + " free"
	case LargerThanDevice:
		return cause.TooLarge(size)
	case TooFewDevices:
		return fmt.Sprintf("no node has %d suitable devices of %d units or more", r.Devices, r.Each())
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
func (d *diagnosis) explainMessage(reasons []reason, message string) {
	p, e, nodes := d.a.pod, d.e, d.nodes
	for _, r := range reasons {
		if r.code == ExtenderDown {
			explainKey(e, d.snapshot)
		}
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
	detail := "the pod fits now on " + listed(fit, 3) + "; kube-scheduler tries a pod again after a back-off of up to 10 s"
	if others := d.world.unjudged(p); len(others) > 0 {
		detail = fmt.Sprintf("the pod fits on %s by all that is judged here; kube-scheduler also looks at %s", listed(fit, 3),
			strings.Join(others, ", "))
	}
	e.Causes = append(e.Causes, Cause{Code: Backoff, Object: count(len(fit), "node"), Nodes: fit, Detail: detail,
		Evidence: evidence(message)})
}

func anyFits(nodes []judged) bool {
	return slices.ContainsFunc(nodes, func(j judged) bool { return j.fits() })
}

// autoscalerCodes are the codes of what the cluster autoscaler says of a group of nodes that
// would do.
var autoscalerCodes = []struct {
	part   string
	code   Code
	detail string
}{
	{"max node group size reached", AtMaximum, "the cluster autoscaler would add a node, but the group of nodes has its maximum size"},
	{"max cluster", AtMaximum, "the cluster autoscaler would add a node, but the cluster has its maximum size"},
	{"in backoff", BackingOff, "the cluster autoscaler could not add a node, and tries again after a back-off"},
}

// explainAutoscaler says what an autoscaler makes of the pod: it counts sums.
func (d *diagnosis) explainAutoscaler() {
	e, a, nodes := d.e, d.a, d.nodes
	if a.resource() == "" {
		return
	}
	if says := d.snapshot.autoscalerSays(a.pod); says != "" {
		e.Autoscaler = &Autoscaler{Sees: true, Why: says}
		for _, known := range autoscalerCodes {
			if strings.Contains(says, known.part) && !anyFits(nodes) {
				e.Causes = append(e.Causes, Cause{Code: known.code, Object: podText(a.pod), Detail: known.detail, Evidence: []string{says}})
			}
		}
		return
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
func (d *diagnosis) explainHope() {
	e, a, nodes := d.e, d.a, d.nodes
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
	case d.lacksClaim:
		e.Waiting.Why = "it helps only if what the claims lack is freed, or recovers"
	case d.othersPlace():
		e.Waiting.Why = fmt.Sprintf("the scheduler %q decides about the pod", a.pod.Spec.SchedulerName)
	case first != nil && *first == Backoff && len(d.world.unjudged(a.pod)) > 0:
		e.Waiting.Why = "unknown, because kube-scheduler also looks at what is not judged here"
	case first != nil && *first == Backoff:
		e.Waiting = Waiting{Helps: true, Until: d.snapshot.Taken.Add(backOff), Why: "the pod fits, and is tried again after a back-off"}
	case slices.ContainsFunc(nodes, func(j judged) bool { return j.startsUp() }):
		e.Waiting = Waiting{Helps: true, Why: "a node on which the pod fits is starting, and what set its taint removes it"}
	case wait != nil && wait.stuck != "":
		e.Waiting.Why = wait.stuck
	case wait != nil && wait.Verified:
		e.Waiting = Waiting{Helps: true, Until: wait.until, Why: "pods that are ending free enough"}
	case wait != nil && wait.unsure && len(d.world.unjudged(a.pod)) == 0:
		e.Waiting = Waiting{Helps: true, Until: wait.until,
			Why: "pods that are ending free enough, unless pods that their controllers create again get it first"}
	case wait != nil:
		e.Waiting.Why = "pods that are ending free enough, but kube-scheduler also looks at what is not judged here"
	case first != nil && *first == CapacityReserved:
		e.Waiting = Waiting{Helps: true, Why: "the capacity is reserved for a pod that is being placed, which may leave some"}
	case !slices.ContainsFunc(nodes, func(j judged) bool { return j.code == NoDeviceFits || j.code == InsufficientCapacity }):
		e.Waiting.Why = "waiting alone does not resolve this"
	case slices.ContainsFunc(nodes, func(j judged) bool { return d.ends(j.n) }):
		e.Waiting.Why = "pods that are ending do not free enough"
	default:
		e.Waiting.Why = "nothing is ending; it helps only if pods end by themselves"
	}
}

// ends reports whether a pod that holds the resource is ending on a node.
func (d *diagnosis) ends(n *nodeView) bool {
	return len(endingOn(d.world, n.Name, d.a.shared.Resource)) > 0 || slices.ContainsFunc(n.pods, func(p placedPod) bool {
		return p.DeletionTimestamp != nil && p.requests[d.a.resource()] > 0
	})
}

// othersPlace reports whether a scheduler that is not known to decide as kube-scheduler does
// places the pod.
func (d *diagnosis) othersPlace() bool {
	return cause.ForeignScheduler(d.a.pod.Spec.SchedulerName) != "" ||
		slices.ContainsFunc(d.e.Causes, func(c Cause) bool { return c.Code == UnknownScheduler })
}
