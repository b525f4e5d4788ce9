package agent

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/divvy-gpu/divvy/internal/node/podresources"
)

// never is the delay of one that does not answer.
const never = 24 * time.Hour

// slow is a kubelet and an API server that take their time.
type slow struct {
	kubeletLister
	podSource
	kubelet, api time.Duration
}

func (s slow) List(ctx context.Context) ([]podresources.Pod, error) {
	if !sleep(ctx, s.kubelet) {
		return nil, ctx.Err()
	}
	return s.kubeletLister.List(ctx)
}

func (s slow) Fresh(ctx context.Context) ([]*corev1.Pod, error) {
	if !sleep(ctx, s.api) {
		return nil, ctx.Err()
	}
	return s.podSource.Fresh(ctx)
}

// questions of kubelet that make the daemon look again and again: all is taken, and
// by what was given out just now.
func questions(t *testing.T) map[string]func(slow) (*records, func() error) {
	t.Helper()
	return map[string]func(slow) (*records, func() error){
		"units": func(s slow) (*records, func() error) {
			w := newWorld(t, "1")
			w.update(t.Context(), found(card(0, "a", 16)), nil)
			holder := newPod("holder", 16)
			w.see(holder)
			if _, err := w.admit(holder); err != nil {
				t.Fatal(err)
			}
			w.admitted = append(w.admitted, newPod("unknown", 4)) // the watch is late
			s.kubeletLister, s.podSource = w, w
			w.records.kubelet, w.records.pods = s, s
			return w.records, func() error {
				_, err := w.Prefer(t.Context(), w.available(), nil, 4)
				return err
			}
		},
		"whole devices": func(s slow) (*records, func() error) {
			w := newSlotWorld(t, t.TempDir(), exclusive)
			w.found(gpuDevice(0, "a"))
			if _, err := w.Allocate(t.Context(), []string{"a"}); err != nil {
				t.Fatal(err)
			}
			w.gives("holder", "a")
			s.kubeletLister, s.podSource = w, w
			w.records.kubelet, w.records.pods = s, s
			return w.records, func() error {
				_, err := w.Prefer(t.Context(), nil, nil, 1)
				return err
			}
		},
		"whole devices that kubelet chose": func(s slow) (*records, func() error) {
			w := newSlotWorld(t, t.TempDir(), exclusive)
			w.found(gpuDevice(0, "a"))
			if _, err := w.Allocate(t.Context(), []string{"a"}); err != nil {
				t.Fatal(err)
			}
			w.gives("holder", "a")
			s.kubeletLister, s.podSource = w, w
			w.records.kubelet, w.records.pods = s, s
			return w.records, func() error {
				_, err := w.Allocate(t.Context(), []string{"a"})
				return err
			}
		},
	}
}

// TestOneDeadlineForOneQuestion: whoever does not answer, the lock of the node is
// held for lookupTimeout at most, however often the daemon looks again.
func TestOneDeadlineForOneQuestion(t *testing.T) {
	for name := range questions(t) {
		for _, kubelet := range []time.Duration{0, lookupTimeout * 9 / 10, never} {
			for _, api := range []time.Duration{0, (lookupTimeout - keptForKubelet) * 2 / 3, never} {
				t.Run(fmt.Sprintf("%s, kubelet %v, API server %v", name, kubelet, api), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						_, ask := questions(t)[name](slow{kubelet: kubelet, api: api})
						begin := time.Now()
						if err := ask(); err == nil {
							t.Error("it was answered, and all is taken")
						}
						if took := time.Since(begin); took > lookupTimeout {
							t.Errorf("it took %v, want %v at most", took, lookupTimeout)
						}
					})
				})
			}
		}
	}
}

// TestSilentServers is the same with sockets: kubelet's takes connections and says
// nothing, and so does the API server.
func TestSilentServers(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	listener, err := net.Listen("unix", socket) //nolint:noctx // it ends with the test
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	silent, err := podresources.NewClient(socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	release := make(chan struct{})
	api := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	t.Cleanup(api.Close)
	t.Cleanup(func() { close(release) })
	client, err := kubernetes.NewForConfig(&rest.Config{Host: api.URL})
	if err != nil {
		t.Fatal(err)
	}
	mute := newNodePods(client, thisNode, func() {})
	for name, question := range questions(t) {
		for who, silence := range map[string]func(*records){
			"kubelet":        func(r *records) { r.kubelet = silent },
			"the API server": func(r *records) { r.pods = mutePods{r.pods, mute} },
			"both":           func(r *records) { r.kubelet, r.pods = silent, mutePods{r.pods, mute} },
		} {
			t.Run(name+", "+who, func(t *testing.T) {
				t.Parallel() // each waits for seconds
				r, ask := question(slow{})
				silence(r)
				begin := time.Now()
				if err := ask(); err == nil {
					t.Error("it was answered, and all is taken")
				}
				// Three lookups with limits of their own would take as many seconds.
				if took := time.Since(begin); took > 5*lookupTimeout/2 {
					t.Errorf("it took %v, want about %v", took, lookupTimeout)
				}
				if !r.turn.TryLock() {
					t.Error("the lock of the node is still held")
				}
			})
		}
	}
}

// mutePods are pods of which the watch knows and the API server says nothing.
type mutePods struct {
	podSource
	api *nodePods
}

func (m mutePods) Fresh(ctx context.Context) ([]*corev1.Pod, error) { return m.api.Fresh(ctx) }

// TestAnswerWithoutAPIServer: a question that the watch and kubelet's list suffice
// for is answered in time, although the API server was asked in vain.
func TestAnswerWithoutAPIServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "1")
		w.update(t.Context(), found(card(0, "a", 16)), nil)
		w.admitted = append(w.admitted, newPod("unknown", 4)) // the watch is late
		s := slow{kubeletLister: w, podSource: w, kubelet: 100 * time.Millisecond, api: never}
		w.records.kubelet, w.records.pods = s, s
		begin := time.Now()
		ids, err := w.Prefer(t.Context(), w.available(), nil, 4)
		if took := time.Since(begin); err != nil || len(ids) != 4 || took > lookupTimeout {
			t.Errorf("%v, %v after %v", ids, err, took)
		}
	})
}
