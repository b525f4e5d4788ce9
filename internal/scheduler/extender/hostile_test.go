package extender

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// unknownCaller is an address from which no bind is accepted.
const unknownCaller = "192.0.2.77:4000"

// from answers a request from that address.
func (w *world) from(remote, method, path string, body io.Reader) *httptest.ResponseRecorder {
	w.tb.Helper()
	r := httptest.NewRequestWithContext(w.tb.Context(), method, Prefix+path, body)
	r.RemoteAddr = remote
	answer := httptest.NewRecorder()
	w.server.Config.Handler.ServeHTTP(answer, r)
	return answer
}

// within fails where what comes at once does not come.
func within(tb testing.TB, what string, do func()) {
	tb.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		do()
	}()
	select {
	case <-done:
	case <-time.After(enough):
		tb.Fatalf("%s hangs", what)
	}
}

// stalled sends the beginning of a request and no more.
func (w *world) stalled(request string) net.Conn {
	w.tb.Helper()
	c, err := new(net.Dialer).DialContext(w.tb.Context(), "tcp", w.server.Listener.Addr().String())
	if err != nil {
		w.tb.Fatal(err)
	}
	w.tb.Cleanup(func() { _ = c.Close() })
	if _, err := io.WriteString(c, request); err != nil {
		w.tb.Fatal(err)
	}
	return c
}

// A body of some megabytes that comes slowly, or not at all, holds up no other of that
// size.
func TestStalledBodiesHoldUpNoOther(t *testing.T) {
	w := newWorld(t)
	for range 3 {
		w.stalled(fmt.Sprintf("POST %s/filter HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n{", Prefix,
			3<<20))
	}
	names := make([]string, 90_000)
	for i := range names {
		names[i] = fmt.Sprintf("a-node-with-a-name-of-some-length-%06d", i)
	}
	names[0] = "node-a"
	within(t, "a filter of more than 3 MB", func() {
		if got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("p", 4), NodeNames: &names}); got.Error != "" || len(*got.NodeNames) != 1 {
			t.Errorf("filter answers %+v", got)
		}
	})
}

// A client that does not read its report holds up no other.
func TestStalledInspectHoldsUpNoOther(t *testing.T) {
	w := newWorld(t)
	for i := range 5000 {
		name := fmt.Sprintf("node-%04d", i)
		w.ledger.SetNode(name, []accel.Inventory{cards(gcuMemory, name+"-", 16, 16, 16, 16, 16, 16, 16, 16)})
	}
	for range 3 {
		w.stalled(fmt.Sprintf("GET %s/inspect?details=true HTTP/1.1\r\nHost: x\r\n\r\n", Prefix))
	}
	within(t, "inspect", func() {
		if status, report := w.get(Prefix + "/inspect?details=true"); status != http.StatusOK ||
			bytes.Count(report, []byte(`"name": "node-`)) < 5000 {
			t.Errorf("inspect answers %d with %d bytes", status, len(report))
		}
	})
}

// counting counts what the ledger is asked.
type countingLedger struct {
	decision.Ledger
	checks, fits atomic.Int64
}

func (c *countingLedger) Check(request accel.Request, nodes []string, out []ledger.Verdict) {
	c.checks.Add(1)
	c.Ledger.Check(request, nodes, out)
}

func (c *countingLedger) Fits(request accel.Request, nodes []string, out []ledger.Verdict) {
	c.fits.Add(1)
	c.Ledger.Fits(request, nodes, out)
}

// Whatever callers that may not bind make up, no policy is asked and nothing is
// remembered; the answer is the same.
func TestMadeUpRequestsAreNotRated(t *testing.T) {
	var counted *countingLedger
	w := newWorld(t, func(c *Config) {
		counted = &countingLedger{Ledger: c.Ledger}
		c.Ledger = counted
	})
	w.extender.slots.wait = enough
	ask := func(i int, remote string) string {
		t.Helper()
		pod := newPod("p", 4)
		pod.Annotations = map[string]string{wire.AvoidDevicesAnnotation: fmt.Sprint("made-up-", i)}
		names := []string{"node-a", "node-b", "nowhere"}
		answer := w.from(remote, http.MethodPost,
			"/filter", bytes.NewReader(mustJSON(t, extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names})))
		return answer.Body.String()
	}
	for i := range 20 {
		if got := ask(i, unknownCaller); !strings.Contains(got, `"NodeNames":["node-a","node-b"]`) {
			t.Fatalf("filter answers %s", got)
		}
	}
	if checks, fits := counted.checks.Load(), counted.fits.Load(); checks != 0 || fits != 20 {
		t.Errorf("%d requests were rated, %d only looked at", checks, fits)
	}
	ask(0, "127.0.0.1:1")
	if counted.checks.Load() != 1 {
		t.Error("the request of a caller that may bind was not rated")
	}
	answer := w.from(unknownCaller, http.MethodPost, "/prioritize", strings.NewReader(`{"Pod":{},"NodeNames":["node-a"]}`))
	if answer.Code != http.StatusBadRequest || !strings.Contains(answer.Body.String(), "bind rejected: 192.0.2.77") {
		t.Errorf("prioritize answers %d %s", answer.Code, answer.Body)
	}
}

// Callers that may not bind send less, and are answered one at a time.
func TestOthersAreBounded(t *testing.T) {
	w := newWorld(t)
	large := `{"Pod":{},"NodeNames":["` + strings.Repeat("x", maxOthersBody) + `"]}`
	for remote, want := range map[string]string{unknownCaller: "the request is larger than 1048576 bytes", "127.0.0.1:1": `"Error":""`} {
		if got := w.from(remote, http.MethodPost, "/filter", strings.NewReader(large)).Body.String(); !strings.Contains(got, want) {
			t.Errorf("%s is answered %.300s, want %s", remote, got, want)
		}
	}

	slots := newSlots()
	slots.wait = 10 * time.Millisecond
	believed := context.WithValue(t.Context(), callerKey{}, true)
	end, err := slots.take(t.Context(), 10)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := slots.take(t.Context(), 10); !errors.Is(err, limit.ErrBusy) {
		t.Errorf("two are answered at once: %v", err)
	}
	for range slotsOfBinders {
		if _, err := slots.take(believed, 10); err != nil {
			t.Errorf("one that may bind waits for one that may not: %v", err)
		}
	}
	gone, cancel := context.WithCancel(believed)
	cancel()
	if _, err := slots.take(gone, 10); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that has gone waits: %v", err)
	}
	end()
	slots.wait = enough
	if _, err := slots.take(t.Context(), 10); err != nil {
		t.Errorf("after the first: %v", err)
	}
}

// Large bodies are decoded one at a time, and hold up none of usual size.
func TestLargeBodiesAreDecodedOneAtATime(t *testing.T) {
	slots := newSlots()
	ctx := context.WithValue(t.Context(), callerKey{}, true)
	release, err := slots.take(ctx, largeBody+1)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
	defer cancel()
	if _, err := slots.take(short, largeBody+1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("another beside it: %v", err)
	}
	for range slotsOfBinders {
		if _, err := slots.take(ctx, largeBody); err != nil {
			t.Error(err)
		}
	}
	release()
	if _, err := slots.take(ctx, largeBody+1); err != nil {
		t.Error(err)
	}
}
