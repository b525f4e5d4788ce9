package wiring

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// pair returns a certificate that signed itself, and its key, in PEM.
func pair(t *testing.T) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "a"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	encoded, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: encoded})
}

func service(ip string, ports ...string) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: "divvy-extender"},
		Spec: corev1.ServiceSpec{ClusterIP: ip}}
	for _, name := range ports {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: name, Port: map[string]int32{"https": 32765, "http": 32766}[name]})
	}
	return s
}

func published(ca, cert, key []byte) (*corev1.ConfigMap, *corev1.Secret) {
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: CAConfigMap}}
	if ca != nil {
		m.Data = map[string]string{caKey: string(ca)}
	}
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: ClientSecret}}
	if cert != nil {
		s.Data = map[string][]byte{certKey: cert, keyKey: key}
	}
	return m, s
}

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// TestProgram: in the place of kube-scheduler nothing is asked of the API server, and the key has to
// be there.
func TestProgram(t *testing.T) {
	key := filepath.Join(t.TempDir(), "key")
	o := Source{Service: "divvy-system/divvy-extender", Weight: 200, Resources: []string{"enflame.com/gcu-memory"},
		Image: "example.com/divvy-scheduler-" + schedconf.Minor + ":v1", Args: []string{"--policy=spread"}, GrantKeyFile: key}
	client := fake.NewClientset()
	var waiting *waitingError
	if _, err := o.extender(t.Context(), client); !errors.As(err, &waiting) || !strings.Contains(err.Error(), key) {
		t.Errorf("without a key: %v", err)
	}
	if err := os.WriteFile(key, []byte("a key"), 0o600); err != nil {
		t.Fatal(err)
	}
	e, err := o.extender(t.Context(), client)
	if err != nil || e.Program == nil || e.Program.Image != o.Image || string(e.Program.Key) != "a key" || len(e.Program.Args) != 1 ||
		e.Weight != 200 || e.URL != "" {
		t.Errorf("%+v: %v", e, err)
	}
	if actions := client.Actions(); len(actions) > 0 {
		t.Errorf("it asks the API server: %v", actions)
	}
	if got := wiredMessage(e); got != "divvy-scheduler runs in place of kube-scheduler and manages enflame.com/gcu-memory" {
		t.Errorf("the event says %q", got)
	}
}

// TestStatusOfUnfinished: the advice in place of kube-scheduler has the flags that keep divvy-scheduler.
func TestStatusOfUnfinished(t *testing.T) {
	dir := t.TempDir()
	n := Node{Name: "a", Dir: dir, Manifest: filepath.Join(dir, "manifests", "kube-scheduler.yaml"), Client: fake.NewClientset()}
	key := filepath.Join(dir, "key")
	for name, text := range map[string]string{
		n.Manifest: "apiVersion: v1\nkind: Pod\nmetadata: {name: kube-scheduler, namespace: kube-system}\nspec:\n  containers:\n" +
			"  - name: kube-scheduler\n    image: registry.k8s.io/kube-scheduler:v1.37.1\n    command: [kube-scheduler]\n",
		filepath.Join(dir, host.JournalFile): `{"version": 1, "pending": {"before": "a", "after": "b", "outcome": "c"}}`,
		key:                                  "a key",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	status := func(s Source) string {
		t.Helper()
		var out strings.Builder
		if err := Status(t.Context(), n, s, &out); !errors.Is(err, errNotWired) {
			t.Errorf("%v", err)
		}
		return out.String()
	}
	s := Source{URL: "http://127.0.0.1:32766" + Route, Resources: []string{DefaultResource}}
	if got := status(s); !strings.Contains(got, "run install or uninstall to complete it") {
		t.Errorf("mode extender:\n%s", got)
	}
	s.Image, s.GrantKeyFile = "example.com/divvy-scheduler:v1", key
	if got := status(s); !strings.Contains(got, "run install with --replace-image, --replace-flag and --grant-key-file as in the "+
		"DaemonSet divvy-schedconf, or uninstall to complete it") {
		t.Errorf("mode replace:\n%s", got)
	}
}

// TestExtender: where kube-scheduler finds the extender, and by what they know each
// other.
func TestExtender(t *testing.T) {
	cert, key := pair(t)
	otherCert, _ := pair(t)
	all, secret := published(cert, cert, key)
	noCA, noCert := published(nil, nil, nil)
	_, broken := published(nil, otherCert, key)
	dir := t.TempDir()
	file := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	caFile, certFile, keyFile := file("ca.crt", cert), file("tls.crt", cert), file("tls.key", key)
	both := service("10.96.0.7", "http", "https")
	tests := map[string]struct {
		client  kubernetes.Interface
		change  func(*Source)
		want    schedconf.Extender
		err     string
		waiting bool
	}{
		"by https": {
			client: fake.NewClientset(both, all, secret),
			want: schedconf.Extender{URL: "https://10.96.0.7:32765/gcushare-scheduler", ServerName: "divvy-extender.divvy-system.svc",
				CA: cert, ClientCert: cert, ClientKey: key},
		},
		"IPv6": {
			client: fake.NewClientset(service("fd00::7", "https"), all, secret),
			want: schedconf.Extender{URL: "https://[fd00::7]:32765/gcushare-scheduler", ServerName: "divvy-extender.divvy-system.svc",
				CA: cert, ClientCert: cert, ClientKey: key},
		},
		"by the local proxy": {
			client: fake.NewClientset(both, all, secret),
			change: func(o *Source) { o.Proxy = "127.0.0.1:32764" },
			want: schedconf.Extender{URL: "https://127.0.0.1:32764/gcushare-scheduler", ServerName: "divvy-extender.divvy-system.svc",
				CA: cert, ClientCert: cert, ClientKey: key},
		},
		"a local proxy and no https": {
			client: fake.NewClientset(service("10.96.0.7", "http")),
			change: func(o *Source) { o.Proxy = "127.0.0.1:32764" },
			want:   schedconf.Extender{URL: "http://10.96.0.7:32766/gcushare-scheduler"},
		},
		"by http": {
			client: fake.NewClientset(service("10.96.0.7", "http")),
			want:   schedconf.Extender{URL: "http://10.96.0.7:32766/gcushare-scheduler"},
		},
		"from files": {
			client: fake.NewClientset(both),
			change: func(o *Source) { o.CAFile, o.CertFile, o.KeyFile = caFile, certFile, keyFile },
			want: schedconf.Extender{URL: "https://10.96.0.7:32765/gcushare-scheduler", ServerName: "divvy-extender.divvy-system.svc",
				CA: cert, ClientCert: cert, ClientKey: key},
		},
		"a URL": {
			client: fake.NewClientset(),
			change: func(o *Source) { o.URL = "http://127.0.0.1:32766/gcushare-scheduler" },
			want:   schedconf.Extender{URL: "http://127.0.0.1:32766/gcushare-scheduler"},
		},
		"a URL with TLS": {
			client: fake.NewClientset(),
			change: func(o *Source) { o.URL, o.CAFile = "https://extender.example:1/x", caFile },
			want:   schedconf.Extender{URL: "https://extender.example:1/x", ServerName: "extender.example", CA: cert},
		},
		"a URL with TLS and no CA": {
			client: fake.NewClientset(), change: func(o *Source) { o.URL = "https://extender.example:1/x" },
			err: "so --ca-file is required to verify its certificate",
		},
		"no Service":           {client: fake.NewClientset(), err: "the extender's Service divvy-system/divvy-extender was not found"},
		"a headless Service":   {client: fake.NewClientset(service("None", "https")), err: `no cluster IP ("None")`},
		"a Service of another": {client: fake.NewClientset(service("10.96.0.7")), err: "no port named https or http"},
		"no CA yet":            {client: fake.NewClientset(both, noCA, noCert), err: "publish its CA", waiting: true},
		"no certificate yet":   {client: fake.NewClientset(both, all, noCert), err: "publish a certificate", waiting: true},
		"no ConfigMap":         {client: fake.NewClientset(both, secret), err: "ConfigMap divvy-system/divvy-extender-ca", waiting: true},
		"no file yet": {
			client: fake.NewClientset(both), change: func(o *Source) { o.CAFile = filepath.Join(dir, "none") }, err: "none", waiting: true,
		},
		"an empty file": {
			client: fake.NewClientset(both), change: func(o *Source) { o.CAFile = file("empty", nil) }, err: "empty", waiting: true,
		},
		"a key of another": {client: fake.NewClientset(both, all, broken), err: "private key does not match"},
		"a CA that is no PEM": {client: fake.NewClientset(both, secret), change: func(o *Source) { o.CAFile = file("bad", []byte("x")) },
			err: "no certificate in PEM"},
		"a folder for the file": {client: fake.NewClientset(both, secret), change: func(o *Source) { o.CAFile = dir },
			err: "is a directory"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			o := Source{Service: "divvy-system/divvy-extender", Timeout: 10 * time.Second, Weight: 1}
			o.Resources = []string{"nvidia.com/gpu-memory", "enflame.com/gcu-memory", "nvidia.com/gpu-memory"}
			if test.change != nil {
				test.change(&o)
			}
			got, err := o.extender(t.Context(), test.client)
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Fatalf("the error is %v, want %q", err, test.err)
			}
			var waiting *waitingError
			if errors.As(err, &waiting) != test.waiting {
				t.Errorf("the error is a %T", err)
			}
			if err != nil {
				return
			}
			if got.URL != test.want.URL || got.ServerName != test.want.ServerName || !bytes.Equal(got.CA, test.want.CA) ||
				!bytes.Equal(got.ClientCert, test.want.ClientCert) || !bytes.Equal(got.ClientKey, test.want.ClientKey) {
				t.Errorf("it is %+v, want %+v", got, test.want)
			}
			if strings.Join(got.Resources, " ") != "enflame.com/gcu-memory nvidia.com/gpu-memory" || got.Timeout != 10*time.Second {
				t.Errorf("it is asked about %v for %s", got.Resources, got.Timeout)
			}
		})
	}
}

// fakeNode answers one after the other.
type fakeNode struct {
	mu      sync.Mutex
	answers []func() (host.Result, error)
	asked   int
}

func (f *fakeNode) Install(context.Context, schedconf.Extender, host.InstallOptions) (host.Result, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	return f.answers[min(f.asked, len(f.answers))-1]()
}

func answer(changed bool, err error) func() (host.Result, error) {
	return func() (host.Result, error) { return host.Result{Changed: changed}, err }
}

// TestRounds: states, events once for a change, and what an API server that is away
// changes of it.
func TestRounds(t *testing.T) {
	away := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	back := &host.RolledBackError{Failure: host.Failure{Reason: "no such plugin"}}
	steps := []struct {
		extender error
		answer   func() (host.Result, error)
		state    string
		event    string
	}{
		{extender: &waitingError{"its CA"}, state: stateWaiting},
		{answer: answer(true, nil), state: stateWired, event: "SchedulerWired"},
		{answer: answer(false, nil), state: stateWired},
		{extender: away, state: stateWired},
		{answer: answer(false, away), state: stateWired},
		{answer: answer(false, &host.UnhealthyError{Problem: "it ended"}), state: stateUnhealthy},
		{answer: answer(true, back), state: stateRolledBack, event: "SchedulerRolledBack"},
		{answer: answer(false, &host.HeldError{}), state: stateRolledBack},
		{extender: away, state: stateFailed},
		{answer: answer(false, host.ErrNoManifest), state: stateFailed},
		{answer: answer(false, nil), state: stateWired},
	}
	registry := prometheus.NewRegistry()
	w, err := newWatcher(registry)
	if err != nil {
		t.Fatal(err)
	}
	if w.ready() == nil {
		t.Error("it is ready from the start")
	}
	for i, step := range steps {
		var told []string
		w.tell = func(_ context.Context, k events.Kind, _ string) { told = append(told, k.Reason) }
		w.extender = func(context.Context) (schedconf.Extender, error) { return schedconf.Extender{}, step.extender }
		w.node = &fakeNode{answers: []func() (host.Result, error){step.answer}}
		w.round(t.Context())
		if w.current() != step.state || strings.Join(told, " ") != step.event {
			t.Errorf("round %d: %s, told %v; want %s and %q", i, w.current(), told, step.state, step.event)
		}
		if (w.ready() == nil) != (step.state == stateWired) {
			t.Errorf("round %d: ready is %v", i, w.ready())
		}
		if got := testutil.ToFloat64(w.states.WithLabelValues(step.state)); got != 1 {
			t.Errorf("round %d: the metric of state %s is %v", i, step.state, got)
		}
	}
	if got := testutil.ToFloat64(w.changes.WithLabelValues(stateWired)); got != 1 {
		t.Errorf("%v changes are counted as wired", got)
	}
	if got := testutil.ToFloat64(w.changes.WithLabelValues(stateRolledBack)); got != 1 {
		t.Errorf("%v changes are counted as rolled back", got)
	}
}

// TestWatchRuns: a changed file makes it look again, and its end does not count as a
// failure.
func TestWatchRuns(t *testing.T) {
	dir := t.TempDir()
	w, err := newWatcher(prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	node := &fakeNode{answers: []func() (host.Result, error){answer(true, nil), answer(false, nil)}}
	w.node, w.resync = node, time.Hour
	w.extender = func(context.Context) (schedconf.Extender, error) { return schedconf.Extender{}, nil }
	w.tell = func(context.Context, events.Kind, string) {}
	ctx, cancel := context.WithCancel(t.Context())
	changed := make(chan struct{}, 1)
	var wait sync.WaitGroup
	wait.Go(func() {
		if err := watchFiles(ctx, []string{dir, filepath.Join(dir, "none")}, changed); err != nil {
			t.Error(err)
		}
	})
	wait.Go(func() { w.run(ctx, changed) })
	asked := func() int {
		node.mu.Lock()
		defer node.mu.Unlock()
		return node.asked
	}
	until := func(n int) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); asked() < n; {
			if time.Now().After(deadline) {
				t.Fatalf("it has looked %d times, want %d", asked(), n)
			}
			// A file that is written before the folder is watched is not seen.
			if err := os.WriteFile(filepath.Join(dir, "a"), []byte(time.Now().String()), 0o600); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * quietFor)
		}
	}
	until(3)
	server := httptest.NewServer(probes("", prometheus.NewRegistry(), w.ready)[0].HTTP.Handler)
	defer server.Close()
	wantStatus(t, server.URL+"/readyz", http.StatusOK)
	wantStatus(t, server.URL+"/healthz", http.StatusOK)
	wantStatus(t, server.URL+"/metrics", http.StatusOK)
	cancel()
	wait.Wait()
	if w.current() != stateWired {
		t.Errorf("at its end it is %s", w.current())
	}
	w.set(t.Context(), stateFailed, errors.New("for a reason"))
	wantStatus(t, server.URL+"/readyz", http.StatusServiceUnavailable)
}

// TestOwnFilesAreNoReason: on a full disk each round writes a part of a file and
// removes it, and that is no reason for the next one.
func TestOwnFilesAreNoReason(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	changed := make(chan struct{}, 1)
	var wait sync.WaitGroup
	wait.Go(func() {
		if err := watchFiles(ctx, []string{dir}, changed); err != nil {
			t.Error(err)
		}
	})
	write := func(name string) {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Remove(path)); err != nil {
			t.Fatal(err)
		}
	}
	seen := func(name string) {
		for timeout := time.After(2 * time.Minute); ; {
			write(name)
			select {
			case <-changed:
				return
			case <-timeout:
				t.Fatalf("a change of %s is not seen", name)
			case <-time.After(2 * quietFor):
			}
		}
	}
	seen("kube-scheduler.yaml")
	for _, name := range []string{".kube-scheduler.yaml.divvy-previous", ".divvy-schedconf.json.divvy-new", host.StagingFile} {
		write(name)
		select {
		case <-changed:
			t.Errorf("a change of %s is seen", name)
		case <-time.After(2 * quietFor):
		}
	}
	seen("admin.conf")
	cancel()
	wait.Wait()
}

func wantStatus(t *testing.T, url string, want int) {
	t.Helper()
	response, err := http.Get(url) //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close() //nolint:errcheck // nothing is lost
	if response.StatusCode != want {
		t.Errorf("%s answers %s, want %d", url, response.Status, want)
	}
}

// TestTell: an event that kubectl describe node shows, and that the API server
// takes.
func TestTell(t *testing.T) {
	client := fake.NewClientset()
	Node{Name: "node-a", Client: client}.tell(t.Context(), events.SchedulerRolledBack, strings.Repeat("ü", 1000))
	list, err := client.CoreV1().Events(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("%d events, %v", len(list.Items), err)
	}
	e := list.Items[0]
	if e.InvolvedObject.Kind != "Node" || e.InvolvedObject.Name != "node-a" || e.InvolvedObject.UID != "node-a" ||
		e.Type != corev1.EventTypeWarning ||
		e.Reason != "SchedulerRolledBack" || e.Source.Component != "divvy-schedconf" || len(e.Message) > 1024 ||
		!strings.HasSuffix(e.Message, "ü...") {
		t.Errorf("the event is %+v", e)
	}
}
