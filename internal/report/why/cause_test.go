package why

import (
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/cause"
)

// TestCausesAgree: what the extender writes on a pod is among the causes that are explained,
// in random clusters, unless the nodes are closed to the pod for other reasons.
func TestCausesAgree(t *testing.T) {
	said := map[cause.Code]int{}
	for seed := range int64(4000) {
		b := randomCluster(t, seed)
		x := New(&b.Snapshot)
		for i := range b.Pods {
			p := &b.Pods[i]
			if p.Spec.NodeName != "" || !waits(p) {
				continue
			}
			a := x.world.newAsk(p)
			nodes := x.world.judge(a)
			if a.shared.Resource == "" || a.mistake != nil ||
				slices.ContainsFunc(nodes, func(j judged) bool { return len(j.hindrances) > 0 }) {
				continue
			}
			names := make([]string, len(nodes))
			for k := range nodes {
				names[k] = nodes[k].n.Name
			}
			code := cause.Of(x.world.ledger, a.shared, names).Code(cause.Message{Asked: len(names)})
			if code == "" {
				continue
			}
			said[code]++
			e := x.Pod(p)
			known := slices.ContainsFunc(e.Causes, func(c Cause) bool {
				// Capacity that is reserved or about to be free is what matters more to a person.
				return string(c.Code) == string(code) || c.Code == CapacityReserved || c.Code == Ending || c.Code == UnhealthyDevice ||
					c.Code == NotRegistered
			})
			if !known {
				t.Fatalf("seed %d: the extender says %s, explained is %s: %+v", seed, code, e.headline(), e.Causes)
			}
			if e.Causes[0].Code == Code(code) && code == cause.LargerThanDevice &&
				strings.ReplaceAll(e.Causes[0].Detail, " ("+gigabytes(e.Request.Bytes)+")", "") != cause.Sentence(code, &a.shared) {
				t.Fatalf("seed %d: %q and %q", seed, e.Causes[0].Detail, cause.Sentence(code, &a.shared))
			}
		}
	}
	if said[cause.NoDeviceFits] < 20 || said[cause.LargerThanDevice] < 20 {
		t.Errorf("said: %v", said)
	}
}
