package accel

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// Tier is a promise about the memory of a device that containers share: what keeps one
// from using what another was allocated. Tiers are ordered; the zero value is TierNone.
type Tier string

// The tiers, from the weakest on.
const (
	// TierNone promises nothing: any program may use all memory of the device.
	TierNone Tier = ""
	// TierCooperative holds for programs that use the vendor's library as it is shipped.
	TierCooperative Tier = "cooperative"
	// TierDriver is enforced by the kernel driver, for each container's control group.
	TierDriver Tier = "driver"
	// TierHardware is enforced by the device itself: a partition, or a device that one
	// container has for itself.
	TierHardware Tier = "hardware"
)

// tiers are in ascending order.
var tiers = []Tier{TierNone, TierCooperative, TierDriver, TierHardware}

// ParseTier reads a tier as pods and configurations name it; "none" is TierNone.
func ParseTier(s string) (Tier, error) {
	if s == "none" {
		return TierNone, nil
	}
	if s == "" || !slices.Contains(tiers, Tier(s)) {
		return TierNone, fmt.Errorf("isolation %q is not known; use one of %s", s, strings.Join(TierNames(), ", "))
	}
	return Tier(s), nil
}

// TierNames returns the names that ParseTier reads, in ascending order.
func TierNames() []string {
	names := make([]string, len(tiers))
	for i, t := range tiers {
		names[i] = t.String()
	}
	return names
}

// String returns the name that ParseTier reads.
func (t Tier) String() string {
	if t == TierNone {
		return "none"
	}
	return string(t)
}

// Meets reports whether the tier promises at least what another does.
func (t Tier) Meets(required Tier) bool {
	return slices.Index(tiers, t) >= slices.Index(tiers, required)
}

// MaxAttestationAge is how old an attestation may be: an older one proves nothing.
const MaxAttestationAge = time.Minute

// attested reports whether the tier counts only as long as it is found to hold.
func (t Tier) attested() bool { return t == TierCooperative || t == TierDriver }

// LowestTier returns the lowest of the tiers, TierNone of no tiers.
func LowestTier(all ...Tier) Tier {
	if len(all) == 0 {
		return TierNone
	}
	return slices.MinFunc(all, func(a, b Tier) int { return cmp.Compare(slices.Index(tiers, a), slices.Index(tiers, b)) })
}

// TierSet is a set of tiers; the zero value is empty.
type TierSet uint8

// Add puts a tier into the set.
func (s *TierSet) Add(t Tier) { *s |= 1 << max(slices.Index(tiers, t), 0) }

// Highest returns the highest tier of the set, TierNone of an empty one.
func (s TierSet) Highest() Tier {
	return tiers[max(bits.Len8(uint8(s)), 1)-1]
}

// String lists the tiers of the set, the highest first: "cooperative and none".
func (s TierSet) String() string {
	var names []string
	for i, t := range slices.Backward(tiers) {
		if s&(1<<i) != 0 {
			names = append(names, t.String())
		}
	}
	return strings.Join(names, " and ")
}

// WhyNotIsolated says that devices, which state these tiers, do not have the required one.
func WhyNotIsolated(required Tier, stated TierSet) string {
	if bits.OnesCount8(uint8(stated)) > 1 {
		return fmt.Sprintf("isolation %s required, devices state %s", required, stated)
	}
	return fmt.Sprintf("isolation %s required, device states %s", required, stated.Highest())
}

// Isolation is what a node states of a device: the tier of its memory, and of its compute
// time by itself, since one does not follow from the other.
type Isolation struct {
	// Memory is the tier of the device's memory, and Compute that of its compute time, which
	// is never TierDriver.
	Memory, Compute Tier
	// Backend is what enforces it: "dmem", "misc", "mps2", "mps3", "mig" or "drs"; "" for
	// nothing.
	Backend string
	// Attested is when it was last found to hold, in whole seconds; the zero time for what
	// needs no attestation, such as a partition.
	Attested time.Time
}

// Until returns when the tier of the memory ends to count without another attestation;
// the zero time for never. An attestation from the future, by a clock that is ahead,
// counts as one of now.
func (i Isolation) Until(now time.Time) time.Time {
	if !i.Memory.attested() {
		return time.Time{}
	}
	if i.Attested.After(now) {
		return now.Add(MaxAttestationAge)
	}
	return i.Attested.Add(MaxAttestationAge)
}

// At returns what counts of it at a time: without a tier whose attestation is too old.
func (i Isolation) At(now time.Time) Isolation {
	if now.Sub(i.Attested) <= MaxAttestationAge {
		return i
	}
	return i.Lapsed()
}

// Lapsed returns what counts of it without an attestation.
func (i Isolation) Lapsed() Isolation {
	if i.Memory.attested() {
		i.Memory = TierNone
	}
	if i.Compute.attested() {
		i.Compute = TierNone
	}
	if i.Memory == TierNone && i.Compute == TierNone {
		return Isolation{}
	}
	return i
}

// String returns both tiers, or the one that both are: "hardware", "driver/none".
func (i Isolation) String() string {
	if i.Memory == i.Compute {
		return i.Memory.String()
	}
	return i.Memory.String() + "/" + i.Compute.String()
}
