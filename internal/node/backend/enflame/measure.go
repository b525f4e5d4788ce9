package enflame

import (
	"context"
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// Measure asks for the memory and the processes of a card. The library's older interface
// does not know what part of the compute time a process has. It lists 64 processes at most;
// what further ones use is part of UsedBytes alone.
func (b *Backend) Measure(ctx context.Context, id accel.DeviceID) (backend.Measured, error) {
	return libloader.Measure(ctx, b.loader, func(lib *library, _ uint64) (backend.Measured, error) {
		device, err := b.table.Listed(id)
		if err != nil {
			return backend.Measured{}, err
		}
		if device.Parent != "" {
			return backend.Measured{}, fmt.Errorf("%w: the library does not report what a DRS instance uses", errors.ErrUnsupported)
		}
		if lib.processes == nil {
			return backend.Measured{}, fmt.Errorf("%w: %s lacks EfmlGetProcessInfo", errors.ErrUnsupported, lib.Path)
		}
		measured, err := b.measure(ctx, lib, device)
		if libloader.HasCode(err, codeNotSupported) {
			err = fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
		}
		return measured, err
	})
}

func (b *Backend) measure(ctx context.Context, lib *library, device accel.Device) (measured backend.Measured, err error) {
	uuid, err := queryCard(ctx, b, lib, "EfmlGetDevUuid", device.Index, lib.uuid)
	if err != nil {
		return measured, err
	}
	if err := b.table.Confirm(device, accel.DeviceID(idPrefix+uuid.String())); err != nil {
		return measured, err
	}
	memory, err := queryCard(ctx, b, lib, "EfmlGetDevMem", device.Index, lib.memory)
	if err != nil {
		return measured, err
	}
	list, err := queryCard(ctx, b, lib, "EfmlGetProcessInfo", device.Index, func(card uint32, out *processList) int32 {
		return lib.processes(card, &out.Count, &out.Entries[0])
	})
	if err != nil {
		return measured, err
	}
	if int(list.Count) > len(list.Entries) {
		return measured, fmt.Errorf("EfmlGetProcessInfo(%d) says %d processes, more than the %d that libefml allows", device.Index,
			list.Count, maxProcesses)
	}
	processes := devicelist.Processes{}
	for _, p := range list.Entries[:list.Count] {
		processes.Add(p.PID, devicelist.MemoryUpTo(memory.TotalBytes, p.Device))
	}
	return backend.Measured{UsedBytes: uint64(memory.UsedMiB) << 20, Processes: processes.Sorted()}, nil
}
