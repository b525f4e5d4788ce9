package coalesce

import (
	"context"
	"errors"
	"net"
	"runtime"
	"sync"
	"time"
)

const (
	// mostPending is how much is kept, in bytes, before a Write waits; it is more than
	// a TLS record. As much is being sent at the same time. A client that reads nothing holds
	// no more than both.
	mostPending = 20 << 10
	// keepBuffer is the largest buffer that an idle connection keeps.
	keepBuffer = 4 << 10
	// closeTimeout is how long Close waits for what was written before it to be sent.
	closeTimeout = time.Second
)

// conn is a connection whose Write returns before the bytes are with the kernel. An
// error of sending is that of the next Write.
type conn struct {
	net.Conn

	mu sync.Mutex
	// changed tells of less pending bytes, of an error, and of the end of sending.
	changed sync.Cond
	// pending is what was not sent yet; spare is a buffer that takes turns with it.
	pending, spare []byte
	sending        bool
	err            error
}

// Conn returns a connection that collects what is written to c, and is otherwise c. It
// is safe for concurrent use, as any net.Conn. Deadlines are those of c.
func Conn(c net.Conn) net.Conn {
	k := &conn{Conn: c}
	k.changed.L = &k.mu
	return k
}

// NetConn returns the connection that is written to.
func (c *conn) NetConn() net.Conn { return c.Conn }

// Write takes p in. It waits only where much is pending already, and until p was sent
// where p itself is much: it is not copied then.
func (c *conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	much := len(p) > mostPending
	for c.err == nil && (much && c.sending || len(c.pending) > 0 && len(c.pending)+len(p) > mostPending) {
		c.changed.Wait()
	}
	if c.err != nil {
		return 0, c.err
	}
	if much {
		return c.writeThrough(p)
	}
	c.pending = append(c.pending, p...)
	if !c.sending && len(p) > 0 {
		c.sending = true
		go c.send()
	}
	return len(p), nil
}

// writeThrough sends p while nothing else is sent or pending. It is called with the
// lock.
func (c *conn) writeThrough(p []byte) (int, error) {
	c.sending = true
	c.mu.Unlock()
	n, err := c.Conn.Write(p)
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	c.sending = c.err == nil && len(c.pending) > 0 // what another goroutine wrote meanwhile
	if c.sending {
		go c.send()
	}
	c.changed.Broadcast()
	return n, err
}

func (c *conn) send() {
	runtime.Gosched() // who is about to write more does so first
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.err == nil && len(c.pending) > 0 {
		out := c.pending
		c.pending, c.spare = c.spare[:0], nil
		c.mu.Unlock()
		_, err := c.Conn.Write(out)
		c.mu.Lock()
		if cap(out) <= keepBuffer {
			c.spare = out
		}
		if c.err == nil {
			c.err = err
		}
		c.changed.Broadcast()
	}
	c.sending = false
	c.changed.Broadcast()
}

// Close sends what was written before it, for a short time, and closes the connection.
func (c *conn) Close() error {
	return errors.Join(c.drain(), c.Conn.Close())
}

// CloseWrite sends what was written before it, and tells the other side that nothing
// follows, where the connection can tell it.
func (c *conn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return errors.Join(c.drain(), half.CloseWrite())
}

// drain waits until nothing is being sent, and lets nobody write any more.
func (c *conn) drain() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	var err error
	if c.sending {
		err = c.SetWriteDeadline(time.Now().Add(closeTimeout))
	}
	for c.sending {
		c.changed.Wait()
	}
	if c.err == nil {
		c.err = net.ErrClosed
	}
	return err
}

// Listener returns a listener that accepts the connections of l, corked.
func Listener(l net.Listener) net.Listener { return listener{l} }

type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return Conn(c), nil
}

// DialContext is the function of that name of a net.Dialer.
type DialContext func(ctx context.Context, network, address string) (net.Conn, error)

// Dial returns a function that makes connections by dial, corked.
func Dial(dial DialContext) DialContext {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return Conn(c), nil
	}
}
