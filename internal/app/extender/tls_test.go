package extender

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

const release = "divvy-system"

// tlsClients are those of an API server with the chart's empty objects.
func tlsClients(t *testing.T) kube.Clients {
	t.Helper()
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: release, Name: name} }
	server, err := kubetest.New(pod("p"),
		&v1.Secret{ObjectMeta: meta("divvy-extender-certs")}, &v1.Secret{ObjectMeta: meta("divvy-extender-client")},
		&v1.ConfigMap{ObjectMeta: meta("divvy-extender-ca")})
	if err != nil {
		t.Fatal(err)
	}
	c, _ := clients(t)
	return kube.Clients{Kubernetes: server.Client(nil), Metadata: c.Metadata}
}

// published is what kube-scheduler's configuration gets: the CA, and a client
// certificate. It waits for both.
func published(t *testing.T, c kube.Clients) (*x509.CertPool, tls.Certificate) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		ca, caErr := c.Kubernetes.CoreV1().ConfigMaps(release).Get(t.Context(), "divvy-extender-ca", metav1.GetOptions{})
		client, clientErr := c.Kubernetes.CoreV1().Secrets(release).Get(t.Context(), "divvy-extender-client", metav1.GetOptions{})
		if caErr != nil || clientErr != nil {
			t.Fatal(caErr, clientErr)
		}
		roots := x509.NewCertPool()
		if roots.AppendCertsFromPEM([]byte(ca.Data["ca.crt"])) && len(client.Data["tls.crt"]) > 0 {
			pair, err := tls.X509KeyPair(client.Data["tls.crt"], client.Data["tls.key"])
			if err != nil {
				t.Fatal(err)
			}
			return roots, pair
		}
		if time.Now().After(deadline) {
			t.Fatal("neither the CA nor a client certificate was published")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// caller is an HTTP client with these certificates, which takes the extender for
// its Service.
func caller(i *instance, roots *x509.CertPool, certificates ...tls.Certificate) *http.Client {
	dialer := &tls.Dialer{Config: &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: certificates, ServerName: "divvy-extender." + release + ".svc",
	}}
	transport := &http.Transport{DialTLSContext: dialer.DialContext}
	i.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// bindOver asks for a bind, and returns the Error of the answer.
func bindOver(i *instance, client *http.Client) string {
	i.t.Helper()
	body, err := json.Marshal(extenderv1.ExtenderBindingArgs{PodName: "p", PodNamespace: "team", PodUID: "uid", Node: "node-a"})
	if err != nil {
		i.t.Fatal(err)
	}
	resp, err := client.Post("https://"+i.tls+"/gcushare-scheduler/bind",
		"application/json", bytes.NewReader(body)) //nolint:noctx // a test
	if err != nil {
		i.t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		i.t.Fatal(err)
	}
	var result extenderv1.ExtenderBindingResult
	if err := json.Unmarshal(answer, &result); err != nil {
		i.t.Fatalf("%v in %s", err, answer)
	}
	return result.Error
}

func grantKey(t *testing.T) string {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, bytes.Repeat([]byte("k"), 32), 0o600); err != nil {
		t.Fatal(err)
	}
	return key
}

// Over TLS a bind needs the certificate that is published, and everything else is
// answered as over plain HTTP.
func TestTLS(t *testing.T) {
	c := tlsClients(t)
	key := grantKey(t)
	i := start(t, c, func(o *Options) { o.GrantKeyFile, o.TLS.Listen, o.TLS.Namespace = key, ":32765", release })
	i.ready("")
	roots, certificate := published(t, c)

	if got := bindOver(i, caller(i, roots)); !strings.Contains(got, "bind rejected: no client certificate; over TLS, the one in") {
		t.Errorf("a bind without a certificate: %q", got)
	}
	if got := bindOver(i, caller(i, roots, certificate)); got != "" {
		t.Errorf("a bind with the certificate: %q", got)
	}
	resp, err := caller(i, roots).Get("https://" + i.tls + "/gcushare-scheduler/inspect/node-a") //nolint:noctx // a test
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	if body, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(body), `"usedGCU": 4`) {
		t.Errorf("inspect answers %s, %v", body, err)
	}

	old := &tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: "divvy-extender." + release + ".svc", MaxVersion: tls.VersionTLS11}}
	if conn, err := old.DialContext(t.Context(), "tcp", i.tls); err == nil {
		conn.Close() //nolint:errcheck // a test
		t.Error("TLS 1.1 is spoken")
	}
	// A certificate that somebody else signed, even for the right name.
	other := tlsClients(t)
	j := start(t, other, func(o *Options) { o.GrantKeyFile, o.TLS.Listen, o.TLS.Namespace = key, ":32765", release })
	_, foreign := published(t, other)
	if err := j.end(); err != nil {
		t.Error(err)
	}
	shown := &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: "divvy-extender." + release + ".svc",
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &foreign, nil },
	}
	transport := &http.Transport{TLSClientConfig: shown}
	defer transport.CloseIdleConnections()
	if resp, err := (&http.Client{Transport: transport}).Get("https://" + i.tls + "/healthz"); err == nil { //nolint:noctx // a test
		resp.Body.Close() //nolint:errcheck // a test
		t.Error("the certificate of another CA is accepted")
	}
	if err := i.end(); err != nil {
		t.Error(err)
	}
}

// changing is a server's certificate, and CAs of clients that change.
type changing struct {
	certificate tls.Certificate
	accepted    atomic.Pointer[x509.CertPool]
}

func (c *changing) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return &c.certificate, nil
}
func (c *changing) ClientCAs() *x509.CertPool { return c.accepted.Load() }

// A connection outlives the CA by which its client was known, and its client's certificate.
// Its requests are those of an unknown caller then.
func TestTLSOfAClientWhoseCAIsGivenUp(t *testing.T) {
	c := tlsClients(t)
	key := grantKey(t)
	i := start(t, c, func(o *Options) { o.GrantKeyFile, o.TLS.Listen, o.TLS.Namespace = key, ":32765", release })
	roots, certificate := published(t, c)
	secret, err := c.Kubernetes.CoreV1().Secrets(release).Get(t.Context(), "divvy-extender-certs", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	own, err := tls.X509KeyPair(secret.Data["tls.crt"], secret.Data["tls.key"])
	if err != nil {
		t.Fatal(err)
	}
	if err := i.end(); err != nil {
		t.Fatal(err)
	}
	cas := &changing{certificate: own}
	cas.accepted.Store(roots)
	server := serve.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, len(r.TLS.VerifiedChains), " ", r.RemoteAddr)
	}), cas, func(s *tls.ConnectionState) bool { return extender.CheckCertificate(s) == nil })
	var config net.ListenConfig
	listener, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- server.ServeTLS(listener, "", "") }()
	defer func() {
		server.Close() //nolint:errcheck // a test
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}()
	client := caller(i, roots, certificate)
	ask := func(path string) (chains, remote string) {
		resp, err := client.Post("https://"+listener.Addr().String()+path, "application/json", nil) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close() //nolint:errcheck // read to its end
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		chains, remote, _ = strings.Cut(string(body), " ")
		return chains, remote
	}
	connection := ""
	for _, path := range []string{"/gcushare-scheduler/filter", "/gcushare-scheduler/preempt", "/gcushare-scheduler/prioritize",
		"/gcushare-scheduler/bind", "/gcushare-scheduler/inspect", "/version"} {
		cas.accepted.Store(roots)
		before, one := ask(path)
		cas.accepted.Store(x509.NewCertPool())
		after, same := ask(path)
		if connection == "" {
			connection = one
		}
		if before != "1" || after != "0" || one != connection || same != connection {
			t.Errorf("%s: verified chains: %s over %s before the CA was given up, %s over %s after; want 1, 0 and one connection", path,
				before, one, after, same)
		}
	}
}

// reviewed posts a review over TLS, and returns the answer.
func reviewed(i *instance, client *http.Client, route string, request admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	i.t.Helper()
	request.UID = "u"
	body, err := json.Marshal(admissionv1.AdmissionReview{TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1",
		Kind: "AdmissionReview"}, Request: &request})
	if err != nil {
		i.t.Fatal(err)
	}
	resp, err := client.Post("https://"+i.tls+route, "application/json", bytes.NewReader(body)) //nolint:noctx // a test
	if err != nil {
		i.t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	var review admissionv1.AdmissionReview
	if err := json.NewDecoder(resp.Body).Decode(&review); err != nil || review.Response == nil || review.Response.UID != "u" {
		i.t.Fatalf("%s: %v", resp.Status, err)
	}
	return review.Response
}

// The API server is answered over TLS alone, without a certificate of its own.
func TestReviews(t *testing.T) {
	c := tlsClients(t)
	key := grantKey(t)
	i := start(t, c, func(o *Options) {
		o.GrantKeyFile, o.TLS.Listen, o.TLS.Namespace, o.TLS.SchedulerName = key, ":32765", release, "divvy-scheduler"
		o.ShutdownDelay, o.ClaimUnits = 2*time.Second, []string{"enflame.com/gcu-memory=enflame:1"}
	})
	i.ready("")
	roots, certificate := published(t, c)
	if got := bindOver(i, caller(i, roots, certificate)); got != "" {
		t.Fatal(got)
	}
	// The stand-in's binding does not show on the pod, as the API server's does.
	bound := pod("p")
	bound.Spec.NodeName = "node-a"
	if _, err := c.Kubernetes.CoreV1().Pods("team").Update(t.Context(), bound, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(2 * time.Minute)
	for status, body := 0, ""; !strings.Contains(body, `state="ungranted"} 1`); status, body = i.get(i.metrics + "/metrics") {
		if time.Now().After(deadline) {
			t.Fatalf("the books do not see the pod: %d %s", status, body)
		}
		time.Sleep(20 * time.Millisecond)
	}

	object := func(o any) runtime.RawExtension {
		data, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		return runtime.RawExtension{Raw: data}
	}
	unit := func(unit string) runtime.RawExtension {
		return object(v1.ConfigMap{Data: map[string]string{"config.yaml": "apiVersion: config.divvy.dev/v1alpha1\nkind: " +
			"NodeConfig\nresources:\n" +
			"- {name: enflame.com/gcu-memory, vendor: enflame, memoryUnit: \"" + unit + "\"}\n"}})
	}
	client := caller(i, roots)
	change := admissionv1.AdmissionRequest{
		Operation: admissionv1.Update, Namespace: release, Name: "divvy-node",
		Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"}, OldObject: unit("1"), Object: unit("0.1"),
	}
	if r := reviewed(i, client, "/admission/config", change); r.Allowed ||
		!strings.Contains(r.Result.Message, `from "1" to "0.1" while pods hold units of it`) ||
		!strings.Contains(r.Result.Message, "team/p") {
		t.Errorf("a change of memoryUnit is answered with %+v", r)
	}
	create := admissionv1.AdmissionRequest{Operation: admissionv1.Create,
		Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: object(pod("q"))}
	if r := reviewed(i, client, "/admission/scheduler", create); !r.Allowed || !strings.Contains(string(r.Patch), "divvy-scheduler") {
		t.Errorf("a pod is answered with %+v", r)
	}
	if r := reviewed(i, client, "/admission/units", create); !r.Allowed || !strings.Contains(string(r.Patch), "resourceClaimTemplateName") {
		t.Errorf("units of a pod are answered with %+v", r)
	}
	claim := admissionv1.AdmissionRequest{Operation: admissionv1.Create, Namespace: "team",
		Resource: metav1.GroupVersionResource{Group: "resource.k8s.io", Version: "v1", Resource: "resourceclaims"},
		Object: object(resourceapi.ResourceClaim{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "enflame.divvy.dev"}}}}}}})}
	if r := reviewed(i, client, "/admission/claims", claim); r.Allowed || !strings.Contains(r.Result.Message, "takes no parameters") {
		t.Errorf("a claim is answered with %+v", r)
	}
	for _, route := range []string{"/admission/config", "/admission/scheduler", "/admission/units", "/admission/claims"} {
		resp, err := http.Post(i.url+route, "application/json", strings.NewReader("{}")) //nolint:noctx // a test
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close() //nolint:errcheck // a test
		if resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s over plain HTTP: %s", route, resp.Status)
		}
	}
	// One that ends binds no more, and answers until nobody asks.
	i.stop()
	i.ready("shutting down")
	if got := bindOver(i, caller(i, roots, certificate)); !strings.Contains(got, "shutting down") {
		t.Errorf("a bind while it ends: %q", got)
	}
	if r := reviewed(i, caller(i, roots), "/admission/scheduler", create); !r.Allowed || len(r.Patch) == 0 {
		t.Errorf("while it ends, a pod is answered with %+v", r)
	}
	if _, body := i.get(i.metrics + "/metrics"); !strings.Contains(body,
		`divvy_webhook_reviews_total{result="denied",webhook="config"} 1`) ||
		!strings.Contains(body, `divvy_webhook_reviews_total{result="converted",webhook="scheduler"} 2`) {
		t.Error("the reviews are not counted")
	}
	if err := i.end(); err != nil {
		t.Error(err)
	}
}
