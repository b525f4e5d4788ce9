package nodeagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// sync derives units and inventory from devices, layout and holdings, and tells
// kubelet. The agent's loop calls it too, so it must not wake the loop.
func (p *memoryPool) sync(ctx context.Context) {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	p.mu.Lock()
	units, problem := p.derive()
	p.mu.Unlock()
	var refused error
	if units != nil {
		refused = p.offerUnits(units)
	}
	p.mu.Lock()
	if refused != nil {
		problem, p.offered = refused, nil
	}
	was, absent := p.problem, p.nothingHere()
	p.problem = problem
	p.mu.Unlock()
	reportProblem(ctx, p.resource, was, problem, absent, p.event)
}

// offerUnits hands the list to kubelet's server. An entry of an unhealthy unit
// is two bytes longer than one of a healthy unit, so cards that fail may make a
// list too long that was just short enough; then those units, which nobody can
// get anyway, are left out.
func (p *memoryPool) offerUnits(units []deviceplugin.Unit) error {
	err := p.sink.SetUnits(units)
	var tooMany *deviceplugin.TooManyUnitsError
	if !errors.As(err, &tooMany) {
		return err
	}
	healthy := slices.DeleteFunc(units, func(u deviceplugin.Unit) bool { return u.Unhealthy })
	if len(healthy) == 0 || len(healthy) == tooMany.Units {
		return err
	}
	return p.sink.SetUnits(healthy)
}

// derive computes shares and units; nil units mean that kubelet is to keep what
// it has. The caller holds mu.
func (p *memoryPool) derive() ([]deviceplugin.Unit, error) {
	if p.draining != "" {
		units := p.drain()
		if !p.heldByNobody() { // else the file is about to be removed
			p.written.unsaved = p.save()
		}
		p.written.describe(p.specify, p.devices())
		return units, p.written.problem(nil)
	}
	var problem error
	switch {
	case !p.looked:
		return nil, errors.New("the devices were not looked for yet")
	case p.foundErr != nil:
		problem = p.foundErr
	case len(p.found.Devices) == 0 && len(p.found.Faults) == 0:
		problem = fmt.Errorf("the vendor's library reports no %s device", p.vendor)
	case len(p.found.Devices) > 0:
		problem = p.injectable()
	}
	if err := p.switchUnit(); err != nil {
		problem = err
	}
	if p.foundErr == nil {
		present := sharing.Cut(p.found.Devices, p.unit)
		for _, s := range present {
			if s.Units == 0 {
				problem = fmt.Errorf("device %s has %d bytes of memory, less than one unit of %s GB; it is left out", s.ID, s.MemoryBytes, p.unit)
			}
		}
		if err := p.restore(present); err != nil {
			return nil, err
		}
		layout, err := p.layout.Place(present, p.heldOf)
		if err != nil {
			problem = err
		}
		p.layout = layout
	}
	p.shares = p.assemble()
	p.written.unsaved = p.save()
	p.written.describe(p.specify, p.devices())
	problem = p.written.problem(problem)
	if len(p.shares) == 0 && len(p.listed) == 0 {
		return none(p.offeredEarly), problem
	}
	for _, s := range p.shares {
		p.listed[s.ID] = true
	}
	if !p.stale() {
		return nil, problem
	}
	return p.units(), problem
}

// injectable returns why containers cannot reach the devices as configured.
func (p *memoryPool) injectable() error {
	edits, err := p.backend.Edits(p.found.Devices[0].ID)
	if err != nil {
		return nil //nolint:nilerr // told when a container asks for it
	}
	return p.inject.check(p.vendor, edits)
}

// drain lists what containers hold of a resource that takes no new pods; before
// that is known, all that they may hold.
func (p *memoryPool) drain() []deviceplugin.Unit {
	unknown := p.held == nil || p.held.partial
	p.shares = nil
	for _, s := range p.assemble() {
		if unknown || p.held.perDevice[s.ID] > 0 || p.keptInits(s.ID) {
			p.shares = append(p.shares, s)
		}
	}
	out := []deviceplugin.Unit{}
	for _, s := range p.shares {
		for _, id := range p.layout.IDs(nil, s.ID) {
			if unknown || p.keptInits(s.ID) || p.inUse(id) {
				out = append(out, deviceplugin.Unit{ID: id})
			}
		}
	}
	return out
}

// stale reports whether kubelet's list has to be made anew; it may have some
// hundred thousand entries. With an unhealthy device it also depends on who
// holds what.
func (p *memoryPool) stale() bool {
	now := make([]offeredRange, 0, len(p.shares))
	sick := map[accel.DeviceID]int{} // positions in now
	for _, s := range p.offerable() {
		r, _ := p.layout.Range(s.ID)
		one := offeredRange{start: r.Start, units: r.Units, unhealthy: s.Health.Unhealthy}
		if s.Health.Unhealthy {
			one.allHealthy = p.allHealthy(s.ID)
			sick[s.ID] = len(now)
		}
		now = append(now, one)
	}
	if len(sick) > 0 && p.held != nil {
		inUse := maps.Clone(p.held.ids)
		for id := range p.given {
			inUse[id] = struct{}{}
		}
		for id := range inUse {
			d, _ := p.layout.Device(id)
			if i, ok := sick[d]; ok {
				h := fnv.New64a()
				_, _ = h.Write([]byte(id)) // it never fails
				now[i].held += h.Sum64()
			}
		}
	}
	same := p.offered != nil && slices.Equal(now, p.offered)
	p.offered = now
	return !same
}

// allHealthy reports whether all units of an unhealthy device are told to be
// healthy, because containers may hold any of them.
func (p *memoryPool) allHealthy(d accel.DeviceID) bool {
	return p.held == nil || p.held.partial || p.keptInits(d)
}

// keptInits reports whether plain init containers, of whose units kubelet keeps
// more than it lists, may have units of the device.
func (p *memoryPool) keptInits(d accel.DeviceID) bool {
	return p.held.inits[d] || p.initDevices[d]
}

// inUse reports whether a container holds the unit or has just got it.
func (p *memoryPool) inUse(id string) bool {
	if _, held := p.held.ids[id]; held {
		return true
	}
	_, given := p.given[id]
	return given
}

// restore makes a layout where there is no saved one. Units that pods hold
// belong to the devices that the pod's grant names, which is signed. Without
// kubelet's whole list there is no telling, and a layout that is merely made
// anew could give ids that a pod holds to another card.
func (p *memoryPool) restore(present []accel.Share) error {
	if !p.lost {
		return nil
	}
	if p.held == nil || p.held.partial {
		return errors.New("there is no saved state; waiting for kubelet and the API server to tell which units are held")
	}
	index := map[accel.DeviceID]int{}
	for _, s := range present {
		index[s.ID] = s.Index
	}
	granted := map[podKey][]accel.DeviceID{}
	for _, pod := range p.records.pods.Cached() {
		if g, ok := p.grant(pod); ok && !terminal(pod) {
			devices := grantedDevices(g)
			slices.SortStableFunc(devices, func(a, b accel.DeviceID) int { return cmp.Compare(index[a], index[b]) })
			granted[podKey{pod.Namespace, pod.Name}] = devices
		}
	}
	claims := map[accel.DeviceID][]string{}
	for _, pod := range p.answer {
		devices := granted[podKey{pod.Namespace, pod.Name}]
		var held []string
		for _, c := range pod.Containers {
			ids := c.Units[p.resource]
			if p.foreign != nil && slices.ContainsFunc(ids, p.foreign) {
				continue
			}
			if len(ids) > 0 && len(devices) == 0 {
				return fmt.Errorf("the saved state is lost, and nothing tells on which device pod %s/%s is, which holds units", pod.Namespace, pod.Name)
			}
			held = append(held, ids...)
		}
		if len(held) == 0 {
			continue
		}
		// Which of several devices has which of the pod's units is not told. Any
		// answer that all pods agree with is right: units are numbers. Lower numbers
		// go to lower indexes, as they do on a new node.
		runs, err := sharing.Runs(held, len(devices))
		if err != nil {
			return fmt.Errorf("the saved state is lost, and the units of pod %s/%s do not tell which device they are of: %w", pod.Namespace, pod.Name, err)
		}
		for i, ids := range runs {
			claims[devices[i]] = append(claims[devices[i]], ids...)
		}
	}
	layout, err := sharing.Recover(present, claims)
	if err != nil {
		return fmt.Errorf("the saved state is lost and cannot be made anew while these pods run: %w", err)
	}
	p.layout, p.lost = layout, false
	p.hold(p.records.pods)
	p.claim(recorded)
	return nil
}

// switchUnit takes over the configured memory unit once nobody holds units of
// the old size.
func (p *memoryPool) switchUnit() error {
	if p.unit == p.wanted || p.lost || len(p.layout.Ranges()) == 0 {
		p.unit = p.wanted
		return nil
	}
	if p.held == nil || p.held.partial {
		return fmt.Errorf("memoryUnit is to change from %s to %s; waiting for kubelet to tell whether pods hold units", p.unit, p.wanted)
	}
	if len(p.given) > 0 {
		return fmt.Errorf("memoryUnit is to change from %s to %s; units of the old size were given out just now", p.unit, p.wanted)
	}
	if len(p.held.ids) > 0 {
		var names []string
		for key := range p.held.pods {
			names = append(names, key.namespace+"/"+key.name)
		}
		slices.Sort(names)
		return fmt.Errorf("memoryUnit stays %s until the pods that hold such units are gone, then becomes %s: %s", p.unit, p.wanted, strings.Join(names, ", "))
	}
	p.unit, p.layout = p.wanted, &sharing.Layout{}
	return nil
}

// heldOf counts the units that containers hold of a device. Before kubelet was
// asked, every device counts as held.
func (p *memoryPool) heldOf(d accel.DeviceID) int {
	if p.held == nil || p.held.partial {
		return 1
	}
	n := p.held.perDevice[d]
	for _, one := range p.given {
		if one.device == d {
			n++
		}
	}
	return n
}

// assemble joins layout and discovery into shares: what is there, and what has
// gone away but was offered or is held.
func (p *memoryPool) assemble() []accel.Share {
	devices := map[accel.DeviceID]accel.Device{}
	for _, d := range p.found.Devices {
		devices[d.ID] = d
	}
	faults := map[accel.DeviceID]string{}
	for _, f := range p.found.Faults {
		if f.ID != "" && f.Err != nil {
			faults[f.ID] = f.Err.Error()
		}
	}
	var shares []accel.Share
	taken := map[int]bool{}
	var away []accel.Share
	for _, r := range p.layout.Ranges() {
		if d, ok := devices[r.Device]; ok && p.draining == "" {
			shares = append(shares, accel.Share{Device: d, Units: r.Units})
			taken[d.Index] = true
			continue
		}
		if (!p.listed[r.Device] || p.left[r.Device] != "") && p.heldOf(r.Device) == 0 {
			continue
		}
		reason := cmp.Or(p.left[r.Device], faults[r.Device], "the vendor's library does not list the device any more")
		if p.foundErr != nil {
			reason = p.foundErr.Error()
		}
		if p.draining != "" {
			reason = p.draining
		}
		away = append(away, accel.Share{Units: r.Units, Device: accel.Device{
			Index: r.Index, ID: r.Device, Model: r.Model, MemoryBytes: r.MemoryBytes, NUMANode: r.NUMANode,
			Health: accel.Health{Unhealthy: true, Reason: reason},
		}})
	}
	for _, s := range away {
		// The library may have given its index to another device.
		for taken[s.Index] {
			s.Index++
		}
		taken[s.Index] = true
		shares = append(shares, s)
	}
	slices.SortFunc(shares, func(a, b accel.Share) int { return cmp.Compare(a.Index, b.Index) })
	return shares
}

// save makes the file hold the state.
func (p *memoryPool) save() error {
	next := sharing.State{Vendor: p.vendor, Unit: p.unit.String(), Ranges: p.layout.Ranges()}
	if len(next.Ranges) == 0 && len(p.saved.Ranges) == 0 {
		return nil
	}
	if err := p.store.Save(next); err != nil {
		return err
	}
	p.saved = next
	return nil
}

// units lists what kubelet is told. Units that a container holds stay healthy
// whatever happens to their device: kubelet refuses a running pod after its own
// restart when they are not. No new pod can get them, since this program
// answers which units a container gets.
func (p *memoryPool) units() []deviceplugin.Unit {
	var total accel.Units
	for _, s := range p.shares {
		total += s.Units
	}
	out := make([]deviceplugin.Unit, 0, total)
	var ids []string
	for _, s := range p.offerable() {
		ids = p.layout.IDs(ids[:0], s.ID)
		for _, id := range ids {
			u := deviceplugin.Unit{ID: id}
			if s.Health.Unhealthy && !p.allHealthy(s.ID) {
				u.Unhealthy = !p.inUse(id)
			}
			out = append(out, u)
		}
	}
	return out
}
