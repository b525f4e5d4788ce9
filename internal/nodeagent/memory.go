package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/events"
	"github.com/divvy-gpu/divvy/internal/podresources"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// memoryPool is a resource of device memory: the devices behind it, the units
// that they are cut into, and who holds them. It is a part.
type memoryPool struct {
	resource accel.Resource
	// wanted is the configured memory unit.
	wanted sharing.MemoryUnit
	// selector chooses among the vendor's devices, nil for all.
	selector *sharing.Selector
	// draining says why the resource takes no new pods for good, "" while it is
	// configured.
	draining string
	inject   injector
	vendor   string
	// backend is nil for a vendor that is not configured any more.
	backend backend.Backend
	store   *sharing.Store
	records *records
	tenant  *tenant
	grant   func(*corev1.Pod) (accel.Grant, bool)
	metrics *metrics
	// ending returns the devices of pods that are gone before their containers;
	// nil where nobody looks after those.
	ending func() []accel.DeviceID
	sink   unitSink
	// specify describes devices in CDI and returns why some are not; nil where
	// containers are not given CDI names that this program defines.
	specify func([]accel.Device) map[accel.DeviceID]error
	// foreign reports whether an id belongs to another part of the resource.
	foreign func(id string) bool
	// changed is called, without locks, when the inventory or what the pods
	// hold may have changed; withdrawn when devices were given out that other
	// resources offer as well.
	changed, withdrawn func()
	// event tells the users of the node.
	event func(kind events.Kind, message string)

	// inits, asked and strangers are guarded by records.turn.
	inits map[string]initServed
	asked question
	// strangers are the pods that kubelet lists and the API server does not
	// know, such as static pods before their mirror, as of the last question;
	// strangerDevice is what the one that was served last got.
	strangers      map[podKey]bool
	strangerDevice accel.DeviceID

	// syncing is held from the derivation of kubelet's list until it is
	// handed over, so that an older list never replaces a newer one.
	syncing sync.Mutex

	mu sync.Mutex // guards what follows
	// unit is the memory unit in force; it differs from wanted while pods hold
	// units of the other size.
	unit   sharing.MemoryUnit
	layout *sharing.Layout
	// lost is true while there is no state although pods may hold units: before
	// the first state was made, and after it was lost or damaged.
	lost     bool
	answer   []podresources.Pod // kubelet's last list
	saved    sharing.State
	written  written
	found    backend.Found
	foundErr error
	looked   bool
	listed   map[accel.DeviceID]bool // devices reported to kubelet by this process
	// shares are the devices as they are, whoever holds them.
	shares []accel.Share
	// left is why a device that is there is not one of the resource's.
	left map[accel.DeviceID]string
	held *holdings // nil until kubelet was asked once
	// given are the units that containers got and that kubelet has not listed
	// since. Kubelet may not have recorded them yet, and panics when a unit that it
	// was just given is not on its list any more. Or it has started anew in between
	// and lists nothing, while the watch does not show the pod yet.
	given map[string]givenUnit
	// initDevices are the devices of which inits knows.
	initDevices map[accel.DeviceID]bool
	problem     error          // why the resource cannot be offered as configured
	offered     []offeredRange // what kubelet's list was made from
	// offeredEarly is true once kubelet knows the units of early.
	offeredEarly bool
}

// offeredRange is what decides about the units of one device in kubelet's list.
type offeredRange struct {
	start     int64
	units     accel.Units
	unhealthy bool
	// Of an unhealthy device, of which only the units that are held are told to
	// be healthy: whether all are all the same, and a sum that tells sets of held
	// units apart.
	allHealthy bool
	held       uint64
}

// givenUnit is a unit that a container got.
type givenUnit struct {
	device accel.DeviceID
	at     time.Time
}

// question is the last answer to GetPreferredAllocation.
type question struct {
	uid       string // of the pod that the question was taken to be for, or ""
	stranger  bool   // it is for a pod that the API server does not know
	request   accel.Request
	container int              // position in request
	devices   []accel.DeviceID // sorted
	ids       []string
}

// open restores what earlier runs remembered.
func (p *memoryPool) open(ctx context.Context) error {
	log := klog.FromContext(ctx).WithValues("resource", p.resource)
	p.inits = map[string]initServed{}
	p.given = map[string]givenUnit{}
	p.listed = map[accel.DeviceID]bool{}
	p.unit = p.wanted
	state, layout, err := p.store.Load()
	if err != nil {
		// It is replaced by what kubelet and the pods' grants say.
		aside, moveErr := p.store.Quarantine()
		log.Error(errors.Join(err, moveErr), "Recovering from kubelet and the pods' grants which units belong to which device", "movedTo", aside)
		state, layout = sharing.State{}, &sharing.Layout{}
	}
	p.layout, p.saved, p.lost = layout, state, state.Unit == ""
	if state.Unit != "" {
		unit, err := sharing.ParseMemoryUnit(state.Unit)
		if err != nil {
			return fmt.Errorf("unit state of %s: %w", p.resource, err)
		}
		p.unit = unit
		if p.draining != "" {
			p.wanted = unit
		}
	}
	return nil
}

// update takes the outcome of a discovery.
func (p *memoryPool) update(ctx context.Context, found backend.Found, err error) {
	p.mu.Lock()
	p.left = map[accel.DeviceID]string{}
	found.Devices = slices.DeleteFunc(slices.Clone(found.Devices), func(d accel.Device) bool {
		chosen := p.selector.Matches(sharing.Card{Device: d, Chips: []accel.DeviceID{d.ID}})
		if !chosen {
			p.left[d.ID] = fmt.Sprintf("the configuration does not give it to %s", p.resource)
		}
		return !chosen
	})
	p.found, p.foundErr, p.looked = found, err, true
	p.mu.Unlock()
	p.sync(ctx)
	p.changed()
}

// take implements part.
func (p *memoryPool) take(pods []podresources.Pod, grace time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = pods
	p.hold(p.records.around())
	now := time.Now()
	maps.DeleteFunc(p.given, func(id string, one givenUnit) bool {
		_, listed := p.held.ids[id]
		return listed || now.Sub(one.at) >= recorded
	})
	p.claim(grace)
}

// hold derives from kubelet's last list, and the pods of the API server, who
// holds what. The caller holds mu.
func (p *memoryPool) hold(pods podSource) {
	p.held = holdingsOf(p.answer, p.resource, p.layout, p.foreign)
	p.held.complete(pods, p.resource, p.grant)
}

// claim tells the other resources which devices are given out. The caller holds
// mu.
func (p *memoryPool) claim(grace time.Duration) {
	if p.lost && len(p.held.ids) > 0 {
		return // nobody knows yet whose units these are
	}
	held := map[accel.DeviceID]bool{}
	for d, n := range p.held.perDevice {
		held[d] = n > 0
	}
	for d := range p.held.inits {
		held[d] = held[d] || d != ""
	}
	for d := range p.initDevices {
		held[d] = true
	}
	for d := range p.held.running {
		held[d] = true
	}
	if p.ending != nil {
		for _, d := range p.ending() {
			held[d] = true
		}
	}
	p.tenant.set(held, grace)
}

// holdings returns what kubelet's last list tells.
func (p *memoryPool) holdings() *holdings {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held
}

// owns implements part.
func (p *memoryPool) owns(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, ok := p.layout.Device(id)
	return ok
}

// holders implements part.
func (p *memoryPool) holders(chip accel.DeviceID) []podKey {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held == nil {
		return nil
	}
	var out []podKey
	for key, h := range p.held.pods {
		if slices.Contains(h.devices, chip) {
			out = append(out, key)
		}
	}
	return out
}

// chips implements part.
func (p *memoryPool) chips() []accel.Device {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.devices()
}

// devices is chips for a caller that holds mu.
func (p *memoryPool) devices() []accel.Device {
	out := make([]accel.Device, 0, len(p.shares))
	for _, s := range p.shares {
		if p.left[s.ID] == "" {
			out = append(out, s.Device)
		}
	}
	return out
}

// offerable returns the shares with those devices unhealthy that are withheld or
// given out as something else. The caller holds mu.
func (p *memoryPool) offerable() []accel.Share {
	out := slices.Clone(p.shares)
	for i := range out {
		if out[i].Health.Unhealthy {
			continue
		}
		if why := p.written.withheld(p.isSaved(out[i].ID), out[i].ID); why != "" {
			out[i].Health = accel.Health{Unhealthy: true, Reason: why}
		} else if r, taken := p.tenant.elsewhere(out[i].ID); taken {
			out[i].Health = accel.Health{Unhealthy: true, Reason: givenOutAs(r)}
		}
	}
	return out
}

// isSaved reports whether the state that was saved last says which units are the
// device's. The caller holds mu.
func (p *memoryPool) isSaved(d accel.DeviceID) bool {
	now, _ := p.layout.Range(d)
	return p.saved.Unit == p.unit.String() && slices.ContainsFunc(p.saved.Ranges, func(r sharing.Range) bool {
		return r.Device == d && r.Start == now.Start && r.Units == now.Units
	})
}

// inventory is what the node publishes of this resource.
func (p *memoryPool) inventory() accel.Inventory {
	p.mu.Lock()
	defer p.mu.Unlock()
	return accel.Inventory{Resource: p.resource, Unit: p.unit.String(), Shares: p.offerable(), Links: p.found.Links, Several: true}
}

// ready returns why the resource is not offered as configured, or nil.
func (p *memoryPool) ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.draining != "" {
		return nil
	}
	if !p.looked {
		return fmt.Errorf("%s: the devices were not looked for yet", p.resource)
	}
	if p.problem != nil {
		return fmt.Errorf("%s: %w", p.resource, p.problem)
	}
	return nil
}

// observe implements part.
func (p *memoryPool) observe() {
	if h := p.holdings(); h != nil {
		p.metrics.observe(p.inventory(), h.perDevice)
	}
}

// device returns the share of a device.
func (p *memoryPool) device(id accel.DeviceID) (accel.Share, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.shares {
		if s.ID == id {
			return s, true
		}
	}
	return accel.Share{}, false
}

// known reports whether the inventory is worth publishing: the devices were
// looked for, and the units that pods hold have their devices. What an earlier
// run published stays until then.
func (p *memoryPool) known() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.looked && (!p.lost || p.foundErr != nil)
}

// absent implements part.
func (p *memoryPool) absent() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.nothingHere()
}

// nothingHere is absent for a caller that holds mu.
func (p *memoryPool) nothingHere() bool {
	return p.looked && len(p.found.Devices) == 0 && len(p.found.Faults) == 0 && len(p.shares) == 0
}

// drained implements part.
func (p *memoryPool) drained() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.draining != "" && p.heldByNobody()
}

// idle implements part.
func (p *memoryPool) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.heldByNobody()
}

// heldByNobody reports whether it is certain that nobody holds units. The caller
// holds mu.
func (p *memoryPool) heldByNobody() bool {
	return p.held != nil && !p.held.partial && len(p.held.ids) == 0 && len(p.given) == 0 &&
		!slices.ContainsFunc(slices.Collect(maps.Keys(p.held.inits)), func(d accel.DeviceID) bool { return d != "" }) && len(p.initDevices) == 0
}

// forget implements part.
func (p *memoryPool) forget() error { return p.store.Remove() }

// present counts the devices that the vendor's library lists now.
func (p *memoryPool) present() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.found.Devices)
}
