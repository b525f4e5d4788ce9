package eviction

import (
	"maps"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// History is what was seen of the lists of all nodes, and what was evicted. It is not safe
// for concurrent use.
type History struct{ nodes map[string]*seen }

// seen is what was seen of one node.
type seen struct {
	// text is the list as it was last written, and written when that was seen.
	text    string
	written time.Time
	// episodes are the entries of the list.
	episodes map[episodeKey]*episode
	past     Past
}

// episodeKey identifies an uninterrupted overuse: another beginning is another episode.
type episodeKey struct {
	uid, container string
	resource       accel.Resource
	device         accel.DeviceID
	since          int64 // Unix seconds
}

func keyOf(o *wire.Overuse) episodeKey {
	return episodeKey{uid: o.Pod.UID, container: o.Container, resource: o.Resource, device: o.Device, since: o.Since.Unix()}
}

type episode struct {
	wire.Overuse // as in the newest list
	first        time.Time
	retry        time.Time
	closed       bool
	reported     []Outcome
}

// NewHistory returns an empty one.
func NewHistory() *History { return &History{nodes: map[string]*seen{}} }

// See takes in the lists of all nodes, each as it is in the annotation. An entry counts from
// when it is first seen, and again from the beginning when it was not listed meanwhile, or
// when its list was stale. A list that cannot be read counts as none; the errors are by
// node, once for each such list.
func (h *History) See(now time.Time, lists map[string]string) map[string]error {
	for name, n := range h.nodes {
		if _, listed := lists[name]; !listed {
			n.text, n.episodes = "", nil
			n.past.trim(now)
			if len(n.past.Evicted) == 0 {
				delete(h.nodes, name)
			}
		}
	}
	errs := map[string]error{}
	for name, text := range lists {
		n := h.nodes[name]
		if n == nil {
			n = &seen{past: Past{Devices: map[accel.DeviceID]time.Time{}}}
			h.nodes[name] = n
		}
		n.past.trim(now)
		if n.text == text {
			continue
		}
		list, err := wire.DecodeOveruse(text)
		if err != nil {
			errs[name] = err
		}
		n.see(now, text, list.Pods)
	}
	return errs
}

// see takes in a list that was written.
func (n *seen) see(now time.Time, text string, list []wire.Overuse) {
	old := n.episodes
	if now.Sub(n.written) >= staleAfter {
		old = nil
	}
	n.text, n.written, n.episodes = text, now, make(map[episodeKey]*episode, len(list))
	for _, o := range list {
		e := old[keyOf(&o)]
		if e == nil {
			e = &episode{first: now}
		}
		e.Overuse = o
		n.episodes[keyOf(&o)] = e
	}
}

// trim forgets evictions that no decision needs any more.
func (p *Past) trim(now time.Time) {
	p.Evicted = slices.DeleteFunc(p.Evicted, func(at time.Time) bool { return now.Sub(at) >= window })
	maps.DeleteFunc(p.Devices, func(_ accel.DeviceID, at time.Time) bool { return now.Sub(at) >= window })
}

// Restart forgets all lists, so that counting begins again, and keeps what was evicted: this
// process did not lead for a while.
func (h *History) Restart() {
	for _, n := range h.nodes {
		n.text, n.episodes = "", nil
	}
}

// Nodes returns the nodes with a list, sorted.
func (h *History) Nodes() []string {
	var out []string
	for name, n := range h.nodes {
		if len(n.episodes) > 0 {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Candidates returns the entries of a node's list, in no order and not yet Confirmed, and
// what was evicted there.
func (h *History) Candidates(node string) ([]Candidate, Past) {
	n := h.nodes[node]
	if n == nil {
		return nil, Past{}
	}
	out := make([]Candidate, 0, len(n.episodes))
	for _, e := range n.episodes {
		out = append(out, Candidate{Overuse: e.Overuse, First: e.first, Written: n.written, Closed: e.closed, Retry: e.retry})
	}
	return out, n.past
}

// Record notes what became of an entry at that time, and reports whether it is the first
// time in this episode.
func (h *History) Record(now time.Time, node string, o *wire.Overuse, outcome Outcome) (first bool) {
	n := h.nodes[node]
	if n == nil {
		return true
	}
	if e := n.episodes[keyOf(o)]; e != nil {
		if first = !slices.Contains(e.reported, outcome); first {
			e.reported = append(e.reported, outcome)
		}
	}
	if outcome == Evicted {
		n.past.Evicted = append(n.past.Evicted, now)
		n.past.Devices[o.Device] = now
	}
	// The API server answers for the pod, whatever the container and the device.
	for key, e := range n.episodes {
		if e.Pod.UID != o.Pod.UID {
			continue
		}
		switch outcome {
		case Evicted, SeveralBudgets:
			e.closed = true
		case Budget, Failed:
			e.retry = now.Add(pause)
		case Gone:
			delete(n.episodes, key)
		}
	}
	return first
}
