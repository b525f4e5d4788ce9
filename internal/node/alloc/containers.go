package alloc

import (
	"cmp"
	"maps"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// ContainerShare is what one container holds of one chip.
type ContainerShare struct {
	PodKey
	Container string
	Chip      accel.DeviceID
	// Bytes is the memory that it holds of the chip; 0 for the whole chip and for time
	// slices.
	Bytes uint64
}

// Initializing is a pod and an init container of it that runs. Sidecars add nothing:
// kubelet lists them.
type Initializing struct {
	*Pod
	Container string
}

// Containers returns what containers hold of a pool by kubelet's last list, sorted. Kubelet
// does not list plain init containers: of those that run it adds what they were given.
// Several slots of one chip are one share.
func (e *Engine) Containers(id ID, running []Initializing) []ContainerShare {
	var out []ContainerShare
	switch a := e.pool(id).held.(type) {
	case *unitAccount:
		out = a.containers(running)
	case *slotAccount:
		out = a.containers(e.listed, running)
	}
	slices.SortFunc(out, func(a, b ContainerShare) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Container, b.Container),
			cmp.Compare(a.Chip, b.Chip))
	})
	return slices.Compact(out)
}

func (a *unitAccount) containers(running []Initializing) (out []ContainerShare) {
	if a.holdings == nil {
		return nil
	}
	for key, pod := range a.holdings.pods {
		for name, c := range pod.containers {
			for d, ids := range c.byDevice {
				out = append(out, ContainerShare{key, name, d, a.ids.bytes(d, accel.Units(len(ids)))})
			}
		}
	}
	for _, one := range running {
		// The containers of a pod are on the same devices, with the same part on each.
		devices := a.inits[one.UID].devices
		if len(devices) == 0 {
			devices = a.holdings.pods[one.Key()].devices
		}
		units := one.unitsOf(a.pool.config.Resource)
		if units == 0 {
			continue
		}
		for _, d := range devices {
			out = append(out, ContainerShare{one.Key(), one.Container, d, a.ids.bytes(d, units/accel.Units(len(devices)))})
		}
	}
	return out
}

func (a *slotAccount) containers(listed []Listed, running []Initializing) (out []ContainerShare) {
	add := func(key PodKey, container string, h *slotHold) {
		for _, chip := range h.chips {
			out = append(out, ContainerShare{PodKey: key, Container: container, Chip: chip})
		}
	}
	for _, pod := range listed {
		for _, c := range pod.Containers {
			for _, id := range c.Units[a.pool.config.Resource] {
				if h := a.holds[id]; h != nil {
					add(pod.PodKey, c.Container, h)
				}
			}
		}
	}
	for _, one := range running {
		if one.unitsOf(a.pool.config.Resource) == 0 {
			continue
		}
		// The other containers of the pod reuse its slots, and those are listed.
		for _, id := range slices.Sorted(maps.Keys(a.holds)) {
			if h := a.holds[id]; slices.Contains(h.inits, initHolder(one.Pod)) || slices.Contains(a.listings[one.Key()], id) {
				add(one.Key(), one.Container, h)
			}
		}
	}
	return out
}

// unitsOf is what the init container requests of a resource.
func (i Initializing) unitsOf(r accel.Resource) accel.Units {
	for _, c := range i.request(r).Containers {
		if c.Name == i.Container && c.Kind == accel.InitContainer {
			return c.Units
		}
	}
	return 0
}
