package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// InstallOptions change what Install does.
type InstallOptions struct {
	// Again tries what was rolled back before, at once.
	Again bool
}

// Result tells what was done.
type Result struct {
	// Changed is true when kube-scheduler was given another manifest.
	Changed bool
	// Notes are schedconf's.
	Notes []string
}

// HeldError says that a change is not tried because it was rolled back before.
type HeldError struct {
	Failure Failure
	// Next is when it is tried again; zero for not before something changes.
	Next time.Time
}

func (e *HeldError) Error() string {
	when := "it is retried when the scheduler's configuration or the chart's values change, or with `divvy-control schedconf install`"
	if !e.Next.IsZero() {
		when = "it is retried at " + e.Next.UTC().Format(time.RFC3339)
	}
	return fmt.Sprintf("kube-scheduler runs without the change that was rolled back at %s; %s. Reason: %s",
		e.Failure.At.UTC().Format(time.RFC3339), when, e.Failure.Reason)
}

// RolledBackError says that a change was made and taken back.
type RolledBackError struct {
	Failure Failure
	// Cause is why, Back is nil when kube-scheduler is well again.
	Cause, Back error
}

func (e *RolledBackError) Error() string {
	if e.Back != nil {
		return fmt.Sprintf("rolled back, but kube-scheduler is not healthy with its previous configuration either: %v. The change was "+
			"rolled back because %s", e.Back, e.Failure.Reason)
	}
	return "rolled back, and kube-scheduler is healthy again with its previous configuration: " + e.Failure.Reason
}

func (e *RolledBackError) Unwrap() []error {
	if e.Back != nil {
		return []error{e.Cause, e.Back}
	}
	return []error{e.Cause}
}

// errMoved says that somebody else wrote the manifest meanwhile.
var errMoved = errors.New("another program writes the manifest")

// Install lets kube-scheduler ask the extender. Where it does already, nothing is
// written and only its health is asked. A change that kube-scheduler is not well
// with is taken back: the error is a *RolledBackError then, and a *HeldError when
// the same is asked again too soon.
//
// When ctx ends while kube-scheduler starts, the change stays; the next Install
// finds out what became of it.
func (h *Host) Install(ctx context.Context, e schedconf.Extender, o InstallOptions) (r Result, err error) {
	unlock, err := h.lock(ctx)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, unlock()) }()

	j, err := h.loadJournal()
	if err != nil {
		return r, err
	}
	finished, err := h.finish(ctx, j)
	if err != nil {
		return r, err
	}
	for range rounds {
		r, err = h.wire(ctx, j, e, o)
		if !errors.Is(err, errMoved) {
			r.Changed = r.Changed || finished
			return r, err
		}
		klog.FromContext(ctx).Info("Another program changed the manifest meanwhile; starting again", "manifest", h.paths.Manifest)
	}
	return r, fmt.Errorf("%w, %d times in a row, while it was being replaced: %s", errMoved, rounds, h.paths.Manifest)
}

// finish ends what an earlier process began. It reports whether it found the
// scheduler well with a change that the process had made.
func (h *Host) finish(ctx context.Context, j *journal) (bool, error) {
	p := j.Pending
	if p == nil {
		return false, h.removeTemporary(j)
	}
	m, err := h.readManifest()
	if err != nil {
		return false, err
	}
	switch now := digest(m.content); {
	case p.Failure != nil:
		klog.FromContext(ctx).Info("Continuing the rollback", "reason", p.Failure.Reason)
		return false, h.rollBack(ctx, j, errors.New(p.Failure.Reason))
	case now == p.After:
		klog.FromContext(ctx).Info("A change was interrupted after the manifest was installed; checking the health of kube-scheduler")
		return true, h.prove(ctx, j, m.content)
	case h.belongsBefore(p, m):
		klog.FromContext(ctx).Info("A change was interrupted before the manifest was installed; reverting it")
		if err := h.restoreFiles(p); err != nil {
			return false, err
		}
	}
	// Otherwise somebody else wrote the manifest: what was saved is out of date.
	return false, h.settle(j)
}

// belongsBefore reports whether a manifest goes with the files from before a
// change: it is the one from before, or somebody edited that one since.
func (h *Host) belongsBefore(p *pending, m manifest) bool {
	if digest(m.content) == p.Before {
		return true
	}
	saved, err := h.fs.ReadFile(h.paths.SavedManifest)
	if err != nil {
		return false
	}
	before, errBefore := WantOf(saved)
	now, errNow := WantOf(m.content)
	return errBefore == nil && errNow == nil && before.Hash == now.Hash
}

// wire does one round. It returns errMoved when somebody else wrote the manifest
// meanwhile.
func (h *Host) wire(ctx context.Context, j *journal, e schedconf.Extender, o InstallOptions) (r Result, err error) {
	m, err := h.readManifest()
	if err != nil {
		return r, err
	}
	change, err := schedconf.Wire(h.input(m.content), e)
	if err != nil {
		return r, err
	}
	r.Notes = change.Notes
	if bytes.Equal(change.Manifest, m.content) && len(change.Files) == 0 {
		if err := h.await(ctx, m.content); err != nil || j.Failure == nil {
			return r, err
		}
		// What was rolled back is not asked for any more.
		j.Failure = nil
		return r, h.saveJournal(j)
	}
	outcome := outcomeOf(change)
	if f := j.Failure; f != nil && f.Outcome == outcome && !o.Again {
		next, again := f.Retry()
		// One of the future was noted by a clock that was wrong.
		if now := h.now(); !again || now.Before(next) && !now.Before(f.At) {
			return r, &HeldError{Failure: *f, Next: next}
		}
	}
	want, err := WantOf(change.Manifest)
	if err != nil {
		return r, fmt.Errorf("%s: %w", h.paths.Manifest, err)
	}
	if err := h.config.Scheduler.Check(ctx, want); err != nil {
		return r, fmt.Errorf("nothing was changed, because the health of kube-scheduler could not be checked: %w", err)
	}
	state, err := schedconf.Inspect(h.input(m.content))
	if err != nil {
		return r, err
	}
	if state.Wired {
		if err := h.adopt(j); err != nil {
			return r, err
		}
	}
	if err := h.take(ctx, outcome); err != nil {
		return r, err
	}
	err = h.prepare(j, m, change, outcome, state)
	if err == nil {
		err = h.replace(j, m, change)
	}
	if err != nil {
		h.done(ctx, nil)
		return r, err
	}
	r.Changed = true
	klog.FromContext(ctx).Info("Installed a new manifest of kube-scheduler; waiting until it is healthy", "manifest", h.paths.Manifest)
	return r, h.prove(ctx, j, change.Manifest)
}

// prepare puts on disk what is needed to undo the change. Nothing that
// kube-scheduler or kubelet reads is touched.
func (h *Host) prepare(j *journal, m manifest, change schedconf.Change, outcome string, now schedconf.State) error {
	old, err := h.obstacle(j, m, change, now)
	if err != nil {
		return err
	}
	backup := !now.Wired // a wired one is no original
	p := &pending{Before: digest(m.content), After: digest(change.Manifest), Outcome: outcome}
	for _, file := range change.Files {
		s := saved{Path: file.Path}
		present, err := h.fs.ReadFile(file.Path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		default:
			a, err := h.fs.Stat(file.Path)
			if err != nil {
				return err
			}
			s.Copy = savedCopy(file.Path)
			if err := h.put(s.Copy, present, a); err != nil {
				return fmt.Errorf("save the current configuration: %w", err)
			}
		}
		p.Saved = append(p.Saved, s)
	}
	if err := h.put(h.paths.SavedManifest, m.content, m.attributes); err != nil {
		return errors.Join(fmt.Errorf("save the current manifest: %w", err), h.removeTemporary(j))
	}
	was := *j
	j.Pending = p
	for _, file := range change.Files {
		if !slices.Contains(j.Files, file.Path) {
			j.Files = append(slices.Clone(j.Files), file.Path)
		}
	}
	if backup {
		j.Backup, j.OldBackup = p.Before, old
	}
	if err := h.saveJournal(j); err != nil {
		*j = was
		return errors.Join(err, h.removeTemporary(j))
	}
	if backup {
		if err := h.put(h.paths.Backup, m.content, m.attributes); err != nil {
			return h.abandon(j, fmt.Errorf("save the original manifest: %w", err))
		}
	}
	return nil
}

// obstacle returns an error when a file is in the way that is somebody else's, and
// else the digest of the backup that the original takes the place of, if any.
func (h *Host) obstacle(j *journal, m manifest, change schedconf.Change, now schedconf.State) (backup string, err error) {
	if !now.Wired {
		if backup, err = h.presentBackup(j, m); err != nil {
			return "", err
		}
	}
	for _, file := range change.Files {
		if slices.Contains(j.Files, file.Path) || file.Path == now.ConfigFile {
			continue
		}
		switch _, err := h.fs.ReadFile(file.Path); {
		case err == nil:
			return "", fmt.Errorf("%s exists but was not written by Divvy; GCUShare's config manager has a file of that name: uninstall "+
				"it first, or move the file away", file.Path)
		case !errors.Is(err, fs.ErrNotExist):
			return "", err
		}
	}
	return backup, nil
}

// presentBackup returns the digest of the backup that the original takes the place
// of, "" when there is none.
func (h *Host) presentBackup(j *journal, m manifest) (string, error) {
	now, err := h.fs.ReadFile(h.paths.Backup)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("read the backup: %w", err)
	// One of ours is there still after kubeadm upgrade has replaced the manifest.
	case !bytes.Equal(now, m.content) && !j.ours(now):
		return "", fmt.Errorf("%s exists, was not created by Divvy, and differs from %s: it may be the original of GCUShare's config "+
			"manager or of an administrator; restore it, or move the file away",
			h.paths.Backup, h.paths.Manifest)
	}
	return digest(now), nil
}

// replace puts the change in place, the manifest last.
func (h *Host) replace(j *journal, m manifest, change schedconf.Change) error {
	for _, file := range change.Files {
		if err := h.put(file.Path, file.Content, h.attributes(file)); err != nil {
			return h.abandon(j, fmt.Errorf("write the scheduler's configuration: %w", err))
		}
	}
	if err := h.swap(m, change.Manifest, m.attributes); err != nil {
		return h.abandon(j, err)
	}
	return nil
}

// swap puts a manifest in the place of another, unless that changed.
func (h *Host) swap(m manifest, content []byte, a Attributes) error {
	if bytes.Equal(m.content, content) {
		return nil
	}
	if err := h.put(h.paths.Staging, content, a); err != nil {
		return fmt.Errorf("write the new manifest: %w", err)
	}
	now, err := h.tryManifest()
	if err != nil || now.target != m.target || !bytes.Equal(now.content, m.content) {
		return errors.Join(errMoved, err, h.fs.Remove(h.paths.Staging))
	}
	if err := h.move(h.paths.Staging, m.target); err != nil {
		return errors.Join(fmt.Errorf("install the new manifest: %w", err), h.fs.Remove(h.paths.Staging))
	}
	return nil
}

// abandon takes back a change that could not be completed.
func (h *Host) abandon(j *journal, cause error) error {
	p := j.Pending
	_, err := h.restoreManifest(p)
	if err == nil {
		err = h.restoreFiles(p)
	}
	if err != nil {
		// The journal stays, so that the next run does it.
		return errors.Join(cause, fmt.Errorf("revert the started change: %w", err))
	}
	// First what takes space: on a full disk the journal may need it.
	return errors.Join(cause, h.removeTemporary(j), h.settle(j))
}

// prove waits until kube-scheduler is well with the pending change, or takes it
// back.
func (h *Host) prove(ctx context.Context, j *journal, content []byte) error {
	err := h.await(ctx, content)
	var unhealthy *UnhealthyError
	switch {
	case err == nil:
		h.done(ctx, nil)
		j.Failure = nil
		return h.settle(j)
	case !errors.As(err, &unhealthy):
		return err // nobody knows; the change stays pending
	}
	f := &Failure{Outcome: j.Pending.Outcome, Reason: unhealthy.Error(), Crashed: unhealthy.Crashed, Attempts: 1, At: h.now()}
	if j.Failure != nil && j.Failure.Outcome == f.Outcome {
		f.Attempts += j.Failure.Attempts
	}
	j.Failure, j.Pending.Failure = f, f
	if err := h.saveJournal(j); err != nil {
		// What matters is that the scheduler comes back; renaming needs no space.
		klog.FromContext(ctx).Error(err, "Could not record the failure")
	}
	return h.rollBack(ctx, j, err)
}

// rollBack puts back what was there before the pending change, and waits for it.
func (h *Host) rollBack(ctx context.Context, j *journal, cause error) error {
	p := j.Pending
	klog.FromContext(ctx).Info("Rolling back", "reason", p.Failure.Reason)
	for _, s := range p.Saved {
		if err := h.moveIfThere(s.Copy, s.Path); err != nil {
			return fmt.Errorf("roll back: %w", errors.Join(err, cause))
		}
	}
	m, err := h.restoreManifest(p)
	if err != nil {
		return fmt.Errorf("roll back: %w", errors.Join(err, cause))
	}
	back := h.await(ctx, m.content)
	var unhealthy *UnhealthyError
	if back != nil && !errors.As(back, &unhealthy) {
		return errors.Join(back, cause) // nobody knows; it goes on with the next run
	}
	f := *p.Failure
	h.done(ctx, &f)
	// Files that were not there before are referred to by nothing now.
	err = errors.Join(h.restoreFiles(p), h.settle(j))
	return errors.Join(&RolledBackError{Failure: f, Cause: cause, Back: back}, err)
}

// restoreManifest puts the manifest back, unless somebody else wrote another, and
// returns what is there then.
func (h *Host) restoreManifest(p *pending) (manifest, error) {
	m, err := h.tryManifest()
	if err != nil || digest(m.content) != p.After || p.After == p.Before {
		return m, err
	}
	if err := h.moveIfThere(h.paths.SavedManifest, m.target); err != nil {
		return m, err
	}
	return h.tryManifest()
}

// restoreFiles puts the configuration files back, and removes those that were not
// there.
func (h *Host) restoreFiles(p *pending) error {
	for _, s := range p.Saved {
		if s.Copy == "" {
			if err := h.fs.Remove(s.Path); err != nil {
				return explain(err)
			}
			continue
		}
		if err := h.moveIfThere(s.Copy, s.Path); err != nil {
			return err
		}
	}
	return h.fs.Sync(h.paths.Dir)
}

// moveIfThere does nothing where it was done before.
func (h *Host) moveIfThere(from, to string) error {
	if from == "" {
		return nil
	}
	if _, err := h.fs.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return h.move(from, to)
}

// settle notes that no change is under way, and removes what was kept for it.
func (h *Host) settle(j *journal) error {
	was := *j
	j.Pending = nil
	if now, err := h.fs.ReadFile(h.paths.Backup); err == nil && digest(now) == j.Backup {
		j.OldBackup = ""
	}
	if err := h.saveJournal(j); err != nil {
		*j = was
		return err
	}
	return h.removeTemporary(j)
}

// removeTemporary removes the files that are there during a change alone.
func (h *Host) removeTemporary(j *journal) error {
	var errs []error
	for _, path := range h.temporaryFiles(j) {
		if _, err := h.fs.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, h.fs.Remove(path))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return explain(err)
	}
	return nil
}

func (h *Host) temporaryFiles(j *journal) []string {
	files := []string{h.paths.Staging, h.paths.SavedManifest, temporary(h.paths.SavedManifest), temporary(h.paths.Staging),
		temporary(h.paths.Backup), temporary(h.paths.Journal), temporary(h.paths.Manifest)}
	if target, err := h.fs.Resolve(h.paths.Manifest); err == nil && target != h.paths.Manifest && h.visible(target) {
		files = append(files, temporary(target))
	}
	for _, path := range h.configFiles(j) {
		files = append(files, savedCopy(path), temporary(savedCopy(path)), temporary(path))
	}
	return files
}

// configFiles are all that this package may have written.
func (h *Host) configFiles(j *journal) []string {
	files := slices.Clone(j.Files)
	for _, name := range append([]string{schedconf.ConfigFile}, schedconf.FormerFiles...) {
		if path := filepath.Join(h.paths.Dir, name); !slices.Contains(files, path) {
			files = append(files, path)
		}
	}
	return files
}

// await asks for the scheduler of a manifest.
func (h *Host) await(ctx context.Context, content []byte) error {
	want, err := WantOf(content)
	if err != nil {
		return fmt.Errorf("%s: %w", h.paths.Manifest, err)
	}
	return h.config.Scheduler.Await(ctx, want)
}

// outcomeOf is the digest of all that a change puts in place.
func outcomeOf(c schedconf.Change) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%d\n%s", len(c.Manifest), c.Manifest)
	for _, file := range c.Files {
		fmt.Fprintf(sum, "%s %d\n%s", file.Path, len(file.Content), file.Content)
	}
	return hex.EncodeToString(sum.Sum(nil))
}
