package admission

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// Config is what Handler needs.
type Config struct {
	// Catalog and Settings return what holds now; they may be called at any time.
	Catalog  func() *pool.Catalog
	Settings func() Settings
	Cluster  Cluster
	// Ready returns nil when answers are right.
	Ready    func() error
	Registry prometheus.Registerer
}

const healthyAnswer = "ok"

type server struct{ config Config }

// Handler serves POST /mutate and POST /validate (AdmissionReview v1 and
// v1beta1, at most admissionreview.MaxBody bytes), GET /healthz and GET /readyz. It sets no
// timeouts; they are the server's. It may be used by any number of goroutines.
func Handler(c Config) (http.Handler, error) {
	if c.Catalog == nil || c.Settings == nil || c.Cluster == nil || c.Ready == nil {
		return nil, errors.New("admission: Catalog, Settings, Cluster and Ready must be set")
	}
	results := []string{admissionreview.Allowed, admissionreview.Denied, admissionreview.Bad, admissionreview.Error}
	observe, err := admissionreview.NewMetrics(c.Registry, map[string][]string{
		"mutate": append(results, admissionreview.Converted), "validate": results,
	})
	if err != nil {
		return nil, fmt.Errorf("register the metrics of admission: %w", err)
	}
	s := &server{config: c}
	reviews := admissionreview.New(observe)
	mux := http.NewServeMux()
	mux.Handle("/mutate", reviews.Handler("mutate", nil, answer(s.mutate)))
	mux.Handle("/validate", reviews.Handler("validate", nil, answer(s.validate)))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		admissionreview.WriteText(w, http.StatusOK, healthyAnswer)
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := c.Ready(); err != nil {
			admissionreview.WriteText(w, http.StatusServiceUnavailable, err.Error())
			return
		}
		admissionreview.WriteText(w, http.StatusOK, healthyAnswer)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		admissionreview.WriteText(w, http.StatusNotFound, fmt.Sprintf("no route %s %q: valid routes are POST /mutate, POST /validate, "+
			"GET /healthz and GET /readyz", r.Method, r.URL.Path))
	})
	return mux, nil
}
