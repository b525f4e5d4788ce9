package reasons

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/cause"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

const memory = decisiontest.Memory

// world is a cluster whose pods carry what was written on them, as the watch shows it.
type world struct {
	t      *testing.T
	clock  time.Time
	ledger *ledger.Ledger
	nodes  []string
	pods   map[string]*cluster.Pod
	// told are the events, "pod reason", and writes the messages of conditions.
	told, writes []string
	// err is what writes fail with, those of some pods only where refuses has them, and mute
	// whether no event can be made.
	err     error
	refuses map[string]error
	tried   map[string]int
	mute    bool
	leads   bool
	// shown are the pods that a watch which lags shows; nil while it does not lag.
	shown  map[string]cluster.Pod
	teller *Teller
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, clock: time.Unix(1_800_000_000, 0), pods: map[string]*cluster.Pod{}, tried: map[string]int{}, leads: true}
	w.ledger = ledger.New(ledger.Options{Now: func() time.Time { return w.clock }})
	w.restart()
	return w
}

// restart begins with another process.
func (w *world) restart() {
	w.teller = New(Config{
		Hindered: w.hindered, Offering: func() []string { return w.nodes }, Ledger: w.ledger,
		Writer: w, Leading: func() bool { return w.leads }, Now: func() time.Time { return w.clock },
		Tell: func(pod accel.PodRef, kind events.Kind, _ string) bool {
			// As events.Recorder.Once, which remembers for longer than these tests retry.
			if told := pod.Name + " " + kind.Reason; !w.mute && w.tried[pod.Name] == 0 {
				w.told = append(w.told, told)
			}
			return !w.mute
		},
	})
}

func (w *world) hindered() []cluster.Pod {
	var out []cluster.Pod
	for name, pod := range w.pods {
		p := *pod
		if old, lags := w.shown[name]; lags {
			p = old
		}
		if p.Said.Short || p.Said.Reason != "" {
			out = append(out, p)
		}
	}
	return out
}

// lag makes the watch show no more than it shows by now, and catchUp all again.
func (w *world) lag() {
	w.shown = map[string]cluster.Pod{}
	for name, p := range w.pods {
		w.shown[name] = *p
	}
}

func (w *world) catchUp() { w.shown = nil }

func (w *world) Say(_ context.Context, ref accel.PodRef, reason, message string) error {
	w.tried[ref.Name]++
	if err := cmp.Or(w.refuses[ref.Name], w.err); err != nil {
		return err
	}
	w.tried[ref.Name] = 0
	p := w.pods[ref.Name]
	p.Said.Reason, p.Said.At = reason, w.clock
	if reason == "" {
		p.Said.At = time.Time{}
	}
	w.writes = append(w.writes, message)
	return nil
}

func (w *world) node(name string, units ...accel.Units) {
	w.ledger.SetNode(name, []accel.Inventory{decisiontest.Cards(memory, name, units...)})
	w.nodes = append(w.nodes, name)
}

// holds makes a pod on a device.
func (w *world) holds(pod, device string, units accel.Units) {
	w.ledger.Observe(ledger.Holding{Pod: accel.PodRef{UID: pod, Name: pod}, Node: device[:1], Resource: memory, Units: units,
		Device: accel.DeviceID(device)})
}

// waits makes a pod that kube-scheduler finds too little for, on two nodes where it asked the
// extender.
func (w *world) waits(name string, units int64) *cluster.Pod {
	p := decisiontest.PodOf(decisiontest.NewPod(name, units))
	p.Said.Message = cause.MessageOf("0/2 nodes are available: 2 insufficient GCU Memory in one gcu device.", memory)
	w.pods[name] = &p
	return &p
}

// pass lets time pass.
func (w *world) pass(d time.Duration) {
	for range d / passEvery {
		w.clock = w.clock.Add(passEvery)
		w.teller.pass(w.t.Context())
	}
}

func (w *world) want(when, told string) {
	w.t.Helper()
	if got := strings.Join(w.told, ", "); got != told {
		w.t.Errorf("%s: events %q, want %q", when, got, told)
	}
	w.told = nil
}

func TestMain(m *testing.M) {
	// Hundreds of expected errors would hide the unexpected.
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// TestEachReasonOnce: each of the four reasons is said once, by a condition and an event, after
// any number of passes, and not again by another leader; it goes when the pod is placed.
func TestEachReasonOnce(t *testing.T) {
	for name, tt := range map[string]struct {
		make    func(w *world) *cluster.Pod
		event   string
		message string
	}{
		"larger than any device": {func(w *world) *cluster.Pod {
			w.node("a", 16, 16)
			return w.waits("p", 20)
		}, "NeverFits", "20 units of enflame.com/gcu-memory are more than any device has"},
		"scattered": {func(w *world) *cluster.Pod {
			w.node("a", 16, 16)
			w.holds("x", "a0", 10)
			w.holds("y", "a1", 10)
			return w.waits("p", 8)
		}, "NoDeviceFits", "no device has 8 units of enflame.com/gcu-memory free, although the sum of a node's devices is enough"},
		"allocated as another resource": {func(w *world) *cluster.Pod {
			inv := decisiontest.Cards(memory, "a", 16, 16)
			inv.Shares[0].Health = accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + "enflame.com/gcu"}
			w.ledger.SetNode("a", []accel.Inventory{inv})
			w.nodes = []string{"a"}
			w.holds("y", "a1", 10)
			return w.waits("p", 8)
		}, "HeldAsOther", "no device has 8 units of enflame.com/gcu-memory free: devices that have it are allocated as another resource"},
		"a tier that no node states": {func(w *world) *cluster.Pod {
			w.node("a", 16)
			w.node("b", 8)
			p := w.waits("p", 4)
			p.Requests[0].Selection = &accel.Selection{Isolation: accel.TierDriver}
			return p
		}, "IsolationNotStated", "isolation driver required, and no device of enflame.com/gcu-memory states it"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			p := tt.make(w)
			w.pass(settleAfter - passEvery)
			w.want("at once", "")
			w.pass(time.Hour)
			w.want("after an hour", "p "+tt.event)
			if len(w.writes) != 1 || w.writes[0] != tt.message {
				t.Errorf("conditions %q, want %q", w.writes, tt.message)
			}
			w.restart()
			w.pass(time.Hour)
			w.want("by another leader", "")
			p.Node, p.Said.Short = "a", false
			w.pass(passEvery)
			if w.want("placed", ""); p.Said.Reason != "" || len(w.writes) != 2 {
				t.Errorf("the condition is left: %+v", p.Said)
			}
			if n := testutil.CollectAndCount(w.teller); n != 4 {
				t.Errorf("%d metrics", n)
			}
		})
	}
}

// TestSumsSayEnough: nothing is said where kube-scheduler's message has the reason, where the
// pod fits, and of pods that wait for something else.
func TestSumsSayEnough(t *testing.T) {
	for name, change := range map[string]func(w *world, p *cluster.Pod){
		"the sum is too small":               func(w *world, _ *cluster.Pod) { w.holds("z", "a1", 6) },
		"it fits by now":                     func(w *world, _ *cluster.Pod) { w.ledger.Forget("x") },
		"kube-scheduler names no device":     func(_ *world, p *cluster.Pod) { p.Said.Short = false },
		"another replica leads":              func(w *world, _ *cluster.Pod) { w.leads = false },
		"the pod is being deleted":           func(_ *world, p *cluster.Pod) { p.Ending = true },
		"no node offers the resource":        func(w *world, _ *cluster.Pod) { w.ledger.DeleteNode("a") },
		"its annotations cannot be followed": func(_ *world, p *cluster.Pod) { p.Mistake = errors.New("wrong") },
		"a device is unhealthy for other causes": func(w *world, _ *cluster.Pod) {
			inv := decisiontest.Cards(memory, "a", 16, 16)
			inv.Shares[0].Health = accel.Health{Unhealthy: true, Reason: "XID 79"}
			w.ledger.SetNode("a", []accel.Inventory{inv})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.node("a", 16, 16)
			w.holds("x", "a0", 10)
			w.holds("y", "a1", 10)
			change(w, w.waits("p", 8))
			if w.pass(time.Minute); len(w.told)+len(w.writes) > 0 {
				t.Errorf("said %q by %q", w.writes, w.told)
			}
		})
	}
}

// TestWatchLags: what was written is not written again while the watch does not show it, as
// kube-scheduler looks at the pod after each write; what is to go goes once the watch is back.
func TestWatchLags(t *testing.T) {
	w := newWorld(t)
	w.node("a", 8, 8)
	w.holds("x", "a0", 4)
	w.holds("y", "a1", 4)
	pod := w.waits("scattered", 6)
	w.lag()
	w.pass(4 * time.Minute)
	w.want("the watch lags", "scattered NoDeviceFits")
	if len(w.writes) != 1 {
		t.Errorf("the pod was written %d times, want once", len(w.writes))
	}
	pod.Node = "a"
	w.catchUp()
	w.pass(passEvery)
	if len(w.writes) != 2 || pod.Said.Reason != "" {
		t.Errorf("a pod that has a node carries %q after %d writes, want nothing after 2", pod.Said.Reason, len(w.writes))
	}
}

// TestChangesAreSaidSeldom: a reason that comes and goes makes an event every few minutes at
// most, and a moment without room none.
func TestChangesAreSaidSeldom(t *testing.T) {
	w := newWorld(t)
	w.node("a", 16, 16)
	w.waits("p", 8)
	for i := range 600 {
		if i%2 == 0 {
			w.holds("x", "a0", 10)
			w.holds("y", "a1", 10)
		} else {
			w.ledger.Forget("x")
		}
		w.pass(passEvery)
	}
	w.want("a reason of two seconds", "")
	w.holds("x", "a0", 10)
	w.pass(time.Minute)
	w.want("a reason that stays", "p NoDeviceFits")
	for range 60 { // two hours, the reason changes each minute
		w.node("b", 16)
		w.holds("z", "b0", 16)
		w.ledger.Forget("x")
		w.pass(time.Minute)
		w.holds("x", "a0", 10)
		w.pass(time.Minute)
	}
	if most := int(2 * time.Hour / changeAfter); len(w.told) > most {
		t.Errorf("%d events in two hours, at most %d", len(w.told), most)
	}
}

// TestThousandsWait: writes are bounded, all pods get their turn, and an API server that is
// away is asked once in a pass.
func TestThousandsWait(t *testing.T) {
	const pods = 600
	w := newWorld(t)
	w.node("a", 16, 16)
	for i := range pods {
		w.waits(fmt.Sprint("p", i), int64(17+i%40))
	}
	w.pass(settleAfter + passEvery)
	before := len(w.writes)
	w.pass(time.Minute)
	if n, most := len(w.writes)-before, writesAtOnce*int(time.Minute/passEvery); n > most || n < most/2 {
		t.Errorf("%d pods were written in a minute, want some %d", n, most)
	}
	w.err = errors.New("the API server is away")
	failed := testutil.ToFloat64(w.teller.written.WithLabelValues(resultFailed))
	w.pass(passEvery)
	if n := testutil.ToFloat64(w.teller.written.WithLabelValues(resultFailed)) - failed; n != 1 {
		t.Errorf("%v requests failed in a pass", n)
	}
	w.err = nil
	w.pass(pods / writesAtOnce * passEvery)
	if len(w.told) != pods {
		t.Errorf("%d of %d pods were told", len(w.told), pods)
	}
	w.pass(10 * time.Minute)
	if len(w.told) != pods {
		t.Errorf("%d pods were told, of %d", len(w.told), pods)
	}
}

// TestOnePodIsRefused: what the API server says of one pod does not silence the others, and that
// pod is tried again ever more seldom.
func TestOnePodIsRefused(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	for name, err := range map[string]error{
		"forbidden":                  apierrors.NewForbidden(pods, "refused", errors.New("a webhook denied the request")),
		"invalid":                    apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "refused", nil),
		"replaced":                   cluster.ErrPodGone,
		"a webhook fails":            apierrors.NewInternalError(errors.New("failed calling webhook")),
		"a webhook is slow":          context.DeadlineExceeded,
		"too many of a kind of pods": apierrors.NewTooManyRequests("later", 1),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.node("a", 16, 16)
			w.refuses = map[string]error{}
			for i := range 40 {
				refused := fmt.Sprint("refused", i)
				w.refuses[refused] = err
				w.waits(refused, 20).Created = time.Unix(1, 0)
				w.waits(fmt.Sprint("p", i), 20)
			}
			if w.pass(2 * time.Minute); len(w.writes) != 40 {
				t.Errorf("%d of 40 other pods were written after two minutes", len(w.writes))
			}
			for range 60 {
				w.clock = w.clock.Add(time.Minute - passEvery)
				w.pass(passEvery)
			}
			if n := w.tried["refused1"]; n < 3 || n > 7 {
				t.Errorf("a pod that is refused was tried %d times in an hour", n)
			}
			delete(w.refuses, "refused1")
			w.clock = w.clock.Add(retryMax)
			if w.pass(time.Minute); w.pods["refused1"].Said.Reason == "" {
				t.Error("what is not refused any more is not said")
			}
		})
	}
}

// TestAwayForAMoment: an API server that is away for a moment costs no pod its reason.
func TestAwayForAMoment(t *testing.T) {
	w := newWorld(t)
	w.node("a", 16, 16)
	p := w.waits("p", 20)
	w.err = errors.New("connection refused")
	w.pass(settleAfter + 2*passEvery)
	w.err = nil
	if w.pass(retryAfter + passEvery); p.Said.Reason != "LargerThanDevice" {
		t.Errorf("said: %q", p.Said.Reason)
	}
	w.want("once", "p NeverFits")
}

// TestPlacedPodsComeFirst: the conditions of pods that are placed go at once, while more pods
// come to wait than can be written.
func TestPlacedPodsComeFirst(t *testing.T) {
	w := newWorld(t)
	w.node("a", 16, 16)
	var placed []*cluster.Pod
	for i := range 3 * writesAtOnce {
		placed = append(placed, w.waits(fmt.Sprint("placed", i), 20))
	}
	w.pass(time.Minute)
	n := 0
	flood := func(pods int) {
		for range pods {
			n++
			w.waits(fmt.Sprint("p", n), 20)
		}
	}
	flood(300)
	w.pass(settleAfter + 2*passEvery)
	for _, p := range placed {
		p.Said.Message, p.Node = cause.Message{}, "a"
	}
	for range 5 {
		flood(2 * writesAtOnce)
		w.pass(passEvery)
	}
	for _, p := range placed {
		if p.Said.Reason != "" {
			t.Errorf("the condition of a pod that is placed is left: %s, %s", p.Ref.Name, p.Said.Reason)
		}
	}
}

// TestEventsBeforeConditions: while no event can be made, no condition takes its place.
func TestEventsBeforeConditions(t *testing.T) {
	w := newWorld(t)
	w.node("a", 16, 16)
	w.mute = true
	for i := range 30 {
		w.waits(fmt.Sprint("p", i), 20)
	}
	if w.pass(time.Minute); len(w.writes) > 0 {
		t.Errorf("%d conditions without an event", len(w.writes))
	}
	w.mute = false
	if w.pass(time.Minute); len(w.writes) != 30 || len(w.told) != 30 {
		t.Errorf("%d conditions and %d events, want 30", len(w.writes), len(w.told))
	}
}

// TestNodesClosedToThePod: what is said holds on a node that the pod may have, and nothing is
// said where that is not certain.
func TestNodesClosedToThePod(t *testing.T) {
	scattered := func(w *world) {
		w.node("x", 16)
		w.holds("f", "x0", 16)
		w.node("y", 16, 16)
		w.holds("g", "y0", 10)
		w.holds("h", "y1", 10)
	}
	given := func(w *world, name string) {
		inv := decisiontest.Cards(memory, name, 16, 16)
		inv.Shares[0].Health = accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + "enflame.com/gcu"}
		w.ledger.SetNode(name, []accel.Inventory{inv})
		w.nodes = append(w.nodes, name)
		w.holds("on-"+name, name+"1", 10)
	}
	for name, tt := range map[string]struct {
		make    func(w *world)
		message string // after "nodes are available: "
		units   int64
		want    string
	}{
		"the scattered node is closed": {scattered,
			"1 Insufficient enflame.com/gcu-memory, 1 node(s) didn't match Pod's node affinity/selector.", 8, ""},
		"the full node is closed": {scattered,
			"1 insufficient GCU Memory in one gcu device, 1 node(s) didn't match Pod's node affinity/selector.", 8, "NoDeviceFits"},
		"a node without devices is closed": {scattered, "1 Insufficient enflame.com/gcu-memory, 1 insufficient GCU Memory in one gcu " +
			"device, 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }.", 8, "NoDeviceFits"},
		"the open node has smaller devices": {func(w *world) {
			scattered(w)
			w.node("z", 4, 4, 4)
		}, "1 insufficient GCU Memory in one gcu device, 2 node(s) were unschedulable.", 8, ""},
		"larger than the devices of closed nodes too": {scattered,
			"1 Insufficient enflame.com/gcu-memory, 1 node(s) were unschedulable.", 20, "LargerThanDevice"},
		"the node with a device that is held is closed": {func(w *world) {
			given(w, "x")
			w.node("y", 16)
			w.holds("f", "y0", 16)
		}, "1 Insufficient enflame.com/gcu-memory, 1 node(s) were unschedulable.", 8, ""},
		"one of two such nodes is closed": {func(w *world) {
			given(w, "x")
			given(w, "y")
		}, "1 Insufficient enflame.com/gcu-memory, 1 node(s) were unschedulable.", 8, "HeldAsOther"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			tt.make(w)
			p := w.waits("p", tt.units)
			p.Said.Message = cause.MessageOf("0/2 nodes are available: "+tt.message, memory)
			if w.pass(time.Minute); p.Said.Reason != tt.want {
				t.Errorf("said %q, want %q", p.Said.Reason, tt.want)
			}
		})
	}
}

// TestReservedCapacity: pods that request the same wait for the same reason, whichever of them
// capacity is reserved for; that one waits for no device.
func TestReservedCapacity(t *testing.T) {
	w := newWorld(t)
	w.node("a", 16, 16, 16)
	w.holds("x", "a0", 10)
	w.holds("y", "a1", 8)
	w.holds("z", "a2", 10)
	n := w.waits("nominated", 8)
	n.Nominated = "a"
	for _, name := range []string{"p", "q", "r"} {
		w.waits(name, 8)
	}
	w.ledger.Nominate(n.Ref.UID, "a", n.Requests[0])
	if got := cause.Of(w.ledger, n.Requests[0], w.nodes); got != (cause.Shortage{Scattered: 1}) {
		t.Errorf("hidden of the pod that capacity is reserved for: %+v", got)
	}
	for range 10 {
		w.pass(passEvery)
		if got := w.teller.short[askOf(n)]; got != (cause.Shortage{Scattered: 1}) {
			t.Fatalf("hidden: %+v", got)
		}
	}
	slices.Sort(w.told)
	w.want("of the others", "p NoDeviceFits, q NoDeviceFits, r NoDeviceFits")
	// Without the reserved capacity the sum is too small.
	w.holds("v", "a0", 6)
	if w.pass(2 * passEvery); w.teller.short[askOf(n)] != (cause.Shortage{}) {
		t.Errorf("hidden: %+v", w.teller.short[askOf(n)])
	}
}

// BenchmarkLook is a pass in a full cluster of 5000 nodes.
func BenchmarkLook(b *testing.B) {
	l := ledger.New(ledger.Options{})
	var nodes []string
	for i := range 5000 {
		name := fmt.Sprintf("node-%06d", i)
		l.SetNode(name, []accel.Inventory{decisiontest.Cards(memory, name+"-", 48, 48, 48, 48, 48, 48, 48, 48)})
		nodes = append(nodes, name)
		for k := range 16 {
			id := fmt.Sprintf("%s-%d", name, k)
			l.Observe(ledger.Holding{Pod: accel.PodRef{UID: id, Name: id}, Node: name, Resource: memory, Units: 24,
				Device: accel.DeviceID(fmt.Sprintf("%s-%d", name, k/2))})
		}
	}
	for _, asks := range []int{1, asksAtOnce} {
		b.Run(fmt.Sprint(asks), func(b *testing.B) {
			var pods []cluster.Pod
			for i := range asks {
				p := decisiontest.PodOf(decisiontest.NewPod(fmt.Sprint("w", i), int64(1+i)))
				p.Said.Short = true
				pods = append(pods, p)
			}
			t := New(Config{Offering: func() []string { return nodes }, Ledger: l})
			b.ReportAllocs()
			for b.Loop() {
				t.look(pods)
			}
			if len(t.short) != asks {
				b.Fatal(t.short)
			}
		})
	}
}

// TestEveryCodeHasAnEvent that is in the table, and a sentence.
func TestEveryCodeHasAnEvent(t *testing.T) {
	r := accel.Request{Resource: memory, Selection: &accel.Selection{Isolation: accel.TierDriver}}
	for _, code := range cause.Codes() {
		if kinds[code].Reason == "" || cause.Sentence(code, &r) == "" {
			t.Errorf("%s has no event or no sentence", code)
		}
	}
}
