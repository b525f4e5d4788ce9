//go:build e2e

// Package scheduling tests what the extender does where a cluster is large or in
// trouble, on the lab's real etcd, API server and kube-scheduler, with simulated
// nodes. It leaves the lab's cluster alone and needs no root.
//
//	go test -tags e2e -count=1 ./e2e/scheduling
package scheduling

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

const (
	namespace = "team"
	resource  = "enflame.com/gcu-memory"
	// patience is how long something that is bound to come may take where every
	// processor is busy with other tests.
	patience  = 2 * time.Minute
	stopGrace = 5 * time.Second
)

// programs are built once, by TestMain; others that the tests build are in programsDir.
var (
	programs    controlplane.Programs
	programsDir string
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // watches that a stopped API server ends
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if code != 0 || err != nil {
		os.Exit(1)
	}
}

func run(m *testing.M) (code int, err error) {
	dir, err := os.MkdirTemp("", "divvy-scheduling-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	programsDir = dir
	if programs, err = controlplane.Build(context.Background(), dir, os.Getenv("DIVVY_E2E_CONTROL"), os.Stderr); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// world is a control plane with nodes of one group.
type world struct {
	*testing.T
	plane  *controlplane.ControlPlane
	client kubernetes.Interface
	nodes  simnodes.Group
}

// newWorld starts a control plane; apiServer are further flags of the API server.
func newWorld(t *testing.T, nodes simnodes.Group, apiServer ...string) *world {
	t.Helper()
	nodes.Resource = resource
	w := &world{T: t, nodes: nodes}
	var err error
	if w.plane, err = controlplane.Start(t.Context(), programs.BinDir, t.TempDir(), apiServer...); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.plane.Stop(); err != nil {
			t.Error(err)
		}
	})
	if w.client, err = w.plane.Client(); err != nil {
		t.Fatal(err)
	}
	space := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}
	if _, err := w.client.CoreV1().Namespaces().Create(t.Context(), space, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return w
}

// extender starts an extender.
func (w *world) extender(args ...string) *controlplane.Extender {
	w.Helper()
	e, err := w.plane.StartExtender(w.Context(), controlplane.ExtenderOptions{
		Name: "extender", Program: programs.Control, Resources: []string{resource}, Args: args,
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { w.end(e.Process) })
	return e
}

// scheduler starts a kube-scheduler that asks the extender.
func (w *world) scheduler(name string, e *controlplane.Extender) {
	w.Helper()
	s, err := w.plane.StartScheduler(w.Context(), programs.Kubernetes, controlplane.SchedulerOptions{Name: name, Extender: &e.Entry,
		QPS: 5000})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { w.end(s.Process) })
}

// end stops a program, and shows the end of its log where the test failed.
func (w *world) end(p *controlplane.Process) {
	if err := p.Stop(stopGrace); err != nil {
		w.Error(err)
	}
	if w.Failed() {
		w.Logf("%s:\n%s", filepath.Base(p.LogPath()), p.LogTail(20))
	}
}

// make makes pods for a scheduler, as fast as the API server takes them.
func (w *world) make(scheduler, prefix string, count int, units accel.Units) {
	w.Helper()
	w.createAtOnce(scheduler, count, func(i int) *corev1.Pod { return w.nodes.Pod(namespace, fmt.Sprintf("%s-%04d", prefix, i), units) })
}

// createAtOnce creates pods for a scheduler, several at a time.
func (w *world) createAtOnce(scheduler string, count int, podOf func(i int) *corev1.Pod) {
	w.Helper()
	group, ctx := errgroup.WithContext(w.Context())
	group.SetLimit(16)
	for i := range count {
		group.Go(func() error {
			pod := podOf(i)
			pod.Spec.SchedulerName = scheduler
			_, err := w.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		w.Fatal(err)
	}
}

// pods returns all pods of the tests.
func (w *world) pods() []corev1.Pod {
	w.Helper()
	list, err := w.client.CoreV1().Pods(namespace).List(w.Context(), metav1.ListOptions{})
	if err != nil {
		w.Fatal(err)
	}
	return list.Items
}

// bound waits until so many pods are bound, and checks that none is wrongly.
func (w *world) bound(count int) simnodes.Used {
	w.Helper()
	w.eventually(fmt.Sprintf("%d pods are bound", count), func(context.Context) error {
		bound := 0
		for _, pod := range w.pods() {
			if pod.Spec.NodeName != "" {
				bound++
			}
		}
		if bound != count {
			return fmt.Errorf("%d are", bound)
		}
		return nil
	})
	return w.right()
}

// right checks what the pods that are bound hold.
func (w *world) right() simnodes.Used {
	w.Helper()
	path, err := w.plane.GrantKey()
	if err != nil {
		w.Fatal(err)
	}
	key, err := os.ReadFile(path)
	if err != nil {
		w.Fatal(err)
	}
	used, err := w.nodes.Used(w.pods(), key)
	if err != nil {
		w.Attr("second-try", "no") // a busy machine is no reason
		w.Error(err)
	}
	return used
}

func (w *world) eventually(what string, done func(context.Context) error) {
	w.Helper()
	if err := poll.Until(w.Context(), patience, what, done); err != nil {
		w.Fatal(err)
	}
}

// serve answers on a port of this machine until the test ends.
func (w *world) serve(handler http.Handler) (url string) {
	server := httptest.NewServer(handler)
	w.Cleanup(func() {
		_ = server.Listener.Close()     // a program that still runs would connect again
		server.CloseClientConnections() // watches end with it, which Close would wait for
		server.Close()
	})
	return server.URL
}
