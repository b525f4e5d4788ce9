package extender

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// Values of the label verb.
const (
	verbFilter     = "filter"
	verbPreempt    = "preempt"
	verbPrioritize = "prioritize"
	verbBind       = "bind"
)

// metrics are what the handlers count. They are always counted, and shown
// when there is a registry. What the hot path counts was looked up by its labels
// at the start.
type metrics struct {
	verbs     map[string]*verbMetrics
	forwarded *prometheus.CounterVec // by result
	panics    prometheus.Counter
}

// verbMetrics are those of one verb.
type verbMetrics struct {
	ok, failed prometheus.Counter
	duration   prometheus.Observer
	inFlight   prometheus.Gauge
}

func newMetrics(registry prometheus.Registerer) (*metrics, error) {
	requests, duration, inFlight := defs.ExtenderRequests.NewCounters(), defs.ExtenderRequestDuration.NewHistograms(),
		defs.ExtenderRequestsInFlight.NewGauges()
	m := &metrics{
		verbs: map[string]*verbMetrics{}, panics: defs.ExtenderPanics.NewCounter(), forwarded: defs.ExtenderForwarded.NewCounters(),
	}
	for _, verb := range []string{verbFilter, verbPreempt, verbPrioritize, verbBind} {
		m.verbs[verb] = &verbMetrics{
			ok: requests.WithLabelValues(verb, "ok"), failed: requests.WithLabelValues(verb, "error"),
			duration: duration.WithLabelValues(verb), inFlight: inFlight.WithLabelValues(verb),
		}
	}
	if registry == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.forwarded, requests, duration, inFlight, m.panics} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *verbMetrics) observe(err error, took time.Duration) {
	if err != nil {
		m.failed.Inc()
	} else {
		m.ok.Inc()
	}
	m.duration.Observe(took.Seconds())
}
