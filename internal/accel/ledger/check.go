package ledger

import (
	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

// Verdict says whether a pod fits on a node.
type Verdict struct {
	// Code is accel.Fits or why the node refuses.
	Code accel.ReasonCode
	// Largest is the most that any one healthy device has free, in units.
	Largest accel.Units
	// Score rates a node that fits, 0 to place.MaxScore.
	Score int64
}

// checkChunk is how many nodes are looked at before writers get a turn, about
// 20 microseconds.
const checkChunk = 256

// Check says for each of the nodes, at the same position of out, whether a pod
// that needs so many units of the resource fits there now. It reads only, does
// not allocate, and looks at as many nodes as both slices have. A pod that
// needs nothing fits everywhere.
//
// A request that no device of the node could ever hold is
// accel.LargerThanDevice, even where the larger device is unhealthy; one that
// only an unhealthy device could hold is accel.NoDeviceFits, as devices
// recover.
func (l *Ledger) Check(res accel.Resource, need accel.Units, nodes []string, out []Verdict) {
	n := min(len(nodes), len(out))
	for from := 0; from < n; from += checkChunk {
		to := min(from+checkChunk, n)
		l.check(res, need, nodes[from:to], out[from:to])
	}
}

func (l *Ledger) check(res accel.Resource, need accel.Units, nodes []string, out []Verdict) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	b := l.books[res]
	for i, name := range nodes {
		out[i] = b[name].verdict(need, l.policy)
	}
}

func (n *node) verdict(need accel.Units, p place.Policy) Verdict {
	switch {
	case n == nil || !n.known:
		if need <= 0 {
			return Verdict{}
		}
		return Verdict{Code: accel.NodeUnknown}
	case need <= 0:
		return Verdict{Largest: n.largestFree}
	case need > n.largestTotal:
		return Verdict{Code: accel.LargerThanDevice, Largest: n.largestFree}
	case need > n.largestFree:
		return Verdict{Code: accel.NoDeviceFits, Largest: n.largestFree}
	default:
		return Verdict{Largest: n.largestFree, Score: place.ScoreFree(n.free, need, p)}
	}
}
