package alloc

import (
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// initServed is what is remembered of a pod whose plain init containers were
// served: kubelet does not list them.
type initServed struct {
	request accel.Request
	// next is the position in request of the container after the last one
	// served.
	next int
	// devices are those of the pod, sorted.
	devices []accel.DeviceID
	// units is the most that any of them got.
	units accel.Units
	// ids are what they got, by device; kubelet keeps them for the pod and does
	// not list those that no other container uses.
	ids map[accel.DeviceID][]string
	// at is when the last one was served.
	at time.Time
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

// replaced reports whether kubelet has taken up another pod of the same name:
// one that is shown as served holds less than it must.
func (a *unitAccount) replaced(pod *Pod) bool {
	if !a.holdings.active[pod.Key()] || !pod.Started && !pod.confirmed(a.pool.config.Resource) {
		return false
	}
	listed := a.holdings.pods[pod.Key()]
	for _, c := range pod.request(a.pool.config.Resource).Containers {
		if c.Kind != accel.InitContainer && listed.containers[c.Name].units != c.Units {
			return true
		}
	}
	return false
}

// moved takes units out of the records of other pods than the one that they were
// given to: kubelet gives no unit away that a pod has.
func (a *unitAccount) moved(ids []string, uid string) {
	if len(a.inits) == 0 {
		return
	}
	given := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		given[id] = struct{}{}
	}
	for other, s := range a.inits {
		if other == uid {
			continue
		}
		left := map[accel.DeviceID][]string{}
		for d, some := range s.ids {
			left[d] = slices.DeleteFunc(slices.Clone(some), func(id string) bool { _, gone := given[id]; return gone })
		}
		s.ids = left
		a.inits[other] = s
	}
}

// waiting returns those of pods that kubelet has not served in full, with what they
// hold so far. size is the number of units that kubelet requests, 0 without a request.
func (a *unitAccount) waiting(pods []Pod, size accel.Units) []sharing.Waiting {
	var out []sharing.Waiting
	for i := range pods {
		if w, ok := a.waits(&pods[i], size); ok {
			out = append(out, w)
		}
	}
	return out
}

func (a *unitAccount) waits(pod *Pod, size accel.Units) (sharing.Waiting, bool) {
	request := pod.request(a.pool.config.Resource)
	if len(request.Containers) == 0 || pod.Started {
		return sharing.Waiting{}, false
	}
	w := sharing.Waiting{Pod: pod.PodRef, Request: request, Admitting: a.holdings.active[pod.Key()], At: pod.Created}
	s, begun := a.inits[pod.UID]
	listed := a.holdings.pods[pod.Key()]
	if planned, ok := pod.planned(a.pool.config.Resource); ok {
		// A pod that kubelet is in the midst of may be confirmed already.
		if pod.Planned.Confirmed && !begun && len(listed.containers) == 0 {
			return w, false
		}
		w.Granted, w.At = planned, pod.Planned.At
	}
	if begun {
		w.Next = s.next
	}
	w.Held = partsHeld(s, listed, w.Granted)
	// Kubelet serves in order, so what is before a served container was served too.
	for i, c := range request.Containers {
		if _, served := listed.containers[c.Name]; served {
			w.Next = max(w.Next, i+1)
		}
	}
	if next, forgot := a.forgotten(&w, listed, size); forgot {
		w.Next = next
		if len(w.Held) == 0 {
			for _, d := range a.served[pod.UID].devices {
				w.Held = append(w.Held, sharing.Part{Device: d})
			}
		}
	}
	if w.Next >= len(request.Containers) {
		return w, false
	}
	// Kubelet does not admit a pod that is being deleted, unless it took the pod up
	// before it heard of that.
	return w, !pod.Deleting || len(w.Held) > 0 || w.Admitting
}

// readmitted returns the pods that were served and of which kubelet, which has them in its list, has
// forgotten everything. After its start it admits a pod again that is being deleted and whose
// containers have exited, for the API server still has it.
func (a *unitAccount) readmitted(pods []Pod) []sharing.Waiting {
	var out []sharing.Waiting
	for i := range pods {
		pod := &pods[i]
		granted, ok := pod.planned(a.pool.config.Resource)
		if !ok || !pod.Planned.Confirmed || pod.Ended || !a.active(pod.Key()) || len(a.holdings.pods[pod.Key()].containers) > 0 {
			continue
		}
		out = append(out, sharing.Waiting{Pod: pod.PodRef, Request: pod.request(a.pool.config.Resource), Admitting: true,
			Granted: granted, At: pod.Planned.At})
	}
	return out
}

// forgotten returns the position of the container of size units that kubelet requests for
// the pod if it has dropped some of the pod's allocations, false if it has not. w.Next is
// the position by kubelet's list. UpdateAllocatedDevices of kubelet's device manager drops the
// devices of every pod that was not active when it looked, which may have been just before
// it began to admit the pod. Kubelet continues with the next container, and requests the
// dropped devices again when it starts their containers.
func (a *unitAccount) forgotten(w *sharing.Waiting, listed podUnits, size accel.Units) (int, bool) {
	all := w.Request.Containers
	isListed := func(c accel.ContainerRequest) bool {
		_, ok := listed.containers[c.Name]
		return ok
	}
	if w.Next < len(all) && all[w.Next].Units == size {
		return 0, false
	}
	s, ok := a.served[w.Pod.UID]
	if ok && s.next < len(all) && all[s.next].Units == size && !isListed(all[s.next-1]) {
		return s.next, true
	}
	if w.Next < len(all) {
		return 0, false
	}
	i := slices.IndexFunc(all, func(c accel.ContainerRequest) bool {
		return c.Kind != accel.InitContainer && c.Units == size && !isListed(c)
	})
	return i, i >= 0
}

// partsHeld returns what a pod has of its devices, by what is remembered of its
// init containers and by kubelet's list. A pod for which several devices were
// planned keeps them, also while the units of one of them are all that kubelet
// lists.
func partsHeld(inits initServed, listed podUnits, planned []accel.DeviceID) []sharing.Part {
	devices := union(inits.devices, listed.devices)
	if listed.odd {
		return nil
	}
	if len(devices) == 1 && (len(planned) < 2 || !within(planned, devices)) {
		return []sharing.Part{{Device: devices[0], Units: max(inits.units, listed.units)}}
	}
	if len(devices) > 0 && within(planned, devices) {
		devices = planned
	}
	var parts []sharing.Part
	for _, d := range devices {
		ids := map[string]struct{}{} // containers reuse the units of init containers
		for _, id := range slices.Concat(inits.ids[d], listed.on(d)) {
			ids[id] = struct{}{}
		}
		parts = append(parts, sharing.Part{Device: d, Units: accel.Units(len(ids))})
	}
	return parts
}
