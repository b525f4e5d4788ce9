package admission

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubejson "k8s.io/apimachinery/pkg/util/json"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
)

// decision is what a webhook decides about a pod: a patch or none, warnings, or a
// *Denial.
type decision func(pod *corev1.Pod, namespace string) (patch []byte, warnings []string, err error)

func (s *server) mutate(pod *corev1.Pod, namespace string) (patch []byte, warnings []string, err error) {
	converted, warnings, err := Mutate(pod, namespace, s.config.Catalog(), s.config.Settings())
	if err != nil || converted == pod {
		return nil, warnings, err
	}
	patch, err = makePatch(pod, converted)
	return patch, warnings, err
}

func (s *server) validate(pod *corev1.Pod, namespace string) (patch []byte, warnings []string, err error) {
	warnings, err = Validate(pod, namespace, s.config.Catalog(), s.config.Settings(), s.config.Cluster)
	return nil, warnings, err
}

func answer(decide decision) admissionreview.Decide {
	return func(_ context.Context, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
		if request.Operation != admissionv1.Create {
			return admissionreview.Allow(request.UID), admissionreview.Allowed
		}
		pod, err := decodePod(request)
		if err != nil {
			return admissionreview.Deny(request.UID, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error()), admissionreview.Bad
		}
		patch, warnings, err := decide(pod, request.Namespace)
		var denial *Denial
		switch {
		case errors.As(err, &denial) && denial.Forbidden:
			return admissionreview.Deny(request.UID, http.StatusForbidden, metav1.StatusReasonForbidden, denial.Error()),
				admissionreview.Denied
		case errors.As(err, &denial):
			return admissionreview.Deny(request.UID, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, denial.Error()),
				admissionreview.Denied
		case err != nil:
			return admissionreview.Deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError, err.Error()),
				admissionreview.Error
		case len(patch) == 0:
			return admissionreview.Allow(request.UID, warnings...), admissionreview.Allowed
		}
		return admissionreview.Patch(request.UID, patch, warnings...), admissionreview.Converted
	}
}

func decodePod(request *admissionv1.AdmissionRequest) (*corev1.Pod, error) {
	resource := metav1.GroupVersionResource{Version: "v1", Resource: "pods"}
	if request.Resource != resource || request.SubResource != "" {
		name := request.Resource.Resource
		if request.SubResource != "" {
			name += "/" + request.SubResource
		}
		return nil, fmt.Errorf("the request is for %s of version %s, but this webhook only reviews pods of version v1: the rules of its "+
			"configuration are wrong",
			name, metav1.GroupVersion{Group: request.Resource.Group, Version: request.Resource.Version})
	}
	raw := request.Object.Raw
	if len(raw) == 0 || string(raw) == "null" {
		return nil, errors.New("the request has no object: must be the pod to create")
	}
	var pod corev1.Pod
	if err := kubejson.Unmarshal(raw, &pod); err != nil {
		return nil, fmt.Errorf("the request's object is not a pod: %w", err)
	}
	if kind := pod.GroupVersionKind(); !kind.Empty() && kind != corev1.SchemeGroupVersion.WithKind("Pod") {
		return nil, fmt.Errorf("the request's object is of apiVersion %q and kind %q: must be v1 and Pod", pod.APIVersion, pod.Kind)
	}
	return &pod, nil
}
