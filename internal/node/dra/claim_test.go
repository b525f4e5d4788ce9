package dra

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

const pool = "node/nvidia"

type (
	allocated  = resourceapi.DeviceRequestAllocationResult
	configured = resourceapi.DeviceAllocationConfiguration
)

// result is an allocated device.
func result(change func(*allocated)) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: "nvidia.divvy.dev", Pool: pool, Device: "gpu-0"}
	if change != nil {
		change(&r)
	}
	return r
}

func amount(name resourceapi.QualifiedName, quantity string) func(*allocated) {
	return func(r *allocated) {
		r.ShareID = ptr.To(types.UID("share"))
		r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{name: resource.MustParse(quantity)}
	}
}

func tolerates(t resourceapi.DeviceToleration) func(*allocated) {
	return func(r *allocated) { r.Tolerations = []resourceapi.DeviceToleration{t} }
}

func TestRead(t *testing.T) {
	part := func(p alloc.ClaimPart) []alloc.ClaimPart {
		p.Request, p.Device = "r", "gpu-0"
		return []alloc.ClaimPart{p}
	}
	foreign := func(r *allocated) { r.Driver = "gpu.nvidia.com" }
	opaque := func(driver string) resourceapi.DeviceAllocationConfiguration {
		return resourceapi.DeviceAllocationConfiguration{DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: driver}}}
	}
	tests := map[string]struct {
		results []allocated
		config  []configured
		want    []alloc.ClaimPart
		err     string
	}{
		"whole": {[]allocated{result(nil)}, nil, part(alloc.ClaimPart{}), ""},
		"memory": {[]allocated{result(amount("memory", "10Gi"))},
			nil, part(alloc.ClaimPart{Share: "share", Bytes: 10 * gib}), ""},
		"slots": {[]allocated{result(amount("slots", "2"))}, nil, part(alloc.ClaimPart{Share: "share", Slots: 2}), ""},
		"other drivers": {[]allocated{result(foreign), result(nil)},
			[]configured{opaque("gpu.nvidia.com")}, part(alloc.ClaimPart{}), ""},
		"admin": {[]allocated{result(func(r *allocated) { r.AdminAccess = ptr.To(true) })},
			nil, part(alloc.ClaimPart{Admin: true}), ""},
		"tolerates all": {[]allocated{result(tolerates(resourceapi.DeviceToleration{Operator: "Exists"}))},
			nil, part(alloc.ClaimPart{Ill: true}), ""},
		"tolerates ours": {
			[]allocated{result(tolerates(resourceapi.DeviceToleration{Key: UnhealthyTaint, Operator: "Equal", Value: "ecc"}))},
			nil, part(alloc.ClaimPart{Ill: true}), ""},
		"tolerates else": {[]allocated{result(tolerates(resourceapi.DeviceToleration{Key: InUseTaint, Operator: "Exists"}))},
			nil, part(alloc.ClaimPart{}), ""},
		"another pool": {[]allocated{result(func(r *allocated) { r.Pool = "other/nvidia" })},
			nil, nil, "device gpu-0 of pool other/nvidia, and the pool of this node is node/nvidia"},
		"parameters": {[]allocated{result(nil)},
			[]configured{opaque("nvidia.divvy.dev")}, nil, "has a configuration for driver nvidia.divvy.dev, which takes none"},
		"a fraction":    {[]allocated{result(amount("memory", "0.5"))}, nil, nil, "500m of memory of device gpu-0 cannot be allocated"},
		"nothing of it": {[]allocated{result(amount("memory", "0"))}, nil, nil, "0 of memory of device gpu-0 cannot be allocated"},
		"cores":         {[]allocated{result(amount("cores", "10"))}, nil, nil, `device gpu-0 has no capacity "cores"`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c", UID: "uid"}}
			claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
				{Resource: "pods", UID: "b"}, {Resource: "pods", UID: "a"}, {APIGroup: "example.com", Resource: "jobs", UID: "j"}}
			claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: tt.results,
				Config: tt.config}}
			got, err := Read(claim, "nvidia", pool)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || !strings.Contains(err.Error(), "claim ns/c") {
					t.Errorf("got %v, want %q", err, tt.err)
				}
				return
			}
			want := alloc.Claim{Vendor: "nvidia", UID: "uid", Namespace: "ns", Name: "c", Pods: []string{"a", "b"}, Parts: tt.want}
			if diff := cmp.Diff(want, got); diff != "" || err != nil {
				t.Errorf("%v %s", err, diff)
			}
		})
	}
	if _, err := Read(&resourceapi.ResourceClaim{}, "nvidia", pool); err == nil {
		t.Error("a claim without an allocation is read")
	}
}
