package iluvatar

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// Types of the library's events, a bit each.
const (
	eventDoubleBitECC = 1 << 1
	eventXIDCritical  = 1 << 3
)

// AwaitChange waits for an event of the library. What it says is not kept: how
// the chips are, the library tells whoever asks.
func (b *Backend) AwaitChange(ctx context.Context) error {
	return b.loader.AwaitEvent(ctx, func(lib *library, wait time.Duration) (heard bool, err error) {
		if lib.events.newSet == nil || lib.events.listen == nil || lib.events.wait == nil {
			return false, fmt.Errorf("%s does not report events", lib.Path)
		}
		if last := b.table.Last(); b.heard.Load() != last.Round {
			if err := b.hear(ctx, lib, last); err != nil {
				return false, err
			}
		}
		e, err := queryOn(ctx, b, b.loader.Events, lib, callqueue.Library, "nvmlEventSetWait_v2", true, func(e *event) int32 {
			return lib.events.wait(b.set, e, uint32(wait.Milliseconds())) //nolint:gosec // less than a second
		})
		switch {
		case err == nil:
			// Not shown by default: a chip in distress sends them by the hundred.
			logr.FromContextOrDiscard(ctx).V(2).Info("The vendor's library reported an event",
				"vendor", Vendor, "type", e.Type, "data", e.Data)
			return true, nil
		case libloader.HasCode(err, codeTimeout):
			return false, nil
		}
		b.heard.Store(0) // with a new set next time
		return false, err
	})
}

// hear makes a set of the events of the chips that were found last, in the place
// of the set before.
func (b *Backend) hear(ctx context.Context, lib *library, last devicelist.Last) error {
	_, err := queryOn(ctx, b, b.loader.Events, lib, callqueue.Library, "nvmlEventSetCreate", true, func(*struct{}) int32 {
		b.forgetSet(lib)
		return lib.events.newSet(&b.set)
	})
	if err != nil {
		return err
	}
	failures := []error{errors.New("no chip reports events")}
	for _, d := range last.Devices {
		err := b.hearChip(ctx, lib, d.Index)
		switch {
		case libloader.IsFatal(err) && libloader.Hung(err) == nil:
			return err
		case err != nil:
			failures = append(failures, err)
		}
	}
	if len(failures) > len(last.Devices) { // for want of chips too
		return fmt.Errorf("%s", oneLine(errors.Join(failures...)))
	}
	b.heard.Store(last.Round)
	return nil
}

// forgetSet lets go of the set of events. The queue of events is the caller's. A set
// is not freed under a call that hangs and may use it.
func (b *Backend) forgetSet(lib *library) {
	if b.set != 0 && lib.events.freeSet != nil && b.loader.Events.AnyHung() == nil {
		lib.events.freeSet(b.set) // a set that cannot be freed is of no further use either
	}
	b.set = 0
	b.heard.Store(0)
}

// hearChip adds a chip's events to the set.
func (b *Backend) hearChip(ctx context.Context, lib *library, index int) error {
	c, err := b.handle(ctx, b.loader.Events, lib, index)
	if err != nil {
		return err
	}
	var wanted uint64 = eventXIDCritical | eventDoubleBitECC
	types, err := queryChipOn(ctx, b, b.loader.Events, lib, "nvmlDeviceGetSupportedEventTypes", c, lib.events.types)
	switch {
	case libloader.IsFatal(err):
		return err
	case err == nil:
		wanted &= types
	}
	if wanted == 0 {
		return fmt.Errorf("chip %d reports no relevant events", index)
	}
	_, err = queryChipOn(ctx, b, b.loader.Events, lib, "nvmlDeviceRegisterEvents", c, func(at uintptr, _ *struct{}) int32 {
		return lib.events.listen(at, wanted, b.set)
	})
	return err
}

var _ backend.Notifier = (*Backend)(nil)
