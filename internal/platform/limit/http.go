package limit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
)

// maxRejecting is how many requests of one connection may be answered with a rejection
// at once. A client with more does not read the answers, and is cut off.
const maxRejecting = 32

// request is what a request holds; its key in a context is requestKey.
type request struct {
	limiter *Limiter
	conn    *conn
	account *account
}

type requestKey struct{}

// Handler counts the requests that next answers. One that is not admitted is answered
// with status 503. Requests that did not come through a Listener are not counted.
func (l *Limiter) Handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, counted := r.Context().Value(connKey{}).(*conn)
		if !counted {
			next.ServeHTTP(w, r)
			return
		}
		a, err := l.begin(c, requestBytes+headerBytes(r.Header), r.ProtoMajor == 2)
		if err != nil {
			l.reject(w, c)
			return
		}
		defer l.end(c, a)
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, &request{l, c, a})))
	})
}

// headerBytes is about what a header takes.
func headerBytes(h http.Header) (sum int64) {
	for key, values := range h {
		sum += int64(len(key)) + 64
		for _, v := range values {
			sum += int64(len(v)) + 16
		}
	}
	return sum
}

// begin counts a request on the connection.
func (l *Limiter) begin(c *conn, bytes int64, http2 bool) (*account, error) {
	l.mu.Lock()
	c.requests++ // it is not idle, whatever it closes
	b, key, first := c.base.budget, c.base.holder.key, !c.used
	c.used = true
	l.mu.Unlock()
	a, err := l.open(b, key, c, bytes)
	if err == nil && first {
		more := int64(usedBytes)
		if http2 {
			more += http2Bytes
		}
		if err = l.grow(c.base, more); err != nil {
			l.close(a)
		}
	}
	if err != nil {
		l.mu.Lock()
		c.used = c.used && !first
		l.mu.Unlock()
		l.end(c, nil)
		return nil, err
	}
	return a, nil
}

// end is after begin. The account may be nil.
func (l *Limiter) end(c *conn, a *account) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a != nil {
		a.close()
	}
	if c.requests--; c.requests == 0 {
		l.idle(c)
	}
}

func (l *Limiter) reject(w http.ResponseWriter, c *conn) {
	l.rejected.WithLabelValues(c.port, "request").Inc()
	count := func(by int) int {
		l.mu.Lock()
		defer l.mu.Unlock()
		c.rejecting += by
		return c.rejecting
	}
	defer count(-1)
	if count(1) > maxRejecting {
		c.abort()
		return
	}
	Reject(w)
	// Before it counts as answered, and not after the handler has returned.
	_ = http.NewResponseController(w).Flush() // a client that is gone reads nothing
}

// Reject answers a request for which there is no memory.
func Reject(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "1")
	http.Error(w, ErrBusy.Error(), http.StatusServiceUnavailable)
}

// of returns what the request of the context holds, nil where it is not counted.
func of(ctx context.Context) *request {
	r, _ := ctx.Value(requestKey{}).(*request)
	return r
}

// Hold counts bytes for the request of the context until it ends or Drop is called. An
// error, which wraps ErrBusy, says that there are not as many.
func Hold(ctx context.Context, bytes int64) error {
	r := of(ctx)
	if r == nil {
		return nil
	}
	if err := r.limiter.grow(r.account, bytes); err != nil {
		r.limiter.rejected.WithLabelValues(r.conn.port, "bytes").Inc()
		return fmt.Errorf("%d bytes: %w", bytes, err)
	}
	return nil
}

// Drop takes back what Hold has counted, or a part of it.
func Drop(ctx context.Context, bytes int64) {
	if r := of(ctx); r != nil {
		r.limiter.shrink(r.account, bytes)
	}
}

// SetReserve says whether the caller has proved to be one with a reserve. It holds for the
// connection from now on; one that has a reserve by its address keeps it.
func SetReserve(ctx context.Context, has bool) {
	r := of(ctx)
	if r == nil || r.conn.hasReserve {
		return
	}
	l, c := r.limiter, r.conn
	b, key := &l.shared, any(c.address)
	if has {
		b, key = &l.reserved, any(c)
	}
	l.move(c.base, b, key)
	l.move(r.account, b, key)
}

// WithoutReserve counts the request of the context like those of callers without a
// reserve, on whose behalf it was made.
func WithoutReserve(ctx context.Context) {
	if r := of(ctx); r != nil {
		r.limiter.move(r.account, &r.limiter.shared, r.conn.address)
	}
}

// TooLargeError says that a body is larger than allowed.
type TooLargeError struct{ Most int64 }

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("the request is larger than %d bytes", e.Most)
}

// ReadBody appends the body of a request, of at most most bytes, to buf. The body counts
// from before it is read; the caller drops len(body) when it needs it no more, and
// has nothing to drop after an error.
func ReadBody(w http.ResponseWriter, r *http.Request, most int64, buf []byte) (body []byte, err error) {
	if r.ContentLength > most {
		return buf, &TooLargeError{most}
	}
	held := r.ContentLength
	if held < 0 { // the client did not say
		held = most
	}
	if err := Hold(r.Context(), held); err != nil {
		return buf, fmt.Errorf("read the request: %w", err)
	}
	into := bytes.NewBuffer(buf)
	before := into.Len()
	if r.ContentLength > 0 {
		into.Grow(int(r.ContentLength) + bytes.MinRead) // so that ReadFrom never grows it
	}
	_, err = into.ReadFrom(http.MaxBytesReader(w, r.Body, most))
	var beyond *http.MaxBytesError
	switch {
	case errors.As(err, &beyond):
		err = &TooLargeError{most}
	case err != nil:
		err = fmt.Errorf("read the request: %w", err)
	}
	if err != nil {
		Drop(r.Context(), held)
		return into.Bytes(), err
	}
	Drop(r.Context(), held-int64(into.Len()-before))
	return into.Bytes(), nil
}
