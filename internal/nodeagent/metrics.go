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
	transitions               *prometheus.CounterVec
	latency                   *prometheus.HistogramVec

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
	m := &metrics{registry: r}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: "divvy", Subsystem: "node", Name: name, Help: help}, labels)
		m.register(v)
		return v
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "divvy", Subsystem: "node", Name: name, Help: help}, labels)
		m.register(v)
		return v
	}
	counter := func(name, help string) prometheus.Counter {
		v := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "divvy", Subsystem: "node", Name: name, Help: help})
		m.register(v)
		return v
	}
	m.latency = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: "divvy", Subsystem: "node", Name: "answer_seconds",
		Help:    "Time to answer a question of kubelet, which admits no other pod meanwhile.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
	}, []string{"resource", "question"})
	m.register(m.latency)
	m.units = gauge("device_units", "Units that a device is cut into.", "resource", "device", "index")
	m.unitsHeld = gauge("device_units_held", "Units of a device that containers hold, as kubelet tells.", "resource", "device", "index")
	m.healthy = gauge("device_healthy", "1 while a device takes new pods, else 0.", "resource", "device", "index")
	m.mismatches = gauge("mixed_pods", "Pods whose containers hold units of several devices; always 0.", "resource")
	m.served = counters("allocations_total", "Containers that got units.", "resource")
	m.refused = counters("refusals_total", "Containers that were refused.", "resource")
	m.corrections = counters("corrections_total", "Pods whose annotations were corrected to what kubelet gave.", "resource")
	m.podResourcesErrors = counter("pod_resources_errors_total", "Questions to kubelet's pod-resources API that failed.")
	m.patchErrors = counter("patch_errors_total", "Writes to the API server that failed.")
	m.transitions = counters("device_health_changes_total", "Changes of a device's health, by what it became.", "vendor", "to")
	return m
}

// observe sets the gauges of a resource's devices.
func (m *metrics) observe(in accel.Inventory, held map[accel.DeviceID]int) {
	for _, g := range []*prometheus.GaugeVec{m.units, m.unitsHeld, m.healthy} {
		g.DeletePartialMatch(prometheus.Labels{"resource": string(in.Resource)})
	}
	for _, s := range in.Shares {
		labels := []string{string(in.Resource), string(s.ID), strconv.Itoa(s.Index)}
		m.units.WithLabelValues(labels...).Set(float64(s.Units))
		m.unitsHeld.WithLabelValues(labels...).Set(float64(held[s.ID]))
		m.healthy.WithLabelValues(labels...).Set(healthyValue(s.Health))
	}
}

func healthyValue(h accel.Health) float64 {
	if h.Unhealthy {
		return 0
	}
	return 1
}
