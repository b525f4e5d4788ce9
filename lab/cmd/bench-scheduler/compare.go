package main

import (
	"fmt"
	"math"
	"slices"
)

// mostCPU is the most processor time for one pod, as a multiple of what it takes with the
// earlier commit.
const mostCPU = 1.05

// Comparison is a side beside its reference, by round.
type Comparison struct {
	Side, Reference side
	// Rate is of pods per second, P99 of the latency's 99th percentile, and CPU of the processor
	// time for one pod, of all programs but this one.
	Rate, P99, CPU Ratio
	// Requests are those of Divvy's own to the API server for one pod, as Divvy counts them and as
	// the API server does. The API server does not say which client asked; what it answered more
	// than beside the reference is Divvy's, and the binds are.
	RequestsCounted, RequestsServed float64
}

// Requests is the larger of the two counts.
func (c *Comparison) Requests() float64 { return max(c.RequestsCounted, c.RequestsServed) }

// Ratio is that of two sides in the same round. The median is from Low to High with a confidence of
// 95 % at least: the smallest and the largest with fewer than six rounds.
type Ratio struct {
	Rounds            []float64
	Median, Low, High float64
}

func (r Ratio) String() string { return fmt.Sprintf("%.2f (%.2f-%.2f)", r.Median, r.Low, r.High) }

func newRatio(of, to []float64) Ratio {
	r := Ratio{Rounds: make([]float64, len(of))}
	for i := range of {
		r.Rounds[i] = of[i] / to[i]
	}
	r.Median = median(r.Rounds)
	r.Low, r.High = interval(r.Rounds)
	return r
}

func rateOf(p *Phase) float64 { return p.PodsPerSecond }
func p99Of(p *Phase) float64  { return p.Latency.P99 }
func cpuOf(p *Phase) float64  { return measured(p.CPU) }

// values are those of a side, in the order of the rounds.
func values(phases []Phase, side side, of func(*Phase) float64) (out []float64) {
	for i := range phases {
		if phases[i].Side == side {
			out = append(out, of(&phases[i]))
		}
	}
	return out
}

// compare compares two sides, which have as many phases.
func compare(phases []Phase, side, reference side) Comparison {
	ratio := func(of func(*Phase) float64) Ratio {
		return newRatio(values(phases, side, of), values(phases, reference, of))
	}
	c := Comparison{Side: side, Reference: reference, Rate: ratio(rateOf), P99: ratio(p99Of), CPU: ratio(cpuOf)}
	c.RequestsCounted = median(values(phases, side, func(p *Phase) float64 { return p.Divvy.Requests }))
	served := values(phases, side, asked)
	for i, without := range values(phases, reference, func(p *Phase) float64 { return asked(p) - p.Server[binds] }) {
		served[i] -= without
	}
	c.RequestsServed = median(served)
	return c
}

// measured is the time of all programs but this one.
func measured(cpu map[string]float64) (sum float64) {
	for name, each := range cpu {
		if name != benchName {
			sum += each
		}
	}
	return sum
}

// interval returns a confidence interval of 95 % at least of the median: the k-th smallest
// and the k-th largest value, with the largest k for which fewer than k of n tosses of a
// coin are heads with a probability of 2.5 % at most.
func interval(values []float64) (low, high float64) {
	sorted := slices.Sorted(slices.Values(values))
	n, k := len(sorted), 0
	tail, heads := 0.0, math.Pow(0.5, float64(n)) // the probability of exactly k heads
	for tail+heads <= 0.025 {
		tail += heads
		heads *= float64(n-k) / float64(k+1)
		k++
	}
	k = max(k, 1)
	return sorted[k-1], sorted[n-k]
}
