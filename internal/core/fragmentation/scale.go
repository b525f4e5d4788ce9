package fragmentation

import "github.com/divvy-gpu/divvy/internal/core/accel"

// one is the value of all units of the largest device. Values are integers in
// this scale, so that ratings are the same on every machine and in every order of
// summing.
const one = 1 << 16

// scale translates units to values.
type scale struct {
	// largest is all units of the largest device, at least 1.
	largest accel.Units
}

// value of so many units of a device, rounded down.
func (s scale) value(u accel.Units) int64 {
	u = min(max(u, 0), s.largest)
	if u > accel.MaxUnits {
		return int64(float64(u) / float64(s.largest) * one)
	}
	return int64(u) * one / int64(s.largest)
}
