package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

func TestFewest(t *testing.T) {
	for bytes, want := range map[int64]int{0: 0, 1: 1, 640 << 30: 1, 640<<30 + 1: 2, 2100 << 30: 4} {
		if got := fewest(bytes); got != want {
			t.Errorf("%d bytes: %d nodes, want %d", bytes, got, want)
		}
	}
}

// Of the rounds, the median of the rate counts, and the one with the most nodes.
func TestPackingIsJudged(t *testing.T) {
	reference, side := side{door: plain}, side{plugin, "binpack"}
	m := &Measurement{Nodes: 1000, Scenario: scenarios[len(scenarios)-1]}
	for round, rates := range [][2]float64{{20, 90}, {20, 100}, {20, 120}} {
		m.Phases = append(m.Phases, Phase{Side: reference, Round: round, PodsPerSecond: rates[0], Packing: Packing{600, 10}},
			Phase{Side: side, Round: round, PodsPerSecond: rates[1], Packing: Packing{10 + round%2, 10}, Divvy: &DivvyTimes{}})
	}
	r := Result{options: options{scenarios: []scenario{m.Scenario}, policies: []string{"binpack"}}, Measurements: []*Measurement{m}}
	r.judge()
	want := "[PASS  1000 nodes, plugin binpack: 5.00 times the pods per second of plain (median of 3 rounds, 4.50 to 6.00); at least 5 " +
		"is wanted PASS  1000 nodes, plugin binpack: pods on 11 nodes, and 10 have the memory; at most 1.1 times as many are wanted]"
	if got := fmt.Sprint(r.verdicts(m)); got != want || r.missed() != nil {
		t.Errorf("got  %s\nwant %s; %v", got, want, r.missed())
	}
	m.Phases[3].Packing.Nodes, m.Phases[1].PodsPerSecond, m.Phases[5].PodsPerSecond = 12, 50, 90
	r.judge()
	if err := r.missed(); err == nil || strings.Count(err.Error(), "MISS")+strings.Count(err.Error(), "wanted") != 2 {
		t.Errorf("%v", err)
	}
}

func TestClaimPods(t *testing.T) {
	s := scenarios[len(scenarios)-1]
	nodes := s.nodes(3)
	if !nodes.Claims || nodes.Units != 80 || nodes.Pods != 1000 {
		t.Errorf("nodes %+v", nodes)
	}
	pod := claimer.pod(&nodes, namespace, "a")
	if len(pod.Spec.ResourceClaims) != 1 || *pod.Spec.ResourceClaims[0].ResourceClaimTemplateName != "memory-2" ||
		simnodes.Template(namespace, claimer.template(), "2Gi").Name != "memory-2" {
		t.Errorf("pod %+v", pod.Spec)
	}
}
