package dra

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// maxCounters is how many chips devices can have that overlap.
const maxCounters = resourceapi.ResourceSliceMaxCountersPerCounterSet

// counters makes devices that have a chip in common exclude each other: each such group
// has a set with a counter of 1 for each chip, and each of its devices draws on those of its
// chips. A device that claims share draws once, with the first of them.
//
// It returns the devices, without those that cannot be made to exclude each other, the sets
// by name, and what each device draws by its name.
func counters(devices []alloc.ClaimDevice) ([]alloc.ClaimDevice, map[string]resourceapi.CounterSet,
	map[string]resourceapi.DeviceCounterConsumption) {
	sets, drawn := map[string]resourceapi.CounterSet{}, map[string]resourceapi.DeviceCounterConsumption{}
	dropped := map[string]bool{}
	for _, group := range overlapping(devices) {
		if len(group) < 2 {
			continue
		}
		var chips []accel.DeviceID
		for _, d := range group {
			chips = append(chips, d.Card.Chips...)
		}
		slices.Sort(chips)
		chips = slices.Compact(chips)
		if len(chips) > maxCounters {
			kept := apart(group)
			for _, d := range group {
				dropped[d.Name] = !slices.ContainsFunc(kept, func(k alloc.ClaimDevice) bool { return k.Name == d.Name })
			}
			continue
		}
		// The first of a group is always there while the group is.
		set := group[0].Name
		draw := func(some []accel.DeviceID) map[string]resourceapi.Counter {
			out, one := map[string]resourceapi.Counter{}, resourceapi.Counter{Value: *resource.NewQuantity(1, resource.DecimalSI)}
			for _, chip := range some {
				out[fmt.Sprintf("chip%d", slices.Index(chips, chip))] = one
			}
			return out
		}
		sets[set] = resourceapi.CounterSet{Name: set, Counters: draw(chips)}
		for _, d := range group {
			drawn[d.Name] = resourceapi.DeviceCounterConsumption{CounterSet: set, Counters: draw(d.Card.Chips)}
		}
	}
	return slices.DeleteFunc(devices, func(d alloc.ClaimDevice) bool { return dropped[d.Name] }), sets, drawn
}

// overlapping divides devices into groups of which none has a chip in common with another,
// in the order of the devices.
func overlapping(devices []alloc.ClaimDevice) [][]alloc.ClaimDevice {
	var groups [][]alloc.ClaimDevice
	for i := range devices {
		d := &devices[i]
		mine := []alloc.ClaimDevice{*d}
		var others [][]alloc.ClaimDevice
		for _, g := range groups {
			if slices.ContainsFunc(g, func(o alloc.ClaimDevice) bool { return d.Overlaps(&o) }) {
				mine = slices.Concat(g, mine)
			} else {
				others = append(others, g)
			}
		}
		others = append(others, mine)
		groups = others
	}
	return groups
}
