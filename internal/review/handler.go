package review

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// Bounds of the bodies of reviews.
const (
	// MaxBody is the largest, in bytes. The API server takes objects of up to 3 MiB,
	// and a review may hold two.
	MaxBody = 8 << 20
	// LargeBody is from where on reviews are let in LargeAtOnce at a time, so that
	// many of the largest do not take the memory of the process. A usual review has
	// some 5 KB.
	LargeBody   = 1 << 20
	LargeAtOnce = 2

	keptForReuse = 1 << 18
	contentType  = "application/json"
)

// Decide answers one request, and says with which of the results above. It does
// the same for a dry run, because nothing may be changed but the answer. The
// logger in ctx tells the object.
type Decide func(ctx context.Context, request *admissionv1.AdmissionRequest) (response *admissionv1.AdmissionResponse, result string)

// Server answers the reviews of any number of webhooks. It is safe for concurrent
// use; New makes one.
type Server struct {
	observe func(webhook, result string, took time.Duration)
	large   chan struct{} // holds one element for each large body in memory
	bodies  sync.Pool     // of *bytes.Buffer
}

// New returns a Server that tells observe, unless it is nil, of each review.
func New(observe func(webhook, result string, took time.Duration)) *Server {
	if observe == nil {
		observe = func(string, string, time.Duration) {}
	}
	return &Server{observe: observe, large: make(chan struct{}, LargeAtOnce)}
}

// Handler answers the reviews of one webhook: POST of an AdmissionReview v1 or
// v1beta1. A panic of decide is a denial. When ready is not nil and returns an
// error, the status is 503: the API server then does what the webhook's
// failurePolicy says.
func (s *Server) Handler(webhook string, ready func() error, decide Decide) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		result := Error
		defer func() { s.observe(webhook, result, time.Since(start)) }()
		logger := klog.FromContext(r.Context()).WithValues("webhook", webhook)

		if ready != nil {
			if err := ready(); err != nil {
				logger.Info("A review cannot be answered yet", "reason", err.Error())
				WriteText(w, http.StatusServiceUnavailable, err.Error())
				return
			}
		}
		body, done, bad := s.read(w, r)
		if bad != nil {
			result = Bad
			logger.Info("A request was no review", "status", bad.status, "reason", bad.text)
			WriteText(w, bad.status, bad.text)
			return
		}
		defer done()
		review, bad := decode(body)
		if bad != nil {
			result = Bad
			logger.Info("A request was no review", "status", bad.status, "reason", bad.text)
			WriteText(w, bad.status, bad.text)
			return
		}
		// Neither the object nor why it is refused is logged: both hold what users
		// wrote, and that may be secret.
		logger = logger.WithValues("namespace", Short(review.Request.Namespace), "name", Name(review.Request))
		review.Response, result = guarded(klog.NewContext(r.Context(), logger), review.Request, decide)
		answer, err := encode(review)
		if err != nil { // a patch is bytes and the rest is text, so this is not reached
			result = Error
			logger.Error(err, "The answer could not be encoded")
			WriteText(w, http.StatusInternalServerError, "the answer could not be encoded")
			return
		}
		level := 0
		if result == Allowed {
			level = 4
		}
		logger.V(level).Info("Reviewed", "result", result)
		w.Header().Set("Content-Type", contentType)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(answer) // a client that went away is nobody to tell
	})
}

// guarded makes a denial of a panic.
func guarded(ctx context.Context, request *admissionv1.AdmissionRequest, decide Decide) (response *admissionv1.AdmissionResponse, result string) {
	defer func() {
		if p := recover(); p != nil {
			klog.FromContext(ctx).Error(errors.New(panicText(p)), "A review failed by a mistake of this program", "stack", string(debug.Stack()))
			response = Deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError,
				"the webhook failed on this object by a mistake of its own; its log says where")
			result = Error
		}
	}()
	return decide(ctx, request)
}

// panicText tells what went wrong without what an object holds: only errors of the
// runtime are known to have none of it.
func panicText(recovered any) string {
	if err, ok := recovered.(runtime.Error); ok {
		return err.Error()
	}
	return fmt.Sprintf("%T", recovered)
}

// badRequest is a request that cannot be answered with a review.
type badRequest struct {
	status int
	text   string
}

func badf(status int, format string, args ...any) *badRequest {
	return &badRequest{status: status, text: fmt.Sprintf(format, args...)}
}

// read returns the body of a request. The caller calls done when it needs the
// body no more; done is nil when there is none.
func (s *Server) read(w http.ResponseWriter, r *http.Request) (body []byte, done func(), bad *badRequest) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		return nil, nil, badf(http.StatusMethodNotAllowed, "method %s: must be POST", r.Method)
	}
	// No type at all is let pass for people who ask by hand.
	if header := r.Header.Get("Content-Type"); header != "" {
		if mediaType, _, err := mime.ParseMediaType(header); err != nil || mediaType != contentType {
			return nil, nil, badf(http.StatusUnsupportedMediaType, "content type %q: must be %s", header, contentType)
		}
	}
	if r.ContentLength > MaxBody {
		return nil, nil, badf(http.StatusRequestEntityTooLarge, "the body has %d bytes: must be at most %d", r.ContentLength, MaxBody)
	}
	let := func() {}
	if r.ContentLength > LargeBody || r.ContentLength < 0 { // -1 says that the client did not tell
		select {
		case s.large <- struct{}{}:
			let = func() { <-s.large }
		case <-r.Context().Done():
			return nil, nil, badf(http.StatusServiceUnavailable, "the client went away")
		}
	}
	buffer, ok := s.bodies.Get().(*bytes.Buffer)
	if !ok {
		buffer = new(bytes.Buffer)
	}
	buffer.Reset()
	done = func() {
		if buffer.Cap() <= keptForReuse {
			s.bodies.Put(buffer)
		}
		let()
	}
	_, err := buffer.ReadFrom(http.MaxBytesReader(w, r.Body, MaxBody))
	var beyond *http.MaxBytesError
	switch {
	case errors.As(err, &beyond):
		bad = badf(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", MaxBody)
	case err != nil:
		bad = badf(http.StatusBadRequest, "the body could not be read: %v", err)
	case buffer.Len() == 0:
		bad = badf(http.StatusBadRequest, "the body is empty: must be an AdmissionReview")
	default:
		return buffer.Bytes(), done, nil
	}
	done()
	return nil, nil, bad
}

// WriteText answers with a line of plain text.
func WriteText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n")
}
