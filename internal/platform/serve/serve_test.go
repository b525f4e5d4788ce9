package serve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

func listener(t *testing.T) net.Listener {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() }) //nolint:errcheck // closed already
	return l
}

// get returns the body of the answer, or the error.
func get(l net.Listener) string {
	resp, err := http.Get("http://" + l.Addr().String()) //nolint:noctx // a test
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	return string(body)
}

func TestListenSaysWhatItListensFor(t *testing.T) {
	taken := listener(t).Addr().String()
	if _, err := Listen(t.Context(), "somebody", taken); err == nil || !strings.HasPrefix(err.Error(), "listen for somebody: ") {
		t.Errorf("error %v", err)
	}
	free := listener(t)
	address := free.Addr().String()
	free.Close() //nolint:errcheck // a test
	servers := []Server{{Address: address, For: "somebody", HTTP: NewServer(nil)}, {Address: taken, For: "metrics", HTTP: NewServer(nil)}}
	if err := (Program{Servers: servers}).Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "listen for metrics: ") {
		t.Errorf("error %v", err)
	}
	l, err := Listen(t.Context(), "somebody", address)
	if err != nil {
		t.Fatalf("the first server still listens: %v", err)
	}
	l.Close() //nolint:errcheck // a test
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (Program{Servers: []Server{{For: "metrics", HTTP: NewServer(nil)}}}).Run(ctx); err != nil {
		t.Errorf("without an address: %v", err)
	}
}

// A server without bounds is one that a few slow clients can stop.
func TestServersAreBounded(t *testing.T) {
	s := NewServer(nil)
	if s.ReadHeaderTimeout <= 0 || s.ReadTimeout <= 0 || s.WriteTimeout <= 0 || s.IdleTimeout <= 0 || s.MaxHeaderBytes <= 0 {
		t.Errorf("the server has no bound for something: %+v", s)
	}
}

func TestMetricsAreAllThatIsAnswered(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "present"}))
	l := listener(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- Program{Servers: []Server{{Listener: l, HTTP: NewServer(Metrics(registry))}, {HTTP: NewServer(nil)}},
			Drain: time.Minute}.Run(ctx)
	}()
	for path, want := range map[string]string{"/metrics": "present 0", "/": "404 page not found", "/debug/pprof": "404 page not found"} {
		resp, err := http.Get("http://" + l.Addr().String() + path) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err = errors.Join(err, resp.Body.Close()); err != nil || !strings.Contains(string(body), want) {
			t.Errorf("%s answers %s, %v, want %s", path, body, err, want)
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// What is under way when the program is to end is answered with all that it
// needs; the parts end after it.
func TestRequestsUnderWayAreAnsweredBeforePartsEnd(t *testing.T) {
	var stopping, partEnded atomic.Bool
	arrived, goOn := make(chan struct{}), make(chan struct{})
	l := listener(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	program := Program{
		Parts: []func(context.Context) error{func(ctx context.Context) error { <-ctx.Done(); partEnded.Store(true); return nil }},
		Servers: []Server{{Listener: l, HTTP: NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			close(arrived)
			<-goOn
			fmt.Fprint(w, partEnded.Load(), r.Context().Err())
		}))}},
		Stopping: func() { stopping.Store(true); close(goOn) },
		Delay:    time.Millisecond,
		Drain:    time.Minute,
	}
	go func() { done <- program.Run(ctx) }()
	answer := make(chan string, 1)
	go func() { answer <- get(l) }()
	<-arrived
	stop()
	if got := <-answer; got != "false <nil>" {
		t.Errorf("the request under way was answered %q", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if !stopping.Load() || !partEnded.Load() {
		t.Errorf("stopping was told: %t, the part has ended: %t", stopping.Load(), partEnded.Load())
	}
}

// A request that does not end is cut off.
func TestDrainIsBounded(t *testing.T) {
	arrived := make(chan struct{})
	l := listener(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	program := Program{
		Servers: []Server{{Listener: l, HTTP: NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			close(arrived)
			<-r.Context().Done()
		}))}},
		Drain: time.Millisecond,
	}
	go func() { done <- program.Run(ctx) }()
	go get(l)
	<-arrived
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Whatever fails ends all of it, without the delay.
func TestTheFirstFailureEndsTheProgram(t *testing.T) {
	broken := errors.New("broken")
	closed := listener(t)
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	waits := func(ctx context.Context) error { <-ctx.Done(); return nil }
	for name, tt := range map[string]struct {
		program Program
		want    string
	}{
		"a part": {Program{Parts: []func(context.Context) error{waits, func(context.Context) error { return broken }}}, "broken"},
		"a server": {Program{Parts: []func(context.Context) error{waits}, Servers: []Server{{Listener: closed, HTTP: NewServer(nil)}}},
			"serve on " + closed.Addr().String()},
	} {
		t.Run(name, func(t *testing.T) {
			tt.program.Delay, tt.program.Drain = 24*time.Hour, time.Minute
			if err := tt.program.Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("error %v, want %s", err, tt.want)
			}
		})
	}
}

// A part that has nothing more to do does not end the program.
func TestAPartMayEnd(t *testing.T) {
	l := listener(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	ended := make(chan struct{})
	program := Program{
		Parts: []func(context.Context) error{func(context.Context) error { close(ended); return nil }},
		Servers: []Server{{Listener: l, HTTP: NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "here")
		}))}},
		Drain: time.Minute,
	}
	go func() { done <- program.Run(ctx) }()
	<-ended
	if got := get(l); got != "here" {
		t.Errorf("answered %q", got)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestAnnounceLogsChangesOnly(t *testing.T) {
	var mu sync.Mutex
	var log bytes.Buffer
	logger := funcr.New(func(_, args string) { mu.Lock(); defer mu.Unlock(); fmt.Fprintln(&log, args) }, funcr.Options{})
	states := []error{errors.New("no key"), errors.New("no key"), nil, nil, errors.New("no key")}
	ctx, stop := context.WithCancel(klog.NewContext(t.Context(), logger))
	ready := func() error {
		state := states[0]
		if states = states[1:]; len(states) == 0 {
			stop()
		}
		return state
	}
	if err := Announce(ready, func() []any { return []any{"nodes", 2} })(ctx); err != nil {
		t.Error(err)
	}
	want := `"level"=0 "msg"="Not ready" "reason"="no key"
"level"=0 "msg"="Ready" "nodes"=2
"level"=0 "msg"="Not ready" "reason"="no key"
`
	if got := log.String(); got != want {
		t.Errorf("the log is\n%swant\n%s", got, want)
	}
}
