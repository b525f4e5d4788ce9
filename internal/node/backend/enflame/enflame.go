// Package enflame reaches Enflame's GCUs through the vendor's management
// library, libefml.so, which it loads at run time.
//
// The library is the only source of facts, and it is not trusted: it may be
// missing, broken, slow or hung, contradict itself or appear hours after the
// daemon has started. Each call of it has a time limit, and a call that
// exceeds it makes further calls fail at once until it returns.
//
// The library's older interface is used, in which a card is a number. The
// newer one knows neither uuids nor health. Neither knows DRS, the vendor's partitions of
// cards; the vendor's program efsmi is asked about these (efsmi.go, drs.go).
package enflame

import (
	"fmt"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// Vendor is this vendor's name in the configuration.
const Vendor = "enflame"

// kind is what the vendor's devices are called.
var kind = devicelist.Kind{Vendor: Vendor, Noun: "card", File: "dev/gcu", CDI: "enflame.com/gcu"}

// Backend reaches the GCUs of this node. It is a backend.Backend, a
// backend.Notifier, a backend.Labeler and a backend.Meter.
type Backend struct {
	options backend.Options
	loader  *libloader.Loader[*library]
	table   *devicelist.Table
	// drs lists DRS instances; nil unless the options ask for them.
	drs *drs

	mu sync.Mutex // guards what follows; not held during calls of the library
	// suspended has the cards that an event took out of use, by index, with
	// the reason. It counts only when the library has no function for health.
	suspended map[int]string
}

// kept are the libraries of this process that were initialised.
var kept libfile.Kept[*library]

// New returns a backend. It does not load the library; the first Discover
// does, and later ones do if that fails.
func New(o backend.Options) (*Backend, error) {
	o, err := o.Complete()
	if err != nil {
		return nil, fmt.Errorf("enflame: %w", err)
	}
	o.IndexInEnv = true // the vendor's software knows nothing else
	b := &Backend{
		options:   o,
		table:     devicelist.New(kind, o),
		suspended: map[int]string{},
	}
	if o.DRS {
		b.drs = &drs{tool: newTool(o)}
	}
	b.loader = libloader.New(o.CallTimeout, libloader.Steps[*library]{
		Vendor:       Vendor,
		Observe:      o.Observe,
		Name:         "libefml.so",
		InitCall:     "EfmlInit",
		ShutdownCall: "EfmlShutdown",
		Load: func(old *library) (*library, error) {
			ignoreSignals()
			return kept.Open(places(o), old, load)
		},
		Init: func(l *library) error {
			err := l.check("EfmlInit", l.init(false))
			if err == nil {
				kept.Keep(places(o), l)
			}
			return err
		},
		Shutdown: func(l *library) { l.shutdown() },
		Close:    func(l *library) error { return kept.Close(places(o), l) },
		Started: func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			clear(b.suspended) // of before the driver was loaded
		},
	})
	return b, nil
}

// Vendor returns "enflame".
func (b *Backend) Vendor() string { return Vendor }

// ignoreSignals keeps the signals that the vendor's driver may send to those
// who use its library from ending the process. The vendor's own binding does
// the same.
var ignoreSignals = sync.OnceFunc(func() { signal.Ignore(syscall.SIGUSR1, syscall.SIGUSR2) })

// visibleDevices is the variable in which Enflame's container runtime and
// libraries expect the indices of the container's cards.
const visibleDevices = "ENFLAME_VISIBLE_DEVICES"

// Edits returns what a container needs to reach the GCUs. The variable names
// cards by index whatever Options.IndexInEnv says.
func (b *Backend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	if _, err := b.loader.Current(); err != nil {
		return backend.Edits{}, err
	}
	e, names, err := b.table.Edits(ids...)
	if err != nil {
		return backend.Edits{}, err
	}
	e.Env = map[string]string{visibleDevices: strings.Join(names, ",")}
	for _, id := range ids {
		index, _ := b.table.Index(id)
		if _, _, part := accel.SplitIndex(index); !part {
			continue
		}
		if len(names) > 1 {
			return backend.Edits{}, errSeveralInstances
		}
		e.Env = instanceEnv(id, index)
	}
	return e, nil
}

// Close shuts the library down. It stays loaded. When a call does not return, Close
// leaves the library as it is and says so.
func (b *Backend) Close() error { return b.loader.Close() }
