package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// owner is the one lock around the node's engine. It is safe for concurrent use.
type owner struct {
	mu     sync.Mutex
	engine *alloc.Engine
}

// use returns the engine, which is the caller's until done is called: nothing that
// waits for anything else may be done in between.
func (o *owner) use() (e *alloc.Engine, done func()) {
	o.mu.Lock()
	return o.engine, o.mu.Unlock
}

// unitSink is the part of deviceplugin.Server that a pool needs.
type unitSink interface {
	SetUnits([]deviceplugin.Unit) error
}

// pool is the shell around one pool of the engine: kubelet's questions, the
// vendor's library, the state file and CDI. A resource has one pool, and a second
// one while containers hold what it gave out in the other way before the
// configuration changed. It is safe for concurrent use.
type pool struct {
	alloc.ID
	config alloc.Config
	inject injector
	// tier is the configured tier of isolation.
	tier accel.Tier
	// backend is nil for a vendor that is not configured any more.
	backend backend.Backend
	store   *state.Store
	records *records
	metrics *metrics
	sink    unitSink
	// specify describes devices in CDI and returns why some are not; nil where
	// containers are not given CDI names that this program defines.
	specify func([]accel.Device) map[accel.DeviceID]error
	// limit returns the CDI devices that limit a container to so many units of each device, and
	// so many percent of its multiprocessors, see sized.of; nil where specify is.
	limit func(ids []accel.DeviceID, units accel.Units, percent int) ([]backend.CDIDevice, error)
	// changed is called, without locks, when the inventory or what the pods
	// hold may have changed; withdrawn when devices were given out that other
	// resources offer as well.
	changed, withdrawn func()
	// event tells the users of the node.
	event func(kind events.Kind, message string)

	// syncing is held from the derivation of a list or a state until it is handed
	// over or saved, so that an older one never replaces a newer one.
	syncing sync.Mutex
}

// load reads what earlier runs saved into the configuration of the engine's pool.
func (p *pool) load(ctx context.Context) {
	saved, err := p.store.Load()
	if err != nil {
		// It is replaced by what kubelet and the pods' grants say.
		aside, moveErr := p.store.Quarantine()
		klog.FromContext(ctx).Error(errors.Join(err, moveErr), "Recovering from kubelet and the pods' grants what containers hold",
			"resource", p.Resource, "movedTo", aside)
	}
	p.config.State = saved
}

// update takes the outcome of a discovery.
func (p *pool) update(ctx context.Context, found backend.Found, err error) {
	d := discoveryOf(found, err)
	d.Unreachable = p.unreachable(found)
	e, done := p.records.owner.use()
	e.Discover(p.ID, d)
	done()
	p.sync(ctx)
	p.changed()
}

// discoveryOf is a discovery as the engine takes it.
func discoveryOf(found backend.Found, err error) alloc.Discovery {
	d := alloc.Discovery{Devices: found.Devices, Links: found.Links, Err: cmp.Or(err, found.Problem)}
	for _, f := range found.Faults {
		d.Faults = append(d.Faults, alloc.Fault{ID: f.ID, Err: f.Err, NotOffered: f.Cause == accel.CauseNotOffered})
	}
	return d
}

// unreachable returns why containers cannot reach the devices as configured.
func (p *pool) unreachable(found backend.Found) error {
	if p.backend == nil || len(found.Devices) == 0 {
		return nil
	}
	edits, err := p.backend.Edits(found.Devices[0].ID)
	if err != nil {
		return nil //nolint:nilerr // reported when a container asks for it
	}
	return p.inject.check(p.config.Vendor, edits)
}

// sync derives units and inventory from devices, configuration and what containers
// hold, writes what new containers need of them, and tells kubelet. The agent's
// loop calls it too, so it must not wake the loop.
func (p *pool) sync(ctx context.Context) {
	p.syncing.Lock()
	defer p.syncing.Unlock()
	e, done := p.records.owner.use()
	plan := e.Derive(p.ID, time.Now())
	done()
	var written alloc.Written
	if !plan.Settled {
		written.Unsaved = p.save(plan.State, plan.Save)
		if p.specify != nil {
			written.Unspecified = p.specify(plan.Describe)
		}
	}
	e, done = p.records.owner.use()
	offer := e.Offer(p.ID, written)
	done()
	var rejected error
	if offer.Changed {
		rejected = p.offer(offer.Units)
	}
	e, done = p.records.owner.use()
	report := e.Settle(p.ID, rejected)
	done()
	p.report(ctx, report)
}

// save makes the state file hold the state. The caller holds syncing.
func (p *pool) save(s alloc.State, wanted bool) error {
	if !wanted {
		return nil
	}
	if err := p.store.Save(s); err != nil {
		return err
	}
	e, done := p.records.owner.use()
	defer done()
	e.Saved(p.ID, s)
	return nil
}

// offer hands the list to kubelet's server. An entry of an unhealthy unit is two
// bytes longer than one of a healthy unit, so devices that fail may make a list too
// long that was just short enough; then those units, which no container can get
// anyway, are left out.
func (p *pool) offer(units []alloc.Unit) error {
	list := make([]deviceplugin.Unit, len(units))
	for i, u := range units {
		list[i] = deviceplugin.Unit(u)
	}
	err := p.sink.SetUnits(list)
	var tooMany *deviceplugin.TooManyUnitsError
	if !errors.As(err, &tooMany) {
		return err
	}
	healthy := slices.DeleteFunc(list, func(u deviceplugin.Unit) bool { return u.Unhealthy })
	if len(healthy) == 0 || len(healthy) == tooMany.Units {
		return err
	}
	return p.sink.SetUnits(healthy)
}

// report logs why a resource is not offered as configured, with an event of the
// node, when the reason is another one than before.
func (p *pool) report(ctx context.Context, r alloc.Report) {
	log := klog.FromContext(ctx).WithValues("resource", p.Resource)
	switch {
	case r.Now == nil && r.Before != nil:
		log.Info("Offering the resource as configured")
	case r.Now == nil, r.Before != nil && r.Before.Error() == r.Now.Error():
	default:
		log.Error(r.Now, "Cannot offer the resource as configured")
		kind := events.ResourceNotOffered
		if r.Absent {
			kind = events.ResourceAbsent
		}
		p.event(kind, fmt.Sprintf("%s: %v", p.Resource, r.Now))
	}
}

// Prefer implements deviceplugin.Allocator. It asks nothing of the vendor's
// library.
func (p *pool) Prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	return patiently(ctx, p.records, p.config.Vendor, func(bool) ([]string, error) { return p.preferOnce(ctx, available, must, size) })
}

func (p *pool) preferOnce(ctx context.Context, available, must []string, size int) ([]string, error) {
	ctx, end := p.records.question(ctx)
	defer end()
	answer, err := p.records.answer(ctx, p.config.Vendor, func(ask askKubelet) (alloc.Preference, error) {
		return p.prefer(ctx, ask, alloc.Question{Available: available, Must: must, Size: size})
	})
	if err != nil {
		return nil, err
	}
	log := klog.FromContext(ctx).WithValues("resource", p.Resource, "units", size)
	if p.Kind == alloc.Slots {
		log = log.WithValues("ids", answer.IDs)
	} else {
		log = log.WithValues("devices", answer.Devices)
	}
	if answer.Pod != (accel.PodRef{}) {
		log = log.WithValues("pod", answer.Pod, "granted", answer.Planned)
	}
	log.Info("Preferring devices")
	return answer.IDs, nil
}

// prefer answers a question of kubelet by what the records say when they are asked
// so. The caller holds records.turn.
func (p *pool) prefer(ctx context.Context, ask askKubelet, q alloc.Question) (alloc.Preference, error) {
	e, done := p.records.owner.use()
	err := e.Admissible(p.ID, q.Size)
	done()
	if err != nil {
		return alloc.Preference{}, err
	}
	if err := ask(ctx, alloc.RecordedBefore); err != nil {
		// Which pod kubelet asks for and what it holds already would be a guess,
		// and could put the pod on two devices.
		return alloc.Preference{}, alloc.Reject(alloc.Kubelet, "get the pod being admitted and the current allocations from kubelet: %w",
			err)
	}
	q.Pods = p.records.seen(ctx, p.ID, q.Size)
	q.Now = time.Now()
	e, done = p.records.owner.use()
	defer done()
	return e.Prefer(p.ID, q)
}

// Allocate implements deviceplugin.Allocator. The ids that kubelet has settled
// on say which devices they are; it may not have asked Prefer.
func (p *pool) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	return patiently(ctx, p.records, p.config.Vendor, func(again bool) (*pluginapi.ContainerAllocateResponse, error) {
		return p.allocateOnce(ctx, ids, again)
	})
}

func (p *pool) allocateOnce(ctx context.Context, ids []string, again bool) (*pluginapi.ContainerAllocateResponse, error) {
	ctx, end := p.records.question(ctx)
	defer end()
	a, err := p.allocate(ctx, ids, again)
	if err != nil {
		return nil, err
	}
	edits, err := p.backend.Edits(a.Devices...)
	if err != nil {
		return nil, fmt.Errorf("device %s: %w", listed(a.Devices), err)
	}
	if err := p.inject.check(p.config.Vendor, edits); err != nil {
		return nil, err
	}
	claims := sync.OnceValue(func() claim { return p.claimants(ctx, a) })
	var limited []backend.CDIDevice
	if p.limit != nil {
		percent, err := p.computePercent(ctx, a, claims)
		if err != nil {
			return nil, err
		}
		if limited, err = p.limit(a.Devices, accel.Units(len(ids)/len(a.Devices)), percent); err != nil {
			return nil, err
		}
		// Hooks run in the order of the devices, and the last limit holds.
		edits.CDIDevices = append(edits.CDIDevices, limited...)
	}
	if err := p.permit(ctx, a, len(limited) == len(a.Devices), claims); err != nil {
		return nil, err
	}
	p.give(ctx, a)
	p.metrics.served.WithLabelValues(string(p.Resource)).Inc()
	log := klog.FromContext(ctx).WithValues("resource", p.Resource, "units", len(ids), "devices", a.Devices)
	if !a.Named() {
		log.Info("Allocated units")
		return p.inject.answer(edits, nil), nil
	}
	log.Info("Allocated devices", "ids", a.IDs)
	return p.inject.answer(edits, a.IDs), nil
}

// allocate decides what a container gets. What is given out goes through here, but
// only kubelet knows what was given back, and to which pod it gave what it chose by
// itself. It is not asked otherwise, as it is handing out units (see records.turn).
func (p *pool) allocate(ctx context.Context, ids []string, again bool) (alloc.Allocation, error) {
	decide := func(again bool) (alloc.Allocation, error) {
		pods := p.records.values(p.records.asking(p.records.pods.Cached()))
		e, done := p.records.owner.use()
		defer done()
		return e.Allocate(p.ID, ids, pods, again)
	}
	a, err := decide(again)
	for i, ask := range []askKubelet{p.records.ask, p.records.askFresh, p.records.askFresh} {
		if !alloc.InDoubt(err) || i == 2 && !p.records.settle(ctx, p.config.Vendor) {
			break
		}
		if failed := ask(ctx, alloc.RecordedBefore); failed != nil {
			return a, fmt.Errorf("%w; the current owner is unknown: %w", err, failed)
		}
		a, err = decide(true)
	}
	return a, err
}

// give notes that a container gets an allocation.
func (p *pool) give(ctx context.Context, a alloc.Allocation) {
	_, done := p.records.owner.use()
	remember := a.Give(time.Now())
	done()
	if remember {
		p.syncing.Lock()
		e, done := p.records.owner.use()
		s, wanted := e.State(p.ID)
		done()
		err := p.save(s, wanted)
		p.syncing.Unlock()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Could not save an allocation; after a restart it is unknown until kubelet lists it",
				"resource",
				p.Resource, "ids", a.IDs)
		}
	}
	p.withdrawn()
	p.changed()
}

func listed(devices []accel.DeviceID) string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = string(d)
	}
	return strings.Join(names, ", ")
}

// see returns what the engine says of the pool.
func see[T any](p *pool, read func(*alloc.Engine, alloc.ID) T) T {
	e, done := p.records.owner.use()
	defer done()
	return read(e, p.ID)
}

// status returns how the pool is.
func (p *pool) status() alloc.Status { return see(p, (*alloc.Engine).Status) }

// holders returns the pods that hold something of a device.
func (p *pool) holders(chip accel.DeviceID) []alloc.PodKey {
	e, done := p.records.owner.use()
	defer done()
	return e.Holders(p.ID, chip)
}

// observe sets the gauges of the devices.
func (p *pool) observe() {
	e, done := p.records.owner.use()
	usage, inventory := e.Usage(p.ID), e.Inventory(p.ID)
	done()
	if usage.Known {
		p.metrics.observe(inventory, usage.Devices)
	}
}

// fact is a pod and the devices that it holds units of, in the order of their
// indexes, the same part of each.
type fact struct {
	pod     *corev1.Pod
	devices []accel.Share
}

// facts returns what is certain of the pods that the API server has shown, by
// kubelet's last list.
func (p *pool) facts(ctx context.Context) []fact {
	pods := p.records.values(p.records.pods.Cached())
	shown := p.records.before()
	values := p.records.values(shown)
	e, done := p.records.owner.use()
	facts := e.Facts(p.ID, values, pods, time.Now())
	done()
	log := klog.FromContext(ctx).WithValues("resource", p.Resource)
	if n := len(facts.Foreign); n > 0 {
		log.Error(nil, "Containers hold unit ids that belong to no device", "ids", facts.Foreign[:min(10, n)], "count", n)
	}
	for _, m := range facts.Mixed {
		log.Error(nil, "A pod holds units of devices that do not serve it together", "pod", klog.KRef(m.Pod.Namespace, m.Pod.Name),
			"devices",
			m.Devices, "containers", m.Containers)
	}
	p.metrics.mismatches.WithLabelValues(string(p.Resource)).Set(float64(len(facts.Mixed)))
	out := make([]fact, len(facts.Pods))
	for i, f := range facts.Pods {
		out[i] = fact{pod: shown[f.Pod], devices: f.Devices}
	}
	return out
}
