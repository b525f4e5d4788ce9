package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/hardware"
	"github.com/divvy-gpu/divvy/lab/internal/host"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/proc"
)

// kubepods is the control group below which kubelet puts all pods.
const kubepods = "kubepods"

// Down takes the cluster and all that it left away, whatever state it is in,
// and checks that nothing remains. What runs in pods gets no time to end: it is
// going to lose its data anyway.
func Down(ctx context.Context, out io.Writer) error {
	record, err := host.LoadRecord(recordPath)
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintln(out, "The lab is not up: there is no record of it.")
		return removeLock()
	}
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "Taking the lab down.")
	killed, err := killAll(ctx, record)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "  ended %d processes\n", killed)

	folders := append(slices.Clone(record.Made), record.Borrowed...)
	if err := host.UnmountBelow(folders...); err != nil {
		return err
	}
	// Whatever is still mounted may lead to files that are not the lab's.
	if left, err := host.MountsBelow(folders...); err != nil || len(left) > 0 {
		return errors.Join(err, fmt.Errorf("these mounts could not be removed, so no files were: %s", strings.Join(left, ", ")))
	}
	errs := []error{
		host.RemoveLinks(layout.BridgeName),
		host.RemoveFilterTables(ctx, record.FilterTables),
		host.RemoveCgroups(ctx, kubepods),
		hardware.Default.Remove(),
		record.RestoreSysctls(),
	}
	if record.RootMadeShared {
		errs = append(errs, host.UnshareRoot())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("the lab is down, but not everything could be taken away (run `lab down` again): %w", err)
	}
	// The record goes last: until then a second Down knows what to do.
	made := record.Made
	record.Made = slices.DeleteFunc(slices.Clone(made), func(p string) bool { return p == layout.StateDir })
	if err := errors.Join(record.Release(), removeAllBut(layout.StateDir, recordPath)); err != nil {
		return fmt.Errorf("remove the lab's files: %w", err)
	}
	remaining, checked := remains(ctx, record)
	if len(remaining) > 0 {
		return fmt.Errorf("the lab is down, but these are left: %s", strings.Join(remaining, "; "))
	}
	if err := os.Remove(recordPath); err != nil {
		return fmt.Errorf("remove the lab's record: %w", err)
	}
	if slices.Contains(made, layout.StateDir) {
		if err := os.Remove(layout.StateDir); err != nil {
			return fmt.Errorf("remove the lab's folder: %w", err)
		}
	}
	if err := removeLock(); err != nil {
		return err
	}
	fmt.Fprintf(out, "The lab is down. Checked, and nothing is left of: %s.\n", strings.Join(checked, ", "))
	return nil
}

// removeLock removes the lock file, whose lock this program holds.
func removeLock() error {
	if err := os.Remove(lockPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the lab's lock: %w", err)
	}
	return nil
}

// killAll ends every process of the lab and returns how many there were. It
// looks again until there is none, because a dying process may have started
// another.
func killAll(ctx context.Context, record *host.Record) (int, error) {
	killed := 0
	for deadline := time.Now().Add(time.Minute); ; {
		processes := processesOf(record)
		if len(processes) == 0 {
			return killed, nil
		}
		if err := ctx.Err(); err != nil {
			return killed, err
		}
		if time.Now().After(deadline) {
			return killed, fmt.Errorf("%d processes do not end, among them %v", len(processes), processes[0].CommandLine())
		}
		for _, id := range processes {
			if err := id.Signal(syscall.SIGKILL); err != nil {
				return killed, err
			}
		}
		for _, id := range processes {
			if err := id.End(ctx, syscall.SIGKILL, 0); err == nil {
				killed++
			}
		}
	}
}

// processesOf returns the living processes of the lab: those that run one of
// its programs, and those in pods. A person's kubectl is not among them.
func processesOf(record *host.Record) []proc.ID {
	var found []proc.ID
	for _, id := range proc.All() {
		exe, err := id.Executable()
		if err != nil {
			continue // a kernel thread
		}
		if isDaemon(exe, record.BinDirs) || inKubepods(id) {
			found = append(found, id)
		}
	}
	return found
}

func isDaemon(exe string, binDirs []string) bool {
	name := filepath.Base(exe)
	if name == "kubectl" || name == "helm" || !slices.Contains(binDirs, filepath.Dir(exe)) {
		return false
	}
	return slices.ContainsFunc(build.Components(), func(c build.Component) bool { return c.Name == name })
}

func inKubepods(id proc.ID) bool {
	return slices.ContainsFunc(id.Cgroups(), func(path string) bool {
		return strings.HasPrefix(path, "/"+kubepods+"/")
	})
}

// remains looks for traces. It returns those that it found and the kinds that
// it looked for.
func remains(ctx context.Context, record *host.Record) (found, checked []string) {
	look := func(kind string, list []string, err error) {
		checked = append(checked, kind)
		if err != nil {
			found = append(found, fmt.Sprintf("%s (cannot tell: %v)", kind, err))
		}
		for _, item := range list {
			found = append(found, kind+" "+item)
		}
	}
	var processes []string
	for _, id := range processesOf(record) {
		processes = append(processes, fmt.Sprint(id.PID))
	}
	look("processes", processes, nil)
	mounts, err := host.MountsBelow(append(slices.Clone(record.Made), layout.StateDir)...)
	look("mounts", mounts, err)
	cgroups, err := host.Cgroups(kubepods)
	look("control groups", cgroups, err)
	links, err := host.Links(layout.BridgeName)
	look("network interfaces", links, err)
	tables, err := host.AddedFilterTables(ctx, record.FilterTables)
	look("packet filter tables", tables, err)
	look("kernel settings", record.ChangedSysctls(), nil)
	devices, err := hardware.Default.Installed()
	look("simulated hardware", devices, err)
	look("files", record.Remaining(), nil)
	return found, checked
}

// removeAllBut empties a folder but for one file directly in it.
func removeAllBut(dir, keep string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, entry := range entries {
		if path := filepath.Join(dir, entry.Name()); path != keep {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	return errors.Join(errs...)
}
