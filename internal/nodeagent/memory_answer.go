package nodeagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// Prefer implements deviceplugin.Allocator: units of the device, or in equal parts
// of the devices, that the pod was granted.
func (p *memoryPool) Prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	ctx, end := p.records.question(ctx)
	defer end()
	return p.records.answer(ctx, p.tenant, sharing.ErrNoRoom, func(ask askKubelet) ([]string, error) {
		return p.prefer(ctx, ask, available, must, size)
	})
}

// prefer answers a question of kubelet by what the records say when they are asked
// so. The caller holds records.turn.
func (p *memoryPool) prefer(ctx context.Context, ask askKubelet, available, must []string, size int) ([]string, error) {
	log := klog.FromContext(ctx).WithValues("resource", p.resource, "units", size)
	if p.draining != "" {
		return nil, p.refuse()
	}
	if err := ask(ctx, recordedBefore); err != nil {
		// Which pod kubelet asks for and what it holds already would be a guess,
		// and could put the pod on two devices.
		return nil, refuse(refusedKubelet, "kubelet does not tell which pod it admits: %w", err)
	}
	if r, unknown := p.tenant.unknown(); unknown {
		return nil, fmt.Errorf("it is not known yet which devices containers hold as %s", r)
	}
	p.mu.Lock()
	layout, shares, h, links := p.layout, p.offerable(), p.held, p.found.Links
	p.mu.Unlock()

	reused, err := partsOf(layout, must)
	if err != nil {
		return nil, err
	}
	pods := p.podsOf(ctx, accel.Units(size), h)
	kept := p.keptByInits(pods, h)
	free := freeUnits(layout, slices.DeleteFunc(slices.Clone(available), func(id string) bool { return kept[id] }), must, h)
	node := place.Node{CPU: place.Unlimited, Memory: place.Unlimited}
	devices := make([]accel.DeviceID, 0, len(shares))
	for _, s := range shares {
		devices = append(devices, s.ID)
		node.Slots = append(node.Slots, place.Slot{
			ID: s.ID, Index: s.Index, Model: s.Model, Total: s.Units, Free: accel.Units(len(free[s.ID])), Unhealthy: s.Health.Unhealthy,
		})
	}
	if len(links) > 0 {
		node.Graph = place.NewGraph(devices, links)
	}
	waiting := waitingPods(pods, p.resource, h, p.inits, p.grant)
	if d := p.strangersDevice(pods, h); d != "" && len(reused) == 0 && !slices.ContainsFunc(waiting, func(w sharing.Waiting) bool { return w.Admitting }) {
		reused = []sharing.Part{{Device: d}}
	}
	// One that was deleted without a grace period is on its way in kubelet while
	// the API server has forgotten it. Another must not be taken for it.
	for i := range waiting {
		waiting[i].Later = len(p.strangers) > 0 && !waiting[i].Admitting
	}
	choice, err := sharing.Choose(accel.Units(size), reused, node, waiting)
	if err != nil {
		return nil, err
	}
	ids := slices.Clone(must)
	var chosen []accel.DeviceID
	for _, part := range choice.Parts {
		if part.Units > accel.Units(len(free[part.Device])) {
			return nil, fmt.Errorf("device %s has %d units, %d are needed: %w", part.Device, len(free[part.Device]), part.Units, sharing.ErrNoRoom)
		}
		ids = append(ids, free[part.Device][:part.Units]...)
		chosen = append(chosen, part.Device)
	}
	if len(ids) != size {
		return nil, fmt.Errorf("kubelet asks for %d units with %d among them: %w", size, len(must), sharing.ErrNoRoom)
	}
	slices.Sort(chosen)
	p.asked = question{devices: chosen, ids: ids}
	if choice.Pod >= 0 {
		w := waiting[choice.Pod]
		p.asked.uid, p.asked.request, p.asked.container = w.Pod.UID, w.Request, w.Next
		log = log.WithValues("pod", w.Pod, "granted", w.Granted)
	} else {
		p.asked.stranger = true
	}
	log.Info("Preferring units", "devices", chosen)
	return ids, nil
}

// freeUnits groups the ids that kubelet offers by device, without those that
// kubelet itself says are held (see turn) and without must, lowest first.
func freeUnits(layout *sharing.Layout, available, must []string, h *holdings) map[accel.DeviceID][]string {
	skip := make(map[string]struct{}, len(must))
	for _, id := range must {
		skip[id] = struct{}{}
	}
	free := map[accel.DeviceID][]string{}
	for _, id := range available {
		if _, inUse := h.ids[id]; inUse {
			continue
		}
		if _, reused := skip[id]; reused {
			continue
		}
		if d, ok := layout.Device(id); ok {
			free[d] = append(free[d], id)
		}
	}
	for _, ids := range free {
		slices.SortFunc(ids, func(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b)) })
	}
	return free
}

// partsOf returns the devices that ids name, in the order of their first ones,
// with how many name each.
func partsOf(layout *sharing.Layout, ids []string) ([]sharing.Part, error) {
	var parts []sharing.Part
	for _, id := range ids {
		d, ok := layout.Device(id)
		if !ok {
			return nil, refuse(refusedUnknownID, "unit id %q belongs to no device of this node", id)
		}
		i := slices.IndexFunc(parts, func(p sharing.Part) bool { return p.Device == d })
		if i < 0 {
			i = len(parts)
			parts = append(parts, sharing.Part{Device: d})
		}
		parts[i].Units++
	}
	return parts, nil
}

// Allocate implements deviceplugin.Allocator. The ids that kubelet has settled
// on say which devices they are.
func (p *memoryPool) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	ctx, end := p.records.question(ctx)
	defer end()
	answer, q, err := p.allocate(ids)
	if err != nil {
		return nil, err
	}
	p.gave(ids)
	p.remember(ids, q)
	p.tenant.give(q.devices...)
	p.withdrawn()
	p.metrics.served.WithLabelValues(string(p.resource)).Inc()
	klog.FromContext(ctx).Info("Allocated units", "resource", p.resource, "units", len(ids), "devices", q.devices)
	p.changed()
	return answer, nil
}

func (p *memoryPool) allocate(ids []string) (*pluginapi.ContainerAllocateResponse, question, error) {
	if len(ids) == 0 {
		return nil, question{}, errors.New("kubelet asked to allocate no units")
	}
	if p.draining != "" {
		return nil, question{}, p.refuse()
	}
	q, err := p.questionOf(ids)
	if err != nil {
		return nil, question{}, err
	}
	for _, device := range q.devices {
		if r, taken := p.tenant.elsewhere(device); taken && !p.tenant.has(device) {
			return nil, question{}, refuse(refusedHeld, "device %s is %s", device, givenOutAs(r))
		}
	}
	edits, err := p.backend.Edits(p.byIndex(q.devices)...)
	if err != nil {
		return nil, question{}, fmt.Errorf("device %s: %w", listed(q.devices), err)
	}
	// The ids of units mean nothing to the vendor's software.
	return p.inject.answer(edits, nil), q, nil
}

// byIndex returns the devices in the order of their indexes, in which containers
// see them.
func (p *memoryPool) byIndex(devices []accel.DeviceID) []accel.DeviceID {
	index := map[accel.DeviceID]int{}
	p.mu.Lock()
	for _, s := range p.shares {
		index[s.ID] = s.Index
	}
	p.mu.Unlock()
	out := slices.Clone(devices)
	slices.SortStableFunc(out, func(a, b accel.DeviceID) int { return cmp.Compare(index[a], index[b]) })
	return out
}

func listed(devices []accel.DeviceID) string {
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = string(d)
	}
	return strings.Join(names, ", ")
}

// questionOf returns what kubelet asked that has settled on these ids, with all
// devices of the pod: a container of a pod on several devices gets all of them,
// also where its units happen to be of some. The caller holds turn.
func (p *memoryPool) questionOf(ids []string) (question, error) {
	p.mu.Lock()
	layout, h := p.layout, p.held
	p.mu.Unlock()
	parts, err := partsOf(layout, ids)
	if err != nil {
		return question{}, err
	}
	if sameIDs(p.asked.ids, ids) {
		return p.asked, nil
	}
	var devices []accel.DeviceID
	for _, part := range parts {
		devices = union(devices, []accel.DeviceID{part.Device})
	}
	// Kubelet reuses units of an earlier init container and did not ask.
	for uid, s := range p.inits {
		if s.next < len(s.request.Containers) && s.request.Containers[s.next].Units == accel.Units(len(ids)) &&
			within(s.devices, devices) && (len(s.devices) == 1 || s.has(ids)) {
			return question{uid: uid, request: s.request, container: s.next, devices: s.devices, ids: ids}, nil
		}
	}
	if len(devices) == 1 {
		return question{devices: devices, ids: ids}, nil
	}
	// Kubelet took all that was left and did not ask, or reuses units of which this
	// program has forgotten.
	if h != nil {
		for _, w := range waitingPods(p.records.pods.Cached(), p.resource, h, p.inits, p.grant) {
			if !w.Admitting || w.Request.Containers[w.Next].Units != accel.Units(len(ids)) {
				continue
			}
			all, equal := w.Granted, true
			if len(w.Held) > 0 {
				all = nil
				for _, part := range w.Held {
					all = append(all, part.Device)
				}
			} else {
				for _, part := range parts {
					equal = equal && part.Units*accel.Units(len(all)) == accel.Units(len(ids))
				}
			}
			if equal && within(all, devices) {
				return question{uid: w.Pod.UID, request: w.Request, container: w.Next, devices: all, ids: ids}, nil
			}
		}
	}
	return question{}, refuse(refusedUnknownID, "kubelet chose units of the devices %s for one container, and no pod that it may be of was granted these together", listed(devices))
}

// has reports whether the init containers got all of the ids.
func (s *initServed) has(ids []string) bool {
	got := map[string]struct{}{}
	for _, some := range s.ids {
		for _, id := range some {
			got[id] = struct{}{}
		}
	}
	return !slices.ContainsFunc(ids, func(id string) bool { _, ok := got[id]; return !ok })
}

// gave notes that a container gets units.
func (p *memoryPool) gave(ids []string) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		device, _ := p.layout.Device(id)
		p.given[id] = givenUnit{device: device, at: now}
	}
}

// refuse is the answer of a resource that takes no new pods.
func (p *memoryPool) refuse() error {
	return refuse(refusedNotOffered, "%s: what containers hold of it is served until they end, and nobody gets more", p.draining)
}

// remember notes that a plain init container was served, which kubelet does not
// list. The caller holds turn.
func (p *memoryPool) remember(ids []string, q question) {
	p.asked = question{}
	if q.stranger {
		p.strangerDevice = q.devices[0]
	}
	if q.uid == "" || q.request.Containers[q.container].Kind != accel.InitContainer {
		return
	}
	before := p.inits[q.uid]
	all := map[accel.DeviceID][]string{}
	maps.Copy(all, before.ids)
	p.mu.Lock()
	for _, id := range ids {
		d, _ := p.layout.Device(id)
		all[d] = append(slices.Clip(all[d]), id)
	}
	p.mu.Unlock()
	p.inits[q.uid] = initServed{
		request: q.request,
		next:    q.container + 1,
		devices: q.devices,
		units:   max(before.units, accel.Units(len(ids))),
		ids:     all,
		at:      time.Now(),
	}
	p.noteInits()
}

// noteInits lets the other resources know of the devices of init containers.
// The caller holds turn.
func (p *memoryPool) noteInits() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.initDevices = map[accel.DeviceID]bool{}
	for _, s := range p.inits {
		for _, d := range s.devices {
			p.initDevices[d] = true
		}
	}
}

func sameIDs(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	set := make(map[string]struct{}, len(a))
	for _, id := range a {
		set[id] = struct{}{}
	}
	for _, id := range b {
		if _, ok := set[id]; !ok {
			return false
		}
	}
	return true
}
