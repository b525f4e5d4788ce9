package agent

import (
	"cmp"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// metrics are what the node daemon tells Prometheus; package metrics has their
// definitions.
type metrics struct {
	units, unitsHeld, healthy, unhealthy *prometheus.GaugeVec
	tiers                                *prometheus.GaugeVec
	mismatches, offered, available       *prometheus.GaugeVec
	served, refused                      *prometheus.CounterVec
	corrections, confirmations           *prometheus.CounterVec
	podResourcesErrors                   prometheus.Counter
	patchErrors                          prometheus.Counter
	transitions                          *prometheus.CounterVec
	quarantined, quarantineUnsaved       *prometheus.GaugeVec
	latency                              *prometheus.HistogramVec

	registry prometheus.Registerer
	all      []prometheus.Collector
}

// register adds a collector, which close takes out again.
func (m *metrics) register(c prometheus.Collector) {
	m.registry.MustRegister(c)
	m.all = append(m.all, c)
}

// close takes all collectors out of the registry, so that another agent of this
// process can put in its own.
func (m *metrics) close() {
	for _, c := range m.all {
		m.registry.Unregister(c)
	}
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		units: defs.NodeDeviceUnits.NewGauges(), unitsHeld: defs.NodeDeviceUnitsHeld.NewGauges(),
		healthy: defs.NodeDeviceHealthy.NewGauges(), tiers: defs.NodeIsolationTier.NewGauges(),
		unhealthy: defs.NodeDeviceUnhealthy.NewGauges(), mismatches: defs.NodeMixedPods.NewGauges(),
		offered:   defs.NodeResourceOffered.NewGauges(),
		available: defs.NodeLibraryAvailable.NewGauges(), served: defs.NodeAllocations.NewCounters(),
		refused:     defs.NodeRefusals.NewCounters(),
		corrections: defs.NodeCorrections.NewCounters(), confirmations: defs.NodeConfirmations.NewCounters(),
		podResourcesErrors: defs.NodePodResourcesErrors.NewCounter(), patchErrors: defs.NodePatchErrors.NewCounter(),
		transitions: defs.NodeDeviceHealthChanges.NewCounters(), latency: defs.NodeAnswerDuration.NewHistograms(),
		quarantined: defs.NodeDeviceQuarantined.NewGauges(), quarantineUnsaved: defs.NodeQuarantineUnsaved.NewGauges(),
		registry: r,
	}
	for _, c := range []prometheus.Collector{
		m.units, m.unitsHeld, m.healthy, m.tiers, m.unhealthy, m.mismatches, m.offered, m.available, m.served, m.refused, m.corrections,
		m.confirmations,
		m.podResourcesErrors, m.patchErrors, m.transitions, m.latency, m.quarantined, m.quarantineUnsaved,
	} {
		m.register(c)
	}
	return m
}

// vendor makes what is counted of a vendor be there before it happens.
func (m *metrics) vendor(name string) {
	m.available.WithLabelValues(name).Set(0)
	for _, to := range []string{becameHealthy, becameUnhealthy} {
		m.transitions.WithLabelValues(name, to)
	}
}

// resource makes what is counted of a resource be there before it happens.
func (m *metrics) resource(name accel.Resource) {
	resource := string(name)
	m.offered.WithLabelValues(resource).Set(0)
	m.served.WithLabelValues(resource)
	m.confirmations.WithLabelValues(resource)
	for _, reason := range alloc.Reasons() {
		m.refused.WithLabelValues(resource, string(reason))
	}
	for _, kind := range []string{grantMoved, grantMissing, grantInvalid} {
		m.corrections.WithLabelValues(resource, kind)
	}
}

// Values of the label to.
const (
	becameHealthy   = "healthy"
	becameUnhealthy = "unhealthy"
)

// Values of the label kind: what was wrong with a grant.
const (
	grantMoved   = "moved"
	grantMissing = "missing"
	grantInvalid = "invalid"
)

// observe sets the gauges of a resource's devices.
func (m *metrics) observe(in accel.Inventory, held map[accel.DeviceID]int) {
	for _, g := range []*prometheus.GaugeVec{m.units, m.unitsHeld, m.healthy, m.tiers} {
		g.DeletePartialMatch(prometheus.Labels{"resource": string(in.Resource)})
	}
	for _, s := range in.Shares {
		labels := []string{string(in.Resource), string(s.ID), accel.IndexText(s.Index)}
		m.units.WithLabelValues(labels...).Set(float64(s.Units))
		m.unitsHeld.WithLabelValues(labels...).Set(float64(held[s.ID]))
		m.healthy.WithLabelValues(labels...).Set(defs.Bool(!s.Health.Unhealthy))
		if tier := s.Isolation.At(time.Now()).Memory; tier != accel.TierNone {
			m.tiers.WithLabelValues(string(in.Resource), string(s.ID), tier.String()).Set(1)
		}
	}
}

// quarantine shows the devices in quarantine, and whether their list cannot be written.
func (m *metrics) quarantine(devices []accel.Quarantine, unsaved error) {
	m.quarantined.Reset()
	for _, q := range devices {
		m.quarantined.WithLabelValues(q.Vendor, string(q.Device), accel.IndexText(q.Index), cmp.Or(q.Cause, "unknown")).Set(1)
	}
	m.quarantineUnsaved.WithLabelValues().Set(defs.Bool(unsaved != nil))
}

// ill shows the devices of a vendor that are unhealthy, and takes away what is not
// true any more.
func (m *metrics) ill(vendor string, was, is map[accel.DeviceID]accel.Health, index map[accel.DeviceID]accel.Device) {
	for id, before := range was {
		if now, still := is[id]; !still || now.Cause != before.Cause {
			m.unhealthy.DeletePartialMatch(prometheus.Labels{"vendor": vendor, "device": string(id)})
		}
	}
	for id, now := range is {
		m.unhealthy.WithLabelValues(vendor, string(id), accel.IndexText(index[id].Index), cmp.Or(now.Cause, "unknown")).Set(1)
	}
}
