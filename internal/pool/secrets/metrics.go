package secrets

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

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
		copies:  defs.PoolCredentialChanges.NewCounters(),
		present: defs.PoolCredentialCopies.NewGaugeFunc(nil, present),
	}
	for _, result := range []string{resultMade, resultUpdated, resultRemoved, resultFailed} {
		m.copies.WithLabelValues(result)
	}
	return m
}

func (m *metrics) register(r prometheus.Registerer) error {
	return errors.Join(r.Register(m.copies), r.Register(m.present))
}
