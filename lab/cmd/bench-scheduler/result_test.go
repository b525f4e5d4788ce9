package main

import (
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
)

func TestQuantiles(t *testing.T) {
	var times []time.Duration
	for i := range 101 {
		times = append(times, time.Duration(i)*time.Second)
	}
	if q := quantiles(times); q != (Quantiles{50, 90, 99, 100}) {
		t.Errorf("of 0 to 100 s: %+v", q)
	}
	if q := quantiles(times[7:8]); q != (Quantiles{7, 7, 7, 7}) {
		t.Errorf("of one: %+v", q)
	}
	if q := quantiles(nil); q != (Quantiles{}) {
		t.Errorf("of none: %+v", q)
	}
}

func TestMedian(t *testing.T) {
	for _, test := range []struct {
		of   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{9, 1, 5, 3}, 4}} {
		given := slices.Clone(test.of)
		if got := median(test.of); got != test.want || !slices.Equal(given, test.of) {
			t.Errorf("median of %v: %g, want %g; it leaves %v", given, got, test.want, test.of)
		}
	}
}

func TestTimeline(t *testing.T) {
	line := newTimeline(2)
	line.began("a")
	line.began("b")
	if line.saw("stranger") || line.saw("a") || line.saw("a") || line.waiting() != 1 {
		t.Errorf("%d pods wait, one should", line.waiting())
	}
	if !line.saw("b") || line.waiting() != 0 {
		t.Error("the last pod is not the last")
	}
	line.allMade()
	start := time.Unix(100, 0)
	line.asked = map[string]time.Time{"a": start, "b": start.Add(time.Second)}
	line.bound = map[string]time.Time{"a": start.Add(4 * time.Second), "b": start.Add(3 * time.Second)}
	line.made = start.Add(2 * time.Second)
	each, whole, creation := line.latencies()
	if !slices.Equal(each, []time.Duration{2 * time.Second, 4 * time.Second}) || whole != 4*time.Second || creation != 2*time.Second {
		t.Errorf("latencies %v, the whole %v, creation %v", each, whole, creation)
	}
}

const metricsBefore = `
# TYPE apiserver_request_total counter
apiserver_request_total{verb="POST",resource="pods",subresource="",code="201"} 10
apiserver_request_total{verb="POST",resource="pods",subresource="binding",code="201"} 10
# TYPE divvy_api_requests_total counter
divvy_api_requests_total{verb="create",resource="pods/binding"} 5
# TYPE divvy_extender_request_duration_seconds histogram
divvy_extender_request_duration_seconds_bucket{verb="filter",le="+Inf"} 5
divvy_extender_request_duration_seconds_sum{verb="filter"} 1
divvy_extender_request_duration_seconds_count{verb="filter"} 5
`

const metricsAfter = `
# TYPE apiserver_request_total counter
apiserver_request_total{verb="POST",resource="pods",subresource="",code="201"} 18
apiserver_request_total{verb="POST",resource="pods",subresource="binding",code="201"} 16
apiserver_request_total{verb="POST",resource="pods",subresource="binding",code="409"} 2
# TYPE divvy_api_requests_total counter
divvy_api_requests_total{verb="create",resource="pods/binding"} 13
divvy_api_requests_total{verb="get",resource="pods"} 2
# TYPE divvy_extender_request_duration_seconds histogram
divvy_extender_request_duration_seconds_bucket{verb="filter",le="+Inf"} 13
divvy_extender_request_duration_seconds_sum{verb="filter"} 1.04
divvy_extender_request_duration_seconds_count{verb="filter"} 13
`

func TestFill(t *testing.T) {
	parse := func(text string) samples {
		t.Helper()
		s, err := parseSamples(strings.TrimSpace(text) + "\n")
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	start := time.Unix(1000, 0)
	before := sight{
		at: start, machine: busy{10 * time.Second, time.Second},
		usage:  map[string]controlplane.Usage{"etcd": {CPU: time.Second}, "divvy-extender": {CPU: time.Second}},
		server: parse(metricsBefore), divvy: parse(metricsBefore), scheduler: samples{},
	}
	after := sight{
		at: start.Add(10 * time.Second), machine: busy{16 * time.Second, 3 * time.Second},
		usage: map[string]controlplane.Usage{"etcd": {CPU: 3 * time.Second}, "divvy-extender": {CPU: 2 * time.Second, Resident: 50e6,
			Peak: 60e6}},
		server: parse(metricsAfter), divvy: parse(metricsAfter), scheduler: samples{},
	}
	p := Phase{Pods: 8}
	p.fill(before, after, extenderName)
	near := func(what string, got, want float64) {
		t.Helper()
		if math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %g, want %g", what, got, want)
		}
	}
	near("etcd", p.CPU["etcd"], 250)
	near("the extender", p.CPU["divvy-extender"], 125)
	near("creations", p.Server["POST pods"], 1)
	near("binds, the refused ones too", p.Server[binds], 1)
	near("requests of the extender", p.Divvy.Requests, 1.25)
	near("filter", p.Divvy.Verbs["filter"].Milliseconds, 5)
	near("filter per pod", p.Divvy.Verbs["filter"].PerPod, 1)
	near("peak", p.Divvy.Peak, 60)
	whole := 10 * float64(runtime.NumCPU())
	near("others", p.Others, 3/whole) // 6 s of which 3 are those of the two programs
	near("stolen", p.Stolen, 2/whole)
	if _, grew := p.Server["GET pods"]; grew {
		t.Error("what did not grow is shown")
	}
}

func TestParseSamplesRefuses(t *testing.T) {
	if _, err := parseSamples("no metrics {"); err == nil {
		t.Error("was taken")
	}
}

var (
	counting = side{door: plain}
	called   = side{extender, "binpack"}
	compiled = side{plugin, "binpack"}
)

// phases returns rounds with these pods per second.
func phases(without, extender, plugin []float64, requests float64) []Phase {
	var all []Phase
	divvy := func(side side, round int, rate, cpu, requests float64) Phase {
		return Phase{Side: side, Round: round, PodsPerSecond: rate, Divvy: &DivvyTimes{Requests: 1}, CPU: map[string]float64{"etcd": cpu},
			Server: map[string]float64{"POST pods": 1, binds: 1, "GET pods": requests - 1, "POST events": 0.5, "WATCH pods": 0.3}}
	}
	for i := range without {
		all = append(all,
			divvy(compiled, i+1, plugin[i], 3, 1),
			Phase{Side: counting, Round: i + 1, PodsPerSecond: without[i], CPU: map[string]float64{"etcd": 2, benchName: 50},
				Server: map[string]float64{"POST pods": 1, binds: 1, "POST events": 1, "WATCH pods": 0.1}},
			divvy(called, i+1, extender[i], 4, requests))
	}
	return all
}

func TestJudge(t *testing.T) {
	judged := scenario{name: "throughput", judged: true}
	r := Result{options: options{pods: 100, policies: []string{"binpack"}}, Measurements: []*Measurement{
		{Nodes: 1000, Scenario: judged, Phases: phases([]float64{100, 200, 100}, []float64{95, 100, 100}, []float64{110, 200, 90}, 1)},
		{Nodes: 4999, Scenario: judged, Phases: phases([]float64{100, 100, 100}, []float64{74, 70, 300}, []float64{99, 99, 99}, 1.5)},
		{Nodes: 5000, Scenario: judged, Phases: phases([]float64{100, 100}, []float64{80, 80}, []float64{100, 100}, 2.5)},
		{Nodes: 5000, Scenario: scenario{name: "mixed"}, Phases: phases([]float64{100}, []float64{1}, []float64{1}, 9)},
	}}
	r.judge()
	err := r.missed()
	if err == nil {
		t.Fatal("no limit was missed")
	}
	want := []string{
		"4999 nodes, extender binpack: 0.74 of the pods per second of plain (median of 3 rounds, 0.70 to 3.00); at least 0.75 is wanted",
		"4999 nodes, plugin binpack: 0.99 of the pods per second of plain (median of 3 rounds, 0.99 to 0.99); at least 1.00 is wanted",
		"5000 nodes, extender binpack: 2.50 requests of Divvy's own to the API server for a pod (1.00 as Divvy counts, 2.50 as the API " +
			"server does); at most 2 is wanted",
	}
	if lines := strings.Split(err.Error(), "\n"); !slices.Equal(lines, want) {
		t.Errorf("missed:\n%v", err)
	}
	for i := range r.Measurements[1].Phases {
		r.Measurements[1].Phases[i].Others, r.Measurements[1].Phases[i].Stolen = 0.2, 0.1
	}
	if err := r.missed(); !strings.Contains(err.Error(), "others had 30 % of the processors meanwhile, so measure again") {
		t.Errorf("a run that was disturbed:\n%v", err)
	}

	var out strings.Builder
	if err := r.print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"PASS  1000 nodes, extender binpack: 0.95 of the pods per second of plain (median of 3 rounds, 0.50 to 1.00); at least 0.75 is " +
			"wanted\n",
		"PASS  1000 nodes, plugin binpack: 1.00 of", "MISS  4999 nodes, extender binpack: 0.74", "PASS  5000 nodes, extender binpack: 0.80",
		"plugin binpack   110.0  1.00 (0.90-1.10)", "1.50 (1.50-1.50)", "mixed: 5000 nodes",
		"  extender binpack: etcd 4.00; together, without this program, 4.00\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output has no %q:\n%s", want, out.String())
		}
	}
	if n := strings.Count(out.String(), "PASS") + strings.Count(out.String(), "MISS"); n != 12 {
		t.Errorf("%d verdicts, want four for each of three:\n%s", n, out.String())
	}

	r.options.batching = true
	if err := r.missed(); strings.Contains(err.Error(), "of the pods per second") {
		t.Errorf("with batching, throughput is judged:\n%v", err)
	}
}

// A median of 15 rounds is between the fourth and the twelfth with 96.5 %.
func TestInterval(t *testing.T) {
	for n, want := range map[int][2]float64{1: {1, 1}, 5: {1, 5}, 6: {1, 6}, 8: {1, 8}, 9: {2, 8}, 15: {4, 12}, 20: {6, 15}} {
		var values []float64
		for i := range n {
			values = append(values, float64(n-i))
		}
		if low, high := interval(values); low != want[0] || high != want[1] {
			t.Errorf("of %d: %g to %g, want %v", n, low, high, want)
		}
	}
}

func TestBefore(t *testing.T) {
	var all []Phase
	for i, factor := range []float64{1.2, 1, 1.1} {
		all = append(all,
			Phase{Side: side{before, "binpack"}, Round: i + 1, CPU: map[string]float64{"etcd": 2, extenderName: 2, benchName: 50},
				Divvy: &DivvyTimes{}},
			Phase{Side: called, Round: i + 1, CPU: map[string]float64{"etcd": 2, extenderName: 4*factor - 2, benchName: 5},
				Divvy: &DivvyTimes{}})
	}
	r := Result{options: options{pods: 100, policies: []string{"binpack"}, before: "divvy-control"}, Measurements: []*Measurement{
		{Nodes: 1000, Scenario: scenario{judged: true}, Phases: all},
	}}
	r.judge()
	if err := r.missed(); err == nil || err.Error() != "1000 nodes, extender binpack: 1.100 of the processor time for a pod before "+
		"(median of 3 rounds, 1.000 to 1.200); at most 1.05 is wanted" {
		t.Errorf("missed: %v", err)
	}
	var out strings.Builder
	if err := r.print(&out); err != nil || !strings.Contains(out.String(), "before binpack: divvy-extender 2.00, etcd 2.00") {
		t.Errorf("%v:\n%s", err, out.String())
	}
}

func TestBusyNow(t *testing.T) {
	b, err := busyNow()
	if err != nil || b.used <= 0 || b.stolen < 0 {
		t.Errorf("%+v, %v", b, err)
	}
}
