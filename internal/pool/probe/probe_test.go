package probe

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// authority signs certificates of a pool.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

var serial atomic.Int64

func make509(t *testing.T, template *x509.Certificate, by *authority) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(serial.Add(1))
	parent, signer := template, key
	if by != nil {
		parent, signer = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

// newAuthority is valid for a year from a time on.
func newAuthority(t *testing.T, name string, from time.Time) *authority {
	t.Helper()
	return make509(t, &x509.Certificate{Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: from.AddDate(1, 0, 0),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil)
}

func (a *authority) roots() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

// certificate is for 127.0.0.1 unless the change says something else.
func (a *authority) certificate(t *testing.T, change func(*x509.Certificate)) tls.Certificate {
	t.Helper()
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "server"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter:    time.Now().AddDate(0, 1, 0),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	if change != nil {
		change(template)
	}
	leaf := make509(t, template, a)
	return tls.Certificate{Certificate: [][]byte{leaf.cert.Raw}, PrivateKey: leaf.key}
}

// listen calls serve for every connection, until the test ends.
func listen(t *testing.T, serve func(net.Conn)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer conn.Close() //nolint:errcheck // the test is over for it
				serve(conn)
			})
		}
	})
	t.Cleanup(func() {
		l.Close() //nolint:errcheck // the test is over for it
		all.Wait()
	})
	return l.Addr().String()
}

// speak is a server of a pool, as far as TLS goes.
func speak(t *testing.T, config *tls.Config) (address string) {
	t.Helper()
	return listen(t, func(conn net.Conn) {
		_ = tls.Server(conn, config).Handshake() // the client tells
	})
}

// hear takes what the client says first and ends the connection.
func hear(c net.Conn) { _, _ = c.Read(make([]byte, 1<<16)) }

// silent takes what the client says and waits until it goes.
func silent(c net.Conn) {
	hear(c)
	hear(c)
}

// greet speaks first, and not TLS.
func greet(c net.Conn) {
	_, _ = c.Write([]byte("SSH-2.0-OpenSSH_9.6\r\n"))
	hear(c)
}

func serverWith(cert tls.Certificate) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
}

func TestVerdicts(t *testing.T) {
	pool := newAuthority(t, "pool", time.Now().AddDate(0, -1, 0))
	other := newAuthority(t, "other", time.Now().AddDate(0, -1, 0))
	old := newAuthority(t, "old", time.Now().AddDate(-2, 0, 0))
	good := serverWith(pool.certificate(t, nil))
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := closed.Addr().String()
	closed.Close() //nolint:errcheck // the test is over for it
	fails := func(err error) func(*Config) {
		return func(c *Config) {
			c.Dial = func(context.Context, string, string) (net.Conn, error) {
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
			}
		}
	}

	tests := map[string]struct {
		address string
		change  func(*Config)
		want    Verdict
		detail  string
		section string
	}{
		"well": {address: speak(t, good), want: OK, detail: "its certificate is valid until 20"},
		"well, by another name": {address: speak(t,
			serverWith(pool.certificate(t, func(c *x509.Certificate) { c.IPAddresses, c.DNSNames = nil, []string{"pool.example.com"} }))),
			change: func(c *Config) { c.ServerName = "pool.example.com" }, want: OK},
		"expired": {address: speak(t, serverWith(pool.certificate(t, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().AddDate(0, -2, 0), time.Date(2024, 5, 6, 7, 8, 9, 0, time.UTC)
		}))), want: Expired, detail: "its certificate expired on 2024-05-06T07:08:09Z", section: CaseToken},
		"not valid yet": {address: speak(t,
			serverWith(pool.certificate(t, func(c *x509.Certificate) { c.NotBefore = time.Now().Add(24 * time.Hour) }))),
			want: Expired, detail: "check the clock of this machine", section: CaseToken},
		"an authority that expired": {address: speak(t, serverWith(old.certificate(t, nil))),
			change: func(c *Config) { c.Roots = old.roots() },
			want:   Expired, detail: "the certificate of the authority expired on", section: CaseToken},
		"another authority": {address: speak(t, serverWith(other.certificate(t, nil))), want: UnknownAuthority,
			detail: `its certificate was issued by "CN=other", which is not the authority in ca.crt`, section: CaseToken},
		"no authority at all": {address: speak(t, good), change: func(c *Config) { c.Roots = nil }, want: UnknownAuthority,
			section: CaseToken},
		"another name": {address: speak(t, serverWith(pool.certificate(t, func(c *x509.Certificate) {
			c.IPAddresses, c.DNSNames = []net.IP{net.IPv4(10, 0, 0, 1)}, []string{"pool.example.com"}
		}))), want: WrongName, detail: "its certificate is not for 127.0.0.1 but for pool.example.com, 10.0.0.1", section: CaseToken},
		"no name": {address: speak(t, serverWith(pool.certificate(t, func(c *x509.Certificate) { c.IPAddresses = nil }))), want: WrongName,
			detail: "no name at all", section: CaseToken},
		"for clients alone": {address: speak(t,
			serverWith(pool.certificate(t, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} }))),
			want: BadCertificate, detail: "cannot be verified", section: CaseToken},
		"no certificate": {address: speak(t, &tls.Config{MinVersion: tls.VersionTLS12,
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return nil, errors.New("none") }}),
			want: HandshakeRefused, detail: "the server aborts the TLS handshake", section: CaseToken},
		"takes connections and says nothing": {address: listen(t, silent),
			change: func(c *Config) { c.Timeout = 200 * time.Millisecond }, want: Silent, detail: "does not respond within 200ms",
			section: CaseToken},
		"ends the connection": {address: listen(t, hear), want: Closed, detail: "the peer closes the connection without a TLS handshake",
			section: CaseToken},
		"speaks something else": {address: listen(t, greet),
			want: NotTLS, detail: "does not speak TLS", section: CaseToken},
		"nobody listens": {address: nobody, want: Refused, detail: "connection refused", section: CaseNetwork},
		"no way": {address: "10.1.1.1:1", change: fails(os.NewSyscallError("connect", syscall.EHOSTUNREACH)), want: Unreachable,
			detail: "no route from this machine: no route to host", section: CaseNetwork},
		"no network": {address: "10.1.1.1:1", change: fails(os.NewSyscallError("connect", syscall.ENETUNREACH)), want: Unreachable,
			detail: "network is unreachable", section: CaseNetwork},
		"no rights": {address: "10.1.1.1:1", change: fails(os.NewSyscallError("connect", syscall.EACCES)), want: Unreachable,
			detail: "permission denied", section: CaseNetwork},
		"kernel gave up": {address: "10.1.1.1:1", change: fails(os.NewSyscallError("connect", syscall.ETIMEDOUT)), want: Timeout,
			section: CaseNetwork},
		"no answer to the connection": {address: "10.1.1.1:1", change: func(c *Config) {
			c.Timeout = 100 * time.Millisecond
			c.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
				<-ctx.Done()
				return nil, &net.OpError{Op: "dial", Err: ctx.Err()}
			}
		}, want: Timeout, detail: "no connection within 100ms", section: CaseNetwork},
		"no such name": {address: "pool.example.com:1",
			change: fails(&net.DNSError{Err: "no such host", Name: "pool.example.com", IsNotFound: true}),
			want:   NoName, detail: "the DNS server of this machine has no address for the name", section: CaseNetwork},
		"no answer of the DNS": {address: "pool.example.com:1",
			change: fails(&net.DNSError{Err: "i/o timeout", Name: "pool.example.com", IsTimeout: true}),
			want:   NoName, detail: "the DNS lookup of the name failed: i/o timeout", section: CaseNetwork},
		"no port":    {address: "10.1.1.1", want: Malformed, detail: "has no port: write 10.1.1.1:56001", section: CaseServers},
		"no address": {address: "a b:1", want: Malformed, section: CaseServers},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := Config{Roots: pool.roots(), Timeout: time.Minute}
			if tt.change != nil {
				tt.change(&c)
			}
			got := Check(t.Context(), c, []string{tt.address})
			if len(got) != 1 || got[0].Address != tt.address {
				t.Fatalf("results %+v", got)
			}
			if r := got[0]; r.Verdict != tt.want || !strings.Contains(r.Detail, tt.detail) || r.Detail == "" {
				t.Errorf("%s: %s, want %s: %s", r.Verdict, r.Detail, tt.want, tt.detail)
			}
			section := got[0].Verdict.Section()
			if section != tt.section {
				t.Errorf("section %q, want %q", section, tt.section)
			}
			if c := Explain(section); section != "" && (c.Section != section || c.Title == "" || c.Pods == "" || len(c.Do) == 0) {
				t.Errorf("section %s is not explained: %+v", section, c)
			}
			if seen := got[0].NotAfter != nil; seen != (tt.want == OK || tt.want == Expired || tt.want == UnknownAuthority ||
				tt.want == WrongName || tt.want == BadCertificate) {
				t.Errorf("end of the certificate %v with %s", got[0].NotAfter, tt.want)
			}
		})
	}
}

// Many addresses are asked at once, and no more than allowed; results are in the
// order of the addresses.
func TestManyAreAskedAtOnce(t *testing.T) {
	const parallel, all = 4, 40
	var now, most atomic.Int64
	arrived := make(chan struct{}, all)
	release := make(chan struct{})
	c := Config{Parallel: parallel, Timeout: time.Minute, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		n := now.Add(1)
		defer now.Add(-1)
		for old := most.Load(); n > old; old = most.Load() {
			if most.CompareAndSwap(old, n) {
				break
			}
		}
		arrived <- struct{}{}
		select {
		case <-release:
		case <-ctx.Done():
		}
		return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	}}
	go func() {
		for range parallel { // they are there at the same time, or this waits for ever
			<-arrived
		}
		close(release)
	}()
	var addresses []string
	for i := range all {
		addresses = append(addresses, net.JoinHostPort("10.0.0.1", string(rune('1'+i%9))))
	}
	for i, r := range Check(t.Context(), c, addresses) {
		if r.Address != addresses[i] || r.Verdict != Refused {
			t.Errorf("result %d: %+v", i, r)
		}
	}
	if most.Load() != parallel {
		t.Errorf("%d were asked at once, want %d", most.Load(), parallel)
	}
}

// Ctrl-C ends the check, whatever the servers do.
func TestCheckEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	mute := listen(t, func(c net.Conn) {
		cancel()
		silent(c)
	})
	results := Check(ctx, Config{Timeout: time.Hour, Parallel: 1}, []string{mute, mute, mute})
	for _, r := range results {
		if r.Verdict != Canceled {
			t.Errorf("verdict %s: %s", r.Verdict, r.Detail)
		}
	}
}
