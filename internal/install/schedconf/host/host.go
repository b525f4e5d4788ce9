package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"k8s.io/klog/v2"
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
	rounds   = 5
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

// Host is a control-plane node. Its methods are safe for concurrent use; those
// that change something wait for each other, also in other processes.
type Host struct {
	config Config
	now    func() time.Time
	files  *nodeFiles
}

// New returns the host. Nothing is read yet.
func New(c Config) (*Host, error) {
	c.Dir, c.Manifest = cmp.Or(c.Dir, DefaultDir), cmp.Or(c.Manifest, DefaultManifest)
	if !filepath.IsAbs(c.Dir) || !filepath.IsAbs(c.Manifest) {
		return nil, fmt.Errorf("%s and %s: must be absolute paths", c.Dir, c.Manifest)
	}
	c.Dir, c.Manifest = filepath.Clean(c.Dir), filepath.Clean(c.Manifest)
	if filepath.Dir(c.Manifest) == c.Dir {
		return nil, fmt.Errorf("%s: the manifest is in %s, which must not contain other files, because kubelet treats them as pods; use "+
			"another folder for Divvy's files", c.Manifest, c.Dir)
	}
	h := &Host{config: c, now: c.Now, files: newNodeFiles(c)}
	if h.now == nil {
		h.now = time.Now
	}
	return h, nil
}

// ManifestPath is the static pod's file.
func (h *Host) ManifestPath() string { return h.files.paths.Manifest }

// Dir is the folder for all other files.
func (h *Host) Dir() string { return h.files.paths.Dir }

// lock waits until no other schedconf is at work on the node.
func (h *Host) lock(ctx context.Context) (func() error, error) {
	unlock, err := h.waitLock(ctx, h.files.paths.Dir, "Another schedconf is running on this node; waiting for it")
	if err != nil && !errors.Is(err, ErrLocked) {
		return nil, fmt.Errorf("lock %s: %w", h.files.paths.Dir, err)
	}
	return unlock, err
}

// waitLock locks a folder as soon as nobody else has it locked. When the context ends
// before, the error wraps ErrLocked and that of the context.
func (h *Host) waitLock(ctx context.Context, dir, waiting string) (func() error, error) {
	for told := false; ; {
		unlock, err := h.files.fs.Lock(dir, false)
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
	return h.files.fs.Lock(filepath.Dir(h.files.paths.Manifest), true)
}

// waitUnwatched returns ErrWatched when another process is in Watching, and still is
// after this time.
func (h *Host) waitUnwatched(ctx context.Context, atMost time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, atMost, ErrWatched)
	defer cancel()
	unlock, err := h.waitLock(ctx, filepath.Dir(h.files.paths.Manifest),
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
