package wire

import (
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// UsageReport is what is in use of a node's devices, as one pass found it: what
// "divvy-node usage" prints in JSON and "kubectl divvy inspect --usage" reads.
type UsageReport struct {
	Node string `json:"node"`
	// Time is when the pass ended.
	Time time.Time `json:"time"`
	// Devices are in ascending order of vendor and index.
	Devices []DeviceUsage `json:"devices"`
}

// DeviceUsage is what is in use of one device. Amounts are bytes of device memory.
type DeviceUsage struct {
	Vendor string         `json:"vendor"`
	Device accel.DeviceID `json:"device"`
	Index  int            `json:"index"`
	// Problem is why nothing is known of the device, "" if the rest holds.
	Problem string `json:"problem,omitempty"`
	// MemoryBytes is the memory of the device, UsedBytes what is in use of it.
	MemoryBytes uint64 `json:"memoryBytes"`
	UsedBytes   uint64 `json:"usedBytes"`
	// LeastProcessBytes is the least memory that a process of a container uses that started at
	// least a minute ago, in a pod that holds something of the device: the context that each
	// process has is not larger. It is nil if there is no such process.
	LeastProcessBytes *uint64 `json:"leastProcessBytes,omitempty"`
	// Containers hold something of the device, in ascending order of their names.
	Containers []ContainerUsage `json:"containers,omitempty"`
	// SystemBytes are used by processes outside of pods, ForeignBytes by pods that hold
	// nothing of the device, and UnknownBytes by processes whose container or use is not known
	// and by the driver.
	SystemBytes  uint64 `json:"systemBytes"`
	ForeignBytes uint64 `json:"foreignBytes"`
	UnknownBytes uint64 `json:"unknownBytes"`
}

// SumKnown returns a+b, nil if one of them is nil, which stands for an unknown amount.
func SumKnown(a, b *uint64) *uint64 {
	if a == nil || b == nil {
		return nil
	}
	return new(*a + *b)
}

// ContainerUsage is what a container holds of a device, and what it uses.
type ContainerUsage struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// PodUID is the UID in the names of the pod's control groups: of a static pod, the hash of
	// its manifest.
	PodUID string `json:"podUID,omitempty"`
	// Container is "" for processes of which only the pod is known.
	Container string         `json:"container,omitempty"`
	Resource  accel.Resource `json:"resource"`
	// AllocatedBytes is what the container holds; nil if it has the device whole or by
	// time slices, which bounds no memory, and without Container.
	AllocatedBytes *uint64 `json:"allocatedBytes,omitempty"`
	// UsedBytes is what its processes use; nil if the vendor's library does not know that
	// of one of them.
	UsedBytes *uint64 `json:"usedBytes,omitempty"`
	// Utilization is the part of the device's compute time that its processes had lately,
	// from 0 to 1; nil if the library does not know that.
	Utilization *float64 `json:"utilization,omitempty"`
	// Processes is how many use the device.
	Processes int `json:"processes"`
}
