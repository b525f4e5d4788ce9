package demand

import (
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

func observe(h *Histogram, n int, a place.Ask) {
	for range n {
		h.Observe(&a)
	}
}

func TestCounts(t *testing.T) {
	h := New(Options{HalfLife: 1e15, Prior: []Count{
		{Kind: Kind{Units: 8, Devices: 1, CPU: 1000}, Pods: 5, Memory: 100},
		{Kind: Kind{Units: 9, Devices: 1}, Pods: 0},
		{Kind: Kind{Units: 9, Devices: 1}, Pods: -1},
	}})
	t4 := &accel.Selection{UseModels: []string{"T4"}, UseIDs: []string{"GPU-1"}}
	observe(h, 5, place.Ask{Units: 8, Devices: 1, CPU: 1000, Memory: 300})
	observe(h, 3, place.Ask{Units: 8, Devices: 1, CPU: 1000, Only: t4})
	observe(h, 2, place.Ask{Units: 8, Devices: 1, CPU: 1000, Only: &accel.Selection{UseIDs: []string{"GPU-1"}}})
	observe(h, 4, place.Ask{Units: -1, CPU: 500, Memory: -7, Only: t4})
	got := h.Counts()
	for i := range got {
		got[i].Pods = math.Round(got[i].Pods*1e6) / 1e6
	}
	want := []Count{
		{Kind: Kind{Units: 8, Devices: 1, CPU: 1000}, Pods: 12, Memory: 166},
		{Kind: Kind{CPU: 500}, Pods: 4},
		{Kind: Kind{Units: 8, Devices: 1, CPU: 1000, Models: &accel.Selection{UseModels: []string{"T4"}}}, Pods: 3},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Counts (-want +got):\n%s", diff)
	}
	if counted, seen := h.Pods(); math.Round(counted) != 19 || seen != 14 {
		t.Errorf("Pods() = %v, %d; want 19, 14", counted, seen)
	}
}

func TestDecay(t *testing.T) {
	h := New(Options{HalfLife: 10, Prior: []Count{{Kind: Kind{Units: 1, Devices: 1}, Pods: 64}}})
	observe(h, 60, place.Ask{Units: 2, Devices: 1})
	i := slices.IndexFunc(h.Counts(), func(c Count) bool { return c.Units == 1 })
	if got := h.Counts()[i].Pods; math.Abs(got-1) > 1e-9 {
		t.Errorf("after 6 half-lives 64 pods count %v, want 1", got)
	}
	// Weights are scaled down on the way; shares do not notice.
	observe(h, 10_000, place.Ask{Units: 3, Devices: 1})
	c := h.Counts()
	want := 1 / (1 - math.Exp2(-0.1)) * math.Exp2(-0.1) // 1/2^0.1 + 1/2^0.2 + ...
	if c[0].Units != 3 || math.Abs(c[0].Pods-want) > 1e-6 || c[1].Pods > 1e-100 {
		t.Errorf("after 1000 half-lives: %v, want %v pods of 3 units and nothing else", c, want)
	}
}

func TestMaxKinds(t *testing.T) {
	h := New(Options{MaxKinds: 10})
	for i := range 1000 {
		observe(h, 3, place.Ask{Units: 7, Devices: 1})
		h.Observe(&place.Ask{Units: 100 + accel.Units(i), Devices: 1})
	}
	c := h.Counts()
	if len(c) > 10 || c[0].Units != 7 || c[0].Pods < 2700 {
		t.Errorf("%d kinds, the first %+v", len(c), c[0])
	}
	sum := 0.0
	for _, k := range c {
		sum += k.Pods
	}
	if counted, _ := h.Pods(); math.Abs(counted-sum) > 1e-6 {
		t.Errorf("Pods() = %v, the sum is %v", counted, sum)
	}
}

// The order of equally frequent kinds does not depend on a map.
func TestOrder(t *testing.T) {
	asks := []place.Ask{
		{CPU: 1}, {CPU: 2}, {Units: 1, Devices: 1}, {Units: 1, Devices: 1, CPU: 5},
		{Units: 1, Devices: 1, CPU: 5, Only: &accel.Selection{AvoidModels: []string{"A"}}}, {Units: 2, Devices: 1}, {Units: 1, Devices: 2},
	}
	for range 20 {
		h := New(Options{HalfLife: 1e18})
		for _, i := range []int{3, 1, 6, 0, 2, 5, 4} {
			h.Observe(&asks[i])
		}
		for i, c := range h.Counts() {
			if a := asks[i]; c.Units != a.Units || c.Devices != a.Devices || c.CPU != a.CPU || (c.Models == nil) != (a.Only == nil) {
				t.Fatalf("kind %d is %+v, want %+v", i, c.Kind, a)
			}
		}
	}
}

func TestConcurrent(t *testing.T) {
	h := New(Options{})
	var wait sync.WaitGroup
	for w := range 4 {
		wait.Go(func() {
			for i := range 500 {
				h.Observe(&place.Ask{Units: accel.Units(i % 7), Devices: 1, CPU: int64(w)})
				if i%100 == 0 {
					h.Counts()
				}
			}
		})
	}
	wait.Wait()
	if _, seen := h.Pods(); seen != 2000 {
		t.Errorf("%d pods seen, want 2000", seen)
	}
}
