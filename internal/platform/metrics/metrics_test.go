package metrics

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// TestNamesKeepTheRules of Prometheus, each made as its definition says. Where a
// name has no sample yet, one is made.
func TestNamesKeepTheRules(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	for _, m := range All() {
		values := make([]string, len(m.Labels))
		for i, l := range m.Labels {
			values[i] = "x"
			if l.Help == "" {
				t.Errorf("%s: the label %s is not explained", m.Name, l.Name)
			}
		}
		switch m.Type {
		case Counter:
			c := m.NewCounters()
			c.WithLabelValues(values...)
			registry.MustRegister(c)
		case Gauge:
			g := m.NewGauges()
			g.WithLabelValues(values...)
			registry.MustRegister(g)
		case Histogram:
			h := m.NewHistograms()
			h.WithLabelValues(values...)
			registry.MustRegister(h)
			if len(m.Buckets) == 0 {
				t.Errorf("%s has no buckets", m.Name)
			}
		}
		if !strings.HasPrefix(m.Name, "divvy_") || m.Help == "" || !strings.HasSuffix(m.Help, ".") {
			t.Errorf("%s: the name begins with divvy_ and the help is a sentence: %q", m.Name, m.Help)
		}
		if len(m.Programs) == 0 {
			t.Errorf("%s: no program shows it", m.Name)
		}
		if unit := strings.HasSuffix(m.Name, "_seconds") || strings.HasSuffix(m.Name, "_bytes"); m.Type == Histogram && !unit {
			t.Errorf("%s: a histogram's name ends with its base unit", m.Name)
		}
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if n, err := testutil.GatherAndCount(registry); err != nil || n != len(All()) {
		t.Errorf("%d of %d metrics: %v", n, len(All()), err)
	}
}

func TestDifferencesAreTold(t *testing.T) {
	text := "# HELP divvy_pool_units x\n# TYPE divvy_pool_units gauge\n# TYPE go_goroutines gauge\n# TYPE divvy_pool_registered counter\n" +
		"# TYPE divvy_node_ready gauge\n# TYPE divvy_other gauge\n# TYPE divvy_build_info gauge\ndivvy_pool_units 1\n"
	want := []string{
		"divvy_http_held_bytes is missing",
		"divvy_node_ready is not in the table for divvy-node-pool", "divvy_other is not in the table",
		"divvy_pool_registered is a counter, in the table a gauge", "divvy_pool_registrations_total is missing",
	}
	if got := Differences(PoolNode, text); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestRegistrySaysWhatRuns(t *testing.T) {
	families, err := Registry(Extender, NewAPI()).Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range families {
		if f.GetName() == BuildInfo.Name {
			for _, l := range f.GetMetric()[0].GetLabel() {
				got[l.GetName()] = l.GetValue()
			}
		}
	}
	if got["program"] != Extender || got["version"] == "" || !strings.HasPrefix(got["go"], "go") {
		t.Errorf("divvy_build_info has the labels %v", got)
	}
}

func TestQuestionsAreTold(t *testing.T) {
	for request, want := range map[string]string{
		"GET /api/v1/pods?watch=true":                                             "watch pods",
		"GET /api/v1/pods?watch=1&fieldSelector=a":                                "watch pods",
		"GET /api/v1/pods?limit=500":                                              "list pods",
		"GET /api/v1/namespaces/a/pods":                                           "list pods",
		"GET /api/v1/namespaces/a/pods/b":                                         "get pods",
		"GET /api/v1/namespaces":                                                  "list namespaces",
		"GET /api/v1/namespaces/a":                                                "get namespaces",
		"PUT /api/v1/namespaces/a/status":                                         "update namespaces/status",
		"POST /api/v1/namespaces/a/pods/b/binding":                                "create pods/binding",
		"PATCH /api/v1/nodes/n/status":                                            "patch nodes/status",
		"PATCH /api/v1/nodes/n":                                                   "patch nodes",
		"DELETE /api/v1/namespaces/a/secrets/b":                                   "delete secrets",
		"DELETE /api/v1/namespaces/a/secrets":                                     "deletecollection secrets",
		"PUT /apis/coordination.k8s.io/v1/namespaces/a/leases/l":                  "update leases",
		"GET /apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations": "list mutatingwebhookconfigurations",
		"GET /version":                                                            "get other",
		"GET /api":                                                                "get other",
		"GET /apis/a/v1":                                                          "get other",
		"GET /":                                                                   "get other",
	} {
		method, target, _ := strings.Cut(request, " ")
		u, err := url.Parse(target)
		if err != nil {
			t.Fatal(err)
		}
		verb, resource := question(method, u)
		if got := verb + " " + resource; got != want {
			t.Errorf("%s is %s, want %s", request, got, want)
		}
	}
}

func TestRequestsAreCountedWithTheirOutcome(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "gone") {
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer server.Close()
	a := NewAPI()
	client := &http.Client{Transport: a.Wrap(http.DefaultTransport)}
	for _, path := range []string{"/api/v1/namespaces/a/pods/here", "/api/v1/namespaces/b/pods/gone"} {
		response, err := client.Get(server.URL + path) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, response.Body)
		_ = response.Body.Close()
	}
	broken := &http.Client{Transport: a.Wrap(roundTripper(func(*http.Request) (*http.Response,
		error) {
		return nil, errors.New("no route")
	}))}
	if _, err := broken.Get("http://nowhere.invalid/api/v1/nodes"); err == nil { //nolint:noctx,bodyclose // there is no answer
		t.Fatal("an answer came from nowhere")
	}
	want := `# HELP divvy_api_requests_total Requests to the API server by what was asked and the status of the answer.
# TYPE divvy_api_requests_total counter
divvy_api_requests_total{code="200",resource="pods",verb="get"} 1
divvy_api_requests_total{code="404",resource="pods",verb="get"} 1
divvy_api_requests_total{code="error",resource="nodes",verb="list"} 1
`
	if err := testutil.CollectAndCompare(a, strings.NewReader(want), APIRequests.Name); err != nil {
		t.Error(err)
	}
}
