package extender

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
)

// Prefix stands before the routes of the verbs, as in the guide.
const Prefix = "/gcushare-scheduler"

// Limits of a request's body in bytes. A client that sends whole nodes sends
// some 15 KB for each, names take some 20 bytes.
const (
	maxFilterBody = 32 << 20
	maxBindBody   = 64 << 10
	// maxOthersBody is the limit for callers that may not bind: 40 000 names.
	maxOthersBody = 1 << 20
	// keepBuffer is the largest buffer that is kept for the next request, and keepSmall the
	// largest of which it does not matter how full it is.
	keepBuffer = 1 << 20
	keepSmall  = 4 << 10
)

// verb is one question of kube-scheduler.
type verb struct {
	name    string
	maxBody int64
	// answer appends the result to out. An error goes to fail.
	answer func(ctx context.Context, body, out []byte) ([]byte, error)
	// fail appends the result that tells the error. A nil fail means that the
	// result has no place for one: the status tells.
	fail func(out []byte, text string) []byte
	// allow rejects a caller; nil admits all.
	allow func(r *http.Request) error
	// acts is true where something was done, which is so whoever leads by now. Other
	// answers are not given by a replica that lost the lead over them.
	acts bool
}

// Handler returns the routes, without listening:
//
//	POST /gcushare-scheduler/filter, /preempt, /prioritize, /bind
//	GET  /gcushare-scheduler/inspect, /inspect/{node}, /inspect/explain/{namespace}/{pod}
//	GET  /gcushare-scheduler/decisions
//	GET  /version, /healthz, /readyz
func (e *Extender) Handler() http.Handler { return e.routes(true) }

// Reports returns the routes of Handler but for those that kube-scheduler calls.
func (e *Extender) Reports() http.Handler { return e.routes(false) }

// Led returns a handler that answers while this replica leads. Otherwise the leader answers, to which
// requests of up to maxBody bytes are handed.
func (e *Extender) Led(name string, maxBody int64, here http.Handler) http.Handler {
	return e.replica.led(verb{name: name, maxBody: maxBody}, here)
}

func (e *Extender) routes(verbs bool) http.Handler {
	mux := http.NewServeMux()
	for _, v := range []verb{
		{name: verbFilter, maxBody: maxFilterBody, answer: e.filter, fail: appendFilterError},
		{name: verbPreempt, maxBody: maxFilterBody, answer: e.preempt, allow: e.callers.mayBind},
		{name: verbPrioritize, maxBody: maxFilterBody, answer: e.prioritize, allow: e.callers.mayBind},
		{name: verbBind, maxBody: maxBindBody, answer: e.bind, fail: appendError, allow: e.callers.mayBind, acts: true},
	} {
		if verbs {
			mux.Handle(Prefix+"/"+v.name, e.replica.led(v, e.handleVerb(v)))
		}
	}
	report := e.replica.led(verb{name: verbInspect}, http.HandlerFunc(e.reports.handle))
	mux.Handle("GET "+inspect.Route, report)
	mux.Handle("GET "+inspect.Route+"/{node}", report)
	explain := e.replica.led(verb{name: verbExplain}, http.HandlerFunc(e.explains.handle))
	mux.Handle("GET "+inspect.ExplainRoute+"/{namespace}/{pod}", explain)
	mux.Handle("GET "+inspect.DecisionsRoute, explain)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, e.config.Version) })
	mux.HandleFunc("GET /healthz", e.handleHealth)
	mux.HandleFunc("GET /readyz", e.handleReady)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		writeError(w, http.StatusNotFound, fmt.Sprintf("no route %s %s", r.Method, r.URL.Path))
	})
	return e.recoverPanics(mux)
}

// LeaderHeader is in the answer to /healthz of the replica that leads.
const LeaderHeader = "Divvy-Leader"

func (e *Extender) handleHealth(w http.ResponseWriter, _ *http.Request) {
	if e.config.Election == nil || e.config.Election.Leading() {
		w.Header().Set(LeaderHeader, "true")
	}
	writeText(w, http.StatusOK, "ok")
}

func (e *Extender) handleReady(w http.ResponseWriter, _ *http.Request) {
	if err := e.replica.reachable(); err != nil {
		writeText(w, http.StatusServiceUnavailable, err.Error())
		return
	}
	writeText(w, http.StatusOK, "ok")
}

// recoverPanics answers a panic like any other failure and lets the process
// live. Verbs write their answer last, so there is none half written.
func (e *Extender) recoverPanics(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(ForwardedHeader) == forwardedStranger {
			limit.WithoutReserve(r.Context()) // the replica that hands it on has one, its caller has none
		}
		defer func() {
			p := recover()
			if p == nil {
				return
			}
			if p == http.ErrAbortHandler { //nolint:errorlint // it is compared so by net/http as well
				panic(p) //nolint:forbidigo // it is net/http's, see above
			}
			e.metrics.panics.Inc()
			klog.FromContext(r.Context()).Error(fmt.Errorf("panic: %v", p), "A request failed because of an internal error",
				"path", r.URL.Path, "stack", string(debug.Stack()))
			writeError(w, http.StatusOK, "internal error of the extender; see its log")
		}()
		next.ServeHTTP(w, r)
	})
}

func (e *Extender) handleVerb(v verb) http.Handler {
	counted := e.metrics.verbs[v.name]
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		counted.inFlight.Inc()
		defer counted.inFlight.Dec()
		out := getBuffer()
		defer func() { putBuffer(out) }()

		status, err := checkRequest(w, r)
		if err == nil && v.allow != nil {
			err = v.allow(r)
		}
		if err == nil {
			r = r.WithContext(e.callers.context(r))
			*out, err = e.answer(w, r, v, (*out)[:0])
		}
		if err != nil {
			logError(r.Context(), err, "verb", v.name)
			if v.fail == nil && status == http.StatusOK {
				status = http.StatusBadRequest
				if errors.Is(err, errNotReady) || errors.Is(err, limit.ErrBusy) {
					status = http.StatusServiceUnavailable
				}
			}
			fail := v.fail
			if fail == nil {
				fail = appendError
			}
			*out = fail((*out)[:0], err.Error())
		}
		counted.observe(err, time.Since(start))
		writeJSON(w, status, *out)
	})
}

// logError logs an error that is answered. Those of clients that reach a bound are counted, see
// package limit, and not logged one by one.
func logError(ctx context.Context, err error, keysAndValues ...any) {
	logger := klog.FromContext(ctx)
	if errors.Is(err, limit.ErrBusy) {
		logger.V(4).Info("Rejected", append(keysAndValues, "reason", err.Error())...)
		return
	}
	logger.Error(err, "Answered with an error", keysAndValues...)
}

// answer reads the request and appends the answer to out. The body is not held any more
// when it returns, the answer is.
func (e *Extender) answer(w http.ResponseWriter, r *http.Request, v verb, out []byte) ([]byte, error) {
	ctx := r.Context()
	body := getBuffer()
	defer func() { putBuffer(body) }()
	var done func()
	var err error
	if *body, done, err = readBody(w, r, &e.callers, v.maxBody, (*body)[:0]); err != nil {
		return out, err
	}
	defer done()
	if !v.acts { // a bind waits for the API server, and takes no memory
		release, err := e.slots.take(ctx, len(*body))
		if err != nil {
			return out, err
		}
		defer release() // also after a panic
	}
	answer, err := v.answer(ctx, *body, out)
	if err == nil && !v.acts {
		err = e.replica.ready() // a process may have been paused in the middle
	}
	if err != nil {
		return out, err
	}
	if cap(answer) > keepSmall && cap(answer) > 2*len(answer) {
		answer = bytes.Clone(answer) // the buffer is for a larger one
	}
	if err := limit.Hold(ctx, int64(cap(answer))); err != nil {
		return out, fmt.Errorf("response: %w", err)
	}
	return answer, nil
}

// checkRequest rejects what is no question of kube-scheduler's.
func checkRequest(w http.ResponseWriter, r *http.Request) (status int, err error) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		return http.StatusMethodNotAllowed, fmt.Errorf("method %s: must be POST", r.Method)
	}
	// No type at all is let pass for people who ask by hand.
	if header := r.Header.Get("Content-Type"); header != "" {
		if mediaType, _, err := mime.ParseMediaType(header); err != nil || mediaType != "application/json" {
			return http.StatusOK, fmt.Errorf("content type %q: must be application/json", header)
		}
	}
	return http.StatusOK, nil
}

// readBody reads the request into buf. The caller calls done when it needs the
// body no more.
func readBody(w http.ResponseWriter, r *http.Request, c *callers, most int64, buf []byte) (body []byte, done func(), err error) {
	if c.mayBind(r) != nil {
		most = min(most, maxOthersBody)
	}
	if body, err = limit.ReadBody(w, r, most, buf); err != nil {
		return body, nil, err
	}
	return body, func() { limit.Drop(r.Context(), int64(len(body))) }, nil
}

// buffers are the bodies of requests and answers.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

func getBuffer() *[]byte {
	b, ok := buffers.Get().(*[]byte)
	if !ok {
		return new([]byte)
	}
	return b
}

func putBuffer(b *[]byte) {
	if cap(*b) <= keepBuffer {
		buffers.Put(b)
	}
}

func appendFilterError(b []byte, text string) []byte {
	b = append(b, `{"Nodes":null,"NodeNames":null,"FailedNodes":null,"FailedAndUnresolvableNodes":null,"Error":`...)
	b = appendString(b, text)
	return append(b, '}')
}

func appendError(b []byte, text string) []byte {
	b = append(b, `{"Error":`...)
	b = appendString(b, text)
	return append(b, '}')
}

// These ignore the error of writing: the client went away.

func writeJSON(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_, _ = w.Write(body) //nolint:gosec // JSON, which no browser takes for HTML
}

func writeError(w http.ResponseWriter, status int, text string) {
	writeJSON(w, status, appendError(nil, text))
}

func writeText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text+"\n")
}
