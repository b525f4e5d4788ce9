package supervisor

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// libraryMetrics are how long the vendors' libraries take. They outlive agents, as
// a call that hangs does.
type libraryMetrics struct {
	duration *prometheus.HistogramVec
	hung     *prometheus.CounterVec
}

func newLibraryMetrics() libraryMetrics {
	return libraryMetrics{duration: metrics.NodeLibraryCallDuration.NewHistograms(), hung: metrics.NodeLibraryCallsHung.NewCounters()}
}

// observer returns what the backend of a vendor tells.
func (m libraryMetrics) observer(vendor string) func(call string, took time.Duration, hung bool) {
	return func(call string, took time.Duration, hung bool) {
		m.duration.WithLabelValues(vendor, call).Observe(took.Seconds())
		if hung {
			m.hung.WithLabelValues(vendor, call).Inc()
		}
	}
}
