package backend_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// scripted is a backend whose outcome a test sets.
type scripted struct {
	mu      sync.Mutex
	found   backend.Found
	err     error
	calls   int
	changes chan struct{} // a token is one event; nil fails AwaitChange
}

func (s *scripted) Vendor() string { return "scripted" }

func (s *scripted) Discover(context.Context) (backend.Found, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	return s.found, s.err
}

func (s *scripted) Edits(...accel.DeviceID) (backend.Edits, error) { return backend.Edits{}, nil }

func (s *scripted) Close() error { return nil }

func (s *scripted) set(found backend.Found, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.found, s.err = found, err
}

func (s *scripted) discoveries() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

func (s *scripted) AwaitChange(ctx context.Context) error {
	if s.changes == nil {
		return errors.New("no library")
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.changes:
		return nil
	}
}

func foundOne(health accel.Health) backend.Found {
	return backend.Found{Devices: []accel.Device{{ID: "a", MemoryBytes: 1, Health: health}}}
}

// outcome is one call of report, with the time since the start of the watch.
type outcome struct {
	At     time.Duration
	Health string
	Err    string
}

// watched runs Watch with a second's interval in the bubble and returns what
// was reported so far of the first device.
func watched(t *testing.T, b backend.Backend, policy backend.Recovery) func() []outcome {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	start := time.Now()
	var mu sync.Mutex
	var got []outcome
	done := make(chan struct{})
	go func() {
		defer close(done)
		backend.Watch(ctx, b, time.Second, policy, func(found backend.Found, err error) {
			o := outcome{At: time.Since(start)}
			switch {
			case err != nil:
				o.Err = err.Error()
			case len(found.Devices) == 0:
				o.Health = "not listed"
			default:
				o.Health = found.Devices[0].Health.Reason
			}
			mu.Lock()
			got = append(got, o)
			mu.Unlock()
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() []outcome {
		mu.Lock()
		defer mu.Unlock()
		return append([]outcome(nil), got...)
	}
}

func TestWatchReportsChangesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &scripted{err: errors.New("no driver")}
		got := watched(t, b, backend.Recovery{})
		time.Sleep(2500 * time.Millisecond)
		b.set(foundOne(accel.Health{}), nil)
		time.Sleep(2 * time.Second)
		b.set(foundOne(accel.Health{Unhealthy: true, Reason: "hot"}), nil)
		time.Sleep(2 * time.Second)
		want := []outcome{
			{At: 0, Err: "no driver"},
			{At: 3 * time.Second},
			{At: 5 * time.Second, Health: "hot"},
		}
		if diff := cmp.Diff(want, got()); diff != "" {
			t.Errorf("reports (-want +got):\n%s", diff)
		}
		if n := b.discoveries(); n != 7 {
			t.Errorf("%d discoveries in 6.5 s at an interval of 1 s, want 7", n)
		}
	})
}

func TestWatchFollowsEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &scripted{found: foundOne(accel.Health{}), changes: make(chan struct{})}
		got := watched(t, b, backend.Recovery{})
		time.Sleep(500 * time.Millisecond)
		b.set(foundOne(accel.Health{Unhealthy: true, Reason: "hot"}), nil)
		b.changes <- struct{}{}
		synctest.Wait()
		want := []outcome{{At: 0}, {At: 500 * time.Millisecond, Health: "hot"}}
		if diff := cmp.Diff(want, got()); diff != "" {
			t.Errorf("reports (-want +got):\n%s", diff)
		}

		before := b.discoveries()
		for range 1000 { // a storm of events in one second
			b.changes <- struct{}{}
			time.Sleep(time.Millisecond)
		}
		if more := b.discoveries() - before; more < 2 || more > 6 {
			t.Errorf("%d discoveries in a second of 1000 events, want 2 to 6", more)
		}
	})
}

// TestHoldDownAfterAnError: devices are not trusted at once when all of them could
// not be used for a while.
func TestHoldDownAfterAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &scripted{found: foundOne(accel.Health{})}
		got := watched(t, b, backend.Recovery{After: 10 * time.Second})
		time.Sleep(1500 * time.Millisecond)
		b.set(backend.Found{}, errors.New("no driver"))
		time.Sleep(3 * time.Second)
		b.set(foundOne(accel.Health{}), nil)
		time.Sleep(time.Minute)
		want := []outcome{
			{At: 0},
			{At: 2 * time.Second, Err: "no driver"},
			{At: 5 * time.Second, Health: "no driver; well again, and trusted once it was so for 10s"},
			{At: 15 * time.Second},
		}
		if diff := cmp.Diff(want, got()); diff != "" {
			t.Errorf("reports (-want +got):\n%s", diff)
		}
	})
}

func TestFoundEqual(t *testing.T) {
	base := func() backend.Found {
		return backend.Found{
			Driver:  "1.3.0",
			Devices: []accel.Device{{ID: "a"}},
			Faults:  []backend.Fault{{Index: 1, ID: "b", Err: errors.New("lost")}},
		}
	}
	tests := map[string]struct {
		change func(*backend.Found)
		equal  bool
	}{
		"the same":      {func(*backend.Found) {}, true},
		"driver":        {func(f *backend.Found) { f.Driver = "1.4.0" }, false},
		"device":        {func(f *backend.Found) { f.Devices[0].MemoryBytes = 7 }, false},
		"fault's text":  {func(f *backend.Found) { f.Faults[0].Err = errors.New("gone") }, false},
		"fault's index": {func(f *backend.Found) { f.Faults[0].Index = 2 }, false},
		"no fault":      {func(f *backend.Found) { f.Faults = nil }, false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			other := base()
			tt.change(&other)
			if got := base().Equal(other); got != tt.equal {
				t.Errorf("Equal = %v, want %v", got, tt.equal)
			}
		})
	}
}
