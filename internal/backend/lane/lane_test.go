package lane

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// call is a call that returns when told to.
func call(release <-chan struct{}) func() (int, error) {
	return func() (int, error) {
		<-release
		return 1, nil
	}
}

func TestLaneGivesUpWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(5*time.Second, nil)
		release := make(chan struct{})
		start := time.Now()
		_, err := Run(t.Context(), l, "first", call(release))
		if d := time.Since(start); d != 5*time.Second || err == nil || err.Error() != "first did not answer within 5s" {
			t.Errorf("after %v: %v", d, err)
		}
		// Those who come now do not wait, and blame the one that hangs.
		start = time.Now()
		_, err = Run(t.Context(), l, "second", call(nil))
		if d := time.Since(start); d != 0 || err == nil || err.Error() != "first did not answer within 5s" {
			t.Errorf("after %v: %v", d, err)
		}
		close(release)
		synctest.Wait()
		if v, err := Run(t.Context(), l, "third", call(release)); v != 1 || err != nil {
			t.Errorf("with the lane free again: %v, %v", v, err)
		}
	})
}

func TestLaneQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(5*time.Second, nil)
		sleep := func() (int, error) {
			time.Sleep(4 * time.Second)
			return 1, nil
		}
		errs := make(chan error)
		for range 3 {
			go func() {
				_, err := Run(t.Context(), l, "sleep", sleep)
				errs <- err
			}()
		}
		start := time.Now()
		for range 3 {
			if err := <-errs; err != nil {
				t.Errorf("a call that waited for its turn: %v", err)
			}
		}
		if d := time.Since(start); d != 12*time.Second {
			t.Errorf("three calls of 4 s took %v", d)
		}
	})
}

func TestLaneHonoursContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(5*time.Second, nil)
		release := make(chan struct{})
		for _, name := range []string{"running", "waiting for it"} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			start := time.Now()
			_, err := Run(ctx, l, name, call(release))
			cancel()
			if d := time.Since(start); d != time.Second || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: after %v: %v", name, d, err)
			}
		}
		close(release)
	})
}

// TestCallsAreTold: how long those took that returned, that one hung, and nothing of
// those that never began.
func TestCallsAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		observe := func(name string, took time.Duration, hung bool) {
			got = append(got, fmt.Sprintf("%s %v %t", name, took, hung))
		}
		l, other := New(5*time.Second, observe), New(time.Second, nil)
		sleep := func(d time.Duration) func() (int, error) {
			return func() (int, error) {
				time.Sleep(d)
				return 1, errors.New("failed")
			}
		}
		for _, d := range []time.Duration{time.Second, 0, 10 * time.Second} {
			_, _ = Run(t.Context(), l, "call", sleep(d))
		}
		_, _ = Run(t.Context(), l, "never began", sleep(0))
		time.Sleep(6 * time.Second) // until it returns
		_, _ = RunOnBoth(t.Context(), other, l, "both", sleep(2*time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _ = Run(ctx, l, "given up", sleep(2*time.Second))
		if want := []string{"call 1s false", "call 0s false", "call 5s true", "both 2s false"}; !slices.Equal(got, want) {
			t.Errorf("told %q, want %q", got, want)
		}
		time.Sleep(10 * time.Second)
	})
}
