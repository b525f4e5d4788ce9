package enflame

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
)

// Types of the library's events.
const (
	eventSuspended     = 0
	eventSuspendedToo  = 3 // newer releases
	eventResetStarted  = 10
	eventResetFinished = 11
)

// eventWait is how long one call waits for an event. It is short, because the
// library cannot be shut down meanwhile.
const eventWait = 500 * time.Millisecond

// AwaitChange waits for an event of the library.
func (b *Backend) AwaitChange(ctx context.Context) error {
	lib, err := b.current()
	switch {
	case err != nil:
		return err
	case lib == nil:
		return errors.New("enflame: no library is loaded")
	case lib.event == nil:
		return fmt.Errorf("enflame: %s lacks EfmlGetEvent", lib.Path)
	}
	// A wait must not look like a call that hangs.
	wait := max(min(eventWait, b.options.CallTimeout/2), time.Millisecond)
	for {
		if !lib.initialised.Load() {
			return errors.New("enflame: the library is not initialised")
		}
		start := time.Now()
		e, err := query(ctx, b.events, lib, "EfmlGetEvent", func(e *event) int32 {
			return lib.event(int32(wait.Milliseconds()), e) //nolint:gosec // eventWait at most, some seconds
		})
		switch {
		case err == nil:
			b.note(ctx, e)
			return nil
		case !hasCode(err, codeTimeout):
			return fmt.Errorf("enflame: %w", err)
		}
		// A library that does not wait must not be asked without a pause.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait - time.Since(start)):
		}
	}
}

// note keeps what an event says about a card's health, for libraries that have
// no function to ask.
func (b *Backend) note(ctx context.Context, e event) {
	message := cString(e.Message[:])
	// Not shown by default: a card in distress sends them by the hundred, and
	// what changes is reported by whoever discovers.
	logr.FromContextOrDiscard(ctx).V(2).Info("The vendor's library tells of an event",
		"vendor", Vendor, "card", e.Card, "type", e.Type, "message", message)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e.Type {
	case eventSuspended, eventSuspendedToo, eventResetStarted:
		b.suspended[int(e.Card)] = fmt.Sprintf("event %d of the library: %s", e.Type, message)
	case eventResetFinished:
		delete(b.suspended, int(e.Card))
	}
}
