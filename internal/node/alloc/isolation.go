package alloc

import (
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Attest takes what was found to isolate the devices of a pool of memory, all that it states
// from then on: a device that is not among them is at tier none.
func (e *Engine) Attest(id ID, stated map[accel.DeviceID]accel.Isolation) {
	e.pool(id).attested = stated
}

// Isolation returns what isolates the devices of the allocation at a time, and the one of the
// lowest tier, whose it is. The engine must be the caller's.
func (a Allocation) Isolation(now time.Time) (lowest accel.DeviceID, of accel.Isolation) {
	for i, it := range a.items() {
		stated := isolationOf(a.pool, it).At(now)
		if i == 0 || !stated.Memory.Meets(of.Memory) {
			lowest, of = it.ID, stated
		}
	}
	return lowest, of
}

// items are those of which a container gets something.
func (a Allocation) items() []*item {
	var out []*item
	for i := range a.pool.items {
		it := &a.pool.items[i]
		if slices.Contains(a.asked.devices, it.ID) || slices.ContainsFunc(a.cards, func(c item) bool { return c.ID == it.ID }) {
			out = append(out, it)
		}
	}
	return out
}

// isolationOf is what isolates an item of a pool. One that a container has for itself is isolated by the
// hardware. Time slices are not isolated, nor are units of memory by counting alone.
func isolationOf(p *pool, it *item) accel.Isolation {
	switch {
	case p.config.Kind == Memory:
		return p.attested[it.ID]
	case it.units > 1:
		return accel.Isolation{}
	}
	whole := accel.Isolation{Memory: accel.TierHardware, Compute: accel.TierHardware}
	if v := accel.VendorNamed(p.config.Vendor); it.Parent != "" && v != nil {
		whole.Backend = v.PartitionBackend
	}
	return whole
}

// Behind returns which of the pods, by their positions, the allocation may be for: those that
// have not started, and of which a container of that size was not served. Kubelet does not say
// which it is. If its list was taken after its question (listed), it is one that kubelet has
// taken up, and with none it is a pod that is not among these, such as a static pod before its
// mirror. The engine must be the caller's.
func (a Allocation) Behind(pods []Pod, listed bool) []int {
	p := a.pool
	var out []int
	for i := range pods {
		pod := &pods[i]
		active := p.held.active(pod.Key())
		if a.asked.uid != "" && pod.UID == a.asked.uid && active {
			return []int{i} // kubelet was asked for its list before the answer
		}
		if !pod.Started && !pod.Ended && (active || !listed) && p.held.lacks(pod, accel.Units(len(a.IDs))) {
			out = append(out, i)
		}
	}
	return out
}

func (a *unitAccount) active(key PodKey) bool { return a.holdings != nil && a.holdings.active[key] }

func (a *unitAccount) lacks(pod *Pod, size accel.Units) bool {
	if a.holdings == nil {
		return slices.ContainsFunc(pod.request(a.pool.config.Resource).Containers, func(c accel.ContainerRequest) bool {
			return c.Units == size
		})
	}
	w, ok := a.waits(pod, size)
	return ok && w.Request.Containers[w.Next].Units == size
}

func (a *slotAccount) active(key PodKey) bool { return a.taken[key] }

func (a *slotAccount) lacks(pod *Pod, size accel.Units) bool {
	return a.pending(pod) &&
		slices.ContainsFunc(pod.request(a.pool.config.Resource).Containers, func(c accel.ContainerRequest) bool {
			return c.Units == size && (c.Kind == accel.InitContainer || a.served[pod.Key()][c.Name] < int(c.Units))
		})
}
