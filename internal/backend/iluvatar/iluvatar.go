// Package iluvatar reaches Iluvatar CoreX's GPUs through the vendor's
// management library, libixml.so, which it loads at run time. The library has
// NVML's functions under NVML's names, and some of its own that begin with
// "ixml".
//
// What the vendor numbers is a chip; some cards carry several. Each chip is a
// device here, with the board that it is on.
//
// The library is the only source of facts, and it is not trusted: it may be
// missing, broken, slow or hung, contradict itself or appear hours after the
// daemon has started. Each call of it has a time limit, and a call that
// exceeds it makes further calls fail at once until it returns. Each function
// is looked up before it is called: one that a release lacks is not supported,
// and does not end the process.
package iluvatar

import (
	"context"
	"fmt"
	"sync"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/lane"
	"github.com/divvy-gpu/divvy/internal/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/backend/sysfs"
)

// Vendor is this vendor's name in the configuration.
const Vendor = "iluvatar"

// Backend reaches the GPUs of this node. It is a backend.Backend, a
// backend.Notifier and a backend.Labeler.
type Backend struct {
	options backend.Options
	places  libfile.Places
	sysfs   sysfs.Root

	// turn is held by the discovery that runs; its limit is of no matter.
	// calls and events are where functions of the library run: the wait for an
	// event must not hold up other calls, so it has a lane of its own. Whoever
	// takes both takes events first.
	turn          chan struct{}
	calls, events *lane.Lane

	// What follows is for the discovery that has the turn.

	// seats have the board of each chip that was ever known, by the chip's id.
	// Chips are soldered on, so it is true for good.
	seats map[accel.DeviceID]seat
	// near remembers how chips are connected.
	near nearness
	// plug notices chips that come and go.
	plug sysfs.Plug

	mu     sync.Mutex // guards what follows; not held during calls of the library
	lib    *library   // nil when none is loaded
	closed bool
	chips  map[accel.DeviceID]known // all that were ever listed
	// at has the device that was listed last under each index, owner that of
	// each device file's number.
	at, owner map[int]accel.DeviceID
	// facts are what Labels tells of.
	facts facts
	// round counts the sets of chips that were found one after the other,
	// from 1; events are asked for anew when it changes.
	round uint64
	// revived is true once the library was initialised anew because no chip
	// could be asked, and until one can: it is tried once, for a driver that
	// was loaded anew, and not for chips that are simply gone.
	revived bool
}

// known is what Edits needs of a chip.
type known struct {
	index int
	minor int // N of /dev/iluvatarN
}

// New returns a backend. It does not load the library; the first Discover
// does, and later ones do if that fails.
func New(o backend.Options) (*Backend, error) {
	o, err := o.Complete()
	if err != nil {
		return nil, fmt.Errorf("iluvatar: %w", err)
	}
	return &Backend{
		options: o,
		places:  places(o),
		sysfs:   sysfs.Root(o.SysfsRoot),
		turn:    make(chan struct{}, 1),
		calls:   lane.New(o.CallTimeout),
		events:  lane.New(o.CallTimeout),
		seats:   map[accel.DeviceID]seat{},
		chips:   map[accel.DeviceID]known{},
		at:      map[int]accel.DeviceID{},
		owner:   map[int]accel.DeviceID{},
	}, nil
}

// Vendor returns "iluvatar".
func (b *Backend) Vendor() string { return Vendor }

// current returns the library that is loaded, or nil.
func (b *Backend) current() (*library, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return nil, backend.ErrClosed
	}
	return b.lib, nil
}

// ready returns the library, loaded and initialised. fresh is true when it was
// not so before. The caller has the turn.
func (b *Backend) ready(ctx context.Context) (lib *library, fresh bool, err error) {
	lib, err = b.current()
	if err != nil {
		return nil, false, err
	}
	if lib != nil && lib.initialised.Load() {
		return lib, false, nil
	}
	lib, err = b.load(ctx)
	if err != nil {
		return nil, false, err
	}
	_, err = lane.Run(ctx, b.calls, "nvmlInit_v2", func() (struct{}, error) {
		if lib.closed {
			return struct{}{}, backend.ErrClosed
		}
		if lib.initialised.Load() { // by a call that took too long to be waited for
			return struct{}{}, nil
		}
		err := check("nvmlInit_v2", lib.init())
		lib.initialised.Store(err == nil)
		return struct{}{}, err
	})
	if err != nil {
		return nil, false, err
	}
	b.near = nearness{} // chips may sit in other slots since
	logr.FromContextOrDiscard(ctx).V(2).Info("Initialised the vendor's library", "vendor", Vendor, "path", lib.Path)
	return lib, true, nil
}

// load makes sure that the library is loaded from where it is found now.
func (b *Backend) load(ctx context.Context) (*library, error) {
	return lane.RunOnBoth(ctx, b.events, b.calls, "loading libixml.so", func() (*library, error) {
		b.mu.Lock()
		old, closed := b.lib, b.closed
		b.mu.Unlock()
		if closed {
			return nil, backend.ErrClosed
		}
		lib, err := libfile.Open(b.places, old, load)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.lib = lib
		if lib != nil && lib != old {
			logr.FromContextOrDiscard(ctx).Info("Loaded the vendor's library", "vendor", Vendor, "path", lib.Path)
		}
		return lib, err
	})
}

// end shuts lib down, so that ready initialises it again.
func (b *Backend) end(ctx context.Context, lib *library) error {
	_, err := lane.RunOnBoth(ctx, b.events, b.calls, "nvmlShutdown", func() (struct{}, error) {
		if !lib.closed {
			lib.end()
		}
		return struct{}{}, nil
	})
	return err
}

// Close shuts the library down and unloads it. When a call does not return, it
// leaves the library as it is and says so.
func (b *Backend) Close() error {
	b.mu.Lock()
	closed := b.closed
	b.closed = true
	b.mu.Unlock()
	if closed {
		return nil
	}
	_, err := lane.RunOnBoth(context.Background(), b.events, b.calls, "nvmlShutdown", func() (struct{}, error) {
		b.mu.Lock()
		lib := b.lib
		b.lib = nil
		b.mu.Unlock()
		if lib == nil {
			return struct{}{}, nil
		}
		return struct{}{}, lib.Close()
	})
	if err != nil {
		return fmt.Errorf("iluvatar: %w", err)
	}
	return nil
}
