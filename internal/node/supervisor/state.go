package supervisor

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// stalled is how long a change of the configuration may take before the
// program counts as hung: stopping an agent waits for calls of the vendors'
// libraries, which are limited to seconds each.
const stalled = 2 * time.Minute

// state is what the probes report. It is safe for concurrent use.
type state struct {
	mu      sync.Mutex // guards what follows
	current *running   // nil while there is none
	since   time.Time  // when current was set or taken away
	// waiting is true while another process has the node, for the reason why; nil
	// where this one is as ready as it can be.
	waiting bool
	why     error
}

func (s *state) set(r *running) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current, s.since, s.waiting = r, time.Now(), false
}

// wait notes that another process has the node, and why this one is not ready.
func (s *state) wait(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting, s.why = true, why
}

// isWaiting returns what wait noted.
func (s *state) isWaiting() (waiting bool, why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting, s.why
}

// now returns what runs, nil while there is nothing, and since when that is so.
func (s *state) now() (*running, time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current, s.since
}

// Ready returns nil while pods can be given devices.
func (s *state) Ready() error {
	if waiting, why := s.isWaiting(); waiting {
		return why
	}
	r, since := s.now()
	if r == nil {
		return fmt.Errorf("the configuration is being applied since %v", time.Since(since).Round(time.Millisecond))
	}
	return r.Ready()
}

// Alive returns an error when the program hangs.
func (s *state) Alive(ctx context.Context) error {
	if waiting, _ := s.isWaiting(); waiting {
		return nil
	}
	r, since := s.now()
	if r != nil {
		return r.Alive(ctx)
	}
	if age := time.Since(since); age > stalled {
		return fmt.Errorf("the configuration is being applied since %v", age.Round(time.Second))
	}
	return nil
}
