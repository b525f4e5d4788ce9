package extender

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// maxVictims bounds the pods of one node; kubelet runs 110 unless told otherwise.
const maxVictims = 10_000

// preemptArgs is an ExtenderPreemptionArgs.
type preemptArgs struct {
	pod *v1.Pod
	// proposals are in the order of the nodes' names.
	proposals []decision.Proposal
}

// preempt answers which of the proposed evictions would let the pod run.
func (e *Extender) preempt(ctx context.Context, body, out []byte) ([]byte, error) {
	if err := e.replica.ready(); err != nil {
		return nil, err
	}
	args, err := decodePreemptArgs(body)
	if err != nil {
		return nil, err
	}
	kept := e.decider.Preempt(ctx, &decision.Question{Pod: args.pod, Believed: mayBind(ctx)}, args.proposals)
	return appendPreemptResult(out, kept), nil
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

func proposalsOf[P any](nodes map[string]*victims[P], uid func(P) string) ([]decision.Proposal, error) {
	if len(nodes) > maxNodes {
		return nil, &limitError{"nodes", maxNodes}
	}
	out := make([]decision.Proposal, 0, len(nodes))
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
		out = append(out, decision.Proposal{Proposal: ledger.Proposal{Node: node, Victims: distinct(uids)},
			Violations: max(of.NumPDBViolations, 0)})
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

func appendPreemptResult(b []byte, kept []decision.Proposal) []byte {
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
		b = strconv.AppendInt(b, p.Violations, 10)
		b = append(b, '}')
	}
	return append(b, "}}"...)
}
