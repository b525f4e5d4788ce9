package decision

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// catchUp is how long preempt waits before each further look for pods to evict. While
// it waits, kube-scheduler places no pod, so it does that catchUpsAtOnce times at once
// and then every catchUpEvery at most.
var catchUp = []time.Duration{5 * time.Millisecond, 15 * time.Millisecond, 30 * time.Millisecond, 50 * time.Millisecond}

const (
	catchUpEvery   = time.Second
	catchUpsAtOnce = 5
)

// Proposal is what kube-scheduler would evict from a node.
type Proposal struct {
	ledger.Proposal
	// Violations of disruption budgets there would be; which of the victims they
	// are of is not told.
	Violations int64
}

// Preempt answers which of the proposed evictions would let the pod run. It
// evicts nothing itself.
//
// kube-scheduler finds its victims without asking extenders
// (kubernetes/kubernetes#139270), by the sum over a node's devices. So among them
// may be pods whose eviction leaves no device with enough room. Where the sum is
// enough it proposes none: versions up to 1.37 do not ask about such a node, later ones
// do, with an empty list (kubernetes/kubernetes#135486). It accepts fewer nodes
// than it proposed and, on those, any pods that it knows there; a node whose victims
// were all taken away fails the whole preemption, so such a node is left out.
func (d *Decider) Preempt(ctx context.Context, q *Question, proposals []Proposal) []Proposal {
	requests, mistake := kube.RequestsOf(q.Pod, d.config.Resources)
	kept := proposals
	switch {
	case len(requests) == 0:
		// Whatever it waits for is nothing of ours.
	case len(requests) > 1 || mistake != nil:
		kept = nil // Filter rejects it everywhere
	case d.roomIsComing(q.Pod, requests[0]):
		kept = nil
	default:
		kept = d.evictAfterWatch(ctx, q, proposals, requests[0])
	}
	counted := d.metrics.of(requests)
	if len(kept) > 0 {
		counted.evicts.Inc()
	} else {
		counted.spares.Inc()
	}
	klog.FromContext(ctx).Info("Selected pods to evict", "pod", klog.KObj(q.Pod), "proposed", describe(proposals),
		"answered", describe(kept))
	return kept
}

// evictAfterWatch is evict, and where nothing makes room it gives the watch a moment
// to show what kube-scheduler may have seen already: it asks when a pod ends, often
// within a millisecond, and after an answer without a node not again for up to five
// minutes. Waking the pod does not help then, unlike where filter rejected it, since
// kube-scheduler's own sum was too small and only an end of a pod makes it look again.
// One such moment is enough for all pods that are asked about in it.
func (d *Decider) evictAfterWatch(ctx context.Context, q *Question, proposals []Proposal, request accel.Request) []Proposal {
	kept := d.evict(proposals, request)
	if len(kept) > 0 || len(proposals) == 0 || !q.Believed || !d.catchUps.AllowN(d.config.Now(), 1) {
		return kept
	}
	for _, pause := range catchUp {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if kept = d.evict(proposals, request); len(kept) > 0 {
			break
		}
	}
	return kept
}

// evict asks the ledger. A pod that was not proposed may be under a disruption
// budget, as kube-scheduler spares those first, so it counts as violating one; of
// the others at most as many do as were told.
func (d *Decider) evict(proposed []Proposal, request accel.Request) []Proposal {
	// Room is kept on every node that the ledger answers, so it is not asked about
	// those that cannot serve the pod at all.
	able := slices.DeleteFunc(slices.Clone(proposed), func(p Proposal) bool { return onlyOne(d.config.Cluster, request, p.Node) })
	proposals := make([]ledger.Proposal, len(able))
	for i, p := range able {
		proposals[i] = p.Proposal
	}
	var kept []Proposal
	for i, eviction := range d.config.Ledger.Evict(request, proposals) {
		if len(eviction.Victims) == 0 {
			continue
		}
		of := int64(len(eviction.Victims) - eviction.Others)
		kept = append(kept, Proposal{
			Proposal:   ledger.Proposal{Node: proposals[i].Node, Victims: eviction.Victims},
			Violations: min(able[i].Violations, of) + int64(eviction.Others),
		})
	}
	return kept
}

// roomIsComing reports whether the pod needs no eviction any more: it is
// nominated to a node that was rejected a moment ago, because the watch had not
// shown yet that its victims are gone, or because they are still going. A node
// that kube-scheduler itself finds unfit by now was not asked about, and does not
// count.
func (d *Decider) roomIsComing(pod *v1.Pod, request accel.Request) bool {
	node := pod.Status.NominatedNodeName
	return node != "" && d.nominated.take(string(pod.UID)) == node && d.config.Ledger.MakesRoom(request, node, nil)
}

// noteNominated remembers that Filter rejected for a pod the node to which it is
// nominated; see roomIsComing.
func (d *Decider) noteNominated(q *Question, a *Answer, asked bool) {
	node := q.Pod.Status.NominatedNodeName
	if node == "" || !q.Believed {
		return
	}
	i := slices.Index(q.Nodes, node)
	if asked && i >= 0 && a.verdicts[i].Code == accel.NoDeviceFits {
		d.nominated.put(string(q.Pod.UID), node)
	} else {
		d.nominated.take(string(q.Pod.UID))
	}
}

// maxNominated bounds what is remembered of nominated pods between two requests.
const maxNominated = 10_000

// nominatedNodes are the nominated nodes that Filter rejected, by the pod's UID.
type nominatedNodes struct {
	mu    sync.Mutex
	nodes map[string]string
}

func (n *nominatedNodes) put(pod, node string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.nodes == nil || len(n.nodes) >= maxNominated {
		n.nodes = map[string]string{}
	}
	n.nodes[pod] = node
}

// take returns the node, "" for none, and forgets it.
func (n *nominatedNodes) take(pod string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	node := n.nodes[pod]
	delete(n.nodes, pod)
	return node
}

// describe is what the log says of proposals: the number of victims by node, of
// the first few.
func describe(proposals []Proposal) string {
	const most = 10
	var b []byte
	for i, p := range proposals {
		if i == most {
			return fmt.Sprintf("%s and %d more nodes", b, len(proposals)-most)
		}
		if i > 0 {
			b = append(b, ", "...)
		}
		b = fmt.Appendf(b, "%s: %d", p.Node, len(p.Victims))
	}
	return string(b)
}
