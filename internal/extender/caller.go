package extender

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/events"
)

// ClientName is the common name of the client certificate that kube-scheduler
// shows over TLS.
const ClientName = "divvy-kube-scheduler"

// callerKey is the key under which a context has the *http.Request of the caller.
type callerKey struct{}

// tell makes an event on a pod. Only who may bind is believed that there is such a
// pod: anybody may ask the other questions, and would choose the pod.
func (e *Extender) tell(ctx context.Context, pod *v1.Pod, kind events.Kind, message string) {
	if e.config.Tell != nil && e.believes(ctx) {
		e.config.Tell(refOf(pod), kind, message)
	}
}

// believes reports whether the caller is one that may bind, also through a replica
// that does not lead.
func (e *Extender) believes(ctx context.Context) bool {
	r, ok := ctx.Value(callerKey{}).(*http.Request)
	return ok && r.Header.Get(ForwardedHeader) != forwardedStranger && e.mayBind(r) == nil
}

// mayBind refuses binds of callers that are nobody to trust with one: a bind acts
// with the extender's own rights.
//
// Over TLS that is who shows no certificate made for kube-scheduler, wherever it
// is. A caller over plain HTTP shows no credentials, so by default only processes
// of the extender's own host may ask for a bind: kube-scheduler beside it on a
// control-plane node. In a pod network of its own, or for a scheduler on another
// node, an administrator names the addresses.
func (e *Extender) mayBind(r *http.Request) error {
	if r.TLS != nil {
		return checkCertificate(r.TLS)
	}
	remote, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return fmt.Errorf("bind refused: the caller's address %q cannot be read: %w", r.RemoteAddr, err)
	}
	from := remote.Addr().Unmap()
	if from.IsLoopback() {
		return nil
	}
	for _, prefix := range e.config.BindFrom {
		if prefix.Contains(from) {
			return nil
		}
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return fmt.Errorf("bind refused: the addresses of this host cannot be read: %w", err)
	}
	for _, a := range own {
		if prefix, err := netip.ParsePrefix(a.String()); err == nil && prefix.Addr().Unmap() == from.WithZone("") {
			return nil
		}
	}
	return fmt.Errorf("bind refused: %s is not an address of this host; --allow-bind-from (chart value extender.allowBindFrom) permits others", from)
}

// checkCertificate goes by certificates that the handshake has verified.
func checkCertificate(state *tls.ConnectionState) error {
	if len(state.VerifiedChains) == 0 {
		return errors.New("bind refused: over TLS it needs the client certificate in Secret divvy-extender-client, and none was shown")
	}
	if name := state.VerifiedChains[0][0].Subject.CommonName; name != ClientName {
		return fmt.Errorf("bind refused: the client certificate is that of %q, not of %q", name, ClientName)
	}
	return nil
}
