package iluvatar

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/callqueue"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// Discover lists the chips.
func (b *Backend) Discover(ctx context.Context) (backend.Found, error) {
	return b.loader.Discover(ctx, func() (backend.Found, error) {
		l, err := libloader.List(ctx, b.loader, b.list)
		if err != nil {
			return backend.Found{}, err
		}
		return devicelist.Record(b.table, l), nil
	})
}

// chip is a chip that the library describes.
type chip struct {
	devicelist.Device
	handle handle
}

// idMarks are the characters besides letters and digits in a uuid.
const idMarks = "-_."

// list asks the library about all chips. Its error is one of the library as a
// whole; what is wrong with one chip is in the listing.
func (b *Backend) list(ctx context.Context, lib *library) (l devicelist.Listing[*chip], err error) {
	count, err := query(ctx, b, lib, "nvmlDeviceGetCount_v2", true, lib.count)
	if err != nil {
		return l, err
	}
	if count > maxChips {
		return l, fmt.Errorf("nvmlDeviceGetCount_v2 says %d chips, more than the %d that can be", count, maxChips)
	}
	driver, cuda, err := b.versions(ctx, lib)
	if err != nil {
		return l, err
	}
	var failed []*chip // those that have an id nevertheless: others may share a board with them
	l, err = devicelist.List(kind, int(count), b.loader.Calls.Hung, func(index int) (*chip, error) {
		c, err := b.describe(ctx, lib, index)
		if err != nil && c.ID != "" && !libloader.IsFatal(err) {
			failed = append(failed, c)
		}
		return c, err
	})
	if err != nil {
		return l, err
	}
	l.Driver, l.CUDA, l.Machine = driver, cuda, b.sysfs.Machine()
	if l.Silent {
		b.keepBoards(ctx, l.Devices)
		return l, nil
	}
	if err := b.assignBoards(ctx, lib, l.Devices, failed); err != nil {
		return l, err
	}
	l.Links, err = b.links(ctx, lib, l.Devices)
	return l, err
}

// versions asks for the versions of the driver and of CUDA, such as "10.2". Its
// error is one that libloader.IsFatal; what the library does not tell is "".
func (b *Backend) versions(ctx context.Context, lib *library) (driver, cuda string, err error) {
	version, err := query(ctx, b, lib, "nvmlSystemGetDriverVersion", lib.driverVersion != nil, func(t *text) int32 {
		return lib.driverVersion(t, versionSize)
	})
	switch {
	case libloader.IsFatal(err):
		return "", "", err
	case err == nil:
		driver = version.String()
	}
	number, err := query(ctx, b, lib, "nvmlSystemGetCudaDriverVersion", lib.cudaVersion != nil, lib.cudaVersion)
	switch {
	case libloader.IsFatal(err):
		return "", "", err
	case err == nil && number > 0:
		cuda = fmt.Sprintf("%d.%d", number/1000, number%1000/10)
	}
	return driver, cuda, nil
}

// describe asks the library about one chip, all but its board. With an error,
// the ID is set if the library gave one.
func (b *Backend) describe(ctx context.Context, lib *library, index int) (*chip, error) {
	c := &chip{Device: devicelist.Device{Device: accel.Device{Index: index, NUMANode: accel.NoNUMA}}}
	var err error
	if c.handle, err = b.handle(ctx, b.loader.Calls, lib, index); err != nil {
		return c, err
	}
	uuid, err := queryText(ctx, b, lib, "nvmlDeviceGetUUID", c.handle, uuidSize, lib.chip.uuid)
	if err != nil {
		return c, err
	}
	if err := devicelist.CheckUUID(uuid, idMarks); err != nil {
		return c, fmt.Errorf("chip %d: %w", index, err)
	}
	c.ID = accel.DeviceID(uuid)
	c.Model, err = queryText(ctx, b, lib, "nvmlDeviceGetName", c.handle, nameSize, lib.chip.name)
	if libloader.IsFatal(err) {
		return c, err
	}
	// Without its number no container could get the chip, and a made-up one
	// might be another's.
	minor, err := queryChip(ctx, b, lib, "nvmlDeviceGetMinorNumber", c.handle, lib.chip.minor)
	if err != nil {
		return c, err
	}
	c.Minor = int(minor)

	memory, err := b.memory(ctx, lib, c.handle)
	if err != nil {
		return c, err
	}
	if c.MemoryBytes, err = devicelist.Memory("nvmlDeviceGetMemoryInfo", memory.Total); err != nil {
		return c, fmt.Errorf("chip %d: %w", index, err)
	}

	pci, err := queryChip(ctx, b, lib, "nvmlDeviceGetPciInfo_v3", c.handle, lib.chip.pci)
	switch {
	case libloader.IsFatal(err):
		return c, err
	case err != nil: // the chip works without
		logr.FromContextOrDiscard(ctx).V(2).Info("The PCI address of a chip is unknown", "vendor", Vendor, "err", err)
	default:
		c.PCI = pci.address()
		c.NUMANode, _ = b.sysfs.NUMANode(c.PCI)
	}
	c.Health, err = b.health(ctx, lib, c.handle)
	return c, err
}

// handle asks for the handle of the chip of that index.
func (b *Backend) handle(ctx context.Context, on *callqueue.Queue, lib *library, index int) (handle, error) {
	return queryChipOn(ctx, b, on, lib, "nvmlDeviceGetHandleByIndex_v2", handle{index: index}, func(_ uintptr, out *handle) int32 {
		out.index = index
		return lib.chip.at(uint32(index), &out.value) //nolint:gosec // below the count of chips
	})
}

// memory asks for a chip's memory. Releases differ in which of two functions works.
func (b *Backend) memory(ctx context.Context, lib *library, c handle) (memoryInfo, error) {
	info, err := queryChip(ctx, b, lib, "nvmlDeviceGetMemoryInfo", c, lib.chip.memory)
	if unsupported(err) && lib.chip.memoryV2 != nil {
		var v2 memoryInfoV2
		v2, err = queryChip(ctx, b, lib, "nvmlDeviceGetMemoryInfo_v2", c, func(at uintptr, out *memoryInfoV2) int32 {
			out.Version = memoryVersion2
			return lib.chip.memoryV2(at, out)
		})
		info = memoryInfo{Total: v2.Total, Free: v2.Free, Used: v2.Used}
	}
	return info, err
}
