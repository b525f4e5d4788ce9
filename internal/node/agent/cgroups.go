package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// cgroupDepth is how far below the top a pod's control group can be:
// kubelet's own root may be some levels down, and in it are kubepods, the class of
// service and the pod.
const cgroupDepth = 6

// runningPods returns which of the pods, by UID, have processes, from the control
// groups below root: that of the host, usually /sys/fs/cgroup. kubelet gives each pod
// a group that is named after its UID and removes it when all has ended. Both
// versions of control groups are read, with systemd's names and with plain ones.
func runningPods(root string, uids []string) (map[string]bool, error) {
	names := make(map[string]string, 2*len(uids))
	for _, uid := range uids {
		names["pod"+uid] = uid
		names["pod"+strings.ReplaceAll(uid, "-", "_")+".slice"] = uid
	}
	top, err := hierarchy(root)
	if err != nil {
		return nil, err
	}
	running := map[string]bool{}
	err = filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case vanished(err):
			return nil // groups come and go
		case err != nil:
			return err
		case !entry.IsDir():
			return nil
		}
		name := entry.Name()
		if i := strings.LastIndex(name, "-pod"); i >= 0 && strings.HasSuffix(name, ".slice") {
			name = name[i+1:]
		}
		if uid, ours := names[name]; ours {
			busy, err := populated(path)
			if err != nil {
				return err
			}
			running[uid] = running[uid] || busy
			return fs.SkipDir
		}
		if below, err := filepath.Rel(top, path); err == nil && strings.Count(below, string(filepath.Separator)) >= cgroupDepth {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("control groups of pods: %w", err)
	}
	return running, nil
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
