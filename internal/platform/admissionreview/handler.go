package admissionreview

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sync/semaphore"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
)

const (
	// MaxBody is the largest, in bytes. The API server takes objects of up to 3 MiB,
	// and a review may hold two.
	MaxBody = 8 << 20
	// MaxValues is how many values a body may have. The largest pods have some thousands.
	MaxValues = 10_000
	// valueBytes is what a value may become in memory: the container "{}" is 784 bytes.
	// unfolded is for as much reviews are decoded and decided at once, in bytes. Usual
	// ones take some 300 KB each.
	valueBytes = 800
	unfolded   = 40 << 20
	// slotTimeout is how long a review waits for others. The API server waits 10 s.
	slotTimeout = 5 * time.Second

	contentType = "application/json"
)

// Decide answers one request, and says with which of the results above. It does
// the same for a dry run, because nothing may be changed but the answer. The
// logger in ctx tells the object.
type Decide func(ctx context.Context, request *admissionv1.AdmissionRequest) (response *admissionv1.AdmissionResponse, result string)

// Server answers the reviews of any number of webhooks. It is safe for concurrent
// use; New makes one.
type Server struct {
	observe func(webhook, result string, took time.Duration)
	slots   *semaphore.Weighted // in bytes that reviews unfold to
}

// New returns a Server that tells observe, unless it is nil, of each review.
func New(observe func(webhook, result string, took time.Duration)) *Server {
	if observe == nil {
		observe = func(string, string, time.Duration) {}
	}
	return &Server{observe: observe, slots: semaphore.NewWeighted(unfolded)}
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
				logger.Info("Not ready to answer a review", "reason", err.Error())
				WriteText(w, http.StatusServiceUnavailable, err.Error())
				return
			}
		}
		answer, decided, bad := s.answer(w, r, logger, decide)
		result = decided
		if bad != nil {
			level := 0
			if bad.status == http.StatusServiceUnavailable { // a client reached a bound, which is counted
				level = 4
			}
			logger.V(level).Info("Rejected a request that is not a valid review", "status", bad.status, "reason", bad.text)
			WriteText(w, bad.status, bad.text)
			return
		}
		w.Header().Set("Content-Type", contentType)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(answer) //nolint:gosec // JSON, which no browser takes for HTML; a client that went away reads nothing
	})
}

// answer reads a review and decides. The answer counts from then on, the review no more.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, logger klog.Logger, decide Decide) (answer []byte, result string,
	bad *badRequest) {
	body, done, bad := s.read(w, r)
	if bad != nil {
		if bad.status == http.StatusServiceUnavailable {
			return nil, Error, bad
		}
		return nil, Bad, bad
	}
	defer done()
	review, bad := decode(body)
	if bad != nil {
		return nil, Bad, bad
	}
	// Neither the object nor why it is refused is logged: both hold what users
	// wrote, and that may be secret.
	logger = logger.WithValues("namespace", Short(review.Request.Namespace), "name", Name(review.Request))
	review.Response, result = guarded(klog.NewContext(r.Context(), logger), review.Request, decide)
	answer, err := encode(review)
	if err != nil { // a patch is bytes and the rest is text, so this is not reached
		logger.Error(err, "Could not encode the response")
		return nil, Error, badf(http.StatusInternalServerError, "could not encode the response")
	}
	if err := limit.Hold(r.Context(), int64(cap(answer))); err != nil {
		return nil, Error, badf(http.StatusServiceUnavailable, "response: %v", err)
	}
	level := 0
	if result == Allowed {
		level = 4
	}
	logger.V(level).Info("Reviewed", "result", result)
	return answer, result, nil
}

// guarded makes a denial of a panic.
func guarded(ctx context.Context, request *admissionv1.AdmissionRequest, decide Decide) (response *admissionv1.AdmissionResponse,
	result string) {
	defer func() {
		if p := recover(); p != nil {
			klog.FromContext(ctx).Error(errors.New(panicText(p)), "A review failed because of an internal error",
				"stack", string(debug.Stack()))
			response = Deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError,
				"internal error of the webhook; see its log")
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
	body, err := limit.ReadBody(w, r, MaxBody, nil)
	var beyond *limit.TooLargeError
	switch {
	case errors.As(err, &beyond):
		return nil, nil, badf(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", MaxBody)
	case errors.Is(err, limit.ErrBusy):
		return nil, nil, badf(http.StatusServiceUnavailable, "%v", err)
	case err != nil:
		return nil, nil, badf(http.StatusBadRequest, "read the body: %v", err)
	case len(body) == 0:
		return nil, nil, badf(http.StatusBadRequest, "the body is empty: must be an AdmissionReview")
	}
	release := func() { limit.Drop(r.Context(), int64(len(body))) }
	end, bad := s.slot(r.Context(), body)
	if bad != nil {
		release()
		return nil, nil, bad
	}
	return body, func() { end(); release() }, nil
}

// slot waits until the body may be decoded. The caller calls end.
func (s *Server) slot(ctx context.Context, body []byte) (end func(), bad *badRequest) {
	values := valuesOf(body)
	if values > MaxValues {
		return nil, badf(http.StatusRequestEntityTooLarge, "the body has more than %d values", MaxValues)
	}
	weight := min(int64(values)*valueBytes+4*int64(len(body)), unfolded)
	ctx, cancel := context.WithTimeout(ctx, slotTimeout)
	defer cancel()
	if s.slots.Acquire(ctx, weight) != nil {
		return nil, badf(http.StatusServiceUnavailable, "%v", limit.ErrBusy)
	}
	return func() { s.slots.Release(weight) }, nil
}

// valuesOf returns how many values the JSON has at most, without those in texts.
func valuesOf(body []byte) int {
	n, text := 1, false
	for i := 0; i < len(body); i++ {
		switch c := body[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case text:
		case c == ',' || c == '{' || c == '[':
			n++
		}
	}
	return n
}

// WriteText answers with a line of plain text.
func WriteText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n")
}
