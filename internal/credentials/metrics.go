package credentials

import "github.com/prometheus/client_golang/prometheus"

// Values of the label result.
const (
	resultMade    = "made"
	resultUpdated = "updated"
	resultRemoved = "removed"
	resultFailed  = "failed"
)

type metrics struct {
	copies  *prometheus.CounterVec // by result
	present prometheus.GaugeFunc
}

func newMetrics(present func() float64) *metrics {
	m := &metrics{
		copies: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "divvy_pool_credential_changes_total",
			Help: "Copies of the pool's secrets in namespaces of pods that this replica made, updated or removed, or failed to, by result.",
		}, []string{"result"}),
		present: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "divvy_pool_credential_copies",
			Help: "Copies of the pool's secrets that there are, in all namespaces.",
		}, present),
	}
	for _, result := range []string{resultMade, resultUpdated, resultRemoved, resultFailed} {
		m.copies.WithLabelValues(result)
	}
	return m
}

func (m *metrics) register(r prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{m.copies, m.present} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}
