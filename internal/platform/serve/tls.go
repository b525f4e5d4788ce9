package serve

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
)

// Certificates are the certificate of a server and the CAs of its clients, as they are at the
// moment. *certs.Manager is one.
type Certificates interface {
	GetCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error)
	ClientCAs() *x509.CertPool
}

// NewTLSServer returns a server with a certificate that asks clients, which need not have one, for
// theirs. A client that trusted accepts has a reserve, see package limit.
func NewTLSServer(handler http.Handler, manager Certificates, trusted func(*tls.ConnectionState) bool) *http.Server {
	server := NewServer(recheck(handler, manager.ClientCAs, trusted))
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

// recheck takes from a client what its handshake has proved, if that would not be proof
// now: the certificate may have expired since, or its CA have been removed, and a connection
// lasts as long as its client likes.
func recheck(next http.Handler, accepted func() *x509.CertPool, trusted func(*tls.ConnectionState) bool) http.Handler {
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
			limit.SetReserve(r.Context(), trusted(r.TLS))
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
