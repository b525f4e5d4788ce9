package extender

import (
	"runtime"
	"strings"
	"testing"
	"time"
)

// A number that a few bytes describe must not cost seconds and hundreds of MB.
func TestQuantityOfManyDigits(t *testing.T) {
	w := newWorld(t)
	body := `{"Pod":{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","resources":{"requests":{"cpu":"10000000000000000000000e5000000"}}}]}},"Nodes":null,"NodeNames":["node-a"]}`
	start := time.Now()
	_, answer := w.post("/filter", []byte(body))
	t.Logf("%v: %.200s", time.Since(start), answer)
	if time.Since(start) > 100*time.Millisecond {
		t.Errorf("%d bytes took %v", len(body), time.Since(start))
	}
}

// The largest bodies that are accepted must fit the container's 512 MiB.
func TestMemoryOfLargestBodies(t *testing.T) {
	const size = maxFilterBody - 4096
	fill := func(head, one, tail string) string {
		return head + strings.Repeat(one+",", (size-len(head)-len(tail))/(len(one)+1)) + one + tail
	}
	pod := `{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","resources":{"requests":{"enflame.com/gcu-memory":"4"}}}]}}`
	for name, body := range map[string]func() string{
		"names": func() string { return fill(`{"Pod":`+pod+`,"Nodes":null,"NodeNames":[`, `"a"`, `]}`) },
		"nodes": func() string { return fill(`{"Pod":`+pod+`,"Nodes":{"items":[`, `{"metadata":{"name":"a"}}`, `]}}`) },
		"containers": func() string {
			return fill(`{"Pod":{"spec":{"containers":[`, `{}`, `]}},"Nodes":null,"NodeNames":["node-a"]}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			b := []byte(body())
			runtime.GC()
			var before runtime.MemStats
			runtime.ReadMemStats(&before)
			peak := uint64(0)
			stop := make(chan struct{})
			done := make(chan struct{})
			go func() {
				defer close(done)
				for {
					var m runtime.MemStats
					runtime.ReadMemStats(&m)
					peak = max(peak, m.HeapInuse)
					select {
					case <-stop:
						return
					case <-time.After(20 * time.Millisecond):
					}
				}
			}()
			_, answer := w.post("/filter", b)
			close(stop)
			<-done
			extra := (peak - before.HeapInuse) >> 20
			t.Logf("%d MB more; answer %d bytes: %.100s", extra, len(answer), answer)
			if extra > 400 {
				t.Errorf("one request takes %d MB", extra)
			}
		})
	}
}
