package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// stateVersion is the version of the state files that this code writes.
const stateVersion = 1

// ErrDamaged is the error of a state file that cannot be trusted.
var ErrDamaged = errors.New("state file is damaged")

// stateFile is a state on disk. It has one writer, the process that holds the
// node's lock, which notices when the file was removed or changed by others and
// writes it again. It is not safe for concurrent use.
type stateFile struct {
	path string
	// known is the state that the file holds, as JSON, and info describes the file
	// with it; both nil while that is not known.
	known []byte
	info  fs.FileInfo
}

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
func (s *stateFile) load(st any) (bool, error) {
	s.known, s.info = nil, nil
	data, info, err := read(s.path)
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
	// In the form of this program: an older one may have written it otherwise.
	known, err := json.Marshal(st)
	if err != nil {
		return false, fmt.Errorf("encode unit state: %w", err)
	}
	s.known, s.info = known, info
	return true, nil
}

// read returns the content of a file and describes the file that it is from, which
// another one may have replaced since.
func read(path string) ([]byte, fs.FileInfo, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	data, err := io.ReadAll(f)
	return data, info, err
}

// holds reports whether the file is the one that was read or written last, and
// holds the state.
func (s *stateFile) holds(state []byte) bool {
	now, err := os.Lstat(s.path)
	return err == nil && atomicfile.Same(s.info, now) && bytes.Equal(s.known, state)
}

func (s *stateFile) damaged(err error) error {
	s.known, s.info = nil, nil
	return fmt.Errorf("%w: %s: %w", ErrDamaged, s.path, err)
}

// save makes the file hold the state, and does nothing where it does: a crash or
// a power failure leaves the old file or the new one. A folder that does not exist
// is made. Errors of a folder that was removed under a mount wrap
// *atomicfile.RemovedError.
func (s *stateFile) save(st any) error {
	state, err := json.Marshal(st)
	if err != nil {
		return fmt.Errorf("encode unit state: %w", err)
	}
	if s.holds(state) {
		return nil
	}
	data, err := json.Marshal(sealed{Version: stateVersion, Sum: crc32.ChecksumIEEE(state), State: state})
	if err != nil {
		return fmt.Errorf("encode unit state: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(s.path), 0o750); err != nil {
		return fmt.Errorf("save unit state: %w", err)
	}
	info, err := atomicfile.Replace(s.path, data, 0o600)
	if err != nil {
		return fmt.Errorf("save unit state: %w", err)
	}
	s.known, s.info = state, info
	return nil
}

// Quarantine moves a damaged file aside, so that it can be looked at, and
// returns its new name.
func (s *stateFile) Quarantine() (string, error) {
	s.known, s.info = nil, nil
	to := s.path + ".damaged"
	if err := os.Rename(s.path, to); err != nil {
		return "", fmt.Errorf("move damaged unit state aside: %w", err)
	}
	return to, nil
}

// Remove takes the file away; one that is not there is no error.
func (s *stateFile) Remove() error {
	s.known, s.info = nil, nil
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove unit state: %w", err)
	}
	return nil
}
