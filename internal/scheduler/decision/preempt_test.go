package decision

import (
	"fmt"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// lagging are books that learn of an end only when they were asked so often who can
// be evicted.
type lagging struct {
	*ledger.Ledger
	asked, learn int
}

func (l *lagging) Evict(req accel.Request, proposals []ledger.Proposal) []ledger.Eviction {
	if l.asked++; l.asked == l.learn {
		l.Forget("ended")
	}
	return l.Ledger.Evict(req, proposals)
}

// TestPreemptWaitsForTheWatch: kube-scheduler asks when it sees a pod end, which the
// books may hear of a moment later.
func TestPreemptWaitsForTheWatch(t *testing.T) {
	books := &lagging{}
	w := newWorld(t, func(c *Config) {
		books.Ledger = c.Ledger.(*ledger.Ledger)
		c.Ledger = books
	})
	w.holds("low", "node-b", "b0", 4)
	priority := int32(1000)
	pod := newPod("p", 8)
	pod.Spec.Priority = &priority
	ask := func(when string, learn, asked int, want string) {
		t.Helper()
		w.ledger.Observe(ledger.Holding{
			Pod: accel.PodRef{UID: "ended", Namespace: "team", Name: "ended"}, Node: "node-b", Resource: gcuMemory, Units: 4,
			Device: "b0", Priority: 1000,
		})
		books.asked, books.learn = 0, learn
		got := describe(w.decider.Preempt(t.Context(), &Question{Pod: pod, Believed: true},
			[]Proposal{{Proposal: ledger.Proposal{Node: "node-b", Victims: []string{"low"}}}}))
		if got != want || books.asked != asked {
			t.Errorf("%s: answered %q and the books were asked %d times, want %q and %d times", when, got, books.asked, want, asked)
		}
	}
	ask("known before", 1, 1, "node-b: 1")
	for range catchUpsAtOnce {
		ask("shown late", 3, 3, "node-b: 1")
	}
	ask("for the next pod there is no time", 3, 1, "")
	w.clock = w.clock.Add(catchUpEvery)
	ask("shown at the last moment", 1+len(catchUp), 1+len(catchUp), "node-b: 1")
	w.clock = w.clock.Add(catchUpEvery)
	ask("not shown", 0, 1+len(catchUp), "")
}

func TestNominatedNodesAreBounded(t *testing.T) {
	var n nominatedNodes
	for i := range 3 * maxNominated {
		n.put(fmt.Sprint(i), "node")
	}
	if len(n.nodes) > maxNominated {
		t.Errorf("%d are remembered", len(n.nodes))
	}
	if last := fmt.Sprint(3*maxNominated - 1); n.take(last) != "node" || n.take(last) != "" {
		t.Error("the last one is not remembered once")
	}
}
