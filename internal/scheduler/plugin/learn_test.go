package plugin

import (
	"fmt"
	"iter"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/claims"
)

// learner notes what it learns.
type learner struct {
	place.Policy

	learned []string
}

func (*learner) Follow([]accel.Resource, func(accel.Resource) iter.Seq2[string, *place.Node]) {}
func (l *learner) Learn(r accel.Request) {
	l.learned = append(l.learned, fmt.Sprintf("%d of %s, %d millicores", r.Peak(), r.Resource, r.CPU))
}

// manager is what DynamicResources knows.
type manager struct {
	fwk.SharedDRAManager
	fwk.ResourceClaimTracker

	claims map[string]*resourceapi.ResourceClaim
	slices []*resourceapi.ResourceSlice
}

func (m *manager) ResourceClaims() fwk.ResourceClaimTracker { return m }
func (m *manager) ResourceSlices() fwk.ResourceSliceLister  { return m }
func (m *manager) DeviceClasses() fwk.DeviceClassLister     { return anyDevice{} }
func (m *manager) ListWithDeviceTaintRules() ([]*resourceapi.ResourceSlice, error) {
	return m.slices, nil
}

func (m *manager) Get(_, name string) (*resourceapi.ResourceClaim, error) {
	if claim := m.claims[name]; claim != nil {
		return claim, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{}, name)
}

// anyDevice is a class of all devices.
type anyDevice struct{ fwk.DeviceClassLister }

func (anyDevice) Get(string) (*resourceapi.DeviceClass, error) {
	return &resourceapi.DeviceClass{}, nil
}

// TestLearnPlaced: a scheduler that begins to place pods learns from those with claims that are placed: each claim once, the
// oldest pod first.
func TestLearnPlaced(t *testing.T) {
	node, shared := "n", true
	none := map[string]*resourceapi.ResourceClaim{}
	m := &manager{claims: none, slices: []*resourceapi.ResourceSlice{{Spec: resourceapi.ResourceSliceSpec{
		Driver: wire.Driver("enflame"), NodeName: &node, Pool: resourceapi.ResourcePool{Name: "n", ResourceSliceCount: 1},
		Devices: []resourceapi.Device{{Name: "a", AllowMultipleAllocations: &shared,
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.MemoryCapacity: {Value: resource.MustParse("16Gi")}}}},
	}}}}
	asks := func(name string, amounts ...string) {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{UID: types.UID(name)}}
		c.Status.Allocation = &resourceapi.AllocationResult{}
		for _, amount := range amounts {
			c.Spec.Devices.Requests = append(c.Spec.Devices.Requests, resourceapi.DeviceRequest{Exactly: &resourceapi.ExactDeviceRequest{
				AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
				Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
					wire.MemoryCapacity: resource.MustParse(amount)}}}})
		}
		m.claims[name] = c
	}
	asks("small", "1Gi")
	asks("large", "8Gi")
	asks("two", "1Gi", "2Gi")
	var pods []*v1.Pod
	place := func(node, owner string, age time.Duration, claims ...string) {
		pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-age))},
			Spec: v1.PodSpec{NodeName: node, Containers: []v1.Container{{Resources: v1.ResourceRequirements{
				Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("2")}}}}}}
		if owner != "" {
			controls := true
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: owner, Controller: &controls}}
		}
		for _, name := range claims {
			pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, v1.PodResourceClaim{Name: name, ResourceClaimName: &name})
		}
		pods = append(pods, pod)
	}
	place("n", "", time.Minute, "small")
	place("n", "", time.Hour, "large")
	place("n", "Job", time.Second, "small") // the claim counts already
	place("n", "", time.Second, "two")
	place("n", "", time.Second, "gone")
	place("n", "", time.Second)
	place("n", "DaemonSet", 2*time.Hour, "large")
	place("", "", 2*time.Hour, "large")

	l := &learner{}
	c := &Core{catalog: claims.NewCatalog(), learning: l}
	if err := c.learnFrom(t.Context(), m, pods); err != nil {
		t.Fatal(err)
	}
	want := []string{"8192 of enflame.divvy.dev/memory, 2000 millicores", "1024 of enflame.divvy.dev/memory, 2000 millicores"}
	if !slices.Equal(l.learned, want) {
		t.Errorf("learned %q, want %q", l.learned, want)
	}
}
