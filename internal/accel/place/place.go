// Package place decides which device serves a pod and how good a node is for
// it. It is pure: slots in, a position or a score out, no state and no clock,
// and equal inputs give equal answers. Who holds what is package ledger's
// business.
//
// A policy is data: an order of free amounts and a scale for scores. The loops
// that look for the best are shared by all.
package place

import (
	"cmp"
	"fmt"
	"math"
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// Slot is a device as placement sees it.
type Slot struct {
	ID    accel.DeviceID
	Index int
	// Total is all units of the device. Free is what no pod holds; it is below
	// zero when a device shrank under its pods, and then counts as nothing.
	Total, Free accel.Units
	// Unhealthy devices take no new pods.
	Unhealthy bool
}

// fits reports whether a pod that needs so many units may go to the slot.
func (s *Slot) fits(need accel.Units) bool {
	return !s.Unhealthy && max(s.Free, 0) >= need
}

// Policy says which of several devices with enough room is best. The zero
// value is Binpack.
type Policy uint8

// The policies.
const (
	// Binpack takes the device with the least free units that still suffice,
	// so that large requests find a whole device later.
	Binpack Policy = iota
	// Spread takes the device with the most free units, so that pods disturb
	// each other least.
	Spread
)

// MaxScore is the best score of a node, the MaxExtenderPriority of
// kube-scheduler.
const MaxScore = 10

// policies is indexed by Policy.
var policies = [...]struct {
	name string
	// order is 1 when the least free amount that suffices is best, -1 when the
	// largest is: of two amounts a and b, a is better when order*a < order*b.
	// It is a number and not a function because a filter call over thousands
	// of nodes spends most of its time on this comparison.
	order accel.Units
	// score rates a slot with free units for a request of need units, where
	// 0 < need <= free. It never rates a slot above one that order prefers:
	// for one need it falls, or rises, with free alone.
	score func(need, free accel.Units) int64
}{
	Binpack: {
		name:  "binpack",
		order: 1,
		score: tightness,
	},
	Spread: {
		name:  "spread",
		order: -1,
		score: func(need, free accel.Units) int64 { return MaxScore - tightness(need, free) },
	},
}

// tightness is the tenths of free that need takes. It is coarse where much is
// left over and fine where little is, which is where binpack has to tell nodes
// apart.
func tightness(need, free accel.Units) int64 {
	if need > accel.MaxUnits {
		// Beyond any real device: avoid the overflow of the multiplication.
		need, free = need/MaxScore, free/MaxScore
	}
	return int64(MaxScore * need / free)
}

// ParsePolicy returns the policy of that name; the empty name is the default.
func ParsePolicy(name string) (Policy, error) {
	if name == "" {
		return Binpack, nil
	}
	names := make([]string, len(policies))
	for i := range policies {
		if policies[i].name == name {
			return Policy(i), nil
		}
		names[i] = policies[i].name
	}
	return Binpack, fmt.Errorf("unknown placement policy %q, known are: %s", name, strings.Join(names, ", "))
}

// String returns the name that ParsePolicy takes.
func (p Policy) String() string { return policies[p.known()].name }

// known is p, or the default for a number that no policy has.
func (p Policy) known() Policy {
	if int(p) >= len(policies) {
		return Binpack
	}
	return p
}

// Pick returns the position of the best slot that holds need units, or
// accel.ErrNoFit. Ties go to the lowest Index, then to the lowest ID, then to
// the first position, so that the order of the slots does not matter. A need
// of zero or less fits every healthy slot. It does not allocate.
func Pick(slots []Slot, need accel.Units, p Policy) (int, error) {
	order := policies[p.known()].order
	best := -1
	for i := range slots {
		s := &slots[i]
		if !s.fits(need) {
			continue
		}
		if best < 0 {
			best = i
			continue
		}
		c := cmp.Compare(order*s.Free, order*slots[best].Free)
		if c == 0 {
			c = cmp.Or(cmp.Compare(s.Index, slots[best].Index), cmp.Compare(s.ID, slots[best].ID))
		}
		if c < 0 {
			best = i
		}
	}
	if best < 0 {
		return -1, accel.ErrNoFit
	}
	return best, nil
}

// Score rates a node with these slots from 0 to MaxScore for a pod that needs
// so many units, by the slot that Pick would choose: were the slots of two
// nodes thrown together, Pick would not choose from the one with the lower
// score. A node on which the pod does not fit, and a need of zero or less,
// score 0. It does not allocate.
func Score(slots []Slot, need accel.Units, p Policy) int64 {
	if need <= 0 {
		return 0
	}
	i, err := Pick(slots, need, p)
	if err != nil {
		return 0
	}
	return policies[p.known()].score(need, slots[i].Free)
}

// ScoreFree is Score for a caller that rates thousands of nodes: it takes just
// the free units of the node's healthy devices, in any order, which are packed
// in memory where slots are not.
func ScoreFree(free []accel.Units, need accel.Units, p Policy) int64 {
	if need <= 0 {
		return 0
	}
	policy := &policies[p.known()]
	var largest accel.Units
	best := accel.Units(math.MaxInt64)
	for _, f := range free { // no branch to mispredict
		rank := policy.order * f
		if f < need {
			rank = math.MaxInt64
		}
		best, largest = min(best, rank), max(largest, f)
	}
	if largest < need {
		return 0
	}
	return policy.score(need, policy.order*best)
}
