package alloc

import (
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Engine holds all pools of a node. It is not safe for concurrent use.
type Engine struct {
	// Claims is what ResourceClaims hold, and may get.
	Claims *Claims
	pools  pools
	// listed are the pods of kubelet's last list.
	listed []Listed
}

// New returns an engine of these pools.
func New(all ...Config) (*Engine, error) {
	e := &Engine{}
	e.Claims = newClaims(&e.pools)
	for _, c := range all {
		if e.pools.find(c.ID) != nil {
			return nil, fmt.Errorf("resource %s has two pools of one kind", c.Resource)
		}
		p := newPool(c, &e.pools, e.Claims)
		e.pools = append(e.pools, p)
		if c.Kind == Slots {
			newSlots(p)
		} else if err := newMemory(p); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// pool returns the pool of that name, one that has nothing where there is none.
func (e *Engine) pool(id ID) *pool {
	if p := e.pools.find(id); p != nil {
		return p
	}
	p := newPool(Config{ID: ID{Resource: id.Resource, Kind: Slots}}, &e.pools, e.Claims)
	newSlots(p)
	return p
}

// Discover takes the outcome of a discovery.
func (e *Engine) Discover(id ID, d Discovery) { e.pool(id).discover(d) }

// Take takes kubelet's list.
func (e *Engine) Take(v View) {
	e.listed = v.Listed
	for _, p := range e.pools {
		p.held.take(&v)
		p.takeChips(v.Grace, v.Now)
	}
}

// Unlisted returns the UIDs of the pods that have, or may have, slots which kubelet lists no more.
// Containers of theirs may still run: kubelet frees the slots of a pod that is deleted by force at
// once. The engine keeps those of View.Running.
func (e *Engine) Unlisted(v *View) []string {
	var out []string
	for _, p := range e.pools {
		if a, ok := p.held.(*slotAccount); ok {
			out = append(out, a.unlisted(v)...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Lingering returns the UIDs of the pods that have slots of a vendor's devices only because their
// containers still ran at the last Take.
func (e *Engine) Lingering(vendor string) []string {
	var out []string
	for _, p := range e.pools {
		a, ok := p.held.(*slotAccount)
		if !ok || p.config.Vendor != vendor {
			continue
		}
		for _, h := range a.holds {
			if h.lingering != "" {
				out = append(out, holderUID(h.lingering))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Derive derives what a pool offers from its devices, its configuration and what
// containers hold, and returns what has to be written before it is offered.
func (e *Engine) Derive(id ID, now time.Time) Plan { return e.pool(id).derive(now) }

// State returns what is to be in the state file of a pool now, false when there
// need not be one.
func (e *Engine) State(id ID) (State, bool) { return e.pool(id).persist() }

// Saved notes that the state file holds the state.
func (e *Engine) Saved(id ID, s State) {
	p := e.pool(id)
	p.stored = true
	p.ids.saved(s)
}

// Offer returns what kubelet is told after a Derive, given what could be written.
func (e *Engine) Offer(id ID, w Written) Offer { return e.pool(id).offer(w) }

// Settle ends the steps from Derive to Offer: rejected is why kubelet's side does
// not take the units, nil when it does.
func (e *Engine) Settle(id ID, rejected error) Report { return e.pool(id).settle(rejected) }

// Early returns the units that an earlier run offered, before the devices are
// known; nil if there are none.
func (e *Engine) Early(id ID) []Unit {
	p := e.pool(id)
	if p.config.Draining != "" || p.looked {
		return nil
	}
	units := p.ids.early()
	p.early = units != nil
	return units
}

// Inventory is what the node publishes of a pool.
func (e *Engine) Inventory(id ID) accel.Inventory { return e.pool(id).inventory() }

// Devices returns the devices that a pool is made of as they are, also while containers hold
// them, those that were lost as well.
func (e *Engine) Devices(id ID) []accel.Device { return e.pool(id).devices() }

// Status returns how a pool is.
func (e *Engine) Status(id ID) Status { return e.pool(id).status() }

// Holders returns the pods that hold something of a chip.
func (e *Engine) Holders(id ID, chip accel.DeviceID) []PodKey { return e.pool(id).held.holders(chip) }

// Usage returns what containers hold of a pool.
func (e *Engine) Usage(id ID) Usage { return e.pool(id).held.usage() }

// DeviceOf returns the device that an id of a pool names, false when the id is
// none of the pool's.
func (e *Engine) DeviceOf(id ID, unit string) (accel.DeviceID, bool) {
	return e.pool(id).ids.deviceOf(unit)
}

// Facts returns what is certain of the pods' memory, by kubelet's last list. shown
// are pods that the API server had shown before kubelet was asked for that list,
// pods those that it shows now.
func (e *Engine) Facts(id ID, shown, pods []Pod, now time.Time) Facts {
	if a, ok := e.pool(id).held.(*unitAccount); ok {
		return a.facts(shown, pods, now)
	}
	return Facts{}
}

// Admissible returns why a container that requests so many units is rejected
// whatever is free.
func (e *Engine) Admissible(id ID, size int) error { return e.pool(id).admissible(size) }

// Late reports whether the pods are too old for a question of that size: kubelet
// has taken up one that is not among them, or none of them can be behind the
// question.
func (e *Engine) Late(id ID, size int, pods []Pod) bool {
	p := e.pool(id)
	known := make(map[PodKey]bool, len(pods))
	for i := range pods {
		known[pods[i].Key()] = true
	}
	for _, l := range e.listed {
		if !known[l.PodKey] {
			return true
		}
	}
	return p.pick.late(accel.Units(size), pods)
}

// Prefer answers which units a container gets. What containers hold must have been
// taken just before.
func (e *Engine) Prefer(id ID, q Question) (Preference, error) {
	p := e.pool(id)
	if err := p.admissible(q.Size); err != nil {
		return Preference{}, err
	}
	if r, unknown := e.pools.unknown(p); unknown {
		return Preference{}, unknownf(r)
	}
	return p.pick.prefer(&q)
}

// Allocate decides what the container gets that kubelet wants to give these ids;
// nothing changes before Give. again is true when the same question is put once
// more because the answer was in doubt.
func (e *Engine) Allocate(id ID, ids []string, pods []Pod, again bool) (Allocation, error) {
	p := e.pool(id)
	if len(ids) == 0 {
		return Allocation{}, fmt.Errorf("kubelet asked to allocate no units")
	}
	for _, other := range e.pools {
		if other == p || other.config.Resource != id.Resource {
			continue
		}
		if i := slices.IndexFunc(ids, other.owns); i >= 0 && !p.owns(ids[i]) {
			return Allocation{}, Reject(UnknownID, "unit id %q of %s is of before the configuration changed, and new containers do not "+
				"get it",
				ids[i], id.Resource)
		}
	}
	if err := p.admissible(len(ids)); err != nil {
		return Allocation{}, err
	}
	a, err := p.pick.allocate(slices.Clone(ids), pods, again)
	a.pool = p
	return a, err
}

// Give notes that a container gets the allocation. It may change what other pools
// offer. It reports whether the state of the pool has to be saved. The engine must be the
// caller's.
func (a Allocation) Give(now time.Time) (save bool) {
	a.pool.pick.give(&a, now)
	a.pool.taken.give(now, a.Devices...)
	return a.pool.config.Kind == Slots
}

// Memory returns what a successor must know of a pool and finds in neither the
// state file nor kubelet's list, for JSON.
func (e *Engine) Memory(id ID) any { return e.pool(id).pick.memory() }

// Recall restores what the predecessor remembered of a pool, before anything else.
func (e *Engine) Recall(id ID, data []byte) error { return e.pool(id).pick.recall(data) }

// LastGiven is the time of the last allocation of devices of a vendor, "" for any.
// Kubelet may not have kept it: a pod may be rejected right after its containers were
// served.
func (e *Engine) LastGiven(vendor string) time.Time {
	var last time.Time
	for _, p := range e.pools {
		if vendor != "" && p.config.Vendor != vendor {
			continue
		}
		for _, at := range p.taken.given {
			if at.After(last) {
				last = at
			}
		}
	}
	return last
}

// pools are all pools of a node.
type pools []*pool

func (all pools) find(id ID) *pool {
	i := slices.IndexFunc(all, func(p *pool) bool { return p.config.ID == id })
	if i < 0 {
		return nil
	}
	return all[i]
}

// elsewhere returns the resource as which another pool, or a claim, holds one of the chips,
// false when none does. Whatever its vendor: it may have been another one's, and
// ids are unique. What a chip is a partition of, and the partitions of a chip, are held
// with it, in the same pool as well: one that offers partitions now may have given out
// the whole device before.
func (all pools) elsewhere(p *pool, chips ...accel.DeviceID) (accel.Resource, bool) {
	for _, c := range chips {
		if p.claims.has(c) {
			return asClaim, true
		}
	}
	return all.without(p, p.claims.parents, chips...)
}

// without returns the resource as which a pool, without a claim, holds one of the chips, or
// what is related to one by parents; false when none does. Chips that the pool but holds itself
// do not count; it is nil for claims.
func (all pools) without(but *pool, parents map[accel.DeviceID]accel.DeviceID, chips ...accel.DeviceID) (accel.Resource, bool) {
	for _, p := range all {
		for _, c := range chips {
			if p != but && p.taken.has(c) || p.taken.related(c, parents) {
				return p.config.Resource, true
			}
		}
	}
	return "", false
}

// unknown returns another pool's resource of the same vendor of which it is not
// known yet what containers hold, or that of claims; false when there is none. It is
// the pool's own where it has partitions: containers may hold what they were cut from.
func (all pools) unknown(p *pool) (accel.Resource, bool) {
	if !p.claims.known {
		return asClaim, true
	}
	for _, other := range all {
		if (other != p || p.partitioned()) && other.config.Vendor == p.config.Vendor && !other.taken.known {
			return other.config.Resource, true
		}
	}
	return "", false
}

// partitioned reports whether some of the pool's devices are partitions.
func (p *pool) partitioned() bool {
	return slices.ContainsFunc(p.items, func(it item) bool { return it.Parent != "" })
}

// promised returns the devices of a vendor that were planned, by memory, for pods
// that kubelet may not have come to yet.
func (all pools) promised(vendor string, pods []Pod) map[accel.DeviceID]bool {
	out := map[accel.DeviceID]bool{}
	for _, p := range all {
		a, ok := p.held.(*unitAccount)
		if !ok || p.config.Vendor != vendor || p.config.Draining != "" || a.holdings == nil {
			continue
		}
		for _, w := range a.waiting(pods, 0) {
			if len(w.Held) == 0 {
				for _, d := range w.Granted {
					out[d] = true
				}
			}
		}
	}
	return out
}
