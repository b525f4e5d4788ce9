package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// podDepth is how far below the top a pod's control group can be:
// kubelet's own root may be some levels down, and in it are kubepods, the class of
// service and the pod.
const podDepth = 6

// maxDepth bounds how far below the top processes are looked for: containers make groups
// of their own below theirs.
const maxDepth = 32

// RunningPods returns which of the pods, by UID, have processes, from the control
// groups below root: that of the host, usually /sys/fs/cgroup. kubelet gives each pod
// a group that is named after its UID and removes it when all has ended.
func RunningPods(root string, uids []string) (map[string]bool, error) {
	running := map[string]bool{}
	err := walk(root, func(dir, group string) error {
		if uid, ok := podUID(filepath.Base(group)); ok && slices.Contains(uids, uid) {
			busy, err := populated(dir)
			if err != nil {
				return err
			}
			running[uid] = running[uid] || busy
			return fs.SkipDir
		}
		return below(group, podDepth)
	})
	if err != nil {
		return nil, fmt.Errorf("control groups of pods: %w", err)
	}
	return running, nil
}

// Members returns the owners of all processes in pods, by PID, from the control groups
// below root: that of the host, usually /sys/fs/cgroup. PIDs are those of the PID
// namespace of the caller. It is an error if there is no group of a pod, for
// then root is not the host's.
func Members(root string) (map[int][]Owner, error) {
	members := map[int][]Owner{}
	err := walkPods(root, func(dir, _ string, owners []Owner) error {
		pids, err := processes(dir)
		for _, pid := range pids {
			members[pid] = owners
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("processes in control groups: %w", err)
	}
	return members, nil
}

// Group is a control group that has processes of a container.
type Group struct {
	// Owner is the innermost container that it belongs to.
	Owner Owner
	// Path is below the top of the hierarchy, and begins with "/".
	Path string
	// Inode is that of its folder, which a group that is made later does not have.
	Inode uint64
}

// Groups returns the groups that have processes of containers, in the order of their paths,
// from the control groups of version 2 below root: that of the host, usually /sys/fs/cgroup.
// It reads those of the pods that are wanted by the UID in the names of their groups. It is an
// error if there is no group of a pod, and ErrNotUnified if the control groups are of version 1.
func Groups(root string, wanted func(podUID string) bool) ([]Group, error) {
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil {
		return nil, ErrNotUnified
	}
	var groups []Group
	err := walkPods(root, func(dir, group string, owners []Owner) error {
		// A container may have made the groups below its own, and named them as it likes.
		owner := owners[0]
		if !wanted(owner.PodUID) {
			return fs.SkipDir
		}
		if owner.Container == "" {
			return nil
		}
		pids, err := processes(dir)
		if err != nil || len(pids) == 0 {
			return err
		}
		inode, err := Inode(dir)
		if err == nil {
			groups = append(groups, Group{Owner: owner, Path: "/" + group, Inode: inode})
		} else if !vanished(err) {
			return err
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("control groups of containers: %w", err)
	}
	return groups, nil
}

// Inode returns that of a control group's folder. The error wraps fs.ErrNotExist if there is no
// such group.
func Inode(dir string) (uint64, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return 0, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() {
		return 0, fmt.Errorf("%s is not a folder", dir)
	}
	return stat.Ino, nil
}

// walkPods calls visit with each control group of a pod, or below one, as walk does. It is an
// error if there is none.
func walkPods(root string, visit func(dir, group string, owners []Owner) error) error {
	found := false
	err := walk(root, func(dir, group string) error {
		owners := Owners(group)
		if len(owners) == 0 {
			return below(group, podDepth)
		}
		found = true
		if err := visit(dir, group, owners); err != nil {
			return err
		}
		return below(group, maxDepth)
	})
	if err == nil && !found {
		return fmt.Errorf("no control group of a pod is below %s", root)
	}
	return err
}

// walk calls visit with each control group below root, as a folder and as its path
// from the top of its hierarchy, which is "." itself. visit returns fs.SkipDir to leave
// out those below.
func walk(root string, visit func(dir, group string) error) error {
	top, err := hierarchy(root)
	if err != nil {
		return err
	}
	return filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case vanished(err):
			return nil // groups come and go
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		}
		group, err := filepath.Rel(top, path)
		if err != nil {
			return err
		}
		return visit(path, group)
	})
}

// below returns fs.SkipDir if groups below a group are deeper than a depth.
func below(group string, depth int) error {
	if strings.Count(group, string(filepath.Separator)) >= depth {
		return fs.SkipDir
	}
	return nil
}

// processes returns the PIDs of the processes in a group, without those in groups
// below it and without those outside of the caller's PID namespace.
func processes(dir string) ([]int, error) {
	file := filepath.Join(dir, "cgroup.procs")
	text, err := os.ReadFile(file)
	switch {
	case vanished(err), errors.Is(err, syscall.EOPNOTSUPP): // a threaded group; one above has its processes
		return nil, nil
	case err != nil:
		return nil, err
	}
	var pids []int
	for field := range strings.FieldsSeq(string(text)) {
		pid, err := strconv.Atoi(field)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// hierarchy returns the folder in which the groups of all pods are: the only one of
// version 2, and of version 1 that of a controller which counts processes.
func hierarchy(root string) (string, error) {
	if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err == nil {
		return root, nil
	}
	for _, controller := range []string{"pids", "memory", "cpu", "systemd"} {
		dir := filepath.Join(root, controller)
		if info, err := os.Stat(dir); err == nil && info.IsDir() {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no control groups are mounted below %s", root)
}

// vanished reports whether a group was removed while it was read.
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV)
}

// populated reports whether a group, or one below it, has processes.
func populated(dir string) (bool, error) {
	events, err := os.ReadFile(filepath.Join(dir, "cgroup.events")) // version 2
	switch {
	case err == nil:
		return strings.Contains("\n"+string(events), "\npopulated 1\n"), nil
	case !vanished(err):
		return false, err
	}
	count, err := os.ReadFile(filepath.Join(dir, "pids.current")) // counts those of groups below as well
	switch {
	case err == nil:
		n, err := strconv.Atoi(strings.TrimSpace(string(count)))
		if err != nil {
			return false, fmt.Errorf("%s: %w", filepath.Join(dir, "pids.current"), err)
		}
		return n > 0, nil
	case !vanished(err):
		return false, err
	}
	// Without either, a container is a group below.
	entries, err := os.ReadDir(dir)
	if err != nil {
		if vanished(err) {
			return false, nil
		}
		return false, err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			return true, nil
		}
	}
	return false, nil
}
