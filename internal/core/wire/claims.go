package wire

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// What the node's DRA drivers publish of a device in a ResourceSlice, and reports read there.
const (
	// DeviceType, DeviceUUID and DeviceModel are attributes that every device has.
	DeviceType  = "type"
	DeviceUUID  = "uuid"
	DeviceModel = "model"
	// MemoryCapacity is the device memory in bytes, and SlotsCapacity the time slices.
	MemoryCapacity = "memory"
	SlotsCapacity  = "slots"
	// DeviceIsolation is the tier of the device's memory.
	DeviceIsolation = "isolation"
)

// MemoryStep is what a claim's memory is rounded up to, in bytes. It is a whole number of
// bytes, since kube-scheduler computes without fractions of one.
const MemoryStep = int64(1) << 20

// UnitsLabel is on namespaces whose pods get claims in place of units of memory, if its value is
// UnitsAsClaims, and then on those pods and on the templates of their claims.
const (
	UnitsLabel    = "divvy.dev/memory-units"
	UnitsAsClaims = "claims"
)

// UnitsAnnotation says which units of a pod became which claims: a JSON list of ClaimedUnits, each with
// the devices that the claim requests.
const UnitsAnnotation = "divvy.dev/units-as-claims"

// ClaimedUnits are the units of a resource that became a claim of a pod.
type ClaimedUnits struct {
	Resource accel.Resource `json:"resource"`
	// Unit is the size of a unit in GB.
	Unit string `json:"unit"`
	// Containers are those that requested units, in the order of their start.
	Containers []ClaimedContainer `json:"containers"`
	// Claim is the name in the pod's spec.resourceClaims, and Template that of the
	// ResourceClaimTemplate.
	Claim    string `json:"claim"`
	Template string `json:"template"`
}

// ClaimedContainer is a container, the units that it requested, and the request of the claim that it uses.
type ClaimedContainer struct {
	Name    string      `json:"name"`
	Units   accel.Units `json:"units"`
	Request string      `json:"request"`
}

// String returns the resource with the containers and their units, for people.
func (c ClaimedUnits) String() string {
	containers := make([]string, len(c.Containers))
	for i, one := range c.Containers {
		containers[i] = fmt.Sprintf("%s %d", one.Name, one.Units)
	}
	return string(c.Resource) + ": " + strings.Join(containers, ", ")
}

// ClaimedUnitsOf reads UnitsAnnotation; nil for a pod without it. Any user may have written it.
func ClaimedUnitsOf(annotations map[string]string) ([]ClaimedUnits, error) {
	text, ok := annotations[UnitsAnnotation]
	if !ok {
		return nil, nil
	}
	var all []ClaimedUnits
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", UnitsAnnotation, err)
	}
	return all, nil
}

const driverDomain = ".divvy.dev"

// Driver is the name of a vendor's DRA driver, which is also the domain of its attributes.
func Driver(vendor string) string { return vendor + driverDomain }

// IsDriver reports whether a name is that of a DRA driver of Divvy's.
func IsDriver(name string) bool { return strings.HasSuffix(name, driverDomain) }

// PathLabel is on nodes that serve ResourceClaims: their allocationPath.
const PathLabel = "divvy.dev/allocation-path"
