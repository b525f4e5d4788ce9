package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// Prefer implements deviceplugin.Allocator: the whole devices that are connected
// best, or slices of the devices that the fewest share. It asks nothing of the
// vendor's library.
func (p *slotPool) Prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	ctx, end := p.records.question(ctx)
	defer end()
	ids, err := p.records.answer(ctx, p.tenant, sharing.ErrTooFewSlots, func(ask askKubelet) ([]string, error) {
		return p.prefer(ctx, ask, available, must, size)
	})
	if err != nil {
		return nil, err
	}
	p.preferred = ids
	klog.FromContext(ctx).Info("Preferring devices", "resource", p.resource, "ids", ids)
	return ids, nil
}

// prefer answers a question of kubelet by what the records say when they are asked
// so. The caller holds records.turn.
func (p *slotPool) prefer(ctx context.Context, ask askKubelet, available, must []string, size int) ([]string, error) {
	if err := p.admissible(size); err != nil {
		return nil, err
	}
	if err := ask(ctx, recordedBefore); err != nil {
		return nil, refuse(refusedKubelet, "kubelet does not tell which devices are held: %w", err)
	}
	if r, unknown := p.tenant.unknown(); unknown {
		return nil, fmt.Errorf("it is not known yet which devices containers hold as %s", r)
	}
	p.mu.Lock()
	active := p.active
	p.mu.Unlock()
	pods := p.records.seen(ctx, active, func([]*corev1.Pod) bool { return false })
	p.noteAdmitting(pods)
	promised := p.promised(pods)

	p.mu.Lock()
	q := sharing.SlotQuestion{Resource: p.resource, Size: size, Must: must, Links: p.links, Policy: p.rules.policy}
	offered := make(map[string]bool, len(available))
	for _, id := range available {
		offered[id] = true
	}
	for i := range p.cards {
		c := &p.cards[i]
		q.Devices = append(q.Devices, sharing.SlotDevice{
			ID: c.ID, Index: c.Index, Replicas: c.replicas, Unusable: p.unusable(c),
			Avoid: slices.ContainsFunc(c.Chips, func(chip accel.DeviceID) bool { return promised[chip] }),
		})
		for _, id := range p.free(c) {
			if offered[id] {
				q.Available = append(q.Available, id)
			}
		}
	}
	p.mu.Unlock()
	return sharing.ChooseSlots(q)
}

// admissible returns why a container that asks for so many slots is refused
// whatever is free.
func (p *slotPool) admissible(size int) error {
	if p.draining != "" {
		return refuse(refusedNotOffered, "%s: what containers hold of it is served until they end, and nobody gets more", p.draining)
	}
	if p.rules.single && size > 1 {
		return refuse(refusedTooMany, "invalid request: maximum request size for shared resources is 1; found %d", size)
	}
	return nil
}

// noteAdmitting remembers which pods with plain init containers kubelet may be
// asking for: known ones or, when none waits, those that the API server does not
// know, such as static pods before their mirror. The caller holds records.turn.
func (p *slotPool) noteAdmitting(pods []*corev1.Pod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.admitting = nil
	unknown := maps.Clone(p.active)
	waits := false
	for _, pod := range pods {
		key := podKey{pod.Namespace, pod.Name}
		delete(unknown, key)
		if !p.active[key] || started(pod) {
			continue
		}
		request := kube.RequestOf(pod, p.resource)
		waits = waits || accel.Units(len(p.listings[key])) < request.Peak()
		if p.unserved(pod) {
			p.admitting = append(p.admitting, initHolder(pod))
		}
	}
	if !waits {
		for key := range unknown {
			p.admitting = append(p.admitting, strangeHolder(key))
		}
	}
	slices.Sort(p.admitting)
}

// recallAdmitting makes admitting that of the container that gets the ids, and
// reports whether kubelet has asked for it just now. If not, the container reuses
// what an init container of its pod has, or nobody knows which pod it is until
// kubelet lists it. The caller holds records.turn.
func (p *slotPool) recallAdmitting(ids []string) (asked bool) {
	asked = sameIDs(p.preferred, ids)
	p.preferred = nil
	if asked {
		return true
	}
	p.mu.Lock()
	var reused []string
	for _, id := range ids {
		h := p.holds[id]
		if h == nil {
			continue
		}
		reused = h.inits
		if len(reused) == 0 {
			break
		}
	}
	p.mu.Unlock()
	pods := p.records.pods.Cached()
	// A pod that runs has all of its devices and reuses none any more.
	p.admitting = slices.DeleteFunc(slices.Clone(reused), func(holder string) bool {
		return slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return initHolder(pod) == holder && started(pod) })
	})
	return false
}

// Allocate implements deviceplugin.Allocator. Kubelet may have settled on the
// ids without asking Prefer.
func (p *slotPool) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	ctx, end := p.records.question(ctx)
	defer end()
	answer, chips, err := p.allocate(ctx, ids)
	if err != nil {
		return nil, err
	}
	p.tenant.give(chips...)
	p.metrics.served.WithLabelValues(string(p.resource)).Inc()
	klog.FromContext(ctx).Info("Allocated devices", "resource", p.resource, "ids", ids, "devices", chips)
	p.withdrawn()
	p.changed()
	return answer, nil
}

func (p *slotPool) allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, []accel.DeviceID, error) {
	if len(ids) == 0 {
		return nil, nil, errors.New("kubelet asked to allocate no devices")
	}
	if err := p.admissible(len(ids)); err != nil {
		return nil, nil, err
	}
	ids = slices.Clone(ids)
	asked := p.recallAdmitting(ids)
	cards, err := p.check(ids)
	var conflict *conflictError
	// What is given out goes through here, but only kubelet knows what was given
	// back, and to which pod it gave what it chose by itself. It is not asked
	// otherwise, as it is handing out units (see records.turn).
	for i, ask := range []askKubelet{p.records.ask, p.records.askFresh, p.records.askFresh} {
		if !errors.As(err, &conflict) || i == 2 && !p.tenant.settle(ctx) {
			break
		}
		if failed := ask(ctx, recordedBefore); failed != nil {
			return nil, nil, fmt.Errorf("%w; and nobody tells whether that is still so: %w", err, failed)
		}
		if !asked {
			p.recallAdmitting(ids)
		}
		cards, err = p.check(ids)
	}
	if err != nil {
		return nil, nil, err
	}
	var chips []accel.DeviceID
	for _, c := range cards {
		chips = append(chips, c.Chips...)
	}
	edits, err := p.backend.Edits(chips...)
	if err != nil {
		return nil, nil, fmt.Errorf("devices %v: %w", chips, err)
	}
	if err := p.inject.check(p.vendor, edits); err != nil {
		return nil, nil, err
	}
	p.hold(ctx, ids, cards, !asked && len(p.admitting) == 0)
	return p.inject.answer(edits, ids), chips, nil
}

// conflictError says that a slot that kubelet wants to give out is held.
type conflictError struct{ text string }

func (e *conflictError) Error() string { return e.text }

// check returns the distinct cards behind the ids, in ascending order of index,
// and sorts ids in that order. It is a *conflictError when they may be held.
func (p *slotPool) check(ids []string) ([]slotCard, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r, unknown := p.tenant.unknown(); unknown {
		return nil, &conflictError{fmt.Sprintf("it is not known yet which devices containers hold as %s", r)}
	}
	known := map[string]bool{}
	var cards []slotCard
	for i := range p.cards {
		c := &p.cards[i]
		used := false
		for _, id := range sharing.SlotIDs(nil, c.ID, c.replicas) {
			if !slices.Contains(ids, id) {
				continue
			}
			used, known[id] = true, true
			h := p.holds[id]
			if h == nil {
				continue
			}
			if !c.fits(id, h) || !slices.ContainsFunc(h.inits, func(pod string) bool { return slices.Contains(p.admitting, pod) }) {
				return nil, &conflictError{fmt.Sprintf("%q of %s is held by another container", id, p.resource)}
			}
		}
		if !used {
			continue
		}
		// Nobody else has what an init container of the pod has; if somebody does,
		// the pod is gone.
		if r, taken := p.tenant.elsewhere(c.Chips...); taken {
			return nil, &conflictError{fmt.Sprintf("device %s may not be given out: %s", c.ID, givenOutAs(r))}
		}
		if why := p.unusable(c); why != "" && !p.reused(c, ids) {
			return nil, &conflictError{fmt.Sprintf("device %s may not be given out: %s", c.ID, why)}
		}
		cards = append(cards, *c)
	}
	for _, id := range ids {
		if !known[id] {
			return nil, refuse(refusedUnknownID, "invalid allocation request for %q: unknown device: %s", p.resource, id)
		}
	}
	order := map[accel.DeviceID]int{}
	for i, c := range cards {
		order[c.ID] = i
	}
	slices.SortFunc(ids, func(a, b string) int {
		x, _ := sharing.ParseSlotID(a)
		y, _ := sharing.ParseSlotID(b)
		if x.Device != y.Device {
			return order[x.Device] - order[y.Device]
		}
		return x.Replica - y.Replica
	})
	return cards, nil
}

// reused reports whether an init container of the pod has the card's ids
// already.
func (p *slotPool) reused(c *slotCard, ids []string) bool {
	for _, id := range sharing.SlotIDs(nil, c.ID, c.replicas) {
		if slices.Contains(ids, id) && p.holds[id] == nil {
			return false
		}
	}
	return true
}

// hold notes that a container gets slots; unasked is as in slotHold. The caller
// holds records.turn.
func (p *slotPool) hold(ctx context.Context, ids []string, cards []slotCard, unasked bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	chips := map[accel.DeviceID][]accel.DeviceID{}
	for _, c := range cards {
		chips[c.ID] = c.Chips
	}
	for _, id := range ids {
		s, _ := sharing.ParseSlotID(id) // it is one of ours
		p.holds[id] = &slotHold{chips: chips[s.Device], inits: p.admitting, unasked: unasked, at: time.Now()}
	}
	if err := p.save(); err != nil {
		klog.FromContext(ctx).Error(err, "What was given out is not remembered over a restart until kubelet lists it", "resource", p.resource, "ids", ids)
	}
}
