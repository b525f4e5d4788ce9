package callqueue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// until is a call that returns when told to.
func until(release <-chan struct{}) func() (int, error) {
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
		_, err := Run(t.Context(), l, Library, "first", until(release))
		if d := time.Since(start); d != 5*time.Second || err == nil || err.Error() != "first did not answer within 5s" {
			t.Errorf("after %v: %v", d, err)
		}
		// Those who come now do not wait, and blame the one that hangs.
		start = time.Now()
		_, err = Run(t.Context(), l, Library, "second", until(nil))
		if d := time.Since(start); d != 0 || err == nil || err.Error() != "first did not answer within 5s" {
			t.Errorf("after %v: %v", d, err)
		}
		close(release)
		synctest.Wait()
		if v, err := Run(t.Context(), l, Library, "third", until(release)); v != 1 || err != nil {
			t.Errorf("with the queue free again: %v, %v", v, err)
		}
	})
}

// TestOneDeviceHangs: calls about it fail at once, calls about others are made, and
// nothing that must be alone.
func TestOneDeviceHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, other := New(5*time.Second, nil), New(time.Second, nil)
		release := make(chan struct{})
		_, err := Run(t.Context(), l, 3, "ask(3)", until(release))
		var hung *HungError
		if !errors.As(err, &hung) || hung.About != 3 || time.Since(hung.Since) != 5*time.Second {
			t.Fatalf("the call that hangs: %+v", err)
		}
		start, at := time.Now(), closed()
		for name, run := range map[string]func() (int, error){
			"of another device": func() (int, error) { return Run(t.Context(), l, 4, "ask(4)", until(at)) },
			"of the library":    func() (int, error) { return Run(t.Context(), l, Library, "count", until(at)) },
			"on another queue":  func() (int, error) { return Run(t.Context(), other, 3, "ask(3)", until(at)) },
		} {
			if v, err := run(); v != 1 || err != nil {
				t.Errorf("a call %s: %v, %v", name, v, err)
			}
		}
		for name, run := range map[string]func() (int, error){
			"of the device":    func() (int, error) { return Run(t.Context(), l, 3, "again(3)", until(at)) },
			"that is alone":    func() (int, error) { return RunAlone(t.Context(), other, l, "shutdown", until(at)) },
			"that is, swapped": func() (int, error) { return RunAlone(t.Context(), l, other, "shutdown", until(at)) },
		} {
			if _, err := run(); err == nil || err.Error() != "ask(3) did not answer within 5s" {
				t.Errorf("a call %s: %v", name, err)
			}
		}
		if d := time.Since(start); d != 0 {
			t.Errorf("calls beside the one that hangs took %v", d)
		}
		close(release)
		synctest.Wait()
		if v, err := RunAlone(t.Context(), other, l, "shutdown", until(at)); v != 1 || err != nil || l.AnyHung() != nil {
			t.Errorf("once it has returned: %v, %v", v, err)
		}
	})
}

// TestNothingRunsBesideACallThatIsAlone, not even when it hangs.
func TestNothingRunsBesideACallThatIsAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := New(5*time.Second, nil), New(5*time.Second, nil)
		release := make(chan struct{})
		_, err := RunAlone(t.Context(), one, two, "init", until(release))
		if err == nil || err.Error() != "init did not answer within 5s" {
			t.Fatalf("the call that hangs: %v", err)
		}
		for _, l := range []*Queue{one, two} {
			if _, err := Run(t.Context(), l, 0, "ask(0)", until(closed())); err == nil || err.Error() != "init did not answer within 5s" {
				t.Errorf("a call beside it: %v", err)
			}
		}
		close(release)
		synctest.Wait()
		if v, err := Run(t.Context(), one, 0, "ask(0)", until(closed())); v != 1 || err != nil {
			t.Errorf("once it has returned: %v, %v", v, err)
		}
	})
}

func closed() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
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
				_, err := Run(t.Context(), l, Library, "sleep", sleep)
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
			_, err := Run(ctx, l, Library, name, until(release))
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
			_, _ = Run(t.Context(), l, Library, "call", sleep(d))
		}
		_, _ = Run(t.Context(), l, Library, "never began", sleep(0))
		time.Sleep(6 * time.Second) // until it returns
		_, _ = RunAlone(t.Context(), other, l, "both", sleep(2*time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, _ = Run(ctx, l, Library, "given up", sleep(2*time.Second))
		if want := []string{"call 1s false", "call 0s false", "call 5s true", "both 2s false"}; !slices.Equal(got, want) {
			t.Errorf("told %q, want %q", got, want)
		}
		time.Sleep(10 * time.Second)
	})
}
