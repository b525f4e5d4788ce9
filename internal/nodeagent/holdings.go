package nodeagent

import (
	"maps"
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
	units accel.Units
	// byDevice are the unit ids of each device.
	byDevice map[accel.DeviceID][]string
}

// podHolding is what one pod holds of one resource.
type podHolding struct {
	// containers holds those with at least one unit, by name.
	containers map[string]held
	// devices are those of all containers, sorted; more than one when the pod was
	// granted several, or something went wrong. None when odd.
	devices []accel.DeviceID
	// odd is true when a container holds ids that belong to no device of the
	// layout.
	odd bool
	// units is the sum over the containers.
	units accel.Units
}

// on returns the unit ids that the pod holds of a device.
func (h podHolding) on(d accel.DeviceID) []string {
	var ids []string
	for _, c := range h.containers {
		ids = append(ids, c.byDevice[d]...)
	}
	return ids
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
					for _, d := range grantedDevices(g) {
						h.running[d] = true
					}
				}
			}
			continue
		}
		if !slices.ContainsFunc(request.Containers, func(c accel.ContainerRequest) bool { return c.Kind == accel.InitContainer }) {
			continue
		}
		devices := h.pods[key].devices
		if g, ok := grant(pod); ok && (len(devices) == 0 || len(g.More) > 0) {
			devices = grantedDevices(g)
		}
		if len(devices) == 0 {
			h.inits[""] = true
		}
		for _, d := range devices {
			h.inits[d] = true
		}
	}
}

// grantedDevices returns the devices of a grant, sorted.
func grantedDevices(g accel.Grant) []accel.DeviceID {
	devices := g.Devices()
	slices.Sort(devices)
	return devices
}

// within reports whether all of some are among all, which is sorted.
func within(all, some []accel.DeviceID) bool {
	for _, d := range some {
		if _, ok := slices.BinarySearch(all, d); !ok {
			return false
		}
	}
	return true
}

// union returns the devices of both, sorted, each once.
func union(a, b []accel.DeviceID) []accel.DeviceID {
	out := slices.Concat(a, b)
	slices.Sort(out)
	return slices.Compact(out)
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
	p, seen := h.pods[key]
	if !seen {
		p.containers = map[string]held{}
	}
	// Containers mostly hold units of one device, some hundred thousand of them at
	// most: those are not copied.
	first, _ := layout.Device(ids[0])
	got, alone := held{byDevice: map[accel.DeviceID][]string{}}, true
	for _, id := range ids {
		h.ids[id] = struct{}{}
		d, known := layout.Device(id)
		if !known {
			h.foreign = append(h.foreign, id)
			p.odd = true
			continue
		}
		h.perDevice[d]++
		got.units++
		alone = alone && d == first
	}
	switch {
	case p.odd:
	case alone:
		got.byDevice[first] = ids
	default:
		for _, id := range ids {
			d, _ := layout.Device(id)
			got.byDevice[d] = append(got.byDevice[d], id)
		}
	}
	p.containers[container] = got
	p.units += got.units
	p.devices = union(p.devices, slices.Collect(maps.Keys(got.byDevice)))
	if p.odd {
		p.devices = nil
	}
	h.pods[key] = p
}
