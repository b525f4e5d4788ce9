package simnodes

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Used is what pods hold of each device.
type Used map[accel.DeviceID]accel.Units

// Used adds up what the pods that are bound hold by their grants, and returns with
// it everything that is wrong: a pod without a grant that the key has signed, one
// whose grant is for another node or another amount than it asks for, a device that
// no node of the group has, and one that holds more than it has.
func (g Group) Used(pods []corev1.Pod, key []byte) (Used, error) {
	g = g.withDefaults()
	signer, err := wire.NewSigner(key)
	if err != nil {
		return nil, fmt.Errorf("the key of grants: %w", err)
	}
	known := map[accel.DeviceID]string{} // node by device
	for number := range g.Count {
		for card := range g.Cards {
			known[g.DeviceID(number, card)] = g.NodeName(number)
		}
	}
	used := Used{}
	var errs []error
	for i := range pods {
		pod := &pods[i]
		if pod.Spec.NodeName == "" {
			continue
		}
		grant, err := signer.DecodeGrant(string(pod.UID), pod.Annotations[wire.GrantAnnotation])
		asked := accel.Units(0)
		for _, container := range pod.Spec.Containers {
			amount := container.Resources.Requests[corev1.ResourceName(g.Resource)]
			asked += accel.Units(amount.Value())
		}
		devices := grant.Devices()
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("pod %s on %s: %w", pod.Name, pod.Spec.NodeName, err))
			continue
		case grant.Node != pod.Spec.NodeName:
			errs = append(errs, fmt.Errorf("pod %s is on %s, its grant for %s", pod.Name, pod.Spec.NodeName, grant.Node))
		case grant.Units != asked:
			errs = append(errs, fmt.Errorf("pod %s asks for %d units, its grant is for %d", pod.Name, asked, grant.Units))
		}
		for _, device := range devices {
			if known[device] != grant.Node {
				errs = append(errs, fmt.Errorf("pod %s: node %s has no device %q", pod.Name, grant.Node, device))
			}
			used[device] += grant.Units / accel.Units(len(devices))
		}
	}
	for device, units := range used {
		if units > g.Units {
			errs = append(errs, fmt.Errorf("device %s has %d units, and pods hold %d", device, g.Units, units))
		}
	}
	return used, errors.Join(errs...)
}

// DeviceID is the id of a card of the node with this number, both from 0 on.
func (g Group) DeviceID(number, card int) accel.DeviceID {
	return accel.DeviceID(fmt.Sprintf("%s-%05d-%02d", g.withDefaults().Name, number, card))
}
