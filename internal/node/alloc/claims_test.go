package alloc

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

const gib = int64(1) << 30

// boardsOf returns the chips of boards of two.
func boardsOf(names ...string) []accel.Device {
	var out []accel.Device
	for i, name := range names {
		out = append(out, accel.Device{Index: i, ID: accel.DeviceID(name), Model: "B", MemoryBytes: 32 * gib, NUMANode: accel.NoNUMA,
			Board: names[i-i%2], Chip: i % 2})
	}
	return out
}

func chipsNamed(names ...string) []accel.Device {
	var out []accel.Device
	for i, name := range names {
		out = append(out, accel.Device{Index: i, ID: accel.DeviceID(name), Model: "G", MemoryBytes: 16 * gib, NUMANode: accel.NoNUMA})
	}
	return out
}

func whole(split bool) Config {
	return Config{ID: ID{"v.example/gpu", Slots}, Cut: Cut{SplitBoards: split}}
}

func sliced(n int) Config {
	return Config{ID: ID{"v.example/shared", Slots}, Cut: Cut{SplitBoards: true, Replicas: func(sharing.Card) int { return n }}}
}

func TestDevicesOfClaims(t *testing.T) {
	memory := Config{ID: ID{"v.example/memory", Memory}}
	cut := chipsNamed("GPU-0", "MIG-1")
	cut[1].Parent, cut[1].Profile, cut[0].Partitioned = "GPU-0", "1g.10gb", true
	partitions := Config{ID: ID{"nvidia.com/mig-1g.10gb", Slots}, Chooses: func(c sharing.Card) bool { return c.Profile != "" }}
	odd := chipsNamed("GPU-A", "GPU-a", "GPU_9", strings.Repeat("x", 70))
	tests := map[string]struct {
		vendor  string
		ways    []Config
		devices []accel.Device
		want    []string // name type shared slots rank
	}{
		"whole": {
			"nvidia", []Config{whole(false)}, chipsNamed("GPU-0", "1"), []string{"gpu-0 gpu - 0 0", "gpu-1 gpu - 0 0"},
		},
		"by memory": {
			"enflame", []Config{memory}, chipsNamed("U530", "gcu-1"), []string{"gcu-u530 gcu shared 0 0", "gcu-1 gcu shared 0 0"},
		},
		"whole and by memory": {
			"enflame", []Config{whole(false), memory}, chipsNamed("U530"), []string{"gcu-u530 gcu shared 0 0"},
		},
		"in slices and whole": {
			"nvidia", []Config{sliced(4), whole(false)}, chipsNamed("0"), []string{"gpu-0-slots slots - 4 0", "gpu-0 gpu - 0 1"},
		},
		"one slice is the whole": {"nvidia", []Config{sliced(1)}, chipsNamed("0"), []string{"gpu-0 gpu - 0 0"}},
		"two ways to slice": {
			"nvidia", []Config{sliced(4), sliced(2)}, chipsNamed("0"), []string{"gpu-0-slots slots - 4 0"},
		},
		"boards": {
			"iluvatar", []Config{whole(false)}, boardsOf("a", "b"), []string{"board-a board - 0 0"},
		},
		"chips": {
			"iluvatar", []Config{whole(true)}, boardsOf("a", "b"), []string{"chip-a chip - 0 0", "chip-b chip - 0 0"},
		},
		"boards and their memory": {
			"iluvatar", []Config{whole(false), memory}, boardsOf("a", "b"), []string{
				"board-a board - 0 0", "chip-a chip shared 0 1", "chip-b chip shared 0 1"},
		},
		"a chip without its board": {
			"iluvatar", []Config{whole(false)}, boardsOf("a", "b")[:1], []string{"chip-a chip - 0 0"},
		},
		"partitions": {"nvidia", []Config{partitions}, cut, []string{"mig-1 mig - 0 0"}},
		"instances":  {"enflame", []Config{partitions}, cut, []string{"drs-mig-1 drs - 0 0"}},
		"names that cannot be": {"nvidia", []Config{whole(false)}, odd, []string{
			"gpu-5d4bc6e8fd8ef9ed2e8d8d4f0a0f5b0e gpu - 0 0", "gpu- gpu - 0 0", "gpu- gpu - 0 0", "gpu- gpu - 0 0"}},
		"nothing is offered": {"nvidia", nil, chipsNamed("0"), nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			e, err := New()
			if err != nil {
				t.Fatal(err)
			}
			e.Claims.Serve(tt.vendor, tt.ways...)
			e.Claims.Discover(tt.vendor, Discovery{Devices: tt.devices})
			var got []string
			for _, d := range e.Claims.Devices(tt.vendor) {
				if !label.MatchString(d.Name) {
					t.Errorf("%q is not a DNS label", d.Name)
				}
				shared := "-"
				if d.Shared {
					shared = "shared"
				}
				got = append(got, fmt.Sprint(d.Name, " ", d.Type, " ", shared, " ", d.Slots, " ", d.Rank))
			}
			if name == "names that cannot be" {
				slices.Sort(got)
				if len(slices.Compact(got)) != len(tt.want) {
					t.Errorf("names are not unique: %v", got)
				}
				return
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// part is a part of a claim: "gpu-0", "gpu-0 8Gi" or "gpu-0-slots 2".
func partOf(text string) ClaimPart {
	name, amount, _ := strings.Cut(text, " ")
	p := ClaimPart{Request: "r", Device: name}
	if strings.HasSuffix(amount, "Gi") {
		_, _ = fmt.Sscanf(amount, "%dGi", &p.Bytes)
		p.Bytes *= gib
	} else if amount != "" {
		_, _ = fmt.Sscanf(amount, "%d", &p.Slots)
	}
	return p
}

func claimOf(uid string, parts ...string) Claim {
	c := Claim{Vendor: "nvidia", UID: uid, Namespace: "ns", Name: uid}
	for _, text := range parts {
		c.Parts = append(c.Parts, partOf(text))
	}
	return c
}

// iluvatarOf is a claim of boards and chips.
func iluvatarOf(uid string, parts ...string) Claim {
	c := claimOf(uid, parts...)
	c.Vendor = "iluvatar"
	return c
}

// claimsEngine has two GPUs, whole, by memory and in four slices, and one by a memory
// resource alone; "b" is unhealthy. It also has two boards of two chips, whole and by the memory
// of each chip.
func claimsEngine(t *testing.T) *Engine {
	t.Helper()
	unit, err := sharing.ParseMemoryUnit("1")
	if err != nil {
		t.Fatal(err)
	}
	memory := Config{ID: ID{"v.example/memory", Memory}, Vendor: "nvidia", Unit: unit}
	e, err := New(memory)
	if err != nil {
		t.Fatal(err)
	}
	d := Discovery{Devices: chipsNamed("a", "b", "m")}
	d.Devices[1].Health = accel.Health{Unhealthy: true, Reason: "ECC", Cause: "ecc"}
	notM := sliced(4)
	notM.Chooses = func(c sharing.Card) bool { return c.ID != "m" }
	byWhole := whole(false)
	byWhole.Chooses = notM.Chooses
	memory.Chooses = func(c sharing.Card) bool { return c.ID != "b" }
	e.Claims.Serve("nvidia", byWhole, memory, notM)
	e.Claims.Discover("nvidia", d)
	e.Claims.Serve("iluvatar", whole(false), Config{ID: ID{"v.example/chip-memory", Memory}})
	e.Claims.Discover("iluvatar", Discovery{Devices: boardsOf("p", "q", "r", "s")})
	e.Discover(memory.ID, d)
	e.Take(View{Complete: true, Now: time.Unix(1, 0)})
	return e
}

func TestHold(t *testing.T) {
	ill, admin := claimOf("c", "gpu-b"), claimOf("c", "gpu-a")
	ill.Parts[0].Ill, admin.Parts[0].Admin = true, true
	tests := map[string]struct {
		before []Claim
		claim  Claim
		want   string // part of the rejection, "" for none
		passes bool
	}{
		"a whole device": {nil, claimOf("c", "gpu-a"), "", false},
		"parts of a device": {
			[]Claim{claimOf("x", "gpu-a 8Gi")}, claimOf("c", "gpu-a 8Gi"), "", false,
		},
		"more than is left": {
			[]Claim{claimOf("x", "gpu-a 8Gi")}, claimOf("c", "gpu-a 9Gi"),
			"device gpu-a has 17179869184 bytes of memory, and claims would hold 18253611008", true,
		},
		"more than is left, by itself": {
			nil, claimOf("c", "gpu-a 8Gi", "gpu-a 9Gi"), "claims would hold 18253611008", true,
		},
		"a whole device beside a part": {
			[]Claim{claimOf("x", "gpu-a 1Gi")}, claimOf("c", "gpu-a"),
			"device gpu-a is held by claim ns/x as gpu-a with 1073741824 bytes", true,
		},
		"a part beside a whole device": {
			[]Claim{claimOf("x", "gpu-a")}, claimOf("c", "gpu-a 1Gi"), "device gpu-a is held by claim ns/x as gpu-a", true,
		},
		"slices": {
			[]Claim{claimOf("x", "gpu-a-slots 2")}, claimOf("c", "gpu-a-slots 2"), "", false,
		},
		"more slices than there are": {
			[]Claim{claimOf("x", "gpu-a-slots 2")}, claimOf("c", "gpu-a-slots 3"),
			"device gpu-a-slots has 4 time slices, and claims would hold 5", true,
		},
		"memory beside slices": {
			[]Claim{claimOf("x", "gpu-a-slots 1")}, claimOf("c", "gpu-a 1Gi"),
			"device gpu-a is held by claim ns/x as gpu-a-slots with 1 time slices", true,
		},
		"a device twice": {nil, claimOf("c", "gpu-a", "gpu-a"), "is held by claim ns/c", true},
		"a device of another name": {
			nil, claimOf("c", "gpu-z"), "claims cannot get device gpu-z: the node does not offer it", false,
		},
		"memory of a device in slices": {
			nil, claimOf("c", "gpu-a-slots 1Gi"), "the memory of device gpu-a-slots is not shared", false,
		},
		"slices of a device": {
			nil, claimOf("c", "gpu-a 1"), "device gpu-a is not offered by time slices", false,
		},
		"nothing":                          {nil, claimOf("c"), "claim ns/c has no device of this node", false},
		"an unhealthy device":              {nil, claimOf("c", "gpu-b"), "device gpu-b is unhealthy: ECC", false},
		"an unhealthy device, tolerated":   {nil, ill, "", false},
		"access of an administrator":       {[]Claim{claimOf("x", "gpu-a 1Gi")}, admin, "", false},
		"a holder beside an administrator": {[]Claim{admin}, claimOf("d", "gpu-a"), "", false},
		"a second device that does not fit": {
			[]Claim{claimOf("x", "gpu-m")}, claimOf("c", "gpu-a", "gpu-m 1Gi"), "device gpu-m is held by claim ns/x", true,
		},
		"chips of one board": {
			[]Claim{iluvatarOf("x", "chip-p 32Gi")}, iluvatarOf("c", "chip-q 32Gi"), "", false,
		},
		"a board and a chip of another": {
			[]Claim{iluvatarOf("x", "board-p")}, iluvatarOf("c", "chip-r 1Gi"), "", false,
		},
		"the first chip of a board in use": {
			[]Claim{iluvatarOf("x", "board-p")}, iluvatarOf("c", "chip-p 1Gi"), "device chip-p is held by claim ns/x as board-p", true,
		},
		"the second chip of a board in use": {
			[]Claim{iluvatarOf("x", "board-p")}, iluvatarOf("c", "chip-q"), "device chip-q is held by claim ns/x as board-p", true,
		},
		"the board of a chip in use": {
			[]Claim{iluvatarOf("x", "chip-q 1Gi")}, iluvatarOf("c", "board-p"),
			"device board-p is held by claim ns/x as chip-q with 1073741824 bytes", true,
		},
		"a board and its chip in one claim": {
			nil, iluvatarOf("c", "board-p", "chip-q 1Gi"), "device chip-q is held by claim ns/c as board-p", true,
		},
		"a chip and its board in one claim": {
			nil, iluvatarOf("c", "chip-p", "board-p"), "device board-p is held by claim ns/c as chip-p", true,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			e := claimsEngine(t)
			for _, c := range tt.before {
				if _, err := e.Claims.Hold(c); err != nil {
					t.Fatal(err)
				}
			}
			got, err := e.Claims.Hold(tt.claim)
			if tt.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				for _, part := range got.Parts {
					if len(part.Card.Chips) == 0 || part.Type == "" {
						t.Errorf("the part is not described: %+v", part)
					}
				}
				again, err := e.Claims.Hold(tt.claim)
				if diff := cmp.Diff(got, again); diff != "" || err != nil {
					t.Errorf("the second time: %v %s", err, diff)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) || MayPass(err) != tt.passes {
				t.Errorf("got %v, may pass %t, want %q, %t", err, MayPass(err), tt.want, tt.passes)
			}
			if _, held := e.Claims.Get(tt.claim.Key()); held || len(e.Claims.All()) != len(tt.before) {
				t.Error("the rejected claim is recorded")
			}
		})
	}
}

// TestBothDoors: what a claim holds is withdrawn from kubelet, and what a container holds
// from claims.
func TestBothDoors(t *testing.T) {
	e := claimsEngine(t)
	id := ID{"v.example/memory", Memory}
	offer := func() map[accel.DeviceID]accel.Health {
		plan := e.Derive(id, time.Unix(1, 0))
		e.Saved(id, plan.State)
		e.Offer(id, Written{})
		e.Settle(id, nil)
		out := map[accel.DeviceID]accel.Health{}
		for _, s := range e.Inventory(id).Shares {
			out[s.ID] = s.Health
		}
		return out
	}
	if _, err := e.Claims.Hold(claimOf("c", "gpu-a 1Gi")); err != nil {
		t.Fatal(err)
	}
	if h := offer(); h["a"].Reason != "given out as a resource claim" || h["m"].Unhealthy {
		t.Errorf("the units are offered with %+v", h)
	}
	units := func(d accel.DeviceID) []string {
		r, _ := e.pool(id).ids.(*ranges).layout.Range(d)
		return e.pool(id).ids.(*ranges).layout.IDs(nil, d)[:r.Units]
	}
	if _, err := e.Allocate(id, units("a")[:1], nil, false); err == nil || !strings.Contains(err.Error(), "given out as a resource claim") {
		t.Errorf("units of a device that a claim holds: %v", err)
	}
	a, err := e.Allocate(id, units("m")[:1], nil, false)
	if err != nil {
		t.Fatal(err)
	}
	a.Give(time.Unix(1, 0))
	if _, err := e.Claims.Hold(claimOf("d", "gpu-m")); !InDoubt(err) ||
		!strings.Contains(err.Error(), "device gpu-m is given out as v.example/memory") {
		t.Errorf("a claim of a device of which a container has units: %v", err)
	}
	for _, d := range e.Claims.Devices("nvidia") {
		if want := map[string]accel.Resource{"gpu-m": id.Resource}[d.Name]; d.Elsewhere != want {
			t.Errorf("device %s is held as %q, want %q", d.Name, d.Elsewhere, want)
		}
	}
	e.Claims.Release(ClaimKey{"nvidia", "c"})
	if h := offer(); h["a"].Unhealthy {
		t.Errorf("after the release: %+v", h["a"])
	}
}

// TestUsed: devices say how much of them claims hold.
func TestUsed(t *testing.T) {
	e := claimsEngine(t)
	used := func() string {
		var out []string
		for _, d := range e.Claims.Devices("nvidia") {
			if d.Used > 0 {
				out = append(out, fmt.Sprintf("%s %.2f %t", d.Name, d.Used*float64(d.Card.MemoryBytes)/(1<<30), d.Packed))
			}
		}
		return strings.Join(out, ", ")
	}
	if got := used(); got != "" {
		t.Errorf("without a claim: %s", got)
	}
	for _, c := range []Claim{claimOf("c", "gpu-a 1Gi"), claimOf("d", "gpu-a 2Gi")} {
		if _, err := e.Claims.Hold(c); err != nil {
			t.Fatal(err)
		}
	}
	if got := used(); got != "gpu-a 3.00 false" {
		t.Errorf("with two claims: %s", got)
	}
	e.Claims.Release(ClaimKey{"nvidia", "d"})
	if got := used(); got != "gpu-a 1.00 false" {
		t.Errorf("with one claim: %s", got)
	}
}

// TestClaimsSaved: an engine that was given the saved state, by way of JSON, knows the
// same, also of devices that are gone.
func TestClaimsSaved(t *testing.T) {
	e := claimsEngine(t)
	c, err := e.Claims.Hold(claimOf("c", "gpu-a 1Gi"))
	if err != nil {
		t.Fatal(err)
	}
	e.Claims.Prepared(ClaimKey{"nvidia", "c"}, nil)
	c.Prepared = true
	data, err := json.Marshal(e.Claims.State())
	if err != nil {
		t.Fatal(err)
	}
	var s ClaimsState
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	next, err := New()
	if err != nil {
		t.Fatal(err)
	}
	next.Claims.Serve("nvidia", whole(false))
	next.Claims.Restore(s)
	next.Claims.Discover("nvidia", Discovery{Devices: chipsNamed("z")})
	if diff := cmp.Diff([]Claim{c}, next.Claims.All()); diff != "" {
		t.Error(diff)
	}
	devices := next.Claims.Devices("nvidia")
	if len(devices) != 2 || devices[1].Name != "gpu-a" || !devices[1].Card.Health.Unhealthy ||
		devices[1].Card.Health.Cause != accel.CauseLost {
		t.Errorf("the devices are %+v", devices)
	}
	changed := claimOf("c", "gpu-z")
	if _, err := next.Claims.Hold(changed); err == nil || !strings.Contains(err.Error(), "was prepared with other devices (gpu-a)") {
		t.Errorf("the claim with another device: %v", err)
	}
}

// TestClaimsRecovered: without the saved state nothing is given out until the claims are
// known from elsewhere.
func TestClaimsRecovered(t *testing.T) {
	e := claimsEngine(t)
	e.Claims.Restore(ClaimsState{Partial: true})
	if _, err := e.Claims.Hold(claimOf("d", "gpu-m")); !MayPass(err) || InDoubt(err) {
		t.Errorf("before: %v", err)
	}
	if _, err := e.Prefer(ID{"v.example/memory", Memory}, Question{Size: 1}); !InDoubt(err) {
		t.Errorf("units before: %v", err)
	}
	e.Claims.Recover([]Claim{claimOf("c", "gpu-a 1Gi", "gpu-gone")})
	c, _ := e.Claims.Get(ClaimKey{"nvidia", "c"})
	if !slices.Equal(c.Parts[0].Card.Chips, []accel.DeviceID{"a"}) || c.Parts[1].Card.Chips != nil {
		t.Errorf("recovered %+v", c)
	}
	if _, err := e.Claims.Hold(claimOf("d", "gpu-a")); err == nil {
		t.Error("the device of a recovered claim is given out")
	}
	if _, err := e.Claims.Hold(claimOf("d", "gpu-m")); err != nil {
		t.Error(err)
	}
	e.Claims.Discover("nvidia", Discovery{Devices: chipsNamed("a", "gone")})
	if c, _ := e.Claims.Get(ClaimKey{"nvidia", "c"}); !slices.Equal(c.Parts[1].Card.Chips, []accel.DeviceID{"gone"}) {
		t.Errorf("after its device was found: %+v", c.Parts[1])
	}
}

// TestClaimsWithoutLibrary: while the vendor's library does not answer, devices stay
// listed as unhealthy and cannot be had.
func TestClaimsWithoutLibrary(t *testing.T) {
	e := claimsEngine(t)
	e.Claims.Discover("nvidia", Discovery{Err: fmt.Errorf("the driver is being replaced")})
	devices := e.Claims.Devices("nvidia")
	if len(devices) != 5 {
		t.Errorf("%d devices are listed", len(devices))
	}
	for _, d := range devices {
		if !d.Card.Health.Unhealthy {
			t.Errorf("device %s is healthy", d.Name)
		}
	}
	if _, err := e.Claims.Hold(claimOf("c", "gpu-a")); err == nil || !strings.Contains(err.Error(), "the driver is being replaced") {
		t.Errorf("got %v", err)
	}
}

// TestClaimOfTwoVendors: each vendor's driver prepares and releases its part of a claim.
func TestClaimOfTwoVendors(t *testing.T) {
	e := claimsEngine(t)
	e.Claims.Serve("enflame", whole(false))
	e.Claims.Discover("enflame", Discovery{Devices: chipsNamed("u1")})
	first, second := claimOf("c", "gpu-a"), claimOf("c", "gcu-u1")
	second.Vendor = "enflame"
	for _, c := range []Claim{first, second} {
		if _, err := e.Claims.Hold(c); err != nil {
			t.Fatal(err)
		}
	}
	e.Claims.Release(first.Key())
	if all := e.Claims.All(); len(all) != 1 || all[0].Vendor != "enflame" {
		t.Errorf("after one driver released it: %+v", all)
	}
}
