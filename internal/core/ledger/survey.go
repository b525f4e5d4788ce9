package ledger

import (
	"iter"
	"maps"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// surveyChunk is how many verdicts a survey renews before writers get a turn.
const surveyChunk = 64

// Survey is what a ledger said of all nodes for one request at one moment. It stays as it is,
// whatever happens to the nodes, is safe for concurrent use, and takes no lock. The verdict on
// a node that does not publish the resource is accel.NodeUnknown.
type Survey struct {
	request accel.Request
	ask     place.Ask
	policy  place.Policy
	// unservable is true where no node can serve the request.
	unservable bool
	names      *directory
	verdicts   []rated // by number
	fits       int
	lower      bool
}

// SurveyOf asks about all nodes, for a request of at least one unit: as Check does, which lets
// writers have their turn, and then for all nodes at one moment.
func SurveyOf(l *Ledger, req accel.Request) *Survey {
	out := &Survey{request: req, names: &directory{}}
	var err error
	if out.ask, out.policy, err = l.rules.ask(req); err != nil {
		out.unservable = true
		return out
	}
	expireTiers(l)
	r := l.ratings.of(l.state.nodes, req.Resource, &out.ask, out.policy)
	from := 0
	for r.refresh(l, from, from+surveyChunk) {
		from += surveyChunk
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renew()
	l.mu.RLock()
	defer l.mu.RUnlock()
	s := &l.state
	x := s.nodes.byResource[req.Resource]
	if x == nil {
		return out
	}
	r.grow(x.size())
	out.names = x.directory()
	for number, n := range x.nodes {
		if n != nil {
			r.verdict(s, x, number)
		}
	}
	out.verdicts = slices.Clone(r.entries[:x.size()])
	differs := func(n *node) {
		slots := s.slotsFor(n, &req)
		v := r.judge(s, n, slots, freest(slots), req.Pod)
		out.verdicts[n.number] = rated{generation: x.generations[n.number], code: v.Code, rating: v.Rating, stated: v.Stated}
	}
	for name := range s.nominations.nodes[req.Resource] {
		if n := x.node(name); n != nil {
			differs(n)
		}
	}
	if h := s.pods.reserved(req.Pod, req.Resource); h != nil {
		differs(h.on.node)
	}
	for number := range out.verdicts {
		if out.fitsAt(number) {
			out.fits++
		}
	}
	for priority := range maps.Keys(x.priorities) {
		out.lower = out.lower || priority < req.Priority
	}
	return out
}

func (s *Survey) fitsAt(number int) bool {
	return s.names.names[number] != "" && s.verdicts[number].code == accel.Fits
}

// Fits is on how many nodes the request fits.
func (s *Survey) Fits() int { return s.fits }

// Lower reports whether any pod of lower priority held some of the resource, on whichever node.
func (s *Survey) Lower() bool { return s.lower }

// At is the verdict on a node.
func (s *Survey) At(node string) Verdict {
	if s.unservable {
		return Verdict{Code: accel.Unservable, Rating: place.NoRating}
	}
	number, known := s.names.numbers[node]
	if !known {
		return Verdict{Code: accel.NodeUnknown, Rating: place.NoRating}
	}
	return s.verdicts[number].public()
}

// Nodes are all nodes that publish the resource or have pods that hold some of it, in no
// order. There are none where no node can serve the request.
func (s *Survey) Nodes() iter.Seq2[string, Verdict] {
	return func(yield func(string, Verdict) bool) {
		for number := range s.verdicts {
			if name := s.names.names[number]; name != "" && !yield(name, s.verdicts[number].public()) {
				return
			}
		}
	}
}

// Ranked are the nodes on which the request fits, the best rated first, of equal ones in the
// order of their names. Each costs one look at all verdicts.
func (s *Survey) Ranked() iter.Seq[string] {
	better := func(i, j int) bool {
		if a, b := s.verdicts[i].rating, s.verdicts[j].rating; a != b {
			return a > b
		}
		return s.names.rank[i] < s.names.rank[j]
	}
	return func(yield func(string) bool) {
		for last := -1; ; {
			best := -1
			for i := range s.verdicts {
				if (best < 0 || better(i, best)) && (last < 0 || better(last, i)) && s.fitsAt(i) {
					best = i
				}
			}
			if best < 0 || !yield(s.names.names[best]) {
				return
			}
			last = best
		}
	}
}

// Overlay is what would be different on a node.
type Overlay struct {
	// Removed are UIDs of pods that would be gone.
	Removed []string
	// Added are requests of pods that would come, before the one of the survey. What is kept for
	// them on the node does not count besides.
	Added []accel.Request
}

// WhatIf is the verdict on a node with an overlay: only what the overlay changes can differ
// from the survey. Where the node has changed since, the answer is that the pod does not fit,
// rather than one which the survey's verdict does not go with.
func WhatIf(l *Ledger, s *Survey, node string, o Overlay) Verdict {
	before := s.At(node)
	if len(o.Removed)+len(o.Added) == 0 || before.Code.Unresolvable() || len(o.Removed) == 0 && before.Code != accel.Fits {
		return before
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := surveyed(l, s, node)
	if n == nil {
		return Verdict{Code: accel.NoDeviceFits, Rating: place.NoRating}
	}
	slots := slices.Clone(n.slots)
	for _, uid := range o.Removed {
		if h := removable(l, s, n, uid); h != nil {
			h.release(slots)
		}
	}
	slots = slices.Clone(l.state.slotsOf(n, slots, &s.request, o.Added))
	for _, added := range o.Added {
		ask, policy, err := l.rules.ask(added)
		if err != nil || ask.Devices == 0 {
			continue
		}
		for _, i := range (&nomination{}).slots(n, slots, &ask, policy) {
			slots[i].Free -= ask.Units
		}
	}
	r := ratings{resource: s.request.Resource, ask: s.ask, policy: s.policy}
	return r.judge(&l.state, n, slots, freest(slots), s.request.Pod)
}

// Candidate is a pod of lower priority that may be evicted.
type Candidate struct {
	Pod string // UID
	// Violates is true where the eviction would violate a disruption budget, and Going where
	// it is decided already, so that it costs nothing more.
	Violates, Going bool
}

// Victims returns which of the candidates must go so that the request fits on a node: the
// least harmful of them, as Evict has it, those that violate no budget before others. There
// are none where nothing has to go, not even all of them are enough, or the node has changed
// since the survey.
func Victims(l *Ledger, s *Survey, node string, candidates []Candidate) []string {
	victims := leastHarmful(l, s, node, candidates)
	if len(victims) > 0 && WhatIf(l, s, node, Overlay{Removed: victims}).Code != accel.Fits {
		return nil // what is kept for others would move
	}
	return victims
}

func leastHarmful(l *Ledger, s *Survey, node string, candidates []Candidate) (victims []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := surveyed(l, s, node)
	if n == nil {
		return nil
	}
	var pods []occupant
	for _, c := range candidates {
		if h := removable(l, s, n, c.Pod); h != nil {
			o := h.occupant(true)
			o.violates, o.ending = c.Violates, o.ending || c.Going
			pods = append(pods, o)
		}
	}
	chosen, _, _ := makeRoom(l.state.slotsFor(n, &s.request), &s.ask, pods)
	for _, v := range chosen {
		victims = append(victims, pods[v].uid)
	}
	return victims
}

// surveyed returns the node if it is as it was at the survey, else nil. The lock is held.
func surveyed(l *Ledger, s *Survey, name string) *node {
	x := l.state.nodes.byResource[s.request.Resource]
	n := l.state.nodes.publishing(s.request.Resource, name)
	if n == nil || x.generations[n.number] != s.verdicts[s.names.numbers[name]].generation {
		return nil
	}
	return n
}

// Current reports whether a node is as it was at the survey.
func Current(l *Ledger, s *Survey, node string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return surveyed(l, s, node) != nil
}

// Occupants are the pods, by node, that hold something which an Overlay can remove: those that
// are bound as far as the ledger knows.
func Occupants(l *Ledger, s *Survey) map[string][]accel.PodRef {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out := map[string][]accel.PodRef{}
	for name := range s.names.numbers {
		n := l.state.nodes.publishing(s.request.Resource, name)
		if n == nil {
			continue
		}
		for _, h := range n.pods {
			if h.observed() && !h.Gone {
				out[name] = append(out[name], h.Pod)
			}
		}
	}
	return out
}

// removable returns what a pod holds on a node that an eviction would free, or nil. The lock is
// held.
func removable(l *Ledger, s *Survey, n *node, uid string) *holding {
	if h := l.state.pods.on(uid, s.request.Resource); h != nil && h.on.node == n && !h.Gone && uid != s.request.Pod {
		return h
	}
	return nil
}

// MayEvict reports whether the request could fit on a node, on which it does not, if all pods
// of lower priority were gone.
func MayEvict(l *Ledger, s *Survey, node string) bool {
	if !s.lower || s.unservable {
		return false
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.state.nodes.publishing(s.request.Resource, node)
	if n == nil {
		return false
	}
	slots := slices.Clone(l.state.slotsFor(n, &s.request))
	for _, h := range n.pods {
		if h.Priority < s.request.Priority {
			h.release(slots)
		}
	}
	able := 0
	for i := range slots {
		if s.ask.Fits(&slots[i]) {
			able++
		}
	}
	return able >= s.ask.Devices
}

// Counted reports whether a survey counts something for a pod on a node: it holds something
// there, or is nominated to it.
func Counted(l *Ledger, s *Survey, podUID, node string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if h := l.state.pods.on(podUID, s.request.Resource); h != nil && h.Node == node {
		return true
	}
	return slices.ContainsFunc(l.state.nominations.pods[podUID], func(k *nomination) bool {
		return k.node == node && k.request.Resource == s.request.Resource
	})
}
