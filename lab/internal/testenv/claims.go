package testenv

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Classes of devices.
const (
	ClassGCU   = "gcu.enflame.divvy.dev"
	ClassGPU   = "gpu.nvidia.divvy.dev"
	ClassMIG   = "mig.nvidia.divvy.dev"
	ClassChip  = "chip.iluvatar.divvy.dev"
	ClassBoard = "board.iluvatar.divvy.dev"
)

// MemoryRequest is a request for a part of the memory of one device, such as 10Gi.
func MemoryRequest(class, amount string) resourceapi.ExactDeviceRequest {
	return resourceapi.ExactDeviceRequest{DeviceClassName: class, Capacity: &resourceapi.CapacityRequirements{
		Requests: map[resourceapi.QualifiedName]resource.Quantity{wire.MemoryCapacity: resource.MustParse(amount)}}}
}

// Claim creates a ResourceClaim of one request.
func (p *Pods) Claim(ctx context.Context, name string, request resourceapi.ExactDeviceRequest) error {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: name}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "device", Exactly: &request}}
	if _, err := p.client.ResourceV1().ResourceClaims(p.Namespace).Create(ctx, claim, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("create claim %s: %w", name, err)
	}
	return nil
}

// Claiming returns a pod whose container uses a claim. It is not created.
func (p *Pods) Claiming(name, claim string) *corev1.Pod {
	container := Container("app", 0)
	container.Resources.Claims = []corev1.ResourceClaim{{Name: "devices"}}
	pod := p.New(name, container)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "devices", ResourceClaimName: &claim}}
	return pod
}

// ClaimDevice is a device that a driver publishes for claims.
type ClaimDevice struct {
	resourceapi.Device
	Driver string
}

// HasTaint reports whether the device has a taint with the key.
func (d *ClaimDevice) HasTaint(key string) bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool { return t.Key == key })
}

// ClaimDevices returns all devices that are published for claims.
func (s *Env) ClaimDevices(ctx context.Context) ([]ClaimDevice, error) {
	list, err := s.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var out []ClaimDevice
	for i := range list.Items {
		for _, d := range list.Items[i].Spec.Devices {
			out = append(out, ClaimDevice{d, list.Items[i].Spec.Driver})
		}
	}
	return out, nil
}
