// Package sharing turns devices into the units that kubelet counts, and back:
// how many units a device has, which ids they carry, and which units a
// container gets.
//
// Everything here is a pure function or a value.
package sharing

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// MemoryUnit is the size of one unit of memory sharing. The zero value is not
// valid; ParseMemoryUnit makes one.
type MemoryUnit struct {
	// milli is the size in thousandths of a GB, so that all arithmetic is exact; 0 if
	// the size is a part of the device.
	milli uint64
	// parts is how many units each device has, whatever its memory; 0 for a size in GB.
	parts uint64
	text  string
}

// ParseMemoryUnit reads "1", "0.1", "0.01" or "0.001", in GB of 2^30 bytes, the
// four sizes that the GCUShare guide documents (section 4.2), or "1/6", a sixth of
// each device, which later releases of GCUShare have.
func ParseMemoryUnit(s string) (MemoryUnit, error) {
	for _, u := range []MemoryUnit{{1000, 0, "1"}, {100, 0, "0.1"}, {10, 0, "0.01"}, {1, 0, "0.001"}, {0, 6, "1/6"}} {
		if u.text == s {
			return u, nil
		}
	}
	return MemoryUnit{}, fmt.Errorf("memory unit %q is not known; use one of 1, 0.1, 0.01, 0.001, 1/6", s)
}

// String returns the text that ParseMemoryUnit reads.
func (u MemoryUnit) String() string { return u.text }

// size is that of one unit of a device with that many bytes of memory: bytes/per.
func (u MemoryUnit) size(memory int64) (bytes, per uint64) {
	if u.parts > 0 {
		return uint64(max(memory, 0)), u.parts
	}
	return u.milli << 30, 1000
}

// Units returns how many whole units a device with that many bytes of memory has, 0 for
// none: floor(memory / unit).
func (u MemoryUnit) Units(memory int64) accel.Units {
	bytes, per := u.size(memory)
	units, _ := scale(uint64(max(memory, 0)), per, bytes)
	return units
}

// Holding returns the fewest units of a device with that much memory that hold so many
// bytes.
func (u MemoryUnit) Holding(bytes uint64, memory int64) accel.Units {
	size, per := u.size(memory)
	units, rest := scale(bytes, per, size)
	if rest > 0 {
		units++
	}
	return units
}

// scale returns n*by/of in whole units, and what is left over; none for a divisor of 0, and for a
// quotient of more than 64 bits.
func scale(n, by, of uint64) (units accel.Units, rest uint64) {
	// 128 bits: bytes*1000 overflows 64 for devices of 9 PB, which a broken
	// library may well report.
	hi, lo := bits.Mul64(n, by)
	if hi >= of {
		return 0, 0
	}
	q, rest := bits.Div64(hi, lo, of)
	return accel.Units(min(q, math.MaxInt64-1)), rest
}

// Bytes returns how many bytes that many units of a device with that much memory are,
// rounded down; 0 for none.
func (u MemoryUnit) Bytes(n accel.Units, memory int64) uint64 {
	if n <= 0 {
		return 0
	}
	bytes, per := u.size(memory)
	hi, lo := bits.Mul64(uint64(n), bytes)
	if hi >= per {
		return math.MaxUint64
	}
	q, _ := bits.Div64(hi, lo, per)
	return q
}

// Cut returns the shares of a resource that counts device memory in units of u.
func Cut(devices []accel.Device, u MemoryUnit) []accel.Share {
	out := make([]accel.Share, 0, len(devices))
	for _, d := range devices {
		out = append(out, accel.Share{Device: d, Units: u.Units(d.MemoryBytes)})
	}
	return out
}
