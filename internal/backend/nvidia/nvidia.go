// Package nvidia reaches NVIDIA's GPUs through the vendor's management library
// (NVML), libnvidia-ml.so.1, which the binding go-nvml loads at run time.
//
// The library is the only source of facts, and it is not trusted: it may be
// missing, broken, slow or hung, contradict itself or appear hours after the
// daemon has started. Each call of it has a time limit, and a call that
// exceeds it makes further calls fail at once until it returns. Each function
// is looked up before it is called: the binding ends the process otherwise.
//
// Devices are whole GPUs. A GPU that is cut into partitions (MIG) is offered
// whole as well, and its mode is told in labels and in the log.
package nvidia

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/lane"
	"github.com/divvy-gpu/divvy/internal/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/backend/sysfs"
)

// Vendor is this vendor's name in the configuration.
const Vendor = "nvidia"

var (
	_ backend.Notifier = (*Backend)(nil)
	_ backend.Labeler  = (*Backend)(nil)
)

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
	// news has a token when devices were listed since somebody looked.
	news chan struct{}

	// initialised is true from a successful nvmlInit to nvmlShutdown. It is
	// written on the lanes: true on calls, false on both.
	initialised atomic.Bool
	// down is true once no function may be called any more. It is written on
	// both lanes.
	down bool
	// set hears the events of the GPUs in hears, and heard is the round that it
	// was made for, 0 for none. The first two are used on the events lane only.
	set   nvml.EventSet
	hears map[nvml.Device]accel.DeviceID
	heard atomic.Uint64

	// What follows is for the discovery that has the turn.

	near nearness
	plug sysfs.Plug
	// worked is true once the library could be initialised.
	worked bool

	mu     sync.Mutex // guards what follows; not held during calls of the library
	lib    *library   // nil when none is loaded
	closed bool
	gpus   map[accel.DeviceID]known // all that were ever listed
	// at has the device that was listed last under each index, owner that of
	// each device file's number.
	at, owner map[int]accel.DeviceID
	facts     facts
	// round counts the sets of GPUs that were found one after the other, from
	// 1; events are asked for anew when it changes.
	round uint64
	// told are the faults that events told of and no discovery did: since the
	// last one, and of GPUs that it could not list.
	told faults
	// unheard are the GPUs whose events cannot be heard although they have
	// some, with the reason; listened is when that was found out.
	unheard  map[accel.DeviceID]error
	listened time.Time
	// born counts how often the library was initialised.
	born uint64
	// lost is true when the last wait for an event ended because a GPU is lost.
	lost bool
	// revived is true once the library was initialised anew because no GPU
	// could be asked, and until one can: it is tried once, for a driver that
	// was loaded anew, and not for GPUs that are simply gone.
	revived bool
}

// known is what Edits needs of a GPU.
type known struct {
	index int
	minor int // N of /dev/nvidiaN
}

// New returns a backend. It does not load the library; the first Discover
// does, and later ones do if that fails.
func New(o backend.Options) (*Backend, error) {
	o, err := o.Complete()
	if err != nil {
		return nil, fmt.Errorf("nvidia: %w", err)
	}
	return &Backend{
		options: o,
		places:  places(o),
		sysfs:   sysfs.Root(o.SysfsRoot),
		turn:    make(chan struct{}, 1),
		calls:   lane.New(o.CallTimeout),
		events:  lane.New(o.CallTimeout),
		news:    make(chan struct{}, 1),
		gpus:    map[accel.DeviceID]known{},
		at:      map[int]accel.DeviceID{},
		owner:   map[int]accel.DeviceID{},
	}, nil
}

// Vendor returns "nvidia".
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
	if lib != nil && b.initialised.Load() {
		return lib, false, nil
	}
	if lib, err = b.load(ctx); err != nil {
		return nil, false, err
	}
	// The binding writes to its own variables here, so nothing else may run.
	_, err = lane.RunOnBoth(ctx, b.events, b.calls, "nvmlInit_v2", func() (struct{}, error) {
		if b.down {
			return struct{}{}, backend.ErrClosed
		}
		if b.initialised.Load() { // by a call that took too long to be waited for
			return struct{}{}, nil
		}
		err := lib.check("nvmlInit_v2", lib.init())
		b.initialised.Store(err == nil)
		return struct{}{}, err
	})
	switch {
	case hasCode(err, nvml.ERROR_LIB_RM_VERSION_MISMATCH) && b.worked:
		return nil, false, &backend.RestartNeededError{
			Reason: fmt.Sprintf("%s no longer goes with the driver in the kernel, which was replaced: %v", lib.Path, err),
		}
	case err != nil:
		return nil, false, err
	}
	b.worked = true
	b.near = nearness{} // GPUs may sit in other slots since
	b.mu.Lock()
	b.born++
	b.unheard = nil // of before the driver was loaded
	b.mu.Unlock()
	logr.FromContextOrDiscard(ctx).V(2).Info("Initialised the vendor's library", "vendor", Vendor, "path", lib.Path)
	return lib, true, nil
}

// load makes sure that the library is loaded.
func (b *Backend) load(ctx context.Context) (*library, error) {
	return lane.RunOnBoth(ctx, b.events, b.calls, "loading libnvidia-ml.so.1", func() (*library, error) {
		if b.down {
			return nil, backend.ErrClosed
		}
		lib, fresh, err := load(b.places)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.lib = lib
		if fresh {
			logr.FromContextOrDiscard(ctx).Info("Loaded the vendor's library", "vendor", Vendor, "path", lib.Path)
		}
		return lib, err
	})
}

// end shuts the library down, so that ready initialises it again.
func (b *Backend) end(ctx context.Context) error {
	_, err := lane.RunOnBoth(ctx, b.events, b.calls, "nvmlShutdown", func() (struct{}, error) {
		b.shutdown()
		return struct{}{}, nil
	})
	return err
}

// shutdown shuts the library down. Both lanes are the caller's. What
// nvmlShutdown returns is of no use: it refuses when the driver is gone, and
// the library is to be initialised anew just the same.
func (b *Backend) shutdown() {
	b.mu.Lock()
	lib := b.lib
	b.mu.Unlock()
	if lib == nil {
		return
	}
	b.forgetSet(lib)
	if b.initialised.Swap(false) {
		_ = lib.shutdown()
	}
}

// Close shuts the library down. It stays loaded, since the binding cannot do
// without. When a call does not return, Close leaves the library as it is and
// says so.
func (b *Backend) Close() error {
	b.mu.Lock()
	closed := b.closed
	b.closed = true
	b.mu.Unlock()
	if closed {
		return nil
	}
	_, err := lane.RunOnBoth(context.Background(), b.events, b.calls, "nvmlShutdown", func() (struct{}, error) {
		b.shutdown()
		b.down = true
		return struct{}{}, nil
	})
	if err != nil {
		return fmt.Errorf("nvidia: %w", err)
	}
	return nil
}

// isFatal tells an error that all further calls would run into from one that
// the library returned about one GPU.
func isFatal(err error) bool {
	var hung *lane.HungError
	return errors.As(err, &hung) || errors.Is(err, backend.ErrClosed) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
