package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	resourceapi "k8s.io/api/resource/v1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// claimReports count and time what kubelet asks for claims, and report rejections on the pods.
type claimReports struct {
	prepared *prometheus.CounterVec
	latency  *prometheus.HistogramVec
	events   *events.Recorder
}

func newClaimReports(a *Agent) claimReports {
	r := claimReports{prepared: defs.NodeClaimPreparations.NewCounters(), latency: defs.NodeClaimPreparationDuration.NewHistograms(),
		events: a.events}
	if a.o.Config.AllocationPath != config.PathPlugin {
		a.metrics.register(r.prepared)
		a.metrics.register(r.latency)
	}
	return r
}

// preparedWell is the result of a Prepare that was not rejected.
const preparedWell = "ok"

// answered returns what takes note of answers of a vendor's driver.
func (r claimReports) answered(vendor string) func([]*resourceapi.ResourceClaim, time.Duration, error) {
	r.prepared.WithLabelValues(vendor, preparedWell)
	for _, reason := range alloc.Reasons() {
		r.prepared.WithLabelValues(vendor, string(reason))
	}
	return func(claims []*resourceapi.ResourceClaim, took time.Duration, err error) {
		r.latency.WithLabelValues(vendor).Observe(took.Seconds())
		if err == nil {
			r.prepared.WithLabelValues(vendor, preparedWell).Inc()
			return
		}
		r.prepared.WithLabelValues(vendor, string(alloc.ReasonOf(err))).Inc()
		var names []string
		for _, claim := range claims {
			names = append(names, claim.Name)
		}
		message := fmt.Sprintf("the devices of claim %s cannot be prepared; kubelet retries in about a minute: %v",
			strings.Join(names, ", "), err)
		reported := map[string]bool{}
		for _, claim := range claims {
			for _, pod := range claim.Status.ReservedFor {
				if uid := string(pod.UID); pod.Resource == "pods" && !reported[uid] {
					reported[uid] = true
					r.events.Once(events.OnPod(claim.Namespace, pod.Name, uid), events.ClaimNotPrepared, err.Error(), message)
				}
			}
		}
	}
}

// misused reports a container that does not have what it uses.
func (r claimReports) misused(use dra.Use, err error) {
	r.events.Once(events.OnPod(use.Namespace, use.Pod, use.PodUID), events.ClaimMisused, use.Container+err.Error(), err.Error())
}

// publishDrivers writes how devices are published for claims, on nodes that serve them.
func (d *claimDesk) publishDrivers(ctx context.Context, p *publisher) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	var drivers []wire.ClaimDriver
	if d.serves {
		for _, vendor := range slices.Sorted(maps.Keys(d.servers)) {
			drivers = append(drivers, d.servers[vendor].Report())
		}
	}
	value, err := wire.EncodeClaimDrivers(drivers)
	if err != nil || value == node.Annotations[wire.ClaimDriversAnnotation] {
		return err
	}
	return p.annotate(ctx, wire.ClaimDriversAnnotation, value)
}
