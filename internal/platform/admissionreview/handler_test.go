package admissionreview

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
)

const asked = `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u-1","name":"p"}}`

// ask posts a review and returns the status, the body and the results that were
// counted.
func ask(t *testing.T, body string, ready func() error, decide Decide) (status int, answer string, counted []string) {
	t.Helper()
	s := New(func(webhook, result string, _ time.Duration) { counted = append(counted, webhook+" "+result) })
	recorder := httptest.NewRecorder()
	s.Handler("w", ready, decide).ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodPost,
		"/", strings.NewReader(body)))
	return recorder.Code, recorder.Body.String(), counted
}

func allow(_ context.Context, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	return Allow(request.UID, "a warning"), Allowed
}

func TestAnswer(t *testing.T) {
	status, body, counted := ask(t, asked, func() error { return nil }, allow)
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal([]byte(body), &review); err != nil || status != http.StatusOK {
		t.Fatalf("%d %s: %v", status, body, err)
	}
	if r := review.Response; r == nil || r.UID != "u-1" || !r.Allowed || len(r.Warnings) != 1 || review.Request != nil {
		t.Errorf("answer %s", body)
	}
	if len(counted) != 1 || counted[0] != "w allowed" {
		t.Errorf("counted %q", counted)
	}
}

// The API server takes a status of 503 for a webhook that is away, and does what
// failurePolicy says; a denial would be final.
func TestNotReadyIsNoDenial(t *testing.T) {
	status, body, counted := ask(t, asked, func() error { return errors.New("the books are not open") }, allow)
	if status != http.StatusServiceUnavailable || !strings.Contains(body, "the books are not open") || counted[0] != "w error" {
		t.Errorf("%d %s, counted %q", status, body, counted)
	}
}

func TestPanicIsADenial(t *testing.T) {
	status, body, counted := ask(t, asked, nil, func(context.Context, *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse,
		string) {
		panic("what a user wrote")
	})
	if status != http.StatusOK || !strings.Contains(body, `"allowed":false`) || strings.Contains(body, "what a user wrote") ||
		counted[0] != "w error" {
		t.Errorf("%d %s, counted %q", status, body, counted)
	}
}

func TestNoReview(t *testing.T) {
	for name, body := range map[string]string{
		"empty": "", "no JSON": "{", "another kind": `{"apiVersion":"v1","kind":"Pod"}`, "another version": strings.Replace(asked,
			"io/v1", "io/v3", 1),
		"no request": `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`, "no uid": strings.Replace(asked, "u-1", "", 1),
	} {
		t.Run(name, func(t *testing.T) {
			status, text, counted := ask(t, body, nil, allow)
			if status != http.StatusBadRequest || text == "" || counted[0] != "w bad" {
				t.Errorf("%d %s, counted %q", status, text, counted)
			}
		})
	}
}

// A few bytes of JSON can be a kilobyte in memory: 8 MB of containers without anything
// in them are two gigabytes.
func TestValuesAreBounded(t *testing.T) {
	list := func(n int, one string) string {
		return strings.Replace(asked, `"name":"p"`, `"object":{"spec":{"containers":[`+one+strings.Repeat(","+one, n-1)+`]}}`, 1)
	}
	for name, tt := range map[string]struct {
		body   string
		status int
	}{
		"many objects":          {list(MaxValues, "{}"), http.StatusRequestEntityTooLarge},
		"many that are null":    {list(MaxValues, "null"), http.StatusRequestEntityTooLarge},
		"many lists":            {list(MaxValues/2, "[[]]"), http.StatusRequestEntityTooLarge},
		"some":                  {list(1000, "{}"), http.StatusOK},
		"a text with commas":    {list(1, `{"name":"`+strings.Repeat(",", MaxValues)+`"}`), http.StatusOK},
		"a text with a quote":   {list(1, `{"name":"\\\"`+strings.Repeat(",", MaxValues)+`"}`), http.StatusOK},
		"commas behind a quote": {list(1, `{"name":"\\\\"`+strings.Repeat(",", MaxValues)+`}`), http.StatusRequestEntityTooLarge},
	} {
		if status, answer, _ := ask(t, tt.body, nil, allow); status != tt.status {
			t.Errorf("%s: %d %.100s, want %d", name, status, answer, tt.status)
		}
	}
}
