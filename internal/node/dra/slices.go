package dra

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// The names that claims and device classes use.
const (
	// UnhealthyTaint is on devices that take no new claims until they recover; its value
	// is the cause. InUseTaint is on those that containers have without claims.
	UnhealthyTaint = "divvy.dev/unhealthy"
	InUseTaint     = "divvy.dev/in-use-by-plugin"
)

// The limits of a ResourceSlice (k8s.io/api/resource/v1). A slice of which a device has
// a taint or draws on counters has at most maxDevices; any device may get a taint.
const (
	maxDevices     = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	maxCounterSets = resourceapi.ResourceSliceMaxCounterSets
	maxPoolName    = resourceapi.PoolNameMaxLength
)

// PoolName is the name of the pool of a node's devices of a vendor. It differs between
// vendors: kube-scheduler before 1.37 mixes up the counters of pools of one name. A node
// whose name is too long for it has a hash in its place.
func PoolName(node, vendor string) string {
	if name := node + "/" + vendor; len(name) <= maxPoolName {
		return name
	}
	return fmt.Sprintf("%x", sha256.Sum256([]byte(node))) + "/" + vendor
}

// Stored says which fields of a ResourceSlice the API server keeps, by its feature gates.
// Fields that it drops must not be what keeps two claims off one device.
type Stored struct {
	// Counters are kept with DRAPartitionableDevices. Without them overlapping devices
	// would look independent, so one of them is published: that of the first resource of
	// the configuration.
	Counters bool
	// Taints are kept with DRADeviceTaints. Without them, a device that must not be
	// allocated is left out.
	Taints bool
	// Shares are kept with DRAConsumableCapacity. Without them, a claim gets a device whole, and what
	// the API server drops is left out: it would be written again with every change.
	Shares bool
}

// Facts are what is known of a vendor's devices beside the devices themselves.
type Facts struct {
	// Driver is the version of the vendor's driver, "" if it is not known.
	Driver string
	Links  []accel.Link
	// PCIeRoots are the PCIe root complexes ("pci0000:00") by PCI address, as far as they
	// are known.
	PCIeRoots map[string]string
}

// Pool describes the devices of a vendor in slices, in the order in which kube-scheduler
// tries them.
func Pool(vendor string, devices []alloc.ClaimDevice, facts Facts, stored Stored) resourceslice.Pool {
	sets := map[string]resourceapi.CounterSet{}
	var drawn map[string]resourceapi.DeviceCounterConsumption
	if devices = allocatable(devices, stored); stored.Counters {
		devices, sets, drawn = counters(devices)
	} else {
		devices = apart(devices)
	}
	groups := linkGroups(devices, facts.Links)
	var pool resourceslice.Pool
	for chunk := range slices.Chunk(devices, maxDevices) {
		var s resourceslice.Slice
		// Each slice for itself: kube-scheduler allocates nothing of a pool while two are rewritten.
		slices.SortStableFunc(chunk, func(a, b alloc.ClaimDevice) int { return cmp.Compare(place(&a), place(&b)) })
		for i := range chunk {
			d := &chunk[i]
			one := resourceapi.Device{
				Name: d.Name, Attributes: attributes(vendor, d, facts, groups), Capacity: capacity(d, stored), Taints: taints(d),
			}
			if isShared(d) && stored.Shares {
				one.AllowMultipleAllocations = new(true)
			}
			if c, ok := drawn[d.Name]; ok {
				one.ConsumesCounters = []resourceapi.DeviceCounterConsumption{c}
			}
			s.Devices = append(s.Devices, one)
		}
		pool.Slices = append(pool.Slices, s)
	}
	for chunk := range slices.Chunk(slices.Sorted(maps.Keys(sets)), maxCounterSets) {
		var s resourceslice.Slice
		for _, name := range chunk {
			s.SharedCounters = append(s.SharedCounters, sets[name])
		}
		pool.Slices = append(pool.Slices, s)
	}
	if len(pool.Slices) == 0 {
		pool.Slices = []resourceslice.Slice{{}} // there is a driver, and no device
	}
	return pool
}

// place is where a device stands among those of its slice, which kube-scheduler tries in their order: the
// most used first where devices are to be filled, the least used first otherwise.
func place(d *alloc.ClaimDevice) float64 {
	if d.Packed {
		return -d.Used
	}
	return d.Used
}

// allocatable returns the devices that kube-scheduler may see.
func allocatable(devices []alloc.ClaimDevice, stored Stored) []alloc.ClaimDevice {
	return slices.DeleteFunc(slices.Clone(devices), func(d alloc.ClaimDevice) bool {
		return !stored.Taints && len(taints(&d)) > 0
	})
}

// apart returns devices that have no chip in common, those of the lowest ranks.
func apart(devices []alloc.ClaimDevice) []alloc.ClaimDevice {
	byRank := slices.Clone(devices)
	slices.SortStableFunc(byRank, func(a, b alloc.ClaimDevice) int { return a.Rank - b.Rank })
	taken, kept := map[accel.DeviceID]bool{}, map[string]bool{}
	for i := range byRank {
		d := &byRank[i]
		if slices.ContainsFunc(d.Card.Chips, func(chip accel.DeviceID) bool { return taken[chip] }) {
			continue
		}
		kept[d.Name] = true
		for _, chip := range d.Card.Chips {
			taken[chip] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(devices), func(d alloc.ClaimDevice) bool { return !kept[d.Name] })
}

// taints are why a device takes no new claims.
func taints(d *alloc.ClaimDevice) []resourceapi.DeviceTaint {
	var out []resourceapi.DeviceTaint
	if d.Card.Health.Unhealthy {
		out = append(out, resourceapi.DeviceTaint{Key: UnhealthyTaint, Value: labelValue(d.Card.Health.Cause),
			Effect: resourceapi.DeviceTaintEffectNoSchedule})
	}
	if d.Elsewhere != "" {
		out = append(out, resourceapi.DeviceTaint{Key: InUseTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule})
	}
	return out
}

// isShared reports whether several claims may have parts of a device. A capacity policy
// needs two steps at least.
func isShared(d *alloc.ClaimDevice) bool {
	return d.Slots > 1 || d.Shared && d.Card.MemoryBytes >= 2*wire.MemoryStep
}

// capacity is what claims may ask for of a device. A claim that does not say how much
// memory it needs gets all of it: there is no maximum, and the default is the total.
func capacity(d *alloc.ClaimDevice, stored Stored) map[resourceapi.QualifiedName]resourceapi.DeviceCapacity {
	if d.Slots > 0 {
		slots := shared(int64(d.Slots), 1, 1, resource.DecimalSI)
		if !stored.Shares {
			slots.RequestPolicy = nil
		}
		return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.SlotsCapacity: slots}
	}
	total := d.Card.MemoryBytes - d.Card.MemoryBytes%wire.MemoryStep
	memory := resourceapi.DeviceCapacity{Value: *resource.NewQuantity(total, resource.BinarySI)}
	if isShared(d) && stored.Shares {
		memory = shared(total, total, wire.MemoryStep, resource.BinarySI)
	}
	return map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.MemoryCapacity: memory}
}

// shared is a capacity of which claims get whole steps.
func shared(value, byDefault, step int64, format resource.Format) resourceapi.DeviceCapacity {
	quantity := func(n int64) *resource.Quantity { return resource.NewQuantity(n, format) }
	return resourceapi.DeviceCapacity{Value: *quantity(value), RequestPolicy: &resourceapi.CapacityRequestPolicy{
		Default: quantity(byDefault), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity(step), Step: quantity(step)},
	}}
}
