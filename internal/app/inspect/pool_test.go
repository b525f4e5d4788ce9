package inspect

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/report/inspect"
	"github.com/divvy-gpu/divvy/internal/report/inspect/collect"
)

// newPoolServer is a cluster without an extender and without a device: two nodes
// offer units of a pool, and a third has nothing to do with it.
func newPoolServer() *apiServer {
	s := &apiServer{}
	for name, units := range map[string]string{"node-a": "1000", "node-b": "1k", "plain": ""} {
		n := v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name},
			Status: v1.NodeStatus{Allocatable: v1.ResourceList{"cpu": resource.MustParse("4")}}}
		if units != "" {
			n.Status.Allocatable["bitfusion.io/gpu"] = resource.MustParse(units)
		}
		s.full = append(s.full, n)
		s.nodes = append(s.nodes, metav1.PartialObjectMetadata{ObjectMeta: n.ObjectMeta})
	}
	pod := func(namespace, name, node string, units ...string) {
		p := v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"divvy.dev/pool": "true"}},
			Spec: v1.PodSpec{NodeName: node}}
		for _, u := range units {
			list := v1.ResourceList{"bitfusion.io/gpu": resource.MustParse(u)}
			p.Spec.Containers = append(p.Spec.Containers, v1.Container{Resources: v1.ResourceRequirements{Requests: list, Limits: list}})
		}
		s.pods = append(s.pods, p)
	}
	pod("tensorflow-benchmark", "bf-pkgs", "node-a", "50")
	pod("tensorflow-benchmark", "bf-deployment", "node-b", "25")
	pod("team-b", "two", "", "200", "50")
	pod("web", "server", "node-a")
	quota := func(namespace, name string, hard, used string, scopes ...v1.ResourceQuotaScope) {
		key := v1.ResourceName("requests.bitfusion.io/gpu")
		q := v1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
			Spec: v1.ResourceQuotaSpec{Hard: v1.ResourceList{"pods": resource.MustParse("5")}, Scopes: scopes}}
		if hard != "" {
			q.Spec.Hard[key] = resource.MustParse(hard)
			q.Status = v1.ResourceQuotaStatus{Hard: q.Spec.Hard, Used: v1.ResourceList{key: resource.MustParse(used)}}
		}
		s.quotas = append(s.quotas, q)
	}
	quota("tensorflow-benchmark", "bitfusion-quota", "100", "75")
	quota("tensorflow-benchmark", "another", "1k", "75")
	quota("tensorflow-benchmark", "of-best-effort", "10", "0", v1.ResourceQuotaScopeBestEffort)
	quota("team-c", "none", "0", "0")
	quota("web", "of-pods", "", "")
	return s
}

// What of a remote pool is requested and allowed is shown in a cluster that has
// no extender and no device.
func TestPoolIsShown(t *testing.T) {
	forbidden := func(s *apiServer) { s.refuseQuotas = http.StatusForbidden }
	for name, tt := range map[string]struct {
		server func(*apiServer)
		node   string
		change func(*collect.Options)
		golden string
		said   string
		err    string
	}{
		"all":          {golden: "pool"},
		"wide":         {change: func(o *collect.Options) { o.Output = "wide" }, golden: "pool-wide"},
		"one resource": {change: func(o *collect.Options) { o.Resource = "bitfusion.io/gpu" }, golden: "pool"},
		"json": {change: func(o *collect.Options) { o.Output = "json" }, golden: "pool-json",
			said: "The extender does not respond"},
		"json of all":    {change: func(o *collect.Options) { o.Output, o.Resource = "json", "all" }, golden: "pool-json"},
		"json of it":     {change: func(o *collect.Options) { o.Output, o.Resource = "json", "bitfusion.io/gpu" }, golden: "pool-json"},
		"yaml of it":     {change: func(o *collect.Options) { o.Output, o.Resource = "yaml", "bitfusion.io/gpu" }, golden: "pool-yaml"},
		"one node":       {node: "node-a", golden: "pool-node"},
		"one node of it": {node: "node-a", change: func(o *collect.Options) { o.Resource = "bitfusion.io/gpu" }, golden: "pool-node"},
		"a node without": {node: "plain", err: `node "plain" is unknown or offers no devices`},
		"a node without it": {node: "plain", change: func(o *collect.Options) { o.Resource = "bitfusion.io/gpu" },
			err: "no node offers bitfusion.io/gpu, no pod requests it and no quota limits it"},
		"quotas are secret": {server: forbidden, golden: "pool-no-quotas", said: "Quotas of bitfusion.io/gpu are not shown: list the " +
			"resource quotas: quotas are not for you"},
		"no lists": {server: func(s *apiServer) { s.refuse = http.StatusForbidden },
			change: func(o *collect.Options) { o.Resource = "bitfusion.io/gpu" }, err: "list the nodes: lists are not for you"},
		"no node offers it":  {server: func(s *apiServer) { s.full, s.quotas = nil, nil }, golden: "pool-no-nodes"},
		"nothing of it":      {server: func(s *apiServer) { s.full, s.quotas, s.pods = nil, nil, nil }, golden: "no-pool"},
		"nothing, no quotas": {server: func(s *apiServer) { s.full, s.pods = nil, nil; forbidden(s) }, golden: "no-pool"},
		"nothing, asked for": {server: func(s *apiServer) { s.full, s.quotas, s.pods = nil, nil, nil },
			change: func(o *collect.Options) { o.Resource = "bitfusion.io/gpu" }, err: "no node offers bitfusion.io/gpu"},
		"beside other things": {server: func(s *apiServer) {
			mixed := newMixedServer(t)
			s.nodes, s.pods = mixed.nodes[1:], append(s.pods, mixed.pods...)
		}, golden: "pool-mixed", said: "Node broken is not shown"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newPoolServer()
			if tt.server != nil {
				tt.server(s)
			}
			out, errOut, err := run(t, s, tt.node, tt.change)
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Fatalf("error %v, want %q", err, tt.err)
			}
			if !strings.Contains(errOut, tt.said) || (tt.said == "") != (errOut == "") {
				t.Errorf("said %q, want %q", errOut, tt.said)
			}
			if tt.golden != "" {
				compare(t, tt.golden, out)
			}
		})
	}
}

// The guide's form of the report has no pool in it where there is something of
// what it is about, and no question more is asked.
func TestGuideJSONHasNoPool(t *testing.T) {
	s := newPoolServer()
	s.extender = extenderOf(twoNodes)
	out, _, err := run(t, s, "", func(o *collect.Options) { o.Output = "json" })
	if err != nil {
		t.Fatal(err)
	}
	var report inspect.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil || report.Pool != nil || len(report.Nodes) != 2 {
		t.Errorf("%v: %s", err, out)
	}
	if len(s.asked) != 1 {
		t.Errorf("asked %q", s.asked)
	}
}
