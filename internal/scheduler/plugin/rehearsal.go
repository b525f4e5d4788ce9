package plugin

import (
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// rehearsed is what one attempt for a pod of a group leaves out. To find victims for a group,
// kube-scheduler takes all pods of lower priority out of its view of the nodes, tries the whole
// group with all of PreFilter, Filter and Reserve, and then puts the pods back one by one, while it
// filters the node of each pod of the group. The ledger knows none of that.
type rehearsed struct {
	// away are UIDs of pods that hold something, by node.
	away map[string][]string
	// node is where the pod was placed.
	node string
}

// rehearses compares what the ledger counts with what kube-scheduler shows of the nodes. It
// returns nil where nothing is tried out. A pod that is missing since it is gone is not shown by
// kube-scheduler's informers either; one that was taken out is.
func (p *Plugin) rehearses(c *decision.Cycle, nodes []fwk.NodeInfo) *rehearsed {
	occupants := c.Occupants()
	r := &rehearsed{away: map[string][]string{}}
	tried := false
	for _, info := range nodes {
		node := info.Node().Name
		if len(occupants[node]) == 0 {
			continue
		}
		there := podsOf(info)
		for _, ref := range occupants[node] {
			if there.Has(ref.UID) {
				continue
			}
			r.away[node] = append(r.away[node], ref.UID)
			pod, err := p.pods.Pods(ref.Namespace).Get(ref.Name)
			tried = tried || err == nil && string(pod.UID) == ref.UID && pod.Spec.NodeName == node
		}
	}
	if !tried {
		return nil
	}
	return r
}

// putBack is for a pod that was taken out. If the node that was chosen has changed since, Filter
// would reject it whatever is put back, and all pods would be evicted: the attempt ends with an
// error instead, and is repeated.
func (r *rehearsed) putBack(c *decision.Cycle, pod *v1.Pod) *fwk.Status {
	if r.node != "" && !c.Current(r.node) {
		return fwk.AsStatus(fmt.Errorf("the devices of node %s changed while victims were searched", r.node))
	}
	node := pod.Spec.NodeName
	if i := slices.Index(r.away[node], string(pod.UID)); i >= 0 {
		r.away[node] = slices.Delete(slices.Clone(r.away[node]), i, i+1)
	}
	return nil
}

// remove takes a pod out again.
func (r *rehearsed) remove(pod *v1.Pod) {
	r.away[pod.Spec.NodeName] = append(slices.Clone(r.away[pod.Spec.NodeName]), string(pod.UID))
}

// rehearsal are the pods of a group that is tried out, in the order in which they were placed. One
// group is at a time. It is safe for concurrent use.
type rehearsal struct {
	mu     sync.Mutex
	placed []rehearsedPod
}

type rehearsedPod struct {
	node    string
	request accel.Request
}

func (r *rehearsal) place(node string, request accel.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.placed = append(r.placed, rehearsedPod{node, request})
}

func (r *rehearsal) undo(podUID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.placed = slices.DeleteFunc(r.placed, func(p rehearsedPod) bool { return p.request.Pod == podUID })
}

// on are the requests on a node.
func (r *rehearsal) on(node string) (requests []accel.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.placed {
		if p.node == node {
			requests = append(requests, p.request)
		}
	}
	return requests
}
