package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
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
// serves within the limits once it is told to.
func listen(ctx context.Context, address string, limits *limit.Limiter, p probed) (run func() error, stop func(), err error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", address)
	if err != nil {
		return nil, nil, fmt.Errorf("serve probes and metrics: %w", err)
	}
	server := serve.Server{Name: serve.Probes, Listener: l, HTTP: serve.NewServer(handler(p))}
	// A probe that is cut off is asked again.
	return func() error { return server.Serve(limits) }, func() { _ = errors.Join(server.HTTP.Close(), l.Close()) }, nil
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
	mux.Handle("GET /metrics", serve.Metrics(prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return p.gatherer().Gather() })))
	return mux
}
