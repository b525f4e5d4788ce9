package nodeagent

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/accel"
)

// metrics are what the node daemon tells Prometheus. docs/operations.md lists
// them.
type metrics struct {
	units, unitsHeld, healthy *prometheus.GaugeVec
	mismatches                *prometheus.GaugeVec
	served, refused           *prometheus.CounterVec
	corrections               *prometheus.CounterVec
	podResourcesErrors        prometheus.Counter
	patchErrors               prometheus.Counter
}

func newMetrics(r prometheus.Registerer) *metrics {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "divvy", Subsystem: "node", Name: name, Help: help}, labels)
		r.MustRegister(v)
		return v
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "divvy", Subsystem: "node", Name: name, Help: help}, labels)
		r.MustRegister(v)
		return v
	}
	counter := func(name, help string) prometheus.Counter {
		v := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "divvy", Subsystem: "node", Name: name, Help: help})
		r.MustRegister(v)
		return v
	}
	return &metrics{
		units:              gauge("device_units", "Units that a device is cut into.", "resource", "device", "index"),
		unitsHeld:          gauge("device_units_held", "Units of a device that containers hold, as kubelet tells.", "resource", "device", "index"),
		healthy:            gauge("device_healthy", "1 while a device takes new pods, else 0.", "resource", "device", "index"),
		mismatches:         gauge("mixed_pods", "Pods whose containers hold units of several devices; always 0.", "resource"),
		served:             counters("allocations_total", "Containers that got units.", "resource"),
		refused:            counters("refusals_total", "Containers that were refused.", "resource"),
		corrections:        counters("corrections_total", "Pods whose annotations were corrected to what kubelet gave.", "resource"),
		podResourcesErrors: counter("pod_resources_errors_total", "Questions to kubelet's pod-resources API that failed."),
		patchErrors:        counter("patch_errors_total", "Writes to the API server that failed."),
	}
}

// observe sets the gauges of a pool's devices.
func (m *metrics) observe(p *pool, h *holdings) {
	for _, g := range []*prometheus.GaugeVec{m.units, m.unitsHeld, m.healthy} {
		g.DeletePartialMatch(prometheus.Labels{"resource": string(p.resource)})
	}
	for _, s := range p.inventory().Shares {
		labels := []string{string(p.resource), string(s.ID), strconv.Itoa(s.Index)}
		m.units.WithLabelValues(labels...).Set(float64(s.Units))
		m.unitsHeld.WithLabelValues(labels...).Set(float64(h.perDevice[s.ID]))
		m.healthy.WithLabelValues(labels...).Set(healthyValue(s.Health))
	}
}

func healthyValue(h accel.Health) float64 {
	if h.Unhealthy {
		return 0
	}
	return 1
}
