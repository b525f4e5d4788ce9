package limits

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

// Backends of the driver: the controllers of control groups that it can keep limits in.
const (
	BackendDMEM = "dmem"
	BackendMisc = "misc"
)

// Controller returns the controller that the driver keeps limits in, from the control groups
// of the host at cgroupRoot and the kernel's processes at procRoot. It is the one that the
// driver prefers; an administrator may have chosen another. The error says what the host
// lacks.
func Controller(procRoot, cgroupRoot string) (string, error) {
	text, err := os.ReadFile(filepath.Join(cgroupRoot, "cgroup.controllers"))
	if err != nil {
		filesystems, readErr := os.ReadFile(filepath.Join(procRoot, "filesystems"))
		if readErr == nil && !strings.Contains(string(filesystems), "\tcgroup2\n") {
			return "", errors.New("control groups v2 are required, and the kernel has v1 alone")
		}
		return "", fmt.Errorf("%w; start the node with systemd.unified_cgroup_hierarchy=1", cgroup.ErrNotUnified)
	}
	controllers := strings.Fields(string(text))
	for _, name := range []string{BackendDMEM, BackendMisc} {
		if slices.Contains(controllers, name) {
			return name, nil
		}
	}
	return "", fmt.Errorf("the kernel has neither the controller %s (Linux 6.14 and later) nor %s of control groups; it has %s",
		BackendDMEM, BackendMisc, strings.Join(controllers, ", "))
}

// OwnGroup returns the folder of the control group of this process, given the path that
// /proc/self/cgroup has for it. hostRoot is where the host's control groups are seen, ownRoot
// where the process's own namespace is mounted. The group on top has no limits.
func OwnGroup(path, hostRoot, ownRoot string) (string, error) {
	dir := filepath.Join(hostRoot, path)
	if path == "/" { // in a namespace of its own, whose mount shows only what is in it
		dir = ownRoot
	}
	if filepath.Clean(path) != path {
		return "", fmt.Errorf("own control group %q is outside of the namespace of this process", path)
	}
	if _, err := os.Stat(filepath.Join(dir, "cgroup.events")); err != nil { // which the top does not have
		return "", fmt.Errorf("own control group: %w", err)
	}
	return dir, nil
}
