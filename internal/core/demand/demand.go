// Package demand counts what pods usually ask for: a histogram of asks that is
// learned from the pods seen, in which older ones count less and less, and that
// may start from a prior.
//
// It is pure: what it counts in is pods, not time. A cluster in which nothing
// happens forgets nothing.
package demand

import (
	"cmp"
	"math"
	"slices"
	"strings"
	"sync"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Kind is what pods of one kind ask for.
type Kind struct {
	// Units are asked for on each of Devices devices; without Devices the pods
	// take CPU and memory alone.
	Units   accel.Units
	Devices int
	// CPU is in millicores.
	CPU int64
	// Models says which models the pods take; nil for any. It names no IDs.
	Models *accel.Selection
}

// Count is a kind and how many pods of it were seen.
type Count struct {
	Kind
	// Pods is a number of pods, of which older ones count less than one.
	Pods float64
	// Memory is their mean, in MiB: memory varies more than CPU and matters less,
	// so pods that differ in it alone are of one kind.
	Memory int64
}

// Asked is how many units its pods ask for in all.
func (c *Count) Asked() float64 { return c.Pods * float64(c.Devices) * float64(c.Units) }

// Options of a Histogram. Zero values stand for the defaults.
type Options struct {
	// HalfLife is after how many pods one counts half; 20 000 by default. Some
	// thousand pods tell the shares of the usual kinds well, and a workload that
	// changed is followed within as many.
	HalfLife float64
	// MaxKinds bounds the kinds that are kept; 2048 by default. Beyond it, the
	// rarer half is forgotten.
	MaxKinds int
	// Prior are counts to start from. Those of zero pods or fewer are left out.
	Prior []Count
}

// Histogram counts asks. It is safe for concurrent use.
type Histogram struct {
	mu     sync.Mutex // guards what follows
	counts map[key]*count
	// unit is what the next pod counts: instead of all others losing weight,
	// each one counts more than the one before it.
	unit, growth float64
	total        float64
	maxKinds     int
	seen         uint64
}

// key is a Kind by value.
type key struct {
	units   accel.Units
	devices int
	cpu     int64
	models  string
}

type count struct {
	models         *accel.Selection
	weight, memory float64 // memory is summed with the weight
}

// maxUnit is where weights are scaled down, far from where a float overflows.
const maxUnit = 1e100

// New returns a histogram of the prior.
func New(o Options) *Histogram {
	if o.HalfLife <= 0 {
		o.HalfLife = 20_000
	}
	if o.MaxKinds <= 0 {
		o.MaxKinds = 2048
	}
	h := &Histogram{counts: map[key]*count{}, unit: 1, growth: math.Exp2(1 / o.HalfLife), maxKinds: o.MaxKinds}
	for i := range o.Prior {
		c := &o.Prior[i]
		if c.Pods > 0 {
			a := place.Ask{Units: c.Units, Devices: c.Devices, CPU: c.CPU, Memory: c.Memory, Only: c.Models}
			h.add(&a, c.Pods)
		}
	}
	return h
}

// Observe counts a pod, which should be done once for each.
func (h *Histogram) Observe(a *place.Ask) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.add(a, h.unit)
	h.seen++
	h.unit *= h.growth
	if h.unit > maxUnit {
		h.scale(1 / h.unit)
	}
}

func (h *Histogram) add(a *place.Ask, weight float64) {
	k := key{units: max(a.Units, 0), devices: max(a.Devices, 0), cpu: max(a.CPU, 0), models: modelsKey(a.Only)}
	if k.devices == 0 {
		k.units, k.models = 0, ""
	}
	c := h.counts[k]
	if c == nil {
		if len(h.counts) >= h.maxKinds {
			h.forget()
		}
		c = &count{}
		if k.models != "" {
			c.models = &accel.Selection{UseModels: a.Only.UseModels, AvoidModels: a.Only.AvoidModels}
		}
		h.counts[k] = c
	}
	c.weight += weight
	c.memory += weight * float64(max(a.Memory, 0))
	h.total += weight
}

// modelsKey is the part of a selection that speaks of models, by value.
func modelsKey(s *accel.Selection) string {
	if s == nil || len(s.UseModels)+len(s.AvoidModels) == 0 {
		return ""
	}
	return strings.Join(s.UseModels, "\x00") + "\x01" + strings.Join(s.AvoidModels, "\x00")
}

// scale multiplies all weights, which changes no share.
func (h *Histogram) scale(by float64) {
	for _, c := range h.counts {
		c.weight *= by
		c.memory *= by
	}
	h.total *= by
	h.unit *= by
}

// forget drops the rarer half of the kinds.
func (h *Histogram) forget() {
	keys := h.sorted()
	for _, k := range keys[len(keys)/2:] {
		h.total -= h.counts[k].weight
		delete(h.counts, k)
	}
}

// sorted returns the keys, those of the most pods first; the order is the same
// for equal histograms.
func (h *Histogram) sorted() []key {
	keys := make([]key, 0, len(h.counts))
	for k := range h.counts {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(
			cmp.Compare(h.counts[b].weight, h.counts[a].weight),
			cmp.Compare(a.devices, b.devices), cmp.Compare(a.units, b.units), cmp.Compare(a.cpu, b.cpu),
			strings.Compare(a.models, b.models))
	})
	return keys
}

// Counts returns the kinds, those of the most pods first.
func (h *Histogram) Counts() []Count {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := h.sorted()
	out := make([]Count, len(keys))
	for i, k := range keys {
		c := h.counts[k]
		out[i] = Count{
			Kind:   Kind{Units: k.units, Devices: k.devices, CPU: k.cpu, Models: c.models},
			Pods:   c.weight / h.unit,
			Memory: int64(c.memory / c.weight),
		}
	}
	return out
}

// Pods returns the sum over Counts, and how many pods Observe saw in all.
func (h *Histogram) Pods() (counted float64, seen uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.total / h.unit, h.seen
}
