package extender

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
)

// mayBind refuses a bind from afar. A bind acts with the extender's own rights,
// and a caller over plain HTTP shows no credentials, so by default only
// processes of the extender's own host may ask for one: kube-scheduler beside
// it on a control-plane node. In a pod network of its own, or for a scheduler
// on another node, an administrator names the addresses.
func (e *Extender) mayBind(r *http.Request) error {
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
