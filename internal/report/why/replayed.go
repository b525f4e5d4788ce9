package why

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// replayed is a plan that is carried out on a copy.
type replayed struct {
	plan     *Plan
	l        *layout
	steps    []step
	admitted map[*ask]bool
	pods     []*v1.Pod          // of the moves
	pins     [][]accel.DeviceID // of the moves
	needed   []map[string]bool  // nodes that the rest needs after a move
}

// step carries one out, and notes it in the plan; false where it cannot be.
func (r *replayed) step(i int, last *ask) bool {
	s, l := &r.steps[i], r.l
	p := s.a.pod
	if r.admitted[s.a] {
		if _, ok := l.carryOut(s, last); !ok {
			return false
		}
		_, devices := l.devicesOf(p)
		r.plan.Admitted = append(r.plan.Admitted, Admission{Pod: objectOf(p), Resource: s.a.shared.Resource, Units: s.a.peak(),
			To: Spot{s.to, devices}, AfterMove: len(r.plan.Moves)})
		return true
	}
	m := Move{Pod: objectOf(p), Owner: ownerText(p), Resource: s.a.shared.Resource, Units: s.a.shared.Peak(),
		From: Spot{Node: l.on[p.UID]}, Pinned: s.pins != nil}
	_, m.From.Devices = l.devicesOf(p)
	needed := r.neededAfter(i)
	m.Cordon = r.cordon(s, needed)
	if _, ok := l.carryOut(s, last); !ok {
		return false
	}
	m.To.Node = s.to
	_, m.To.Devices = l.devicesOf(p)
	r.plan.Moves = append(r.plan.Moves, m)
	r.pods, r.pins, r.needed = append(r.pods, p), append(r.pins, s.pins), append(r.needed, needed)
	return true
}

// neededAfter are the nodes on which the rest of the plan needs what is free after a step.
func (r *replayed) neededAfter(i int) map[string]bool {
	needed := map[string]bool{}
	for k := i + 1; k < len(r.steps); k++ {
		needed[r.steps[k].to] = true
	}
	if r.plan.Goal == GoalEmpty {
		needed[r.plan.Node] = true
	}
	if s := &r.steps[i]; s.pins == nil {
		delete(needed, s.to)
	} else {
		needed[s.to] = true // until the annotation is on the pod
	}
	return needed
}

// cordon are the needed nodes on which the pod of a step would fit: wherever else
// kube-scheduler places it, the rest of the plan holds.
func (r *replayed) cordon(s *step, needed map[string]bool) []string {
	back := r.l.end(s.a.pod)
	defer back()
	var out []string
	for _, name := range slices.Sorted(maps.Keys(needed)) {
		always := r.plan.Goal == GoalEmpty && name == r.plan.Node || s.pins != nil && name == s.to
		if always || r.l.fits(s.a, r.l.byName[name]) {
			out = append(out, name)
		}
	}
	return out
}

// commands fills in those of all moves.
func (r *replayed) commands() {
	p := r.plan
	cordoned := map[string]bool{}
	for i := range p.Moves {
		m := &p.Moves[i]
		add := func(format string, args ...any) { m.Commands = append(m.Commands, fmt.Sprintf(format, args...)) }
		for _, name := range m.Cordon {
			if !cordoned[name] && !r.l.byName[name].Spec.Unschedulable {
				add("kubectl cordon %s", name)
				cordoned[name] = true
			}
		}
		add("kubectl delete pod -n %s %s", m.Pod.Namespace, m.Pod.Name)
		if m.Pinned {
			r.annotate(i, add)
		}
		open := func() {
			for _, name := range slices.Sorted(maps.Keys(cordoned)) {
				later := i+1 < len(p.Moves) && r.needed[i+1][name] && !r.admits(name, i+1)
				if m.Pinned && name == m.To.Node {
					later = false
				}
				if !later && name != p.Node {
					add("kubectl uncordon %s", name)
					delete(cordoned, name)
				}
			}
		}
		if m.Pinned { // it is placed once its node is open again
			open()
		}
		if kind, _, _ := strings.Cut(m.Owner, "/"); (kind == "deployment" || kind == "statefulset") && !r.waitsFor(m) {
			add("kubectl rollout status -n %s %s --timeout=10m", m.Pod.Namespace, m.Owner)
		} else {
			add("kubectl get pods -n %s -o wide", m.Pod.Namespace)
		}
		if !m.Pinned {
			open()
		}
	}
}

// admits reports whether a pod that waits is placed on a node after so many moves.
func (r *replayed) admits(node string, moves int) bool {
	return slices.ContainsFunc(r.plan.Admitted, func(a Admission) bool { return a.AfterMove == moves && a.To.Node == node })
}

// annotate adds the commands that select devices for the pod that replaces one.
func (r *replayed) annotate(i int, add func(format string, args ...any)) {
	m, p := &r.plan.Moves[i], r.pods[i]
	value := pool.Quote(wire.UseDevicesAnnotation + "=" + joinIDs(r.pins[i]))
	if isStatefulSets(p) {
		add("kubectl wait -n %s --for=create pod/%s --timeout=1m", m.Pod.Namespace, m.Pod.Name)
		add("kubectl annotate pod -n %s %s --overwrite %s", m.Pod.Namespace, m.Pod.Name, value)
		return
	}
	var selector []string
	for key, v := range p.Labels {
		selector = append(selector, key+"="+v)
	}
	slices.Sort(selector)
	add("kubectl annotate pods -n %s -l %s --field-selector=spec.nodeName= --overwrite %s", m.Pod.Namespace,
		pool.Quote(strings.Join(selector, ",")), value)
}

// waitsFor reports whether another pod of the move's owner waits, so that its rollout does not end.
func (r *replayed) waitsFor(m *Move) bool {
	for i := range r.l.snapshot.Pods {
		p := &r.l.snapshot.Pods[i]
		if p.Namespace == m.Pod.Namespace && ownerText(p) == m.Owner && p.Spec.NodeName == "" && !ended(p) {
			return true
		}
	}
	return false
}
