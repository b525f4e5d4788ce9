package libloader

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// eventWait is how long one call waits for an event. It is short, because the
// library cannot be shut down meanwhile.
const eventWait = 500 * time.Millisecond

// EventWait is how long one call may wait for an event: not so long that it
// looks like a call that hangs.
func (s *Loader[L]) EventWait() time.Duration {
	return max(min(eventWait, s.limit/2), time.Millisecond)
}

// AwaitEvent calls once, which waits for an event for as long as wait, until
// it heard one or failed. It fails when no library is initialised.
func (s *Loader[L]) AwaitEvent(ctx context.Context, once func(lib L, wait time.Duration) (heard bool, err error)) error {
	var none L
	wait := s.EventWait()
	for {
		lib, err := s.Current()
		if err != nil {
			return err
		}
		if lib == none || !s.Initialised() {
			return fmt.Errorf("%s: %w", s.steps.Vendor, ErrNotInitialised)
		}
		start := time.Now()
		heard, err := once(lib, wait)
		switch {
		case errors.Is(err, ErrNotInitialised):
			continue // that library was released meanwhile; what is loaded now, Current says
		case err != nil:
			return fmt.Errorf("%s: %w", s.steps.Vendor, err)
		case heard:
			return nil
		}
		if err := Rest(ctx, start.Add(wait)); err != nil {
			return err
		}
	}
}

// Rest waits until the time that a call should have waited to: a library that
// does not wait must not be asked without a pause. Its error is ctx's.
func Rest(ctx context.Context, until time.Time) error {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
