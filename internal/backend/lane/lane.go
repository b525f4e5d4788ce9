// Package lane keeps a vendor's library, which may hang at any call, from
// holding up whoever asks it.
package lane

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Lane runs calls of the library one at a time. C code cannot be interrupted,
// so a call that takes longer than the limit is left to itself, on a goroutine
// of its own, and keeps the lane occupied: calls that come meanwhile fail at
// once instead of piling up behind it, until it returns.
type Lane struct {
	limit time.Duration
	// observe is told of each call, nil for nobody.
	observe func(name string, took time.Duration, hung bool)
	// free has room for one token, which is there when no call runs.
	free chan struct{}

	mu    sync.Mutex
	name  string    // of the call that runs
	since time.Time // when it began
}

// New returns a Lane whose calls may take as long as limit. observe, unless nil, is
// told how long each call took that was waited for, and whether it did not return
// in time.
func New(limit time.Duration, observe func(name string, took time.Duration, hung bool)) *Lane {
	l := &Lane{limit: limit, observe: observe, free: make(chan struct{}, 1)}
	l.free <- struct{}{}
	return l
}

// HungError says that a call did not return in time. Its text stays the same
// for as long as the call does not return.
type HungError struct {
	name  string
	limit time.Duration
}

func (e *HungError) Error() string {
	return fmt.Sprintf("%s did not answer within %v", e.name, e.limit)
}

// acquire waits until no call runs and occupies the lane for the call of that
// name. The lane is the caller's until it calls release. acquire fails with a
// *HungError, which names the call that occupies the lane for too long, and
// with ctx's error.
func (l *Lane) acquire(ctx context.Context, name string) (release func(), err error) {
	for {
		// Without this check a call could still begin after ctx has ended,
		// since select chooses at random among what is ready.
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		l.mu.Lock()
		running, left := l.name, l.limit-time.Since(l.since)
		l.mu.Unlock()
		if running != "" && left <= 0 {
			return nil, &HungError{running, l.limit}
		}
		// A lane that is free now or soon is waited for as long as a call may
		// take; then it is looked at again.
		if running == "" {
			left = l.limit
		}
		timer := time.NewTimer(left)
		select {
		case <-l.free:
			timer.Stop()
			l.mu.Lock()
			l.name, l.since = name, time.Now()
			l.mu.Unlock()
			return l.release, nil
		case <-ctx.Done():
			timer.Stop()
		case <-timer.C:
		}
	}
}

func (l *Lane) release() {
	l.mu.Lock()
	l.name = ""
	l.mu.Unlock()
	l.free <- struct{}{}
}

// Run calls f on the lane and waits for it as await does.
func Run[T any](ctx context.Context, l *Lane, name string, f func() (T, error)) (T, error) {
	release, err := l.acquire(ctx, name)
	if err != nil {
		var none T
		return none, err
	}
	return await(ctx, l, name, func() (T, error) {
		defer release()
		return f()
	})
}

// RunOnBoth is Run with two lanes occupied, the second of which decides how
// long f may take. All who take both take them in the same order.
func RunOnBoth[T any](ctx context.Context, one, two *Lane, name string, f func() (T, error)) (T, error) {
	release, err := one.acquire(ctx, name)
	if err != nil {
		var none T
		return none, err
	}
	releaseTwo, err := two.acquire(ctx, name)
	if err != nil {
		release()
		var none T
		return none, err
	}
	return await(ctx, two, name, func() (T, error) {
		defer release()
		defer releaseTwo()
		return f()
	})
}

// await calls f on a goroutine of its own and waits for it until ctx ends or
// the lane's limit is over. What f returns after that is dropped, so f must keep by
// itself what must not get lost.
func await[T any](ctx context.Context, l *Lane, name string, f func() (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1) // room for the result that nobody waits for any more
	start := time.Now()
	go func() {
		value, err := f()
		done <- result{value, err}
	}()
	observe := func(hung bool) {
		if l.observe != nil {
			l.observe(name, time.Since(start), hung)
		}
	}
	timer := time.NewTimer(l.limit)
	defer timer.Stop()
	var none T
	select {
	case r := <-done:
		observe(false)
		return r.value, r.err
	case <-timer.C:
		observe(true)
		return none, &HungError{name, l.limit}
	case <-ctx.Done():
		return none, fmt.Errorf("%s: %w", name, ctx.Err())
	}
}
