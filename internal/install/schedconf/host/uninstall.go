package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// UninstallOptions change what Uninstall does.
type UninstallOptions struct {
	// Stay, when set, runs under the lock after all is done: while it does, no
	// watch on this node can wire the scheduler again, and none is minded.
	Stay func(context.Context, Result) error
	// WatchEnds is how long Uninstall waits for a watch on this node to end. Helm may be
	// done before the watch's pod is.
	WatchEnds time.Duration
}

// Uninstall makes kube-scheduler what it was: the original manifest byte for
// byte where nothing else was edited since, else the present one without what was
// put in. The files of this package go once kube-scheduler runs without them. On
// a node where nothing is wired it only removes files that were left.
//
// While another process is in Watching for longer than WatchEnds, it returns
// ErrWatched, but with Stay.
func (h *Host) Uninstall(ctx context.Context, o UninstallOptions) (r Result, err error) {
	unlock, err := h.lock(ctx)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if o.Stay == nil {
		if err := h.waitUnwatched(ctx, o.WatchEnds); err != nil {
			return r, err
		}
	}
	j, err := h.files.loadJournal()
	if err != nil {
		return r, err
	}
	for range rounds {
		if r, err = h.unwire(ctx, j); !errors.Is(err, errMoved) {
			break
		}
	}
	if errors.Is(err, errMoved) {
		err = fmt.Errorf("%w, %d times in a row, while it was being replaced: %s", errMoved, rounds, h.files.paths.Manifest)
	}
	if err == nil && o.Stay != nil {
		err = o.Stay(ctx, r)
	}
	return r, err
}

// unwire does one round. It returns errMoved when somebody else wrote the
// manifest meanwhile.
func (h *Host) unwire(ctx context.Context, j *journal) (r Result, err error) {
	m, missing := h.files.readManifest()
	if missing == nil {
		// GCUShare's wiring has no such annotation; it is not ours to take out.
		if want, err := WantOf(m.content); err == nil && want.Hash != "" {
			if err := h.files.adopt(j); err != nil {
				return r, err
			}
		} else if err == nil && j.fresh {
			return r, h.files.removeTemporary(j)
		}
	}
	backup, original, err := h.files.readBackup(j)
	if err != nil {
		return r, err
	}
	if err = missing; errors.Is(err, ErrNoManifest) {
		if original != nil {
			return r, fmt.Errorf("%w. Its original is kept in %s: restore it, or remove it", err, h.files.paths.Backup)
		}
		return r, h.files.removeAll(j, false)
	}
	if err != nil {
		return r, err
	}
	if p := j.Pending; p != nil && h.files.belongsBefore(p, m) {
		// The files belong to the manifest again, before it is looked at.
		if err := h.files.restoreFiles(p); err != nil {
			return r, err
		}
	}
	change, unused, err := schedconf.Unwire(h.files.input(m.content), original)
	if err != nil {
		return r, err
	}
	r.Notes = change.Notes
	attributes := m.attributes
	if original != nil && bytes.Equal(change.Manifest, original) {
		attributes = backup
	}
	for _, file := range change.Files {
		if err := h.files.put(file.Path, file.Content, attributesOf(file)); err != nil {
			return r, fmt.Errorf("write the scheduler's configuration: %w", err)
		}
	}
	if r.Changed = !bytes.Equal(change.Manifest, m.content); r.Changed {
		if err := h.files.swap(m, change.Manifest, attributes); err != nil {
			return r, err
		}
		klog.FromContext(ctx).Info("Installed the manifest of kube-scheduler without Divvy; waiting until it is healthy",
			"manifest", h.files.paths.Manifest)
	}
	// A configuration that somebody edited stays in use.
	rest := *j
	rest.Files = slices.DeleteFunc(slices.Clone(j.Files), func(path string) bool { return !slices.Contains(unused, path) })
	left, err := h.files.leftovers(&rest)
	if err != nil {
		return r, err
	}
	if !r.Changed && len(left) == 0 {
		return r, nil
	}
	// What a running scheduler has mounted must not go away under it.
	if err := h.await(ctx, change.Manifest); err != nil {
		return r, fmt.Errorf("kube-scheduler has its manifest without Divvy; Divvy's files are kept until it is healthy: %w", err)
	}
	return r, h.files.removeAll(&rest, original != nil)
}
