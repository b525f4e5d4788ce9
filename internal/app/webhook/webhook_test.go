package webhook

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/sources"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

const serverName = "bwki-webhook-svc.bwki.svc"

// fixed is a certificate that is there at once, or never.
type fixed struct {
	certificate *tls.Certificate
	err         error
}

func (f fixed) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (f fixed) Ready() error { return f.err }

func (f fixed) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return f.certificate, f.err
}

// generous allows credentials everywhere.
type generous struct{}

func (generous) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (generous) Ready() error { return nil }

func (generous) Allowed(string, []string) error { return nil }

// instance is a running program.
type instance struct {
	t            *testing.T
	url, metrics string
	client       *fake.Clientset
	https        *http.Client
	stop         context.CancelFunc
	ended        chan struct{}
	err          error // what run returned, once ended is closed
}

// options are those of an instance.
func options() Options {
	o := DefaultOptions()
	o.Namespace, o.TotalGPUMemory, o.ShutdownDelay = "bwki", "16000", 0
	return o
}

// start runs the program of makeProgram, on addresses of its own, over a fake API
// server.
func start(t *testing.T, o Options, client *fake.Clientset, makeProgram func(Options, *sources.CatalogFile, *fake.Clientset) (*program,
	error)) *instance {
	t.Helper()
	return startIn(context.Background(), t, o, client, makeProgram)
}

// startIn is start with a context that ends the program.
func startIn(ctx context.Context, t *testing.T, o Options, client *fake.Clientset, makeProgram func(Options, *sources.CatalogFile,
	*fake.Clientset) (*program, error)) *instance {
	t.Helper()
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	t.Setenv("POD_NAME", "webhook-1")
	catalog, err := sources.OpenCatalog(o.CatalogFile, o.ClientImage)
	if err != nil {
		t.Fatal(err)
	}
	p, err := makeProgram(o, catalog, client)
	if err != nil {
		t.Fatal(err)
	}
	var config net.ListenConfig
	listeners := make([]net.Listener, 2)
	for i := range listeners {
		if listeners[i], err = config.Listen(t.Context(), "tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
	}
	for i := range p.servers {
		p.servers[i].Listener = listeners[i]
	}
	ctx, stop := context.WithCancel(ctx)
	i := &instance{
		t: t, url: "https://" + listeners[0].Addr().String(), metrics: "http://" + listeners[1].Addr().String(),
		client: client, stop: stop, ended: make(chan struct{}),
	}
	i.https = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}}
	go func() {
		defer close(i.ended)
		i.err = p.run(ctx)
	}()
	t.Cleanup(func() { stop(); <-i.ended })
	return i
}

// withFixed makes a program with a certificate that is there, and credentials
// everywhere.
func withFixed(t *testing.T) (func(Options, *sources.CatalogFile, *fake.Clientset) (*program, error), *x509.CertPool) {
	t.Helper()
	certificate, err := selfSigned(serverName)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(certificate.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	return func(o Options, catalog *sources.CatalogFile, client *fake.Clientset) (*program, error) {
		return newProgram(o, catalog, client, fixed{certificate: certificate}, generous{}, prometheus.NewRegistry())
	}, roots
}

// trust makes the instance's client check the certificate as the API server does.
func (i *instance) trust(roots *x509.CertPool) {
	i.https.CloseIdleConnections()
	i.https = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: serverName},
		ForceAttemptHTTP2: true}}
}

// end stops the instance and returns what run returned.
func (i *instance) end() error {
	i.t.Helper()
	i.stop()
	select {
	case <-i.ended:
		return i.err
	case <-time.After(2 * time.Minute):
		i.t.Fatal("it did not stop")
		return nil
	}
}

func (i *instance) get(url string) (status int, body string) {
	i.t.Helper()
	resp, err := i.https.Get(url) //nolint:noctx // a test
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		i.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// ready waits until /readyz answers so, or with the text.
func (i *instance) ready(text string) {
	i.t.Helper()
	want := http.StatusOK
	if text != "" {
		want = http.StatusServiceUnavailable
	}
	var status int
	var body string
	defer func() {
		if i.t.Failed() {
			i.t.Logf("/readyz answers %d %s", status, body)
		}
	}()
	eventually(i.t, "/readyz answers "+http.StatusText(want)+" "+text, func() bool {
		status, body = i.get(i.url + "/readyz")
		return status == want && strings.Contains(body, text)
	})
}

// review asks one of the webhooks about a pod.
func review(client *http.Client, url string, pod *corev1.Pod) (*admissionv1.AdmissionResponse, error) {
	raw, err := json.Marshal(pod)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID: "1", Namespace: pod.Namespace, Operation: admissionv1.Create, Kind: metav1.GroupVersionKind{Version: "v1", Kind: "Pod"},
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: runtime.RawExtension{Raw: raw},
		},
	})
	if err != nil {
		return nil, err
	}
	resp, err := client.Post(url, "application/json", bytes.NewReader(body)) //nolint:noctx // a test
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %d: %s", resp.StatusCode, answer)
	}
	var out admissionv1.AdmissionReview
	if err := json.Unmarshal(answer, &out); err != nil {
		return nil, err
	}
	if out.Response == nil || out.Response.UID != "1" {
		return nil, fmt.Errorf("answer %s", answer)
	}
	return out.Response, nil
}

// guidePod is the pod of the guide, as the API server hands it to webhooks.
func guidePod(namespace string) *corev1.Pod {
	amount := corev1.ResourceList{pool.AmountResource: resource.MustParse("1"), pool.PercentResource: resource.MustParse("50")}
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "bf-pkgs", Annotations: map[string]string{
			pool.ModeAnnotation: "all", pool.OSAnnotation: "ubuntu18", pool.VersionAnnotation: "450",
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "bf-pkgs", Image: "nvcr.io/nvidia/tensorflow:19.07-py3", Command: []string{"python x.py"},
			Resources: corev1.ResourceRequirements{Limits: amount, Requests: amount},
		}}},
	}
}

// apiServer returns an API server as the chart leaves it, with a node, the pool's
// secrets, and a namespace that may use them.
func apiServer() *fake.Clientset {
	secret := func(name, key string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name},
			Data: map[string][]byte{key: []byte("x")}}
	}
	return fake.NewClientset(
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "bwki", Name: "bwki-webhook-certs"}},
		&registrationv1.MutatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "bwki-webhook-cfg"},
			Webhooks:   []registrationv1.MutatingWebhook{{Name: "bwkimua.bitfusion.io"}},
		},
		&registrationv1.ValidatingWebhookConfiguration{
			ObjectMeta: metav1.ObjectMeta{Name: "validation.bitfusion.io-cfg"},
			Webhooks:   []registrationv1.ValidatingWebhook{{Name: "bwkival.bitfusion.io"}},
		},
		secret(pool.CASecret, pool.CAKey), secret(pool.ClientSecret, pool.ClientKey), secret(pool.ServersSecret, pool.ServersKey),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team", Labels: map[string]string{"divvy.dev/pool": "allowed"}}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "stranger"}},
		&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: "node-1"},
			Status: corev1.NodeStatus{
				Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
				Allocatable: corev1.ResourceList{"cpu": resource.MustParse("4"), pool.Resource: resource.MustParse("1000")},
			},
		},
		&corev1.ResourceQuota{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "q"},
			Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"requests." + pool.Resource: resource.MustParse("100")}},
		},
	)
}

// Defect P8: without a certificate each handshake failed, also those of probes.
func TestProbesAreAnsweredWithoutACertificate(t *testing.T) {
	i := start(t, options(), apiServer(), func(o Options, catalog *sources.CatalogFile, client *fake.Clientset) (*program, error) {
		return newProgram(o, catalog, client, fixed{err: errors.New("no certificate yet")}, generous{}, prometheus.NewRegistry())
	})
	i.ready("no certificate yet")
	if status, body := i.get(i.url + "/healthz"); status != http.StatusOK {
		t.Errorf("/healthz answers %d %s", status, body)
	}
	if err := i.end(); err != nil {
		t.Error(err)
	}
}

// A catalog that changes is used without a restart; a bad one is told of in log,
// metric and event, and leaves the one before.
func TestCatalogReload(t *testing.T) {
	m := kubetest.MountConfigMap(t, catalogName, original("450"))
	o := options()
	o.CatalogFile = m.File()
	program, roots := withFixed(t)
	i := start(t, o, apiServer(), program)
	i.trust(roots)
	i.ready("")
	pod := guidePod("team")
	allowed := func(version string) bool {
		pod.Annotations[pool.VersionAnnotation] = version
		response, err := review(i.https, i.url+"/mutate", pod)
		if err != nil {
			t.Fatal(err)
		}
		return response.Allowed
	}
	event := func(reason string) string {
		message := ""
		eventually(t, "an event "+reason, func() bool {
			events, err := i.client.CoreV1().Events("bwki").List(t.Context(), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range events.Items {
				if e.Reason == reason && e.InvolvedObject.Name == "webhook-1" {
					message = e.Message
				}
			}
			return message != ""
		})
		return message
	}
	metric := func(line string) {
		t.Helper()
		eventually(t, line, func() bool { _, body := i.get(i.metrics + "/metrics"); return strings.Contains(body, line) })
	}
	if !allowed("450") || allowed("451") {
		t.Error("the catalog of the start is not in use")
	}
	m.Write(original("451"))
	eventually(t, "the new catalog is in use", func() bool { return allowed("451") })
	event("CatalogReloaded")
	metric(`divvy_webhook_catalog_reloads_total{result="accepted"} 1`)

	m.Write("BitfusionClients: 7\n")
	if message := event("CatalogRejected"); !strings.HasPrefix(message, "the new catalog is invalid, the previous one stays in use: ") ||
		strings.Contains(message, "\n") {
		t.Errorf("event %q", message)
	}
	metric(`divvy_webhook_catalog_reloads_total{result="rejected"} 1`)
	metric("divvy_webhook_catalog_stale 1")
	if !allowed("451") {
		t.Error("the catalog before is not in use any more")
	}
	i.ready("")

	m.Write(original("452"))
	eventually(t, "the next good one is in use", func() bool { return allowed("452") })
	metric("divvy_webhook_catalog_stale 0")
	if err := i.end(); err != nil {
		t.Error(err)
	}
}

// endpoints are the replicas that a service leads to.
type endpoints struct {
	mu   sync.RWMutex // guards what follows
	urls []string
}

func (e *endpoints) pick(n int) string {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.urls[n%len(e.urls)]
}

func (e *endpoints) set(urls ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.urls = urls
}

// A replica that is told to end is not ready at once, answers while the service
// still leads to it, and finishes what it has begun: no review fails.
func TestStoppingAReplicaUnderLoadFailsNoReview(t *testing.T) {
	o := options()
	o.ShutdownDelay = 2 * time.Second
	program, roots := withFixed(t)
	replicas := make([]*instance, 2)
	terminated, forget := signal.NotifyContext(t.Context(), syscall.SIGTERM) // as main does
	defer forget()
	for n, ctx := range []context.Context{terminated, t.Context()} {
		replicas[n] = startIn(ctx, t, o, apiServer(), program)
		replicas[n].trust(roots)
		replicas[n].ready("")
	}
	service := &endpoints{}
	service.set(replicas[0].url, replicas[1].url)
	load, endLoad := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	var asked, askedLater atomic.Int64
	var stopped atomic.Bool
	for n := range 8 {
		client := replicas[n%2].https // a connection for several workers, as the API server has
		workers.Go(func() {
			for k := n; load.Err() == nil; k++ {
				response, err := review(client, service.pick(k)+"/mutate", guidePod("team"))
				if err != nil || !response.Allowed || len(response.Patch) == 0 {
					t.Errorf("a review failed: %+v, %v", response, err)
					return
				}
				if asked.Add(1); stopped.Load() {
					askedLater.Add(1)
				}
			}
		})
	}
	eventually(t, "there is load", func() bool { return asked.Load() > 100 })
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is not ready", func() bool {
		status, body := replicas[0].get(replicas[0].url + "/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "shutting down")
	})
	if status, _ := replicas[0].get(replicas[0].url + "/healthz"); status != http.StatusOK {
		t.Errorf("/healthz answers %d while it stops", status)
	}
	// The service follows, as kube-proxy does after readiness.
	service.set(replicas[1].url)
	<-replicas[0].ended
	if err := replicas[0].err; err != nil {
		t.Error(err)
	}
	stopped.Store(true)
	eventually(t, "the other replica answers", func() bool { return askedLater.Load() > 100 })
	endLoad()
	workers.Wait()
	if err := replicas[1].end(); err != nil {
		t.Error(err)
	}
}

// Reviews that have begun are finished although the program ends.
func TestAReviewUnderWayIsFinished(t *testing.T) {
	withCertificate, roots := withFixed(t)
	begun := make(chan struct{})
	i := start(t, options(), apiServer(), func(o Options, catalog *sources.CatalogFile, client *fake.Clientset) (*program, error) {
		p, err := withCertificate(o, catalog, client)
		if err == nil {
			server := p.servers[0].HTTP
			inner := server.Handler
			server.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodPost {
					close(begun)
				}
				inner.ServeHTTP(w, r)
			})
		}
		return p, err
	})
	i.trust(roots)
	i.ready("")
	body, feed := io.Pipe()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, i.url+"/mutate", body)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	answered := make(chan error, 1)
	go func() {
		resp, err := i.https.Do(request)
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusBadRequest {
				err = fmt.Errorf("status %d", resp.StatusCode)
			}
		}
		answered <- err
	}()
	if _, err := feed.Write([]byte("{")); err != nil {
		t.Fatal(err)
	}
	<-begun
	i.stop()
	select {
	case <-i.ended:
		t.Fatalf("it ended in the middle of a review: %v", i.err)
	case <-time.After(500 * time.Millisecond):
	}
	if _, err := feed.Write([]byte("}")); err != nil {
		t.Fatal(err)
	}
	if err := feed.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
	if err := i.end(); err != nil {
		t.Error(err)
	}
}

// Defect W34: the server had no limits at all.
func TestTheServerIsBounded(t *testing.T) {
	program, roots := withFixed(t)
	i := start(t, options(), apiServer(), program)
	i.trust(roots)
	i.ready("")
	address := strings.TrimPrefix(i.url, "https://")
	if c, err := tls.Dial("tcp", address, &tls.Config{RootCAs: roots, ServerName: serverName, MinVersion: tls.VersionTLS10,
		MaxVersion: tls.VersionTLS11}); err == nil {
		_ = c.Close()
		t.Error("TLS 1.1 is spoken")
	}
	c, err := tls.Dial("tcp", address, &tls.Config{RootCAs: roots, ServerName: serverName, NextProtos: []string{"h2"},
		MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() //nolint:errcheck // a test
	if got := streamsOf(t, c); got != serve.MaxStreams {
		t.Errorf("HTTP/2 allows %d streams, want %d", got, serve.MaxStreams)
	}

	plain := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: serverName}}} // HTTP/1.1
	defer plain.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, i.url+"/healthz", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("X-Large", strings.Repeat("x", 128<<10))
	resp, err := plain.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // not read
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("headers of 128 KiB: status %d", resp.StatusCode)
	}
}

// streamsOf reads SETTINGS_MAX_CONCURRENT_STREAMS from a server's first frame.
func streamsOf(t *testing.T, c net.Conn) uint32 {
	t.Helper()
	if _, err := c.Write([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 9)
	if _, err := io.ReadFull(c, head); err != nil {
		t.Fatal(err)
	}
	if head[3] != 4 {
		t.Fatalf("the first frame is of type %d, want SETTINGS", head[3])
	}
	body := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
	if _, err := io.ReadFull(c, body); err != nil {
		t.Fatal(err)
	}
	for ; len(body) >= 6; body = body[6:] {
		if binary.BigEndian.Uint16(body) == 3 {
			return binary.BigEndian.Uint32(body[2:])
		}
	}
	return 0
}

// Defect P8: what cannot be mended ends Run with a text that says what it was
// doing. The original logged it and went on, "Running" for ever.
func TestRunFails(t *testing.T) {
	defer klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig,
		[]byte(`{"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],"contexts":[{"name":"x","context":{"cluster":"c"}}],`+
			`"current-context":"x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(t.TempDir(), "catalog.yaml")
	if err := os.WriteFile(bad, []byte("BitfusionClients: 7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close() //nolint:errcheck // a test
	for name, tt := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"bad catalog": {func(o *Options) { o.CatalogFile = bad }, "catalog " + bad + ": "},
		"no catalog":  {func(o *Options) { o.CatalogFile = "/nowhere" }, "read the catalog: open /nowhere"},
		"bad total memory": {func(o *Options) { o.TotalGPUMemory = "16000M" },
			`--total-gpu-memory: "16000M": must be a whole number of MB`},
		"bad selector":  {func(o *Options) { o.NamespaceSelector = "a=b=c" }, `--namespace-selector: "a=b=c": `},
		"no API server": {func(o *Options) { o.Kubeconfig = "/nowhere" }, "configuration of the Kubernetes client: "},
		"port taken":    {func(o *Options) { o.Listen = taken.Addr().String() }, "listen for the API server: "},
		"metrics port taken": {func(o *Options) { o.Listen, o.MetricsListen = "127.0.0.1:0", taken.Addr().String() },
			"listen for metrics: "},
	} {
		t.Run(name, func(t *testing.T) {
			o := options()
			o.Kubeconfig = kubeconfig
			tt.change(&o)
			if err := Run(t.Context(), o); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("error %v, want %s", err, tt.want)
			}
		})
	}
}

func TestCommandTakesItsOptionsFromTheEnvironment(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "bwki")
	t.Setenv("TOTAL_GPU_MEMORY", "16Gi")
	t.Setenv("DIVVY_LISTEN", "nowhere")
	cmd := Command()
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	cmd.SetArgs(nil)
	err := cmd.ExecuteContext(t.Context())
	for _, want := range []string{`--listen: "nowhere"`, `--total-gpu-memory: "16Gi"`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %s", err, want)
		}
	}
}

const catalogName = "bitfusion-client-config.yaml"

// original is a catalog of the original's form with one client.
func original(version string) string {
	return "BitfusionClients:\n- BitfusionVersion: \"" + version + "\"\n  OSVersion: ubuntu18\n" +
		"  BinaryPath: /bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb/usr/bin/bitfusion\n" +
		"  EnvVariable: /bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/\n"
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
