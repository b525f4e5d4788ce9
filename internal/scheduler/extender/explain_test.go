package extender

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// recording is a world that keeps decisions and chooses nodes.
func recording(tb testing.TB) *world {
	tb.Helper()
	w := newWorld(tb, choosing, func(c *Config) {
		c.Recorder = &decision.Recorder{Log: history.NewLog(c.Now()), Now: c.Now}
	})
	w.extender.config.Recorder.Ledger = w.ledger
	return w
}

func (w *world) explain(pod string) (history.Explanation, int, string) {
	w.tb.Helper()
	status, body := w.get(inspect.ExplainRoute + "/team/" + pod)
	var e history.Explanation
	if err := json.Unmarshal(body, &e); err != nil {
		w.tb.Fatalf("%s: %v", body, err)
	}
	return e, status, string(body)
}

func TestExplainAPlacement(t *testing.T) {
	w := recording(t)
	w.ledger.SetNode("node-c", []accel.Inventory{cards(gcuMemory, "c", 16, 16)})
	w.running("node-c", "x 6 c0")
	pod := w.add(newPod("p", 8))
	nodes := []string{"node-a", "node-b", "node-c", "node-d"}
	if got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes}); len(*got.NodeNames) != 1 {
		t.Fatalf("%+v", got)
	}
	if text := w.bind(pod, "node-b"); text != "" {
		t.Fatal(text)
	}
	e, status, text := w.explain("p")
	if status != http.StatusOK || e.Kind != history.Kind || e.Policy != "binpack" || e.Chosen != "node-b" || e.Fits != 3 || e.Offered != 4 {
		t.Fatalf("%d %s", status, text)
	}
	if len(e.Rejected) != 1 || e.Rejected[0].Code != "nodeUnknown" || e.Rejected[0].Named[0] != "node-d" {
		t.Errorf("rejected: %+v", e.Rejected)
	}
	var names []string
	for _, r := range e.Ratings {
		names = append(names, r.Node)
		if history.Sum(r.Terms) != r.Rating || r.Terms[0].Name != place.TermLeft {
			t.Errorf("%s: rating %d of %+v", r.Node, r.Rating, r.Terms)
		}
	}
	if got := strings.Join(names, " "); got != "node-b node-c node-a" {
		t.Errorf("candidates %s", got)
	}
	// Of node-c the device with less free, though the other one is as it was.
	if d := e.Ratings[1].Devices; !d[0].WouldGet || d[1].WouldGet || d[0].Chosen || d[0].Free != 10 || history.Sum(d[1].Terms) != -8 {
		t.Errorf("devices of node-c: %+v", d)
	}
	if e.Bound == nil || e.Bound.Node != "node-b" || e.Bound.Devices[0].ID != "b0" || e.Ended != nil {
		t.Errorf("bound: %+v", e.Bound)
	}
	w.show(pod)
	w.clock = w.clock.Add(time.Hour)
	w.extender.config.Recorder.Forget(string(pod.UID))
	if e, _, text := w.explain("p"); e.Ended == nil || !e.Ended.At.Equal(w.clock) {
		t.Errorf("after its end: %s", text)
	}
}

// TestExplainWhatIsNotKnown: each answer says since when decisions are known.
func TestExplainWhatIsNotKnown(t *testing.T) {
	w := recording(t)
	w.add(newPod("waits", 8))
	bound := newPod("bound", 8)
	bound.Spec.NodeName = "node-a"
	w.add(bound)
	for pod, want := range map[string]string{
		"absent": "no pod of that name requests a shared resource",
		"waits":  "kubectl divvy why -n team waits",
		"bound":  "it was placed before",
	} {
		if _, status, text := w.explain(pod); status != http.StatusNotFound || !strings.Contains(text, want) ||
			!strings.Contains(text, "2026-01-02T03:04:05Z, the start of this replica") {
			t.Errorf("%s: %d %s", pod, status, text)
		}
	}
	w.notReady = errNoLeader
	if status, _ := w.get(inspect.ExplainRoute + "/team/waits"); status != http.StatusServiceUnavailable {
		t.Errorf("of an extender that is not ready: %d", status)
	}
}

// TestOthersAreNotRecorded: a caller that may not bind could fill the record with pods that
// are not.
func TestOthersAreNotRecorded(t *testing.T) {
	w := recording(t)
	body := mustJSON(t, extenderv1.ExtenderArgs{Pod: newPod("p", 8), NodeNames: &[]string{"node-a"}})
	if _, err := w.extender.filter(t.Context(), body, nil); err != nil { // with no caller
		t.Fatal(err)
	}
	for e := range w.extender.decider.History().Each {
		t.Errorf("kept %+v", e)
	}
}

func TestDecisionsAreExported(t *testing.T) {
	w := recording(t)
	for _, name := range []string{"p", "q", "r"} {
		pod := w.add(newPod(name, 8))
		node := (*w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"node-a", "node-b"}}).NodeNames)[0]
		if text := w.bind(pod, node); text != "" {
			t.Fatal(text)
		}
	}
	status, body := w.get(inspect.DecisionsRoute)
	var r history.Record
	if err := json.Unmarshal(body, &r); err != nil || status != http.StatusOK {
		t.Fatalf("%d %v %s", status, err, body)
	}
	if err := r.Validate(); err != nil || len(r.Entries) != 6 || !r.Started.Equal(w.clock) {
		t.Errorf("%v: %s", err, body)
	}
}

// TestWholeRecordsWaitForReports: both together take half of a processor. One pod's decision
// waits for neither.
func TestWholeRecordsWaitForReports(t *testing.T) {
	w := recording(t)
	pod := w.add(newPod("p", 8))
	w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"node-a"}})
	begun, finish, report := make(chan bool), make(chan bool), make(chan error)
	go func() {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
		report <- w.extender.reports.whole.Serve(httptest.NewRecorder(), r, inspectQuery{}, "", func(io.Writer) error {
			close(begun)
			<-finish
			return nil
		})
	}()
	<-begun
	record := make(chan int)
	go func() {
		status, _ := w.get(inspect.DecisionsRoute)
		record <- status
	}()
	if _, status, text := w.explain("p"); status != http.StatusOK {
		t.Errorf("one pod: %d %s", status, text)
	}
	select {
	case <-record:
		t.Error("a record was made beside a report")
	case <-time.After(50 * time.Millisecond):
	}
	close(finish)
	if err, status := <-report, <-record; err != nil || status != http.StatusOK {
		t.Errorf("%v, %d", err, status)
	}
	w.notReady = errNoLeader // while a record waited
	if err := w.extender.explains.write(io.Discard); !errors.Is(err, errNotReady) {
		t.Errorf("of a replica that lost its lead: %v", err)
	}
}
