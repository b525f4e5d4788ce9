package limits

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

// Hook is what a createRuntime hook does for one container and one device. The roots are
// those of the host.
type Hook struct {
	Device accel.DeviceID
	// Bytes is the limit, 0 to clear one that the container may have inherited.
	Bytes uint64
	// ProcRoot is /proc, CgroupRoot /sys/fs/cgroup and RecordDir the folder of records.
	ProcRoot, CgroupRoot, RecordDir string
	// Now is the time.
	Now func() time.Time
}

// Run reads the container's state from in, sets the limit, reads it back and records it, or
// clears it. An error means that the container has no limit that is proven.
func (h Hook) Run(ctx context.Context, in io.Reader, open func() (Driver, error)) error {
	state, err := ReadState(in)
	if err != nil {
		return err
	}
	group, inode, err := h.locate(state.PID)
	if err != nil {
		return err
	}
	d, err := open()
	if err != nil {
		return err
	}
	if h.Bytes == 0 {
		if err := d.ClearLimit(ctx, h.Device, group.Dir); err != nil {
			return fmt.Errorf("clear the memory limit of %s on device %s: %w", group.Path, h.Device, err)
		}
		return nil
	}
	if err := Set(ctx, d, h.Device, group, h.Bytes); err != nil {
		return err
	}
	return Record{Container: state.ID, Group: group.Path, Inode: inode, Device: h.Device, Bytes: h.Bytes,
		Time: h.Now().UTC().Truncate(time.Second)}.Write(h.RecordDir)
}

// locate returns the group of a process, and the inode of its folder.
func (h Hook) locate(pid int) (Group, uint64, error) {
	// The file has a line of about 200 bytes for each controller of version 1.
	const limit = 64 << 10
	f, err := os.Open(filepath.Join(h.ProcRoot, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return Group{}, 0, fmt.Errorf("control group of process %d: %w", pid, err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	text, err := io.ReadAll(io.LimitReader(f, limit))
	if err != nil {
		return Group{}, 0, fmt.Errorf("control group of process %d: %w", pid, err)
	}
	path, err := cgroup.Unified(string(text))
	if err != nil {
		return Group{}, 0, err
	}
	group, err := NewGroup(h.CgroupRoot, path)
	if err != nil {
		return Group{}, 0, err
	}
	inode, err := cgroup.Inode(group.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return Group{}, 0, fmt.Errorf("%w: control group %s is not below %s", cgroup.ErrNotUnified, path, h.CgroupRoot)
	}
	if err != nil {
		return Group{}, 0, fmt.Errorf("control group %s: %w", path, err)
	}
	return group, inode, nil
}
