package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/events"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// slotRules say how a slotPool cuts devices into slots.
type slotRules struct {
	// splitBoards makes each chip of a board a device of its own.
	splitBoards bool
	// selector chooses among the devices, nil for all.
	selector *sharing.Selector
	// sliced is true for time slices, of which each device has replicas, or as
	// many as the first of rules that matches it says.
	sliced   bool
	replicas int
	rules    []sharing.ReplicaRule
	policy   sharing.SlotPolicy
	// single refuses containers that ask for more than one slice.
	single bool
}

// rulesOf reads the rules of a resource.
func rulesOf(r *config.Resource) slotRules {
	out := slotRules{
		splitBoards: r.SplitBoards,
		selector:    selectorOf(r.Devices),
		sliced:      r.Mode == config.ModeTimeSlicing,
		replicas:    max(r.Replicas, 1),
	}
	if r.Allocation == config.PackedAllocation {
		out.policy = sharing.Packed
	}
	for i := range r.ReplicasFor {
		out.rules = append(out.rules, sharing.ReplicaRule{
			Devices: *selectorOf(&r.ReplicasFor[i].Devices), Replicas: max(r.ReplicasFor[i].Replicas, 1),
		})
	}
	// With one replica each, several are several whole devices.
	out.single = out.sliced && r.FailRequestsGreaterThanOne &&
		(out.replicas > 1 || slices.ContainsFunc(out.rules, func(r sharing.ReplicaRule) bool { return r.Replicas > 1 }))
	return out
}

func selectorOf(d *config.DeviceSelector) *sharing.Selector {
	if d == nil {
		return nil
	}
	out := &sharing.Selector{Models: d.Models, Indexes: d.Indexes, Except: selectorOf(d.Except)}
	for _, id := range d.IDs {
		out.IDs = append(out.IDs, accel.DeviceID(id))
	}
	return out
}

// replicasOf returns how many slices the card has, 0 for one that is given out
// as a whole.
func (r *slotRules) replicasOf(c sharing.Card) int {
	if !r.sliced {
		return 0
	}
	return sharing.Replicas(c, r.rules, r.replicas)
}

// slotPool is a resource of whole devices or of time slices: the cards behind
// it, their slots, and which of them containers hold. It is a part.
//
// A slot that a container holds stays on kubelet's list, healthy, until the
// container lets go of it, whatever becomes of the card or the configuration:
// kubelet, when it restarts, fails a running pod otherwise. What a slot id meant
// when it was given out is remembered with it.
type slotPool struct {
	resource accel.Resource
	rules    slotRules
	// draining says why the resource takes no new pods for good, "" while it is
	// configured.
	draining string
	inject   injector
	vendor   string
	// backend is nil for a vendor that is not configured any more.
	backend backend.Backend
	store   *sharing.SlotStore
	records *records
	tenant  *tenant
	// promised returns the devices that pods were granted by memory and that
	// kubelet has not come to yet. The caller holds records.turn.
	promised func([]*corev1.Pod) map[accel.DeviceID]bool
	metrics  *metrics
	sink     unitSink
	// specify describes devices in CDI and returns why some are not; nil where
	// containers are not given CDI names that this program defines.
	specify func([]accel.Device) map[accel.DeviceID]error
	// foreign reports whether an id belongs to another part of the resource. It
	// is not called under mu.
	foreign func(id string) bool
	// changed is called, without locks, when the inventory or what the pods
	// hold may have changed; withdrawn when devices were given out that other
	// resources offer as well.
	changed, withdrawn func()
	// event tells the users of the node.
	event func(kind events.Kind, message string)

	// admitting are the pods (initHolder) that the last question of kubelet may
	// have been for and that have plain init containers; preferred is what it was
	// answered. Guarded by records.turn.
	admitting []string
	preferred []string

	// syncing is held from the derivation of kubelet's list until it is
	// handed over, so that an older list never replaces a newer one.
	syncing sync.Mutex

	mu       sync.Mutex // guards what follows
	found    backend.Found
	foundErr error
	looked   bool
	// chipIndex is the vendor's number of each chip when it was last listed.
	chipIndex map[accel.DeviceID]int
	boards    *sharing.Boards
	// cards are what is offered, and what is away and was offered by this
	// process or is held.
	cards []slotCard
	links []accel.Link
	// remembered describes the cards that were ever offered, by id.
	remembered map[accel.DeviceID]sharing.StoredCard
	// listed are the cards that this process offered.
	listed map[accel.DeviceID]bool
	holds  map[string]*slotHold
	// certain is true once it is known which slots containers hold: they were
	// remembered, or kubelet told of all its pods.
	certain bool
	// complete is true while kubelet's last list has all pods that run.
	complete bool
	listings map[podKey][]string       // slots by pod, of kubelet's last list
	served   map[podKey]map[string]int // how many of them by container
	active   map[podKey]bool
	saved    sharing.SlotState
	written  written
	problem  error
	// offeredEarly is true once kubelet knows the units of early.
	offeredEarly bool
}

// slotCard is a card that is offered.
type slotCard struct {
	sharing.Card
	replicas int // 0 for one that is given out as a whole
}

// slotHold is a slot that a container holds.
type slotHold struct {
	// chips are those that came with it, none when that is not known.
	chips []accel.DeviceID
	// inits are the pods (initHolder) whose plain init containers may hold it.
	inits []string
	// unasked is true when it is not known which pod it was given to: kubelet
	// chose it without asking.
	unasked bool
	// at is when it was given out by this process.
	at time.Time
	// seen is true once kubelet listed it.
	seen bool
}

// open restores what earlier runs remembered.
func (p *slotPool) open(ctx context.Context) error {
	p.remembered = map[accel.DeviceID]sharing.StoredCard{}
	p.listed = map[accel.DeviceID]bool{}
	p.holds = map[string]*slotHold{}
	p.chipIndex = map[accel.DeviceID]int{}
	state, exists, err := p.store.Load()
	if err != nil {
		// It is replaced by what kubelet reports.
		aside, moveErr := p.store.Quarantine()
		klog.FromContext(ctx).Error(errors.Join(err, moveErr), "Recovering from kubelet which devices containers hold", "resource", p.resource, "movedTo", aside)
	}
	p.boards = sharing.NewBoards(state.Boards)
	p.saved, p.certain = state, exists
	for _, c := range state.Cards {
		p.remembered[c.ID] = c
	}
	held := map[accel.DeviceID]bool{}
	for _, h := range state.Held {
		p.holds[h.ID] = &slotHold{chips: h.Chips, inits: h.Inits, seen: true}
		for _, c := range h.Chips {
			held[c] = true
		}
	}
	if exists {
		p.tenant.set(held, 0)
	}
	return nil
}

// update implements part.
func (p *slotPool) update(ctx context.Context, found backend.Found, err error) {
	p.mu.Lock()
	p.found, p.foundErr, p.looked = found, err, true
	for _, d := range found.Devices {
		p.chipIndex[d.ID] = d.Index
	}
	p.mu.Unlock()
	p.sync(ctx)
	p.changed()
}

// sync implements part.
func (p *slotPool) sync(ctx context.Context) {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	p.mu.Lock()
	units, problem := p.derive()
	p.mu.Unlock()
	if units != nil {
		if err := p.sink.SetUnits(units); err != nil {
			problem = err
		}
	}
	p.mu.Lock()
	was, absent := p.problem, p.nothingHere()
	p.problem = problem
	p.mu.Unlock()
	reportProblem(ctx, p.resource, was, problem, absent, p.event)
}

// derive computes cards and units; nil units mean that kubelet is to keep what
// it has. The caller holds mu.
func (p *slotPool) derive() ([]deviceplugin.Unit, error) {
	if !p.looked {
		return nil, errors.New("the devices were not looked for yet")
	}
	var problem error
	switch {
	case p.draining != "":
	case p.foundErr != nil:
		problem = p.foundErr
	case len(p.found.Devices) == 0 && len(p.found.Faults) == 0:
		problem = fmt.Errorf("the vendor's library reports no %s device", p.vendor)
	case len(p.found.Devices) > 0:
		if edits, err := p.backend.Edits(p.found.Devices[0].ID); err == nil {
			problem = p.inject.check(p.vendor, edits)
		}
	}
	p.assemble()
	if problem == nil && p.draining == "" && len(p.found.Devices) > 0 && len(p.cards) == 0 {
		problem = fmt.Errorf("the configuration chooses none of the %d %s devices for it", len(p.found.Devices), p.vendor)
	}
	p.written.unsaved = p.save()
	p.written.describe(p.specify, p.devices())
	problem = p.written.problem(problem)
	if len(p.cards) == 0 && len(p.holds) == 0 && len(p.listed) == 0 {
		return none(p.offeredEarly), problem
	}
	for _, c := range p.cards {
		p.listed[c.ID] = true
	}
	return p.units(), problem
}

// inventory implements part.
func (p *slotPool) inventory() accel.Inventory {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := accel.Inventory{Resource: p.resource}
	for _, c := range p.cards {
		d := c.Device
		if why := p.unusable(&c); why != "" && !d.Health.Unhealthy {
			d.Health = accel.Health{Unhealthy: true, Reason: why}
		}
		share := accel.Share{Device: d, Units: accel.Units(max(c.replicas, 1))}
		if len(c.Chips) > 1 {
			share.Chips = len(c.Chips)
		}
		out.Shares = append(out.Shares, share)
	}
	return out
}

// ready implements part.
func (p *slotPool) ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.draining != "":
		return nil
	case !p.looked:
		return fmt.Errorf("%s: the devices were not looked for yet", p.resource)
	case p.problem != nil:
		return fmt.Errorf("%s: %w", p.resource, p.problem)
	case !p.certain:
		return fmt.Errorf("%s: %w", p.resource, errNotAsked)
	}
	return nil
}

// known implements part.
func (p *slotPool) known() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.looked
}

// absent implements part.
func (p *slotPool) absent() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.nothingHere()
}

// nothingHere is absent for a caller that holds mu.
func (p *slotPool) nothingHere() bool {
	return p.looked && len(p.found.Faults) == 0 && len(p.cards) == 0 && len(p.holds) == 0
}

// drained implements part.
func (p *slotPool) drained() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.draining != "" && p.complete && len(p.holds) == 0
}

// idle implements part.
func (p *slotPool) idle() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.complete && len(p.holds) == 0
}

// forget implements part.
func (p *slotPool) forget() error { return p.store.Remove() }

// owns implements part.
func (p *slotPool) owns(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, held := p.holds[id]; held {
		return true
	}
	s, err := sharing.ParseSlotID(id)
	if err != nil {
		return false
	}
	_, remembered := p.remembered[s.Device]
	return remembered || slices.ContainsFunc(p.found.Devices, func(d accel.Device) bool { return d.ID == s.Device })
}

// holders implements part.
func (p *slotPool) holders(chip accel.DeviceID) []podKey {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []podKey
	for key, ids := range p.listings {
		if slices.ContainsFunc(ids, func(id string) bool {
			h := p.holds[id]
			return h != nil && slices.Contains(h.chips, chip)
		}) {
			out = append(out, key)
		}
	}
	return out
}
