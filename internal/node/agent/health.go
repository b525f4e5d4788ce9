package agent

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/usage"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// healthReporter tells the users of each device that takes no pods any more or
// takes them again, once, however many resources are made of it. Only the
// agent's loop uses it.
type healthReporter struct {
	metrics *metrics
	name    string // of the node
	// node tells the users of the node, pod those of a pod.
	node func(kind events.Kind, message string)
	pod  func(pod *corev1.Pod, kind events.Kind, message string)
	pods podSource
	// claimed returns what the containers of pods have of claims; nil until New has built the
	// claim desk.
	claimed func([]*corev1.Pod) []usage.Container
	// unhealthy is why a device takes no pods, by vendor.
	unhealthy map[string]map[accel.DeviceID]accel.Health
}

// report compares the devices of the parts, and those of claims, with those of the last time.
func (h *healthReporter) report(ctx context.Context, vendor string, parts []*pool, claims []accel.Device) {
	var ways [][]accel.Device
	for _, p := range parts {
		ways = append(ways, see(p, (*alloc.Engine).Devices))
	}
	devices := once(append(ways, claims)...)
	log := klog.FromContext(ctx).WithValues("vendor", vendor)
	now := map[accel.DeviceID]accel.Health{}
	for _, d := range ordered(devices) {
		was, before := h.unhealthy[vendor][d.ID]
		switch {
		case d.Health.Unhealthy:
			now[d.ID] = d.Health
			if before && was.Quarantined.Equal(d.Health.Quarantined) && sameTrouble(was, d.Health) {
				continue
			}
			if !before {
				h.metrics.transitions.WithLabelValues(vendor, becameUnhealthy).Inc()
			}
			log.Info("Device is unhealthy; no new pods are placed on it", "device", d.ID, "index", accel.IndexText(d.Index), "reason",
				d.Health.Reason, "cause", d.Health.Cause)
			what := fmt.Sprintf("%s device %s (%s)", vendor, accel.IndexText(d.Index), d.ID)
			if d.Health.Quarantined.IsZero() {
				h.node(events.DeviceUnhealthy, fmt.Sprintf("%s is unhealthy; no new pods are placed on it: %s", what, d.Health.Reason))
			} else {
				which := "it"
				if d.Parent != "" { // which may be what is in quarantine
					which = fmt.Sprintf("it, or the device %s that it is a partition of,", d.Parent)
				}
				h.node(events.DeviceQuarantined, fmt.Sprintf("%s is in quarantine since %s: %s; no new pods are placed on it until %s is "+
					"released with: kubectl divvy device release %s %s",
					what, d.Health.Quarantined.Format(time.RFC3339), d.Health.Reason, which, h.name, d.ID))
			}
			for _, pod := range h.holders(parts, d.ID) {
				h.pod(pod, events.DeviceUnhealthy, fmt.Sprintf("%s, which the pod holds, is unhealthy: %s", what, d.Health.Reason))
			}
		case before:
			h.metrics.transitions.WithLabelValues(vendor, becameHealthy).Inc()
			log.Info("Device is healthy again", "device", d.ID, "index", accel.IndexText(d.Index))
			h.node(events.DeviceRecovered, fmt.Sprintf("%s device %s (%s) is healthy again; new pods can be placed on it", vendor,
				accel.IndexText(d.Index), d.ID))
		}
	}
	h.metrics.ill(vendor, h.unhealthy[vendor], now, devices)
	h.unhealthy[vendor] = now
}

// once returns each device once, however many ways offer it: healthy if it is in one of them, since
// what one way does not offer any more need not have failed.
func once(ways ...[]accel.Device) map[accel.DeviceID]accel.Device {
	out := map[accel.DeviceID]accel.Device{}
	for _, d := range slices.Concat(ways...) {
		if before, seen := out[d.ID]; !seen || before.Health.Unhealthy && !d.Health.Unhealthy {
			out[d.ID] = d
		}
	}
	return out
}

// claimedChips returns the chips of devices that claims get or hold, with the health that the last discovery
// found; none before the first one. A claim's device shows less: a board has the worst health of its chips, and
// one that a claim holds although it is not offered any more counts as lost there, however healthy it is.
func claimedChips(devices []alloc.ClaimDevice, last discovery) []accel.Device {
	if !last.looked {
		return nil
	}
	found := map[accel.DeviceID]accel.Device{}
	for _, one := range last.found.Devices {
		found[one.ID] = one
	}
	failed := cmp.Or(last.err, last.found.Problem)
	var out []accel.Device
	for i := range devices {
		for _, id := range devices[i].Card.Chips {
			one, here := found[id]
			if !here {
				one = devices[i].Card.Device
				one.ID, one.Health = id, accel.Health{Unhealthy: true, Cause: accel.CauseLost,
					Reason: "the vendor's library does not list the device any more"}
			}
			if failed != nil && (!here || !one.Health.Unhealthy) {
				one.Health = accel.Health{Unhealthy: true, Cause: accel.CauseUnreachable, Reason: failed.Error()}
			}
			out = append(out, one)
		}
	}
	return out
}

// sameTrouble reports whether a device is unhealthy for the same cause as before,
// also when it is well again and not trusted yet.
func sameTrouble(was, is accel.Health) bool {
	if was.Cause != "" || is.Cause != "" {
		return was.Cause == is.Cause
	}
	return strings.HasPrefix(is.Reason, was.Reason) || strings.HasPrefix(was.Reason, is.Reason)
}

// holders returns the pods that hold something of a device, by units or by claims.
func (h *healthReporter) holders(parts []*pool, chip accel.DeviceID) []*corev1.Pod {
	keys, pods := map[alloc.PodKey]bool{}, h.pods.Cached()
	for _, p := range parts {
		for _, key := range p.holders(chip) {
			keys[key] = true
		}
	}
	if h.claimed != nil {
		for _, c := range h.claimed(pods) {
			if c.Device == chip {
				keys[alloc.PodKey{Namespace: c.Namespace, Name: c.Pod}] = true
			}
		}
	}
	var out []*corev1.Pod
	for _, pod := range pods {
		if keys[keyOf(pod)] && !terminal(pod) {
			out = append(out, pod)
		}
	}
	slices.SortFunc(out, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

func ordered(devices map[accel.DeviceID]accel.Device) []accel.Device {
	out := make([]accel.Device, 0, len(devices))
	for _, d := range devices {
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b accel.Device) int { return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID)) })
	return out
}
