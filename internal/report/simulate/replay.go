package simulate

import (
	"context"
	"math"
	"math/rand"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// endEvery is after how many arrivals an experiment looks whether it is to end.
const endEvery = 100

// Replay is the experiment in which pods arrive one at a time and none leaves.
type Replay struct {
	// Until is the arrived demand at which it ends, in parts of the cluster's
	// units: 1.3 for 130 %.
	Until float64
	// Sample shows the policy as many nodes for each pod as kube-scheduler would.
	Sample bool
	// Clock measures how long decisions take, in time since any fixed moment;
	// nil for not measuring.
	Clock func() time.Duration
}

// Tally is what became of the pods that arrived.
type Tally struct {
	Seed int64
	// Arrived and Refused count the pods; ArrivedUnits and RefusedUnits what
	// they asked for.
	Arrived, Refused           int
	ArrivedUnits, RefusedUnits accel.Units
	// Decisions are how long each decision took, in the order of arrival; nil
	// without a clock.
	Decisions []time.Duration
}

// note counts a pod; timed is true where it is known how long its decision took.
func (t *Tally) note(p *Pod, placed bool, took time.Duration, timed bool) {
	t.Arrived++
	t.ArrivedUnits += p.Demand()
	if !placed {
		t.Refused++
		t.RefusedUnits += p.Demand()
	}
	if timed {
		t.Decisions = append(t.Decisions, took)
	}
}

// RefusedPercent is the part of the demand that was refused.
func (t *Tally) RefusedPercent() float64 { return percent(t.RefusedUnits, max(t.ArrivedUnits, 1)) }

// Curve is what one run found.
type Curve struct {
	Tally

	// Allocated has, at position p, the part of the cluster's units that was
	// allocated, in percent: the mean over the arrivals after which the arrived
	// demand, rounded, was p percent. Where there were none, which is common with
	// few devices, it is what was allocated before.
	Allocated []float64
}

// Run replays the workload once. It returns the context's error when that ends.
func (r Replay) Run(ctx context.Context, c *Cluster, w *Workload, kind PolicyKind, seed int64) (Curve, error) {
	capacity := c.Units()
	rng := rand.New(rand.NewSource(seed)) //nolint:gosec // the reference's generator; nothing is secret here
	pods := byName(w.Pods)
	order := arrivals(rng, pods, accel.Units(r.Until*float64(capacity)))
	world := newRun(c, w, kind, rng, rng, r.Sample, r.Clock)

	curve := Curve{Tally: Tally{Seed: seed}}
	var at means
	for i, p := range order {
		if i%endEvery == 0 {
			if err := ctx.Err(); err != nil {
				return Curve{}, err
			}
		}
		pod := &pods[p]
		_, took, ok, err := world.arrive(i, &pod.Ask)
		if err != nil {
			return Curve{}, err
		}
		curve.note(pod, ok, took, r.Clock != nil)
		at.add(int(math.Round(percent(curve.ArrivedUnits, capacity))), percent(world.allocated, capacity))
	}
	curve.Allocated = at.values(int(math.Round(100*r.Until)) + 1)
	return curve, nil
}

func percent(part, whole accel.Units) float64 { return 100 * float64(part) / float64(whole) }

// means are means by position.
type means struct {
	sum []float64
	n   []int
}

func (m *means) add(at int, v float64) {
	if more := at + 1 - len(m.sum); more > 0 {
		m.sum = append(m.sum, make([]float64, more)...)
		m.n = append(m.n, make([]int, more)...)
	}
	m.sum[at] += v
	m.n[at]++
}

// values returns the means at the positions below n. A position without values
// has the mean of the one before it.
func (m *means) values(n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		switch {
		case i < len(m.n) && m.n[i] > 0:
			out[i] = m.sum[i] / float64(m.n[i])
		case i > 0:
			out[i] = out[i-1]
		}
	}
	return out
}
