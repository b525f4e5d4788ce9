package coalesce

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// gated is a connection whose writes wait for a gate, one each.
type gated struct {
	net.Conn
	gate   chan struct{}
	writes chan []byte
	err    error
}

func newGated() *gated {
	return &gated{gate: make(chan struct{}, 100), writes: make(chan []byte, 100)}
}

func (g *gated) Write(p []byte) (int, error) {
	<-g.gate
	if g.err != nil {
		return 0, g.err
	}
	g.writes <- bytes.Clone(p)
	return len(p), nil
}

func write(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if n, err := c.Write([]byte(text)); n != len(text) || err != nil {
		t.Fatalf("Write = %d, %v", n, err)
	}
}

// sending returns a connection that is sending the word "first" and has nothing else,
// and what is inside it.
func sending(t *testing.T) (*gated, net.Conn) {
	t.Helper()
	inner := newGated()
	c := Conn(inner)
	write(t, c, "first")
	for !c.(*conn).takenUp() {
		time.Sleep(time.Millisecond)
	}
	return inner, c
}

func TestWritesAreCollected(t *testing.T) {
	inner, c := sending(t)
	for _, piece := range []string{" se", "co", "", "nd"} {
		write(t, c, piece)
	}
	inner.gate <- struct{}{}
	inner.gate <- struct{}{}
	if one, two := string(<-inner.writes), string(<-inner.writes); one != "first" || two != " second" {
		t.Errorf("it wrote %q and %q", one, two)
	}
	select {
	case more := <-inner.writes:
		t.Errorf("it wrote %q as well", more)
	default:
	}
}

// takenUp reports whether something is being sent and nothing waits.
func (c *conn) takenUp() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sending && len(c.pending) == 0
}

func TestWriteWaitsWhereMuchIsPending(t *testing.T) {
	inner, c := sending(t)
	large := strings.Repeat("x", mostPending)
	write(t, c, large)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = c.Write([]byte("more"))
	}()
	select {
	case <-done:
		t.Error("it took in more than it may keep")
	case <-time.After(50 * time.Millisecond):
	}
	for range 3 {
		inner.gate <- struct{}{}
	}
	<-done
	if one, two, three := string(<-inner.writes), string(<-inner.writes), string(<-inner.writes); one != "first" || two != large ||
		three != "more" {
		t.Errorf("it wrote %q, %d bytes and %q", one, len(two), three)
	}
}

// Much is not copied: its Write returns when it was sent, after all before it and before all
// after it.
func TestMuchIsWrittenThrough(t *testing.T) {
	inner, c := sending(t)
	write(t, c, "small")
	much := strings.Repeat("x", 10*mostPending)
	done := make(chan struct{})
	go func() {
		defer close(done)
		write(t, c, much)
		write(t, c, "after")
	}()
	for _, want := range []string{"first", "small", much, "after"} {
		select {
		case <-done:
			if want != "after" {
				t.Error("much was taken in before it was sent")
			}
		case <-time.After(20 * time.Millisecond):
		}
		if kept := len(c.(*conn).buffered()); kept > len("small") {
			t.Errorf("%d bytes are kept", kept)
		}
		inner.gate <- struct{}{}
		if got := string(<-inner.writes); got != want {
			t.Errorf("it wrote %d bytes %.10q, want %d %.10q", len(got), got, len(want), want)
		}
	}
	<-done
	failing := newGated()
	failing.err = errors.New("the line is cut")
	close(failing.gate)
	if _, err := Conn(failing).Write([]byte(much)); !errors.Is(err, failing.err) {
		t.Errorf("error %v", err)
	}
}

// buffered is what waits to be sent.
func (c *conn) buffered() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pending
}

func TestAnErrorIsThatOfTheNextWrite(t *testing.T) {
	inner := newGated()
	inner.err = errors.New("the line is cut")
	c := Conn(inner)
	write(t, c, "lost")
	close(inner.gate)
	for until := time.Now().Add(10 * time.Second); time.Now().Before(until); time.Sleep(time.Millisecond) {
		if _, err := c.Write([]byte("lost too")); err != nil {
			if !errors.Is(err, inner.err) {
				t.Errorf("error %v", err)
			}
			return
		}
	}
	t.Error("nobody is told that nothing arrives")
}

// pair returns the two ends of a TCP connection, the first one corked.
func pair(t *testing.T) (corked, other net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // a test
	corked, err = Dial((&net.Dialer{}).DialContext)(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if other, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = corked.Close(), other.Close() })
	return corked, other
}

func TestNothingIsLostAndAllIsInOrder(t *testing.T) {
	for name, end := range map[string]func(net.Conn) error{
		"Close":      net.Conn.Close,
		"CloseWrite": func(c net.Conn) error { return c.(interface{ CloseWrite() error }).CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			corked, other := pair(t)
			var sent bytes.Buffer
			go func() {
				for i := range 20_000 {
					piece := bytes.Repeat([]byte{byte(i)}, i%100)
					sent.Write(piece)
					if _, err := corked.Write(piece); err != nil {
						t.Error(err)
					}
				}
				if err := end(corked); err != nil {
					t.Error(err)
				}
			}()
			got, err := io.ReadAll(other)
			if err != nil || !bytes.Equal(got, sent.Bytes()) {
				t.Errorf("%d of %d bytes arrived, %v", len(got), sent.Len(), err)
			}
			if _, err := corked.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
				t.Errorf("a write after the end: %v", err)
			}
		})
	}
	if err := Conn(newGated()).(*conn).CloseWrite(); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("CloseWrite of what has none: %v", err)
	}
}

// A peer that reads nothing holds up neither Close nor a Write that waits.
func TestCloseDoesNotWaitForLong(t *testing.T) {
	near, _ := net.Pipe()
	c := Conn(near)
	write(t, c, strings.Repeat("x", mostPending))
	waiting := make(chan error, 1)
	go func() {
		for {
			if _, err := c.Write(make([]byte, mostPending)); err != nil {
				waiting <- err
				return
			}
		}
	}()
	began := time.Now()
	_ = c.Close()
	if took := time.Since(began); took > 20*closeTimeout {
		t.Errorf("Close took %s", took)
	}
	if err := <-waiting; err == nil {
		t.Error("a write to a closed connection succeeded")
	}
}

// counted counts what a connection hands to the kernel.
type counted struct {
	net.Conn
	writes *atomic.Int64
}

func (c counted) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

type countedListener struct {
	net.Listener
	writes *atomic.Int64
}

func (l countedListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return counted{c, l.writes}, nil
}

// server answers over HTTP/2 with TLS through corked connections or others, and counts
// the writes of both sides. The function asks it once.
func server(tb testing.TB, corked bool) (ask func() error, writes *atomic.Int64) {
	tb.Helper()
	writes = new(atomic.Int64)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.ProtoMajor != 2 {
			tb.Errorf("%s: %v", r.Proto, err)
		}
		_, _ = w.Write(body[:100])
	}))
	s.EnableHTTP2 = true
	s.Listener = countedListener{s.Listener, writes}
	var dialer net.Dialer
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return counted{c, writes}, nil
	}
	if corked {
		s.Listener, dial = Listener(s.Listener), Dial(dial)
	}
	s.StartTLS()
	tb.Cleanup(s.Close)
	transport, ok := s.Client().Transport.(*http.Transport)
	if !ok {
		tb.Fatalf("the client's transport is a %T", s.Client().Transport)
	}
	transport.DialContext, transport.TLSClientConfig.MinVersion = dial, tls.VersionTLS13
	body := bytes.Repeat([]byte("node,"), 1200) // as long as a question about 420 nodes
	return func() error {
		response, err := s.Client().Post(s.URL, "text/plain", bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer response.Body.Close() //nolint:errcheck // read to its end
		got, err := io.ReadAll(response.Body)
		if err == nil && !bytes.Equal(got, body[:100]) {
			err = errors.New("another answer: " + string(got))
		}
		return err
	}, writes
}

func TestHTTP2(t *testing.T) {
	ask, _ := server(t, true)
	for range 200 {
		if err := ask(); err != nil {
			t.Fatal(err)
		}
	}
}

// BenchmarkHTTP2 shows how often a question and its answer are handed to the kernel.
func BenchmarkHTTP2(b *testing.B) {
	for _, corked := range []bool{false, true} {
		name := "as they come"
		if corked {
			name = "corked"
		}
		b.Run(name, func(b *testing.B) {
			ask, writes := server(b, corked)
			if err := ask(); err != nil {
				b.Fatal(err)
			}
			before := writes.Load()
			for b.Loop() {
				if err := ask(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(writes.Load()-before)/float64(b.N), "writes/op")
		})
	}
}
