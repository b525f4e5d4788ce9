package claimreview

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// CheckDevices returns what of a claim at the path can never be served, or means something else than
// it says: parameters for a driver of Divvy's, and amounts of memory or time slices that no device has.
func CheckDevices(at *field.Path, devices *resourceapi.DeviceClaim) error {
	var errs field.ErrorList
	for i, config := range devices.Config {
		if config.Opaque != nil && wire.IsDriver(config.Opaque.Driver) {
			errs = append(errs, field.Forbidden(at.Child("config").Index(i).Child("opaque"),
				fmt.Sprintf("driver %s takes no parameters; remove this entry", config.Opaque.Driver)))
		}
	}
	for path, r := range requestsOf(at, devices) {
		if vendorOf(r.class) == "" {
			continue
		}
		if r.capacity == nil {
			continue
		}
		for name, amount := range r.capacity.Requests {
			key := path.Child("capacity", "requests").Key(string(name))
			n, whole := amount.AsInt64()
			// kube-scheduler compares names as they are written, and nodes publish them without a domain.
			switch string(name) {
			case wire.MemoryCapacity:
				if mib := (n + wire.MemoryStep - 1) / wire.MemoryStep; n > 0 && n%wire.MemoryStep != 0 {
					errs = append(errs, field.Invalid(key, amount.String(),
						fmt.Sprintf("must be a multiple of 1Mi (2^20 bytes); the next is %dMi", mib)))
				}
				if !whole || n <= 0 {
					errs = append(errs, field.Invalid(key, amount.String(), "must be at least 1Mi and a whole number of MiB, such as 10Gi"))
				}
			case wire.SlotsCapacity:
				if !whole || n <= 0 {
					errs = append(errs, field.Invalid(key, amount.String(), "must be a whole number of time slices, at least 1"))
				}
			default:
				errs = append(errs, field.NotSupported(key, string(name), []string{wire.MemoryCapacity, wire.SlotsCapacity}))
			}
		}
	}
	return errs.ToAggregate()
}

// deviceRequest is a request of a claim, or one of the alternatives of a request.
type deviceRequest struct {
	// name is that of the request, of an alternative that of the request it belongs to.
	name, class string
	capacity    *resourceapi.CapacityRequirements
	mode        resourceapi.DeviceAllocationMode
	count       int64
	admin       bool
}

// requestsOf returns the requests of a claim at the path, each with its own.
func requestsOf(at *field.Path, devices *resourceapi.DeviceClaim) func(func(*field.Path, deviceRequest) bool) {
	return func(yield func(*field.Path, deviceRequest) bool) {
		for i := range devices.Requests {
			r := &devices.Requests[i]
			path := at.Child("requests").Index(i)
			if e := r.Exactly; e != nil {
				one := deviceRequest{r.Name, e.DeviceClassName, e.Capacity, e.AllocationMode, e.Count,
					e.AdminAccess != nil && *e.AdminAccess}
				if !yield(path.Child("exactly"), one) {
					return
				}
			}
			for j := range r.FirstAvailable {
				s := &r.FirstAvailable[j]
				one := deviceRequest{r.Name, s.DeviceClassName, s.Capacity, s.AllocationMode, s.Count, false}
				if !yield(path.Child("firstAvailable").Index(j), one) {
					return
				}
			}
		}
	}
}

// CheckContainers returns which containers have both a claim of a vendor's devices and units of their
// memory: the container would have two devices where the vendor's software reads one variable. find
// returns the devices of a claim of the pod, nil if they are not known.
func CheckContainers(pod *corev1.Pod, units []Unit, find func(corev1.PodResourceClaim) *resourceapi.DeviceClaim) error {
	var errs field.ErrorList
	claimed := map[string]*resourceapi.DeviceClaim{}
	for path, c := range containers(&pod.Spec) {
		for _, u := range units {
			amount, ok := c.Resources.Limits[corev1.ResourceName(u.Resource)]
			if !ok {
				amount = c.Resources.Requests[corev1.ResourceName(u.Resource)]
			}
			if amount.Sign() <= 0 {
				continue
			}
			for i, used := range c.Resources.Claims {
				devices, known := claimed[used.Name]
				if !known {
					for _, claim := range pod.Spec.ResourceClaims {
						if claim.Name == used.Name {
							devices = find(claim)
						}
					}
					claimed[used.Name] = devices
				}
				if class := classOf(devices, used.Request, u.Vendor); class != "" {
					errs = append(errs, field.Forbidden(path.Child("resources", "claims").Index(i), fmt.Sprintf(
						"container %s has both a claim (%s, class %s) and units (%s) for one device of %s; remove one of the two",
						c.Name, used.Name, class, u.Resource, accel.VendorNamed(u.Vendor).Brand)))
				}
			}
		}
	}
	return errs.ToAggregate()
}

// classOf returns the class of the vendor's devices in a request of a claim, or in any if its name is
// empty, "" if there is none.
func classOf(devices *resourceapi.DeviceClaim, request, vendor string) string {
	if devices == nil {
		return ""
	}
	for _, r := range requestsOf(nil, devices) {
		if (request == "" || r.name == request) && vendorOf(r.class) == vendor {
			return r.class
		}
	}
	return ""
}

// hasMemory reports whether the devices of a class of Divvy's are counted by their memory: those that
// are not time slices or partitions, which have their own names.
func hasMemory(class string) bool {
	kind, _, _ := strings.Cut(class, ".")
	vendor := accel.VendorNamed(vendorOf(class))
	return vendor != nil && kind != vendor.PartitionBackend && !strings.HasSuffix(kind, "slots")
}
