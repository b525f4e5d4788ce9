package extender

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

const (
	gcuMemory                = decisiontest.Memory
	otherMem  accel.Resource = "example.com/other-memory"

	noRoom = "insufficient GCU Memory in one gcu device"
)

func TestMain(m *testing.M) {
	// A process of BenchmarkHTTP.
	if what := os.Getenv(benchEnv); what != "" {
		if err := serveBenchmark(what); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	// Hundreds of expected errors would hide the unexpected.
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// What decisiontest has, by short names.
var (
	newKeys      = decisiontest.NewKeys
	cards        = decisiontest.Cards
	podOf        = decisiontest.PodOf
	newPod       = decisiontest.NewPod
	newContainer = decisiontest.NewContainer
)

// world is an extender over real books and a cluster of the test's making.
type world struct {
	tb     testing.TB
	server *httptest.Server
	// extender is what the server answers with.
	extender *Extender
	ledger   *ledger.Ledger
	keys     *kube.Keyring
	cluster  *decisiontest.Cluster
	clock    time.Time
	// notReady is what Ready returns.
	notReady error
}

// newWorld has node-a with cards of 16 and 16, node-b with one of 8 units.
func newWorld(tb testing.TB, change ...func(*Config)) *world {
	tb.Helper()
	w := &world{
		tb: tb, keys: newKeys(tb), clock: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		cluster: decisiontest.NewCluster(),
	}
	w.ledger = ledger.New(ledger.Options{Now: func() time.Time { return w.clock }, ReservationTTL: time.Minute})
	w.ledger.SetNode("node-a", []accel.Inventory{cards(gcuMemory, "a", 16, 16)})
	w.ledger.SetNode("node-b", []accel.Inventory{cards(gcuMemory, "b", 8)})
	config := Config{
		Config: decision.Config{
			Ledger: w.ledger, Cluster: w.cluster, Binder: w.cluster, Signer: w.keys.Signer,
			Ready:     func() error { return w.notReady },
			Resources: []accel.Resource{gcuMemory}, Now: func() time.Time { return w.clock },
		},
		Version: "v1.2.3", BindTimeout: time.Second,
	}
	for _, f := range change {
		f(&config)
	}
	e, err := New(config)
	if err != nil {
		tb.Fatal(err)
	}
	w.extender, w.server = e, httptest.NewServer(e.Handler())
	tb.Cleanup(w.server.Close)
	return w
}

// used is what is used of each card of the node.
func (w *world) used(node string) []accel.Units {
	w.tb.Helper()
	u, ok := w.ledger.Node(gcuMemory, node)
	if !ok {
		w.tb.Fatalf("node %s is not in the books", node)
	}
	used := make([]accel.Units, len(u.Devices))
	for i, d := range u.Devices {
		used[i] = d.Used
	}
	return used
}

// post sends a body and returns the answer.
func (w *world) post(path string, body []byte) (status int, answer []byte) {
	w.tb.Helper()
	resp, err := w.server.Client().Post(w.server.URL+Prefix+path, "application/json", bytes.NewReader(body))
	if err != nil {
		w.tb.Fatal(err)
	}
	return readAll(w.tb, resp)
}

func (w *world) get(path string) (status int, answer []byte) {
	w.tb.Helper()
	resp, err := w.server.Client().Get(w.server.URL + path)
	if err != nil {
		w.tb.Fatal(err)
	}
	return readAll(w.tb, resp)
}

func readAll(tb testing.TB, resp *http.Response) (status int, body []byte) {
	tb.Helper()
	defer resp.Body.Close() //nolint:errcheck // read to its end
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		tb.Fatal(err)
	}
	return resp.StatusCode, b.Bytes()
}

// filter asks as kube-scheduler does and reads the answer as it does.
func (w *world) filter(args extenderv1.ExtenderArgs) extenderv1.ExtenderFilterResult {
	w.tb.Helper()
	var result extenderv1.ExtenderFilterResult
	w.ask("/filter", args, &result)
	return result
}

// bind asks as kube-scheduler does and returns the error's text.
func (w *world) bind(pod *v1.Pod, node string) string {
	w.tb.Helper()
	var result extenderv1.ExtenderBindingResult
	w.ask("/bind", extenderv1.ExtenderBindingArgs{
		PodName: pod.Name, PodNamespace: pod.Namespace, PodUID: pod.UID, Node: node,
	}, &result)
	return result.Error
}

func (w *world) ask(path string, args, result any) {
	w.tb.Helper()
	body, err := json.Marshal(args)
	if err != nil {
		w.tb.Fatal(err)
	}
	status, answer := w.post(path, body)
	if status != http.StatusOK {
		w.tb.Fatalf("%s: status %d, kube-scheduler would lose the text %s", path, status, answer)
	}
	if err := json.Unmarshal(answer, result); err != nil {
		w.tb.Fatalf("%s answered %s: %v", path, answer, err)
	}
}

// add makes the pod exist, and seen.
func (w *world) add(pod *v1.Pod, resources ...accel.Resource) *v1.Pod {
	w.cluster.Add(pod, resources...)
	return pod
}

// show is the watch catching up: the books and the ledger learn what is true.
func (w *world) show(pod *v1.Pod) {
	w.tb.Helper()
	w.cluster.Mu.Lock()
	defer w.cluster.Mu.Unlock()
	key := pod.Namespace + "/" + pod.Name
	p := w.cluster.Actual[key]
	w.cluster.Known[key] = p
	if p.Node == "" {
		return
	}
	h := ledger.Holding{Pod: p.Ref, Node: p.Node, Resource: gcuMemory, Units: p.Requests[0].Peak(), Created: p.Created}
	if value := w.cluster.Annotations[key][wire.GrantAnnotation]; value != "" {
		grant, err := w.keys.DecodeGrant(p.Ref.UID, value)
		if err != nil {
			w.tb.Fatal(err)
		}
		h.Device = grant.Device
	}
	w.ledger.Observe(h)
}

func mustContain(tb testing.TB, text, part string) {
	tb.Helper()
	if !strings.Contains(text, part) {
		tb.Errorf("%q lacks %q", text, part)
	}
}

func mustJSON(tb testing.TB, v any) []byte {
	tb.Helper()
	body, err := json.Marshal(v)
	if err != nil {
		tb.Fatal(err)
	}
	return body
}
