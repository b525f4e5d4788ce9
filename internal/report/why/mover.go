package why

import (
	"cmp"
	"math"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	placement "github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const (
	// maxMoves is how many pods are moved for one that waits, at most.
	maxMoves = 4
	// podEffort bounds the search for one pod that waits, and planEffort for all, of which
	// each has at least leastEffort: in sets of pods that are looked at, about 20
	// microseconds each, so that an answer takes seconds.
	podEffort, planEffort, leastEffort = 20_000, 100_000, 500
	// branching is how many nodes are tried for a pod that moves.
	branching = 3
	// On up to exactNodes nodes every move of every pod is tried, exactTrials times at most,
	// where the search from the node's side finds nothing.
	exactNodes, exactTrials = 16, 5_000
)

// step is a pod that ends, where it is on a node, and is placed on another one, or on
// other devices of the same one.
type step struct {
	a    *ask
	to   string
	pins []accel.DeviceID // the devices that an annotation selects; nil for none
}

// mover looks for the fewest pods to move.
type mover struct {
	// layouts are equal but for the policy. The search is on the first; what it finds is
	// carried out on all, step by step, so that it depends on no policy.
	layouts []*layout
	// fixed are the pods that do not move: each is moved at most once.
	fixed map[types.UID]bool
	rules map[types.UID]Rule
	// ceiling is the highest priority of pods that may be moved.
	ceiling int32
	// effort is what is left for this pod, left for all; exact counts towards exactTrials.
	effort, left, exact int
	// limited is true once a limit kept the search from an end.
	limited bool
}

func (w *world) mover() *mover {
	m := &mover{fixed: map[types.UID]bool{}, rules: map[types.UID]Rule{}, ceiling: math.MaxInt32, left: planEffort}
	for _, p := range placement.Policies() {
		m.layouts = append(m.layouts, w.layout(p))
	}
	return m
}

func (m *mover) l() *layout { return m.layouts[0] }

func (m *mover) movable(p *v1.Pod) bool {
	if m.fixed[p.UID] || corev1helpers.PodPriority(p) > m.ceiling {
		return false
	}
	rule, known := m.rules[p.UID]
	if !known {
		rule = m.l().rule(p)
		m.rules[p.UID] = rule
	}
	return rule == ""
}

// admit moves the fewest pods so that one is admitted to a node that is not shut, and
// places it there: the last of the steps. Without a way, nothing is changed.
func (m *mover) admit(a *ask, shut []string) ([]step, bool) {
	m.effort, m.exact, m.limited = max(min(podEffort, m.left), leastEffort), 0, false
	before := m.effort
	defer func() { m.left -= before - m.effort }()
	for budget := range maxMoves + 1 {
		steps, _, ok := m.find(a, shut, budget, 0, func(steps []step, undo func()) bool {
			undo()
			return m.carryOut(steps)
		})
		if !ok && budget > 0 && len(m.l().nodes) <= exactNodes {
			steps, ok = m.exhaust(a, shut, budget, nil)
		}
		if ok {
			m.fix(steps, true)
			return steps, true
		}
	}
	return nil, false
}

// exhaust tries every move of every pod to every device, and carries out what admits the
// pod. The search on the first layout is taken back.
func (m *mover) exhaust(a *ask, shut []string, budget int, before []step) ([]step, bool) {
	l := m.l()
	if budget == 0 {
		nodes := l.destinations(a, shut)
		if len(nodes) == 0 {
			return nil, false
		}
		return append(slices.Clone(before), step{a: a, to: nodes[0].Name}), true
	}
	near := m.candidates(a, shut, budget)
	if len(near) == 0 {
		return nil, false
	}
	for _, n := range l.nodes {
		if budget == 1 && !slices.ContainsFunc(near, func(c candidate) bool { return c.n == n }) {
			continue
		}
		for _, on := range slices.Clone(n.pods) {
			if !m.movable(on.Pod) || len(l.held[on.UID]) == 0 {
				continue
			}
			v := l.again(on.Pod)
			was, _ := l.devicesOf(on.Pod)
			back := l.end(on.Pod)
			m.fixed[on.UID] = true
			for s := range m.spots(v, n, was, shut) {
				if m.exact++; m.exact > exactTrials || !m.spend(2) {
					m.limited = true
					break
				}
				there, ok := l.put(s.a, l.byName[s.to])
				if !ok {
					continue
				}
				steps, ok := m.exhaust(a, shut, budget-1, append(before, s))
				there()
				if !ok {
					continue
				}
				back()
				delete(m.fixed, on.UID)
				if len(before) > 0 || m.carryOut(steps) {
					return steps, true
				}
				back = l.end(on.Pod)
				m.fixed[on.UID] = true
			}
			back()
			delete(m.fixed, on.UID)
		}
	}
	return nil, false
}

// spots are the places for a pod that was on devices of a node: those that the ledger
// chooses on other nodes, then all others.
func (m *mover) spots(a *ask, from *nodeView, was []accel.DeviceID, shut []string) func(yield func(step) bool) {
	return func(yield func(step) bool) {
		l := m.l()
		nodes := l.destinations(a, shut)
		for _, n := range nodes {
			if n != from && !yield(step{a: a, to: n.Name}) {
				return
			}
		}
		if !m.steerable(a.pod) {
			return
		}
		each := a.shared.Each()
		for _, n := range nodes {
			usage, _ := l.ledger.Node(a.shared.Resource, n.Name)
			var able []accel.DeviceID
			for _, d := range usage.Devices {
				allowed := !d.Health.Unhealthy && a.shared.Selection.Allows(d.ID, d.Model, d.Isolation.Memory)
				if allowed && d.Units-d.Withheld-d.Used >= each {
					able = append(able, d.ID)
				}
			}
			for set := range subsets(len(able), max(a.shared.Devices, 1)) {
				ids := make([]accel.DeviceID, len(set))
				for i, at := range set {
					ids[i] = able[at]
				}
				if n == from && slices.Equal(ids, was) {
					continue
				}
				if !yield(step{a: l.pinned(a, ids), to: n.Name, pins: ids}) {
					return
				}
			}
		}
	}
}

// spend takes some of the effort that is left, false where there is not enough.
func (m *mover) spend(effort int) bool {
	m.effort -= effort
	m.limited = m.limited || m.effort < 0
	return m.effort >= 0
}

// fix says whether the pods of some steps may still be moved.
func (m *mover) fix(steps []step, fixed bool) {
	for i := range steps {
		if uid := steps[i].a.pod.UID; fixed {
			m.fixed[uid] = true
		} else {
			delete(m.fixed, uid)
		}
	}
}

// candidates are the nodes on which at most so many pods must move, those with the fewest first.
func (m *mover) candidates(a *ask, shut []string, budget int) []candidate {
	l := m.l()
	var out []candidate
	for _, n := range l.openTo(a) {
		if slices.Contains(shut, n.Name) {
			continue
		}
		c := newCandidate(&l.world, a, n, nil)
		c.victims = slices.DeleteFunc(c.victims, func(v victim) bool { return !m.movable(v.pod) })
		if c.least = c.atLeast(c.victims); len(c.victims) > 0 && c.least <= min(budget, len(c.victims)) {
			out = append(out, c)
		}
	}
	slices.SortStableFunc(out, func(a, b candidate) int { return a.least - b.least })
	return out
}

// find is admit with at most so many moves, on the first layout. accept has the last word
// about steps at depth 0, and undoes them; deeper, the caller does.
func (m *mover) find(a *ask, shut []string, budget, depth int, accept func([]step, func()) bool) ([]step, func(), bool) {
	l := m.l()
	if nodes := l.destinations(a, shut); len(nodes) > 0 {
		steps := []step{{a: a, to: nodes[0].Name}}
		undo, ok := l.put(a, nodes[0])
		if ok && (depth > 0 || accept(steps, undo)) {
			return steps, undo, true
		}
		return nil, nil, false // on another layout it does not fit there
	}
	if budget == 0 {
		return nil, nil, false
	}
	if !m.spend(len(m.l().openTo(a)) / 4) {
		return nil, nil, false
	}
	for _, c := range m.candidates(a, shut, budget) {
		for size := c.least; size <= min(budget, len(c.victims)); size++ {
			for set := range subsets(len(c.victims), size) {
				if !m.spend(1) {
					return nil, nil, false
				}
				if !c.enough(set) {
					continue
				}
				steps, undo, ok := m.vacate(a, c.n, podsOf(c.victims, set), shut, budget-size, depth)
				if ok && (depth > 0 || accept(steps, undo)) {
					return steps, undo, true
				}
			}
		}
	}
	return nil, nil, false
}

// vacate ends pods of a node, places one that waits there, and then those.
func (m *mover) vacate(a *ask, n *nodeView, pods []*v1.Pod, shut []string, rest, depth int) ([]step, func(), bool) {
	l := m.l()
	var undos []func()
	undo := func() {
		for _, u := range slices.Backward(undos) {
			u()
		}
	}
	moved := make([]*ask, len(pods))
	was := map[types.UID][]accel.DeviceID{}
	for i, p := range pods {
		moved[i] = l.again(p)
		was[p.UID], _ = l.devicesOf(p)
		undos = append(undos, l.end(p))
	}
	slices.SortStableFunc(moved, func(a, b *ask) int { return cmp.Compare(b.peak(), a.peak()) })
	back, ok := func() (func(), bool) {
		if !l.fits(a, n) {
			return nil, false
		}
		return l.put(a, n)
	}()
	if !ok {
		undo()
		return nil, nil, false
	}
	undos = append(undos, back)
	steps, back, ok := m.settle(moved, n, append(slices.Clone(shut), n.Name), rest, depth, was)
	if !ok {
		undo()
		return nil, nil, false
	}
	undos = append(undos, back)
	// Those that leave the node make place for those that stay on it.
	slices.SortStableFunc(steps, func(a, b step) int { return cmp.Compare(min(len(a.pins), 1), min(len(b.pins), 1)) })
	return append(steps, step{a: a, to: n.Name}), undo, true
}

// settle places pods that were on a node: on others, else on other devices of it, else on
// others from which pods move.
func (m *mover) settle(pods []*ask, from *nodeView, shut []string, rest, depth int, was map[types.UID][]accel.DeviceID) (
	steps []step, undo func(), ok bool) {
	if len(pods) == 0 {
		return nil, func() {}, true
	}
	l, a := m.l(), pods[0]
	if !m.spend(5 + len(l.openTo(a))/25) {
		return nil, nil, false
	}
	then := func(first []step, back func(), rest int) bool {
		m.fix(first, true)
		more, undoMore, found := m.settle(pods[1:], from, shut, rest, depth, was)
		m.fix(first, false)
		if !found {
			back()
			return false
		}
		steps, undo = slices.Concat(first, more), func() { undoMore(); back() }
		return true
	}
	nodes := l.destinations(a, shut)
	for _, n := range nodes[:min(branching, len(nodes))] {
		if back, ok := l.put(a, n); ok && then([]step{{a: a, to: n.Name}}, back, rest) {
			return steps, undo, true
		}
	}
	if depth == 0 && m.steerable(a.pod) {
		if pinned, back, ok := m.pin(a, from, was[a.pod.UID]); ok && then([]step{pinned}, back, rest) {
			return steps, undo, true
		}
	}
	if rest == 0 || depth > 0 {
		return nil, nil, false
	}
	first, back, ok := m.find(a, shut, rest, depth+1, nil)
	if ok && then(first, back, rest-(len(first)-1)) {
		return steps, undo, true
	}
	return nil, nil, false
}

// pin places a pod on other devices of its node, and names those in its annotation.
func (m *mover) pin(a *ask, n *nodeView, was []accel.DeviceID) (step, func(), bool) {
	l := m.l()
	if a.shared.Resource == "" || !l.fits(a, n) {
		return step{}, nil, false
	}
	back, ok := l.put(a, n)
	if !ok {
		return step{}, nil, false
	}
	ids, _ := l.devicesOf(a.pod)
	if slices.Equal(ids, was) {
		back()
		return step{}, nil, false
	}
	return step{a: l.pinned(a, ids), to: n.Name, pins: ids}, back, true
}

// pinned is a pod with an annotation that selects these devices.
func (l *layout) pinned(a *ask, ids []accel.DeviceID) *ask {
	p := a.pod.DeepCopy()
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[wire.UseDevicesAnnotation] = joinIDs(ids)
	return l.askOf(p)
}

func joinIDs(ids []accel.DeviceID) string {
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = string(id)
	}
	return strings.Join(texts, ",")
}

// steerable reports whether the pod that replaces p can be found while it waits: it is the
// only one with its labels, or has the same name.
func (m *mover) steerable(p *v1.Pod) bool {
	if isStatefulSets(p) {
		return true
	}
	if len(p.Labels) == 0 {
		return false
	}
	alike := labels.SelectorFromSet(p.Labels)
	for i := range m.l().snapshot.Pods {
		o := &m.l().snapshot.Pods[i]
		if o.Namespace == p.Namespace && o.Spec.NodeName == "" && !ended(o) && alike.Matches(labels.Set(o.Labels)) {
			return false
		}
	}
	return true
}

func isStatefulSets(p *v1.Pod) bool { return strings.HasPrefix(ownerText(p), "statefulset/") }

// carryOut does the steps one after the other on every layout, or none of them.
func (m *mover) carryOut(steps []step) bool {
	var undos []func()
	for _, l := range m.layouts {
		for i := range steps {
			undo, ok := l.carryOut(&steps[i], steps[len(steps)-1].a)
			if !ok {
				for _, u := range slices.Backward(undos) {
					u()
				}
				return false
			}
			undos = append(undos, undo)
		}
	}
	return true
}

// carryOut ends a pod and places it, as a person would have it done. last is the pod that
// the steps admit, which may be placed before one that waits for its annotation.
func (l *layout) carryOut(s *step, last *ask) (undo func(), ok bool) {
	n, back := l.byName[s.to], func() {}
	if _, runs := l.on[s.a.pod.UID]; runs {
		back = l.end(s.a.pod)
	}
	if _, runs := l.on[last.pod.UID]; s.pins != nil && !runs && l.fits(last, n) {
		early, ok := l.put(last, n)
		fits := ok && l.fits(s.a, n)
		if ok {
			early()
		}
		if !fits {
			back()
			return nil, false
		}
	}
	there, ok := l.put(s.a, n)
	if !ok {
		back()
		return nil, false
	}
	return func() { there(); back() }, true
}
