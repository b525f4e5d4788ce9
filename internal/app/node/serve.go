package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// probed is what the HTTP server tells of.
type probed interface {
	// Alive returns an error when the program hangs.
	Alive(context.Context) error
	// Ready returns what is missing for pods to get devices.
	Ready() error
	// gatherer has the metrics as they are now.
	gatherer() prometheus.Gatherer
}

// listen opens the address of probes and metrics. It returns the server, which
// serves once it is told to.
func listen(ctx context.Context, address string, p probed) (serve func() error, stop func(), err error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, nil, fmt.Errorf("serve probes and metrics: %w", err)
	}
	server := &http.Server{
		Handler:           handler(p),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
	}
	serve = func() error {
		if err := server.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve probes and metrics: %w", err)
		}
		return nil
	}
	// A probe that is cut off is asked again.
	return serve, func() { _ = errors.Join(server.Close(), l.Close()) }, nil
}

func handler(p probed) http.Handler {
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, err error) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, err.Error()+"\n")
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) { answer(w, p.Alive(r.Context())) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, p.Ready()) })
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		promhttp.HandlerFor(p.gatherer(), promhttp.HandlerOpts{}).ServeHTTP(w, r)
	})
	return mux
}
