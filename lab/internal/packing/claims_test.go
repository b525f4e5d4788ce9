package packing

import (
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// TestClaimsArePackedAsUnits: binpack places pods with claims as those with units, and fragmentation rejects about as much. It
// learns from pods with devices alone, and kube-scheduler chooses the devices, so its decisions differ.
func TestClaimsArePackedAsUnits(t *testing.T) {
	c, workloads, err := ReadTrace("testdata/trace", []string{"default"})
	if err != nil {
		t.Fatal(err)
	}
	kinds, err := simulate.ParsePolicies(Policies(), []string{place.Binpack.Name(), BinpackClaims, simulate.FragmentationOnline,
		FragmentationClaims})
	if err != nil {
		t.Fatal(err)
	}
	e := &simulate.Experiment{Cluster: c, Workloads: workloads, Policies: kinds, FirstSeed: 42, Seeds: 2}
	r, err := e.Churn(t.Context(), simulate.Churn{Load: 0.97, WarmUp: 3, Measure: 3})
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, p := range r.Workloads[0].Policies {
		got[p.Policy] = p.RefusedPercent.Mean
	}
	if got[BinpackClaims] != got[place.Binpack.Name()] {
		t.Errorf("rejected demand in percent: %v; binpack differs", got)
	}
	if units, through := got[simulate.FragmentationOnline], got[FragmentationClaims]; through > units+2 || through < units-2 {
		t.Errorf("rejected demand in percent: %v; fragmentation differs by more than 2 points", got)
	}
	e.Sample = true
	if err := e.Validate(); err == nil {
		t.Error("a sample is simulated through claims")
	}
}
