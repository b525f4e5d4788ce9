package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// proof is what the passes have found of a tier that is configured for some resources. It is safe
// for concurrent use.
type proof struct {
	tier accel.Tier
	// resources are those with the tier, by their configuration.
	resources map[accel.Resource]bool

	mu sync.Mutex
	// stated is what counts while the tier holds: without the time. All is guarded by mu.
	stated accel.Isolation
	status map[accel.DeviceID]limits.Status
	// passed is when the last pass ended, the zero time before the first one.
	passed time.Time
}

func newProof(c config.NodeConfig, isolation config.Isolation) proof {
	resources := map[accel.Resource]bool{}
	for _, r := range c.Resources {
		if r.Isolation == isolation {
			resources[accel.Resource(r.Name)] = true
		}
	}
	return proof{tier: accel.Tier(isolation), stated: accel.Isolation{Memory: accel.Tier(isolation)}, resources: resources}
}

// proves reports whether the tier is that of a pool's devices.
func (d *proof) proves(p *pool) bool { return d.resources[p.Resource] && p.Kind == alloc.Memory }

// set takes in a pass.
func (d *proof) set(status map[accel.DeviceID]limits.Status, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status, d.passed = status, now
}

// carry makes the engine state what the node has published of a pool until the first pass, or
// each start of the daemon would take the tier from all devices. What was published too long
// ago counts for nothing.
func (d *proof) carry(p *pool, published func(accel.Resource) (accel.Inventory, bool)) {
	d.mu.Lock()
	passed := !d.passed.IsZero()
	d.mu.Unlock()
	if !d.proves(p) || passed {
		return
	}
	before, ok := published(p.Resource)
	if !ok {
		return
	}
	stated := map[accel.DeviceID]accel.Isolation{}
	for _, s := range before.Shares {
		if s.Isolation.Memory == d.tier {
			stated[s.ID] = s.Isolation
		}
	}
	e, done := p.records.owner.use()
	defer done()
	e.Attest(p.ID, stated)
}

// end says that there are no more passes, so that nothing is proven.
func (d *proof) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status, d.passed = nil, time.Time{}
}

// isolation returns what the node states of a device whose resource has the tier, and why it
// does not have it.
func (d *proof) isolation(id accel.DeviceID) (accel.Isolation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s, ok := d.status[id]
	switch {
	case !ok:
		return accel.Isolation{}, errors.New("the isolation of the device was not examined yet")
	case len(s.Losses) > 0:
		return accel.Isolation{}, errors.New(s.Losses[0].Reason)
	case s.Attested.IsZero():
		return accel.Isolation{}, errors.New("the isolation of the device held in one pass only so far")
	}
	stated := d.stated
	stated.Attested = s.Attested.UTC().Truncate(time.Second)
	return stated, nil
}

// attest makes the engine state what the last pass has found of the pools with the tier.
func (d *proof) attest(r *records, parts []*pool) {
	e, done := r.owner.use()
	defer done()
	for _, p := range parts {
		if !d.proves(p) {
			continue
		}
		stated := map[accel.DeviceID]accel.Isolation{}
		for _, s := range e.Inventory(p.ID).Shares {
			if isolation, err := d.isolation(s.ID); err == nil {
				stated[s.ID] = isolation
			}
		}
		e.Attest(p.ID, stated)
	}
}

// passes makes passes over the tier until ctx ends, once it is known which containers hold what.
func (d *proof) passes(ctx context.Context, all *discoveries, r *records, parts []*pool, now func() time.Time, pass func(context.Context)) {
	defer func() {
		d.end()
		d.attest(r, parts)
	}()
	if !awaitRecords(ctx, all, r, limitInterval, now) {
		return
	}
	tick := time.NewTicker(limitInterval)
	defer tick.Stop()
	for {
		bounded, cancel := context.WithTimeout(ctx, limitInterval)
		pass(bounded)
		cancel()
		if ctx.Err() != nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// reportLosses takes the losses of a pass, counts those that are new and reports them, and returns
// the status of all devices.
func reportLosses(ctx context.Context, watch *limits.Watch, losses map[accel.DeviceID][]limits.Loss, now time.Time,
	lost *prometheus.CounterVec, node func(events.Kind, string)) map[accel.DeviceID]limits.Status {
	status, fresh := watch.Look(losses, now)
	for id, some := range fresh {
		for _, l := range some {
			lost.WithLabelValues(string(l.Cause)).Inc()
			klog.FromContext(ctx).Error(nil, "The configured isolation does not hold on a device", "device", id, "cause", l.Cause,
				"reason", l.Reason)
		}
		node(events.IsolationLost, fmt.Sprintf("device %s: %s", id, some[0].Reason))
	}
	return status
}

// publishIsolation writes the node's condition about the tiers that are configured.
func publishIsolation(ctx context.Context, p *publisher, now time.Time, tiers ...*proof) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	all, age, configured := map[accel.DeviceID]limits.Status{}, time.Duration(0), false
	for _, d := range tiers {
		if len(d.resources) == 0 {
			continue
		}
		configured = true
		d.mu.Lock()
		passed, status := d.passed, d.status
		d.mu.Unlock()
		if passed.IsZero() {
			return nil // the condition is as an earlier run left it
		}
		age = max(age, now.Sub(passed))
		maps.Copy(all, status)
	}
	if !configured {
		return p.publishCondition(ctx, node, wire.IsolationCondition, nil, now)
	}
	return p.publishCondition(ctx, node, wire.IsolationCondition, isolationCondition(all, age), now)
}

// isolationCondition returns the condition without its type and times. age is that of the pass.
func isolationCondition(status map[accel.DeviceID]limits.Status, age time.Duration) *corev1.NodeCondition {
	if age > accel.MaxAttestationAge {
		return &corev1.NodeCondition{Status: corev1.ConditionTrue, Reason: reasonIsolationLost,
			Message: "the isolation of the devices could not be examined for more than " + accel.MaxAttestationAge.String()}
	}
	var lost []string
	for _, id := range slices.Sorted(maps.Keys(status)) {
		if losses := status[id].Losses; len(losses) > 0 {
			lost = append(lost, fmt.Sprintf("%s: %s", id, losses[0].Reason))
		}
	}
	if len(lost) == 0 {
		return &corev1.NodeCondition{Status: corev1.ConditionFalse, Reason: reasonIsolationHolds,
			Message: "the configured isolation holds on all devices"}
	}
	return &corev1.NodeCondition{Status: corev1.ConditionTrue, Reason: reasonIsolationLost,
		Message: "the configured isolation does not hold: " + shortList(lost)}
}
