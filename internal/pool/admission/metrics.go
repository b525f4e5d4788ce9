package admission

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// metrics are what the handler counts.
type metrics struct {
	reviews  *prometheus.CounterVec   // by webhook and result
	duration *prometheus.HistogramVec // by webhook
}

func newMetrics(registry prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		reviews:  defs.WebhookReviews.NewCounters(),
		duration: defs.WebhookReviewDuration.NewHistograms(),
	}
	for _, webhook := range []string{"mutate", "validate"} {
		for _, result := range []string{admissionreview.Converted, admissionreview.Allowed, admissionreview.Denied, admissionreview.Bad,
			admissionreview.Error} {
			if webhook == "mutate" || result != admissionreview.Converted {
				m.reviews.WithLabelValues(webhook, result) // so that it is there before it happens
			}
		}
	}
	if registry == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.reviews, m.duration} {
		if err := registry.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *metrics) observe(webhook, result string, took time.Duration) {
	m.reviews.WithLabelValues(webhook, result).Inc()
	m.duration.WithLabelValues(webhook).Observe(took.Seconds())
}
