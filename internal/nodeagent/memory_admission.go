package nodeagent

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// podsOf returns the pods of this node, among them all that kubelet has taken
// up. When the watch has not delivered one of those yet, or none of those that
// it has delivered can be behind the question for size units, the API server
// is asked.
func (p *memoryPool) podsOf(ctx context.Context, size accel.Units, h *holdings) []*corev1.Pod {
	return p.records.seen(ctx, h.active, func(pods []*corev1.Pod) bool {
		behind := slices.ContainsFunc(waitingPods(pods, p.resource, h, p.inits, p.grant), func(w sharing.Waiting) bool {
			return w.Admitting && w.Request.Containers[w.Next].Units == size
		})
		return !behind || slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return p.replaced(pod, h) })
	})
}

// promised returns the devices that waiting pods were granted: kubelet may not
// have come to them yet.
func (p *memoryPool) promised(pods []*corev1.Pod) map[accel.DeviceID]bool {
	h := p.holdings()
	out := map[accel.DeviceID]bool{}
	if h == nil || p.draining != "" {
		return out
	}
	for _, w := range waitingPods(pods, p.resource, h, p.inits, p.grant) {
		if len(w.Held) == 0 {
			for _, d := range w.Granted {
				out[d] = true
			}
		}
	}
	return out
}

// keptByInits returns the ids that kubelet keeps for plain init containers of
// active pods. They are not on kubelet's list, and kubelet itself may have
// forgotten them (see turn).
func (p *memoryPool) keptByInits(pods []*corev1.Pod, h *holdings) map[string]bool {
	kept := map[string]bool{}
	for _, pod := range pods {
		if s, ok := p.inits[string(pod.UID)]; ok && !terminal(pod) && h.active[podKey{pod.Namespace, pod.Name}] {
			for _, ids := range s.ids {
				for _, id := range ids {
					kept[id] = true
				}
			}
		}
	}
	return kept
}

// replaced reports whether kubelet has taken up another pod of the same name:
// one that is shown as served holds less than it must.
func (p *memoryPool) replaced(pod *corev1.Pod, h *holdings) bool {
	key := podKey{pod.Namespace, pod.Name}
	if !h.active[key] {
		return false
	}
	if g, ok := p.grant(pod); !started(pod) && (!ok || !g.Confirmed) {
		return false
	}
	for _, c := range kube.RequestOf(pod, p.resource).Containers {
		if c.Kind != accel.InitContainer && h.pods[key].containers[c.Name].units != c.Units {
			return true
		}
	}
	return false
}

// strangersDevice returns the device of a pod that the API server does not know
// and that kubelet may be in the midst of, "" when there is none. Kubelet takes
// up one pod, admits it, and takes up the next: with a pod that was not there
// at the last question, this is the first question for it or another new one;
// without, it is for the one that was served last.
func (p *memoryPool) strangersDevice(pods []*corev1.Pod, h *holdings) accel.DeviceID {
	unknown := maps.Clone(h.active)
	for _, pod := range pods {
		delete(unknown, podKey{pod.Namespace, pod.Name})
	}
	holds := false
	for key := range unknown {
		if !p.strangers[key] {
			p.strangerDevice = ""
		}
		holds = holds || slices.Equal(h.pods[key].devices, []accel.DeviceID{p.strangerDevice})
	}
	p.strangers = unknown
	if !holds {
		return ""
	}
	return p.strangerDevice
}
