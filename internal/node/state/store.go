package state

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// The names of state files: a prefix, the resource with "_" for "/", a suffix.
const (
	memoryPrefix = "units-"
	slotPrefix   = "slots-"
	stateSuffix  = ".json"
)

// Store keeps the state of one pool in a file. It is not safe for concurrent use.
type Store struct{ stateFile }

// NewStore returns the store of a pool below dir.
func NewStore(dir string, id alloc.ID) *Store {
	prefix := memoryPrefix
	if id.Kind == alloc.Slots {
		prefix = slotPrefix
	}
	return &Store{stateFile{path: filepath.Join(dir, prefix+strings.ReplaceAll(string(id.Resource), "/", "_")+stateSuffix)}}
}

// Load returns the saved state, nil when there is none. A damaged file is an error
// that wraps ErrDamaged.
func (s *Store) Load() (*alloc.State, error) {
	st := &alloc.State{}
	if exists, err := s.load(st); err != nil || !exists {
		return nil, err
	}
	if err := st.Check(); err != nil {
		return nil, s.damaged(err)
	}
	return st, nil
}

// Save makes the file hold the state, and does nothing where it does. A crash
// leaves the old file or the new one.
func (s *Store) Save(st alloc.State) error { return s.save(st) }

// Stored returns the resources of which a state file is in dir, in ascending
// order: those that this node offers or has offered while containers held
// something of them.
func Stored(dir string) ([]accel.Resource, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		if os.IsNotExist(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("read the state folder: %w", err)
	}
	var out []accel.Resource
	for _, e := range entries {
		name, isState := strings.CutSuffix(e.Name(), stateSuffix)
		if !isState {
			continue
		}
		for _, prefix := range []string{memoryPrefix, slotPrefix} {
			// A domain has no "_", so the first one stands for the "/".
			if r, ok := strings.CutPrefix(name, prefix); ok && strings.Contains(r, "_") {
				out = append(out, accel.Resource(strings.Replace(r, "_", "/", 1)))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}
