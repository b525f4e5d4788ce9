package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// Names of files in Config.Dir; the first is that of the GCUShare user guide.
const (
	// BackupFile is the manifest as it was.
	BackupFile = "kube-scheduler.back.yaml"
	// StagingFile is the manifest to come, until it is in place. The guide's name,
	// kube-scheduler.yaml, is what an administrator gives the manifest who moves it
	// out of kubelet's folder to stop the scheduler: a file of that name is not
	// touched.
	StagingFile = ".kube-scheduler.yaml" + next
	// JournalFile is there from the first change to the last.
	JournalFile = "divvy-schedconf.json"
)

// DefaultDir and DefaultManifest are where kubeadm has them.
const (
	DefaultDir      = "/etc/kubernetes"
	DefaultManifest = DefaultDir + "/manifests/kube-scheduler.yaml"
)

const (
	// previous and fresh end the names of files that are there during a change
	// alone. These begin with a dot: kubelet does not take them for pods.
	previous = ".divvy-previous"
	fresh    = ".divvy-new"
	next     = ".divvy-next"
	// rounds is how often a change is worked out again when somebody else
	// writes the manifest meanwhile.
	rounds = 5
	// lockPoll is how often a lock is tried.
	lockPoll = 200 * time.Millisecond
)

// ErrNoManifest says that kubelet of this node runs no kube-scheduler from a
// file.
var ErrNoManifest = errors.New("no kube-scheduler on this node")

// ErrWatched says that a watch on this node would wire the scheduler again.
var ErrWatched = errors.New("divvy-schedconf watches this node and would configure kube-scheduler again; remove its DaemonSet first " +
	"(helm uninstall, or scheduler.mode=none)")

// Config says what a Host works on.
type Config struct {
	// Manifest is the static pod's file, Dir the folder for all other files;
	// "" for kubeadm's.
	Manifest, Dir string
	// Version of kube-scheduler where the image's tag does not tell; "" for the
	// tag's.
	Version string
	// Visible are the folders of the host that this process sees, besides Dir
	// and that of Manifest; nil when it sees all.
	Visible []string
	// Scheduler tells how kube-scheduler is.
	Scheduler Scheduler
	// Turn is nil where no other node is minded.
	Turn Turn
	// FS is nil for the machine's.
	FS FS
	// Now is nil for the machine's clock.
	Now func() time.Time
}

// Scheduler is the kube-scheduler of the node.
type Scheduler interface {
	// Check returns an error when it cannot be told how the scheduler is, say
	// because the API server is away. How it is does not matter.
	Check(ctx context.Context, want Want) error
	// Await returns nil once the scheduler runs as it is wanted and has been
	// well for some seconds, an *UnhealthyError when it is not in time, and
	// another error when that could not be found out.
	Await(ctx context.Context, want Want) error
}

// paths are the absolute names of files.
type paths struct {
	Manifest, Dir                           string
	Backup, Staging, Journal, SavedManifest string
}

// Host is a control-plane node. Its methods are safe for concurrent use; those
// that change something wait for each other, also in other processes.
type Host struct {
	config Config
	fs     FS
	now    func() time.Time
	paths  paths
}

// New returns the host. Nothing is read yet.
func New(c Config) (*Host, error) {
	if c.Dir == "" {
		c.Dir = DefaultDir
	}
	if c.Manifest == "" {
		c.Manifest = DefaultManifest
	}
	if !filepath.IsAbs(c.Dir) || !filepath.IsAbs(c.Manifest) {
		return nil, fmt.Errorf("%s and %s: must be absolute paths", c.Dir, c.Manifest)
	}
	c.Dir, c.Manifest = filepath.Clean(c.Dir), filepath.Clean(c.Manifest)
	if filepath.Dir(c.Manifest) == c.Dir {
		return nil, fmt.Errorf("%s: the manifest is in %s, which must not contain other files, because kubelet treats them as pods; use "+
			"another folder for Divvy's files", c.Manifest, c.Dir)
	}
	h := &Host{config: c, fs: c.FS, now: c.Now}
	if h.fs == nil {
		h.fs = Disk{}
	}
	if h.now == nil {
		h.now = time.Now
	}
	in := func(name string) string { return filepath.Join(c.Dir, name) }
	h.paths = paths{
		Manifest: c.Manifest, Dir: c.Dir,
		Backup: in(BackupFile), Staging: in(StagingFile), Journal: in(JournalFile),
		SavedManifest: in("." + filepath.Base(c.Manifest) + previous),
	}
	return h, nil
}

// ManifestPath is the static pod's file.
func (h *Host) ManifestPath() string { return h.paths.Manifest }

// Dir is the folder for all other files.
func (h *Host) Dir() string { return h.paths.Dir }

// manifest is the static pod's file at one moment.
type manifest struct {
	content []byte
	// target is the file behind links: that one is replaced, and links stay.
	target     string
	attributes Attributes
}

func (h *Host) readManifest() (manifest, error) {
	m, err := h.tryManifest()
	if errors.Is(err, fs.ErrNotExist) {
		return m, fmt.Errorf("%w: %s does not exist. kubelet on this node does not run kube-scheduler from a file of that name; "+
			"set the file name, or use scheduler.mode=dedicated if the control plane is managed by your provider", ErrNoManifest,
			h.paths.Manifest)
	}
	if err != nil {
		return m, fmt.Errorf("read the manifest of kube-scheduler: %w", err)
	}
	if len(bytes.TrimSpace(m.content)) == 0 {
		return m, fmt.Errorf("the manifest of kube-scheduler, %s, is empty", h.paths.Manifest)
	}
	return m, nil
}

func (h *Host) tryManifest() (m manifest, err error) {
	if m.target, err = h.fs.Resolve(h.paths.Manifest); err != nil {
		return m, err
	}
	if !h.visible(m.target) {
		return m, fmt.Errorf("%s is a link to %s: %w", h.paths.Manifest, m.target, errInvisible)
	}
	if m.attributes, err = h.fs.Stat(m.target); err != nil {
		return m, err
	}
	m.content, err = h.fs.ReadFile(m.target)
	return m, err
}

var errInvisible = errors.New("that folder of the host is not mounted; add it to schedconf.hostPaths of the chart (flag --host-path)")

func (h *Host) visible(path string) bool {
	if h.config.Visible == nil {
		return true
	}
	for _, dir := range append([]string{h.paths.Dir, filepath.Dir(h.paths.Manifest)}, h.config.Visible...) {
		if path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/") {
			return true
		}
	}
	return false
}

// input is what schedconf decides on.
func (h *Host) input(content []byte) schedconf.Input {
	return schedconf.Input{
		Manifest: content, ManifestPath: h.paths.Manifest, Version: h.config.Version, ConfigDir: h.paths.Dir,
		ReadFile: func(path string) ([]byte, error) {
			data, err := h.fs.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) && !h.visible(path) {
				return nil, fmt.Errorf("%s: %w", path, errInvisible)
			}
			return data, err
		},
	}
}

// own are the attributes of a file of this process.
func (h *Host) own(mode fs.FileMode) Attributes {
	return Attributes{Mode: mode.Perm(), UID: os.Geteuid(), GID: os.Getegid()}
}

// attributes are those that a configuration is to have: it belongs to who
// kube-scheduler runs as, where that is not root.
func (h *Host) attributes(file schedconf.File) Attributes {
	a := h.own(file.Mode)
	if file.UID != 0 {
		a.UID = file.UID
	}
	if file.GID != 0 {
		a.GID = file.GID
	}
	return a
}

// put writes a file so that its old or its new content is there, never a part.
func (h *Host) put(path string, data []byte, a Attributes) error {
	temporary := temporary(path)
	err := h.fs.Write(temporary, data, a)
	if err == nil {
		err = h.fs.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(explain(err), h.fs.Remove(temporary))
	}
	return h.fs.Sync(filepath.Dir(path))
}

// temporary is where the next content of a file is written: beside it, hidden.
func temporary(path string) string {
	return filepath.Join(filepath.Dir(path), "."+strings.TrimPrefix(filepath.Base(path), ".")+fresh)
}

// IsTemporary reports whether a file is one of those that are there during a change
// of this package alone.
func IsTemporary(path string) bool {
	return slices.Contains([]string{previous, fresh, next}, filepath.Ext(path))
}

// move puts a complete file in the place of another.
func (h *Host) move(from, to string) error {
	err := h.fs.Rename(from, to)
	if errors.Is(err, syscall.EXDEV) {
		// Another file system: it is written there under a hidden name first.
		return h.carry(from, to)
	}
	if err != nil {
		return explain(err)
	}
	return errors.Join(h.fs.Sync(filepath.Dir(to)), h.fs.Sync(filepath.Dir(from)))
}

func (h *Host) carry(from, to string) error {
	data, err := h.fs.ReadFile(from)
	if err != nil {
		return err
	}
	a, err := h.fs.Stat(from)
	if err != nil {
		return err
	}
	if err := h.put(to, data, a); err != nil {
		return err
	}
	return errors.Join(h.fs.Remove(from), h.fs.Sync(filepath.Dir(from)))
}

// explain adds to errors of the system what an administrator can do.
func explain(err error) error {
	switch {
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("%w; mount it writable during this change", err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("%w; free some space there", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w; run this command as the owner of the file, usually root", err)
	}
	return err
}

// lock waits until no other schedconf is at work on the node.
func (h *Host) lock(ctx context.Context) (func() error, error) {
	unlock, err := h.waitLock(ctx, h.paths.Dir, "Another schedconf is running on this node; waiting for it")
	if err != nil && !errors.Is(err, ErrLocked) {
		return nil, fmt.Errorf("lock %s: %w", h.paths.Dir, err)
	}
	return unlock, err
}

// waitLock locks a folder as soon as nobody else has it locked. When the context ends
// before, the error wraps ErrLocked and that of the context.
func (h *Host) waitLock(ctx context.Context, dir, waiting string) (func() error, error) {
	for told := false; ; {
		unlock, err := h.fs.Lock(dir, false)
		if !errors.Is(err, ErrLocked) {
			return unlock, err
		}
		if !told {
			klog.FromContext(ctx).Info(waiting)
			told = true
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", ErrLocked, ctx.Err())
		case <-time.After(lockPoll):
		}
	}
}

// Watching tells other processes that this one wires the scheduler again when
// somebody changes it, until unlock is called. Uninstall minds it.
func (h *Host) Watching() (unlock func() error, err error) {
	return h.fs.Lock(filepath.Dir(h.paths.Manifest), true)
}

// waitUnwatched returns ErrWatched when another process is in Watching, and still is
// after this time.
func (h *Host) waitUnwatched(ctx context.Context, atMost time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, atMost, ErrWatched)
	defer cancel()
	unlock, err := h.waitLock(ctx, filepath.Dir(h.paths.Manifest),
		"A watch on this node would configure kube-scheduler again; waiting for it to exit")
	switch {
	case err == nil:
		return unlock()
	case errors.Is(err, fs.ErrNotExist):
		return nil // the manifest is missed with a better sentence
	case errors.Is(err, ErrLocked) && errors.Is(context.Cause(ctx), ErrWatched):
		return ErrWatched
	case errors.Is(err, ErrLocked):
		return fmt.Errorf("%w: %w", ErrWatched, context.Cause(ctx))
	}
	return err
}
