package usage

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

// initPIDNamespace is what the kernel calls the PID namespace that it starts with.
const initPIDNamespace = "pid:[4026531836]"

// errPrivatePIDs says that this process is in a PID namespace of its own.
var errPrivatePIDs = errors.New("divvy-node does not see the processes of the host, so it cannot find out which containers use a device: " +
	"set hostPID: true in its pod (node.usage.enabled of the chart)")

// HostPIDs returns nil if this process sees the host's processes, so that the PIDs that
// a vendor's library lists mean something. Otherwise the error says what to do. procRoot
// is usually /proc; it may also be that of another PID namespace, such as the host's.
//
// The host is a machine, or a container in which a kubelet runs.
func HostPIDs(procRoot string) error {
	self := filepath.Join(procRoot, "self")
	namespace, err := os.Readlink(filepath.Join(self, "ns/pid"))
	if err != nil {
		return fmt.Errorf("find out the PID namespace of divvy-node: %w", err)
	}
	if namespace == initPIDNamespace {
		return nil
	}
	status, err := os.ReadFile(filepath.Join(self, "status"))
	if err != nil {
		return fmt.Errorf("find out the PID namespace of divvy-node: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		// The PIDs in procRoot's namespace and in those below it.
		if pids, ok := strings.CutPrefix(line, "NSpid:"); ok && len(strings.Fields(pids)) > 1 {
			return errPrivatePIDs
		}
	}
	pid, err := ownPID(procRoot)
	if err != nil {
		return err
	}
	own, err := cgroup.ReadMembership(procRoot, pid)
	if err != nil {
		return fmt.Errorf("find out the control group of divvy-node: %w", err)
	}
	first, err := cgroup.ReadMembership(procRoot, 1)
	if err != nil {
		return fmt.Errorf("find out the control group of the first process: %w", err)
	}
	if samePod(own, first) {
		return errPrivatePIDs
	}
	return nil
}

// ownPID returns the PID of this process in procRoot.
func ownPID(procRoot string) (int, error) {
	target, err := os.Readlink(filepath.Join(procRoot, "self"))
	if err != nil {
		return 0, fmt.Errorf("find out the PID of divvy-node: %w", err)
	}
	pid, err := strconv.Atoi(target)
	if err != nil {
		return 0, fmt.Errorf("find out the PID of divvy-node: %w", err)
	}
	return pid, nil
}

// samePod reports whether the first process of a PID namespace is in the pod of another
// process. On the host, it is outside of that pod, perhaps in one of another cluster.
func samePod(own, first cgroup.Membership) bool {
	switch {
	case len(own.Owners) > 0 && len(first.Owners) > 0:
		return own.Owners[len(own.Owners)-1].PodUID == first.Owners[len(first.Owners)-1].PodUID
	case len(own.Owners) > 0 || len(first.Owners) > 0:
		return false
	default:
		// In a cgroup namespace of its own, a container does not see its pod's name.
		return own.Path == first.Path
	}
}
