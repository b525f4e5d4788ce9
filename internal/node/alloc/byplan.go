package alloc

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// byPlan chooses the devices that were planned for the pod that kubelet asks for.
type byPlan struct {
	pool *pool
	ids  *ranges
	held *unitAccount

	// asked is the last answer.
	asked question
	// unknown are the pods that kubelet lists and the API server does not know,
	// such as static pods before their mirror, as of the last question; device is
	// what the one that was served last got.
	unknown map[PodKey]bool
	device  accel.DeviceID
}

// question is the last answer to Prefer.
type question struct {
	uid       string // of the pod that the question was taken to be for, or ""
	unknown   bool   // it is for a pod that the API server does not know
	request   accel.Request
	container int              // position in request
	devices   []accel.DeviceID // sorted
	ids       []string
}

// late reports whether none of the pods can be behind a question for size units, or
// kubelet has taken up another pod of the same name as one of them.
func (c *byPlan) late(size accel.Units, pods []Pod) bool {
	behind := slices.ContainsFunc(c.held.waiting(pods, size), func(w sharing.Waiting) bool {
		return w.Admitting && w.Request.Containers[w.Next].Units == size
	})
	return !behind || slices.ContainsFunc(pods, func(p Pod) bool { return c.held.replaced(&p) })
}

func (c *byPlan) prefer(q *Question) (Preference, error) {
	reused, err := c.partsOf(q.Must)
	if err != nil {
		return Preference{}, err
	}
	free := c.freeUnits(q)
	waiting := c.held.waiting(q.Pods, accel.Units(q.Size))
	d := c.unknownsDevice(q.Pods)
	if !slices.ContainsFunc(waiting, func(w sharing.Waiting) bool { return w.Admitting }) {
		if d != "" && len(reused) == 0 {
			reused = []sharing.Part{{Device: d}}
		}
		waiting = append(waiting, c.held.readmitted(q.Pods)...)
	}
	// One that was deleted without a grace period is on its way in kubelet while
	// the API server has forgotten it. Another must not be taken for it.
	for i := range waiting {
		waiting[i].Later = len(c.unknown) > 0 && !waiting[i].Admitting
	}
	choice, err := sharing.Choose(accel.Units(q.Size), reused, c.node(free, q.Now), waiting)
	if err != nil {
		return Preference{}, err
	}
	out := Preference{IDs: slices.Clone(q.Must)}
	for _, part := range choice.Parts {
		if part.Units > accel.Units(len(free[part.Device])) {
			return Preference{}, fmt.Errorf("device %s has %d units, %d are needed: %w",
				part.Device, len(free[part.Device]), part.Units, sharing.ErrNoRoom)
		}
		out.IDs = append(out.IDs, free[part.Device][:part.Units]...)
		out.Devices = append(out.Devices, part.Device)
	}
	if len(out.IDs) != q.Size {
		return Preference{}, fmt.Errorf("kubelet asks for %d units with %d among them: %w", q.Size, len(q.Must), sharing.ErrNoRoom)
	}
	slices.Sort(out.Devices)
	c.asked = question{devices: out.Devices, ids: out.IDs, unknown: choice.Pod < 0}
	if choice.Pod >= 0 {
		w := waiting[choice.Pod]
		c.asked.uid, c.asked.request, c.asked.container = w.Pod.UID, w.Request, w.Next
		out.Pod, out.Planned = w.Pod, w.Granted
	}
	return out, nil
}

// node is the pool's devices as a placement sees them at a time, with the units that are free.
func (c *byPlan) node(free map[accel.DeviceID][]string, now time.Time) place.Node {
	node := place.Node{CPU: place.Unlimited, Memory: place.Unlimited}
	devices := make([]accel.DeviceID, 0, len(c.pool.items))
	for i := range c.pool.items {
		it := &c.pool.items[i]
		devices = append(devices, it.ID)
		node.Slots = append(node.Slots, place.Slot{
			ID: it.ID, Index: it.Index, Model: it.Model, Total: it.units, Free: accel.Units(len(free[it.ID])),
			Unhealthy: c.pool.unusable(it) != "", Tier: isolationOf(c.pool, it).At(now).Memory,
		})
	}
	if links := c.pool.found.Links; len(links) > 0 {
		node.Graph = place.NewGraph(devices, links)
	}
	return node
}

// freeUnits groups the ids that kubelet offers by device, lowest first: without
// those that kubelet itself lists as held, as it may have forgotten them, those
// that it keeps for plain init containers, and those that must be in the answer.
func (c *byPlan) freeUnits(q *Question) map[accel.DeviceID][]string {
	skip := make(map[string]struct{}, len(q.Must))
	for _, id := range q.Must {
		skip[id] = struct{}{}
	}
	for i := range q.Pods {
		pod := &q.Pods[i]
		if s, ok := c.held.inits[pod.UID]; ok && !pod.Ended && c.held.holdings.active[pod.Key()] {
			for _, ids := range s.ids {
				for _, id := range ids {
					skip[id] = struct{}{}
				}
			}
		}
	}
	free := map[accel.DeviceID][]string{}
	for _, id := range q.Available {
		if _, inUse := c.held.holdings.ids[id]; inUse {
			continue
		}
		if _, kept := skip[id]; kept {
			continue
		}
		if d, ok := c.ids.layout.Device(id); ok {
			free[d] = append(free[d], id)
		}
	}
	for _, ids := range free {
		slices.SortFunc(ids, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	}
	return free
}

// partsOf returns the devices that ids name, in the order of their first ones,
// with how many name each.
func (c *byPlan) partsOf(ids []string) ([]sharing.Part, error) {
	var parts []sharing.Part
	for _, id := range ids {
		d, ok := c.ids.layout.Device(id)
		if !ok {
			return nil, Reject(UnknownID, "unit id %q belongs to no device of this node", id)
		}
		i := slices.IndexFunc(parts, func(p sharing.Part) bool { return p.Device == d })
		if i < 0 {
			i = len(parts)
			parts = append(parts, sharing.Part{Device: d})
		}
		parts[i].Units++
	}
	return parts, nil
}

// unknownsDevice returns the device of a pod that the API server does not know
// and that kubelet may be in the midst of, "" when there is none. Kubelet takes
// up one pod, admits it, and takes up the next: with a pod that was not there
// at the last question, this is the first question for it or another new one;
// without, it is for the one that was served last.
func (c *byPlan) unknownsDevice(pods []Pod) accel.DeviceID {
	unknown := maps.Clone(c.held.holdings.active)
	for i := range pods {
		delete(unknown, pods[i].Key())
	}
	holds := false
	for key := range unknown {
		if !c.unknown[key] {
			c.device = ""
		}
		holds = holds || slices.Equal(c.held.holdings.pods[key].devices, []accel.DeviceID{c.device})
	}
	c.unknown = unknown
	if !holds {
		return ""
	}
	return c.device
}

// allocate takes the devices from the ids, on which kubelet has settled.
func (c *byPlan) allocate(ids []string, pods []Pod, _ bool) (Allocation, error) {
	q, err := c.questionOf(ids, pods)
	if err != nil {
		return Allocation{}, err
	}
	if r, unknown := c.pool.others.unknown(c.pool); unknown {
		return Allocation{}, unknownf(r)
	}
	for _, d := range q.devices {
		if r, taken := c.pool.others.elsewhere(c.pool, d); taken && !c.held.has(d, q.uid) {
			return Allocation{}, Reject(Held, "device %s is %s", d, givenOutAs(r))
		}
	}
	return Allocation{IDs: ids, Devices: c.pool.byIndex(q.devices), asked: q}, nil
}

// questionOf returns what kubelet asked that has settled on these ids, with all
// devices of the pod: a container of a pod on several devices gets all of them,
// also where its units happen to be of some.
func (c *byPlan) questionOf(ids []string, pods []Pod) (question, error) {
	parts, err := c.partsOf(ids)
	if err != nil {
		return question{}, err
	}
	if sameIDs(c.asked.ids, ids) {
		return c.asked, nil
	}
	size := accel.Units(len(ids))
	var devices []accel.DeviceID
	for _, part := range parts {
		devices = union(devices, []accel.DeviceID{part.Device})
	}
	// Kubelet reuses units of an earlier init container and did not ask.
	for uid, s := range c.held.inits {
		if s.next < len(s.request.Containers) && s.request.Containers[s.next].Units == size &&
			within(s.devices, devices) && (len(s.devices) == 1 || s.has(ids)) {
			return question{uid: uid, request: s.request, container: s.next, devices: s.devices, ids: ids}, nil
		}
	}
	if len(devices) == 1 {
		return question{devices: devices, ids: ids}, nil
	}
	// Kubelet took all that was left and did not ask, or reuses units of which this
	// program has forgotten.
	if c.held.holdings != nil {
		for _, w := range c.held.waiting(pods, size) {
			if !w.Admitting || w.Request.Containers[w.Next].Units != size {
				continue
			}
			if all, ok := together(&w, parts, size); ok && within(all, devices) {
				return question{uid: w.Pod.UID, request: w.Request, container: w.Next, devices: all, ids: ids}, nil
			}
		}
	}
	return question{}, Reject(UnknownID, "kubelet chose units of the devices %s for one container, "+
		"and no pod that it may be of was granted these together", join(devices))
}

// give notes that a container got units, and that a plain init container was
// served, which kubelet does not list.
func (c *byPlan) give(a *Allocation, now time.Time) {
	byDevice := map[accel.DeviceID][]string{}
	for _, id := range a.IDs {
		d, _ := c.ids.layout.Device(id)
		byDevice[d] = append(byDevice[d], id)
		c.held.given[id] = givenUnit{device: d, at: now}
	}
	q := a.asked
	c.asked = question{}
	c.held.moved(a.IDs, q.uid)
	if q.unknown {
		c.device = q.devices[0]
	}
	if q.uid == "" {
		return
	}
	if q.request.Containers[q.container].Kind != accel.InitContainer {
		c.held.served[q.uid] = podServed{next: q.container + 1, devices: q.devices, at: now}
		return
	}
	before := c.held.inits[q.uid]
	all := maps.Clone(before.ids)
	if all == nil {
		all = map[accel.DeviceID][]string{}
	}
	for d, ids := range byDevice {
		all[d] = slices.Concat(all[d], ids)
	}
	c.held.inits[q.uid] = initServed{
		request: q.request,
		next:    q.container + 1,
		devices: q.devices,
		units:   max(before.units, accel.Units(len(a.IDs))),
		ids:     all,
		at:      now,
	}
}

// together returns all devices of a pod that waits, and whether units of these
// parts can be the next container's.
func together(w *sharing.Waiting, parts []sharing.Part, size accel.Units) ([]accel.DeviceID, bool) {
	if len(w.Held) > 0 {
		var all []accel.DeviceID
		for _, part := range w.Held {
			all = append(all, part.Device)
		}
		return all, true
	}
	equal := !slices.ContainsFunc(parts, func(p sharing.Part) bool { return p.Units*accel.Units(len(w.Granted)) != size })
	return w.Granted, equal
}

func join(devices []accel.DeviceID) string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = string(d)
	}
	return strings.Join(names, ", ")
}
