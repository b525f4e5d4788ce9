package extender

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
)

// TestMetricsAreThoseOfTheTable, and keep Prometheus' rules for names.
func TestMetricsAreThoseOfTheTable(t *testing.T) {
	for _, secured := range []bool{false, true} {
		o := DefaultOptions()
		o.TLS.Namespace, o.Eviction.Enabled = "divvy-system", secured
		if !secured {
			o.TLS.Listen = ""
		}
		c, _ := clients(t)
		c.Requests = metrics.NewAPI()
		p, err := assemble(o, c)
		if err != nil {
			t.Fatal(err)
		}
		text := httptest.NewRecorder()
		serve.Metrics(p.registry).ServeHTTP(text, httptest.NewRequest(http.MethodGet, "/metrics", http.NoBody))
		for _, difference := range metrics.Differences(metrics.Extender, text.Body.String()) {
			if secured || !strings.Contains(difference, "certificate") && !strings.Contains(difference, "review") {
				t.Errorf("TLS is %t: %s", secured, difference)
			}
		}
		if shown := strings.Contains(text.Body.String(), `divvy_extender_evictions_total{outcome="evicted"} 0`); shown != secured {
			t.Errorf("eviction is %t: its metric is shown: %t", secured, shown)
		}
		problems, err := testutil.GatherAndLint(p.registry)
		if err != nil || len(problems) > 0 {
			t.Errorf("%v, %v", problems, err)
		}
	}
}
