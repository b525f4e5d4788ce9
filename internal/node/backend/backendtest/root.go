package backendtest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Root is a driver root with nothing in it yet, for tests of where a vendor's
// library is found.
type Root struct {
	Dir    string
	t      *testing.T
	vendor string
}

// NewRoot returns an empty driver root for the driver of a vendor.
func NewRoot(t *testing.T, vendor string) Root {
	t.Helper()
	return Root{t.TempDir(), t, vendor}
}

// Put makes a file, in the place of the one that is there.
func (r Root) Put(path string, data []byte) (full string) {
	r.t.Helper()
	full = filepath.Join(r.Dir, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		r.t.Fatal(err)
	}
	// Written beside and renamed, as a package manager does: the old file may
	// be in use.
	if err := os.WriteFile(full+".new", data, 0o755); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Rename(full+".new", full); err != nil {
		r.t.Fatal(err)
	}
	return full
}

// Link makes a symbolic link, in the place of the file that is there.
func (r Root) Link(path, target string) {
	r.t.Helper()
	full := filepath.Join(r.Dir, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		r.t.Fatal(err)
	}
	_ = os.Remove(full) // the file that it replaces, if any
	if err := os.Symlink(target, full); err != nil {
		r.t.Fatal(err)
	}
}

// Install puts the stand-in for the vendor's library into the folder, with the
// topology beside it, and returns the topology's path.
func (r Root) Install(folder string, topology vendorsim.Topology) (topologyPath string) {
	r.t.Helper()
	data, err := vendorsim.Compiled(r.vendor)
	if err != nil {
		r.t.Fatal(err)
	}
	file := r.Put(filepath.Join(folder, vendorsim.LibraryName(r.vendor)), data)
	topologyPath = filepath.Join(filepath.Dir(file), vendorsim.TopologyName)
	Write(r.t, topologyPath, topology)
	return topologyPath
}

// Open opens a backend whose driver is in the root, and closes it when the test
// ends. open is the vendor's New.
func Open[B backend.Backend](r Root, open func(backend.Options) (B, error), o backend.Options) B {
	r.t.Helper()
	o.DriverRoot = r.Dir
	b, err := open(o)
	if err != nil {
		r.t.Fatal(err)
	}
	CloseAtEnd(r.t, b)
	return b
}

// Write makes the topology the hardware of the stand-ins that read that file.
func Write(t testing.TB, path string, topology vendorsim.Topology) {
	t.Helper()
	if err := topology.Write(path); err != nil {
		t.Fatal(err)
	}
}

// CloseAtEnd closes b when the test ends, which must work.
func CloseAtEnd(t testing.TB, b backend.Backend) {
	t.Helper()
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
}

// Found discovers, which must work.
func Found(t testing.TB, b backend.Backend) backend.Found {
	t.Helper()
	found, err := b.Discover(t.Context())
	if err != nil {
		t.Fatalf("Discover: %v", err)
	}
	return found
}

// IDs discovers, which must work, and returns the ids of the devices with a
// space between them.
func IDs(t testing.TB, b backend.Backend) string {
	t.Helper()
	var out []string
	for _, d := range Found(t, b).Devices {
		out = append(out, string(d.ID))
	}
	return strings.Join(out, " ")
}

// Reason discovers and returns why that is not possible.
func Reason(t testing.TB, b backend.Backend) string {
	t.Helper()
	found, err := b.Discover(t.Context())
	u := backend.Unavailable(err)
	if u == nil {
		t.Fatalf("Discover = %v, %v; want an UnavailableError", found, err)
	}
	return u.Reason()
}

// WantRestart discovers, which must not be possible before a restart.
func WantRestart(t testing.TB, b backend.Backend) {
	t.Helper()
	var restart *backend.RestartNeededError
	if found, err := b.Discover(t.Context()); !errors.As(err, &restart) {
		t.Errorf("Discover = %v, %v; want a RestartNeededError", found, err)
	}
}

// StaysLoaded opens and closes backends one after the other, as changes of the
// configuration do: the library in the root is loaded once and never unloaded.
func StaysLoaded[B backend.Backend](t *testing.T, r Root, open func(backend.Options) (B, error)) {
	t.Helper()
	first := ""
	for i := range 5 {
		b, err := open(backend.Options{DriverRoot: r.Dir})
		if err != nil {
			t.Fatal(err)
		}
		Found(t, b)
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		where := mapped(t, r.Dir)
		if i == 0 {
			first = where
		}
		if where == "" || where != first {
			t.Errorf("after %d backends were closed, the library is at %q, want where it was: %q", i+1, where, first)
		}
	}
}

// mapped returns where this process has files below a folder in memory.
func mapped(t testing.TB, dir string) string {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	var at []string
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, dir) {
			address, _, _ := strings.Cut(line, " ")
			at = append(at, address)
		}
	}
	return strings.Join(at, " ")
}

// A Broken is hardware or a library that cannot be used, and how that is told.
type Broken = struct {
	Change func(*vendorsim.Topology)
	Reason string
}

// RunBroken tests that a vendor's backend words the reasons so, again and again,
// and finds a device once what is wrong was mended.
func RunBroken(t *testing.T, h Harness, tests map[string]Broken) {
	t.Helper()
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			good := vendorsim.Topology{Cards: h.Cards(1, 1024)}
			topology := good.Clone()
			tt.Change(&topology)
			b, path := h.Open(t, topology, backend.Options{SysfsRoot: t.TempDir()})
			CloseAtEnd(t, b)
			for range 2 {
				if got := Reason(t, b); got != tt.Reason {
					t.Errorf("reason is %q, want %q", got, tt.Reason)
				}
			}
			Write(t, path, good)
			if got, want := IDs(t, b), string(h.ID(good.Cards[0].UUID)); got != want {
				t.Errorf("after the repair: devices %q, want %q", got, want)
			}
		})
	}
}
