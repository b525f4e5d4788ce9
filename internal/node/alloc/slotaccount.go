package alloc

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// slotAccount knows which slots containers hold. It is saved, as what an id meant when
// it was given out is remembered with it: the configuration may change under a
// running pod.
type slotAccount struct {
	pool  *pool
	ids   *uuids
	holds map[string]*slotHold
	// sure is true once it is known which slots containers hold: they were
	// remembered, or kubelet told of all its pods. complete is true while kubelet's
	// last list has all pods that run.
	sure, complete bool
	listings       map[PodKey][]string       // slots by pod, of kubelet's last list
	served         map[PodKey]map[string]int // how many of them by container
	taken          map[PodKey]bool           // pods that kubelet has taken up
}

// slotHold is a slot that a container holds.
type slotHold struct {
	// chips are those that came with it, none when that is not known.
	chips []accel.DeviceID
	// inits are the pods (initHolder) whose plain init containers may hold it.
	inits []string
	// unasked is true when it is not known which pod it was given to: kubelet
	// chose it without asking.
	unasked bool
	// guessed is true when it was taken for one that a container reuses of an init
	// container of inits. Kubelet may have given it to another pod, if theirs have
	// ended: its next list tells.
	guessed bool
	// at is when it was given out by this process.
	at time.Time
	// seen is true once kubelet listed it.
	seen bool
	// pod is the one (initHolder) for which kubelet listed it, "" when that is not known.
	pod string
	// lingering is the pod (initHolder) that has the slot only because its containers still run,
	// while kubelet counts it as free, "" for none; since is when that was so first, and stuck is
	// true StuckAfter later.
	lingering string
	since     time.Time
	stuck     bool
}

// StuckAfter is how long containers of a pod that is gone may take to exit. Kubelet gives those of
// a pod that was deleted by force a few seconds. Slots of a pod that takes longer are unhealthy, so
// that no pod is sent to the node for them: kubelet counts them as free.
const StuckAfter = 10 * time.Second

// isHeld is false for a slot that kubelet does not count as held any more, and is to be told of.
func (a *slotAccount) isHeld(id string) bool { return a.holds[id] != nil && !a.holds[id].stuck }

func (a *slotAccount) certain(*item) bool { return a.sure }

func (a *slotAccount) idle() bool { return a.complete && len(a.holds) == 0 }

func (a *slotAccount) ready() error {
	if !a.sure {
		return ErrNotAsked
	}
	return nil
}

// free leaves out slots that would be more than the card's replicas: after their
// number was lowered, slots beyond it may still be held.
func (a *slotAccount) free(it *item) map[string]bool {
	left := max(it.replicas, 1)
	for id, h := range a.holds {
		if it.fits(id, h) {
			left--
		}
	}
	out := map[string]bool{}
	for _, id := range sharing.SlotIDs(nil, it.ID, it.replicas) {
		if a.holds[id] == nil && len(out) < left {
			out[id] = true
		}
	}
	return out
}

func (a *slotAccount) strays(listed map[string]bool) []Unit {
	var out []Unit
	for id, h := range a.holds {
		if !listed[id] && !h.stuck {
			out = append(out, Unit{ID: id, NUMANodes: a.ids.numaOf(id)})
		}
	}
	slices.SortFunc(out, func(a, b Unit) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

func (a *slotAccount) conflict(it *item) string {
	for id, h := range a.holds {
		if it.fits(id, h) {
			if h.stuck && it.replicas == 0 {
				return h.heldBy()
			}
			continue
		}
		if slices.ContainsFunc(h.chips, func(chip accel.DeviceID) bool { return slices.Contains(it.Chips, chip) }) {
			return fmt.Sprintf("%s (%s, before the configuration changed)", givenOutAs(a.pool.config.Resource), id)
		}
	}
	return ""
}

// take makes slots that kubelet lists held, and those that it does not list any
// more free, unless it does not list all of its pods yet, a plain init container
// may be the holder, or containers of the pod still run.
func (a *slotAccount) take(v *View) {
	listings := map[PodKey][]string{}
	served := map[PodKey]map[string]int{}
	active := map[PodKey]bool{}
	ambiguous := map[PodKey]bool{}
	listed := map[string]PodKey{} // which pod lists a slot
	for _, pod := range v.Listed {
		ambiguous[pod.PodKey] = active[pod.PodKey]
		active[pod.PodKey] = true
		for _, c := range pod.Containers {
			for _, id := range c.Units[a.pool.config.Resource] {
				if a.pool.foreign(id) {
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
	alive := map[PodKey]string{} // as initHolder
	complete := v.Complete
	for i := range v.Pods {
		pod := &v.Pods[i]
		named[pod.Key()] = true
		if pod.Ended {
			continue
		}
		alive[pod.Key()] = initHolder(pod)
		request := pod.request(a.pool.config.Resource)
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
	a.note(listed, alive)
	a.listings, a.served, a.taken, a.complete = listings, served, active, complete
	a.attribute(v.Pods, named)
	meant := true
	holds := func(pod string) bool {
		key := initKey(pod)
		return holders[pod] || active[key] && !named[key] // the API server is late
	}
	runs := func(pod string) bool { return v.Running[holderUID(pod)] }
	for id, h := range a.holds {
		_, seen := listed[id]
		lingering := ""
		switch {
		case seen, !complete, !h.seen && v.Now.Sub(h.at) < v.Grace:
		case slices.ContainsFunc(h.inits, holds):
			h.inits = slices.DeleteFunc(slices.Clone(h.inits), func(pod string) bool { return !holds(pod) && !runs(pod) })
		default:
			if lingering = h.first(runs); lingering == "" {
				delete(a.holds, id)
				continue
			}
		}
		h.linger(lingering, v.Now)
		meant = meant && h.chips != nil
	}
	for key := range ambiguous {
		if ambiguous[key] {
			delete(listings, key)
		}
	}
	a.sure = a.sure || complete && meant
}

// unlisted returns the UIDs of the pods that have, or may have, slots which kubelet lists no more.
func (a *slotAccount) unlisted(v *View) []string {
	if len(a.holds) == 0 {
		return nil
	}
	listed, active, served := map[string]bool{}, map[PodKey]bool{}, map[string]bool{}
	for _, pod := range v.Listed {
		active[pod.PodKey] = true
		for _, c := range pod.Containers {
			for _, id := range c.Units[a.pool.config.Resource] {
				listed[id] = true
			}
		}
	}
	for i := range v.Pods { // those have what their init containers had
		served[v.Pods[i].UID] = active[v.Pods[i].Key()] && !v.Pods[i].Ended
	}
	var out []string
	for id, h := range a.holds {
		for _, holder := range h.pods() {
			if uid := holderUID(holder); !listed[id] && uid != "" && !served[uid] {
				out = append(out, uid)
			}
		}
	}
	return out
}

// pods are those that have the slot, or may have it, as initHolder; the first may be "".
func (h *slotHold) pods() []string { return append([]string{h.pod}, h.inits...) }

// first returns the first of the slot's pods of which that is true, "" for none.
func (h *slotHold) first(is func(holder string) bool) string {
	pods := h.pods()
	if i := slices.IndexFunc(pods, is); i >= 0 {
		return pods[i]
	}
	return ""
}

// linger notes the pod whose containers still run, "" for none.
func (h *slotHold) linger(pod string, now time.Time) {
	if pod != h.lingering {
		h.lingering, h.since = pod, now
	}
	h.stuck = pod != "" && now.Sub(h.since) >= StuckAfter
}

// note makes the slots that kubelet lists held. alive are the pods of the API server that have not
// ended, as initHolder.
func (a *slotAccount) note(listed map[string]PodKey, alive map[PodKey]string) {
	for id, key := range listed {
		h := a.holds[id]
		if h == nil {
			if a.pool.config.Draining != "" {
				continue // given out since, in the other way
			}
			h = &slotHold{}
			a.holds[id] = h
		}
		if h.chips == nil {
			h.chips = a.meaning(id)
		}
		// Another pod may have the name of one that was deleted by force and that kubelet still lists.
		if h.pod == "" || initKey(h.pod) != key {
			h.pod = alive[key]
		}
		// Kubelet reuses what an init container has in its own pod only.
		h.inits = slices.DeleteFunc(slices.Clone(h.inits), func(holder string) bool { return initKey(holder) != key })
		h.seen, h.unasked, h.guessed = true, false, false
	}
}

func (a *slotAccount) chips() (map[accel.DeviceID]bool, bool) {
	held := map[accel.DeviceID]bool{}
	for _, h := range a.holds {
		for _, c := range h.chips {
			held[c] = true
		}
	}
	return held, a.sure
}

// open reports whether it is not known yet which pods may hold the slot.
func (h *slotHold) open() bool { return h.guessed || h.unasked && len(h.inits) == 0 }

// attribute finds the pods of slots that kubelet chose by itself and does not
// list: those of plain init containers. The pod is among those that kubelet has in
// the first list after that; what is known later only takes pods away.
func (a *slotAccount) attribute(pods []Pod, named map[PodKey]bool) {
	var open []*slotHold
	for _, h := range a.holds {
		if h.open() {
			open = append(open, h)
		}
	}
	if len(open) == 0 {
		return
	}
	var admitted, running []string
	for i := range pods {
		pod := &pods[i]
		request := pod.request(a.pool.config.Resource)
		switch {
		case !a.taken[pod.Key()] || pod.Ended || !hasInits(request) || a.got(pod) >= request.Peak():
		case pod.Started:
			running = append(running, initHolder(pod))
		default:
			admitted = append(admitted, initHolder(pod))
		}
	}
	for key := range a.taken {
		if !named[key] {
			admitted = append(admitted, unknownHolder(key))
		}
	}
	if len(admitted) == 0 {
		admitted = running
	}
	for _, h := range open {
		// None when no pod lacks a slot.
		inits := slices.Concat(h.inits, admitted)
		slices.Sort(inits)
		h.inits, h.unasked, h.guessed = slices.Compact(inits), true, false
	}
}

// got counts the slots that are known to be the pod's.
func (a *slotAccount) got(pod *Pod) accel.Units {
	ids := slices.Clone(a.listings[pod.Key()])
	for id, h := range a.holds {
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
func (a *slotAccount) meaning(id string) []accel.DeviceID {
	slot, err := sharing.ParseSlotID(id)
	if err != nil {
		return []accel.DeviceID{} // of nothing that is known here
	}
	for i := range a.pool.items {
		if a.pool.items[i].ID == slot.Device {
			return a.pool.items[i].Chips
		}
	}
	if c, ok := a.ids.remembered[slot.Device]; ok {
		return c.Chips
	}
	if !a.pool.looked || a.pool.found.Err != nil {
		return nil // it may be a board
	}
	return a.ids.boards.Chips(slot.Device)
}

// pending reports whether containers of the pod have not got all of their slots.
func (a *slotAccount) pending(pod *Pod) bool {
	request := pod.request(a.pool.config.Resource)
	others := false
	for _, c := range request.Containers {
		if c.Kind == accel.InitContainer {
			continue
		}
		others = true
		if a.served[pod.Key()][c.Name] < int(c.Units) {
			return true
		}
	}
	if others {
		return false // kubelet serves these last
	}
	var got accel.Units
	for _, h := range a.holds {
		if slices.Contains(h.inits, initHolder(pod)) {
			got++
		}
	}
	return got < request.Peak()
}

func (a *slotAccount) holders(chip accel.DeviceID) []PodKey {
	var out []PodKey
	for key, ids := range a.listings {
		if slices.ContainsFunc(ids, func(id string) bool {
			h := a.holds[id]
			return h != nil && slices.Contains(h.chips, chip)
		}) {
			out = append(out, key)
		}
	}
	return out
}

func (a *slotAccount) usage() Usage {
	out := Usage{Known: true, Devices: map[accel.DeviceID]int{}, Slots: a.listings}
	for id := range a.holds {
		if slot, err := sharing.ParseSlotID(id); err == nil {
			out.Devices[slot.Device]++
		}
	}
	return out
}

// fits reports whether a slot that is held is one of the card's as it is offered
// now. Another one may stand for other chips or for all of the device's time.
func (it *item) fits(id string, h *slotHold) bool {
	slot, err := sharing.ParseSlotID(id)
	return err == nil && slot.Device == it.ID && (slot.Replica == sharing.WholeDevice) == (it.replicas == 0) &&
		(len(h.chips) == 0 || slices.Equal(h.chips, it.Chips))
}

// full reports whether kubelet lists as many slots of a pod as the pod needs at
// most. Its plain init containers had none besides: kubelet gives what they had
// to the app containers before anything else.
func full(request accel.Request, listed []string) bool {
	ids := slices.Compact(slices.Sorted(slices.Values(listed)))
	return len(request.Containers) > 0 && accel.Units(len(ids)) >= request.Peak()
}

// initHolder names a pod in slotHold.inits: namespace, name and UID.
func initHolder(pod *Pod) string { return pod.Namespace + "/" + pod.Name + "/" + pod.UID }

// unknownHolder names a pod in slotHold.inits that the API server does not know:
// namespace and name.
func unknownHolder(key PodKey) string { return key.Namespace + "/" + key.Name + "/" }

// holderUID is the UID of an initHolder, "" of an unknownHolder.
func holderUID(holder string) string { return holder[strings.LastIndex(holder, "/")+1:] }

// heldBy says who has the slot.
func (h *slotHold) heldBy() string {
	if h.lingering == "" {
		return "held by another container"
	}
	key := initKey(h.lingering)
	return fmt.Sprintf("held by containers of deleted pod %s/%s, which have not exited", key.Namespace, key.Name)
}

func initKey(holder string) PodKey {
	namespace, rest, _ := strings.Cut(holder, "/")
	name, _, _ := strings.Cut(rest, "/")
	return PodKey{namespace, name}
}
