package iluvatar

import (
	"context"
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

const (
	// firstRoom is for how many processes there is room in the first call.
	firstRoom = 64
	// maxRoom is more than a chip can serve; a library that reports more is broken.
	maxRoom = 1 << 16
)

// Measure asks for the memory and the processes of a chip. The library does not know what
// part of the compute time a process has.
func (b *Backend) Measure(ctx context.Context, id accel.DeviceID) (backend.Measured, error) {
	return libloader.Measure(ctx, b.loader, func(lib *library, session uint64) (backend.Measured, error) {
		device, err := b.table.Listed(id)
		if err != nil {
			return backend.Measured{}, err
		}
		measured, err := measure(ctx, b, lib, session, device)
		if unsupported(err) {
			err = fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
		}
		return measured, err
	})
}

func measure(ctx context.Context, b *Backend, lib *library, session uint64, device accel.Device) (measured backend.Measured, err error) {
	c, err := b.handle(ctx, b.loader.Calls, lib, device.Index)
	if err != nil {
		return measured, err
	}
	c.session = session
	uuid, err := queryText(ctx, b, lib, "nvmlDeviceGetUUID", c, uuidSize, lib.chip.uuid)
	if err != nil {
		return measured, err
	}
	if err := b.table.Confirm(device, accel.DeviceID(uuid)); err != nil {
		return measured, err
	}
	memory, err := b.memory(ctx, lib, c)
	if err != nil {
		return measured, err
	}
	processes, err := processesOf(ctx, b, lib, c, memory.Total)
	return backend.Measured{UsedBytes: memory.Used, Processes: processes.Sorted()}, err
}

// processesOf asks for the processes of a chip with that much memory, in bytes. The vendor's
// own function has all of them; releases without it have those with a compute context.
func processesOf(ctx context.Context, b *Backend, lib *library, c handle, total uint64) (devicelist.Processes, error) {
	out := devicelist.Processes{}
	all, err := listProcesses(ctx, b, lib, "ixmlDeviceGetComputeAllProcesses", c, lib.chip.allProcesses)
	if err == nil {
		for _, p := range all {
			out.Add(p.PID, devicelist.MemoryUpTo(total, p.Used))
		}
		return out, nil
	}
	if !unsupported(err) {
		return nil, err
	}
	list, err := listProcesses(ctx, b, lib, "nvmlDeviceGetComputeRunningProcesses", c, lib.chip.processes)
	for _, p := range list {
		out.Add(p.PID, devicelist.MemoryUpTo(total, p.Used))
	}
	return out, err
}

// listProcesses calls a function that fills a list, again with more room while that does
// not suffice. It may say so by a code, or succeed with a count that is above the room.
func listProcesses[P any](ctx context.Context, b *Backend, lib *library, name string, c handle,
	f func(uintptr, *uint32, *P) int32) ([]P, error) {
	if f == nil {
		return nil, check(name, codeFunctionNotFound)
	}
	type answer struct {
		count uint32
		list  []P
	}
	for room := uint32(firstRoom); room <= maxRoom; {
		a, err := queryChip(ctx, b, lib, name, c, func(chip uintptr, out *answer) int32 {
			out.count, out.list = room, make([]P, room)
			return f(chip, &out.count, &out.list[0])
		})
		switch {
		case err == nil && a.count <= room:
			return a.list[:a.count], nil
		case err != nil && !libloader.HasCode(err, codeInsufficientSize):
			return nil, err
		}
		room = max(2*room, min(a.count, maxRoom+1))
	}
	return nil, fmt.Errorf("%s(%d) says more than %d processes, which cannot be", name, c.index, maxRoom)
}
