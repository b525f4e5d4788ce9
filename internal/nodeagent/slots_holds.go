package nodeagent

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/podresources"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// take implements part: slots that kubelet lists are held, and those that it
// does not list any more are free, unless it does not list all of its pods yet
// or a plain init container may be the holder.
func (p *slotPool) take(pods []podresources.Pod, grace time.Duration) {
	listings := map[podKey][]string{}
	served := map[podKey]map[string]int{}
	active := map[podKey]bool{}
	ambiguous := map[podKey]bool{}
	listed := map[string]podKey{} // who lists a slot
	for _, pod := range pods {
		key := podKey{pod.Namespace, pod.Name}
		ambiguous[key] = active[key]
		active[key] = true
		for _, c := range pod.Containers {
			for _, id := range c.Units[p.resource] {
				if p.foreign == nil || !p.foreign(id) {
					listings[key] = append(listings[key], id)
					if served[key] == nil {
						served[key] = map[string]int{}
					}
					served[key][c.Name]++
					listed[id] = key
				}
			}
		}
	}
	holders := map[string]bool{} // of slots that kubelet does not list
	named := map[podKey]bool{}
	complete := p.records.around().Synced()
	cached := p.records.around().Cached()
	for _, pod := range cached {
		key := podKey{pod.Namespace, pod.Name}
		named[key] = true
		if terminal(pod) {
			continue
		}
		request := kube.RequestOf(pod, p.resource)
		if !full(request, listings[key]) || ambiguous[key] {
			holders[initHolder(pod)] = true
			if hasInits(request) {
				holders[strangeHolder(key)] = true
			}
		}
		if started(pod) && !active[key] && len(request.Containers) > 0 {
			complete = false
		}
	}
	holds := func(pod string) bool {
		key := initKey(pod)
		return holders[pod] || active[key] && !named[key] // the watch is late
	}
	now := time.Now()

	p.mu.Lock()
	defer p.mu.Unlock()
	for id, key := range listed {
		h := p.holds[id]
		if h == nil {
			if p.draining != "" {
				continue // given out since, in the other way
			}
			h = &slotHold{}
			p.holds[id] = h
		}
		if h.chips == nil {
			h.chips = p.meaning(id)
		}
		// Kubelet reuses what an init container has in its own pod only.
		h.inits = slices.DeleteFunc(slices.Clone(h.inits), func(holder string) bool { return initKey(holder) != key })
		h.seen, h.unasked = true, false
	}
	p.listings, p.served, p.active, p.complete = listings, served, active, complete
	p.attribute(cached, named)
	held := map[accel.DeviceID]bool{}
	meant := true
	for id, h := range p.holds {
		_, seen := listed[id]
		switch {
		case seen, !complete, !h.seen && now.Sub(h.at) < grace:
		case slices.ContainsFunc(h.inits, holds):
		default:
			delete(p.holds, id)
			continue
		}
		meant = meant && h.chips != nil
		for _, c := range h.chips {
			held[c] = true
		}
	}
	for key := range ambiguous {
		if ambiguous[key] {
			delete(listings, key)
		}
	}
	p.certain = p.certain || complete && meant
	if p.certain {
		p.tenant.set(held, grace)
	}
}

// attribute finds the pods of slots that kubelet chose by itself and does not
// list: those of plain init containers. The caller holds mu.
func (p *slotPool) attribute(pods []*corev1.Pod, named map[podKey]bool) {
	if !slices.ContainsFunc(slices.Collect(maps.Values(p.holds)), func(h *slotHold) bool { return h.unasked }) {
		return
	}
	var waiting, running, strange []string
	for _, pod := range pods {
		key := podKey{pod.Namespace, pod.Name}
		request := kube.RequestOf(pod, p.resource)
		switch {
		case !p.active[key] || terminal(pod) || !hasInits(request) || p.got(pod) >= request.Peak():
		case started(pod):
			running = append(running, initHolder(pod))
		default:
			waiting = append(waiting, initHolder(pod))
		}
	}
	for key := range p.active {
		if !named[key] {
			strange = append(strange, strangeHolder(key))
		}
	}
	var holders []string // of the first kind that there is; when none lacks a slot, nobody
	for _, holders = range [][]string{waiting, strange, running} {
		if len(holders) > 0 {
			break
		}
	}
	slices.Sort(holders)
	for _, h := range p.holds {
		if h.unasked {
			h.inits = holders
		}
	}
}

// full reports whether kubelet lists as many slots of a pod as the pod needs at
// most. Its plain init containers had none besides: kubelet gives what they had
// to the app containers before anything else.
func full(request accel.Request, listed []string) bool {
	ids := slices.Compact(slices.Sorted(slices.Values(listed)))
	return len(request.Containers) > 0 && accel.Units(len(ids)) >= request.Peak()
}

// got counts the slots that are known to be the pod's. The caller holds mu.
func (p *slotPool) got(pod *corev1.Pod) accel.Units {
	ids := slices.Clone(p.listings[podKey{pod.Namespace, pod.Name}])
	for id, h := range p.holds {
		if !h.unasked && slices.Contains(h.inits, initHolder(pod)) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return accel.Units(len(slices.Compact(ids)))
}

// meaning returns the chips of a slot that was given out by an earlier run whose
// state is lost, or by the vendor's own plugin, whose ids are the same; nil while
// that is not known. The caller holds mu.
func (p *slotPool) meaning(id string) []accel.DeviceID {
	s, err := sharing.ParseSlotID(id)
	if err != nil {
		return []accel.DeviceID{} // of nothing that is known here
	}
	for i := range p.cards {
		if p.cards[i].ID == s.Device {
			return p.cards[i].Chips
		}
	}
	if c, ok := p.remembered[s.Device]; ok {
		return c.Chips
	}
	if !p.looked || p.foundErr != nil {
		return nil // it may be a board
	}
	return p.boards.Chips(s.Device)
}

// unserved reports whether plain init containers of the pod may be what kubelet
// asks for: it has some, and has not got all of its slots. The caller holds mu.
func (p *slotPool) unserved(pod *corev1.Pod) bool {
	request := kube.RequestOf(pod, p.resource)
	inits, others := false, false
	for _, c := range request.Containers {
		if c.Kind == accel.InitContainer {
			inits = true
			continue
		}
		others = true
		if p.served[podKey{pod.Namespace, pod.Name}][c.Name] < int(c.Units) {
			return hasInits(request)
		}
	}
	if !inits || others {
		return false
	}
	var got accel.Units
	for _, h := range p.holds {
		if slices.Contains(h.inits, initHolder(pod)) {
			got++
		}
	}
	return got < request.Peak()
}

func hasInits(r accel.Request) bool {
	return slices.ContainsFunc(r.Containers, func(c accel.ContainerRequest) bool { return c.Kind == accel.InitContainer })
}

// initHolder names a pod in slotHold.inits: namespace, name and UID.
func initHolder(pod *corev1.Pod) string {
	return pod.Namespace + "/" + pod.Name + "/" + string(pod.UID)
}

// strangeHolder names a pod in slotHold.inits that the API server does not know:
// namespace and name.
func strangeHolder(key podKey) string { return key.namespace + "/" + key.name + "/" }

func initKey(holder string) podKey {
	namespace, rest, _ := strings.Cut(holder, "/")
	name, _, _ := strings.Cut(rest, "/")
	return podKey{namespace, name}
}

// observe implements part.
func (p *slotPool) observe() {
	held, _ := p.heldSlots()
	p.metrics.observe(p.inventory(), held)
}

// heldSlots returns how many slots of each card containers hold, and what each pod
// holds.
func (p *slotPool) heldSlots() (map[accel.DeviceID]int, map[podKey][]string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	perCard := map[accel.DeviceID]int{}
	for id := range p.holds {
		if s, err := sharing.ParseSlotID(id); err == nil {
			perCard[s.Device]++
		}
	}
	return perCard, p.listings
}
