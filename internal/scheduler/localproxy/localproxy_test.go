package localproxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// patience is how long something that is bound to come may take.
const patience = 2 * time.Minute

// backend answers each line with its name and that line, as long as it is not frozen.
type backend struct {
	name     string
	listener net.Listener

	mu      sync.Mutex
	silent  bool  // probes fail
	fails   error // of probes, nil for none
	leading bool
	frozen  chan struct{} // closed when it goes on; nil while it does
}

func (b *backend) set(change func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change()
}

func (b *backend) freeze() {
	b.set(func() { b.silent, b.frozen = true, make(chan struct{}) })
}

func (b *backend) serve() {
	for {
		c, err := b.listener.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close() //nolint:errcheck // a test's
			for lines := bufio.NewScanner(c); lines.Scan(); {
				b.mu.Lock()
				frozen := b.frozen
				b.mu.Unlock()
				if frozen != nil {
					<-frozen
				}
				if lines.Text() == "end" {
					_, _ = c.Write(bytes.Repeat([]byte("x"), 1<<20))
					return
				}
				fmt.Fprintf(c, "%s %s\n", b.name, lines.Text())
			}
		}()
	}
}

type world struct {
	t        *testing.T
	address  string
	backends map[string]*backend // by address

	mu    sync.Mutex
	order []string
}

// newWorld runs a proxy before backends of these names.
func newWorld(t *testing.T, names ...string) (*world, []*backend) {
	t.Helper()
	w := &world{t: t, backends: map[string]*backend{}}
	var all []*backend
	for _, name := range names {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		b := &backend{name: name, listener: listener}
		w.backends[listener.Addr().String()] = b
		w.order, all = append(w.order, listener.Addr().String()), append(all, b)
		t.Cleanup(func() {
			listener.Close() //nolint:errcheck // it may be closed already
			b.set(func() {
				if b.frozen != nil {
					close(b.frozen)
				}
			})
		})
		go b.serve()
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.address = listener.Addr().String()
	p := New(Config{
		Replicas: func() []string {
			w.mu.Lock()
			defer w.mu.Unlock()
			return append([]string(nil), w.order...)
		},
		Probe: func(_ context.Context, address string) (bool, error) {
			b := w.backends[address]
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.silent {
				return false, errors.New("no answer")
			}
			if b.fails != nil {
				return false, b.fails
			}
			return b.leading, nil
		},
	})
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- p.Serve(ctx, listener) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return w, all
}

// client is a connection through the proxy.
type client struct {
	net.Conn
	lines *bufio.Reader
}

// rejected is a connection that was reset before it was there.
type rejected struct {
	net.Conn
	err error
}

func (r rejected) Read([]byte) (int, error)  { return 0, r.err }
func (r rejected) Write([]byte) (int, error) { return 0, r.err }
func (r rejected) Close() error              { return nil }

func (w *world) connect() *client {
	w.t.Helper()
	c, err := net.Dial("tcp", w.address)
	if err != nil {
		r := rejected{err: err}
		return &client{r, bufio.NewReader(r)}
	}
	w.t.Cleanup(func() { c.Close() }) //nolint:errcheck // it may be closed already
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		w.t.Fatal(err)
	}
	return &client{c, bufio.NewReader(c)}
}

// say returns the answer, or why there is none.
func (c *client) say(text string) (string, error) {
	if _, err := fmt.Fprintln(c, text); err != nil {
		return "", err
	}
	line, err := c.lines.ReadString('\n')
	return line, err
}

// eventually connects until the answer is the wanted one; "" for none.
func (w *world) eventually(want string) *client {
	w.t.Helper()
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		c := w.connect()
		got, err := c.say("hello")
		if os.IsTimeout(err) {
			w.t.Fatal("a connection was neither answered nor rejected")
		}
		if err != nil && want == "" || got == want+" hello\n" {
			return c
		}
		if time.Since(began) > patience {
			w.t.Fatalf("answered %q, %v; want one of %q", got, err, want)
		}
	}
}

func TestPrefersTheLeader(t *testing.T) {
	w, all := newWorld(t, "a", "b", "c")
	c := w.eventually("a") // the first of the list, while none leads
	all[1].set(func() { all[1].leading = true })
	w.eventually("b")
	// What is connected already stays: the replica hands requests on.
	if got, err := c.say("again"); got != "a again\n" {
		t.Errorf("answered %q, %v", got, err)
	}
	all[1].set(func() { all[1].leading = false })
	all[2].set(func() { all[2].leading = true })
	w.eventually("c")
}

func TestCutsOffAReplicaThatStopsAnswering(t *testing.T) {
	w, all := newWorld(t, "a", "b")
	c := w.eventually("a")
	all[0].freeze()
	if got, err := c.say("hello"); err == nil || os.IsTimeout(err) {
		t.Errorf("a request to a replica that is gone ended with %q, %v", got, err)
	}
	w.eventually("b")
	all[1].freeze()
	w.eventually("")
	for range 5 {
		if got, err := w.connect().say("hello"); err == nil || os.IsTimeout(err) {
			t.Errorf("without a replica a request ended with %q, %v", got, err)
		}
	}
	all[0].set(func() { close(all[0].frozen); all[0].silent, all[0].frozen = false, nil })
	w.eventually("a")
}

// A replica whose memory other clients use up closes the connections of probes. It goes
// on with those of kube-scheduler.
func TestAReplicaThatClosesProbes(t *testing.T) {
	w, all := newWorld(t, "a", "b")
	c := w.eventually("a")
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, &net.OpError{Op: "read", Err: syscall.ECONNRESET}} {
		all[0].set(func() { all[0].fails = err })
		time.Sleep(3 * probeEvery)
		if got, err := c.say("hello"); got != "a hello\n" {
			t.Errorf("answered %q, %v", got, err)
		}
	}
	all[0].set(func() { all[0].fails = syscall.ECONNREFUSED })
	if got, err := c.lines.ReadString('\n'); err == nil || os.IsTimeout(err) {
		t.Errorf("a connection to a replica that is gone says %q, %v", got, err)
	}
}

func TestAReplicaThatEndedSinceItsLastProbe(t *testing.T) {
	w, all := newWorld(t, "a", "b")
	w.eventually("a")
	if err := all[0].listener.Close(); err != nil { // its probe is still answered
		t.Fatal(err)
	}
	for range 20 {
		if got, err := w.connect().say("hello"); got != "b hello\n" {
			t.Fatalf("answered %q, %v", got, err)
		}
	}
}

func TestReplicasThatAreNotListedAreLeft(t *testing.T) {
	w, _ := newWorld(t, "a", "b")
	c := w.eventually("a")
	w.mu.Lock()
	w.order = w.order[1:]
	w.mu.Unlock()
	if got, err := c.lines.ReadString('\n'); err == nil || os.IsTimeout(err) {
		t.Errorf("its connection says %q, %v", got, err)
	}
	w.eventually("b")
}

// What a replica sent before it ended in order arrives.
func TestNothingIsLostInAnOrderlyEnd(t *testing.T) {
	w, _ := newWorld(t, "a")
	w.eventually("a")
	for range 20 {
		c := w.connect()
		if _, err := fmt.Fprintln(c, "end"); err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, c.lines); n != 1<<20 || err != nil {
			t.Fatalf("%d bytes arrived, %v", n, err)
		}
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	w, _ := newWorld(t, "a")
	first := w.eventually("a")
	var all []*client
	for range maxConnections - 1 {
		all = append(all, w.connect())
	}
	if got, err := first.say("again"); got != "a again\n" {
		t.Fatalf("the first is answered %q, %v", got, err)
	}
	// Of one more than there may be the one ends that was idle for longest.
	if got, err := w.connect().say("hello"); got != "a hello\n" {
		t.Errorf("one connection more is answered %q, %v", got, err)
	}
	if got, err := all[0].lines.ReadString('\n'); err == nil || os.IsTimeout(err) {
		t.Errorf("the one that said nothing for longest says %q, %v", got, err)
	}
	if got, err := first.say("still"); got != "a still\n" {
		t.Errorf("the first is answered %q, %v", got, err)
	}
	for _, c := range all {
		_ = c.Close()
	}
	w.eventually("a")
}
