package sharing

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/accel"
)

func TestSlotStoreKeepsWhatItWasGiven(t *testing.T) {
	dir := t.TempDir()
	s := NewSlotStore(dir, "nvidia.com/gpu")
	if _, exists, err := s.Load(); exists || err != nil {
		t.Errorf("before anything was saved: %v, %v", exists, err)
	}
	want := SlotState{
		Vendor: "nvidia",
		Cards:  []StoredCard{{ID: "a", Index: 1, Model: "M", MemoryBytes: 5, NUMANode: -1, Board: "a", Chips: []accel.DeviceID{"a", "b"}}},
		Boards: []Board{{ID: "a", Chips: []BoardChip{{ID: "a"}, {Chip: 1, ID: "b"}}}},
		Held:   []HeldSlot{{ID: "a::1", Chips: []accel.DeviceID{"a"}, Inits: []string{"uid"}}},
	}
	if err := s.Save(want); err != nil {
		t.Fatal(err)
	}
	got, exists, err := s.Load()
	if err != nil || !exists {
		t.Fatal(exists, err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := os.WriteFile(filepath.Join(dir, "slots-nvidia.com_gpu.json"), []byte(`{"version":1,"sum":1,"state":{}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Load(); !errors.Is(err, ErrDamaged) {
		t.Errorf("a changed file: %v", err)
	}
}

func TestStoredNamesTheResources(t *testing.T) {
	dir := t.TempDir()
	if got, err := Stored(filepath.Join(dir, "none")); err != nil || got != nil {
		t.Errorf("without a folder: %v, %v", got, err)
	}
	for _, r := range []accel.Resource{"nvidia.com/gpu", "enflame.com/gcu_x"} {
		if err := NewSlotStore(dir, r).Save(SlotState{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := NewStore(dir, "nvidia.com/gpu").Save(State{}); err != nil {
		t.Fatal(err)
	}
	if _, err := NewStore(dir, "nvidia.com/gpu").Quarantine(); err != nil {
		t.Fatal(err)
	}
	if err := NewStore(dir, "enflame.com/gcu-memory").Save(State{}); err != nil {
		t.Fatal(err)
	}
	got, err := Stored(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]accel.Resource{"enflame.com/gcu-memory", "enflame.com/gcu_x", "nvidia.com/gpu"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
