package why

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// offeredBy reports whether the node publishes the shared resource of the pod, if it requests
// one, and supports as many devices as the pod needs.
func (a *ask) offeredBy(n *nodeView) bool {
	if a.shared.Resource == "" {
		return true
	}
	in := n.inventory(a.shared.Resource)
	return in != nil && (a.shared.Devices <= 1 || in.Several)
}

// unhindered are the nodes from which nothing but the resource keeps the pod.
func (w *world) unhindered(a *ask) []*nodeView {
	var out []*nodeView
	for _, n := range w.nodes {
		if len(a.hindrances(n)) == 0 {
			out = append(out, n)
		}
	}
	return out
}

// admits returns the first of the nodes on which an ask fits, by its resource.
func (w *world) admits(a *ask, nodes []*nodeView) (*nodeView, bool) {
	if a.mistake != nil || len(a.several) > 0 {
		return nil, false
	}
	about := a.resource()
	names := make([]string, 0, len(nodes))
	able := make([]*nodeView, 0, len(nodes))
	for _, n := range nodes {
		if about != "" && a.requests[about] > a.free(n, about) || !a.offeredBy(n) {
			continue
		}
		able, names = append(able, n), append(names, n.Name)
	}
	if len(able) == 0 {
		return nil, false
	}
	if a.shared.Resource == "" {
		return able[0], true
	}
	verdicts := make([]ledger.Verdict, len(names))
	w.ledger.Fits(a.shared, names, verdicts)
	for i, v := range verdicts {
		if v.Code == accel.Fits {
			return able[i], true
		}
	}
	return nil, false
}

// placed fills in where a change puts the pod.
func (w *world) placed(c Change, a *ask, n *nodeView, gone func(*heldUnits) bool) Change {
	c.Node, c.Verified = n.Name, !c.unsure
	if a.shared.Resource == "" {
		return c
	}
	ref := accel.PodRef{UID: string(a.pod.UID), Namespace: a.pod.Namespace, Name: a.pod.Name}
	if ref.UID == "" {
		ref.UID = "waiting"
	}
	g, _, err := w.copyOf([]string{n.Name}, gone, true).Reserve(ref, time.Time{}, n.Name, a.shared)
	if err != nil {
		c.Verified = false // the core has the last word
		return c
	}
	c.Devices = []string{accel.IndexText(g.Index)}
	for _, d := range g.More {
		c.Devices = append(c.Devices, accel.IndexText(d.Index))
	}
	return c
}

// fitsWithout reports whether an ask fits on a node without some pods: by all filters, and
// by the core on a copy.
func (w *world) fitsWithout(n *nodeView, a *ask, gone map[types.UID]bool, held func(*heldUnits) bool) bool {
	rest := n.without(gone)
	if a.mistake != nil || len(a.several) > 0 || len(a.hindrances(rest)) > 0 {
		return false
	}
	if about := a.resource(); about != "" && a.requests[about] > a.free(rest, about) {
		return false
	}
	if a.shared.Resource == "" {
		return true
	}
	return a.offeredBy(n) && fits(w.copyOf([]string{n.Name}, held, true), a.shared, n.Name).Code == accel.Fits
}
