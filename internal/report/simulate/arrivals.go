package simulate

import (
	"cmp"
	"math/rand"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// arrivals are the pods of a workload in the order in which they come, as
// positions in the workload sorted by name.
//
// The random numbers are drawn as the reference draws them, from math/rand and
// not from math/rand/v2, so that a seed stands for the order that it has there:
// one number that its log prints; a shuffle of the pods sorted by name; then
// pods are added, or taken away, until they ask for what was wanted.
func arrivals(rng *rand.Rand, pods []Pod, want accel.Units) []int {
	rng.Int()
	order := make([]int, 0, len(pods))
	var total accel.Units
	for i := range pods {
		order = append(order, i)
		total += pods[i].Demand()
	}
	rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	for total > want && len(order) > 0 {
		i := rng.Intn(len(order))
		total -= pods[order[i]].Demand()
		order = slices.Delete(order, i, i+1)
	}
	if total == want || len(order) < len(pods) {
		return order
	}
	// The reference ends at the first pod whose units on one device go beyond
	// what is wanted, though it counts those on all devices.
	for {
		i := rng.Intn(len(pods))
		if total+pods[i].Ask.Units > want {
			return order
		}
		total += pods[i].Demand()
		order = append(order, i)
	}
}

// nodeOrder is the order in which nodes win ties: the reference renames the
// nodes, sorted by name, with a random number in front.
func nodeOrder(rng *rand.Rand, n int) []int {
	order := make([]int, n)
	for i, at := range rng.Perm(n) {
		order[at] = i
	}
	return order
}

func byName(pods []Pod) []Pod {
	out := slices.Clone(pods)
	slices.SortStableFunc(out, func(a, b Pod) int { return cmp.Compare(a.Name, b.Name) })
	return out
}
