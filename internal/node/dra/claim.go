package dra

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// Read returns what was allocated to a claim of a vendor's devices in the pool of this node.
// An error says what of the claim cannot be served here, whatever is free.
func Read(claim *resourceapi.ResourceClaim, vendor, pool string) (alloc.Claim, error) {
	out := alloc.Claim{Vendor: vendor, UID: string(claim.UID), Namespace: claim.Namespace, Name: claim.Name}
	allocation, driver := claim.Status.Allocation, wire.Driver(vendor)
	if allocation == nil {
		return out, fmt.Errorf("claim %s/%s has no allocation", claim.Namespace, claim.Name)
	}
	for _, c := range allocation.Devices.Config {
		if c.Opaque != nil && c.Opaque.Driver == driver {
			return out, fmt.Errorf("claim %s/%s has a configuration for driver %s, which takes none; remove it from the claim or "+
				"its device class", claim.Namespace, claim.Name, driver)
		}
	}
	for i := range allocation.Devices.Results {
		r := &allocation.Devices.Results[i]
		if r.Driver != driver {
			continue
		}
		if r.Pool != pool {
			return out, fmt.Errorf("claim %s/%s has device %s of pool %s, and the pool of this node is %s", claim.Namespace,
				claim.Name, r.Device, r.Pool, pool)
		}
		part, err := readPart(r)
		if err != nil {
			return out, fmt.Errorf("claim %s/%s, request %s: %w", claim.Namespace, claim.Name, r.Request, err)
		}
		out.Parts = append(out.Parts, part)
	}
	for _, user := range claim.Status.ReservedFor {
		if user.APIGroup == "" && user.Resource == "pods" {
			out.Pods = append(out.Pods, string(user.UID))
		}
	}
	slices.Sort(out.Pods)
	return out, nil
}

// readPart returns what a claim has of one device.
func readPart(r *resourceapi.DeviceRequestAllocationResult) (alloc.ClaimPart, error) {
	part := alloc.ClaimPart{Request: r.Request, Device: r.Device, Admin: r.AdminAccess != nil && *r.AdminAccess}
	if r.ShareID != nil {
		part.Share = string(*r.ShareID)
	}
	if part.Admin {
		return part, nil // it uses up nothing, and whatever the device is like
	}
	for name, amount := range r.ConsumedCapacity {
		n, whole := amount.AsInt64()
		if !whole || n <= 0 {
			return part, fmt.Errorf("%s of %s of device %s cannot be allocated; a whole number above 0 can", amount.String(), name,
				r.Device)
		}
		switch name {
		case wire.MemoryCapacity:
			part.Bytes = n
		case wire.SlotsCapacity:
			part.Slots = int(min(n, 1<<30))
		default:
			return part, fmt.Errorf("device %s has no capacity %q", r.Device, name)
		}
	}
	unhealthy := resourceapi.DeviceTaint{Key: UnhealthyTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule}
	part.Ill = slices.ContainsFunc(r.Tolerations, func(t resourceapi.DeviceToleration) bool {
		t.Value, t.Operator = "", resourceapi.DeviceTolerationOpExists // whatever the cause is now
		return resourceclaim.ToleratesTaint(t, unhealthy)
	})
	return part, nil
}
