package iluvatar

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func edits(t *testing.T, n *node, ids ...accel.DeviceID) backend.Edits {
	t.Helper()
	e, err := n.Edits(ids...)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func TestEdits(t *testing.T) {
	topology := boards(1, 2)
	topology.Cards[0].Minor = new(5)
	topology.Cards[0].UUID, topology.Cards[1].UUID = "GPU-b", "GPU-a"
	n := start(t, topology, backend.Options{HostDriverRoot: "/run/corex"})
	n.found()
	n.root.Put("/dev/itrctl", nil)
	want := backend.Edits{
		Env: map[string]string{
			"IX_VISIBLE_DEVICES":             "GPU-b,GPU-a",
			"ILUVATAR_COREX_VISIBLE_DEVICES": "GPU-b,GPU-a",
		},
		ReplicaEnv: []string{"ILUVATAR_COREX_REPLICA_DEVICES", "IX_REPLICA_DEVICES"},
		DeviceNodes: []backend.DeviceNode{
			{Path: "/dev/iluvatar5", HostPath: "/run/corex/dev/iluvatar5", Permissions: "rw"},
			{Path: "/dev/iluvatar1", HostPath: "/run/corex/dev/iluvatar1", Permissions: "rw"},
			{Path: "/dev/itrctl", HostPath: "/run/corex/dev/itrctl", Permissions: "rw"},
		},
		CDIDevices: []backend.CDIDevice{
			{Kind: "iluvatar.com/gpu", Name: "GPU-b"},
			{Kind: "iluvatar.com/gpu", Name: "GPU-a"},
		},
	}
	if diff := cmp.Diff(want, edits(t, n, "GPU-a", "GPU-b", "GPU-a")); diff != "" {
		t.Errorf("edits (-want +got):\n%s", diff)
	}
}

// A container that gets all chips of the node sees what it would see of the
// same chips on a larger node.
func TestEditsDoNotDependOnTheNodesSize(t *testing.T) {
	chips := boards(2, 2).Cards
	for i := range chips {
		chips[i].Minor = new(i + 3)
	}
	all := func(topology vendorsim.Topology) backend.Edits {
		t.Helper()
		n := start(t, topology, backend.Options{})
		n.found()
		return edits(t, n, n.id(0), n.id(1))
	}
	whole := all(vendorsim.Topology{Cards: chips[:2]})
	part := all(vendorsim.Topology{Cards: chips})
	if diff := cmp.Diff(part, whole); diff != "" {
		t.Errorf("edits on a node with these chips alone (-larger node +this node):\n%s", diff)
	}
	for i, d := range whole.DeviceNodes {
		if want := []string{"/dev/iluvatar3", "/dev/iluvatar4"}[i]; d.Path != want || d.HostPath != want {
			t.Errorf("device node %d is %+v, want %s inside and outside", i, d, want)
		}
	}
}

func TestOrderNeverChanges(t *testing.T) {
	topology := boards(4, 2)
	slices.Reverse(topology.Cards)
	n := start(t, topology, backend.Options{})
	found := n.found()
	var ids []accel.DeviceID
	for i, d := range found.Devices {
		if d.Index != i {
			t.Fatalf("devices are not in the order of their index: %v", found.Devices)
		}
		ids = append(ids, d.ID)
	}
	want := edits(t, n, ids...)
	for range 20 {
		if again := n.found(); !again.Equal(found) {
			t.Fatalf("another discovery differs:\n%s", cmp.Diff(found.Devices, again.Devices))
		}
		slices.Reverse(ids)
		if diff := cmp.Diff(want, edits(t, n, ids...)); diff != "" {
			t.Fatalf("other edits (-first +now):\n%s", diff)
		}
	}
}

// A chip that was taken out leaves its device file to another.
func TestEditsRefuseAFileThatAnotherChipHas(t *testing.T) {
	topology := boards(2, 1)
	n := start(t, topology, backend.Options{})
	n.found()
	n.change(func(topology *vendorsim.Topology) {
		topology.Cards[1].Lost = true
		topology.Cards[0].Minor = new(1)
	})
	n.found()
	if e, err := n.Edits(n.id(1)); err == nil {
		t.Errorf("Edits of a chip whose file is another's: %+v", e)
	}
}

func TestIndexInEnv(t *testing.T) {
	n := start(t, boards(1, 3), backend.Options{IndexInEnv: true})
	n.found()
	for name, value := range edits(t, n, n.id(2), n.id(0)).Env {
		if value != "0,2" {
			t.Errorf("%s is %q, want 0,2", name, value)
		}
	}
}
