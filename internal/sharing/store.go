package sharing

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// The names of state files: a prefix, the resource with "_" for "/", a suffix.
const (
	memoryPrefix = "units-"
	slotPrefix   = "slots-"
	stateSuffix  = ".json"
)

func statePath(dir, prefix string, resource accel.Resource) string {
	return filepath.Join(dir, prefix+strings.ReplaceAll(string(resource), "/", "_")+stateSuffix)
}

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

// State is what a node remembers of a resource of memory between restarts.
type State struct {
	// Vendor is whose devices they are; "" in files of before there were several.
	Vendor string `json:"vendor,omitempty"`
	// Unit is the memory unit that the ranges are counted in.
	Unit string `json:"unit"`
	// Ranges say which ids belong to which device.
	Ranges []Range `json:"ranges"`
}

// Store keeps the State of one resource in a file. It is not safe for
// concurrent use.
type Store struct{ stateFile }

// NewStore returns the store of a resource below dir.
func NewStore(dir string, resource accel.Resource) *Store {
	return &Store{stateFile{path: statePath(dir, memoryPrefix, resource)}}
}

// Load returns the saved state; a file that does not exist is the empty state.
// A damaged file is an error that wraps ErrDamaged.
func (s *Store) Load() (State, *Layout, error) {
	var st State
	if exists, err := s.load(&st); err != nil || !exists {
		return State{}, &Layout{}, err
	}
	layout, err := NewLayout(st.Ranges)
	if err != nil {
		return State{}, nil, s.damaged(err)
	}
	return st, layout, nil
}

// Save makes the file hold the state, and does nothing where it does. A crash
// leaves the old file or the new one.
func (s *Store) Save(st State) error { return s.save(st) }

// SlotState is what a node remembers of a resource of whole devices or time
// slices between restarts.
type SlotState struct {
	// Vendor is whose devices they are.
	Vendor string `json:"vendor"`
	// Cards are those that are offered and those that are away or offered no
	// more while containers hold slots of them.
	Cards []StoredCard `json:"cards"`
	// Boards are what Boards.Known returned.
	Boards []Board `json:"boards,omitempty"`
	// Held are the slots that containers hold.
	Held []HeldSlot `json:"held,omitempty"`
}

// StoredCard describes a card while it is away.
type StoredCard struct {
	ID          accel.DeviceID   `json:"id"`
	Index       int              `json:"index"`
	Model       string           `json:"model,omitempty"`
	MemoryBytes int64            `json:"memoryBytes"`
	NUMANode    int              `json:"numaNode"`
	NUMANodes   []int            `json:"numaNodes,omitempty"`
	Board       string           `json:"board,omitempty"`
	Chips       []accel.DeviceID `json:"chips"`
}

// HeldSlot is a slot that was given to a container.
type HeldSlot struct {
	ID string `json:"id"`
	// Chips are those that the container got with it: the same id may mean
	// others after a change of the configuration. None when that is not known.
	Chips []accel.DeviceID `json:"chips,omitempty"`
	// Inits are the pods, as namespace/name/UID, one of whose plain init
	// containers may be the holder; kubelet does not list what those hold.
	Inits []string `json:"inits,omitempty"`
}

// SlotStore keeps the SlotState of one resource in a file. It is not safe for
// concurrent use.
type SlotStore struct{ stateFile }

// NewSlotStore returns the store of a resource below dir.
func NewSlotStore(dir string, resource accel.Resource) *SlotStore {
	return &SlotStore{stateFile{path: statePath(dir, slotPrefix, resource)}}
}

// Load returns the saved state, false when there is none. A damaged file is an
// error that wraps ErrDamaged.
func (s *SlotStore) Load() (SlotState, bool, error) {
	var st SlotState
	exists, err := s.load(&st)
	if err != nil {
		return SlotState{}, false, err
	}
	for _, c := range st.Cards {
		if c.ID == "" || len(c.Chips) == 0 {
			return SlotState{}, false, s.damaged(fmt.Errorf("a card has no id or no chips: %+v", c))
		}
	}
	return st, exists, nil
}

// Save makes the file hold the state, and does nothing where it does. A crash
// leaves the old file or the new one.
func (s *SlotStore) Save(st SlotState) error { return s.save(st) }
