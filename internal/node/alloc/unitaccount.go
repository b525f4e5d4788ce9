package alloc

import (
	"maps"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// unitAccount knows which units of memory containers hold. It is not saved: kubelet
// lists them, and the planned allocations say of which device they are.
type unitAccount struct {
	pool *pool
	ids  *ranges
	// list is the last view, and holdings what follows from it, nil before that.
	list     *View
	holdings *holdings
	// sure is true once kubelet has listed all pods that run.
	sure bool
	// given are the units that containers got and that kubelet has not listed
	// since. Kubelet may not have recorded them yet, and panics when a unit that it
	// was just given is not on its list any more. Or it has started in between and
	// lists nothing, while the API server does not show the pod yet.
	given map[string]givenUnit
	// inits are the pods whose plain init containers were served, by UID.
	inits map[string]initServed
	// served are the last allocations, of at most Recorded ago, to containers that are
	// not plain init containers, by the UID of the pod.
	served map[string]podServed
}

// podServed is the last allocation to a container of a pod.
type podServed struct {
	// next is the position in the pod's request of the container after that one.
	next int
	// devices are those of the pod, sorted.
	devices []accel.DeviceID
	at      time.Time
}

// givenUnit is a unit that a container got.
type givenUnit struct {
	device accel.DeviceID
	at     time.Time
}

func (a *unitAccount) isHeld(id string) bool {
	if a.holdings == nil {
		return false
	}
	_, held := a.holdings.ids[id]
	_, given := a.given[id]
	return held || given
}

// certain is false where containers may hold any unit of the device.
func (a *unitAccount) certain(it *item) bool {
	return a.holdings != nil && !a.holdings.partial && !a.keptInits(it.ID)
}

// keptInits reports whether plain init containers, of whose units kubelet keeps
// more than it lists, may have units of the device.
func (a *unitAccount) keptInits(d accel.DeviceID) bool {
	return a.holdings.inits[d] || a.initDevices()[d]
}

// initDevices are the devices of init containers that were served.
func (a *unitAccount) initDevices() map[accel.DeviceID]bool {
	out := map[accel.DeviceID]bool{}
	for _, s := range a.inits {
		for _, d := range s.devices {
			out[d] = true
		}
	}
	return out
}

func (a *unitAccount) free(*item) map[string]bool { return nil }

func (a *unitAccount) strays(map[string]bool) []Unit { return nil }

func (a *unitAccount) conflict(*item) string { return "" }

func (a *unitAccount) ready() error { return nil }

// has reports whether it is certain that a container holds units of the device: by
// kubelet's last list, or an init container of the pod.
func (a *unitAccount) has(d accel.DeviceID, uid string) bool {
	return a.holdings != nil && a.holdings.perDevice[d] > 0 || slices.Contains(a.inits[uid].devices, d)
}

// heldOf counts the units that containers hold of a device. Before kubelet was
// asked, every device counts as held, and later one of which plain init containers
// may have units.
func (a *unitAccount) heldOf(d accel.DeviceID) int {
	if a.holdings == nil || a.holdings.partial {
		return 1
	}
	n := a.holdings.perDevice[d]
	for _, one := range a.given {
		if one.device == d {
			n++
		}
	}
	if n == 0 && a.keptInits(d) {
		return 1
	}
	return n
}

func (a *unitAccount) take(v *View) {
	a.list = v
	a.holdings = holdingsOf(v, a.pool.config.Resource, a.ids.layout, a.pool.foreign)
	maps.DeleteFunc(a.given, func(id string, one givenUnit) bool {
		_, listed := a.holdings.ids[id]
		return listed || v.Now.Sub(one.at) >= Recorded
	})
	maps.DeleteFunc(a.served, func(_ string, one podServed) bool { return v.Now.Sub(one.at) >= Recorded })
}

func (a *unitAccount) chips() (map[accel.DeviceID]bool, bool) {
	if a.ids.lost && len(a.holdings.ids) > 0 {
		return nil, false // whose units these are is not known yet
	}
	held := a.initDevices()
	for d, n := range a.holdings.perDevice {
		held[d] = held[d] || n > 0
	}
	for d := range a.holdings.inits {
		held[d] = held[d] || d != ""
	}
	for d := range a.holdings.running {
		held[d] = true
	}
	for _, d := range a.list.Ending[a.pool.config.Resource] {
		held[d] = true
	}
	if a.holdings.partial {
		// Nothing is taken for free while a pod that runs is not listed.
		for d := range a.pool.taken.held {
			held[d] = true
		}
	}
	a.sure = a.sure || !a.holdings.partial
	return held, a.sure
}

func (a *unitAccount) holders(chip accel.DeviceID) []PodKey {
	if a.holdings == nil {
		return nil
	}
	var out []PodKey
	for key, h := range a.holdings.pods {
		if slices.Contains(h.devices, chip) {
			out = append(out, key)
		}
	}
	return out
}

func (a *unitAccount) usage() Usage {
	if a.holdings == nil {
		return Usage{}
	}
	return Usage{Known: true, Devices: a.holdings.perDevice}
}

func (a *unitAccount) idle() bool {
	if a.holdings == nil || a.holdings.partial || len(a.holdings.ids) > 0 || len(a.given) > 0 || len(a.initDevices()) > 0 {
		return false
	}
	for d := range a.holdings.inits {
		if d != "" {
			return false
		}
	}
	return true
}
