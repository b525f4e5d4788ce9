package nvidia

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libloader"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
)

// limiter is the backend.Limiter of a Backend.
type limiter struct{ backend *Backend }

// errPartitioned says that the driver has no limits for partitions.
var errPartitioned = errors.New("the driver has no memory limits for MIG devices and for GPUs in MIG mode")

// Limitable implements backend.Limiter.
func (l limiter) Limitable(ctx context.Context) error {
	_, err := libloader.Measure(ctx, l.backend.loader, func(lib *library, _ uint64) (struct{}, error) {
		var lacks []string
		for _, function := range []string{memlimit.SetFunction, memlimit.GetFunction} {
			if !lib.has[function] {
				lacks = append(lacks, function)
			}
		}
		if len(lacks) == 0 {
			return struct{}{}, nil
		}
		// Without the version the error says so.
		driver, _ := query(ctx, l.backend, lib, "nvmlSystemGetDriverVersion", lib.api.SystemGetDriverVersion)
		return struct{}{}, memlimit.Missing(driver, lacks...)
	})
	return err
}

// about calls functions of the library about a GPU that can have limits.
func about[T any](ctx context.Context, l limiter, id accel.DeviceID, calls func(*target) (T, error)) (T, error) {
	return libloader.Measure(ctx, l.backend.loader, func(lib *library, session uint64) (none T, err error) {
		t, err := newTarget(l.backend, lib, session, id)
		if err != nil {
			return none, err
		}
		if t.isMIG || t.device.Partitioned {
			return none, fmt.Errorf("device %s (%s): %w", accel.IndexText(t.device.Index), id, errPartitioned)
		}
		if err := t.find(ctx); err != nil {
			return none, err
		}
		return calls(t)
	})
}

// KeepsLimits implements backend.Limiter. Without persistence mode, the driver forgets all
// of a GPU when the last program has closed it.
func (l limiter) KeepsLimits(ctx context.Context, id accel.DeviceID) error {
	_, err := about(ctx, l, id, func(t *target) (struct{}, error) {
		mode, err := ask(ctx, t, "nvmlDeviceGetPersistenceMode", t.handle.GetPersistenceMode)
		switch {
		case err != nil:
			return struct{}{}, fmt.Errorf("persistence mode is not known: %w", err)
		case mode != nvml.FEATURE_ENABLED:
			return struct{}{}, fmt.Errorf("persistence mode is off, and without it the driver forgets limits when the last program ends; "+
				"run nvidia-persistenced on the node, or \"nvidia-smi --persistence-mode=1 --id=%s\"", id)
		}
		return struct{}{}, nil
	})
	return err
}

// SetLimit implements backend.Limiter.
func (l limiter) SetLimit(ctx context.Context, id accel.DeviceID, group string, bytes uint64) error {
	_, err := about(ctx, l, id, func(t *target) (struct{}, error) {
		_, err := ask(ctx, t, memlimit.SetFunction, func() (struct{}, nvml.Return) {
			return struct{}{}, t.handle.SetMemoryLimits_v1(group, 0, bytes)
		})
		return struct{}{}, memlimit.Outcome(err)
	})
	return err
}

// ClearLimit implements backend.Limiter.
func (l limiter) ClearLimit(ctx context.Context, id accel.DeviceID, group string) error {
	return l.SetLimit(ctx, id, group, memlimit.Unlimited)
}

// Limit implements backend.Limiter.
func (l limiter) Limit(ctx context.Context, id accel.DeviceID, group string) (backend.MemoryLimit, error) {
	return about(ctx, l, id, func(t *target) (backend.MemoryLimit, error) {
		limits, err := ask(ctx, t, memlimit.GetFunction, func() (nvml.MemoryLimits_v1, nvml.Return) {
			return t.handle.GetMemoryLimits_v1(group)
		})
		if err != nil {
			return backend.MemoryLimit{}, memlimit.Outcome(err)
		}
		return memlimit.Read(limits.HardLimit, limits.CurrentUsed)
	})
}
