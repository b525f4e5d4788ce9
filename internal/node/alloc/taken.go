package alloc

import (
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// taken are the chips that a pool gave out.
type taken struct {
	// known is true once it is known which chips containers hold.
	known bool
	held  map[accel.DeviceID]bool
	// given are the chips that containers got, with the time.
	given map[accel.DeviceID]time.Time
}

// set says which chips containers hold; what was given less than grace ago is held
// as well.
func (t *taken) set(held map[accel.DeviceID]bool, grace time.Duration, now time.Time) {
	t.known, t.held = true, held
	for chip, at := range t.given {
		// Not those that are held: a slice may be held and another one be just given.
		if now.Sub(at) >= grace {
			delete(t.given, chip)
		}
	}
}

// give says that a container got chips at that time.
func (t *taken) give(at time.Time, chips ...accel.DeviceID) {
	for _, chip := range chips {
		t.given[chip] = at
	}
}

// related reports whether a container holds what the chip is a partition of, or a
// partition of the chip.
func (t *taken) related(chip accel.DeviceID, parents map[accel.DeviceID]accel.DeviceID) bool {
	if parent := parents[chip]; parent != "" && t.has(parent) {
		return true
	}
	for held := range t.held {
		if parents[held] == chip {
			return true
		}
	}
	for given := range t.given {
		if parents[given] == chip {
			return true
		}
	}
	return false
}

// has reports whether a container holds the chip.
func (t *taken) has(chip accel.DeviceID) bool {
	_, given := t.given[chip]
	return given || t.held[chip]
}
