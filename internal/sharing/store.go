package sharing

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// stateVersion is the version of the state file that this code writes.
const stateVersion = 1

// State is what a node remembers of one resource between restarts.
type State struct {
	// Unit is the memory unit that the ranges are counted in.
	Unit string `json:"unit"`
	// Ranges say which ids belong to which device.
	Ranges []Range `json:"ranges"`
}

// stateFile is State on disk. Sum is the CRC-32 (IEEE) of the State's JSON, so
// that a file that a crash or an editor damaged is not taken for the truth.
type stateFile struct {
	Version int             `json:"version"`
	Sum     uint32          `json:"sum"`
	State   json.RawMessage `json:"state"`
}

// Store keeps the State of one resource in a file. It is not safe for
// concurrent use.
type Store struct{ path string }

// NewStore returns the store of a resource below dir.
func NewStore(dir string, resource accel.Resource) *Store {
	return &Store{path: filepath.Join(dir, "units-"+strings.ReplaceAll(string(resource), "/", "_")+".json")}
}

// ErrDamaged is the error of a state file that cannot be trusted.
var ErrDamaged = errors.New("state file is damaged")

// Load returns the saved state; a file that does not exist is the empty state.
// A damaged file is an error that wraps ErrDamaged.
func (s *Store) Load() (State, *Layout, error) {
	data, err := os.ReadFile(s.path)
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, &Layout{}, nil
	}
	if err != nil {
		return State{}, nil, fmt.Errorf("read unit state: %w", err)
	}
	var f stateFile
	if err := json.Unmarshal(data, &f); err != nil {
		return State{}, nil, fmt.Errorf("%w: %s: %w", ErrDamaged, s.path, err)
	}
	if f.Version != stateVersion {
		return State{}, nil, fmt.Errorf("%w: %s has version %d, this program reads %d", ErrDamaged, s.path, f.Version, stateVersion)
	}
	if sum := crc32.ChecksumIEEE(f.State); sum != f.Sum {
		return State{}, nil, fmt.Errorf("%w: %s: checksum %08x, recorded %08x", ErrDamaged, s.path, sum, f.Sum)
	}
	var st State
	if err := json.Unmarshal(f.State, &st); err != nil {
		return State{}, nil, fmt.Errorf("%w: %s: %w", ErrDamaged, s.path, err)
	}
	layout, err := NewLayout(st.Ranges)
	if err != nil {
		return State{}, nil, fmt.Errorf("%w: %s: %w", ErrDamaged, s.path, err)
	}
	return st, layout, nil
}

// Save replaces the saved state at once: a crash leaves the old file or the
// new one.
func (s *Store) Save(st State) (err error) {
	state, err := json.Marshal(st)
	if err != nil {
		return fmt.Errorf("encode unit state: %w", err)
	}
	data, err := json.Marshal(stateFile{Version: stateVersion, Sum: crc32.ChecksumIEEE(state), State: state})
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
func (s *Store) Quarantine() (string, error) {
	to := s.path + ".damaged"
	if err := os.Rename(s.path, to); err != nil {
		return "", fmt.Errorf("move damaged unit state aside: %w", err)
	}
	return to, nil
}
