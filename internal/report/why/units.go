package why

import (
	"math"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// unitOf is the size of one unit of a resource, "" where nodes differ or none offers it.
func (w *world) unitOf(r accel.Resource) string {
	unit := ""
	for _, n := range w.nodes {
		in := n.inventory(r)
		switch {
		case in == nil:
		case unit != "" && unit != in.Unit:
			return ""
		default:
			unit = in.Unit
		}
	}
	return unit
}

// leastMebibytes is the least request that is taken for MiB.
const leastMebibytes = 1024

// mebibytes returns the units of a request that was written in MiB, 0 where it was not,
// and the units of the largest device.
func (w *world) mebibytes(a *ask) (units, largest accel.Units) {
	r := a.shared
	unit, err := sharing.ParseMemoryUnit(w.unitOf(r.Resource))
	if err != nil || a.mistake != nil || r.Peak() > math.MaxInt64>>20 {
		return 0, 0
	}
	var memory int64 // of the largest device
	for _, n := range w.nodes {
		if in := n.inventory(r.Resource); in != nil {
			for _, s := range in.Shares {
				if s.Units > largest {
					largest, memory = s.Units, s.MemoryBytes
				}
			}
		}
	}
	units = unit.Holding(uint64(r.Peak())<<20, memory) //nolint:gosec // not below 0
	k := accel.Units(max(r.Devices, 1))
	if units = (units + k - 1) / k * k; r.Peak() < leastMebibytes || r.Peak()/k <= largest || units/k > largest {
		return 0, largest
	}
	return units, largest
}
