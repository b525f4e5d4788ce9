package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// loop makes the API server's objects say what the node does, again and again.
func (a *Agent) loop(ctx context.Context) {
	tick := time.NewTicker(reconcileInterval)
	defer tick.Stop()
	var told logging.Changes
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-a.signals.wake:
			select {
			case <-ctx.Done():
				return
			case <-time.After(settle):
			}
			// What woke the loop in the meantime is served by this turn.
			select {
			case <-a.signals.wake:
			default:
			}
		}
		told.Log(ctx, a.turn(ctx), "Could not reconcile allocations; retrying")
	}
}

// describePods writes into the pods what they hold, whenever the loop has learned
// it. It is apart from the loop, since admission policies and webhooks of the
// cluster may reject or delay what is written into a pod: nothing else waits.
func (a *Agent) describePods(ctx context.Context) {
	var told logging.Changes
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.signals.learned:
		}
		// Memory is written as the extender reads it, whole devices and slices for people.
		var failed []error
		for p := range a.offerings.parts(ofKind(alloc.Memory)) {
			failed = append(failed, a.corrector.reconcile(ctx, p))
		}
		slots := slices.Collect(a.offerings.parts(ofKind(alloc.Slots)))
		failed = append(failed, a.annotator.annotate(ctx, a.records.before(), slots))
		told.Log(ctx, errors.Join(failed...), "Could not write the allocations of pods; retrying")
	}
}

// turn asks kubelet who holds what, once for all resources, and publishes what
// follows from that.
func (a *Agent) turn(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stalled/2)
	defer cancel()
	asked := a.records.refresh(ctx)
	var described error
	if asked == nil {
		// Units that were given back on an unhealthy device are healthy no more,
		// devices that came free return to the other resources, a change of the
		// configuration may be due, and files may be written again.
		a.offerings.sync(ctx)
		a.claims.refresh()
		a.signals.learned.raise()
		described = errors.Join(a.offerings.release(ctx), a.cdi.forget(time.Now()))
		if !a.offerings.any(func(p *pool) bool { return !p.status().Idle }) {
			described = errors.Join(described, a.cdi.tidy())
		}
	}
	_, found, _ := a.discoveries.all()
	for vendor := range a.o.Backends {
		parts := slices.Collect(a.offerings.parts(func(r *offering, _ *pool) bool { return r.vendor == vendor }))
		a.health.report(ctx, vendor, parts, claimedChips(a.claims.Devices(vendor), found[vendor]))
	}
	removed := a.offerings.observe(a.metrics)
	published := a.publish(ctx)
	// Devices can be given to pods without these, so readiness leaves them out: a
	// policy of the cluster may reject them for good, and a full disk for long.
	described = errors.Join(described, a.publishAllocatable(ctx), a.publishLabels(ctx), a.publishEnding(ctx),
		a.quarantine.publish(ctx, a.publisher), a.overuse.publish(ctx, a.publisher, time.Now()),
		publishIsolation(ctx, a.publisher, time.Now(), &a.cdi.limits.proof, &a.cdi.mps.proof),
		publishSetup(ctx, a.publisher, a.o.Setup), a.claims.publishDrivers(ctx, a.publisher))
	a.progress.note(published, asked, removed)
	return errors.Join(published, asked, described)
}

// observe sets the metrics of the resources, and returns what a restart would help against.
func (all offerings) observe(m *metrics) (removed *atomicfile.RemovedError) {
	for _, r := range all {
		err := r.parts[0].status().Problem
		_ = errors.As(err, &removed)
		m.offered.WithLabelValues(string(r.name)).Set(defs.Bool(r.configured && err == nil))
		r.parts[0].observe()
	}
	return removed
}

// publish writes the node's object. What is not known yet of a resource stays as
// an earlier run wrote it, and holds up none of the others.
func (a *Agent) publish(ctx context.Context) error {
	var inventory []accel.Inventory
	var failed []error
	c := counts{devices: map[string]int{}, named: map[string]bool{}, served: map[string]bool{}}
	for _, r := range a.offerings {
		p := r.parts[0]
		c.served[string(r.name)] = true
		if r.count != "" {
			c.named[r.count] = true
		}
		status := p.status()
		if !status.Known {
			failed = append(failed, fmt.Errorf("%s: the inventory is not known yet", r.name))
			if before, ok := a.publisher.before(r.name); ok {
				inventory = append(inventory, before)
			}
			continue
		}
		a.cdi.limits.carry(p, a.publisher.before)
		a.cdi.mps.carry(p, a.publisher.before)
		one := see(p, (*alloc.Engine).Inventory)
		steady(&one, func() (accel.Inventory, bool) { return a.publisher.before(r.name) })
		a.overuse.withhold(&one, a.publisher.before)
		if r.configured || len(one.Shares) > 0 {
			inventory = append(inventory, one)
		}
		if p.Kind == alloc.Memory && r.count != "" {
			c.devices[r.count] = status.Present
		}
	}
	return errors.Join(append(failed, a.publisher.publish(ctx, inventory, c))...)
}
