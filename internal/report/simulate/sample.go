package simulate

import (
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// kube-scheduler's constants: it looks at no fewer nodes that fit, and at no smaller
// part of them in percent.
const (
	fewestShown        = 100
	fewestShownPercent = 5
)

// ShownNodes is how many nodes that fit kube-scheduler looks for in a cluster of n,
// where its configuration does not set percentageOfNodesToScore.
func ShownNodes(n int) int {
	if n < fewestShown {
		return n
	}
	return max(n*max(50-n/125, fewestShownPercent)/100, fewestShown)
}

// sample is kube-scheduler's search for nodes: it goes through them from where the
// search before ended, counts CPU, memory and units as sums, and stops as soon as it
// has found enough. Only these does an extender see.
type sample struct {
	want, next int
	// left is what each node has left, by its position.
	left []sums
	// names are the nodes that the last search found, at their positions.
	names     []string
	positions []int
}

// sums are amounts of a node.
type sums struct {
	cpu, memory int64
	units       accel.Units
}

// sumsOf is what a pod takes.
func sumsOf(a *place.Ask) sums {
	return sums{a.CPU, a.Memory, a.Units * accel.Units(a.Devices)}
}

func newSample(c *Cluster, order []int) *sample {
	s := &sample{want: ShownNodes(len(order))}
	for _, i := range order {
		n := &c.Nodes[i]
		left := sums{cpu: n.CPU, memory: n.Memory}
		for _, d := range n.Devices {
			if !d.Health.Unhealthy {
				left.units += d.Units - d.Withheld
			}
		}
		s.left = append(s.left, left)
	}
	return s
}

// search finds nodes for a pod among the next most ones, and returns how many it went
// through.
func (s *sample) search(names []string, a *place.Ask, most int) int {
	pod := sumsOf(a)
	s.names, s.positions = s.names[:0], s.positions[:0]
	looked := 0
	for looked < most && len(s.names) < s.want {
		at := (s.next + looked) % len(names)
		looked++
		if left := &s.left[at]; left.cpu >= pod.cpu && left.memory >= pod.memory && left.units >= pod.units {
			s.names, s.positions = append(s.names, names[at]), append(s.positions, at)
		}
	}
	s.next = (s.next + looked) % len(names)
	return looked
}

// take counts a pod on a node, and give takes it off.
func (s *sample) take(at int, pod sums) { s.left[at].add(sums{-pod.cpu, -pod.memory, -pod.units}) }
func (s *sample) give(at int, pod sums) { s.left[at].add(pod) }

func (s *sums) add(o sums) {
	if s.cpu != place.Unlimited {
		s.cpu += o.cpu
	}
	if s.memory != place.Unlimited {
		s.memory += o.memory
	}
	s.units += o.units
}
