package nodelabels

import (
	"maps"
	"testing"
)

// node applies changes as the API server does.
type node struct {
	labels map[string]string
	owned  string
	writes int
}

func (n *node) take(c Change) {
	if c.Empty() {
		return
	}
	n.writes++
	maps.Copy(n.labels, c.Set)
	for _, key := range c.Remove {
		delete(n.labels, key)
	}
	n.owned = c.Owned
}

// A feature discovery that starts after Divvy writes its value each minute.
func TestLabelThatSomebodyElseKeepsWritingIsTheirs(t *testing.T) {
	var k Keeper
	n := &node{labels: map[string]string{}}
	wanted := map[string]string{"nvidia.com/gpu.mode": "compute", "nvidia.com/gpu.count": "2"}
	for range 10 {
		n.take(k.Merge(n.labels, n.owned, wanted))
		n.take(k.Merge(n.labels, n.owned, wanted))
		n.labels["nvidia.com/gpu.mode"] = "unknown"
	}
	c := k.Merge(n.labels, n.owned, wanted)
	if n.labels["nvidia.com/gpu.mode"] != "unknown" || n.owned != "nvidia.com/gpu.count" || !c.Empty() || n.writes > 2*maxLost {
		t.Errorf("labels %v, owned %q, after %d writes: %+v", n.labels, n.owned, n.writes, c)
	}
	if len(c.Conflicts) != 1 {
		t.Errorf("conflicts: %v", c.Conflicts)
	}
	delete(n.labels, "nvidia.com/gpu.mode") // they are gone
	n.take(k.Merge(n.labels, n.owned, wanted))
	n.take(k.Merge(n.labels, n.owned, wanted))
	if n.labels["nvidia.com/gpu.mode"] != "compute" || n.owned != "nvidia.com/gpu.count,nvidia.com/gpu.mode" {
		t.Errorf("after they have gone: labels %v, owned %q", n.labels, n.owned)
	}
}

// What Divvy itself changes is no contest, however often, nor is one change by
// hand.
func TestOwnChangesOfLabelsAreNoContest(t *testing.T) {
	var k Keeper
	n := &node{labels: map[string]string{}}
	for i := range 20 {
		count := string(rune('1' + i%2))
		wanted := map[string]string{"nvidia.com/gpu.count": count}
		before, owned := maps.Clone(n.labels), n.owned
		n.take(k.Merge(n.labels, n.owned, wanted))
		n.take(k.Merge(before, owned, wanted)) // a copy that lags behind
		n.take(k.Merge(n.labels, n.owned, wanted))
		if n.labels["nvidia.com/gpu.count"] != count || n.owned == "" {
			t.Fatalf("step %d: labels %v, owned %q", i, n.labels, n.owned)
		}
	}
	n.labels["nvidia.com/gpu.count"] = "7"
	n.take(k.Merge(n.labels, n.owned, map[string]string{"nvidia.com/gpu.count": "2"}))
	if n.labels["nvidia.com/gpu.count"] != "2" {
		t.Errorf("after a change by hand: %v", n.labels)
	}
}
