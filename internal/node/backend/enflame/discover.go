package enflame

import (
	"context"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

const (
	// idPrefix makes a device's identity out of the library's uuid, as the
	// vendor's own binding does.
	idPrefix = "GCU-"
	// idMarks are the characters besides letters and digits in a uuid.
	idMarks = "-_.:"
)

// Discover lists the GCUs, and with Options.DRS their DRS instances.
func (b *Backend) Discover(ctx context.Context) (backend.Found, error) {
	return b.loader.Discover(ctx, func() (backend.Found, error) {
		l, err := libloader.List(ctx, b.loader, b.list)
		if err != nil {
			return backend.Found{}, err
		}
		if b.drs != nil {
			if l, err = b.drs.add(ctx, l); err != nil {
				return backend.Found{}, err
			}
		}
		return devicelist.Record(b.table, l), nil
	})
}

// list asks the library about all cards. Its error is one of the library as a
// whole; what is wrong with one card is in the listing.
func (b *Backend) list(ctx context.Context, lib *library) (l devicelist.Listing[*devicelist.Device], err error) {
	count, err := query(ctx, b, lib, "EfmlGetDevCount", lib.count)
	if err != nil {
		return l, err
	}
	if count > maxCards {
		return l, fmt.Errorf("EfmlGetDevCount says %d cards, more than the %d that libefml allows", count, maxCards)
	}
	var driver text
	if lib.driverVersion != nil {
		driver, err = query(ctx, b, lib, "EfmlGetDriverVer", lib.driverVersion)
		switch {
		case libloader.IsFatal(err):
			return l, err
		case err != nil:
			driver = text{}
		}
	}
	l, err = devicelist.List(kind, int(count), b.loader.Calls.Hung, func(index int) (*devicelist.Device, error) {
		return b.describe(ctx, lib, index)
	})
	l.Driver = driver.String()
	return l, err
}

// describe asks the library about one card. With an error, the ID is set if
// the library gave one.
func (b *Backend) describe(ctx context.Context, lib *library, index int) (*devicelist.Device, error) {
	d := &devicelist.Device{Device: accel.Device{Index: index, NUMANode: accel.NoNUMA}}
	uuid, err := queryCard(ctx, b, lib, "EfmlGetDevUuid", index, lib.uuid)
	if err != nil {
		return d, err
	}
	if err := devicelist.CheckUUID(uuid.String(), idMarks); err != nil {
		return d, fmt.Errorf("card %d: %w", index, err)
	}
	d.ID = accel.DeviceID(idPrefix + uuid.String())
	info, err := queryCard(ctx, b, lib, "EfmlGetDevInfo", index, lib.info)
	if err != nil {
		return d, err
	}
	d.Model = libfile.CString(info.Name[:])
	d.PCI = fmt.Sprintf("%04x:%02x:%02x.%x", info.Domain, info.Bus, info.Device, info.Function)
	d.Minor = int(info.Logic)
	if d.Model == "" && lib.name != nil {
		name, err := queryCard(ctx, b, lib, "EfmlGetDevName", index, lib.name)
		if libloader.IsFatal(err) {
			return d, err
		}
		d.Model = name.String()
	}

	memory, err := queryCard(ctx, b, lib, "EfmlGetDevMem", index, lib.memory)
	if err != nil {
		return d, err
	}
	if d.MemoryBytes, err = devicelist.Memory("EfmlGetDevMem", memory.TotalBytes); err != nil {
		return d, fmt.Errorf("card %d: %w", index, err)
	}

	if lib.numa != nil {
		node, err := queryCard(ctx, b, lib, "EfmlGetNumaNode", index, lib.numa)
		if libloader.IsFatal(err) {
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
// libloader.IsFatal.
func (b *Backend) health(ctx context.Context, lib *library, index int) (accel.Health, error) {
	health, err := b.rawHealth(ctx, lib, index)
	if health.Unhealthy && !b.options.Counts(health.Cause) {
		return accel.Health{}, err
	}
	return health, err
}

// causeLibrary is the cause of a card that the library calls unhealthy. A card
// that is lost cannot be described, and is a fault instead.
const causeLibrary = "library"

// FatalByDefault are the causes after which a card is put into quarantine unless the
// configuration says otherwise: none. The library has one word for whatever is wrong,
// and takes it back when it has reset the card.
var FatalByDefault []string

// Causes returns the causes that a device of the vendor can be unhealthy for, as
// patterns with "*".
func Causes() []string { return []string{causeLibrary, accel.CauseUnreachable, accel.CauseLost} }

func (b *Backend) rawHealth(ctx context.Context, lib *library, index int) (accel.Health, error) {
	if lib.health.of != nil {
		ok, err := queryCard(ctx, b, lib, lib.health.name, index, lib.health.of)
		switch {
		case libloader.IsFatal(err):
			return accel.Health{}, err
		case libloader.HasCode(err, codeNotSupported):
		case err != nil:
			return accel.Health{Unhealthy: true, Reason: err.Error(), Cause: accel.CauseUnreachable}, nil
		case ok == 0:
			return accel.Health{
				Unhealthy: true,
				Reason:    lib.health.name + " says that the card is unhealthy",
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
