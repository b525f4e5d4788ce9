package simulate

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// FragmentationOnline is the name of the extender's fragmentation policy without
// a prior.
const FragmentationOnline = fragmentation.Name + "-online"

// PolicyKind is a policy that a simulation can use.
type PolicyKind struct {
	Name string
	// RandomTies is true where equally rated nodes are chosen from by chance,
	// and not by their order.
	RandomTies bool
	// New makes the policy for one run. Its result is used by that run alone.
	New func(c *Cluster, w *Workload) place.Policy
	// Placer makes what places the pods of one run by the policy; nil for the extender's ledger. It shows a policy all
	// nodes.
	Placer func(c *Cluster, p place.Policy) Placer
}

// Placer places pods in another way than the extender's ledger does. A policy that learns does so there.
type Placer interface {
	// Place puts a pod on the best node, of equal ones the first in the order of the names; false where it fits nowhere.
	Place(uid string, names []string, a *place.Ask) (bool, error)
	Remove(uid string)
	// Nodes are those with devices, for the renewal of weights.
	Nodes() iter.Seq2[string, *place.Node]
}

// same is a policy that is the same in all runs.
func same(p place.Policy) func(*Cluster, *Workload) place.Policy {
	return func(*Cluster, *Workload) place.Policy { return p }
}

// fragmentationOf returns the policy with the workload as its prior.
func fragmentationOf(_ *Cluster, w *Workload) place.Policy {
	seen := demand.New(demand.Options{HalfLife: math.Inf(1)})
	for i := range w.Pods {
		seen.Observe(&w.Pods[i].Ask)
	}
	return fragmentation.New(demand.Options{Prior: seen.Counts()})
}

// Policies returns the extender's, in the order of their table, and FragmentationOnline,
// which learns what is usual from the pods that were placed; fragmentation knows it.
func Policies() []PolicyKind {
	var kinds []PolicyKind
	for _, p := range place.Policies() {
		kinds = append(kinds, PolicyKind{Name: p.Name(), New: same(p)})
	}
	return append(kinds,
		PolicyKind{Name: fragmentation.Name, New: fragmentationOf},
		PolicyKind{Name: FragmentationOnline, New: func(*Cluster, *Workload) place.Policy {
			return fragmentation.New(demand.Options{})
		}})
}

// ParsePolicies returns those of all kinds that have the names, each once, or all of them
// for "all"; case does not matter.
func ParsePolicies(all []PolicyKind, names []string) ([]PolicyKind, error) {
	if len(names) == 0 {
		return nil, errors.New("at least one policy is needed")
	}
	if slices.Equal(names, []string{"all"}) {
		return all, nil
	}
	known := make([]string, len(all))
	for i, k := range all {
		known[i] = k.Name
	}
	var out []PolicyKind
	var errs []error
	for _, name := range names {
		name = strings.TrimSpace(name)
		named := func(k PolicyKind) bool { return strings.EqualFold(k.Name, name) }
		switch i := slices.IndexFunc(all, named); {
		case i < 0:
			errs = append(errs, fmt.Errorf("unknown policy %q; use one of %s", name, strings.Join(known, ", ")))
		case slices.ContainsFunc(out, named):
			errs = append(errs, fmt.Errorf("%s is listed twice", all[i].Name))
		default:
			out = append(out, all[i])
		}
	}
	return out, errors.Join(errs...)
}
