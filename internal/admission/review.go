package admission

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubejson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/klog/v2"
)

// reviewKind heads every review; its two versions have the same fields.
const reviewKind = "AdmissionReview"

var reviewVersions = []string{"admission.k8s.io/v1", "admission.k8s.io/v1beta1"}

// ReviewVersions returns the API versions of the reviews that the handler
// answers, with their group.
func ReviewVersions() []string { return slices.Clone(reviewVersions) }

// decodeReview reads a review and checks that it can be answered with one.
func decodeReview(body []byte) (*admissionv1.AdmissionReview, *badRequest) {
	var review admissionv1.AdmissionReview
	if err := kubejson.Unmarshal(body, &review); err != nil {
		return nil, badf(http.StatusBadRequest, "the body is no AdmissionReview: %v", err)
	}
	if review.Kind != reviewKind || review.APIVersion != reviewVersions[0] && review.APIVersion != reviewVersions[1] {
		return nil, badf(http.StatusBadRequest, "the body is of apiVersion %q and kind %q: must be %s of %s or %s",
			review.APIVersion, review.Kind, reviewKind, reviewVersions[0], reviewVersions[1])
	}
	if review.Request == nil {
		return nil, badf(http.StatusBadRequest, "the review has no request")
	}
	if review.Request.UID == "" {
		return nil, badf(http.StatusBadRequest, "the request has no uid, so there is no answering it")
	}
	return &review, nil
}

// encodeReview gives back the review with its response alone, in the version in
// which it was asked.
func encodeReview(review *admissionv1.AdmissionReview) ([]byte, error) {
	return json.Marshal(admissionv1.AdmissionReview{TypeMeta: review.TypeMeta, Response: review.Response})
}

// podName names a pod in logs, where no name is longer than a pod's may be.
func podName(request *admissionv1.AdmissionRequest) string { return short(nameOf(request)) }

func nameOf(request *admissionv1.AdmissionRequest) string {
	if request.Name != "" {
		return request.Name
	}
	// The name of a pod of a controller is made later.
	var object struct {
		Metadata struct {
			Name         string `json:"name"`
			GenerateName string `json:"generateName"`
		} `json:"metadata"`
	}
	if err := kubejson.Unmarshal(request.Object.Raw, &object); err != nil || object.Metadata.Name != "" {
		return object.Metadata.Name
	}
	return object.Metadata.GenerateName
}

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

// answer decides about the request of a review. It does the same for a dry run,
// because nothing is ever changed but the answer.
func (s *server) answer(logger klog.Logger, request *admissionv1.AdmissionRequest, decide decision) (response *admissionv1.AdmissionResponse, result string) {
	defer func() {
		if p := recover(); p != nil {
			recovered(logger, p)
			response = deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError,
				"the webhook failed on this pod by a mistake of its own; its log says where")
			result = resultError
		}
	}()
	if request.Operation != admissionv1.Create {
		return &admissionv1.AdmissionResponse{UID: request.UID, Allowed: true}, resultAllowed
	}
	pod, err := decodePod(request)
	if err != nil {
		return deny(request.UID, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error()), resultBad
	}
	patch, warnings, err := decide(pod, request.Namespace)
	var denial *Denial
	switch {
	case errors.As(err, &denial) && denial.Forbidden:
		return deny(request.UID, http.StatusForbidden, metav1.StatusReasonForbidden, denial.Error()), resultDenied
	case errors.As(err, &denial):
		return deny(request.UID, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, denial.Error()), resultDenied
	case err != nil:
		return deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError, err.Error()), resultError
	}
	response = &admissionv1.AdmissionResponse{UID: request.UID, Allowed: true, Warnings: warnings}
	if len(patch) == 0 {
		return response, resultAllowed
	}
	patchType := admissionv1.PatchTypeJSONPatch
	response.Patch, response.PatchType = patch, &patchType
	return response, resultConverted
}

// deny is a response that refuses.
func deny(uid types.UID, code int32, reason metav1.StatusReason, message string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{UID: uid, Allowed: false, Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: code, Reason: reason, Message: message,
	}}
}

// decodePod returns the pod of a request.
func decodePod(request *admissionv1.AdmissionRequest) (*corev1.Pod, error) {
	resource := metav1.GroupVersionResource{Version: "v1", Resource: "pods"}
	if request.Resource != resource || request.SubResource != "" {
		name := request.Resource.Resource
		if request.SubResource != "" {
			name += "/" + request.SubResource
		}
		return nil, fmt.Errorf("the request is about %s of version %s: this webhook decides about pods of version v1 alone, so its configuration has a wrong rule",
			name, metav1.GroupVersion{Group: request.Resource.Group, Version: request.Resource.Version})
	}
	raw := request.Object.Raw
	if len(raw) == 0 || string(raw) == "null" {
		return nil, errors.New("the request has no object: must be the pod to create")
	}
	var pod corev1.Pod
	if err := kubejson.Unmarshal(raw, &pod); err != nil {
		return nil, fmt.Errorf("the request's object is no pod: %w", err)
	}
	if kind := pod.GroupVersionKind(); !kind.Empty() && kind != corev1.SchemeGroupVersion.WithKind("Pod") {
		return nil, fmt.Errorf("the request's object is of apiVersion %q and kind %q: must be v1 and Pod", pod.APIVersion, pod.Kind)
	}
	return &pod, nil
}
