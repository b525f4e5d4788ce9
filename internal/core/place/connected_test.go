package place

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// matrix is a symmetric table of link scores.
type matrix [][]int

func newMatrix(n int, score func(a, b int) int) matrix {
	m := make(matrix, n)
	for a := range m {
		m[a] = make([]int, n)
	}
	for a := range n {
		for b := range a {
			m[a][b] = score(b, a)
			m[b][a] = m[a][b]
		}
	}
	return m
}

func (m matrix) ids() []accel.DeviceID {
	out := make([]accel.DeviceID, len(m))
	for i := range out {
		out[i] = accel.DeviceID(fmt.Sprintf("GPU-%03d", i))
	}
	return out
}

func (m matrix) graph() *Graph {
	ids := m.ids()
	var links []accel.Link
	for a := range m {
		for b := range a {
			if m[a][b] != 0 {
				links = append(links, accel.Link{A: ids[b], B: ids[a], Score: m[a][b]})
			}
		}
	}
	return NewGraph(ids, links)
}

func (m matrix) sum(set []int) int {
	s := 0
	for i, a := range set {
		for _, b := range set[:i] {
			s += m[a][b]
		}
	}
	return s
}

// rest is the sum over the candidates that are not in the set.
func (m matrix) rest(all, set []int) int {
	return m.sum(slices.DeleteFunc(slices.Clone(all), func(p int) bool { return slices.Contains(set, p) }))
}

// brute is the obvious way: try every set in ascending order.
func (m matrix) brute(candidates, required []int, size int) []int {
	var all []int
	for p := range m {
		if slices.Contains(candidates, p) || slices.Contains(required, p) {
			all = append(all, p)
		}
	}
	var best, set []int
	var bestSum, bestRest int
	var walk func(from int)
	walk = func(from int) {
		if len(set) == size {
			for _, r := range required {
				if !slices.Contains(set, r) {
					return
				}
			}
			sum := m.sum(set)
			if best != nil && sum < bestSum {
				return
			}
			if rest := m.rest(all, set); best == nil || sum > bestSum || rest > bestRest {
				best, bestSum, bestRest = slices.Clone(set), sum, rest
			}
			return
		}
		for i := from; i < len(all); i++ {
			set = append(set, all[i])
			walk(i + 1)
			set = set[:len(set)-1]
		}
	}
	walk(0)
	return best
}

func upTo(n int) []int {
	out := make([]int, n)
	for i := range out {
		out[i] = i
	}
	return out
}

// Machines as they are built. Scores are those of accel.Link.

func pcie(a, b, perSwitch, perSocket int) int {
	switch {
	case a/perSwitch == b/perSwitch:
		return accel.LinkSwitch
	case a/perSocket == b/perSocket:
		return accel.LinkHostBridge
	}
	return accel.LinkSystem
}

// nvswitch has every pair linked by 12 lanes.
func nvswitch(n int) matrix {
	return newMatrix(n, func(a, b int) int { return 12*accel.LinkLane + pcie(a, b, 2, max(n/2, 1)) })
}

func twoSockets(n int) matrix {
	return newMatrix(n, func(a, b int) int { return pcie(a, b, 1, max(n/2, 1)) })
}

func pairedSwitches(n int) matrix {
	return newMatrix(n, func(a, b int) int { return pcie(a, b, 2, max(n/2, 1)) })
}

// hybridCubeMesh is the DGX-1: groups of four, in each a ring of two lanes on
// two of its sides and one lane elsewhere, and each device linked to its peer
// in the other group.
func hybridCubeMesh(n int) matrix {
	return newMatrix(n, func(a, b int) int {
		s := pcie(a, b, 2, 4)
		switch {
		case a/4 == b/4 && (a+b)%4 == 3:
			s += 2 * accel.LinkLane
		case a/4 == b/4:
			s += accel.LinkLane
		case a%4 == b%4 && b-a == 4:
			s += 2 * accel.LinkLane
		}
		return s
	})
}

func random(n int, seed uint64, levels int) matrix {
	r := rand.New(rand.NewPCG(seed, uint64(n)))
	return newMatrix(n, func(_, _ int) int { return r.IntN(levels) })
}

// closePairs has all devices equally far from each other, but for the pairs.
func closePairs(n int, pairs ...[2]int) matrix {
	return newMatrix(n, func(a, b int) int {
		if slices.Contains(pairs, [2]int{a, b}) {
			return accel.LinkSwitch
		}
		return accel.LinkSystem
	})
}

var machines = []struct {
	name string
	make func(n int) matrix
}{
	{"nvswitch", nvswitch},
	{"two sockets", twoSockets},
	{"paired switches", pairedSwitches},
	{"hybrid cube mesh", hybridCubeMesh},
	{"random", func(n int) matrix { return random(n, 1, 1000) }},
	{"random, few levels", func(n int) matrix { return random(n, 2, 3) }},
	{"nothing linked", func(n int) matrix { return newMatrix(n, func(_, _ int) int { return 0 }) }},
}

// The exact answer, ties included, for every size and several sets of required
// devices.
func TestPreferredSetIsTheBestOfAll(t *testing.T) {
	for _, machine := range machines {
		for n := 1; n <= 10; n++ {
			m := machine.make(n)
			g := m.graph()
			for size := 1; size <= n; size++ {
				for _, required := range [][]int{nil, {0}, {n - 1}, {n / 2, 0}, {n - 1, n / 3, n / 2}} {
					required = slices.Compact(slices.Sorted(slices.Values(required)))
					if len(required) > size {
						continue
					}
					got, err := Connected(g, upTo(n), required, size)
					if err != nil {
						t.Fatalf("%s, %d of %d with %v: %v", machine.name, size, n, required, err)
					}
					if want := m.brute(upTo(n), required, size); !slices.Equal(got, want) {
						t.Errorf("%s, %d of %d with %v: got %v (%d), want %v (%d)",
							machine.name, size, n, required, got, m.sum(got), want, m.sum(want))
					}
				}
			}
		}
	}
}

func TestPreferredSetIsExactForSixteenDevices(t *testing.T) {
	for seed := range uint64(6) {
		m := random(16, seed, []int{2, 4, 1000}[seed%3])
		g := m.graph()
		for _, size := range []int{4, 8, 9, 15} {
			required := []int{int(seed)}
			got, err := Connected(g, upTo(16), required, size)
			if want := m.brute(upTo(16), required, size); err != nil || !slices.Equal(got, want) {
				t.Errorf("seed %d, %d of 16: got %v (%d), %v; want %v (%d)", seed, size, got, m.sum(got), err, want, m.sum(want))
			}
		}
	}
}

// NVIDIA 8 and Iluvatar 12b: the vendors' allocators panic on some orders of
// these.
func TestNoPanicWhenFreeIsNoMultipleOfTheRequest(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 12))
	for _, pairs := range [][][2]int{{{0, 1}}, {{0, 1}, {2, 3}}, {{2, 5}}, {{1, 6}, {0, 7}}} {
		m := closePairs(8, pairs...)
		g := m.graph()
		for _, ask := range []struct{ free, size int }{{5, 3}, {7, 4}, {8, 3}, {3, 2}, {7, 2}} {
			for range 300 {
				candidates := r.Perm(8)[:ask.free]
				got, err := Connected(g, candidates, nil, ask.size)
				if err != nil {
					t.Fatal(err)
				}
				if want := m.brute(candidates, nil, ask.size); !slices.Equal(got, want) {
					t.Fatalf("pairs %v, %d of %v: got %v, want %v", pairs, ask.size, candidates, got, want)
				}
			}
		}
	}
}

// NVIDIA 9 and Iluvatar 12: a query between two devices that fails in one
// direction leaves a link that is listed once, or with two scores.
func TestOneWayLinksDoNotPanic(t *testing.T) {
	ids := []accel.DeviceID{"a", "b", "c", "d"}
	g := NewGraph(ids, []accel.Link{
		{A: "d", B: "b", Score: 50}, // the wrong way round
		{A: "a", B: "c", Score: 10}, {A: "c", B: "a", Score: 40},
		{A: "a", B: "stranger", Score: 900}, {A: "a", B: "a", Score: 900}, {A: "a", B: "d", Score: -900},
	})
	for _, tt := range []struct {
		required, want []int
	}{
		{nil, []int{1, 3}}, {[]int{0}, []int{0, 2}}, {[]int{2}, []int{0, 2}}, {[]int{3}, []int{1, 3}},
	} {
		got, err := Connected(g, upTo(4), tt.required, 2)
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("with %v: got %v, %v; want %v", tt.required, got, err, tt.want)
		}
	}
}

func TestAbsurdScoresDoNotOverflow(t *testing.T) {
	m := newMatrix(64, func(_, _ int) int { return 1 << 62 })
	got, err := Connected(m.graph(), upTo(64), nil, 63)
	if err != nil || !slices.Equal(got, upTo(63)) {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestPreferredSetDoesNotDependOnTheOrder(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for _, n := range []int{8, 16, 32, 40} {
		m := random(n, 5, 4)
		g := m.graph()
		for _, size := range []int{2, n / 4, n / 2} {
			candidates, required := r.Perm(n), r.Perm(n)[:1]
			want, err := Connected(g, candidates, required, size)
			if err != nil {
				t.Fatal(err)
			}
			for range 10 {
				r.Shuffle(n, func(i, j int) { candidates[i], candidates[j] = candidates[j], candidates[i] })
				got, err := Connected(g, candidates, required, size)
				if err != nil || !slices.Equal(got, want) {
					t.Fatalf("%d of %v with %v: got %v, %v; want %v", size, candidates, required, got, err, want)
				}
			}
		}
	}
}

// What is too large to try all of: the search is bounded, the answer a set of
// the right size that no exchange of one device improves, or a better one.
func TestLargeNodesGetAGoodSetInBoundedTime(t *testing.T) {
	for _, machine := range machines {
		for _, ask := range []struct{ n, size int }{{32, 8}, {32, 16}, {64, 8}, {64, 32}, {128, 16}} {
			m := machine.make(ask.n)
			g := m.graph()
			required := []int{ask.n / 2}
			got, err := Connected(g, upTo(ask.n), required, ask.size)
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != ask.size || !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != ask.size ||
				!slices.Contains(got, required[0]) {
				t.Fatalf("%s, %d of %d: got %v", machine.name, ask.size, ask.n, got)
			}
			have := m.sum(got)
			for i, out := range got {
				if out == required[0] {
					continue
				}
				for in := range ask.n {
					if slices.Contains(got, in) {
						continue
					}
					other := slices.Clone(got)
					other[i] = in
					if s := m.sum(other); s > have {
						t.Fatalf("%s, %d of %d: %d in place of %d scores %d, more than %d", machine.name, ask.size, ask.n, in, out, s, have)
					}
				}
			}
		}
	}
}

// NVIDIA 9 and Iluvatar 11: the number of ways to cut all devices into groups, 2e17 for 32/2,
// is no measure of the time. What takes hours there may take seconds here, a hundred times
// what it takes on a machine with other work.
func TestTimeDoesNotExplode(t *testing.T) {
	for _, machine := range machines {
		for _, ask := range []struct{ n, size int }{{16, 2}, {16, 4}, {16, 8}, {32, 2}, {32, 4}, {32, 8}, {32, 16}} {
			g := machine.make(ask.n).graph()
			start := time.Now()
			if _, err := Connected(g, upTo(ask.n), nil, ask.size); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("%s, %d of %d: %v", machine.name, ask.size, ask.n, took)
			}
		}
	}
}

// The machines on which the vendors' allocators run for hours (Iluvatar 11).
func TestLinkedGroupsAreFoundOnLargeNodes(t *testing.T) {
	// Four switches of eight; one of each is taken.
	m := newMatrix(32, func(a, b int) int { return pcie(a, b, 8, 16) })
	var candidates []int
	for p := range 32 {
		if p%8 != 0 || p == 16 {
			candidates = append(candidates, p)
		}
	}
	got, err := Connected(m.graph(), candidates, nil, 8)
	if want := []int{16, 17, 18, 19, 20, 21, 22, 23}; err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	if got, err = Connected(m.graph(), candidates, []int{1, 9}, 16); err != nil ||
		m.sum(got) < m.sum([]int{1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 17, 18}) {
		t.Errorf("16 of %d: got %v, %v", len(candidates), got, err)
	}
}

// A pod that asks for one device does not tear a linked pair apart for which the
// next pod may ask.
func TestWhatIsLeftStaysTogether(t *testing.T) {
	m := pairedSwitches(8)
	for _, tt := range []struct {
		candidates []int
		size       int
		want       []int
	}{
		{[]int{0, 1, 2}, 1, []int{2}},
		{[]int{0, 1, 2, 4, 5}, 1, []int{2}},
		{[]int{0, 2, 3, 4, 5}, 2, []int{4, 5}}, // 0 is closer to 2 and 3
		{upTo(8), 1, []int{0}},
		{[]int{0, 1, 2, 3, 6}, 3, []int{0, 1, 2}}, // with 6 it would be across the sockets
	} {
		got, err := Connected(m.graph(), tt.candidates, nil, tt.size)
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("%d of %v: got %v, %v; want %v", tt.size, tt.candidates, got, err, tt.want)
		}
	}
}

func TestRequiredDevicesNeedNotBeCandidates(t *testing.T) {
	m := pairedSwitches(8)
	for _, candidates := range [][]int{{0, 2, 3, 6}, {0, 2, 3, 6, 7}} {
		got, err := Connected(m.graph(), candidates, []int{7}, 2)
		if err != nil || !slices.Equal(got, []int{6, 7}) {
			t.Errorf("of %v: got %v, %v", candidates, got, err)
		}
	}
}

func TestConnectedRefusesWhatCannotBe(t *testing.T) {
	g := twoSockets(4).graph()
	for name, tt := range map[string]struct {
		candidates, required []int
		size                 int
		want                 string
	}{
		"none":                 {upTo(4), nil, 0, "choose 0 devices: at least one must be requested"},
		"below none":           {upTo(4), nil, -3, "choose -3 devices: at least one must be requested"},
		"more required":        {upTo(4), []int{0, 1}, 1, "choose 1 devices: 2 are required"},
		"too few":              {[]int{1, 2}, nil, 3, "choose 3 devices out of 2: no device has enough free units"},
		"none there":           {nil, nil, 1, "choose 1 devices out of 0: no device has enough free units"},
		"too few with its own": {[]int{1, 2}, []int{1}, 3, "choose 3 devices out of 2: no device has enough free units"},
		"unknown": {[]int{0, 4}, []int{-1}, 1,
			"choose 1 devices: required position -1 is not one of 4 devices\ncandidate position 4 is not one of 4 devices"},
		"twice":          {[]int{0, 1, 0}, nil, 1, "choose 1 devices: candidate position 0 is listed twice"},
		"required twice": {upTo(4), []int{2, 2}, 3, "choose 3 devices: required position 2 is listed twice"},
	} {
		_, err := Connected(g, tt.candidates, tt.required, tt.size)
		if err == nil || err.Error() != tt.want {
			t.Errorf("%s: got %v, want %s", name, err, tt.want)
		}
	}
	if _, err := Connected(g, nil, nil, 1); !errors.Is(err, accel.ErrNoFit) {
		t.Errorf("%v does not wrap ErrNoFit", err)
	}
}

// FuzzConnected compares with the obvious way on whatever machine the bytes
// describe.
func FuzzConnected(f *testing.F) {
	f.Add(uint8(8), uint16(0b00011111), uint16(0), uint8(3), []byte{40})
	f.Add(uint8(9), uint16(0x1ff), uint16(0b100100), uint8(5), []byte{1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Fuzz(func(t *testing.T, n uint8, candidateBits, requiredBits uint16, size uint8, scores []byte) {
		count := int(n%10) + 1
		at := 0
		m := newMatrix(count, func(_, _ int) int {
			if at++; at > len(scores) {
				return 0
			}
			return int(scores[at-1])
		})
		positions := func(b uint16) []int {
			var out []int
			for p := range count {
				if b&(1<<p) != 0 {
					out = append(out, p)
				}
			}
			return out
		}
		candidates, required := positions(candidateBits), positions(requiredBits)
		all := bits.OnesCount16((candidateBits | requiredBits) & (1<<count - 1))
		got, err := Connected(m.graph(), candidates, required, int(size))
		if size == 0 || len(required) > int(size) || all < int(size) {
			if err == nil {
				t.Fatalf("%d of %v with %v: got %v where an error is due", size, candidates, required, got)
			}
			return
		}
		if want := m.brute(candidates, required, int(size)); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%d of %v with %v: got %v, %v; want %v", size, candidates, required, got, err, want)
		}
	})
}

func BenchmarkPreferred(b *testing.B) {
	for _, ask := range []struct{ size, n, required int }{
		{8, 16, 0}, {8, 16, 2}, {4, 16, 0}, {4, 16, 1}, {2, 32, 0}, {2, 32, 1}, {16, 32, 0}, {32, 64, 0},
	} {
		for _, machine := range machines {
			m := machine.make(ask.n)
			g := m.graph()
			name := fmt.Sprintf("%d of %d/%d required/%s", ask.size, ask.n, ask.required, machine.name)
			b.Run(name, func(b *testing.B) {
				candidates, required := upTo(ask.n), upTo(ask.required)
				b.ReportAllocs()
				for b.Loop() {
					if _, err := Connected(g, candidates, required, ask.size); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
