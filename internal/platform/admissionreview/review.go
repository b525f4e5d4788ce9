package admissionreview

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubejson "k8s.io/apimachinery/pkg/util/json"
)

// reviewKind heads every review; its two versions have the same fields.
const reviewKind = "AdmissionReview"

var reviewVersions = []string{"admission.k8s.io/v1", "admission.k8s.io/v1beta1"}

// Versions returns the API versions of the reviews that are answered, with their
// group.
func Versions() []string { return slices.Clone(reviewVersions) }

// Results of reviews, in logs and metrics.
const (
	Converted = "converted" // a patch was answered
	Allowed   = "allowed"   // as it is
	Denied    = "denied"    // the object is refused
	Bad       = "bad"       // no review that could be answered
	Error     = "error"     // a mistake of this program, or something that it lacks
)

// decode reads a review and checks that it can be answered with one.
func decode(body []byte) (*admissionv1.AdmissionReview, *badRequest) {
	var review admissionv1.AdmissionReview
	if err := kubejson.Unmarshal(body, &review); err != nil {
		return nil, badf(http.StatusBadRequest, "the body is not an AdmissionReview: %v", err)
	}
	if review.Kind != reviewKind || !slices.Contains(reviewVersions, review.APIVersion) {
		return nil, badf(http.StatusBadRequest, "the body has apiVersion %q and kind %q: must be %s of %s or %s",
			review.APIVersion, review.Kind, reviewKind, reviewVersions[0], reviewVersions[1])
	}
	if review.Request == nil {
		return nil, badf(http.StatusBadRequest, "the review has no request")
	}
	if review.Request.UID == "" {
		return nil, badf(http.StatusBadRequest, "the request has no uid")
	}
	return &review, nil
}

// encode gives back the review with its response alone, in the version in which it
// was asked.
func encode(review *admissionv1.AdmissionReview) ([]byte, error) {
	return json.Marshal(admissionv1.AdmissionReview{TypeMeta: review.TypeMeta, Response: review.Response})
}

// Allow is a response that lets the object be as it is.
func Allow(uid types.UID, warnings ...string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{UID: uid, Allowed: true, Warnings: warnings}
}

// Patch is a response that allows the object with a JSON patch.
func Patch(uid types.UID, patch []byte, warnings ...string) *admissionv1.AdmissionResponse {
	response := Allow(uid, warnings...)
	patchType := admissionv1.PatchTypeJSONPatch
	response.Patch, response.PatchType = patch, &patchType
	return response
}

// Deny is a response that refuses. The code is an HTTP status.
func Deny(uid types.UID, code int32, reason metav1.StatusReason, message string) *admissionv1.AdmissionResponse {
	return &admissionv1.AdmissionResponse{UID: uid, Allowed: false, Result: &metav1.Status{
		Status: metav1.StatusFailure, Code: code, Reason: reason, Message: message,
	}}
}

// Name tells an object in logs. It is bounded, as objects come here before the API
// server has checked how long their names are.
func Name(request *admissionv1.AdmissionRequest) string {
	if request.Name != "" {
		return Short(request.Name)
	}
	// The name of a pod of a controller is made later.
	var object struct {
		Metadata struct {
			Name         string `json:"name"`
			GenerateName string `json:"generateName"`
		} `json:"metadata"`
	}
	if err := kubejson.Unmarshal(request.Object.Raw, &object); err != nil || object.Metadata.Name != "" {
		return Short(object.Metadata.Name)
	}
	return Short(object.Metadata.GenerateName)
}

// Short bounds what is repeated of what a user wrote.
func Short(s string) string {
	const most = 256
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}
