package nodeagent

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// initServed is what is remembered of a pod whose plain init containers were
// served: the pod-resources API does not list them.
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

// waitingPods returns those of pods that are bound to this node and that
// kubelet has not served in full, with what they hold so far.
func waitingPods(pods []*corev1.Pod, resource accel.Resource, h *holdings, inits map[string]initServed, grant func(*corev1.Pod) (accel.Grant, bool)) []sharing.Waiting {
	var out []sharing.Waiting
	for _, pod := range pods {
		request := kube.RequestOf(pod, resource)
		if len(request.Containers) == 0 || started(pod) {
			continue
		}
		w := sharing.Waiting{
			Pod:       accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name},
			Request:   request,
			Admitting: h.active[podKey{pod.Namespace, pod.Name}],
			At:        pod.CreationTimestamp.Time,
		}
		if g, ok := grant(pod); ok {
			_, begun := inits[string(pod.UID)]
			// A pod that kubelet is in the midst of may be confirmed already.
			if g.Confirmed && !begun && len(h.pods[podKey{pod.Namespace, pod.Name}].containers) == 0 {
				continue
			}
			w.Granted, w.At = grantedDevices(g), g.At
		}
		s, begun := inits[string(pod.UID)]
		if begun {
			w.Next = s.next
		}
		w.Held = partsHeld(s, h.pods[podKey{pod.Namespace, pod.Name}], w.Granted)
		if p, ok := h.pods[podKey{pod.Namespace, pod.Name}]; ok {
			// Kubelet serves in order, so what is before a served container was
			// served too.
			for i, c := range request.Containers {
				if _, served := p.containers[c.Name]; served {
					w.Next = max(w.Next, i+1)
				}
			}
		}
		if w.Next >= len(request.Containers) {
			continue
		}
		if pod.DeletionTimestamp != nil && len(w.Held) == 0 && !w.Admitting {
			// Kubelet does not admit a pod that is being deleted, unless it took
			// the pod up before it heard of that.
			continue
		}
		out = append(out, w)
	}
	return out
}

// partsHeld returns what a pod has of its devices, by what is remembered of its
// init containers and by kubelet's list. A pod that was granted several devices
// keeps them, also while the units of one of them are all that kubelet lists.
func partsHeld(inits initServed, listed podHolding, granted []accel.DeviceID) []sharing.Part {
	devices := union(inits.devices, listed.devices)
	if listed.odd {
		return nil
	}
	if len(devices) == 1 && (len(granted) < 2 || !within(granted, devices)) {
		return []sharing.Part{{Device: devices[0], Units: max(inits.units, listed.units)}}
	}
	if len(devices) > 0 && within(granted, devices) {
		devices = granted
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

// started reports whether kubelet must have admitted the pod already, or never
// will.
func started(pod *corev1.Pod) bool {
	if pod.Status.Phase != corev1.PodPending && pod.Status.Phase != "" {
		return true
	}
	for _, statuses := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range statuses {
			if statuses[i].ContainerID != "" || statuses[i].State.Running != nil || statuses[i].State.Terminated != nil {
				return true
			}
		}
	}
	return false
}

// terminal reports whether the pod's containers have ended for good.
func terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// grantedAt is when a pod that is found without a grant is said to have got its
// device.
func grantedAt(now time.Time, g accel.Grant, valid bool) time.Time {
	if valid && !g.At.IsZero() {
		return g.At
	}
	return now
}
