package progress

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// clock is a hand-driven clock.
type clock struct{ now time.Time }

func (c *clock) time() time.Time { return c.now }

func TestLogOutput(t *testing.T) {
	var out bytes.Buffer
	c := &clock{now: time.Unix(1000, 0)}
	r := newReporter(&out, 2, false, c.time)
	r.Printf("Building %d programs.", 2)
	first := r.Begin("kubelet")
	c.now = c.now.Add(95 * time.Second)
	first.Done()
	second := r.Begin("helm")
	c.now = c.now.Add(1500 * time.Millisecond)
	second.Failed()
	second.Done() // of no effect after the first end

	want := strings.Join([]string{
		"Building 2 programs.",
		"[1/2] kubelet                    running 0.0s",
		"[1/2] kubelet                    done in 1m35s, 1 left",
		"[2/2] helm                       running 0.0s",
		"[2/2] helm                       FAILED after 1.5s, none left",
		"",
	}, "\n")
	if got := out.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestTerminalRewritesTheLine(t *testing.T) {
	var out bytes.Buffer
	c := &clock{now: time.Unix(1000, 0)}
	r := newReporter(&out, 12, true, c.time)
	task := r.Begin("etcd")
	task.Detail("7 packages compiled")
	r.mu.Lock()
	r.draw(task)
	r.mu.Unlock()
	task.Done()
	got := out.String()
	if n := strings.Count(got, "\n"); n != 1 {
		t.Errorf("a task at a terminal left %d lines, want 1: %q", n, got)
	}
	for _, part := range []string{"[ 1/12] etcd", "7 packages compiled", "\r\x1b[K", "done in 0.0s, 11 left\n"} {
		if !strings.Contains(got, part) {
			t.Errorf("output %q lacks %q", got, part)
		}
	}
}

func TestElapsed(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0.0s", 1234 * time.Millisecond: "1.2s", time.Minute: "1m00s", 125 * time.Second: "2m05s", 61 * time.Minute: "61m00s",
	} {
		if got := Elapsed(d); got != want {
			t.Errorf("Elapsed(%v) = %q, want %q", d, got, want)
		}
	}
}
