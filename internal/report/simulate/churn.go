package simulate

import (
	"container/heap"
	"context"
	"errors"
	"math/rand"
	"time"
)

// Churn is the experiment in which pods also leave: they arrive as a Poisson
// process, each drawn uniformly from the workload, and one that was placed
// stays for a time that is distributed exponentially, the same for all. A pod
// that finds no room is refused and does not come back. Times are counted in
// mean lifetimes.
type Churn struct {
	// Load is the mean demand of the pods that would be there if none were
	// refused, in parts of the cluster's units: 0.97 for 97 %.
	Load float64
	// WarmUp comes before Measure; both are durations in lifetimes.
	WarmUp, Measure float64
	// Sample and Clock are as in Replay.
	Sample bool
	Clock  func() time.Duration
}

// Churned is what one run found during its measurement.
type Churned struct {
	Tally

	// Allocated is the mean over time of the allocated units, in percent of the
	// cluster's.
	Allocated float64
}

// departure is a pod that leaves at a time.
type departure struct {
	at float64
	placement
}

// departures is a heap with the next one first. Of two at the same time the
// one that was added first comes first or not, which changes nothing.
type departures []departure

func (d departures) Len() int           { return len(d) }
func (d departures) Less(i, j int) bool { return d[i].at < d[j].at }
func (d departures) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *departures) Push(x any)        { *d = append(*d, x.(departure)) } //nolint:forcetypeassert // heap hands back what it was given
func (d *departures) Pop() any {
	last := len(*d) - 1
	x := (*d)[last]
	*d = (*d)[:last]
	return x
}

// Run runs the experiment once. With equal seeds all policies see the same pods
// at the same times with the same lifetimes.
func (ch Churn) Run(ctx context.Context, c *Cluster, w *Workload, kind PolicyKind, seed int64) (Churned, error) {
	capacity := c.Units()
	mean := float64(w.Demand()) / float64(len(w.Pods))
	if mean == 0 {
		return Churned{}, errors.New("no pod of the workload requests a device")
	}
	rate := ch.Load * float64(capacity) / mean // arrivals per lifetime

	rng := rand.New(rand.NewSource(seed)) //nolint:gosec // nothing is secret here
	pods := byName(w.Pods)
	// Ties have chance of their own, which does not change who arrives.
	ties := rand.New(rand.NewSource(^seed)) //nolint:gosec // as above
	world := newRun(c, w, kind, rng, ties, ch.Sample, ch.Clock)

	out := Churned{Tally: Tally{Seed: seed}}
	var leaving departures
	var area float64 // of the allocated units over time
	now, end := 0.0, ch.WarmUp+ch.Measure
	pass := func(to float64) {
		if from := max(now, ch.WarmUp); to > from {
			area += float64(world.allocated) * (min(to, end) - from)
		}
		now = to
	}
	for i := 0; ; i++ {
		if i%endEvery == 0 {
			if err := ctx.Err(); err != nil {
				return Churned{}, err
			}
		}
		next := now + rng.ExpFloat64()/rate
		p, stays := rng.Intn(len(pods)), rng.ExpFloat64()
		for len(leaving) > 0 && leaving[0].at <= min(next, end) {
			d := heap.Pop(&leaving).(departure) //nolint:forcetypeassert // as above
			pass(d.at)
			world.remove(d.placement)
		}
		if next >= end {
			pass(end)
			break
		}
		pass(next)
		pod := &pods[p]
		placed, took, ok, err := world.arrive(i, &pod.Ask)
		if err != nil {
			return Churned{}, err
		}
		if ok {
			heap.Push(&leaving, departure{now + stays, placed})
		}
		if now >= ch.WarmUp {
			out.note(pod, ok, took, ch.Clock != nil)
		}
	}
	out.Allocated = 100 * area / ch.Measure / float64(capacity)
	return out, nil
}
