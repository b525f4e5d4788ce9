package backend

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// DefaultInterval is how often Watch asks when nothing else makes it ask.
const DefaultInterval = 5 * time.Second

// minGap is the least time between two discoveries that events ask for, so
// that a card in distress, which sends them by the hundred, cannot keep the
// library busy.
const minGap = 200 * time.Millisecond

// Watch discovers the devices of b at once, then every interval
// (DefaultInterval when it is not positive) and whenever b tells of a change,
// until ctx ends. It calls report with the first outcome
// and then with each outcome that differs from the one before; err is that of
// Discover, and found is empty when it is not nil. Devices that failed are shown
// as unhealthy until policy trusts them again. The calls of report come one
// after the other, from the goroutine that called Watch.
//
// During a pause (Recovery.Pause) the devices are shown as they were, but unhealthy.
//
// Devices that the library does not answer about, for no fault of theirs that is
// known, are shown as they were, for as long as Patience, and are in found.Unasked.
//
// A device that was there before and is not in found.Devices has been lost;
// what that means for the pods on it is for the caller to decide. With an
// error no device can be used.
//
// Watch returns when ctx has ended and all that it started has stopped.
func Watch(ctx context.Context, b Backend, interval time.Duration, policy Recovery, report func(found Found, err error)) {
	if interval <= 0 {
		interval = DefaultInterval
	}
	changed := make(chan struct{}, 1)
	var listening sync.WaitGroup
	defer listening.Wait()
	if n, ok := b.(Notifier); ok {
		listening.Go(func() { listen(ctx, n, interval, changed) })
	}

	trust := newRecovery(b.Vendor(), policy)
	var last Found
	var lastErr error
	for first := true; ; first = false {
		_, pause := policy.Pause.Now()
		found, err := b.Discover(ctx)
		if ctx.Err() != nil {
			if err == nil {
				trust.apply(found, time.Now()) // what is in it may not be told again
			}
			return
		}
		wait, now := interval, time.Now()
		if err == nil {
			var due time.Time
			if found, due = trust.apply(found, now); !due.IsZero() {
				wait = min(wait, max(due.Sub(now), minGap))
			}
		} else {
			found, err = trust.without(err, now)
		}
		if first || !found.Equal(last) || errorText(err) != errorText(lastErr) {
			last, lastErr = found, err
			report(found, err)
		}
		if !rest(ctx, wait, changed, pause) {
			return
		}
	}
}

// listen puts a token into changed whenever n tells of a change.
func listen(ctx context.Context, n Notifier, interval time.Duration, changed chan<- struct{}) {
	for ctx.Err() == nil {
		if err := n.AwaitChange(ctx); err != nil {
			// The reason also keeps Discover from working, which reports it.
			sleep(ctx, interval)
			continue
		}
		select {
		case changed <- struct{}{}:
		default: // one is waiting already, and one discovery serves both
		}
	}
}

// rest waits until the next discovery is due. It returns false when ctx ended.
func rest(ctx context.Context, interval time.Duration, changed, pause <-chan struct{}) bool {
	gap := min(minGap, interval)
	if !sleep(ctx, gap) {
		return false
	}
	timer := time.NewTimer(interval - gap)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-changed:
	case <-pause:
	case <-timer.C:
	}
	return true
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// Equal reports whether f and g tell the same; errors count by their text.
func (f Found) Equal(g Found) bool {
	return f.Driver == g.Driver && f.CUDA == g.CUDA && f.Silent == g.Silent && errorText(f.Problem) == errorText(g.Problem) &&
		slices.Equal(f.Devices, g.Devices) &&
		slices.Equal(f.Links, g.Links) &&
		slices.EqualFunc(f.Faults, g.Faults, Fault.equal) && slices.EqualFunc(f.Unasked, g.Unasked, Fault.equal)
}

func (f Fault) equal(g Fault) bool {
	return f.Index == g.Index && f.ID == g.ID && f.Cause == g.Cause && errorText(f.Err) == errorText(g.Err)
}

// Unavailable returns the *UnavailableError in err, or nil.
func Unavailable(err error) *UnavailableError {
	var u *UnavailableError
	if errors.As(err, &u) {
		return u
	}
	return nil
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
