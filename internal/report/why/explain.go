package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// APIVersion and Kind are those of an Explanation.
const (
	APIVersion = "divvy.dev/v1"
	Kind       = "PodExplanation"
)

// unseenAfter is how long a pod may wait for any scheduler to look at it.
const unseenAfter = time.Minute

// Explainer explains pods of one snapshot.
type Explainer struct {
	snapshot *Snapshot
	world    *world
}

// New reads the snapshot.
func New(s *Snapshot) *Explainer { return &Explainer{s, newWorld(s)} }

// Owner explains the oldest pod of a controller that waits, else its oldest one, or why
// it has none. A pod that has ended is explained, the newest, if there is no other.
func (x *Explainer) Owner(o *Owner) Explanation {
	var live, over []*v1.Pod
	for _, p := range x.snapshot.podsOf(o) {
		if ended(p) {
			over = append(over, p)
		} else {
			live = append(live, p)
		}
	}
	for _, p := range live {
		if waits(p) && p.DeletionTimestamp == nil {
			return x.Pod(p)
		}
	}
	e := x.explanation(Object{Namespace: o.Namespace})
	e.Owner = o.String()
	if o.Suspended {
		e.State = StateGated
		e.Causes = []Cause{{Code: Suspended, Object: o.String(), Detail: "the Job is suspended", Evidence: []string{"spec.suspend: true"}}}
		e.Waiting.Why = "the pods are made once spec.suspend is false"
		resume := Change{Kind: ChangeRequest, Text: "resume the Job"}
		if named(o.Namespace, o.Name) {
			resume.Commands = []string{kubectl("patch", kindJob, "-n", o.Namespace, o.Name, "--type=merge", "-p",
				`{"spec":{"suspend":false}}`)}
		}
		e.Changes = []Change{resume}
		e.Notes = append(e.Notes, "A queue such as Kueue suspends Jobs until they are admitted, and resumes them itself.")
		e.cost()
		return e
	}
	if events := x.failedCreate(o); len(live) < int(o.Wanted) &&
		(len(live)+len(over) == 0 || len(events) > 0 || o.Problem != "") {
		return notCreated(e, o, len(live), events)
	}
	if len(live) > 0 {
		return x.Pod(live[0])
	}
	if len(over) > 0 {
		return x.Pod(over[len(over)-1])
	}
	e.State = StateRuns
	e.Notes = append(e.Notes, fmt.Sprintf("%s has no pods and requests none.", o))
	return e
}

// notCreated explains an owner whose pods are not made.
func notCreated(e Explanation, o *Owner, have int, events []string) Explanation {
	e.State = StateNotCreated
	if o.Problem != "" {
		events = append([]string{o.Problem}, events...)
	}
	c := Cause{Code: NotCreated, Object: o.String(), Evidence: events,
		Detail: fmt.Sprintf("%d of %s exist", have, count(int(o.Wanted), "pod"))}
	if len(events) > 0 {
		c.Detail += ": " + strings.TrimSuffix(events[0], ".")
	}
	e.Causes = []Cause{c}
	e.Waiting.Why = "the controller tries again, with the same answer until what rejects the pod changes"
	return e
}

// failedCreate are the messages of events that say why pods of an owner were not made.
func (x *Explainer) failedCreate(o *Owner) []string {
	var out []string
	for i := range x.snapshot.Events {
		e := &x.snapshot.Events[i]
		if e.Namespace == o.Namespace && e.Reason == "FailedCreate" && o.makes(&e.InvolvedObject) && !slices.Contains(out, e.Message) {
			out = append(out, e.Message)
		}
	}
	return out
}

// hashLetters are those of the hashes in names of ReplicaSets.
const hashLetters = "bcdfghjklmnpqrstvwxz2456789"

// makes reports whether an object creates the owner's pods: itself, or the ReplicaSets of a
// Deployment.
func (o *Owner) makes(obj *v1.ObjectReference) bool {
	kind := strings.ToLower(obj.Kind)
	if o.Kind != kindDeployment {
		return kind == o.Kind && obj.Name == o.Name
	}
	hash, ok := strings.CutPrefix(obj.Name, o.Name+"-")
	return kind == kindReplicaSet && ok && hash != "" && strings.Trim(hash, hashLetters) == ""
}

func (x *Explainer) explanation(pod Object) Explanation {
	e := Explanation{APIVersion: APIVersion, Kind: Kind, Pod: pod, Taken: x.snapshot.Taken, Causes: []Cause{}, Changes: []Change{}}
	for _, f := range x.snapshot.Failed {
		e.Notes = append(e.Notes, fmt.Sprintf("The %s could not be read, so the answer may be incomplete: %s.", f.Source,
			strings.TrimSuffix(f.Reason, ".")))
	}
	return e
}

// Pod explains a pod.
func (x *Explainer) Pod(p *v1.Pod) Explanation {
	e := x.explanation(Object{p.Namespace, p.Name})
	e.Owner = ownerText(p)
	e.Since = p.CreationTimestamp.Time
	a := x.world.newAsk(p)
	e.Request = x.request(a)
	switch {
	case p.Status.Phase == v1.PodFailed:
		x.explainFailed(&e, p)
	case p.Status.Phase == v1.PodSucceeded:
		e.State = StateRuns
		e.Notes = append(e.Notes, "The pod has completed.")
	case p.DeletionTimestamp != nil:
		e.State = StateRuns
		if waits(p) {
			e.State, e.Waiting.Why = StateWaits, "the pod is being deleted"
		}
		e.Notes = append(e.Notes, "The pod is being deleted.")
	case !waits(p):
		e.State = StateRuns
		if p.Status.StartTime != nil {
			e.Since = p.Status.StartTime.Time
		}
	case p.Spec.NodeName != "":
		x.explainStarting(&e, p)
	case len(p.Spec.SchedulingGates) > 0:
		e.State = StateGated
		c := Cause{Code: Gated, Object: podText(p)}
		for _, g := range p.Spec.SchedulingGates {
			c.Evidence = append(c.Evidence, "spec.schedulingGates: "+g.Name)
		}
		c.Detail = fmt.Sprintf("the scheduling gate %s prevents scheduling; the controller that set it must remove it",
			p.Spec.SchedulingGates[0].Name)
		e.Causes = []Cause{c}
		e.Waiting.Why = "the pod waits for the controller that set the gate"
	default:
		x.explainWaiting(&e, a)
	}
	e.cost()
	for i := range e.Changes {
		if file := e.Changes[i].file(); file != "" {
			e.Notes = append(e.Notes, fmt.Sprintf("Keep %s until the new pod exists: if kubectl replace fails after it has deleted "+
				"the pod, kubectl create -f %s creates it.", file, file))
			break
		}
	}
	return e
}

// cost sorts causes and changes.
func (e *Explanation) cost() {
	slices.SortStableFunc(e.Causes, func(a, b Cause) int { return a.Code.rank() - b.Code.rank() })
	for i := range e.Changes {
		c := &e.Changes[i]
		c.Cost = slices.Index(changeKinds, c.Kind)
	}
	slices.SortStableFunc(e.Changes, func(a, b Change) int { return a.Cost - b.Cost })
}

// request is what the pod requests of the resource that it is about, nil for none.
func (x *Explainer) request(a *ask) *Request {
	name := a.resource()
	if name == "" {
		return nil
	}
	r := &Request{Resource: accel.Resource(name), Units: accel.Units(a.requests[name]), Devices: max(a.shared.Devices, 1)}
	if a.shared.Resource != "" {
		r.Units = a.shared.Peak()
		r.Bytes = bytesOf(x.world.unitOf(a.shared.Resource), r.Units)
	} else {
		r.Devices = int(r.Units)
	}
	return r
}

// unitOf is the size of one unit of a resource, "" where nodes differ or none offers it.
func (w *world) unitOf(r accel.Resource) string {
	unit := ""
	for _, n := range w.nodes {
		in := n.inventory(r)
		switch {
		case in == nil:
		case unit != "" && unit != in.Unit:
			return ""
		default:
			unit = in.Unit
		}
	}
	return unit
}

func podText(p *v1.Pod) string { return "Pod " + p.Namespace + "/" + p.Name }

// explainFailed explains a pod that has failed.
func (x *Explainer) explainFailed(e *Explanation, p *v1.Pod) {
	e.State = StateFailed
	c := Cause{Code: Unknown, Object: podText(p), Detail: "the pod failed", Evidence: evidence(p.Status.Reason, p.Status.Message)}
	switch reason := p.Status.Reason; {
	case reason == "TopologyAffinityError":
		c.Code = Topology
		c.Detail = fmt.Sprintf("kubelet on node %s rejected the pod, because its topology manager found no aligned resources",
			p.Spec.NodeName)
	case reason == "UnexpectedAdmissionError" || strings.HasPrefix(reason, "OutOf"):
		c.Code = RejectedByKubelet
		c.Detail = fmt.Sprintf("kubelet on node %s rejected the pod (%s)", p.Spec.NodeName, reason)
	}
	if p.Spec.NodeName != "" {
		c.Nodes = []string{p.Spec.NodeName}
	}
	e.Causes = []Cause{c}
	e.Waiting.Why = "a pod that failed does not start again"
	if c.Code == Unknown {
		return
	}
	if e.Owner != "" {
		e.Waiting.Why += "; " + e.Owner + " recreates it"
		return
	}
	ops := []string{jsonPatch("remove", "/spec/nodeName", nil)}
	for _, key := range []string{wire.GrantAnnotation, wire.HeldAnnotation} {
		if _, has := p.Annotations[key]; has {
			ops = append(ops, jsonPatch("remove", "/metadata/annotations/"+pointer(key), nil))
		}
	}
	r := remake{pod: p}
	e.Changes = []Change{{Kind: ChangeRequest, Text: "delete the pod, then create it again", Commands: r.replace(ops)}}
}

// explainStarting explains a pod on its node that has not started.
func (x *Explainer) explainStarting(e *Explanation, p *v1.Pod) {
	e.State = StateStarting
	c := Cause{Code: StartingUp, Object: podText(p), Nodes: []string{p.Spec.NodeName},
		Detail: "it is on node " + p.Spec.NodeName + ", where kubelet starts it"}
	for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil && w.Reason != "PodInitializing" {
			c.Detail = fmt.Sprintf("it is on node %s, where container %s does not run yet: %s", p.Spec.NodeName, s.Name, w.Reason)
			c.Evidence = evidence(w.Reason, w.Message)
			break
		}
	}
	for i := range x.snapshot.Events {
		if ev := &x.snapshot.Events[i]; ev.Type == v1.EventTypeWarning && isAbout(ev, p) {
			c.Evidence = append(c.Evidence, "event "+ev.Reason+": "+ev.Message)
		}
	}
	e.Causes = []Cause{c}
	e.Waiting = Waiting{Helps: len(c.Evidence) == 0, Why: "the pod has its node; what kubelet reports must be fixed"}
	if e.Waiting.Helps {
		e.Waiting.Why = "kubelet is starting the pod"
	}
}

func isAbout(e *v1.Event, p *v1.Pod) bool {
	o := &e.InvolvedObject
	return e.Namespace == p.Namespace && o.Kind == "Pod" && o.Name == p.Name && (o.UID == "" || o.UID == p.UID)
}

func evidence(texts ...string) []string {
	var out []string
	for _, t := range texts {
		if t != "" {
			out = append(out, t)
		}
	}
	return out
}
