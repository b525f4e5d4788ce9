// Package quarantine keeps a node's devices that take no pods until an administrator
// releases them, by uuid, in memory and in a file of the state folder, so that neither
// a restart nor another configuration puts a broken device back into service.
//
// Memory decides. A file that cannot be written is written later; one that cannot be
// read is moved aside, and what the node's object says of the quarantine is taken in
// its place.
package quarantine

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/state"
)

// FileName is the name of the file in the state folder.
const FileName = "quarantine.json"

// List is the quarantine of a node. It is safe for concurrent use.
type List struct {
	log klog.Logger

	mu      sync.Mutex // guards what follows
	entries map[accel.DeviceID]accel.Quarantine
	file    *state.Document[json.RawMessage] // nil for memory alone
	// pending is true until Adopt was called. written is when the file was written that
	// this program found, zero while it is not known what was in quarantine before.
	pending bool
	written time.Time
	// unsaved is why the file lacks a change, nil while it does not.
	unsaved error
}

// New returns a quarantine without devices, in memory alone.
func New() *List { return &List{entries: map[accel.DeviceID]accel.Quarantine{}} }

// Open returns the quarantine that the state folder has. It returns one also where
// the file cannot be read, which it logs.
func Open(ctx context.Context, stateDir string) *List {
	l := New()
	l.log = klog.FromContext(ctx)
	l.file = state.NewDocument[json.RawMessage](stateDir, FileName)
	saved, exists, err := l.load()
	switch {
	case errors.Is(err, state.ErrDamaged):
		aside, moveErr := l.file.Quarantine()
		l.log.Error(errors.Join(err, moveErr), "The list of devices in quarantine is damaged; taking that of the node's object",
			"movedTo", aside)
	case err != nil:
		l.log.Error(err, "The list of devices in quarantine cannot be read; taking that of the node's object")
	}
	l.pending = true
	if exists && err == nil {
		l.written = l.file.Written()
	}
	for _, q := range saved {
		l.entries[q.Device] = q
	}
	if len(l.entries) > 0 {
		l.log.Info("Devices are in quarantine; kubectl divvy device shows and releases them", "devices", len(l.entries))
	}
	return l
}

// load reads the file, which has what the node's object has.
func (l *List) load() (devices []accel.Quarantine, exists bool, err error) {
	text, exists, err := l.file.Load()
	if err != nil || !exists {
		return nil, false, err
	}
	q, err := wire.DecodeQuarantine(string(text))
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", state.ErrDamaged, err)
	}
	return q.Devices, true, nil
}

// Adopt adds the devices that the node's object shows in quarantine if the file did not
// say which they are, or could not be written after they were put there. It does so
// once.
func (l *List) Adopt(shown []accel.Quarantine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.pending {
		return
	}
	l.pending = false
	for _, q := range shown {
		if q.Since.Before(l.written.Truncate(time.Second)) {
			continue // it was released since
		}
		l.log.Info("Device is in quarantine, as the node's object says", "device", q.Device, "cause", q.Cause, "since", q.Since)
		l.add(q)
	}
	l.save()
}

// Restore replaces the entries by those that the predecessor of this process had, which
// may not have been able to write them.
func (l *List) Restore(devices []accel.Quarantine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = false
	clear(l.entries)
	for _, q := range devices {
		l.entries[q.Device] = q
	}
	l.save()
}

// Doubt reports whether Adopt is to be called.
func (l *List) Doubt() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pending
}

// Of returns a device's entry, false when it is not in quarantine.
func (l *List) Of(id accel.DeviceID) (accel.Quarantine, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	q, ok := l.entries[id]
	return q, ok
}

// Add puts a device into quarantine. One that is there stays as it is.
func (l *List) Add(q accel.Quarantine) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.add(q) {
		l.log.Info("Device is put into quarantine; it takes no pods until it is released", "device", q.Device, "cause", q.Cause,
			"reason", q.Reason)
		l.save()
	}
}

// add adds an entry, of which there is room for wire.MaxQuarantined: the oldest ones
// make way. The caller holds mu.
func (l *List) add(q accel.Quarantine) bool {
	if _, there := l.entries[q.Device]; there || q.Device == "" {
		return false
	}
	q.Reason, q.Cause = clip(q.Reason), clip(q.Cause)
	for len(l.entries) >= wire.MaxQuarantined {
		delete(l.entries, l.sorted()[0].Device)
	}
	l.entries[q.Device] = q
	return true
}

// Release takes a device out of quarantine. It returns false when it was not in it.
func (l *List) Release(id accel.DeviceID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, there := l.entries[id]; !there {
		return false
	}
	l.log.Info("Device is released from quarantine", "device", id)
	delete(l.entries, id)
	l.save()
	return true
}

// All returns the entries, the oldest first.
func (l *List) All() []accel.Quarantine {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sorted()
}

func (l *List) sorted() []accel.Quarantine {
	out := make([]accel.Quarantine, 0, len(l.entries))
	for _, q := range l.entries {
		out = append(out, q)
	}
	slices.SortFunc(out, func(a, b accel.Quarantine) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Device, b.Device))
	})
	return out
}

// Sync writes the file if it lacks a change, or is gone. Its error is why it still does:
// a restart would bring back what the file says.
func (l *List) Sync() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.save()
	return l.unsaved
}

// save makes the file hold the entries. The caller holds mu.
func (l *List) save() {
	if l.file == nil || l.pending && l.written.IsZero() {
		return
	}
	text, err := wire.EncodeQuarantine(wire.QuarantineStatus{Devices: l.sorted()})
	if err == nil {
		err = l.file.Save(json.RawMessage(cmp.Or(text, `{"v":1}`)))
	}
	switch {
	case err != nil && l.unsaved == nil:
		l.log.Error(err, "The list of devices in quarantine cannot be written; trying again")
	case err == nil && l.unsaved != nil:
		l.log.Info("The list of devices in quarantine is written again")
	}
	l.unsaved = err
}

// clip makes a text fit for the file and the node's object.
func clip(text string) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if len(text) > wire.MaxReason {
		text = strings.ToValidUTF8(text[:wire.MaxReason-len("...")], "") + "..."
	}
	return text
}
