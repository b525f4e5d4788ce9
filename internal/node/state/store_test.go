package state

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

func memory(r accel.Resource) alloc.ID { return alloc.ID{Resource: r, Kind: alloc.Memory} }
func slots(r accel.Resource) alloc.ID  { return alloc.ID{Resource: r, Kind: alloc.Slots} }

func TestSlotStoreKeepsWhatItWasGiven(t *testing.T) {
	dir := t.TempDir()
	s := NewStore(dir, slots("nvidia.com/gpu"))
	if got, err := s.Load(); got != nil || err != nil {
		t.Errorf("before anything was saved: %v, %v", got, err)
	}
	want := alloc.State{
		Vendor: "nvidia",
		Cards: []alloc.StoredCard{{ID: "a", Index: 1, Model: "M", MemoryBytes: 5, NUMANode: -1,
			Board: "a", Chips: []accel.DeviceID{"a", "b"}}},
		Boards: []sharing.Board{{ID: "a", Chips: []sharing.BoardChip{{ID: "a"}, {Chip: 1, ID: "b"}}}},
		Held:   []alloc.HeldSlot{{ID: "a::1", Chips: []accel.DeviceID{"a"}, Inits: []string{"uid"}}},
	}
	if err := s.Save(want); err != nil {
		t.Fatal(err)
	}
	got, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := os.WriteFile(filepath.Join(dir, "slots-nvidia.com_gpu.json"), []byte(`{"version":1,"sum":1,"state":{}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Load(); !errors.Is(err, ErrDamaged) {
		t.Errorf("a changed file: %v", err)
	}
}

func TestStoreOfMemory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	s := NewStore(dir, memory("enflame.com/gcu-memory"))
	if st, err := s.Load(); err != nil || st != nil {
		t.Fatalf("no file: %v %v", st, err)
	}
	want := alloc.State{Unit: "0.1", Ranges: []sharing.Range{{Device: "a", Units: 16, MemoryBytes: 16 << 30}, {Device: "b",
		Index: 1, Start: 16, Units: 8, MemoryBytes: 8 << 30}}}
	must(t, s.Save(want))
	got, err := s.Load()
	must(t, err)
	if diff := cmp.Diff(&want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) != 1 {
		t.Errorf("files left: %v, %v", left, err)
	}
	good, err := os.ReadFile(s.path)
	must(t, err)
	for name, text := range map[string]string{
		"cut off":         string(good[:len(good)/2]),
		"empty":           "",
		"changed by hand": strings.Replace(string(good), `"units":16`, `"units":17`, 1),
		"another version": strings.Replace(string(good), `"version":1`, `"version":9`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			must(t, os.WriteFile(s.path, []byte(text), 0o600))
			if _, err := s.Load(); !errors.Is(err, ErrDamaged) {
				t.Errorf("want ErrDamaged, got %v", err)
			}
		})
	}
	if to, err := s.Quarantine(); err != nil {
		t.Error(err)
	} else if _, err := os.Stat(to); err != nil {
		t.Error(err)
	}
}

// TestFilesOfBefore: files are read that earlier releases wrote, with a type for each
// kind of pool, and what is written now is what those read.
func TestFilesOfBefore(t *testing.T) {
	for name, tt := range map[string]struct {
		id   alloc.ID
		file string
		want alloc.State
	}{
		"units-a.example_memory.json": {
			id: memory("a.example/memory"),
			file: `{"version":1,"sum":508243066,"state":{"vendor":"a","unit":"1","ranges":[` +
				`{"device":"x","index":2,"start":0,"units":16,"model":"M","memoryBytes":17179869184,"numaNode":-1}]}}`,
			want: alloc.State{Vendor: "a", Unit: "1", Ranges: []sharing.Range{{Device: "x", Index: 2, Units: 16, Model: "M",
				MemoryBytes: 16 << 30, NUMANode: -1}}},
		},
		"slots-a.example_gpu.json": {
			id: slots("a.example/gpu"),
			file: `{"version":1,"sum":183915849,"state":{"vendor":"a","cards":[{"id":"x","index":1,"memoryBytes":5,"numaNode":0,` +
				`"chips":["x","y"]}],` +
				`"boards":[{"id":"x","chips":[{"chip":0,"id":"x","numa":0},{"chip":1,"id":"y","numa":0}]}],"held":[{"id":"x::1",` +
				`"chips":["x","y"],"inits":["ns/p/u"]}]}}`,
			want: alloc.State{
				Vendor: "a", Cards: []alloc.StoredCard{{ID: "x", Index: 1, MemoryBytes: 5, Chips: []accel.DeviceID{"x", "y"}}},
				Boards: []sharing.Board{{ID: "x", Chips: []sharing.BoardChip{{ID: "x"}, {Chip: 1, ID: "y"}}}},
				Held:   []alloc.HeldSlot{{ID: "x::1", Chips: []accel.DeviceID{"x", "y"}, Inits: []string{"ns/p/u"}}},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, name)
			must(t, os.WriteFile(path, []byte(tt.file), 0o600))
			got, err := NewStore(dir, tt.id).Load()
			must(t, err)
			if diff := cmp.Diff(&tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			must(t, os.Remove(path))
			must(t, NewStore(dir, tt.id).Save(tt.want))
			if text, err := os.ReadFile(path); err != nil || string(text) != tt.file {
				t.Errorf("written is %s, %v", text, err)
			}
		})
	}
}

func TestStoredNamesTheResources(t *testing.T) {
	dir := t.TempDir()
	if got, err := Stored(filepath.Join(dir, "none")); err != nil || got != nil {
		t.Errorf("without a folder: %v, %v", got, err)
	}
	for _, r := range []accel.Resource{"nvidia.com/gpu", "enflame.com/gcu_x"} {
		if err := NewStore(dir, slots(r)).Save(alloc.State{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := NewStore(dir, memory("nvidia.com/gpu")).Save(alloc.State{}); err != nil {
		t.Fatal(err)
	}
	if _, err := NewStore(dir, memory("nvidia.com/gpu")).Quarantine(); err != nil {
		t.Fatal(err)
	}
	if err := NewStore(dir, memory("enflame.com/gcu-memory")).Save(alloc.State{}); err != nil {
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
	state := alloc.State{Vendor: "nvidia", Cards: []alloc.StoredCard{{ID: "a", Chips: []accel.DeviceID{"a"}}}}
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
				s := NewStore(dir, slots("nvidia.com/gpu"))
				must(t, s.Save(state))
				if loaded { // a process that has read it and written nothing yet
					s = NewStore(dir, slots("nvidia.com/gpu"))
					if _, err := s.Load(); err != nil {
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
				if got, err := NewStore(dir, slots("nvidia.com/gpu")).Load(); err != nil || !cmp.Equal(got, &state) {
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
