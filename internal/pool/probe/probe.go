package probe

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/divvy-gpu/divvy/internal/pool/token"
)

// Verdict is what was found out about an address.
type Verdict string

// The verdicts.
const (
	// OK: the server answers and its certificate is the pool's.
	OK Verdict = "ok"
	// Malformed: the address is not host:port; nothing was asked.
	Malformed Verdict = "malformed"
	// NoName: the host's name has no address.
	NoName Verdict = "no-name"
	// Refused: the host is there and nothing listens on the port.
	Refused Verdict = "refused"
	// Unreachable: this machine has no way to the host.
	Unreachable Verdict = "unreachable"
	// Timeout: no connection within the time.
	Timeout Verdict = "timeout"
	// Silent: a connection, and then no answer within the time.
	Silent Verdict = "silent"
	// Closed: a connection that the other side ended.
	Closed Verdict = "closed"
	// NotTLS: something answers that does not speak TLS.
	NotTLS Verdict = "not-tls"
	// HandshakeRefused: the server speaks TLS and does not want to.
	HandshakeRefused Verdict = "tls-refused"
	// UnknownAuthority: the certificate is not signed by the pool's authority.
	UnknownAuthority Verdict = "unknown-authority"
	// Expired: the server's certificate, or the authority's, is over or is not
	// valid yet.
	Expired Verdict = "expired"
	// WrongName: the certificate is for other names than the address.
	WrongName Verdict = "wrong-name"
	// BadCertificate: something else is wrong with it.
	BadCertificate Verdict = "bad-certificate"
	// Canceled: the check was ended before an answer.
	Canceled Verdict = "canceled"
)

// Result is what was found out about one address.
type Result struct {
	Address string  `json:"address"`
	Verdict Verdict `json:"verdict"`
	// Detail says it in words.
	Detail string `json:"detail"`
	// Milliseconds is how long it took.
	Milliseconds int64 `json:"milliseconds"`
	// NotAfter is when the server's certificate ends; nil when none was seen.
	NotAfter *time.Time `json:"certificateNotAfter,omitempty"`
}

// Config is how to ask.
type Config struct {
	// Roots are what servers are verified with. Nil trusts nobody.
	Roots *x509.CertPool
	// ServerName is the name that certificates must have; "" for the host of
	// each address.
	ServerName string
	// Timeout bounds the time for one address; 5 seconds when 0.
	Timeout time.Duration
	// Parallel bounds how many addresses are asked at once; 16 when 0.
	Parallel int
	// Dial connects; nil for a net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Now is the time at which certificates must be valid; nil for time.Now.
	Now func() time.Time
}

// Defaults of a Config.
const (
	DefaultTimeout  = 5 * time.Second
	DefaultParallel = 16
)

// Check asks all addresses and returns the results in their order. It returns
// when all are done, or soon after the context is.
func Check(ctx context.Context, c Config, addresses []string) []Result {
	if c.Roots == nil {
		c.Roots = x509.NewCertPool() // nil would mean the system's
	}
	c.Timeout, c.Parallel = cmp.Or(c.Timeout, DefaultTimeout), cmp.Or(c.Parallel, DefaultParallel)
	if c.Dial == nil {
		c.Dial = new(net.Dialer).DialContext
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	results := make([]Result, len(addresses))
	var checks errgroup.Group
	checks.SetLimit(c.Parallel)
	for i, address := range addresses {
		checks.Go(func() error {
			results[i] = c.check(ctx, address)
			return nil
		})
	}
	_ = checks.Wait() // none fails
	return results
}

func (c Config) check(ctx context.Context, address string) Result {
	r := Result{Address: address}
	if err := token.CheckAddress(address); err != nil {
		r.Verdict, r.Detail = Malformed, err.Error()
		return r
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		r.Verdict, r.Detail = Malformed, err.Error()
		return r
	}
	begun := time.Now()
	ask, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	conn, err := c.Dial(ask, "tcp", address)
	if err != nil {
		r.Verdict, r.Detail = c.unconnected(ctx, err)
		r.Milliseconds = time.Since(begun).Milliseconds()
		return r
	}
	defer conn.Close() //nolint:errcheck // nothing was written that could be lost
	name := host
	if c.ServerName != "" {
		name = c.ServerName
	}
	secure := tls.Client(conn, &tls.Config{RootCAs: c.Roots, ServerName: name, Time: c.Now, MinVersion: tls.VersionTLS12})
	err = secure.HandshakeContext(ask)
	r.Milliseconds = time.Since(begun).Milliseconds()
	var unverified *tls.CertificateVerificationError
	switch {
	case err == nil:
		leaf := secure.ConnectionState().PeerCertificates[0]
		end := leaf.NotAfter.UTC()
		r.NotAfter, r.Verdict = &end, OK
		r.Detail = fmt.Sprintf("its certificate is valid until %s", end.Format(time.DateOnly))
	case errors.As(err, &unverified):
		if len(unverified.UnverifiedCertificates) > 0 {
			end := unverified.UnverifiedCertificates[0].NotAfter.UTC()
			r.NotAfter = &end
		}
		r.Verdict, r.Detail = c.unverified(unverified, name)
	default:
		r.Verdict, r.Detail = c.unanswered(ctx, err)
	}
	return r
}

// unconnected says why there is no connection. ctx is that of the whole check.
func (c Config) unconnected(ctx context.Context, err error) (Verdict, string) {
	var dns *net.DNSError
	switch {
	case ctx.Err() != nil:
		return Canceled, "the check was ended"
	case errors.As(err, &dns) && dns.IsNotFound:
		return NoName, "the DNS server of this machine has no address for the name"
	case errors.As(err, &dns):
		return NoName, "the DNS lookup of the name failed: " + dns.Err
	case errors.Is(err, syscall.ECONNREFUSED):
		return Refused, "connection refused: the server is not running, it uses another port, or a firewall rejects the connection"
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL):
		return Unreachable, "no route from this machine: " + cause(err)
	case timedOut(err):
		return Timeout, fmt.Sprintf("no connection within %s: the host is down, or a firewall drops packets on the way", c.Timeout)
	}
	return Unreachable, cause(err)
}

func (c Config) unanswered(ctx context.Context, err error) (Verdict, string) {
	var header tls.RecordHeaderError
	var remote *net.OpError
	switch {
	case ctx.Err() != nil:
		return Canceled, "the check was ended"
	case timedOut(err):
		return Silent, fmt.Sprintf("the server accepts the connection but does not respond within %s", c.Timeout)
	case errors.As(err, &header):
		return NotTLS, "the peer does not speak TLS: it is not a server of a pool, or a proxy intercepts the connection"
	case errors.As(err, &remote) && remote.Op == "remote error": // an alert
		return HandshakeRefused, "the server aborts the TLS handshake: " + strings.TrimPrefix(cause(err), "tls: ")
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return Closed, "the peer closes the connection without a TLS handshake: it is not a server of a pool, or a proxy or firewall " +
			"intercepts the connection"
	}
	return HandshakeRefused, cause(err)
}

func (c Config) unverified(err *tls.CertificateVerificationError, name string) (Verdict, string) {
	var authority x509.UnknownAuthorityError
	var invalid x509.CertificateInvalidError
	var names x509.HostnameError
	switch {
	case errors.As(err, &names):
		return WrongName, fmt.Sprintf("its certificate is not for %s but for %s", name, namesOf(names.Certificate))
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil:
		whose := "its certificate"
		if leaf := err.UnverifiedCertificates; len(leaf) > 0 && !invalid.Cert.Equal(leaf[0]) {
			whose = "the certificate of the authority"
		}
		if c.Now().Before(invalid.Cert.NotBefore) {
			return Expired, fmt.Sprintf("%s is not valid before %s; check the clock of this machine", whose,
				invalid.Cert.NotBefore.UTC().Format(time.RFC3339))
		}
		return Expired, fmt.Sprintf("%s expired on %s", whose, invalid.Cert.NotAfter.UTC().Format(time.RFC3339))
	case errors.As(err, &authority):
		issuer := "another authority"
		if leaf := err.UnverifiedCertificates; len(leaf) > 0 {
			issuer = fmt.Sprintf("%q", clipped(leaf[0].Issuer.String()))
		}
		return UnknownAuthority, fmt.Sprintf("its certificate was issued by %s, which is not the authority in ca.crt", issuer)
	}
	return BadCertificate, "its certificate cannot be verified: " + strings.TrimPrefix(err.Err.Error(), "x509: ")
}

// maxNames bounds the names of a certificate that a message lists, maxText any
// foreign text in it, in bytes.
const (
	maxNames = 5
	maxText  = 200
)

func namesOf(cert *x509.Certificate) string {
	var all []string
	if cert != nil {
		all = append(all, cert.DNSNames...)
		for _, ip := range cert.IPAddresses {
			all = append(all, ip.String())
		}
	}
	switch {
	case len(all) == 0:
		return "no name at all"
	case len(all) > maxNames:
		all = append(all[:maxNames], fmt.Sprintf("%d more", len(all)-maxNames))
	}
	return clipped(strings.Join(all, ", "))
}

func clipped(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}

func timedOut(err error) bool {
	var slow net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || errors.As(err, &slow) && slow.Timeout()
}

// cause is the innermost reason, without what was being done to which address,
// which the reader sees beside it.
func cause(err error) string {
	for {
		var op *net.OpError
		var sys *os.SyscallError
		switch {
		case errors.As(err, &op) && op.Err != nil:
			err = op.Err
		case errors.As(err, &sys):
			return sys.Err.Error()
		default:
			return clipped(err.Error())
		}
	}
}
