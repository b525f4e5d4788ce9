package claims

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Demand is what claims that are not allocated ask for together.
type Demand struct {
	requests []request
	// key is the same text for the same requests.
	key string
	// CPU and Memory are the peak of the pod, in millicores and MiB, for a policy that looks at them.
	CPU, Memory int64
	// Counted is true where that is all that the claims ask for. Otherwise something is left out:
	// alternatives, constraints between devices, administrative access, all devices of a node, or
	// a claim that has its devices, and with them its node.
	Counted bool
}

// request asks for equal parts of different devices.
type request struct {
	// selectors are CEL expressions, each of which a device must match. key is the same text for
	// the same expressions.
	selectors []string
	key       string
	count     int
	// amounts are of the capacities that are named.
	amounts map[resourceapi.QualifiedName]resource.Quantity
}

// DemandOf returns what claims ask for. The error is that of class, which returns a DeviceClass by
// its name.
func DemandOf(claims []*resourceapi.ResourceClaim, class func(name string) (*resourceapi.DeviceClass, error)) (Demand, error) {
	d := Demand{Counted: true}
	for _, claim := range claims {
		if claim.Status.Allocation != nil {
			d.Counted = false
			continue
		}
		if len(claim.Spec.Devices.Constraints) > 0 {
			d.Counted = false
		}
		for i := range claim.Spec.Devices.Requests {
			asked := claim.Spec.Devices.Requests[i].Exactly
			if asked == nil || asked.AllocationMode != resourceapi.DeviceAllocationModeExactCount ||
				asked.AdminAccess != nil && *asked.AdminAccess {
				d.Counted = false
				continue
			}
			of, err := class(asked.DeviceClassName)
			if err != nil {
				return Demand{}, fmt.Errorf("device class %s: %w", asked.DeviceClassName, err)
			}
			r := request{count: int(asked.Count)}
			for _, selectors := range [][]resourceapi.DeviceSelector{of.Spec.Selectors, asked.Selectors} {
				for _, s := range selectors {
					if s.CEL != nil {
						r.selectors = append(r.selectors, s.CEL.Expression)
					}
				}
			}
			r.key = strings.Join(r.selectors, "\x00")
			if asked.Capacity != nil {
				r.amounts = asked.Capacity.Requests
			}
			d.requests = append(d.requests, r)
			d.key += fmt.Sprintf("%s\x00%d", r.key, r.count)
			for _, name := range slices.Sorted(maps.Keys(r.amounts)) {
				amount := r.amounts[name]
				d.key += fmt.Sprintf("\x00%s\x00%d", name, amount.Value())
			}
			d.key += "\x01"
		}
	}
	return d, nil
}

// Empty reports whether nothing is asked for that nodes could be rated by.
func (d *Demand) Empty() bool { return len(d.requests) == 0 }

// need is how much of the device's capacity the request takes, as kube-scheduler computes it; ok is
// false where the device has not what is asked for, however little is in use.
func (r *request) need(d *device) (need int64, ok bool) {
	amount, named := r.amounts[d.capacity]
	if len(r.amounts) > 1 || len(r.amounts) == 1 && !named {
		return 0, false
	}
	asked := amount.Value()
	switch {
	case !d.shared:
		return d.total, asked <= d.total
	case !named:
		asked = d.byDefault
	default:
		asked = max(asked, d.least)
		if over := (asked - d.least) % d.step; over > 0 {
			asked += d.step - over
		}
	}
	return asked, asked <= d.most
}
