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

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// memory is the form of a pool that counts the memory of devices in units: each
// device has a range of ids, and the planned allocation of a pod chooses devices.
// What containers hold is not saved: the planned allocations say of which device
// it is.
type memory struct {
	pool *pool
	// wanted is the configured memory unit; unit is the one in force, another one
	// while pods hold units of the other size.
	wanted, unit sharing.MemoryUnit
	layout       *sharing.Layout
	stored       State
	// lost is true while there is no state although pods may hold units: before
	// the first state was made, and after it was lost or damaged.
	lost bool
	// ids is the buffer of the method of that name, offered what kubelet's list was
	// made from.
	buffer  []string
	offered []offeredRange

	// list is the last view, and holdings what follows from it, nil before that.
	list     *View
	holdings *holdings
	// given are the units that containers got and that kubelet has not listed
	// since. Kubelet may not have recorded them yet, and panics when a unit that it
	// was just given is not on its list any more. Or it has started in between and
	// lists nothing, while the API server does not show the pod yet.
	given map[string]givenUnit
	// inits are the pods whose plain init containers were served, by UID.
	inits map[string]initServed
	asked question
	// unknown are the pods that kubelet lists and the API server does not know,
	// such as static pods before their mirror, as of the last question; device is
	// what the one that was served last got.
	unknown map[PodKey]bool
	device  accel.DeviceID
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

// givenUnit is a unit that a container got.
type givenUnit struct {
	device accel.DeviceID
	at     time.Time
}

func newMemory(p *pool) (*memory, error) {
	m := &memory{
		pool: p, wanted: p.config.Unit, unit: p.config.Unit, layout: &sharing.Layout{}, lost: true,
		inits: map[string]initServed{}, given: map[string]givenUnit{},
	}
	if s := p.config.State; s != nil && s.Unit != "" {
		unit, err := sharing.ParseMemoryUnit(s.Unit)
		if err == nil {
			m.layout, err = sharing.NewLayout(s.Ranges)
		}
		if err != nil {
			return nil, fmt.Errorf("unit state of %s: %w", p.config.Resource, err)
		}
		m.stored, m.lost, m.unit = *s, false, unit
		if p.config.Draining != "" {
			m.wanted = unit
		}
	}
	return m, nil
}

func (m *memory) persist() State { return State{Unit: m.unit.String(), Ranges: m.layout.Ranges()} }

func (m *memory) saved(s State) { m.stored = s }

func (m *memory) isSaved(it *item) bool {
	now, _ := m.layout.Range(it.ID)
	return m.stored.Unit == m.unit.String() && slices.ContainsFunc(m.stored.Ranges, func(r sharing.Range) bool {
		return r.Device == it.ID && r.Start == now.Start && r.Units == now.Units
	})
}

func (m *memory) early() []Unit {
	if m.lost {
		return nil
	}
	var out []Unit
	for _, r := range m.layout.Ranges() {
		for _, id := range m.ids(&item{Card: sharing.Card{Device: accel.Device{ID: r.Device}}}) {
			out = append(out, Unit{ID: id})
		}
	}
	return out
}

func (m *memory) ids(it *item) []string {
	m.buffer = m.layout.IDs(m.buffer[:0], it.ID)
	return m.buffer
}

func (m *memory) deviceOf(id string) (accel.DeviceID, bool) { return m.layout.Device(id) }

func (m *memory) held(id string) bool {
	if m.holdings == nil {
		return false
	}
	_, held := m.holdings.ids[id]
	_, given := m.given[id]
	return held || given
}

// certain is false where containers may hold any unit of the device.
func (m *memory) certain(it *item) bool {
	return m.holdings != nil && !m.holdings.partial && !m.keptInits(it.ID)
}

// keptInits reports whether plain init containers, of whose units kubelet keeps
// more than it lists, may have units of the device.
func (m *memory) keptInits(d accel.DeviceID) bool {
	return m.holdings.inits[d] || m.initDevices()[d]
}

// initDevices are the devices of init containers that were served.
func (m *memory) initDevices() map[accel.DeviceID]bool {
	out := map[accel.DeviceID]bool{}
	for _, s := range m.inits {
		for _, d := range s.devices {
			out[d] = true
		}
	}
	return out
}

func (m *memory) free(*item) map[string]bool    { return nil }
func (m *memory) strays(map[string]bool) []Unit { return nil }
func (m *memory) conflict(*item) string         { return "" }
func (m *memory) ready() error                  { return nil }
func (m *memory) reoffer()                      { m.offered = nil }

// known reports whether the units that pods hold have their devices. What an
// earlier run published stays until then.
func (m *memory) known() bool { return !m.lost || m.pool.found.Err != nil }

// unchanged reports whether kubelet's list is as it must be; it may have some
// hundred thousand entries. With an unhealthy device it also depends on who
// holds what.
func (m *memory) unchanged() bool {
	now := make([]offeredRange, 0, len(m.pool.items))
	unhealthy := map[accel.DeviceID]int{} // positions in now
	for i := range m.pool.items {
		it := &m.pool.items[i]
		r, _ := m.layout.Range(it.ID)
		one := offeredRange{start: r.Start, units: r.Units, unhealthy: m.pool.unusable(it) != ""}
		if one.unhealthy {
			one.allHealthy = !m.certain(it)
			unhealthy[it.ID] = len(now)
		}
		now = append(now, one)
	}
	if len(unhealthy) > 0 && m.holdings != nil {
		inUse := maps.Clone(m.holdings.ids)
		for id := range m.given {
			inUse[id] = struct{}{}
		}
		for id := range inUse {
			d, _ := m.layout.Device(id)
			if i, ok := unhealthy[d]; ok {
				h := fnv.New64a()
				_, _ = h.Write([]byte(id)) // it never fails
				now[i].held += h.Sum64()
			}
		}
	}
	same := m.offered != nil && slices.Equal(now, m.offered)
	m.offered = now
	return same
}

func (m *memory) arrange(now time.Time) (problem error, keep bool) {
	if m.pool.config.Draining != "" {
		// What containers hold; before that is known, all that they may hold.
		m.assemble(nil)
		m.pool.items = slices.DeleteFunc(m.pool.items, func(it item) bool {
			return m.certain(&it) && m.heldOf(it.ID) == 0
		})
		return nil, false
	}
	problem = m.switchUnit()
	cards := m.pool.chosen(sharing.Split(m.pool.found.Devices))
	if m.pool.found.Err == nil {
		devices := make([]accel.Device, len(cards))
		for i := range cards {
			devices[i] = cards[i].Device
		}
		present := sharing.Cut(devices, m.unit)
		for _, s := range present {
			if s.Units == 0 {
				problem = fmt.Errorf("device %s has %d bytes of memory, less than one unit of %s GB; it is left out", s.ID, s.MemoryBytes, m.unit)
			}
		}
		if err := m.restore(present, now); err != nil {
			return err, true
		}
		layout, err := m.layout.Place(present, m.heldOf)
		if err != nil {
			problem = err
		}
		m.layout = layout
	}
	m.assemble(cards)
	return problem, false
}

// restore makes a layout where there is no saved one. Units that pods hold
// belong to the devices that were planned for the pod, which is signed. Without
// kubelet's whole list that is not known, and a layout that is simply made again
// could give ids that a pod holds to another device.
func (m *memory) restore(present []accel.Share, now time.Time) error {
	if !m.lost {
		return nil
	}
	if m.holdings == nil || m.holdings.partial {
		return errors.New("there is no saved state; waiting for kubelet and the API server to tell which units are held")
	}
	claims, err := m.claimsOf(present)
	if err != nil {
		return err
	}
	layout, err := sharing.Recover(present, claims)
	if err != nil {
		return fmt.Errorf("the saved state is lost and cannot be made anew while these pods run: %w", err)
	}
	m.layout, m.lost = layout, false
	m.holdings = holdingsOf(m.list, m.pool.config.Resource, m.layout, m.pool.foreign)
	m.pool.claim(Recorded, now)
	return nil
}

// claimsOf returns which units of which device pods hold, by their planned
// allocations.
func (m *memory) claimsOf(present []accel.Share) (map[accel.DeviceID][]string, error) {
	resource := m.pool.config.Resource
	index := map[accel.DeviceID]int{}
	for _, s := range present {
		index[s.ID] = s.Index
	}
	planned := map[PodKey][]accel.DeviceID{}
	for i := range m.list.Pods {
		pod := &m.list.Pods[i]
		if devices, ok := pod.planned(resource); ok && !pod.Ended {
			slices.SortStableFunc(devices, func(a, b accel.DeviceID) int { return cmp.Compare(index[a], index[b]) })
			planned[pod.Key()] = devices
		}
	}
	claims := map[accel.DeviceID][]string{}
	for _, pod := range m.list.Listed {
		devices := planned[pod.PodKey]
		var held []string
		for _, c := range pod.Containers {
			ids := c.Units[resource]
			if slices.ContainsFunc(ids, m.pool.foreign) {
				continue
			}
			if len(ids) > 0 && len(devices) == 0 {
				return nil, fmt.Errorf("the saved state is lost, and nothing tells on which device pod %s/%s is, which holds units", pod.Namespace, pod.Name)
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
			return nil, fmt.Errorf("the saved state is lost, and the units of pod %s/%s do not tell which device they are of: %w", pod.Namespace, pod.Name, err)
		}
		for i, ids := range runs {
			claims[devices[i]] = append(claims[devices[i]], ids...)
		}
	}
	return claims, nil
}

// switchUnit takes over the configured memory unit once no container holds units
// of the old size.
func (m *memory) switchUnit() error {
	if m.unit == m.wanted || m.lost || len(m.layout.Ranges()) == 0 {
		m.unit = m.wanted
		return nil
	}
	if m.holdings == nil || m.holdings.partial {
		return fmt.Errorf("memoryUnit is to change from %s to %s; waiting for kubelet to tell whether pods hold units", m.unit, m.wanted)
	}
	if len(m.given) > 0 {
		return fmt.Errorf("memoryUnit is to change from %s to %s; units of the old size were given out just now", m.unit, m.wanted)
	}
	if len(m.holdings.ids) > 0 {
		var names []string
		for key := range m.holdings.pods {
			names = append(names, key.Namespace+"/"+key.Name)
		}
		slices.Sort(names)
		return fmt.Errorf("memoryUnit stays %s until the pods that hold such units are gone, then becomes %s: %s", m.unit, m.wanted, strings.Join(names, ", "))
	}
	m.unit, m.layout = m.wanted, &sharing.Layout{}
	return nil
}

// heldOf counts the units that containers hold of a device. Before kubelet was
// asked, every device counts as held.
func (m *memory) heldOf(d accel.DeviceID) int {
	if m.holdings == nil || m.holdings.partial {
		return 1
	}
	n := m.holdings.perDevice[d]
	for _, one := range m.given {
		if one.device == d {
			n++
		}
	}
	return n
}

// assemble joins layout and discovery into items: the cards, and what has gone
// away but was offered or is held.
func (m *memory) assemble(cards []sharing.Card) {
	here := map[accel.DeviceID]accel.Device{}
	for _, c := range cards {
		here[c.ID] = c.Device
	}
	var present, away []item
	for _, r := range m.layout.Ranges() {
		it := item{units: r.Units, Card: sharing.Card{Chips: []accel.DeviceID{r.Device}}}
		if d, ok := here[r.Device]; ok {
			it.Device = d
			present = append(present, it)
			continue
		}
		if (!m.pool.listed[r.Device] || m.pool.here(r.Device)) && m.heldOf(r.Device) == 0 {
			continue
		}
		it.Device = accel.Device{
			Index: r.Index, ID: r.Device, Model: r.Model, MemoryBytes: r.MemoryBytes, NUMANode: r.NUMANode,
			Health: accel.Health{Unhealthy: true, Reason: m.pool.whyAway(r.Device)},
		}
		away = append(away, it)
	}
	m.pool.items = apart(present, away)
}

func (m *memory) take(v *View) {
	m.list = v
	m.holdings = holdingsOf(v, m.pool.config.Resource, m.layout, m.pool.foreign)
	maps.DeleteFunc(m.given, func(id string, one givenUnit) bool {
		_, listed := m.holdings.ids[id]
		return listed || v.Now.Sub(one.at) >= Recorded
	})
}

func (m *memory) claimed() (map[accel.DeviceID]bool, bool) {
	if m.lost && len(m.holdings.ids) > 0 {
		return nil, false // whose units these are is not known yet
	}
	held := m.initDevices()
	for d, n := range m.holdings.perDevice {
		held[d] = held[d] || n > 0
	}
	for d := range m.holdings.inits {
		held[d] = held[d] || d != ""
	}
	for d := range m.holdings.running {
		held[d] = true
	}
	for _, d := range m.list.Ending[m.pool.config.Resource] {
		held[d] = true
	}
	return held, true
}

func (m *memory) holders(chip accel.DeviceID) []PodKey {
	if m.holdings == nil {
		return nil
	}
	var out []PodKey
	for key, h := range m.holdings.pods {
		if slices.Contains(h.devices, chip) {
			out = append(out, key)
		}
	}
	return out
}

func (m *memory) counts() (map[accel.DeviceID]int, bool) {
	if m.holdings == nil {
		return nil, false
	}
	return m.holdings.perDevice, true
}

func (m *memory) idle() bool {
	if m.holdings == nil || m.holdings.partial || len(m.holdings.ids) > 0 || len(m.given) > 0 || len(m.initDevices()) > 0 {
		return false
	}
	for d := range m.holdings.inits {
		if d != "" {
			return false
		}
	}
	return true
}

// share returns a device as it is, whoever holds it.
func (m *memory) share(id accel.DeviceID) (accel.Share, bool) {
	for i := range m.pool.items {
		if it := &m.pool.items[i]; it.ID == id {
			return accel.Share{Device: it.Device, Units: it.units}, true
		}
	}
	return accel.Share{}, false
}

// byIndex returns the devices in the order of their indexes, in which containers
// see them.
func (m *memory) byIndex(devices []accel.DeviceID) []accel.DeviceID {
	index := map[accel.DeviceID]int{}
	for i := range m.pool.items {
		index[m.pool.items[i].ID] = m.pool.items[i].Index
	}
	out := slices.Clone(devices)
	slices.SortStableFunc(out, func(a, b accel.DeviceID) int { return cmp.Compare(index[a], index[b]) })
	return out
}
