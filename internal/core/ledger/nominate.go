package ledger

import (
	"cmp"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// planTTL is how long room is kept for a pod whose preemption was planned and
// that is not seen nominated. kube-scheduler writes the nomination in the same
// moment in which it has the victims deleted, so this is only for the watch to
// bring it; a node that kube-scheduler did not choose is free again after it.
// It is also how long the bind of a pod is expected that the watch has not shown.
const planTTL = 5 * time.Second

// A nomination reserves capacity on a node for a pod that is not bound, against pods of
// lower priority.
type nomination struct {
	pod      string // UID
	node     string
	request  accel.Request
	priority int32
	// seq is the order of nominations: of two pods of one priority the one that
	// was nominated first does not see the other.
	seq uint64
	// devices are those on which room was planned; nil where nothing is known of
	// a plan, as after a restart.
	devices []accel.DeviceID
	// until is when a plan ends that did not become a nomination; zero for what
	// the API server says.
	until time.Time
}

// nominations are all of them, twice: by the pod's UID, and by resource and node.
type nominations struct {
	pods  map[string][]*nomination
	nodes map[accel.Resource]map[string][]*nomination
	seq   uint64
}

func newNominations() nominations {
	return nominations{pods: map[string][]*nomination{}, nodes: map[accel.Resource]map[string][]*nomination{}}
}

func (ns *nominations) add(n *nomination) {
	ns.seq++
	n.seq = ns.seq
	ns.pods[n.pod] = append(ns.pods[n.pod], n)
	of := ns.nodes[n.request.Resource]
	if of == nil {
		of = map[string][]*nomination{}
		ns.nodes[n.request.Resource] = of
	}
	of[n.node] = append(of[n.node], n)
}

// drop takes out those of a pod that the function names.
func (ns *nominations) drop(pod string, which func(*nomination) bool) {
	all := ns.pods[pod]
	if len(all) == 0 {
		return
	}
	keep := slices.DeleteFunc(slices.Clone(all), which)
	for _, n := range all {
		if slices.Contains(keep, n) {
			continue
		}
		of := ns.nodes[n.request.Resource]
		of[n.node] = slices.DeleteFunc(of[n.node], func(o *nomination) bool { return o == n })
		if len(of[n.node]) == 0 {
			delete(of, n.node)
		}
		if len(of) == 0 {
			delete(ns.nodes, n.request.Resource)
		}
	}
	if ns.pods[pod] = keep; len(keep) == 0 {
		delete(ns.pods, pod)
	}
}

// Nominate says that kube-scheduler wants to put a pod on a node once there is
// room, as the pod's status tells; an empty node says that it does not any more.
// Until then, or until the pod is observed or forgotten, room for it on the node
// is not there for pods of lower priority, nor for those of the same priority
// that were not nominated before it. It is kept on the devices that Evict planned
// for the pod, or else on those that have the room once pods that are ending are
// gone.
func (l *Ledger) Nominate(podUID, node string, req accel.Request) {
	if podUID == "" {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	ns := &l.state.nominations
	var devices []accel.DeviceID
	for _, n := range ns.pods[podUID] {
		if n.node == node && n.request.Resource == req.Resource {
			if n.until.IsZero() {
				return // nothing new
			}
			devices = n.devices
		}
	}
	ns.drop(podUID, func(n *nomination) bool {
		// Plans outlive the news of no nomination, which may be older than they.
		return node != "" || n.until.IsZero()
	})
	if node == "" || req.Peak() <= 0 {
		return
	}
	ns.add(&nomination{pod: podUID, node: node, request: req, priority: req.Priority, devices: devices})
}

// confirmed reports whether the API server has shown the pod nominated for the node.
func (ns *nominations) confirmed(podUID, node string) bool {
	return slices.ContainsFunc(ns.pods[podUID], func(n *nomination) bool { return n.node == node && n.until.IsZero() })
}

// plan reserves capacity for a pod until then, see planTTL.
func (ns *nominations) plan(podUID, node string, req accel.Request, devices []accel.DeviceID, until time.Time) {
	if podUID == "" {
		return
	}
	for _, n := range ns.pods[podUID] {
		if n.node == node && n.request.Resource == req.Resource {
			n.devices = devices
			if !n.until.IsZero() {
				n.until = until
			}
			return
		}
	}
	ns.add(&nomination{pod: podUID, node: node, request: req, priority: req.Priority, devices: devices, until: until})
}

// expire drops plans that came to nothing.
func (ns *nominations) expire(now time.Time) {
	for pod := range ns.pods {
		ns.drop(pod, func(n *nomination) bool { return !n.until.IsZero() && !now.Before(n.until) })
	}
}

// slotsFor returns the node's slots as they are for a request: without the capacity
// that is kept for others, and with what is reserved for the pod itself, which does
// not compete with its own reservation. Where there is neither, they are the node's
// own, and must not be changed.
func (s *state) slotsFor(n *node, req *accel.Request) []place.Slot {
	return s.slotsOf(n, n.slots, req, nil)
}

// slotsOf is slotsFor with other slots of the node than its own, and without what is kept for
// pods that come besides.
func (s *state) slotsOf(n *node, slots []place.Slot, req *accel.Request, besides []accel.Request) []place.Slot {
	if h := s.pods.reserved(req.Pod, req.Resource); h != nil && h.on.node == n {
		slots = slices.Clone(slots)
		h.release(slots)
	}
	kept := s.nominations.nodes[req.Resource][n.host.name]
	if len(kept) == 0 {
		return slots
	}
	var own uint64
	for _, k := range kept {
		if k.pod == req.Pod {
			own = k.seq
		}
	}
	var counts []*nomination
	var now time.Time
	for _, k := range kept {
		before := own == 0 || k.seq < own
		if k.pod == req.Pod || k.priority < req.Priority || k.priority == req.Priority && !before {
			continue
		}
		if s.pods.on(k.pod, req.Resource) != nil {
			continue // it has its capacity
		}
		if slices.ContainsFunc(besides, func(r accel.Request) bool { return r.Pod == k.pod }) {
			continue
		}
		if !k.until.IsZero() {
			if now.IsZero() {
				now = s.rules.now()
			}
			if !now.Before(k.until) {
				continue
			}
		}
		counts = append(counts, k)
	}
	if len(counts) == 0 {
		return slots
	}
	slices.SortFunc(counts, func(a, b *nomination) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), cmp.Compare(a.seq, b.seq))
	})
	slots = slices.Clone(slots)
	for _, k := range counts {
		ask, policy, err := s.rules.ask(k.request)
		if err != nil {
			continue
		}
		for _, i := range k.slots(n, slots, &ask, policy) {
			slots[i].Free -= ask.Units
		}
	}
	return slots
}

// slots returns the slots on which a nomination reserves capacity: as planned, or
// those that have it now, or that will once pods that are ending are gone.
func (k *nomination) slots(n *node, slots []place.Slot, ask *place.Ask, policy place.Policy) []int {
	if len(k.devices) == ask.Devices {
		planned := make([]int, 0, len(k.devices))
		for _, d := range k.devices {
			i := n.find(d)
			if i < 0 || slots[i].Unhealthy || slots[i].Total < ask.Units || !ask.Only.Isolates(slots[i].Tier) {
				break
			}
			planned = append(planned, i)
		}
		if len(planned) == ask.Devices {
			return planned
		}
	}
	view := place.Node{Slots: slots, CPU: place.Unlimited, Memory: place.Unlimited}
	if chosen, _, ok := policy.Choose(&view, ask, nil); ok {
		return chosen
	}
	view.Slots = slices.Clone(slots)
	for _, h := range n.pods {
		if h.Ending {
			h.release(view.Slots)
		}
	}
	chosen, _, _ := policy.Choose(&view, ask, nil)
	return chosen
}
