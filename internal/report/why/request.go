package why

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// request is kind 3: the pod must be created again.
func (s *search) request() (Change, bool) {
	if units, _ := s.world.mebibytes(s.a); units > 0 {
		if c, ok := s.withUnits(s.a, s.open, units); ok {
			return c, true
		}
	}
	if c, ok := s.lessUnits(s.a, s.open); ok {
		return c, true
	}
	for _, one := range []func() (Change, bool){s.rename, s.lessBeside, s.dropSelector} {
		if c, ok := one(); ok {
			return c, true
		}
	}
	return Change{}, false
}

// place is where a container of a pod requests a resource.
type place struct {
	init  bool
	index int
}

func (at place) of(p *v1.Pod) *v1.Container {
	if at.init {
		return &p.Spec.InitContainers[at.index]
	}
	return &p.Spec.Containers[at.index]
}

func (at place) path(name v1.ResourceName, list string) string {
	kind := "containers"
	if at.init {
		kind = "initContainers"
	}
	return fmt.Sprintf("/spec/%s/%d/resources/%s/%s", kind, at.index, list, pointer(string(name)))
}

// pointer escapes a name for a JSON pointer.
func pointer(s string) string { return strings.NewReplacer("~", "~0", "/", "~1").Replace(s) }

// places are the containers that request a resource.
func places(p *v1.Pod, name v1.ResourceName) []place {
	var out []place
	for _, init := range []bool{true, false} {
		all := p.Spec.Containers
		if init {
			all = p.Spec.InitContainers
		}
		for i := range all {
			q, ok := all[i].Resources.Requests[name]
			if !ok {
				q, ok = all[i].Resources.Limits[name]
			}
			if ok && q.Sign() > 0 {
				out = append(out, place{init, i})
			}
		}
	}
	return out
}

// withAmount returns a copy of a pod in which a container requests another amount.
func withAmount(p *v1.Pod, at place, name v1.ResourceName, q resource.Quantity) *v1.Pod {
	changed := p.DeepCopy()
	r := &at.of(changed).Resources
	if r.Requests == nil {
		r.Requests = v1.ResourceList{}
	}
	r.Requests[name] = q
	if _, limited := r.Limits[name]; limited {
		r.Limits[name] = q
	}
	return changed
}

// withUnits returns the change to a number of units, if that admits the pod.
func (s *search) withUnits(a *ask, nodes []*nodeView, units accel.Units) (Change, bool) {
	name := a.resource()
	where := places(a.pod, name)
	if len(where) != 1 {
		return Change{}, false
	}
	changed := s.world.newAsk(withAmount(a.pod, where[0], name, *resource.NewQuantity(int64(units), resource.DecimalSI)))
	n, ok := s.world.admits(changed, nodes)
	if !ok {
		return Change{}, false
	}
	c := Change{Kind: ChangeRequest, Text: fmt.Sprintf("request %d instead of %d", units, a.peak())}
	s.remake.order(&c, where[0], name, strconv.FormatInt(int64(units), 10), true)
	return s.world.placed(c, changed, n, nil), true
}

// lessUnits finds the number of units nearest to the request that admits the pod. Whether
// it is admitted is monotone in the number.
func (s *search) lessUnits(a *ask, nodes []*nodeView) (Change, bool) {
	name := a.resource()
	if name == "" || len(a.several) > 0 || len(nodes) == 0 || len(places(a.pod, name)) != 1 {
		return Change{}, false
	}
	k, peak := accel.Units(max(a.shared.Devices, 1)), a.peak()
	below, above := peak/k, (peak+k-1)/k // of each device
	if above > below && (above*k-peak <= peak-below*k || below == 0) {
		if c, ok := s.withUnits(a, nodes, above*k); ok {
			return c, true
		}
	}
	if below*k == peak {
		below--
	}
	most := sort.Search(int(min(below, accel.MaxUnits)), func(i int) bool {
		_, ok := s.withUnits(a, nodes, (below-accel.Units(i))*k)
		return ok
	})
	if accel.Units(most) < below {
		return s.withUnits(a, nodes, (below-accel.Units(most))*k)
	}
	if above*k > peak {
		return s.withUnits(a, nodes, above*k)
	}
	return Change{}, false
}

// rename is the change to the nearest name that nodes offer.
func (s *search) rename() (Change, bool) {
	name := s.a.resource()
	offered := s.world.offeredNames()
	where := places(s.a.pod, name)
	if name == "" || len(where) != 1 || slices.Contains(offered, string(name)) || foreignSystem(name) != "" {
		return Change{}, false
	}
	near := v1.ResourceName(nearest(string(name), offered))
	if near == "" {
		return Change{}, false
	}
	changed := s.a.pod.DeepCopy()
	r := &where[0].of(changed).Resources
	var ops []operation
	for _, one := range []struct {
		list string
		of   v1.ResourceList
	}{{"limits", r.Limits}, {"requests", r.Requests}} {
		if q, ok := one.of[name]; ok {
			delete(one.of, name)
			one.of[near] = q
			ops = append(ops, operation{Op: "remove", Path: where[0].path(name, one.list)},
				operation{Op: "add", Path: where[0].path(near, one.list), Value: q.String()})
		}
	}
	a := s.world.newAsk(changed)
	n, ok := s.world.admits(a, s.world.unhindered(a))
	if !ok {
		return Change{}, false
	}
	c := Change{Kind: ChangeRequest, Text: fmt.Sprintf("request %s instead of %s", near, name)}
	s.remake.again(&c, ops)
	return s.world.placed(c, a, n, nil), true
}

// lessBeside finds the node that lacks least CPU or memory, and the request that fits there.
func (s *search) lessBeside() (Change, bool) {
	type near struct {
		n    *nodeView
		h    hindrance
		part float64
	}
	var all []near
	for i := range s.nodes {
		j := &s.nodes[i]
		if len(j.hindrances) == 1 && j.hindrances[0].code == CPUOrMemory && j.code == "" {
			h := j.hindrances[0]
			all = append(all, near{j.n, h, float64(h.missing) / float64(s.a.requests[h.resource])})
		}
	}
	slices.SortStableFunc(all, func(a, b near) int { return compareFloats(a.part, b.part) })
	for _, one := range all {
		name := one.h.resource
		for _, at := range places(s.a.pod, name) {
			q := at.of(s.a.pod).Resources.Requests[name]
			have := q.Value()
			if name == v1.ResourceCPU {
				have = q.MilliValue()
			}
			less := have - one.h.missing
			if less <= 0 {
				continue
			}
			text := quantity(name, less)
			a := s.world.newAsk(withAmount(s.a.pod, at, name, resource.MustParse(text)))
			if len(a.hindrances(one.n)) > 0 {
				continue
			}
			n, ok := s.world.admits(a, []*nodeView{one.n})
			if !ok {
				continue
			}
			_, limited := at.of(s.a.pod).Resources.Limits[name]
			c := Change{Kind: ChangeRequest, Text: fmt.Sprintf("request %s %s instead of %s", text, name, quantity(name, have))}
			s.remake.order(&c, at, name, text, limited)
			return s.world.placed(c, a, n, nil), true
		}
	}
	return Change{}, false
}

func compareFloats(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// drop is the pod with less of what it selects nodes by, which opens nodes.
type drop struct {
	keys     []string // of the node selector
	affinity bool
	a        *ask
	nodes    []obstacle
}

func (d *drop) size() int {
	if d.affinity {
		return len(d.keys) + 1
	}
	return len(d.keys)
}

// drops are what the pod may drop, the least first, with the nodes that this opens beside other
// changes of theirs, or without any. One of a DaemonSet is bound to its node by the affinity.
func (s *search) drops(others bool) []drop {
	p := s.a.pod
	if s.remake.kind == kindDaemonSet || p.Spec.NodeName != "" {
		return nil
	}
	byText := map[string]*drop{}
	for i := range s.nodes {
		j := &s.nodes[i]
		var rest []hindrance
		var d drop
		for k := range j.hindrances {
			switch h := &j.hindrances[k]; h.code {
			case Selector:
				d.keys = slices.Sorted(maps.Keys(missingLabels(p, j.n.Node)))
			case Affinity:
				d.affinity = true
			default:
				rest = append(rest, *h)
			}
		}
		o, ok := s.obstacle(j.n, rest)
		if d.size() == 0 || !ok || (len(rest) > 0) != others || slices.ContainsFunc(j.n.Spec.Taints, isHandled) {
			continue
		}
		text := fmt.Sprint(d.affinity, d.keys)
		if byText[text] == nil {
			changed := p.DeepCopy()
			for _, key := range d.keys {
				delete(changed.Spec.NodeSelector, key)
			}
			if d.affinity {
				changed.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = nil
			}
			d.a = s.world.newAsk(changed)
			byText[text] = &d
		}
		byText[text].nodes = append(byText[text].nodes, o)
	}
	var out []drop
	for _, text := range slices.Sorted(maps.Keys(byText)) {
		out = append(out, *byText[text])
	}
	slices.SortStableFunc(out, func(a, b drop) int { return a.size() - b.size() })
	return out
}

// change is what the pod drops.
func (d *drop) change(r *remake) Change {
	var parts []string
	var ops []operation
	if len(d.keys) > 0 {
		parts = append(parts, strings.Join(d.keys, " and ")+" from the node selector")
	}
	for _, key := range d.keys {
		ops = append(ops, operation{Op: "remove", Path: "/spec/nodeSelector/" + pointer(key)})
	}
	if d.affinity {
		parts = append(parts, "the required node affinity")
		ops = append(ops, operation{Op: "remove", Path: "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution"})
	}
	c := Change{Kind: ChangeRequest, Text: "drop " + strings.Join(parts, " and ")}
	r.again(&c, ops)
	return c
}

// dropSelector drops what the pod selects nodes by, as little as possible.
func (s *search) dropSelector() (Change, bool) {
	for _, d := range s.drops(false) {
		if n, ok := s.world.admits(d.a, nodesOf(d.nodes)); ok {
			return s.world.placed(d.change(&s.remake), d.a, n, nil), true
		}
	}
	return Change{}, false
}

// pair are changes of kinds 1 to 3 that admit the pod together: the cheapest.
func (s *search) pair() (Change, bool) {
	if n, ok := s.world.admits(s.a, nodesOf(s.barred)); ok {
		return s.world.placed(s.opening(s.barred, n.Name), s.a, n, nil), true
	}
	all := slices.Concat(s.shut, s.barred)
	shut := nodesOf(all)
	for v := range s.annotationVariants(s.a, shut) {
		if n, ok := s.world.admits(v.a, shut); ok {
			return join(s.opening(all, n.Name), s.world.placed(v.change, v.a, n, nil)), true
		}
	}
	for _, d := range s.drops(true) {
		if n, ok := s.world.admits(d.a, nodesOf(d.nodes)); ok {
			return join(s.opening(d.nodes, n.Name), s.world.placed(d.change(&s.remake), d.a, n, nil)), true
		}
	}
	if c, ok := s.lessUnits(s.a, shut); ok {
		return join(s.opening(all, c.Node), c), true
	}
	for v := range s.annotationVariants(s.a, s.open) {
		if c, ok := s.lessUnits(v.a, v.nodes); ok {
			return s.remake.both(v.change, c), true
		}
	}
	return s.indivisible()
}

// indivisible spreads a request that has no equal parts over devices, with fewer units: the
// most units, then the fewest devices.
func (s *search) indivisible() (Change, bool) {
	r := s.a.shared
	name := v1.ResourceName(r.Resource)
	where := places(s.a.pod, name)
	if r.Resource == "" || len(s.a.several) > 0 || len(where) != 1 {
		return Change{}, false
	}
	var best Change
	var units accel.Units
	for k := 2; k <= 64 && accel.Units(k) <= r.Peak(); k++ {
		rounded := r.Peak() / accel.Units(k) * accel.Units(k)
		if rounded <= units {
			continue
		}
		p := withAmount(s.a.pod, where[0], name, *resource.NewQuantity(int64(rounded), resource.DecimalSI))
		for v := range s.annotationVariants(s.world.newAsk(p), s.open) {
			if v.a.shared.Devices != k || v.a.mistake != nil {
				continue
			}
			if n, ok := s.world.admits(v.a, v.nodes); ok {
				c := Change{Kind: ChangeRequest, Text: fmt.Sprintf("request %d instead of %d", rounded, r.Peak())}
				s.remake.order(&c, where[0], name, strconv.FormatInt(int64(rounded), 10), true)
				best, units = s.remake.both(v.change, s.world.placed(c, v.a, n, nil)), rounded
			}
			break
		}
	}
	return best, units > 0
}
