//go:build e2e

package scheduling

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

// A pod ends, and kube-scheduler hears of it long before the extender does. So it
// asks about the pod that waits, is refused, and asks no more, as nothing else
// happens in the cluster. When the extender hears of the room, it makes kube-scheduler
// look again.
func TestBooksThatLag(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 1, Cards: 1, Units: 8})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	pods := &gate{}
	e := w.extender("--kubeconfig=" + w.before("lagging", pods.wrap))
	s, err := w.plane.StartScheduler(t.Context(), programs.Kubernetes, controlplane.SchedulerOptions{
		Name: "default-scheduler", Extender: &e.Entry, Settings: map[string]any{"podInitialBackoffSeconds": 1, "podMaxBackoffSeconds": 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.end(s.Process) })
	w.make("default-scheduler", "holds", 1, 8)
	w.bound(1)
	w.make("default-scheduler", "waits", 1, 8)
	refusals := func(ctx context.Context) (int, error) {
		return counter(ctx, e.Metrics, `divvy_extender_decisions_total{outcome="refused",resource="`+resource+`",verb="filter"}`)
	}

	pods.shut()
	defer pods.open()
	before, err := refusals(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := w.client.CoreV1().Pods(namespace).Delete(t.Context(),
		"holds-0000", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	// Several times the second that it pauses between two attempts.
	const calm = 5 * time.Second
	last, since := before, time.Now()
	w.eventually("kube-scheduler was refused and asks no more", func(ctx context.Context) error {
		now, err := refusals(ctx)
		if err != nil {
			return err
		}
		if now != last {
			last, since = now, time.Now()
		}
		if last == before || time.Since(since) < calm {
			return fmt.Errorf("it was refused %d times, the last time %s ago", last-before, time.Since(since))
		}
		return nil
	})
	if _, woken := w.waits(t.Context()); woken {
		t.Fatal("it was woken while the extender could know of no room")
	}
	pods.open()
	start := time.Now()
	w.eventually("the pod that waits is bound", func(ctx context.Context) error {
		node, woken := w.waits(ctx)
		if node == "" {
			return fmt.Errorf("it waits; woken: %t", woken)
		}
		if !woken {
			return errors.New("it is bound, and was not woken") // and this will not change: somebody else made kube-scheduler look
		}
		return nil
	})
	t.Logf("bound %.1f s after the extender could know of the room", time.Since(start).Seconds())
	w.right()
	if n, err := counter(t.Context(), e.Metrics, `divvy_extender_woken_pods_total{result="ok"}`); err != nil || n < 1 || n > 3 {
		t.Errorf("%d requests woke one pod, %v", n, err)
	}
}

// waits returns where the pod that waits is bound, and whether it was woken.
func (w *world) waits(ctx context.Context) (node string, woken bool) {
	w.Helper()
	pod, err := w.client.CoreV1().Pods(namespace).Get(ctx, "waits-0000", metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	_, woken = pod.Annotations[wire.RetryAnnotation]
	return pod.Spec.NodeName, woken
}

// counter reads one of Divvy's metrics, 0 where it is not there yet.
func counter(ctx context.Context, metrics func(ctx context.Context) (string, error), series string) (int, error) {
	text, err := metrics(ctx)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			return strconv.Atoi(strings.TrimSpace(rest))
		}
	}
	return 0, nil
}

// gate keeps what the watch of pods says back while it is shut.
type gate struct {
	mu     sync.Mutex
	closed chan struct{} // closed when it opens; nil when it is open
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = make(chan struct{})
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed != nil {
		close(g.closed)
		g.closed = nil
	}
}

// wrap lets the watch of pods through the gate.
func (g *gate) wrap(proxy http.Handler) http.Handler {
	return http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/pods") && r.URL.Query().Get("watch") != "" {
			out = &gatedWriter{out, g, r.Context()}
		}
		proxy.ServeHTTP(out, r)
	})
}

type gatedWriter struct {
	http.ResponseWriter
	gate *gate
	ctx  context.Context //nolint:containedctx // of the request
}

// Unwrap lets the proxy flush.
func (w *gatedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *gatedWriter) Write(b []byte) (int, error) {
	w.gate.mu.Lock()
	closed := w.gate.closed
	w.gate.mu.Unlock()
	if closed != nil {
		select {
		case <-closed:
		case <-w.ctx.Done():
			return 0, context.Cause(w.ctx)
		}
	}
	return w.ResponseWriter.Write(b)
}
