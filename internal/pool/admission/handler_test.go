package admission

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admission/v1"
	admissionv1beta1 "k8s.io/api/admission/v1beta1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// webhook is a handler with what is around it.
type webhook struct {
	http.Handler

	config   Config
	cluster  *testCluster
	registry *prometheus.Registry
	mu       sync.Mutex
	log      strings.Builder
}

func newWebhook(t testing.TB, change ...func(*Config)) *webhook {
	t.Helper()
	w := &webhook{cluster: readyCluster(), registry: prometheus.NewRegistry()}
	catalog, settings := pool.DefaultCatalog(), testSettings()
	w.config = Config{
		Catalog: func() *pool.Catalog { return catalog }, Settings: func() Settings { return settings },
		Cluster: w.cluster, Ready: func() error { return nil }, Registry: w.registry,
	}
	for _, f := range change {
		f(&w.config)
	}
	handler, err := Handler(w.config)
	if err != nil {
		t.Fatal(err)
	}
	logger := funcr.New(func(prefix, args string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		fmt.Fprintln(&w.log, prefix, args)
	}, funcr.Options{Verbosity: 10})
	w.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(rw, r.WithContext(klog.NewContext(r.Context(), logger)))
	})
	return w
}

func (w *webhook) logged() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.log.String()
}

// post sends a body and returns the answer.
func (w *webhook) post(t testing.TB, path string, body []byte, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer := httptest.NewRecorder()
	w.ServeHTTP(answer, r)
	return answer
}

// review sends a review and returns its response, checking its frame.
func (w *webhook) review(t testing.TB, path string, review any) *admissionv1.AdmissionResponse {
	t.Helper()
	body, err := json.Marshal(review)
	if err != nil {
		t.Fatal(err)
	}
	var asked struct {
		metav1.TypeMeta

		Request struct{ UID string }
	}
	if err := json.Unmarshal(body, &asked); err != nil {
		t.Fatal(err)
	}
	answer := w.post(t, path, body)
	if answer.Code != http.StatusOK || answer.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("status %d, content type %q: %s", answer.Code, answer.Header().Get("Content-Type"), answer.Body)
	}
	var got admissionv1.AdmissionReview
	if err := json.Unmarshal(answer.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.TypeMeta != asked.TypeMeta || got.Response == nil || string(got.Response.UID) != asked.Request.UID || got.Request != nil {
		t.Fatalf("the answer is %s", answer.Body)
	}
	return got.Response
}

func podRequest(t testing.TB, pod *corev1.Pod) *admissionv1.AdmissionRequest {
	t.Helper()
	raw, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	return &admissionv1.AdmissionRequest{
		UID: "705ab4f5-6393-11e8-b7cc-42010a800002", Operation: admissionv1.Create, Name: pod.Name, Namespace: testNamespace,
		Kind:     metav1.GroupVersionKind{Version: "v1", Kind: "Pod"},
		Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
		Object:   runtime.RawExtension{Raw: raw},
	}
}

func reviewOf(request *admissionv1.AdmissionRequest) *admissionv1.AdmissionReview {
	return &admissionv1.AdmissionReview{TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: request}
}

// W32: both versions are answered in their own, with what they demand.
func TestReviewsOfBothVersions(t *testing.T) {
	t.Parallel()
	w := newWebhook(t)
	want, _ := convert(t, guidePod())
	for _, version := range []string{"v1", "v1beta1"} {
		var review any = reviewOf(podRequest(t, guidePod()))
		if version == "v1beta1" {
			r := podRequest(t, guidePod())
			review = admissionv1beta1.AdmissionReview{
				TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1beta1", Kind: "AdmissionReview"},
				Request: &admissionv1beta1.AdmissionRequest{UID: r.UID, Kind: r.Kind, Resource: r.Resource,
					Operation: admissionv1beta1.Create, Namespace: r.Namespace, Object: r.Object},
			}
		}
		response := w.review(t, "/mutate", review)
		if !response.Allowed || response.PatchType == nil || *response.PatchType != admissionv1.PatchTypeJSONPatch {
			t.Fatalf("%s: %+v", version, response)
		}
		var got corev1.Pod
		if err := json.Unmarshal(applyPatch(t, podRequest(t, guidePod()).Object.Raw, response.Patch), &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, &got); diff != "" {
			t.Errorf("%s: the patch gives another pod than Mutate (-Mutate +patch):\n%s", version, diff)
		}
		if response := w.review(t, "/validate", reviewOf(podRequest(t, &got))); !response.Allowed || response.PatchType != nil ||
			response.Patch != nil {
			t.Errorf("%s: %+v", version, response)
		}
	}
}

func TestDenialsHaveStatusAndReason(t *testing.T) {
	t.Parallel()
	w := newWebhook(t)
	w.cluster.notAllowed = errors.New("somebody must allow it")
	pod, _ := convert(t, guidePod())
	tests := map[string]struct {
		path   string
		pod    *corev1.Pod
		code   int32
		reason metav1.StatusReason
		text   string
	}{
		"a wrong pod":         {"/mutate", annotated(guidePod(), pool.VersionAnnotation, "999"), 422, metav1.StatusReasonInvalid, "999"},
		"what is not allowed": {"/validate", pod, 403, metav1.StatusReasonForbidden, "somebody must allow it"},
		"a leftover":          {"/validate", guidePod(), 422, metav1.StatusReasonInvalid, "not converted"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			response := w.review(t, test.path, reviewOf(podRequest(t, test.pod)))
			if response.Allowed || response.Patch != nil || response.Result == nil {
				t.Fatalf("%+v", response)
			}
			if r := response.Result; r.Code != test.code || r.Reason != test.reason || r.Status != metav1.StatusFailure ||
				!strings.Contains(r.Message, test.text) {
				t.Errorf("%+v", r)
			}
		})
	}
}

// Warnings arrive although nothing is changed.
func TestWarningsAreAnswered(t *testing.T) {
	t.Parallel()
	response := newWebhook(t).review(t, "/mutate", reviewOf(podRequest(t, poolPod(container("a", corev1.ResourceRequirements{})))))
	if !response.Allowed || response.Patch != nil || response.PatchType != nil || len(response.Warnings) != 1 {
		t.Errorf("%+v", response)
	}
}

// Requests that are no review: W33 (nothing is missing unnoticed), W34 (nothing
// is read without bound), and content types with parameters.
func TestRequestsThatAreNoReview(t *testing.T) {
	t.Parallel()
	frame := func(version, kind, rest string) []byte {
		return fmt.Appendf(nil, `{"apiVersion":%q,"kind":%q%s}`, version, kind, rest)
	}
	const v1 = "admission.k8s.io/v1"
	good, err := json.Marshal(reviewOf(podRequest(t, guidePod())))
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		body   []byte
		header []string
		status int
		words  []string
	}{
		"empty":        {nil, nil, 400, []string{"empty", "AdmissionReview"}},
		"no JSON":      {[]byte("pod"), nil, 400, []string{"AdmissionReview"}},
		"cut off":      {good[:len(good)/2], nil, 400, []string{"AdmissionReview"}},
		"a list":       {[]byte("[]"), nil, 400, []string{"AdmissionReview"}},
		"null":         {[]byte("null"), nil, 400, []string{"AdmissionReview"}},
		"deep":         {bytes.Repeat([]byte("["), 1<<20), nil, 413, []string{"more than 10000 values"}},
		"not as deep":  {bytes.Repeat([]byte("["), admissionreview.MaxValues/2), nil, 400, []string{"AdmissionReview"}},
		"another kind": {frame(v1, "Pod", `,"request":{"uid":"1"}`), nil, 400, []string{`"Pod"`, v1}},
		"another version": {frame("admission.k8s.io/v2", "AdmissionReview", `,"request":{"uid":"1"}`), nil, 400,
			[]string{"admission.k8s.io/v2", v1}},
		"W33: no request":      {frame(v1, "AdmissionReview", ""), nil, 400, []string{"no request"}},
		"W33: request is null": {frame(v1, "AdmissionReview", `,"request":null`), nil, 400, []string{"no request"}},
		"no uid":               {frame(v1, "AdmissionReview", `,"request":{}`), nil, 400, []string{"uid"}},
		"W34: huge":            {bytes.Repeat([]byte(" "), admissionreview.MaxBody+1), nil, 413, []string{"bytes"}},
		"another type":         {good, []string{"Content-Type", "text/plain"}, 415, []string{"text/plain", "application/json"}},
		"no type at all":       {good, []string{"Content-Type", "json;;"}, 415, []string{"application/json"}},
		"a charset":            {good, []string{"Content-Type", "application/json; charset=utf-8"}, 200, nil},
		"capitals":             {good, []string{"Content-Type", "Application/JSON"}, 200, nil},
	}
	w := newWebhook(t)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, path := range []string{"/mutate", "/validate"} {
				answer := w.post(t, path, test.body, test.header...)
				if answer.Code != test.status {
					t.Fatalf("%s: status %d: %s", path, answer.Code, answer.Body)
				}
				mentions(t, answer.Body.String(), test.words...)
				if kind := answer.Header().Get("Content-Type"); test.status != 200 && kind != "text/plain; charset=utf-8" {
					t.Errorf("%s: content type %q", path, kind)
				}
			}
		})
	}
}

// W34: a body that says it is too large is not read at all, and one that does
// not say so no further than the bound.
func TestBodyIsBounded(t *testing.T) {
	t.Parallel()
	w := newWebhook(t)
	for _, told := range []bool{true, false} {
		body := &countingReader{}
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/mutate", body)
		r.ContentLength = -1
		want := int64(admissionreview.MaxBody + 64<<10)
		if told {
			r.ContentLength, want = 1<<40, 0
		}
		answer := httptest.NewRecorder()
		w.ServeHTTP(answer, r)
		if answer.Code != http.StatusRequestEntityTooLarge || body.n > want {
			t.Errorf("length told %v: status %d after %d bytes", told, answer.Code, body.n)
		}
	}
}

// countingReader never ends.
type countingReader struct{ n int64 }

func (r *countingReader) Read(p []byte) (int, error) {
	r.n += int64(len(p))
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// Clients that send large bodies slowly hold up no review, large or small.
func TestStalledBodiesHoldUpNoReview(t *testing.T) {
	t.Parallel()
	w := newWebhook(t)
	var pipes []*io.PipeWriter
	var all sync.WaitGroup
	for range 10 {
		reader, writer := io.Pipe()
		pipes = append(pipes, writer)
		all.Go(func() {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/mutate", reader)
			r.ContentLength = admissionreview.MaxBody - 1
			w.ServeHTTP(httptest.NewRecorder(), r)
		})
		if _, err := writer.Write([]byte(" ")); err != nil { // read, so it is in
			t.Fatal(err)
		}
	}
	if !w.review(t, "/mutate", reviewOf(podRequest(t, guidePod()))).Allowed {
		t.Error("denied")
	}
	large := make(chan int, 1)
	go func() { large <- w.post(t, "/mutate", bytes.Repeat([]byte(" "), admissionreview.MaxBody-1)).Code }()
	select {
	case status := <-large:
		if status != http.StatusBadRequest {
			t.Errorf("status %d", status)
		}
	case <-time.After(time.Minute):
		t.Error("a large review waits for bodies that do not come")
	}
	for _, p := range pipes {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	all.Wait()
}

// Requests that can be answered are, with their uid (W33).
func TestRequestsAboutOtherThings(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		change func(*admissionv1.AdmissionRequest)
		words  []string // of the denial; none when allowed
	}{
		"deployments": {func(r *admissionv1.AdmissionRequest) {
			r.Resource = metav1.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
		}, []string{"deployments", "apps/v1", "pods"}},
		"another version": {func(r *admissionv1.AdmissionRequest) { r.Resource.Version = "v2" }, []string{"v2", "pods"}},
		"a subresource":   {func(r *admissionv1.AdmissionRequest) { r.SubResource = "binding" }, []string{"pods/binding"}},
		"W33: no object":  {func(r *admissionv1.AdmissionRequest) { r.Object.Raw = nil }, []string{"no object"}},
		"a null object":   {func(r *admissionv1.AdmissionRequest) { r.Object.Raw = []byte("null") }, []string{"no object"}},
		"another object": {func(r *admissionv1.AdmissionRequest) { r.Object.Raw = []byte(`{"apiVersion":"v1","kind":"Node"}`) },
			[]string{"Node"}},
		"no pod": {func(r *admissionv1.AdmissionRequest) { r.Object.Raw = []byte(`{"spec":{"containers":{}}}`) },
			[]string{"not a pod"}},
		"a bad quantity": {func(r *admissionv1.AdmissionRequest) {
			r.Object.Raw = []byte(`{"spec":{"containers":[{"resources":{"limits":{"bitfusion.io/gpu-amount":"one"}}}]}}`)
		}, []string{"not a pod"}},
		"an update": {func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Update }, nil},
		"an ephemeral one": {func(r *admissionv1.AdmissionRequest) {
			r.Operation, r.SubResource = admissionv1.Update, "ephemeralcontainers"
		}, nil},
		"a removal":    {func(r *admissionv1.AdmissionRequest) { r.Operation, r.Object.Raw = admissionv1.Delete, nil }, nil},
		"an operation": {func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Connect }, nil},
		// W24: though the object has another
		"kube-system":  {func(r *admissionv1.AdmissionRequest) { r.Namespace = "kube-system" }, nil},
		"an empty pod": {func(r *admissionv1.AdmissionRequest) { r.Object.Raw = []byte(`{}`) }, nil},
		"nothing in common": {func(r *admissionv1.AdmissionRequest) { r.Object.Raw = []byte(`{"spec":{"containers":[{"name":"a"}]}}`) },
			nil},
	}
	w := newWebhook(t)
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, path := range []string{"/mutate", "/validate"} {
				request := podRequest(t, guidePod())
				test.change(request)
				response := w.review(t, path, reviewOf(request))
				if test.words == nil {
					if !response.Allowed || response.Patch != nil {
						t.Errorf("%s: %+v", path, response)
					}
					continue
				}
				if response.Allowed || response.Result.Code != http.StatusBadRequest {
					t.Fatalf("%s: %+v", path, response)
				}
				mentions(t, response.Result.Message, test.words...)
			}
		})
	}
}

// Nothing but the answer is ever changed, so a dry run is as any other (S4, S5).
func TestDryRunIsAnsweredAlike(t *testing.T) {
	t.Parallel()
	w := newWebhook(t)
	request := podRequest(t, guidePod())
	request.DryRun = ptr.To(true)
	response := w.review(t, "/mutate", reviewOf(request))
	if !response.Allowed || response.Patch == nil {
		t.Errorf("%+v", response)
	}
}

func TestOtherRequests(t *testing.T) {
	t.Parallel()
	reason := errors.New("the catalog was not read yet")
	w := newWebhook(t, func(c *Config) { c.Ready = func() error { return reason } })
	tests := map[string]struct {
		method, path string
		status       int
		words        []string
	}{
		"wrong method":   {http.MethodGet, "/mutate", 405, []string{"GET", "POST"}},
		"wrong method 2": {http.MethodPut, "/validate", 405, []string{"PUT", "POST"}},
		"unknown":        {http.MethodPost, "/mutat", 404, []string{"/mutat", "POST /mutate"}},
		"health":         {http.MethodGet, "/healthz", 200, []string{"ok"}},
		"not ready":      {http.MethodGet, "/readyz", 503, []string{reason.Error()}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			answer := httptest.NewRecorder()
			w.ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), test.method, test.path, nil))
			if answer.Code != test.status {
				t.Errorf("status %d", answer.Code)
			}
			mentions(t, answer.Body.String(), test.words...)
			if test.status == 405 && answer.Header().Get("Allow") != http.MethodPost {
				t.Errorf("Allow: %q", answer.Header().Get("Allow"))
			}
		})
	}
	if answer := newWebhookGet(t, "/readyz"); answer.Code != http.StatusOK {
		t.Errorf("ready: status %d", answer.Code)
	}
}

func newWebhookGet(t *testing.T, path string) *httptest.ResponseRecorder {
	t.Helper()
	answer := httptest.NewRecorder()
	newWebhook(t).ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
	return answer
}

// panickingCluster fails on every question, with a secret in what it says.
type panickingCluster struct{ testCluster }

func (panickingCluster) QuotaLimits(namespace string) map[string]int64 {
	return []map[string]int64{}[len(namespace)]
}

// W14, W15, W25, W33, V4: whatever goes wrong within a decision denies the pod,
// and the process lives.
func TestPanicIsADenial(t *testing.T) {
	t.Parallel()
	w := newWebhook(t, func(c *Config) { c.Cluster = &panickingCluster{} })
	pod, _ := convert(t, secretivePod())
	for range 2 {
		response := w.review(t, "/validate", reviewOf(podRequest(t, pod)))
		if response.Allowed || response.Result.Code != http.StatusInternalServerError ||
			response.Result.Reason != metav1.StatusReasonInternalError {
			t.Errorf("%+v", response)
		}
	}
	mentions(t, w.logged(), "index out of range", "validate.go", "bf-pkgs")
	noSecrets(t, w.logged())
	if got := testutil.ToFloat64(reviews(t, w, "validate", admissionreview.Error)); got != 2 {
		t.Errorf("%v errors counted", got)
	}

	text := newWebhook(t, func(c *Config) {
		c.Settings = func() Settings { panic("password=hunter2") }
	})
	if response := text.review(t, "/mutate", reviewOf(podRequest(t, guidePod()))); response.Allowed {
		t.Errorf("%+v", response)
	}
	noSecrets(t, text.logged())
	if response := newWebhook(t, func(c *Config) { c.Catalog = func() *pool.Catalog { return nil } }).
		review(t, "/mutate", reviewOf(podRequest(t, guidePod()))); response.Allowed {
		t.Errorf("without a catalog: %+v", response)
	}
}

// secretivePod has secrets wherever users put them.
func secretivePod() *corev1.Pod {
	pod := annotated(guidePod(), "example.com/token", "hunter2", pool.StatusAnnotation, "hunter2")
	c := &pod.Spec.Containers[0]
	c.Env = []corev1.EnvVar{{Name: "PASSWORD", Value: "hunter2"}}
	c.Command = []string{"python", "x.py", "--token=hunter2"}
	return pod
}

func noSecrets(t *testing.T, text string) {
	t.Helper()
	for _, secret := range []string{"hunter2", "password", "PASSWORD", "somebody@example.com", "patch"} {
		if strings.Contains(text, secret) {
			t.Errorf("%q is in the log:\n%s", secret, text)
		}
	}
}

// reviews is one counter.
func reviews(t *testing.T, w *webhook, webhook, result string) prometheus.Collector {
	t.Helper()
	families, err := w.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if family.GetName() == "divvy_webhook_reviews_total" && labels["webhook"] == webhook && labels["result"] == result {
				return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "x"}, func() float64 { return m.GetCounter().GetValue() })
			}
		}
	}
	t.Fatalf("no counter of %s %s", webhook, result)
	return nil
}

// W35: the log has names and results, whatever happens, at every level.
func TestLogsHoldNothingOfThePod(t *testing.T) {
	t.Parallel()
	w := newWebhook(t)
	request := podRequest(t, secretivePod())
	request.UserInfo.Username = "somebody@example.com"
	w.review(t, "/mutate", reviewOf(request))
	w.review(t, "/validate", reviewOf(request)) // denied
	wrong := podRequest(t, annotated(secretivePod(), pool.FilterAnnotation, "hunter2", pool.ModeAnnotation, "hunter2"))
	w.review(t, "/mutate", reviewOf(wrong))
	broken := podRequest(t, secretivePod())
	broken.Object.Raw = []byte(`{"metadata":{"name":"n"},"spec":{"containers":[{"resources":{"limits":{"cpu":"hunter2"}}}]}}`)
	w.review(t, "/mutate", reviewOf(broken))
	w.post(t, "/mutate", []byte(`{"kind":1,"request":{"object":"hunter2"}}`))
	text := w.logged()
	noSecrets(t, text)
	mentions(t, text, testNamespace, "bf-pkgs", "mutate", "validate", admissionreview.Converted, admissionreview.Denied)

	generated := secretivePod()
	generated.Name, generated.GenerateName = "", "bf-job-"
	w.review(t, "/mutate", reviewOf(podRequest(t, generated)))
	mentions(t, w.logged(), "bf-job-")
}

func TestReviewsAreCounted(t *testing.T) {
	t.Parallel()
	w := newWebhook(t)
	w.review(t, "/mutate", reviewOf(podRequest(t, guidePod())))
	w.review(t, "/mutate", reviewOf(podRequest(t, poolPod(container("a", corev1.ResourceRequirements{})))))
	w.review(t, "/mutate", reviewOf(podRequest(t, annotated(guidePod(), pool.OSAnnotation, "plan9"))))
	w.post(t, "/mutate", nil)
	w.review(t, "/validate", reviewOf(podRequest(t, guidePod())))
	for key, want := range map[[2]string]float64{
		{"mutate", admissionreview.Converted}: 1, {"mutate", admissionreview.Allowed}: 1, {"mutate", admissionreview.Denied}: 1,
		{"mutate", admissionreview.Bad}: 1, {"mutate", admissionreview.Error}: 0,
		{"validate", admissionreview.Denied}: 1, {"validate", admissionreview.Allowed}: 0,
	} {
		if got := testutil.ToFloat64(reviews(t, w, key[0], key[1])); got != want {
			t.Errorf("%v: %v, want %v", key, got, want)
		}
	}
	if n, err := testutil.GatherAndCount(w.registry, "divvy_webhook_review_duration_seconds"); err != nil || n != 2 {
		t.Errorf("%d histograms, %v", n, err)
	}
	if _, err := Handler(w.config); err == nil {
		t.Error("two handlers with one registry")
	}
	if _, err := Handler(Config{}); err == nil {
		t.Error("a handler of nothing")
	}
}

// W5 and W6 through the handler, with both webhooks at once and settings that
// change meanwhile. Run with the race detector.
func TestReviewsAtTheSameTime(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	settings := testSettings()
	w := newWebhook(t, func(c *Config) {
		c.Settings = func() Settings {
			mu.Lock()
			defer mu.Unlock()
			return settings
		}
	})
	want, _ := convert(t, guidePod())
	raw := podRequest(t, guidePod()).Object.Raw
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 20 {
				response := w.review(t, "/mutate", reviewOf(podRequest(t, guidePod())))
				var got corev1.Pod
				if err := json.Unmarshal(applyPatch(t, raw, response.Patch), &got); err != nil {
					t.Error(err)
					return
				}
				if diff := cmp.Diff(want, &got); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
				if response := w.review(t, "/validate", reviewOf(podRequest(t, &got))); !response.Allowed {
					t.Errorf("%+v", response)
				}
				mu.Lock()
				settings.TotalMemoryMB++
				mu.Unlock()
			}
		})
	}
	all.Wait()
}
