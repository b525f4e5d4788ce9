package limit

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"
)

// kernelBuffer bounds what the kernel keeps for each direction of a connection without a
// reserve, in bytes. It counts as the container's memory as well.
const kernelBuffer = 64 << 10

// Listener returns a listener of the connections of l that the Limiter admits. It is
// for the server that is called port in metrics; secure says that it speaks TLS. What
// is rejected is closed, after an answer of status 503 where the client would read it.
func (l *Limiter) Listener(inner net.Listener, port string, secure bool) net.Listener {
	for _, bound := range []string{"connection", "request", "bytes", "displaced"} {
		l.rejected.WithLabelValues(port, bound) // so that it exists before it happens
	}
	return &listener{Listener: inner, limiter: l, port: port, secure: secure}
}

type listener struct {
	net.Listener
	limiter *Limiter
	port    string
	secure  bool
}

// Accept returns the next connection that is admitted.
func (l *listener) Accept() (net.Conn, error) {
	for {
		inner, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: inner, limiter: l.limiter, port: l.port, address: addressOf(inner)}
		bytes := int64(connBytes)
		if l.secure {
			bytes += tlsBytes
		}
		if c.admit(bytes) == nil {
			return c, nil
		}
		l.limiter.rejected.WithLabelValues(l.port, "connection").Inc()
		if !l.secure {
			_ = inner.SetWriteDeadline(time.Now().Add(time.Second)) // nothing was written before, so it fits the kernel's buffer
			_, _ = inner.Write([]byte(rejection))
		}
		_ = inner.Close()
	}
}

// rejection is what a client reads whose connection is not admitted.
var rejection = "HTTP/1.1 503 Service Unavailable\r\n" +
	"Content-Type: text/plain; charset=utf-8\r\n" +
	"Retry-After: 1\r\n" +
	"Connection: close\r\n\r\n" + ErrBusy.Error() + "\n"

// addressOf returns the remote address, the zero value where it is none of IP.
func addressOf(c net.Conn) netip.Addr {
	remote, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return netip.Addr{}
	}
	return remote.Addr().Unmap()
}

// conn is a connection that counts.
type conn struct {
	net.Conn
	limiter *Limiter
	port    string
	address netip.Addr
	// hasReserve is true where the address has one, whatever certificate is shown.
	hasReserve bool
	closing    sync.Once

	// The Limiter's lock guards what follows.
	base *account
	// used is true once something was asked.
	used      bool
	requests  int
	rejecting int
	// idleSince is the moment since when there are no requests.
	idleSince int64
}

// admit counts the connection with what it takes before it asks anything.
func (c *conn) admit(bytes int64) error {
	l := c.limiter
	c.hasReserve = l.hasReserve(c.address)
	budget, key := &l.shared, any(c.address)
	if c.hasReserve {
		budget, key = &l.reserved, any(c)
	} else if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetReadBuffer(kernelBuffer)
		_ = tcp.SetWriteBuffer(kernelBuffer)
	}
	base, err := l.open(budget, key, c, bytes)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	c.base = base
	l.idle(c)
	return nil
}

// idle notes that the connection has no requests. The Limiter is locked.
func (l *Limiter) idle(c *conn) {
	l.moment++
	c.idleSince = l.moment
}

// Close closes the connection, which counts no longer.
func (c *conn) Close() error {
	err := c.Conn.Close()
	c.closing.Do(func() { c.limiter.close(c.base) })
	return err
}

// CloseWrite says to the other side that nothing follows, where the connection can.
func (c *conn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

// abort ends the connection and all that is sent or read on it. It counts until the
// server closes it.
func (c *conn) abort() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // what was not read yet is not sent any more
	}
	_ = c.Conn.Close()
}

type connKey struct{}

// ConnContext is for the field of that name of http.Server, whose Listener is one of a
// Limiter.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if secure, ok := c.(*tls.Conn); ok {
		c = secure.NetConn()
	}
	if counted, ok := c.(*conn); ok {
		return context.WithValue(ctx, connKey{}, counted)
	}
	return ctx
}
