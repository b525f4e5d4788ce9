package extender

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/platform/certs"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
)

// serverName is the name by which clients of all replicas know them.
func (s settings) serverName() string { return s.TLSService + "." + s.TLSNamespace + ".svc" }

// newCertificates returns what keeps the certificates of every replica, whether it
// leads or not.
func newCertificates(s settings, client kubernetes.Interface, registry prometheus.Registerer) (*certs.Manager, error) {
	manager, err := certs.New(certs.Config{
		Client: client, Namespace: s.TLSNamespace, Secret: s.TLSSecret,
		DNSNames:     []string{s.serverName(), s.TLSService + "." + s.TLSNamespace, s.TLSService},
		Mutating:     s.MutatingConfig,
		Validating:   s.ValidatingConfig,
		ConfigMap:    s.TLSConfigMap,
		ClientSecret: s.TLSClientSecret, ClientName: extender.ClientName,
		Overlap: s.TLSOverlap,
	})
	if err != nil {
		return nil, err
	}
	if err := manager.Register(registry); err != nil {
		return nil, fmt.Errorf("metrics of the certificates: %w", err)
	}
	return manager, nil
}

// certificates is what secure needs of a *certs.Manager.
type certificates interface {
	GetCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error)
	ClientCAs() *x509.CertPool
}

// secure returns a server that proves who it is and asks clients, who need not,
// to do the same. Both the certificate and the CAs are those of the moment.
func secure(handler http.Handler, manager certificates) *http.Server {
	server := serve.NewServer(recheck(handler, manager.ClientCAs))
	server.TLSConfig = &tls.Config{
		MinVersion:     tls.VersionTLS12,
		GetCertificate: manager.GetCertificate,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return &tls.Config{
				MinVersion:     tls.VersionTLS12,
				GetCertificate: manager.GetCertificate,
				ClientAuth:     tls.VerifyClientCertIfGiven,
				ClientCAs:      manager.ClientCAs(),
				NextProtos:     []string{"h2", "http/1.1"},
				// What a session was begun with is not checked again when it is resumed.
				SessionTicketsDisabled: true,
			}, nil
		},
	}
	return server
}

// recheck takes from a caller what its handshake has proved, if that would not be proof
// now: the certificate may have expired since, or its CA been given up, and a connection
// lasts as long as its client likes. While the proof holds, the caller has a
// reserve.
func recheck(next http.Handler, accepted func() *x509.CertPool) http.Handler {
	// The last that was proved: all callers but few show one certificate.
	var last atomic.Pointer[proof]
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
			leaf, roots, now := r.TLS.PeerCertificates[0], accepted(), time.Now()
			p := last.Load()
			if p == nil || !p.holds(leaf, roots, now) {
				p = prove(leaf, roots, now)
				last.Store(p)
			}
			if p.err != nil {
				state := *r.TLS
				state.VerifiedChains = nil
				r = r.WithContext(r.Context()) // a copy, as the state is the connection's
				r.TLS = &state
			}
			limit.SetReserve(r.Context(), extender.CheckCertificate(r.TLS) == nil)
		}
		next.ServeHTTP(w, r)
	})
}

// proof is what a certificate proves by the CAs of a moment. It does not change.
type proof struct {
	leaf  *x509.Certificate
	roots *x509.CertPool
	// until is when it proves nothing any more, where err is nil.
	until time.Time
	err   error
}

// prove verifies the certificate of a client.
func prove(leaf *x509.Certificate, roots *x509.CertPool, now time.Time) *proof {
	p := &proof{leaf: leaf, roots: roots}
	var chains [][]*x509.Certificate
	chains, p.err = leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	for _, chain := range chains {
		until := chain[0].NotAfter
		for _, c := range chain[1:] {
			if c.NotAfter.Before(until) {
				until = c.NotAfter
			}
		}
		if until.After(p.until) {
			p.until = until
		}
	}
	return p
}

// holds reports whether the certificate is that one, and still proves the same.
func (p *proof) holds(leaf *x509.Certificate, roots *x509.CertPool, now time.Time) bool {
	return p.err == nil && p.leaf.Equal(leaf) && now.Before(p.until) && p.roots == roots
}

// listeners are the sockets of the program; tls and metrics may be nil.
type listeners struct {
	plain, tls, metrics net.Listener
}

// close closes them all, for a program that does not come to run.
func (l listeners) close() error {
	var errs []error
	for _, one := range []net.Listener{l.plain, l.tls, l.metrics} {
		if one != nil {
			errs = append(errs, one.Close())
		}
	}
	return errors.Join(errs...)
}
