package host

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
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
	// Replaces is true where divvy-scheduler was to run.
	Replaces bool
}

// ReplaceFlags completes the advice to run `divvy-control schedconf install` where divvy-scheduler runs, or
// is to: without them, the command restores kube-scheduler.
const ReplaceFlags = "--replace-image, --replace-flag and --grant-key-file as in the DaemonSet divvy-schedconf"

// byHand is the command that tries a change at once.
func byHand(replaces bool) string {
	if replaces {
		return "`divvy-control schedconf install` with " + ReplaceFlags
	}
	return "`divvy-control schedconf install`"
}

func (e *HeldError) Error() string {
	when := "it is retried when the scheduler's configuration or the chart's values change, or with " +
		byHand(e.Replaces)
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

	j, err := h.files.loadJournal()
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
		klog.FromContext(ctx).Info("Another program changed the manifest meanwhile; starting again", "manifest", h.files.paths.Manifest)
	}
	return r, fmt.Errorf("%w, %d times in a row, while it was being replaced: %s", errMoved, rounds, h.files.paths.Manifest)
}

// finish ends what an earlier process began. It reports whether it found the
// scheduler well with a change that the process had made.
func (h *Host) finish(ctx context.Context, j *journal) (bool, error) {
	p := j.Pending
	if p == nil {
		return false, h.files.removeTemporary(j)
	}
	m, err := h.files.readManifest()
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
	case h.files.belongsBefore(p, m):
		klog.FromContext(ctx).Info("A change was interrupted before the manifest was installed; reverting it")
		if err := h.files.restoreFiles(p); err != nil {
			return false, err
		}
	}
	// Otherwise somebody else wrote the manifest: what was saved is out of date.
	return false, h.files.settle(j)
}

// wire does one round. It returns errMoved when somebody else wrote the manifest
// meanwhile.
func (h *Host) wire(ctx context.Context, j *journal, e schedconf.Extender, o InstallOptions) (r Result, err error) {
	m, err := h.files.readManifest()
	if err != nil {
		return r, err
	}
	change, err := schedconf.Wire(h.files.input(m.content), e)
	if err != nil {
		return r, err
	}
	r.Notes = change.Notes
	if bytes.Equal(change.Manifest, m.content) && len(change.Files) == 0 {
		if err := h.await(ctx, m.content); err != nil {
			return r, err
		}
		if j.Failure != nil { // what was rolled back is not asked for any more
			j.Failure = nil
			if err := h.files.saveJournal(j); err != nil {
				return r, err
			}
		}
		return r, h.files.dropKey(j)
	}
	state, err := schedconf.Inspect(h.files.input(m.content))
	if err != nil {
		return r, err
	}
	if change.Files, err = h.files.putKey(j, change, m, state); err != nil {
		return r, err
	}
	outcome := outcomeOf(change)
	if f := j.Failure; f != nil && f.Outcome == outcome && !o.Again {
		next, again := f.Retry()
		// One of the future was noted by a clock that was wrong.
		if now := h.now(); !again || now.Before(next) && !now.Before(f.At) {
			return r, &HeldError{Failure: *f, Next: next, Replaces: e.Program != nil}
		}
	}
	want, err := WantOf(change.Manifest)
	if err != nil {
		return r, fmt.Errorf("%s: %w", h.files.paths.Manifest, err)
	}
	if err := h.config.Scheduler.Check(ctx, want); err != nil {
		return r, fmt.Errorf("nothing was changed, because the health of kube-scheduler could not be checked: %w", err)
	}
	if state.Wired {
		if err := h.files.adopt(j); err != nil {
			return r, err
		}
	}
	if err := h.take(ctx, outcome, e.Program != nil); err != nil {
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
	klog.FromContext(ctx).Info("Installed a new manifest of kube-scheduler; waiting until it is healthy", "manifest",
		h.files.paths.Manifest)
	return r, h.prove(ctx, j, change.Manifest)
}

// prepare puts on disk what is needed to undo the change. Nothing that
// kube-scheduler or kubelet reads is touched.
func (h *Host) prepare(j *journal, m manifest, change schedconf.Change, outcome string, now schedconf.State) error {
	old, err := h.files.obstacle(j, m, change, now)
	if err != nil {
		return err
	}
	backup := !now.Wired // a wired one is no original
	p := &pending{Before: digest(m.content), After: digest(change.Manifest), Outcome: outcome}
	for _, file := range change.Files {
		s := saved{Path: file.Path}
		present, err := h.files.fs.ReadFile(file.Path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		default:
			a, err := h.files.fs.Stat(file.Path)
			if err != nil {
				return err
			}
			s.Copy = savedCopy(file.Path)
			if err := h.files.put(s.Copy, present, a); err != nil {
				return fmt.Errorf("save the current configuration: %w", err)
			}
		}
		p.Saved = append(p.Saved, s)
	}
	if err := h.files.put(h.files.paths.SavedManifest, m.content, m.attributes); err != nil {
		return errors.Join(fmt.Errorf("save the current manifest: %w", err), h.files.removeTemporary(j))
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
	if err := h.files.saveJournal(j); err != nil {
		*j = was
		return errors.Join(err, h.files.removeTemporary(j))
	}
	if backup {
		if err := h.files.put(h.files.paths.Backup, m.content, m.attributes); err != nil {
			return h.abandon(j, fmt.Errorf("save the original manifest: %w", err))
		}
	}
	return nil
}

// replace puts the change in place, the manifest last.
func (h *Host) replace(j *journal, m manifest, change schedconf.Change) error {
	for _, file := range change.Files {
		if err := h.files.put(file.Path, file.Content, attributesOf(file)); err != nil {
			return h.abandon(j, fmt.Errorf("write the scheduler's configuration: %w", err))
		}
	}
	if err := h.files.swap(m, change.Manifest, m.attributes); err != nil {
		return h.abandon(j, err)
	}
	return nil
}

// abandon takes back a change that could not be completed.
func (h *Host) abandon(j *journal, cause error) error {
	p := j.Pending
	_, err := h.files.restoreManifest(p)
	if err == nil {
		err = h.files.restoreFiles(p)
	}
	if err != nil {
		// The journal stays, so that the next run does it.
		return errors.Join(cause, fmt.Errorf("revert the started change: %w", err))
	}
	// First what takes space: on a full disk the journal may need it.
	return errors.Join(cause, h.files.removeTemporary(j), h.files.settle(j))
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
		return h.files.settle(j)
	case !errors.As(err, &unhealthy):
		return err // nobody knows; the change stays pending
	}
	f := &Failure{Outcome: j.Pending.Outcome, Reason: unhealthy.Error(), Crashed: unhealthy.Crashed, Attempts: 1, At: h.now()}
	if j.Failure != nil && j.Failure.Outcome == f.Outcome {
		f.Attempts += j.Failure.Attempts
	}
	j.Failure, j.Pending.Failure = f, f
	if err := h.files.saveJournal(j); err != nil {
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
		if err := h.files.moveIfThere(s.Copy, s.Path); err != nil {
			return fmt.Errorf("roll back: %w", errors.Join(err, cause))
		}
	}
	m, err := h.files.restoreManifest(p)
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
	err = errors.Join(h.files.restoreFiles(p), h.files.settle(j))
	return errors.Join(&RolledBackError{Failure: f, Cause: cause, Back: back}, err)
}

func (h *Host) await(ctx context.Context, content []byte) error {
	want, err := WantOf(content)
	if err != nil {
		return fmt.Errorf("%s: %w", h.files.paths.Manifest, err)
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
