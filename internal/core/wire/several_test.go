package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// severalGrant is 24 units on three cards.
func severalGrant() accel.Grant {
	g := guideGrant()
	g.Units = 24
	g.More = []accel.GrantedDevice{
		{Device: "GCU-U53000090106", Index: 2, DeviceUnits: 16},
		{Device: "GCU-U53000090109", Index: 5, DeviceUnits: 32},
	}
	return g
}

func TestGrantOfSeveralDevices(t *testing.T) {
	s := signer(t, testKey())
	v, err := s.EncodeGrant(podUID, severalGrant())
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "grant-several.json", v)
	if back, err := s.DecodeGrant(podUID, v); err != nil || !reflect.DeepEqual(back, severalGrant()) {
		t.Errorf("read back %+v, %v; want %+v", back, err, severalGrant())
	}
	for _, change := range []struct{ old, new string }{
		{"GCU-U53000090106", "GCU-U53000090107"},
		{`"index":5`, `"index":4`},
		{`"deviceUnits":32`, `"deviceUnits":64`},
		{`,{"device":"GCU-U53000090109","index":5,"deviceUnits":32}`, ""},
	} {
		forged := strings.Replace(v, change.old, change.new, 1)
		if forged == v {
			t.Fatalf("%s does not have %s", v, change.old)
		}
		if g, err := s.DecodeGrant(podUID, forged); !errors.Is(err, ErrSignature) {
			t.Errorf("%s: read as %+v, %v; want ErrSignature", change.new, g, err)
		}
	}
}

// A program of the release before knows the first version only. It must take a
// grant of several devices for unreadable, and one of one device as ever.
func TestGrantsForEarlierReleases(t *testing.T) {
	s := signer(t, testKey())
	for want, g := range map[int]accel.Grant{1: guideGrant(), 2: severalGrant()} {
		v, err := s.EncodeGrant(podUID, g)
		if err != nil {
			t.Fatal(err)
		}
		var doc struct {
			Version int `json:"v"`
		}
		if err := json.Unmarshal([]byte(v), &doc); err != nil || doc.Version != want {
			t.Errorf("version %d, %v; want %d: %s", doc.Version, err, want, v)
		}
	}
}

func TestGrantOfSeveralRefused(t *testing.T) {
	more := func(ids ...accel.DeviceID) []accel.GrantedDevice {
		var out []accel.GrantedDevice
		for _, id := range ids {
			out = append(out, accel.GrantedDevice{Device: id})
		}
		return out
	}
	var many []accel.DeviceID
	for i := range MaxDevices {
		many = append(many, accel.DeviceID(fmt.Sprint(i)))
	}
	for name, tc := range map[string]struct {
		more []accel.GrantedDevice
		want string
	}{
		"the first again":  {more(guideGrant().Device), "is listed twice"},
		"twice":            {more("x", "x"), `device "x" is listed twice`},
		"no uuid":          {more(""), "no device"},
		"not UTF-8":        {more("x\xff"), "not valid UTF-8"},
		"too many":         {more(many...), "64 more devices, at most 63"},
		"below 0":          {[]accel.GrantedDevice{{Device: "x", Index: -1}}, "index -1 is below 0"},
		"units below 0":    {[]accel.GrantedDevice{{Device: "x", DeviceUnits: -1}}, "a device of -1 units"},
		"the longest ones": {more(accel.DeviceID(strings.Repeat("x", maxGrantBytes))), "at most 16384 are read"},
	} {
		g := guideGrant()
		g.More = tc.more
		if v, err := signer(t, testKey()).EncodeGrant(podUID, g); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %s, %v; want an error with %q", name, v, err, tc.want)
		}
	}
	for value, want := range map[string]string{
		`{"v":1,"resource":"r","node":"n","device":"d","units":2,"more":[{"device":"e"}]}`: "version 1 with 1 more devices",
		`{"v":2,"resource":"r","node":"n","device":"d","units":2}`:                         "version 2 with 0 more devices",
		`{"v":3}`: "newer release",
	} {
		if g, err := DecodeGrantUnverified(value); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v; want an error with %q", value, g, err, want)
		}
	}
}

func TestLegacyAnnotationsOfSeveral(t *testing.T) {
	got := LegacyAnnotations(severalGrant())
	want := map[string]string{"id": "1,2,5", "memory": "64", "memory-request": "24", "assigned": "false",
		"assign-time": "1662453232515055293"}
	for key, value := range want {
		if got["enflame.com/gcu-device-"+key] != value {
			t.Errorf("%s is %q, want %q", key, got["enflame.com/gcu-device-"+key], value)
		}
	}
}

func TestInventoryOfLinks(t *testing.T) {
	share := func(index int, id accel.DeviceID) accel.Share {
		return accel.Share{Units: 8, Device: accel.Device{Index: index, ID: id, NUMANode: accel.NoNUMA}}
	}
	inv := accel.Inventory{
		Resource: gcuMemory, Unit: "1", Several: true,
		// The order of ids is not that of the indexes.
		Shares: []accel.Share{share(0, "c"), share(1, "a"), share(2, "b")},
		Links:  []accel.Link{{A: "a", B: "b", Score: accel.LinkNode}, {A: "a", B: "c", Score: accel.LinkBoard + accel.LinkLane}},
	}
	text, err := EncodeInventory([]accel.Inventory{inv})
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "inventory-links.json", text)
	back, err := DecodeInventory(text)
	if err != nil || !reflect.DeepEqual(back, []accel.Inventory{inv}) {
		t.Errorf("read back %+v, %v; want %+v", back, err, inv)
	}
	odd := inv
	odd.Links = append([]accel.Link{{A: "a", B: "away", Score: 10}, {A: "b", B: "b", Score: 10}, {A: "b", B: "c"}}, inv.Links...)
	if again, err := EncodeInventory([]accel.Inventory{odd}); err != nil || again != text {
		t.Errorf("links of no use were written: %s, %v", again, err)
	}
	for _, links := range []string{"[[0,3,10]]", "[[1,0,10]]", "[[1,1,10]]", "[[-1,0,10]]", "[[0,1,0]]", "[[0,1]]"} {
		bad := strings.Replace(text, text[strings.Index(text, `"links":`)+8:len(text)-3], links, 1)
		if got, err := DecodeInventory(bad); err == nil || !strings.Contains(err.Error(), "a link is") {
			t.Errorf("%s: read as %+v, %v", bad, got, err)
		}
	}
}

// Devices come before links where there is no room for both.
func TestInventoryWithoutRoomForLinks(t *testing.T) {
	inv := accel.Inventory{Resource: "r"}
	for i := range 200 {
		id := accel.DeviceID(fmt.Sprintf("GPU-%032d", i))
		for _, other := range inv.Shares {
			inv.Links = append(inv.Links, accel.Link{A: other.ID, B: id, Score: accel.LinkSystem})
		}
		inv.Shares = append(inv.Shares, accel.Share{Units: 1, Device: accel.Device{Index: i, ID: id, NUMANode: accel.NoNUMA}})
	}
	text, err := EncodeInventory([]accel.Inventory{inv})
	if err != nil {
		t.Fatal(err)
	}
	back, err := DecodeInventory(text)
	if err != nil || len(back) != 1 || len(back[0].Shares) != 200 || len(back[0].Links) != 0 {
		t.Errorf("read %d inventories, %v; want 200 devices without links", len(back), err)
	}
}

func TestHeldOf(t *testing.T) {
	const list = `{"nvidia.com/gpu":["GPU-1"]}`
	for name, tt := range map[string]struct {
		annotations map[string]string
		want        string
	}{
		"nothing":                       {nil, ""},
		"written now":                   {map[string]string{HeldAnnotation: list, CountAnnotation: "2"}, list},
		"written by an earlier release": {map[string]string{CountAnnotation: list}, list},
		"a number of devices":           {map[string]string{CountAnnotation: "2"}, ""},
	} {
		if got := HeldOf(tt.annotations); got != tt.want {
			t.Errorf("%s: got %q, want %q", name, got, tt.want)
		}
	}
}

func TestInventoryOfLeast(t *testing.T) {
	want := []accel.Inventory{{Resource: gcuMemory, Unit: "1", Least: 2, Shares: []accel.Share{}}}
	text, err := EncodeInventory(want)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := DecodeInventory(text); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s is read as %+v (%v)", text, got, err)
	}
	text = strings.Replace(text, `"least":2`, `"least":-2`, 1)
	if got, err := DecodeInventory(text); err != nil || got[0].Least != 0 {
		t.Errorf("%s is read as %+v (%v)", text, got, err)
	}
}
