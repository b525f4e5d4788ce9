package iluvatar

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/lane"
)

// Discover lists the chips.
func (b *Backend) Discover(ctx context.Context) (backend.Found, error) {
	select {
	case b.turn <- struct{}{}:
		defer func() { <-b.turn }()
	case <-ctx.Done():
		return backend.Found{}, fmt.Errorf("discover %s devices: %w", Vendor, ctx.Err())
	}
	found, err := b.discover(ctx)
	switch {
	case err == nil:
		return found, nil
	case errors.Is(err, backend.ErrClosed):
		return backend.Found{}, backend.ErrClosed
	case ctx.Err() != nil:
		return backend.Found{}, fmt.Errorf("discover %s devices: %w", Vendor, ctx.Err())
	}
	return backend.Found{}, &backend.UnavailableError{Vendor: Vendor, Err: err}
}

// discover lists the chips, if need be with the library initialised anew: it
// may have counted its chips when it was initialised, and a driver that was
// loaded again meanwhile serves it no more.
func (b *Backend) discover(ctx context.Context) (backend.Found, error) {
	lib, fresh, err := b.ready(ctx)
	if err != nil {
		return backend.Found{}, err
	}
	again := b.plug.Changed(b.sysfs.Bound(kernelDriver), fresh)
	var l listing
	if !again {
		l, err = b.list(ctx, lib)
		again = !fresh && b.wantsInit(l, err)
	}
	if again {
		if err := b.end(ctx, lib); err != nil {
			return backend.Found{}, err
		}
		if lib, _, err = b.ready(ctx); err != nil {
			return backend.Found{}, err
		}
		l, err = b.list(ctx, lib)
	}
	if err != nil {
		return backend.Found{}, err
	}
	return b.record(l), nil
}

// kernelDriver is the name of the vendor's driver in the kernel.
const kernelDriver = "iluvatar"

// wantsInit reports whether the outcome of list is one that another
// initialisation may mend.
func (b *Backend) wantsInit(l listing, err error) bool {
	var code *codeError
	if err != nil {
		return errors.As(err, &code)
	}
	none := len(l.chips) == 0 && len(l.faults) > 0
	for _, f := range l.faults {
		none = none && errors.As(f.Err, &code)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	again := none && !b.revived
	b.revived = none
	return again
}

// listing is what the library says about all chips.
type listing struct {
	driver, cuda string
	machine      string
	chips        []*chip
	links        []accel.Link
	faults       []backend.Fault
}

// chip is a chip that the library describes.
type chip struct {
	accel.Device
	handle handle
	minor  int
}

// list asks the library about all chips. Its error is one of the library as a
// whole; what is wrong with one chip is in the listing.
func (b *Backend) list(ctx context.Context, lib *library) (listing, error) {
	count, err := query(ctx, b.calls, lib, "nvmlDeviceGetCount_v2", true, lib.count)
	if err != nil {
		return listing{}, err
	}
	if count > maxChips {
		return listing{}, fmt.Errorf("nvmlDeviceGetCount_v2 says %d chips, more than the %d that can be", count, maxChips)
	}
	l := listing{machine: b.sysfs.Machine()}
	if l.driver, l.cuda, err = b.versions(ctx, lib); err != nil {
		return listing{}, err
	}
	var failed []*chip // those that have an id nevertheless: others may share a board with them
	for index := range int(count) {
		c, err := b.describe(ctx, lib, index)
		switch {
		case isFatal(err):
			return listing{}, err
		case err != nil:
			l.faults = append(l.faults, backend.Fault{Index: index, ID: c.ID, Err: err})
			if c.ID != "" {
				failed = append(failed, c)
			}
		default:
			l.chips = append(l.chips, c)
		}
	}
	l.rejectDuplicates("uuid", func(c *chip) any { return c.ID })
	l.rejectDuplicates("device file number", func(c *chip) any { return c.minor })
	slices.SortFunc(l.faults, func(a, b backend.Fault) int { return a.Index - b.Index })
	if err := b.assignBoards(ctx, lib, l.chips, failed); err != nil {
		return listing{}, err
	}
	l.links, err = b.links(ctx, lib, l.chips)
	return l, err
}

// versions asks for the versions of the driver and of CUDA, such as "10.2". Its
// error is one that isFatal; what the library does not tell is "".
func (b *Backend) versions(ctx context.Context, lib *library) (driver, cuda string, err error) {
	version, err := query(ctx, b.calls, lib, "nvmlSystemGetDriverVersion", lib.driverVersion != nil, func(t *text) int32 {
		return lib.driverVersion(t, versionSize)
	})
	switch {
	case isFatal(err):
		return "", "", err
	case err == nil:
		driver = cString(version[:])
	}
	number, err := query(ctx, b.calls, lib, "nvmlSystemGetCudaDriverVersion", lib.cudaVersion != nil, lib.cudaVersion)
	switch {
	case isFatal(err):
		return "", "", err
	case err == nil && number > 0:
		cuda = fmt.Sprintf("%d.%d", number/1000, number%1000/10)
	}
	return driver, cuda, nil
}

// isFatal tells an error that all further calls would run into from one that
// the library returned about one chip.
func isFatal(err error) bool {
	var hung *lane.HungError
	return errors.As(err, &hung) || errors.Is(err, backend.ErrClosed) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// describe asks the library about one chip, all but its board. With an error,
// the ID is set if the library gave one.
func (b *Backend) describe(ctx context.Context, lib *library, index int) (*chip, error) {
	c := &chip{Device: accel.Device{Index: index, NUMANode: accel.NoNUMA}, handle: handle{index: index}}
	var err error
	c.handle.value, err = query(ctx, b.calls, lib, fmt.Sprintf("nvmlDeviceGetHandleByIndex_v2(%d)", index), true, func(out *uintptr) int32 {
		return lib.at(uint32(index), out) //nolint:gosec // below the count of chips
	})
	if err != nil {
		return c, err
	}
	uuid, err := queryText(ctx, b.calls, lib, "nvmlDeviceGetUUID", c.handle, uuidSize, lib.uuid)
	if err != nil {
		return c, err
	}
	if c.ID, err = deviceID(uuid); err != nil {
		return c, fmt.Errorf("chip %d: %w", index, err)
	}
	c.Model, err = queryText(ctx, b.calls, lib, "nvmlDeviceGetName", c.handle, nameSize, lib.name)
	if isFatal(err) {
		return c, err
	}
	// Without its number no container could get the chip, and a made-up one
	// might be another's.
	minor, err := queryChip(ctx, b.calls, lib, "nvmlDeviceGetMinorNumber", c.handle, lib.minor)
	if err != nil {
		return c, err
	}
	c.minor = int(minor)

	c.MemoryBytes, err = b.memory(ctx, lib, c.handle)
	if err != nil {
		return c, err
	}

	pci, err := queryChip(ctx, b.calls, lib, "nvmlDeviceGetPciInfo_v3", c.handle, lib.pci)
	switch {
	case isFatal(err):
		return c, err
	case err != nil: // the chip works without
		logr.FromContextOrDiscard(ctx).V(2).Info("A chip's PCI address is not known", "vendor", Vendor, "err", err)
	default:
		c.PCI = pci.address()
		c.NUMANode = b.sysfs.NUMANode(c.PCI)
	}
	c.Health, err = b.health(ctx, lib, c.handle)
	return c, err
}

// memory asks for a chip's memory in bytes. Releases differ in which of two
// functions works.
func (b *Backend) memory(ctx context.Context, lib *library, c handle) (int64, error) {
	info, err := queryChip(ctx, b.calls, lib, "nvmlDeviceGetMemoryInfo", c, lib.memory)
	total := info.Total
	if unsupported(err) && lib.memoryV2 != nil {
		var v2 memoryInfoV2
		v2, err = queryChip(ctx, b.calls, lib, "nvmlDeviceGetMemoryInfo_v2", c, func(at uintptr, out *memoryInfoV2) int32 {
			out.Version = memoryVersion2
			return lib.memoryV2(at, out)
		})
		total = v2.Total
	}
	switch {
	case err != nil:
		return 0, err
	case total == 0:
		return 0, fmt.Errorf("chip %d: it has no memory, nvmlDeviceGetMemoryInfo says 0 bytes", c.index)
	case total > math.MaxInt64:
		return 0, fmt.Errorf("chip %d: nvmlDeviceGetMemoryInfo says %d bytes, which cannot be", c.index, total)
	}
	return int64(total), nil
}

// deviceID makes an ID of the library's uuid. An ID becomes part of CDI names,
// annotations and logs, so it consists of the characters that are allowed in
// all of them.
func deviceID(uuid string) (accel.DeviceID, error) {
	if uuid == "" {
		return "", errors.New("its uuid is empty")
	}
	bad := strings.ContainsFunc(uuid, func(c rune) bool {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		return !letter && c != '-' && c != '_' && c != '.'
	})
	if bad {
		return "", fmt.Errorf("its uuid %q has characters other than letters, digits and -_. in it", uuid)
	}
	return accel.DeviceID(uuid), nil
}

// rejectDuplicates makes faults of all chips that share what must be a chip's
// own: which of them is the right one cannot be told, and to guess would swap
// one user's chip for another's.
func (l *listing) rejectDuplicates(what string, property func(*chip) any) {
	sharing := map[any][]int{}
	for _, c := range l.chips {
		sharing[property(c)] = append(sharing[property(c)], c.Index)
	}
	l.chips = slices.DeleteFunc(l.chips, func(c *chip) bool {
		indices := sharing[property(c)]
		if len(indices) == 1 {
			return false
		}
		l.faults = append(l.faults, backend.Fault{
			Index: c.Index,
			ID:    c.ID,
			Err:   fmt.Errorf("chip %d: chips %v have the same %s %v", c.Index, indices, what, property(c)),
		})
		return true
	})
}

// record keeps what Edits, Labels and later discoveries need of a listing, and
// returns it as the outcome of a discovery.
func (b *Backend) record(l listing) backend.Found {
	found := backend.Found{Driver: l.driver, CUDA: l.cuda, Links: l.links, Faults: l.faults}
	listed := map[accel.DeviceID]bool{}
	b.mu.Lock()
	defer b.mu.Unlock()
	var places []place
	for _, c := range l.chips {
		found.Devices = append(found.Devices, c.Device)
		listed[c.ID] = true
		b.chips[c.ID] = known{index: c.Index, minor: c.minor}
		b.at[c.Index], b.owner[c.minor] = c.ID, c.ID
		places = append(places, place{c.Index, c.ID})
	}
	for i := range found.Faults {
		f := &found.Faults[i]
		if last := b.at[f.Index]; f.ID == "" && !listed[last] {
			f.ID = last
		}
	}
	if b.round == 0 || !slices.Equal(places, b.facts.places) {
		b.round++
	}
	b.facts = facts{driver: l.driver, cuda: l.cuda, machine: l.machine, devices: found.Devices, places: places}
	return found
}

// place is a chip under its index.
type place struct {
	index int
	id    accel.DeviceID
}
