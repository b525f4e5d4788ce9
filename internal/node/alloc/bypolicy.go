package alloc

import (
	"maps"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// byPolicy chooses whole devices by their connections, and time slices by how many of
// a device containers hold.
type byPolicy struct {
	pool *pool
	ids  *uuids
	held *slotAccount

	// admitting are the pods (initHolder) that the last question of kubelet may
	// have been for and that have plain init containers; preferred is what it was
	// answered. asked is true when kubelet asked for what it wants to give out now.
	admitting []string
	preferred []string
	asked     bool
}

func (c *byPolicy) late(accel.Units, []Pod) bool { return false }

// prefer chooses the whole devices that are connected best, or slices of the
// devices that the fewest share.
func (c *byPolicy) prefer(q *Question) (Preference, error) {
	c.noteAdmitting(q.Pods)
	promised := c.pool.others.promised(c.pool.config.Vendor, q.Pods)
	choice := sharing.SlotQuestion{Resource: c.pool.config.Resource, Size: q.Size, Must: q.Must, Links: c.ids.links,
		Policy: c.pool.config.Cut.Policy}
	offered := make(map[string]bool, len(q.Available))
	for _, id := range q.Available {
		offered[id] = true
	}
	for i := range c.pool.items {
		it := &c.pool.items[i]
		choice.Devices = append(choice.Devices, sharing.SlotDevice{
			ID: it.ID, Index: it.Index, Parent: it.Parent, Replicas: it.replicas, Unusable: c.pool.unusable(it),
			Avoid: slices.ContainsFunc(it.Chips, func(chip accel.DeviceID) bool { return promised[chip] }),
		})
		for id := range c.held.free(it) {
			if offered[id] {
				choice.Available = append(choice.Available, id)
			}
		}
	}
	ids, err := sharing.ChooseSlots(choice)
	if err != nil {
		return Preference{}, err
	}
	c.preferred = ids
	return Preference{IDs: ids}, nil
}

// noteAdmitting remembers which pods with plain init containers kubelet may be
// asking for: known ones or, when none waits, those that the API server does not
// know, such as static pods before their mirror.
func (c *byPolicy) noteAdmitting(pods []Pod) {
	c.admitting = nil
	unknown := maps.Clone(c.held.taken)
	waits := false
	for i := range pods {
		pod := &pods[i]
		delete(unknown, pod.Key())
		if !c.held.taken[pod.Key()] || pod.Started {
			continue
		}
		if !c.held.pending(pod) {
			continue
		}
		waits = true
		if hasInits(pod.request(c.pool.config.Resource)) {
			c.admitting = append(c.admitting, initHolder(pod))
		}
	}
	if !waits {
		for key := range unknown {
			c.admitting = append(c.admitting, unknownHolder(key))
		}
	}
	slices.Sort(c.admitting)
}

// recallAdmitting makes admitting that of the container that gets the ids: kubelet
// has asked for it just now, or the container reuses what an init container of its
// pod has, or it is not known which pod it is until kubelet lists it.
func (c *byPolicy) recallAdmitting(ids []string, pods []Pod, again bool) {
	if again && c.asked {
		return
	}
	c.asked = !again && sameIDs(c.preferred, ids)
	c.preferred = nil
	if c.asked {
		return
	}
	var reused []string
	for _, id := range ids {
		h := c.held.holds[id]
		if h == nil {
			continue
		}
		reused = h.inits
		if len(reused) == 0 {
			break
		}
	}
	// A pod that runs has all of its devices and reuses none any more.
	c.admitting = slices.DeleteFunc(slices.Clone(reused), func(holder string) bool {
		return slices.ContainsFunc(pods, func(pod Pod) bool { return pod.Started && initHolder(&pod) == holder })
	})
}

// allocate checks the ids: kubelet may have settled on them without a question.
func (c *byPolicy) allocate(ids []string, pods []Pod, again bool) (Allocation, error) {
	c.recallAdmitting(ids, pods, again)
	cards, err := c.check(ids)
	if err != nil {
		return Allocation{}, err
	}
	a := Allocation{IDs: ids, cards: cards, unasked: !c.asked && len(c.admitting) == 0}
	for _, c := range cards {
		a.Devices = append(a.Devices, c.Chips...)
	}
	return a, nil
}

// check returns the distinct cards behind the ids, in ascending order of index,
// and sorts ids in that order. The rejection is in doubt when they may be held.
func (c *byPolicy) check(ids []string) ([]item, error) {
	if r, unknown := c.pool.others.unknown(c.pool); unknown {
		return nil, unknownf(r)
	}
	known := map[string]bool{}
	var cards []item
	for i := range c.pool.items {
		it := &c.pool.items[i]
		used, fresh := false, false
		for _, id := range c.ids.idsOf(it) {
			if !slices.Contains(ids, id) {
				continue
			}
			used, known[id] = true, true
			h := c.held.holds[id]
			if h == nil {
				fresh = true
				continue
			}
			reuses := slices.ContainsFunc(h.inits, func(pod string) bool { return slices.Contains(c.admitting, pod) })
			if !it.fits(id, h) || h.lingering != "" || !reuses {
				return nil, conflictf("%q of %s is %s", id, c.pool.config.Resource, h.heldBy())
			}
		}
		if !used {
			continue
		}
		// No other pool has what an init container of the pod has; if one does, the
		// pod is gone.
		if r, taken := c.pool.others.elsewhere(c.pool, it.Chips...); taken {
			return nil, conflictf("device %s may not be given out: %s", it.ID, givenOutAs(r))
		}
		if why := c.pool.unusable(it); why != "" && fresh {
			return nil, conflictf("device %s may not be given out: %s", it.ID, why)
		}
		cards = append(cards, *it)
	}
	for _, id := range ids {
		if !known[id] {
			return nil, Reject(UnknownID, "invalid allocation request for %q: unknown device: %s", c.pool.config.Resource, id)
		}
	}
	order := map[accel.DeviceID]int{}
	for i, c := range cards {
		order[c.ID] = i
	}
	slices.SortFunc(ids, func(a, b string) int {
		x, _ := sharing.ParseSlotID(a)
		y, _ := sharing.ParseSlotID(b)
		if x.Device != y.Device {
			return order[x.Device] - order[y.Device]
		}
		return x.Replica - y.Replica
	})
	return cards, nil
}

// give notes that a container gets slots.
func (c *byPolicy) give(a *Allocation, now time.Time) {
	chips := map[accel.DeviceID][]accel.DeviceID{}
	for _, c := range a.cards {
		chips[c.ID] = c.Chips
	}
	for _, id := range a.IDs {
		slot, _ := sharing.ParseSlotID(id) // it is one of the pool's
		c.held.holds[id] = &slotHold{
			chips: chips[slot.Device], inits: c.admitting, unasked: a.unasked, guessed: !c.asked && !a.unasked, at: now,
		}
	}
}
