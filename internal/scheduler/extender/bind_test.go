package extender

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

func TestBindWritesGrantAndAnnotations(t *testing.T) {
	w := newWorld(t)
	pod := w.add(newPod("p", 3, 1))
	if text := w.bind(pod, "node-a"); text != "" {
		t.Fatal(text)
	}
	got := w.cluster.Annotations["team/p"]
	grant, err := w.keys.DecodeGrant("uid-p", got[wire.GrantAnnotation])
	if err != nil {
		t.Fatal(err)
	}
	want := accel.Grant{Resource: gcuMemory, Node: "node-a", Device: "a0", Index: 0, DeviceUnits: 16, Units: 4, At: w.clock}
	if diff := cmp.Diff(want, grant); diff != "" {
		t.Errorf("grant (-want +got):\n%s", diff)
	}
	delete(got, wire.GrantAnnotation)
	if diff := cmp.Diff(map[string]string{
		"enflame.com/gcu-device-id":             "0",
		"enflame.com/gcu-device-memory":         "16",
		"enflame.com/gcu-device-memory-request": "4",
		"enflame.com/gcu-device-assigned":       "false",
		"enflame.com/gcu-device-assign-time":    fmt.Sprint(w.clock.UnixNano()),
	}, got); diff != "" {
		t.Errorf("the guide's annotations (-want +got):\n%s", diff)
	}
}

// The guide's four pods, then one ends.
func TestBindGuideScenario(t *testing.T) {
	w := newWorld(t)
	node := []string{"node-a"}
	for i, amount := range []int64{4, 8, 12} {
		pod := w.add(newPod(fmt.Sprintf("gcushare-pod-%d", i+1), amount))
		if got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &node}); len(*got.NodeNames) != 1 {
			t.Fatalf("filter refused pod %d: %+v", i+1, got)
		}
		if text := w.bind(pod, "node-a"); text != "" {
			t.Fatal(text)
		}
		w.show(pod)
	}
	if got := w.used("node-a"); !slices.Equal(got, []accel.Units{12, 12}) {
		t.Errorf("used %v, want 12 on card 0 (4 and 8) and 12 on card 1", got)
	}
	got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("gcushare-pod-4", 20), NodeNames: &node})
	if diff := cmp.Diff(extenderv1.FailedNodesMap{"node-a": noRoom}, got.FailedAndUnresolvableNodes); diff != "" {
		t.Errorf("pod 4 (-want +got):\n%s", diff)
	}
	w.ledger.Forget("uid-gcushare-pod-3")
	if got := w.used("node-a"); !slices.Equal(got, []accel.Units{12, 0}) {
		t.Errorf("used %v after pod 3 ended, want 12 and 0", got)
	}
}

// Each case is one bind of pod p, which asks for 4 units, to node-a.
func TestBind(t *testing.T) {
	apiDown := errors.New("connection refused")
	tests := map[string]struct {
		// prepare changes the world before the bind.
		prepare func(w *world, pod *v1.Pod)
		err     string // part of the error's text, "" for success
		used    []accel.Units
		gets    int
	}{
		"success": {used: []accel.Units{4, 0}},
		"a failed bind leaves nothing behind": {
			prepare: func(w *world, _ *v1.Pod) {
				w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return apiDown }
			},
			err: "connection refused", used: []accel.Units{0, 0},
		},
		"an unknown outcome keeps the device reserved": {
			prepare: func(w *world, _ *v1.Pod) {
				w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return cluster.ErrOutcomeUnknown }
			},
			err: "is unknown", used: []accel.Units{4, 0},
		},
		"the API server does not answer in time": {
			prepare: func(w *world, _ *v1.Pod) {
				w.cluster.BindError = func(ctx context.Context, _ accel.PodRef, _ string) error {
					<-ctx.Done()
					return ctx.Err()
				}
			},
			err: "deadline exceeded", used: []accel.Units{0, 0},
		},
		"not seen yet": {
			prepare: func(w *world, _ *v1.Pod) { delete(w.cluster.Known, "team/p") },
			used:    []accel.Units{4, 0}, gets: 1,
		},
		"gone": {
			prepare: func(w *world, _ *v1.Pod) {
				clear(w.cluster.Known)
				clear(w.cluster.Actual)
			},
			err: "the pod no longer exists", used: []accel.Units{0, 0}, gets: 1,
		},
		"re-created under its name": {
			prepare: func(w *world, pod *v1.Pod) {
				again := pod.DeepCopy()
				again.UID = "uid-of-the-second"
				w.add(again)
			},
			err: "now has the UID uid-of-the-second", used: []accel.Units{0, 0}, gets: 1,
		},
		"the books still show its predecessor": {
			prepare: func(w *world, pod *v1.Pod) {
				before := pod.DeepCopy()
				before.UID = "uid-of-the-first"
				w.cluster.Known["team/p"] = podOf(before)
			},
			used: []accel.Units{4, 0}, gets: 1,
		},
		"bound there already": {
			prepare: func(w *world, pod *v1.Pod) {
				pod.Spec.NodeName = "node-a"
				w.add(pod)
			},
			used: []accel.Units{0, 0}, // the watch will tell where it is
		},
		"bound elsewhere": {
			prepare: func(w *world, pod *v1.Pod) {
				pod.Spec.NodeName = "node-b"
				w.add(pod)
			},
			err: "is already bound to node-b", used: []accel.Units{0, 0},
		},
		"asks for nothing of ours": {
			prepare: func(w *world, pod *v1.Pod) {
				plain := newPod("p")
				w.cluster.Actual["team/p"] = podOf(plain)
				delete(w.cluster.Known, "team/p")
			},
			used: []accel.Units{0, 0}, gets: 1,
		},
		"no room left since filter": {
			prepare: func(w *world, _ *v1.Pod) {
				for i := range 2 {
					other := w.add(newPod(fmt.Sprintf("other%d", i), 13))
					if text := w.bind(other, "node-a"); text != "" {
						w.tb.Fatal(text)
					}
				}
			},
			err: "at most 3 are free", used: []accel.Units{13, 13},
		},
		"the node left": {
			prepare: func(w *world, _ *v1.Pod) { w.ledger.SetNode("node-a", nil) },
			err:     "publishes no inventory",
		},
		"a reservation on another node that came to nothing": {
			prepare: func(w *world, pod *v1.Pod) {
				w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return cluster.ErrOutcomeUnknown }
				if w.bind(pod, "node-b") == "" {
					w.tb.Fatal("the first bind succeeded")
				}
				w.cluster.BindError = nil
			},
			used: []accel.Units{4, 0}, gets: 1,
		},
		"a bind to another node that got through": {
			prepare: func(w *world, pod *v1.Pod) {
				w.cluster.BindError = func(_ context.Context, ref accel.PodRef, node string) error {
					p := w.cluster.Actual[ref.String()]
					p.Node = node
					w.cluster.Actual[ref.String()] = p
					return cluster.ErrOutcomeUnknown
				}
				if w.bind(pod, "node-b") == "" {
					w.tb.Fatal("the first bind succeeded")
				}
				w.cluster.BindError = nil
			},
			err: "is already bound to node-b", used: []accel.Units{0, 0}, gets: 1,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, func(c *Config) { c.BindTimeout = 100 * time.Millisecond })
			pod := newPod("p", 4)
			w.add(pod)
			if tt.prepare != nil {
				tt.prepare(w, pod)
			}
			w.cluster.Gets = 0
			text := w.bind(pod, "node-a")
			if tt.err == "" && text != "" {
				t.Fatalf("bind: %s", text)
			}
			if tt.err != "" {
				mustContain(t, text, tt.err)
			}
			if tt.used != nil {
				if got := w.used("node-a"); !slices.Equal(got, tt.used) {
					t.Errorf("used %v, want %v", got, tt.used)
				}
			}
			if w.cluster.Gets != tt.gets {
				t.Errorf("asked the API server for the pod %d times, want %d", w.cluster.Gets, tt.gets)
			}
		})
	}
}

func TestBindTwiceIsOnce(t *testing.T) {
	w := newWorld(t)
	pod := w.add(newPod("p", 4))
	w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return cluster.ErrOutcomeUnknown }
	if w.bind(pod, "node-a") == "" {
		t.Fatal("the first bind succeeded")
	}
	w.cluster.BindError = nil
	for range 2 {
		if text := w.bind(pod, "node-a"); text != "" {
			t.Fatal(text)
		}
		w.show(pod)
	}
	if got := w.used("node-a"); !slices.Equal(got, []accel.Units{4, 0}) {
		t.Errorf("used %v, want 4 on card 0", got)
	}
}

// A reservation whose bind never came to anything expires.
func TestReservationExpires(t *testing.T) {
	w := newWorld(t)
	pod := w.add(newPod("p", 4))
	w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return cluster.ErrOutcomeUnknown }
	if w.bind(pod, "node-a") == "" {
		t.Fatal("the bind succeeded")
	}
	w.clock = w.clock.Add(2 * time.Minute)
	if n := w.ledger.Expire(); n != 1 {
		t.Errorf("%d reservations expired, want 1", n)
	}
	if got := w.used("node-a"); !slices.Equal(got, []accel.Units{0, 0}) {
		t.Errorf("used %v, want nothing", got)
	}
}

// Many pods of one size at once, more than fit: each card is filled and none
// beyond its size.
func TestBindManyAtOnce(t *testing.T) {
	w := newWorld(t)
	const pods = 12 // of 3 units; 5 fit on each card of 16
	var group sync.WaitGroup
	failed := make(chan string, pods)
	for i := range pods {
		pod := w.add(newPod(fmt.Sprintf("p%d", i), 3))
		group.Go(func() {
			if text := w.bind(pod, "node-a"); text != "" {
				failed <- text
			}
		})
	}
	group.Wait()
	close(failed)
	n := 0
	for text := range failed {
		mustContain(t, text, accel.ErrNoFit.Error())
		n++
	}
	if got := w.used("node-a"); n != 2 || !slices.Equal(got, []accel.Units{15, 15}) {
		t.Errorf("%d refused, used %v; want 2 refused and 15 on each card", n, got)
	}
}

// kube-scheduler gives up on a bind and sends it again while the first is
// still under way: the second waits and then finds the pod bound.
func TestBindWaitsForTheFirst(t *testing.T) {
	w := newWorld(t)
	pod := w.add(newPod("p", 4))
	entered, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.cluster.BindError = func(context.Context, accel.PodRef, string) error {
		once.Do(func() {
			close(entered)
			<-release
		})
		return nil
	}
	var group sync.WaitGroup
	texts := make([]string, 2)
	group.Go(func() { texts[0] = w.bind(pod, "node-a") })
	<-entered
	group.Go(func() { texts[1] = w.bind(pod, "node-a") })
	close(release)
	group.Wait()
	if texts[0] != "" || texts[1] != "" {
		t.Errorf("binds answered %q", texts)
	}
	if got := w.used("node-a"); !slices.Equal(got, []accel.Units{4, 0}) {
		t.Errorf("used %v, want 4 on card 0", got)
	}
}

func TestBindNeedsKey(t *testing.T) {
	missing := kube.NewKeyring("/nonexistent/key")
	w := newWorld(t, func(c *Config) { c.Signer = missing.Signer })
	mustContain(t, w.bind(w.add(newPod("p", 4)), "node-a"), "no signing key yet")
	if got := w.used("node-a"); !slices.Equal(got, []accel.Units{0, 0}) {
		t.Errorf("used %v, want nothing", got)
	}
}

func TestBindOneSharedResource(t *testing.T) {
	both := []accel.Resource{gcuMemory, otherMem}
	w := newWorld(t, func(c *Config) { c.Resources = both })
	pod := newPod("p", 4)
	pod.Spec.Containers = append(pod.Spec.Containers, newContainer("other", otherMem, 1))
	mustContain(t, w.bind(w.add(pod, both...), "node-a"), "a pod can have only one shared resource")
}
