package certs

import "github.com/prometheus/client_golang/prometheus"

// Values of the label kind.
const (
	kindCertificate = "certificate"
	kindCA          = "ca"
)

type metrics struct {
	expiry    *prometheus.GaugeVec   // by kind
	rotations *prometheus.CounterVec // by kind
	bundles   *prometheus.CounterVec // by configuration
	failures  prometheus.Counter
}

func newMetrics() *metrics {
	m := &metrics{
		expiry: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "divvy_webhook_certificate_expiry_timestamp_seconds",
			Help: "When what is served expires, in seconds since 1970, by kind (certificate, ca).",
		}, []string{"kind"}),
		rotations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "divvy_webhook_certificate_rotations_total",
			Help: "Certificates and CAs that this replica put in the place of others, by kind (certificate, ca).",
		}, []string{"kind"}),
		bundles: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "divvy_webhook_ca_bundle_writes_total",
			Help: "Times that this replica wrote caBundle into a webhook configuration, by its name.",
		}, []string{"configuration"}),
		failures: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "divvy_webhook_certificate_failures_total",
			Help: "Passes over the certificates that failed and were tried again.",
		}),
	}
	for _, kind := range []string{kindCertificate, kindCA} {
		m.rotations.WithLabelValues(kind)
	}
	return m
}

func (m *metrics) register(r prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{m.expiry, m.rotations, m.bundles, m.failures} {
		if err := r.Register(c); err != nil {
			return err
		}
	}
	return nil
}
