package certs

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

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
		expiry:    defs.CertificateExpiry.NewGauges(),
		rotations: defs.CertificateRotations.NewCounters(),
		bundles:   defs.CABundleWrites.NewCounters(),
		failures:  defs.CertificateFailures.NewCounter(),
	}
	for _, kind := range []string{kindCertificate, kindCA} {
		m.rotations.WithLabelValues(kind)
	}
	return m
}

func (m *metrics) register(r prometheus.Registerer) error {
	return errors.Join(r.Register(m.expiry), r.Register(m.rotations), r.Register(m.bundles), r.Register(m.failures))
}
