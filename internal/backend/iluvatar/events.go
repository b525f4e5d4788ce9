package iluvatar

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/backend"
)

// Types of the library's events, a bit each.
const (
	eventDoubleBitECC = 1 << 1
	eventXIDCritical  = 1 << 3
)

// eventWait is how long one call waits for an event. It is short, because the
// library cannot be shut down meanwhile.
const eventWait = 500 * time.Millisecond

// AwaitChange waits for an event of the library. What it says is not kept: how
// the chips are, the library tells whoever asks.
func (b *Backend) AwaitChange(ctx context.Context) error {
	lib, err := b.current()
	switch {
	case err != nil:
		return err
	case lib == nil:
		return errors.New("iluvatar: no library is loaded")
	case lib.newSet == nil || lib.listen == nil || lib.wait == nil:
		return fmt.Errorf("iluvatar: %s tells of no events", lib.Path)
	}
	// A wait must not look like a call that hangs.
	wait := max(min(eventWait, b.options.CallTimeout/2), time.Millisecond)
	for {
		if !lib.initialised.Load() {
			return errors.New("iluvatar: the library is not initialised")
		}
		b.mu.Lock()
		round, places := b.round, b.facts.places
		b.mu.Unlock()
		if lib.heard.Load() != round {
			if err := b.hear(ctx, lib, round, places); err != nil {
				return fmt.Errorf("iluvatar: %w", err)
			}
		}
		start := time.Now()
		e, err := query(ctx, b.events, lib, "nvmlEventSetWait_v2", true, func(e *event) int32 {
			return lib.wait(lib.set, e, uint32(wait.Milliseconds())) //nolint:gosec // eventWait at most
		})
		switch {
		case err == nil:
			// Not shown by default: a chip in distress sends them by the hundred.
			logr.FromContextOrDiscard(ctx).V(2).Info("The vendor's library tells of an event",
				"vendor", Vendor, "type", e.Type, "data", e.Data)
			return nil
		case !hasCode(err, codeTimeout):
			lib.heard.Store(0) // with a new set next time
			return fmt.Errorf("iluvatar: %w", err)
		}
		// A library that does not wait must not be asked without a pause.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait - time.Since(start)):
		}
	}
}

// hear makes a set of the events of the chips that were found in that round, in
// the place of the set before.
func (b *Backend) hear(ctx context.Context, lib *library, round uint64, places []place) error {
	_, err := query(ctx, b.events, lib, "nvmlEventSetCreate", true, func(*struct{}) int32 {
		lib.forgetSet()
		return lib.newSet(&lib.set)
	})
	if err != nil {
		return err
	}
	failures := []error{errors.New("no chip tells of events")}
	for _, p := range places {
		err := b.hearChip(ctx, lib, p.index)
		switch {
		case isFatal(err):
			return err
		case err != nil:
			failures = append(failures, err)
		}
	}
	if len(failures) > len(places) { // for want of chips too
		return fmt.Errorf("%s", oneLine(errors.Join(failures...)))
	}
	lib.heard.Store(round)
	return nil
}

// hearChip adds a chip's events to the set.
func (b *Backend) hearChip(ctx context.Context, lib *library, index int) error {
	at, err := query(ctx, b.events, lib, fmt.Sprintf("nvmlDeviceGetHandleByIndex_v2(%d)", index), true, func(out *uintptr) int32 {
		return lib.at(uint32(index), out) //nolint:gosec // below the count of chips
	})
	if err != nil {
		return err
	}
	c := handle{index, at}
	var wanted uint64 = eventXIDCritical | eventDoubleBitECC
	types, err := queryChip(ctx, b.events, lib, "nvmlDeviceGetSupportedEventTypes", c, lib.eventTypes)
	switch {
	case isFatal(err):
		return err
	case err == nil:
		wanted &= types
	}
	if wanted == 0 {
		return fmt.Errorf("chip %d tells of no events that matter", index)
	}
	_, err = queryChip(ctx, b.events, lib, "nvmlDeviceRegisterEvents", c, func(at uintptr, _ *struct{}) int32 {
		return lib.listen(at, wanted, lib.set)
	})
	return err
}

var _ backend.Notifier = (*Backend)(nil)
