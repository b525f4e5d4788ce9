package monitoring

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

const root = "../../.."

var helm = sync.OnceValues(func() (string, error) {
	cmd := exec.Command("make", "--silent", "helm")
	cmd.Dir = root
	// What make tells its own commands is not for this one.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS") })
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("make helm: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1], nil
})

// rendered are the objects of the chart by "Kind name".
func rendered(t *testing.T, set string) map[string][]byte {
	t.Helper()
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), program, "template", "divvy", filepath.Join(root, "charts/divvy"),
		"--namespace", "divvy-system", "--kube-version", "1.37.1", "--set", set).Output()
	if err != nil {
		t.Fatal(err)
	}
	objects := map[string][]byte{}
	for document := range bytes.SplitSeq(out, []byte("\n---\n")) {
		var head struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := yaml.Unmarshal(document, &head); err != nil {
			t.Fatal(err)
		}
		objects[head.Kind+" "+head.Metadata.Name] = document
	}
	return objects
}

const everything = "pool.enabled=true,metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.interval=30s," +
	"metrics.serviceMonitor.labels.release=p," +
	"metrics.prometheusRule.enabled=true,metrics.prometheusRule.labels.release=p,metrics.dashboard.enabled=true," +
	"schedconf.listenAddress=0.0.0.0"

// TestServiceMonitorsAreOnesOfTheOperator, with no field that it does not know, and
// each finds the Service of its part, which finds the pods.
func TestServiceMonitorsAreOnesOfTheOperator(t *testing.T) {
	for name, tt := range map[string]struct {
		set  string
		want []string
	}{
		"everything": {everything, []string{"bitfusion-device-plugin", "bitfusion-webhook", "divvy-extender", "divvy-node",
			"divvy-schedconf"}},
		"a scheduler of its own": {"metrics.serviceMonitor.enabled=true,scheduler.mode=dedicated",
			[]string{"divvy-node", "divvy-scheduler"}},
		"what nobody reaches": {"metrics.serviceMonitor.enabled=true,extender.listenAddress=127.0.0.1", []string{"divvy-node"}},
		"not asked for":       {"pool.enabled=true", nil},
	} {
		t.Run(name, func(t *testing.T) {
			objects := rendered(t, tt.set)
			var got []string
			for key, text := range objects {
				part, ok := strings.CutPrefix(key, "ServiceMonitor ")
				if !ok {
					continue
				}
				got = append(got, part)
				var monitor monitoringv1.ServiceMonitor
				if err := yaml.UnmarshalStrict(text, &monitor); err != nil {
					t.Errorf("%s: %v", key, err)
				}
				var service corev1.Service
				if err := yaml.UnmarshalStrict(objects["Service "+part+"-metrics"], &service); err != nil {
					t.Errorf("the Service of %s: %v", key, err)
				}
				for label, value := range monitor.Spec.Selector.MatchLabels {
					if service.Labels[label] != value {
						t.Errorf("%s asks for a Service with %s=%s, which has %v", key, label, value, service.Labels)
					}
				}
				if service.Namespace != monitor.Namespace || service.Spec.Ports[0].Name != monitor.Spec.Endpoints[0].Port ||
					service.Labels[monitor.Spec.JobLabel] != part {
					t.Errorf("%s and its Service differ in namespace, port or name", key)
				}
				workload := objects["DaemonSet "+part]
				for _, other := range []string{"Deployment " + part, "Deployment " + part + "-deployment"} {
					if workload == nil {
						workload = objects[other]
					}
				}
				if !strings.Contains(string(workload), fmt.Sprint("containerPort: ", service.Spec.Ports[0].Port)) &&
					part != "divvy-schedconf" {
					t.Errorf("no pod of %s has the port %d", part, service.Spec.Ports[0].Port)
				}
				for label, value := range service.Spec.Selector {
					if !strings.Contains(string(workload), label+": "+value) {
						t.Errorf("the Service of %s asks for pods with %s=%s", part, label, value)
					}
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, tt.want) {
				t.Errorf("ServiceMonitors of %v, want %v", got, tt.want)
			}
		})
	}
}

// TestAlertsAreParsed by Prometheus' own parser, name metrics that are there with
// labels that they have, and come with what is installed.
func TestAlertsAreParsed(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	for set, want := range map[string][]string{
		everything:                            {"divvy-node", "divvy-extender", "divvy-certificates", "divvy-pool"},
		"metrics.prometheusRule.enabled=true": {"divvy-node", "divvy-extender", "divvy-certificates"},
		"metrics.prometheusRule.enabled=true,pool.enabled=true,sharedResources=null": {"divvy-certificates", "divvy-pool"},
	} {
		var rule monitoringv1.PrometheusRule
		if err := yaml.UnmarshalStrict(rendered(t, set)["PrometheusRule divvy"], &rule); err != nil {
			t.Fatal(err)
		}
		var groups []string
		for _, g := range rule.Spec.Groups {
			groups = append(groups, g.Name)
			for _, r := range g.Rules {
				check(t, r.Alert, r.Expr.String())
				if r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
					t.Errorf("%s says too little: %v %v", r.Alert, r.Labels, r.Annotations)
				}
				if !strings.Contains(string(page), "| `"+r.Alert+"` |") {
					t.Errorf("docs/metrics.md has no row for %s", r.Alert)
				}
			}
		}
		if !slices.Equal(groups, want) {
			t.Errorf("%s: groups %v, want %v", set, groups, want)
		}
	}
}

// TestDashboardsAreParsed likewise.
func TestDashboardsAreParsed(t *testing.T) {
	var m corev1.ConfigMap
	if err := yaml.UnmarshalStrict(rendered(t, everything)["ConfigMap divvy-dashboard"], &m); err != nil {
		t.Fatal(err)
	}
	var dashboard struct {
		Title  string
		Panels []struct {
			ID      int
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(m.Data["divvy.json"]), &dashboard); err != nil {
		t.Fatal(err)
	}
	ids := map[int]bool{}
	for _, p := range dashboard.Panels {
		if ids[p.ID] || len(p.Targets) == 0 {
			t.Errorf("panel %q has no question, or the number of another", p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			// Variables of Grafana stand in texts alone.
			check(t, p.Title, target.Expr)
		}
	}
	if len(dashboard.Panels) < 10 || dashboard.Title == "" {
		t.Errorf("%d panels", len(dashboard.Panels))
	}
}

// TestQuestionsOfTheDocumentsAreParsed likewise.
func TestQuestionsOfTheDocumentsAreParsed(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(page), "## Questions")
	rows := regexp.MustCompile("(?m)^\\| ([^|]+) \\| `(.+)` \\|$").FindAllStringSubmatch(section, -1)
	if !found || len(rows) < 5 {
		t.Fatalf("%d questions", len(rows))
	}
	for _, row := range rows {
		check(t, row[1], strings.ReplaceAll(row[2], `\|`, "|"))
	}
}

// check parses an expression and compares what it asks for with the table of
// metrics.
func check(t *testing.T, what, expression string) {
	t.Helper()
	expr, err := parser.ParseExpr(expression)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok || selector.Name == "up" {
			return nil
		}
		i := slices.IndexFunc(metrics.All(), func(m metrics.Metric) bool {
			return m.Name == selector.Name || m.Type == metrics.Histogram && m.Name == strings.TrimSuffix(selector.Name, "_bucket")
		})
		if i < 0 {
			t.Errorf("%s: no program shows %s", what, selector.Name)
			return nil
		}
		for _, matcher := range selector.LabelMatchers {
			named := slices.ContainsFunc(metrics.All()[i].Labels, func(l metrics.Label) bool { return l.Name == matcher.Name })
			// The chart's ServiceMonitor adds it to what a program of a node shows.
			named = named || matcher.Name == "node" && strings.HasPrefix(selector.Name, "divvy_node_")
			if matcher.Name != labels.MetricName && !named {
				t.Errorf("%s: %s has no label %s", what, selector.Name, matcher.Name)
			}
		}
		return nil
	})
}
