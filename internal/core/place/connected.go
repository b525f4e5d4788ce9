package place

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Graph says how closely the devices of a node are connected, by their
// positions in the list that it was made from. What it says does not change, and
// it is safe for concurrent use.
type Graph struct {
	n int
	// scores has n*n entries; it is symmetric and its diagonal is 0.
	scores []int64
	at     map[accel.DeviceID]int
	// equal is true where all pairs have one score.
	equal bool

	mu sync.Mutex // guards answers
	// answers are those of Best: the chosen positions, by the size and the
	// preferred positions, a byte each.
	answers map[string]string
}

// maxLinkScore bounds what one link counts for, so that no sum of scores
// overflows. It is beyond 40 lanes; no vendor links two devices by half of them.
const maxLinkScore = 1 << 12

// NewGraph returns the graph of these devices, which should come in ascending
// order of Index: Connected prefers the first among equals. A pair without a
// link scores 0, as does a negative score. A pair that is listed twice, or once
// in each direction, counts as the better of the two: the vendors' queries fail
// one-sidedly, links do not. Links of other devices, and of a device to itself,
// are ignored; of a device that is listed twice the first position counts.
func NewGraph(devices []accel.DeviceID, links []accel.Link) *Graph {
	g := &Graph{
		n:      len(devices),
		scores: make([]int64, len(devices)*len(devices)),
		at:     make(map[accel.DeviceID]int, len(devices)),
	}
	for i, d := range devices {
		if _, twice := g.at[d]; !twice {
			g.at[d] = i
		}
	}
	for _, l := range links {
		a, okA := g.at[l.A]
		b, okB := g.at[l.B]
		if !okA || !okB || a == b {
			continue
		}
		s := max(g.scores[a*g.n+b], min(int64(l.Score), maxLinkScore))
		g.scores[a*g.n+b], g.scores[b*g.n+a] = s, s
	}
	g.equal = true
	for a := range g.n {
		for b := range a {
			g.equal = g.equal && g.score(a, b) == g.score(1, 0)
		}
	}
	return g
}

// Position returns the position of a device, false for one that is not in the
// graph.
func (g *Graph) Position(d accel.DeviceID) (int, bool) {
	i, ok := g.at[d]
	return i, ok
}

func (g *Graph) score(a, b int) int64 { return g.scores[a*g.n+b] }

// searchWork bounds the exact search of Connected, in looks at single devices:
// so many, divided by the number of candidates, partial sets are extended at
// most. Choosing r of n extends as many as there are ways to choose r-1 of n;
// for 16 candidates that is 16 over 8, below 2^14, and for 3 of 64 half of what
// is allowed.
const searchWork = 1 << 18

// Connected returns the positions, ascending, of the size devices among
// candidates and required that are connected best: the sum of the scores of all
// pairs is the greatest of all sets that contain all of required. Of several
// such sets it is one that leaves the candidates that are left over connected
// best, so that a single device does not tear a pair apart; and of those the one
// with the lowest positions, compared from the lowest on. So the order of the
// arguments does not matter. Required devices may be listed as candidates or
// not.
//
// The answer is exact for up to 16 candidates, for up to 4 of 32 and 3 of 64,
// and for more as long as the search can leave out enough of the sets: those
// that cannot be better than one that was found, and those that differ only in
// devices with the same connections, which is nearly all where every device
// hangs on one kind of switch. Beyond that it is the best set that
// a search of bounded length finds, at least as good as greedy choices from
// many starting points, each improved by exchanging single devices until none
// helps. The time is bounded in any case, by a count and not by a clock: equal
// questions get equal answers.
//
// It is an error when size is below 1 or below the number of required devices,
// when a position is not in the graph or twice in one list, and, wrapping
// accel.ErrNoFit, when there are fewer than size devices.
func Connected(g *Graph, candidates, required []int, size int) ([]int, error) {
	optional, err := g.check(candidates, required, size)
	if err != nil {
		return nil, err
	}
	s := newSearch(g, optional, required, size-len(required))
	s.climb()
	s.explore(0, 0)
	out := slices.Clone(required)
	for _, i := range s.best {
		out = append(out, s.pos[i])
	}
	slices.Sort(out)
	return out, nil
}

// check returns the candidates that are not required, in ascending order.
func (g *Graph) check(candidates, required []int, size int) ([]int, error) {
	if size < 1 {
		return nil, fmt.Errorf("choose %d devices: at least one must be requested", size)
	}
	if len(required) > size {
		return nil, fmt.Errorf("choose %d devices: %d are required", size, len(required))
	}
	const asCandidate, asRequired = 1, 2
	seen := make([]uint8, g.n)
	var errs []error
	mark := func(list []int, as uint8, what string) {
		for _, p := range list {
			switch {
			case p < 0 || p >= g.n:
				errs = append(errs, fmt.Errorf("%s position %d is not one of %d devices", what, p, g.n))
			case seen[p]&as != 0:
				errs = append(errs, fmt.Errorf("%s position %d is listed twice", what, p))
			default:
				seen[p] |= as
			}
		}
	}
	mark(required, asRequired, "required")
	mark(candidates, asCandidate, "candidate")
	if len(errs) > 0 {
		return nil, fmt.Errorf("choose %d devices: %w", size, errors.Join(errs...))
	}
	var optional []int
	for p, as := range seen {
		if as == asCandidate {
			optional = append(optional, p)
		}
	}
	if have := len(optional) + len(required); have < size {
		return nil, fmt.Errorf("choose %d devices out of %d: %w", size, have, accel.ErrNoFit)
	}
	return optional, nil
}

// search looks for the best want of the optional devices, which it numbers
// from 0 in the order in which they are given: of equally good sets it prefers
// low numbers.
//
// It has one number to compare sets by, in which a point of connection counts
// scale times and what is left over counts once. The devices left over lose the
// scores of each chosen one with all optional ones, and get those between the
// chosen back, which were counted twice: so this part is a sum over devices and
// pairs of the set as well.
type search struct {
	n, want int
	// pos are the positions in the graph.
	pos []int
	// scores has n*n entries: what a pair adds.
	scores []int64
	// base is what each device adds by itself: its scores with all required
	// ones, less what those left over lose.
	base []int64
	// near holds per device, for r = 0..n-1, the sum of its r greatest scores
	// with other optional devices: what r others can add at most.
	near []int64
	// twin is the next lower device with the same connections, -1 for none.
	// Twins are exchangeable, so a set without the lower one need not be tried
	// with the higher one.
	twin []int

	best      []int
	bestScore int64
	// ordered is true when best was found by explore, which meets sets in
	// ascending order; before, an equally good set may come first.
	ordered bool

	chosen []int
	in     []bool
	// gain holds, per number of chosen devices, each device's score with the
	// required and the chosen ones.
	gain  [][]int64
	score int64
	// steps is how many sets may still be extended.
	steps int
	rank  []int64
}

func newSearch(g *Graph, optional, required []int, want int) *search {
	n := len(optional)
	s := &search{
		n: n, want: want, pos: optional,
		scores:    make([]int64, n*n),
		base:      make([]int64, n),
		near:      make([]int64, n*max(n, 1)),
		twin:      make([]int, n),
		bestScore: math.MinInt64 / 4,
		in:        make([]bool, n),
		gain:      make([][]int64, want+1),
		rank:      make([]int64, 0, n),
		steps:     searchWork / max(n, 16),
	}
	scale, rest := scaleOf(g, optional)
	row := make([]int64, 0, n)
	for a, p := range optional {
		for _, r := range required {
			s.base[a] += scale * g.score(p, r)
		}
		row = row[:0]
		for b, q := range optional {
			s.base[a] -= rest * g.score(p, q)
			s.scores[a*n+b] = (scale + rest) * g.score(p, q)
			if b != a {
				row = append(row, s.scores[a*n+b])
			}
		}
		slices.Sort(row)
		for r := 1; r < n; r++ {
			s.near[a*n+r] = s.near[a*n+r-1] + row[n-1-r]
		}
	}
	for a := range optional {
		s.twin[a] = -1
		for b := a - 1; b >= 0 && s.twin[a] < 0; b-- {
			if twins(g, optional, required, a, b) {
				s.twin[a] = b
			}
		}
	}
	gains := make([]int64, (want+1)*n)
	for i := range s.gain {
		s.gain[i] = gains[i*n : (i+1)*n]
	}
	copy(s.gain[0], s.base)
	return s
}

// maxScaled is the number of devices up to which no sum of scaled scores
// overflows: about 2^58 for 512 of them.
const maxScaled = 512

// scaleOf returns what a point of connection counts, and what one of the devices
// left over counts: no difference in the second makes up for one in the first.
func scaleOf(g *Graph, optional []int) (scale, rest int64) {
	if len(optional) > maxScaled {
		return 1, 0
	}
	scale = 1
	for _, p := range optional {
		for _, q := range optional {
			scale += g.score(p, q)
		}
	}
	return scale, 1
}

// twins reports whether two devices have the same score with every other
// device that may be chosen or is required.
func twins(g *Graph, optional, required []int, a, b int) bool {
	p, q := optional[a], optional[b]
	for _, list := range [2][]int{optional, required} {
		for _, r := range list {
			if r != p && r != q && g.score(p, r) != g.score(q, r) {
				return false
			}
		}
	}
	return true
}

// climbWork bounds the work of climb, in looks at single devices.
const climbWork = 1 << 18

// climb sets best to a good set: it starts from each device, adds the device
// that is connected best to those chosen until there are enough, and then
// exchanges one device for another for as long as that helps.
func (s *search) climb() {
	if s.want == 0 {
		return
	}
	cost := s.n * s.want
	gain := make([]int64, s.n)
	set := make([]int, 0, s.want)
	for start := range max(1, min(s.n, climbWork/cost)) {
		if s.twin[start] >= 0 {
			continue // the same as from its twin
		}
		copy(gain, s.base)
		clear(s.in)
		set = set[:0]
		score := s.add(gain, start)
		set = append(set, start)
		for len(set) < s.want {
			next := -1
			for v := range s.n {
				if !s.in[v] && (next < 0 || gain[v] > gain[next]) {
					next = v
				}
			}
			score += s.add(gain, next)
			set = append(set, next)
		}
		for range s.want { // a limit: each exchange helps, but maybe by little
			delta := s.exchange(gain, set)
			if delta == 0 {
				break
			}
			score += delta
		}
		slices.Sort(set)
		if score > s.bestScore || score == s.bestScore && slices.Compare(set, s.best) < 0 {
			s.best, s.bestScore = append(s.best[:0], set...), score
		}
	}
	clear(s.in)
}

// add puts v into the set and returns what it adds to the score.
func (s *search) add(gain []int64, v int) int64 {
	s.in[v] = true
	delta := gain[v]
	row := s.scores[v*s.n : (v+1)*s.n]
	for u := range gain {
		gain[u] += row[u]
	}
	return delta
}

// exchange makes the exchange of one device that helps most, and returns by how
// much; 0 when none helps.
func (s *search) exchange(gain []int64, set []int) int64 {
	var delta int64
	out, in := -1, -1
	for i, u := range set {
		row := s.scores[u*s.n : (u+1)*s.n]
		for v := range s.n {
			if d := gain[v] - row[v] - gain[u]; d > delta && !s.in[v] {
				delta, out, in = d, i, v
			}
		}
	}
	if out < 0 {
		return 0
	}
	u := set[out]
	s.in[u], s.in[in], set[out] = false, true, in
	rowU, rowV := s.scores[u*s.n:(u+1)*s.n], s.scores[in*s.n:(in+1)*s.n]
	for w := range gain {
		gain[w] += rowV[w] - rowU[w]
	}
	return delta
}

// explore extends the chosen devices, all of them below from, to full sets, in
// ascending order, and leaves out those that cannot be better than best.
func (s *search) explore(from, depth int) {
	left := s.want - depth
	if left == 0 { // nothing to choose, or all of it
		return
	}
	if s.steps--; s.steps < 0 {
		return
	}
	gain := s.gain[depth]
	if left == 1 {
		s.last(from, gain)
		return
	}
	// Below that, the bound costs more than it saves.
	if left > 2 && !s.promising(from, left, gain) {
		return
	}
	next := s.gain[depth+1]
	for v := from; v <= s.n-left && s.steps >= 0; v++ {
		if t := s.twin[v]; t >= 0 && !s.in[t] {
			continue
		}
		row := s.scores[v*s.n : (v+1)*s.n]
		for u := v + 1; u < s.n; u++ {
			next[u] = gain[u] + row[u]
		}
		s.in[v] = true
		s.score += gain[v]
		s.chosen = append(s.chosen, v)
		s.explore(v+1, depth+1)
		s.chosen = s.chosen[:depth]
		s.score -= gain[v]
		s.in[v] = false
	}
}

// last completes the chosen devices by the best one.
func (s *search) last(from int, gain []int64) {
	for v := from; v < s.n; v++ {
		if t := s.twin[v]; t >= 0 && !s.in[t] {
			continue
		}
		score := s.score + gain[v]
		if score > s.bestScore || score == s.bestScore && !s.ordered {
			s.best = append(append(s.best[:0], s.chosen...), v)
			s.bestScore, s.ordered = score, true
		}
	}
}

// promising reports whether the chosen devices and left others from the ones
// after may be a better set than best, or an equally good one that comes first.
func (s *search) promising(from, left int, gain []int64) bool {
	// Counted twice, so that the score of a pair can be halved between its two
	// devices: each adds its score with those chosen, and at most half of its
	// greatest scores with left-1 others.
	s.rank = s.rank[:0]
	for v := from; v < s.n; v++ {
		s.rank = append(s.rank, 2*gain[v]+s.near[v*s.n+left-1])
	}
	slices.Sort(s.rank)
	bound := 2 * s.score
	for _, r := range s.rank[max(0, len(s.rank)-left):] {
		bound += r
	}
	return bound > 2*s.bestScore || bound == 2*s.bestScore && !s.ordered
}
