package ledger

import (
	"slices"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
)

// A Proposal is what kube-scheduler would evict from a node for a pod. It knows
// the sum over a node's devices only, and besides what else a pod needs of a
// node: CPU, memory, ports.
type Proposal struct {
	Node string
	// Victims are UIDs of pods of lower priority than the pod's, in any order.
	Victims []string
}

// An Eviction says what of a Proposal would let the pod run.
type Eviction struct {
	// Helps is false where nothing that may be evicted makes room for the pod, or
	// nothing needs to be.
	Helps bool
	// Spared are the proposed victims whose eviction the pod does not need.
	Spared []string
	// Others are pods that were not proposed and have to go as well.
	Others []Victim
}

// A Victim is a pod to evict.
type Victim struct {
	UID      string
	Priority int32
}

// Evict says for a pod which of the proposed evictions it needs so that one
// device, or as many as it asks for, has room for it, and keeps that room for it
// for a moment: see Nominate.
//
// Proposed victims are reduced to the least harmful of them that make the room.
// Least harmful is what kube-scheduler prefers: the lowest priority of the
// highest victim, then the fewest, then the lowest priorities. Only where all
// proposed ones together make no room, other pods are taken as well: of lower
// priority than the pod, and observed on the node, since kube-scheduler refuses
// the whole answer for a victim that it does not know there.
//
// A proposed victim that holds nothing of the resource stays one, since
// kube-scheduler wants it for another reason, which is not known here. So does
// one whose units kube-scheduler does not miss: it spares each victim without
// which the sum over the node is enough, so something else made it keep that one.
//
// A node on which the pod fits as it is stays as proposed, for the same reason.
// A victim of the pod's own or higher priority, by what the books say, is none.
func (l *Ledger) Evict(req accel.Request, proposals []Proposal) []Eviction {
	out := make([]Eviction, len(proposals))
	ask, policy, err := l.ask(req)
	if err != nil || ask.Devices == 0 {
		return out
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expirePlans(l.now())
	for i, p := range proposals {
		n := l.publishing(req.Resource, p.Node)
		if n == nil || len(p.Victims) == 0 {
			continue
		}
		var devices []accel.DeviceID
		if out[i], devices = l.evict(n, &req, &ask, policy, p.Victims); out[i].Helps {
			l.plan(req.Pod, p.Node, req, devices)
		}
	}
	return out
}

// evict is Evict for one node; it also returns the devices on which there will be
// room. l.mu is held.
func (l *Ledger) evict(n *node, req *accel.Request, ask *place.Ask, policy place.Policy, proposed []string) (Eviction, []accel.DeviceID) {
	slots := slices.Clone(l.slotsFor(n, req))
	view := place.Node{Slots: slots, CPU: place.Unlimited, Memory: place.Unlimited}
	fit, _, fits := policy.Choose(&view, ask, nil)

	// What of the proposal is here for the units, and what for something else.
	var inNode []*holding // the proposed ones that hold units
	for _, uid := range proposed {
		if h := l.holding(uid, req.Resource); h != nil && h.node == n {
			if h.Priority >= req.Priority {
				return Eviction{}, nil
			}
			inNode = append(inNode, h)
		}
	}
	if fits {
		return Eviction{Helps: true}, names(slots, fit)
	}
	for _, h := range n.besidesUnits(inNode, slots, ask.Units*accel.Units(ask.Devices)) {
		inNode = slices.DeleteFunc(inNode, func(o *holding) bool { return o == h })
		for _, p := range h.parts() {
			slots[p.slot].Free += p.units
		}
	}
	if fit, _, fits = policy.Choose(&view, ask, nil); fits {
		return Eviction{Helps: len(inNode) < len(proposed), Spared: uids(inNode)}, names(slots, fit)
	}

	var pods []occupant
	for _, h := range inNode {
		pods = append(pods, h.occupant(true))
	}
	victims, room, ok := makeRoom(slots, ask, pods)
	if !ok {
		for _, h := range n.pods {
			if h.observed && h.Priority < req.Priority && !slices.Contains(proposed, h.Pod.UID) {
				pods = append(pods, h.occupant(false))
			}
		}
		if victims, room, ok = makeRoom(slots, ask, pods); !ok {
			return Eviction{}, nil
		}
	}
	e := Eviction{Helps: true}
	for v := range pods {
		switch _, needed := slices.BinarySearch(victims, v); {
		case needed && !pods[v].proposed:
			e.Others = append(e.Others, Victim{UID: pods[v].uid, Priority: pods[v].priority})
		case !needed && pods[v].proposed:
			e.Spared = append(e.Spared, pods[v].uid)
		}
	}
	return e, names(slots, room)
}

// besidesUnits returns those of the proposed victims that kube-scheduler wants
// for something else than their units: it has gone through all of them, and
// would have spared one without which the sum over the node is enough. Where even
// all of them are not enough by the books, it counts otherwise than they, and
// nothing can be told.
func (n *node) besidesUnits(proposed []*holding, slots []place.Slot, need accel.Units) []*holding {
	var free accel.Units // as kubelet and kube-scheduler count: healthy devices, all pods
	for i := range slots {
		if !slots[i].Unhealthy {
			free += slots[i].Total
		}
		free -= n.slots[i].Free - slots[i].Free // kept for others
	}
	free -= n.used
	for _, h := range proposed {
		free += h.Units
	}
	if free < need {
		return nil
	}
	var out []*holding
	for _, h := range proposed {
		if free-h.Units >= need {
			out = append(out, h)
		}
	}
	return out
}

// MakesRoom reports whether the pod fits on the node as it is, or will once the
// pods of lower priority that are ending there are gone. Then nothing needs to be
// evicted for it anywhere.
func (l *Ledger) MakesRoom(req accel.Request, node string) bool {
	ask, policy, err := l.ask(req)
	if err != nil {
		return false
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.publishing(req.Resource, node)
	if n == nil {
		return false
	}
	slots := slices.Clone(l.slotsFor(n, &req))
	for _, h := range n.pods {
		if h.Ending && h.Priority < req.Priority {
			for _, p := range h.parts() {
				slots[p.slot].Free += p.units
			}
		}
	}
	_, _, fits := policy.Choose(&place.Node{Slots: slots, CPU: place.Unlimited, Memory: place.Unlimited}, &ask, nil)
	return fits
}

// publishing returns a node that publishes the resource, nil for any other.
func (l *Ledger) publishing(res accel.Resource, name string) *node {
	if n := l.books[res].node(name); n != nil && n.known {
		return n
	}
	return nil
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

func (h *holding) occupant(proposed bool) occupant {
	return occupant{uid: h.Pod.UID, priority: h.Priority, created: h.Created, ending: h.Ending, proposed: proposed, parts: h.parts()}
}

func uids(all []*holding) []string {
	var out []string
	for _, h := range all {
		out = append(out, h.Pod.UID)
	}
	return out
}

func names(slots []place.Slot, chosen []int) []accel.DeviceID {
	out := make([]accel.DeviceID, len(chosen))
	for i, s := range chosen {
		out[i] = slots[s].ID
	}
	return out
}
