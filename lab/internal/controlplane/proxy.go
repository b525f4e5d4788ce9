package controlplane

import (
	"context"
	"errors"
	"fmt"
	"net"
)

// Service is the extender's, of which no more than its EndpointSlices are there.
const Service = "divvy-extender"

// Proxy is a "divvy-control proxy" that runs.
type Proxy struct {
	*Process
	// URL is what kube-scheduler is to ask in place of a replica's own.
	URL string
}

// StartProxy starts the program with an administrator's rights, and waits until it
// listens.
func (c *ControlPlane) StartProxy(ctx context.Context, program string) (*Proxy, error) {
	ports, err := FreePorts(1)
	if err != nil {
		return nil, err
	}
	address := fmt.Sprintf("%s:%d", loopback, ports[0])
	p := &Proxy{URL: "https://" + address + route}
	if p.Process, err = StartProcess("proxy", program, c.path("proxy.log"), nil,
		"proxy", "--kubeconfig="+c.Kubeconfig(), "--listen="+address, "--extender-service="+Namespace+"/"+Service); err != nil {
		return nil, err
	}
	err = c.await(ctx, p.Process, func(ctx context.Context) error {
		connection, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err == nil {
			err = connection.Close()
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start the proxy: %w", err), p.Stop(stopGrace))
	}
	return p, nil
}
