package extender

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// Whatever is sent, the answer has an error that says what is wrong, and the
// next good question is answered.
func TestBadInput(t *testing.T) {
	good := `{"Pod":{"spec":{"containers":[]}},"NodeNames":["node-a"]}`
	type request struct {
		method, contentType, body string
		// huge makes a body anew for each request; the client may still send
		// the last one.
		huge func() io.Reader
	}
	tests := map[string]struct {
		request
		filter, bind string // part of the error's text; "" where it does not apply
		status       int    // 0 for 200
	}{
		"empty":       {filter: "the request is empty", bind: "the request is empty"},
		"white space": {request: request{body: " \n\t"}, filter: "the request is empty", bind: "the request is empty"},
		"not JSON":    {request: request{body: "hello"}, filter: "not valid JSON", bind: "not valid JSON"},
		"cut short":   {request: request{body: `{"Pod":{"spec":`}, filter: "not valid JSON", bind: "not valid JSON"},
		"two values":  {request: request{body: good + good}, filter: "not valid JSON", bind: "not valid JSON"},
		"binary":      {request: request{body: "\x00\x01\xff\xfe"}, filter: "not valid JSON", bind: "not valid JSON"},
		"null":        {request: request{body: "null"}, filter: "not a JSON object", bind: "not a JSON object"},
		"an array":    {request: request{body: "[]"}, filter: "a JSON array, not an object", bind: "a JSON array, not an object"},
		"a string":    {request: request{body: `"x"`}, filter: "a JSON string, not an object", bind: "a JSON string, not an object"},
		"another object": {request: request{body: `{"kind":"AdmissionReview","request":{"uid":"x"}}`}, filter: "has no Pod",
			bind: "has no PodName"},
		"deeply nested":  {request: request{body: strings.Repeat(`{"Pod":`, 20000)}, filter: "not valid JSON", bind: "larger than"},
		"no nodes":       {request: request{body: `{"Pod":{}}`}, filter: "neither NodeNames nor Nodes"},
		"null for nodes": {request: request{body: `{"Pod":{},"Nodes":null,"NodeNames":null}`}, filter: "neither NodeNames nor Nodes"},
		"pod is a list":  {request: request{body: `{"Pod":[],"NodeNames":[]}`}, filter: "field Pod cannot be a JSON array"},
		"names are not":  {request: request{body: `{"Pod":{},"NodeNames":"node-a"}`}, filter: "field NodeNames cannot be a JSON string"},
		"a name is not":  {request: request{body: `{"Pod":{},"NodeNames":[7]}`}, filter: "cannot be a JSON number"},
		"nameless node":  {request: request{body: `{"Pod":{},"Nodes":{"items":[{}]}}`}, filter: "item 0 of Nodes has no name"},
		"node is a text": {request: request{body: `{"Pod":{},"Nodes":{"items":["x"]}}`}, filter: "string"},
		"bad amount": {request: request{body: `{"Pod":{"spec":{"containers":[{"resources":{"limits":{"enflame.com/` +
			`gcu-memory":"much"}}}]}},"NodeNames":[]}`},
			filter: "quantities must match"},
		"bad amount in kube-scheduler's form": {request: request{body: `{"Pod":{"spec":{"containers":[{"resources":{"limits":{` +
			`"enflame.com/gcu-memory":"much"}}}]}},"Nodes":null,"NodeNames":["a"]}`},
			filter: "quantities must match"},
		"no UID": {request: request{body: `{"PodName":"p","PodNamespace":"team","Node":"n"}`}, bind: "has no PodUID"},
		"UID is 7": {request: request{body: `{"PodName":"p","PodNamespace":"team","PodUID":7,"Node":"n"}`},
			bind: "field PodUID cannot be a JSON number"},
		"unknown pod": {request: request{body: `{"PodName":"p","PodNamespace":"team","PodUID":"u","Node":"n"}`},
			bind: "the pod no longer exists"},
		"GET": {request: request{method: http.MethodGet}, filter: "must be POST", bind: "must be POST",
			status: http.StatusMethodNotAllowed},
		"PUT": {request: request{method: http.MethodPut, body: good}, filter: "must be POST", bind: "must be POST",
			status: http.StatusMethodNotAllowed},
		"a form": {request: request{contentType: "application/x-www-form-urlencoded", body: good}, filter: "must be application/json",
			bind: "must be application/json"},
		"odd type": {request: request{contentType: ";;", body: good}, filter: "must be application/json",
			bind: "must be application/json"},
		"said to be huge": {request: request{huge: func() io.Reader { return bytes.NewReader(make([]byte, maxFilterBody+1)) }},
			filter: "larger than 33554432 bytes", bind: "larger than 65536 bytes"},
		// A reader of no known type makes the client send chunks.
		"huge without saying so": {request: request{huge: func() io.Reader { return io.LimitReader(zeros{}, maxFilterBody+1) }},
			filter: "larger than 33554432 bytes", bind: "larger than 65536 bytes"},
	}
	w := newWorld(t)
	for name, tt := range tests {
		for verb, want := range map[string]string{"filter": tt.filter, "bind": tt.bind} {
			if want == "" {
				continue
			}
			t.Run(name+"/"+verb, func(t *testing.T) {
				var body io.Reader = strings.NewReader(tt.body)
				if tt.huge != nil {
					body = tt.huge()
				}
				method := tt.method
				if method == "" {
					method = http.MethodPost
				}
				req, err := http.NewRequestWithContext(t.Context(), method, w.server.URL+Prefix+"/"+verb, body)
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("Content-Type", "application/json; charset=utf-8")
				if tt.contentType != "" {
					req.Header.Set("Content-Type", tt.contentType)
				}
				resp, err := w.server.Client().Do(req)
				if err != nil {
					// A server may hang up on a client that sends too much.
					if tt.huge == nil {
						t.Fatal(err)
					}
				} else {
					status, answer := readAll(t, resp)
					if wantStatus := max(tt.status, http.StatusOK); status != wantStatus && (tt.status != 0 || status != http.StatusOK) {
						t.Errorf("status %d, want %d", status, wantStatus)
					}
					var result struct{ Error string }
					if err := json.Unmarshal(answer, &result); err != nil {
						t.Fatalf("answer %q: %v", answer, err)
					}
					mustContain(t, result.Error, want)
				}

				nodes := []string{"node-a"}
				if got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("p", 1), NodeNames: &nodes}); got.Error != "" ||
					len(*got.NodeNames) != 1 {
					t.Errorf("the next good question was answered %+v", got)
				}
			})
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// Amounts that no device has, in every notation, are refused as such and take
// no time.
func TestHugeAmounts(t *testing.T) {
	w := newWorld(t)
	for _, amount := range []string{`"9223372036854775807"`, `9223372036854775807`, `"1e999999999"`, `"99999999999999999999999999999"`,
		`"8Ei"`} {
		body := `{"Pod":{"spec":{"containers":[` +
			`{"resources":{"requests":{"enflame.com/gcu-memory":` + amount + `}}},{"resources":{"requests":{"enflame.com/gcu-memory":` +
			amount + `}}}` +
			`]}},"NodeNames":["node-a"]}`
		status, answer := w.post("/filter", []byte(body))
		var result extenderv1.ExtenderFilterResult
		if err := json.Unmarshal(answer, &result); err != nil || status != http.StatusOK {
			t.Fatalf("%s: %d %s: %v", amount, status, answer, err)
		}
		if diff := cmp.Diff(extenderv1.FailedNodesMap{"node-a": noRoom}, result.FailedAndUnresolvableNodes); diff != "" {
			t.Errorf("%s (-want +got):\n%s", amount, diff)
		}
	}
}

// Keys are read like Go's encoder and everybody else writes them.
func TestKeysInAnyCase(t *testing.T) {
	w := newWorld(t)
	for _, body := range []string{
		`{"pod":{"metadata":{},"spec":{"containers":[{"resources":{"limits":{"enflame.com/gcu-memory":4}}}]}},"nodenames":["node-a",` +
			`"node-b"]}`,
		` { "Pod" : {"spec":{"containers":[{"resources":{"limits":{"enflame.com/gcu-memory":"4"}}}]}}, "NodeNames" : [ "node-a" , ` +
			`"node-b" ] } `,
	} {
		_, answer := w.post("/filter", []byte(body))
		var result extenderv1.ExtenderFilterResult
		if err := json.Unmarshal(answer, &result); err != nil || result.Error != "" || len(*result.NodeNames) != 2 {
			t.Errorf("%s: answered %s", body, answer)
		}
	}
}

func TestNotReady(t *testing.T) {
	w := newWorld(t)
	w.notReady = errors.New("the ledger is still being read from the API server")
	nodes := []string{"node-a"}
	pod := w.add(newPod("p", 1))
	got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes})
	mustContain(t, got.Error, "not ready: the ledger is still being read")
	mustContain(t, w.bind(pod, "node-a"), "not ready")
	if got := w.used("node-a")[0]; got != 0 {
		t.Errorf("used %d by a bind before it was ready", got)
	}
	for path, want := range map[string]int{
		"/readyz": http.StatusServiceUnavailable, "/healthz": http.StatusOK, "/version": http.StatusOK,
		Prefix + "/inspect": http.StatusServiceUnavailable,
	} {
		if status, body := w.get(path); status != want {
			t.Errorf("%s: status %d %s, want %d", path, status, body, want)
		}
	}
	if status, _ := w.post("/prioritize", []byte(`{"Pod":{},"NodeNames":[]}`)); status != http.StatusServiceUnavailable {
		t.Errorf("prioritize: status %d, want 503", status)
	}
	w.notReady = nil
	if status, _ := w.get("/readyz"); status != http.StatusOK {
		t.Errorf("/readyz: status %d when ready", status)
	}
}

func TestRoutes(t *testing.T) {
	w := newWorld(t)
	if status, body := w.get("/version"); status != http.StatusOK || string(body) != "v1.2.3\n" {
		t.Errorf("/version: %d %q", status, body)
	}
	status, body := w.get("/nowhere")
	if status != http.StatusNotFound {
		t.Errorf("/nowhere: status %d", status)
	}
	mustContain(t, string(body), "no route GET /nowhere")
	if status, body := w.post("/prioritize", []byte("{")); status != http.StatusBadRequest ||
		!strings.Contains(string(body), "not valid JSON") {
		t.Errorf("prioritize of garbage: %d %s", status, body)
	}
	if status, _ := w.get("/debug/pprof/"); status != http.StatusNotFound {
		t.Errorf("/debug/pprof/: status %d, want 404", status)
	}
}

type panickyLedger struct{ decision.Ledger }

func (panickyLedger) Check(accel.Request, []string, []ledger.Verdict) {
	panic("a mistake")
}

func TestPanicIsAnAnswer(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, func(c *Config) { c.Ledger, c.Registry = panickyLedger{c.Ledger}, registry })
	nodes := []string{"node-a"}
	got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("p", 1), NodeNames: &nodes})
	mustContain(t, got.Error, "internal error of the extender")
	if text := w.bind(w.add(newPod("q", 1)), "node-a"); text != "" {
		t.Errorf("bind after the panic: %s", text)
	}
	if n, err := testutil.GatherAndCount(registry, "divvy_extender_panics_total"); n != 1 || err != nil {
		t.Errorf("panics counted in %d series: %v", n, err)
	}
}

func TestMetrics(t *testing.T) {
	registry := prometheus.NewRegistry()
	w := newWorld(t, func(c *Config) { c.Registry = registry })
	nodes := []string{"node-a", "node-b", "nowhere"}
	args := extenderv1.ExtenderArgs{Pod: newPod("p", 9), NodeNames: &nodes}
	w.filter(args)
	var rated extenderv1.HostPriorityList
	w.ask("/prioritize", args, &rated)
	w.bind(w.add(newPod("p", 9)), "node-b")
	w.bind(w.add(newPod("p", 9)), "node-a")
	w.bind(newPod("ghost", 1), "node-a")
	w.filter(extenderv1.ExtenderArgs{Pod: newPod("idle", 0), NodeNames: &nodes})
	w.filter(extenderv1.ExtenderArgs{Pod: newPod("giant", 900), NodeNames: &nodes})
	got, err := nonzero(registry)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{
		`divvy_extender_requests_total{result="ok",verb="filter"}`:                                            3,
		`divvy_extender_requests_total{result="ok",verb="prioritize"}`:                                        1,
		`divvy_extender_requests_total{result="error",verb="bind"}`:                                           2,
		`divvy_extender_requests_total{result="ok",verb="bind"}`:                                              1,
		`divvy_extender_decisions_total{outcome="fits",resource="enflame.com/gcu-memory",verb="filter"}`:      1,
		`divvy_extender_decisions_total{outcome="refused",resource="enflame.com/gcu-memory",verb="filter"}`:   1,
		`divvy_extender_decisions_total{outcome="fits",resource="none",verb="filter"}`:                        1,
		`divvy_extender_decisions_total{outcome="rated",resource="enflame.com/gcu-memory",verb="prioritize"}`: 1,
		`divvy_extender_decisions_total{outcome="bound",resource="enflame.com/gcu-memory",verb="bind"}`:       1,
		`divvy_extender_decisions_total{outcome="failed",resource="enflame.com/gcu-memory",verb="bind"}`:      1,
		`divvy_extender_decisions_total{outcome="failed",resource="none",verb="bind"}`:                        1,
		`divvy_extender_node_verdicts_total{resource="enflame.com/gcu-memory",verdict="fits"}`:                1,
		`divvy_extender_node_verdicts_total{resource="enflame.com/gcu-memory",verdict="largerThanDevice"}`:    3,
		`divvy_extender_node_verdicts_total{resource="enflame.com/gcu-memory",verdict="nodeUnknown"}`:         2,
		`divvy_extender_node_verdicts_total{resource="none",verdict="fits"}`:                                  3,
		`divvy_extender_bind_errors_total{cause="noFit"}`:                                                     1,
		`divvy_extender_bind_errors_total{cause="podGone"}`:                                                   1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
	if _, err := New(Config{}); err == nil {
		t.Error("New took a configuration with nothing in it")
	}
}

// nonzero are the values of the registry that are not 0, without histograms.
func nonzero(registry prometheus.Gatherer) (map[string]float64, error) {
	families, err := registry.Gather()
	if err != nil {
		return nil, err
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			if v := m.GetCounter().GetValue() + m.GetGauge().GetValue(); v != 0 {
				out[f.GetName()+"{"+strings.Join(labels, ",")+"}"] = v
			}
		}
	}
	return out, nil
}

// TestPodsThatNobodyCanPlaceAreTold, and no others: a node that is full now may
// have room later.
func TestPodsThatNobodyCanPlaceAreTold(t *testing.T) {
	var told []string
	w := newWorld(t, func(c *Config) {
		c.Tell = func(pod accel.PodRef, kind events.Kind, message string) {
			told = append(told, fmt.Sprintf("%s %s %s: %s", pod, pod.UID, kind.Reason, message))
		}
	})
	for name, tt := range map[string]struct {
		units int64
		nodes []string
		want  string
	}{
		"fits":        {1, []string{"node-a", "node-b"}, ""},
		"fits on one": {9, []string{"node-a", "node-b"}, ""},
		"larger than any device": {900, []string{"node-a", "node-b", "nowhere"}, "NeverFits: the pod requests 900 units of " +
			"enflame.com/gcu-memory on one device, more than any device has on the 2 candidate nodes that offer it"},
		"no node offers it": {1, []string{"nowhere"}, ""},
		"larger, but others were left": {9, []string{"node-b"}, "NeverFits: the pod requests 9 units of enflame.com/gcu-memory on one " +
			"device, more than any device has on the 1 candidate nodes that offer it"},
		"nothing is asked for, no nodes": {0, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			told = nil
			pod := newPod("p", tt.units)
			w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &tt.nodes})
			var want []string
			if tt.want != "" {
				want = []string{fmt.Sprintf("%s/p %s %s", pod.Namespace, pod.UID, tt.want)}
			}
			if diff := cmp.Diff(want, told); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestAStrangerTellsNobody: whoever may not bind makes no events by what it asks,
// which names any pod that it likes.
func TestAStrangerTellsNobody(t *testing.T) {
	told := 0
	w := newWorld(t, func(c *Config) { c.Tell = func(accel.PodRef, events.Kind, string) { told++ } })
	for remote, want := range map[string]int{"192.0.2.77:4000": 0, "127.0.0.1:4000": 1} {
		body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: newPod("p", 900), NodeNames: &[]string{"node-a"}})
		if err != nil {
			t.Fatal(err)
		}
		r := httptest.NewRequest(http.MethodPost, Prefix+"/filter", bytes.NewReader(body))
		r.RemoteAddr, told = remote, 0
		answer := httptest.NewRecorder()
		w.server.Config.Handler.ServeHTTP(answer, r)
		if !strings.Contains(answer.Body.String(), "node-a") || told != want {
			t.Errorf("%s: %d events, want %d; the answer is %s", remote, told, want, answer.Body)
		}
	}
}
