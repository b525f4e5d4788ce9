package simulate

import (
	"context"
	"fmt"
	"math/rand"
	"strconv"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// maxFoundNodes bounds the clusters that Find tries.
const maxFoundNodes = 20000

// Find is the question how many nodes a workload needs: each pod comes once, in
// an order that the seed decides, and none leaves.
type Find struct {
	// Refused is the demand that may be refused, in percent of the workload's; a
	// pod that asks for no device must find room always.
	Refused float64
	// Sample is as in Replay.
	Sample bool
}

// Run returns the least number of nodes of the cluster's kinds, in the
// cluster's proportions, on which the policy places the workload. It is found
// by halving: one node less is too few for this order of arrival, though a
// cluster that is smaller still might do by luck. The error is a *MisfitError for
// pods that no number of nodes holds.
func (f Find) Run(ctx context.Context, c *Cluster, w *Workload, kind PolicyKind, seed int64) (int, error) {
	if misfits := Misfits(c, w); len(misfits) > 0 {
		return 0, &MisfitError{w, misfits}
	}
	kinds := kindsOf(c)
	few, enough := 0, max(FewestNodes(c, w), 1)
	if f.Refused == 0 {
		few = enough - 1 // no need to try what cannot be
	}
	for {
		ok, err := f.holds(ctx, kinds.cluster(enough), w, kind, seed)
		if err != nil {
			return 0, err
		}
		if ok {
			break
		}
		if few = enough; enough >= maxFoundNodes {
			return 0, fmt.Errorf("workload %s does not fit on %d nodes like those of the cluster either", w.Name, enough)
		}
		enough = min(enough+enough/8+1, maxFoundNodes)
	}
	for enough-few > 1 {
		middle := few + (enough-few)/2
		ok, err := f.holds(ctx, kinds.cluster(middle), w, kind, seed)
		if err != nil {
			return 0, err
		}
		if ok {
			enough = middle
		} else {
			few = middle
		}
	}
	return enough, nil
}

// holds reports whether the policy places the workload on the cluster.
func (f Find) holds(ctx context.Context, c *Cluster, w *Workload, kind PolicyKind, seed int64) (bool, error) {
	if c.Units() == 0 {
		return false, nil
	}
	rng := rand.New(rand.NewSource(seed)) //nolint:gosec // nothing is secret here
	pods := byName(w.Pods)
	rng.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	world := newRun(c, w, kind, rng, rng, f.Sample, nil)
	allowed := accel.Units(f.Refused / 100 * float64(w.Demand()))
	for i := range pods {
		if i%endEvery == 0 {
			if err := ctx.Err(); err != nil {
				return false, err
			}
		}
		if _, _, ok, err := world.arrive(i, &pods[i].Ask); err != nil {
			return false, err
		} else if ok {
			continue
		}
		if allowed -= pods[i].Demand(); allowed < 0 || pods[i].Demand() == 0 {
			return false, nil
		}
	}
	return true, nil
}

// FewestNodes is a bound: on fewer nodes of the cluster's kinds, in its
// proportions, the units, CPU or memory would not suffice in sum, however well
// they were packed.
func FewestNodes(c *Cluster, w *Workload) int {
	var cpu, memory float64
	for i := range w.Pods {
		cpu += float64(w.Pods[i].Ask.CPU)
		memory += float64(w.Pods[i].Ask.Memory)
	}
	units := float64(w.Demand())
	kinds := kindsOf(c)
	for n := 1; n < maxFoundNodes; n++ {
		kind := &c.Nodes[kinds.at(n-1)]
		for _, d := range kind.Devices {
			units -= float64(d.Units)
		}
		cpu -= float64(kind.CPU)
		memory -= float64(kind.Memory)
		if units <= 0 && cpu <= 0 && memory <= 0 {
			return n
		}
	}
	return maxFoundNodes
}

// kinds are the kinds of nodes of a cluster.
type kinds struct {
	of *Cluster
	// sequence has positions of nodes of the cluster: the first n of it are n
	// nodes in the cluster's proportions.
	sequence []int
}

// kindsOf orders the nodes of a cluster so that each beginning of the order has
// all kinds in nearly the cluster's proportions: the next one is always of the
// kind that lags most behind its share.
func kindsOf(c *Cluster) *kinds {
	byKind := map[string][]int{}
	var order []string // of first appearance
	for i := range c.Nodes {
		k := kindOf(&c.Nodes[i])
		if byKind[k] == nil {
			order = append(order, k)
		}
		byKind[k] = append(byKind[k], i)
	}
	taken := make([]int, len(order))
	out := &kinds{of: c}
	for n := range len(c.Nodes) {
		next, lag := 0, 0.0
		for i, k := range order {
			share := float64(len(byKind[k])) / float64(len(c.Nodes))
			if l := share*float64(n+1) - float64(taken[i]); l > lag+1e-9 {
				next, lag = i, l
			}
		}
		out.sequence = append(out.sequence, byKind[order[next]][taken[next]%len(byKind[order[next]])])
		taken[next]++
	}
	return out
}

// kindOf describes what nodes of a kind have in common.
func kindOf(n *Node) string {
	text := strconv.FormatInt(n.CPU, 10) + " " + strconv.FormatInt(n.Memory, 10)
	for _, d := range n.Devices {
		text += fmt.Sprintf(" %q %d %d %t", d.Model, d.Units, d.Withheld, d.Health.Unhealthy)
	}
	return text
}

// at is the position in the cluster of the i-th node of any number of them.
func (k *kinds) at(i int) int { return k.sequence[i%len(k.sequence)] }

// cluster returns one of n nodes. Beyond the cluster's own they are copies.
func (k *kinds) cluster(n int) *Cluster {
	out := &Cluster{Nodes: make([]Node, n)}
	for i := range n {
		out.Nodes[i] = k.of.Nodes[k.at(i)]
		if round := i / len(k.sequence); round > 0 {
			out.Nodes[i].Name += fmt.Sprintf("+%d", round)
		}
	}
	return out
}

// Misfits returns the pods that no node of the cluster holds even when it is
// empty, as positions in the workload.
func Misfits(c *Cluster, w *Workload) []int {
	order := make([]int, len(c.Nodes))
	for i := range order {
		order[i] = i
	}
	world := newWorld(c, order, place.Binpack, nil, false)
	fits := map[place.Ask]bool{}
	var out []int
	for i := range w.Pods {
		a := &w.Pods[i].Ask
		ok, known := fits[*a]
		if !known {
			ok = world.choose(a) >= 0
			fits[*a] = ok
		}
		if !ok {
			out = append(out, i)
		}
	}
	return out
}
