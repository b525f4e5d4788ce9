package main

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// shape is what a pod requests: units, in equal parts on so many devices, or by a claim of its own
// as many GiB of one device.
type shape struct {
	units   accel.Units
	devices int
	claim   bool
	class   string // its PriorityClass, "" for none
}

// Priorities of pods. Those without a class are between the two.
const (
	lowClass  = "bench-low"
	highClass = "bench-high"
)

var (
	small = shape{units: 4, devices: 1}
	// filler leaves a quarter of each device of a node.
	filler = shape{units: cardsPerNode * cardUnits * 3 / 4, devices: cardsPerNode, class: lowClass}
	// evictor fits on a node where no filler is.
	evictor = shape{units: filler.units, devices: filler.devices, class: highClass}
	claimer = shape{units: 2, devices: 1, claim: true}
)

// scenario is what is placed, and beside what.
type scenario struct {
	name string
	// filled has a filler on each node before, and waiting are pods that fit nowhere.
	filled  bool
	waiting int
	// paced pods come at half of the pods per second without Divvy; others as fast as the API
	// server accepts them.
	paced bool
	// judged is whether the pods per second have a limit; a scenario that is not is measured in
	// fewer rounds.
	judged bool
	// claims is of nodes whose devices are for ResourceClaims. It is measured alone.
	claims bool
	// pods are requested in turn.
	pods []shape
}

var scenarios = []scenario{
	{name: "throughput", judged: true, pods: []shape{small}},
	{name: "latency", paced: true, pods: []shape{small}},
	{name: "full", filled: true, waiting: 1000, pods: []shape{small}},
	{name: "mixed", pods: []shape{{units: 1, devices: 1}, {units: 2, devices: 1}, small, {units: 8, devices: 1}, {units: 16, devices: 1},
		{units: 16, devices: 2}}},
	{name: "preemption", filled: true, pods: []shape{small, small, small, small, evictor}},
	{name: "claims", judged: true, claims: true, pods: []shape{claimer}},
}

// scenarioNames are those of the scenarios of one cluster.
func scenarioNames(claims bool) string {
	var names []string
	for i := range scenarios {
		if scenarios[i].claims == claims {
			names = append(names, scenarios[i].name)
		}
	}
	return strings.Join(names, ",")
}

// nodes returns the nodes of the scenario's cluster. Where pods have claims, as many may run on a node
// as its devices have memory for.
func (s *scenario) nodes(count int) simnodes.Group {
	g := simnodes.Group{Count: count, Cards: cardsPerNode, Units: cardUnits, Resource: resource}
	if s.claims {
		g.Units, g.Pods, g.Claims = claimUnits, claimPods, true
	}
	return g
}

// rounds are fewer where nothing is judged.
func (s *scenario) rounds(of int) int {
	if s.judged {
		return of
	}
	return max(1, of/3)
}

// check reports that the pods would leave less than a half of the capacity that is free for them:
// the last ones would search for it, which a benchmark of the usual case is not about.
func (s *scenario) check(pods, nodes int) error {
	var asked, evictors int
	for i := range pods {
		if p := &s.pods[i%len(s.pods)]; *p == evictor {
			evictors++
		} else {
			asked += int(p.units)
		}
	}
	free := nodes * cardsPerNode * int(s.nodes(nodes).Units)
	if s.filled {
		free -= nodes * int(filler.units)
	}
	switch {
	case asked > free/2:
		return fmt.Errorf("-pods %d request %d units in scenario %s; half of what %d nodes have free are %d", pods, asked, s.name, nodes,
			free/2)
	case evictors > nodes/2:
		return fmt.Errorf("-pods %d evict %d pods in scenario %s; half of the %d nodes have %d", pods, evictors, s.name, nodes, nodes/2)
	}
	return nil
}

// pod returns a pod of this shape.
func (s *shape) pod(nodes *simnodes.Group, namespace, name string) *corev1.Pod {
	pod := nodes.Pod(namespace, name, s.units)
	if s.claim {
		pod = nodes.ClaimPod(namespace, name, s.template())
	}
	pod.Spec.PriorityClassName = s.class
	// No kubelet ends it.
	pod.Spec.TerminationGracePeriodSeconds = ptr.To[int64](0)
	if s.devices > 1 {
		pod.Annotations = map[string]string{wire.CountAnnotation: fmt.Sprint(s.devices)}
	}
	return pod
}

// selected returns the scenarios of these names, in the order of the table.
func selected(names string) ([]scenario, error) {
	wanted := strings.Split(names, ",")
	var out []scenario
	for i := range scenarios {
		if at := slices.Index(wanted, scenarios[i].name); at >= 0 {
			out = append(out, scenarios[i])
			wanted = slices.Delete(wanted, at, at+1)
		}
	}
	if len(wanted) > 0 {
		return nil, fmt.Errorf("-scenario is %q: %q is none of %s", names, wanted[0], scenarioNames(false)+","+scenarioNames(true))
	}
	if i := slices.IndexFunc(out, func(s scenario) bool { return s.claims }); i >= 0 && len(out) > 1 {
		return nil, fmt.Errorf("-scenario is %q: %s is measured alone, on nodes of its own", names, out[i].name)
	}
	return out, nil
}
