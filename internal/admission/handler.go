package admission

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// Config is what Handler needs.
type Config struct {
	// Catalog and Settings return what holds now; they may be called at any time.
	Catalog  func() *pool.Catalog
	Settings func() Settings
	Cluster  Cluster
	// Ready returns nil when answers are right.
	Ready    func() error
	Registry prometheus.Registerer
}

// MaxBody bounds the body of a review, in bytes. The API server takes objects of
// up to 3 MiB, and a review may hold two.
const MaxBody = 8 << 20

const (
	// largeBody is from where on reviews are let in a few at a time, so that many
	// of the largest do not take the memory of the process. A usual review has
	// some 5 KB.
	largeBody     = 1 << 20
	largeAtOnce   = 2
	keptForReuse  = 1 << 18
	contentType   = "application/json"
	healthyAnswer = "ok"
)

// server answers reviews.
type server struct {
	config  Config
	metrics *metrics
	large   chan struct{} // holds one element for each large body in memory
	bodies  sync.Pool     // of *bytes.Buffer
}

// Handler serves POST /mutate and POST /validate (AdmissionReview v1 and
// v1beta1, at most MaxBody bytes), GET /healthz and GET /readyz. It sets no
// timeouts; they are the server's. It may be used by any number of goroutines.
func Handler(c Config) (http.Handler, error) {
	if c.Catalog == nil || c.Settings == nil || c.Cluster == nil || c.Ready == nil {
		return nil, errors.New("admission: Catalog, Settings, Cluster and Ready must be set")
	}
	m, err := newMetrics(c.Registry)
	if err != nil {
		return nil, fmt.Errorf("register the metrics of admission: %w", err)
	}
	s := &server{config: c, metrics: m, large: make(chan struct{}, largeAtOnce)}
	mux := http.NewServeMux()
	mux.Handle("/mutate", s.serve("mutate", s.mutate))
	mux.Handle("/validate", s.serve("validate", s.validate))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, healthyAnswer) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := c.Ready(); err != nil {
			writeText(w, http.StatusServiceUnavailable, err.Error())
			return
		}
		writeText(w, http.StatusOK, healthyAnswer)
	})
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeText(w, http.StatusNotFound, fmt.Sprintf("no route %s %q: there are POST /mutate, POST /validate, GET /healthz and GET /readyz", r.Method, r.URL.Path))
	})
	return mux, nil
}

// serve answers the reviews of one webhook.
func (s *server) serve(webhook string, decide decision) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		result := resultError
		defer func() { s.metrics.observe(webhook, result, time.Since(start)) }()
		logger := klog.FromContext(r.Context()).WithValues("webhook", webhook)

		body, done, bad := s.read(w, r)
		if bad != nil {
			result = resultBad
			logger.Info("A request was no review", "status", bad.status, "reason", bad.text)
			writeText(w, bad.status, bad.text)
			return
		}
		defer done()
		review, bad := decodeReview(body)
		if bad != nil {
			result = resultBad
			logger.Info("A request was no review", "status", bad.status, "reason", bad.text)
			writeText(w, bad.status, bad.text)
			return
		}
		// Neither the pod nor why it is refused is logged: both hold what users
		// wrote, and that may be secret.
		logger = logger.WithValues("namespace", short(review.Request.Namespace), "name", podName(review.Request))
		review.Response, result = s.answer(logger, review.Request, decide)
		answer, err := encodeReview(review)
		if err != nil { // a patch is bytes and the rest is text, so this is not reached
			result = resultError
			logger.Error(err, "The answer could not be encoded")
			writeText(w, http.StatusInternalServerError, "the answer could not be encoded")
			return
		}
		level := 0
		if result == resultAllowed {
			level = 4
		}
		logger.V(level).Info("Reviewed", "result", result)
		w.Header().Set("Content-Type", contentType)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write(answer) // a client that went away is nobody to tell
	})
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
func (s *server) read(w http.ResponseWriter, r *http.Request) (body []byte, done func(), bad *badRequest) {
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
	if r.ContentLength > largeBody || r.ContentLength < 0 { // -1 says that the client did not tell
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

// panicText tells what went wrong without what a pod holds: only errors of the
// runtime are known to have none of it.
func panicText(recovered any) string {
	if err, ok := recovered.(runtime.Error); ok {
		return err.Error()
	}
	return fmt.Sprintf("%T", recovered)
}

// recovered logs a panic.
func recovered(logger klog.Logger, p any) {
	logger.Error(errors.New(panicText(p)), "A review failed by a mistake of this program", "stack", string(debug.Stack()))
}

func writeText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n") //nolint:gosec // plain text, and sniffing is off
}
