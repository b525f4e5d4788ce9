package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
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
	// explained has the explanations of pods without a node by what is the same for others
	// like them.
	explained map[string]*Explanation
}

// New reads the snapshot.
func New(s *Snapshot) *Explainer { return &Explainer{s, newWorld(s), map[string]*Explanation{}} }

// Forget lets the next explanation of each pod be found again, after what the snapshot asks, such as
// MayDelete, has changed.
func (x *Explainer) Forget() { clear(x.explained) }

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
	e := newExplanation(x.snapshot, Object{Namespace: o.Namespace})
	e.Owner = o.String()
	if o.Suspended {
		if x.snapshot.Queues.explainWorkload(&e, x.snapshot.workloadOf(o.Namespace, o.Kind, o.Name)) {
			e.cost()
			return e
		}
		x.snapshot.noteSource(&e, SourceWorkloads)
		e.State = StateGated
		e.Causes = []Cause{{Code: Suspended, Object: o.String(), Detail: "the Job is suspended", Evidence: []string{"spec.suspend: true"}}}
		e.Waiting.Why = "the pods are made once spec.suspend is false"
		resume := Change{Kind: ChangeRequest, Text: "resume the Job"}
		if named(o.Namespace, o.Name) {
			resume.Commands = []string{kubectl("patch", kindJob, "-n", o.Namespace, o.Name, "--type=merge", "-p",
				`{"spec":{"suspend":false}}`)}
			resume.patches(kindJob, o.Namespace, o.Name, patchMerge, nested(false, "spec", "suspend"))
		}
		e.Changes = []Change{resume}
		e.Notes = append(e.Notes, "A queue such as Kueue suspends Jobs until they are admitted, and resumes them itself.")
		e.cost()
		return e
	}
	if events := x.snapshot.failedCreate(o); len(live) < int(o.Wanted) &&
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
		c.Code = codeOfDenial(events[0])
		c.Detail += ": " + strings.TrimSuffix(events[0], ".")
		if short := shortOf(events[0]); short != "" {
			c.Detail += "; needed: " + short
		}
		if allow, ok := allowPool(o.Namespace, events[0]); ok {
			e.Changes = append(e.Changes, allow)
		}
	}
	e.Causes = []Cause{c}
	e.Waiting.Why = "the controller tries again, with the same answer until what rejects the pod changes"
	e.cost()
	return e
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

// newExplanation is about a pod, or none yet.
func newExplanation(s *Snapshot, pod Object) Explanation {
	e := Explanation{APIVersion: APIVersion, Kind: Kind, Pod: pod, Taken: s.Taken, Causes: []Cause{}, Changes: []Change{}}
	for _, source := range []string{SourceNodes, SourcePods, SourceEvents} {
		s.noteSource(&e, source)
	}
	return e
}

// Pod explains a pod.
func (x *Explainer) Pod(p *v1.Pod) Explanation {
	e := newExplanation(x.snapshot, Object{p.Namespace, p.Name})
	e.Owner = ownerText(p)
	e.Since = p.CreationTimestamp.Time
	a := x.world.newAsk(p)
	e.Request = x.request(a)
	b := &bound{x.snapshot, x.world, a, &e}
	switch {
	case p.Status.Phase == v1.PodFailed:
		b.explainFailed()
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
		b.explainLost()
	case p.Spec.NodeName != "":
		b.explainStarting()
	case len(p.Spec.SchedulingGates) > 0:
		if p.Spec.SchedulingGates[0].Name == gateKueue {
			if x.snapshot.Queues.explainWorkload(&e, x.snapshot.workloadOfPod(p)) {
				break
			}
			x.snapshot.noteSource(&e, SourceWorkloads)
		}
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
		x.explainAlike(&e, a)
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

func podText(p *v1.Pod) string { return "Pod " + p.Namespace + "/" + p.Name }

func evidence(texts ...string) []string {
	var out []string
	for _, t := range texts {
		if t != "" {
			out = append(out, t)
		}
	}
	return out
}
