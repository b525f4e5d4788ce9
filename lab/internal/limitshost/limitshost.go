// Package limitshost makes of the lab's node one whose NVIDIA driver limits the memory of
// control groups. The driver needs version 2 of them. On a node with both versions the
// kernel's own groups of version 2 serve, at another place and with a list of controllers
// that has misc in it: the stand-in for the driver needs no more of the kernel. Containers get
// there by the script that containerd runs in the place of runc.
package limitshost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/memlimit"
	"github.com/divvy-gpu/divvy/internal/node/limits/install"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/host"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/nvidiahost"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// podDir is layout.DriverDir at a place that pods may mount: Divvy rejects those that mount
// parts of the host's /dev.
var podDir = filepath.Join(layout.RunDir, "driver")

// libraries is the folder of the driver's libraries, which Divvy's specification of CDI needs a
// libcuda in.
var libraries = filepath.Join(nvidiahost.Libraries, "nvidia/current")

// Version is that of the driver, the first with limits.
const Version = "615.36.02"

// Argument is what divvy-node needs to see control groups of version 2 on such a node.
const Argument = "--cgroup-root=" + layout.CgroupRoot

// ErrUnified says that the node has no control groups of version 1, which the lab's view of
// version 2 is made beside.
var ErrUnified = errors.New("the lab shows limits only on nodes with control groups of both versions")

// SetUp makes such a node, until TearDown. It returns the topology whose driver has the limits,
// for the caller to put into force.
func SetUp(ctx context.Context, topology vendorsim.Topology) (vendorsim.Topology, error) {
	var system unix.Statfs_t
	if err := unix.Statfs("/sys/fs/cgroup", &system); err != nil || system.Type == unix.CGROUP2_SUPER_MAGIC {
		return topology, errors.Join(ErrUnified, err)
	}
	if err := TearDown(ctx); err != nil {
		return topology, err
	}
	topology = topology.Clone()
	driver := topology.DriverOf(vendorsim.NVIDIA)
	driver.Version, driver.Run = Version, layout.DriverDir
	driver.MemoryAccounting, driver.Persistence = vendorsim.MemoryAccountingMisc, true
	topology.Drivers[vendorsim.NVIDIA] = driver
	topology.ControlGroups = vendorsim.ControlGroups{Root: layout.CgroupRoot}
	if err := mount(); err != nil {
		return topology, fmt.Errorf("make a node with limits of device memory: %w", err)
	}
	// Pods have library and topology from here: what a GPU comes with is not the lab's to extend.
	_, err := vendorsim.Build(ctx, vendorsim.NVIDIA, layout.DriverDir)
	return topology, errors.Join(err, topology.Write(filepath.Join(layout.DriverDir, vendorsim.TopologyName)),
		nvidiahost.InstallCUDA(ctx, libraries, Version))
}

func mount() error {
	controllers := filepath.Join(layout.DriverDir, "controllers")
	return errors.Join(
		os.MkdirAll(layout.CgroupRoot, 0o755), os.MkdirAll(podDir, 0o755), os.WriteFile(controllers, []byte("misc\n"), 0o644),
		unix.Mount("divvy-lab", layout.CgroupRoot, "cgroup2", 0, ""),
		unix.Mount(controllers, filepath.Join(layout.CgroupRoot, "cgroup.controllers"), "", unix.MS_BIND, ""),
		unix.Mount(layout.DriverDir, podDir, "", unix.MS_BIND|unix.MS_REC, ""),
	)
}

// TearDown undoes SetUp. Containers that run leave their groups of version 2.
func TearDown(ctx context.Context) error {
	kubepods := filepath.Join(layout.CgroupRoot, "kubepods")
	// What they start meanwhile is in the groups as well.
	err := poll.Until(ctx, leaveTimeout, "containers to leave "+kubepods, func(context.Context) error {
		return errors.Join(leave(kubepods), host.RemoveCgroup(kubepods))
	})
	return errors.Join(err, host.UnmountBelow(podDir, layout.DriverDir), os.RemoveAll(podDir), os.RemoveAll(layout.DriverDir),
		os.RemoveAll(nvidiahost.CUDA(libraries, Version)))
}

const leaveTimeout = 10 * time.Second

// leave moves all processes in a group and below to the top.
func leave(group string) error {
	return filepath.WalkDir(group, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || err == nil && d.Name() != "cgroup.procs" {
			return nil
		}
		text, err := os.ReadFile(path)
		for pid := range strings.FieldsSeq(string(text)) {
			// It may have ended.
			_ = os.WriteFile(filepath.Join(layout.CgroupRoot, "cgroup.procs"), []byte(pid), 0)
		}
		return err
	})
}

// Allocate makes the first container of a pod run alloc, the program that allocates memory of
// the node's first GPU, with these arguments.
func Allocate(pod *corev1.Pod, args ...string) *corev1.Pod {
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "driver", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: podDir}}})
	c := &pod.Spec.Containers[0]
	c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "driver", MountPath: layout.DriverDir})
	c.Command = Allocator(args...)
	return pod
}

// Allocator is the command line of alloc in such a container.
func Allocator(args ...string) []string {
	library := filepath.Join(layout.DriverDir, vendorsim.LibraryName(vendorsim.NVIDIA))
	return append([]string{"alloc", "--library", library}, args...)
}

// Group returns the folder of the control group of a pod's first container, which runs.
func Group(pod *corev1.Pod) (string, error) {
	for _, status := range pod.Status.ContainerStatuses[:min(1, len(pod.Status.ContainerStatuses))] {
		_, id, _ := strings.Cut(status.ContainerID, "://")
		for _, class := range []string{"", "burstable", "besteffort"} {
			dir := filepath.Join(layout.CgroupRoot, "kubepods", class, "pod"+string(pod.UID), id)
			if _, err := os.Stat(dir); err == nil && id != "" {
				return dir, nil
			}
		}
	}
	return "", fmt.Errorf("the container of pod %s has no control group of version 2", pod.Name)
}

// Limited returns nil if the driver limits a group to so many bytes of a GPU.
func Limited(ctx context.Context, gpu accel.DeviceID, group string, bytes uint64) error {
	return use(func(driver *memlimit.Library) error {
		limit, err := driver.Limit(ctx, gpu, group)
		if err == nil && limit.Bytes != bytes {
			err = fmt.Errorf("the limit of %s is %d bytes, want %d", group, limit.Bytes, bytes)
		}
		return err
	})
}

// Limits returns what the driver says of a group and each of the GPUs on which it has a limit.
func Limits(ctx context.Context, gpus []accel.DeviceID, group string) (limits map[accel.DeviceID]backend.MemoryLimit, err error) {
	limits = map[accel.DeviceID]backend.MemoryLimit{}
	return limits, use(func(driver *memlimit.Library) error {
		for _, gpu := range gpus {
			limit, err := driver.Limit(ctx, gpu, group)
			switch {
			case err == nil:
				limits[gpu] = limit
			case !errors.Is(err, backend.ErrNoLimit):
				return err
			}
		}
		return nil
	})
}

// RemoveLimit removes the limit of a group from the driver, as nvidia-smi does for an
// administrator.
func RemoveLimit(ctx context.Context, gpu accel.DeviceID, group string) error {
	return use(func(driver *memlimit.Library) error { return driver.ClearLimit(ctx, gpu, group) })
}

func use(do func(*memlimit.Library) error) error {
	driver, err := memlimit.Open(memlimit.Places(backend.Options{DriverRoot: "/"}))
	if err != nil {
		return err
	}
	return errors.Join(do(driver), driver.Close())
}

// Hook returns the program that divvy-node has installed.
func Hook() (string, error) {
	found, err := filepath.Glob(filepath.Join(install.DefaultDir, "divvy-hook-*"))
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("hooks on the host: %q, want one", found)
	}
	return strings.Join(found, " "), err
}

// ReplaceHook puts a script in the place of the hook; restore puts the hook back.
func ReplaceHook(script string) (restore func() error, err error) {
	hook, err := Hook()
	if err != nil {
		return nil, err
	}
	// There is a hook at every moment, or the daemon might install its own again.
	kept, replacement := hook+".kept", hook+".script"
	return func() error { return os.Rename(kept, hook) },
		errors.Join(os.WriteFile(replacement, []byte(script), 0o755), os.Link(hook, kept), os.Rename(replacement, hook))
}
