package admission

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
)

func raw(t *testing.T, object any) runtime.RawExtension {
	t.Helper()
	data, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return runtime.RawExtension{Raw: data}
}

// change is a review of a ConfigMap whose entry changes.
func change(t *testing.T, name, entry, before, after string) *admissionv1.AdmissionRequest {
	t.Helper()
	configMap := func(text string) runtime.RawExtension {
		return raw(t, corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: name},
			Data: map[string]string{entry: text}})
	}
	return &admissionv1.AdmissionRequest{
		UID: "u", Operation: admissionv1.Update, Namespace: "divvy-system", Name: name,
		Resource: metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"}, OldObject: configMap(before),
		Object: configMap(after),
	}
}

func TestReviewsOfTheConfiguration(t *testing.T) {
	coarse, fine := file("enflame.com/gcu-memory=1"), file("enflame.com/gcu-memory=0.1")
	there := map[string]map[string]string{BaseConfigMap: {"config.yaml": coarse}, NamedConfigMap: {"fine": fine}}
	tests := map[string]struct {
		request *admissionv1.AdmissionRequest
		edit    func(*admissionv1.AdmissionRequest)
		read    error
		result  string
		message string // of a refusal, or of a warning
	}{
		"the base": {request: change(t, BaseConfigMap, "config.yaml", coarse, fine), result: admissionreview.Denied,
			message: "team/a"},
		"the base as it was": {request: change(t, BaseConfigMap, "config.yaml", coarse, coarse), result: admissionreview.Allowed},
		"a named one": {request: change(t, NamedConfigMap, "fine", fine, coarse), result: admissionreview.Denied,
			message: `from "0.1" to "1"`},
		"a named one is removed": {request: change(t, NamedConfigMap, "fine", fine, fine),
			edit: func(r *admissionv1.AdmissionRequest) { r.Object = raw(t, corev1.ConfigMap{}) }, result: admissionreview.Allowed},
		"another entry":     {request: change(t, BaseConfigMap, "other", coarse, fine), result: admissionreview.Allowed},
		"another ConfigMap": {request: change(t, "settings", "config.yaml", coarse, fine), result: admissionreview.Allowed},
		"another namespace": {request: change(t, BaseConfigMap, "config.yaml", coarse, fine),
			edit: func(r *admissionv1.AdmissionRequest) { r.Namespace = "team" }, result: admissionreview.Allowed},
		"a deletion": {request: change(t, BaseConfigMap, "config.yaml", coarse, fine),
			edit: func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Delete }, result: admissionreview.Allowed},
		"a Secret": {request: change(t, BaseConfigMap, "config.yaml", coarse, fine),
			edit: func(r *admissionv1.AdmissionRequest) { r.Resource.Resource = "secrets" }, result: admissionreview.Allowed},
		"no ConfigMap": {request: change(t, BaseConfigMap, "config.yaml", coarse, fine),
			edit: func(r *admissionv1.AdmissionRequest) { r.OldObject.Raw = []byte("[]") }, result: admissionreview.Error,
			message: "the request's objects are not ConfigMaps"},
		"the other is not read": {request: change(t, BaseConfigMap, "config.yaml", coarse, fine), read: errors.New("forbidden"),
			result: admissionreview.Error, message: "forbidden"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c := Config{
				Namespace: "divvy-system",
				Holders:   func() []Holder { return []Holder{holder("a", gcu, "", "1"), holder("b", gcu, "fine", "0.1")} },
				Read:      func(_ context.Context, name string) (map[string]string, error) { return there[name], tt.read },
			}
			if tt.edit != nil {
				tt.edit(tt.request)
			}
			response, result := c.Decide(t.Context(), tt.request)
			if result != tt.result || response.UID != "u" || response.Allowed != (result != admissionreview.Denied) ||
				response.Patch != nil {
				t.Errorf("%s, %+v; want %s", result, response, tt.result)
			}
			said := strings.Join(response.Warnings, "\n")
			if response.Result != nil {
				said += response.Result.Message
			}
			if !strings.Contains(said, tt.message) || tt.message == "" && said != "" {
				t.Errorf("it says %q, want %q", said, tt.message)
			}
		})
	}
}

func asking(requests, limits string, init bool) corev1.PodSpec {
	list := func(name string) corev1.ResourceList {
		if name == "" {
			return nil
		}
		name, amount, _ := strings.Cut(name, "=")
		return corev1.ResourceList{corev1.ResourceName(name): resource.MustParse(amount), "cpu": resource.MustParse("1")}
	}
	c := corev1.Container{Name: "c", Resources: corev1.ResourceRequirements{Requests: list(requests), Limits: list(limits)}}
	if init {
		return corev1.PodSpec{InitContainers: []corev1.Container{c}, Containers: []corev1.Container{{Name: "main"}}}
	}
	return corev1.PodSpec{Containers: []corev1.Container{{Name: "sidecar"}, c}}
}

func TestScheduler(t *testing.T) {
	s := Scheduler{Name: "divvy-scheduler", Resources: []accel.Resource{gcu, gpu}}
	chosen := func(spec corev1.PodSpec, name string) corev1.PodSpec { spec.SchedulerName = name; return spec }
	tests := map[string]struct {
		spec corev1.PodSpec
		want string
	}{
		"a limit":                     {asking("", "enflame.com/gcu-memory=4", false), "divvy-scheduler"},
		"a request":                   {asking("nvidia.com/gpu-memory=4", "", false), "divvy-scheduler"},
		"an init container":           {asking("", "enflame.com/gcu-memory=4", true), "divvy-scheduler"},
		"the default by its name":     {chosen(asking("", "enflame.com/gcu-memory=4", false), "default-scheduler"), "divvy-scheduler"},
		"another scheduler":           {chosen(asking("", "enflame.com/gcu-memory=4", false), "volcano"), "volcano"},
		"ours already":                {chosen(asking("", "enflame.com/gcu-memory=4", false), "divvy-scheduler"), "divvy-scheduler"},
		"whole devices":               {asking("", "nvidia.com/gpu=1", false), ""},
		"none of it":                  {asking("", "enflame.com/gcu-memory=0", false), ""},
		"nothing":                     {chosen(asking("", "", false), "default-scheduler"), "default-scheduler"},
		"a resource of another name":  {asking("", "enflame.com/gcu-memory2=4", false), ""},
		"the default, asking for cpu": {chosen(asking("cpu=1", "", false), "default-scheduler"), "default-scheduler"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			// A field that this program does not know must stay.
			object := raw(t, map[string]any{"metadata": map[string]any{"name": "p"}, "spec": tt.spec, "new": "field"})
			response, result := s.Decide(t.Context(), &admissionv1.AdmissionRequest{UID: "u", Operation: admissionv1.Create,
				Resource: podsResource, Object: object})
			if !response.Allowed || response.UID != "u" {
				t.Fatalf("refused: %+v", response)
			}
			if patched := tt.want != tt.spec.SchedulerName; patched != (result == admissionreview.Converted) ||
				patched != (response.Patch != nil) {
				t.Errorf("%s with patch %s", result, response.Patch)
			}
			after := object.Raw
			if response.Patch != nil {
				patch, err := jsonpatch.DecodePatch(response.Patch)
				if err != nil {
					t.Fatal(err)
				}
				if after, err = patch.Apply(after); err != nil {
					t.Fatal(err)
				}
			}
			var pod struct {
				Spec corev1.PodSpec
				New  string
			}
			if err := json.Unmarshal(after, &pod); err != nil {
				t.Fatal(err)
			}
			if pod.Spec.SchedulerName != tt.want || pod.New != "field" || len(pod.Spec.Containers) != len(tt.spec.Containers) {
				t.Errorf("it became %s, want scheduler %q", after, tt.want)
			}
		})
	}
}

func TestSchedulerOfWhatIsNoNewPod(t *testing.T) {
	s := Scheduler{Name: "divvy-scheduler", Resources: []accel.Resource{gcu}}
	spec := asking("", "enflame.com/gcu-memory=4", false)
	object := raw(t, map[string]any{"spec": spec})
	for name, tt := range map[string]struct {
		request admissionv1.AdmissionRequest
		result  string
	}{
		"an update": {admissionv1.AdmissionRequest{Operation: admissionv1.Update, Resource: podsResource, Object: object},
			admissionreview.Allowed},
		"a subresource": {admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: podsResource,
			SubResource: "binding", Object: object}, admissionreview.Allowed},
		"another kind": {admissionv1.AdmissionRequest{Operation: admissionv1.Create,
			Resource: metav1.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}, Object: object},
			admissionreview.Allowed},
		"no object": {admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: podsResource}, admissionreview.Bad},
		"another shape": {admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: podsResource,
			Object: runtime.RawExtension{Raw: []byte(`{"spec":[]}`)}}, admissionreview.Bad},
	} {
		t.Run(name, func(t *testing.T) {
			response, result := s.Decide(t.Context(), &tt.request)
			if result != tt.result || response.Allowed != (tt.result == admissionreview.Allowed) || response.Patch != nil {
				t.Errorf("%s, %+v; want %s", result, response, tt.result)
			}
		})
	}
}
