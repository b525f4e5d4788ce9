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

// TestSaveWritesWhatTheFileLacks: the file is written where it does not hold the state, and
// left alone where it does.
func TestSaveWritesWhatTheFileLacks(t *testing.T) {
	state := SlotState{Vendor: "nvidia", Cards: []StoredCard{{ID: "a", Chips: []accel.DeviceID{"a"}}}}
	tests := map[string]struct {
		harm func(path string) error
		// written is true where Save must write the file again.
		written bool
	}{
		"nothing happened":     {func(string) error { return nil }, false},
		"the file was removed": {os.Remove, true},
		"the file was emptied": {func(path string) error { return os.Truncate(path, 0) }, true},
		"the file was replaced": {func(path string) error {
			return errors.Join(os.WriteFile(path+"~", []byte("{}"), 0o600), os.Rename(path+"~", path))
		}, true},
		"the folder was removed": {func(path string) error { return os.RemoveAll(filepath.Dir(path)) }, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for _, loaded := range []bool{false, true} {
				dir := filepath.Join(t.TempDir(), "state")
				path := filepath.Join(dir, "slots-nvidia.com_gpu.json")
				s := NewSlotStore(dir, "nvidia.com/gpu")
				must(t, s.Save(state))
				if loaded { // a process that has read it and written nothing yet
					s = NewSlotStore(dir, "nvidia.com/gpu")
					if _, _, err := s.Load(); err != nil {
						t.Fatal(err)
					}
				}
				// While it is open no other file gets its number.
				file, err := os.Open(path)
				must(t, err)
				t.Cleanup(func() { _ = file.Close() })
				before, err := file.Stat()
				must(t, err)
				must(t, tt.harm(path))
				must(t, s.Save(state))
				after, err := os.Stat(path)
				must(t, err)
				if written := !os.SameFile(before, after); written != tt.written {
					t.Errorf("loaded %t: written again %t, want %t", loaded, written, tt.written)
				}
				if got, _, err := NewSlotStore(dir, "nvidia.com/gpu").Load(); err != nil || !cmp.Equal(got, state) {
					t.Errorf("loaded %t: the file holds %+v, %v", loaded, got, err)
				}
				folder, err := os.Stat(dir)
				must(t, err)
				if folder.Mode().Perm() != 0o750 || after.Mode().Perm() != 0o600 {
					t.Errorf("loaded %t: folder %v, file %v; want 0750 and 0600", loaded, folder.Mode(), after.Mode())
				}
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
