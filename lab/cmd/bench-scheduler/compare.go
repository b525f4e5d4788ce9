package main

import (
	"fmt"
	"math"
	"slices"
)

// mostCPU is the most processor time for one pod, as a multiple of what it takes with the
// earlier commit.
const mostCPU = 1.05

// Comparison is the processor time for one pod, of the control plane and the extender
// together, with this commit beside that with an earlier one.
type Comparison struct {
	// Ratios are by round, and Ratio is their median, which is from Low to High with a
	// confidence of 95 % at least: the smallest and the largest with fewer than six rounds.
	Ratios []float64
	Ratio  float64
	Low    float64
	High   float64
	// Extender is the median ratio of the extenders alone.
	Extender float64
}

// compare compares the sides with and before, by round.
func compare(phases []Phase) *Comparison {
	var c Comparison
	var extenders []float64
	for _, round := range byRound(phases) {
		now, earlier := round[with].CPU, round[before].CPU
		c.Ratios = append(c.Ratios, measured(now)/measured(earlier))
		extenders = append(extenders, now[extenderName]/earlier[extenderName])
	}
	c.Ratio, c.Extender = median(c.Ratios), median(extenders)
	c.Low, c.High = interval(c.Ratios)
	return &c
}

// byRound returns the phases of each round by their sides.
func byRound(phases []Phase) []map[side]Phase {
	var rounds []map[side]Phase
	for _, p := range phases {
		for len(rounds) < p.Round {
			rounds = append(rounds, map[side]Phase{})
		}
		rounds[p.Round-1][p.Side] = p
	}
	return rounds
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

func (c *Comparison) verdict(nodes int) verdict {
	return verdict{
		fmt.Sprintf("%d nodes: %.3f of the processor time for a pod before (median of %d rounds, with 95 %% confidence %.3f to %.3f; the "+
			"extender alone %.2f); at most %g is wanted",
			nodes, c.Ratio, len(c.Ratios), c.Low, c.High, c.Extender, mostCPU), c.Ratio <= mostCPU,
	}
}
