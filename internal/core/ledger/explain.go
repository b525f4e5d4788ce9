package ledger

import (
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// View copies a node as the policy sees it for the request, in which what is reserved for the
// pod itself is free. It reports whether the node publishes the resource. The slots are put
// into the memory of into; the graph may be kept.
func View(l *Ledger, req accel.Request, nodeName string, into *place.Node) bool {
	ask, _, err := l.rules.ask(req)
	if err != nil {
		return false
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.state.nodes.publishing(req.Resource, nodeName)
	if n == nil {
		return false
	}
	buf := into.Slots[:0]
	l.state.view(into, n, l.state.slotsFor(n, &req), &ask, req.Pod)
	into.Slots = append(buf, into.Slots...)
	return true
}

// AskOf returns what a policy is asked for a request, and which one. The error says why no
// node serves it.
func AskOf(l *Ledger, req accel.Request) (place.Ask, place.Policy, error) { return l.rules.ask(req) }

// Held is a grant and the pod that holds it.
type Held struct {
	Pod accel.PodRef
	accel.Grant
}

// HeldBy returns on which devices a pod was observed, as far as they are known.
func HeldBy(l *Ledger, podUID string) []Held {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var out []Held
	for h := l.state.pods.byUID[podUID]; h != nil; h = h.next {
		if h.observed() && h.located() {
			out = append(out, Held{h.Pod, h.grant()})
		}
	}
	return out
}
