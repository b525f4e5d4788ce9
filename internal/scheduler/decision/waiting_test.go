package decision

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// wakers note who was woken, and answer with err.
type wakers struct {
	woken []string
	err   error
}

func (w *wakers) Wake(_ context.Context, pod accel.PodRef) error {
	w.woken = append(w.woken, pod.Name)
	return w.err
}

// turn is one turn of the loop; it returns who was woken in it.
func (w *world) turn(wake *wakers) []string {
	w.tb.Helper()
	wake.woken = nil
	w.decider.waker.wakeSome(w.tb.Context())
	return wake.woken
}

// waits makes pods that ask for so much and are refused everywhere.
func (w *world) waits(ask int64, names ...string) {
	w.tb.Helper()
	for _, name := range names {
		result := w.filter(w.add(newPod(name, ask)))
		if len(result) != 0 {
			w.tb.Fatalf("%s is not refused: %+v", name, result)
		}
	}
}

// holds makes a pod that holds all of a card.
func (w *world) holds(name, node, device string, units accel.Units) {
	w.ledger.Observe(ledger.Holding{
		Pod: accel.PodRef{UID: name, Namespace: "team", Name: name}, Node: node, Resource: gcuMemory, Units: units,
		Device: accel.DeviceID(device),
	})
}

// newFullWorld is a world without room, and who is woken in it.
func newFullWorld(tb testing.TB) (*world, *wakers) {
	tb.Helper()
	wake := &wakers{}
	w := newWorld(tb, func(c *Config) { c.Waker = wake })
	w.holds("x", "node-a", "a0", 16)
	w.holds("y", "node-a", "a1", 16)
	w.holds("z", "node-b", "b0", 8)
	return w, wake
}

func want(t *testing.T, when string, got []string, want ...string) {
	t.Helper()
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("woken %s (-want +got):\n%s", when, diff)
	}
}

// TestRoomWakesPods: a pod that kube-scheduler does not ask about by itself is
// woken when there is room, again and again but ever more seldom, until it fits.
func TestRoomWakesPods(t *testing.T) {
	w, wake := newFullWorld(t)
	w.waits(12, "p")
	w.clock = w.clock.Add(time.Minute)
	want(t, "without room", w.turn(wake))
	w.ledger.Forget("z") // 8 units, too few
	want(t, "with too little room", w.turn(wake))
	w.waits(12, "p")
	w.ledger.Forget("x")
	want(t, "while kube-scheduler may ask by itself", w.turn(wake))
	w.clock = w.clock.Add(wakeAfter)
	want(t, "with room", w.turn(wake), "p")
	var pauses []time.Duration
	for at := w.clock; len(pauses) < 9; {
		w.clock = w.clock.Add(time.Second)
		if len(w.turn(wake)) > 0 {
			pauses, at = append(pauses, w.clock.Sub(at)), w.clock
		}
		if w.clock.Sub(at) > maxWakeBackoff {
			t.Fatalf("after %v it is woken no more", pauses)
		}
		w.decider.waker.waiting.pods["uid-p"].pods["uid-p"].asked = w.clock.Add(-wakeAfter) // kube-scheduler looked, on other nodes
	}
	if diff := cmp.Diff([]time.Duration{4e9, 8e9, 16e9, 32e9, 64e9, 128e9, 256e9, 300e9, 300e9}, pauses); diff != "" {
		t.Errorf("pauses (-want +got):\n%s", diff)
	}
	// Other room is a new reason.
	w.clock = w.clock.Add(10 * time.Second)
	w.holds("z", "node-b", "b0", 8)
	w.ledger.SetNode("node-b", []accel.Inventory{cards(gcuMemory, "b", 8, 16)})
	want(t, "with more room", w.turn(wake), "p")

	result := w.filter(w.add(newPod("p", 12)))
	if len(result) == 0 {
		t.Fatalf("it does not fit: %+v", result)
	}
	w.clock = w.clock.Add(time.Hour)
	want(t, "after it was told where it fits", w.turn(wake))
	if n := w.decider.waker.waiting.size(); n != 0 {
		t.Errorf("%d pods are remembered", n)
	}
}

// TestFreedUnitsWakeWhoMayEvict: kube-scheduler asks who may give way when a pod ends,
// and not again when the books know of it.
func TestFreedUnitsWakeWhoMayEvict(t *testing.T) {
	w, wake := newFullWorld(t)
	w.waits(12, "modest")
	for _, name := range []string{"urgent", "urgent-too"} {
		pod := newPod(name, 12)
		pod.Spec.Priority = ptr.To[int32](1000)
		w.filter(w.add(pod))
		w.clock = w.clock.Add(time.Second)
	}
	w.clock = w.clock.Add(wakeAfter)
	want(t, "before anything came free", w.turn(wake))
	w.ledger.Forget("z") // 8 units, too few for anyone who waits
	want(t, "after units came free", w.turn(wake), "urgent")
	w.clock = w.clock.Add(maxWakeBackoff)
	want(t, "when nothing came free since", w.turn(wake))
	w.ledger.Forget("nobody")
	want(t, "when nobody gave anything back", w.turn(wake))
	w.holds("z", "node-b", "b0", 8)
	w.ledger.Forget("z")
	want(t, "the next time, who was not woken yet", w.turn(wake), "urgent-too")
}

// TestFreedUnitsWakeByPriority: which pods may evict others depends on what these are,
// also where priorities are below zero, as those of an autoscaler's placeholders.
func TestFreedUnitsWakeByPriority(t *testing.T) {
	for name, tt := range map[string]struct {
		waits, holds int32
		want         []string
	}{
		"equal":                        {0, 0, nil},
		"lower":                        {0, 5, nil},
		"no priority and placeholders": {0, -10, []string{"p"}},
		"both below zero":              {-5, -10, []string{"p"}},
		"placeholders for each other":  {-10, -10, nil},
		"higher":                       {7, 5, []string{"p"}},
	} {
		t.Run(name, func(t *testing.T) {
			w, wake := newFullWorld(t)
			for _, card := range []string{"x a0", "y a1"} {
				uid, device, _ := strings.Cut(card, " ")
				w.ledger.Observe(ledger.Holding{
					Pod: accel.PodRef{UID: uid, Namespace: "team", Name: uid}, Node: "node-a", Resource: gcuMemory, Units: 16,
					Device: accel.DeviceID(device), Priority: tt.holds,
				})
			}
			pod := newPod("p", 12)
			pod.Spec.Priority = &tt.waits
			w.filter(w.add(pod))
			w.clock = w.clock.Add(wakeAfter)
			w.ledger.Forget("z")
			want(t, "after units came free", w.turn(wake), tt.want...)
		})
	}
}

// TestNoMoreThanRoom: of pods that wait for the same, not more are woken than
// nodes have room, those first that wait longest; and pods that room is kept for
// are woken by their own name.
func TestNoMoreThanRoom(t *testing.T) {
	w, wake := newFullWorld(t)
	for _, name := range []string{"a", "b", "c"} {
		w.waits(4, name)
		w.clock = w.clock.Add(time.Second)
	}
	w.clock = w.clock.Add(wakeAfter)
	w.ledger.Forget("x")
	want(t, "with one node", w.turn(wake), "a")
	want(t, "at the next turn", w.turn(wake), "b")
	w.ledger.Forget("z")
	want(t, "with another node", w.turn(wake), "a", "b")
	want(t, "at the turn after that", w.turn(wake), "c")
}

// TestOnlyPodsThatWait: nobody is woken who is gone, bound or somebody else.
func TestOnlyPodsThatWait(t *testing.T) {
	set := func(w *world, change func(*cluster.Pod)) {
		pod := w.cluster.Known["team/p"]
		change(&pod)
		w.cluster.Known["team/p"] = pod
	}
	for name, tt := range map[string]struct {
		change func(w *world, wake *wakers)
		want   []string
		left   int
	}{
		"it waits":      {want: []string{"p"}, left: 1},
		"it is gone":    {change: func(w *world, _ *wakers) { delete(w.cluster.Known, "team/p") }},
		"it is bound":   {change: func(w *world, _ *wakers) { set(w, func(p *cluster.Pod) { p.Node = "node-b" }) }},
		"it has ended":  {change: func(w *world, _ *wakers) { set(w, func(p *cluster.Pod) { p.Ended = true }) }},
		"it is another": {change: func(w *world, _ *wakers) { set(w, func(p *cluster.Pod) { p.Ref.UID = "new" }) }},
		"it goes just now": {change: func(_ *world, wake *wakers) { wake.err = fmt.Errorf("patch: %w", cluster.ErrPodGone) },
			want: []string{"p"}},
		"the API server is away": {
			change: func(_ *world, wake *wakers) { wake.err = errors.New("connection refused") }, want: []string{"p"}, left: 1,
		},
		"another replica leads": {change: func(w *world, _ *wakers) { w.notReady = errors.New("another leads") }, left: 1},
		"nobody asked for long": {change: func(w *world, _ *wakers) { w.clock = w.clock.Add(forgetWaiting) }},
	} {
		t.Run(name, func(t *testing.T) {
			w, wake := newFullWorld(t)
			w.waits(8, "p")
			w.clock = w.clock.Add(wakeAfter)
			w.ledger.Forget("z")
			if tt.change != nil {
				tt.change(w, wake)
			}
			want(t, "now", w.turn(wake), tt.want...)
			if n := w.decider.waker.waiting.size(); n != tt.left {
				t.Errorf("%d pods are remembered, want %d", n, tt.left)
			}
		})
	}
}

// TestNobodyElseIsRemembered: whoever may not bind could name pods that are not.
func TestNobodyElseIsRemembered(t *testing.T) {
	w, _ := newFullWorld(t)
	pod := newPod("p", 8)
	requests := podOf(pod).Requests
	w.decider.waker.answered(&Question{Pod: pod}, requests, 0)
	if n := w.decider.waker.waiting.size(); n != 0 {
		t.Errorf("%d pods of an unknown caller are remembered", n)
	}
	w.waits(8, "p")
	w.decider.waker.answered(&Question{Pod: pod}, requests, 1)
	if n := w.decider.waker.waiting.size(); n != 1 {
		t.Errorf("an unknown caller made it forget: %d pods are remembered", n)
	}
}

// TestManyWait: thousands of pods that fit nowhere cost a bounded memory, and a
// turn looks at a bounded number of asks and wakes a bounded number of pods,
// those of high priority first; all of them get their turn.
func TestManyWait(t *testing.T) {
	clock := time.Unix(1000, 0)
	w := newWaiting(1000, func() time.Time { return clock })
	ask := func(i int) accel.Request {
		return accel.Request{
			Resource: gcuMemory, Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: accel.Units(1 + i%40)}},
			Priority: int32(i % 2), Pod: fmt.Sprint(i),
		}
	}
	for i := range 5000 {
		w.refused(accel.PodRef{UID: fmt.Sprint(i), Namespace: "team", Name: fmt.Sprint(i)}, ask(i))
	}
	if w.size() != 1000 || len(w.asks) != 40 {
		t.Fatalf("%d pods of %d asks are remembered, want 1000 of 40", w.size(), len(w.asks))
	}
	clock = clock.Add(wakeAfter)
	var order []int32
	woken := map[string]int{}
	for range 3 { // three turns make a round of 40
		for _, one := range w.some(16) {
			order = append(order, one.request.Priority)
			pods := w.due(one, []string{"a", "b", "c"}, wakeAtOnce)
			if len(pods) != 3 {
				t.Fatalf("%d pods are woken for room on 3 nodes", len(pods))
			}
			for _, pod := range pods {
				woken[pod.UID]++
			}
		}
	}
	if len(order) != 40 || !slices.IsSortedFunc(order, func(a, b int32) int { return int(b - a) }) {
		t.Errorf("a round looks at %d asks, priorities %v", len(order), order)
	}
	if len(woken) != 120 {
		t.Errorf("%d pods were woken, want 120 different ones", len(woken))
	}
	for i := range 5000 {
		w.forget(fmt.Sprint(i))
	}
	if w.size() != 0 || len(w.asks) != 0 {
		t.Errorf("%d pods and %d asks are left", w.size(), len(w.asks))
	}
}

// Pods that wait for different tiers wait apart.
func TestWaitingForTiers(t *testing.T) {
	keys := map[string]bool{}
	for _, tier := range []accel.Tier{accel.TierNone, accel.TierCooperative, accel.TierDriver, accel.TierHardware} {
		keys[accel.Request{Resource: gcuMemory, Selection: &accel.Selection{Isolation: tier}}.Key()] = true
	}
	if len(keys) != 4 {
		t.Errorf("%d kinds of requests for four tiers", len(keys))
	}
}
