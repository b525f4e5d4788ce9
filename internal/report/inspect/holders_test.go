package inspect

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func TestNodeFromHolders(t *testing.T) {
	inv := accel.Inventory{Resource: "nvidia.com/gpu.shared"}
	for i, units := range []accel.Units{2, 4} {
		inv.Shares = append(inv.Shares,
			accel.Share{Units: units, Device: accel.Device{Index: i, ID: accel.DeviceID("GPU-" + string(rune('a'+i))),
				NUMANode: accel.NoNUMA}})
	}
	at := time.Unix(1662450043, 0)
	holder := func(name string, age int, units accel.Units, ids ...string) Holder {
		return Holder{Pod: accel.PodRef{UID: name, Namespace: "team", Name: name}, Created: at.Add(-time.Duration(age) * time.Second),
			Units: units, IDs: ids}
	}
	holders := []Holder{
		holder("young", 1, 3, "GPU-a::0", "GPU-b::0", "GPU-b::3"),
		holder("old", 9, 1, "GPU-b::1"),
		holder("starting", 0, 2),
		holder("lost", 5, 2, "GPU-a::1", "GPU-gone::0"),
		holder("odd", 2, 1, "GPU-b::2::7"),
	}
	got := NodeFromHolders("n", inv, holders)
	type pods = map[string][]string
	summary := func(list []Pod) pods {
		out := pods{}
		for _, p := range list {
			out[p.Name] = p.IDs
		}
		return out
	}
	if got.Total != 6 || got.Used != 3+1+2+2+1 || got.Available != 0 {
		t.Errorf("node: total %d, used %d, available %d", got.Total, got.Used, got.Available)
	}
	if diff := cmp.Diff(pods{"young": {"GPU-a::0"}, "lost": {"GPU-a::1"}}, summary(got.Devices[0].Pods)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(pods{"young": {"GPU-b::0", "GPU-b::3"}, "old": {"GPU-b::1"}}, summary(got.Devices[1].Pods)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(pods{"starting": nil, "lost": {"GPU-gone::0"}, "odd": {"GPU-b::2::7"}}, summary(got.Unplaced)); diff != "" {
		t.Error(diff)
	}
	if d := got.Devices[1]; d.Used != 3 || d.Available != 1 || d.Pods[0].Name != "old" {
		t.Errorf("the second device: %+v", d)
	}
	// The guide's form has none of it.
	for _, d := range got.Guide().Devices {
		for _, p := range d.Pods {
			if p.IDs != nil || d.Chips != 0 {
				t.Errorf("the guide's form has %+v", p)
			}
		}
	}
	if empty := NodeFromHolders("n", accel.Inventory{Resource: "r"}, nil); empty.Devices == nil || empty.Used != 0 {
		t.Errorf("without devices: %+v", empty)
	}
}

// Whoever may create pods may write what they hold into them.
// TestUnitsOfACard: units that are a part of a card are called so, and are not added up with others
// as GB.
func TestUnitsOfACard(t *testing.T) {
	node := func(unit string) Node {
		return Node{Unit: unit, Total: 12, Used: 3, Available: 9, Devices: make([]Device, 2)}
	}
	if got, want := node("1/6").Shared(), "in units of 1/6 of a card"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for name, tt := range map[string]struct {
		nodes []Node
		want  string
	}{
		"alike":       {[]Node{node("1/6"), node("1/6")}, "2 nodes, 4 cards: total 24, used 6, free 18, in units of 1/6 of a card"},
		"not alike":   {[]Node{node("1/6"), node("1")}, "2 nodes, 4 cards: total 24, used 6, free 18, in units of different sizes"},
		"all in GB":   {[]Node{node("0.1"), node("1")}, "2 nodes, 4 cards: total 13.2, used 3.3, free 9.9, in GB"},
		"an odd unit": {[]Node{node("x"), node("x")}, "2 nodes, 4 cards: total 24, used 6, free 18, in units of x GB"},
	} {
		if got := total(tt.nodes); !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestForgedDevicesDoNotFillANode(t *testing.T) {
	inv := accel.Inventory{Resource: "nvidia.com/gpu"}
	var all []string
	for _, id := range []string{"GPU-a", "GPU-b", "GPU-c"} {
		inv.Shares = append(inv.Shares, accel.Share{Units: 1, Device: accel.Device{ID: accel.DeviceID(id), NUMANode: accel.NoNUMA}})
		all = append(all, id)
	}
	got := NodeFromHolders("n", inv, []Holder{{Pod: accel.PodRef{Name: "forger"}, Units: 1, IDs: all}})
	if got.Used != 1 || got.Available != 2 {
		t.Errorf("a pod that asks for one device: %d used, %d available", got.Used, got.Available)
	}
	if len(got.Unplaced) != 1 || got.Unplaced[0].Used != 1 || got.Unplaced[0].Confirmed {
		t.Errorf("unplaced: %+v", got.Unplaced)
	}
	for _, d := range got.Devices {
		if len(d.Pods) > 0 {
			t.Errorf("device %s is shown as held by %+v", d.UUID, d.Pods)
		}
	}
}
