package fragmentation

import (
	"math/rand/v2"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// TestTermsAreTheRating: for every policy, the terms of a rating add up to it, with and
// without connections, and before there are weights.
func TestTermsAreTheRating(t *testing.T) {
	r := rand.New(rand.NewPCG(47, 48))
	nodes := randomNodes(r, 200)
	for _, n := range nodes {
		if shares := make([]accel.Share, len(n.Slots)); r.IntN(2) == 0 {
			for i := range shares {
				shares[i].ID, shares[i].NUMANode = n.Slots[i].ID, r.IntN(2)
			}
			n.Graph = place.GraphOf(shares, nil)
		}
	}
	for name, policy := range map[string]place.Policy{
		"binpack": place.Binpack, "spread": place.Spread, "fragmentation": withPrior(t, nodes, usual...),
		"fragmentation without weights": New(demand.Options{}),
	} {
		explainer, ok := policy.(place.Explainer)
		if !ok {
			t.Fatalf("%s cannot explain", name)
		}
		explained, connected := 0, 0
		for range 4000 {
			n, a := nodes[r.IntN(len(nodes))], randomAsk(r)
			slots, rating, fits := policy.Choose(n, a, nil)
			if !fits || a.Devices == 0 {
				continue
			}
			var sum int64
			terms := explainer.Explain(n, a, slots)
			for _, term := range terms {
				sum += term.Value
				if term.Name == place.TermConnections && term.Value > 0 {
					connected++
				}
			}
			if sum != rating {
				t.Fatalf("%s: Choose(%+v, %+v) = %v, %d; the terms are %v", name, n, a, slots, rating, terms)
			}
			explained++
		}
		if explained < 300 || connected < 10 {
			t.Errorf("%s: %d ratings were explained, %d of them by connections", name, explained, connected)
		}
	}
}
