// Package enflame reaches Enflame's GCUs through the vendor's management
// library, libefml.so, which it loads at run time.
//
// The library is the only source of facts, and it is not trusted: it may be
// missing, broken, slow or hung, contradict itself or appear hours after the
// daemon has started. Each call of it has a time limit, and a call that
// exceeds it makes further calls fail at once until it returns.
//
// The library's older interface is used, in which a card is a number. The
// newer one knows neither uuids nor health.
package enflame

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/lane"
	"github.com/divvy-gpu/divvy/internal/backend/libfile"
)

// Vendor is this vendor's name in the configuration.
const Vendor = "enflame"

// Backend reaches the GCUs of this node. It is a backend.Backend, a
// backend.Notifier and a backend.Labeler.
type Backend struct {
	options backend.Options
	places  libfile.Places

	// turn is held by the discovery that runs; its limit is of no matter.
	// calls and events are where functions of the library run: the wait for an
	// event must not hold up other calls, so it has a lane of its own. Whoever
	// takes both takes events first.
	turn          chan struct{}
	calls, events *lane.Lane

	mu     sync.Mutex // guards what follows; not held during calls of the library
	lib    *library   // nil when none is loaded
	closed bool
	cards  map[accel.DeviceID]card // all that were ever listed
	// at has the device that was listed last under each index.
	at map[int]accel.DeviceID
	// driver and listed are what the last discovery found, for Labels.
	driver string
	listed []accel.Device
	// suspended has the cards that an event took out of use, by index, with
	// the reason. It counts only when the library has no function for health.
	suspended map[int]string
	// revived is true once the library was initialised anew because no card
	// could be asked, and until one can: it is tried once, for a driver that
	// was loaded anew, and not for cards that are simply gone.
	revived bool
}

// card is what Edits needs of a device.
type card struct {
	index int
	minor int // N of /dev/gcuN
}

// New returns a backend. It does not load the library; the first Discover
// does, and later ones do if that fails.
func New(o backend.Options) (*Backend, error) {
	o, err := o.Complete()
	if err != nil {
		return nil, fmt.Errorf("enflame: %w", err)
	}
	return &Backend{
		options:   o,
		places:    places(o),
		turn:      make(chan struct{}, 1),
		calls:     lane.New(o.CallTimeout),
		events:    lane.New(o.CallTimeout),
		cards:     map[accel.DeviceID]card{},
		at:        map[int]accel.DeviceID{},
		suspended: map[int]string{},
	}, nil
}

// Vendor returns "enflame".
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
	_, err = lane.Run(ctx, b.calls, "EfmlInit", func() (struct{}, error) {
		if lib.closed {
			return struct{}{}, backend.ErrClosed
		}
		if lib.initialised.Load() { // by a call that took too long to be waited for
			return struct{}{}, nil
		}
		err := lib.check("EfmlInit", lib.init(false))
		lib.initialised.Store(err == nil)
		return struct{}{}, err
	})
	if err != nil {
		return nil, false, err
	}
	b.mu.Lock()
	clear(b.suspended) // of before the driver was loaded
	b.mu.Unlock()
	logr.FromContextOrDiscard(ctx).V(2).Info("Initialised the vendor's library", "vendor", Vendor, "path", lib.Path)
	return lib, true, nil
}

// load makes sure that the library is loaded from where it is found now.
func (b *Backend) load(ctx context.Context) (*library, error) {
	return lane.RunOnBoth(ctx, b.events, b.calls, "loading libefml.so", func() (*library, error) {
		b.mu.Lock()
		old, closed := b.lib, b.closed
		b.mu.Unlock()
		if closed {
			return nil, backend.ErrClosed
		}
		ignoreSignals()
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

// ignoreSignals keeps the signals that the vendor's driver may send to those
// who use its library from ending the process. The vendor's own binding does
// the same.
var ignoreSignals = sync.OnceFunc(func() { signal.Ignore(syscall.SIGUSR1, syscall.SIGUSR2) })

// end shuts lib down, so that ready initialises it again.
func (b *Backend) end(ctx context.Context, lib *library) error {
	_, err := lane.RunOnBoth(ctx, b.events, b.calls, "EfmlShutdown", func() (struct{}, error) {
		if !lib.closed {
			lib.end()
		}
		return struct{}{}, nil
	})
	return err
}

// Edits returns what a container needs to reach the GCUs. The variable names
// cards by index whatever Options.IndexInEnv says: the vendor's software knows
// nothing else.
func (b *Backend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return backend.Edits{}, backend.ErrClosed
	}
	if len(ids) == 0 {
		return backend.Edits{}, errors.New("enflame: no device is asked for")
	}
	chosen := map[int]accel.DeviceID{}
	for _, id := range ids {
		c, ok := b.cards[id]
		if !ok {
			return backend.Edits{}, fmt.Errorf("enflame: device %s was never found on this node", id)
		}
		if now := b.at[c.index]; now != id {
			// The driver numbers cards anew when one is gone.
			return backend.Edits{}, fmt.Errorf("enflame: device %s was card %d, which is %s now", id, c.index, now)
		}
		chosen[c.index] = id
	}

	e := backend.Edits{Env: map[string]string{}}
	var indices []string
	for _, index := range slices.Sorted(maps.Keys(chosen)) {
		id := chosen[index]
		file := fmt.Sprintf("dev/gcu%d", b.cards[id].minor)
		indices = append(indices, fmt.Sprint(index))
		e.DeviceNodes = append(e.DeviceNodes, backend.DeviceNode{
			Path:        "/" + file,
			HostPath:    filepath.Join(b.options.HostDriverRoot, file),
			Permissions: "rw",
		})
		e.CDIDevices = append(e.CDIDevices, backend.CDIDevice{
			Kind: cmp.Or(b.options.CDIKind, cdiKind),
			Name: string(id),
		})
	}
	e.Env[visibleDevices] = strings.Join(indices, ",")
	return e, nil
}

const (
	// visibleDevices is the variable in which Enflame's container runtime and
	// libraries expect the indices of the container's cards.
	visibleDevices = "ENFLAME_VISIBLE_DEVICES"
	// cdiKind is the kind of GCUs in the Container Device Interface, unless the
	// configuration has another.
	cdiKind = "enflame.com/gcu"
)

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
	_, err := lane.RunOnBoth(context.Background(), b.events, b.calls, "EfmlShutdown", func() (struct{}, error) {
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
		return fmt.Errorf("enflame: %w", err)
	}
	return nil
}
