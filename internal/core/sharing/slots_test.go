package sharing

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func TestSlotIDRoundTrip(t *testing.T) {
	for text, want := range map[string]SlotID{
		"GPU-1":              {"GPU-1", WholeDevice},
		"GPU-1::0":           {"GPU-1", 0},
		"GPU-1::17":          {"GPU-1", 17},
		"MIG-GPU-1/0/3":      {"MIG-GPU-1/0/3", WholeDevice},
		"GPU::odd::3":        {"GPU::odd", 3},
		"GCU-U5300009010::1": {"GCU-U5300009010", 1},
	} {
		got, err := ParseSlotID(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%q: got %+v, %v, %q", text, got, err, got.String())
		}
	}
	for _, text := range []string{"", "::0", "GPU-1::", "GPU-1::x", "GPU-1::-1", "GPU-1::+1", "GPU-1::01", "GPU-1:: 1",
		"GPU-1::99999999999999999999", "GPU-1::1048577"} {
		if got, err := ParseSlotID(text); err == nil {
			t.Errorf("%q was read as %+v", text, got)
		}
	}
}

func FuzzParseSlotID(f *testing.F) {
	for _, s := range []string{"GPU-1", "GPU-1::3", "::", "a::b::0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := ParseSlotID(text); err == nil && s.String() != text {
			t.Fatalf("%q was read as %+v, which is %q", text, s, s.String())
		}
	})
}

// node has devices d0, d1... with so many replicas each.
func node(replicas ...int) []SlotDevice {
	var out []SlotDevice
	for i, r := range replicas {
		out = append(out, SlotDevice{ID: accel.DeviceID(fmt.Sprint("d", i)), Index: i, Replicas: r})
	}
	return out
}

// all returns all slot ids but those that are held.
func all(devices []SlotDevice, held ...string) []string {
	var out []string
	for _, d := range devices {
		out = SlotIDs(out, d.ID, d.Replicas)
	}
	return slices.DeleteFunc(out, func(id string) bool { return slices.Contains(held, id) })
}

// linked are links of score 50 between pairs such as "d0 d1".
func linked(pairs ...string) []accel.Link {
	var out []accel.Link
	for _, p := range pairs {
		a, b, _ := strings.Cut(p, " ")
		out = append(out, accel.Link{A: accel.DeviceID(a), B: accel.DeviceID(b), Score: accel.LinkSwitch})
	}
	return out
}

func with(devices []SlotDevice, change func(d []SlotDevice)) []SlotDevice {
	change(devices)
	return devices
}

func TestChooseSlots(t *testing.T) {
	lost := func(i int) func([]SlotDevice) { return func(d []SlotDevice) { d[i].Unusable = "lost" } }
	avoid := func(at ...int) func([]SlotDevice) {
		return func(d []SlotDevice) {
			for _, i := range at {
				d[i].Avoid = true
			}
		}
	}
	for name, tt := range map[string]struct {
		devices []SlotDevice
		held    []string
		must    []string
		links   []accel.Link
		policy  SlotPolicy
		size    int
		want    string // ids, blanks between; or the error after "error: "
	}{
		"a whole device, the first":     {devices: node(0, 0, 0), size: 1, want: "d0"},
		"whole devices that are linked": {devices: node(0, 0, 0, 0), links: linked("d1 d3"), size: 2, want: "d1 d3"},
		"linked with the required one": {devices: node(0, 0, 0, 0), links: linked("d1 d3", "d0 d2"), must: []string{"d2"},
			size: 2, want: "d0 d2"},
		"all devices of the node":                {devices: node(0, 0, 0), size: 3, want: "d0 d1 d2"},
		"only what must be":                      {devices: node(0, 0), must: []string{"d1"}, held: []string{"d0"}, size: 1, want: "d1"},
		"not a lost device":                      {devices: with(node(0, 0), lost(0)), size: 1, want: "d1"},
		"a lost device that the pod has already": {devices: with(node(0, 0), lost(0)), must: []string{"d0"}, size: 1, want: "d0"},
		"not a promised device": {devices: with(node(0, 0, 0), avoid(0, 1)), links: linked("d0 d1", "d0 d2"), size: 1,
			want: "d2"},
		"as few promised devices as possible": {devices: with(node(0, 0, 0, 0), avoid(0, 1, 2)), links: linked("d0 d1", "d2 d3"), size: 2,
			want: "d2 d3"},

		"a replica of the device with the fewest held": {devices: node(4, 4), held: []string{"d0::0", "d0::1", "d1::0"}, size: 1,
			want: "d1::1"},
		"packed, of the one with the most": {devices: node(4, 4), held: []string{"d1::0"}, policy: Packed, size: 1,
			want: "d1::1"},
		"packed, not of a full one": {devices: node(2, 2, 2), held: []string{"d1::0", "d1::1", "d2::1"}, policy: Packed,
			size: 1, want: "d2::0"},
		"replicas on different devices": {devices: node(4, 4, 4), held: []string{"d0::0", "d0::1", "d0::2"}, size: 3,
			want: "d0::3 d1::0 d2::0"},
		"packed, on different devices too": {devices: node(4, 4, 4), held: []string{"d2::3"}, policy: Packed, size: 2,
			want: "d0::0 d2::0"},
		"a second round when all devices serve": {devices: node(4, 2), size: 5, want: "d0::0 d0::1 d0::2 d1::0 d1::1"},
		"equally shared ones that are linked":   {devices: node(2, 2, 2, 2), links: linked("d1 d3"), size: 2, want: "d1::0 d3::0"},
		"linked with the least shared one": {devices: node(2, 2, 2, 2), held: []string{"d0::0", "d1::1", "d3::0"},
			links: linked("d2 d3", "d0 d1"), size: 2, want: "d2::0 d3::1"},
		"another device than the one of the replica to be reused": {devices: node(2, 2), held: []string{"d1::0"}, must: []string{"d0::1"},
			size: 2,
			want: "d0::1 d1::1"},
		"one replica each":                              {devices: node(1, 1), held: []string{"d0::0"}, size: 1, want: "d1::0"},
		"a promised device after second replicas":       {devices: with(node(2, 2), avoid(1)), size: 3, want: "d0::0 d0::1 d1::0"},
		"a replica from before the replicas were fewer": {devices: node(2, 2), must: []string{"d0::7"}, size: 1, want: "d0::7"},

		"too few": {devices: node(0, 0), held: []string{"d0"}, size: 2,
			want: "error: nvidia.com/gpu: 2 devices asked for, 1 of 2 may be given out: 1 held by containers: not enough devices may be " +
				"given out"},
		"too few, with reasons": {devices: with(node(2, 2), func(d []SlotDevice) { d[1].Unusable = "given out as nvidia.com/gpu-memory" }),
			held: []string{"d0::1"}, size: 3,
			want: "error: nvidia.com/gpu: 3 replicas asked for, 1 of 4 may be given out: 2 given out as nvidia.com/gpu-memory, 1 held by " +
				"containers: not enough devices may be given out"},
		"nothing there": {size: 1, want: "error: nvidia.com/gpu: 1 devices asked for, 0 of 0 may be given out: not enough devices " +
			"may be given out"},
		"nothing asked": {devices: node(0), size: 0, want: "error: nvidia.com/gpu: 0 devices asked for"},
		"more to be reused": {devices: node(0, 0), must: []string{"d0", "d1"}, size: 1,
			want: "error: nvidia.com/gpu: 1 devices asked for and 2 to be reused"},
		"reused, of nowhere": {devices: node(0), must: []string{"x"}, size: 1,
			want: `error: nvidia.com/gpu: "x", which is to be reused, is none of its devices`},
		"reused twice": {devices: node(0, 0), must: []string{"d0", "d0"}, size: 2,
			want: `error: nvidia.com/gpu: "d0" is to be reused twice`},
	} {
		t.Run(name, func(t *testing.T) {
			q := SlotQuestion{
				Resource: "nvidia.com/gpu", Size: tt.size, Available: all(tt.devices, tt.held...), Must: tt.must,
				Devices: tt.devices, Links: tt.links, Policy: tt.policy,
			}
			got, err := ChooseSlots(q)
			text := strings.Join(got, " ")
			if err != nil {
				text = "error: " + err.Error()
			}
			if text != tt.want {
				t.Errorf("got  %s\nwant %s", text, tt.want)
			}
		})
	}
}

// Iluvatar 13 and NVIDIA 8: fewer candidates than asked for are an error that
// says so, for every size, never a panic or an empty answer.
func TestFewerCandidatesThanRequestedIsAnError(t *testing.T) {
	for _, replicas := range []int{0, 1, 4} {
		devices := node(replicas, replicas, replicas)
		for have := range 3 {
			available := all(devices)[:have]
			for size := have + 1; size < 20; size++ {
				got, err := ChooseSlots(SlotQuestion{Resource: "r", Size: size, Available: available, Devices: devices})
				if !errors.Is(err, ErrTooFewSlots) || got != nil {
					t.Errorf("%d of %v: got %v, %v", size, available, got, err)
				}
			}
		}
	}
}

// Ids that kubelet offers and that are not known are not chosen, and not
// silently passed over either.
func TestUnknownIDsAreNeverChosen(t *testing.T) {
	q := SlotQuestion{Resource: "r", Size: 2, Available: []string{"stranger", "d0::0", "d0::9", "d0", "::", "d1::0"}, Devices: node(2, 2)}
	if got, err := ChooseSlots(q); err != nil || !slices.Equal(got, []string{"d0::0", "d1::0"}) {
		t.Errorf("got %v, %v", got, err)
	}
	q.Size = 3
	if _, err := ChooseSlots(q); err == nil || !strings.Contains(err.Error(), "4 that kubelet offers are not known") {
		t.Errorf("got %v", err)
	}
}

// The order in which kubelet and the vendor list things comes from maps
// (NVIDIA 11, Iluvatar 3).
func TestSlotChoiceDoesNotDependOnTheOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 3))
	devices := node(3, 3, 3, 3, 3, 3)
	links := linked("d0 d3", "d1 d4", "d2 d5", "d4 d5")
	for _, size := range []int{1, 2, 3, 5, 8} {
		q := SlotQuestion{Resource: "r", Size: size, Available: all(devices, "d0::0", "d4::1"), Must: []string{"d2::1"}, Devices: devices,
			Links: links}
		want, err := ChooseSlots(q)
		if err != nil {
			t.Fatal(err)
		}
		for range 30 {
			r.Shuffle(len(q.Available), func(i, j int) { q.Available[i], q.Available[j] = q.Available[j], q.Available[i] })
			r.Shuffle(len(devices), func(i, j int) { devices[i], devices[j] = devices[j], devices[i] })
			r.Shuffle(len(links), func(i, j int) { links[i], links[j] = links[j], links[i] })
			if got, err := ChooseSlots(q); err != nil || !slices.Equal(got, want) {
				t.Fatalf("size %d: got %v, %v; want %v", size, got, err, want)
			}
		}
	}
}

// NVIDIA 10: the configured policy, and links and NUMA nodes by their scores,
// decide on replicas as well.
func TestReplicaChoiceHeedsPolicyAndLinks(t *testing.T) {
	devices := node(4, 4, 4, 4)
	links := []accel.Link{{A: "d0", B: "d1", Score: accel.LinkSystem}, {A: "d0", B: "d3", Score: accel.LinkNode},
		{A: "d2", B: "d3", Score: accel.LinkSystem}}
	for _, tt := range []struct {
		policy SlotPolicy
		held   []string
		size   int
		want   string
	}{
		{Distributed, nil, 2, "d0::0 d3::0"},
		{Distributed, []string{"d0::0"}, 2, "d2::0 d3::0"},
		{Packed, []string{"d0::0", "d1::0", "d1::1"}, 1, "d1::2"},
		{Packed, []string{"d1::0"}, 2, "d0::0 d1::1"},
	} {
		got, err := ChooseSlots(SlotQuestion{Resource: "r", Size: tt.size, Available: all(devices, tt.held...), Devices: devices,
			Links: links, Policy: tt.policy})
		if err != nil || strings.Join(got, " ") != tt.want {
			t.Errorf("%d beside %v: got %v, %v; want %s", tt.size, tt.held, got, err, tt.want)
		}
	}
}

// NVIDIA 12: replicas of one request land on different devices as long as
// there are any, and are spread evenly over many requests.
func TestReplicasAreSpreadOverTheLeastSharedDevices(t *testing.T) {
	devices := node(4, 4, 4, 4)
	free := all(devices)
	for round := range 8 {
		got, err := ChooseSlots(SlotQuestion{Resource: "r", Size: 2, Available: free, Devices: devices, Links: linked("d0 d1", "d2 d3")})
		if err != nil {
			t.Fatal(err)
		}
		a, _ := ParseSlotID(got[0])
		b, _ := ParseSlotID(got[1])
		if a.Device == b.Device {
			t.Errorf("round %d: both of %s", round, a.Device)
		}
		free = slices.DeleteFunc(free, func(id string) bool { return slices.Contains(got, id) })
		held := map[accel.DeviceID]int{}
		for _, id := range free {
			s, _ := ParseSlotID(id)
			held[s.Device]++
		}
		lo, hi := 4, 0
		for _, d := range devices {
			lo, hi = min(lo, held[d.ID]), max(hi, held[d.ID])
		}
		if hi-lo > 1 {
			t.Errorf("round %d: shared unevenly: %v", round, held)
		}
	}
	if len(free) != 0 {
		t.Errorf("%v are left", free)
	}
}

func FuzzChooseSlots(f *testing.F) {
	f.Add(uint64(1), uint8(4), uint8(2), uint8(3), false)
	f.Fuzz(func(t *testing.T, seed uint64, count, replicas, size uint8, packed bool) {
		r := rand.New(rand.NewPCG(seed, 0))
		devices := node(make([]int, count%12)...)
		usable := 0
		var available, must []string
		var links []accel.Link
		for i := range devices {
			d := &devices[i]
			d.Replicas = int(replicas % 6)
			d.Avoid = r.IntN(3) == 0
			if r.IntN(4) == 0 {
				d.Unusable = "lost"
			}
			for _, id := range SlotIDs(nil, d.ID, d.Replicas) {
				switch r.IntN(5) {
				case 0: // held
				case 1:
					if len(must) < int(size) && r.IntN(2) == 0 {
						must = append(must, id)
						available = append(available, id)
						usable++
						continue
					}
					fallthrough
				default:
					available = append(available, id)
					if d.Unusable == "" {
						usable++
					}
				}
			}
			for _, o := range devices[:i] {
				links = append(links, accel.Link{A: o.ID, B: d.ID, Score: r.IntN(200)})
			}
		}
		q := SlotQuestion{Resource: "r", Size: int(size), Available: available, Must: must, Devices: devices, Links: links}
		if packed {
			q.Policy = Packed
		}
		got, err := ChooseSlots(q)
		if (err == nil) != (size > 0 && usable >= int(size)) {
			t.Fatalf("%d of %v usable %d: %v, %v", size, available, usable, got, err)
		}
		if err != nil {
			return
		}
		seen := map[string]bool{}
		for _, id := range got {
			if seen[id] || !slices.Contains(available, id) {
				t.Fatalf("%v has %s, twice or not of %v", got, id, available)
			}
			seen[id] = true
			s, _ := ParseSlotID(id)
			i := slices.IndexFunc(devices, func(d SlotDevice) bool { return d.ID == s.Device })
			if devices[i].Unusable != "" && !slices.Contains(must, id) {
				t.Fatalf("%v has %s of a lost device", got, id)
			}
		}
		for _, id := range must {
			if !seen[id] {
				t.Fatalf("%v lacks %s", got, id)
			}
		}
		if len(got) != int(size) {
			t.Fatalf("%v are not %d", got, size)
		}
	})
}
