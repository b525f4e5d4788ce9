package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

const (
	gcuMemory accel.Resource = "enflame.com/gcu-memory"
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

// newKeys returns a keyring with a key.
func newKeys(tb testing.TB) *kube.Keyring {
	tb.Helper()
	file := filepath.Join(tb.TempDir(), "key")
	if err := os.WriteFile(file, bytes.Repeat([]byte("k"), 32), 0o600); err != nil {
		tb.Fatal(err)
	}
	return kube.NewKeyring(file)
}

// world is an extender over real books and a cluster of the test's making.
type world struct {
	tb     testing.TB
	server *httptest.Server
	// extender is what the server answers with.
	extender *Extender
	ledger   *ledger.Ledger
	keys     *kube.Keyring
	cluster  *fakeCluster
	clock    time.Time
	// notReady is what Ready returns.
	notReady error
}

// newWorld has node-a with cards of 16 and 16, node-b with one of 8 units.
func newWorld(tb testing.TB, change ...func(*Config)) *world {
	tb.Helper()
	w := &world{
		tb: tb, keys: newKeys(tb), clock: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		cluster: &fakeCluster{known: map[string]cluster.Pod{}, actual: map[string]cluster.Pod{}, problems: map[string]string{}},
	}
	w.ledger = ledger.New(ledger.Options{Now: func() time.Time { return w.clock }, ReservationTTL: time.Minute})
	w.ledger.SetNode("node-a", []accel.Inventory{cards(gcuMemory, "a", 16, 16)})
	w.ledger.SetNode("node-b", []accel.Inventory{cards(gcuMemory, "b", 8)})
	config := Config{
		Ledger: w.ledger, Cluster: w.cluster, Binder: w.cluster, Signer: w.keys.Signer,
		Ready:     func() error { return w.notReady },
		Resources: []accel.Resource{gcuMemory}, Version: "v1.2.3", BindTimeout: time.Second,
		Now: func() time.Time { return w.clock },
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

func cards(res accel.Resource, prefix string, units ...accel.Units) accel.Inventory {
	inv := accel.Inventory{Resource: res, Unit: "1"}
	for i, u := range units {
		inv.Shares = append(inv.Shares, accel.Share{Units: u, Device: accel.Device{
			Index: i, ID: accel.DeviceID(fmt.Sprintf("%s%d", prefix, i)), Model: "S60", NUMANode: accel.NoNUMA,
		}})
	}
	return inv
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
	p := podOf(pod, resources...)
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	w.cluster.known[p.Ref.String()], w.cluster.actual[p.Ref.String()] = p, p
	return pod
}

func podOf(pod *v1.Pod, resources ...accel.Resource) cluster.Pod {
	if len(resources) == 0 {
		resources = []accel.Resource{gcuMemory}
	}
	requests, mistake := kube.RequestsOf(pod, resources)
	return cluster.Pod{
		Ref:     accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name},
		Created: pod.CreationTimestamp.Time, Node: pod.Spec.NodeName,
		Requests: requests, Mistake: mistake,
	}
}

// newPod asks for amounts of gcu-memory, one container each.
func newPod(name string, amounts ...int64) *v1.Pod {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "team", Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.Unix(1662450043, 0),
	}}
	for i, amount := range amounts {
		pod.Spec.Containers = append(pod.Spec.Containers, newContainer(fmt.Sprintf("c%d", i), gcuMemory, amount))
	}
	if len(amounts) == 0 {
		pod.Spec.Containers = []v1.Container{{Name: "main"}}
	}
	return pod
}

func newContainer(name string, res accel.Resource, amount int64) v1.Container {
	list := v1.ResourceList{v1.ResourceName(res): *resource.NewQuantity(amount, resource.DecimalSI)}
	return v1.Container{Name: name, Resources: v1.ResourceRequirements{Limits: list, Requests: list}}
}

// fakeCluster is what the books know and what is true, which differ.
type fakeCluster struct {
	mu       sync.Mutex
	known    map[string]cluster.Pod // by namespace/name: what the watch has shown
	actual   map[string]cluster.Pod // what the API server has
	problems map[string]string
	single   map[string]bool // nodes that can give a pod one device only
	// bindError, when set, decides what a bind answers; it may change actual.
	bindError func(ctx context.Context, ref accel.PodRef, node string) error
	getError  error
	// annotations of the binds that were written, by pod.
	annotations map[string]map[string]string
	gets        int
}

func (c *fakeCluster) Pod(namespace, name string) (cluster.Pod, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p, ok := c.known[namespace+"/"+name]
	return p, ok
}

func (c *fakeCluster) Problem(node string) string { return c.problems[node] }

func (c *fakeCluster) Offering() []string { return []string{"node-a", "node-b"} }

func (c *fakeCluster) Several(node string, _ accel.Resource) bool { return !c.single[node] }

func (c *fakeCluster) Get(_ context.Context, namespace, name string) (cluster.Pod, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gets++
	if c.getError != nil {
		return cluster.Pod{}, c.getError
	}
	p, ok := c.actual[namespace+"/"+name]
	if !ok {
		return cluster.Pod{}, fmt.Errorf("pod %s/%s: %w", namespace, name, cluster.ErrPodGone)
	}
	return p, nil
}

func (c *fakeCluster) Bind(ctx context.Context, ref accel.PodRef, node string, annotations map[string]string) error {
	if c.bindError != nil {
		if err := c.bindError(ctx, ref, node); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	p, ok := c.actual[ref.String()]
	if !ok || p.Ref.UID != ref.UID {
		return cluster.ErrPodGone
	}
	p.Node = node
	c.actual[ref.String()] = p
	if c.annotations == nil {
		c.annotations = map[string]map[string]string{}
	}
	c.annotations[ref.String()] = annotations
	return nil
}

// show is the watch catching up: the books and the ledger learn what is true.
func (w *world) show(pod *v1.Pod) {
	w.tb.Helper()
	w.cluster.mu.Lock()
	defer w.cluster.mu.Unlock()
	key := pod.Namespace + "/" + pod.Name
	p := w.cluster.actual[key]
	w.cluster.known[key] = p
	if p.Node == "" {
		return
	}
	h := ledger.Holding{Pod: p.Ref, Node: p.Node, Resource: gcuMemory, Units: p.Requests[0].Peak(), Created: p.Created}
	if value := w.cluster.annotations[key][wire.GrantAnnotation]; value != "" {
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
