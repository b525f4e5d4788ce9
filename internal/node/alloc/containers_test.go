package alloc

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// TestContainersBySixths: a unit that is a part of the device has its memory.
func TestContainersBySixths(t *testing.T) {
	one := pod("one", memoryID, "d0", "c1=2")
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1/6")})
	n.turn(nil, one)
	ids := n.prefer(memoryID, 2, one)
	n.give(memoryID, ids, one)
	n.turn([]Listed{listed(one, memoryID, map[string][]string{"c1": ids})}, one)
	const sixths = 2 * (4 << 30) / 6
	want := []ContainerShare{{PodKey: one.Key(), Container: "c1", Chip: "d0", Bytes: sixths}}
	if diff := cmp.Diff(want, n.Containers(memoryID, nil)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, s := range n.Inventory(memoryID).Shares {
		if s.Units != 6 {
			t.Errorf("device %s has %d units, want 6", s.ID, s.Units)
		}
	}
}

// TestContainers: what containers hold, by chip, of memory and of slots; plain init
// containers only while they run.
func TestContainers(t *testing.T) {
	both := pod("both", memoryID, "d0", "i1=1", "c1=2", "c2=1")
	two := pod("two", memoryID, "d0 d1", "c1=2")
	slots := pod("slots", sharedID, "", "i1=1", "c1=2")
	other := pod("other", sharedID, "", "c1=1")
	share := func(p Pod, container, chip string, bytes uint64) ContainerShare {
		return ContainerShare{PodKey: p.Key(), Container: container, Chip: devices(chip)[0].ID, Bytes: bytes}
	}
	const gb = 1 << 30
	n := boot(t, nil, Config{ID: memoryID, Unit: unit(t, "1")},
		Config{ID: sharedID, Cut: Cut{Replicas: func(sharing.Card) int { return 2 }}})
	if got := n.Containers(memoryID, nil); got != nil {
		t.Errorf("before kubelet was asked: %v", got)
	}
	n.turn(nil, both, two, slots, other)
	init := n.prefer(memoryID, 1, both)
	n.give(memoryID, init, both)
	n.turn([]Listed{listed(both, memoryID, nil)}, both, two, slots, other)
	waiting := []Initializing{{&both, "i1"}}
	want := []ContainerShare{share(both, "i1", "d0", gb)}
	if diff := cmp.Diff(want, n.Containers(memoryID, waiting)); diff != "" {
		t.Errorf("an init container that is not listed (-want +got):\n%s", diff)
	}
	ids := map[accel.DeviceID][]string{}
	for _, one := range strings.Fields(n.list(memoryID)) {
		d, _ := n.DeviceOf(memoryID, one)
		ids[d] = append(ids[d], one)
	}
	d0, d1 := ids["d0"], ids["d1"]
	n.turn([]Listed{
		listed(both, memoryID, map[string][]string{"c1": d0[:2], "c2": d0[2:3]}),
		listed(two, memoryID, map[string][]string{"c1": {d0[3], d1[0]}}),
		listed(slots, sharedID, map[string][]string{"c1": {"d1::0", "d1::1"}}),
		listed(other, sharedID, map[string][]string{"c1": {"d0::0"}}),
	}, both, two, slots, other)
	tests := map[string]struct {
		id      ID
		running []Initializing
		want    []ContainerShare
	}{
		"memory": {memoryID, nil, []ContainerShare{share(both, "c1", "d0", 2*gb), share(both, "c2", "d0", gb), share(two, "c1", "d0", gb),
			share(two, "c1", "d1", gb)}},
		"memory, with an init container": {memoryID, waiting, []ContainerShare{share(both, "c1", "d0", 2*gb), share(both, "c2", "d0", gb),
			share(both, "i1", "d0", gb), share(two, "c1", "d0", gb), share(two, "c1", "d1", gb)}},
		"memory, with one that requests none": {memoryID, []Initializing{{&slots, "i1"}, {&both, "c1"}}, []ContainerShare{
			share(both, "c1", "d0", 2*gb), share(both, "c2", "d0", gb), share(two, "c1", "d0", gb), share(two, "c1", "d1", gb)}},
		"slots": {sharedID, nil, []ContainerShare{share(other, "c1", "d0", 0), share(slots, "c1", "d1", 0)}},
		"slots, with an init container": {sharedID, []Initializing{{&slots, "i1"}}, []ContainerShare{share(other, "c1", "d0", 0),
			share(slots, "c1", "d1", 0), share(slots, "i1", "d1", 0)}},
		"an unknown pool": {ID{"v.example/none", Slots}, nil, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, n.Containers(tt.id, tt.running)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
