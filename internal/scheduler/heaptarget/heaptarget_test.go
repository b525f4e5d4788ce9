package heaptarget

import (
	"context"
	"runtime"
	"runtime/debug"
	"testing"
	"time"
)

func TestLimitFor(t *testing.T) {
	const mib = 1 << 20
	for name, tt := range map[string]struct {
		usage usage
		want  int64
	}{
		"nothing is known":               {want: 100 * mib},
		"little is in use":               {usage: usage{live: 5 * mib, heap: 20 * mib, all: 30 * mib}, want: 100 * mib},
		"just enough room":               {usage: usage{live: 66 * mib, heap: 80 * mib, all: 90 * mib}, want: 100 * mib},
		"more is in use":                 {usage: usage{live: 90 * mib, heap: 95 * mib, all: 105 * mib}, want: (90 + 24 + 10) * mib},
		"much is in use":                 {usage: usage{live: 400 * mib, heap: 450 * mib, all: 470 * mib}, want: (400 + 50 + 20) * mib},
		"the runtime counts oddly":       {usage: usage{live: 400 * mib, heap: 450 * mib}, want: 450 * mib},
		"numbers beyond all reason":      {usage: usage{live: 1 << 62, heap: 0, all: 1 << 62}, want: 1<<63 - 1},
		"the heap has much that is free": {usage: usage{live: 10 * mib, heap: 200 * mib, all: 210 * mib}, want: 100 * mib},
	} {
		if got := limitFor(100*mib, tt.usage); got != tt.want {
			t.Errorf("%s: limit %d, want %d", name, got, tt.want)
		}
	}
}

// What the runtime says about this process is plausible, so the names are right.
func TestRead(t *testing.T) {
	runtime.GC()
	u := read()
	if u.live == 0 || u.heap < u.live/2 || u.all < u.heap {
		t.Errorf("read %+v", u)
	}
}

// limits returns those of the process, and leaves them.
func limits() (percent int, limit int64) {
	percent = debug.SetGCPercent(100)
	debug.SetGCPercent(percent)
	return percent, debug.SetMemoryLimit(-1)
}

func TestKeep(t *testing.T) {
	before, limit := limits()
	for _, name := range []string{"GOGC", "GOMEMLIMIT"} {
		t.Run("not with "+name, func(t *testing.T) {
			t.Setenv(name, "50")
			Keep(t.Context(), 1<<30) // returns at once
			if p, l := limits(); p != before || l != limit {
				t.Errorf("it set %d and %d", p, l)
			}
		})
	}
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); Keep(ctx, 1<<30) }()
	for {
		if p, l := limits(); p == growth && l == 1<<30 {
			break
		}
		time.Sleep(time.Millisecond) // the test's own timeout ends it
	}
	cancel()
	<-done
	if p, l := limits(); p != before || l != limit {
		t.Errorf("it left %d and %d, before were %d and %d", p, l, before, limit)
	}
}
