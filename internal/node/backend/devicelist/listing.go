package devicelist

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// Device is a device that the library describes. Vendors put it into a struct
// with what else they know of a device.
type Device struct {
	accel.Device
	// Minor is the number of its device file.
	Minor int
	// Owner is whose device file it is: the parent of a partition, "" for its own.
	Owner accel.DeviceID
	// Nodes are further device files of the device alone, seen from the driver root.
	Nodes []string
}

// Entry returns d.
func (d *Device) Entry() *Device { return d }

// Entry is a pointer to a struct with a Device in it.
type Entry interface{ Entry() *Device }

// Listing is what the library says about all devices now.
type Listing[E Entry] struct {
	Driver, CUDA string
	Machine      string // the product name of the machine, for labels
	// Devices are in ascending order of Index, as are Faults.
	Devices []E
	Links   []accel.Link
	Faults  []backend.Fault
	Problem error // that of backend.Found
	// Silent and Unasked are those of backend.Found. Of a library that is silent
	// nothing more must be asked.
	Silent  bool
	Unasked []backend.Fault
}

// ErrSkip is what describe returns for a device that is not for pods.
var ErrSkip = errors.New("skip this device")

// List describes one device after the other, from 0 to count. What is wrong
// with one device becomes a fault, with the ID if describe knows it; any other error
// that libloader.IsFatal ends it. Devices that share what must be a device's own
// are faults as well.
//
// A device about which a call hangs, as hung says, is not asked, and is a fault if
// others answer. If they do not, a lock of the library may be all that is wrong
// with them: then the call that has been hanging longest is the fault, and the
// other devices are Unasked.
func List[E Entry](k Kind, count int, hung func(index int) *callqueue.HungError, describe func(index int) (E, error)) (Listing[E], error) {
	var l Listing[E]
	var before, now []silent // before this discovery, and in it since a device answered last
	hangs, answered := map[int]bool{}, false
	for index := range count {
		if call := hung(index); call != nil {
			hangs[index] = true
			before = append(before, silent{index: index, call: call})
		}
	}
	for index := range count {
		switch {
		case hangs[index]:
			continue
		case len(now) > 1 || len(now) == 1 && len(before) > 0 && !answered:
			l.Unasked = append(l.Unasked, silent{index: index, call: now[0].call}.fault())
			continue
		}
		e, err := describe(index)
		call := libloader.Hung(err)
		switch {
		case call != nil && call.About == index:
			now = append(now, silent{index, e.Entry().ID, call})
			continue
		case libloader.IsFatal(err):
			return Listing[E]{}, err
		case errors.Is(err, ErrSkip):
		case err != nil:
			l.Faults = append(l.Faults, backend.Fault{Index: index, ID: e.Entry().ID, Err: err})
		default:
			l.Devices = append(l.Devices, e)
		}
		before, now, answered = append(before, now...), nil, true
	}
	suspects := now
	if answered {
		for _, s := range before {
			l.Faults = append(l.Faults, s.fault())
		}
	} else {
		suspects = slices.Concat(before, now)
	}
	l.Silent = len(suspects) > 0
	slices.SortStableFunc(suspects, func(a, b silent) int { return a.call.Since.Compare(b.call.Since) })
	for i, s := range suspects {
		if i == 0 {
			l.Faults = append(l.Faults, s.fault())
		} else {
			l.Unasked = append(l.Unasked, s.fault())
		}
	}
	l.rejectDuplicates(k, "uuid", func(d *Device) any { return d.ID })
	l.rejectDuplicates(k, "device file number", func(d *Device) any { return d.Minor })
	for _, list := range [][]backend.Fault{l.Faults, l.Unasked} {
		slices.SortFunc(list, func(a, b backend.Fault) int { return cmp.Compare(a.Index, b.Index) })
	}
	return l, nil
}

// silent is a device about which a call hangs.
type silent struct {
	index int
	id    accel.DeviceID // "" when it is not known
	call  *callqueue.HungError
}

func (s silent) fault() backend.Fault {
	return backend.Fault{Index: s.index, ID: s.id, Err: s.call, Cause: accel.CauseUnreachable}
}

// rejectDuplicates makes faults of all devices that share what must be a
// device's own: which of them is the right one cannot be told, and to guess
// would swap one user's device for another's.
func (l *Listing[E]) rejectDuplicates(k Kind, what string, property func(*Device) any) {
	sharing := map[any][]int{}
	for _, e := range l.Devices {
		d := e.Entry()
		sharing[property(d)] = append(sharing[property(d)], d.Index)
	}
	l.Devices = slices.DeleteFunc(l.Devices, func(e E) bool {
		d := e.Entry()
		indices := sharing[property(d)]
		if len(indices) == 1 {
			return false
		}
		l.Faults = append(l.Faults, backend.Fault{
			Index: d.Index,
			ID:    d.ID,
			Err:   fmt.Errorf("%s %d: %ss %v have the same %s %v", k.Noun, d.Index, k.Noun, indices, what, property(d)),
		})
		return true
	})
}

// Unanswered reports whether there are devices, and the library returned an
// error for each of them.
func (l Listing[E]) Unanswered() bool {
	return len(l.Devices) == 0 && len(l.Faults) > 0 && !slices.ContainsFunc(l.Faults, func(f backend.Fault) bool {
		var code *libloader.CodeError
		return !errors.As(f.Err, &code)
	})
}

// CheckUUID returns what is wrong with the uuid that a library gives a device,
// nil for one that can be its identity. That becomes part of CDI names,
// annotations and logs, so it consists of letters, digits and those marks that
// are allowed in all of them and that the vendor uses, such as "-_.".
func CheckUUID(uuid, marks string) error {
	if uuid == "" {
		return errors.New("its uuid is empty")
	}
	if strings.ContainsFunc(uuid, func(c rune) bool {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		return !letter && !strings.ContainsRune(marks, c)
	}) {
		return fmt.Errorf("its uuid %q has characters other than letters, digits and %s in it", uuid, marks)
	}
	return nil
}

// Memory returns the size of a device's memory in bytes, as a function of the
// library says it, unless it cannot be.
func Memory(function string, bytes uint64) (int64, error) {
	switch {
	case bytes == 0:
		return 0, fmt.Errorf("it has no memory, %s says 0 bytes", function)
	case bytes > math.MaxInt64:
		return 0, fmt.Errorf("%s says %d bytes, which cannot be", function, bytes)
	}
	return int64(bytes), nil
}
