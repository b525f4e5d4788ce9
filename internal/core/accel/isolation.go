package accel

import (
	"fmt"
	"slices"
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
		return TierNone, fmt.Errorf("isolation %q is not known; use one of none, cooperative, driver, hardware", s)
	}
	return Tier(s), nil
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
