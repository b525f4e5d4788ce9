package alloc

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

var (
	gpuID   = ID{"v.example/gpu", Slots}
	smallID = ID{"v.example/mig-small", Slots}
)

// gpus are pools of whole devices, of partitions and of memory, as a configuration makes
// them that offers partitions by their profile.
func gpus(t *testing.T) []Config {
	t.Helper()
	whole := func(c sharing.Card) bool { return c.Profile == "" && !c.Partitioned }
	return []Config{
		{ID: gpuID, Chooses: whole}, {ID: memoryID, Unit: unit(t, "1"), Chooses: whole},
		{ID: smallID, Chooses: func(c sharing.Card) bool { return c.Profile == "small" }},
	}
}

// sees lets all pools know d0 and d1, of which d0 is cut into these partitions; nil for
// one that is not cut.
func (n *node) sees(partitions []string) {
	all := devices("d0", "d1")
	all[0].Partitioned = partitions != nil
	for i, id := range partitions {
		all = append(all, accel.Device{
			Index: accel.PartitionIndex(0, i), ID: accel.DeviceID(id), Parent: "d0", Profile: "small", MemoryBytes: 1 << 30,
		})
	}
	for _, p := range n.pools {
		n.Discover(p.config.ID, Discovery{Devices: all})
	}
	n.sync()
}

// TestPartitionThatVanishes: while a container holds it, it is on kubelet's list and the
// device that it was cut from is not offered; also after a restart.
func TestPartitionThatVanishes(t *testing.T) {
	n := boot(t, nil, gpus(t)...)
	n.turn(nil)
	n.sees([]string{"m0", "m1"})
	if got := n.list(gpuID) + "; " + n.list(smallID); got != "d1; m0 m1" {
		t.Errorf("offered are %q", got)
	}
	p := pod("a", smallID, "", "c0=1")
	n.give(smallID, []string{"m0"}, p)
	holds := listed(p, smallID, map[string][]string{"c0": {"m0"}})
	n.turn([]Listed{holds}, p)

	for _, when := range []string{"at once", "after a restart"} {
		n.sees(nil)
		n.turn([]Listed{holds}, p)
		if got := n.list(gpuID) + "; " + n.list(smallID); got != "d1; m0" {
			t.Errorf("%s, offered are %q while m0 is held and d0 whole again", when, got)
		}
		if _, err := n.Allocate(gpuID, []string{"d0"}, nil, false); err == nil || !strings.Contains(err.Error(), "given out as "+
			string(smallID.Resource)) {
			t.Errorf("%s, d0: %v", when, err)
		}
		for _, s := range n.Inventory(memoryID).Shares {
			if s.ID == "d0" && !s.Health.Unhealthy {
				t.Errorf("%s, units of d0 are offered", when)
			}
		}
		for _, s := range n.Inventory(smallID).Shares {
			if s.ID != "m0" || !s.Health.Unhealthy || s.Health.Reason != "the partition does not exist any more" || s.Parent != "d0" ||
				s.Profile != "small" {
				t.Errorf("%s, the inventory has %+v", when, s)
			}
		}
		if when == "at once" {
			n = boot(t, n, gpus(t)...)
		}
	}
	n.now = n.now.Add(Recorded)
	n.turn(nil)
	n.sees(nil)
	if got := n.list(gpuID) + "; " + n.list(smallID); got != "d0 d1; " {
		t.Errorf("offered are %q once m0 is free", got)
	}
}

// TestPartitionsOfADeviceInUse: what is cut out of a device that a container holds as a
// whole, or by units of its memory, is not offered.
func TestPartitionsOfADeviceInUse(t *testing.T) {
	for _, tt := range []struct {
		id  ID
		ids []string
	}{{gpuID, []string{"d0"}}, {memoryID, []string{"0", "1"}}} {
		t.Run(tt.id.String(), func(t *testing.T) {
			n := boot(t, nil, gpus(t)...)
			n.turn(nil)
			p := pod("a", tt.id, "d0", "c0=1")
			n.give(tt.id, tt.ids, p)
			holds := listed(p, tt.id, map[string][]string{"c0": tt.ids})
			n.turn([]Listed{holds}, p)
			n.sees([]string{"m0"})
			n.turn([]Listed{holds}, p)
			if got := n.list(smallID); got != "" {
				t.Errorf("offered are %q", got)
			}
			n.now = n.now.Add(Recorded)
			n.turn(nil)
			if got := n.list(smallID); got != "m0" {
				t.Errorf("offered are %q once d0 is free", got)
			}
		})
	}
}

// TestRepartition: partitions that no container holds come and go with what is listed.
func TestRepartition(t *testing.T) {
	n := boot(t, nil, gpus(t)...)
	n.turn(nil)
	for _, tt := range []struct {
		partitions []string
		want       string
	}{{[]string{"m0", "m1"}, "d1; m0 m1"}, {[]string{"m1", "m2"}, "d1; m1 m2"}, {[]string{}, "d1; "}, {nil, "d0 d1; "}} {
		n.sees(tt.partitions)
		if got := n.list(gpuID) + "; " + n.list(smallID); got != tt.want {
			t.Errorf("with %q, offered are %q, want %q", tt.partitions, got, tt.want)
		}
		if len(n.lists[smallID]) != len(tt.partitions) {
			t.Errorf("with %q, kubelet counts %v", tt.partitions, n.lists[smallID])
		}
	}
}

// TestPartitionThatCannotBeDescribed: it was not deleted.
func TestPartitionThatCannotBeDescribed(t *testing.T) {
	n := boot(t, nil, gpus(t)...)
	n.turn(nil)
	n.sees([]string{"m0", "m1"})
	found := n.pools.find(smallID).found
	found.Devices = slices.DeleteFunc(slices.Clone(found.Devices), func(d accel.Device) bool { return d.ID == "m1" })
	found.Faults = []Fault{{ID: "m1", Err: errors.New("unknown error")}}
	n.Discover(smallID, found)
	n.sync()
	if got := n.list(smallID); got != "m0" || len(n.lists[smallID]) != 2 {
		t.Errorf("offered are %q of %v", got, n.lists[smallID])
	}
}

// TestAbsentBesidePartitions: a resource of which the node has nothing is no problem beside
// a partition that is not offered, and is one while the devices may not be offered at all.
func TestAbsentBesidePartitions(t *testing.T) {
	for name, tt := range map[string]struct {
		faults []Fault
		err    error
		absent bool
	}{
		"partitions alone":  {nil, nil, true},
		"one not offered":   {[]Fault{{ID: "m1", Err: errors.New("a part of an instance"), NotOffered: true}}, nil, true},
		"one with a fault":  {[]Fault{{ID: "m1", Err: errors.New("unknown error")}}, nil, false},
		"an unequal layout": {nil, errors.New("the partitions differ"), false},
	} {
		t.Run(name, func(t *testing.T) {
			n := boot(t, nil, gpus(t)[:1]...)
			n.Engine, _ = New(n.pools[0].config)
			all := devices("d0")
			all[0].Partitioned = true
			n.Discover(gpuID, Discovery{Devices: all, Faults: tt.faults, Err: tt.err})
			n.sync()
			if got := n.Status(gpuID).Absent; got != tt.absent {
				t.Errorf("absent is %t, want %t", got, tt.absent)
			}
		})
	}
}
