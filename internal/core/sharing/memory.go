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
	// milli is the size in thousandths of a GB, so that all arithmetic is exact.
	milli uint64
	text  string
}

// ParseMemoryUnit reads "1", "0.1", "0.01" or "0.001", in GB of 2^30 bytes, the
// four sizes that the GCUShare guide documents (section 4.2).
func ParseMemoryUnit(s string) (MemoryUnit, error) {
	for _, u := range []MemoryUnit{{1000, "1"}, {100, "0.1"}, {10, "0.01"}, {1, "0.001"}} {
		if u.text == s {
			return u, nil
		}
	}
	return MemoryUnit{}, fmt.Errorf("memory unit %q is not known; use one of 1, 0.1, 0.01, 0.001", s)
}

// String returns the text that ParseMemoryUnit reads.
func (u MemoryUnit) String() string { return u.text }

// Units returns how many whole units memory of that many bytes holds, 0 for
// none: floor(bytes / (unit * 2^30)).
func (u MemoryUnit) Units(bytes int64) accel.Units {
	if bytes <= 0 {
		return 0
	}
	// 128 bits: bytes*1000 overflows 64 for devices of 9 PB, which a broken
	// library may well report.
	hi, lo := bits.Mul64(uint64(bytes), 1000)
	divisor := u.milli << 30
	if hi >= divisor {
		return 0
	}
	q, _ := bits.Div64(hi, lo, divisor)
	return accel.Units(q) //nolint:gosec // below 2^63*1000/2^30
}

// Bytes returns how many bytes that many units are, rounded down; 0 for none.
func (u MemoryUnit) Bytes(n accel.Units) uint64 {
	if n <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(n), u.milli<<30)
	if hi >= 1000 {
		return math.MaxUint64
	}
	q, _ := bits.Div64(hi, lo, 1000)
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
