package extender

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
)

func TestMayBind(t *testing.T) {
	own := "127.0.0.1"
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Is4() && !p.Addr().IsLoopback() {
			own = p.Addr().String()
		}
	}
	tests := map[string]struct {
		remote  string
		allowed []netip.Prefix
		refused string
	}{
		"loopback":                       {remote: "127.0.0.1:4000"},
		"loopback of IPv6":               {remote: "[::1]:4000"},
		"loopback, mapped":               {remote: "[::ffff:127.0.0.1]:4000"},
		"an address of this host":        {remote: own + ":4000"},
		"another host":                   {remote: "192.0.2.77:4000", refused: "192.0.2.77 is not an address of this host"},
		"another host of IPv6":           {remote: "[2001:db8::1]:4000", refused: "2001:db8::1 is not"},
		"another host that is permitted": {remote: "192.0.2.77:4000", allowed: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}},
		"another host beside a permitted": {remote: "198.51.100.1:4000", allowed: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")},
			refused: "198.51.100.1 is not"},
		"no address": {remote: "@", refused: `parse the caller's address "@"`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			e := &Extender{callers: callers{bindFrom: tt.allowed}}
			r := httptest.NewRequest(http.MethodPost, Prefix+"/bind", nil)
			r.RemoteAddr = tt.remote
			err := e.callers.mayBind(r)
			if tt.refused == "" && err != nil {
				t.Errorf("refused: %v", err)
			}
			if tt.refused != "" && (err == nil || !strings.Contains(err.Error(), tt.refused)) {
				t.Errorf("want a refusal with %q, got %v", tt.refused, err)
			}
		})
	}
}

// Over TLS the address does not matter, and a certificate does.
func TestMayBindOverTLS(t *testing.T) {
	shown := func(name string) [][]*x509.Certificate {
		return [][]*x509.Certificate{{{Subject: pkix.Name{CommonName: name}}}}
	}
	tests := map[string]struct {
		remote  string
		chains  [][]*x509.Certificate
		refused string
	}{
		"kube-scheduler from afar":      {remote: "192.0.2.77:4000", chains: shown(ClientName)},
		"kube-scheduler by the Service": {remote: "@", chains: shown(ClientName)},
		"without a certificate": {remote: "192.0.2.77:4000",
			refused: "bind rejected: no client certificate; over TLS, the one in"},
		"without, from the same host": {remote: "127.0.0.1:4000", refused: "bind rejected: no client certificate; over TLS, the one in"},
		"a certificate made for another": {remote: "127.0.0.1:4000", chains: shown("somebody"),
			refused: `for "somebody", not for "divvy-kube-scheduler"`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			e := &Extender{}
			r := httptest.NewRequest(http.MethodPost, Prefix+"/bind", nil)
			r.RemoteAddr, r.TLS = tt.remote, &tls.ConnectionState{VerifiedChains: tt.chains}
			err := e.callers.mayBind(r)
			if tt.refused == "" && err != nil {
				t.Errorf("refused: %v", err)
			}
			if tt.refused != "" && (err == nil || !strings.Contains(err.Error(), tt.refused)) {
				t.Errorf("want a refusal with %q, got %v", tt.refused, err)
			}
		})
	}
}

func TestBindFromAfarIsRefusedInTheAnswer(t *testing.T) {
	w := newWorld(t)
	r := httptest.NewRequest(http.MethodPost, Prefix+"/bind", strings.NewReader(`{"podName":"p"}`))
	r.RemoteAddr = "192.0.2.77:4000"
	answer := httptest.NewRecorder()
	w.server.Config.Handler.ServeHTTP(answer, r)
	if answer.Code != 200 || !strings.Contains(answer.Body.String(), "bind rejected: 192.0.2.77") {
		t.Errorf("answer is %d %s", answer.Code, answer.Body)
	}
	r = httptest.NewRequest(http.MethodPost, Prefix+"/filter", strings.NewReader(`{"nodenames":["node-a"],"pod":{}}`))
	r.RemoteAddr = "192.0.2.77:4000"
	answer = httptest.NewRecorder()
	w.server.Config.Handler.ServeHTTP(answer, r)
	if strings.Contains(answer.Body.String(), "refused") {
		t.Errorf("a question without consequences was refused: %s", answer.Body)
	}
}
