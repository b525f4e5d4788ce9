package extender

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// ClientName is the common name of the client certificate that kube-scheduler
// shows over TLS.
const ClientName = "divvy-kube-scheduler"

// callerKey is the key under which a context has whether the caller may bind.
type callerKey struct{}

// callers decides who may bind.
type callers struct {
	bindFrom []netip.Prefix // Config.BindFrom
	host     host
}

// context says whether the caller of the request is one that may bind, also through a
// replica that does not lead.
func (c *callers) context(r *http.Request) context.Context {
	may := r.Header.Get(ForwardedHeader) != forwardedStranger && c.mayBind(r) == nil
	return context.WithValue(r.Context(), callerKey{}, may)
}

func mayBind(ctx context.Context) bool {
	may, _ := ctx.Value(callerKey{}).(bool)
	return may
}

// mayBind says why the caller may not bind: a bind acts with the extender's own rights.
//
// Over TLS a caller needs a certificate made for kube-scheduler, wherever it is. A caller
// over plain HTTP shows no credentials, so by default only processes of the extender's
// own host may ask for a bind: kube-scheduler beside it on a control-plane node. In a pod
// network of its own, or for a scheduler on another node, an administrator names the
// addresses.
func (c *callers) mayBind(r *http.Request) error {
	if r.TLS != nil {
		return CheckCertificate(r.TLS)
	}
	remote, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return fmt.Errorf("bind rejected: parse the caller's address %q: %w", r.RemoteAddr, err)
	}
	return c.checkAddress(remote.Addr().Unmap())
}

// MayBindFrom reports whether callers over plain HTTP from that address may bind.
func (e *Extender) MayBindFrom(address netip.Addr) bool {
	return e.callers.checkAddress(address) == nil
}

// checkAddress says why callers over plain HTTP from that address may not bind.
func (c *callers) checkAddress(from netip.Addr) error {
	if from.IsLoopback() {
		return nil
	}
	for _, prefix := range c.bindFrom {
		if prefix.Contains(from) {
			return nil
		}
	}
	own, err := c.host.addresses()
	if err != nil {
		return fmt.Errorf("bind rejected: list the addresses of this host: %w", err)
	}
	if own[from.WithZone("")] {
		return nil
	}
	return fmt.Errorf("bind rejected: %s is not an address of this host; use --allow-bind-from (chart value extender.allowBindFrom) to "+
		"permit others", from)
}

// hostAge is how long the addresses of the host are used after they were read.
const hostAge = 5 * time.Second

// host caches the addresses of this host.
type host struct {
	mu    sync.Mutex
	at    time.Time // when they were read
	known map[netip.Addr]bool
}

// addresses returns them. The result is not changed any more.
func (h *host) addresses() (map[netip.Addr]bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.known != nil && time.Since(h.at) < hostAge {
		return h.known, nil
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	h.at, h.known = time.Now(), make(map[netip.Addr]bool, len(own))
	for _, a := range own {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil {
			h.known[prefix.Addr().Unmap()] = true
		}
	}
	return h.known, nil
}

// CheckCertificate says why a caller over TLS may not bind. It goes by certificates that
// the handshake has verified.
func CheckCertificate(state *tls.ConnectionState) error {
	if len(state.VerifiedChains) == 0 {
		return errors.New("bind rejected: no client certificate; over TLS, the one in Secret divvy-extender-client is required")
	}
	if name := state.VerifiedChains[0][0].Subject.CommonName; name != ClientName {
		return fmt.Errorf("bind rejected: the client certificate is for %q, not for %q", name, ClientName)
	}
	return nil
}
