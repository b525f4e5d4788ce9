package extender

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

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

	pod, err := e.podToBind(ctx, args)
	if err == nil {
		err = e.bindPod(ctx, pod, args.Node)
	}
	counted := e.metrics.of(pod.Requests)
	if err != nil {
		counted.failed.Inc()
		e.metrics.bindErrors.WithLabelValues(bindCause(err)).Inc()
		return nil, err
	}
	counted.bound.Inc()
	e.attempts.forget(args.PodUID)
	return appendError(out, ""), nil
}

// Quiesce returns when no bind is under way, or when the context ends. It is for a
// replica that answers no more binds: one that comes in the meantime may begin after
// that, and needs the Lease then.
func (e *Extender) Quiesce(ctx context.Context) { e.binds.wait(ctx) }

// podToBind returns the pod that the arguments mean. The cluster state usually has
// it. Where the watch is behind, it is as the same caller showed it when it asked
// for a node. When there is neither, as for a pod that asks for nothing of ours, the
// API server is asked.
func (e *Extender) podToBind(ctx context.Context, args bindArgs) (cluster.Pod, error) {
	pod, known := e.config.Cluster.Pod(args.PodNamespace, args.PodName)
	if !known || pod.Ref.UID != args.PodUID {
		pod, known = e.attempts.pod(accel.PodRef{UID: args.PodUID, Namespace: args.PodNamespace, Name: args.PodName})
	}
	if !known {
		var err error
		if pod, err = e.config.Binder.Get(ctx, args.PodNamespace, args.PodName); err != nil {
			return cluster.Pod{}, err
		}
	}
	if pod.Ref.UID != args.PodUID {
		return cluster.Pod{}, fmt.Errorf("pod %s now has the UID %s, not %s: %w", pod.Ref, pod.Ref.UID, args.PodUID, cluster.ErrPodGone)
	}
	if pod.Ended {
		return cluster.Pod{}, fmt.Errorf("pod %s has ended", pod.Ref)
	}
	if pod.Node != "" && pod.Node != args.Node {
		return cluster.Pod{}, fmt.Errorf("pod %s is already bound to %s", pod.Ref, pod.Node)
	}
	return pod, nil
}

// bindPod reserves, binds, and takes the reservation back when that failed. A
// pod that is bound to the node already is left as it is.
func (e *Extender) bindPod(ctx context.Context, pod cluster.Pod, node string) error {
	if pod.Node == node {
		return nil
	}
	switch len(pod.Requests) {
	case 0:
		return e.config.Binder.Bind(ctx, pod.Ref, node, nil)
	case 1:
	default:
		// filter has rejected it already; this is for a caller that does not ask filter.
		return fmt.Errorf("pod %s: %s", pod.Ref, severalResources(pod.Requests))
	}
	if pod.Mistake != nil {
		return fmt.Errorf("pod %s: %s", pod.Ref, mistaken(pod.Mistake))
	}
	if onlyOne(e.config.Cluster, pod.Requests[0], node) {
		return fmt.Errorf("pod %s: node %s: %s", pod.Ref, node, reasonOf(e.config.Cluster, pod.Requests[0], accel.Unservable, node))
	}
	signer, err := e.config.Signer()
	if err != nil {
		return err
	}
	grant, undo, err := e.reserve(ctx, pod, node)
	if err != nil {
		return err
	}
	value, err := signer.EncodeGrant(pod.Ref.UID, grant)
	if err != nil {
		undo()
		return fmt.Errorf("planned allocation of pod %s: %w", pod.Ref, err)
	}
	annotations := wire.LegacyAnnotations(grant)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[wire.GrantAnnotation] = value

	if err := e.config.Binder.Bind(ctx, pod.Ref, node, annotations); err != nil {
		// If it is unknown whether the pod was bound, the device stays
		// reserved: the watch confirms it, or it expires.
		if !errors.Is(err, cluster.ErrOutcomeUnknown) {
			undo()
		}
		return err
	}
	klog.FromContext(ctx).Info("Bound", "pod", pod.Ref.String(), "node", node, "resource", grant.Resource,
		"device", grant.Device, "index", grant.Index, "devices", 1+len(grant.More), "units", grant.Units)
	return nil
}

// reserve takes a device for the pod. A reservation on another node can only
// be left from a bind whose outcome was not known; if the API server says that
// the pod is not bound, that reservation holds nothing and goes.
func (e *Extender) reserve(ctx context.Context, pod cluster.Pod, node string) (accel.Grant, func(), error) {
	grant, undo, err := e.config.Ledger.Reserve(pod.Ref, pod.Created, node, pod.Requests[0])
	if !errors.Is(err, ledger.ErrHeldElsewhere) {
		return grant, undo, err
	}
	now, getErr := e.config.Binder.Get(ctx, pod.Ref.Namespace, pod.Ref.Name)
	switch {
	case getErr != nil:
		return accel.Grant{}, nil, fmt.Errorf("%w; then %w", err, getErr)
	case now.Ref.UID != pod.Ref.UID:
		return accel.Grant{}, nil, fmt.Errorf("pod %s was replaced by another pod: %w", pod.Ref, cluster.ErrPodGone)
	case now.Node != "":
		return accel.Grant{}, nil, fmt.Errorf("pod %s is already bound to %s: %w", pod.Ref, now.Node, err)
	}
	e.config.Ledger.Forget(pod.Ref.UID)
	return e.config.Ledger.Reserve(pod.Ref, pod.Created, node, pod.Requests[0])
}

// bindCauses are the labels of failed binds in the metrics; the first that an
// error is counts.
var bindCauses = []struct {
	err   error
	label string
}{
	{accel.ErrNoFit, "noFit"},
	{ledger.ErrNodeUnknown, "nodeUnknown"},
	{cluster.ErrPodGone, "podGone"},
	{cluster.ErrOutcomeUnknown, "outcomeUnknown"},
	{ledger.ErrHeldElsewhere, "heldElsewhere"},
}

// otherCause is the label of all others.
const otherCause = "other"

func bindCause(err error) string {
	for _, cause := range bindCauses {
		if errors.Is(err, cause.err) {
			return cause.label
		}
	}
	return otherCause
}
