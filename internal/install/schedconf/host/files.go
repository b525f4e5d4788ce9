package host

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

type paths struct {
	Manifest, Dir                           string
	Backup, Staging, Journal, SavedManifest string
	// Keys is the folder of the key, Key.
	Keys, Key string
}

type nodeFiles struct {
	fs    FS
	paths paths
	// version and seen are Version and Visible of the Config.
	version string
	seen    []string
}

func newNodeFiles(c Config) *nodeFiles {
	in := func(name string) string { return filepath.Join(c.Dir, name) }
	n := &nodeFiles{fs: c.FS, version: c.Version, seen: c.Visible, paths: paths{
		Manifest: c.Manifest, Dir: c.Dir,
		Backup: in(BackupFile), Staging: in(StagingFile), Journal: in(JournalFile),
		SavedManifest: in("." + filepath.Base(c.Manifest) + previous), Keys: in(schedconf.KeyDir), Key: in(schedconf.KeyFile),
	}}
	if n.fs == nil {
		n.fs = Disk{}
	}
	return n
}

// manifest is the static pod's file at one moment.
type manifest struct {
	content []byte
	// target is the file behind links: that one is replaced, and links stay.
	target     string
	attributes Attributes
}

func (n *nodeFiles) readManifest() (manifest, error) {
	m, err := n.tryManifest()
	if errors.Is(err, fs.ErrNotExist) {
		return m, fmt.Errorf("%w: %s does not exist. kubelet on this node does not run kube-scheduler from a file of that name; "+
			"set the file name, or use scheduler.mode=dedicated if the control plane is managed by your provider", ErrNoManifest,
			n.paths.Manifest)
	}
	if err != nil {
		return m, fmt.Errorf("read the manifest of kube-scheduler: %w", err)
	}
	if len(bytes.TrimSpace(m.content)) == 0 {
		return m, fmt.Errorf("the manifest of kube-scheduler, %s, is empty", n.paths.Manifest)
	}
	return m, nil
}

func (n *nodeFiles) tryManifest() (m manifest, err error) {
	if m.target, err = n.fs.Resolve(n.paths.Manifest); err != nil {
		return m, err
	}
	if !n.visible(m.target) {
		return m, fmt.Errorf("%s is a link to %s: %w", n.paths.Manifest, m.target, errInvisible)
	}
	if m.attributes, err = n.fs.Stat(m.target); err != nil {
		return m, err
	}
	m.content, err = n.fs.ReadFile(m.target)
	return m, err
}

var errInvisible = errors.New("that folder of the host is not mounted; add it to schedconf.hostPaths of the chart (flag --host-path)")

func (n *nodeFiles) visible(path string) bool {
	if n.seen == nil {
		return true
	}
	for _, dir := range append([]string{n.paths.Dir, filepath.Dir(n.paths.Manifest)}, n.seen...) {
		if path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/") {
			return true
		}
	}
	return false
}

func (n *nodeFiles) input(content []byte) schedconf.Input {
	return schedconf.Input{
		Manifest: content, ManifestPath: n.paths.Manifest, Version: n.version, ConfigDir: n.paths.Dir,
		ReadFile: func(path string) ([]byte, error) {
			data, err := n.fs.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) && !n.visible(path) {
				return nil, fmt.Errorf("%s: %w", path, errInvisible)
			}
			return data, err
		},
	}
}

func own(mode fs.FileMode) Attributes {
	return Attributes{Mode: mode.Perm(), UID: os.Geteuid(), GID: os.Getegid()}
}

// attributesOf returns the attributes of a configuration file: it belongs to the user that
// kube-scheduler runs as, where that is not root.
func attributesOf(file schedconf.File) Attributes {
	a := own(file.Mode)
	if file.UID != 0 {
		a.UID = file.UID
	}
	if file.GID != 0 {
		a.GID = file.GID
	}
	return a
}

// put writes a file so that its old or its new content is there, never a part.
func (n *nodeFiles) put(path string, data []byte, a Attributes) error {
	temporary := temporary(path)
	var err error
	if dir := filepath.Dir(path); dir == n.paths.Keys {
		err = n.fs.Mkdir(dir)
	}
	if err == nil {
		err = n.fs.Write(temporary, data, a)
	}
	if err == nil {
		err = n.fs.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(explain(err), n.fs.Remove(temporary))
	}
	return n.fs.Sync(filepath.Dir(path))
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
func (n *nodeFiles) move(from, to string) error {
	err := n.fs.Rename(from, to)
	if err == nil {
		return errors.Join(n.fs.Sync(filepath.Dir(to)), n.fs.Sync(filepath.Dir(from)))
	}
	if !errors.Is(err, syscall.EXDEV) {
		return explain(err)
	}
	// Another file system: it is written there under a hidden name first.
	data, err := n.fs.ReadFile(from)
	if err != nil {
		return err
	}
	a, err := n.fs.Stat(from)
	if err != nil {
		return err
	}
	if err := n.put(to, data, a); err != nil {
		return err
	}
	return errors.Join(n.fs.Remove(from), n.fs.Sync(filepath.Dir(from)))
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

// belongsBefore reports whether a manifest goes with the files from before a
// change: it is the one from before, or somebody edited that one since.
func (n *nodeFiles) belongsBefore(p *pending, m manifest) bool {
	if digest(m.content) == p.Before {
		return true
	}
	saved, err := n.fs.ReadFile(n.paths.SavedManifest)
	if err != nil {
		return false
	}
	before, errBefore := WantOf(saved)
	now, errNow := WantOf(m.content)
	return errBefore == nil && errNow == nil && before.Hash == now.Hash
}

// obstacle returns an error when a file is in the way that is somebody else's, and
// else the digest of the backup that the original takes the place of, if any.
func (n *nodeFiles) obstacle(j *journal, m manifest, change schedconf.Change, now schedconf.State) (backup string, err error) {
	if !now.Wired {
		if backup, err = n.presentBackup(j, m); err != nil {
			return "", err
		}
	}
	for _, file := range change.Files {
		if slices.Contains(j.Files, file.Path) || file.Path == now.ConfigFile {
			continue
		}
		switch _, err := n.fs.ReadFile(file.Path); {
		case err == nil:
			return "", fmt.Errorf("%s exists but was not written by Divvy; GCUShare's config manager has a file of that name: uninstall "+
				"it first, or move the file away", file.Path)
		case !errors.Is(err, fs.ErrNotExist):
			return "", err
		}
	}
	return backup, nil
}

// putKey gives a divvy-scheduler that runs already a new key, and returns the other files of a change. The
// key does not wait for them: they may be held, or rolled back, for longer than the previous key is accepted.
func (n *nodeFiles) putKey(j *journal, change schedconf.Change, m manifest, now schedconf.State) ([]schedconf.File, error) {
	files, key := change.Files, n.paths.Key
	i := slices.IndexFunc(files, func(f schedconf.File) bool { return f.Path == key })
	alone := len(files) == 1 && bytes.Equal(change.Manifest, m.content)
	if i < 0 || alone || now.Program == "" || !slices.Contains(j.Files, key) {
		return files, nil
	}
	if err := n.put(key, files[i].Content, attributesOf(files[i])); err != nil {
		return nil, fmt.Errorf("write the key: %w", err)
	}
	return slices.Delete(slices.Clone(files), i, i+1), nil
}

// presentBackup returns the digest of the backup that the original takes the place
// of, "" when there is none.
func (n *nodeFiles) presentBackup(j *journal, m manifest) (string, error) {
	now, err := n.fs.ReadFile(n.paths.Backup)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("read the backup: %w", err)
	// One of ours is there still after kubeadm upgrade has replaced the manifest.
	case !bytes.Equal(now, m.content) && !j.ours(now):
		return "", fmt.Errorf("%s exists, was not created by Divvy, and differs from %s: it may be the original of GCUShare's config "+
			"manager or of an administrator; restore it, or move the file away",
			n.paths.Backup, n.paths.Manifest)
	}
	return digest(now), nil
}

// swap puts a manifest in the place of another, unless that changed.
func (n *nodeFiles) swap(m manifest, content []byte, a Attributes) error {
	if bytes.Equal(m.content, content) {
		return nil
	}
	if err := n.put(n.paths.Staging, content, a); err != nil {
		return fmt.Errorf("write the new manifest: %w", err)
	}
	now, err := n.tryManifest()
	if err != nil || now.target != m.target || !bytes.Equal(now.content, m.content) {
		return errors.Join(errMoved, err, n.fs.Remove(n.paths.Staging))
	}
	if err := n.move(n.paths.Staging, m.target); err != nil {
		return errors.Join(fmt.Errorf("install the new manifest: %w", err), n.fs.Remove(n.paths.Staging))
	}
	return nil
}

// restoreManifest puts the manifest back, unless somebody else wrote another, and
// returns what is there then.
func (n *nodeFiles) restoreManifest(p *pending) (manifest, error) {
	m, err := n.tryManifest()
	if err != nil || digest(m.content) != p.After || p.After == p.Before {
		return m, err
	}
	if err := n.moveIfThere(n.paths.SavedManifest, m.target); err != nil {
		return m, err
	}
	return n.tryManifest()
}

// restoreFiles puts the configuration files back, and removes those that were not
// there.
func (n *nodeFiles) restoreFiles(p *pending) error {
	for _, s := range p.Saved {
		if s.Copy == "" {
			if err := n.fs.Remove(s.Path); err != nil {
				return explain(err)
			}
			continue
		}
		if err := n.moveIfThere(s.Copy, s.Path); err != nil {
			return err
		}
	}
	return n.fs.Sync(n.paths.Dir)
}

// moveIfThere does nothing where it was done before.
func (n *nodeFiles) moveIfThere(from, to string) error {
	if from == "" {
		return nil
	}
	if _, err := n.fs.Stat(from); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return n.move(from, to)
}

// settle notes that no change is under way, and removes what was kept for it, and the key that
// nothing uses any more.
func (n *nodeFiles) settle(j *journal) error {
	was := *j
	j.Pending = nil
	if now, err := n.fs.ReadFile(n.paths.Backup); err == nil && digest(now) == j.Backup {
		j.OldBackup = ""
	}
	if err := n.saveJournal(j); err != nil {
		*j = was
		return err
	}
	if err := n.removeTemporary(j); err != nil {
		return err
	}
	return n.dropKey(j)
}

// dropKey removes the key where the manifest has no divvy-scheduler. Releases that know none reject a
// journal that names it. It stays where the manifest cannot be read.
func (n *nodeFiles) dropKey(j *journal) error {
	key := n.paths.Key
	if !slices.Contains(j.Files, key) {
		return nil
	}
	m, err := n.tryManifest()
	if err != nil {
		return nil //nolint:nilerr // documented
	}
	if want, err := WantOf(m.content); err != nil || want.Replaced {
		return nil //nolint:nilerr // documented
	}
	if _, err := n.fs.Stat(key); err == nil {
		if err := errors.Join(n.fs.Remove(key), n.fs.Sync(n.paths.Keys)); err != nil {
			return fmt.Errorf("remove the key that is no longer needed: %w", explain(err))
		}
	}
	if err := n.removeKeys(); err != nil {
		return err
	}
	was := j.Files
	j.Files = slices.DeleteFunc(slices.Clone(j.Files), func(path string) bool { return path == key })
	if err := n.saveJournal(j); err != nil {
		j.Files = was
		return err
	}
	return nil
}

// removeKeys removes the folder of the key, unless another file is in it.
func (n *nodeFiles) removeKeys() error {
	if err := n.fs.Remove(n.paths.Keys); err != nil && !errors.Is(err, syscall.ENOTEMPTY) {
		return fmt.Errorf("remove files that are no longer needed: %w", explain(err))
	}
	return nil
}

// removeTemporary removes the files that are there during a change alone.
func (n *nodeFiles) removeTemporary(j *journal) error {
	var errs []error
	for _, path := range n.temporaryFiles(j) {
		if _, err := n.fs.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, n.fs.Remove(path))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return explain(err)
	}
	return nil
}

func (n *nodeFiles) temporaryFiles(j *journal) []string {
	files := []string{n.paths.Staging, n.paths.SavedManifest, temporary(n.paths.SavedManifest), temporary(n.paths.Staging),
		temporary(n.paths.Backup), temporary(n.paths.Journal), temporary(n.paths.Manifest)}
	if target, err := n.fs.Resolve(n.paths.Manifest); err == nil && target != n.paths.Manifest && n.visible(target) {
		files = append(files, temporary(target))
	}
	for _, path := range n.paths.configFiles(j) {
		files = append(files, savedCopy(path), temporary(savedCopy(path)), temporary(path))
	}
	return files
}

// configFiles are all that this package may have written.
func (p paths) configFiles(j *journal) []string {
	files := slices.Clone(j.Files)
	for _, name := range append([]string{schedconf.ConfigFile, schedconf.KeyFile}, schedconf.FormerFiles...) {
		if path := filepath.Join(p.Dir, name); !slices.Contains(files, path) {
			files = append(files, path)
		}
	}
	return files
}

// readBackup returns the original and its attributes; nil when there is none that
// this package made.
func (n *nodeFiles) readBackup(j *journal) (Attributes, []byte, error) {
	data, err := n.fs.ReadFile(n.paths.Backup)
	if errors.Is(err, fs.ErrNotExist) {
		return Attributes{}, nil, nil
	}
	if err != nil {
		return Attributes{}, nil, fmt.Errorf("read the backup: %w", err)
	}
	if len(bytes.TrimSpace(data)) == 0 || !j.ours(data) {
		klog.Background().Info("The backup was not created by Divvy, or was edited since; it is neither used nor removed",
			"file", n.paths.Backup)
		return Attributes{}, nil, nil
	}
	a, err := n.fs.Stat(n.paths.Backup)
	if err != nil {
		return Attributes{}, nil, fmt.Errorf("read the backup: %w", err)
	}
	return a, data, nil
}

func (n *nodeFiles) leftovers(j *journal) ([]string, error) {
	var found []string
	for _, path := range append(append(slices.Clone(j.Files), n.paths.Journal), n.temporaryFiles(j)...) {
		_, err := n.fs.ReadFile(path)
		switch {
		case err == nil:
			found = append(found, path)
		case !errors.Is(err, fs.ErrNotExist):
			return nil, err
		}
	}
	return found, nil
}

// removeAll removes every file of this package, the journal last: as long as it
// is there, it says which are ours.
func (n *nodeFiles) removeAll(j *journal, backup bool) error {
	files := append(slices.Clone(j.Files), n.temporaryFiles(j)...)
	if backup {
		files = append(files, n.paths.Backup)
	}
	for _, paths := range [][]string{files, {n.paths.Journal}} {
		removed := false
		for _, path := range paths {
			if _, err := n.fs.Stat(path); errors.Is(err, fs.ErrNotExist) {
				continue
			}
			removed = true
			if err := n.fs.Remove(path); err != nil {
				return fmt.Errorf("remove files that are no longer needed: %w", explain(err))
			}
		}
		if removed && slices.Contains(j.Files, n.paths.Key) {
			if err := n.removeKeys(); err != nil {
				return err
			}
		}
		if removed {
			if err := n.fs.Sync(n.paths.Dir); err != nil {
				return err
			}
		}
	}
	*j = journal{Version: journalVersion}
	return nil
}
