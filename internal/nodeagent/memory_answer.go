package nodeagent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/place"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// Prefer implements deviceplugin.Allocator: all units of one device.
func (p *memoryPool) Prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	p.records.turn.Lock()
	defer p.records.turn.Unlock()
	ids, err := p.prefer(ctx, available, must, size)
	if errors.Is(err, sharing.ErrNoRoom) && p.tenant.settle(ctx) {
		ids, err = p.prefer(ctx, available, must, size)
	}
	return ids, err
}

// prefer answers a question of kubelet. The caller holds records.turn.
func (p *memoryPool) prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	log := klog.FromContext(ctx).WithValues("resource", p.resource, "units", size)
	if p.draining != "" {
		return nil, p.refuse()
	}
	if err := p.records.ask(ctx, recordedBefore); err != nil {
		// Which pod kubelet asks for and what it holds already would be a guess,
		// and could put the pod on two devices.
		return nil, refuse(refusedKubelet, "kubelet does not tell which pod it admits: %w", err)
	}
	if r, unknown := p.tenant.unknown(); unknown {
		return nil, fmt.Errorf("it is not known yet which devices containers hold as %s", r)
	}
	p.mu.Lock()
	layout, shares, h := p.layout, p.offerable(), p.held
	p.mu.Unlock()

	mustDevice, err := oneDevice(layout, must)
	if err != nil {
		return nil, err
	}
	pods := p.podsOf(ctx, accel.Units(size), h)
	kept := p.keptByInits(pods, h)
	free := freeUnits(layout, slices.DeleteFunc(slices.Clone(available), func(id string) bool { return kept[id] }), must, h)
	slots := make([]place.Slot, 0, len(shares))
	for _, s := range shares {
		slots = append(slots, place.Slot{ID: s.ID, Index: s.Index, Total: s.Units, Free: accel.Units(len(free[s.ID])), Unhealthy: s.Health.Unhealthy})
	}
	waiting := waitingPods(pods, p.resource, h, p.inits, p.grant)
	if d := p.strangersDevice(pods, h); d != "" && mustDevice == "" && !slices.ContainsFunc(waiting, func(w sharing.Waiting) bool { return w.Admitting }) {
		mustDevice = d
	}
	// One that was deleted without a grace period is on its way in kubelet while
	// the API server has forgotten it. Another must not be taken for it.
	for i := range waiting {
		waiting[i].Later = len(p.strangers) > 0 && !waiting[i].Admitting
	}
	choice, err := sharing.Choose(accel.Units(size), mustDevice, accel.Units(len(must)), slots, waiting)
	if err != nil {
		return nil, err
	}
	more := size - len(must)
	if more < 0 || more > len(free[choice.Device]) {
		return nil, fmt.Errorf("kubelet asks for %d units with %d among them; device %s has %d more: %w", size, len(must), choice.Device, len(free[choice.Device]), sharing.ErrNoRoom)
	}
	ids := append(slices.Clone(must), free[choice.Device][:more]...)
	p.asked = question{device: choice.Device, ids: ids}
	if choice.Pod >= 0 {
		w := waiting[choice.Pod]
		p.asked.uid, p.asked.request, p.asked.container = w.Pod.UID, w.Request, w.Next
		log = log.WithValues("pod", w.Pod, "granted", w.Granted)
	} else {
		p.asked.stranger = true
	}
	log.Info("Preferring units of one device", "device", choice.Device)
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

// oneDevice returns the device that all ids name, "" for no ids.
func oneDevice(layout *sharing.Layout, ids []string) (accel.DeviceID, error) {
	var device accel.DeviceID
	for _, id := range ids {
		d, ok := layout.Device(id)
		switch {
		case !ok:
			return "", refuse(refusedUnknownID, "unit id %q belongs to no device of this node", id)
		case device == "":
			device = d
		case d != device:
			return "", refuse(refusedUnknownID, "kubelet chose units of two devices, %s and %s, for one container; a container gets units of one device", device, d)
		}
	}
	return device, nil
}

// Allocate implements deviceplugin.Allocator. The ids that kubelet has settled
// on say which device it is.
func (p *memoryPool) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	p.records.turn.Lock()
	defer p.records.turn.Unlock()
	answer, device, err := p.allocate(ids)
	if err != nil {
		return nil, err
	}
	p.gave(ids, device)
	p.remember(ids, device)
	p.tenant.give(device)
	p.withdrawn()
	p.metrics.served.WithLabelValues(string(p.resource)).Inc()
	klog.FromContext(ctx).Info("Allocated units of one device", "resource", p.resource, "units", len(ids), "device", device)
	p.changed()
	return answer, nil
}

func (p *memoryPool) allocate(ids []string) (*pluginapi.ContainerAllocateResponse, accel.DeviceID, error) {
	if len(ids) == 0 {
		return nil, "", errors.New("kubelet asked to allocate no units")
	}
	if p.draining != "" {
		return nil, "", p.refuse()
	}
	p.mu.Lock()
	layout := p.layout
	p.mu.Unlock()
	device, err := oneDevice(layout, ids)
	if err != nil {
		return nil, "", err
	}
	if r, taken := p.tenant.elsewhere(device); taken && !p.tenant.has(device) {
		return nil, "", refuse(refusedHeld, "device %s is %s", device, givenOutAs(r))
	}
	edits, err := p.backend.Edits(device)
	if err != nil {
		return nil, "", fmt.Errorf("device %s: %w", device, err)
	}
	// The ids of units mean nothing to the vendor's software.
	return p.inject.answer(edits, nil), device, nil
}

// gave notes that a container gets units.
func (p *memoryPool) gave(ids []string, device accel.DeviceID) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		p.given[id] = givenUnit{device: device, at: now}
	}
}

// refuse is the answer of a resource that takes no new pods.
func (p *memoryPool) refuse() error {
	return refuse(refusedNotOffered, "%s: what containers hold of it is served until they end, and nobody gets more", p.draining)
}

// remember notes that a plain init container was served, which kubelet does not
// list. The caller holds turn.
func (p *memoryPool) remember(ids []string, device accel.DeviceID) {
	asked := p.asked
	p.asked = question{}
	if asked.stranger && asked.device == device && sameIDs(asked.ids, ids) {
		p.strangerDevice = device
	}
	if asked.device != device || !sameIDs(asked.ids, ids) {
		asked.uid = ""
		// Kubelet reuses units of an earlier init container and did not ask.
		for uid, s := range p.inits {
			if s.device == device && s.next < len(s.request.Containers) && s.request.Containers[s.next].Units == accel.Units(len(ids)) {
				asked.uid, asked.request, asked.container = uid, s.request, s.next
				break
			}
		}
	}
	if asked.uid == "" || asked.request.Containers[asked.container].Kind != accel.InitContainer {
		return
	}
	p.inits[asked.uid] = initServed{
		request: asked.request,
		next:    asked.container + 1,
		device:  device,
		units:   max(p.inits[asked.uid].units, accel.Units(len(ids))),
		ids:     slices.Concat(p.inits[asked.uid].ids, ids),
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
		if s.device != "" {
			p.initDevices[s.device] = true
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
