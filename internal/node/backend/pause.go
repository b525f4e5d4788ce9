package backend

import (
	"sync"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Pause keeps a vendor's library out of the process while another program needs the
// driver for itself: to replace it, or to cut devices into other partitions. Discover
// releases the library then and fails with a *PausedError, and Watch shows the devices as
// unhealthy for that reason. Backends read it; one owner sets it. It is safe for
// concurrent use; nil is a Pause that is never set.
type Pause struct {
	mu      sync.Mutex // guards what follows
	why     accel.Health
	changed chan struct{} // closed with each change
}

// NewPause returns a Pause that is set for that reason, or not set if why is healthy.
func NewPause(why accel.Health) *Pause { return &Pause{why: why, changed: make(chan struct{})} }

// Set sets the pause for a reason, and ends it if why is healthy. It reports whether that
// changes anything.
func (p *Pause) Set(why accel.Health) (changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.why == why {
		return false
	}
	p.why = why
	close(p.changed)
	p.changed = make(chan struct{})
	return true
}

// Now returns the reason of the pause, healthy if there is none, and a channel that is
// closed when that changes.
func (p *Pause) Now() (why accel.Health, changed <-chan struct{}) {
	if p == nil {
		return accel.Health{}, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.why, p.changed
}
