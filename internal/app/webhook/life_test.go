package webhook

import (
	"crypto/x509"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/sources"
)

// patched applies the patch of a response.
func patched(t *testing.T, pod *corev1.Pod, response *admissionv1.AdmissionResponse) *corev1.Pod {
	t.Helper()
	before, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	patch, err := jsonpatch.DecodePatch(response.Patch)
	if err != nil {
		t.Fatalf("%v: %s", err, response.Patch)
	}
	after, err := patch.Apply(before)
	if err != nil {
		t.Fatal(err)
	}
	out := &corev1.Pod{}
	if err := json.Unmarshal(after, out); err != nil {
		t.Fatal(err)
	}
	return out
}

// whole makes the program of divvy-control webhook.
func whole(o Options, catalog *sources.CatalogFile, client *fake.Clientset) (*program, error) {
	return assemble(o, catalog, kube.Clients{Kubernetes: client})
}

// From the start without a certificate to pods that are converted, checked, and
// refused.
func TestLife(t *testing.T) {
	i := start(t, options(), apiServer(), whole)
	i.ready("")
	config, err := i.client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(),
		"bwki-webhook-cfg", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(config.Webhooks[0].ClientConfig.CABundle) {
		t.Fatalf("no CA in %q", config.Webhooks[0].ClientConfig.CABundle)
	}
	i.trust(roots)

	pod := guidePod("team")
	response, err := review(i.https, i.url+"/mutate", pod)
	if err != nil {
		t.Fatal(err)
	}
	if !response.Allowed || len(response.Patch) == 0 {
		t.Fatalf("/mutate answers %+v", response)
	}
	converted := patched(t, pod, response)
	units := converted.Spec.Containers[0].Resources.Limits[pool.Resource]
	if units.Value() != 50 || len(converted.Spec.InitContainers) != 1 ||
		converted.Spec.InitContainers[0].Image != DefaultOptions().ClientImage {
		t.Errorf("converted to %+v", converted.Spec)
	}
	if response, err = review(i.https, i.url+"/validate", converted); err != nil || !response.Allowed {
		t.Errorf("/validate answers %+v, %v", response, err)
	}
	if response, err = review(i.https, i.url+"/validate", pod); err != nil || response.Allowed {
		t.Errorf("/validate of a pod that was not converted answers %+v, %v", response, err)
	}
	stranger := converted.DeepCopy()
	stranger.Namespace = "stranger"
	response, err = review(i.https, i.url+"/validate", stranger)
	if err != nil || response.Allowed || response.Result.Code != http.StatusForbidden ||
		!strings.Contains(response.Result.Message, "kubectl label namespace stranger divvy.dev/pool=allowed") {
		t.Errorf("/validate in a namespace that is not allowed answers %+v, %v", response, err)
	}
	own := guidePod("bwki")
	if response, err = review(i.https, i.url+"/mutate", own); err != nil || !response.Allowed || len(response.Patch) > 0 {
		t.Errorf("/mutate in the program's own namespace answers %+v, %v", response, err)
	}

	_, text := i.get(i.metrics + "/metrics")
	for _, want := range []string{
		"divvy_webhook_ready 1", "divvy_webhook_catalog_stale 0", "divvy_webhook_catalog_clients ",
		"divvy_build_info{", "process_resident_memory_bytes",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("metrics lack %s", want)
		}
	}
	for _, difference := range metrics.Differences(metrics.Webhook, text) {
		t.Error(difference)
	}
	if problems, err := promlint.New(strings.NewReader(text)).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("names of metrics: %v, %v", problems, err)
	}
	for _, path := range []string{"/healthz", "/readyz", "/mutate", "/"} {
		if status, _ := i.get(i.metrics + path); status != http.StatusNotFound {
			t.Errorf("%s on the port of metrics answers %d", path, status)
		}
	}
	if status, _ := i.get(i.url + "/metrics"); status != http.StatusNotFound {
		t.Errorf("/metrics on the API server's port answers %d", status)
	}
	if err := i.end(); err != nil {
		t.Error(err)
	}
}
