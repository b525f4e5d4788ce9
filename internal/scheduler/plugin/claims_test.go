package plugin

import (
	"maps"
	"testing"

	"github.com/divvy-gpu/divvy/internal/scheduler/claims"
)

// Nodes are scored against each other by their ratings; one that was not rated is the worst.
func TestScoresOfClaims(t *testing.T) {
	c := &claimed{rated: []claims.Rated{{Node: "full", Rating: -1}, {Node: "half", Rating: -8}, {Node: "not offered", Rating: -9},
		{Node: "same", Rating: -8}}}
	c.preScore([]string{"half", "full", "unknown", "same"})
	if want := map[string]int64{"full": 100, "half": 90, "same": 90, "unknown": 0}; !maps.Equal(c.scores, want) {
		t.Errorf("scores %v, want %v", c.scores, want)
	}
}
