package place

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// cards are healthy slots a, b, c... of 16 units with so many free.
func cards(free ...accel.Units) []Slot {
	out := make([]Slot, len(free))
	for i, f := range free {
		out[i] = Slot{ID: accel.DeviceID(rune('a' + i)), Index: i, Total: 16, Free: f}
	}
	return out
}

func unhealthy(slots []Slot, at ...int) []Slot {
	for _, i := range at {
		slots[i].Unhealthy = true
	}
	return slots
}

func TestPick(t *testing.T) {
	tests := map[string]struct {
		slots  []Slot
		need   accel.Units
		policy Policy
		want   accel.DeviceID
		err    error
	}{
		"binpack takes the fullest that still fits":   {slots: cards(9, 4, 3), need: 4, want: "b"},
		"binpack joins the used card":                 {slots: cards(12, 16), need: 8, want: "a"},
		"binpack leaves a card that has not enough":   {slots: cards(4, 16), need: 12, want: "b"},
		"binpack on a tie takes the lowest index":     {slots: cards(16, 16, 16), need: 1, want: "a"},
		"the order of the slots does not matter":      {slots: reversed(cards(16, 16, 16)), need: 1, want: "a"},
		"spread takes the emptiest":                   {slots: cards(4, 9, 3), need: 2, policy: Spread, want: "b"},
		"spread on a tie takes the lowest index":      {slots: cards(9, 16, 16), need: 2, policy: Spread, want: "b"},
		"the whole device":                            {slots: cards(15, 16), need: 16, want: "b"},
		"an unhealthy device is passed over":          {slots: unhealthy(cards(4, 9), 0), need: 4, want: "b"},
		"a policy of no name is the default":          {slots: cards(9, 4), need: 4, policy: 77, want: "b"},
		"nothing asked, nothing free":                 {slots: cards(-2, -3), need: 0, want: "b"},
		"less than nothing is like nothing":           {slots: cards(-2), need: -5, want: "a"},
		"equal index and free: the lowest id":         {slots: []Slot{{ID: "y", Free: 4}, {ID: "x", Free: 4}}, need: 1, want: "x"},
		"equal free: the index decides before the id": {slots: []Slot{{ID: "x", Index: 1, Free: 4}, {ID: "y", Index: 0, Free: 4}}, need: 1, want: "y"},
		"no slots":                         {need: 1, err: accel.ErrNoFit},
		"nothing fits":                     {slots: cards(3, 3), need: 4, err: accel.ErrNoFit},
		"free below zero fits nothing":     {slots: cards(-4), need: 1, err: accel.ErrNoFit},
		"room only on an unhealthy device": {slots: unhealthy(cards(16, 2), 0), need: 4, err: accel.ErrNoFit},
		"an absurd request":                {slots: cards(16), need: math.MaxInt64, err: accel.ErrNoFit},
		"one unhealthy device even when nothing is asked": {slots: unhealthy(cards(16), 0), need: 0, err: accel.ErrNoFit},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			i, err := Pick(tc.slots, tc.need, tc.policy)
			if !errors.Is(err, tc.err) {
				t.Fatalf("Pick: error %v, want %v", err, tc.err)
			}
			if err != nil {
				if i != -1 {
					t.Errorf("Pick with an error = %d, want -1", i)
				}
				return
			}
			if got := tc.slots[i].ID; got != tc.want {
				t.Errorf("Pick = %q, want %q", got, tc.want)
			}
		})
	}
}

func reversed(s []Slot) []Slot {
	slices.Reverse(s)
	return s
}

func TestScore(t *testing.T) {
	tests := map[string]struct {
		slots  []Slot
		need   accel.Units
		policy Policy
		want   int64
	}{
		"an exact fit is best":           {slots: cards(16, 4), need: 4, want: 10},
		"half is left":                   {slots: cards(8), need: 4, want: 5},
		"an empty card":                  {slots: cards(16), need: 4, want: 2},
		"spread wants room":              {slots: cards(16), need: 4, policy: Spread, want: 8},
		"spread at an exact fit":         {slots: cards(4), need: 4, policy: Spread, want: 0},
		"no room":                        {slots: cards(3), need: 4, want: 0},
		"nothing asked":                  {slots: cards(3), need: 0, want: 0},
		"unhealthy devices do not count": {slots: unhealthy(cards(4, 8), 0), need: 4, want: 5},
		"the multiplication does not leave the range": {slots: cards(math.MaxInt64), need: math.MaxInt64 / 2, want: 5},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := Score(tc.slots, tc.need, tc.policy); got != tc.want {
				t.Errorf("Score = %d, want %d", got, tc.want)
			}
			var free []accel.Units
			for _, s := range tc.slots {
				if !s.Unhealthy {
					free = append(free, s.Free)
				}
			}
			if got := ScoreFree(free, tc.need, tc.policy); got != tc.want {
				t.Errorf("ScoreFree = %d, want %d", got, tc.want)
			}
		})
	}
}

func TestParsePolicy(t *testing.T) {
	for _, p := range []Policy{Binpack, Spread} {
		got, err := ParsePolicy(p.String())
		if err != nil || got != p {
			t.Errorf("ParsePolicy(%q) = %v, %v", p, got, err)
		}
	}
	if got, err := ParsePolicy(""); err != nil || got != Binpack {
		t.Errorf("ParsePolicy(\"\") = %v, %v, want the default", got, err)
	}
	_, err := ParsePolicy("random")
	if err == nil || !strings.Contains(err.Error(), "random") || !strings.Contains(err.Error(), "binpack, spread") {
		t.Errorf("ParsePolicy(random): error %v does not name the policy and the known ones", err)
	}
	if got := Policy(200).String(); got != "binpack" {
		t.Errorf("Policy(200).String() = %q", got)
	}
}

// naivePick sorts everything that fits.
func naivePick(slots []Slot, need accel.Units, p Policy) (accel.DeviceID, bool) {
	fits := slices.DeleteFunc(slices.Clone(slots), func(s Slot) bool {
		return s.Unhealthy || need > 0 && s.Free < need
	})
	if len(fits) == 0 {
		return "", false
	}
	slices.SortFunc(fits, func(a, b Slot) int {
		free := cmp.Compare(a.Free, b.Free)
		if p == Spread {
			free = -free
		}
		return cmp.Or(free, cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID))
	})
	return fits[0].ID, true
}

func FuzzPick(f *testing.F) {
	f.Add([]byte{}, int64(1), uint8(0))
	f.Add([]byte{16, 0, 0, 4, 0, 1}, int64(4), uint8(0))
	f.Add([]byte{16, 0, 1, 4, 1, 0, 200, 0, 3}, int64(3), uint8(1))
	f.Fuzz(func(t *testing.T, data []byte, need int64, policy uint8) {
		p := Policy(policy % 2)
		var slots []Slot
		for ; len(data) >= 3; data = data[3:] {
			slots = append(slots, Slot{
				ID: accel.DeviceID(fmt.Sprint(len(slots))), Index: int(data[2] % 8),
				Total: 128, Free: accel.Units(int8(data[0])), Unhealthy: data[1]%2 == 1,
			})
		}
		n := accel.Units(need)
		i, err := Pick(slots, n, p)
		want, ok := naivePick(slots, n, p)
		if ok != (err == nil) || ok && slots[i].ID != want {
			t.Fatalf("Pick(%v, %d, %v) = %d, %v; want %q, %t", slots, n, p, i, err, want, ok)
		}
		var free []accel.Units
		for _, s := range slots {
			if !s.Unhealthy {
				free = append(free, s.Free)
			}
		}
		if a, b := Score(slots, n, p), ScoreFree(free, n, p); a != b {
			t.Fatalf("Score(%v, %d, %v) = %d, ScoreFree %d", slots, n, p, a, b)
		}
		if !ok {
			return
		}
		if s := Score(slots, n, p); s < 0 || s > MaxScore {
			t.Fatalf("Score(%v, %d, %v) = %d", slots, n, p, s)
		}
		// Score agrees with Pick: cut the slots in two nodes; the node that has
		// the picked one is not rated below the other.
		for cut := range slots {
			a, b := slots[:cut], slots[cut:]
			if i >= cut {
				a, b = b, a
			}
			if Score(a, n, p) < Score(b, n, p) {
				t.Fatalf("Pick takes %v, but its node %v scores %d and %v scores %d (need %d, %v)",
					slots[i], a, Score(a, n, p), b, Score(b, n, p), n, p)
			}
		}
	})
}

func TestPickDoesNotAllocate(t *testing.T) {
	slots := cards(16, 9, 4, 3, 2, 1, 16, 16)
	got := testing.AllocsPerRun(100, func() {
		_, _ = Pick(slots, 4, Binpack)
		_, _ = Pick(slots, 40, Spread)
		_ = Score(slots, 4, Spread)
	})
	if got != 0 {
		t.Errorf("%v allocations, want 0", got)
	}
}

func BenchmarkPick(b *testing.B) {
	for _, devices := range []int{1, 8, 16, 128} {
		b.Run(fmt.Sprintf("devices=%d", devices), func(b *testing.B) {
			var seed [32]byte
			binary.LittleEndian.PutUint64(seed[:], uint64(devices))
			r := rand.New(rand.NewChaCha8(seed))
			slots := make([]Slot, devices)
			for i := range slots {
				slots[i] = Slot{ID: accel.DeviceID(fmt.Sprintf("GCU-%04d", i)), Index: i, Total: 32, Free: accel.Units(r.IntN(33))}
			}
			slots[0].Free = 32
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Pick(slots, 8, Binpack); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
