package why

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	placement "github.com/divvy-gpu/divvy/internal/core/place"
)

// PlanKind is the kind of a Plan.
const PlanKind = "DefragmentationPlan"

// The goals of a Plan.
const (
	GoalAdmit = "admit"
	GoalEmpty = "empty"
)

// Plan says which pods to move, in which order, and what that brings. Nothing is done by it.
type Plan struct {
	APIVersion string    `json:"apiVersion"`
	Kind       string    `json:"kind"`
	Taken      time.Time `json:"taken"`
	// Goal is one of the goals, and Node the node that is to be empty.
	Goal string `json:"goal"`
	Node string `json:"node,omitempty"`
	// Reached is true where every pod that waits is admitted, or the node is empty.
	Reached bool   `json:"reached"`
	Moves   []Move `json:"moves"`
	// Admitted are the pods that wait and then fit, Left those that do not, or that
	// keep the node from being empty.
	Admitted []Admission `json:"admitted"`
	Left     []Left      `json:"left"`
	// Unmoved counts the pods that hold a shared resource and are not moved, by rule.
	Unmoved []Unmoved      `json:"unmoved,omitempty"`
	Before  []FreeCapacity `json:"before"`
	After   []FreeCapacity `json:"after"`
	Notes   []string       `json:"notes,omitempty"`
}

// Move is a pod that ends and is made again by its controller.
type Move struct {
	Pod      Object         `json:"pod"`
	Owner    string         `json:"owner"`
	Resource accel.Resource `json:"resource,omitempty"`
	Units    accel.Units    `json:"units,omitempty"`
	From     Spot           `json:"from"`
	// To is where the placement core puts it, of the nodes that are not cordoned.
	To Spot `json:"to"`
	// Cordon are the nodes on which it must not be placed: the rest of the plan needs
	// what is free there.
	Cordon []string `json:"cordon,omitempty"`
	// Pinned is true where an annotation must select the devices.
	Pinned bool `json:"pinned,omitempty"`
	// Commands carry the move out, each a line for a shell.
	Commands []string `json:"commands"`
}

// Spot is a node and indexes of devices.
type Spot struct {
	Node    string   `json:"node"`
	Devices []string `json:"devices,omitempty"`
}

// Admission is a pod that waits and fits.
type Admission struct {
	Pod      Object         `json:"pod"`
	Resource accel.Resource `json:"resource"`
	Units    accel.Units    `json:"units"`
	To       Spot           `json:"to"`
	// AfterMove is the number of the move after which it fits, 0 for one that fits now.
	AfterMove int `json:"afterMove"`
}

// Left is a pod for which no moves were found.
type Left struct {
	Pod    Object      `json:"pod"`
	Units  accel.Units `json:"units,omitempty"`
	Code   LeftCode    `json:"code"`
	Reason string      `json:"reason"`
}

// LeftCode is why a plan does not help a pod. The codes are stable.
type LeftCode string

// The codes.
const (
	// LeftNotJudged: it cannot be known where the pod would be placed.
	LeftNotJudged LeftCode = "notJudged"
	// LeftNoNode: it fits on no node, whatever pods are moved.
	LeftNoNode LeftCode = "noNode"
	// LeftNotMovable: pods that are not moved hold what it needs.
	LeftNotMovable LeftCode = "notMovable"
	// LeftInsufficientCapacity: all that is free is less than it requests.
	LeftInsufficientCapacity LeftCode = "insufficientCapacity"
	// LeftNoPlace: the pods that would have to move fit nowhere else.
	LeftNoPlace LeftCode = "noPlaceElsewhere"
	// LeftLimit: it would take more moves, or more trials, than are tried.
	LeftLimit LeftCode = "limit"
	// LeftStays: the pod is on the node that is to be empty, and is not moved.
	LeftStays LeftCode = "stays"
)

// LeftCodes are all of them.
func LeftCodes() []LeftCode {
	return []LeftCode{LeftNotJudged, LeftNoNode, LeftNotMovable, LeftInsufficientCapacity, LeftNoPlace, LeftLimit, LeftStays}
}

// Unmoved counts pods by the rule for which they are not moved.
type Unmoved struct {
	Rule Rule `json:"rule"`
	Pods int  `json:"pods"`
}

// FreeCapacity is what is free of a resource, in units, of healthy devices.
type FreeCapacity struct {
	Resource accel.Resource `json:"resource"`
	Free     accel.Units    `json:"free"`
	// LargestFree is that of one device. After the moves, it is before the pods that wait
	// are placed.
	LargestFree accel.Units `json:"largestFree"`
	// Usable are the units that the pods that wait request and can get.
	Usable accel.Units `json:"usable"`
}

// Admit plans moves that admit the pods that wait for a shared resource, in the order in
// which kube-scheduler tries them: the highest priority first, then the oldest.
func (x *Explainer) Admit() Plan {
	p := x.world.plan(GoalAdmit, "")
	m := x.world.mover()
	p.Unmoved = m.unmoved()
	p.Before = m.l().free()
	var waiting []*ask
	for i := range x.snapshot.Pods {
		pod := &x.snapshot.Pods[i]
		if !waits(pod) || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil || len(pod.Spec.SchedulingGates) > 0 {
			continue
		}
		if a := m.l().askOf(pod); a.shared.Resource != "" {
			waiting = append(waiting, a)
		}
	}
	slices.SortStableFunc(waiting, func(a, b *ask) int {
		return cmp.Or(cmp.Compare(corev1helpers.PodPriority(b.pod), corev1helpers.PodPriority(a.pod)),
			a.pod.CreationTimestamp.Compare(b.pod.CreationTimestamp.Time),
			cmp.Compare(podText(a.pod), podText(b.pod)))
	})
	var steps []step
	waits := map[*ask]bool{}
	now, moves := 0, 0
	failed := map[string]Left{} // of pods that are alike: what is free only shrinks
	for _, a := range waiting {
		left := Left{Pod: objectOf(a.pod), Units: a.peak()}
		if why := m.l().unknown(a); why != "" {
			left.Code, left.Reason = LeftNotJudged, why
			p.Left = append(p.Left, left)
			continue
		}
		alike := fmt.Sprintf("%s/%s/%s/%d", a.pod.Namespace, ownerText(a.pod), a.shared.Resource, a.peak())
		if like, ok := failed[alike]; ok && ownerText(a.pod) != "" {
			left.Code, left.Reason = like.Code, like.Reason
			p.Left = append(p.Left, left)
			continue
		}
		m.ceiling = corev1helpers.PodPriority(a.pod)
		more, ok := m.placeNow(a)
		if ok && moves == 0 {
			now++
		}
		if !ok {
			more, ok = m.admit(a, nil)
			moves += len(more)
		}
		if !ok {
			left.Code, left.Reason = m.why(a)
			failed[alike] = left
			p.Left = append(p.Left, left)
			continue
		}
		waits[a] = true
		steps = append(steps, more...)
	}
	x.world.replay(&p, steps, waits)
	if now > 0 && len(p.Moves) > 0 {
		p.Notes = append(p.Notes, "Pods that fit now are expected where policy binpack places them. Plan again once they run.")
	}
	return p
}

// placeNow places a pod that fits without a move, on the same devices in all layouts.
func (m *mover) placeNow(a *ask) ([]step, bool) {
	nodes := m.l().destinations(a, nil)
	if len(nodes) == 0 {
		return nil, false
	}
	n := nodes[0]
	undo, ok := m.l().put(a, n)
	if !ok {
		return nil, false
	}
	ids, _ := m.l().devicesOf(a.pod)
	undos := []func(){undo}
	for _, l := range m.layouts[1:] {
		undo, ok := l.put(l.pinned(a, ids), l.byName[n.Name])
		if !ok {
			for _, undo := range undos {
				undo()
			}
			return nil, false
		}
		undos = append(undos, undo)
	}
	steps := []step{{a: a, to: n.Name}}
	m.fix(steps, true)
	return steps, true
}

// Empty plans moves that leave no pod on a node, but for those that belong to it. It
// returns an error for a node that does not exist.
func (x *Explainer) Empty(node string) (Plan, error) {
	p := x.world.plan(GoalEmpty, node)
	m := x.world.mover()
	n := m.l().byName[node]
	if n == nil {
		return p, fmt.Errorf("the cluster has no node %q", node)
	}
	p.Unmoved = m.unmoved()
	p.Before = m.l().free()
	var pods []*ask
	for _, on := range n.pods {
		rule := m.l().rule(on.Pod)
		switch {
		case rule == RuleNode || rule == RuleEnding: // they go with the node, or by themselves
		case rule != "":
			p.Left = append(p.Left, Left{Pod: objectOf(on.Pod), Units: m.l().again(on.Pod).peak(),
				Code: LeftStays, Reason: "it is not moved: a pod " + ruleTexts[rule]})
		default:
			pods = append(pods, m.l().again(on.Pod))
		}
	}
	if len(p.Left) > 0 {
		x.world.replay(&p, nil, nil)
		return p, nil
	}
	slices.SortStableFunc(pods, func(a, b *ask) int {
		return cmp.Or(cmp.Compare(min(len(b.shared.Resource), 1), min(len(a.shared.Resource), 1)), cmp.Compare(b.peak(), a.peak()),
			cmp.Compare(b.requests[v1.ResourceCPU], a.requests[v1.ResourceCPU]), cmp.Compare(podText(a.pod), podText(b.pod)))
	})
	// The largest first; if one finds no place then, it goes first, a few times.
	for range min(len(pods), 5) {
		m := x.world.mover()
		steps, failed := m.empty(pods, node)
		if failed < 0 {
			p.Left = nil
			x.world.replay(&p, steps, nil)
			return p, nil
		}
		a := pods[failed]
		left := Left{Pod: objectOf(a.pod), Units: a.peak(), Code: LeftNoPlace, Reason: "it fits on no other node"}
		if m.limited {
			left.Code, left.Reason = LeftLimit, "more places would have to be tried"
		}
		p.Left = []Left{left}
		pods = slices.Insert(slices.Delete(pods, failed, failed+1), 0, a)
	}
	x.world.replay(&p, nil, nil)
	return p, nil
}

// empty moves pods off a node, and returns the position of the first one that fits
// nowhere, -1 for none.
func (m *mover) empty(pods []*ask, node string) (steps []step, failed int) {
	for _, a := range pods {
		m.fixed[a.pod.UID] = true
	}
	for i, a := range pods {
		// It is placed elsewhere while it is still on the node, which changes nothing there.
		var undos []func()
		for _, l := range m.layouts {
			undos = append(undos, l.end(a.pod))
		}
		more, ok := m.admit(a, []string{node})
		if !ok {
			for _, undo := range slices.Backward(undos) {
				undo()
			}
			return nil, i
		}
		steps = append(steps, more...)
	}
	return steps, -1
}

func (w *world) plan(goal, node string) Plan {
	p := Plan{APIVersion: APIVersion, Kind: PlanKind, Taken: w.snapshot.Taken, Goal: goal, Node: node,
		Moves: []Move{}, Admitted: []Admission{}, Left: []Left{}}
	for _, f := range w.snapshot.Failed {
		p.Notes = append(p.Notes, fmt.Sprintf("The %s could not be read: %s.", f.Source, f.Reason))
	}
	ending := 0
	for _, held := range w.record.held {
		for i := range held {
			if isEnding(&held[i]) {
				ending++
			}
		}
	}
	if ending > 0 {
		p.Notes = append(p.Notes, count(ending, "pod")+" being deleted still hold devices; what they free is not used by the plan.")
	}
	return p
}

func objectOf(p *v1.Pod) Object { return Object{p.Namespace, p.Name} }

// unmoved counts the pods that hold a shared resource and are not moved.
func (m *mover) unmoved() []Unmoved {
	by := map[Rule]int{}
	for _, n := range m.l().nodes {
		for _, on := range n.pods {
			if len(m.l().held[on.UID]) > 0 {
				by[m.l().rule(on.Pod)]++
			}
		}
	}
	var out []Unmoved
	for _, r := range Rules() {
		if by[r] > 0 {
			out = append(out, Unmoved{r, by[r]})
		}
	}
	return out
}

// free is what is free of each resource.
func (l *layout) free() []FreeCapacity {
	out := []FreeCapacity{}
	for _, r := range l.memory {
		f := FreeCapacity{Resource: r}
		known := false
		for usage := range l.ledger.Nodes(r) {
			known = true
			for _, d := range usage.Devices {
				if free := d.Units - d.Withheld - d.Used; !d.Health.Unhealthy && free > 0 {
					f.Free += free
					f.LargestFree = max(f.LargestFree, free)
				}
			}
		}
		if known {
			out = append(out, f)
		}
	}
	return out
}

// why says why no moves admit a pod.
func (m *mover) why(a *ask) (LeftCode, string) {
	l := m.l()
	var free accel.Units
	var none, some, most bool
	for _, n := range l.openTo(a) {
		usage, _ := l.ledger.Node(a.shared.Resource, n.Name)
		for _, d := range usage.Devices {
			if !d.Health.Unhealthy && a.shared.Selection.Allows(d.ID, d.Model, d.Isolation.Memory) {
				free += max(d.Units-d.Withheld-d.Used, 0)
			}
		}
		none = none || l.fitsWithout(a, n, func(*v1.Pod) bool { return true })
		some = some || l.fitsWithout(a, n, m.movable)
	}
	for _, c := range m.candidates(a, nil, math.MaxInt) {
		most = most || c.least <= maxMoves
	}
	switch {
	case !none:
		return LeftNoNode, "it fits on no node, whatever is moved; see kubectl divvy why"
	case !some:
		return LeftNotMovable, "pods that are not moved, or have a higher priority, hold what it needs"
	case free < a.shared.Peak():
		return LeftInsufficientCapacity, fmt.Sprintf("%d units are free on suitable nodes, less than it requests", free)
	case m.limited || !most:
		return LeftLimit, fmt.Sprintf("more than %d pods would have to move, or more places be tried", maxMoves)
	}
	return LeftNoPlace, "the pods that would have to move fit nowhere else"
}

// fitsWithout reports whether a pod fits on a node without some pods of it.
func (l *layout) fitsWithout(a *ask, n *nodeView, gone func(*v1.Pod) bool) bool {
	var undos []func()
	for _, on := range slices.Clone(n.pods) {
		if gone(on.Pod) {
			undos = append(undos, l.end(on.Pod))
		}
	}
	ok := l.fits(a, n)
	for _, undo := range slices.Backward(undos) {
		undo()
	}
	return ok
}

// replay carries the steps out on a fresh copy, and fills in the plan from what happens there.
func (w *world) replay(p *Plan, steps []step, admitted map[*ask]bool) {
	l := w.layout(placement.Binpack)
	last := make([]*ask, len(steps)) // the pod that a step is for
	for i := len(steps) - 1; i >= 0; i-- {
		if last[i] = steps[i].a; !admitted[steps[i].a] && i+1 < len(steps) {
			last[i] = last[i+1]
		}
	}
	r := replayed{plan: p, l: l, steps: steps, admitted: admitted}
	for i := range steps {
		if !r.step(i, last[i]) {
			// The search has carried them out on copies like this one.
			pod := steps[i].a.pod
			p.Notes = append(p.Notes, fmt.Sprintf("The plan ends before the move of %s, which could not be verified.", podText(pod)))
			p.Left = append(p.Left, Left{Pod: objectOf(pod), Code: LeftLimit, Reason: "it could not be verified"})
			break
		}
	}
	r.commands()
	for a := range admitted {
		if _, placed := l.on[a.pod.UID]; placed {
			l.end(a.pod)
		}
	}
	p.After = l.free()
	for _, a := range p.Admitted {
		use := func(all []FreeCapacity) {
			for i := range all {
				if all[i].Resource == a.Resource {
					all[i].Usable += a.Units
				}
			}
		}
		use(p.After)
		if a.AfterMove == 0 {
			use(p.Before)
		}
	}
	p.Reached = len(p.Left) == 0
}
