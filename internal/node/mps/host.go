package mps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
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

// sharedMemoryOptions bound the memory of the node that containers can use up.
const sharedMemoryOptions = "mode=1777,size=1g,nr_inodes=65536"

// Tidy removes what containers have left in the shared memory if none has it any more, but what
// servers use. proc is the kernel's folder of the node's processes.
func (h Host) Tidy(proc string, servers []int) error {
	dir := SharedMemoryDir(h.Dir())
	left, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no daemon was started yet
	} else if err != nil || len(left) == 0 {
		return err
	}
	if used, err := h.sharedMemoryIsUsed(proc, dir); used || err != nil {
		return err
	}
	var mapped strings.Builder
	for _, pid := range servers {
		text, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "maps"))
		if err != nil {
			return nil //nolint:nilerr // it has ended meanwhile
		}
		mapped.Write(text)
	}
	for _, one := range left {
		if !strings.Contains(mapped.String(), "/"+one.Name()) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, one.Name())))
		}
	}
	return err
}

// sharedMemoryIsUsed reports whether a container has the shared memory.
func (h Host) sharedMemoryIsUsed(proc, dir string) (bool, error) {
	var stat unix.Stat_t
	if err := unix.Stat(dir, &stat); err != nil {
		return false, err
	}
	device := fmt.Sprintf("%d:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev))
	own, err := os.Readlink(filepath.Join(proc, "self/ns/mnt"))
	if err != nil {
		return false, err
	}
	processes, err := os.ReadDir(proc)
	if err != nil {
		return false, err
	}
	seen := map[string]bool{own: true}
	for _, p := range processes {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		space, err := os.Readlink(filepath.Join(proc, p.Name(), "ns/mnt"))
		if err != nil || seen[space] {
			continue // it has ended, or is like another one
		}
		text, err := os.ReadFile(filepath.Join(proc, p.Name(), "mountinfo"))
		if err != nil {
			continue
		}
		seen[space] = true
		for line := range strings.Lines(string(text)) {
			words := strings.Fields(line)
			if len(words) > 4 && words[2] == device && strings.HasSuffix(words[4], "/dev/shm") {
				return true, nil
			}
		}
	}
	return false, nil
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
	if err := h.Mount("divvy-mps", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, sharedMemoryOptions); err != nil {
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
