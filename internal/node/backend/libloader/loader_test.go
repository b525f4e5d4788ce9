package libloader

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
)

// library is a release of a library that is nothing but what happened to it.
type library struct {
	libfile.File
	release int
}

// world is what a loader finds, and what it did.
type world struct {
	*Loader[*library]
	release int    // the file that is there now, 0 for none
	failing error  // what Init returns
	bound   string // what the kernel lists
	log     []string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{release: 1}
	w.Loader = New(5*time.Second, Steps[*library]{
		Vendor:       "acme",
		Name:         "libacme.so",
		InitCall:     "acmeInit",
		ShutdownCall: "acmeShutdown",
		Load: func(old *library) (*library, error) {
			if old != nil && old.release == w.release {
				return old, nil
			}
			if old != nil {
				w.did("close %d", old.release)
			}
			if w.release == 0 {
				return nil, errors.New("libacme.so not found")
			}
			w.did("load %d", w.release)
			return &library{release: w.release}, nil
		},
		Init: func(l *library) error {
			if w.failing != nil {
				return w.failing
			}
			w.did("init %d", l.release)
			return nil
		},
		Shutdown: func(l *library) { w.did("shutdown %d", l.release) },
		Close: func(l *library) error {
			w.did("close %d", l.release)
			return nil
		},
		Started: func() { w.did("started") },
		Bound:   func() string { return w.bound },
	})
	return w
}

func (w *world) did(format string, args ...any) { w.log = append(w.log, fmt.Sprintf(format, args...)) }

// wantDone compares what happened since the last time.
func (w *world) wantDone(t *testing.T, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, w.log); diff != "" {
		t.Errorf("what was done (-want +got):\n%s", diff)
	}
	w.log = nil
}

// listing is one in which no device answers, or all do.
type listing struct{ unanswered bool }

func (l listing) Unanswered() bool { return l.unanswered }

// discover lists with these outcomes, one after the other.
func (w *world) discover(t *testing.T, outcomes ...any) error {
	t.Helper()
	_, err := w.Discover(t.Context(), func() (backend.Found, error) {
		_, err := List(t.Context(), w.Loader, func(_ context.Context, l *library) (listing, error) {
			w.did("list %d", l.release)
			if len(outcomes) == 0 {
				t.Fatal("listed once too often")
			}
			next := outcomes[0]
			outcomes = outcomes[1:]
			if err, ok := next.(error); ok {
				return listing{}, err
			}
			return next.(listing), nil
		})
		return backend.Found{}, err
	})
	if len(outcomes) > 0 {
		t.Errorf("not asked for: %v", outcomes)
	}
	return err
}

var (
	well   = listing{}
	silent = listing{unanswered: true}
)

func want(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil && text == "" {
		return
	}
	if u := backend.Unavailable(err); u == nil || u.Reason() != text {
		t.Errorf("error is %v, want %q", err, text)
	}
}

func TestLoadedAndInitialisedWhenNeeded(t *testing.T) {
	w := newWorld(t)
	w.wantDone(t)
	want(t, w.discover(t, well), "")
	w.wantDone(t, "load 1", "init 1", "started", "list 1")
	want(t, w.discover(t, well), "")
	w.wantDone(t, "list 1")
	if err := w.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	w.wantDone(t, "shutdown 1", "close 1")
	if err := w.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	if err := w.discover(t); !errors.Is(err, backend.ErrClosed) || backend.Unavailable(err) != nil {
		t.Errorf("after Close: %v", err)
	}
	w.wantDone(t)
}

func TestWhatFailsIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	w.release = 0
	want(t, w.discover(t), "libacme.so not found")
	w.release, w.failing = 1, errors.New("no driver")
	want(t, w.discover(t), "no driver")
	w.wantDone(t, "load 1")
	w.release = 2 // the driver came with another library
	want(t, w.discover(t), "no driver")
	w.failing = nil
	want(t, w.discover(t, well), "")
	w.wantDone(t, "close 1", "load 2", "init 2", "started", "list 2")
}

func TestInitialisedAnew(t *testing.T) {
	code := &CodeError{Call: "acmeCount", Code: 9, Text: "driver not loaded"}
	anew := []string{"list 1", "shutdown 1", "init 1", "started", "list 1"}
	w := newWorld(t)
	want(t, w.discover(t, well), "")
	w.log = nil

	want(t, w.discover(t, code, well), "")
	w.wantDone(t, anew...)
	want(t, w.discover(t, code, code), "acmeCount: driver not loaded (9)")
	w.wantDone(t, anew...)
	want(t, w.discover(t, errors.New("too many")), "too many") // no word of the library
	w.wantDone(t, "list 1")

	want(t, w.discover(t, silent, silent), "")
	w.wantDone(t, anew...)
	want(t, w.discover(t, silent), "") // once was enough
	want(t, w.discover(t, well), "")
	w.wantDone(t, "list 1", "list 1")
	want(t, w.discover(t, silent, well), "")
	w.wantDone(t, anew...)

	w.bound = "0000:10:00.0"
	want(t, w.discover(t, well), "")
	w.wantDone(t, anew[1:]...)
}

func TestCallOfALibraryThatIsGone(t *testing.T) {
	w := newWorld(t)
	want(t, w.discover(t, well), "")
	lib, err := w.Current()
	if err != nil || lib == nil {
		t.Fatalf("Current = %v, %v", lib, err)
	}
	call := func() (int, error) {
		return Call(t.Context(), w.Loader, w.Calls, lib, callqueue.Library, "acmeCount", func() (int, error) { return 7, nil })
	}
	if got, err := call(); got != 7 || err != nil {
		t.Errorf("Call = %d, %v", got, err)
	}
	if err := w.Loader.release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, err := call(); got != 0 || !errors.Is(err, ErrNotInitialised) || errors.Is(err, backend.ErrClosed) {
		t.Errorf("Call after a release = %d, %v", got, err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := call(); got != 0 || !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Call after Close = %d, %v", got, err)
	}
}

func TestCanceledDiscovery(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := w.Discover(ctx, func() (backend.Found, error) { return backend.Found{}, ctx.Err() })
	if !errors.Is(err, context.Canceled) || backend.Unavailable(err) != nil || err.Error() != "discover acme devices: context canceled" {
		t.Errorf("error is %v", err)
	}
}

func TestAwaitEvent(t *testing.T) {
	w := newWorld(t)
	unexpected := func(*library, time.Duration) (bool, error) {
		t.Error("a library is asked that is not initialised")
		return true, nil
	}
	if err := w.AwaitEvent(t.Context(), unexpected); err == nil || err.Error() != "acme: the library is not initialised" {
		t.Errorf("without a library: %v", err)
	}
	want(t, w.discover(t, well), "")
	start := time.Now()
	times := 0
	err := w.AwaitEvent(t.Context(), func(l *library, wait time.Duration) (bool, error) {
		times++
		return times == 2, nil
	})
	if d := time.Since(start); err != nil || times != 2 || d < w.EventWait() {
		t.Errorf("error %v after %d calls and %v; want two with a pause of %v", err, times, d, w.EventWait())
	}
	failed := errors.New("failed")
	err = w.AwaitEvent(t.Context(), func(*library, time.Duration) (bool, error) { return false, failed })
	if !errors.Is(err, failed) || !strings.HasPrefix(err.Error(), "acme: ") {
		t.Errorf("error is %v, want that of the call", err)
	}
	// Call fails so if the library was released in that moment.
	times = 0
	err = w.AwaitEvent(t.Context(), func(*library, time.Duration) (bool, error) {
		times++
		return true, map[bool]error{true: ErrNotInitialised}[times == 1]
	})
	if err != nil || times != 2 {
		t.Errorf("error %v after %d calls; want the second one's event", err, times)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := w.AwaitEvent(t.Context(), unexpected); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("after Close the error is %v, want %v", err, backend.ErrClosed)
	}
}

func TestHasCode(t *testing.T) {
	err := fmt.Errorf("describe: %w", &CodeError{"acmeMemory(1)", 3, "not supported"})
	if !HasCode(err, 1, 3) || HasCode(err, 1) || HasCode(nil, 3) || HasCode[int](err) {
		t.Error("HasCode does not find the code, or another")
	}
	if got, want := err.Error(), "describe: acmeMemory(1): not supported (3)"; got != want {
		t.Errorf("error is %q, want %q", got, want)
	}
}

// TestCallsAreFew: names of calls are values of a label, so the number of the device
// and the file are not in them.
func TestCallsAreFew(t *testing.T) {
	for name, want := range map[string]string{
		"nvmlDeviceGetMemoryInfo(3)": "nvmlDeviceGetMemoryInfo", "EfmlInit": "EfmlInit", loading + "libefml.so": "load",
	} {
		if got := function(name); got != want {
			t.Errorf("%s is told as %s, want %s", name, got, want)
		}
	}
}
