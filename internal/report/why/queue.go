package why

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// Groups of objects that other programs queue pods by.
const (
	// GroupKueue is that of Kueue's Workloads, and VisibilityKueue that of its queues.
	GroupKueue      = "kueue.x-k8s.io"
	VisibilityKueue = "visibility.kueue.x-k8s.io"
	// GroupPlugins is that of PodGroups of scheduler-plugins, GroupScheduling that of
	// Kubernetes' own.
	GroupPlugins    = "scheduling.x-k8s.io"
	GroupScheduling = "scheduling.k8s.io"
)

const (
	labelPodGroup   = GroupPlugins + "/pod-group"
	labelKueueGroup = GroupKueue + "/pod-group-name"
	labelKueueQueue = GroupKueue + "/queue-name"
	gateKueue       = GroupKueue + "/admission"
	kindWorkload    = "workload"
)

// Workload is what is read of a Workload of Kueue.
type Workload struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		QueueName string `json:"queueName"`
		// Active is false for one that is not to be admitted.
		Active *bool `json:"active"`
	} `json:"spec"`
	Status struct {
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

// PodGroup is what is read of a PodGroup, of scheduler-plugins or of Kubernetes.
type PodGroup struct {
	metav1.ObjectMeta `json:"metadata"`
	// Group is the API group that it is of.
	Group string `json:"-"`
	Spec  struct {
		MinMember        int32 `json:"minMember"`
		SchedulingPolicy struct {
			Gang *struct {
				MinCount int32 `json:"minCount"`
			} `json:"gang"`
		} `json:"schedulingPolicy"`
	} `json:"spec"`
}

// Place is where a Workload is in its queues, as Kueue's API of pending workloads says; both
// begin with 0.
type Place struct {
	InClusterQueue int32 `json:"positionInClusterQueue"`
	InLocalQueue   int32 `json:"positionInLocalQueue"`
}

// Queues has the objects of the programs that queue pods, in the namespaces that are explained.
type Queues struct {
	Workloads []Workload
	Groups    []PodGroup
	// Place asks for the place of a Workload in its queue; nil if Kueue cannot be asked.
	Place func(*Workload) (Place, error)
}

// add adds an object of a kind that is known.
func (q *Queues) add(o *unstructured.Unstructured) {
	group := o.GroupVersionKind().Group
	switch {
	case group == GroupKueue && o.GetKind() == "Workload":
		var w Workload
		if runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &w) == nil {
			q.Workloads = append(q.Workloads, w)
		}
	case (group == GroupPlugins || group == GroupScheduling) && o.GetKind() == "PodGroup":
		var g PodGroup
		if runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &g) == nil {
			g.Group = group
			q.Groups = append(q.Groups, g)
		}
	}
}

// Workload returns the Workload of that name, nil for an unknown one.
func (s *Snapshot) Workload(namespace, name string) *Workload {
	for i := range s.Queues.Workloads {
		if w := &s.Queues.Workloads[i]; w.Namespace == namespace && w.Name == name {
			return w
		}
	}
	return nil
}

// workloadOf returns the Workload that a controller of a kind, or a pod, is queued by; nil for
// none.
func (s *Snapshot) workloadOf(namespace, kind, name string) *Workload {
	for i := range s.Queues.Workloads {
		w := &s.Queues.Workloads[i]
		if w.Namespace == namespace && slices.ContainsFunc(w.OwnerReferences, func(o metav1.OwnerReference) bool {
			return refKind(&o) == kind && o.Name == name
		}) {
			return w
		}
	}
	return nil
}

// is reports whether a condition of the Workload is true.
func (w *Workload) is(kind string) bool {
	return meta.IsStatusConditionTrue(w.Status.Conditions, kind)
}

// missingQuota is what Kueue says of a resource that a flavor has too little of.
var missingQuota = regexp.MustCompile(`insufficient (?:unused )?quota (?:in cohort )?for (\S+) in flavor ([^\s,]+), ` +
	`(?:(\S+) more needed|[^,;]*> maximum capacity \((?:\S+ > )?([^\s)]+)\))`)

// Workload explains a Workload of Kueue: why it is not admitted, or its oldest pod that waits.
// The owner is its controller, nil where that is not known.
func (x *Explainer) Workload(w *Workload, owner *Owner) Explanation {
	e := newExplanation(x.snapshot, Object{Namespace: w.Namespace})
	e.Owner, e.Since = kindWorkload+"/"+w.Name, w.CreationTimestamp.Time
	switch {
	case w.is("Finished"):
		e.State = StateRuns
		e.Notes = append(e.Notes, "The Workload has finished.")
		return e
	case !w.is("Admitted"):
		x.snapshot.Queues.explainQueued(&e, w)
		e.cost()
		return e
	}
	if owner != nil {
		return x.Owner(owner)
	}
	for _, o := range w.OwnerReferences {
		if kind := refKind(&o); kind != kindPod {
			owner := Owner{Kind: kind, Namespace: w.Namespace, Name: o.Name}
			owner.Wanted = int32(len(x.snapshot.podsOf(&owner))) //nolint:gosec // pods of one controller
			return x.Owner(&owner)
		}
	}
	var newest *v1.Pod
	for _, p := range x.snapshot.namedBy(w) {
		if newest = p; waits(p) && p.DeletionTimestamp == nil {
			break
		}
	}
	if newest != nil {
		return x.Pod(newest)
	}
	e.State = StateRuns
	e.Notes = append(e.Notes, fmt.Sprintf("%s is admitted and has no pods.", e.Owner))
	return e
}

// namedBy are the pods that a Workload is of, the oldest first.
func (s *Snapshot) namedBy(w *Workload) []*v1.Pod {
	var out []*v1.Pod
	for i := range s.Pods {
		p := &s.Pods[i]
		if p.Namespace == w.Namespace && slices.ContainsFunc(w.OwnerReferences, func(o metav1.OwnerReference) bool {
			return refKind(&o) == kindPod && o.Name == p.Name
		}) {
			out = append(out, p)
		}
	}
	oldestFirst(out)
	return out
}

// explainQueued explains what a Workload that is not admitted waits for.
func (q *Queues) explainQueued(e *Explanation, w *Workload) {
	e.State = StateGated
	c := Cause{Code: NotAdmitted, Object: "Workload " + w.Namespace + "/" + w.Name, Detail: "Kueue has not admitted it"}
	e.Waiting.Why = "Kueue admits it once the quota of its queue is enough"
	if w.Spec.QueueName != "" {
		c.Evidence = append(c.Evidence, "spec.queueName: "+w.Spec.QueueName)
	}
	message := ""
	for _, kind := range []string{"QuotaReserved", "Admitted", "Evicted"} {
		condition := meta.FindStatusCondition(w.Status.Conditions, kind)
		if condition == nil {
			continue
		}
		c.Evidence = append(c.Evidence, fmt.Sprintf("condition %s %s: %s: %s", kind, condition.Status, condition.Reason, condition.Message))
		if message == "" && kind != "Evicted" && condition.Status == metav1.ConditionFalse {
			message = condition.Message
		}
	}
	switch {
	case w.Spec.Active != nil && !*w.Spec.Active:
		c.Detail = "it is not active, so Kueue does not admit it"
		c.Evidence = append(c.Evidence, "spec.active: false")
		e.Waiting.Why = "Kueue does not admit it before spec.active is true"
		activate := Change{Kind: ChangeRequest, Text: "activate it"}
		if named(w.Namespace, w.Name) {
			activate.Commands = []string{kubectl("patch", kindWorkload+"s."+GroupKueue, "-n", w.Namespace, w.Name, "--type=merge", "-p",
				`{"spec":{"active":true}}`)}
			activate.patches(kindWorkload+"."+GroupKueue, w.Namespace, w.Name, patchMerge, nested(true, "spec", "active"))
		}
		e.Changes = append(e.Changes, activate)
	case w.is("QuotaReserved"):
		c.Detail = "its quota is reserved, and an admission check has not passed"
		if message != "" {
			c.Detail += ": " + strings.TrimSuffix(message, ".")
		}
		e.Waiting.Why = "Kueue admits it once its admission checks pass"
	case message != "":
		c.Detail += ": " + strings.TrimSuffix(message, ".")
	}
	for _, m := range missingQuota.FindAllStringSubmatch(message, -1) {
		text := fmt.Sprintf("raise the quota of %s in flavor %s by %s", m[1], m[2], m[3])
		if m[3] == "" {
			text = fmt.Sprintf("raise the quota of %s in flavor %s to more than %s", m[1], m[2], m[4])
			e.Waiting.Why = "the request is more than the queue can ever have"
		}
		e.Changes = append(e.Changes, Change{Kind: ChangeNode, By: administrator, Text: text})
	}
	q.explainPlace(e, w, &c)
	e.Causes = append(e.Causes, c)
}

// explainPlace says where in its queue a Workload is, if Kueue's API says it.
func (q *Queues) explainPlace(e *Explanation, w *Workload, c *Cause) {
	if q.Place == nil || w.Spec.QueueName == "" || w.is("QuotaReserved") {
		return
	}
	place, err := q.Place(w)
	if err != nil {
		e.Notes = append(e.Notes, fmt.Sprintf("Its place in the queue is unknown: %v.", err))
		return
	}
	c.Evidence = append(c.Evidence, fmt.Sprintf("place %d in the cluster queue, %d in local queue %s", place.InClusterQueue+1,
		place.InLocalQueue+1, w.Spec.QueueName))
	if place.InClusterQueue > 0 {
		e.Waiting.Why += fmt.Sprintf("; %d before it in the queue", place.InClusterQueue)
	}
}

// explainWorkload explains a pod or controller that Kueue queues, and reports whether it did.
func (q *Queues) explainWorkload(e *Explanation, w *Workload) bool {
	if w == nil || w.is("Admitted") {
		return false
	}
	q.explainQueued(e, w)
	return true
}

// workloadOfPod is the Workload by which a pod is queued; nil for none.
func (s *Snapshot) workloadOfPod(p *v1.Pod) *Workload {
	if group := p.Labels[labelKueueGroup]; group != "" {
		return s.Workload(p.Namespace, group)
	}
	if w := s.workloadOf(p.Namespace, kindPod, p.Name); w != nil {
		return w
	}
	kind, name := controllerOf(p)
	if kind == "" {
		return nil
	}
	return s.workloadOf(p.Namespace, kind, name)
}

// gang is a group of pods that are placed all at once or not at all.
type gang struct {
	name string
	// api is the API group of its PodGroup, spec nil where that is not known.
	api  string
	spec *PodGroup
}

// gangOf returns the gang that a pod is of; false for none.
func (s *Snapshot) gangOf(p *v1.Pod) (gang, bool) {
	g := gang{name: p.Labels[labelPodGroup], api: GroupPlugins}
	if of := p.Spec.SchedulingGroup; of != nil && of.PodGroupName != nil {
		g = gang{name: *of.PodGroupName, api: GroupScheduling}
	}
	if g.name == "" {
		return g, false
	}
	for i := range s.Queues.Groups {
		if spec := &s.Queues.Groups[i]; spec.Namespace == p.Namespace && spec.Name == g.name && spec.Group == g.api {
			g.spec = spec
		}
	}
	if g.spec != nil && g.api == GroupScheduling && g.spec.Spec.SchedulingPolicy.Gang == nil {
		return g, false // its pods are placed one by one
	}
	return g, true
}

// least is how many pods a gang needs, 0 where that is not known.
func (g *gang) least() int {
	switch {
	case g.spec == nil:
		return 0
	case g.api == GroupScheduling:
		return int(g.spec.Spec.SchedulingPolicy.Gang.MinCount)
	}
	return int(g.spec.Spec.MinMember)
}

// explainGang says if a pod waits for others of its gang.
func (d *diagnosis) explainGang() {
	p, e := d.a.pod, d.e
	g, ok := d.snapshot.gangOf(p)
	if !ok {
		return
	}
	if g.spec == nil {
		e.Notes = append(e.Notes,
			fmt.Sprintf("The pod is one of pod group %s, which is placed as a whole; its PodGroup (%s) is not known, so "+
				"neither is how many pods it needs.", g.name, g.api))
		d.snapshot.noteSource(e, SourceGroups)
		return
	}
	members, placed := 0, 0
	for i := range d.snapshot.Pods {
		o := &d.snapshot.Pods[i]
		of, is := d.snapshot.gangOf(o)
		if !is || o.Namespace != p.Namespace || of.name != g.name || of.api != g.api || ended(o) || o.DeletionTimestamp != nil {
			continue
		}
		members++
		if o.Spec.NodeName != "" {
			placed++
		}
	}
	least := g.least()
	if members >= least {
		e.Notes = append(e.Notes,
			fmt.Sprintf("The pod is one of pod group %s, of which %d must be placed together; %d of its %d pods have a "+
				"node.", g.name, least, placed, members))
		return
	}
	e.Causes = append(e.Causes, Cause{Code: GangIncomplete, Object: "PodGroup " + p.Namespace + "/" + g.name,
		Evidence: []string{fmt.Sprintf("PodGroup %s needs %s", g.name, count(least, "pod"))},
		Detail: fmt.Sprintf("pod group %s needs %d pods at once, and %s: %s missing", g.name, least, existing(members),
			count(least-members, "pod"))})
}

func existing(n int) string {
	if n == 1 {
		return "1 exists"
	}
	return fmt.Sprintf("%d exist", n)
}
