package why

import (
	"cmp"
	"maps"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	placement "github.com/divvy-gpu/divvy/internal/core/place"
)

// layout is a copy of the world in which pods end and are placed.
type layout struct {
	world // whose nodes and ledger are copies

	byName map[string]*nodeView
	// on has the node of each pod, held what it holds there.
	on   map[types.UID]string
	held map[types.UID][]ledger.Holding
	open map[types.UID][]*nodeView
}

func (w *world) layout(p placement.Policy) *layout {
	l := &layout{world: *w, byName: map[string]*nodeView{}, on: map[types.UID]string{}, held: map[types.UID][]ledger.Holding{},
		open: map[types.UID][]*nodeView{}}
	l.nodes = make([]*nodeView, len(w.nodes))
	for i, n := range w.nodes {
		c := *n
		c.used, c.pods = maps.Clone(n.used), slices.Clone(n.pods)
		l.nodes[i], l.byName[n.Name] = &c, &c
		for _, on := range n.pods {
			l.on[on.UID] = n.Name
		}
	}
	l.ledger = ledger.New(ledger.Options{Policy: p, Now: w.now})
	w.copyInto(l.ledger, slices.Sorted(maps.Keys(w.record.inventories)), nil, true)
	for _, held := range w.record.held {
		for _, h := range held {
			l.held[types.UID(h.Pod.UID)] = append(l.held[types.UID(h.Pod.UID)], h)
		}
	}
	return l
}

// end ends a pod, and returns what undoes that.
func (l *layout) end(p *v1.Pod) (undo func()) {
	n, held := l.byName[l.on[p.UID]], l.held[p.UID]
	at := slices.IndexFunc(n.pods, func(o placedPod) bool { return o.UID == p.UID })
	was := n.pods[at]
	n.pods = slices.Delete(n.pods, at, at+1)
	n.used.add(was.requests, -1)
	l.ledger.Forget(string(p.UID))
	delete(l.on, p.UID)
	delete(l.held, p.UID)
	return func() {
		n.pods = slices.Insert(n.pods, at, was)
		n.used.add(was.requests, 1)
		for _, h := range held {
			l.ledger.Observe(h)
		}
		l.on[p.UID], l.held[p.UID] = n.Name, held
	}
}

// put places a pod on a node, on the devices that the ledger chooses, and returns what
// undoes that; false where it does not fit.
func (l *layout) put(a *ask, n *nodeView) (undo func(), ok bool) {
	if !l.beside(a, n) {
		return nil, false
	}
	uid := a.pod.UID
	if r := a.shared; r.Resource != "" {
		ref := accel.PodRef{UID: string(uid), Namespace: a.pod.Namespace, Name: a.pod.Name}
		g, _, err := l.ledger.Reserve(ref, time.Time{}, n.Name, r)
		if err != nil {
			return nil, false
		}
		h := ledger.Holding{Pod: ref, Node: n.Name, Resource: r.Resource, Units: r.Peak(), Confirmed: true, Priority: r.Priority}
		h.SetDevices(g.Devices())
		l.held[uid] = []ledger.Holding{h}
	}
	n.pods = append(n.pods, placedPod{a.pod, a.requests})
	n.used.add(a.requests, 1)
	l.on[uid] = n.Name
	return func() { l.end(a.pod) }, true
}

// beside reports whether all but the devices admits a pod to a node.
func (l *layout) beside(a *ask, n *nodeView) bool {
	if about := a.resource(); about != "" && a.requests[about] > n.free(about) {
		return false
	}
	return a.offeredBy(n) && len(a.hindrances(n)) == 0
}

// fits reports whether a pod fits on a node.
func (l *layout) fits(a *ask, n *nodeView) bool {
	return l.beside(a, n) && (a.shared.Resource == "" || fits(l.ledger, a.shared, n.Name).Code == accel.Fits)
}

// openTo are the nodes from which only pods keep a pod off.
func (l *layout) openTo(a *ask) []*nodeView {
	out, known := l.open[a.pod.UID]
	if known {
		return out
	}
	for _, n := range l.nodes {
		if a.shared.Resource != "" && n.inventory(a.shared.Resource) == nil {
			continue
		}
		if !slices.ContainsFunc(a.hindrances(n), func(h hindrance) bool { return !slices.Contains(byPods, h.code) }) {
			out = append(out, n)
		}
	}
	l.open[a.pod.UID] = out
	return out
}

// destinations are the nodes on which a pod fits, the one that the extender rates best
// first; of a pod without a shared resource, the one with the most free CPU.
func (l *layout) destinations(a *ask, shut []string) []*nodeView {
	var names []string
	var nodes []*nodeView
	for _, n := range l.openTo(a) {
		if !slices.Contains(shut, n.Name) {
			nodes, names = append(nodes, n), append(names, n.Name)
		}
	}
	verdicts := make([]ledger.Verdict, len(names))
	if a.shared.Resource != "" {
		l.ledger.Check(a.shared, names, verdicts)
	} else {
		for i, n := range nodes {
			verdicts[i].Rating = n.free(v1.ResourceCPU)
		}
	}
	type rated struct {
		n      *nodeView
		rating int64
	}
	var fit []rated
	for i, v := range verdicts {
		if v.Code == accel.Fits && l.beside(a, nodes[i]) {
			fit = append(fit, rated{nodes[i], v.Rating})
		}
	}
	slices.SortStableFunc(fit, func(a, b rated) int { return cmp.Compare(b.rating, a.rating) })
	out := make([]*nodeView, len(fit))
	for i := range fit {
		out[i] = fit[i].n
	}
	return out
}

// devicesOf are the devices that a pod is on, and their indexes as people read them.
func (l *layout) devicesOf(p *v1.Pod) (ids []accel.DeviceID, indexes []string) {
	for _, h := range l.held[p.UID] {
		usage, _ := l.ledger.Node(h.Resource, h.Node)
		for _, d := range usage.Devices {
			if d.ID == h.Device || slices.Contains(h.More, d.ID) {
				ids, indexes = append(ids, d.ID), append(indexes, accel.IndexText(d.Index))
			}
		}
	}
	return ids, indexes
}
