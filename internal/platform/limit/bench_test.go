package limit

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"
)

// BenchmarkHandler measures what counting adds to a request, beside a thousand connections.
func BenchmarkHandler(b *testing.B) {
	l := New(Config{Shared: 1 << 30})
	var c *conn
	for i := range 1000 {
		c = &conn{Conn: &deaf{}, limiter: l, port: "bench", address: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}
		if err := c.admit(connBytes); err != nil {
			b.Fatal(err)
		}
	}
	h := l.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if err := Hold(r.Context(), 100_000); err != nil {
			b.Error(err)
		}
		Drop(r.Context(), 100_000)
	}))
	r := httptest.NewRequestWithContext(context.WithValue(b.Context(), connKey{}, c), http.MethodPost, "/", http.NoBody)
	w := httptest.NewRecorder()
	b.ReportAllocs()
	for b.Loop() {
		h.ServeHTTP(w, r)
	}
}
