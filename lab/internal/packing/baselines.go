package packing

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// The baselines are policies of the published experiment, with the scores of
// its artifact: whole numbers, so that ties are common and the order of nodes
// decides them. Where the artifact has constants of its cluster in a formula,
// the cluster's own largest node takes their place; on the published cluster
// both are the same.

// Names of the published baselines.
const (
	Random     = "Random"
	BestFit    = "BestFit"
	GpuPacking = "GpuPacking"
	FGD        = "FGD"
)

// baselines are in the order in which they are listed.
var baselines = []simulate.PolicyKind{
	{Name: Random, RandomTies: true, New: same(random{baseline{Random}})},
	{Name: BestFit, New: func(c *simulate.Cluster, _ *simulate.Workload) place.Policy { return newBestFit(c) }},
	{Name: GpuPacking, New: same(gpuPacking{baseline{GpuPacking}})},
	{Name: FGD, New: func(c *simulate.Cluster, w *simulate.Workload) place.Policy { return newFGD(c, w.Pods) }},
}

// same is a policy that is the same in all runs.
func same(p place.Policy) func(*simulate.Cluster, *simulate.Workload) place.Policy {
	return func(*simulate.Cluster, *simulate.Workload) place.Policy { return p }
}

// Policies returns the product's policies, the baselines, and the product's policies through claims.
func Policies() []simulate.PolicyKind {
	return slices.Concat(simulate.Policies(), baselines, throughClaims)
}

// models are the models of the cluster's devices, sorted, each once.
func models(c *simulate.Cluster) []string {
	seen := map[string]bool{}
	for i := range c.Nodes {
		for _, d := range c.Nodes[i].Devices {
			seen[d.Model] = true
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// largest is the most that a node of the cluster has: CPU in millicores (of the
// nodes where it is counted), units over its devices, and units of one device.
func largest(c *simulate.Cluster) (cpu int64, units, device accel.Units) {
	for i := range c.Nodes {
		n := &c.Nodes[i]
		if n.CPU != place.Unlimited {
			cpu = max(cpu, n.CPU)
		}
		var sum accel.Units
		for _, d := range n.Devices {
			sum += d.Units
			device = max(device, d.Units)
		}
		units = max(units, sum)
	}
	return cpu, units, device
}

// baseline is what they share. It has no prices that change.
type baseline struct{ name string }

func (b baseline) Name() string  { return b.name }
func (b baseline) Epoch() uint64 { return 0 }

// tightest appends the device with the least free units that suffice to buf for
// a pod on one device, and for one on several the first that have enough. false
// where there are not enough.
func tightest(n *place.Node, a *place.Ask, buf []int) ([]int, bool) {
	buf = buf[:0]
	if !a.FitsBeside(n) {
		return buf, false
	}
	if a.Devices == 0 {
		return buf, true
	}
	for i := range n.Slots {
		s := &n.Slots[i]
		if !a.Fits(s) {
			continue
		}
		if a.Devices > 1 || len(buf) == 0 {
			if buf = append(buf, i); a.Devices > 1 && len(buf) == a.Devices {
				return buf, true
			}
			continue
		}
		if s.Free < n.Slots[buf[0]].Free {
			buf[0] = i
		}
	}
	return buf, len(buf) == a.Devices
}

// free is what a slot has for pods.
func free(s *place.Slot) accel.Units {
	if s.Unhealthy || s.Free < 0 {
		return 0
	}
	return s.Free
}

// random takes any node that fits, and on it any device that has enough units,
// for a pod on a part of one. That it is any node, the simulation does: it
// breaks ties by chance. The device is drawn by a number that depends on the
// node's devices alone, as a policy has no chance of its own.
type random struct{ baseline }

func (p random) Choose(n *place.Node, a *place.Ask, buf []int) ([]int, int64, bool) {
	slots, ok := tightest(n, a, buf)
	if !ok || a.Devices != 1 || a.Units == n.Slots[slots[0]].Total {
		return slots, 0, ok
	}
	const prime = 1099511628211 // of the hash FNV-1a
	hash := uint64(14695981039346656037)
	for i := range n.Slots {
		hash = (hash ^ uint64(free(&n.Slots[i]))) * prime //nolint:gosec // not below zero
	}
	for i, fitting := 0, uint64(0); i < len(n.Slots); i++ {
		if !a.Fits(&n.Slots[i]) {
			continue
		}
		// The k-th device takes the place of those before it with chance 1/k.
		fitting++
		hash = (hash ^ fitting) * prime
		if (hash>>32)%fitting == 0 {
			slots[0] = i
		}
	}
	return slots, 0, true
}

// bestFit takes the node on which the least CPU and units are left, each
// counted in the largest node's.
type bestFit struct {
	baseline
	cpu, units float64
}

func newBestFit(c *simulate.Cluster) place.Policy {
	cpu, units, _ := largest(c)
	return bestFit{baseline{BestFit}, max(float64(cpu), 1), max(float64(units), 1)}
}

func (p bestFit) Choose(n *place.Node, a *place.Ask, buf []int) ([]int, int64, bool) {
	slots, ok := tightest(n, a, buf)
	if !ok {
		return slots, place.NoRating, false
	}
	left := -float64(a.Units) * float64(a.Devices)
	for i := range n.Slots {
		left += float64(free(&n.Slots[i]))
	}
	unused := left / p.units * 0.5
	if n.CPU != place.Unlimited {
		unused += float64(n.CPU-a.CPU) / p.cpu * 0.5
	}
	return slots, int64((1 - unused) * 100), true
}

// gpuPacking takes used devices before free ones of a used node, and those
// before free nodes.
type gpuPacking struct{ baseline }

func (p gpuPacking) Choose(n *place.Node, a *place.Ask, buf []int) ([]int, int64, bool) {
	slots, ok := tightest(n, a, buf)
	switch {
	case !ok:
		return slots, place.NoRating, false
	case a.Devices == 0:
		return slots, 0, true
	}
	const most = 100
	whole, used := int64(0), false
	for i := range n.Slots {
		if n.Slots[i].Free == n.Slots[i].Total {
			whole++
		} else {
			used = true
		}
	}
	if !used {
		return slots, max(most/3-whole, whole), true
	}
	var opened, percent int64
	for _, i := range slots {
		s := &n.Slots[i]
		if s.Free == s.Total {
			opened++
		}
		percent += int64(s.Free) * 100 / int64(max(s.Total, 1))
	}
	if opened > 0 {
		return slots, max(most/2-opened, most/3), true
	}
	return slots, max(most-percent/10, most/2), true
}

// typicalShare is the part of a workload's pods, most frequent shapes first,
// that FGD takes for the typical ones.
const typicalShare = 0.95

// shape is a kind of pod and how often it comes.
type shape struct {
	ask place.Ask
	// weight is its share of the typical pods.
	weight float64
}

// typical returns the most frequent shapes, memory disregarded.
func typical(pods []simulate.Pod) []shape {
	count := map[place.Ask]int{}
	for i := range pods {
		a := pods[i].Ask
		a.Memory = 0
		count[a]++
	}
	shapes := make([]shape, 0, len(count))
	for a, n := range count {
		shapes = append(shapes, shape{a, float64(n)})
	}
	slices.SortFunc(shapes, func(x, y shape) int {
		return cmp.Or(
			cmp.Compare(y.weight, x.weight),
			cmp.Compare(y.ask.CPU, x.ask.CPU),
			cmp.Compare(y.ask.Units, x.ask.Units),
			cmp.Compare(y.ask.Devices, x.ask.Devices),
			cmp.Compare(selectionText(y.ask.Only), selectionText(x.ask.Only)),
		)
	})
	covered, n := 0.0, 0
	for n < len(shapes) && covered < typicalShare*float64(len(pods)) {
		covered += shapes[n].weight
		n++
	}
	shapes = shapes[:n]
	for i := range shapes {
		shapes[i].weight /= covered
	}
	return shapes
}

// selectionText puts selections in an order.
func selectionText(s *accel.Selection) string {
	if s == nil {
		return ""
	}
	return strings.Join(slices.Concat(s.UseModels, []string{"\x00"}, s.AvoidModels, []string{"\x00"}, s.UseIDs, []string{"\x00"},
		s.AvoidIDs), "|")
}

// fgd takes the node whose fragmentation grows least: for each typical pod, the
// free units of a node that it cannot use, weighted by how often it comes.
type fgd struct {
	baseline
	// scale is the units of one device.
	scale float64
	// byModel has, per model of a device, what FGD needs to know of nodes with
	// devices of that model.
	byModel map[string]*pattern
}

// pattern is the typical pods as a node of one model sees them.
type pattern struct {
	// foreign is the weight of those that no node of the model serves: they ask
	// for no device or for others.
	foreign float64
	shapes  []shape
}

func newFGD(c *simulate.Cluster, pods []simulate.Pod) place.Policy {
	_, _, device := largest(c)
	p := &fgd{baseline: baseline{FGD}, scale: max(float64(device), 1), byModel: map[string]*pattern{}}
	shapes := typical(pods)
	for _, model := range models(c) {
		pat := &pattern{}
		for _, s := range shapes {
			if s.ask.Devices == 0 || !s.ask.Only.Names("", model) {
				pat.foreign += s.weight
			} else {
				pat.shapes = append(pat.shapes, s)
			}
		}
		p.byModel[model] = pat
	}
	return p
}

// maxDevices bounds the devices of a node that FGD looks at.
const maxDevices = maxNodeGPUs

// Choose implements place.Policy. A pod on a part of a device gets the device
// with the best score, one on whole devices the first that are free.
func (p *fgd) Choose(n *place.Node, a *place.Ask, buf []int) ([]int, int64, bool) {
	slots, ok := tightest(n, a, buf)
	if !ok || len(n.Slots) > maxDevices {
		return slots, place.NoRating, false
	}
	var room [maxDevices]accel.Units
	left := room[:len(n.Slots)]
	for i := range n.Slots {
		left[i] = free(&n.Slots[i])
	}
	pat := &pattern{}
	if len(n.Slots) > 0 {
		pat = p.byModel[n.Slots[0].Model]
	}
	before := pat.fragmentation(n.CPU, left)
	cpu := n.CPU
	if cpu != place.Unlimited {
		cpu -= a.CPU
	}
	if a.Devices != 1 || float64(a.Units) >= p.scale {
		for _, i := range slots {
			left[i] -= a.Units
		}
		return slots, p.score(before - pat.fragmentation(cpu, left)), true
	}
	best := place.NoRating
	for i := range n.Slots {
		if !a.Fits(&n.Slots[i]) || slices.Contains(left[:i], left[i]) {
			continue // as good as the one before it
		}
		left[i] -= a.Units
		if score := p.score(before - pat.fragmentation(cpu, left)); score > best {
			best, slots[0] = score, i
		}
		left[i] += a.Units
	}
	return slots, best, true
}

// score is the whole number that nodes are compared by: the sigmoid of what
// fragmentation falls by, counted in devices, in hundredths.
func (p *fgd) score(fall float64) int64 {
	return int64(1 / (1 + math.Exp(-fall/p.scale)) * 100)
}

// fragmentation is the expected amount of free units that a typical pod cannot
// use on a node with so much CPU and so much left on its devices.
func (p *pattern) fragmentation(cpu int64, left []accel.Units) float64 {
	var total accel.Units
	for _, f := range left {
		total += f
	}
	sum := p.foreign * float64(total)
	for i := range p.shapes {
		s := &p.shapes[i]
		lost := total
		if cpu >= s.ask.CPU {
			var fits int
			var small accel.Units
			for _, f := range left {
				if f >= s.ask.Units {
					fits++
				} else {
					small += f
				}
			}
			if fits >= s.ask.Devices {
				lost = small
			}
		}
		sum += s.weight * float64(lost)
	}
	return sum
}
