package place

import (
	"encoding/binary"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// GraphOf returns how closely the devices of a node are connected, by their
// positions in shares: by the links where there are any, else by boards and NUMA
// nodes, on the scale of accel.Link. It is nil where nothing is known. The graph
// has no Position: equal nodes may share one.
func GraphOf(shares []accel.Share, links []accel.Link) *Graph {
	if len(shares) < 2 {
		return nil
	}
	if len(links) == 0 {
		links = nearness(shares)
	}
	ids := make([]accel.DeviceID, len(shares))
	for i, s := range shares {
		ids[i] = s.ID
	}
	g := NewGraph(ids, links)
	g.at = nil
	if !slices.ContainsFunc(g.scores, func(s int64) bool { return s != 0 }) {
		return nil
	}
	return g
}

// nearness makes links of what the devices say of their places.
func nearness(shares []accel.Share) []accel.Link {
	var links []accel.Link
	for i, a := range shares {
		for _, b := range shares[:i] {
			link := accel.Link{A: a.ID, B: b.ID}
			switch {
			case a.Board != "" && a.Board == b.Board:
				link.Score = accel.LinkBoard
			case a.NUMANode < 0 || b.NUMANode < 0:
				continue
			case a.NUMANode == b.NUMANode:
				link.Score = accel.LinkNode
			default:
				link.Score = accel.LinkSystem
			}
			links = append(links, link)
		}
	}
	return links
}

// Key is equal for graphs of equal connections, and only for those.
func (g *Graph) Key() string {
	key := make([]byte, 0, 2*len(g.scores)+2)
	key = binary.AppendVarint(key, int64(g.n))
	for a := range g.n {
		for b := range a {
			key = binary.AppendVarint(key, g.score(a, b))
		}
	}
	return string(key)
}

// maxRemembered bounds the answers that a graph remembers.
const maxRemembered = 4096

// Best appends the positions, ascending, of the size devices among preferred
// that are connected best to buf[:0], and returns the sum of the scores of all
// their pairs. Of equally good sets it is the one that Connected would choose,
// but with the order of preferred in place of that of the positions: the first
// of preferred are taken before the others. preferred lists at least size
// positions of the graph, each once. Answers for three devices and more are
// remembered.
func (g *Graph) Best(preferred []int, size int, buf []int) (chosen []int, score int64) {
	chosen = buf[:0]
	switch {
	case g.equal || size == len(preferred) || size < 2:
		chosen = append(chosen, preferred[:size]...)
		slices.Sort(chosen)
	case size == 2 && len(preferred) <= maxPairs:
		chosen = g.pair(preferred, chosen)
	case g.n > 1<<8:
		chosen = g.search(preferred, size, chosen)
	default:
		chosen = g.remembered(preferred, size, chosen)
	}
	for i, a := range chosen {
		for _, b := range chosen[:i] {
			score += g.score(a, b)
		}
	}
	return chosen, score
}

// maxPairs bounds the devices of which all pairs are tried.
const maxPairs = 64

// pair is search for two devices, which most pods of several ask for: it looks at
// all pairs, in less time than it takes to look an answer up.
func (g *Graph) pair(preferred, chosen []int) []int {
	var with [maxPairs]int64 // what each device has with all others
	for i, a := range preferred {
		for j, b := range preferred[:i] {
			s := g.score(a, b)
			with[i] += s
			with[j] += s
		}
	}
	first, second, best, lost := 0, 1, int64(-1), int64(0)
	for i, a := range preferred {
		for j := i + 1; j < len(preferred); j++ {
			s := g.score(a, preferred[j])
			// What those that are left over lose by it.
			if l := with[i] + with[j] - s; s > best || s == best && l < lost {
				first, second, best, lost = i, j, s, l
			}
		}
	}
	a, b := preferred[first], preferred[second]
	return append(chosen, min(a, b), max(a, b))
}

// remembered is search for positions that fit in a byte.
func (g *Graph) remembered(preferred []int, size int, chosen []int) []int {
	var space [64]byte
	key := appendBytes(append(space[:0], byte(size&0xff)), preferred) // size is below g.n
	g.mu.Lock()
	known, ok := g.answers[string(key)]
	g.mu.Unlock()
	if ok {
		for i := range len(known) {
			chosen = append(chosen, int(known[i]))
		}
		return chosen
	}
	chosen = g.search(preferred, size, chosen)
	answer := appendBytes(nil, chosen)
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.answers == nil || len(g.answers) >= maxRemembered {
		g.answers = make(map[string]string)
	}
	g.answers[string(key)] = string(answer)
	return chosen
}

// appendBytes appends positions below 256, a byte each.
func appendBytes(to []byte, positions []int) []byte {
	for _, p := range positions {
		to = append(to, byte(p&0xff))
	}
	return to
}

func (g *Graph) search(preferred []int, size int, chosen []int) []int {
	// A copy, so that the caller's may be on its stack when nothing is searched.
	s := newSearch(g, slices.Clone(preferred), nil, size)
	s.climb()
	s.explore(0, 0)
	for _, i := range s.best {
		chosen = append(chosen, preferred[i])
	}
	slices.Sort(chosen)
	return chosen
}
