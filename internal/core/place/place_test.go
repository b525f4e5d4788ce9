package place

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
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

func reversed(s []Slot) []Slot {
	slices.Reverse(s)
	return s
}

// node is one of which only the devices count.
func node(slots []Slot) *Node { return &Node{Slots: slots, CPU: Unlimited, Memory: Unlimited} }

func TestChooseOne(t *testing.T) {
	tests := map[string]struct {
		slots  []Slot
		need   accel.Units
		spread bool
		want   accel.DeviceID // "" where nothing fits
		rating int64
	}{
		"binpack takes the fullest that still fits": {slots: cards(9, 4, 3), need: 4, want: "b"},
		"binpack joins the used card":               {slots: cards(12, 16), need: 8, want: "a", rating: -4},
		"binpack leaves a card that has not enough": {slots: cards(4, 16), need: 12, want: "b", rating: -4},
		"binpack on a tie takes the lowest index":   {slots: cards(16, 16, 16), need: 1, want: "a", rating: -15},
		"the order of the slots does not matter":    {slots: reversed(cards(16, 16, 16)), need: 1, want: "a", rating: -15},
		"spread takes the emptiest":                 {slots: cards(4, 9, 3), need: 2, spread: true, want: "b", rating: 7},
		"spread on a tie takes the lowest index":    {slots: cards(9, 16, 16), need: 2, spread: true, want: "b", rating: 14},
		"the whole device":                          {slots: cards(15, 16), need: 16, want: "b"},
		"an unhealthy device is passed over":        {slots: unhealthy(cards(4, 9), 0), need: 4, want: "b", rating: -5},
		"nothing asked, nothing free":               {slots: cards(-2, -3), need: 0, want: "b", rating: 3},
		"equal index and free: the lowest id": {slots: []Slot{{ID: "y", Free: 4}, {ID: "x", Free: 4}}, need: 1,
			want: "x", rating: -3},
		"equal free: the index decides before the id": {slots: []Slot{{ID: "x", Index: 1, Free: 4}, {ID: "y", Index: 0, Free: 4}}, need: 1,
			want: "y", rating: -3},
		"no slots":                         {need: 1},
		"nothing fits":                     {slots: cards(3, 3), need: 4},
		"free below zero fits nothing":     {slots: cards(-4), need: 1},
		"room only on an unhealthy device": {slots: unhealthy(cards(16, 2), 0), need: 4},
		"an absurd request":                {slots: cards(16), need: math.MaxInt64},
		"one unhealthy device even when nothing is asked": {slots: unhealthy(cards(16), 0), need: 0},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := Binpack
			if tc.spread {
				p = Spread
			}
			chosen, rating, ok := p.Choose(node(tc.slots), &Ask{Units: tc.need, Devices: 1}, nil)
			if tc.want == "" {
				if ok || len(chosen) != 0 || rating != NoRating {
					t.Errorf("Choose = %v, %d, %t, want none", chosen, rating, ok)
				}
				return
			}
			if !ok || len(chosen) != 1 || tc.slots[chosen[0]].ID != tc.want || rating != tc.rating {
				t.Errorf("Choose = %v, %d, %t, want %q rated %d", chosen, rating, ok, tc.want, tc.rating)
			}
		})
	}
}

func TestScores(t *testing.T) {
	for _, tc := range []struct{ ratings, want []int64 }{
		{nil, nil},
		{[]int64{NoRating}, []int64{0}},
		{[]int64{-3, -3}, []int64{10, 10}},
		{[]int64{5, NoRating, 7, 6, 7}, []int64{8, 0, 10, 9, 10}},
		{[]int64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, []int64{0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
		{[]int64{12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 3, 1}, []int64{10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 0}},
		{[]int64{math.MaxInt64, math.MinInt64 + 1}, []int64{10, 9}},
	} {
		got := slices.Clone(tc.ratings)
		Scores(got)
		if !slices.Equal(got, tc.want) {
			t.Errorf("Scores(%v) = %v, want %v", tc.ratings, got, tc.want)
		}
	}
}

func TestScoresDoesNotAllocate(t *testing.T) {
	ratings, in := make([]int64, 100), make([]int64, 100)
	for i := range in {
		in[i] = int64(i * 37 % 100)
	}
	if got := testing.AllocsPerRun(100, func() { Scores(ratings[:copy(ratings, in)]) }); got != 0 {
		t.Errorf("%v allocations, want 0", got)
	}
}

func TestParse(t *testing.T) {
	learning := ordered{name: Fragmentation}
	for _, name := range Names() {
		if got, err := Parse(name, learning); err != nil || got.Name() != name {
			t.Errorf("Parse(%q) = %v, %v", name, got, err)
		}
	}
	if got, err := Parse(""); err != nil || got != Binpack {
		t.Errorf("Parse(\"\") = %v, %v, want the default", got, err)
	}
	_, err := Parse("random", learning)
	if want := `unknown placement policy "random"; use one of binpack, spread, fragmentation`; err == nil || err.Error() != want {
		t.Errorf("Parse(random): error %v, want %s", err, want)
	}
	if want := "binpack (the fullest that still fits), spread (the emptiest) or fragmentation (the one that leaves the most free " +
		"capacity for typical requests, learned from past pods)"; About() != want {
		t.Errorf("About() = %s, want %s", About(), want)
	}
}

// naive sorts everything that fits.
func naive(slots []Slot, need accel.Units, spread bool) (accel.DeviceID, bool) {
	fits := slices.DeleteFunc(slices.Clone(slots), func(s Slot) bool {
		return s.Unhealthy || need > 0 && s.Free < need
	})
	if len(fits) == 0 {
		return "", false
	}
	slices.SortFunc(fits, func(a, b Slot) int {
		free := cmp.Compare(a.Free, b.Free)
		if spread {
			free = -free
		}
		return cmp.Or(free, cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID))
	})
	return fits[0].ID, true
}

func FuzzChooseOne(f *testing.F) {
	f.Add([]byte{}, int64(1), false)
	f.Add([]byte{16, 0, 0, 4, 0, 1}, int64(4), false)
	f.Add([]byte{16, 0, 1, 4, 1, 0, 200, 0, 3}, int64(3), true)
	f.Fuzz(func(t *testing.T, data []byte, need int64, spread bool) {
		p := Binpack
		if spread {
			p = Spread
		}
		var slots []Slot
		for ; len(data) >= 3; data = data[3:] {
			slots = append(slots, Slot{
				ID: accel.DeviceID(fmt.Sprint(len(slots))), Index: int(data[2] % 8),
				Total: 128, Free: accel.Units(int8(data[0])), Unhealthy: data[1]%2 == 1,
			})
		}
		ask := &Ask{Units: accel.Units(need), Devices: 1}
		chosen, rating, ok := p.Choose(node(slots), ask, nil)
		want, wantOK := naive(slots, ask.Units, spread)
		if ok != wantOK || ok && (len(chosen) != 1 || slots[chosen[0]].ID != want) {
			t.Fatalf("Choose(%v, %d, %s) = %v, %t; want %q, %t", slots, need, p.Name(), chosen, ok, want, wantOK)
		}
		if !ok {
			return
		}
		// The rating agrees with the choice: cut the slots in two nodes; the node
		// that has the chosen one is not rated below the other.
		for cut := range slots {
			a, b := slots[:cut], slots[cut:]
			if chosen[0] >= cut {
				a, b = b, a
			}
			_, ratingA, _ := p.Choose(node(a), ask, nil)
			_, ratingB, _ := p.Choose(node(b), ask, nil)
			if ratingA < ratingB || ratingA != rating {
				t.Fatalf("%s takes %v, but its node %v is rated %d and %v %d (need %d)", p.Name(), slots[chosen[0]], a, ratingA, b, ratingB,
					need)
			}
		}
	})
}
