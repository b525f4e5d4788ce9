package claimreview

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

func create(t *testing.T, resource metav1.GroupVersionResource, object any) *admissionv1.AdmissionRequest {
	t.Helper()
	data, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return &admissionv1.AdmissionRequest{UID: "u", Operation: admissionv1.Create, Namespace: "team", Resource: resource,
		Object: runtime.RawExtension{Raw: data}}
}

func said(r *admissionv1.AdmissionResponse) string {
	text := strings.Join(r.Warnings, "\n")
	if r.Result != nil {
		text += r.Result.Message
	}
	return text
}

// reader is a client that knows a claim and a template, or fails.
func reader(t *testing.T, failure error) *fake.Clientset {
	t.Helper()
	template := resourceapi.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "template"}}
	template.Spec.Spec.Devices = *devices(t, "requests: [{name: a, exactly: {deviceClassName: gcu.enflame.divvy.dev}}]")
	client := kubetest.CopyWatched(fake.NewClientset(memory(t, "there", gcus, "1Gi", 1), &template))
	if failure != nil {
		client.PrependReactor("get", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, failure })
	}
	return client
}

func TestReviews(t *testing.T) {
	units := podOf(nil, nil, container("a", string(gcu)+"=10"))
	both := func(source corev1.PodResourceClaim) *corev1.Pod {
		pod := podOf(nil, nil, container("a", string(gcu)+"=10"))
		source.Name = "c"
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{source}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "c"}}
		return pod
	}
	byName := corev1.PodResourceClaim{ResourceClaimName: new("there")}
	byTemplate := corev1.PodResourceClaim{ResourceClaimTemplateName: new("template")}
	bad := claim(t, "new", "requests: []\nconfig: [{opaque: {driver: nvidia.divvy.dev, parameters: {}}}]")
	badTemplate := resourceapi.ResourceClaimTemplate{Spec: resourceapi.ResourceClaimTemplateSpec{Spec: bad.Spec}}
	tests := map[string]struct {
		request   *admissionv1.AdmissionRequest
		failure   error
		translate bool
		result    string
		said      string
	}{
		"units":    {create(t, podsResource, units), nil, true, admissionreview.Converted, ""},
		"no units": {create(t, podsResource, podOf(nil, nil, container("a"))), nil, true, admissionreview.Allowed, ""},
		"half a unit": {create(t, podsResource, podOf(nil, nil, container("a", string(gcu)+"=500m"))), nil, true,
			admissionreview.Denied, "whole number of units"},
		"units and a claim": {create(t, podsResource, both(byName)), nil, true, admissionreview.Denied,
			"has both a claim (c, class gcu.enflame.divvy.dev) and units"},
		"a claim that cannot be read": {create(t, podsResource, both(byName)), errors.New("no route"), true, admissionreview.Error,
			"could not be read: claim c: no route"},
		"no pod":           {create(t, podsResource, []int{1}), nil, true, admissionreview.Bad, "cannot be read"},
		"not a pod's":      {create(t, claimsResource, units), nil, true, admissionreview.Allowed, ""},
		"validated: units": {create(t, podsResource, units), nil, false, admissionreview.Allowed, ""},
		"validated: units and a claim": {create(t, podsResource, both(byName)), nil, false, admissionreview.Denied,
			"remove one of the two"},
		"units and a template": {create(t, podsResource, both(byTemplate)), nil, false, admissionreview.Denied,
			"remove one of the two"},
		"units and a claim that does not exist yet": {create(t, podsResource,
			both(corev1.PodResourceClaim{ResourceClaimName: new("later")})), nil, false,
			admissionreview.Allowed, ""},
		"units and no claim": {create(t, podsResource, both(corev1.PodResourceClaim{})), nil, false, admissionreview.Allowed, ""},
		"validated: a claim that cannot be read": {create(t, podsResource, both(byTemplate)), errors.New("no route"), false,
			admissionreview.Error,
			"could not read the claims of the pod: claim c: no route"},
		"a claim":                 {create(t, claimsResource, memory(t, "new", gcus, "1Gi", 1)), nil, false, admissionreview.Allowed, ""},
		"a claim with parameters": {create(t, claimsResource, bad), nil, false, admissionreview.Denied, "spec.devices.config[0].opaque"},
		"a template with parameters": {create(t, templatesResource, badTemplate), nil, false, admissionreview.Denied,
			"spec.spec.devices.config[0].opaque"},
		"a claim beyond the quota": {create(t, claimsResource, memory(t, "new", gcus, "11Gi", 1)), nil, false, admissionreview.Denied,
			"exceeded quota q"},
		"no claim":           {create(t, claimsResource, []int{1}), nil, false, admissionreview.Bad, "cannot be read"},
		"no template":        {create(t, templatesResource, []int{1}), nil, false, admissionreview.Bad, "cannot be read"},
		"no pod to validate": {create(t, podsResource, []int{1}), nil, false, admissionreview.Bad, "cannot be read"},
		"another kind": {create(t, metav1.GroupVersionResource{Version: "v1", Resource: "secrets"}, units), nil, false,
			admissionreview.Allowed, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			client := reader(t, tt.failure)
			r := New(client, testUnits(t), func() bool { return true })
			r.quotas.Quota(nil, quotaOf("q", string(gcu)+"=10"))
			decide := r.Validate
			if tt.translate {
				decide = r.Translate
			}
			response, result := decide(t.Context(), tt.request)
			// A pod is not kept out because its claims cannot be read, unless it is to be translated.
			converted := result == admissionreview.Converted
			allowed := result == admissionreview.Allowed || converted || result == admissionreview.Error && !tt.translate
			if result != tt.result || response.UID != "u" || response.Allowed != allowed || (response.Patch != nil) != converted {
				t.Errorf("%s, %+v; want %s", result, response, tt.result)
			}
			if got := said(response); !strings.Contains(got, tt.said) || tt.said == "" && got != "" {
				t.Errorf("it says %q, want %q", got, tt.said)
			}
			for _, edit := range []func(*admissionv1.AdmissionRequest){
				func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Update },
				func(r *admissionv1.AdmissionRequest) { r.SubResource = "status" },
			} {
				other := tt.request.DeepCopy()
				edit(other)
				if response, result := decide(t.Context(), other); result != admissionreview.Allowed || response.Patch != nil {
					t.Errorf("of what is not created: %s", result)
				}
			}
			// The API server may reject the object after the review, or the request may be a dry run.
			for _, a := range client.Actions() {
				if a.GetVerb() != "get" {
					t.Errorf("a review does %s of %s", a.GetVerb(), a.GetResource().Resource)
				}
			}
		})
	}
}

// A dry run gets the answer of the request itself, and leaves no template behind.
func TestDryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, err := kubetest.New()
		if err != nil {
			t.Fatal(err)
		}
		client := server.Client(nil)
		r := New(client, testUnits(t), func() bool { return true })
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		defer func() { stop(); <-done }()
		templates := func() int {
			t.Helper()
			time.Sleep(2 * lookEvery)
			synctest.Wait()
			list, err := client.ResourceV1().ResourceClaimTemplates("team").List(ctx, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return len(list.Items)
		}
		templates() // pods are followed from here on
		pod := podOf(nil, nil, container("a", string(gcu)+"=10"))
		var results []string
		for _, dryRun := range []bool{true, false} {
			request := create(t, podsResource, pod)
			request.DryRun = &dryRun
			response, result := r.Translate(ctx, request)
			if result != admissionreview.Converted {
				t.Fatalf("dry run %t: %s, %+v", dryRun, result, response)
			}
			patch, err := jsonpatch.DecodePatch(response.Patch)
			if err != nil {
				t.Fatal(err)
			}
			if request.Object.Raw, err = patch.Apply(request.Object.Raw); err != nil {
				t.Fatal(err)
			}
			results = append(results, string(request.Object.Raw))
			if response, result := r.Validate(ctx, request); result != admissionreview.Allowed {
				t.Fatalf("dry run %t, with claims: %s, %+v", dryRun, result, response)
			}
			if found := templates(); found != 0 {
				t.Errorf("dry run %t: %d templates without a pod", dryRun, found)
			}
		}
		if diff := cmp.Diff(results[1], results[0]); diff != "" {
			t.Errorf("a dry run makes another pod: %s", diff)
		}
		if _, err := client.CoreV1().Pods("team").Create(ctx, translated(t, "p", "10"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if found := templates(); found != 1 {
			t.Errorf("%d templates of a pod that was created", found)
		}
	})
}

// translated is a pod as the review leaves it.
func translated(t *testing.T, name string, units string) *corev1.Pod {
	t.Helper()
	pod := podOf(nil, nil, container("a", string(gcu)+"="+units))
	all, _, err := Translate(pod, testUnits(t))
	if err != nil {
		t.Fatal(err)
	}
	pod = patched(t, pod, all)
	pod.Name = name
	return pod
}

// Pods get the templates that they name, and those that no pod names go.
func TestTemplates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server, err := kubetest.New(translated(t, "first", "10"))
		if err != nil {
			t.Fatal(err)
		}
		var failure atomic.Pointer[error]
		client := server.Client(func(a clienttesting.Action) error {
			if a.GetVerb() == "create" && a.GetResource().Resource == "resourceclaimtemplates" {
				if err := failure.Load(); err != nil {
					return *err
				}
			}
			return nil
		})
		var leads atomic.Bool
		r := New(client, testUnits(t), leads.Load)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		defer func() { stop(); <-done }()
		pass := func(wait time.Duration) []string {
			t.Helper()
			time.Sleep(wait)
			synctest.Wait()
			list, err := client.ResourceV1().ResourceClaimTemplates("team").List(ctx, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			var found []string
			for _, one := range list.Items {
				q := one.Spec.Spec.Devices.Requests[0].Exactly.Capacity.Requests[wire.MemoryCapacity]
				found = append(found, q.String())
			}
			return sorted(found)
		}
		want := func(what string, got []string, want ...string) {
			t.Helper()
			if strings.Join(got, " ") != strings.Join(want, " ") {
				t.Errorf("%s: templates %q, want %q", what, got, want)
			}
		}
		pods := client.CoreV1().Pods("team")
		add := func(pod *corev1.Pod) {
			t.Helper()
			if _, err := pods.Create(ctx, pod, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		remove := func(name string) {
			t.Helper()
			if err := pods.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		want("another replica leads", pass(time.Minute))
		leads.Store(true)
		want("at first", pass(lookEvery), "10Gi")
		add(translated(t, "second", "10"))
		add(translated(t, "third", "4"))
		want("at once", pass(0), "10Gi", "4Gi")
		remove("first")
		remove("third")
		want("not yet", pass(linger-lookEvery), "10Gi", "4Gi")
		want("unused for a while", pass(2*lookEvery), "10Gi")
		add(translated(t, "third", "4"))
		want("used again", pass(0), "10Gi", "4Gi")
		four := *translated(t, "x", "4").Spec.ResourceClaims[0].ResourceClaimTemplateName
		if err := client.ResourceV1().ResourceClaimTemplates("team").Delete(ctx, four, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		want("deleted under its pod", pass(0), "10Gi", "4Gi")
		failure.Store(new(errors.New("no room")))
		add(translated(t, "fourth", "5"))
		want("a failure", pass(0), "10Gi", "4Gi")
		failure.Store(nil)
		want("tried again", pass(lookEvery), "10Gi", "4Gi", "5Gi")
		forged := translated(t, "forged", "6")
		forged.Annotations[wire.UnitsAnnotation] = strings.Replace(forged.Annotations[wire.UnitsAnnotation], `"6Gi"`, `"60Gi"`, 1)
		add(forged)
		want("forged", pass(lookEvery), "10Gi", "4Gi", "5Gi")
	})
}
