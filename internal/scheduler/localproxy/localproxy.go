// Package localproxy is a TCP proxy on a control-plane node, between kube-scheduler and
// the replicas of the extender.
//
// kube-scheduler asks the extender in its one scheduling loop. A connection to a
// machine that is gone, or cut off, keeps it waiting for its whole HTTP timeout, for
// one pod after the other, and every pod of the cluster with it, until it gives the
// connection up, which takes most of a minute. It cannot be told otherwise. The proxy
// can: it probes the replicas all the time, cuts connections to one that stops
// answering, and rejects connections at once while none answers. kube-scheduler then
// fails the pod that it asked about, goes on with the others, and tries that one again.
//
// The proxy sees no requests: TLS, with kube-scheduler's client certificate, is between
// kube-scheduler and the extender.
package localproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

const (
	// probeEvery is how often each replica is probed, and probeTimeout how long it may
	// take to answer. One that was cut off is known after the sum of both.
	probeEvery   = 200 * time.Millisecond
	probeTimeout = 300 * time.Millisecond
	// dialTimeout bounds the connection to a replica that answered its last probe.
	dialTimeout = 500 * time.Millisecond
	// rejectTimeout is how long a client may take to end a connection that was rejected.
	rejectTimeout = time.Second
	// maxConnections bounds the connections at a time; kube-scheduler needs one or two.
	maxConnections = 100
)

// Config is what a Proxy needs. All of it is required.
type Config struct {
	// Replicas returns the addresses, host:port, of the replicas that there are, those
	// first that are to be preferred. It must not block.
	Replicas func() []string
	// Probe returns nil when the replica at the address answers, and whether it leads.
	Probe func(ctx context.Context, address string) (leads bool, err error)
}

// Proxy hands connections to a replica that answers: the one that leads, if it does. It
// is safe for concurrent use.
type Proxy struct {
	config Config

	mu sync.Mutex // guards what follows
	// replicas are those of the last look, in its order.
	replicas []*replica
	// answering is what was logged last.
	answering []string
}

// replica is one replica of the extender.
type replica struct {
	address string
	probing bool
	leads   bool
	// up ends, by down, when the replica stops answering. It is nil until it has
	// answered for the first time.
	up   context.Context //nolint:containedctx // connections end with it
	down context.CancelCauseFunc
}

func (r *replica) answers() bool { return r.up != nil && r.up.Err() == nil }

func (r *replica) fail(err error) {
	if r.answers() {
		r.down(err)
	}
}

// New returns a proxy.
func New(c Config) *Proxy { return &Proxy{config: c} }

// Serve accepts connections until ctx ends, and closes the listener then. It returns
// nil when ctx ended and all connections are closed.
func (p *Proxy) Serve(ctx context.Context, listener net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	work.Go(func() { p.watch(ctx, &work) })
	defer context.AfterFunc(ctx, func() { listener.Close() })() //nolint:errcheck // nothing is lost
	var clients clientConns
	for {
		client, err := listener.Accept()
		switch {
		case ctx.Err() != nil:
			return nil // the listener was closed
		case err != nil:
			return fmt.Errorf("accept connections of kube-scheduler: %w", err)
		}
		c := clients.add(client)
		work.Go(func() {
			defer clients.remove(c)
			p.hand(ctx, c)
		})
	}
}

// clientConns are the connections of clients, at most maxConnections. It is safe for
// concurrent use.
type clientConns struct {
	mu  sync.Mutex
	all map[*clientConn]struct{}
}

// clientConn is the connection of a client.
type clientConn struct {
	net.Conn
	// used is when it was read from last, in ns since 1970.
	used atomic.Int64
}

func (c *clientConn) Read(to []byte) (int, error) {
	n, err := c.Conn.Read(to)
	c.used.Store(time.Now().UnixNano())
	return n, err
}

// CloseWrite ends what is sent to the client.
func (c *clientConn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// add adds a connection. If there are too many, the one is closed that was idle for
// longest, so that no client keeps kube-scheduler out.
func (s *clientConns) add(conn net.Conn) *clientConn {
	c := &clientConn{Conn: conn}
	c.used.Store(time.Now().UnixNano())
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = map[*clientConn]struct{}{}
	}
	if len(s.all) >= maxConnections {
		var idle *clientConn
		for one := range s.all {
			if idle == nil || one.used.Load() < idle.used.Load() {
				idle = one
			}
		}
		delete(s.all, idle)
		reset(idle)
	}
	s.all[c] = struct{}{}
	return c
}

func (s *clientConns) remove(c *clientConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, c)
}

func (p *Proxy) watch(ctx context.Context, work *sync.WaitGroup) {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for {
		for _, r := range p.due() {
			work.Go(func() { p.probe(ctx, r) })
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// due takes over the replicas that there are now, and returns those to probe. One
// that is being probed is not among them.
func (p *Proxy) due() (out []*replica) {
	addresses := p.config.Replicas()
	p.mu.Lock()
	defer p.mu.Unlock()
	known := map[string]*replica{}
	for _, r := range p.replicas {
		known[r.address] = r
	}
	p.replicas = p.replicas[:0]
	for _, address := range addresses {
		r := cmp.Or(known[address], &replica{address: address})
		delete(known, address)
		p.replicas = append(p.replicas, r)
		if !r.probing {
			r.probing = true
			out = append(out, r)
		}
	}
	for _, r := range known {
		r.fail(errors.New("the replica no longer exists"))
	}
	return out
}

func (p *Proxy) probe(ctx context.Context, r *replica) {
	bounded, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	leads, err := p.config.Probe(bounded, r.address)
	p.mu.Lock()
	defer p.mu.Unlock()
	r.probing = false
	switch {
	case ctx.Err() != nil:
		return
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		// Its process has ended, which the next probe shows, or it has closed the
		// probe's connection alone, since other clients use up its memory.
		r.leads = false
	case err != nil:
		r.leads = false
		r.fail(err)
	default:
		r.leads = leads
		if !r.answers() {
			r.up, r.down = context.WithCancelCause(context.Background())
		}
	}
	p.log(ctx, err)
}

// log says which replicas answer, when that changed. p.mu is held.
func (p *Proxy) log(ctx context.Context, cause error) {
	var now []string
	for _, r := range p.replicas {
		if r.answers() {
			now = append(now, r.address)
		}
	}
	slices.Sort(now)
	if slices.Equal(now, p.answering) {
		return
	}
	p.answering = now
	if logger := klog.FromContext(ctx); cause != nil {
		logger.Info("A replica of the extender stopped responding", "answering", now, "reason", cause.Error())
	} else {
		logger.Info("A replica of the extender responds", "answering", now)
	}
}

// pick returns the replica for a connection, and a context that ends when it stops
// answering; nil while none answers.
func (p *Proxy) pick() (best *replica, up context.Context) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.replicas {
		if r.answers() && (best == nil || r.leads && !best.leads) {
			best, up = r, r.up
		}
	}
	return best, up
}

// hand hands the connection to a replica that answers, or rejects it.
func (p *Proxy) hand(ctx context.Context, client net.Conn) {
	for {
		r, up := p.pick()
		if r == nil {
			reject(client)
			return
		}
		dialer := net.Dialer{Timeout: dialTimeout}
		server, err := dialer.DialContext(ctx, "tcp", r.address)
		switch {
		case err == nil:
			join(ctx, up, client, server)
			return
		case ctx.Err() != nil:
			reset(client)
			return
		}
		p.mu.Lock()
		r.fail(err) // it ended since its last probe
		p.log(ctx, err)
		p.mu.Unlock()
	}
}

// join copies between the two connections until both sides have ended, or one fails,
// or one of the contexts ends.
func join(ctx, up context.Context, client, server net.Conn) {
	cut := func() { reset(client); reset(server) }
	defer context.AfterFunc(ctx, cut)()
	defer context.AfterFunc(up, cut)()
	var copying sync.WaitGroup
	for _, way := range [][2]net.Conn{{server, client}, {client, server}} {
		copying.Go(func() {
			to, from := way[0], way[1]
			if _, err := io.Copy(to, from); err != nil {
				cut()
				return
			}
			// What was sent before the end still arrives.
			if half, ok := to.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
				cut()
			}
		})
	}
	copying.Wait()
	_ = client.Close() // both have ended
	_ = server.Close()
}

// reject ends a connection without an answer. The client reads its end, which is the
// same text in each of its errors, where a reset has the client's port in it.
func reject(client net.Conn) {
	if half, ok := client.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		// A close with unread data would be a reset.
		_ = client.SetReadDeadline(time.Now().Add(rejectTimeout))
		_, _ = io.Copy(io.Discard, client)
	}
	_ = client.Close()
}

// reset closes a connection at once, so that its other side hears of it even where what
// was sent before does not arrive any more.
func reset(c net.Conn) {
	if of, ok := c.(*clientConn); ok {
		c = of.Conn
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // a connection that is closed already
	}
	_ = c.Close()
}
