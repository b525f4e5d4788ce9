package extender

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
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

// maxVictims bounds the pods of one node; kubelet runs 110 unless told otherwise.
const maxVictims = 10_000

// preemptArgs is an ExtenderPreemptionArgs.
type preemptArgs struct {
	pod *v1.Pod
	// proposals are in the order of the nodes' names.
	proposals []proposal
}

// proposal is what kube-scheduler would evict from a node.
type proposal struct {
	ledger.Proposal
	// violations of disruption budgets there would be; which of the victims they
	// are of is not told.
	violations int64
}

// preempt answers which of the proposed evictions would let the pod run. It
// evicts nothing itself.
//
// kube-scheduler finds its victims without asking extenders
// (kubernetes/kubernetes#139270), by the sum over a node's devices. So among them
// may be pods whose eviction leaves no device with enough room. Where the sum is
// enough it proposes none: versions up to 1.37 do not ask about such a node, later ones
// do, with an empty list (kubernetes/kubernetes#135486). It accepts fewer nodes
// than it proposed and, on those, any pods that it knows there; a node whose victims
// were all taken away fails the whole preemption, so such a node is left out.
func (e *Extender) preempt(ctx context.Context, body, out []byte) ([]byte, error) {
	if err := e.replica.ready(); err != nil {
		return nil, err
	}
	args, err := decodePreemptArgs(body)
	if err != nil {
		return nil, err
	}
	requests, mistake := kube.RequestsOf(args.pod, e.config.Resources)
	kept := args.proposals
	switch {
	case len(requests) == 0:
		// Whatever it waits for is nothing of ours.
	case len(requests) > 1 || mistake != nil:
		kept = nil // filter rejects it everywhere
	case e.roomIsComing(args.pod, requests[0]):
		kept = nil
	default:
		kept = e.evictAfterWatch(ctx, args, requests[0])
	}
	counted := e.metrics.of(requests)
	if len(kept) > 0 {
		counted.evicts.Inc()
	} else {
		counted.spares.Inc()
	}
	klog.FromContext(ctx).Info("Selected pods to evict", "pod", klog.KObj(args.pod), "proposed", describe(args.proposals),
		"answered", describe(kept))
	return appendPreemptResult(out, kept), nil
}

// evictAfterWatch is evict, and where nothing makes room it gives the watch a moment
// to show what kube-scheduler may have seen already: it asks when a pod ends, often
// within a millisecond, and after an answer without a node not again for up to five
// minutes. Waking the pod does not help then, unlike where filter rejected it, since
// kube-scheduler's own sum was too small and only an end of a pod makes it look again.
// One such moment is enough for all pods that are asked about in it.
func (e *Extender) evictAfterWatch(ctx context.Context, args preemptArgs, request accel.Request) []proposal {
	kept := e.evict(args, request)
	if len(kept) > 0 || len(args.proposals) == 0 || !mayBind(ctx) || !e.catchUps.AllowN(e.config.Now(), 1) {
		return kept
	}
	for _, pause := range catchUp {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		if kept = e.evict(args, request); len(kept) > 0 {
			break
		}
	}
	return kept
}

// evict asks the ledger. A pod that was not proposed may be under a disruption
// budget, as kube-scheduler spares those first, so it counts as violating one; of
// the others at most as many do as were told.
func (e *Extender) evict(args preemptArgs, request accel.Request) []proposal {
	// Room is kept on every node that the ledger answers, so it is not asked about
	// those that cannot serve the pod at all.
	able := slices.DeleteFunc(slices.Clone(args.proposals), func(p proposal) bool { return onlyOne(e.config.Cluster, request, p.Node) })
	proposals := make([]ledger.Proposal, len(able))
	for i, p := range able {
		proposals[i] = p.Proposal
	}
	var kept []proposal
	for i, eviction := range e.config.Ledger.Evict(request, proposals) {
		if len(eviction.Victims) == 0 {
			continue
		}
		of := int64(len(eviction.Victims) - eviction.Others)
		kept = append(kept, proposal{
			Proposal:   ledger.Proposal{Node: proposals[i].Node, Victims: eviction.Victims},
			violations: min(able[i].violations, of) + int64(eviction.Others),
		})
	}
	return kept
}

// roomIsComing reports whether the pod needs no eviction any more: it is
// nominated to a node that was rejected a moment ago, because the watch had not
// shown yet that its victims are gone, or because they are still going. A node
// that kube-scheduler itself finds unfit by now was not asked about, and does not
// count.
func (e *Extender) roomIsComing(pod *v1.Pod, request accel.Request) bool {
	node := pod.Status.NominatedNodeName
	return node != "" && e.nominated.take(string(pod.UID)) == node && e.config.Ledger.MakesRoom(request, node)
}

// noteNominated remembers that filter rejected for a pod the node to which it is
// nominated; see roomIsComing. Only who may bind is believed.
func (e *Extender) noteNominated(ctx context.Context, args filterArgs, verdicts []ledger.Verdict) {
	node := args.pod.Status.NominatedNodeName
	if node == "" || !mayBind(ctx) {
		return
	}
	i := slices.Index(args.names, node)
	if i >= 0 && i < len(verdicts) && verdicts[i].Code == accel.NoDeviceFits {
		e.nominated.put(string(args.pod.UID), node)
	} else {
		e.nominated.take(string(args.pod.UID))
	}
}

// maxNominated bounds what is remembered of nominated pods between two requests.
const maxNominated = 10_000

// nominatedNodes are the nominated nodes that filter rejected, by the pod's UID.
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
func describe(proposals []proposal) string {
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

// decodePreemptArgs reads an ExtenderPreemptionArgs. kube-scheduler names the
// victims by their UIDs with nodeCacheCapable, and sends whole pods without.
func decodePreemptArgs(body []byte) (preemptArgs, error) {
	var raw struct {
		Pod                   json.RawMessage
		NodeNameToVictims     map[string]*victims[wholePod]
		NodeNameToMetaVictims map[string]*victims[metaPod]
	}
	if err := decodeObject(body, &raw); err != nil {
		return preemptArgs{}, err
	}
	pod, err := decodePod(raw.Pod)
	if err != nil {
		return preemptArgs{}, err
	}
	args := preemptArgs{pod: pod.object()}
	switch {
	case raw.NodeNameToMetaVictims != nil:
		args.proposals, err = proposalsOf(raw.NodeNameToMetaVictims, func(p metaPod) string { return p.UID })
	case raw.NodeNameToVictims != nil:
		args.proposals, err = proposalsOf(raw.NodeNameToVictims, func(p wholePod) string { return p.Metadata.UID })
	default:
		err = errors.New("the request names no victims: neither NodeNameToMetaVictims nor NodeNameToVictims is set")
	}
	return args, err
}

type (
	metaPod  struct{ UID string }
	wholePod struct{ Metadata struct{ UID string } }
)

// victims are those of one node; P is the form in which pods are told.
type victims[P any] struct {
	Pods             victimList[P]
	NumPDBViolations int64
}

func proposalsOf[P any](nodes map[string]*victims[P], uid func(P) string) ([]proposal, error) {
	if len(nodes) > maxNodes {
		return nil, &limitError{"nodes", maxNodes}
	}
	out := make([]proposal, 0, len(nodes))
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		of := nodes[node]
		if of == nil {
			return nil, fmt.Errorf("node %q has no list of victims", node)
		}
		uids := make([]string, len(of.Pods))
		for i, p := range of.Pods {
			if uids[i] = uid(p); uids[i] == "" {
				return nil, fmt.Errorf("victim %d on node %q has no UID", i, node)
			}
		}
		out = append(out, proposal{ledger.Proposal{Node: node, Victims: distinct(uids)}, max(of.NumPDBViolations, 0)})
	}
	return out, nil
}

type victimList[P any] []P

// UnmarshalJSON reads at most maxVictims pods.
func (l *victimList[P]) UnmarshalJSON(data []byte) (err error) {
	*l, err = decodeList(*l, data, "victims on one node", maxVictims)
	return err
}

// distinct returns each once, in the order of the first.
func distinct(uids []string) []string {
	seen := make(map[string]bool, len(uids))
	return slices.DeleteFunc(uids, func(uid string) bool {
		before := seen[uid]
		seen[uid] = true
		return before
	})
}

func appendPreemptResult(b []byte, kept []proposal) []byte {
	b = append(b, `{"NodeNameToMetaVictims":{`...)
	for i, p := range kept {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, p.Node)
		b = append(b, `:{"Pods":[`...)
		for j, uid := range p.Victims {
			if j > 0 {
				b = append(b, ',')
			}
			b = append(b, `{"UID":`...)
			b = appendString(b, uid)
			b = append(b, '}')
		}
		b = append(b, `],"NumPDBViolations":`...)
		b = strconv.AppendInt(b, p.violations, 10)
		b = append(b, '}')
	}
	return append(b, "}}"...)
}
