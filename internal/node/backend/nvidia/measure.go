package nvidia

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
)

// processLists are the library's lists of processes. A process that computes and draws is
// in two of them.
var processLists = []struct {
	function string
	list     func(nvml.Device) ([]nvml.ProcessInfo, nvml.Return)
}{
	{"nvmlDeviceGetComputeRunningProcesses_v3", nvml.Device.GetComputeRunningProcesses},
	{"nvmlDeviceGetGraphicsRunningProcesses_v3", nvml.Device.GetGraphicsRunningProcesses},
	{"nvmlDeviceGetMPSComputeRunningProcesses_v3", nvml.Device.GetMPSComputeRunningProcesses},
}

// meter is the backend.Meter of a Backend.
type meter struct {
	backend *Backend

	mu sync.Mutex // guards what follows; not held during calls of the library
	// recent are the last samples of each GPU.
	recent map[accel.DeviceID]utilization
}

// utilization is what the processes of a GPU had of its compute time.
type utilization struct {
	// of is the part by PID, from 0 to 1; a process that is not in it had none.
	of map[uint32]float64
	// last is the time of the newest sample, in the library's microseconds.
	last uint64
	// read is when the samples were read.
	read time.Time
}

// samplePeriod is how long a sample counts if no newer one exists: NVML documents that it
// takes one each second or more often.
const samplePeriod = time.Second

// target is a device that calls of a Meter or a Limiter are about.
type target struct {
	backend *Backend
	lib     *library
	session uint64
	device  accel.Device
	// gpu is the number of the GPU, which calls are about, mig that of the MIG device on it.
	gpu, mig int
	isMIG    bool
	handle   nvml.Device
}

// newTarget returns the target of that ID, without its handle; see find.
func newTarget(b *Backend, lib *library, session uint64, id accel.DeviceID) (*target, error) {
	device, err := b.table.Listed(id)
	if err != nil {
		return nil, err
	}
	t := &target{backend: b, lib: lib, session: session, device: device}
	t.gpu, t.mig, t.isMIG = accel.SplitIndex(device.Index)
	return t, nil
}

// ask calls a function of the library about the target, unless its handle is of an earlier
// session of the library.
func ask[T any](ctx context.Context, t *target, function string, call func() (T, nvml.Return)) (T, error) {
	return queryGPU(ctx, t.backend, t.lib, function, t.gpu, func() (T, nvml.Return) {
		if t.backend.loader.Session() != t.session {
			var none T
			return none, nvml.ERROR_UNINITIALIZED
		}
		return call()
	})
}

// Measure asks for the memory and the processes of a GPU or of a MIG device. On the handle
// of a MIG device the library answers for that alone. What is in use of it is what is in
// use of its GPU instance, whose memory other compute instances share.
func (m *meter) Measure(ctx context.Context, id accel.DeviceID) (backend.Measured, error) {
	b := m.backend
	return libloader.Measure(ctx, b.loader, func(lib *library, session uint64) (backend.Measured, error) {
		t, err := newTarget(b, lib, session, id)
		if err != nil {
			return backend.Measured{}, err
		}
		measured, err := m.measure(ctx, t)
		switch {
		case unsupported(err):
			return backend.Measured{}, fmt.Errorf("%w: %w", errors.ErrUnsupported, err)
		case err != nil:
			return backend.Measured{}, monitorHint(t.device.Partitioned || t.isMIG, err)
		}
		return measured, nil
	})
}

func (m *meter) measure(ctx context.Context, t *target) (measured backend.Measured, err error) {
	if err := t.find(ctx); err != nil {
		return measured, err
	}
	memory, err := ask(ctx, t, "nvmlDeviceGetMemoryInfo", t.handle.GetMemoryInfo)
	if err != nil {
		return measured, err
	}
	processes, err := t.processes(ctx, memory.Total)
	if err != nil {
		return measured, err
	}
	measured = backend.Measured{UsedBytes: memory.Used, Processes: processes.Sorted()}
	if t.isMIG { // documented as not supported
		return measured, nil
	}
	of, err := m.utilization(ctx, t)
	if err != nil || of == nil {
		return measured, err
	}
	for i := range measured.Processes {
		p := &measured.Processes[i]
		p.Utilization = new(of[uint32(p.PID)]) //nolint:gosec // the library's number, which has 32 bits
	}
	return measured, nil
}

// find asks for the handle of the device, and makes sure that it is the same device as
// when it was listed.
func (t *target) find(ctx context.Context) (err error) {
	t.handle, err = ask(ctx, t, "nvmlDeviceGetHandleByIndex_v2", func() (nvml.Device, nvml.Return) {
		return t.lib.api.DeviceGetHandleByIndex(t.gpu)
	})
	if err == nil && t.isMIG {
		gpu := t.handle
		t.handle, err = ask(ctx, t, "nvmlDeviceGetMigDeviceHandleByIndex", func() (nvml.Device, nvml.Return) {
			return gpu.GetMigDeviceHandleByIndex(t.mig)
		})
	}
	if err != nil {
		return err
	}
	uuid, err := ask(ctx, t, "nvmlDeviceGetUUID", t.handle.GetUUID)
	if err != nil {
		return err
	}
	return t.backend.table.Confirm(t.device, accel.DeviceID(uuid))
}

// processes asks for the lists of processes of a device with that much memory, in bytes. A
// list that the library, or the device, does not have adds nothing. The error is one of
// those if all are so.
func (t *target) processes(ctx context.Context, total uint64) (devicelist.Processes, error) {
	out := devicelist.Processes{}
	var missing error
	answered := false
	for _, l := range processLists {
		list, err := ask(ctx, t, l.function, func() ([]nvml.ProcessInfo, nvml.Return) {
			return sized(func() ([]nvml.ProcessInfo, nvml.Return) { return l.list(t.handle) })
		})
		switch {
		case unsupported(err):
			missing = err
			continue
		case err != nil:
			return nil, err
		}
		answered = true
		for _, p := range list {
			out.Add(p.Pid, devicelist.MemoryUpTo(total, p.UsedGpuMemory))
		}
	}
	if !answered {
		return nil, missing
	}
	return out, nil
}

// sizedTries is how often a list is asked for that grows from one call to the next.
const sizedTries = 4

// sized calls a function of the binding that asks for a list's length first, until the list
// fits. The binding cuts its buffer to the length that the library returns without a look
// at the buffer's, and panics if the list has grown meanwhile.
func sized[T any](call func() ([]T, nvml.Return)) (list []T, code nvml.Return) {
	try := func() (list []T, code nvml.Return) {
		defer func() {
			if recover() != nil {
				list, code = nil, nvml.ERROR_INSUFFICIENT_SIZE
			}
		}()
		return call()
	}
	for range sizedTries {
		if list, code = try(); code != nvml.ERROR_INSUFFICIENT_SIZE {
			return list, code
		}
	}
	return nil, code
}

// utilization asks for the samples since the last call about the GPU, and returns the part
// of its compute time that each process had by PID; nil if the library does not know that.
// The error is one that libloader.IsFatal.
func (m *meter) utilization(ctx context.Context, t *target) (map[uint32]float64, error) {
	m.mu.Lock()
	recent := m.recent[t.device.ID]
	m.mu.Unlock()
	samples, err := ask(ctx, t, "nvmlDeviceGetProcessUtilization", func() ([]nvml.ProcessUtilizationSample, nvml.Return) {
		return sized(func() ([]nvml.ProcessUtilizationSample, nvml.Return) {
			return t.handle.GetProcessUtilization(recent.last)
		})
	})
	switch {
	case libloader.IsFatal(err):
		return nil, err
	case err != nil && !libloader.HasCode(err, nvml.ERROR_NOT_FOUND):
		return nil, nil
	}
	now := recent.next(samples, time.Now())
	m.mu.Lock()
	defer m.mu.Unlock()
	m.recent[t.device.ID] = now
	return now.of, nil
}

// next returns the utilization after samples were read, of which each process that computed
// in the last sample period has one. Without any, the last ones count for that period, and
// then no process has computed since.
func (u utilization) next(samples []nvml.ProcessUtilizationSample, now time.Time) utilization {
	sums, counts := map[uint32]float64{}, map[uint32]float64{}
	last := u.last
	for _, s := range samples {
		if s.TimeStamp <= u.last || s.SmUtil > 100 { // the driver leaves what was in the buffer in it
			continue
		}
		sums[s.Pid] += float64(s.SmUtil) / 100
		counts[s.Pid]++
		last = max(last, s.TimeStamp)
	}
	if len(sums) == 0 && now.Sub(u.read) < samplePeriod {
		return u
	}
	for pid := range sums {
		sums[pid] /= counts[pid]
	}
	return utilization{of: sums, last: last, read: now}
}
