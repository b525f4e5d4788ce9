package kube

import (
	"net/http"
	"strings"
	"time"
)

// withDeadline tells the API server how long a binding may take, where its context
// has a deadline: one that waits there is not written after that, when another
// replica may have decided otherwise. Without, the API server would learn of it only
// when the connection tells that nobody waits any more.
func withDeadline(next http.RoundTripper) http.RoundTripper { return deadline{next} }

type deadline struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (d deadline) RoundTrip(r *http.Request) (*http.Response, error) {
	until, ok := r.Context().Deadline()
	if ok && r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "/binding") {
		r = r.Clone(r.Context())
		query := r.URL.Query()
		// In whole milliseconds, and never 0, which stands for no limit.
		query.Set("timeout", max(time.Until(until).Truncate(time.Millisecond), time.Millisecond).String())
		r.URL.RawQuery = query.Encode()
	}
	return d.next.RoundTrip(r)
}

// WrappedRoundTripper lets client-go find the transport below.
func (d deadline) WrappedRoundTripper() http.RoundTripper { return d.next }
