package simulate

import (
	"fmt"
	"math/rand"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// TestShownNodes has the numbers of kube-scheduler's own numFeasibleNodesToFind.
func TestShownNodes(t *testing.T) {
	for nodes, want := range map[int]int{1: 1, 99: 99, 100: 100, 125: 100, 250: 120, 1000: 420, 1213: 497, 5000: 500, 6000: 300,
		20000: 1000} {
		if got := ShownNodes(nodes); got != want {
			t.Errorf("of %d nodes %d are shown, want %d", nodes, got, want)
		}
	}
}

// TestSample goes through nodes as kube-scheduler does: from where it stopped, and
// only until it has found enough.
func TestSample(t *testing.T) {
	c := &Cluster{}
	var order []int
	for i := range 200 {
		n := Node{Name: fmt.Sprint(i), CPU: 1000, Memory: place.Unlimited, Devices: []accel.Share{
			{Device: accel.Device{ID: accel.DeviceID(fmt.Sprint(i, "a"))}, Units: 10},
			{Device: accel.Device{ID: accel.DeviceID(fmt.Sprint(i, "b")), Index: 1, Health: accel.Health{Unhealthy: i == 3}}, Units: 10},
		}}
		c.Nodes, order = append(c.Nodes, n), append(order, i)
	}
	w := newWorld(c, order, place.Binpack, nil, true)
	s := w.sample
	shown := func(a place.Ask, most int) (looked int, first, last string) {
		t.Helper()
		looked = s.search(w.names, &a, most)
		if len(s.names) == 0 {
			return looked, "", ""
		}
		return looked, s.names[0], s.names[len(s.names)-1]
	}
	want := func(a place.Ask, most, looked int, first, last string) {
		t.Helper()
		l, f, e := shown(a, most)
		if diff := cmp.Diff([]any{looked, first, last}, []any{l, f, e}); diff != "" {
			t.Errorf("looked at, first and last that were found (-want +got):\n%s", diff)
		}
	}
	// 200 nodes: 49 % are fewer than 100.
	want(place.Ask{CPU: 1000, Devices: 1, Units: 10}, 200, 100, "0", "99")
	want(place.Ask{CPU: 1000, Devices: 1, Units: 10}, 200, 100, "100", "199")
	// Node 3 has one healthy device, so that its sum does not suffice.
	want(place.Ask{CPU: 1000, Devices: 2, Units: 10}, 200, 101, "0", "100")
	want(place.Ask{CPU: 1001}, 200, 200, "", "")
	want(place.Ask{CPU: 1}, 20, 20, "101", "120")
	// What is taken is gone until it is given back.
	for at := range 200 {
		s.take(at, sums{cpu: 1, units: 15})
	}
	want(place.Ask{Devices: 1, Units: 6}, 200, 200, "", "")
	want(place.Ask{CPU: 1000}, 200, 200, "", "")
	s.give(7, sums{cpu: 1, units: 15})
	want(place.Ask{CPU: 1000, Devices: 1, Units: 10}, 200, 200, "7", "7")
}

// TestSampledPodsArePlaced: a pod that fits on few nodes is placed though none of them
// is among the first that are shown, and the sums agree with the ledger.
func TestSampledPodsArePlaced(t *testing.T) {
	rng := rand.New(rand.NewSource(1))
	c, load := generated(rng, 300, 400)
	w := newWorld(c, nodeOrder(rng, len(c.Nodes)), place.Binpack, nil, true)
	all := newWorld(c, nodeOrder(rng, len(c.Nodes)), place.Binpack, nil, false)
	all.books, all.names = w.books, w.names
	var there []placement
	placed := 0
	for i := range 3000 {
		if len(there) > 0 && rng.Intn(3) == 0 {
			k := rng.Intn(len(there))
			w.remove(there[k])
			there = slices.Delete(there, k, k+1)
		}
		a := &load.Pods[rng.Intn(len(load.Pods))].Ask
		fits := all.choose(a) >= 0
		p, ok, err := w.place(a)
		if err != nil || ok != fits {
			t.Fatalf("step %d: placed %t, %v; it fits: %t", i, ok, err, fits)
		}
		if ok {
			there, placed = append(there, p), placed+1
		}
	}
	if placed < 1000 {
		t.Errorf("only %d pods were placed", placed)
	}
	left := map[string]sums{}
	for name, n := range w.books.Each(resource) {
		sum := sums{cpu: n.CPU, memory: n.Memory}
		for i := range n.Slots {
			sum.units += n.Slots[i].Free
		}
		left[name] = sum
	}
	for at, name := range w.names {
		if left[name] != w.sample.left[at] {
			t.Errorf("node %s has %+v left in the ledger, and %+v by the sums", name, left[name], w.sample.left[at])
		}
	}
}
