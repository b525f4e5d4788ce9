package enflame

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/lane"
)

// idPrefix makes a device's identity out of the library's uuid, as the
// vendor's own binding does.
const idPrefix = "GCU-"

// Discover lists the GCUs.
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

// discover lists the cards, if need be with the library initialised anew: a
// driver that was loaded again while the library was in use serves it no more.
func (b *Backend) discover(ctx context.Context) (backend.Found, error) {
	lib, fresh, err := b.ready(ctx)
	if err != nil {
		return backend.Found{}, err
	}
	l, err := b.list(ctx, lib)
	if !fresh && b.wantsInit(l, err) {
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

// wantsInit reports whether the outcome of list is one that another EfmlInit
// may mend.
func (b *Backend) wantsInit(l listing, err error) bool {
	var code *codeError
	if err != nil {
		return errors.As(err, &code)
	}
	none := len(l.cards) == 0 && len(l.faults) > 0
	for _, f := range l.faults {
		none = none && errors.As(f.Err, &code)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	again := none && !b.revived
	b.revived = none
	return again
}

// listing is what the library says about all cards.
type listing struct {
	driver string
	cards  []described
	faults []backend.Fault
}

// described is a card that the library describes.
type described struct {
	accel.Device
	minor int
}

// list asks the library about all cards. Its error is one of the library as a
// whole; what is wrong with one card is in the listing.
func (b *Backend) list(ctx context.Context, lib *library) (listing, error) {
	count, err := query(ctx, b.calls, lib, "EfmlGetDevCount", lib.count)
	if err != nil {
		return listing{}, err
	}
	if count > maxCards {
		return listing{}, fmt.Errorf("EfmlGetDevCount says %d cards, more than the %d that libefml allows", count, maxCards)
	}
	l := listing{}
	if lib.driverVersion != nil {
		version, err := query(ctx, b.calls, lib, "EfmlGetDriverVer", lib.driverVersion)
		if isFatal(err) {
			return listing{}, err
		}
		if err == nil {
			l.driver = cString(version[:])
		}
	}
	for index := range int(count) {
		d, err := b.describe(ctx, lib, index)
		switch {
		case isFatal(err):
			return listing{}, err
		case err != nil:
			l.faults = append(l.faults, backend.Fault{Index: index, ID: d.ID, Err: err})
		default:
			l.cards = append(l.cards, d)
		}
	}
	l.rejectDuplicates("uuid", func(d described) any { return d.ID })
	l.rejectDuplicates("device file number", func(d described) any { return d.minor })
	slices.SortFunc(l.faults, func(a, b backend.Fault) int { return a.Index - b.Index })
	return l, nil
}

// isFatal tells an error that all further calls would run into from one that
// the library returned about one card.
func isFatal(err error) bool {
	var hung *lane.HungError
	return errors.As(err, &hung) || errors.Is(err, backend.ErrClosed) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// describe asks the library about one card. With an error, the ID is set if
// the library gave one.
func (b *Backend) describe(ctx context.Context, lib *library, index int) (described, error) {
	d := described{Device: accel.Device{Index: index, NUMANode: accel.NoNUMA}}
	uuid, err := queryCard(ctx, b.calls, lib, "EfmlGetDevUuid", index, lib.uuid)
	if err != nil {
		return d, err
	}
	if d.ID, err = deviceID(cString(uuid[:])); err != nil {
		return d, fmt.Errorf("card %d: %w", index, err)
	}
	info, err := queryCard(ctx, b.calls, lib, "EfmlGetDevInfo", index, lib.info)
	if err != nil {
		return d, err
	}
	d.Model = cString(info.Name[:])
	d.PCI = fmt.Sprintf("%04x:%02x:%02x.%x", info.Domain, info.Bus, info.Device, info.Function)
	d.minor = int(info.Logic)
	if d.Model == "" && lib.name != nil {
		name, err := queryCard(ctx, b.calls, lib, "EfmlGetDevName", index, lib.name)
		if isFatal(err) {
			return d, err
		}
		d.Model = cString(name[:])
	}

	memory, err := queryCard(ctx, b.calls, lib, "EfmlGetDevMem", index, lib.memory)
	switch {
	case err != nil:
		return d, err
	case memory.TotalBytes == 0:
		return d, fmt.Errorf("card %d: it has no memory, EfmlGetDevMem says 0 bytes", index)
	case memory.TotalBytes > math.MaxInt64:
		return d, fmt.Errorf("card %d: EfmlGetDevMem says %d bytes, which cannot be", index, memory.TotalBytes)
	}
	d.MemoryBytes = int64(memory.TotalBytes)

	if lib.numa != nil {
		node, err := queryCard(ctx, b.calls, lib, "EfmlGetNumaNode", index, lib.numa)
		if isFatal(err) {
			return d, err
		}
		if err == nil && node >= 0 {
			d.NUMANode = int(node)
		}
	}
	d.Health, err = b.health(ctx, lib, index)
	return d, err
}

// health asks how a card is. A library that can tell is believed; a card that
// it cannot tell about takes no new pods. Without such a function events count.
// Causes that the configuration ignores do not count. Its error is one that
// isFatal.
func (b *Backend) health(ctx context.Context, lib *library, index int) (accel.Health, error) {
	health, err := b.rawHealth(ctx, lib, index)
	if health.Unhealthy && !b.options.Counts(health.Cause) {
		return accel.Health{}, err
	}
	return health, err
}

// Causes of ill health. A card that is lost cannot be described, and is a fault
// instead.
const (
	causeLibrary     = "library"     // the library calls the card unhealthy
	causeUnreachable = "unreachable" // the library cannot tell
)

// Causes returns the causes that a device of the vendor can be unhealthy for, as
// patterns with "*".
func Causes() []string { return []string{causeLibrary, causeUnreachable, accel.CauseLost} }

func (b *Backend) rawHealth(ctx context.Context, lib *library, index int) (accel.Health, error) {
	if lib.health != nil {
		ok, err := queryCard(ctx, b.calls, lib, lib.healthName, index, lib.health)
		switch {
		case isFatal(err):
			return accel.Health{}, err
		case hasCode(err, codeNotSupported):
		case err != nil:
			return accel.Health{Unhealthy: true, Reason: err.Error(), Cause: causeUnreachable}, nil
		case ok == 0:
			return accel.Health{
				Unhealthy: true,
				Reason:    lib.healthName + " says that the card is unhealthy",
				Cause:     causeLibrary,
			}, nil
		default:
			return accel.Health{}, nil
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if reason, ok := b.suspended[index]; ok {
		return accel.Health{Unhealthy: true, Reason: reason, Cause: causeLibrary}, nil
	}
	return accel.Health{}, nil
}

// deviceID makes an ID of the library's uuid. An ID becomes part of CDI names,
// annotations and logs, so it consists of the characters that are allowed in
// all of them.
func deviceID(uuid string) (accel.DeviceID, error) {
	if uuid == "" {
		return "", errors.New("its uuid is empty")
	}
	for _, c := range []byte(uuid) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && c != '-' && c != '_' && c != '.' && c != ':' {
			return "", fmt.Errorf("its uuid %q has characters other than letters, digits and -_.: in it", uuid)
		}
	}
	return accel.DeviceID(idPrefix + uuid), nil
}

// rejectDuplicates makes faults of all cards that share what must be a card's
// own: which of them is the right one cannot be told, and to guess would swap
// one user's card for another's.
func (l *listing) rejectDuplicates(what string, property func(described) any) {
	sharing := map[any][]int{}
	for _, d := range l.cards {
		sharing[property(d)] = append(sharing[property(d)], d.Index)
	}
	l.cards = slices.DeleteFunc(l.cards, func(d described) bool {
		indices := sharing[property(d)]
		if len(indices) == 1 {
			return false
		}
		l.faults = append(l.faults, backend.Fault{
			Index: d.Index,
			ID:    d.ID,
			Err:   fmt.Errorf("card %d: cards %v have the same %s %v", d.Index, indices, what, property(d)),
		})
		return true
	})
}

// record keeps what Edits and later discoveries need of a listing, and returns
// it as the outcome of a discovery.
func (b *Backend) record(l listing) backend.Found {
	found := backend.Found{Driver: l.driver, Faults: l.faults}
	listed := map[accel.DeviceID]bool{}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, d := range l.cards {
		found.Devices = append(found.Devices, d.Device)
		listed[d.ID] = true
		b.cards[d.ID] = card{index: d.Index, minor: d.minor}
		b.at[d.Index] = d.ID
	}
	b.driver, b.listed = found.Driver, found.Devices
	for i := range found.Faults {
		f := &found.Faults[i]
		if last := b.at[f.Index]; f.ID == "" && !listed[last] {
			f.ID = last
		}
	}
	return found
}
