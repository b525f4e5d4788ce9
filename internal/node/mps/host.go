package mps

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
)

// Program is the vendor's program.
const Program = "nvidia-cuda-mps-control"

// programFolders are where it can be in the driver's installation.
var programFolders = []string{"/usr/bin", "/usr/local/bin", "/bin", "/usr/local/nvidia/bin"}

// Host is the host as the service sees it in its container.
type Host struct {
	// Root is where the host's root is seen, "/" for the host itself.
	Root string
	// Mount is unix.Mount. What is mounted is seen by this process and its children alone,
	// except below Dir.
	Mount func(source, target, fstype string, flags uintptr, data string) error
}

// Dir returns the folder of this package as the service sees it.
func (h Host) Dir() string { return filepath.Join(h.Root, Dir) }

// DriverRoot returns a folder of the host as the service sees it.
func (h Host) DriverRoot(driverRoot string) (string, error) {
	return securejoin.SecureJoin(h.Root, driverRoot)
}

// Prepare makes the vendor's programs in a driver's installation on the host usable: they see
// Dir at its path, the devices, and the shared memory that their clients see. It returns the
// program.
func (h Host) Prepare(driverRoot string) (Tool, error) {
	root, err := h.DriverRoot(driverRoot)
	if err != nil {
		return nil, err
	}
	program, err := find(root)
	if err != nil {
		return nil, fmt.Errorf("%w in the driver's folder %s of the host", err, driverRoot)
	}
	shared, err := h.sharedMemory()
	if err != nil {
		return nil, err
	}
	if filepath.Clean(root) != filepath.Clean(h.Root) {
		if _, err := os.Stat(filepath.Join(root, "dev/nvidiactl")); err != nil {
			if err := h.bind(filepath.Join(h.Root, "dev"), filepath.Join(root, "dev")); err != nil {
				return nil, err
			}
		}
		if err := h.bind(h.Dir(), filepath.Join(root, Dir)); err != nil {
			return nil, err
		}
	}
	if err := h.bind(shared, filepath.Join(root, "dev/shm")); err != nil {
		return nil, err
	}
	return func(ctx context.Context, env []string, args ...string) (*exec.Cmd, error) {
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.Dir, cmd.Env = "/", env
		if filepath.Clean(root) != "/" {
			cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		}
		return cmd, nil
	}, nil
}

// find returns the path of the vendor's program in a root.
func find(root string) (string, error) {
	for _, folder := range programFolders {
		file, err := securejoin.SecureJoin(root, filepath.Join(folder, Program))
		if err != nil {
			return "", err
		}
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return filepath.Join(folder, Program), nil
		}
	}
	return "", fmt.Errorf("there is no %s", Program)
}

// sharedMemory makes the folder of SharedMemoryDir a file system of its own, once for as long
// as the host runs, so that what clients write there is bounded as in their own /dev/shm.
func (h Host) sharedMemory() (string, error) {
	dir := SharedMemoryDir(h.Dir())
	if err := os.MkdirAll(dir, 0o755); err != nil { // the file system that is mounted has its own mode
		return "", err
	}
	var above, there unix.Stat_t
	if err := unix.Stat(h.Dir(), &above); err != nil {
		return "", err
	}
	if err := unix.Stat(dir, &there); err != nil {
		return "", err
	}
	if above.Dev != there.Dev {
		return dir, nil
	}
	if err := h.Mount("divvy-mps", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"); err != nil {
		return "", fmt.Errorf("mount the shared memory of MPS: %w", err)
	}
	return dir, nil
}

// bind makes a folder seen in another place.
func (h Host) bind(from, to string) error {
	if err := os.MkdirAll(to, 0o755); err != nil { // a mount point
		return err
	}
	if err := h.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s at %s: %w", from, to, err)
	}
	return nil
}
