// Package callqueue keeps calls of a vendor's library, any of which may hang, from
// holding up whatever else is to be asked.
package callqueue

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// Queue runs calls of the library one at a time. C code cannot be interrupted, so
// a call that takes longer than the limit is left to itself, on a goroutine of its
// own, and the queue goes on without it. Until it returns, calls about the same
// device fail at once instead of piling up beside it. Calls about other devices
// are made: the libraries are documented to be safe for threads, and are used so
// anyway, since one thread waits for events all the time.
type Queue struct {
	limit time.Duration
	// observe is told of each call, nil for nobody.
	observe func(name string, took time.Duration, hung bool)
	// free has room for one token, which is there when no call runs but those
	// that were left.
	free chan struct{}

	mu   sync.Mutex // guards what follows
	left []*call    // that did not return in time, oldest first
}

// Library is what a call is about that is about no device, or about several.
const Library = -1

// call is a call of the library.
type call struct {
	name   string
	about  int // a device's index, or Library
	alone  bool
	since  time.Time
	queues []*Queue
	hung   chan struct{} // closed once it did not return in time

	mu          sync.Mutex // guards what follows
	left, ended bool
}

// New returns a Queue whose calls may take as long as limit. observe, unless nil, is
// told how long each call took that was waited for, and whether it did not return
// in time.
func New(limit time.Duration, observe func(name string, took time.Duration, hung bool)) *Queue {
	l := &Queue{limit: limit, observe: observe, free: make(chan struct{}, 1)}
	l.free <- struct{}{}
	return l
}

// HungError says that a call did not return in time. Its text stays the same
// for as long as the call does not return.
type HungError struct {
	// About is the index of the device that the call is about, or Library.
	About int
	// Since is when the call began.
	Since time.Time

	name  string
	limit time.Duration
}

func (e *HungError) Error() string {
	return fmt.Sprintf("%s did not answer within %v", e.name, e.limit)
}

func (l *Queue) hungError(c *call) *HungError {
	return &HungError{About: c.about, Since: c.since, name: c.name, limit: l.limit}
}

// Hung returns the call about a device that did not return in time and has not
// returned yet, nil when there is none.
func (l *Queue) Hung(about int) *HungError {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.left, func(c *call) bool { return c.alone || c.about == about })
	if i < 0 {
		return nil
	}
	return l.hungError(l.left[i])
}

// AnyHung is Hung for calls about whatever.
func (l *Queue) AnyHung() *HungError {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.left) == 0 {
		return nil
	}
	return l.hungError(l.left[0])
}

// inTheWay returns the call that keeps c from being made.
func (l *Queue) inTheWay(c *call) *HungError {
	if c.alone {
		return l.AnyHung()
	}
	return l.Hung(c.about)
}

// acquire waits until no call runs and occupies the queue for c. It fails with a
// *HungError, which names the call that is in the way and did not return in time,
// and with ctx's error.
func (l *Queue) acquire(ctx context.Context, c *call) error {
	// Without this check a call could still begin after ctx has ended, since
	// select chooses at random among what is ready.
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: %w", c.name, err)
	}
	if hung := l.inTheWay(c); hung != nil {
		return hung
	}
	select {
	case <-l.free: // after the limit at the latest, then the call that runs is left
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", c.name, ctx.Err())
	}
	if hung := l.inTheWay(c); hung != nil {
		l.free <- struct{}{}
		return hung
	}
	return nil
}

// Run calls f on the queue, about the device of that index or Library, and waits
// for it until ctx ends or the queue's limit is over. What f returns after that is
// dropped, so f must keep by itself what must not get lost.
func Run[T any](ctx context.Context, l *Queue, about int, name string, f func() (T, error)) (T, error) {
	return await(ctx, &call{name: name, about: about, queues: []*Queue{l}}, f)
}

// RunAlone is Run with two queues occupied, the second of which decides how long f
// may take. Nothing else runs on them meanwhile, also when f does not return in
// time, and f is not called while a call hangs. All who take both queues take them
// in the same order.
func RunAlone[T any](ctx context.Context, one, two *Queue, name string, f func() (T, error)) (T, error) {
	return await(ctx, &call{name: name, about: Library, alone: true, queues: []*Queue{one, two}}, f)
}

// await occupies the queues of c, calls f on a goroutine of its own and waits for it.
func await[T any](ctx context.Context, c *call, f func() (T, error)) (T, error) {
	var none T
	for i, l := range c.queues {
		if err := l.acquire(ctx, c); err != nil {
			for _, before := range c.queues[:i] {
				before.free <- struct{}{}
			}
			return none, err
		}
	}
	l := c.queues[len(c.queues)-1]
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1) // room for the result that nobody waits for any more
	c.since, c.hung = time.Now(), make(chan struct{})
	tooLong := time.AfterFunc(l.limit, c.leave)
	go func() {
		value, err := f()
		tooLong.Stop()
		c.end()
		done <- result{value, err}
	}()
	observe := func(hung bool) {
		if l.observe != nil {
			l.observe(c.name, time.Since(c.since), hung)
		}
	}
	select {
	case r := <-done:
		observe(false)
		return r.value, r.err
	case <-c.hung:
		observe(true)
		return none, l.hungError(c)
	case <-ctx.Done():
		return none, fmt.Errorf("%s: %w", c.name, ctx.Err())
	}
}

// leave leaves a call to itself, unless it has returned just now.
func (c *call) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.left = true
	for _, l := range c.queues {
		l.mu.Lock()
		l.left = append(l.left, c)
		l.mu.Unlock()
		l.free <- struct{}{}
	}
	close(c.hung)
}

// end notes that a call has returned.
func (c *call) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for _, l := range c.queues {
		if !c.left {
			l.free <- struct{}{}
			continue
		}
		l.mu.Lock()
		l.left = slices.DeleteFunc(l.left, func(other *call) bool { return other == c })
		l.mu.Unlock()
	}
}
