package wire

import (
	"slices"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// IsLegacyAnnotation reports whether key is one that LegacyAnnotations may write.
// Scripts read those annotations. No program of Divvy decides by them, because
// every user may write them too.
func IsLegacyAnnotation(key string) bool {
	return slices.ContainsFunc(accel.Vendors, func(v accel.Vendor) bool {
		return v.LegacyPrefix != "" && strings.HasPrefix(key, v.LegacyPrefix)
	})
}

// LegacyAnnotations returns the five annotations of the grant's resource that
// older systems wrote, or nil for a resource that had none:
//
//	<prefix>id              the device's index on its node
//	<prefix>memory          all units of the device
//	<prefix>memory-request  the pod's units
//	<prefix>assigned        "true" once the node confirmed the grant
//	<prefix>assign-time     Unix time in ns at which the device was chosen
//
// Of several devices, which older systems did not give, id lists the indexes
// joined by commas and memory is the sum.
func LegacyAnnotations(g accel.Grant) map[string]string {
	v := accel.VendorOfMemory(g.Resource)
	if v == nil || v.LegacyPrefix == "" {
		return nil
	}
	prefix := v.LegacyPrefix
	ids, memory := strconv.Itoa(g.Index), g.DeviceUnits
	for _, d := range g.More {
		ids += "," + strconv.Itoa(d.Index)
		memory += d.DeviceUnits
	}
	var ns int64
	if !g.At.IsZero() { // the zero time is outside the range of UnixNano
		ns = g.At.UnixNano()
	}
	return map[string]string{
		prefix + "id":             ids,
		prefix + "memory":         strconv.FormatInt(int64(memory), 10),
		prefix + "memory-request": strconv.FormatInt(int64(g.Units), 10),
		prefix + "assigned":       strconv.FormatBool(g.Confirmed),
		prefix + "assign-time":    strconv.FormatInt(ns, 10),
	}
}
