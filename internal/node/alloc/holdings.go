package alloc

import (
	"maps"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// containerUnits is what one container holds of a pool of memory.
type containerUnits struct {
	units accel.Units
	// byDevice are the unit ids of each device.
	byDevice map[accel.DeviceID][]string
}

// podUnits is what one pod holds of a pool of memory.
type podUnits struct {
	// containers are those with at least one unit, by name.
	containers map[string]containerUnits
	// devices are those of all containers, sorted; more than one when several were
	// planned for the pod, or something went wrong. None when odd.
	devices []accel.DeviceID
	// odd is true when a container holds ids that belong to no device of the
	// layout.
	odd bool
	// units is the sum over the containers.
	units accel.Units
}

// on returns the unit ids that the pod holds of a device.
func (h podUnits) on(d accel.DeviceID) []string {
	var ids []string
	for _, c := range h.containers {
		ids = append(ids, c.byDevice[d]...)
	}
	return ids
}

// holdings is what kubelet's list says of one pool of memory.
type holdings struct {
	// active are all pods that kubelet listed, with units or without.
	active map[PodKey]bool
	// pods are those with units, but for names that kubelet listed twice: a pod
	// that was deleted by force may still be ending while one of the same name is
	// there.
	pods map[PodKey]podUnits
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
	// kubelet keeps more than it lists; "" for one that is not known.
	inits map[accel.DeviceID]bool
	// running are the planned devices of pods that run and that kubelet did not
	// list.
	running map[accel.DeviceID]bool
}

// holdingsOf reads kubelet's list. Ids that are foreign are another pool's.
func holdingsOf(v *View, resource accel.Resource, layout *sharing.Layout, foreign func(id string) bool) *holdings {
	h := &holdings{
		active:    map[PodKey]bool{},
		pods:      map[PodKey]podUnits{},
		ids:       map[string]struct{}{},
		perDevice: map[accel.DeviceID]int{},
	}
	twice := map[PodKey]bool{}
	for _, p := range v.Listed {
		if h.active[p.PodKey] {
			twice[p.PodKey] = true
		}
		h.active[p.PodKey] = true
		for _, c := range p.Containers {
			ids := c.Units[resource]
			if len(ids) == 0 || slices.ContainsFunc(ids, foreign) {
				continue // a container was given all of its ids by one pool
			}
			h.add(p.PodKey, c.Container, ids, layout)
		}
	}
	for key := range twice {
		delete(h.pods, key)
	}
	h.complete(v, resource)
	return h
}

func (h *holdings) add(key PodKey, container string, ids []string, layout *sharing.Layout) {
	p, seen := h.pods[key]
	if !seen {
		p.containers = map[string]containerUnits{}
	}
	// Containers mostly hold units of one device, some hundred thousand of them at
	// most: those are not copied.
	first, _ := layout.Device(ids[0])
	got, alone := containerUnits{byDevice: map[accel.DeviceID][]string{}}, true
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

// complete adds what the pods of the API server say beside kubelet's list.
func (h *holdings) complete(v *View, resource accel.Resource) {
	h.partial = !v.Complete
	h.inits, h.running = map[accel.DeviceID]bool{}, map[accel.DeviceID]bool{}
	for i := range v.Pods {
		pod := &v.Pods[i]
		request := pod.request(resource)
		if len(request.Containers) == 0 || pod.Ended {
			continue
		}
		planned, _ := pod.planned(resource)
		if !h.active[pod.Key()] {
			if pod.Started {
				h.partial = true
				for _, d := range planned {
					h.running[d] = true
				}
			}
			continue
		}
		if !hasInits(request) {
			continue
		}
		devices := h.pods[pod.Key()].devices
		if len(planned) > 0 && (len(devices) == 0 || len(planned) > 1) {
			devices = planned
		}
		if len(devices) == 0 {
			h.inits[""] = true
		}
		for _, d := range devices {
			h.inits[d] = true
		}
	}
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

func hasInits(r accel.Request) bool {
	return slices.ContainsFunc(r.Containers, func(c accel.ContainerRequest) bool { return c.Kind == accel.InitContainer })
}

func sameIDs(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	set := make(map[string]struct{}, len(a))
	for _, id := range a {
		set[id] = struct{}{}
	}
	for _, id := range b {
		if _, ok := set[id]; !ok {
			return false
		}
	}
	return true
}
