package host

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"
)

// journal is what has to be known after this process has ended. It is kept in
// Paths.Journal and holds no content of files, so no key.
type journal struct {
	Version int `json:"version"`
	// Backup is the digest of the backup that this package made; a file of that
	// name with another content is somebody else's.
	Backup string `json:"backup,omitempty"`
	// OldBackup is the digest of the one before, until the new one is written.
	OldBackup string `json:"oldBackup,omitempty"`
	// Files are the configuration files that this package wrote.
	Files []string `json:"files,omitempty"`
	// Pending is the change that has begun and is not known to be good.
	Pending *pending `json:"pending,omitempty"`
	// Failure is the last change that was taken back.
	Failure *Failure `json:"failure,omitempty"`

	// fresh is true when there was no file.
	fresh bool
}

const journalVersion = 1

type pending struct {
	// Before and After are the digests of the manifests.
	Before string `json:"before"`
	After  string `json:"after"`
	// Outcome is the digest of everything that the change puts in place.
	Outcome string `json:"outcome"`
	// Saved are the configuration files that it writes.
	Saved []saved `json:"saved,omitempty"`
	// Failure is set once the change is being taken back.
	Failure *Failure `json:"failure,omitempty"`
}

// saved says how a configuration file was before.
type saved struct {
	Path string `json:"path"`
	// Copy has what it was; "" when there was no file.
	Copy string `json:"copy,omitempty"`
}

// A Failure is a change that kube-scheduler was not well with.
type Failure struct {
	// Outcome is the digest of what was put in place.
	Outcome string `json:"outcome"`
	// Reason says what kube-scheduler did, with the end of its log.
	Reason string `json:"reason"`
	// Crashed is true when the program ended by itself. It would again; one that
	// was only too slow may do better another time.
	Crashed bool `json:"crashed,omitempty"`
	// Attempts is how often it was tried.
	Attempts int       `json:"attempts"`
	At       time.Time `json:"at"`
}

// Retry returns when the same may be tried again, or false when it is not worth
// it.
func (f *Failure) Retry() (time.Time, bool) {
	pauses := []time.Duration{2 * time.Minute, 10 * time.Minute, time.Hour}
	if f.Crashed || f.Attempts > len(pauses) {
		return time.Time{}, false
	}
	return f.At.Add(pauses[max(f.Attempts, 1)-1]), true
}

func (n *nodeFiles) loadJournal() (*journal, error) {
	data, err := n.fs.ReadFile(n.paths.Journal)
	if errors.Is(err, fs.ErrNotExist) {
		return &journal{Version: journalVersion, fresh: true}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	j := &journal{}
	if err := decoder.Decode(j); err != nil {
		return nil, fmt.Errorf("the journal %s was edited and cannot be parsed: %w; check %s and %s, and remove the journal",
			n.paths.Journal, err, n.paths.Manifest, n.paths.Backup)
	}
	if j.Version != journalVersion {
		return nil, fmt.Errorf("the journal %s has version %d, but this program supports version %d: use the program that wrote it",
			n.paths.Journal, j.Version, journalVersion)
	}
	if err := checkJournal(n.paths.configFiles(&journal{}), j); err != nil {
		return nil, fmt.Errorf("the journal %s was edited: %w; check %s and %s, and remove the journal",
			n.paths.Journal, err, n.paths.Manifest, n.paths.Backup)
	}
	return j, nil
}

// adopt takes over the files of a wired scheduler that no journal tells of: it was
// removed, or GCUShare's config manager, which has the same names, wired it. What is
// taken for the original is used only where wiring it gives the present manifest.
func (n *nodeFiles) adopt(j *journal) error {
	if !j.fresh {
		return nil
	}
	for _, path := range n.paths.configFiles(j) {
		switch _, err := n.fs.ReadFile(path); {
		case err == nil:
			j.Files = append(j.Files, path)
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
	}
	switch data, err := n.fs.ReadFile(n.paths.Backup); {
	case err == nil:
		j.Backup = digest(data)
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read the backup: %w", err)
	}
	return nil
}

// checkJournal rejects names of files that are not among this package's own: some are
// removed, and some take the place of others.
func checkJournal(own []string, j *journal) error {
	check := func(path string) error {
		if !slices.Contains(own, path) {
			return fmt.Errorf("it names %q, which is not a file of Divvy", path)
		}
		return nil
	}
	for _, path := range j.Files {
		if err := check(path); err != nil {
			return err
		}
	}
	if j.Pending == nil {
		return nil
	}
	for _, s := range j.Pending.Saved {
		if err := check(s.Path); err != nil {
			return err
		}
		if s.Copy != "" && s.Copy != savedCopy(s.Path) {
			return fmt.Errorf("it names %q, which is not a file of Divvy", s.Copy)
		}
	}
	return nil
}

// savedCopy is where the present content of a file is kept during a change.
func savedCopy(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+previous)
}

// saveJournal does nothing where the file says so already.
func (n *nodeFiles) saveJournal(j *journal) error {
	data, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the journal: %w", err)
	}
	data = append(data, '\n')
	if old, err := n.fs.ReadFile(n.paths.Journal); err == nil && bytes.Equal(old, data) {
		return nil
	}
	if err := n.put(n.paths.Journal, data, own(0o600)); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	return nil
}

func (j *journal) ours(backup []byte) bool {
	d := digest(backup)
	return d == j.Backup || d == j.OldBackup
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}
