package metrics

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// API counts the requests of one program to the API server. It stands on the way
// of each request, where verb, resource and status are known at once; client-go's
// own hooks know no resource and are one for the whole process.
type API struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// NewAPI returns an API that has counted nothing.
func NewAPI() *API {
	return &API{requests: APIRequests.NewCounters(), duration: APIRequestDuration.NewHistograms()}
}

// Describe implements prometheus.Collector.
func (a *API) Describe(ch chan<- *prometheus.Desc) {
	a.requests.Describe(ch)
	a.duration.Describe(ch)
}

// Collect implements prometheus.Collector.
func (a *API) Collect(ch chan<- prometheus.Metric) {
	a.requests.Collect(ch)
	a.duration.Collect(ch)
}

// Wrap returns a transport that counts what goes through it.
func (a *API) Wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		verb, resource := question(r.Method, r.URL)
		start := time.Now()
		response, err := next.RoundTrip(r)
		code := "error"
		if err == nil {
			code = strconv.Itoa(response.StatusCode)
		}
		a.requests.WithLabelValues(verb, resource, code).Inc()
		a.duration.WithLabelValues(verb, resource).Observe(time.Since(start).Seconds())
		return response, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// question says what a request asks of which resource. Names of objects and
// namespaces are left out, so that there are as many values as there are kinds of
// requests in the code.
func question(method string, u *url.URL) (verb, resource string) {
	named := false
	resource = "other"
	// api/v1/... and apis/<group>/<version>/...
	parts := strings.Split(strings.Trim(u.Path, "/"), "/")
	switch {
	case len(parts) > 2 && parts[0] == "api":
		resource, named = within(parts[2:])
	case len(parts) > 3 && parts[0] == "apis":
		resource, named = within(parts[3:])
	}
	switch method {
	case http.MethodPost:
		verb = "create"
	case http.MethodPut:
		verb = "update"
	case http.MethodPatch:
		verb = "patch"
	case http.MethodDelete:
		verb = "deletecollection"
		if named {
			verb = "delete"
		}
	default:
		switch watch := u.Query().Get("watch"); {
		case watch == "true" || watch == "1":
			verb = "watch"
		case named || resource == "other":
			verb = "get"
		default:
			verb = "list"
		}
	}
	return verb, resource
}

// within takes what stands behind the version: namespaces/<name>/<resource>/<name>/
// <subresource>, of which the beginning or the end may be missing.
func within(parts []string) (resource string, named bool) {
	// A namespace's own subresources are these two.
	if len(parts) > 2 && parts[0] == "namespaces" && parts[2] != "status" && parts[2] != "finalize" {
		parts = parts[2:]
	}
	resource = parts[0]
	if len(parts) > 2 {
		resource += "/" + parts[2]
	}
	return resource, len(parts) > 1
}
