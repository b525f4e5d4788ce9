// Package libloader is the life of a vendor's library, which is the same for all
// vendors: it is found, loaded and initialised when it is needed, initialised
// anew when its driver was loaded anew, loaded again when another file is
// there, shut down and unloaded. What differs is in Steps.
//
// Functions of the library run on two queues: the wait for an event must not
// hold up other calls, so it has a queue of its own. Whatever changes which
// library there is, or whether it is initialised, takes both, events first, so
// that nothing else is called meanwhile, and waits for calls that hang.
package libloader

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/sysfs"
)

// Library is a library that is loaded, as a vendor binds it: a pointer to a
// struct with a libfile.File in it.
type Library interface {
	comparable
	// LoadedFrom is the path or name that it was loaded from. File has it.
	LoadedFrom() string
}

// Steps are what a vendor's library needs to live. The functions run on both
// queues, unless they say otherwise.
type Steps[L Library] struct {
	// Vendor is the vendor's name, Name that of the library's file.
	Vendor, Name string
	// InitCall and ShutdownCall are the library's functions that Init and
	// Shutdown call, for messages.
	InitCall, ShutdownCall string

	// Load returns the library that is found now. It is given the one that is
	// loaded, or the zero value, and returns or closes it. With an error, it
	// returns what is loaded nevertheless.
	Load func(old L) (L, error)
	// Init initialises the library.
	Init func(L) error
	// Shutdown ends what Init began. It has no error: a library refuses it when
	// the driver is gone, and is to be initialised anew just the same.
	Shutdown func(L)
	// Close unloads the library, which was shut down.
	Close func(L) error

	// Started, unless nil, is told that the library was initialised. It runs in
	// a discovery, on no queue.
	Started func()
	// Observe, unless nil, is that of backend.Options.
	Observe func(call string, took time.Duration, hung bool)
	// Pause is that of backend.Options.
	Pause *backend.Pause
	// Bound, unless nil, tells which devices the kernel has for the driver, see
	// sysfs.Root.Bound. It is for libraries that count their devices when they
	// are initialised, and runs in a discovery, on no queue.
	Bound func() string
}

// Loader is the life of one library. It is safe for concurrent use.
type Loader[L Library] struct {
	steps Steps[L]
	limit time.Duration

	// Calls and Events are where functions of the library run, with Call.
	Calls, Events *callqueue.Queue

	// turn is held by the discovery that runs. It guards plug, revived and unreleased.
	turn chan struct{}
	plug sysfs.Plug
	// unreleased is why the library was not released when a pause wanted it.
	unreleased error
	// revived is true once the library was initialised anew because no device
	// could be asked, and until one can: it is tried once, for a driver that
	// was loaded anew, and not for devices that are simply gone.
	revived bool

	// initialised is true from a successful Init to Shutdown. It is written on
	// both queues.
	initialised atomic.Bool
	// session counts the times that Init succeeded. It is written on both queues.
	session atomic.Uint64

	mu     sync.Mutex // guards what follows; not held during calls of the library
	lib    L          // zero when none is loaded; written on both queues
	closed bool
}

// New returns a loader whose library is not loaded yet. Each call of it may
// take as long as limit.
func New[L Library](limit time.Duration, steps Steps[L]) *Loader[L] {
	var observe func(name string, took time.Duration, hung bool)
	if steps.Observe != nil {
		observe = func(name string, took time.Duration, hung bool) { steps.Observe(function(name), took, hung) }
	}
	return &Loader[L]{
		steps:  steps,
		limit:  limit,
		Calls:  callqueue.New(limit, observe),
		Events: callqueue.New(limit, nil), // their time is that of the world
		turn:   make(chan struct{}, 1),
	}
}

// loading begins the name of the call that loads a library.
const loading = "loading "

// function is the library's function that a call is named after, without the number
// of the device: one of few.
func function(name string) string {
	if strings.HasPrefix(name, loading) {
		return "load"
	}
	name, _, _ = strings.Cut(name, "(")
	return name
}

// ErrNotInitialised says that nothing can be asked of the library now.
var ErrNotInitialised = errors.New("the library is not initialised")

// Current returns the library that is loaded, the zero value when none is, and
// backend.ErrClosed after Close.
func (s *Loader[L]) Current() (L, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		var none L
		return none, backend.ErrClosed
	}
	return s.lib, nil
}

// Initialised reports whether the library is loaded and initialised.
func (s *Loader[L]) Initialised() bool { return s.initialised.Load() }

// Session numbers the time from one initialisation of the library to the next. A handle
// that the library returned in one session must not be used in another. On a queue, it
// does not change.
func (s *Loader[L]) Session() uint64 { return s.session.Load() }

// Call runs f, which calls functions of lib about the device of that index or
// callqueue.Library, on one of the loader's queues; name is what errors call it. It fails
// with backend.ErrClosed after Close, and with ErrNotInitialised when lib is no longer the
// library that is loaded, and between the moment in which a discovery shut the library
// down and the one in which it initialised it again.
func Call[L Library, T any](ctx context.Context, s *Loader[L], on *callqueue.Queue, lib L, about int, name string, f func() (T, error)) (T,
	error) {
	return callqueue.Run(ctx, on, about, name, func() (T, error) {
		var none T
		loaded, err := s.Current()
		switch {
		case err != nil:
			return none, err
		case loaded != lib || !s.initialised.Load():
			return none, ErrNotInitialised
		}
		return f()
	})
}

// loaded returns the library that is loaded. It stays so for as long as the
// caller has a queue.
func (s *Loader[L]) loaded() L {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lib
}

// ready returns the library, loaded and initialised. fresh is true when it was
// not so before. The caller has the turn.
func (s *Loader[L]) ready(ctx context.Context) (lib L, fresh bool, err error) {
	var none L
	lib, err = s.Current()
	if err != nil {
		return none, false, err
	}
	if lib != none && s.initialised.Load() {
		return lib, false, nil
	}
	if lib, err = s.load(ctx); err != nil {
		return none, false, err
	}
	// A call that is not waited for any more must not look at results that this
	// function returns.
	loaded := lib
	_, err = callqueue.RunAlone(ctx, s.Events, s.Calls, s.steps.InitCall, func() (struct{}, error) {
		if s.loaded() != loaded {
			return struct{}{}, backend.ErrClosed
		}
		if s.initialised.Load() { // by a call that took too long to be waited for
			return struct{}{}, nil
		}
		err := s.steps.Init(loaded)
		if err == nil {
			s.session.Add(1)
		}
		s.initialised.Store(err == nil)
		return struct{}{}, err
	})
	if err != nil {
		return none, false, err
	}
	if s.steps.Started != nil {
		s.steps.Started()
	}
	logr.FromContextOrDiscard(ctx).V(2).Info("Initialised the vendor's library", "vendor", s.steps.Vendor, "path", lib.LoadedFrom())
	return lib, true, nil
}

// load makes sure that the library is loaded from where it is found now.
func (s *Loader[L]) load(ctx context.Context) (L, error) {
	return callqueue.RunAlone(ctx, s.Events, s.Calls, loading+s.steps.Name, func() (L, error) {
		var none L
		old, err := s.Current()
		if err != nil {
			return none, err
		}
		if s.initialised.Load() { // by a call that took too long to be waited for
			return old, nil
		}
		lib, err := s.steps.Load(old)
		s.mu.Lock()
		s.lib = lib
		s.mu.Unlock()
		if err != nil {
			return none, err
		}
		if lib != old {
			logr.FromContextOrDiscard(ctx).Info("Loaded the vendor's library", "vendor", s.steps.Vendor, "path", lib.LoadedFrom())
		}
		return lib, nil
	})
}

// end shuts the library down, so that ready initialises it again.
func (s *Loader[L]) end(ctx context.Context) error {
	_, err := callqueue.RunAlone(ctx, s.Events, s.Calls, s.steps.ShutdownCall, func() (struct{}, error) {
		s.shutdown()
		return struct{}{}, nil
	})
	return err
}

// shutdown shuts the library down if it is initialised. Both queues are the
// caller's.
func (s *Loader[L]) shutdown() {
	if s.initialised.Swap(false) {
		s.steps.Shutdown(s.loaded())
	}
}

// Close shuts the library down and unloads it. When a call does not return, it
// leaves the library as it is and says so. Close again returns nil.
func (s *Loader[L]) Close() error {
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	s.mu.Unlock()
	if closed {
		return nil
	}
	if err := s.release(context.Background()); err != nil {
		return fmt.Errorf("%s: %w", s.steps.Vendor, err)
	}
	return nil
}

// release shuts the library down and unloads it.
func (s *Loader[L]) release(ctx context.Context) error {
	_, err := callqueue.RunAlone(ctx, s.Events, s.Calls, s.steps.ShutdownCall, func() (struct{}, error) {
		var none L
		s.shutdown()
		s.mu.Lock()
		lib := s.lib
		s.lib = none
		s.mu.Unlock()
		if lib == none {
			return struct{}{}, nil
		}
		return struct{}{}, s.steps.Close(lib)
	})
	return err
}

// paused returns an error while the library may not be used, and has released it then. The
// caller has the turn.
func (s *Loader[L]) paused(ctx context.Context) error {
	why, _ := s.steps.Pause.Now()
	if !why.Unhealthy {
		s.unreleased = nil
		return nil
	}
	lib, err := s.Current()
	if err != nil {
		return err
	}
	var none L
	if lib != none {
		s.unreleased = s.release(ctx)
		if s.unreleased == nil {
			logr.FromContextOrDiscard(ctx).Info("Released the vendor's library", "vendor", s.steps.Vendor, "path", lib.LoadedFrom(),
				"because", why.Reason)
		}
	} else if Hung(s.unreleased) != nil && !s.hangs() {
		s.unreleased = nil // the call that did not return in time has returned
	}
	return &backend.PausedError{Health: why, Unreleased: s.unreleased}
}
