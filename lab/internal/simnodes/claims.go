package simnodes

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/dra"
)

const (
	// ClaimClass is the name of the DeviceClass of the cards, as the chart has it.
	ClaimClass  = "gcu.enflame.divvy.dev"
	claimVendor = "enflame"
)

// createSlices makes the DeviceClass, and the slice of each node as its driver publishes it.
func (g Group) createSlices(ctx context.Context, client kubernetes.Interface) error {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: ClaimClass}}
	class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: "device.driver == 'enflame.divvy.dev' && device.attributes['enflame.divvy.dev'].type == 'gcu'"}}}
	_, err := client.ResourceV1().DeviceClasses().Create(ctx, class, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make DeviceClass %s: %w", ClaimClass, err)
	}
	if err := g.each(ctx, func(ctx context.Context, number int) error {
		_, err := client.ResourceV1().ResourceSlices().Create(ctx, g.Slice(number), metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	}); err != nil {
		return fmt.Errorf("make slices: %w", err)
	}
	return nil
}

// Slice returns what the DRA driver of the node with this number publishes.
func (g Group) Slice(number int) *resourceapi.ResourceSlice {
	g = g.withDefaults()
	node := g.NodeName(number)
	var devices []alloc.ClaimDevice
	for card := range g.Cards {
		d := g.device(number, card)
		devices = append(devices, alloc.ClaimDevice{Name: g.claimName(number, card), Type: "gcu", Shared: true,
			Card: sharing.Card{Device: d, Chips: []accel.DeviceID{d.ID}}})
	}
	pool := dra.Pool(claimVendor, devices, dra.Facts{}, dra.Stored{Counters: true, Taints: true, Shares: true})
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: resourceapi.ResourceSliceSpec{
		Driver: wire.Driver(claimVendor), NodeName: &node, Devices: pool.Slices[0].Devices,
		Pool: resourceapi.ResourcePool{Name: dra.PoolName(node, claimVendor), Generation: 1, ResourceSliceCount: 1},
	}}
}

// claimName is the name of a card in its slice.
func (g Group) claimName(number, card int) string { return "gcu-" + string(g.DeviceID(number, card)) }

// Template returns a ResourceClaimTemplate for memory of one card.
func Template(namespace, name, memory string) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "memory", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: ClaimClass,
				Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
					wire.MemoryCapacity: resource.MustParse(memory)}},
			}}},
		}}},
	}
}

// ClaimPod returns a pod like Pod's that has a claim of a template instead of units.
func (g Group) ClaimPod(namespace, name, template string) *corev1.Pod {
	pod := g.Pod(namespace, name, 0)
	container := &pod.Spec.Containers[0].Resources
	for _, amounts := range []corev1.ResourceList{container.Requests, container.Limits} {
		delete(amounts, corev1.ResourceName(g.withDefaults().Resource))
	}
	container.Claims = []corev1.ResourceClaim{{Name: "device"}}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "device", ResourceClaimTemplateName: ptr.To(template)}}
	return pod
}

// Claimed is what claims hold of each card, in bytes.
type Claimed map[accel.DeviceID]int64

// Claimed adds up what claims hold, and returns with it everything that is wrong: a device that no
// node of the group has, and one of which more is held than it has.
func (g Group) Claimed(claims []resourceapi.ResourceClaim) (Claimed, error) {
	g = g.withDefaults()
	known := map[[2]string]accel.DeviceID{}
	for number := range g.Count {
		for card := range g.Cards {
			known[[2]string{dra.PoolName(g.NodeName(number), claimVendor), g.claimName(number, card)}] = g.DeviceID(number, card)
		}
	}
	held := Claimed{}
	var errs []error
	for i := range claims {
		if claims[i].Status.Allocation == nil {
			continue
		}
		for _, r := range claims[i].Status.Allocation.Devices.Results {
			device, ok := known[[2]string{r.Pool, r.Device}]
			if !ok {
				errs = append(errs, fmt.Errorf("claim %s holds device %s of pool %s, which does not exist", claims[i].Name, r.Device,
					r.Pool))
				continue
			}
			amount := r.ConsumedCapacity[wire.MemoryCapacity]
			if r.ShareID == nil {
				amount = *resource.NewQuantity(int64(g.Units)<<30, resource.BinarySI)
			}
			held[device] += amount.Value()
		}
	}
	for device, bytes := range held {
		if has := int64(g.Units) << 30; bytes > has {
			errs = append(errs, fmt.Errorf("device %s has %d bytes, and claims hold %d", device, has, bytes))
		}
	}
	return held, errors.Join(errs...)
}
