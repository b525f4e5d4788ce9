package claimreview

import (
	"fmt"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// mibPerGiB and partsPerGiB: the first is what claims are counted in, the second how many units of
// each size a GiB has.
const mibPerGiB = (1 << 30) / wire.MemoryStep

var partsPerGiB = map[string]int64{"1": 1, "0.1": 10, "0.01": 100, "0.001": 1000}

// Unit is a resource of units of memory that claims can stand for.
type Unit struct {
	Resource accel.Resource
	// Vendor is the name of the vendor of the devices.
	Vendor string
	// Size is that of a unit in GB of 2^30 bytes, such as "0.1".
	Size string
}

// ParseUnit reads "resource=vendor:size", such as "enflame.com/gcu-memory=enflame:0.1".
func ParseUnit(text string) (Unit, error) {
	resource, rest, _ := strings.Cut(text, "=")
	vendor, size, _ := strings.Cut(rest, ":")
	u := Unit{accel.Resource(resource), vendor, size}
	switch {
	case accel.VendorNamed(vendor) == nil:
		return u, fmt.Errorf("%q: vendor %q is not known; use resource=vendor:size with one of %s", text, vendor,
			strings.Join(accel.VendorNames(), ", "))
	case partsPerGiB[size] == 0:
		return u, fmt.Errorf("%q: a unit of %q GB is not a fixed amount of memory; use one of 1, 0.1, 0.01, 0.001", text, size)
	}
	return u, nil
}

// MiB is the memory of so many units, rounded up to what claims are counted in.
func (u Unit) MiB(units accel.Units) int64 {
	parts := partsPerGiB[u.Size]
	return (int64(units)*mibPerGiB + parts - 1) / parts
}

// Units is how many units a claim of so much memory counts as: the fewest that have it.
func (u Unit) Units(mib int64) int64 {
	// The inverse of MiB, which rounds up: the units whose memory begins in the last MiB still count.
	parts := partsPerGiB[u.Size]
	n := mib * parts / mibPerGiB
	for u.MiB(accel.Units(n)) < mib {
		n++
	}
	for n > 0 && u.MiB(accel.Units(n-1)) >= mib {
		n--
	}
	return n
}

// Class is the DeviceClass of the devices whose memory the units are.
func (u Unit) Class() string {
	return accel.VendorNamed(u.Vendor).DeviceType + "." + wire.Driver(u.Vendor)
}

// vendorOf returns the vendor whose devices a class of Divvy's selects, "" for another class.
func vendorOf(class string) string {
	for _, vendor := range accel.VendorNames() {
		if strings.HasSuffix(class, "."+wire.Driver(vendor)) {
			return vendor
		}
	}
	return ""
}
