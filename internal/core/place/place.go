// Package place decides which devices of a node serve a pod and how good the
// node is for it. It is pure: a node and an ask in, positions and a rating out,
// no clock, and equal inputs give equal answers. Who holds what is package
// ledger's business.
//
// A Policy does both with one function, so that a node is rated by the devices
// that the pod would get there.
package place

import (
	"cmp"
	"math"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Slot is a device as placement sees it.
type Slot struct {
	ID    accel.DeviceID
	Index int
	// Model is the vendor's product name, "" when unknown.
	Model string
	// Total is all units of the device. Free is what no pod holds and the node does
	// not withhold; it is below zero when a device shrank under its pods, or units that
	// pods hold are withheld besides, and then counts as nothing.
	Total, Free accel.Units
	// Least is the fewest units that a container can have; 0 for any.
	Least accel.Units
	// Unhealthy devices take no new pods.
	Unhealthy bool
	// Tier is what isolates the device's memory at the moment.
	Tier accel.Tier
}

// Unlimited is the CPU or memory of a node of which nobody counts it.
const Unlimited int64 = math.MaxInt64

// Node is a node as placement sees it at one moment.
type Node struct {
	Slots []Slot
	// CPU and Memory are what is left for pods, in millicores and MiB, below
	// zero where more is taken than there is; Unlimited where nobody counts.
	CPU, Memory int64
	// Cores is all CPU that the node has for pods, in millicores, whoever takes
	// it; 0 or Unlimited where nobody counts.
	Cores int64
	// Graph says how the devices are connected, by their positions in Slots;
	// nil when that is not known.
	Graph *Graph
}

// Ask is what a pod asks of a node.
type Ask struct {
	// Units are asked for on each of Devices devices. A pod with no Devices
	// takes only CPU and memory.
	Units   accel.Units
	Devices int
	// Least is the fewest units that a container of the pod has of a device; 0 if that is not known.
	Least accel.Units
	// CPU and Memory are the pod's peak, in millicores and MiB.
	CPU, Memory int64
	// Only says which devices the pod takes; nil for any.
	Only *accel.Selection
}

// Fits reports whether a pod may go to the slot: a device of which it asks
// nothing must be healthy as well.
func (a *Ask) Fits(s *Slot) bool {
	return max(s.Free, 0) >= a.Units && a.allows(s)
}

// FitsEmpty reports whether a pod could go to the slot if no pod held any of it and the node
// withheld nothing.
func (a *Ask) FitsEmpty(s *Slot) bool { return s.Total >= a.Units && a.allows(s) }

func (a *Ask) allows(s *Slot) bool {
	return !s.Unhealthy && a.Suffices(s) && (a.Only == nil || a.Only.Allows(s.ID, s.Model, s.Tier))
}

// Suffices reports whether each container of the pod has as much of the slot as one must have.
func (a *Ask) Suffices(s *Slot) bool { return a.Least == 0 || a.Least >= s.Least }

// FitsBeside reports whether the node has the CPU and memory that the pod
// takes. A pod that takes none of one fits also where that is overdrawn.
func (a *Ask) FitsBeside(n *Node) bool {
	return (a.CPU <= 0 || a.CPU <= n.CPU) && (a.Memory <= 0 || a.Memory <= n.Memory)
}

// Policy chooses devices of a node and rates the node by that choice. A Policy
// is deterministic and safe for concurrent use.
type Policy interface {
	// Name is the name in configurations and annotations.
	Name() string
	// Choose appends the positions of the chosen slots, ascending, to buf[:0]
	// and rates the node with them: a higher rating is better, and of equal ones
	// the first node by name. ok is false where the pod does not fit. Neither
	// node nor ask may be kept or changed.
	Choose(n *Node, a *Ask, buf []int) (slots []int, rating int64, ok bool)
	// Epoch changes when ratings of unchanged nodes may have changed, because
	// prices were renewed; caches ask it. It changes no sooner than the ratings,
	// or a cache would take an old one for a new one. A policy that rates a node by the node
	// and the ask alone has the same epoch always.
	Epoch() uint64
}

// NoRating stands for the rating of a node on which the pod does not fit.
const NoRating int64 = math.MinInt64

// MaxScore is the best score of a node, the MaxExtenderPriority of
// kube-scheduler.
const MaxScore = 10

// Scores replaces ratings by scores from 0 to MaxScore: the best rating gets
// MaxScore, the next lower one a point less and so on for as many different
// ratings as there are points; all below get 0, and so does NoRating. It does
// not allocate.
func Scores(ratings []int64) {
	var space [MaxScore]int64
	levels := space[:0] // the best ratings, descending
	for _, r := range ratings {
		if r == NoRating || len(levels) == MaxScore && r <= levels[MaxScore-1] {
			continue
		}
		at, known := slices.BinarySearchFunc(levels, r, func(level, r int64) int { return cmp.Compare(r, level) })
		if known {
			continue
		}
		levels = slices.Insert(levels[:min(len(levels), MaxScore-1)], at, r)
	}
	for i, r := range ratings {
		ratings[i] = 0
		if at := slices.Index(levels, r); at >= 0 {
			ratings[i] = int64(MaxScore - at)
		}
	}
}
