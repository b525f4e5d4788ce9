package nvidia

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// wantedEvents are the types that tell of a fault. Errors of a single bit are
// corrected and not among them.
const wantedEvents = nvml.EventTypeXidCriticalError | nvml.EventTypeDoubleBitEccError

// AwaitChange waits for an event of the library, and keeps what it says for the
// next Discover. While there is no library, or no GPU was listed yet, it waits
// for that.
func (b *Backend) AwaitChange(ctx context.Context) error {
	wait := b.loader.EventWait()
	for {
		lib, err := b.loader.Current()
		if err != nil {
			return err
		}
		last := b.table.Last()
		b.mu.Lock()
		born, lost := b.born, b.lost
		retry := len(b.unheard.why) > 0 && time.Since(b.unheard.at) >= backend.DefaultInterval && b.loader.Events.AnyHung() == nil
		b.mu.Unlock()
		switch {
		case lib == nil || !b.loader.Initialised() || last.Round == 0:
			if err := awaitNews(ctx, b.news, wait); err != nil {
				return err
			}
			continue
		case !lib.has["nvmlEventSetCreate"] || !lib.has["nvmlEventSetWait_v2"] || !lib.has["nvmlDeviceRegisterEvents"]:
			return fmt.Errorf("nvidia: %s does not report events", lib.Path)
		case b.heard.Load() != last.Round || retry:
			changed, err := b.hear(ctx, lib, born, last)
			switch {
			case errors.Is(err, libloader.ErrNotInitialised), err != nil && !libloader.IsFatal(err) && !b.loader.Initialised():
				continue // the library was shut down meanwhile
			case err != nil:
				return fmt.Errorf("nvidia: %w", err)
			case changed:
				return nil
			}
		}

		start := time.Now()
		_, err = queryOn(ctx, b, b.loader.Events, lib, "nvmlEventSetWait_v2", noGPU, func() (struct{}, nvml.Return) {
			return struct{}{}, b.wait(ctx, lib, wait)
		})
		if errors.Is(err, libloader.ErrNotInitialised) || err != nil && b.heard.Load() != last.Round {
			continue // the library was shut down meanwhile, and with it the set
		}
		gone := libloader.HasCode(err, nvml.ERROR_GPU_IS_LOST)
		b.mu.Lock()
		b.lost = gone
		b.mu.Unlock()
		switch {
		case err == nil:
			return nil
		case libloader.HasCode(err, nvml.ERROR_TIMEOUT):
		case gone && !lost:
			b.heard.Store(0) // the next set is made without it
			return nil
		default:
			b.heard.Store(0)
			return fmt.Errorf("nvidia: %w", err)
		}
		if err := libloader.Rest(ctx, start.Add(wait)); err != nil {
			return err
		}
	}
}

// awaitNews waits until devices were listed, or for a while.
func awaitNews(ctx context.Context, news <-chan struct{}, wait time.Duration) error {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-news:
	case <-timer.C:
	}
	return nil
}

// wait waits for an event and keeps what it says. The events queue is the
// caller's; what it returns may be heard by nobody.
func (b *Backend) wait(ctx context.Context, lib *library, wait time.Duration) nvml.Return {
	if b.set == nil {
		return nvml.ERROR_UNINITIALIZED // shut down meanwhile
	}
	event, code := lib.api.EventSetWait(b.set, uint32(wait.Milliseconds())) //nolint:gosec // less than a second
	if code == nvml.SUCCESS {
		b.note(ctx, event)
	}
	return code
}

// note keeps what an event says, if it counts. The events queue is the caller's.
func (b *Backend) note(ctx context.Context, e nvml.EventData) {
	b.mu.Lock()
	id, known := b.hears[e.Device]
	b.mu.Unlock()
	if !known && e.Device != nil {
		if uuid, code := e.Device.GetUUID(); code == nvml.SUCCESS {
			id, known = accel.DeviceID(uuid), true
		}
	}
	// Not shown by default: a GPU in distress sends them by the hundred, and
	// what changes is reported by whoever discovers.
	logr.FromContextOrDiscard(ctx).V(2).Info("The vendor's library reported an event",
		"vendor", Vendor, "device", id, "type", e.EventType, "data", e.EventData)
	of := ""
	if !known {
		of = " of a GPU that the library does not identify"
	}
	var h accel.Health
	switch e.EventType {
	case nvml.EventTypeXidCriticalError:
		h = unwell(b.options, fmt.Sprintf("xid-%d", e.EventData), "critical error XID %d%s", e.EventData, of)
	case nvml.EventTypeDoubleBitEccError:
		h = unwell(b.options, doubleBit(b.options), "an error in memory that could not be corrected (ECC, double bit)%s", of)
	}
	if !h.Unhealthy {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if known {
		b.reported.faults = b.reported.faults.add(subject{id, instance{e.GpuInstanceId, e.ComputeInstanceId}}, h)
	} else {
		b.reported.faults = b.reported.faults.addAll(h)
	}
}

// maxLeft bounds how many events of a set are taken before it goes.
const maxLeft = 64

// hear makes a set of the events of the GPUs that were found last, in the place
// of the set before. changed is true when that one had something to
// tell, and when there are GPUs whose events cannot be heard now, and could
// before, or the other way round.
func (b *Backend) hear(ctx context.Context, lib *library, born uint64, last devicelist.Last) (changed bool, err error) {
	failed := map[accel.DeviceID]error{}
	// Events of MIG devices are those of their GPU.
	gpus := backend.Whole(last.Devices)
	left, failure := queryOn(ctx, b, b.loader.Events, lib, "nvmlEventSetCreate", noGPU, func() (left bool, code nvml.Return) {
		// What the set before has not told yet would be lost with it.
		for range maxLeft {
			if b.set == nil || b.wait(ctx, lib, 0) != nvml.SUCCESS {
				break
			}
			left = true
		}
		b.forgetSet(lib)
		set, code := lib.api.EventSetCreate()
		if code == nvml.SUCCESS {
			b.mu.Lock()
			b.set, b.hears = set, map[nvml.Device]accel.DeviceID{}
			b.mu.Unlock()
		}
		return left, code
	})
	switch {
	case libloader.IsFatal(failure) || unsupported(failure) ||
		libloader.HasCode(failure, nvml.ERROR_UNINITIALIZED, nvml.ERROR_DRIVER_NOT_LOADED):
		return false, failure
	case failure != nil:
		for _, g := range gpus {
			failed[g.ID] = failure
		}
		gpus = nil
	}
	for _, g := range gpus {
		err := b.hearGPU(ctx, lib, g.Index, g.ID)
		switch {
		case libloader.IsFatal(err) && libloader.Hung(err) == nil:
			return false, err
		case unsupported(err):
			logr.FromContextOrDiscard(ctx).V(2).Info("A GPU does not report events; polling it only",
				"vendor", Vendor, "device", g.ID, "err", err)
		case libloader.HasCode(err, nvml.ERROR_GPU_IS_LOST): // whoever discovers finds out
		case err != nil:
			failed[g.ID] = err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.born != born {
		return false, nil // the library was initialised anew, and the set with it
	}
	changed = left || !maps.EqualFunc(failed, b.unheard.why, func(a, b error) bool { return a.Error() == b.Error() })
	b.unheard = unheard{failed, time.Now()}
	if failure == nil {
		b.heard.Store(last.Round)
	} else if !changed {
		return false, failure
	}
	return changed, nil
}

// hearGPU adds a GPU's events to the set.
func (b *Backend) hearGPU(ctx context.Context, lib *library, index int, id accel.DeviceID) error {
	handle, err := queryOn(ctx, b, b.loader.Events, lib, "nvmlDeviceGetHandleByIndex_v2", index, func() (nvml.Device, nvml.Return) {
		return lib.api.DeviceGetHandleByIndex(index)
	})
	if err != nil {
		return err
	}
	uuid, err := queryOn(ctx, b, b.loader.Events, lib, "nvmlDeviceGetUUID", index, handle.GetUUID)
	if err != nil {
		return err
	}
	if accel.DeviceID(uuid) != id {
		return nil // another GPU has its place; the next round knows
	}
	types := uint64(wantedEvents)
	supported, err := queryOn(ctx, b, b.loader.Events, lib, "nvmlDeviceGetSupportedEventTypes", index, handle.GetSupportedEventTypes)
	switch {
	case err == nil:
		types &= supported
	case !libloader.HasCode(err, nvml.ERROR_FUNCTION_NOT_FOUND):
		return err
	}
	if types == 0 {
		return nil
	}
	_, err = queryOn(ctx, b, b.loader.Events, lib, "nvmlDeviceRegisterEvents", index, func() (struct{}, nvml.Return) {
		if b.set == nil {
			return struct{}{}, nvml.ERROR_UNINITIALIZED
		}
		code := handle.RegisterEvents(types, b.set)
		b.mu.Lock()
		defer b.mu.Unlock()
		if code == nvml.SUCCESS && b.hears != nil { // which may be those of another set if the call hung
			b.hears[handle] = id
		}
		return struct{}{}, code
	})
	return err
}

// forgetSet lets go of the set of events. The events queue is the caller's. A set is
// not freed under a call that hangs and may use it.
func (b *Backend) forgetSet(lib *library) {
	if b.set != nil && lib.has["nvmlEventSetFree"] && b.loader.Events.AnyHung() == nil {
		_ = lib.api.EventSetFree(b.set) // refused when the driver is gone, and the set with it
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.set, b.hears = nil, nil
	b.heard.Store(0)
}
