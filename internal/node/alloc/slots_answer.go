package alloc

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// prefer chooses the whole devices that are connected best, or slices of the
// devices that the fewest share.
func (s *slots) prefer(q *Question) (Preference, error) {
	s.noteAdmitting(q.Pods)
	promised := s.pool.engine.promised(s.pool.config.Vendor, q.Pods)
	choice := sharing.SlotQuestion{Resource: s.pool.config.Resource, Size: q.Size, Must: q.Must, Links: s.links, Policy: s.pool.config.Cut.Policy}
	offered := make(map[string]bool, len(q.Available))
	for _, id := range q.Available {
		offered[id] = true
	}
	for i := range s.pool.items {
		it := &s.pool.items[i]
		choice.Devices = append(choice.Devices, sharing.SlotDevice{
			ID: it.ID, Index: it.Index, Replicas: it.replicas, Unusable: s.pool.unusable(it),
			Avoid: slices.ContainsFunc(it.Chips, func(chip accel.DeviceID) bool { return promised[chip] }),
		})
		for id := range s.free(it) {
			if offered[id] {
				choice.Available = append(choice.Available, id)
			}
		}
	}
	ids, err := sharing.ChooseSlots(choice)
	if err != nil {
		return Preference{}, err
	}
	s.preferred = ids
	return Preference{IDs: ids}, nil
}

// noteAdmitting remembers which pods with plain init containers kubelet may be
// asking for: known ones or, when none waits, those that the API server does not
// know, such as static pods before their mirror.
func (s *slots) noteAdmitting(pods []Pod) {
	s.admitting = nil
	unknown := maps.Clone(s.active)
	waits := false
	for i := range pods {
		pod := &pods[i]
		delete(unknown, pod.Key())
		if !s.active[pod.Key()] || pod.Started {
			continue
		}
		request := pod.request(s.pool.config.Resource)
		waits = waits || accel.Units(len(s.listings[pod.Key()])) < request.Peak()
		if s.unserved(pod) {
			s.admitting = append(s.admitting, initHolder(pod))
		}
	}
	if !waits {
		for key := range unknown {
			s.admitting = append(s.admitting, unknownHolder(key))
		}
	}
	slices.Sort(s.admitting)
}

// recallAdmitting makes admitting that of the container that gets the ids: kubelet
// has asked for it just now, or the container reuses what an init container of its
// pod has, or it is not known which pod it is until kubelet lists it.
func (s *slots) recallAdmitting(ids []string, pods []Pod, again bool) {
	if again && s.asked {
		return
	}
	s.asked = !again && sameIDs(s.preferred, ids)
	s.preferred = nil
	if s.asked {
		return
	}
	var reused []string
	for _, id := range ids {
		h := s.holds[id]
		if h == nil {
			continue
		}
		reused = h.inits
		if len(reused) == 0 {
			break
		}
	}
	// A pod that runs has all of its devices and reuses none any more.
	s.admitting = slices.DeleteFunc(slices.Clone(reused), func(holder string) bool {
		return slices.ContainsFunc(pods, func(pod Pod) bool { return pod.Started && initHolder(&pod) == holder })
	})
}

// allocate checks the ids: kubelet may have settled on them without a question.
func (s *slots) allocate(ids []string, pods []Pod, again bool) (Allocation, error) {
	s.recallAdmitting(ids, pods, again)
	cards, err := s.check(ids)
	if err != nil {
		return Allocation{}, err
	}
	a := Allocation{IDs: ids, cards: cards, unasked: !s.asked && len(s.admitting) == 0}
	for _, c := range cards {
		a.Devices = append(a.Devices, c.Chips...)
	}
	return a, nil
}

// check returns the distinct cards behind the ids, in ascending order of index,
// and sorts ids in that order. The rejection is in doubt when they may be held.
func (s *slots) check(ids []string) ([]item, error) {
	if r, unknown := s.pool.engine.unknown(s.pool); unknown {
		return nil, conflictf("it is not known yet which devices containers hold as %s", r)
	}
	known := map[string]bool{}
	var cards []item
	for i := range s.pool.items {
		it := &s.pool.items[i]
		used, fresh := false, false
		for _, id := range s.ids(it) {
			if !slices.Contains(ids, id) {
				continue
			}
			used, known[id] = true, true
			h := s.holds[id]
			if h == nil {
				fresh = true
				continue
			}
			if !it.fits(id, h) || !slices.ContainsFunc(h.inits, func(pod string) bool { return slices.Contains(s.admitting, pod) }) {
				return nil, conflictf("%q of %s is held by another container", id, s.pool.config.Resource)
			}
		}
		if !used {
			continue
		}
		// No other pool has what an init container of the pod has; if one does, the
		// pod is gone.
		if r, taken := s.pool.engine.elsewhere(s.pool, it.Chips...); taken {
			return nil, conflictf("device %s may not be given out: %s", it.ID, givenOutAs(r))
		}
		if why := s.pool.unusable(it); why != "" && fresh {
			return nil, conflictf("device %s may not be given out: %s", it.ID, why)
		}
		cards = append(cards, *it)
	}
	for _, id := range ids {
		if !known[id] {
			return nil, Reject(UnknownID, "invalid allocation request for %q: unknown device: %s", s.pool.config.Resource, id)
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

// give notes that a container gets slots.
func (s *slots) give(a *Allocation, now time.Time) {
	chips := map[accel.DeviceID][]accel.DeviceID{}
	for _, c := range a.cards {
		chips[c.ID] = c.Chips
	}
	for _, id := range a.IDs {
		slot, _ := sharing.ParseSlotID(id) // it is one of the pool's
		s.holds[id] = &slotHold{chips: chips[slot.Device], inits: s.admitting, unasked: a.unasked, at: now}
	}
}

// take makes slots that kubelet lists held, and those that it does not list any
// more free, unless it does not list all of its pods yet or a plain init container
// may be the holder.
func (s *slots) take(v *View) {
	listings := map[PodKey][]string{}
	served := map[PodKey]map[string]int{}
	active := map[PodKey]bool{}
	ambiguous := map[PodKey]bool{}
	listed := map[string]PodKey{} // which pod lists a slot
	for _, pod := range v.Listed {
		ambiguous[pod.PodKey] = active[pod.PodKey]
		active[pod.PodKey] = true
		for _, c := range pod.Containers {
			for _, id := range c.Units[s.pool.config.Resource] {
				if s.pool.foreign(id) {
					continue
				}
				listings[pod.PodKey] = append(listings[pod.PodKey], id)
				if served[pod.PodKey] == nil {
					served[pod.PodKey] = map[string]int{}
				}
				served[pod.PodKey][c.Container]++
				listed[id] = pod.PodKey
			}
		}
	}
	holders := map[string]bool{} // of slots that kubelet does not list
	named := map[PodKey]bool{}
	complete := v.Complete
	for i := range v.Pods {
		pod := &v.Pods[i]
		named[pod.Key()] = true
		if pod.Ended {
			continue
		}
		request := pod.request(s.pool.config.Resource)
		if !full(request, listings[pod.Key()]) || ambiguous[pod.Key()] {
			holders[initHolder(pod)] = true
			if hasInits(request) {
				holders[unknownHolder(pod.Key())] = true
			}
		}
		if pod.Started && !active[pod.Key()] && len(request.Containers) > 0 {
			complete = false
		}
	}
	s.note(listed)
	s.listings, s.served, s.active, s.complete = listings, served, active, complete
	s.attribute(v.Pods, named)
	meant := true
	for id, h := range s.holds {
		_, seen := listed[id]
		switch {
		case seen, !complete, !h.seen && v.Now.Sub(h.at) < v.Grace:
		case slices.ContainsFunc(h.inits, func(pod string) bool {
			key := initKey(pod)
			return holders[pod] || active[key] && !named[key] // the API server is late
		}):
		default:
			delete(s.holds, id)
			continue
		}
		meant = meant && h.chips != nil
	}
	for key := range ambiguous {
		if ambiguous[key] {
			delete(listings, key)
		}
	}
	s.sure = s.sure || complete && meant
}

// note makes the slots that kubelet lists held.
func (s *slots) note(listed map[string]PodKey) {
	for id, key := range listed {
		h := s.holds[id]
		if h == nil {
			if s.pool.config.Draining != "" {
				continue // given out since, in the other way
			}
			h = &slotHold{}
			s.holds[id] = h
		}
		if h.chips == nil {
			h.chips = s.meaning(id)
		}
		// Kubelet reuses what an init container has in its own pod only.
		h.inits = slices.DeleteFunc(slices.Clone(h.inits), func(holder string) bool { return initKey(holder) != key })
		h.seen, h.unasked = true, false
	}
}

func (s *slots) claimed() (map[accel.DeviceID]bool, bool) {
	held := map[accel.DeviceID]bool{}
	for _, h := range s.holds {
		for _, c := range h.chips {
			held[c] = true
		}
	}
	return held, s.sure
}

// attribute finds the pods of slots that kubelet chose by itself and does not
// list: those of plain init containers.
func (s *slots) attribute(pods []Pod, named map[PodKey]bool) {
	if !slices.ContainsFunc(slices.Collect(maps.Values(s.holds)), func(h *slotHold) bool { return h.unasked }) {
		return
	}
	var waiting, running, unknown []string
	for i := range pods {
		pod := &pods[i]
		request := pod.request(s.pool.config.Resource)
		switch {
		case !s.active[pod.Key()] || pod.Ended || !hasInits(request) || s.got(pod) >= request.Peak():
		case pod.Started:
			running = append(running, initHolder(pod))
		default:
			waiting = append(waiting, initHolder(pod))
		}
	}
	for key := range s.active {
		if !named[key] {
			unknown = append(unknown, unknownHolder(key))
		}
	}
	var holders []string // of the first kind that there is; none when no pod lacks a slot
	for _, holders = range [][]string{waiting, unknown, running} {
		if len(holders) > 0 {
			break
		}
	}
	slices.Sort(holders)
	for _, h := range s.holds {
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

// got counts the slots that are known to be the pod's.
func (s *slots) got(pod *Pod) accel.Units {
	ids := slices.Clone(s.listings[pod.Key()])
	for id, h := range s.holds {
		if !h.unasked && slices.Contains(h.inits, initHolder(pod)) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return accel.Units(len(slices.Compact(ids)))
}

// meaning returns the chips of a slot that was given out by an earlier run whose
// state is lost, or by the vendor's own plugin, whose ids are the same; nil while
// that is not known.
func (s *slots) meaning(id string) []accel.DeviceID {
	slot, err := sharing.ParseSlotID(id)
	if err != nil {
		return []accel.DeviceID{} // of nothing that is known here
	}
	for i := range s.pool.items {
		if s.pool.items[i].ID == slot.Device {
			return s.pool.items[i].Chips
		}
	}
	if c, ok := s.remembered[slot.Device]; ok {
		return c.Chips
	}
	if !s.pool.looked || s.pool.found.Err != nil {
		return nil // it may be a board
	}
	return s.boards.Chips(slot.Device)
}

// unserved reports whether plain init containers of the pod may be what kubelet
// asks for: it has some, and has not got all of its slots.
func (s *slots) unserved(pod *Pod) bool {
	request := pod.request(s.pool.config.Resource)
	inits, others := false, false
	for _, c := range request.Containers {
		if c.Kind == accel.InitContainer {
			inits = true
			continue
		}
		others = true
		if s.served[pod.Key()][c.Name] < int(c.Units) {
			return hasInits(request)
		}
	}
	if !inits || others {
		return false
	}
	var got accel.Units
	for _, h := range s.holds {
		if slices.Contains(h.inits, initHolder(pod)) {
			got++
		}
	}
	return got < request.Peak()
}

func (s *slots) holders(chip accel.DeviceID) []PodKey {
	var out []PodKey
	for key, ids := range s.listings {
		if slices.ContainsFunc(ids, func(id string) bool {
			h := s.holds[id]
			return h != nil && slices.Contains(h.chips, chip)
		}) {
			out = append(out, key)
		}
	}
	return out
}

func (s *slots) counts() (map[accel.DeviceID]int, bool) {
	out := map[accel.DeviceID]int{}
	for id := range s.holds {
		if slot, err := sharing.ParseSlotID(id); err == nil {
			out[slot.Device]++
		}
	}
	return out, true
}

// initHolder names a pod in slotHold.inits: namespace, name and UID.
func initHolder(pod *Pod) string { return pod.Namespace + "/" + pod.Name + "/" + pod.UID }

// unknownHolder names a pod in slotHold.inits that the API server does not know:
// namespace and name.
func unknownHolder(key PodKey) string { return key.Namespace + "/" + key.Name + "/" }

func initKey(holder string) PodKey {
	namespace, rest, _ := strings.Cut(holder, "/")
	name, _, _ := strings.Cut(rest, "/")
	return PodKey{namespace, name}
}
