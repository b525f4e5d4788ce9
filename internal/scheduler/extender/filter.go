package extender

import (
	"context"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// filter answers which of the nodes have a device with room for the pod, or which of
// them is the best.
func (e *Extender) filter(ctx context.Context, body, out []byte) ([]byte, error) {
	args, question, err := e.question(ctx, body)
	if err != nil {
		return nil, err
	}
	answer := takeAnswer()
	defer giveBack(answer)
	e.decider.Filter(ctx, &question, answer)
	return appendFilterResult(out, args, answer), nil
}

// prioritize rates the nodes from 0 to 10.
func (e *Extender) prioritize(ctx context.Context, body, out []byte) ([]byte, error) {
	_, question, err := e.question(ctx, body)
	if err != nil {
		return nil, err
	}
	answer := takeAnswer()
	defer giveBack(answer)
	return appendPriorities(out, question.Nodes, e.decider.Rate(&question, answer)), nil
}

// question decodes what is asked.
func (e *Extender) question(ctx context.Context, body []byte) (filterArgs, decision.Question, error) {
	if err := e.replica.ready(); err != nil {
		return filterArgs{}, decision.Question{}, err
	}
	args, err := decodeFilterArgs(body)
	return args, decision.Question{Pod: args.pod, Nodes: args.names, Prefers: args.prefers, Believed: mayBind(ctx)}, err
}

// bind gives the pod a device of the node and binds it there.
func (e *Extender) bind(ctx context.Context, body, out []byte) ([]byte, error) {
	if err := e.replica.ready(); err != nil {
		return nil, err
	}
	args, err := decodeBindArgs(body)
	if err != nil {
		return nil, err
	}
	// kube-scheduler that no longer waits is no reason to leave the pod half
	// way: the bind goes on, for a bounded time.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.config.BindTimeout)
	defer cancel()
	unlock, err := e.binds.lock(ctx, args.PodUID)
	if err != nil {
		return nil, fmt.Errorf("another bind of pod %s/%s is in progress: %w", args.PodNamespace, args.PodName, err)
	}
	defer unlock()
	ctx, done, err := e.replica.lead(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	pod := accel.PodRef{UID: args.PodUID, Namespace: args.PodNamespace, Name: args.PodName}
	if err := e.decider.Bind(ctx, pod, args.Node); err != nil {
		return nil, err
	}
	return appendError(out, ""), nil
}

// Quiesce returns when no bind is under way, or when the context ends. It is for a
// replica that answers no more binds: one that comes in the meantime may begin after
// that, and needs the Lease then.
func (e *Extender) Quiesce(ctx context.Context) { e.binds.wait(ctx) }
