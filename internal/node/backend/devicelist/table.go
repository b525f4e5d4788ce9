// Package devicelist keeps the devices of one vendor on this node: what the last
// discovery found, and every device that was ever listed with its index and its
// device file, so that containers get what is theirs without the library being
// asked.
package devicelist

import (
	"cmp"
	"fmt"
	"slices"
	"sync"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// Kind says what a vendor's devices are called and where their files are.
type Kind struct {
	// Vendor is the vendor's name, Noun the word for one of its devices in
	// messages: "card". Its plural ends in "s".
	Vendor, Noun string
	// File is the device file without its number, seen from the driver root:
	// "dev/gcu".
	File string
	// Shared are device files that all containers get, as far as the node has
	// them.
	Shared []string
	// CDI is the kind of the devices in the Container Device Interface, unless
	// the configuration has another: "enflame.com/gcu".
	CDI string
	// FormerCDI is the kind that earlier releases of Divvy had; "" for none.
	FormerCDI string
}

// Table is the devices of one vendor. It is safe for concurrent use.
type Table struct {
	kind    Kind
	options backend.Options

	mu    sync.Mutex // guards what follows
	known map[accel.DeviceID]known
	// at has the device that was listed last under each index, owner that of
	// each device file's number.
	at, owner map[int]accel.DeviceID
	last      Last
}

// known is what Edits needs of a device.
type known struct {
	id           accel.DeviceID
	index, minor int
	// owner is whose device file it is, and nodes are those of its own besides.
	owner accel.DeviceID
	nodes []string
}

// Last is what the last discovery found.
type Last struct {
	Driver, CUDA, Machine string
	// Devices are in ascending order of Index, and with them those that it could not
	// ask and that were found before. They are not to be changed.
	Devices []accel.Device
	// Round counts the sets of devices, each under its index, that were found
	// one after the other, from 1; it is 0 before the first discovery.
	Round uint64
}

// New returns a table without devices.
func New(k Kind, o backend.Options) *Table {
	return &Table{
		kind:    k,
		options: o,
		known:   map[accel.DeviceID]known{},
		at:      map[int]accel.DeviceID{},
		owner:   map[int]accel.DeviceID{},
	}
}

// Record keeps a listing, and returns it as the outcome of a discovery.
func Record[E Entry](r *Table, l Listing[E]) backend.Found {
	found := backend.Found{Driver: l.Driver, CUDA: l.CUDA, Links: l.Links, Faults: l.Faults, Silent: l.Silent, Unasked: l.Unasked,
		Problem: l.Problem}
	r.mu.Lock()
	defer r.mu.Unlock()
	listed := map[accel.DeviceID]bool{}
	for _, e := range l.Devices {
		d := e.Entry()
		found.Devices = append(found.Devices, d.Device)
		listed[d.ID] = true
		owner := cmp.Or(d.Owner, d.ID)
		r.known[d.ID] = known{d.ID, d.Index, d.Minor, owner, d.Nodes}
		r.at[d.Index], r.owner[d.Minor] = d.ID, owner
	}
	for _, faults := range [][]backend.Fault{found.Faults, found.Unasked} {
		for i := range faults {
			f := &faults[i]
			if last := r.at[f.Index]; f.ID == "" && !listed[last] {
				f.ID = last
			} else if f.ID != "" && last == "" {
				r.at[f.Index] = f.ID // for when the library does not tell it any more
			}
		}
	}
	devices := slices.Clone(found.Devices)
	for _, d := range r.last.Devices {
		if slices.ContainsFunc(found.Unasked, func(f backend.Fault) bool { return f.ID == d.ID }) {
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b accel.Device) int { return cmp.Compare(a.Index, b.Index) })
	round := r.last.Round
	samePlace := func(a, b accel.Device) bool { return a.Index == b.Index && a.ID == b.ID }
	if round == 0 || !slices.EqualFunc(devices, r.last.Devices, samePlace) {
		round++
	}
	r.last = Last{l.Driver, l.CUDA, l.Machine, devices, round}
	return found
}

// Index returns the index of a device when it was listed last.
func (r *Table) Index(id accel.DeviceID) (index int, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	d, ok := r.known[id]
	return d.index, ok
}

// Listed returns a device that the last discovery listed.
func (r *Table) Listed(id accel.DeviceID) (accel.Device, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.last.Devices {
		if d.ID == id {
			return d, nil
		}
	}
	if _, ok := r.known[id]; ok {
		return accel.Device{}, fmt.Errorf("%s: device %s is not found any more", r.kind.Vendor, id)
	}
	return accel.Device{}, fmt.Errorf("%s: device %s was never found on this node", r.kind.Vendor, id)
}

// Confirm returns an error unless the device that the library has at the index of d now
// is d. When a device is gone, the library may give its index to another.
func (r *Table) Confirm(d accel.Device, now accel.DeviceID) error {
	if now == d.ID {
		return nil
	}
	return fmt.Errorf("%s: device %s was %s %s, which is %s now", r.kind.Vendor, d.ID, r.kind.Noun, accel.IndexText(d.Index), now)
}

// Last returns what the last discovery found.
func (r *Table) Last() Last {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last
}
