package dra

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

var update = flag.Bool("update", false, "write the golden files")

const gib = int64(1) << 30

// The resources of a node.
var (
	whole  = alloc.Config{ID: alloc.ID{Resource: "whole", Kind: alloc.Slots}}
	memory = alloc.Config{ID: alloc.ID{Resource: "memory", Kind: alloc.Memory}}
	slots  = alloc.Config{ID: alloc.ID{Resource: "slots", Kind: alloc.Slots}, Cut: alloc.Cut{Replicas: func(sharing.Card) int { return 4 }}}
)

// devicesOf returns the devices that claims get.
func devicesOf(t *testing.T, vendor string, d alloc.Discovery, ways ...alloc.Config) []alloc.ClaimDevice {
	t.Helper()
	e, err := alloc.New()
	if err != nil {
		t.Fatal(err)
	}
	e.Claims.Serve(vendor, ways...)
	e.Claims.Discover(vendor, d)
	return e.Claims.Devices(vendor)
}

func nvidia() alloc.Discovery {
	var out alloc.Discovery
	for i := range 3 {
		out.Devices = append(out.Devices, accel.Device{
			Index: i, ID: accel.DeviceID(fmt.Sprintf("GPU-3b1f0e52-0000-4000-8000-00000000000%d", i)), Model: "NVIDIA A100-SXM4-40GB",
			MemoryBytes: 40*gib - 1, NUMANode: i % 2, PCI: fmt.Sprintf("0000:1%d:00.0", i),
		})
	}
	out.Links = []accel.Link{{A: out.Devices[0].ID, B: out.Devices[1].ID, Score: 12*accel.LinkLane + accel.LinkNode},
		{A: out.Devices[0].ID, B: out.Devices[2].ID, Score: accel.LinkNode}}
	return out
}

func iluvatar() alloc.Discovery {
	var out alloc.Discovery
	for i := range 3 {
		id := accel.DeviceID(fmt.Sprintf("GPU-9c4d2a10-1000-5000-8000-00000000000%d", i))
		d := accel.Device{Index: i, ID: id, Model: "Iluvatar BI-V150", MemoryBytes: 32 * gib, NUMANode: accel.NoNUMA, Chip: i % 2}
		if i < 2 {
			d.Board = "GPU-9c4d2a10-1000-5000-8000-000000000000"
		}
		out.Devices = append(out.Devices, d)
	}
	return out
}

func TestPools(t *testing.T) {
	all := Stored{Counters: true, Taints: true, Shares: true}
	facts := Facts{Driver: "550.054.1", Links: nvidia().Links, PCIeRoots: map[string]string{"0000:10:00.0": "pci0000:10"}}
	mig := nvidia()
	mig.Devices = mig.Devices[:1]
	mig.Devices[0].Partitioned = true
	for i, profile := range []string{"1g.5gb", "3g.20gb"} {
		p := mig.Devices[0]
		p.Index, p.ID = accel.PartitionIndex(0, i), accel.DeviceID(fmt.Sprintf("MIG-00%d", i))
		p.Parent, p.Profile = mig.Devices[0].ID, profile
		p.Partitioned, p.MemoryBytes = false, 5*gib
		mig.Devices = append(mig.Devices, p)
	}
	gcu := alloc.Discovery{Devices: []accel.Device{
		{Index: 0, ID: "U53000090104", Model: "Enflame S60", MemoryBytes: 42 * gib, NUMANode: 0},
		{Index: 1, ID: "U53000090105", MemoryBytes: 42 * gib, NUMANode: accel.NoNUMA,
			Health: accel.Health{Unhealthy: true, Reason: "hot", Cause: "over-temperature"}},
	}}
	partitions := alloc.Config{ID: alloc.ID{Resource: "mig", Kind: alloc.Slots},
		Chooses: func(c sharing.Card) bool { return c.Parent != "" }}
	inUse := devicesOf(t, "enflame", gcu, memory)
	inUse[0].Elsewhere = "enflame.com/gcu-memory"
	tests := map[string]struct {
		vendor  string
		devices []alloc.ClaimDevice
		stored  Stored
	}{
		"nvidia":                 {"nvidia", devicesOf(t, "nvidia", nvidia(), whole), all},
		"nvidia-slices":          {"nvidia", devicesOf(t, "nvidia", nvidia(), memory, slots), all},
		"nvidia-no-counters":     {"nvidia", devicesOf(t, "nvidia", nvidia(), slots, memory), Stored{Taints: true, Shares: true}},
		"nvidia-mig":             {"nvidia", devicesOf(t, "nvidia", mig, partitions), all},
		"iluvatar":               {"iluvatar", devicesOf(t, "iluvatar", iluvatar(), whole, memory), all},
		"iluvatar-no-counters":   {"iluvatar", devicesOf(t, "iluvatar", iluvatar(), whole, memory), Stored{Taints: true, Shares: true}},
		"enflame":                {"enflame", inUse, all},
		"enflame-no-taints":      {"enflame", inUse, Stored{Counters: true, Shares: true}},
		"enflame-without-device": {"enflame", nil, all},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := yaml.Marshal(Pool(tt.vendor, tt.devices, facts, tt.stored))
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join("testdata", name+".yaml")
			if *update {
				if err := os.WriteFile(path, got, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestLinkGroups: devices are in one group if direct lanes connect them, over other devices too.
func TestLinkGroups(t *testing.T) {
	const lane = accel.LinkLane + accel.LinkNode
	chips := alloc.Discovery{}
	for i, name := range []string{"a", "b", "c", "d", "e"} {
		chips.Devices = append(chips.Devices, accel.Device{Index: i, ID: accel.DeviceID(name), MemoryBytes: gib})
	}
	boards := alloc.Discovery{Devices: slices.Clone(chips.Devices[:4])} // of two chips each
	for i := range boards.Devices {
		boards.Devices[i].Board, boards.Devices[i].Chip = string(boards.Devices[i-i%2].ID), i%2
	}
	tests := map[string]struct {
		vendor string
		found  alloc.Discovery
		ways   []alloc.Config
		links  []accel.Link
		want   map[string]string
	}{
		"no links": {"nvidia", chips, []alloc.Config{whole}, nil, map[string]string{}},
		"no lanes": {"nvidia", chips, []alloc.Config{whole}, []accel.Link{{A: "a", B: "b", Score: accel.LinkLane - 1}},
			map[string]string{}},
		"two pairs": {"nvidia", chips, []alloc.Config{whole}, []accel.Link{{A: "a", B: "b", Score: accel.LinkNode},
			{A: "a", B: "c", Score: lane}, {A: "b", B: "d", Score: lane}}, map[string]string{"a": "a", "c": "a", "b": "b", "d": "b"}},
		"two pairs that a later link connects": {"nvidia", chips, []alloc.Config{whole}, []accel.Link{{A: "a", B: "c", Score: lane},
			{A: "b", B: "d", Score: lane}, {A: "c", B: "d", Score: lane}}, map[string]string{"a": "a", "b": "a", "c": "a", "d": "a"}},
		"a chain whose lowest device comes last": {"nvidia", chips, []alloc.Config{whole}, []accel.Link{{A: "d", B: "e", Score: lane},
			{A: "c", B: "d", Score: lane}, {A: "a", B: "e", Score: lane}}, map[string]string{"a": "a", "c": "a", "d": "a", "e": "a"}},
		"both forms of a device": {"nvidia", chips, []alloc.Config{memory, slots}, []accel.Link{{A: "b", B: "c", Score: lane}},
			map[string]string{"b": "b", "c": "b", "b-slots": "b", "c-slots": "b"}},
		"boards by a link of their second chips": {"iluvatar", boards, []alloc.Config{whole}, []accel.Link{{A: "b", B: "d", Score: lane}},
			map[string]string{"a": "b", "c": "b"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := map[string]string{}
			devices := devicesOf(t, tt.vendor, tt.found, tt.ways...)
			pool := Pool(tt.vendor, devices, Facts{Links: tt.links}, Stored{Counters: true, Taints: true, Shares: true})
			for _, s := range pool.Slices {
				for _, d := range s.Devices {
					if group := d.Attributes["linkGroup"].StringValue; group != nil {
						_, device, _ := strings.Cut(d.Name, "-")
						got[device] = *group
					}
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestOrder: kube-scheduler tries first what the policy says, and the counters do not change with it.
func TestOrder(t *testing.T) {
	names := func(p resourceslice.Pool) (out []string) {
		for _, d := range p.Slices[0].Devices {
			out = append(out, strings.TrimPrefix(d.Name, "gpu-3b1f0e52-0000-4000-8000-00000000000"))
		}
		return out
	}
	filled := memory
	filled.Cut.Policy = sharing.Packed
	for name, tt := range map[string]struct {
		ways []alloc.Config
		want []string
	}{
		"packed":              {[]alloc.Config{filled}, []string{"1", "2", "0"}},
		"distributed":         {[]alloc.Config{memory}, []string{"0", "2", "1"}},
		"packed, with slices": {[]alloc.Config{filled, slots}, []string{"1", "2", "0", "0-slots", "1-slots", "2-slots"}},
	} {
		devices := devicesOf(t, "nvidia", nvidia(), tt.ways...)
		before := Pool("nvidia", devices, Facts{}, Stored{Counters: true, Taints: true, Shares: true})
		for i := range devices {
			if devices[i].Slots == 0 {
				devices[i].Used = []float64{0, .5, .25}[devices[i].Card.Index]
			}
		}
		after := Pool("nvidia", devices, Facts{}, Stored{Counters: true, Taints: true, Shares: true})
		if diff := cmp.Diff(tt.want, names(after)); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if diff := cmp.Diff(before.Slices[1:], after.Slices[1:]); diff != "" {
			t.Errorf("%s: the counters have changed: %s", name, diff)
		}
	}
}

// TestOrderOfLate: the devices are not put in order more often than every few seconds.
func TestOrderOfLate(t *testing.T) {
	start := time.Unix(1000, 0)
	o := order{used: map[string]float64{}}
	look := func(seconds int, used float64) (shown float64, again int) {
		devices := []alloc.ClaimDevice{{Name: "a", Used: used}}
		at := o.keep(devices, start.Add(time.Duration(seconds)*time.Second))
		if !at.IsZero() {
			again = int(at.Sub(start).Seconds())
		}
		return devices[0].Used, again
	}
	for _, tt := range []struct {
		seconds     int
		used, shown float64
		again       int
	}{{0, 0, 0, 0}, {1, .1, .1, 0}, {2, .2, .1, 11}, {10, .2, .1, 11}, {11, .2, .2, 0}, {12, .2, .2, 0}, {13, .3, .2, 21}, {14, .2, .2, 0},
		{40, .2, .2, 0}, {41, .5, .5, 0}} {
		if shown, again := look(tt.seconds, tt.used); shown != tt.shown || again != tt.again {
			t.Errorf("after %d s: %v is shown and the next order is at %d s, want %v and %d s", tt.seconds, shown, again, tt.shown,
				tt.again)
		}
	}
}

// count returns the devices, and the most devices and counter sets of one slice.
func count(p resourceslice.Pool) (devices, most, sets int) {
	for _, s := range p.Slices {
		devices, most, sets = devices+len(s.Devices), max(most, len(s.Devices)), max(sets, len(s.SharedCounters))
	}
	return devices, most, sets
}

func TestManyDevices(t *testing.T) {
	all := Stored{Counters: true, Taints: true, Shares: true}
	var many alloc.Discovery
	for i := range 65 {
		many.Devices = append(many.Devices, accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("x", i)), MemoryBytes: gib})
	}
	big := alloc.Discovery{} // a board of more chips than a set has counters
	for i := range maxCounters + 1 {
		big.Devices = append(big.Devices, accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("x", i)), Board: "x0", Chip: i,
			MemoryBytes: gib})
	}
	tests := map[string]struct {
		pool                        resourceslice.Pool
		devices, most, sets, slices int
	}{
		"65 devices": {Pool("nvidia", devicesOf(t, "nvidia", many, whole), Facts{}, all), 65, 64, 0, 2},
		"65 in two forms": {Pool("nvidia", devicesOf(t, "nvidia", many, whole, slots), Facts{}, all),
			130, 64, 8, 3 + 9},
		"a board of 33 chips": {Pool("iluvatar", devicesOf(t, "iluvatar", big, whole, memory), Facts{}, all),
			1, 1, 0, 1},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			devices, most, sets := count(tt.pool)
			if devices != tt.devices || most != tt.most || sets != tt.sets || len(tt.pool.Slices) != tt.slices {
				t.Errorf("%d devices, %d in one slice, %d counter sets in one slice, %d slices", devices, most, sets, len(tt.pool.Slices))
			}
		})
	}
}

func TestPoolName(t *testing.T) {
	long := strings.Repeat("n", 250)
	for name, tt := range map[string]struct{ node, want string }{
		"node": {"node-1", "node-1/nvidia"},
		"long": {long, "213b83271b358ed960938751e3f3f6d81cfb08fe1cb5424d1046bbbc6e6d1e3c/nvidia"},
	} {
		if got := PoolName(tt.node, "nvidia"); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
}

func TestSemver(t *testing.T) {
	for version, want := range map[string]string{
		"535.104.05": "535.104.5", "4.2": "4.2.0", "7": "7.0.0", "1.2.3.4": "", "1.2-rc": "", "": "", "1.2.9999999999": "",
	} {
		if got := semver(version); got != want {
			t.Errorf("%q: %q, want %q", version, got, want)
		}
	}
}

func TestLabelValue(t *testing.T) {
	for cause, want := range map[string]string{
		"xid-79": "xid-79", "over temperature": "over-temperature", "-ecc-": "ecc", "": "", "温度": "",
		strings.Repeat("a", 62) + "--b": strings.Repeat("a", 62),
	} {
		if got := labelValue(cause); got != want {
			t.Errorf("%q: %q, want %q", cause, got, want)
		}
	}
}
