package packing

import (
	"fmt"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// TestChurnWithLargePods: where pods come and go, and some pods of many devices fit only on
// the few nodes with more CPU, fragmentation rejects less than FGD: 0.77 of it, and 0.94 if
// slots for these pods have no price of their own.
func TestChurnWithLargePods(t *testing.T) {
	c := &simulate.Cluster{}
	for i := range 60 {
		n := simulate.Node{Name: fmt.Sprint("n", i), CPU: 96_000, Memory: place.Unlimited}
		if i%10 == 0 {
			n.CPU = 128_000
		}
		for d := range 8 {
			id := accel.DeviceID(fmt.Sprint(n.Name, "-", d))
			n.Devices = append(n.Devices, accel.Share{Device: accel.Device{ID: id, Index: d}, Units: 1000})
		}
		c.Nodes = append(c.Nodes, n)
	}
	w := &simulate.Workload{Name: "large pods"}
	for i := range 100 { // a third of the demand, a sixth of that on the large nodes alone
		a := place.Ask{Units: 1000, Devices: 1, CPU: int64(4000 + i%3*4000)}
		switch {
		case i%4 == 0:
			a = place.Ask{Units: 500, Devices: 1, CPU: 4000}
		case i == 1:
			a = place.Ask{Units: 1000, Devices: 8, CPU: 120_000}
		case i%20 == 1:
			a = place.Ask{Units: 1000, Devices: 8, CPU: 64_000}
		}
		w.Pods = append(w.Pods, simulate.Pod{Name: fmt.Sprint("p", i), Ask: a})
	}
	kinds, err := simulate.ParsePolicies(Policies(), []string{fragmentation.Name, FGD})
	if err != nil {
		t.Fatal(err)
	}
	e := &simulate.Experiment{Cluster: c, Workloads: []*simulate.Workload{w}, Policies: kinds, FirstSeed: 42, Seeds: 5}
	r, err := e.Churn(t.Context(), simulate.Churn{Load: 0.97, WarmUp: 3, Measure: 10})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, p := range r.Workloads[0].Policies {
		got[p.Policy] = p.RefusedPercent.Mean
	}
	if got[fragmentation.Name] >= 0.9*got[FGD] {
		t.Errorf("rejected demand in percent: %v; want at most 0.9 of FGD's for fragmentation", got)
	}
}
