package libloader

import (
	"context"
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
)

// Discover calls discover when no other discovery runs, and turns its error
// into one that backend.Backend promises. During a pause it releases the library instead.
func (s *Loader[L]) Discover(ctx context.Context, discover func() (backend.Found, error)) (backend.Found, error) {
	var found backend.Found
	err := s.alone(ctx, func() (err error) {
		found, err = discover()
		return err
	})
	if err != nil {
		return backend.Found{}, s.explain(ctx, "discover", err)
	}
	return found, nil
}

// alone calls f when no discovery runs, unless the library is paused.
func (s *Loader[L]) alone(ctx context.Context, f func() error) error {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := s.paused(ctx); err != nil {
		return err
	}
	return f()
}

// explain turns an error about the library as a whole into one that package backend
// promises.
func (s *Loader[L]) explain(ctx context.Context, doing string, err error) error {
	switch {
	case errors.Is(err, backend.ErrClosed):
		return backend.ErrClosed
	case ctx.Err() != nil:
		return fmt.Errorf("%s %s devices: %w", doing, s.steps.Vendor, ctx.Err())
	}
	return &backend.UnavailableError{Vendor: s.steps.Vendor, Err: err, Silent: Hung(err) != nil}
}

// Listing is what a library says about all devices.
type Listing interface {
	// Unanswered reports whether there are devices, and the library returned an
	// error for each of them.
	Unanswered() bool
}

// List calls list with the library, loaded and initialised. It does so with the
// library initialised anew if it may tell more then: a library may count its
// devices when it is initialised, and a driver that was loaded again while the
// library was in use serves it no more. To be called within Discover.
//
// The error of list is one of the library as a whole.
func List[L Library, T Listing](ctx context.Context, s *Loader[L], list func(context.Context, L) (T, error)) (T, error) {
	var l, none T
	lib, fresh, err := s.ready(ctx)
	if err != nil {
		return none, err
	}
	// A library in which a call hangs cannot be shut down. What another
	// initialisation would bring has to wait until the call returns.
	again := !s.hangs() && s.steps.Bound != nil && s.plug.Changed(s.steps.Bound(), fresh)
	if !again {
		l, err = list(ctx, lib)
		again = !fresh && !s.hangs() && s.wantsInit(l, err)
	}
	if again {
		if err := s.end(ctx); err != nil {
			return none, err
		}
		if lib, _, err = s.ready(ctx); err != nil {
			return none, err
		}
		l, err = list(ctx, lib)
	}
	return l, err
}

// hangs reports whether a call has not returned in time and is still in the library.
func (s *Loader[L]) hangs() bool { return s.Calls.AnyHung() != nil || s.Events.AnyHung() != nil }

// wantsInit reports whether the outcome of a list is one that another
// initialisation may mend. The caller has the turn.
func (s *Loader[L]) wantsInit(l Listing, err error) bool {
	if err != nil {
		var code *CodeError
		return errors.As(err, &code)
	}
	unanswered := l.Unanswered()
	again := unanswered && !s.revived
	s.revived = unanswered
	return again
}

// Hung returns the call in err that did not return in time, nil when it is another
// error.
func Hung(err error) *callqueue.HungError {
	var hung *callqueue.HungError
	if errors.As(err, &hung) {
		return hung
	}
	return nil
}

// IsFatal tells an error that further calls would run into, at least those about
// the same device, from one that the library returned about one device.
func IsFatal(err error) bool {
	return Hung(err) != nil || errors.Is(err, backend.ErrClosed) || errors.Is(err, ErrNotInitialised) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
