package libloader

import (
	"context"
	"errors"

	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Measure calls measure with the library, in which handles of devices must not be used
// after that session. It does not wait for a discovery, so that a device that hangs there
// delays no other. Its errors about the library as a whole are those of Discover: paused,
// closed or not initialised, which it does not change; those about the device are
// measure's own.
func Measure[L Library, T any](ctx context.Context, s *Loader[L], measure func(lib L, session uint64) (T, error)) (T, error) {
	var none T
	session := s.Session()
	lib, err := s.usable(ctx)
	if err != nil {
		return none, s.explain(ctx, "measure", err)
	}
	value, err := measure(lib, session)
	switch {
	case err == nil && s.Session() == session:
		return value, nil
	case err == nil || errors.Is(err, backend.ErrClosed) || errors.Is(err, ErrNotInitialised):
		// The library was released or initialised again meanwhile.
		if _, err = s.usable(ctx); err == nil {
			err = ErrNotInitialised
		}
		return none, s.explain(ctx, "measure", err)
	}
	return none, err
}

// usable returns the library if it may be used now.
func (s *Loader[L]) usable(ctx context.Context) (lib L, err error) {
	var none L
	if why, _ := s.steps.Pause.Now(); why.Unhealthy {
		// Discover's word, and like it this releases the library.
		if err := s.alone(ctx, func() error { return nil }); err != nil {
			return none, err
		}
	}
	lib, err = s.Current()
	if err == nil && (lib == none || !s.Initialised()) {
		err = ErrNotInitialised
	}
	return lib, err
}
