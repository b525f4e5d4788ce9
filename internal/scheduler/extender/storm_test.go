package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes/fake"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// storm is many pods that fit nowhere.
const storm = 10_000

// counting is a waker that counts.
type counting struct {
	mu    sync.Mutex
	woken map[string]int
	all   int
}

func (c *counting) Wake(_ context.Context, pod accel.PodRef) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.woken[pod.Name]++
	c.all++
	return nil
}

// stormBodies are what kube-scheduler asks about so many pods.
func stormBodies(tb testing.TB, n int, ask func(i int) int64) [][]byte {
	tb.Helper()
	bodies := make([][]byte, n)
	for i := range bodies {
		var err error
		bodies[i], err = json.Marshal(extenderv1.ExtenderArgs{Pod: newPod(fmt.Sprint(i), ask(i)), NodeNames: &[]string{"node-a", "node-b"}})
		if err != nil {
			tb.Fatal(err)
		}
	}
	return bodies
}

// refuse asks about all pods and wants them refused.
func (w *world) refuse(bodies [][]byte) {
	w.tb.Helper()
	handler := w.extender.Handler()
	for i, body := range bodies {
		r := httptest.NewRequestWithContext(w.tb.Context(), http.MethodPost, Prefix+"/filter", bytes.NewReader(body))
		r.RemoteAddr = "127.0.0.1:1"
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, r)
		var result extenderv1.ExtenderFilterResult
		if err := json.Unmarshal(answer.Body.Bytes(), &result); err != nil || answer.Code != http.StatusOK {
			w.tb.Fatalf("pod %d: status %d: %s: %v", i, answer.Code, answer.Body, err)
		}
		if result.Error != "" || len(*result.NodeNames) != 0 {
			w.tb.Fatalf("pod %d is not refused: %s", i, answer.Body)
		}
	}
}

// Ten thousand pods wait, and kube-scheduler asks about some of them again. No
// refusal asks the API server for anything, no event says the same twice, and events
// are as many as their limit lets through; what is remembered is bounded. When there is
// room, pods are woken at a bounded rate, and ever more slowly when none of them can use
// it.
func TestStormOfPodsThatFitNowhere(t *testing.T) {
	wake := &counting{woken: map[string]int{}}
	client := fake.NewClientset()
	recorder := events.NewRecorder(t.Context(), client, events.Extend, "")
	recorder.Anew()
	recorder.Start()
	defer recorder.Shutdown()
	told := 0
	w := newWorld(t, func(c *Config) {
		c.Waker = wake
		c.Tell = func(pod accel.PodRef, kind events.Kind, message string) {
			told++
			recorder.Once(events.OnPod(pod.Namespace, pod.Name, pod.UID), kind, message, message)
		}
	})
	w.holds("x", "node-a", "a0", 16)
	w.holds("y", "node-a", "a1", 16)
	w.holds("z", "node-b", "b0", 8)
	// One of ten asks for more than any device has, which an event says.
	ask := func(i int) int64 {
		if i%10 == 0 {
			return 17
		}
		return 4
	}
	bodies := stormBodies(t, storm, ask)
	for i := range storm {
		w.add(newPod(fmt.Sprint(i), ask(i)))
	}
	began := time.Now()
	w.refuse(bodies)
	w.refuse(bodies[:storm/10])
	took := time.Since(began)

	if w.cluster.gets != 0 || wake.all != 0 {
		t.Errorf("refusals asked the API server %d times and woke %d pods", w.cluster.gets, wake.all)
	}
	if want := (storm + storm/10) / 10; told != want {
		t.Errorf("%d refusals were to be told, want %d, those of pods that wait in vain", told, want)
	}
	// 50 at once and 5 a second, as docs/extender.md has it.
	if n, most := len(client.Actions()), 50+5*(int(took.Seconds())+2); n == 0 || n > most {
		t.Errorf("%d requests for events after %s, want 1 to %d", n, took, most)
	}
	if n := w.extender.waker.waiting.size(); n != storm {
		t.Errorf("%d pods are remembered, want %d", n, storm)
	}
	if n := len(w.extender.waker.waiting.asks); n != 2 {
		t.Errorf("%d different asks are remembered, want 2", n)
	}

	for i := range storm { // the turns that follow are many
		if i >= storm/10 {
			w.extender.waker.waiting.forget(fmt.Sprintf("uid-%d", i))
		}
	}
	// Room for one, which none of them can use: kube-scheduler keeps them off it.
	w.ledger.Forget("z")
	turns := func(d time.Duration) int {
		before := wake.all
		for range d / wakeEvery {
			w.clock = w.clock.Add(wakeEvery)
			at := wake.all
			w.extender.waker.wakeSome(t.Context())
			if n := wake.all - at; n > wakeAtOnce {
				t.Fatalf("%d pods are woken in a turn", n)
			}
			// kube-scheduler asks about them as soon as they are woken.
			for name := range wake.woken {
				if ask := w.extender.waker.waiting.pods["uid-"+name]; ask != nil {
					ask.pods["uid-"+name].asked = w.clock
				}
			}
		}
		return wake.all - before
	}
	if n := turns(wakeAfter); n == 0 || n > 4 {
		t.Errorf("%d pods are woken in the first 2 s for room on one node", n)
	}
	first, later := turns(time.Minute), turns(4*time.Minute)
	if first < wakeInVain/2 || first > 60 || later == 0 || later > 2*first {
		t.Errorf("%d pods were woken in the first minute, %d in the four after it", first, later)
	}
	// Other room is another matter.
	w.ledger.Forget("x")
	w.ledger.Forget("y")
	if n := turns(wakeAfter); n < 4 {
		t.Errorf("%d pods were woken in 2 s when another node has room", n)
	}
	for name, n := range wake.woken {
		if w.extender.waker.waiting.pods["uid-"+name].key != askKey(podOf(newPod("p", 4)).Requests[0]) {
			t.Errorf("pod %s was woken %d times, no device is large enough for it", name, n)
		}
	}
}

// Thousands of pods were deleted while they waited: those that wait now are
// remembered in their place.
func TestPodsThatAreGoneMakeRoom(t *testing.T) {
	wake := &counting{woken: map[string]int{}}
	w := newWorld(t, func(c *Config) { c.Waker = wake })
	w.extender.waker.waiting.limit = 3000
	w.holds("x", "node-a", "a0", 16)
	w.holds("y", "node-a", "a1", 16)
	w.holds("z", "node-b", "b0", 8)
	for i := range 3000 {
		w.extender.waker.waiting.refused(accel.PodRef{UID: fmt.Sprintf("uid-%d", i), Namespace: "team", Name: fmt.Sprint(i)},
			podOf(newPod("p", 4)).Requests[0])
		if i%100 == 0 {
			w.add(newPod(fmt.Sprint(i), 4)) // the others are gone
		}
	}
	w.waits(4, "late")
	if w.extender.waker.waiting.has("uid-late") {
		t.Fatal("more are remembered than the limit")
	}
	w.clock = w.clock.Add(pruneAfter - time.Second)
	w.extender.waker.wakeSome(t.Context())
	if n := w.extender.waker.waiting.size(); n != 3000 {
		t.Errorf("%d are left before the watch can have shown all", n)
	}
	w.clock = w.clock.Add(time.Second)
	for range 100_000 { // it looks at some in each turn, by chance
		if w.extender.waker.waiting.size() == 30 {
			break
		}
		w.extender.waker.wakeSome(t.Context())
	}
	if n := w.extender.waker.waiting.size(); n != 30 {
		t.Fatalf("%d are remembered, 30 are there", n)
	}
	w.waits(4, "late")
	if !w.extender.waker.waiting.has("uid-late") {
		t.Error("the one that waits is not remembered")
	}
}

// What is remembered of pods that all ask for something else is bounded in bytes,
// with room on any number of nodes.
func TestManyAsksTakeLittle(t *testing.T) {
	const asks = 2000
	clock := time.Unix(1000, 0)
	w := newWaiting(maxWaiting, func() time.Time { return clock })
	room := make([]string, 5000)
	for i := range room {
		room[i] = fmt.Sprintf("node-%d", i)
	}
	before := heapInUse()
	for i := range asks {
		request := podOf(newPod(fmt.Sprint(i), int64(i+1))).Requests[0]
		w.refused(accel.PodRef{UID: fmt.Sprint(i), Namespace: "team", Name: fmt.Sprint(i)}, request)
		w.due(w.pods[fmt.Sprint(i)], room, wakeAtOnce)
	}
	each := (heapInUse() - before) / asks
	if each <= 0 || each > 3000 {
		t.Errorf("an ask of one pod takes %d bytes", each)
	}
	runtime.KeepAlive(w)
}

func heapInUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A nodeSet may confuse two nodes, but forgets none.
func TestNodeSet(t *testing.T) {
	var s nodeSet
	confused := 0
	for i := range 1000 {
		if s.has(fmt.Sprint(i)) {
			confused++
		}
		s.add(fmt.Sprint(i))
	}
	for i := range 1000 {
		if !s.has(fmt.Sprint(i)) {
			t.Fatalf("node %d is forgotten", i)
		}
	}
	if confused > 200 {
		t.Errorf("%d of 1000 nodes are taken for others", confused)
	}
}

// BenchmarkRefusal measures the refusal of one of ten thousand pods that wait, on 5000
// full nodes, as the handler answers it: what it costs does not depend on how many wait.
func BenchmarkRefusal(b *testing.B) {
	for _, waiting := range []int{1, storm} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) {
			w := newWorld(b, func(c *Config) { c.Waker = &counting{woken: map[string]int{}} })
			names := make([]string, benchNodes)
			for i := range names {
				names[i] = benchNodeName(i)
				w.ledger.SetNode(names[i], []accel.Inventory{cards(gcuMemory, names[i], 16)})
				w.holds(names[i], names[i], names[i]+"0", 16)
			}
			for i := range waiting {
				w.extender.waker.waiting.refused(accel.PodRef{UID: fmt.Sprintf("uid-%d", i), Namespace: "team", Name: fmt.Sprint(i)},
					podOf(newPod("p", 4)).Requests[0])
			}
			body := mustJSON(b, extenderv1.ExtenderArgs{Pod: newPod("0", 4), NodeNames: &names})
			r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, "/filter", http.NoBody)
			if err != nil {
				b.Fatal(err)
			}
			r.RemoteAddr = "127.0.0.1:1"
			ctx := w.extender.callers.context(r)
			var out []byte
			b.ReportAllocs()
			for b.Loop() {
				if out, err = w.extender.filter(ctx, body, out[:0]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkWakeTurn measures a turn in which ten thousand pods wait for the room
// that there is on one node.
func BenchmarkWakeTurn(b *testing.B) {
	w := newWorld(b, func(c *Config) { c.Waker = &counting{woken: map[string]int{}} })
	for i := range storm {
		w.extender.waker.waiting.refused(accel.PodRef{UID: fmt.Sprintf("uid-%d", i), Namespace: "team", Name: fmt.Sprint(i)},
			podOf(newPod("p", 4)).Requests[0])
		w.cluster.known[fmt.Sprintf("team/%d", i)] = cluster.Pod{Ref: accel.PodRef{UID: fmt.Sprintf("uid-%d", i)}}
	}
	w.clock = w.clock.Add(wakeAfter)
	for b.Loop() {
		w.clock = w.clock.Add(time.Millisecond)
		w.extender.waker.wakeSome(b.Context())
	}
}

func mustJSON(tb testing.TB, v any) []byte {
	tb.Helper()
	body, err := json.Marshal(v)
	if err != nil {
		tb.Fatal(err)
	}
	return body
}
