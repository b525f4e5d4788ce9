package eviction

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

const (
	// staleAfter is how long a list counts that is not rewritten: nodes write theirs every
	// wire.OveruseRefresh, and one write may be late or lost.
	staleAfter = 2*wire.OveruseRefresh + 30*time.Second
	// pause is the least time between two evictions on a device, and after an attempt that
	// failed: the memory of the first pod must be free before the next one is judged.
	pause = 30 * time.Second
	// window is the time in which Settings.MaxPerHour pods of a node may be evicted.
	window = time.Hour
	// criticalPriority is the lowest of the classes system-cluster-critical and
	// system-node-critical. Users' classes end at half of it.
	criticalPriority = 2_000_000_000
)

// Settings are the administrator's.
type Settings struct {
	// Grace is the period for which a pod may be over its allocation without interruption.
	Grace time.Duration
	// MaxPerHour is how many pods of a node may be evicted in an hour.
	MaxPerHour int
	// Exempt are the namespaces whose pods are never evicted.
	Exempt []string
}

// Candidate is an entry of a node's list, with what this process knows of it. All times are
// by the clock of this process.
type Candidate struct {
	wire.Overuse
	// First is when the entry was first seen, and Written when its list was last seen to
	// change.
	First, Written time.Time
	// Confirmed is true if the pod is on the node and holds the device, see
	// cluster.Overuse.Pod. Without it, OverusingPod means nothing.
	Confirmed bool
	cluster.OverusingPod
	// Closed is true after an attempt that is not to be repeated, and Retry is when one that
	// failed may be.
	Closed bool
	Retry  time.Time
}

// Past is what was evicted on a node.
type Past struct {
	// Evicted has the times of evictions, at least those within window.
	Evicted []time.Time
	// Devices has the time of the last eviction on each device.
	Devices map[accel.DeviceID]time.Time
}

// Outcome is what became of a pod that is over its allocation for longer than the grace period.
type Outcome string

// The outcomes, as the metric names them.
const (
	Evicted        Outcome = "evicted"
	Exempt         Outcome = "exempt"
	RateLimit      Outcome = "rateLimit"
	Budget         Outcome = "budget"
	SeveralBudgets Outcome = "severalBudgets"
	Gone           Outcome = "gone"
	Failed         Outcome = "failed"
)

// Verdict is a decision about a candidate.
type Verdict struct {
	Candidate
	// Outcome is Evicted if the pod is to be evicted, else Exempt or RateLimit.
	Outcome Outcome
	// Why is the reason for which it is not evicted, a clause about the pod.
	Why string
}

// Decide returns the verdicts about the entries of one node's list; those about which
// nothing is to be done yet have none. Pods of the lowest priority come first, then those
// with the largest excess. On each device at most one pod is to be evicted.
func Decide(now time.Time, candidates []Candidate, past Past, s Settings) []Verdict {
	left := s.MaxPerHour
	for _, at := range past.Evicted {
		if now.Sub(at) < window {
			left--
		}
	}
	reached := left <= 0
	busy, chosen := map[accel.DeviceID]bool{}, map[string]bool{}
	var out []Verdict
	for _, c := range due(now, candidates, s.Grace) {
		why := s.exempts(c)
		switch {
		case why != "":
			out = append(out, Verdict{Candidate: c, Outcome: Exempt, Why: why})
		case c.Closed || now.Before(c.Retry) || busy[c.Device] || chosen[c.Pod.UID] || past.occupies(now, c):
		case left <= 0 && !reached: // some of this pass may not be evicted
		case reached:
			out = append(out, Verdict{Candidate: c, Outcome: RateLimit,
				Why: fmt.Sprintf("the node's limit of %d evictions within an hour is reached", s.MaxPerHour)})
		default:
			out = append(out, Verdict{Candidate: c, Outcome: Evicted})
			busy[c.Device], chosen[c.Pod.UID] = true, true
			left--
		}
	}
	return out
}

// occupies reports whether another pod was evicted from the candidate's device so lately that
// the node may not have measured it since.
func (p Past) occupies(now time.Time, c Candidate) bool {
	at, evicted := p.Devices[c.Device]
	return evicted && (now.Sub(at) < pause || !c.Written.After(at))
}

// due returns those that are proven to have been over their allocation for the grace period, in the
// order in which they are to be evicted.
func due(now time.Time, candidates []Candidate, grace time.Duration) []Candidate {
	var out []Candidate
	for _, c := range candidates {
		// A list that was written once only may be that of a daemon that ended long ago.
		proven := c.Written.After(c.First) && now.Sub(c.Written) < staleAfter
		if c.Confirmed && proven && now.Sub(c.First) >= grace {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b Candidate) int {
		return cmp.Or(
			cmp.Compare(a.Priority, b.Priority),
			cmp.Compare(b.UsedBytes-b.AllocatedBytes, a.UsedBytes-a.AllocatedBytes),
			cmp.Compare(a.Pod.UID, b.Pod.UID),
			cmp.Compare(a.Device, b.Device),
			cmp.Compare(a.Container, b.Container),
			cmp.Compare(a.Resource, b.Resource),
			a.Since.Compare(b.Since),
		)
	})
	return out
}

// exempts returns why the pod is never evicted; "" if it may be.
func (s Settings) exempts(c Candidate) string {
	switch {
	case c.Static:
		return "it is a static pod"
	case c.Priority >= criticalPriority:
		return "it has a priority of Kubernetes' critical classes"
	case slices.Contains(s.Exempt, c.Pod.Namespace):
		return "its namespace is exempt"
	}
	return ""
}
