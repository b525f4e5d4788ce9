package limit

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// patience is for what comes at once unless something hangs.
const patience = 2 * time.Minute

// served is a server behind a Limiter.
type served struct {
	t       *testing.T
	limiter *Limiter
	address string
	server  *httptest.Server
}

func serve(t *testing.T, c Config, secure bool, handler http.HandlerFunc) *served {
	t.Helper()
	s := &served{t: t, limiter: New(c)}
	s.server = httptest.NewUnstartedServer(s.limiter.Handler(handler))
	s.address = s.server.Listener.Addr().String()
	s.server.Listener = s.limiter.Listener(s.server.Listener, "test", secure)
	s.server.Config.ConnContext = ConnContext
	s.server.EnableHTTP2 = secure
	if secure {
		s.server.StartTLS()
	} else {
		s.server.Start()
	}
	t.Cleanup(func() {
		s.server.CloseClientConnections()
		s.server.Close()
		s.eventually("nothing is held when all is over", s.empty)
	})
	return s
}

func (s *served) empty() error {
	s.limiter.mu.Lock()
	defer s.limiter.mu.Unlock()
	if held := s.limiter.shared.held + s.limiter.reserved.held; held != 0 {
		return fmt.Errorf("%d bytes are held", held)
	}
	return nil
}

func (s *served) eventually(what string, done func() error) {
	s.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := done()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// dial connects from one of the addresses of the loopback interface.
func (s *served) dial(from string) net.Conn {
	s.t.Helper()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := dialer.DialContext(s.t.Context(), "tcp", s.address)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// get asks over a connection, and returns the status and the text, or the error.
func (s *served) get(c net.Conn, request string) (status int, text string, err error) {
	s.t.Helper()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		s.t.Fatal(err)
	}
	if _, err := io.WriteString(c, request); err != nil {
		return 0, "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, "", err
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return resp.StatusCode, string(body), err
}

const plainGet = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"

func hello(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") }

// However many connections one address has open without asking anything, others are
// served, and so is it itself.
func TestSlowConnectionsKeepNoOneOut(t *testing.T) {
	s := serve(t, Config{Shared: 100 * connBytes}, false, hello)
	for range 500 {
		_, _ = io.WriteString(s.dial("127.0.0.2"), "GET / HT")
	}
	for _, from := range []string{"127.0.0.3", "127.0.0.2"} {
		if status, text, err := s.get(s.dial(from), plainGet); status != http.StatusOK || text != "hello" {
			t.Errorf("%s is answered %d %q, %v", from, status, text, err)
		}
	}
	count := func(bound string) float64 {
		return testutil.ToFloat64(s.limiter.rejected.WithLabelValues("test", bound))
	}
	if displaced, rejected := count("displaced"), count("connection"); displaced < 200 || displaced+rejected < 400 {
		t.Errorf("%v connections were closed for others, %v were not accepted", displaced, rejected)
	}
}

// What has a reserve is neither kept out by others nor keeps them out.
func TestReserve(t *testing.T) {
	mine := netip.MustParseAddr("127.0.0.9")
	hold, release := make(chan struct{}, 100), make(chan struct{})
	s := serve(t, Config{
		Shared: 3 * (connBytes + usedBytes + requestBytes), Reserved: 3 * (connBytes + usedBytes + requestBytes),
		HasReserve: func(a netip.Addr) bool { return a == mine },
	}, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			hold <- struct{}{}
			<-release
		}
		hello(w, r)
	})
	defer close(release)
	fill := func(from string) {
		t.Helper()
		for range 2 {
			if _, err := io.WriteString(s.dial(from), strings.Replace(plainGet, "/", "/wait", 1)); err != nil {
				t.Fatal(err)
			}
			<-hold
		}
	}
	fill("127.0.0.2")
	fill("127.0.0.9")
	for _, from := range []string{"127.0.0.9", "127.0.0.3"} {
		if status, _, err := s.get(s.dial(from), plainGet); status != http.StatusOK {
			t.Errorf("%s is answered %d, %v", from, status, err)
		}
	}
	s.limiter.mu.Lock()
	defer s.limiter.mu.Unlock()
	if s.limiter.reserved.held < 2*connBytes || s.limiter.shared.held < 2*connBytes {
		t.Errorf("%d bytes are held of the reserve, %d of the rest", s.limiter.reserved.held, s.limiter.shared.held)
	}
}

// What does not fit is answered at once, and says so.
func TestRejections(t *testing.T) {
	waiting, release := make(chan struct{}, 10), make(chan struct{})
	s := serve(t, Config{Shared: 2*connBytes + usedBytes + requestBytes + 2000}, false, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			waiting <- struct{}{}
			<-release
		}
		if err := Hold(r.Context(), 10_000); err != nil {
			w.WriteHeader(http.StatusTeapot)
			fmt.Fprint(w, err)
			return
		}
		hello(w, r)
	})
	defer close(release)
	if status, text, err := s.get(s.dial("127.0.0.2"), plainGet); status != http.StatusOK || text != "hello" {
		t.Fatalf("the first is answered %d %q, %v", status, text, err)
	}
	first := s.dial("127.0.0.2")
	if _, err := io.WriteString(first, strings.Replace(plainGet, "/", "/wait", 1)); err != nil {
		t.Fatal(err)
	}
	<-waiting
	second := s.dial("127.0.0.2")
	if status, text, err := s.get(second, plainGet); status != http.StatusServiceUnavailable ||
		!strings.Contains(text, "the memory for requests is in use by other requests") {
		t.Errorf("a request is answered %d %q, %v", status, text, err)
	}
	third := s.dial("127.0.0.2")
	if _, err := io.WriteString(third, strings.Replace(plainGet, "/", "/wait", 1)); err == nil {
		status, text, err := s.get(third, "")
		if status != http.StatusServiceUnavailable {
			t.Errorf("another is answered %d %q, %v", status, text, err)
		}
	}
	for bound, least := range map[string]float64{"request": 1, "connection": 0, "bytes": 0} {
		if n := testutil.ToFloat64(s.limiter.rejected.WithLabelValues("test", bound)); n < least {
			t.Errorf("%v are counted as rejected by %s", n, bound)
		}
	}
}

// An answer counts until it was written. A client that does not read it loses it for one
// that holds less.
func TestUnreadAnswersAreHeld(t *testing.T) {
	const answer = 4 << 20
	s := serve(t, Config{Shared: 5 * answer}, false, func(w http.ResponseWriter, r *http.Request) {
		if err := Hold(r.Context(), answer); err != nil {
			Reject(w)
			return
		}
		_, _ = w.Write(make([]byte, answer))
	})
	for range 30 {
		if _, err := io.WriteString(s.dial("127.0.0.2"), plainGet); err != nil {
			t.Fatal(err)
		}
	}
	s.eventually("answers that are not read are held", func() error {
		s.limiter.mu.Lock()
		defer s.limiter.mu.Unlock()
		if held := s.limiter.shared.held; held < 4*answer || held > 5*answer {
			return fmt.Errorf("%d bytes", held)
		}
		return nil
	})
	if status, text, err := s.get(s.dial("127.0.0.3"), plainGet); status != http.StatusOK || len(text) != answer {
		t.Errorf("another is answered %d with %d bytes, %v", status, len(text), err)
	}
}

// A body counts before it is read, so that bodies that do not come take what they say.
func TestBodies(t *testing.T) {
	const most = 1 << 20
	s := serve(t, Config{Shared: 10 * most}, false, func(w http.ResponseWriter, r *http.Request) {
		body, err := ReadBody(w, r, most, nil)
		var large *TooLargeError
		switch {
		case errors.Is(err, ErrBusy):
			Reject(w)
		case errors.As(err, &large):
			http.Error(w, err.Error(), http.StatusRequestEntityTooLarge)
		case err != nil:
			http.Error(w, err.Error(), http.StatusBadRequest)
		default:
			Drop(r.Context(), int64(len(body)))
			fmt.Fprintf(w, "%d bytes", len(body))
		}
	})
	post := func(length int, body string) string {
		return fmt.Sprintf("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", length, body)
	}
	for request, want := range map[string]string{
		post(4, "abcd"):   "200 4 bytes",
		post(most+1, ""):  "413 the request is larger than 1048576 bytes\n",
		post(0, ""):       "200 0 bytes",
		post(most, "abc"): "",
		"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n": "200 4 bytes",
		"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + fmt.Sprintf("%x\r\n%s\r\n0\r\n\r\n", most+1,
			strings.Repeat("x", most+1)): "413 the request is larger than 1048576 bytes\n",
	} {
		c := s.dial("127.0.0.2")
		if want == "" { // it does not come
			if _, err := io.WriteString(c, request); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if status, text, err := s.get(c, request); fmt.Sprint(status, " ", text) != want {
			t.Errorf("%.80q is answered %d %q, %v; want %s", request, status, text, err, want)
		}
		_ = c.Close()
	}
	for range 100 {
		if _, err := io.WriteString(s.dial("127.0.0.2"), post(most-1, "x")); err != nil {
			t.Fatal(err)
		}
	}
	if status, text, err := s.get(s.dial("127.0.0.3"), post(4, "abcd")); status != http.StatusOK || text != "4 bytes" {
		t.Errorf("beside bodies that do not come: %d %q, %v", status, text, err)
	}
}

// A request that begins after its connection was closed, as with HTTP/2, holds nothing for
// good.
func TestRequestAfterTheConnection(t *testing.T) {
	l := New(Config{Shared: 1 << 20})
	inner, other := net.Pipe()
	defer other.Close() //nolint:errcheck // nothing was written
	c := &conn{Conn: inner, limiter: l}
	if err := c.admit(connBytes); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if a, err := l.begin(c, requestBytes, true); err == nil {
		l.end(c, a)
	}
	l.move(c.base, &l.reserved, c)
	if err := (&served{t: t, limiter: l}).empty(); err != nil {
		t.Error(err)
	}
}

// flood opens streams of HTTP/2 on a connection that has no window for answers. The
// server may end it before all are sent.
func (s *served) flood(streams int) net.Conn {
	s.t.Helper()
	inner := s.dial("127.0.0.2")
	c := tls.Client(inner, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}) // a test
	frame := func(kind, flags byte, stream uint32, payload ...byte) []byte {
		head := []byte{0, byte(len(payload) >> 8), byte(len(payload)), kind, flags}
		return append(binary.BigEndian.AppendUint32(head, stream), payload...)
	}
	out := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), frame(4, 0, 0, 0, 4, 0, 0, 0, 0)...)
	for i := range streams {
		// GET https://x/ without a body, by HPACK's static table.
		out = append(out, frame(1, 5, uint32(2*i+1), 0x82, 0x84, 0x87, 0x41, 1, 'x')...)
	}
	if err := c.HandshakeContext(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	_, _ = c.Write(out)
	return c
}

// Streams count. Answers to more of them, which are not read either, end the connection.
func TestStreamsAreHeld(t *testing.T) {
	var mu sync.Mutex
	under := 0
	s := serve(t, Config{Shared: connBytes + tlsBytes + usedBytes + http2Bytes + 10*(requestBytes+200)}, true,
		func(_ http.ResponseWriter, r *http.Request) {
			mu.Lock()
			under++
			mu.Unlock()
			<-r.Context().Done()
		})
	few := s.flood(20)
	s.eventually("ten of twenty streams are answered", func() error {
		mu.Lock()
		defer mu.Unlock()
		if rejected := testutil.ToFloat64(s.limiter.rejected.WithLabelValues("test", "request")); under != 10 || rejected != 10 {
			return fmt.Errorf("%d are, %v are rejected", under, rejected)
		}
		return nil
	})
	_ = few.Close()
	s.eventually("nothing is held", s.empty)
	many := s.flood(100)
	if err := many.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	_, err := io.Copy(io.Discard, many)
	if timeout := net.Error(nil); errors.As(err, &timeout) && timeout.Timeout() {
		t.Error("the connection stays")
	}
}

// A connection has a reserve as long as its caller proves to be entitled to it.
func TestSetReserve(t *testing.T) {
	s := serve(t, Config{Shared: 1 << 20, Reserved: 1 << 20}, true, func(w http.ResponseWriter, r *http.Request) {
		SetReserve(r.Context(), r.URL.Path == "/proof")
		if r.URL.Path == "/other" {
			SetReserve(r.Context(), true)
			WithoutReserve(r.Context())
		}
		q := of(r.Context())
		q.limiter.mu.Lock()
		defer q.limiter.mu.Unlock()
		fmt.Fprint(w, q.conn.base.budget == &q.limiter.reserved, " ", q.account.budget == &q.limiter.reserved)
	})
	for _, step := range [][2]string{{"/", "false false"}, {"/proof", "true true"}, {"/", "false false"}, {"/proof", "true true"},
		{"/other", "true false"}} {
		resp, err := s.server.Client().Get(s.server.URL + step[0]) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || string(text) != step[1] {
			t.Errorf("%s: the connection and the request have a reserve: %s, %v; want %s", step[0], text, err, step[1])
		}
	}
}

// A report is made once for all requests that wait for it, and again for those that come after it was
// begun.
func TestReports(t *testing.T) {
	var reports Reports[string]
	var mu sync.Mutex
	made := 0
	begun, proceed := make(chan struct{}, 10), make(chan struct{})
	write := func(w io.Writer) error {
		begun <- struct{}{}
		<-proceed
		mu.Lock()
		defer mu.Unlock()
		made++
		_, err := fmt.Fprint(w, "report ", made)
		return err
	}
	ask := func() <-chan string {
		out := make(chan string, 1)
		go func() {
			w := httptest.NewRecorder()
			err := reports.Serve(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody),
				"key", "text/plain", write)
			if err != nil {
				out <- err.Error()
				return
			}
			out <- w.Body.String()
		}()
		return out
	}
	first := ask()
	<-begun
	var later []<-chan string
	for range 5 {
		later = append(later, ask())
	}
	waiting := func() int {
		reports.mu.Lock()
		defer reports.mu.Unlock()
		return len(reports.next)
	}
	for deadline := time.Now().Add(patience); waiting() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("no request waits")
		}
	}
	time.Sleep(50 * time.Millisecond) // for the others, which makes no difference to what is right
	close(proceed)
	if got := <-first; got != "report 1" {
		t.Errorf("the first gets %q", got)
	}
	for _, one := range later {
		if got := <-one; got == "report 1" || !strings.HasPrefix(got, "report ") {
			t.Errorf("one that asked later gets %q", got)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if made > 4 {
		t.Errorf("%d reports were made for six requests, five of them at once", made)
	}
}

// Whatever goes wrong, the next report is made.
func TestReportsThatFail(t *testing.T) {
	var reports Reports[string]
	ask := func(accept string, write func(io.Writer) error) (w *httptest.ResponseRecorder, err error) {
		w = httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
		r.Header.Set("Accept-Encoding", accept)
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v", p)
			}
		}()
		return w, reports.Serve(w, r, "key", "text/plain", write)
	}
	broken := errors.New("broken")
	if _, err := ask("", func(io.Writer) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
	if _, err := ask("", func(io.Writer) error { panic("a mistake") }); err == nil || err.Error() != "panic: a mistake" {
		t.Errorf("error %v", err)
	}
	if _, err := ask("", func(w io.Writer) error {
		noise, rest := make([]byte, 1<<20), uint64(1)
		for range 20 {
			for i := range noise {
				rest = rest*6364136223846793005 + 1442695040888963407
				noise[i] = byte(rest >> 56)
			}
			if _, err := w.Write(noise); err != nil {
				return err
			}
		}
		return nil
	}); err == nil || !strings.Contains(err.Error(), "larger than 16777216 bytes") {
		t.Errorf("error %v", err)
	}
	for accept, compressed := range map[string]bool{"": false, "gzip": true, "br, gzip;q=0.5": true, "gzip;q=0": false,
		"gzip; q=0.0": false, "identity": false} {
		w, err := ask(accept, func(w io.Writer) error { _, err := w.Write(bytes.Repeat([]byte("text "), 1000)); return err })
		if err != nil || (w.Header().Get("Content-Encoding") == "gzip") != compressed || compressed == (w.Body.Len() == 5000) {
			t.Errorf("%q: %d bytes, %v, %v", accept, w.Body.Len(), w.Header(), err)
		}
	}
}

// A reader that stops holds up no other.
func TestStalledReaderOfAReport(t *testing.T) {
	var reports Reports[string]
	line := bytes.Repeat([]byte("a line of a report\n"), 1000)
	s := serve(t, Config{Shared: 8 << 20}, false, func(w http.ResponseWriter, r *http.Request) {
		if err := reports.Serve(w, r, "key", "text/plain", func(w io.Writer) error {
			for range 1000 {
				if _, err := w.Write(line); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			Reject(w)
		}
	})
	for range 5 {
		if _, err := io.WriteString(s.dial("127.0.0.2"), plainGet); err != nil {
			t.Fatal(err)
		}
	}
	if status, text, err := s.get(s.dial("127.0.0.3"), plainGet); status != http.StatusOK || len(text) != 1000*len(line) {
		t.Errorf("answered %d with %d bytes, %v", status, len(text), err)
	}
}
