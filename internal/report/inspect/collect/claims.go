package collect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
)

// claims reads what nodes offer to ResourceClaims and what these hold, of the one node alone when one
// was asked for. What cannot be read is said and left out; nothing where no node offers anything.
func (q *question) claims(ctx context.Context) []inspect.ClaimNode {
	api := q.clients.Kubernetes.ResourceV1()
	var options metav1.ListOptions
	if q.node != "" {
		options.FieldSelector = resourceapi.ResourceSliceSelectorNodeName + "=" + q.node
	}
	var offered []*resourceapi.ResourceSlice
	err := kube.EachItem(ctx, "resource slices", options, api.ResourceSlices().List, func(obj runtime.Object) {
		if s, ok := obj.(*resourceapi.ResourceSlice); ok {
			offered = append(offered, s)
		}
	})
	offered = slices.DeleteFunc(offered, func(s *resourceapi.ResourceSlice) bool {
		return s.Spec.NodeName == nil || !wire.IsDriver(s.Spec.Driver)
	})
	var allocated []*resourceapi.ResourceClaim
	if err == nil && len(offered) > 0 {
		err = kube.EachItem(ctx, "resource claims", metav1.ListOptions{}, api.ResourceClaims(metav1.NamespaceAll).List,
			func(obj runtime.Object) {
				if c, ok := obj.(*resourceapi.ResourceClaim); ok && c.Status.Allocation != nil {
					allocated = append(allocated, c)
				}
			})
	}
	if err != nil && !apierrors.IsNotFound(err) { // the API is that of Kubernetes 1.34
		fmt.Fprintf(q.errOut, "Devices of ResourceClaims are not shown: %v.\n", err)
		return nil
	}
	return claimNodes(offered, allocated, q.claimedUnits(ctx, allocated))
}

// claimedUnits are the units of pods that became claims, by what the pods say. What cannot be read is
// said and left out.
func (q *question) claimedUnits(ctx context.Context, allocated []*resourceapi.ResourceClaim) map[kube.PodClaim]*wire.ClaimedUnits {
	if len(allocated) == 0 {
		return nil
	}
	out := map[kube.PodClaim]*wire.ClaimedUnits{}
	options := metav1.ListOptions{LabelSelector: wire.UnitsLabel + "=" + wire.UnitsAsClaims}
	err := kube.EachItem(ctx, "pods", options, q.clients.Kubernetes.CoreV1().Pods(metav1.NamespaceAll).List, func(obj runtime.Object) {
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return
		}
		all, err := wire.ClaimedUnitsOf(pod.Annotations)
		if err != nil {
			fmt.Fprintf(q.errOut, "Pod %s/%s: %v.\n", pod.Namespace, pod.Name, err)
		}
		for i := range all {
			out[kube.PodClaim{Pod: pod.UID, Name: all[i].Claim}] = &all[i]
		}
	})
	if err != nil {
		fmt.Fprintf(q.errOut, "Units that became claims are not shown: %v.\n", err)
	}
	return out
}

// claimNodes are the devices in slices and what claims hold of them. A claim of a device that no slice
// has is shown where its pool is.
func claimNodes(offered []*resourceapi.ResourceSlice, allocated []*resourceapi.ResourceClaim,
	units map[kube.PodClaim]*wire.ClaimedUnits) []inspect.ClaimNode {
	type pool struct{ driver, name string }
	nodes, nodeOf := map[string]*inspect.ClaimNode{}, map[pool]string{}
	slices.SortFunc(offered, func(a, b *resourceapi.ResourceSlice) int {
		return cmp.Or(cmp.Compare(a.Spec.Driver, b.Spec.Driver), cmp.Compare(a.Name, b.Name))
	})
	for _, s := range offered {
		name := *s.Spec.NodeName
		nodeOf[pool{s.Spec.Driver, s.Spec.Pool.Name}] = name
		for i := range s.Spec.Devices {
			n := nodes[name]
			if n == nil {
				n = &inspect.ClaimNode{Name: name}
				nodes[name] = n
			}
			n.Devices = append(n.Devices, claimDevice(s.Spec.Driver, &s.Spec.Devices[i]))
		}
	}
	for _, c := range allocated {
		results := c.Status.Allocation.Devices.Results
		for i := range results {
			r := &results[i]
			name, known := nodeOf[pool{r.Driver, r.Pool}]
			if !known {
				continue
			}
			n := nodes[name]
			if n == nil {
				n = &inspect.ClaimNode{Name: name}
				nodes[name] = n
			}
			at := slices.IndexFunc(n.Devices, func(d inspect.ClaimDevice) bool { return d.Driver == r.Driver && d.Name == r.Device })
			if at < 0 {
				at = len(n.Devices)
				n.Devices = append(n.Devices, inspect.ClaimDevice{Driver: r.Driver, Name: r.Device, Claims: []inspect.Claim{}})
			}
			claim := claimOf(c, r, &n.Devices[at])
			claim.Units = units[kube.PodClaimOf(c)]
			n.Devices[at].Claims = append(n.Devices[at].Claims, claim)
		}
	}
	var out []inspect.ClaimNode
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		n := nodes[name]
		for i := range n.Devices {
			slices.SortStableFunc(n.Devices[i].Claims, func(a, b inspect.Claim) int {
				return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
			})
		}
		out = append(out, *n)
	}
	return out
}

func claimDevice(driver string, d *resourceapi.Device) inspect.ClaimDevice {
	text := func(name resourceapi.QualifiedName) string {
		if a := d.Attributes[name]; a.StringValue != nil {
			return *a.StringValue
		}
		return ""
	}
	out := inspect.ClaimDevice{
		Driver: driver, Name: d.Name, Claims: []inspect.Claim{},
		Type: text(wire.DeviceType), UUID: accel.DeviceID(text(wire.DeviceUUID)), Model: text(wire.DeviceModel),
	}
	memory, slots := d.Capacity[wire.MemoryCapacity], d.Capacity[wire.SlotsCapacity]
	out.MemoryBytes, out.Slots = memory.Value.Value(), slots.Value.Value()
	for _, taint := range d.Taints {
		name := taint.Key
		if taint.Value != "" {
			name += "=" + taint.Value
		}
		out.Taints = append(out.Taints, name)
	}
	return out
}

func claimOf(c *resourceapi.ResourceClaim, r *resourceapi.DeviceRequestAllocationResult, d *inspect.ClaimDevice) inspect.Claim {
	out := inspect.Claim{Namespace: c.Namespace, Name: c.Name, UID: string(c.UID)}
	for _, user := range c.Status.ReservedFor {
		if user.Resource == "pods" {
			out.Pods = append(out.Pods, user.Name)
		}
	}
	memory, slots := r.ConsumedCapacity[wire.MemoryCapacity], r.ConsumedCapacity[wire.SlotsCapacity]
	switch {
	case r.AdminAccess != nil && *r.AdminAccess:
		out.Admin = true
	case r.ShareID != nil:
		out.MemoryBytes, out.Slots = memory.Value(), slots.Value()
	default: // the whole device
		out.MemoryBytes, out.Slots = d.MemoryBytes, d.Slots
	}
	return out
}
