package agent

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// renewAfter is how old the attestation that a node has published may become before a newer one
// is written: the second pass does, and leaves one more to be late until
// accel.MaxAttestationAge.
const renewAfter = 20 * time.Second

// steady keeps the times of attestations that were published less than renewAfter before those
// of the inventory, if nothing of the isolation of any device has changed: each attestation would be
// a write of the node otherwise. before returns what was published.
func steady(in *accel.Inventory, before func() (accel.Inventory, bool)) {
	if !slices.ContainsFunc(in.Shares, func(s accel.Share) bool { return !s.Isolation.Attested.IsZero() }) {
		return
	}
	published, ok := before()
	if !ok {
		return
	}
	kept := slices.Clone(in.Shares)
	for i := range kept {
		now := &kept[i].Isolation
		at := slices.IndexFunc(published.Shares, func(s accel.Share) bool { return s.ID == kept[i].ID })
		if at < 0 {
			return
		}
		before := published.Shares[at].Isolation
		same := *now
		same.Attested = before.Attested
		if age := now.Attested.Sub(before.Attested); same != before || age < 0 || age >= renewAfter {
			return // one write renews all
		}
		*now = before
	}
	in.Shares = kept
}

// permit returns why the pod of an allocation must not get it: its devices do not have the tier
// of isolation that the pod requires, or the pod has ways around the tier that is configured.
// Only kubelet knows which pod it is. If one of those that it may be is rejected, kubelet is
// asked, and without an answer the allocation is rejected.
//
// A pod that neither the watch nor the API server shows gets it: such is a static pod before
// its mirror, which only an administrator of the node can have made. limited is true if the
// container gets a limit of each device.
func (p *pool) permit(ctx context.Context, a alloc.Allocation, limited bool, claims func() claim) error {
	_, done := p.records.owner.use()
	device, stated := a.Isolation(time.Now())
	done()
	if stated.Memory == accel.TierHardware {
		return nil // no other container is on the device
	}
	if !limited {
		stated.Memory = accel.TierNone // what was attested does not hold for this container
	}
	c := claims()
	if c.err != nil {
		klog.FromContext(ctx).Error(c.err, "The isolation that a pod requires is not known", "resource", p.Resource)
		return nil //nolint:nilerr // it is taken for a static pod
	}
	err := p.rejects(c.behind, device, stated)
	if err == nil || p.records.ask(ctx, alloc.RecordedBefore) != nil {
		return err
	}
	behind := p.behind(a, c.pods, true)
	if err = p.rejects(behind, device, stated); err != nil && len(behind) == 1 {
		p.records.reject(behind[0])
	}
	return err
}

// computePercent returns how many percent of a device's multiprocessors the pod of an allocation
// requests for each container, 0 for those that belong to its memory. Only kubelet knows which
// pod it is: if those that it may be differ, it is asked, and without an answer the allocation is
// rejected.
func (p *pool) computePercent(ctx context.Context, a alloc.Allocation, claims func() claim) (int, error) {
	if p.tier != accel.TierCooperative {
		return 0, nil
	}
	if len(a.Devices) > 1 {
		return 0, alloc.Reject(alloc.Isolation, "devices %s: isolation %s is for one device in a container, as each has an MPS server of "+
			"its own; request one device", listed(a.Devices), p.tier)
	}
	c := claims()
	if c.err != nil {
		return 0, alloc.Reject(alloc.Isolation, "read the share of the device's multiprocessors that the pod requests: %w", c.err)
	}
	percent, err := samePercent(c.behind)
	if err != nil && p.records.ask(ctx, alloc.RecordedBefore) == nil {
		percent, err = samePercent(p.behind(a, c.pods, true))
	}
	return percent, err
}

// samePercent returns what all of the pods request of a device's multiprocessors.
func samePercent(pods []*corev1.Pod) (int, error) {
	same := 0
	for i, pod := range pods {
		percent, err := kube.ComputePercentOf(pod.Annotations)
		if err != nil {
			return 0, alloc.Reject(alloc.Isolation, "pod %s: %w", klog.KObj(pod), err)
		}
		if i > 0 && percent != same {
			return 0, alloc.Reject(alloc.Isolation, "kubelet requests a device for one of the pods %s and %s, whose annotations %s differ",
				klog.KObj(pods[0]), klog.KObj(pod), wire.ComputeAnnotation)
		}
		same = percent
	}
	return same, nil
}

// claim has the node's pods, and those that an allocation may be for.
type claim struct {
	pods, behind []*corev1.Pod
	err          error
}

// claimants returns the pods that an allocation may be for. If the watch shows none of these, the
// API server is asked.
func (p *pool) claimants(ctx context.Context, a alloc.Allocation) (c claim) {
	c.pods = p.records.pods.Cached()
	if c.behind = p.behind(a, c.pods, false); len(c.behind) > 0 {
		return c
	}
	if c.pods, c.err = p.records.askAPI(ctx); c.err == nil {
		c.behind = p.behind(a, c.pods, false)
	}
	return c
}

// behind returns which of the pods an allocation may be for; listed is as in Engine.Behind.
func (p *pool) behind(a alloc.Allocation, pods []*corev1.Pod, listed bool) []*corev1.Pod {
	pods = p.records.asking(pods)
	values := p.records.values(pods)
	_, done := p.records.owner.use()
	defer done()
	var out []*corev1.Pod
	for _, i := range a.Behind(values, listed) {
		out = append(out, pods[i])
	}
	return out
}

// rejects returns why the first of the pods that may not have the device does not get it.
func (p *pool) rejects(pods []*corev1.Pod, device accel.DeviceID, stated accel.Isolation) error {
	for _, pod := range pods {
		required, err := kube.IsolationOf(pod.Annotations)
		if err != nil {
			return alloc.Reject(alloc.Isolation, "pod %s: %w", klog.KObj(pod), err)
		}
		if !stated.Memory.Meets(required) {
			return alloc.Reject(alloc.Isolation, "pod %s: isolation %s required, device %s states %s", klog.KObj(pod), required, device,
				stated.Memory)
		}
		if p.tier == accel.TierNone {
			continue
		}
		if way := wayAround(&pod.Spec); way != "" {
			return alloc.Reject(alloc.Isolation, "pod %s: %s, which gets around isolation %s of the node's devices", klog.KObj(pod), way,
				p.tier)
		}
	}
	return nil
}
