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
	"fmt"
	"sync/atomic"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/links"
	"github.com/divvy-gpu/divvy/internal/node/backend/sysfs"
)

// Vendor is this vendor's name in the configuration.
const Vendor = "iluvatar"

// kind is what the vendor's devices are called. The shared file is there on
// some drivers only.
var kind = devicelist.Kind{
	Vendor: Vendor,
	Noun:   "chip",
	File:   "dev/iluvatar",
	Shared: []string{"dev/itrctl"},
	CDI:    "iluvatar.com/gpu",
}

// Backend reaches the GPUs of this node. It is a backend.Backend, a
// backend.Notifier, a backend.Labeler and a backend.Meter.
type Backend struct {
	options backend.Options
	sysfs   sysfs.Root
	loader  *libloader.Loader[*library]
	table   *devicelist.Table

	// set is the set of events that are waited for, 0 when there is none. It is
	// read and written on the queue of events.
	set uintptr
	// heard is the round of discovery whose chips are in set, 0 for none.
	heard atomic.Uint64

	// What follows is for the discovery that runs.

	seats seats
	// near remembers the scores of links.
	near links.Memo[links.Pair, int]
}

// kernelDriver is the name of the vendor's driver in the kernel.
const kernelDriver = "iluvatar"

// kept are the libraries of this process that were initialised.
var kept libfile.Kept[*library]

// New returns a backend. It does not load the library; the first Discover
// does, and later ones do if that fails.
func New(o backend.Options) (*Backend, error) {
	o, err := o.Complete()
	if err != nil {
		return nil, fmt.Errorf("iluvatar: %w", err)
	}
	b := &Backend{
		options: o,
		sysfs:   sysfs.Root(o.SysfsRoot),
		table:   devicelist.New(kind, o),
		seats:   seats{},
	}
	b.loader = libloader.New(o.CallTimeout, libloader.Steps[*library]{
		Vendor:       Vendor,
		Observe:      o.Observe,
		Name:         "libixml.so",
		InitCall:     "nvmlInit_v2",
		ShutdownCall: "nvmlShutdown",
		Load:         func(old *library) (*library, error) { return kept.Open(places(o), old, load) },
		Init: func(l *library) error {
			err := check("nvmlInit_v2", l.init())
			if err == nil {
				kept.Keep(places(o), l)
			}
			return err
		},
		Shutdown: func(l *library) {
			b.forgetSet(l)
			l.shutdown()
		},
		Close:   func(l *library) error { return kept.Close(places(o), l) },
		Started: func() { b.near = links.Memo[links.Pair, int]{} }, // chips may sit in other slots since
		Bound:   func() string { return b.sysfs.Bound(kernelDriver) },
	})
	return b, nil
}

// Vendor returns "iluvatar".
func (b *Backend) Vendor() string { return Vendor }

// Close shuts the library down. It stays loaded. When a call does not return, Close
// leaves the library as it is and says so.
func (b *Backend) Close() error { return b.loader.Close() }
