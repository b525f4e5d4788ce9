package admissionreview

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// NewMetrics registers what is counted of reviews, with the results that each webhook may have, and
// returns what New tells of them. Nothing is registered where the registry is nil.
func NewMetrics(registry prometheus.Registerer, results map[string][]string) (func(webhook, result string, took time.Duration), error) {
	reviews, duration := metrics.WebhookReviews.NewCounters(), metrics.WebhookReviewDuration.NewHistograms()
	for webhook, possible := range results {
		for _, result := range possible {
			reviews.WithLabelValues(webhook, result) // so that it is there before it happens
		}
	}
	observe := func(webhook, result string, took time.Duration) {
		reviews.WithLabelValues(webhook, result).Inc()
		duration.WithLabelValues(webhook).Observe(took.Seconds())
	}
	if registry == nil {
		return observe, nil
	}
	return observe, errors.Join(registry.Register(reviews), registry.Register(duration))
}
