package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ShareRoot makes the root mount propagate to containers that ask for it, as
// it does on every machine with systemd. It returns false where it did already.
func ShareRoot() (bool, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter("/"))
	if err != nil {
		return false, fmt.Errorf("read mounts: %w", err)
	}
	for _, m := range mounts {
		if strings.Contains(m.Optional, "shared:") {
			return false, nil
		}
	}
	if err := unix.Mount("", "/", "", unix.MS_SHARED, ""); err != nil {
		return false, fmt.Errorf("share the root mount: %w", err)
	}
	return true, nil
}

// UnshareRoot undoes ShareRoot.
func UnshareRoot() error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the root mount private again: %w", err)
	}
	return nil
}

// MountsBelow returns the mount points at or below any of the folders, the
// deepest first.
func MountsBelow(folders ...string) ([]string, error) {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !slices.ContainsFunc(folders, func(f string) bool {
			return m.Mountpoint == f || strings.HasPrefix(m.Mountpoint, f+"/")
		}), false
	})
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	points := make([]string, 0, len(mounts))
	for _, m := range slices.Backward(mounts) { // later ones may lie on earlier ones
		points = append(points, m.Mountpoint)
	}
	slices.SortStableFunc(points, func(a, b string) int {
		return strings.Count(b, "/") - strings.Count(a, "/")
	})
	return points, nil
}

// unmountRounds bounds how often UnmountBelow looks again.
const unmountRounds = 10

// UnmountBelow unmounts everything at or below the folders. It looks again until
// there is nothing: a mount may hide another one, or take others along.
func UnmountBelow(folders ...string) error {
	var failed error
	for range unmountRounds {
		points, err := MountsBelow(folders...)
		if err != nil || len(points) == 0 {
			return err
		}
		failed = unmountAll(points)
	}
	return failed
}

func unmountAll(points []string) error {
	var errs []error
	for _, p := range points {
		if err := unix.Unmount(p, unix.UMOUNT_NOFOLLOW); err == nil {
			continue
		}
		// Busy: detach it now, the kernel lets go of it with its last user.
		if err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) &&
			!errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("unmount %s: %w", p, err))
		}
	}
	return errors.Join(errs...)
}

// Cgroups returns the folders named name at the top of every mounted cgroup
// hierarchy, of either version.
func Cgroups(name string) ([]string, error) {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return m.FSType != "cgroup" && m.FSType != "cgroup2", false
	})
	if err != nil {
		return nil, fmt.Errorf("read mounts: %w", err)
	}
	var found []string
	for _, m := range mounts {
		dir := filepath.Join(m.Mountpoint, name)
		if _, err := os.Stat(dir); err == nil && !slices.Contains(found, dir) {
			found = append(found, dir)
		}
	}
	return found, nil
}

// cgroupWait is how long a control group may stay busy after its last process
// was killed.
const cgroupWait = 10 * time.Second

// RemoveCgroups removes the folders named name at the top of every hierarchy
// with all below. No process may be left in them.
func RemoveCgroups(ctx context.Context, name string) error {
	deadline := time.Now().Add(cgroupWait)
	for {
		dirs, err := Cgroups(name)
		if err != nil || len(dirs) == 0 {
			return err
		}
		var errs []error
		for _, dir := range dirs {
			errs = append(errs, RemoveCgroup(dir))
		}
		err = errors.Join(errs...)
		if err != nil && (ctx.Err() != nil || time.Now().After(deadline)) {
			return fmt.Errorf("remove control groups: %w", err)
		}
		if err != nil {
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

// RemoveCgroup removes a control group and those below it; files in them go
// with them and cannot be removed.
func RemoveCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := RemoveCgroup(filepath.Join(dir, entry.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}

// Links returns the names of the bridge and of the interfaces attached to it.
func Links(bridge string) ([]string, error) {
	master, err := netlink.LinkByName(bridge)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for interface %s: %w", bridge, err)
	}
	links, err := listLinks()
	if err != nil {
		return nil, fmt.Errorf("list network interfaces: %w", err)
	}
	var names []string
	for _, l := range links {
		if l.Attrs().MasterIndex == master.Attrs().Index {
			names = append(names, l.Attrs().Name)
		}
	}
	return append(names, bridge), nil
}

// linkWait is how long interfaces may come and go before a list of them is given
// up: those of pods that have ended go by and by.
const linkWait = 10 * time.Second

// listLinks lists the network interfaces. The kernel says so when they changed
// while it listed them, and the list is incomplete then.
func listLinks() ([]netlink.Link, error) {
	for deadline := time.Now().Add(linkWait); ; {
		links, err := netlink.LinkList()
		if !errors.Is(err, netlink.ErrDumpInterrupted) || time.Now().After(deadline) {
			return links, err
		}
		<-time.After(10 * time.Millisecond)
	}
}

// RemoveLinks removes the bridge and the interfaces attached to it.
func RemoveLinks(bridge string) error {
	names, err := Links(bridge)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		link, err := netlink.LinkByName(name)
		if err != nil {
			continue // went away with its peer
		}
		if err := netlink.LinkDel(link); err != nil && linkExists(name) {
			errs = append(errs, fmt.Errorf("remove interface %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func linkExists(name string) bool {
	_, err := netlink.LinkByName(name)
	var missing netlink.LinkNotFoundError
	return !errors.As(err, &missing)
}

// FilterTables returns the packet filter tables of the machine as "family
// name"; none where the machine has no nft.
func FilterTables(ctx context.Context) ([]string, error) {
	if _, err := exec.LookPath("nft"); errors.Is(err, exec.ErrNotFound) {
		return nil, nil
	}
	out, err := exec.CommandContext(ctx, "nft", "list", "tables").Output()
	if err != nil {
		var failed *exec.ExitError
		if errors.As(err, &failed) {
			err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(failed.Stderr))
		}
		return nil, fmt.Errorf("list packet filter tables: %w", err)
	}
	var tables []string
	for line := range strings.Lines(string(out)) {
		if table, ok := strings.CutPrefix(strings.TrimSpace(line), "table "); ok {
			tables = append(tables, table)
		}
	}
	return tables, nil
}

// ownTables are the tables that kube-proxy, the CNI plugins, and the iptables
// commands that kubelet and kube-proxy may call, create.
var ownTables = []string{
	"ip kube-proxy", "ip6 kube-proxy",
	"inet cni_plugins_masquerade", "ip cni_hostport", "ip6 cni_hostport",
	"ip nat", "ip filter", "ip mangle", "ip raw",
	"ip6 nat", "ip6 filter", "ip6 mangle", "ip6 raw",
}

// AddedFilterTables returns the tables of the lab's cluster that are not among
// those that existed before.
func AddedFilterTables(ctx context.Context, before []string) ([]string, error) {
	tables, err := FilterTables(ctx)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(tables, func(t string) bool {
		return slices.Contains(before, t) || !slices.Contains(ownTables, t)
	}), nil
}

// RemoveFilterTables removes what AddedFilterTables returns. A table that goes
// in another way meanwhile is gone, too.
func RemoveFilterTables(ctx context.Context, before []string) error {
	tables, err := AddedFilterTables(ctx, before)
	if err != nil || len(tables) == 0 {
		return err
	}
	failed := map[string]error{}
	for _, t := range tables {
		family, name, _ := strings.Cut(t, " ")
		if out, err := exec.CommandContext(ctx, "nft", "delete", "table", family, name).CombinedOutput(); err != nil {
			failed[t] = fmt.Errorf("remove packet filter table %s: %w: %s", t, err, bytes.TrimSpace(out))
		}
	}
	if len(failed) == 0 {
		return nil
	}
	left, err := AddedFilterTables(ctx, before)
	errs := []error{err}
	for _, t := range tables {
		if err != nil || slices.Contains(left, t) {
			errs = append(errs, failed[t])
		}
	}
	return errors.Join(errs...)
}
