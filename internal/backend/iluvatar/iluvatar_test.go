package iluvatar

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/vendorsim"
)

// built is the stand-in for libixml, compiled once for all tests.
var built = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "iluvatar-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }() // in the temporary folder
	path, err := vendorsim.Build(context.Background(), vendorsim.Iluvatar, dir)
	if err != nil {
		return nil, err
	}
	return os.ReadFile(path)
})

// installFolder is where the vendor's package puts the library.
const installFolder = "/usr/local/corex/lib64"

// root is a driver root with nothing in it yet.
type root struct {
	t   *testing.T
	dir string
}

func newRoot(t *testing.T) root {
	t.Helper()
	return root{t, t.TempDir()}
}

func (r root) put(path string, data []byte) string {
	r.t.Helper()
	full := filepath.Join(r.dir, path)
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

// install puts the stand-in into the folder, with the topology beside it, and
// returns the topology's path.
func (r root) install(folder string, topology vendorsim.Topology) string {
	r.t.Helper()
	data, err := built()
	if err != nil {
		r.t.Fatal(err)
	}
	file := r.put(filepath.Join(folder, vendorsim.LibraryName(vendorsim.Iluvatar)), data)
	path := filepath.Join(filepath.Dir(file), vendorsim.TopologyName)
	write(r.t, path, topology)
	return path
}

func (r root) open(o backend.Options) *Backend {
	r.t.Helper()
	o.DriverRoot = r.dir
	b, err := New(o)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := b.Close(); err != nil {
			r.t.Errorf("Close: %v", err)
		}
	})
	return b
}

func write(t *testing.T, path string, topology vendorsim.Topology) {
	t.Helper()
	if err := topology.Write(path); err != nil {
		t.Fatal(err)
	}
}

// node is a backend with hardware of its own.
type node struct {
	*Backend
	t        *testing.T
	root     root
	path     string
	topology vendorsim.Topology
}

func start(t *testing.T, topology vendorsim.Topology, o backend.Options) *node {
	t.Helper()
	r := newRoot(t)
	path := r.install(installFolder, topology)
	return &node{Backend: r.open(o), t: t, root: r, path: path, topology: topology.Clone()}
}

func (n *node) change(f func(*vendorsim.Topology)) {
	n.t.Helper()
	f(&n.topology)
	write(n.t, n.path, n.topology)
}

func (n *node) found() backend.Found {
	n.t.Helper()
	found, err := n.Discover(n.t.Context())
	if err != nil {
		n.t.Fatalf("Discover: %v", err)
	}
	return found
}

// seats returns where each chip is, by the chip's index.
func (n *node) seats() map[int]seat {
	n.t.Helper()
	out := map[int]seat{}
	for _, d := range n.found().Devices {
		out[d.Index] = seat{d.Board, d.Chip}
	}
	return out
}

func (n *node) id(card int) accel.DeviceID { return accel.DeviceID(n.topology.Cards[card].UUID) }

func boards(boards, chips int) vendorsim.Topology {
	return vendorsim.Topology{Cards: vendorsim.IXBoards(boards, chips, 32768)}
}

// fails makes a call about a card fail.
func fails(c *vendorsim.Card, call string, code int) {
	c.Fail = vendorsim.Failures{call: code}
}

// reason discovers and returns why that is not possible.
func reason(t *testing.T, b *Backend) string {
	t.Helper()
	found, err := b.Discover(t.Context())
	u := backend.Unavailable(err)
	if u == nil {
		t.Fatalf("Discover = %v, %v; want an UnavailableError", found, err)
	}
	return u.Reason()
}

// uuids discovers and returns the uuids found.
func uuids(t *testing.T, b *Backend) string {
	t.Helper()
	found, err := b.Discover(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, d := range found.Devices {
		out = append(out, string(d.ID))
	}
	return strings.Join(out, " ")
}

func one(uuid string) vendorsim.Topology {
	topology := boards(1, 1)
	topology.Cards[0].UUID = uuid
	return topology
}

func TestConformance(t *testing.T) {
	backendtest.Run(t, backendtest.Harness{
		Cards:    func(n int, memoryMiB int64) []vendorsim.Card { return vendorsim.IXBoards(n, 1, memoryMiB) },
		Boards:   vendorsim.IXBoards,
		ID:       func(uuid string) accel.DeviceID { return accel.DeviceID(uuid) },
		CardCall: "nvmlDeviceGetMemoryInfo",
		FailCode: codeUnknown,
		LinkCall: "nvmlDeviceGetTopologyCommonAncestor",
		Open: func(t *testing.T, first vendorsim.Topology, o backend.Options) (backend.Backend, string) {
			t.Helper()
			r := newRoot(t)
			path := r.install(installFolder, first)
			o.DriverRoot = r.dir
			b, err := New(o)
			if err != nil {
				t.Fatal(err)
			}
			return b, path
		},
	})
}
