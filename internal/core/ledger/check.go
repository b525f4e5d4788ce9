package ledger

import (
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Verdict says whether a pod fits on a node.
type Verdict struct {
	// Code is accel.Fits or why the pod does not fit.
	Code accel.ReasonCode
	// Rating rates a node that fits, higher is better: see place.Policy and
	// place.Scores. It is place.NoRating for one that does not.
	Rating int64
	// Stated are, with accel.NotIsolated, the tiers of the devices that the pod's selection
	// allows otherwise; else none.
	Stated accel.TierSet
}

// checkChunk is how many nodes are looked at before writers get a turn, about
// 20 microseconds.
const checkChunk = 256

// Check says for each of the nodes, at the same position of out, whether a pod
// with that request fits there now. It changes nothing, allocates nothing per
// node, and looks at as many nodes as both slices have. A pod that asks for no
// units fits everywhere that its CPU and memory do.
//
// A request that no device of the node could ever hold is
// accel.LargerThanDevice, even where the larger device is unhealthy or some of its
// units are withheld; one that only such a device could hold is
// accel.NoDeviceFits, as devices recover. The same goes for accel.TooFewDevices.
func (l *Ledger) Check(req accel.Request, nodes []string, out []Verdict) {
	checkAll(l, req, nodes, out, func(ask *place.Ask, policy place.Policy) *ratings {
		return l.ratings.of(l.state.nodes, req.Resource, ask, policy)
	})
}

// Fits answers like Check, without ratings: Rating is 0 for a node that fits. It asks no
// policy and remembers nothing, so a request that was made up costs no more than one look
// at the devices of each node that it names.
func (l *Ledger) Fits(req accel.Request, nodes []string, out []Verdict) {
	checkAll(l, req, nodes, out, func(ask *place.Ask, policy place.Policy) *ratings {
		return &ratings{resource: req.Resource, ask: *ask, policy: fits{policy}, temporary: true}
	})
}

// checkAll answers for all of the nodes by what ratings returns.
func checkAll(l *Ledger, req accel.Request, nodes []string, out []Verdict, ratings func(*place.Ask, place.Policy) *ratings) {
	n := min(len(nodes), len(out))
	ask, policy, err := l.rules.ask(req)
	if err != nil {
		for i := range out[:n] {
			out[i] = Verdict{Code: accel.Unservable, Rating: place.NoRating}
		}
		return
	}
	expireTiers(l)
	r := ratings(&ask, policy)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.renew()
	guess := 0
	for from := 0; from < n; from += checkChunk {
		to := min(from+checkChunk, n)
		guess = r.check(l, &req, guess, nodes[from:to], out[from:to])
	}
}

// fits is a policy that rates nothing. Every policy serves a pod that fits so.
type fits struct{ place.Policy }

// Choose implements place.Policy, and chooses nothing.
func (fits) Choose(n *place.Node, a *place.Ask, buf []int) (slots []int, rating int64, ok bool) {
	if !a.FitsBeside(n) {
		return buf[:0], place.NoRating, false
	}
	able := 0
	for i := range n.Slots {
		if able == a.Devices {
			break
		}
		if a.Fits(&n.Slots[i]) {
			able++
		}
	}
	if able < a.Devices {
		return buf[:0], place.NoRating, false
	}
	return buf[:0], 0, true
}

// check answers for some nodes. The guess is the number of the first one, and
// the result that of the node which comes after the last. r.mu is held.
func (r *ratings) check(l *Ledger, req *accel.Request, guess int, nodes []string, out []Verdict) int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	s := &l.state
	x := s.nodes.byResource[r.resource]
	r.grow(x.size())
	kept := s.nominations.nodes[r.resource]
	own := -1 // the node with a reservation of the pod itself
	if h := s.pods.reserved(req.Pod, r.resource); h != nil {
		own = h.on.node.number
	}
	before := -1
	for i, name := range nodes {
		number := x.find(name, guess)
		if number < 0 {
			out[i] = r.unknown()
			continue
		}
		if number != guess && before >= 0 && !r.temporary {
			x.next[before].Store(int64(number))
		}
		before, guess = number, int(x.next[number].Load())
		if number == own || len(kept) > 0 && len(kept[name]) > 0 {
			n := x.nodes[number]
			slots := s.slotsFor(n, req)
			out[i] = r.judge(s, n, slots, freest(slots), req.Pod)
			continue
		}
		out[i] = r.verdict(s, x, number)
	}
	return guess
}

// verdict answers for one node, by what r remembers if the node did not change
// since.
func (r *ratings) verdict(s *state, x *index, number int) Verdict {
	e := &r.entries[number]
	if e.generation != x.generations[number] {
		n := x.nodes[number]
		v := r.judge(s, n, n.slots, n.largestFree, "")
		e.generation, e.code, e.rating, e.stated = x.generations[number], v.Code, v.Rating, v.Stated
	}
	return e.public()
}

// unknown is the verdict on a node that does not publish the resource.
func (r *ratings) unknown() Verdict {
	if r.ask.Devices == 0 {
		return Verdict{}
	}
	return Verdict{Code: accel.NodeUnknown, Rating: place.NoRating}
}

// judge asks the policy about a node with these slots, of which the freest has so
// many free units. The pod may be "".
func (r *ratings) judge(s *state, n *node, slots []place.Slot, free accel.Units, podUID string) Verdict {
	if !n.known {
		return r.unknown()
	}
	if r.ask.Devices == 0 || r.ask.Units <= free {
		s.view(&r.view, n, slots, &r.ask, podUID)
		var rating int64
		var ok bool
		if r.buf, rating, ok = r.policy.Choose(&r.view, &r.ask, r.buf); ok {
			return Verdict{Rating: rating}
		}
	}
	code, stated := refusal(slots, &r.ask)
	return Verdict{Code: code, Rating: place.NoRating, Stated: stated}
}

// view sets v to the node as the policy sees it for an ask of a pod, whose own CPU and
// memory do not count; the pod may be "".
func (s *state) view(v *place.Node, n *node, slots []place.Slot, a *place.Ask, podUID string) {
	*v = place.Node{Slots: slots, Graph: n.graph, CPU: place.Unlimited, Memory: place.Unlimited, Cores: place.Unlimited}
	if !s.nodes.hosts.limited.Load() {
		return
	}
	v.CPU, v.Memory = n.host.leftWithout(s.nodes.hosts.charges[podUID])
	v.Cores = n.host.cpu
	if s.rules.capacityChecked {
		v.CPU, v.Memory = max(v.CPU, a.CPU), max(v.Memory, a.Memory)
	}
}

// refusal says why a pod does not fit on a node that has these slots; stated are the tiers
// where none meets what the pod requires.
func refusal(slots []place.Slot, a *place.Ask) (_ accel.ReasonCode, stated accel.TierSet) {
	if a.Devices == 0 {
		return accel.NoCapacity, 0
	}
	var allowed, large, healthy, small int
	for i := range slots {
		s := &slots[i]
		if !a.Only.Names(s.ID, s.Model) {
			continue
		}
		if !a.Only.Isolates(s.Tier) {
			stated.Add(s.Tier)
			continue
		}
		if !a.Suffices(s) {
			small++
			continue
		}
		allowed++
		if s.Total >= a.Units {
			large++
		}
		if a.Fits(s) {
			healthy++
		}
	}
	switch {
	case allowed == 0 && stated != 0:
		return accel.NotIsolated, stated
	case allowed == 0 && small > 0:
		return accel.TooSmall, 0
	case allowed == 0 && len(slots) > 0:
		return accel.NotSelected, 0
	case large == 0:
		return accel.LargerThanDevice, 0
	case large < a.Devices:
		return accel.TooFewDevices, 0
	case healthy < a.Devices:
		return accel.NoDeviceFits, 0
	}
	return accel.NoCapacity, 0
}
