package libloader

import (
	"errors"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// What was measured of two sessions of a library may be of two devices.
func TestMeasure(t *testing.T) {
	lost := &CodeError{Call: "acmeGet(0)"}
	for name, tt := range map[string]struct {
		before, meanwhile func(*testing.T, *world)
		err               error // what the measurement itself returns
		want              error // nil for none
		unavailable       bool
	}{
		"at rest":                    {},
		"before the first discovery": {before: func(_ *testing.T, w *world) { w.shutdown() }, want: ErrNotInitialised, unavailable: true},
		"closed":                     {before: func(_ *testing.T, w *world) { _ = w.Close() }, want: backend.ErrClosed},
		"closed meanwhile": {
			meanwhile: func(_ *testing.T, w *world) { _ = w.Close() }, err: backend.ErrClosed, want: backend.ErrClosed,
		},
		"initialised again meanwhile": {
			meanwhile: func(t *testing.T, w *world) {
				t.Helper()
				if err := w.discover(t, &CodeError{}, listing{}); err != nil {
					t.Fatal(err)
				}
			},
			want: ErrNotInitialised, unavailable: true,
		},
		"released meanwhile, as for a pause": {
			meanwhile: func(t *testing.T, w *world) {
				t.Helper()
				_ = w.Loader.release(t.Context())
			},
			err: ErrNotInitialised, want: ErrNotInitialised, unavailable: true,
		},
		"an error of the device": {err: lost, want: lost},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			if err := w.discover(t, listing{}); err != nil {
				t.Fatal(err)
			}
			if tt.before != nil {
				tt.before(t, w)
			}
			_, err := Measure(t.Context(), w.Loader, func(*library, uint64) (struct{}, error) {
				if tt.meanwhile != nil {
					tt.meanwhile(t, w)
				}
				return struct{}{}, tt.err
			})
			if !errors.Is(err, tt.want) {
				t.Errorf("Measure: %v, want %v", err, tt.want)
			}
			if got := backend.Unavailable(err) != nil; got != tt.unavailable {
				t.Errorf("Measure: %v, an UnavailableError %v", err, got)
			}
		})
	}
}

// A pause counts from the first call, whether or not a discovery has noticed it.
func TestMeasurePaused(t *testing.T) {
	w := newWorld(t)
	w.steps.Pause = backend.NewPause(accel.Health{})
	if err := w.discover(t, listing{}); err != nil {
		t.Fatal(err)
	}
	why := accel.Health{Unhealthy: true, Reason: "the driver is being replaced"}
	w.steps.Pause.Set(why)
	w.log = nil
	_, err := Measure(t.Context(), w.Loader, func(*library, uint64) (struct{}, error) {
		t.Error("the library is used")
		return struct{}{}, nil
	})
	var paused *backend.PausedError
	if !errors.As(err, &paused) || paused.Health != why || backend.Unavailable(err) == nil {
		t.Errorf("Measure: %v", err)
	}
	w.wantDone(t, "shutdown 1", "close 1")
}
