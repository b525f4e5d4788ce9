// Package serve runs a program that answers HTTP: it starts its parts and
// servers, and ends them in an order in which no request is cut off.
package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"golang.org/x/time/rate"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
)

// Listen opens an address, of which errors name the purpose.
func Listen(ctx context.Context, purpose, address string) (net.Listener, error) {
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen for %s: %w", purpose, err)
	}
	return l, nil
}

// Metrics returns a handler of GET /metrics and nothing else. However many clients ask,
// the metrics are gathered for one answer at a time.
func Metrics(registry prometheus.Gatherer) http.Handler {
	var reports limit.Reports[expfmt.Format]
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		format := expfmt.NegotiateAccept(r.Header, expfmt.DefaultAcceptedFormats()...)
		err := reports.Serve(w, r, format, string(format), func(to io.Writer) error {
			families, err := registry.Gather()
			if err != nil {
				return fmt.Errorf("gather metrics: %w", err)
			}
			encoder := expfmt.NewEncoder(to, format)
			for _, family := range families {
				if err := encoder.Encode(family); err != nil {
					return fmt.Errorf("encode metrics: %w", err)
				}
			}
			return nil
		})
		switch {
		case errors.Is(err, limit.ErrBusy):
			limit.Reject(w)
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	return mux
}

// NewProbes returns a handler of GET /healthz, /readyz and /metrics. alive may be nil. Each of
// details adds a line to the text of /readyz, unless it is empty.
func NewProbes(alive func(context.Context) error, ready func() error, registry prometheus.Gatherer,
	details ...func() string) http.Handler {
	answer := func(w http.ResponseWriter, err error, details ...func() string) {
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		} else {
			fmt.Fprintln(w, "ok")
		}
		for _, d := range details {
			if text := d(); text != "" {
				fmt.Fprintln(w, text)
			}
		}
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", Metrics(registry))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		var err error
		if alive != nil {
			err = alive(r.Context())
		}
		answer(w, err)
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, ready(), details...) })
	return mux
}

// MaxStreams bounds the requests under way on one connection over HTTP/2; clients open
// another connection for more.
const MaxStreams = 100

// NewServer returns a server that bounds what a client can take of the process's
// time, and with one connection of its memory; see package limit for that of all
// connections.
func NewServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second, // and of the handshake
		ReadTimeout:       15 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: MaxStreams,
			MaxReadFrameSize:     16 << 10,
			// Filter of 5000 nodes sends some 120 KB.
			MaxReceiveBufferPerConnection: 256 << 10,
			MaxReceiveBufferPerStream:     256 << 10,
			WriteByteTimeout:              15 * time.Second,
		},
		ErrorLog: log.New(&errorLog{limiter: rate.NewLimiter(rate.Every(time.Second), 10)}, "", 0),
	}
}

// errorLog logs what net/http reports of connections, such as a handshake that failed. A
// client can cause any number of these, so few are logged.
type errorLog struct{ limiter *rate.Limiter }

// Write logs one line. Load balancers and probes open connections and close them at
// once, which is no failure.
func (l *errorLog) Write(line []byte) (int, error) {
	reason := strings.TrimSpace(string(line))
	level := 0
	if strings.HasPrefix(reason, "http: TLS handshake error") && strings.HasSuffix(reason, ": EOF") {
		level = 2
	}
	if l.limiter.Allow() {
		klog.Background().V(level).Info("A connection failed", "reason", reason)
	}
	return len(line), nil
}

// Server is a server and where it serves.
type Server struct {
	// Name is what metrics call it: Plain, TLS, MetricsPort or Probes.
	Name string
	// Address is host:port; a server without one is left out. For says in errors who is
	// served there.
	Address, For string
	// Listener serves in place of Address if set. Program.Run closes it.
	Listener net.Listener
	// HTTP serves with TLS when its TLSConfig is set. Its BaseContext is that of
	// the parts.
	HTTP *http.Server
}

// Names of servers in metrics.
const (
	Plain       = "plain"
	TLS         = "tls"
	MetricsPort = "metrics"
	Probes      = "probes"
)

// Program is what runs together.
type Program struct {
	// Limits bounds what clients of all servers hold together; that of a small program
	// when nil.
	Limits *limit.Limiter
	// Parts run until the last request was answered. One that returns an error
	// before ends the program.
	Parts   []func(context.Context) error
	Servers []Server
	// Stopping, when set, is called once as soon as the program is to end.
	Stopping func()
	// Delay is how long requests are still taken after the context ended, until
	// everybody knows that nobody should send any. A program that failed does not
	// wait.
	Delay time.Duration
	// Drain is how long requests under way may take after that.
	Drain time.Duration
}

// Run starts everything and waits for all of it to end. The first part or server
// that fails, or the end of ctx, ends the others: first the servers, so that
// requests under way are finished, then the parts, which they need. The error is
// that of what failed; it is nil when ctx was cancelled.
func (p Program) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if err := p.listen(ctx); err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	// The parts outlive ctx until the servers have finished.
	partsCtx, stopParts := context.WithCancel(context.WithoutCancel(ctx))
	defer stopParts()

	var parts, serving sync.WaitGroup
	start := func(group *sync.WaitGroup, run func() error) {
		group.Go(func() {
			if err := run(); err != nil {
				fail(err)
			}
		})
	}
	for _, part := range p.Parts {
		start(&parts, func() error { return part(partsCtx) })
	}
	if p.Limits == nil {
		p.Limits = limit.New(limit.Config{})
	}
	for _, s := range p.Servers {
		if s.Listener != nil {
			s.HTTP.BaseContext = func(net.Listener) context.Context { return partsCtx }
			start(&serving, func() error { return s.Serve(p.Limits) })
		}
	}

	<-ctx.Done()
	cause := context.Cause(ctx)
	failed := !errors.Is(cause, context.Canceled)
	logger.Info("Stopping", "cause", cause.Error())
	if p.Stopping != nil {
		p.Stopping()
	}
	if p.Delay > 0 && !failed {
		logger.Info("Still accepting requests", "delay", p.Delay)
		<-time.After(p.Delay)
	}
	p.drain(context.WithoutCancel(ctx))
	serving.Wait()
	stopParts()
	parts.Wait()
	if failed {
		return cause
	}
	return nil
}

// listen opens the addresses of the servers, all or none.
func (p Program) listen(ctx context.Context) (err error) {
	for i := range p.Servers {
		s := &p.Servers[i]
		if s.Listener == nil && s.Address != "" && err == nil {
			s.Listener, err = Listen(ctx, s.For, s.Address)
		}
	}
	if err == nil {
		return nil
	}
	errs := []error{err}
	for _, s := range p.Servers {
		if s.Listener != nil {
			errs = append(errs, s.Listener.Close())
		}
	}
	return errors.Join(errs...)
}

// drain ends the servers when requests under way are answered, or at the latest
// after p.Drain.
func (p Program) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, p.Drain)
	defer cancel()
	for _, s := range p.Servers {
		if err := s.HTTP.Shutdown(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Aborted requests")
			s.HTTP.Close() //nolint:errcheck // nothing is left to do about it
		}
	}
}

// Serve serves within the limits. It returns when the server was shut down, or why it
// failed.
func (s Server) Serve(limits *limit.Limiter) error {
	defer s.Listener.Close() //nolint:errcheck // closed already, but for a server that could not start
	secure := s.HTTP.TLSConfig != nil
	s.HTTP.Handler, s.HTTP.ConnContext = limits.Handler(s.HTTP.Handler), limit.ConnContext
	listener := limits.Listener(s.Listener, s.Name, secure)
	serve := s.HTTP.Serve
	if secure {
		serve = func(l net.Listener) error { return s.HTTP.ServeTLS(l, "", "") }
	}
	if err := serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", s.Listener.Addr(), err)
	}
	return nil
}

const announceEvery = 100 * time.Millisecond

// Announce returns a part that logs when the program becomes ready, with what
// details has to say then, and when it is no longer and why. Details may be nil.
func Announce(ready func() error, details func() []any) func(context.Context) error {
	return func(ctx context.Context) error {
		logger := klog.FromContext(ctx)
		ticker := time.NewTicker(announceEvery)
		defer ticker.Stop()
		for last := ""; ; {
			state := "ready"
			if err := ready(); err != nil {
				state = err.Error()
			}
			switch {
			case state == last:
			case state != "ready":
				logger.Info("Not ready", "reason", state)
			case details != nil:
				logger.Info("Ready", details()...)
			default:
				logger.Info("Ready")
			}
			last = state
			select {
			case <-ctx.Done():
				return nil
			case <-ticker.C:
			}
		}
	}
}
