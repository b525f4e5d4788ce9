package agent

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"sync"
	"time"

	"k8s.io/klog/v2"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

const (
	// causeInterval is how often it is checked whether descriptions have to be
	// generated again.
	causeInterval = 2 * time.Second
	// retryLeast and retryMost bound the time between two attempts to generate
	// descriptions that failed; each is twice as long as the one before.
	retryLeast, retryMost = 4 * time.Second, time.Minute
	// awaitLimit is how long a discovery waits for the first descriptions, longer than a
	// backend takes.
	awaitLimit = backend.DefaultCDITimeout + 5*time.Second
)

// describer keeps the complete CDI descriptions of one vendor's devices, which take
// seconds to generate: it has them generated when their cause changes, in a
// goroutine of its own, so that neither kubelet nor discoveries wait. It is safe for
// concurrent use.
type describer struct {
	vendor  string
	backend backend.Specifier
	// changed is called, without locks, when there is another outcome.
	changed func()
	// due makes run look at the cause now.
	due signal
	now func() time.Time

	// What follows is run's alone: how often generating failed in a row, and when it is
	// tried again.
	failures int
	retry    time.Time
	told     logging.Changes

	mu    sync.Mutex // guards last
	last  described
	first chan struct{} // closed when last is known
}

// described is an outcome.
type described struct {
	cause string // "" when err says why nothing was generated
	spec  backend.Specification
	err   error
}

func newDescriber(vendor string, b backend.Specifier, changed func()) *describer {
	return &describer{vendor: vendor, backend: b, changed: changed, due: make(signal, 1), now: time.Now, first: make(chan struct{})}
}

// run keeps the descriptions up to date until ctx ends.
func (d *describer) run(ctx context.Context) {
	tick := time.NewTicker(causeInterval)
	defer tick.Stop()
	for {
		d.turn(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-d.due:
		}
	}
}

// turn generates the descriptions if their cause has changed, or if an attempt that
// failed is due again.
func (d *describer) turn(ctx context.Context) {
	cause, err := d.backend.SpecCause()
	before := d.outcome()
	switch {
	case err != nil:
		d.settle(ctx, described{err: err})
		return
	case cause == "":
		return // no device
	case cause != before.cause:
		d.failures = 0
	case before.err == nil && len(before.spec.Failed) == 0, d.now().Before(d.retry):
		return
	}
	spec, err := d.backend.Specify(ctx)
	if ctx.Err() != nil {
		return
	}
	if err != nil || len(spec.Failed) > 0 {
		d.retry = d.now().Add(min(retryMost, retryLeast<<min(d.failures, 10)))
		d.failures++
	}
	d.settle(ctx, described{cause: cause, spec: spec, err: err})
}

// settle keeps an outcome.
func (d *describer) settle(ctx context.Context, now described) {
	d.told.Log(ctx, now.err, "Could not generate the CDI specification; retrying")
	d.mu.Lock()
	before := d.last
	d.last = now
	select {
	case <-d.first:
	default:
		close(d.first)
	}
	d.mu.Unlock()
	same := sameSpecification(before.spec, now.spec)
	if now.err == nil && !same {
		klog.FromContext(ctx).Info("Generated the CDI specification", "vendor", d.vendor, "devices", len(now.spec.Devices),
			"failed", len(now.spec.Failed))
	}
	if !same || fmt.Sprint(before.err) != fmt.Sprint(now.err) {
		d.changed()
	}
}

// sameSpecification reports whether two specifications describe the same devices in the same
// way, and fail to describe others for the same reasons.
func sameSpecification(a, b backend.Specification) bool {
	return reflect.DeepEqual(a.Common, b.Common) && reflect.DeepEqual(a.Devices, b.Devices) &&
		maps.EqualFunc(a.Failed, b.Failed, func(a, b error) bool { return a.Error() == b.Error() })
}

func (d *describer) outcome() described {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// await waits until there is an outcome, for a limited time.
func (d *describer) await(ctx context.Context) {
	d.due.raise()
	limit := time.NewTimer(awaitLimit)
	defer limit.Stop()
	select {
	case <-d.first:
	case <-ctx.Done():
	case <-limit.C:
	}
}

// edits returns what a container gets with any device of the vendor, and with this one
// besides; or why that is not known.
func (d *describer) edits(id accel.DeviceID) (common, device cdispecs.ContainerEdits, err error) {
	last := d.outcome()
	if last.err != nil {
		return common, device, last.err
	}
	if device, ok := last.spec.Devices[id]; ok {
		return last.spec.Common, device, nil
	}
	if err := last.spec.Failed[id]; err != nil {
		return common, device, err
	}
	d.due.raise()
	return common, device, fmt.Errorf("the CDI specification of device %s is being generated", id)
}
