// Package cleanup removes what divvy-node left on a host.
package cleanup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/node/handover"
	"github.com/divvy-gpu/divvy/internal/node/limits/install"
	nodestate "github.com/divvy-gpu/divvy/internal/node/state"
)

// Leftovers say where divvy-node leaves something on a host. Files are known by
// their names, never by their folder alone: a folder that somebody else uses as
// well, or that was named by mistake, keeps all that is not Divvy's.
type Leftovers struct {
	// Host is where the host's root folder is seen. The other paths are those on
	// the host; symbolic links in them are followed as on the host, those in the
	// folders are not.
	Host string
	// KubeletDir, StateDir and CDIDir are as in the configuration of the daemon;
	// "" for what is to be left alone.
	KubeletDir, StateDir, CDIDir string
	// HookDir is the folder that the hook of containers was installed in.
	HookDir string
	// Resources are those whose sockets are the daemon's, besides those of which
	// there is a state file. PoolSocket is that of the pool's daemon, "" for none.
	Resources  []string
	PoolSocket string
	// Shared are folders that kubelet made because pods of the daemon mount them,
	// inner ones first.
	Shared []string
	// LogDirs are the folders of log files, which are removed with RemoveLogs.
	LogDirs    []string
	RemoveLogs bool
	// born says when a folder was made, the zero time where that is not known;
	// nil for what the file system says.
	born func(path string, folder *os.File) time.Time
}

// The names of Divvy's files.
var (
	// stateFile is a file in the state folder; one that could not be read was set
	// aside, and one that was being written when the power failed ends with ".new",
	// or with a number where an earlier release wrote it.
	stateFile = regexp.MustCompile(`^(((units|slots)-.+|quarantine|claims)\.json(\.damaged|\.new|\.[0-9]+)?|divvy-node\.(lock|sock))$`)
	// logFile is a log file, or one that was rotated.
	logFile = regexp.MustCompile(`^(gcushare-device-plugin|gcushare-scheduler-extender|gcushare-config-manager)` +
		`(-\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}\.\d{3})?\.log(\.gz)?$`)
)

// Default returns the folders of the chart's defaults.
func Default() Leftovers {
	return Leftovers{
		Host: "/", KubeletDir: "/var/lib/kubelet", StateDir: "/var/lib/divvy", CDIDir: "/var/run/cdi",
		HookDir: install.DefaultDir,
		LogDirs: []string{"/var/log/topscloud/gcushare"}, PoolSocket: "bitfusion.io",
	}
}

// maxSpec is more than any CDI specification of Divvy's has, in bytes.
const maxSpec = 4 << 20

// Clean removes what there is and prints it. When ctx ends while a daemon still
// runs, nothing was removed. It may be called again after an error.
func (l Leftovers) Clean(ctx context.Context, out io.Writer) error {
	state, err := l.open(l.StateDir)
	if err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	defer state.close()
	unlock, err := state.claim(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	age := l.age(state)
	// The state folder goes last: a run after one that was interrupted finds in it which
	// resources there were, and how old it is.
	for _, step := range []func() error{
		func() error { return l.removeSockets(state, out) },
		func() error { return l.removeDrivers(out) },
		func() error { return l.removeSpecs(age, out) },
		func() error { return l.removeHooks(out) },
		func() error { return l.removeShared(age, out) },
		func() error { return l.removeLogs(out) },
		func() error { return removeNamed(state, out, stateFile, "it is no file of divvy-node") },
		func() error { return l.removeFolder(l.StateDir, time.Time{}, out) },
	} {
		if err := step(); err != nil {
			return err // the rest needs what failed
		}
	}
	return nil
}

// removeSockets removes the sockets of the daemon that nobody serves. One that is
// served is another plugin's that took the resource over: vendors' plugins use
// the same names.
func (l Leftovers) removeSockets(state folder, out io.Writer) error {
	if l.KubeletDir == "" {
		return nil
	}
	var resources []accel.Resource
	for _, r := range l.Resources {
		resources = append(resources, accel.Resource(r))
	}
	if state.there() {
		stored, err := nodestate.Stored(state.root.Name())
		if err != nil {
			return err
		}
		resources = append(resources, stored...)
	}
	ours := map[string]bool{}
	for _, r := range resources {
		ours[strings.TrimSuffix(deviceplugin.SocketNames(r)[0], ".sock")] = true
		ours[strings.ReplaceAll(string(r), "/", "_")] = true
	}
	if l.PoolSocket != "" {
		ours[strings.TrimSuffix(l.PoolSocket, ".sock")] = true
	}
	sockets, err := l.open(filepath.Join(l.KubeletDir, "device-plugins"))
	if err != nil {
		return fmt.Errorf("kubelet's folder: %w", err)
	}
	defer sockets.close()
	return sockets.each(func(e fs.DirEntry) error {
		if e.Type() != fs.ModeSocket || !ours[socketBase(e.Name())] {
			return nil
		}
		served, err := sockets.served(e.Name())
		if err != nil {
			return err
		}
		if served {
			fmt.Fprintf(out, "left %s: a program that is not divvy-node serves it\n", sockets.name(e.Name()))
			return nil
		}
		return sockets.remove(e.Name(), out)
	})
}

// socketBase is the name of a socket without what package deviceplugin adds to it
// when kubelet refuses the name.
func socketBase(name string) string {
	name = strings.TrimSuffix(name, ".sock")
	base, number, found := strings.Cut(name, "~")
	if found && number != "" && strings.Trim(number, "0123456789") == "" {
		return base
	}
	return name
}

// removeDrivers removes the sockets of the DRA drivers, and their folders.
func (l Leftovers) removeDrivers(out io.Writer) error {
	if l.KubeletDir == "" {
		return nil
	}
	for _, vendor := range accel.VendorNames() {
		driver := wire.Driver(vendor)
		for _, socket := range dra.Sockets(vendor) {
			path := filepath.Join(l.KubeletDir, socket)
			f, err := l.open(filepath.Dir(path))
			if err != nil {
				return fmt.Errorf("kubelet's folder: %w", err)
			}
			err = f.each(func(e fs.DirEntry) error {
				if e.Type() != fs.ModeSocket || e.Name() != filepath.Base(path) {
					return nil
				}
				return f.remove(e.Name(), out)
			})
			f.close()
			if err != nil {
				return err
			}
		}
		plugins, err := l.open(filepath.Join(l.KubeletDir, "plugins"))
		if err != nil {
			return fmt.Errorf("kubelet's folder: %w", err)
		}
		if !plugins.there() {
			continue
		}
		gone, err := plugins.removeEmpty(driver)
		plugins.close()
		if err != nil {
			return err
		}
		if gone {
			fmt.Fprintf(out, "removed %s\n", plugins.name(driver))
		}
	}
	return nil
}

// removeSpecs removes the CDI specifications that the daemon wrote.
func (l Leftovers) removeSpecs(age time.Time, out io.Writer) error {
	specs, err := l.open(l.CDIDir)
	if err != nil {
		return fmt.Errorf("folder of CDI specifications: %w", err)
	}
	defer specs.close()
	err = specs.each(func(e fs.DirEntry) error {
		if !strings.HasPrefix(e.Name(), agent.CDIPrefix) || !e.Type().IsRegular() {
			return nil
		}
		content, err := specs.read(e.Name(), maxSpec)
		if err != nil {
			return err
		}
		if !agent.OwnCDISpec(e.Name(), content) {
			fmt.Fprintf(out, "left %s: it has the name of a specification of divvy-node, and another content\n", specs.name(e.Name()))
			return nil
		}
		return specs.remove(e.Name(), out)
	})
	if err != nil || !l.younger(specs, age) {
		return err
	}
	return l.removeFolder(l.CDIDir, age, out)
}

// removeHooks removes the programs that the daemon installed, whose CDI specifications are
// gone.
func (l Leftovers) removeHooks(out io.Writer) error {
	hooks, err := l.open(l.HookDir)
	if err != nil {
		return fmt.Errorf("folder of the hook: %w", err)
	}
	defer hooks.close()
	if err := removeNamed(hooks, out, install.Name, "it is no program of divvy-node"); err != nil || !hooks.there() {
		return err
	}
	return l.removeFolder(l.HookDir, time.Time{}, out)
}

// removeShared removes the folders that are empty and no older than the state
// folder: who made them first cannot be seen otherwise.
func (l Leftovers) removeShared(age time.Time, out io.Writer) error {
	for _, path := range l.Shared {
		f, err := l.open(path)
		if err != nil {
			return err
		}
		young := l.younger(f, age)
		f.close()
		if !young {
			continue
		}
		if err := l.removeFolder(path, age, out); err != nil {
			return err
		}
	}
	return nil
}

// removeLogs removes log files if that is asked for, and folders of log files
// that are empty.
func (l Leftovers) removeLogs(out io.Writer) error {
	for _, path := range l.LogDirs {
		if l.RemoveLogs {
			logs, err := l.open(path)
			if err != nil {
				return fmt.Errorf("folder of log files: %w", err)
			}
			err = removeNamed(logs, out, logFile, "it is no log file of Divvy")
			logs.close()
			if err != nil {
				return err
			}
		}
		if err := l.removeFolder(path, time.Time{}, out); err != nil {
			return err
		}
	}
	return nil
}

// removeNamed removes the files of a folder with a name of ours, and prints which it keeps
// and why.
func removeNamed(f folder, out io.Writer, ours *regexp.Regexp, other string) error {
	return f.each(func(e fs.DirEntry) error {
		switch {
		case !ours.MatchString(e.Name()):
			fmt.Fprintf(out, "left %s: %s\n", f.name(e.Name()), other)
			return nil
		case e.IsDir():
			fmt.Fprintf(out, "left %s: it is a folder\n", f.name(e.Name()))
			return nil
		}
		return f.remove(e.Name(), out)
	})
}

// removeFolder removes a folder if it is empty, and then those above it that are
// empty without it and, unless since is zero, no older than that.
func (l Leftovers) removeFolder(path string, since time.Time, out io.Writer) error {
	for path != "" {
		path = filepath.Clean(path)
		parent, err := l.open(filepath.Dir(path))
		if err != nil {
			return err
		}
		if path == "/" || !parent.there() {
			return nil
		}
		gone, err := parent.removeEmpty(filepath.Base(path))
		parent.close()
		if err != nil || !gone {
			return err
		}
		fmt.Fprintf(out, "removed %s\n", path)
		path = filepath.Dir(path)
		if since.IsZero() {
			continue
		}
		above, err := l.open(path)
		if err != nil {
			return err
		}
		young := l.younger(above, since)
		above.close()
		if !young {
			return nil
		}
	}
	return nil
}

// folder is a folder of the host that is looked into. The zero value is one that
// is not there: it has no files.
type folder struct {
	path string // on the host
	root *os.Root
}

// open opens a folder; one that is not there is no error.
func (l Leftovers) open(path string) (folder, error) {
	if path == "" {
		return folder{}, nil
	}
	// An absolute link on the host means a place on the host.
	full, err := securejoin.SecureJoin(l.Host, path)
	if err != nil {
		return folder{}, err
	}
	root, err := os.OpenRoot(full)
	if errors.Is(err, fs.ErrNotExist) {
		return folder{path: path}, nil
	}
	if err != nil {
		return folder{}, err
	}
	return folder{path: path, root: root}, nil
}

func (f folder) there() bool { return f.root != nil }

func (f folder) close() {
	if f.root != nil {
		_ = f.root.Close() // it was read alone
	}
}

// name is the path of a file on the host.
func (f folder) name(file string) string { return filepath.Join(f.path, file) }

// each calls do with the entries, in order.
func (f folder) each(do func(fs.DirEntry) error) error {
	if !f.there() {
		return nil
	}
	entries, err := fs.ReadDir(f.root.FS(), ".")
	if err != nil {
		return fmt.Errorf("read %s: %w", f.path, err)
	}
	for _, e := range entries {
		if err := do(e); err != nil {
			return err
		}
	}
	return nil
}

// remove removes a file, or a link and not what it points to.
func (f folder) remove(file string, out io.Writer) error {
	if err := f.root.Remove(file); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("remove %s: %w", f.name(file), bare(err))
	}
	fmt.Fprintf(out, "removed %s\n", f.name(file))
	return nil
}

// removeEmpty removes a folder in this one, if it is a folder and empty.
func (f folder) removeEmpty(name string) (gone bool, err error) {
	info, err := f.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
		return false, nil
	}
	if err == nil {
		err = f.root.Remove(name)
	}
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EEXIST), errors.Is(err, syscall.EBUSY), errors.Is(err, fs.ErrNotExist):
		return false, nil // EBUSY: something is mounted there
	}
	return false, fmt.Errorf("remove %s: %w", f.name(name), bare(err))
}

// bare is the error without the path, which is not that on the host.
func bare(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// read reads a file of at most so many bytes.
func (f folder) read(file string, limit int64) ([]byte, error) {
	opened, err := f.root.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", f.name(file), bare(err))
	}
	defer opened.Close() //nolint:errcheck // it was read alone
	content, err := io.ReadAll(io.LimitReader(opened, limit))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", f.name(file), bare(err))
	}
	return content, nil
}

// served reports whether somebody listens on a socket.
func (f folder) served(file string) (bool, error) {
	self, err := f.root.Open(".")
	if err != nil {
		return false, fmt.Errorf("open %s: %w", f.path, bare(err))
	}
	defer self.Close() //nolint:errcheck // nothing was written
	// By its descriptor, because a socket's path may have 107 bytes at most.
	conn, err := net.DialTimeout("unix", fmt.Sprintf("/proc/self/fd/%d/%s", self.Fd(), file), time.Second)
	switch {
	case err == nil:
		return true, conn.Close()
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return false, nil
	}
	return false, fmt.Errorf("see whether %s is served: %w", f.name(file), err)
}

// age is when a folder was made; the zero time when it is not there or that is
// not known.
func (l Leftovers) age(f folder) time.Time {
	if !f.there() {
		return time.Time{}
	}
	self, err := f.root.Open(".")
	if err != nil {
		return time.Time{}
	}
	defer self.Close() //nolint:errcheck // nothing was written
	if l.born != nil {
		return l.born(f.path, self)
	}
	var st unix.Statx_t
	if err := unix.Statx(int(self.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BTIME, &st); err != nil || st.Mask&unix.STATX_BTIME == 0 {
		return time.Time{}
	}
	return time.Unix(st.Btime.Sec, int64(st.Btime.Nsec))
}

// together is how long kubelet may take between the folders of one pod.
const together = time.Minute

// younger reports whether the folder was not there before the time. One whose age
// is not known counts as older.
func (l Leftovers) younger(f folder, than time.Time) bool {
	age := l.age(f)
	return !than.IsZero() && !age.IsZero() && age.After(than.Add(-together))
}

// claim takes the daemon's lock, if there is one. It waits until ctx ends.
func (f folder) claim(ctx context.Context) (release func(), err error) {
	if !f.there() {
		return func() {}, nil
	}
	file, err := f.root.OpenFile(handover.LockName, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", f.name(handover.LockName), bare(err))
	}
	if err := handover.Lock(ctx, file); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", f.name(handover.LockName), err), file.Close())
	}
	return func() { _ = file.Close() }, nil
}
