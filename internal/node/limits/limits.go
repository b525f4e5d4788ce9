// Package limits bounds the device memory of containers in a vendor's driver, and finds out
// whether the bounds hold.
//
// A container gets its limit from a hook (Hook) that the container runtime runs when the
// container's control group exists and none of its programs has started: a limit that is set
// later does not count what was allocated before. The hook leaves a Record. The node's daemon
// judges in each pass (Judge) whether each container has the limit that the node's own ledger
// says, and whether it had it from the beginning.
//
// The program of the hook and the daemon share this package. It uses no API server, and
// reads control groups of version 2 only.
package limits

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

// MiB is the unit of limits, in bytes.
const MiB = 1 << 20

// Driver sets and reads limits, as backend.Limiter does.
type Driver interface {
	SetLimit(ctx context.Context, id accel.DeviceID, group string, bytes uint64) error
	ClearLimit(ctx context.Context, id accel.DeviceID, group string) error
	Limit(ctx context.Context, id accel.DeviceID, group string) (backend.MemoryLimit, error)
}

// Group is the control group that a limit is for, in a container.
type Group struct {
	// Path is as the kernel names it, from the top of the hierarchy.
	Path string
	// Dir is its folder, and Scope that of the container's own group, which is Dir or above.
	Dir, Scope string
}

// NewGroup returns the group with a path below the folder of the hierarchy. It is an error if
// the group is in no container of a pod, or if the path leads out of a control group
// namespace.
func NewGroup(cgroupRoot, path string) (Group, error) {
	if filepath.Clean(path) != path {
		return Group{}, fmt.Errorf("control group %q is outside of the namespace of this program", path)
	}
	scope, ok := cgroup.Scope(path)
	if !ok {
		return Group{}, fmt.Errorf("control group %q belongs to no container of a pod", path)
	}
	return Group{Path: path, Dir: filepath.Join(cgroupRoot, path), Scope: filepath.Join(cgroupRoot, scope)}, nil
}

// Set bounds what a group may allocate of a device, in bytes, and reads the limit back. Where
// the group itself cannot have a limit, the nearest one above gets it, up to the container's
// own.
func Set(ctx context.Context, d Driver, id accel.DeviceID, g Group, bytes uint64) error {
	dir := g.Dir
	err := d.SetLimit(ctx, id, dir, bytes)
	for errors.Is(err, backend.ErrNoController) && dir != g.Scope {
		dir = filepath.Dir(dir)
		err = d.SetLimit(ctx, id, dir, bytes)
	}
	if err != nil {
		return fmt.Errorf("set the memory limit of %s on device %s to %d MiB: %w", g.Path, id, bytes/MiB, err)
	}
	limit, err := d.Limit(ctx, id, g.Dir)
	if err != nil {
		return fmt.Errorf("read back the memory limit of %s on device %s: %w", g.Path, id, err)
	}
	if limit.Bytes != bytes {
		return fmt.Errorf("the memory limit of %s on device %s is %d bytes after it was set to %d bytes", g.Path, id, limit.Bytes, bytes)
	}
	return nil
}

// Probe finds out whether the driver keeps limits of a device: it sets one on a group that has
// none of its own, reads it back and clears it. The group is that of the caller.
func Probe(ctx context.Context, d Driver, id accel.DeviceID, group string) (err error) {
	g := Group{Path: group, Dir: group, Scope: group}
	// Two amounts, since the first may be what an earlier probe left.
	for _, bytes := range []uint64{64 * MiB, 65 * MiB} {
		if err := Set(ctx, d, id, g, bytes); err != nil {
			return errors.Join(err, d.ClearLimit(ctx, id, group))
		}
	}
	if err := d.ClearLimit(ctx, id, group); err != nil {
		return fmt.Errorf("clear the memory limit of %s on device %s: %w", group, id, err)
	}
	limit, err := d.Limit(ctx, id, group)
	switch {
	case errors.Is(err, backend.ErrNoLimit):
		return nil
	case err != nil:
		return fmt.Errorf("read the cleared memory limit of %s on device %s: %w", group, id, err)
	case limit.Bytes == 65*MiB:
		return fmt.Errorf("the memory limit of %s on device %s is still %d MiB after it was cleared", group, id, limit.Bytes/MiB)
	}
	return nil // that of a group above
}
