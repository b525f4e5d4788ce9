package place

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// two sockets with two boards each, two chips on a board.
func boards(n int) []accel.Share {
	out := make([]accel.Share, n)
	for i := range out {
		out[i].Device = accel.Device{Index: i, ID: accel.DeviceID(rune('a' + i)), Board: fmt.Sprint("board", i/2), NUMANode: i / 4}
	}
	return out
}

func TestGraphOf(t *testing.T) {
	unknown := boards(3)
	for i := range unknown {
		unknown[i].Board, unknown[i].NUMANode = "", accel.NoNUMA
	}
	links := []accel.Link{{A: "a", B: "c", Score: 200}, {A: "a", B: "elsewhere", Score: 300}}
	tests := map[string]struct {
		shares []accel.Share
		links  []accel.Link
		want   []int64 // of a with b, c and so on, then of b with c; nil for no graph
	}{
		"a board, a NUMA node, a system": {shares: []accel.Share{boards(5)[0], boards(5)[1], boards(5)[2], boards(5)[4]},
			want: []int64{60, 20, 10, 20, 10, 10}},
		"links count and nothing else beside them": {shares: boards(3), links: links, want: []int64{0, 200, 0}},
		"nothing is known":                         {shares: unknown},
		"links of others":                          {shares: boards(3), links: links[1:]},
		"one device":                               {shares: boards(1)},
		"none":                                     {},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g := GraphOf(tc.shares, tc.links)
			var got []int64
			for i := range tc.shares {
				for j := i + 1; g != nil && j < len(tc.shares); j++ {
					got = append(got, g.score(i, j))
				}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("scores %v, want %v", got, tc.want)
			}
		})
	}
}

func TestGraphKey(t *testing.T) {
	renamed := boards(4)
	for i := range renamed {
		renamed[i].ID += "'"
	}
	g := GraphOf(boards(4), nil)
	if other := GraphOf(renamed, nil); g.Key() != other.Key() {
		t.Error("equal connections have different keys")
	}
	for name, other := range map[string]*Graph{
		"fewer devices": GraphOf(boards(3), nil),
		"other scores":  GraphOf(boards(4), []accel.Link{{A: "a", B: "b", Score: 1}}),
	} {
		if g.Key() == other.Key() {
			t.Errorf("%s: the same key", name)
		}
	}
}

func TestChooseSeveral(t *testing.T) {
	const one = int64(1) << 41 // a point of connection
	graph := GraphOf(boards(8), nil)
	tests := map[string]struct {
		slots  []Slot
		graph  *Graph
		ask    Ask
		spread bool
		want   []int // nil where the pod does not fit
		rating int64
	}{
		"the fullest where nothing is known of connections": {
			slots: cards(16, 4, 8, 5), ask: Ask{Units: 4, Devices: 2}, want: []int{1, 3}, rating: -1,
		},
		"the emptiest with spread": {
			slots: cards(16, 4, 8, 5), ask: Ask{Units: 4, Devices: 2}, spread: true, want: []int{0, 2}, rating: 16,
		},
		"one board, of which one is the fullest, before the two fullest": {
			slots: cards(16, 4, 8, 5), graph: GraphOf(boards(4), nil), ask: Ask{Units: 4, Devices: 2}, want: []int{0, 1},
			rating: 60*one - 12,
		},
		"the fullest of equally good boards": {
			slots: cards(16, 16, 8, 8, 9, 9, 16, 16), graph: graph, ask: Ask{Units: 8, Devices: 2}, want: []int{2, 3}, rating: 60 * one,
		},
		"the emptiest of equally good boards with spread": {
			slots: cards(8, 8, 9, 9, 16, 16, 15, 15), graph: graph, ask: Ask{Units: 8, Devices: 2}, spread: true, want: []int{4, 5},
			rating: 60*one + 16,
		},
		"a board is not torn apart": {
			slots: cards(16, 16, 16, 4, 4, 16, 16, 16), graph: graph, ask: Ask{Units: 8, Devices: 3}, want: []int{0, 1, 2},
			rating: (60+20+20)*one - 24,
		},
		"all there are": {
			slots: cards(16, 16, 16), graph: GraphOf(boards(3), nil), ask: Ask{Units: 16, Devices: 3}, want: []int{0, 1, 2},
			rating: 100 * one,
		},
		"too few with room": {slots: cards(16, 4, 4), ask: Ask{Units: 8, Devices: 2}},
		"too few healthy":   {slots: unhealthy(cards(16, 16), 1), ask: Ask{Units: 8, Devices: 2}},
		"too few allowed": {
			slots: cards(16, 16), ask: Ask{Units: 8, Devices: 2, Only: &accel.Selection{AvoidIDs: []string{"b"}}},
		},
		"one device that is allowed": {
			slots: cards(8, 16), ask: Ask{Units: 8, Devices: 1, Only: &accel.Selection{AvoidIDs: []string{"a"}}}, want: []int{1},
			rating: -8,
		},
		"no devices": {slots: cards(1), ask: Ask{CPU: 4}, want: []int{}},
		"too much CPU": {
			slots: cards(16), ask: Ask{Units: 8, Devices: 1, CPU: 101},
		},
		"too much memory, no device": {ask: Ask{Memory: 101}},
		"all CPU and memory":         {slots: cards(16), ask: Ask{Units: 16, Devices: 1, CPU: 100, Memory: 100}, want: []int{0}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := Binpack
			if tc.spread {
				p = Spread
			}
			got, rating, ok := p.Choose(&Node{Slots: tc.slots, CPU: 100, Memory: 100, Graph: tc.graph}, &tc.ask, nil)
			if tc.want == nil {
				if ok || len(got) != 0 || rating != NoRating {
					t.Errorf("Choose = %v, %d, %t, want none", got, rating, ok)
				}
				return
			}
			if !ok || !slices.Equal(got, tc.want) || rating != tc.rating {
				t.Errorf("Choose = %v, %d, %t, want %v, %d", got, rating, ok, tc.want, tc.rating)
			}
		})
	}
}

// TestOverdrawn: where more CPU is taken than there is, a pod that takes none
// still fits.
func TestOverdrawn(t *testing.T) {
	n := &Node{Slots: cards(16), CPU: -5, Memory: -5}
	if _, _, ok := Binpack.Choose(n, &Ask{Units: 1, Devices: 1}, nil); !ok {
		t.Error("a pod that takes no CPU is refused")
	}
	if _, _, ok := Binpack.Choose(n, &Ask{Units: 1, Devices: 1, CPU: 1}, nil); ok {
		t.Error("a pod that takes CPU fits")
	}
}

// TestBestIsConnectedInAnotherOrder compares Best with Connected on a graph whose
// devices are numbered in the preferred order.
func TestBestIsConnectedInAnotherOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 1))
	for range 400 {
		n := 2 + r.IntN(8)
		m := newMatrix(n, func(int, int) int { return r.IntN(4) * 10 })
		preferred := r.Perm(n)
		renumbered := newMatrix(n, func(a, b int) int { return m[preferred[a]][preferred[b]] })
		g := m.graph()
		for size := 1; size <= n; size++ {
			got, score := g.Best(preferred, size, nil)
			want, err := Connected(renumbered.graph(), upTo(n), nil, size)
			if err != nil {
				t.Fatal(err)
			}
			for i, p := range want {
				want[i] = preferred[p]
			}
			slices.Sort(want)
			if size == 1 {
				want = preferred[:1] // a single device is the preferred one, whatever is left over
			}
			if !slices.Equal(got, want) || score != int64(m.sum(want)) {
				t.Fatalf("best %d of %v = %v with %d, want %v with %d; scores %v", size, preferred, got, score, want, m.sum(want), m)
			}
			if again, s := g.Best(preferred, size, nil); !slices.Equal(again, got) || s != score {
				t.Fatalf("asked again: %v with %d, then %v with %d", got, score, again, s)
			}
		}
	}
}

// TestBestForgets: a graph that is asked for ever does not grow for ever, and
// answers the same after it forgot.
func TestBestForgets(t *testing.T) {
	g := GraphOf(boards(8), nil)
	r := rand.New(rand.NewPCG(6, 2))
	orders := make([][]int, maxRemembered+200)
	answers := make([][]int, len(orders))
	for i := range orders {
		orders[i] = r.Perm(8)
		answers[i], _ = g.Best(orders[i], 3, nil)
		if len(g.answers) > maxRemembered {
			t.Fatalf("%d answers are remembered", len(g.answers))
		}
	}
	for i, order := range orders {
		if again, _ := g.Best(order, 3, nil); !slices.Equal(again, answers[i]) {
			t.Fatalf("best 3 of %v = %v, later %v", order, answers[i], again)
		}
	}
}

// TestGraphIsSafeForConcurrentUse is for the race detector.
func TestGraphIsSafeForConcurrentUse(t *testing.T) {
	g := GraphOf(boards(8), nil)
	want, _ := g.Best(upTo(8), 3, nil)
	var group sync.WaitGroup
	for seed := range uint64(4) {
		group.Go(func() {
			r := rand.New(rand.NewPCG(seed, 3))
			for range 500 {
				g.Best(r.Perm(8), 2+r.IntN(4), nil)
				if got, _ := g.Best(upTo(8), 3, nil); !slices.Equal(got, want) {
					t.Errorf("best 3 = %v, want %v", got, want)
				}
			}
		})
	}
	group.Wait()
}

func TestManyDevices(t *testing.T) {
	const n = 300 // more than a byte numbers
	shares := make([]accel.Share, n)
	slots := make([]Slot, n)
	for i := range shares {
		shares[i].Device = accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprintf("d%03d", i)), NUMANode: i % 3}
		slots[i] = Slot{ID: shares[i].ID, Index: i, Total: 1, Free: 1}
	}
	got, _, ok := Binpack.Choose(&Node{Slots: slots, Graph: GraphOf(shares, nil)}, &Ask{Units: 1, Devices: 3}, nil)
	if want := []int{0, 3, 6}; !ok || !slices.Equal(got, want) {
		t.Errorf("Choose = %v, %t, want %v", got, ok, want)
	}
}

// FuzzChooseSeveral compares with all sets of devices, tried in the order of
// preference.
func FuzzChooseSeveral(f *testing.F) {
	f.Add([]byte{16, 0, 4, 1, 8, 2, 8, 0}, uint8(4), uint8(2), false)
	f.Add([]byte{16, 0, 16, 1, 16, 2, 16, 3, 16, 4, 3, 5}, uint8(4), uint8(3), true)
	f.Fuzz(func(t *testing.T, data []byte, need, size uint8, spread bool) {
		p, order := Binpack, 1
		if spread {
			p, order = Spread, -1
		}
		var slots []Slot
		var shares []accel.Share
		for ; len(data) >= 2 && len(slots) < 9; data = data[2:] {
			i := len(slots)
			slots = append(slots, Slot{
				ID: accel.DeviceID(rune('a' + i)), Index: int(data[1] / 64), Total: 128, Free: accel.Units(data[0] % 32),
				Unhealthy: data[1]&8 != 0,
			})
			shares = append(shares, accel.Share{Device: accel.Device{ID: slots[i].ID, NUMANode: int(data[1]&3) - 1,
				Board: []string{"", "b"}[data[1]>>2&1]}})
		}
		g := GraphOf(shares, nil)
		ask := &Ask{Units: accel.Units(need % 32), Devices: int(size%4) + 2}
		got, _, ok := p.Choose(&Node{Slots: slots, CPU: Unlimited, Memory: Unlimited, Graph: g}, ask, nil)

		var fits []int
		for i := range slots {
			if ask.Fits(&slots[i]) {
				fits = append(fits, i)
			}
		}
		slices.SortStableFunc(fits, func(a, b int) int {
			return cmp.Or(order*cmp.Compare(slots[a].Free, slots[b].Free), cmp.Compare(slots[a].Index, slots[b].Index),
				cmp.Compare(slots[a].ID, slots[b].ID))
		})
		if len(fits) < ask.Devices {
			if ok {
				t.Fatalf("%d of %d devices: got %v", ask.Devices, len(fits), got)
			}
			return
		}
		m := newMatrix(len(fits), func(a, b int) int {
			if g == nil {
				return 0
			}
			return int(g.score(fits[a], fits[b]))
		})
		want := m.brute(upTo(len(fits)), nil, ask.Devices)
		for i, at := range want {
			want[i] = fits[at]
		}
		slices.Sort(want)
		if !ok || !slices.Equal(got, want) {
			t.Fatalf("%d of %v (%s): got %v, %t, want %v", ask.Devices, slots, p.Name(), got, ok, want)
		}
	})
}

func TestChooseDoesNotAllocate(t *testing.T) {
	n := &Node{Slots: cards(16, 9, 4, 3, 2, 1, 16, 16), CPU: Unlimited, Memory: Unlimited, Graph: GraphOf(boards(8), nil)}
	asks := []*Ask{{Units: 4, Devices: 1}, {Units: 40, Devices: 1}, {Units: 2, Devices: 3}}
	buf := make([]int, 0, 8)
	for _, p := range Policies() {
		got := testing.AllocsPerRun(100, func() {
			for _, a := range asks {
				buf, _, _ = p.Choose(n, a, buf)
			}
		})
		if got != 0 {
			t.Errorf("%s: %v allocations, want 0", p.Name(), got)
		}
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, devices := range []int{1, 2, 4} {
		for _, graph := range []*Graph{nil, GraphOf(boards(8), nil)} {
			b.Run(fmt.Sprintf("devices=%d/connected=%t", devices, graph != nil), func(b *testing.B) {
				n := &Node{Slots: cards(16, 9, 4, 3, 12, 1, 16, 16), CPU: Unlimited, Memory: Unlimited, Graph: graph}
				ask := &Ask{Units: 4, Devices: devices}
				buf := make([]int, 0, 8)
				b.ReportAllocs()
				for b.Loop() {
					var ok bool
					if buf, _, ok = Binpack.Choose(n, ask, buf); !ok {
						b.Fatal("no fit")
					}
				}
			})
		}
	}
}
