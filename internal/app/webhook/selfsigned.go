package webhook

import (
	"crypto/tls"
	"fmt"

	"k8s.io/client-go/util/cert"
)

// selfSigned makes a certificate that nobody trusts and kubelet's probes do not
// check.
func selfSigned(name string) (*tls.Certificate, error) {
	certificate, key, err := cert.GenerateSelfSignedCertKey(name, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("create a provisional certificate: %w", err)
	}
	pair, err := tls.X509KeyPair(certificate, key)
	if err != nil {
		return nil, fmt.Errorf("create a provisional certificate: %w", err)
	}
	return &pair, nil
}
