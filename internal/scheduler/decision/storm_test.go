package decision

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

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

// stormPods are so many.
func stormPods(n int, ask func(i int) int64) []*v1.Pod {
	pods := make([]*v1.Pod, n)
	for i := range pods {
		pods[i] = newPod(fmt.Sprint(i), ask(i))
	}
	return pods
}

// refuse asks about all pods and wants them refused.
func (w *world) refuse(pods []*v1.Pod) {
	w.tb.Helper()
	for _, pod := range pods {
		if fits := w.filter(pod); len(fits) != 0 {
			w.tb.Fatalf("pod %s fits on %v", pod.Name, fits)
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
	pods := stormPods(storm, ask)
	for _, pod := range pods {
		w.add(pod)
	}
	began := time.Now()
	w.refuse(pods)
	w.refuse(pods[:storm/10])
	took := time.Since(began)

	if w.cluster.Gets != 0 || wake.all != 0 {
		t.Errorf("refusals asked the API server %d times and woke %d pods", w.cluster.Gets, wake.all)
	}
	if want := (storm + storm/10) / 10; told != want {
		t.Errorf("%d refusals were to be told, want %d, those of pods that wait in vain", told, want)
	}
	// 50 at once and 5 a second, as docs/extender.md has it.
	if n, most := len(client.Actions()), 50+5*(int(took.Seconds())+2); n == 0 || n > most {
		t.Errorf("%d requests for events after %s, want 1 to %d", n, took, most)
	}
	if n := w.decider.waker.waiting.size(); n != storm {
		t.Errorf("%d pods are remembered, want %d", n, storm)
	}
	if n := len(w.decider.waker.waiting.asks); n != 2 {
		t.Errorf("%d different asks are remembered, want 2", n)
	}

	for i := range storm { // the turns that follow are many
		if i >= storm/10 {
			w.decider.waker.waiting.forget(fmt.Sprintf("uid-%d", i))
		}
	}
	// Room for one, which none of them can use: kube-scheduler keeps them off it.
	w.ledger.Forget("z")
	turns := func(d time.Duration) int {
		before := wake.all
		for range d / wakeEvery {
			w.clock = w.clock.Add(wakeEvery)
			at := wake.all
			w.decider.waker.wakeSome(t.Context())
			if n := wake.all - at; n > wakeAtOnce {
				t.Fatalf("%d pods are woken in a turn", n)
			}
			// kube-scheduler asks about them as soon as they are woken.
			for name := range wake.woken {
				if ask := w.decider.waker.waiting.pods["uid-"+name]; ask != nil {
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
		if w.decider.waker.waiting.pods["uid-"+name].key != podOf(newPod("p", 4)).Requests[0].Key() {
			t.Errorf("pod %s was woken %d times, no device is large enough for it", name, n)
		}
	}
}

// Thousands of pods were deleted while they waited: those that wait now are
// remembered in their place.
func TestPodsThatAreGoneMakeRoom(t *testing.T) {
	wake := &counting{woken: map[string]int{}}
	w := newWorld(t, func(c *Config) { c.Waker = wake })
	w.decider.waker.waiting.limit = 3000
	w.holds("x", "node-a", "a0", 16)
	w.holds("y", "node-a", "a1", 16)
	w.holds("z", "node-b", "b0", 8)
	for i := range 3000 {
		w.decider.waker.waiting.refused(accel.PodRef{UID: fmt.Sprintf("uid-%d", i), Namespace: "team", Name: fmt.Sprint(i)},
			podOf(newPod("p", 4)).Requests[0])
		if i%100 == 0 {
			w.add(newPod(fmt.Sprint(i), 4)) // the others are gone
		}
	}
	w.waits(4, "late")
	if w.decider.waker.waiting.has("uid-late") {
		t.Fatal("more are remembered than the limit")
	}
	w.clock = w.clock.Add(pruneAfter - time.Second)
	w.decider.waker.wakeSome(t.Context())
	if n := w.decider.waker.waiting.size(); n != 3000 {
		t.Errorf("%d are left before the watch can have shown all", n)
	}
	w.clock = w.clock.Add(time.Second)
	for range 100_000 { // it looks at some in each turn, by chance
		if w.decider.waker.waiting.size() == 30 {
			break
		}
		w.decider.waker.wakeSome(t.Context())
	}
	if n := w.decider.waker.waiting.size(); n != 30 {
		t.Fatalf("%d are remembered, 30 are there", n)
	}
	w.waits(4, "late")
	if !w.decider.waker.waiting.has("uid-late") {
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
// full nodes, what it costs does not depend on how many wait.
func BenchmarkRefusal(b *testing.B) {
	for _, waiting := range []int{1, storm} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) {
			w := newWorld(b, func(c *Config) { c.Waker = &counting{woken: map[string]int{}} })
			names := make([]string, 5000)
			for i := range names {
				names[i] = fmt.Sprintf("node-%06d", i)
				w.ledger.SetNode(names[i], []accel.Inventory{cards(gcuMemory, names[i], 16)})
				w.holds(names[i], names[i], names[i]+"0", 16)
			}
			for i := range waiting {
				w.decider.waker.waiting.refused(accel.PodRef{UID: fmt.Sprintf("uid-%d", i), Namespace: "team", Name: fmt.Sprint(i)},
					podOf(newPod("p", 4)).Requests[0])
			}
			q := Question{Pod: newPod("0", 4), Nodes: names, Believed: true}
			var a Answer
			b.ReportAllocs()
			for b.Loop() {
				w.decider.Filter(b.Context(), &q, &a)
			}
		})
	}
}

// BenchmarkWakeTurn measures a turn in which ten thousand pods wait for the room
// that there is on one node.
func BenchmarkWakeTurn(b *testing.B) {
	w := newWorld(b, func(c *Config) { c.Waker = &counting{woken: map[string]int{}} })
	for i := range storm {
		w.decider.waker.waiting.refused(accel.PodRef{UID: fmt.Sprintf("uid-%d", i), Namespace: "team", Name: fmt.Sprint(i)},
			podOf(newPod("p", 4)).Requests[0])
		w.cluster.Known[fmt.Sprintf("team/%d", i)] = cluster.Pod{Ref: accel.PodRef{UID: fmt.Sprintf("uid-%d", i)}}
	}
	w.clock = w.clock.Add(wakeAfter)
	for b.Loop() {
		w.clock = w.clock.Add(time.Millisecond)
		w.decider.waker.wakeSome(b.Context())
	}
}
