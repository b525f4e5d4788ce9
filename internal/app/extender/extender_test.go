package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	metadatafake "k8s.io/client-go/metadata/fake"
	"k8s.io/klog/v2"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// instance is a running extender over a fake API server.
type instance struct {
	t            *testing.T
	url, metrics string
	tls          string // host:port, which is answered where TLS is on
	stop         context.CancelFunc
	done         chan error
}

func start(t *testing.T, clients kube.Clients, change func(*Options)) *instance {
	t.Helper()
	o := DefaultOptions()
	o.GrantKeyFile, o.TLS.Listen = filepath.Join(t.TempDir(), "key"), ""
	if change != nil {
		change(&o)
	}
	var config net.ListenConfig
	var err error
	sockets := make([]net.Listener, 3)
	for i := range sockets {
		if sockets[i], err = config.Listen(t.Context(), "tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	if o.TLS.Listen != "" {
		o.TLS.Listen = sockets[2].Addr().String() // where other replicas reach this one
	}
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	p, err := assemble(o, clients)
	if err != nil {
		t.Fatal(err)
	}
	for i := range p.servers {
		p.servers[i].Listener = sockets[i]
	}
	ctx, stop := context.WithCancel(context.Background())
	i := &instance{t: t, url: "http://" + sockets[0].Addr().String(), metrics: "http://" + sockets[1].Addr().String(),
		tls: sockets[2].Addr().String(), stop: stop, done: make(chan error, 1)}
	go func() { i.done <- p.run(ctx) }()
	t.Cleanup(stop)
	return i
}

// end stops the instance and returns what run returned.
func (i *instance) end() error {
	i.t.Helper()
	i.stop()
	select {
	case err := <-i.done:
		return err
	case <-time.After(2 * time.Minute):
		i.t.Fatal("it did not stop")
		return nil
	}
}

func (i *instance) get(url string) (status int, body string) {
	i.t.Helper()
	resp, err := http.Get(url) //nolint:noctx // a test
	if err != nil {
		i.t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		i.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func (i *instance) post(verb string, args, result any) {
	i.t.Helper()
	body, err := json.Marshal(args)
	if err != nil {
		i.t.Fatal(err)
	}
	resp, err := http.Post(i.url+"/gcushare-scheduler/"+verb, "application/json", bytes.NewReader(body)) //nolint:noctx // a test
	if err != nil {
		i.t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	if err := json.NewDecoder(resp.Body).Decode(result); err != nil {
		i.t.Fatal(err)
	}
}

// ready waits until /readyz answers so, or with the text.
func (i *instance) ready(text string) {
	i.t.Helper()
	want := http.StatusOK
	if text != "" {
		want = http.StatusServiceUnavailable
	}
	deadline := time.Now().Add(2 * time.Minute)
	for {
		status, body := i.get(i.url + "/readyz")
		if status == want && strings.Contains(body, text) {
			return
		}
		if time.Now().After(deadline) {
			i.t.Fatalf("/readyz answers %d %s, want %d %s", status, body, want, text)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func clients(t *testing.T) (kube.Clients, *fake.Clientset) {
	t.Helper()
	value, err := wire.EncodeInventory([]accel.Inventory{{Resource: "enflame.com/gcu-memory", Unit: "1", Shares: []accel.Share{
		{Units: 16, Device: accel.Device{ID: "U1", NUMANode: accel.NoNUMA}}}}})
	if err != nil {
		t.Fatal(err)
	}
	scheme := metadatafake.NewTestScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	node := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{
		Name: "node-a", Labels: map[string]string{"enflame.com/gcushare": "true"},
		Annotations: map[string]string{wire.InventoryAnnotation: value}}}
	client := fake.NewClientset(pod("p"))
	return kube.Clients{Kubernetes: client, Metadata: metadatafake.NewSimpleMetadataClient(scheme, node)}, client
}

func pod(name string) *v1.Pod {
	amount := v1.ResourceList{"enflame.com/gcu-memory": resource.MustParse("4")}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: "uid"},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "main", Resources: v1.ResourceRequirements{Limits: amount,
			Requests: amount}}}},
	}
}

// From the start without a key to the end in the middle of a bind.
func TestLife(t *testing.T) {
	c, client := clients(t)
	keyFile := filepath.Join(t.TempDir(), "key")
	i := start(t, c, func(o *Options) { o.GrantKeyFile = keyFile })

	i.ready("no signing key yet")
	if status, _ := i.get(i.url + "/healthz"); status != http.StatusOK {
		t.Errorf("/healthz answers %d while it waits for its key", status)
	}
	names := []string{"node-a", "node-b"}
	args := extenderv1.ExtenderArgs{Pod: pod("p"), NodeNames: &names}
	var filtered extenderv1.ExtenderFilterResult
	i.post("filter", args, &filtered)
	if !strings.Contains(filtered.Error, "not ready") {
		t.Errorf("filter answered %+v before it was ready", filtered)
	}

	if err := os.WriteFile(keyFile, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	i.ready("the signing key has 5 bytes")
	if err := os.WriteFile(keyFile, bytes.Repeat([]byte("k"), 32), 0o600); err != nil {
		t.Fatal(err)
	}
	i.ready("")

	filtered = extenderv1.ExtenderFilterResult{}
	i.post("filter", args, &filtered)
	if filtered.Error != "" || len(*filtered.NodeNames) != 1 || filtered.FailedAndUnresolvableNodes["node-b"] == "" {
		t.Errorf("filter answered %+v", filtered)
	}
	var bound extenderv1.ExtenderBindingResult
	i.post("bind", extenderv1.ExtenderBindingArgs{PodName: "p", PodNamespace: "team", PodUID: "uid", Node: "node-a"}, &bound)
	if bound.Error != "" {
		t.Error(bound.Error)
	}
	if last := client.Actions()[len(client.Actions())-1]; last.GetSubresource() != "binding" {
		t.Errorf("the last call of the API server is %v, want a binding", last)
	}
	if status, body := i.get(i.url + "/gcushare-scheduler/inspect/node-a"); status != http.StatusOK ||
		!strings.Contains(body, `"usedGCU": 4`) {
		t.Errorf("inspect answers %d %s", status, body)
	}
	for _, want := range []string{
		`divvy_extender_requests_total{result="ok",verb="filter"} 1`, `divvy_extender_books_nodes{state="good"} 1`,
		`divvy_extender_books_pods{state="waiting"} 1`, "divvy_build_info{", "process_resident_memory_bytes",
		`divvy_extender_decisions_total{outcome="bound",resource="enflame.com/gcu-memory",verb="bind"} 1`,
		"divvy_extender_ready 1", "divvy_extender_leader 1", "divvy_extender_reservations 1",
		`divvy_extender_device_units{device="U1",index="0",node="node-a",resource="enflame.com/gcu-memory"} 16`,
		`divvy_extender_device_units_used{device="U1",index="0",node="node-a",resource="enflame.com/gcu-memory"} 4`,
		`divvy_extender_device_units_free{device="U1",index="0",node="node-a",resource="enflame.com/gcu-memory"} 12`,
		`divvy_extender_node_units{node="node-a",resource="enflame.com/gcu-memory"} 16`,
		`divvy_extender_node_units_used{node="node-a",resource="enflame.com/gcu-memory"} 4`,
		`divvy_extender_node_unit_bytes{node="node-a",resource="enflame.com/gcu-memory"} 1.073741824e+09`,
		`divvy_extender_namespace_units_used{namespace="team",node="node-a",resource="enflame.com/gcu-memory"} 4`,
	} {
		if _, body := i.get(i.metrics + "/metrics"); !strings.Contains(body, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	if status, _ := i.get(i.url + "/metrics"); status != http.StatusNotFound {
		t.Errorf("/metrics on kube-scheduler's port answers %d", status)
	}
	if err := i.end(); err != nil {
		t.Error(err)
	}
}

// Where another program places pods, it serves the reports alone.
func TestReportsOnly(t *testing.T) {
	c, _ := clients(t)
	keyFile := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(keyFile, bytes.Repeat([]byte("k"), 32), 0o600); err != nil {
		t.Fatal(err)
	}
	i := start(t, c, func(o *Options) { o.GrantKeyFile, o.ReportsOnly = keyFile, true })
	i.ready("")
	if status, body := i.get(i.url + "/gcushare-scheduler/inspect/node-a"); status != http.StatusOK {
		t.Errorf("inspect answers %d %s", status, body)
	}
	for _, verb := range []string{"filter", "preempt", "prioritize", "bind"} {
		resp, err := http.Post(i.url+"/gcushare-scheduler/"+verb, "application/json", strings.NewReader("{}")) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s answers %d", verb, resp.StatusCode)
		}
		if err := resp.Body.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := i.end(); err != nil {
		t.Error(err)
	}
}

// What cannot be mended ends Run with a text that says what it was doing.
func TestRunFails(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "divvy-system")
	o := DefaultOptions()
	o.Kubeconfig = filepath.Join(t.TempDir(), "none")
	if err := Run(t.Context(), o); err == nil || !strings.HasPrefix(err.Error(), "configuration of the Kubernetes client: ") {
		t.Errorf("error %v", err)
	}
	o.Placement.Policy = "best"
	if err := Run(t.Context(), o); err == nil || !strings.HasPrefix(err.Error(), "--policy: ") {
		t.Errorf("error %v", err)
	}
	var config net.ListenConfig
	taken, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close() //nolint:errcheck // a test
	o = DefaultOptions()
	o.Kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(o.Kubeconfig,
		[]byte(`{"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],"contexts":[{"name":"x","context":{"cluster":"c"}}],`+
			`"current-context":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	o.Listen = taken.Addr().String()
	if err := Run(t.Context(), o); err == nil || !strings.HasPrefix(err.Error(), "listen for kube-scheduler: ") {
		t.Errorf("error %v", err)
	}
	o.Listen, o.MetricsListen = "127.0.0.1:0", taken.Addr().String()
	if err := Run(t.Context(), o); err == nil || !strings.HasPrefix(err.Error(), "listen for metrics: ") {
		t.Errorf("error %v", err)
	}
	o.MetricsListen, o.TLS.Listen = "", taken.Addr().String()
	if err := Run(t.Context(), o); err == nil || !strings.HasPrefix(err.Error(), "listen for kube-scheduler over TLS: ") {
		t.Errorf("error %v", err)
	}
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
}
