package sharing

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
)

// stateVersion is the version of the state files that this code writes.
const stateVersion = 1

// ErrDamaged is the error of a state file that cannot be trusted.
var ErrDamaged = errors.New("state file is damaged")

// stateFile is a state on disk. It is not safe for concurrent use.
type stateFile struct{ path string }

// sealed is the content of a state file. Sum is the CRC-32 (IEEE) of the state's
// JSON, so that a file that a crash or an editor damaged is not taken for the
// truth.
type sealed struct {
	Version int             `json:"version"`
	Sum     uint32          `json:"sum"`
	State   json.RawMessage `json:"state"`
}

// load reads the state into st. It is false when there is no file. A damaged
// file is an error that wraps ErrDamaged.
func (s stateFile) load(st any) (bool, error) {
	data, err := os.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read unit state: %w", err)
	}
	var f sealed
	if err := json.Unmarshal(data, &f); err != nil {
		return false, s.damaged(err)
	}
	if f.Version != stateVersion {
		return false, s.damaged(fmt.Errorf("version %d, this program reads %d", f.Version, stateVersion))
	}
	if sum := crc32.ChecksumIEEE(f.State); sum != f.Sum {
		return false, s.damaged(fmt.Errorf("checksum %08x, recorded %08x", sum, f.Sum))
	}
	if err := json.Unmarshal(f.State, st); err != nil {
		return false, s.damaged(err)
	}
	return true, nil
}

func (s stateFile) damaged(err error) error {
	return fmt.Errorf("%w: %s: %w", ErrDamaged, s.path, err)
}

// save replaces the saved state at once: a crash leaves the old file or the new
// one.
func (s stateFile) save(st any) (err error) {
	state, err := json.Marshal(st)
	if err != nil {
		return fmt.Errorf("encode unit state: %w", err)
	}
	data, err := json.Marshal(sealed{Version: stateVersion, Sum: crc32.ChecksumIEEE(state), State: state})
	if err != nil {
		return fmt.Errorf("encode unit state: %w", err)
	}
	dir := filepath.Dir(s.path)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("save unit state: %w", err)
	}
	tmp, err := os.CreateTemp(dir, filepath.Base(s.path)+".*")
	if err != nil {
		return fmt.Errorf("save unit state: %w", err)
	}
	defer func() {
		if err != nil {
			_ = tmp.Close()
			_ = os.Remove(tmp.Name())
			err = fmt.Errorf("save unit state: %w", err)
		}
	}()
	if _, err = tmp.Write(data); err != nil {
		return err
	}
	if err = tmp.Sync(); err != nil {
		return err
	}
	if err = tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), s.path)
}

// Quarantine moves a damaged file aside, so that it can be looked at, and
// returns its new name.
func (s stateFile) Quarantine() (string, error) {
	to := s.path + ".damaged"
	if err := os.Rename(s.path, to); err != nil {
		return "", fmt.Errorf("move damaged unit state aside: %w", err)
	}
	return to, nil
}

// Remove takes the file away; one that is not there is no error.
func (s stateFile) Remove() error {
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove unit state: %w", err)
	}
	return nil
}

// Exists reports whether there is a file.
func (s stateFile) Exists() bool {
	_, err := os.Lstat(s.path)
	return err == nil
}
