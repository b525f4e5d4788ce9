package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

var update = flag.Bool("update", false, "write the golden files anew")

const gcuMemory accel.Resource = "enflame.com/gcu-memory"

// twoCards is the guide's node: two S60 of 16 GB, the second one broken.
func twoCards() []accel.Inventory {
	return []accel.Inventory{{
		Resource: gcuMemory,
		Unit:     "0.1",
		Shares: []accel.Share{
			{Units: 160, Device: accel.Device{
				Index: 0, ID: "GCU-U53000090104", Model: "S60", MemoryBytes: 16 << 30, NUMANode: 0, PCI: "0000:3b:00.0",
			}},
			{Units: 80, Device: accel.Device{
				Index: 1, ID: "GCU-U53000090105", Model: "S60 <half>", MemoryBytes: 8 << 30, NUMANode: accel.NoNUMA, Board: "B7",
				Health: accel.Health{Unhealthy: true, Reason: "reset in progress"},
			}},
		},
	}}
}

// Boards and chips are in the inventory, so that a report can show them.
func TestInventoryOfBoardsRoundTrip(t *testing.T) {
	want := []accel.Inventory{
		{Resource: "iluvatar.com/gpu", Shares: []accel.Share{
			{Units: 1, Chips: 2, Device: accel.Device{Index: 0, ID: "GPU-a", Board: "GPU-a", NUMANode: accel.NoNUMA}},
			{Units: 1, Chips: 2, Device: accel.Device{Index: 2, ID: "GPU-c", Board: "GPU-c", NUMANode: accel.NoNUMA}},
		}},
		{Resource: "iluvatar.com/gpu-memory", Unit: "1", Shares: []accel.Share{
			{Units: 16, Device: accel.Device{Index: 0, ID: "GPU-a", Board: "GPU-a", NUMANode: accel.NoNUMA}},
			{Units: 16, Device: accel.Device{Index: 1, ID: "GPU-b", Board: "GPU-a", Chip: 1, NUMANode: accel.NoNUMA}},
		}},
	}
	text, err := EncodeInventory(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeInventory(text)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	if _, err := DecodeInventory(strings.Replace(text, `"chip":1`, `"chip":-1`, 1)); err == nil {
		t.Error("a chip at a position below 0 was read")
	}
}

// guideGrant is the third pod of the guide: 12 units on card 1.
func guideGrant() accel.Grant {
	return accel.Grant{
		Resource: gcuMemory, Node: "gcu-node-1", Device: "GCU-U53000090105", Index: 1,
		DeviceUnits: 16, Units: 12, At: time.Unix(0, 1662453232515055293).UTC(),
	}
}

const podUID = "0f6c1f33-7c53-4a3e-9f4c-0d8cbbd2a4a5"

func testKey() []byte { return []byte("an example key of 32 bytes, or a few more") }

func signer(t testing.TB, key []byte) *Signer {
	t.Helper()
	s, err := NewSigner(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got+"\n" != string(want) {
		t.Errorf("%s differs: an annotation of this version was read differently before.\n got %s\nwant %s", path, got, want)
	}
}

func TestInventoryGolden(t *testing.T) {
	s, err := EncodeInventory(twoCards())
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "inventory.json", s)
	back, err := DecodeInventory(s)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back, twoCards()) {
		t.Errorf("read back\n got %+v\nwant %+v", back, twoCards())
	}
}

// Withheld units are written only where there are some, so that nodes without any publish what
// they always did.
func TestInventoryOfWithheldUnits(t *testing.T) {
	for name, tt := range map[string]struct {
		withheld accel.Units
		want     string
	}{
		"none": {0, `{"index":0,"id":"x","units":16}`},
		"some": {5, `{"index":0,"id":"x","units":16,"withheld":5}`},
		"all":  {16, `{"index":0,"id":"x","units":16,"withheld":16}`},
	} {
		t.Run(name, func(t *testing.T) {
			want := []accel.Inventory{{Resource: "r", Shares: []accel.Share{
				{Units: 16, Withheld: tt.withheld, Device: accel.Device{ID: "x", NUMANode: accel.NoNUMA}},
			}}}
			text, err := EncodeInventory(want)
			if err != nil {
				t.Fatal(err)
			}
			if device := `{"v":1,"resources":[{"resource":"r","devices":[` + tt.want + `]}]}`; text != device {
				t.Errorf("written as %s, want %s", text, device)
			}
			if got, err := DecodeInventory(text); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("read back %+v, %v; want %+v", got, err, want)
			}
		})
	}
}

// Tiers are written only where there are some, and one that is not known is none.
func TestInventoryOfTiers(t *testing.T) {
	attested := time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
	for name, tt := range map[string]struct {
		stated accel.Isolation
		want   string
		read   accel.Isolation
	}{
		"none": {want: `{"index":0,"id":"x","units":16}`},
		"a partition": {
			stated: accel.Isolation{Memory: accel.TierHardware, Compute: accel.TierHardware, Backend: "mig"},
			want:   `{"index":0,"id":"x","units":16,"tier":"hardware","compute":"hardware","backend":"mig"}`,
			read:   accel.Isolation{Memory: accel.TierHardware, Compute: accel.TierHardware, Backend: "mig"},
		},
		"limits in the driver": {
			stated: accel.Isolation{Memory: accel.TierDriver, Backend: "dmem", Attested: attested.Local().Add(time.Millisecond)},
			want:   `{"index":0,"id":"x","units":16,"tier":"driver","backend":"dmem","attested":"2026-07-01T10:00:00Z"}`,
			read:   accel.Isolation{Memory: accel.TierDriver, Backend: "dmem", Attested: attested},
		},
		"compute alone": {
			stated: accel.Isolation{Compute: accel.TierCooperative, Backend: "mps3", Attested: attested},
			want:   `{"index":0,"id":"x","units":16,"compute":"cooperative","backend":"mps3","attested":"2026-07-01T10:00:00Z"}`,
			read:   accel.Isolation{Compute: accel.TierCooperative, Backend: "mps3", Attested: attested},
		},
		"a tier that does not exist": {
			stated: accel.Isolation{Memory: "vault", Compute: accel.TierDriver, Backend: "x", Attested: attested},
			want:   `{"index":0,"id":"x","units":16}`},
	} {
		t.Run(name, func(t *testing.T) {
			share := accel.Share{Units: 16, Device: accel.Device{ID: "x", NUMANode: accel.NoNUMA}, Isolation: tt.stated}
			text, err := EncodeInventory([]accel.Inventory{{Resource: "r", Shares: []accel.Share{share}}})
			if err != nil {
				t.Fatal(err)
			}
			if device := `{"v":1,"resources":[{"resource":"r","devices":[` + tt.want + `]}]}`; text != device {
				t.Errorf("written as %s, want %s", text, device)
			}
			got, err := DecodeInventory(text)
			if err != nil {
				t.Fatal(err)
			}
			if got[0].Shares[0].Isolation != tt.read {
				t.Errorf("read back %+v, want %+v", got[0].Shares[0].Isolation, tt.read)
			}
		})
	}
}

// A newer node may state tiers that this release does not know.
func TestInventoryOfANewerNode(t *testing.T) {
	got, err := DecodeInventory(`{"v":1,"resources":[{"resource":"r","devices":[{"id":"x","units":3,"tier":"vault","compute":"hardware"},` +
		`{"id":"y","index":1,"units":3,"tier":"Driver","compute":"driver","backend":"dmem","attested":"2026-07-01T10:00:00Z"}]}]}`)
	if err != nil {
		t.Fatal(err)
	}
	if want := (accel.Isolation{Compute: accel.TierHardware}); got[0].Shares[0].Isolation != want {
		t.Errorf("a tier that is not known is read as %+v, want %+v", got[0].Shares[0].Isolation, want)
	}
	if got[0].Shares[1].Isolation != (accel.Isolation{}) {
		t.Errorf("tiers that are not known are read as %+v", got[0].Shares[1].Isolation)
	}
}

func TestInventoryIsDeterministic(t *testing.T) {
	inv := append(twoCards(), accel.Inventory{Resource: "a.example/chip", Shares: []accel.Share{}})
	mixed := []accel.Inventory{inv[1], {
		Resource: inv[0].Resource, Unit: inv[0].Unit,
		Shares: []accel.Share{inv[0].Shares[1], inv[0].Shares[0]},
	}}
	a, err := EncodeInventory(inv)
	if err != nil {
		t.Fatal(err)
	}
	b, err := EncodeInventory(mixed)
	if err != nil {
		t.Fatal(err)
	}
	if a != b {
		t.Errorf("the order of the input shows:\n%s\n%s", a, b)
	}
	if mixed[1].Shares[0].Index != 1 {
		t.Error("EncodeInventory changed its argument")
	}
}

func TestInventoryRefused(t *testing.T) {
	share := func(index int, id accel.DeviceID, units accel.Units) accel.Share {
		return accel.Share{Units: units, Device: accel.Device{Index: index, ID: id, NUMANode: accel.NoNUMA}}
	}
	tests := map[string]struct {
		inv  []accel.Inventory
		want []string // parts of the error
	}{
		"duplicate uuid": {
			[]accel.Inventory{{Resource: "r", Shares: []accel.Share{share(0, "x", 1), share(3, "x", 1)}}},
			[]string{`the devices with index 0 and 3 have the same uuid "x"`},
		},
		"duplicate index": {
			[]accel.Inventory{{Resource: "r", Shares: []accel.Share{share(2, "x", 1), share(2, "y", 1)}}},
			[]string{`the devices "x" and "y" have the same index 2`},
		},
		"several mistakes at once": {
			[]accel.Inventory{{Resource: "r", Shares: []accel.Share{share(-1, "x", -1), share(0, "", accel.MaxUnits+1)}}, {Resource: "r"}},
			[]string{`index -1, below 0`, `-1 units`, `index 0 has no uuid`, `1099511627777 units`, `resource "r" is listed twice`},
		},
		"more withheld than it has, or less than none": {
			[]accel.Inventory{{Resource: "r", Shares: []accel.Share{
				{Units: 3, Withheld: 4, Device: accel.Device{ID: "x"}}, {Units: 3, Withheld: -1, Device: accel.Device{Index: 1, ID: "y"}},
			}}},
			[]string{`device "x" has 4 withheld units, not from 0 to its 3 units`,
				`device "y" has -1 withheld units, not from 0 to its 3 units`},
		},
		"no resource name": {[]accel.Inventory{{}}, []string{"a resource has no name"}},
		"negative memory": {
			[]accel.Inventory{{Resource: "r", Shares: []accel.Share{{Device: accel.Device{ID: "x", MemoryBytes: -1}}}}},
			[]string{"-1 bytes of memory"},
		},
		"not UTF-8": {
			[]accel.Inventory{{Resource: "r\xff", Shares: []accel.Share{share(0, "x\xfe", 1)}}},
			[]string{`name or unit is not valid UTF-8`, `"x\xfe" is not valid UTF-8`},
		},
		"too long": {
			[]accel.Inventory{{Resource: "r", Shares: []accel.Share{share(0, accel.DeviceID(strings.Repeat("x", maxInventoryBytes)), 1)}}},
			[]string{"at most 131072 are read"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s, err := EncodeInventory(tc.inv)
			if err == nil {
				t.Fatalf("encoded as %s", s)
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q does not say %q", err, part)
				}
			}
		})
	}
}

func TestDecodeInventoryRefused(t *testing.T) {
	tests := map[string]struct{ value, want string }{
		"empty":            {"", "the value is empty"},
		"no JSON":          {"16 GB", "a JSON number where an object is expected"},
		"cut off":          {`{"v":1,"resources":[`, "unexpected EOF"},
		"another type":     {`["v"]`, "a JSON array where an object is expected"},
		"one quote":        {`'v'`, "invalid character"},
		"null":             {"null", `want "v":1`},
		"no version":       {`{"resources":[]}`, `want "v":1`},
		"a later version":  {`{"v":2}`, "newer release"},
		"text behind":      {`{"v":1} {"v":1}`, "text follows"},
		"garbage behind":   {`{"v":1}}`, "text follows"},
		"fractional units": {`{"v":1,"resources":[{"resource":"r","devices":[{"id":"x","units":1.5}]}]}`, "1.5"},
		"units out of range": {`{"v":1,"resources":[{"resource":"r","devices":[{"id":"x","units":9223372036854775808}]}]}`,
			"9223372036854775808"},
		"duplicate uuid":  {`{"v":1,"resources":[{"resource":"r","devices":[{"id":"x"},{"index":1,"id":"x"}]}]}`, "the same uuid"},
		"duplicate index": {`{"v":1,"resources":[{"resource":"r","devices":[{"id":"x"},{"id":"y"}]}]}`, "the same index 0"},
		"too long":        {`{"v":1,"x":"` + strings.Repeat("x", maxInventoryBytes) + `"}`, "at most 131072"},
		"more withheld than it has": {`{"v":1,"resources":[{"resource":"r","devices":[{"id":"x","units":2,"withheld":3}]}]}`,
			`3 withheld units, not from 0 to its 2 units`},
		"too deep": {strings.Repeat("[", 60000), "depth"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			inv, err := DecodeInventory(tc.value)
			if se := (*SyntaxError)(nil); !errors.As(err, &se) || se.What != "inventory" {
				t.Fatalf("DecodeInventory = %v, %v; want a *SyntaxError of an inventory", inv, err)
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %q does not say %q", err, tc.want)
			}
		})
	}
}

func TestDecodeInventoryIgnoresUnknownFields(t *testing.T) {
	got, err := DecodeInventory(`{"v":1,"later":{"x":[1]},"resources":[{"resource":"r","devices":[{"id":"x","units":3,"tier":"hard",` +
		`"numa":-7}]}]}`)
	if err != nil {
		t.Fatal(err)
	}
	want := []accel.Inventory{{Resource: "r", Shares: []accel.Share{{Units: 3, Device: accel.Device{ID: "x", NUMANode: accel.NoNUMA}}}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestGrantGolden(t *testing.T) {
	s := signer(t, testKey())
	for name, g := range map[string]accel.Grant{
		"grant.json": guideGrant(),
		"grant-confirmed.json": func() accel.Grant {
			g := guideGrant()
			g.Confirmed = true
			return g
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			v, err := s.EncodeGrant(podUID, g)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, name, v)
			for what, decode := range map[string]func() (accel.Grant, error){
				"verified":   func() (accel.Grant, error) { return s.DecodeGrant(podUID, v) },
				"unverified": func() (accel.Grant, error) { return DecodeGrantUnverified(v) },
			} {
				if back, err := decode(); err != nil || !reflect.DeepEqual(back, g) {
					t.Errorf("%s: read back %+v, %v; want %+v", what, back, err, g)
				}
			}
		})
	}
}

// TestGrantSurvivesReformatting: a tool that pretty-prints JSON does not break
// the signature, which covers the meaning.
func TestGrantSurvivesReformatting(t *testing.T) {
	s := signer(t, testKey())
	v, err := s.EncodeGrant(podUID, guideGrant())
	if err != nil {
		t.Fatal(err)
	}
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, []byte(v), "", "  "); err != nil {
		t.Fatal(err)
	}
	if g, err := s.DecodeGrant(podUID, pretty.String()); err != nil || !reflect.DeepEqual(g, guideGrant()) {
		t.Errorf("DecodeGrant = %+v, %v", g, err)
	}
}

func TestGrantForged(t *testing.T) {
	s := signer(t, testKey())
	value, err := s.EncodeGrant(podUID, guideGrant())
	if err != nil {
		t.Fatal(err)
	}
	// Every field is covered by the signature.
	var fields map[string]any
	if err := json.Unmarshal([]byte(value), &fields); err != nil {
		t.Fatal(err)
	}
	changes := map[string]any{
		"resource": "enflame.com/gcu", "node": "gcu-node-2", "device": "GCU-U53000090104", "index": 0,
		"deviceUnits": 32, "units": 1, "at": "2022-09-06T08:33:52.515055294Z", "confirmed": true,
	}
	for field, v := range changes {
		t.Run("changed "+field, func(t *testing.T) {
			forged := maps.Clone(fields)
			forged[field] = v
			b, err := json.Marshal(forged)
			if err != nil {
				t.Fatal(err)
			}
			if g, err := s.DecodeGrant(podUID, string(b)); !errors.Is(err, ErrSignature) {
				t.Errorf("DecodeGrant = %+v, %v; want ErrSignature", g, err)
			}
			if _, err := DecodeGrantUnverified(string(b)); err != nil {
				t.Errorf("the unverified reading failed: %v", err)
			}
		})
	}
	for f := range fields {
		if _, ok := changes[f]; !ok && f != "v" && f != "mac" {
			t.Errorf("no case changes the field %q", f)
		}
	}

	mac, _ := fields["mac"].(string)
	other := signer(t, bytes.Repeat([]byte("k"), MinKeyBytes))
	foreign, err := other.EncodeGrant(podUID, guideGrant())
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct{ uid, value string }{
		"of another pod":           {"11111111-7c53-4a3e-9f4c-0d8cbbd2a4a5", value},
		"of a pod without UID":     {"", value},
		"with another key":         {podUID, foreign},
		"without a MAC":            {podUID, strings.Replace(value, `,"mac":"`+mac+`"`, "", 1)},
		"with an empty MAC":        {podUID, strings.Replace(value, mac, "", 1)},
		"with a shorter MAC":       {podUID, strings.Replace(value, mac, mac[:22], 1)},
		"with a longer MAC":        {podUID, strings.Replace(value, mac, mac+"AAAA", 1)},
		"with a MAC not in base64": {podUID, strings.Replace(value, mac, strings.Repeat("!", len(mac)), 1)},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if g, err := s.DecodeGrant(tc.uid, tc.value); !errors.Is(err, ErrSignature) {
				t.Errorf("DecodeGrant = %+v, %v; want ErrSignature", g, err)
			}
		})
	}
}

// TestGrantUIDBoundary: the UID cannot flow into the signed text behind it.
func TestGrantUIDBoundary(t *testing.T) {
	s := signer(t, testKey())
	document := []byte(`{"v":1}`)
	a := s.mac("ab", document)
	for _, uid := range []string{"a", "abc", "ab{", ""} {
		b := s.mac(uid, document)
		if bytes.Equal(a, b) {
			t.Errorf("the MACs of %q and %q are equal", "ab", uid)
		}
	}
}

func TestDecodeGrantRefused(t *testing.T) {
	s := signer(t, testKey())
	tests := map[string]struct{ value, want string }{
		"empty":           {"", "the value is empty"},
		"no JSON":         {"card 1", "invalid character"},
		"null":            {"null", `want "v":1`},
		"a later version": {`{"v":3}`, "newer release"},
		"fields missing":  {`{"v":1,"units":4,"mac":"x"}`, "no resource\nno node\nno device"},
		"no units":        {`{"v":1,"resource":"r","node":"n","device":"d"}`, "0 units"},
		"too many units":  {`{"v":1,"resource":"r","node":"n","device":"d","units":4611686018427387904}`, "4611686018427387904 units"},
		"negative index":  {`{"v":1,"resource":"r","node":"n","device":"d","units":1,"index":-1}`, "index -1"},
		"negative device": {`{"v":1,"resource":"r","node":"n","device":"d","units":1,"deviceUnits":-1}`, "-1 units"},
		"a bad time":      {`{"v":1,"at":"yesterday"}`, "yesterday"},
		"text behind":     {`{"v":1}x`, "text follows"},
		"too long":        {`{"v":1,"node":"` + strings.Repeat("n", maxGrantBytes) + `"}`, "at most 16384"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			_, verified := s.DecodeGrant(podUID, tc.value)
			_, unverified := DecodeGrantUnverified(tc.value)
			for _, err := range []error{verified, unverified} {
				if se := (*SyntaxError)(nil); !errors.As(err, &se) || se.What != "grant" {
					t.Fatalf("error %v, want a *SyntaxError of a grant", err)
				}
				if !strings.Contains(err.Error(), tc.want) {
					t.Errorf("error %q does not say %q", err, tc.want)
				}
			}
		})
	}
}

func TestEncodeGrantRefused(t *testing.T) {
	s := signer(t, testKey())
	tests := map[string]struct {
		uid    string
		change func(*accel.Grant)
		want   string
	}{
		"no UID":         {"", func(*accel.Grant) {}, "no UID"},
		"no node":        {podUID, func(g *accel.Grant) { g.Node = "" }, "no node"},
		"no device":      {podUID, func(g *accel.Grant) { g.Device = "" }, "no device"},
		"no units":       {podUID, func(g *accel.Grant) { g.Units = 0 }, "0 units"},
		"not UTF-8":      {podUID, func(g *accel.Grant) { g.Device = "\xff" }, "not valid UTF-8"},
		"absurd time":    {podUID, func(g *accel.Grant) { g.At = time.Unix(math.MaxInt64/2, 0) }, "year"},
		"very long node": {podUID, func(g *accel.Grant) { g.Node = strings.Repeat("n", maxGrantBytes) }, "at most 16384"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := guideGrant()
			tc.change(&g)
			v, err := s.EncodeGrant(tc.uid, g)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("EncodeGrant = %q, %v; want an error that says %q", v, err, tc.want)
			}
		})
	}
}

func TestNewSigner(t *testing.T) {
	for _, n := range []int{0, 1, MinKeyBytes - 1} {
		if _, err := NewSigner(make([]byte, n)); err == nil || !strings.Contains(err.Error(), "at least 32") {
			t.Errorf("a key of %d bytes: error %v", n, err)
		}
	}
	key := testKey()
	s := signer(t, key)
	v, err := s.EncodeGrant(podUID, guideGrant())
	if err != nil {
		t.Fatal(err)
	}
	clear(key) // the caller may wipe its copy
	if _, err := s.DecodeGrant(podUID, v); err != nil {
		t.Errorf("after the caller wiped its key: %v", err)
	}
}

func TestSignerIsSafeForConcurrentUse(t *testing.T) {
	s := signer(t, testKey())
	want, err := s.EncodeGrant(podUID, guideGrant())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 200 {
				v, err := s.EncodeGrant(podUID, guideGrant())
				if err != nil || v != want {
					t.Errorf("EncodeGrant = %q, %v", v, err)
					return
				}
				if _, err := s.DecodeGrant(podUID, v); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestLegacyAnnotations(t *testing.T) {
	confirmed := guideGrant()
	confirmed.Confirmed = true
	other := guideGrant()
	other.Resource = "nvidia.com/gpu"
	undated := guideGrant()
	undated.At = time.Time{}
	annotations := func(assigned, at string) map[string]string {
		return map[string]string{
			"enflame.com/gcu-device-id":             "1",
			"enflame.com/gcu-device-memory":         "16",
			"enflame.com/gcu-device-memory-request": "12",
			"enflame.com/gcu-device-assigned":       assigned,
			"enflame.com/gcu-device-assign-time":    at,
		}
	}
	tests := map[string]struct {
		grant accel.Grant
		want  map[string]string
	}{
		"as the guide shows them at bind": {guideGrant(), annotations("false", "1662453232515055293")},
		"as the node corrects them":       {confirmed, annotations("true", "1662453232515055293")},
		"another resource":                {other, nil},
		"no time":                         {undated, annotations("false", "0")},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := LegacyAnnotations(tc.grant); !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}
