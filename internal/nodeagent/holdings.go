package nodeagent

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/podresources"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// podKey is how kubelet names a pod in the pod-resources API.
type podKey struct{ namespace, name string }

// held is what one container holds of one resource.
type held struct {
	device accel.DeviceID
	units  accel.Units
}

// podHolding is what one pod holds of one resource.
type podHolding struct {
	// containers holds those with at least one unit, by name.
	containers map[string]held
	// device is that of all containers; "" when they hold units of several.
	device accel.DeviceID
	// units is the sum over the containers.
	units accel.Units
}

// holdings is kubelet's word on one resource of the node.
type holdings struct {
	// active are all pods that kubelet listed, with units or without.
	active map[podKey]bool
	pods   map[podKey]podHolding
	// ambiguous are names that kubelet listed twice: a force-deleted pod may
	// still be ending while one of the same name is there.
	ambiguous map[podKey]bool
	// ids are all units held.
	ids map[string]struct{}
	// perDevice counts the units held of each device.
	perDevice map[accel.DeviceID]int
	// foreign are ids held that belong to no device of the layout.
	foreign []string
	// partial is true when kubelet did not list a pod that runs: just after its
	// start it lists those that it has looked at since. Nothing may be taken
	// for free then.
	partial bool
	// inits are the devices of pods with plain init containers, of whose units
	// kubelet keeps more than it lists.
	inits map[accel.DeviceID]bool
	// running are the granted devices of pods that run and that kubelet did not
	// list.
	running map[accel.DeviceID]bool
}

// complete adds what the pods of the API server tell about kubelet's list.
func (h *holdings) complete(pods podSource, resource accel.Resource, grant func(*corev1.Pod) (accel.Grant, bool)) {
	h.partial = !pods.Synced()
	h.inits, h.running = map[accel.DeviceID]bool{}, map[accel.DeviceID]bool{}
	for _, pod := range pods.Cached() {
		request := kube.RequestOf(pod, resource)
		if len(request.Containers) == 0 || terminal(pod) {
			continue
		}
		key := podKey{pod.Namespace, pod.Name}
		if !h.active[key] {
			if started(pod) {
				h.partial = true
				if g, ok := grant(pod); ok {
					h.running[g.Device] = true
				}
			}
			continue
		}
		if !slices.ContainsFunc(request.Containers, func(c accel.ContainerRequest) bool { return c.Kind == accel.InitContainer }) {
			continue
		}
		device := h.pods[key].device
		if g, ok := grant(pod); ok && device == "" {
			device = g.Device
		}
		h.inits[device] = true
	}
}

// holdingsOf reads kubelet's list. A list that is nil gives no holdings. Ids
// that are foreign are another part's of the resource.
func holdingsOf(pods []podresources.Pod, resource accel.Resource, layout *sharing.Layout, foreign func(id string) bool) *holdings {
	h := &holdings{
		active:    map[podKey]bool{},
		pods:      map[podKey]podHolding{},
		ambiguous: map[podKey]bool{},
		ids:       map[string]struct{}{},
		perDevice: map[accel.DeviceID]int{},
	}
	for _, p := range pods {
		key := podKey{p.Namespace, p.Name}
		if h.active[key] {
			h.ambiguous[key] = true
		}
		h.active[key] = true
		for _, c := range p.Containers {
			ids := c.Units[resource]
			if foreign != nil && slices.ContainsFunc(ids, foreign) {
				continue // a container was given all of its ids by one part
			}
			if len(ids) == 0 {
				continue
			}
			h.add(key, c.Name, ids, layout)
		}
	}
	for key := range h.ambiguous {
		delete(h.pods, key)
	}
	return h
}

func (h *holdings) add(key podKey, container string, ids []string, layout *sharing.Layout) {
	var got held
	mixed := false
	for _, id := range ids {
		h.ids[id] = struct{}{}
		d, known := layout.Device(id)
		if !known {
			h.foreign = append(h.foreign, id)
			mixed = true
			continue
		}
		h.perDevice[d]++
		got.units++
		if got.device == "" {
			got.device = d
		}
		mixed = mixed || got.device != d
	}
	if mixed {
		got.device = ""
	}
	p, seen := h.pods[key]
	if !seen {
		p.containers = map[string]held{}
		p.device = got.device
	}
	p.containers[container] = got
	p.units += got.units
	if p.device != got.device {
		p.device = ""
	}
	h.pods[key] = p
}
