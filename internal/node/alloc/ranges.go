package alloc

import (
	"cmp"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// ranges are the ids of a pool of memory: each device has a range of unit numbers.
type ranges struct {
	pool *pool
	held *unitAccount
	// wanted is the configured memory unit; unit is the one in force, another one
	// while pods hold units of the other size.
	wanted, unit sharing.MemoryUnit
	layout       *sharing.Layout
	stored       State
	// lost is true while there is no state although pods may hold units: before
	// the first state was made, and after it was lost or damaged.
	lost bool
	// buffer is what ids returned, offered what kubelet's list was made from.
	buffer  []string
	offered []offeredRange
}

// offeredRange is what decides about the units of one device in kubelet's list.
type offeredRange struct {
	start     int64
	units     accel.Units
	unhealthy bool
	// Of an unhealthy device, of which only the units that are held are offered as
	// healthy: whether all are all the same, and a sum that tells sets of held
	// units apart.
	allHealthy bool
	held       uint64
}

func newMemory(p *pool) error {
	ids := &ranges{pool: p, wanted: p.config.Unit, unit: p.config.Unit, layout: &sharing.Layout{}, lost: true}
	ids.held = &unitAccount{pool: p, ids: ids, inits: map[string]initServed{}, given: map[string]givenUnit{},
		served: map[string]podServed{}}
	p.ids, p.held, p.pick = ids, ids.held, &byPlan{pool: p, ids: ids, held: ids.held}
	s := p.config.State
	if s == nil || s.Unit == "" {
		return nil
	}
	unit, err := sharing.ParseMemoryUnit(s.Unit)
	if err == nil {
		ids.layout, err = sharing.NewLayout(s.Ranges)
	}
	if err != nil {
		return fmt.Errorf("unit state of %s: %w", p.config.Resource, err)
	}
	ids.stored, ids.lost, ids.unit = *s, false, unit
	if p.config.Draining != "" {
		ids.wanted = unit
	}
	return nil
}

func (rs *ranges) persist() State { return State{Unit: rs.unit.String(), Ranges: rs.layout.Ranges()} }

func (rs *ranges) saved(s State) { rs.stored = s }

func (rs *ranges) isSaved(it *item) bool {
	now, _ := rs.layout.Range(it.ID)
	return rs.stored.Unit == rs.unit.String() && slices.ContainsFunc(rs.stored.Ranges, func(r sharing.Range) bool {
		return r.Device == it.ID && r.Start == now.Start && r.Units == now.Units
	})
}

func (rs *ranges) early() []Unit {
	if rs.lost {
		return nil
	}
	var out []Unit
	for _, r := range rs.layout.Ranges() {
		for _, id := range rs.idsOf(&item{Card: sharing.Card{Device: accel.Device{ID: r.Device}}}) {
			out = append(out, Unit{ID: id})
		}
	}
	return out
}

func (rs *ranges) idsOf(it *item) []string {
	rs.buffer = rs.layout.IDs(rs.buffer[:0], it.ID)
	return rs.buffer
}

// bytes is how much memory that many units of a device are.
func (rs *ranges) bytes(d accel.DeviceID, n accel.Units) uint64 {
	r, _ := rs.layout.Range(d)
	return rs.unit.Bytes(n, r.MemoryBytes)
}

func (rs *ranges) deviceOf(id string) (accel.DeviceID, bool) { return rs.layout.Device(id) }

func (rs *ranges) reoffer() { rs.offered = nil }

// known reports whether the units that pods hold have their devices. What an
// earlier run published stays until then.
func (rs *ranges) known() bool { return !rs.lost || rs.pool.found.Err != nil }

// unchanged reports whether kubelet's list is as it must be; it may have some
// hundred thousand entries. With an unhealthy device it also depends on who
// holds what.
func (rs *ranges) unchanged() bool {
	now := make([]offeredRange, 0, len(rs.pool.items))
	unhealthy := map[accel.DeviceID]int{} // positions in now
	for i := range rs.pool.items {
		it := &rs.pool.items[i]
		r, _ := rs.layout.Range(it.ID)
		one := offeredRange{start: r.Start, units: r.Units, unhealthy: rs.pool.unusable(it) != ""}
		if one.unhealthy {
			one.allHealthy = !rs.held.certain(it)
			unhealthy[it.ID] = len(now)
		}
		now = append(now, one)
	}
	if len(unhealthy) > 0 && rs.held.holdings != nil {
		inUse := maps.Clone(rs.held.holdings.ids)
		for id := range rs.held.given {
			inUse[id] = struct{}{}
		}
		for id := range inUse {
			d, _ := rs.layout.Device(id)
			if i, ok := unhealthy[d]; ok {
				h := fnv.New64a()
				_, _ = h.Write([]byte(id)) // it never fails
				now[i].held += h.Sum64()
			}
		}
	}
	same := rs.offered != nil && slices.Equal(now, rs.offered)
	rs.offered = now
	return same
}

func (rs *ranges) arrange(now time.Time) (keep bool, problem error) {
	if rs.pool.config.Draining != "" {
		// What containers hold; before that is known, all that they may hold.
		rs.assemble(nil)
		rs.pool.items = slices.DeleteFunc(rs.pool.items, func(it item) bool {
			return rs.held.certain(&it) && rs.held.heldOf(it.ID) == 0
		})
		return false, nil
	}
	problem = rs.switchUnit()
	cards := rs.pool.chosen(sharing.Split(rs.pool.found.Devices))
	if rs.pool.found.Err == nil {
		devices := make([]accel.Device, len(cards))
		for i := range cards {
			devices[i] = cards[i].Device
		}
		present := sharing.Cut(devices, rs.unit)
		for _, s := range present {
			if s.Units == 0 {
				problem = fmt.Errorf("device %s has %d bytes of memory, less than one unit of %s; it is left out", s.ID, s.MemoryBytes,
					accel.UnitName(rs.unit.String()))
			}
		}
		if err := rs.restore(present, now); err != nil {
			return true, err
		}
		layout, err := rs.layout.Place(present, rs.held.heldOf)
		if err != nil {
			problem = err
		}
		rs.layout = layout
	}
	rs.assemble(cards)
	return false, problem
}

// restore makes a layout where there is no saved one. Units that pods hold
// belong to the devices that were planned for the pod, which is signed. Without
// kubelet's whole list that is not known, and a layout that is simply made again
// could give ids that a pod holds to another device.
func (rs *ranges) restore(present []accel.Share, now time.Time) error {
	if !rs.lost {
		return nil
	}
	if rs.held.holdings == nil || rs.held.holdings.partial {
		return errors.New("no saved state; waiting for kubelet and the API server to report the allocated units")
	}
	claims, err := rs.claimsOf(present)
	if err != nil {
		return err
	}
	layout, err := sharing.Recover(present, claims)
	if err != nil {
		return fmt.Errorf("the saved state is lost and cannot be recovered while these pods run: %w", err)
	}
	rs.layout, rs.lost = layout, false
	rs.held.holdings = holdingsOf(rs.held.list, rs.pool.config.Resource, rs.layout, rs.pool.foreign)
	rs.pool.takeChips(Recorded, now)
	return nil
}

// claimsOf returns which units of which device pods hold, by their planned
// allocations.
func (rs *ranges) claimsOf(present []accel.Share) (map[accel.DeviceID][]string, error) {
	resource := rs.pool.config.Resource
	index := map[accel.DeviceID]int{}
	for _, s := range present {
		index[s.ID] = s.Index
	}
	planned := map[PodKey][]accel.DeviceID{}
	for i := range rs.held.list.Pods {
		pod := &rs.held.list.Pods[i]
		if devices, ok := pod.planned(resource); ok && !pod.Ended {
			slices.SortStableFunc(devices, func(a, b accel.DeviceID) int { return cmp.Compare(index[a], index[b]) })
			planned[pod.Key()] = devices
		}
	}
	claims := map[accel.DeviceID][]string{}
	for _, pod := range rs.held.list.Listed {
		devices := planned[pod.PodKey]
		var held []string
		for _, c := range pod.Containers {
			ids := c.Units[resource]
			if slices.ContainsFunc(ids, rs.pool.foreign) {
				continue
			}
			if len(ids) > 0 && len(devices) == 0 {
				return nil, fmt.Errorf("the saved state is lost, and the device of pod %s/%s, which holds units, is unknown",
					pod.Namespace, pod.Name)
			}
			held = append(held, ids...)
		}
		if len(held) == 0 {
			continue
		}
		// Which of several devices has which of the pod's units is not known. Any
		// answer that all pods agree with is right: units are numbers. Lower numbers
		// go to lower indexes, as they do on a new node.
		runs, err := sharing.Runs(held, len(devices))
		if err != nil {
			return nil, fmt.Errorf("the saved state is lost, and the device of the units of pod %s/%s is unknown: %w",
				pod.Namespace, pod.Name, err)
		}
		for i, ids := range runs {
			claims[devices[i]] = append(claims[devices[i]], ids...)
		}
	}
	return claims, nil
}

// switchUnit takes over the configured memory unit once no container holds units
// of the old size.
func (rs *ranges) switchUnit() error {
	if rs.unit == rs.wanted || rs.lost || len(rs.layout.Ranges()) == 0 {
		rs.unit = rs.wanted
		return nil
	}
	if rs.held.holdings == nil || rs.held.holdings.partial {
		return fmt.Errorf("memoryUnit is to change from %s to %s; waiting for kubelet to report whether pods hold units", rs.unit,
			rs.wanted)
	}
	if len(rs.held.given) > 0 {
		return fmt.Errorf("memoryUnit is to change from %s to %s; units of the old size were just allocated", rs.unit, rs.wanted)
	}
	if !rs.held.idle() {
		var names []string
		for key := range rs.held.holdings.pods {
			names = append(names, key.Namespace+"/"+key.Name)
		}
		if slices.Sort(names); len(names) == 0 {
			names = []string{"some whose init containers were served"}
		}
		return fmt.Errorf("memoryUnit stays %s until the pods that hold such units are gone, then becomes %s: %s",
			rs.unit, rs.wanted, strings.Join(names, ", "))
	}
	rs.unit, rs.layout = rs.wanted, &sharing.Layout{}
	return nil
}

// assemble joins layout and discovery into items: the cards, and what has gone
// away but was offered or is held.
func (rs *ranges) assemble(cards []sharing.Card) {
	here := map[accel.DeviceID]accel.Device{}
	for _, c := range cards {
		here[c.ID] = c.Device
	}
	var present, away []item
	for _, r := range rs.layout.Ranges() {
		it := item{units: r.Units, Card: sharing.Card{Chips: []accel.DeviceID{r.Device}}}
		if d, ok := here[r.Device]; ok {
			it.Device = d
			present = append(present, it)
			continue
		}
		if (!rs.pool.listed[r.Device] || rs.pool.here(r.Device)) && rs.held.heldOf(r.Device) == 0 {
			continue
		}
		it.Device = accel.Device{
			Index: r.Index, ID: r.Device, Model: r.Model, MemoryBytes: r.MemoryBytes, NUMANode: r.NUMANode,
			Health: accel.Health{Unhealthy: true, Reason: rs.pool.whyAway(r.Device)},
		}
		away = append(away, it)
	}
	rs.pool.items = apart(present, away)
}
