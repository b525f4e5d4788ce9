package decision

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// BindTimeout bounds a bind. It is below the 10 s that Divvy has kube-scheduler wait for an
// extender, so that the scheduler hears what happened, and above the 5 s and more that a
// write takes in a slow control plane.
const BindTimeout = 9 * time.Second

// Bind gives the pod devices of the node and binds it there. Two calls for one pod must
// follow each other.
func (d *Decider) Bind(ctx context.Context, ref accel.PodRef, node string) error {
	pod, err := d.podToBind(ctx, ref, node)
	if err == nil {
		err = d.bindPod(ctx, pod, node)
	}
	if d.metrics.binds(pod.Requests, err); err == nil {
		d.attempts.forget(ref.UID)
	}
	return err
}

// podToBind returns the pod that is meant. The cluster state usually has
// it. Where the watch is behind, it is as the same caller showed it when it asked
// for a node. When there is neither, as for a pod that asks for nothing of ours, the
// API server is asked.
func (d *Decider) podToBind(ctx context.Context, ref accel.PodRef, node string) (cluster.Pod, error) {
	pod, known := d.config.Cluster.Pod(ref.Namespace, ref.Name)
	if !known || pod.Ref.UID != ref.UID {
		pod, known = d.attempts.pod(ref)
	}
	if !known {
		var err error
		if pod, err = d.config.Binder.Get(ctx, ref.Namespace, ref.Name); err != nil {
			return cluster.Pod{}, err
		}
	}
	if pod.Ref.UID != ref.UID {
		return cluster.Pod{}, fmt.Errorf("pod %s now has the UID %s, not %s: %w", pod.Ref, pod.Ref.UID, ref.UID, cluster.ErrPodGone)
	}
	if pod.Ended {
		return cluster.Pod{}, fmt.Errorf("pod %s has ended", pod.Ref)
	}
	if pod.Node != "" && pod.Node != node {
		return cluster.Pod{}, fmt.Errorf("pod %s is already bound to %s", pod.Ref, pod.Node)
	}
	return pod, nil
}

// bindPod reserves, binds, and takes the reservation back when that failed. A
// pod that is bound to the node already is left as it is.
func (d *Decider) bindPod(ctx context.Context, pod cluster.Pod, node string) error {
	if pod.Node == node {
		return nil
	}
	switch len(pod.Requests) {
	case 0:
		return d.config.Binder.Bind(ctx, pod.Ref, node, nil)
	case 1:
	default:
		// filter has rejected it already; this is for a caller that does not ask filter.
		return fmt.Errorf("pod %s: %s", pod.Ref, severalResources(pod.Requests))
	}
	if pod.Mistake != nil {
		return fmt.Errorf("pod %s: %s", pod.Ref, mistaken(pod.Mistake))
	}
	if onlyOne(d.config.Cluster, pod.Requests[0], node) {
		return fmt.Errorf("pod %s: node %s: %s", pod.Ref, node, reasonOf(d.config.Cluster, pod.Requests[0], accel.Unservable, node))
	}
	signer, err := d.config.Signer()
	if err != nil {
		return err
	}
	grant, undo, err := d.reserve(ctx, pod, node)
	if err != nil {
		return err
	}
	err = d.write(ctx, signer, pod.Ref, &grant)
	// If it is unknown whether the pod was bound, the device stays
	// reserved: the watch confirms it, or it expires.
	if err != nil && !errors.Is(err, cluster.ErrOutcomeUnknown) {
		undo()
	}
	return err
}

// write binds a pod with its grant.
func (d *Decider) write(ctx context.Context, signer *wire.Signer, pod accel.PodRef, grant *accel.Grant) error {
	value, err := signer.EncodeGrant(pod.UID, *grant)
	if err != nil {
		return fmt.Errorf("planned allocation of pod %s: %w", pod, err)
	}
	annotations := wire.LegacyAnnotations(*grant)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[wire.GrantAnnotation] = value
	if err := d.config.Binder.Bind(ctx, pod, grant.Node, annotations); err != nil {
		return err
	}
	d.config.Recorder.bound(pod, grant)
	klog.FromContext(ctx).Info("Bound", "pod", pod.String(), "node", grant.Node, "resource", grant.Resource,
		"device", grant.Device, "index", grant.Index, "devices", 1+len(grant.More), "units", grant.Units)
	return nil
}

// reserve takes a device for the pod. A reservation on another node can only
// be left from a bind whose outcome was not known; if the API server says that
// the pod is not bound, that reservation holds nothing and goes.
func (d *Decider) reserve(ctx context.Context, pod cluster.Pod, node string) (accel.Grant, func(), error) {
	grant, undo, err := d.config.Ledger.Reserve(pod.Ref, pod.Created, node, pod.Requests[0])
	if !errors.Is(err, ledger.ErrHeldElsewhere) {
		return grant, undo, err
	}
	now, getErr := d.config.Binder.Get(ctx, pod.Ref.Namespace, pod.Ref.Name)
	switch {
	case getErr != nil:
		return accel.Grant{}, nil, fmt.Errorf("%w; then %w", err, getErr)
	case now.Ref.UID != pod.Ref.UID:
		return accel.Grant{}, nil, fmt.Errorf("pod %s was replaced by another pod: %w", pod.Ref, cluster.ErrPodGone)
	case now.Node != "":
		return accel.Grant{}, nil, fmt.Errorf("pod %s is already bound to %s: %w", pod.Ref, now.Node, err)
	}
	d.config.Ledger.Forget(pod.Ref.UID)
	return d.config.Ledger.Reserve(pod.Ref, pod.Created, node, pod.Requests[0])
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
