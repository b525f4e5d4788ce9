package libloader

import (
	"context"
	"errors"

	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Measure calls measure with the library and the number of its session. It does not wait
// for a discovery that runs, so that a device that hangs there delays no measurement of
// another, and it does not initialise the library.
//
// Errors about the library as a whole are those of Discover: backend.ErrClosed, ctx's, and
// a *backend.UnavailableError, with a *backend.PausedError during a pause. Other errors are
// those of measure.
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
		// As in Discover, so that both return the same error, and release the library.
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
