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

// downAttempts is how often Down tries, and downTime the time after which it
// begins no other attempt. The kernel may still let go of something, and what a
// daemon started a moment before it was killed may still put something there.
const (
	downAttempts = 5
	downTime     = 2 * time.Minute
)

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
	d := &teardown{record: record, out: out, sessions: map[int]bool{}}
	return attempt(ctx, out, downAttempts, time.Second, downTime, d.run)
}

// attempt calls run until it succeeds, a few times, with a pause in between, and
// tells why it does so again. It returns the last error.
func attempt(ctx context.Context, out io.Writer, times int, pause, limit time.Duration, run func(context.Context) error) error {
	begun := time.Now()
	for i := 1; ; i++ {
		err := run(ctx)
		if err == nil || i == times || ctx.Err() != nil || time.Since(begun) > limit {
			return err
		}
		fmt.Fprintf(out, "  attempt %d of %d: %v\n", i, times, err)
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// teardown is what attempts to take a lab down have in common.
type teardown struct {
	record *host.Record
	out    io.Writer
	// sessions are those of daemons that were seen. What daemons started is in
	// them also when it is none of the lab's programs: nft, mount.
	sessions map[int]bool
}

// run is one attempt. It does again, without harm, what an earlier one did.
func (d *teardown) run(ctx context.Context) error {
	killed, err := d.killAll(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "  ended %d processes\n", killed)

	folders := slices.Concat(d.record.Made, d.record.Borrowed)
	if err := host.UnmountBelow(folders...); err != nil {
		return err
	}
	// Whatever is still mounted may lead to files that are not the lab's.
	left, err := host.MountsBelow(folders...)
	if err != nil {
		return err
	}
	if len(left) > 0 {
		return fmt.Errorf("these mounts could not be removed, so no files were: %s", strings.Join(left, ", "))
	}
	errs := []error{
		host.RemoveLinks(layout.BridgeName),
		host.RemoveFilterTables(ctx, d.record.FilterTables),
		host.RemoveCgroups(ctx, kubepods),
		hardware.Default.Remove(),
		d.record.RestoreSysctls(),
	}
	if d.record.RootMadeShared {
		errs = append(errs, host.UnshareRoot())
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("the lab is down, but not everything could be taken away (run `lab down` again): %w", err)
	}
	// The record goes last: until then a second Down knows what to do.
	others := *d.record
	others.Made = slices.DeleteFunc(slices.Clone(d.record.Made), func(p string) bool { return p == layout.StateDir })
	if err := errors.Join(others.Release(), removeAllBut(layout.StateDir, recordPath)); err != nil {
		return fmt.Errorf("remove the lab's files: %w", err)
	}
	remaining, checked := d.remains(ctx, &others)
	if len(remaining) > 0 {
		return fmt.Errorf("the lab is down, but these are left: %s", strings.Join(remaining, "; "))
	}
	if err := os.Remove(recordPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the lab's record: %w", err)
	}
	if slices.Contains(d.record.Made, layout.StateDir) {
		if err := os.Remove(layout.StateDir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the lab's folder: %w", err)
		}
	}
	if err := removeLock(); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "The lab is down. Checked, and nothing is left of: %s.\n", strings.Join(checked, ", "))
	return nil
}

// removeLock removes the lock file, whose lock this program holds.
func removeLock() error {
	if err := os.Remove(lockPath); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the lab's lock: %w", err)
	}
	return nil
}

// killTime is how long all processes of the lab together may take to end.
const killTime = time.Minute

// killAll ends every process of the lab and returns how many there were. It
// looks again until there is none, because a dying process may have started
// another.
func (d *teardown) killAll(ctx context.Context) (int, error) {
	killed := map[proc.ID]bool{}
	for deadline := time.Now().Add(killTime); ; {
		processes := d.processes()
		if len(processes) == 0 {
			return len(killed), nil
		}
		if err := ctx.Err(); err != nil {
			return len(killed), err
		}
		if time.Now().After(deadline) {
			return len(killed), fmt.Errorf("%d processes do not end, among them %v", len(processes), processes[0].CommandLine())
		}
		for _, id := range processes {
			if err := id.Signal(syscall.SIGKILL); err != nil {
				return len(killed), err
			}
		}
		for _, id := range processes {
			if err := id.End(ctx, syscall.SIGKILL, 0); err == nil {
				killed[id] = true
			}
		}
	}
}

// processes returns the living processes of the lab: those that run one of its
// programs, those that its daemons started, and those in pods. A person's
// kubectl is not among them.
func (d *teardown) processes() []proc.ID {
	var found, others []proc.ID
	for _, id := range proc.All() {
		exe, err := id.Executable()
		switch {
		case err != nil:
			// A kernel thread.
		case isDaemon(exe, d.record.BinDirs):
			found = append(found, id)
			// Daemons have a session of their own; what a person runs by hand is
			// in that of the person.
			if id.Session() == id.PID {
				d.sessions[id.PID] = true
			}
		case inKubepods(id):
			found = append(found, id)
		default:
			others = append(others, id)
		}
	}
	for _, id := range others {
		if d.sessions[id.Session()] {
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

// remains looks for traces, of a record's files among others. It returns those
// that it found and the kinds that it looked for.
func (d *teardown) remains(ctx context.Context, record *host.Record) (found, checked []string) {
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
	for _, id := range d.processes() {
		processes = append(processes, fmt.Sprintf("%d %v", id.PID, id.CommandLine()))
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
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
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
