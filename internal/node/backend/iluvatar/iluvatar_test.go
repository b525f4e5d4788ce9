package iluvatar

import (
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// installFolder is where the vendor's package puts the library.
const installFolder = "/usr/local/corex/lib64"

// root is a driver root.
type root struct{ backendtest.Root }

func newRoot(t *testing.T) root {
	t.Helper()
	return root{backendtest.NewRoot(t, vendorsim.Iluvatar)}
}

func (r root) open(o backend.Options) *Backend {
	return backendtest.Open(r.Root, New, o)
}

func write(t *testing.T, path string, topology vendorsim.Topology) {
	t.Helper()
	backendtest.Write(t, path, topology)
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
	path := r.Install(installFolder, topology)
	return &node{Backend: r.open(o), t: t, root: r, path: path, topology: topology.Clone()}
}

func (n *node) change(f func(*vendorsim.Topology)) {
	n.t.Helper()
	f(&n.topology)
	write(n.t, n.path, n.topology)
}

func (n *node) found() backend.Found {
	n.t.Helper()
	return backendtest.Found(n.t, n)
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
	c.Calls.Fail = vendorsim.Failures{call: code}
}

func reason(t *testing.T, b *Backend) string {
	t.Helper()
	return backendtest.Reason(t, b)
}

func uuids(t *testing.T, b *Backend) string {
	t.Helper()
	return backendtest.IDs(t, b)
}

func one(uuid string) vendorsim.Topology {
	topology := boards(1, 1)
	topology.Cards[0].UUID = uuid
	return topology
}

// harness is what the tests of all vendors must know of this one.
var harness = backendtest.Harness{
	Cards:    func(n int, memoryMiB int64) []vendorsim.Card { return vendorsim.IXBoards(n, 1, memoryMiB) },
	Boards:   vendorsim.IXBoards,
	ID:       func(uuid string) accel.DeviceID { return accel.DeviceID(uuid) },
	CardCall: "nvmlDeviceGetMemoryInfo",
	FailCode: codeUnknown,
	LinkCall: "nvmlDeviceGetTopologyCommonAncestor",
	Open: func(t *testing.T, first vendorsim.Topology, o backend.Options) (backend.Backend, string) {
		t.Helper()
		r := newRoot(t)
		path := r.Install(installFolder, first)
		return r.open(o), path
	},
}

func TestConformance(t *testing.T) { backendtest.Run(t, harness) }
