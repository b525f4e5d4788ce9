package admission

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
)

// Scheduler gives pods that ask for one of the resources to the scheduler of that
// name. Nothing is known of a pod but what it asks for: pods of every namespace
// are treated alike, since one that is left to another scheduler never gets a
// device.
type Scheduler struct {
	Name      string
	Resources []accel.Resource
}

// podsResource is what the webhook decides about.
var podsResource = metav1.GroupVersionResource{Version: "v1", Resource: "pods"}

// Patch returns the JSON patch for a pod, nil when it is to stay as it is: it asks
// for none of the resources, or its author chose a scheduler.
func (s Scheduler) Patch(spec *corev1.PodSpec) ([]byte, error) {
	if spec.SchedulerName != "" && spec.SchedulerName != corev1.DefaultSchedulerName || !s.asked(spec) {
		return nil, nil
	}
	type operation struct {
		Op    string `json:"op"`
		Path  string `json:"path"`
		Value string `json:"value"`
	}
	// It replaces a name that is there, too.
	return json.Marshal([]operation{{Op: "add", Path: "/spec/schedulerName", Value: s.Name}})
}

// asked reports whether a container asks for any of the resources.
func (s Scheduler) asked(spec *corev1.PodSpec) bool {
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			for _, list := range []corev1.ResourceList{containers[i].Resources.Limits, containers[i].Resources.Requests} {
				for name, amount := range list {
					if amount.Sign() > 0 && slices.Contains(s.Resources, accel.Resource(name)) {
						return true
					}
				}
			}
		}
	}
	return false
}

// Decide answers a review of a pod that is created.
func (s Scheduler) Decide(_ context.Context, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	if request.Operation != admissionv1.Create || request.Resource != podsResource || request.SubResource != "" {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	// Of a pod no more is read than is needed: what is new in a later version of
	// Kubernetes is no mistake here.
	var pod struct {
		Spec corev1.PodSpec `json:"spec"`
	}
	if err := kubejson.Unmarshal(request.Object.Raw, &pod); err != nil {
		return admissionreview.Deny(request.UID, http.StatusBadRequest, metav1.StatusReasonBadRequest,
			"the request's object is not a pod: "+err.Error()), admissionreview.Bad
	}
	patch, err := s.Patch(&pod.Spec)
	if err != nil {
		return admissionreview.Deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError, err.Error()),
			admissionreview.Error
	}
	if patch == nil {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	return admissionreview.Patch(request.UID, patch), admissionreview.Converted
}
