package ledger

import (
	"cmp"
	"maps"
	"slices"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// A Proposal is what kube-scheduler would evict from a node for a pod. It knows
// the sum over a node's devices only, and besides what else a pod needs of a
// node: CPU, memory, ports.
type Proposal struct {
	Node string
	// Victims are UIDs of pods of lower priority than the pod's, in descending
	// order of priority. None means that the sum is enough as it is: newer versions of
	// kube-scheduler propose such nodes as well.
	Victims []string
}

// An Eviction says what to evict from a node so that a pod can run there.
type Eviction struct {
	// Victims are UIDs, in descending order of priority as far as it is known; none
	// where nothing that may be evicted makes room for the pod.
	Victims []string
	// Others is how many of them were not proposed.
	Others int
}

// Evict says for a pod which of the proposed evictions it needs so that one
// device, or as many as it asks for, has room for it, and keeps that room for it
// for a moment: see Nominate.
//
// Proposed victims are reduced to the least harmful of them that make the room:
// the fewest, of sets of so many the one whose highest priority is lowest, then
// the one of the lowest priorities together. Only where all proposed ones make no
// room, other pods are taken as well: of lower priority than the pod, and observed
// on the node, since kube-scheduler rejects the whole answer for a victim that it
// does not know there.
//
// A proposed victim that holds nothing of the resource stays one, since
// kube-scheduler wants it for another reason, which is not known here, such as
// CPU. So do all of a node on which the pod fits as it is. One that holds units
// and was proposed for its CPU may be spared all the same: kube-scheduler finds
// that out in its next turn, proposes it again, and then it stays.
//
// A proposal with a pod of the same or a higher priority, by what the ledger knows,
// is not followed.
func (l *Ledger) Evict(req accel.Request, proposals []Proposal) []Eviction {
	out := make([]Eviction, len(proposals))
	ask, policy, err := l.rules.ask(req)
	if err != nil || ask.Devices == 0 {
		return out
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s, now := &l.state, l.rules.now()
	s.nodes.expireTiers(now)
	s.nominations.expire(now)
	for i, p := range proposals {
		n := s.nodes.publishing(req.Resource, p.Node)
		if n == nil {
			continue
		}
		var devices []accel.DeviceID
		if out[i], devices = s.evict(n, &req, &ask, policy, p.Victims); len(out[i].Victims) > 0 {
			s.nominations.plan(req.Pod, p.Node, req, devices, now.Add(planTTL))
		}
	}
	return out
}

// evict is Evict for one node; it also returns the devices on which there will be
// room.
func (s *state) evict(n *node, req *accel.Request, ask *place.Ask, policy place.Policy, proposed []string) (Eviction, []accel.DeviceID) {
	slots := slices.Clone(s.slotsFor(n, req))
	together := n.freeTogether(slots)
	for _, h := range n.pods {
		if h.Gone { // what it holds comes by itself
			h.release(slots)
		}
	}
	view := place.Node{Slots: slots, CPU: place.Unlimited, Memory: place.Unlimited}
	fit, _, fits := policy.Choose(&view, ask, nil)

	var inNode []*holding // those that hold units
	for _, uid := range proposed {
		if h := s.pods.on(uid, req.Resource); h != nil && h.on.node == n && !h.Gone {
			if h.Priority >= req.Priority {
				return Eviction{}, nil
			}
			inNode = append(inNode, h)
		}
	}
	if fits {
		return Eviction{Victims: proposed}, names(slots, fit)
	}
	var pods []occupant
	for _, h := range inNode {
		pods = append(pods, h.occupant(true))
	}
	victims, room, ok := makeRoom(slots, ask, pods)
	if !ok {
		for _, h := range n.pods {
			if h.observed() && !h.Gone && h.Priority < req.Priority && !slices.Contains(proposed, h.Pod.UID) {
				pods = append(pods, h.occupant(false))
			}
		}
		if victims, room, ok = makeRoom(slots, ask, pods); !ok {
			return Eviction{}, nil
		}
	}
	spared, others := map[string]bool{}, []*occupant(nil)
	missing := ask.Units*accel.Units(ask.Devices) - together
	for v := range pods {
		switch _, needed := slices.BinarySearch(victims, v); {
		case needed && !pods[v].proposed:
			others = append(others, &pods[v])
		case !needed && pods[v].proposed:
			spared[pods[v].uid] = true
			continue
		case !needed:
			continue
		}
		missing -= s.pods.on(pods[v].uid, req.Resource).Units
	}
	slices.SortFunc(inNode, func(a, b *holding) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), cmp.Compare(b.Units, a.Units), b.Created.Compare(a.Created))
	})
	for _, h := range inNode {
		if missing > 0 && spared[h.Pod.UID] {
			delete(spared, h.Pod.UID)
			missing -= h.Units
		}
	}
	return s.pods.eviction(req.Resource, proposed, spared, others), names(slots, room)
}

// freeTogether is what kube-scheduler takes the node to have: the units of healthy
// devices without those of all pods, also of pods on no device or on a lost one,
// and without what is kept for others. Units that are withheld count, as kubelet
// offers them. With less than the pod asks for the node
// would not be looked at, whatever one device has.
func (n *node) freeTogether(slots []place.Slot) accel.Units {
	free := -n.used
	for _, h := range n.pods {
		if h.Gone {
			free += h.Units // kube-scheduler does not know it
		}
	}
	for i := range slots {
		if !slots[i].Unhealthy {
			free += slots[i].Total
		}
		free -= n.slots[i].Free - slots[i].Free
	}
	return free
}

// eviction puts the answer together: what was proposed, in that order, without
// those that are spared, and the others among them by their priority, before pods
// of which it is not known.
func (ps *pods) eviction(res accel.Resource, proposed []string, spared map[string]bool, others []*occupant) Eviction {
	e := Eviction{Others: len(others)}
	slices.SortFunc(others, func(a, b *occupant) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), cmp.Compare(a.uid, b.uid))
	})
	for _, uid := range proposed {
		if spared[uid] {
			continue
		}
		h := ps.on(uid, res)
		for len(others) > 0 && (h == nil || others[0].priority > h.Priority) {
			e.Victims, others = append(e.Victims, others[0].uid), others[1:]
		}
		e.Victims = append(e.Victims, uid)
	}
	for _, o := range others {
		e.Victims = append(e.Victims, o.uid)
	}
	return e
}

// MakesRoom reports whether the pod fits on the node as it is, or will once the
// pods of lower priority that are ending there are gone. Then nothing needs to be
// evicted for it anywhere. gone reports whether a pod, by its UID, is known to have left
// the node already; nil for none that the ledger has not heard of.
func (l *Ledger) MakesRoom(req accel.Request, node string, gone func(podUID string) bool) bool {
	ask, policy, err := l.rules.ask(req)
	if err != nil {
		return false
	}
	expireTiers(l)
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.state.nodes.publishing(req.Resource, node)
	if n == nil {
		return false
	}
	slots := slices.Clone(l.state.slotsFor(n, &req))
	for _, h := range n.pods {
		leaves := h.Ending || gone != nil && h.observed() && gone(h.Pod.UID)
		if h.Gone || leaves && h.Priority < req.Priority {
			h.release(slots)
		}
	}
	_, _, fits := policy.Choose(&place.Node{Slots: slots, CPU: place.Unlimited, Memory: place.Unlimited}, &ask, nil)
	return fits
}

// LowestPriority is the least priority of any pod that holds some of the resource. It
// is false where none does: then no pod can be evicted for another one.
func (l *Ledger) LowestPriority(res accel.Resource) (lowest int32, some bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	x := l.state.nodes.byResource[res]
	if x == nil || len(x.priorities) == 0 {
		return 0, false
	}
	return slices.Min(slices.Collect(maps.Keys(x.priorities))), true
}

// parts returns what the holding holds of slots that the node has.
func (h *holding) parts() []part {
	var out []part
	for i := range h.devices() {
		if at := h.slotOf(i); at >= 0 {
			out = append(out, part{at, h.part(i)})
		}
	}
	return out
}

// release gives back to the slots what the holding holds of them.
func (h *holding) release(slots []place.Slot) {
	for _, p := range h.parts() {
		slots[p.slot].Free += p.units
	}
}

func (h *holding) occupant(proposed bool) occupant {
	return occupant{uid: h.Pod.UID, priority: h.Priority, created: h.Created, ending: h.Ending, proposed: proposed, parts: h.parts()}
}

func names(slots []place.Slot, chosen []int) []accel.DeviceID {
	out := make([]accel.DeviceID, len(chosen))
	for i, s := range chosen {
		out[i] = slots[s].ID
	}
	return out
}
