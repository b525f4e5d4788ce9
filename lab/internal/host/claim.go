package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Record is what the lab remembers about the machine as it was before, and
// about what it made there. It is written before anything is changed and is
// the last thing that goes, so that everything can be taken back at any time.
type Record struct {
	path string

	// NodeIP is the address that certificates were made for.
	NodeIP string `json:"nodeIP"`
	// BinDirs are the folders whose programs were started.
	BinDirs []string `json:"binDirs"`
	// Made are paths that did not exist before, Borrowed are folders that did
	// and were empty.
	Made     []string `json:"made"`
	Borrowed []string `json:"borrowed,omitempty"`
	// Sysctls holds kernel settings as they were.
	Sysctls map[string]string `json:"sysctls"`
	// RootMadeShared says that the root mount was private before.
	RootMadeShared bool `json:"rootMadeShared,omitempty"`
	// FilterTables are the packet filter tables that existed before.
	FilterTables []string `json:"filterTables"`
	// KubernetesVersion is the version of the programs in the last of BinDirs.
	KubernetesVersion string `json:"kubernetesVersion"`
}

// LoadRecord reads the record at path. The error is fs.ErrNotExist where the
// lab has left no record.
func LoadRecord(path string) (*Record, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := &Record{path: path}
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("the lab's record %s is damaged: %w", path, err)
	}
	return r, nil
}

// NewRecord returns an empty record that Save writes to path.
func NewRecord(path string) *Record {
	return &Record{path: path, Sysctls: map[string]string{}}
}

// Save writes the record durably.
func (r *Record) Save() error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the lab's record: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(r.path), 0o755); err != nil {
		return fmt.Errorf("write the lab's record: %w", err)
	}
	temporary := r.path + ".tmp"
	file, err := os.OpenFile(temporary, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("write the lab's record: %w", err)
	}
	_, err = file.Write(append(data, '\n'))
	if err := errors.Join(err, file.Sync(), file.Close()); err != nil {
		return fmt.Errorf("write the lab's record: %w", err)
	}
	if err := os.Rename(temporary, r.path); err != nil {
		return fmt.Errorf("write the lab's record: %w", err)
	}
	return nil
}

// Claim notes the paths that the lab is about to make. It refuses, before
// anything was changed, where one of them is in use by somebody else. Paths
// that the record names already are the lab's own.
func (r *Record) Claim(paths ...string) error {
	known := map[string]bool{}
	for _, p := range append(append([]string{}, r.Made...), r.Borrowed...) {
		known[p] = true
	}
	for _, p := range paths {
		if known[p] {
			continue
		}
		entries, err := os.ReadDir(p)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if _, err := os.Lstat(p); err == nil {
				return fmt.Errorf("%s exists and is no folder; the lab needs that place and will not touch what it did not make", p)
			}
			r.Made = append(r.Made, p)
		case err != nil:
			return fmt.Errorf("look at a place that the lab needs: %w", err)
		case len(entries) > 0:
			return fmt.Errorf("%s holds files that the lab did not make: does another Kubernetes use this machine? Move them away, or "+
				"use another machine", p)
		default:
			r.Borrowed = append(r.Borrowed, p)
		}
	}
	return nil
}

// Note claims the paths that do not exist, and leaves those alone that do: they
// belong to somebody else, whom the lab does not disturb.
func (r *Record) Note(paths ...string) {
	for _, p := range paths {
		if _, err := os.Lstat(p); errors.Is(err, fs.ErrNotExist) && !slices.Contains(r.Made, p) {
			r.Made = append(r.Made, p)
		}
	}
}

// Release removes what was made at the claimed paths. The record itself stays
// until the caller removes it.
func (r *Record) Release() error {
	var errs []error
	for _, p := range r.Made {
		errs = append(errs, os.RemoveAll(p))
	}
	for _, p := range r.Borrowed {
		entries, err := os.ReadDir(p)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, entry := range entries {
			errs = append(errs, os.RemoveAll(filepath.Join(p, entry.Name())))
		}
	}
	return errors.Join(errs...)
}

// Remaining returns the claimed paths that still hold something.
func (r *Record) Remaining() []string {
	var remaining []string
	for _, p := range r.Made {
		if _, err := os.Lstat(p); err == nil {
			remaining = append(remaining, p)
		}
	}
	for _, p := range r.Borrowed {
		if entries, err := os.ReadDir(p); err == nil && len(entries) > 0 {
			remaining = append(remaining, p)
		}
	}
	return remaining
}

// SetSysctl sets a kernel setting and remembers its value from before. The
// record must be saved by the caller before KeepSysctl's settings change.
func (r *Record) SetSysctl(name, value string) error {
	if err := r.KeepSysctl(name); err != nil {
		return err
	}
	if err := r.Save(); err != nil {
		return err
	}
	return WriteSysctl(name, value)
}

// KeepSysctl remembers the value of a setting that somebody else will change.
func (r *Record) KeepSysctl(name string) error {
	if _, known := r.Sysctls[name]; known {
		return nil
	}
	value, err := ReadSysctl(name)
	if err != nil {
		return err
	}
	r.Sysctls[name] = value
	return nil
}

// RestoreSysctls puts the remembered settings back.
func (r *Record) RestoreSysctls() error {
	var errs []error
	for name, value := range r.Sysctls {
		if now, err := ReadSysctl(name); err == nil && now == value {
			continue
		}
		errs = append(errs, WriteSysctl(name, value))
	}
	return errors.Join(errs...)
}

// ChangedSysctls returns the remembered settings that differ from before.
func (r *Record) ChangedSysctls() []string {
	var changed []string
	for name, value := range r.Sysctls {
		if now, err := ReadSysctl(name); err == nil && now != value {
			changed = append(changed, fmt.Sprintf("%s is %s, was %s", name, now, value))
		}
	}
	return changed
}
