package ledger

import (
	"fmt"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

// Verdict says whether a pod fits on a node.
type Verdict struct {
	// Code is accel.Fits or why the node refuses.
	Code accel.ReasonCode
	// Largest is the most that any one healthy device has free, in units.
	Largest accel.Units
	// Rating rates a node that fits, higher is better: see place.Policy and
	// place.Scores. It is place.NoRating for one that does not.
	Rating int64
}

// checkChunk is how many nodes are looked at before writers get a turn, about
// 20 microseconds.
const checkChunk = 256

// Check says for each of the nodes, at the same position of out, whether a pod
// with that request fits there now. It reads only, does
// not allocate, and looks at as many nodes as both slices have. A pod that
// needs nothing fits everywhere.
//
// A request that no device of the node could ever hold is
// accel.LargerThanDevice, even where the larger device is unhealthy; one that
// only an unhealthy device could hold is accel.NoDeviceFits, as devices
// recover.
func (l *Ledger) Check(req accel.Request, nodes []string, out []Verdict) {
	n := min(len(nodes), len(out))
	ask, policy, err := l.ask(req)
	if err != nil {
		for i := range out[:n] {
			out[i] = Verdict{Code: accel.Unservable, Rating: place.NoRating}
		}
		return
	}
	asking := &asking{ask: ask, policy: policy}
	for from := 0; from < n; from += checkChunk {
		to := min(from+checkChunk, n)
		l.check(req.Resource, asking, nodes[from:to], out[from:to])
	}
}

func (l *Ledger) check(res accel.Resource, a *asking, nodes []string, out []Verdict) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	b := l.books[res]
	for i, name := range nodes {
		out[i] = b[name].verdict(a)
	}
}

// asking is one request and what its answer needs.
type asking struct {
	ask    place.Ask
	policy place.Policy
	view   place.Node
	buf    []int
}

func (n *node) verdict(a *asking) Verdict {
	switch {
	case n == nil || !n.known:
		if a.ask.Devices == 0 {
			return Verdict{}
		}
		return Verdict{Code: accel.NodeUnknown, Rating: place.NoRating}
	case a.ask.Units > n.largestTotal:
		return Verdict{Code: accel.LargerThanDevice, Largest: n.largestFree, Rating: place.NoRating}
	}
	a.view = place.Node{Slots: n.slots, CPU: place.Unlimited, Memory: place.Unlimited}
	var rating int64
	var ok bool
	if a.buf, rating, ok = a.policy.Choose(&a.view, &a.ask, a.buf); ok {
		return Verdict{Largest: n.largestFree, Rating: rating}
	}
	return Verdict{Code: accel.NoDeviceFits, Largest: n.largestFree, Rating: place.NoRating}
}

// ask translates a request; the error says why no node serves it.
func (l *Ledger) ask(req accel.Request) (place.Ask, place.Policy, error) {
	ask := place.Ask{CPU: req.CPU, Memory: req.Memory, Only: req.Selection}
	policy, known := l.policies[req.Policy]
	if !known {
		return ask, nil, fmt.Errorf("%w: %q", ErrPolicyUnknown, req.Policy)
	}
	peak := req.Peak()
	if peak <= 0 {
		return ask, policy, nil
	}
	ask.Devices = max(req.Devices, 1)
	ask.Units = peak / accel.Units(ask.Devices)
	if peak%accel.Units(ask.Devices) != 0 {
		return ask, nil, fmt.Errorf("%w: %d units by %d devices", ErrIndivisible, peak, ask.Devices)
	}
	return ask, policy, nil
}
