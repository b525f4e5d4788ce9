package podfuzz

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/diff"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	podutil "k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/core"
	_ "k8s.io/kubernetes/pkg/apis/core/install" // registers pods, their defaults and conversions
	"k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/capabilities"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/pool/admission"
)

const namespace = "fuzz"

// seeds is how many pods a plain test makes.
const seeds = 400

func settings() admission.Settings {
	return admission.Settings{
		TotalMemoryMB: 16000, ClientImage: "docker.io/bitfusiondeviceplugin/bitfusion-client:0.4",
		ClientPullPolicy: corev1.PullIfNotPresent, IgnoredNamespaces: []string{"kube-system"},
	}
}

// FuzzMutate makes pods of every shape and holds against each what must be true
// of all of them:
//
//   - a pod that Kubernetes accepts without the pool's resources is still
//     accepted once it is converted;
//   - converting it again changes nothing, also after the API server filled in
//     its defaults, and a container that is added later changes nothing else;
//   - the containers, annotations, labels, environment, volumes and mounts that
//     the user wrote are all still there, and so are fields of a later version of
//     Kubernetes;
//   - the patch that the webhook answers, applied by the API server's library,
//     gives what Mutate gives;
//   - nothing that a user writes for the pool is left, and the validating webhook
//     accepts it;
//   - a refusal says why.
func FuzzMutate(f *testing.F) {
	for i, seed := range seedBytes() {
		if i%4 == 0 { // a test below takes them all
			f.Add(seed)
		}
	}
	handler := webhook(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		check(t, handler, data)
	})
}

// seedBytes are the same in every run.
func seedBytes() [][]byte {
	random := rand.New(rand.NewPCG(1, 2))
	all := [][]byte{nil}
	for i := range seeds {
		seed := make([]byte, i)
		for j := range seed {
			seed[j] = byte(random.UintN(256))
		}
		all = append(all, seed)
	}
	return all
}

// outcome is what became of a pod.
type outcome string

const (
	untouched outcome = "untouched"
	denied    outcome = "denied"
	invalid   outcome = "converted, and Kubernetes refuses it for what the user wrote"
	converted outcome = "converted"
)

// Of the seeds enough are converted, and each outcome happens: otherwise the
// fuzzing would hold little against anything.
func TestSeedsReachEveryOutcome(t *testing.T) {
	handler := webhook(t)
	count := map[outcome]int{}
	reasons := map[string]int{}
	for _, seed := range seedBytes() {
		what, why := check(t, handler, seed)
		count[what]++
		if why != "" {
			reasons[why]++
		}
	}
	t.Logf("%v", count)
	for why, n := range reasons {
		t.Logf("%5d %s", n, why)
	}
	for what, least := range map[outcome]int{untouched: 5, denied: 50, invalid: 5, converted: seeds / 4} {
		if count[what] < least {
			t.Errorf("%d pods were %s, want %d", count[what], what, least)
		}
	}
}

// quoted is what differs between messages of one kind.
var quoted = regexp.MustCompile(`"[^"]*"`)

func check(t *testing.T, handler http.Handler, data []byte) (what outcome, why string) {
	t.Helper()
	s := &shape{bytes: data}
	written := s.pod()
	apply(written) // as the API server does before it calls webhooks
	pod := decode[corev1.Pod](t, encode(t, written))
	before := pod.DeepCopy()

	after, _, err := admission.Mutate(pod, namespace, pool.DefaultCatalog(), settings())
	if !apiequality.Semantic.DeepEqual(before, pod) {
		t.Fatalf("Mutate changed its argument:\n%s", diff.Diff(before, pod))
	}
	// Unknown fields do not change what is decided.
	tree := decode[map[string]any](t, encode(t, pod))
	marked := 0
	mark(*tree, &marked)
	raw := encode(t, tree)
	response := review(t, handler, "/mutate", raw)
	if err != nil {
		var denial *admission.Denial
		if !errors.As(err, &denial) || len(denial.Problems) == 0 || denial.Error() == "" {
			t.Fatalf("refused without saying why: %v", err)
		}
		if response.Allowed || response.Result.Message != denial.Error() {
			t.Fatalf("Mutate denies (%v), the webhook answers %+v", denial, response)
		}
		return denied, quoted.ReplaceAllString(denial.Problems[0], "...")
	}
	if !response.Allowed {
		t.Fatalf("Mutate allows, the webhook answers %+v", response)
	}
	if after == pod {
		if response.Patch != nil {
			t.Fatalf("Mutate changes nothing, the webhook answers %s", response.Patch)
		}
		return untouched, ""
	}

	// The patch.
	result := patched(t, raw, response.Patch)
	if got := decode[corev1.Pod](t, result); !apiequality.Semantic.DeepEqual(after, got) {
		t.Fatalf("the patch gives another pod than Mutate:\n%s", diff.Diff(after, got))
	}
	checkMarks(t, *tree, *decode[map[string]any](t, result), marked)
	checkKept(t, before, after)

	// Again, as it is and with defaults.
	ready := after.DeepCopy()
	apply(ready)
	for _, p := range []*corev1.Pod{after, ready} {
		again, _, err := admission.Mutate(p, namespace, pool.DefaultCatalog(), settings())
		if err != nil {
			t.Fatalf("refused what it made: %v", err)
		}
		if again != p {
			t.Fatalf("applied twice:\n%s", diff.Diff(p, again))
		}
	}
	checkAdded(t, ready)
	checkWebhook(t, handler, before, ready)

	without := before.DeepCopy()
	removePoolResources(without)
	if errs := validate(t, without); len(errs) > 0 {
		return invalid, errs[0].Error()
	}
	if errs := validate(t, ready); len(errs) > 0 {
		t.Fatalf("Kubernetes refuses the converted pod: %v\n%s", errs, encode(t, ready))
	}
	return converted, ""
}

// apply fills in the defaults of pods.
func apply(pod *corev1.Pod) { legacyscheme.Scheme.Default(pod) }

// validate is Kubernetes' own validation of a new pod, after its defaulting.
func validate(t *testing.T, pod *corev1.Pod) []error {
	t.Helper()
	pod = pod.DeepCopy()
	apply(pod)
	var internal core.Pod
	if err := legacyscheme.Scheme.Convert(pod, &internal, nil); err != nil {
		t.Fatal(err)
	}
	options := podutil.GetValidationOptionsFromPodSpecAndMeta(&internal.Spec, nil, &internal.ObjectMeta, nil)
	options.ResourceIsPod = true
	var errs []error
	for _, err := range validation.ValidatePodCreate(&internal, options) {
		errs = append(errs, err)
	}
	return errs
}

// removePoolResources removes what Mutate replaces.
func removePoolResources(pod *corev1.Pod) {
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			for _, list := range []corev1.ResourceList{containers[i].Resources.Limits, containers[i].Resources.Requests} {
				for _, name := range []corev1.ResourceName{pool.AmountResource, pool.PercentResource, pool.MemoryResource} {
					delete(list, name)
				}
			}
		}
	}
}

func allContainers(pod *corev1.Pod) map[string]corev1.Container {
	all := map[string]corev1.Container{}
	for i, c := range pod.Spec.InitContainers {
		if c.Name != "populate" {
			all["init "+c.Name] = pod.Spec.InitContainers[i]
		}
	}
	for i, c := range pod.Spec.Containers {
		all["app "+c.Name] = pod.Spec.Containers[i]
	}
	return all
}

// names lists a pod's own containers in their order.
func names(containers []corev1.Container) string {
	var all []string
	for i := range containers {
		if containers[i].Name != "populate" {
			all = append(all, containers[i].Name)
		}
	}
	return strings.Join(all, " ")
}

// checkKept finds what of the user's is not there any more.
func checkKept(t *testing.T, before, after *corev1.Pod) {
	t.Helper()
	for key, value := range before.Annotations {
		if got, ok := after.Annotations[key]; !ok || got != value && key != pool.StatusAnnotation {
			t.Fatalf("annotation %s: %q, was %q", key, got, value)
		}
	}
	for key, value := range before.Labels {
		if got, ok := after.Labels[key]; !ok || got != value && key != pool.ConvertedLabel {
			t.Fatalf("label %s: %q, was %q", key, got, value)
		}
	}
	if got, want := names(after.Spec.InitContainers), names(before.Spec.InitContainers); got != want {
		t.Fatalf("init containers %s, were %s", got, want)
	}
	if got, want := names(after.Spec.Containers), names(before.Spec.Containers); got != want {
		t.Fatalf("containers %s, were %s", got, want)
	}
	prefix(t, "volumes", before.Spec.Volumes, after.Spec.Volumes)
	is := allContainers(after)
	for name, was := range allContainers(before) {
		now := is[name]
		if !pool.Asks(was.Resources) {
			if !apiequality.Semantic.DeepEqual(was, now) {
				t.Fatalf("%s asks for nothing and was changed:\n%s", name, diff.Diff(was, now))
			}
			continue
		}
		if pool.Asks(now.Resources) {
			t.Fatalf("%s still asks: %v", name, now.Resources)
		}
		prefix(t, "mounts of "+name, was.VolumeMounts, now.VolumeMounts)
		if len(now.Env) < len(was.Env) {
			t.Fatalf("env of %s: %v, was %v", name, now.Env, was.Env)
		}
		for i, e := range was.Env {
			got := now.Env[i]
			if e.Name == "LD_LIBRARY_PATH" && e.ValueFrom == nil && strings.HasSuffix(got.Value, e.Value) {
				got.Value = e.Value
			}
			if !apiequality.Semantic.DeepEqual(e, got) {
				t.Fatalf("env of %s: %v, was %v", name, now.Env[i], e)
			}
		}
		for list, lists := range map[string][2]corev1.ResourceList{"limits": {was.Resources.Limits, now.Resources.Limits},
			"requests": {was.Resources.Requests, now.Resources.Requests}} {
			for resource, q := range lists[0] {
				if got, ok := lists[1][resource]; !strings.HasPrefix(string(resource), pool.Prefix) && (!ok || q.Cmp(got) != 0) {
					t.Fatalf("%s of %s: %s is %v, was %v", list, name, resource, got, q)
				}
			}
		}
		// Everything else is the same.
		now.Command, now.Args, now.Env, now.VolumeMounts = was.Command, was.Args, was.Env, was.VolumeMounts
		now.Resources.Limits, now.Resources.Requests = was.Resources.Limits, was.Resources.Requests
		if !apiequality.Semantic.DeepEqual(was, now) {
			t.Fatalf("%s:\n%s", name, diff.Diff(was, now))
		}
	}
}

func prefix[T any](t *testing.T, what string, was, now []T) {
	t.Helper()
	if len(now) < len(was) || !apiequality.Semantic.DeepEqual(was, now[:len(was):len(was)]) && len(was) > 0 {
		t.Fatalf("%s:\n%s", what, diff.Diff(was, now))
	}
}

// checkAdded lets another webhook add containers that ask and be called again.
func checkAdded(t *testing.T, first *corev1.Pod) {
	t.Helper()
	second := first.DeepCopy()
	delete(second.Annotations, pool.FilterAnnotation) // the client may know none, which no container has asked so far
	asks := corev1.ResourceRequirements{Limits: corev1.ResourceList{pool.AmountResource: resource.MustParse("1")}}
	second.Spec.Containers = append(second.Spec.Containers,
		corev1.Container{Name: "added", Image: "busybox", Command: []string{"python", "x.py"}, Resources: asks})
	second.Spec.InitContainers = append([]corev1.Container{{
		Name: "mesh", Image: "busybox", Command: []string{"mesh"}, Resources: asks,
		RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways),
	}}, second.Spec.InitContainers...)
	apply(second)
	after, _, err := admission.Mutate(second, namespace, pool.DefaultCatalog(), settings())
	if err != nil {
		t.Fatalf("refused another container: %v", err)
	}
	checkKept(t, second, after)
	if after.Spec.InitContainers[0].Name != "populate" {
		t.Fatalf("populate is not before %q, which needs it: %s", "mesh", names(after.Spec.InitContainers))
	}
	if len(after.Spec.Volumes) != len(first.Spec.Volumes) {
		t.Fatalf("volumes: %v, were %v", after.Spec.Volumes, first.Spec.Volumes)
	}
	is := allContainers(after)
	for name, was := range allContainers(first) {
		if now := is[name]; !apiequality.Semantic.DeepEqual(was, now) {
			t.Fatalf("%s was changed by the second run:\n%s", name, diff.Diff(was, now))
		}
	}
	if errs := validate(t, first); len(errs) == 0 {
		if errs := validate(t, after); len(errs) > 0 {
			t.Fatalf("Kubernetes refuses the pod converted again: %v", errs)
		}
	}
}

// checkWebhook asks the validating webhook about a converted pod.
func checkWebhook(t *testing.T, handler http.Handler, before, after *corev1.Pod) {
	t.Helper()
	for _, c := range allContainers(before) {
		for _, list := range []corev1.ResourceList{c.Resources.Limits, c.Resources.Requests} {
			for name := range list {
				switch name {
				case pool.AmountResource, pool.PercentResource, pool.MemoryResource:
				default:
					if strings.HasPrefix(string(name), pool.Prefix) {
						return // written by hand or misspelt, so it is refused
					}
				}
			}
		}
	}
	if response := review(t, handler, "/validate", encode(t, after)); !response.Allowed {
		t.Fatalf("the validating webhook refuses what the other made: %s\n%s", response.Result.Message, encode(t, after))
	}
}

// anyCluster has everything.
type anyCluster struct{}

func (anyCluster) LargestAllocatable() map[corev1.ResourceName]int64 { return nil }
func (anyCluster) QuotaLimits(string) map[string]int64               { return nil }
func (anyCluster) CredentialsAllowed(string, []string) error         { return nil }

func webhook(t testing.TB) http.Handler {
	t.Helper()
	capabilities.Setup(true, 0) // privileged containers are allowed, as API servers do for their own programs
	handler, err := admission.Handler(admission.Config{
		Catalog: pool.DefaultCatalog, Settings: settings, Cluster: anyCluster{}, Ready: func() error { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	return handler
}

func review(t *testing.T, handler http.Handler, path string, raw []byte) *admissionv1.AdmissionResponse {
	t.Helper()
	body := encode(t, admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: admissionv1.SchemeGroupVersion.String(), Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID: "1", Operation: admissionv1.Create, Namespace: namespace,
			Kind:     metav1.GroupVersionKind{Version: "v1", Kind: "Pod"},
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
			Object:   runtime.RawExtension{Raw: raw},
		},
	})
	r := httptest.NewRequestWithContext(klog.NewContext(t.Context(), logr.Discard()), http.MethodPost, path, bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	answer := httptest.NewRecorder()
	handler.ServeHTTP(answer, r)
	if answer.Code != http.StatusOK {
		t.Fatalf("status %d: %s", answer.Code, answer.Body)
	}
	response := decode[admissionv1.AdmissionReview](t, answer.Body.Bytes()).Response
	if response == nil || !response.Allowed && (response.Result == nil || response.Result.Code == http.StatusInternalServerError) {
		t.Fatalf("the answer is %s", answer.Body)
	}
	return response
}

// patched applies a patch with the library of the API server.
func patched(t *testing.T, raw, patch []byte) []byte {
	t.Helper()
	operations, err := jsonpatch.DecodePatch(patch)
	if err != nil {
		t.Fatal(err)
	}
	after, err := operations.Apply(raw)
	if err != nil {
		t.Fatalf("the patch does not apply: %v\n%s", err, patch)
	}
	return after
}

// unknown is a field of no version of Kubernetes.
const unknown = "fromTheFuture"

// mark puts the unknown field into every object with a fixed set of fields, with
// the name of the object as its value.
func mark(tree any, n *int) {
	switch tree := tree.(type) {
	case []any:
		for _, v := range tree {
			mark(v, n)
		}
	case map[string]any:
		for key, v := range tree {
			switch key {
			case "annotations", "labels", "limits", "requests", "nodeSelector", "overhead", "creationTimestamp":
			default:
				mark(v, n)
			}
		}
		tree[unknown] = fmt.Sprint(tree["name"])
		*n++
	}
}

// checkMarks finds unknown fields that are gone or at another object.
func checkMarks(t *testing.T, before, after map[string]any, want int) {
	t.Helper()
	n := 0
	var count func(any)
	count = func(tree any) {
		switch tree := tree.(type) {
		case []any:
			for _, v := range tree {
				count(v)
			}
		case map[string]any:
			if mark, ok := tree[unknown]; ok {
				n++
				if mark != fmt.Sprint(tree["name"]) {
					t.Fatalf("%v has the unknown field of %v", tree["name"], mark)
				}
			}
			for _, v := range tree {
				count(v)
			}
		}
	}
	count(after)
	if n != want {
		t.Fatalf("%d unknown fields, were %d:\n%s", n, want, diff.Diff(before, after))
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func decode[T any](t *testing.T, data []byte) *T {
	t.Helper()
	v := new(T)
	if err := json.Unmarshal(data, v); err != nil {
		t.Fatal(err)
	}
	return v
}
