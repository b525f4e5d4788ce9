package extender

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/platform/certs"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
)

// newCertificates returns what keeps the certificates of every replica, whether it
// leads or not.
func newCertificates(t TLS, client kubernetes.Interface, registry prometheus.Registerer) (*certs.Manager, error) {
	manager, err := certs.New(certs.Config{
		Client: client, Namespace: t.namespace(), Secret: t.Secret,
		DNSNames:     []string{t.serverName(), t.Service + "." + t.namespace(), t.Service},
		Mutating:     t.MutatingConfig,
		Validating:   t.ValidatingConfig,
		ConfigMap:    t.ConfigMap,
		ClientSecret: t.ClientSecret, ClientName: extender.ClientName,
		Overlap: t.Overlap,
	})
	if err != nil {
		return nil, err
	}
	if err := manager.Register(registry); err != nil {
		return nil, fmt.Errorf("metrics of the certificates: %w", err)
	}
	return manager, nil
}
