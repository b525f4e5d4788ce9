package extender

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what the extender counts. They are always counted, and shown
// when there is a registry.
type metrics struct {
	requests   *prometheus.CounterVec   // by verb and result
	duration   *prometheus.HistogramVec // by verb
	nodes      *prometheus.CounterVec   // by verdict
	bindErrors *prometheus.CounterVec   // by cause
	panics     prometheus.Counter
}

func newMetrics(registry prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "divvy_extender_requests_total",
			Help: "Requests of kube-scheduler by verb and result (ok, error).",
		}, []string{"verb", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "divvy_extender_request_duration_seconds",
			Help:    "Time to answer a request of kube-scheduler, from its header to the answer.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2.5, 12), // 0.1 ms to 2.4 s
		}, []string{"verb"}),
		nodes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "divvy_extender_node_verdicts_total",
			Help: "Nodes that filter looked at, by verdict (fits, nodeUnknown, noDeviceFits, largerThanDevice, severalResources).",
		}, []string{"verdict"}),
		bindErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "divvy_extender_bind_errors_total",
			Help: "Binds that failed, by cause.",
		}, []string{"cause"}),
		panics: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "divvy_extender_panics_total",
			Help: "Requests on which the extender failed by a mistake of its own.",
		}),
	}
	if registry == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.requests, m.duration, m.nodes, m.bindErrors, m.panics} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) observe(verb string, err error, took time.Duration) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.requests.WithLabelValues(verb, result).Inc()
	m.duration.WithLabelValues(verb).Observe(took.Seconds())
}
