package audit

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/pkg/kubelet/cm/dra/state"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/node/alloc"
	nodestate "github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

var bothChips = []Chip{
	{"enflame", "U0", "", 0, 4 << 30},
	{"enflame", "U1", "", 1, 4 << 30},
	{"nvidia", "GPU-aa", "", 0, 8 << 30},
	{"nvidia", "GPU-bb", "", 1, 8 << 30},
	{"iluvatar", "GPU-cc", "first", 0, 8 << 30},
	{"iluvatar", "GPU-dd", "first", 1, 8 << 30},
}

// agreeing is a sample without a mismatch: a container with units of GCU 0 and with a whole GPU 0, two
// that share a part of GCU 1, one with another part of it, and one with a board of two chips.
func agreeing() Sample {
	const gcu, ix = "enflame.divvy.dev", "iluvatar.divvy.dev"
	claims := func() []Claim {
		return []Claim{
			{"u1", "n/shared", []Allocation{{gcu, "gcu-u1", "s1", "r0", 2 << 30}}, 2, true},
			{"u2", "n/part", []Allocation{{gcu, "gcu-u1", "s2", "r0", 2 << 30}}, 1, true},
			{"u3", "n/board", []Allocation{{ix, "board-gpu-cc", "", "r0", 0}}, 1, true},
		}
	}
	kubelet := func(claim string, has ...Allocation) Held {
		return Held{Claims: map[string][]Allocation{claim: has}, Units: map[string][]string{}}
	}
	sees := func(variable, value string, nodes ...string) testenv.Sight {
		return testenv.Sight{Env: map[string]string{variable: value}, Nodes: nodes}
	}
	board := sees("IX_VISIBLE_DEVICES", "GPU-cc,GPU-dd", "iluvatar0", "iluvatar1", "itrctl")
	shared := kubelet("n/shared", Allocation{Driver: gcu, Device: "gcu-u1", Share: "s1"})
	return Sample{
		Chips: bothChips, Units: Units{{"GCU-U0", 0, 4}},
		API: claims(), Daemon: claims(), Checkpoint: claims(), Specs: []string{"enflame-u1", "enflame-u2", "iluvatar-u3"},
		Kubelet: map[string]Held{
			"n/units/app": {Units: map[string][]string{"enflame.com/gcu-memory": {"0", "1"}, "nvidia.com/gpu": {"GPU-aa"}}},
			"n/one/app":   shared, "n/two/app": shared,
			"n/three/app": kubelet("n/part", Allocation{Driver: gcu, Device: "gcu-u1", Share: "s2"}),
			"n/four/app":  kubelet("n/board", Allocation{Driver: ix, Device: "board-gpu-cc"}),
		},
		Users: []User{
			{"n/units/app", "c0", nil, map[string]int64{"enflame.com/gcu-memory": 2, "nvidia.com/gpu": 1}, testenv.Sight{
				Env:   map[string]string{visibleDevices: "0", "NVIDIA_VISIBLE_DEVICES": "GPU-aa"},
				Nodes: []string{"gcu0", "nvidia0", "nvidiactl"},
			}},
			{"n/one/app", "c1", []Use{{"n/shared", ""}}, nil, sees(visibleDevices, "1", "gcu1")},
			{"n/two/app", "c2", []Use{{"n/shared", "r0"}}, nil, sees(visibleDevices, "1", "gcu1")},
			{"n/three/app", "c3", []Use{{"n/part", ""}}, nil, sees(visibleDevices, "1", "gcu1")},
			{"n/four/app", "c4", []Use{{"n/board", ""}}, nil, board},
		},
	}
}

// change makes one value of a map another, and leaves the map of other samples alone.
func (s *Sample) change(container string, change func(*Held)) {
	held := s.Kubelet[container]
	held.Claims, held.Units = maps.Clone(held.Claims), maps.Clone(held.Units)
	change(&held)
	s.Kubelet[container] = held
}

// more is another claim, of 1 GiB of a device.
func more(driver, device string) Claim {
	return Claim{"u4", "n/more", []Allocation{{driver, device, "s4", "r0", 1 << 30}}, 1, false}
}

func TestCompareClaims(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Sample)
		want   string // part of what is wrong; "" for nothing
	}{
		"all agree":                     {},
		"no answer of the API server":   {change: func(s *Sample) { s.API, s.Users = nil, nil }},
		"no answer of kubelet":          {change: func(s *Sample) { s.Kubelet = nil }},
		"kubelet lists a container not": {change: func(s *Sample) { delete(s.Kubelet, "n/one/app") }},

		"the environment names another device": {
			change: func(s *Sample) { s.Users[1].Sight.Env[visibleDevices] = "0" },
			want:   `container n/one/app: its ENFLAME_VISIBLE_DEVICES is "0", its allocations are "1"`,
		},
		"no environment": {
			change: func(s *Sample) { s.Users[4].Sight.Env = nil },
			want:   `its IX_VISIBLE_DEVICES is "", its allocations are "GPU-cc,GPU-dd"`,
		},
		"the environment names a device beside the claim's": {
			change: func(s *Sample) { s.Users[1].Sight.Env["NVIDIA_VISIBLE_DEVICES"] = "GPU-bb" },
			want:   `its NVIDIA_VISIBLE_DEVICES is "GPU-bb", its allocations are ""`,
		},
		"/dev has another device": {
			change: func(s *Sample) { s.Users[3].Sight.Nodes = []string{"gcu0"} },
			want:   `container n/three/app: it has "gcu0" in /dev, its allocations are "gcu1"`,
		},
		"/dev lacks a chip of the board": {
			change: func(s *Sample) { s.Users[4].Sight.Nodes = []string{"iluvatar0", "itrctl"} },
			want:   `it has "iluvatar0" in /dev, its allocations are "iluvatar0,iluvatar1"`,
		},
		"the environment names another whole GPU than kubelet": {
			change: func(s *Sample) { s.Users[0].Sight.Env["NVIDIA_VISIBLE_DEVICES"] = "GPU-bb" },
			want:   `container n/units/app: its NVIDIA_VISIBLE_DEVICES is "GPU-bb", its allocations are "GPU-aa"`,
		},
		"a claim without an allocation": {
			change: func(s *Sample) { s.API = s.API[1:] },
			want:   "container n/one/app: its claim n/shared has no allocation",
		},
		"the claim was allocated otherwise": {
			change: func(s *Sample) { s.API[1].Has[0].Device = "gcu-u0" },
			want:   "n/three/app: divvy-node recorded [enflame.divvy.dev gcu-u1 share s2 for r0, 2147483648 bytes] of claim n/part",
		},
		"divvy-node has no record": {
			change: func(s *Sample) { s.Daemon = s.Daemon[1:] },
			want:   "divvy-node has no record of claim n/shared",
		},
		"divvy-node has a record of an earlier claim of the name": {
			change: func(s *Sample) { s.Daemon[0].UID = "u0" },
			want:   "divvy-node has no record of claim n/shared",
		},
		"divvy-node has not prepared the claim": {
			change: func(s *Sample) { s.Daemon[0].Prepared = false },
			want:   "divvy-node has not prepared claim n/shared",
		},
		"divvy-node recorded another amount": {
			change: func(s *Sample) { s.Daemon[0].Has[0].Bytes = 1 << 30 },
			want:   "divvy-node recorded [enflame.divvy.dev gcu-u1 share s1 for r0, 1073741824 bytes] of claim n/shared",
		},
		"kubelet has no record": {
			change: func(s *Sample) { s.Checkpoint = s.Checkpoint[:2] },
			want:   "container n/four/app: kubelet has no record of claim n/board",
		},
		"kubelet recorded another device": {
			change: func(s *Sample) { s.Checkpoint[2].Has[0].Device = "chip-gpu-cc" },
			want:   "kubelet recorded [iluvatar.divvy.dev chip-gpu-cc] of claim n/board",
		},
		"no CDI specification": {
			change: func(s *Sample) { s.Specs = s.Specs[1:] },
			want:   "there is no CDI specification of claim n/shared for enflame",
		},
		"kubelet lists another share": {
			change: func(s *Sample) {
				s.change("n/one/app", func(h *Held) {
					h.Claims["n/shared"] = []Allocation{{Driver: "enflame.divvy.dev", Device: "gcu-u1", Share: "s2"}}
				})
			},
			want: "kubelet lists [enflame.divvy.dev gcu-u1 share s2] of claim n/shared",
		},
		"kubelet lists no claim": {
			change: func(s *Sample) { s.change("n/one/app", func(h *Held) { h.Claims = nil }) },
			want:   "kubelet lists [] of claim n/shared",
		},
		"kubelet gave too few units": {
			change: func(s *Sample) {
				s.change("n/units/app", func(h *Held) { h.Units["enflame.com/gcu-memory"] = []string{"0"} })
			},
			want: "it requests 2 of enflame.com/gcu-memory, kubelet lists 1",
		},
		"kubelet gave a unit of no device": {
			change: func(s *Sample) {
				s.change("n/units/app", func(h *Held) { h.Units["enflame.com/gcu-memory"] = []string{"0", "9"} })
			},
			want: "kubelet lists 9 of enflame.com/gcu-memory, which is of no device",
		},

		"claims of the API server beyond the memory": {
			change: func(s *Sample) {
				s.API = append(s.API, more("enflame.divvy.dev", "gcu-u1"))
			},
			want: "the API server's claims: device U1 of 4294967296 bytes is used beyond its size",
		},
		"a whole device beside a part in divvy-node's record": {
			change: func(s *Sample) {
				s.Daemon = append(s.Daemon, more("iluvatar.divvy.dev", "chip-gpu-dd"))
			},
			want: "the node: device GPU-dd of 8589934592 bytes is used beyond its size, or in two ways: a holder has all of it is true",
		},
		"one device by units and by a claim": {
			change: func(s *Sample) {
				s.Daemon = append(s.Daemon, more("enflame.divvy.dev", "gcu-u0"))
			},
			want: "the node: device U0 of 4294967296 bytes is used beyond its size, or in two ways",
		},
		"two containers with one whole GPU": {
			change: func(s *Sample) {
				s.change("n/three/app", func(h *Held) { h.Units["nvidia.com/gpu"] = []string{"GPU-aa"} })
			},
			want: "the node: device GPU-aa of 8589934592 bytes is used beyond its size",
		},
		"a claim of a device that does not exist": {
			change: func(s *Sample) {
				s.Daemon = append(s.Daemon, more("enflame.divvy.dev", "gcu-u9"))
			},
			want: "the node: device gcu-u9 does not exist",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := agreeing()
			if test.change != nil {
				test.change(&s)
			}
			wrong, _ := CompareClaims(s)
			if test.want == "" && len(wrong) > 0 {
				t.Errorf("wrong are %q, want nothing", wrong)
			}
			if !strings.Contains(strings.Join(wrong, "\n"), test.want) {
				t.Errorf("wrong are %q, want one with %q", wrong, test.want)
			}
		})
	}
}

// TestFacts: a mismatch is reported with what each source has.
func TestFacts(t *testing.T) {
	s := agreeing()
	s.Users[1].Sight.Nodes = nil
	wrong, _ := CompareClaims(s)
	if len(wrong) != 1 {
		t.Fatalf("wrong are %q, want one", wrong)
	}
	for _, want := range []string{
		`claim n/shared u1 request "": allocation [enflame.divvy.dev gcu-u1 share s1 for r0, 2147483648 bytes]`,
		"divvy-node [enflame", "kubelet's record [enflame", "kubelet answers true, lists it true: claims map[n/shared:",
		"environment map[ENFLAME_VISIBLE_DEVICES:1]; /dev []; c1",
	} {
		if !strings.Contains(wrong[0], want) {
			t.Errorf("the mismatch is %q, want it with %q", wrong[0], want)
		}
	}
}

func TestLeftovers(t *testing.T) {
	if found := Leftovers(agreeing()); len(found) > 0 {
		t.Errorf("leftovers %q, want none", found)
	}
	for want, change := range map[string]func(*Sample){
		"claim n/part has an allocation, and is reserved for no pod":        func(s *Sample) { s.API[1].Users = 0 },
		"divvy-node has enflame.divvy.dev u2 (n/part), which no claim":      func(s *Sample) { s.API = slices.Delete(s.API, 1, 2) },
		"divvy-node lacks enflame.divvy.dev u1 of claim n/shared":           func(s *Sample) { s.Daemon = s.Daemon[1:] },
		"kubelet's checkpoint lacks iluvatar.divvy.dev u3 of claim n/board": func(s *Sample) { s.Checkpoint = s.Checkpoint[:2] },
		"the CDI folder has enflame-u9 (a specification), which no claim":   func(s *Sample) { s.Specs = append(s.Specs, "enflame-u9") },
	} {
		s := agreeing()
		change(&s)
		if found := Leftovers(s); !strings.Contains(strings.Join(found, "\n"), want) {
			t.Errorf("leftovers %q, want one with %q", found, want)
		}
	}
}

func TestClaimWatch(t *testing.T) {
	now := time.Now()
	all := func(string) bool { return true }
	w := NewClaimWatch(nil, bothChips)
	w.take(agreeing(), now, all)
	got := w.Summary()
	want := ClaimSummary{Samples: 1, Full: 1, Containers: 5, Claims: 3, Shared: 2, Largest: 20 << 30}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("summary %+v, want %+v", got, want)
	}

	// The pod with a part of GCU 1 was deleted by force, its container runs, and its part was given
	// to another pod, whose container runs as well.
	s := agreeing()
	s.API[1], s.Users[3].ID = Claim{"u4", "n/part", s.API[1].Has, 1, true}, "c5"
	s.Daemon, s.Checkpoint, s.Specs[1] = s.API, s.API, "enflame-u4"
	for name, alive := range map[string]func(string) bool{"it ended": func(id string) bool { return id != "c3" }, "it runs": all} {
		w := NewClaimWatch(nil, bothChips)
		w.take(agreeing(), now, all)
		w.take(s, now, alive)
		const want = "the running containers: device U1 of 4294967296 bytes is used beyond its size"
		if got := w.Summary().Violations; strings.Contains(strings.Join(got, "\n"), want) != (name == "it runs") {
			t.Errorf("%s: violations %q", name, got)
		}
	}

	w = NewClaimWatch(nil, bothChips)
	s = agreeing()
	delete(s.Kubelet, "n/one/app")
	for _, step := range []struct {
		after time.Duration
		s     Sample
		want  int
	}{{0, s, 0}, {absentFor, agreeing(), 0}, {absentFor + 1, s, 0}, {2 * absentFor, s, 0}, {2*absentFor + 2, s, 1}} {
		w.take(step.s, now.Add(step.after), all)
		if got := w.Summary().Violations; len(got) != step.want {
			t.Errorf("after %v the violations are %q, want %d", step.after, got, step.want)
		}
	}
}

// TestReadRecords: what divvy-node and kubelet write is read.
func TestReadRecords(t *testing.T) {
	dir := t.TempDir()
	recorded := alloc.ClaimsState{Claims: []alloc.Claim{{
		Vendor: "enflame", UID: "u1", Namespace: "n", Name: "c", Pods: []string{"p"}, Prepared: true,
		Parts: []alloc.ClaimPart{{Request: "r0", Device: "gcu-u0", Share: "s", Bytes: 5}, {Request: "r1", Device: "gcu-u1"}},
	}}}
	if err := nodestate.NewDocument[alloc.ClaimsState](dir, "claims.json").Save(recorded); err != nil {
		t.Fatal(err)
	}
	checkpoint, err := state.NewCheckpoint(state.ClaimInfoStateList{{
		ClaimUID: "u1", ClaimName: "c", Namespace: "n", PodUIDs: sets.New("p"),
		DriverState: map[string]state.DriverState{"enflame.divvy.dev": {Devices: []state.Device{
			{PoolName: "node", DeviceName: "gcu-u0", ShareID: ptr.To(types.UID("s")), RequestNames: []string{"r0"}},
			{PoolName: "node", DeviceName: "gcu-u1", RequestNames: []string{"r1"}},
		}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	data, err := checkpoint.MarshalCheckpoint()
	if err != nil {
		t.Fatal(err)
	}
	damaged := filepath.Join(dir, "damaged")
	for path, data := range map[string][]byte{filepath.Join(dir, "checkpoint"): data, damaged: []byte("{")} {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	claim := func(users int, prepared bool, request0, request1 string, bytes int64) Claim {
		const driver = "enflame.divvy.dev"
		has := []Allocation{{driver, "gcu-u0", "s", request0, bytes}, {driver, "gcu-u1", "", request1, 0}}
		return Claim{"u1", "n/c", has, users, prepared}
	}
	for file, test := range map[string]struct {
		read func(string) ([]Claim, error)
		want Claim
	}{
		"claims.json": {readDaemon, claim(0, true, "r0", "r1", 5)},
		"checkpoint":  {readCheckpoint, claim(1, false, "", "", 0)},
	} {
		if got, err := test.read(filepath.Join(dir, file)); err != nil || !reflect.DeepEqual(got, []Claim{test.want}) {
			t.Errorf("%s is read as %+v, %v; want %+v", file, got, err, test.want)
		}
		if claims, err := test.read(filepath.Join(dir, "none")); err != nil || claims == nil || len(claims) > 0 {
			t.Errorf("no record is read as %v, %v; want no claims", claims, err)
		}
		if _, err := test.read(damaged); err == nil {
			t.Errorf("a damaged %s was read", file)
		}
	}
}

func TestChipsOfDevices(t *testing.T) {
	for device, want := range map[string][]string{
		"gcu-u1": {"U1"}, "gpu-bb": {"GPU-bb"}, "chip-gpu-dd": {"GPU-dd"}, "board-gpu-cc": {"GPU-cc", "GPU-dd"}, "gcu-u7": nil, "": nil,
	} {
		var got []string
		for _, chip := range chipsOf(bothChips, device) {
			got = append(got, chip.UUID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("device %q has the chips %q, want %q", device, got, want)
		}
	}
	got := ChipsOf(vendorsim.Topology{Cards: []vendorsim.Card{
		{Vendor: "nvidia", UUID: "a", MemoryMiB: 2}, {Vendor: "enflame", UUID: "b"}, {Vendor: "nvidia", UUID: "c", Board: "x"},
	}})
	want := []Chip{{"nvidia", "a", "", 0, 2 << 20}, {"enflame", "b", "", 0, 0}, {"nvidia", "c", "x", 1, 0}}
	if !slices.Equal(got, want) {
		t.Errorf("chips %+v, want %+v", got, want)
	}
}

// TestUnusedContainers: containers that do not run, or use no devices, are not looked at.
func TestUnusedContainers(t *testing.T) {
	pod := &corev1.Pod{}
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c", ResourceClaimName: ptr.To("claim")}}
	pod.Spec.Containers = []corev1.Container{{Name: "app"}, {Name: "plain"}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "c"}}
	if users := look(pod); len(users) > 0 {
		t.Errorf("users %+v of a pod that has not started", users)
	}
	if got := stayed([]User{{ID: "x"}}, []corev1.Pod{*pod}); len(got) > 0 {
		t.Errorf("%+v stayed, want none", got)
	}
}
