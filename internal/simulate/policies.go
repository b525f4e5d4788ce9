package simulate

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel/demand"
	"github.com/divvy-gpu/divvy/internal/accel/fragmentation"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

// Names of the published baselines.
const (
	Random     = "Random"
	BestFit    = "BestFit"
	GpuPacking = "GpuPacking"
	FGD        = "FGD"
)

// FragmentationOnline is the name of the extender's fragmentation policy without
// a prior.
const FragmentationOnline = fragmentation.Name + "-online"

// PolicyKind is a policy that a simulation can use.
type PolicyKind struct {
	Name string
	// About says in a line what the policy does.
	About string
	// Extender is true for the policies that the extender has.
	Extender bool
	// RandomTies is true where equally rated nodes are chosen from by chance,
	// and not by their order.
	RandomTies bool
	// New makes the policy for one run. Its result is used by that run alone.
	New func(c *Cluster, w *Workload) (place.Policy, error)
}

// same is a policy that is the same in all runs.
func same(p place.Policy) func(*Cluster, *Workload) (place.Policy, error) {
	return func(*Cluster, *Workload) (place.Policy, error) { return p, nil }
}

// policies are in the order in which they are listed.
var policies = []PolicyKind{
	{Name: place.Binpack.Name(), About: "the extender's default: the devices with the least free units that suffice", Extender: true, New: same(place.Binpack)},
	{Name: place.Spread.Name(), About: "the extender's: the devices with the most free units", Extender: true, New: same(place.Spread)},
	{Name: fragmentation.Name, About: "the extender's: what each placement does to the room for usual pods, which are known", Extender: true, New: fragmentationOf},
	{Name: FragmentationOnline, About: "the same, which learns what is usual from the pods that were placed", New: func(*Cluster, *Workload) (place.Policy, error) {
		return fragmentation.New(fragmentation.Options{}), nil
	}},
	{Name: Random, About: "baseline: any node with room", RandomTies: true, New: same(random{baseline{Random}})},
	{Name: BestFit, About: "baseline: the node on which the least CPU and units are left", New: func(c *Cluster, _ *Workload) (place.Policy, error) { return newBestFit(c), nil }},
	{Name: GpuPacking, About: "baseline: used devices first, then used nodes", New: same(gpuPacking{baseline{GpuPacking}})},
	{Name: FGD, About: "baseline: fragmentation gradient descent", New: func(c *Cluster, w *Workload) (place.Policy, error) { return newFGD(c, w.Pods), nil }},
}

// fragmentationOf returns the policy with the workload as its prior.
func fragmentationOf(_ *Cluster, w *Workload) (place.Policy, error) {
	seen := demand.New(demand.Options{HalfLife: math.Inf(1)})
	for i := range w.Pods {
		seen.Observe(&w.Pods[i].Ask)
	}
	return fragmentation.New(fragmentation.Options{Demand: demand.Options{Prior: seen.Counts()}}), nil
}

// Policies returns all kinds.
func Policies() []PolicyKind { return slices.Clone(policies) }

// ParsePolicy returns the kind of that name; case does not matter.
func ParsePolicy(name string) (PolicyKind, error) {
	names := make([]string, len(policies))
	for i, k := range policies {
		if strings.EqualFold(k.Name, name) {
			return k, nil
		}
		names[i] = k.Name
	}
	return PolicyKind{}, fmt.Errorf("unknown policy %q, known are: %s", name, strings.Join(names, ", "))
}

// ExtenderPolicies returns the names of those that the extender has.
func ExtenderPolicies() []string {
	var out []string
	for _, k := range policies {
		if k.Extender {
			out = append(out, k.Name)
		}
	}
	return out
}
