package ledger

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

const gcu accel.Resource = "enflame.com/gcu-memory"

// world is a ledger with a clock that stands still, and short words to change
// it. Pods are named by their UIDs.
type world struct {
	t testing.TB
	*Ledger
	clock time.Time
}

func newWorld(t testing.TB, o Options) *world {
	t.Helper()
	w := &world{t: t, clock: time.Unix(1_700_000_000, 0)}
	o.Now = func() time.Time { return w.clock }
	w.Ledger = New(o)
	return w
}

// cards are the shares of healthy cards a, b, c... of so many units.
func cards(units ...accel.Units) []accel.Share {
	out := make([]accel.Share, len(units))
	for i, u := range units {
		out[i] = accel.Share{Units: u, Device: accel.Device{Index: i, ID: accel.DeviceID(rune('a' + i)), NUMANode: accel.NoNUMA}}
	}
	return out
}

func broken(shares []accel.Share, at ...int) []accel.Share {
	for _, i := range at {
		shares[i].Health = accel.Health{Unhealthy: true, Reason: "broken"}
	}
	return shares
}

func inventory(shares []accel.Share) []accel.Inventory {
	return []accel.Inventory{{Resource: gcu, Unit: "1", Shares: shares}}
}

func (w *world) node(name string, shares []accel.Share) { w.SetNode(name, inventory(shares)) }

func pod(uid string) accel.PodRef { return accel.PodRef{UID: uid, Namespace: "ns", Name: uid} }

func asks(units accel.Units) accel.Request {
	return accel.Request{Resource: gcu, Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: units}}}
}

func (w *world) reserve(uid, node string, units accel.Units) (accel.Grant, func()) {
	w.t.Helper()
	g, undo, err := w.Reserve(pod(uid), time.Time{}, node, asks(units))
	if err != nil {
		w.t.Fatalf("reserve %d units on %s for %s: %v", units, node, uid, err)
	}
	return g, undo
}

func (w *world) observe(uid, node string, units accel.Units, device accel.DeviceID) {
	w.Observe(Holding{Pod: pod(uid), Node: node, Resource: gcu, Units: units, Device: device})
}

func (w *world) confirm(uid, node string, units accel.Units, device accel.DeviceID) {
	w.Observe(Holding{Pod: pod(uid), Node: node, Resource: gcu, Units: units, Device: device, Confirmed: true})
}

// show prints the books of a node: used/total, then per device used/total with
// the pods ("!" behind a confirmed one), then "? " and the unplaced pods.
func (w *world) show(node string) string {
	w.t.Helper()
	w.check()
	u, ok := w.Node(gcu, node)
	if !ok {
		return "unknown"
	}
	var b strings.Builder
	pods := func(ps []PodUsage) {
		for _, p := range ps {
			fmt.Fprintf(&b, " %s:%d", p.Pod.UID, p.Units)
			if p.Confirmed {
				b.WriteByte('!')
			}
		}
	}
	fmt.Fprintf(&b, "%d/%d", u.Used, u.Total)
	for _, d := range u.Devices {
		fmt.Fprintf(&b, " | %s %d/%d", d.ID, d.Used, d.Units)
		pods(d.Pods)
	}
	if len(u.Unplaced) > 0 {
		b.WriteString(" | ?")
		pods(u.Unplaced)
	}
	return b.String()
}

func (w *world) want(node, books string) {
	w.t.Helper()
	if got := w.show(node); got != books {
		w.t.Errorf("books of %s\n got %s\nwant %s", node, got, books)
	}
}

// check recounts all sums that the ledger keeps.
func (w *world) check() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	pending, holdings := 0, 0
	for uid, h := range w.state.pods.byUID {
		for ; h != nil; h = h.next {
			holdings++
			if h.Pod.UID != uid || h.on.node == nil || h.on.node.pods[h.on.pos] != h ||
				h.on.node != w.state.nodes.byResource[h.Resource].node(h.Node) ||
				h.on.slot != h.on.node.find(h.Device) || len(h.on.more) != len(h.More) {
				w.t.Fatalf("holding %+v is not where it says", h.Holding)
			}
			var sum accel.Units
			for i := range h.devices() {
				sum += h.part(i)
				if h.slotOf(i) != h.on.node.find(h.device(i)) || h.part(i) < 0 || h.part(0)-h.part(i) > 1 {
					w.t.Fatalf("holding %+v: device %d is not where it says, or has %d units", h.Holding, i, h.part(i))
				}
			}
			if sum != h.Units {
				w.t.Fatalf("holding %+v: its parts are %d units", h.Holding, sum)
			}
			_, waits := w.state.pods.pending[h]
			if waits == h.observed() || waits && (h.reservation.binds == 0) != h.expects() {
				w.t.Fatalf("holding %+v: pending %t, %+v", h.Holding, waits, h.reservation)
			}
			if waits {
				pending++
			}
		}
	}
	if pending != len(w.state.pods.pending) {
		w.t.Fatalf("%d reservations in the books, %d in the list", pending, len(w.state.pods.pending))
	}
	for res, b := range w.state.nodes.byResource {
		w.checkIndex(res, b)
		for _, n := range b.nodes {
			if n != nil {
				holdings -= len(n.pods)
			}
		}
	}
	if holdings != 0 {
		w.t.Fatalf("%d more holdings of pods than on nodes", holdings)
	}
	charges := 0
	for name, h := range w.state.nodes.hosts.byName {
		var cpu, memory int64
		var count int
		for uid, c := range w.state.nodes.hosts.charges {
			if c.host == h {
				cpu, memory, count = cpu+c.cpu, memory+c.memory, count+1
				if uid == "" || c.cpu == 0 && c.memory == 0 {
					w.t.Fatalf("a charge of nothing for pod %q", uid)
				}
			}
		}
		charges += count
		idle := count == 0 && len(h.nodes) == 0 && h.cpu == place.Unlimited && h.memory == place.Unlimited
		if h.name != name || h.usedCPU != cpu || h.usedMemory != memory || h.charges != count || idle {
			w.t.Fatalf("host %+v, recounted %d charges with %d CPU and %d memory", h, count, cpu, memory)
		}
	}
	if charges != len(w.state.nodes.hosts.charges) {
		w.t.Fatalf("%d charges, %d of them on hosts", len(w.state.nodes.hosts.charges), charges)
	}
}

func (w *world) checkIndex(res accel.Resource, b *index) {
	w.t.Helper()
	if len(b.numbers)+len(b.free) != b.size() || len(b.numbers) == 0 {
		w.t.Fatalf("%s: %d nodes and %d free numbers of %d", res, len(b.numbers), len(b.free), b.size())
	}
	priorities := map[int32]int{}
	for _, n := range b.nodes {
		if n == nil {
			continue
		}
		for _, h := range n.pods {
			priorities[h.Priority]++
		}
	}
	if !maps.Equal(priorities, b.priorities) {
		w.t.Fatalf("%s: pods by priority %v, recounted %v", res, b.priorities, priorities)
	}
	for number, n := range b.nodes {
		if n == nil {
			if b.names[number] != "" {
				w.t.Fatalf("%s: the free number %d has the name %s", res, number, b.names[number])
			}
			continue
		}
		name := n.host.name
		if b.names[number] != name || b.numbers[name] != number || n.number != number || n.index != b ||
			w.state.nodes.hosts.byName[name] != n.host ||
			!slices.Contains(n.host.nodes, n) || !n.known && len(n.pods) == 0 || len(n.slots) != len(n.shares) {
			w.t.Fatalf("%s: node %+v", res, n)
		}
		var used, free accel.Units
		for i, s := range n.slots {
			left := n.shares[i].Units - n.shares[i].Withheld
			for _, h := range n.pods {
				for d := range h.devices() {
					if h.slotOf(d) == i {
						left -= h.part(d)
					}
				}
			}
			if s.Free != left {
				w.t.Fatalf("%s: slot %+v, recounted %d free", name, s, left)
			}
			if !s.Unhealthy {
				free = max(free, left)
			}
		}
		for _, h := range n.pods {
			used += h.Units
		}
		if n.used != used || n.largestFree != free {
			w.t.Fatalf("%s: used %d, largest %d; recounted %d, %d", name, n.used, n.largestFree, used, free)
		}
	}
}

func TestGuide(t *testing.T) {
	// The guide's scenario, section 4.1: two cards of 16.
	w := newWorld(t, Options{})
	w.node("n1", cards(16, 16))
	for i, step := range []struct {
		units accel.Units
		want  string
	}{
		{4, "4/32 | a 4/16 p0:4 | b 0/16"},
		{8, "12/32 | a 12/16 p0:4 p1:8 | b 0/16"},
		{12, "24/32 | a 12/16 p0:4 p1:8 | b 12/16 p2:12"},
	} {
		uid := fmt.Sprint("p", i)
		g, _ := w.reserve(uid, "n1", step.units)
		w.want("n1", step.want)
		w.observe(uid, "n1", step.units, g.Device)
		w.want("n1", step.want)
	}
	_, undo, err := w.Reserve(pod("p3"), time.Time{}, "n1", asks(20))
	want := &accel.NoFitError{Node: "n1", Resource: gcu, Code: accel.LargerThanDevice, Devices: 1, Need: 20, Largest: 4}
	if got := (*accel.NoFitError)(nil); !errors.As(err, &got) || *got != *want {
		t.Errorf("20 units: error %v, want %v", err, want)
	}
	undo() // harmless
	w.Forget("p0")
	w.want("n1", "20/32 | a 8/16 p1:8 | b 12/16 p2:12")
}

func TestScenarios(t *testing.T) {
	tests := map[string]struct {
		do   func(w *world)
		want map[string]string // books by node
	}{
		"a failed bind leaves nothing behind": {
			do: func(w *world) {
				w.node("n1", cards(16))
				_, undo := w.reserve("p", "n1", 4)
				undo()
				undo()
			},
			want: map[string]string{"n1": "0/16 | a 0/16"},
		},
		"undo after the pod was observed does nothing": {
			do: func(w *world) {
				w.node("n1", cards(16))
				g, undo := w.reserve("p", "n1", 4)
				w.observe("p", "n1", 4, g.Device)
				undo()
			},
			want: map[string]string{"n1": "4/16 | a 4/16 p:4"},
		},
		"undo after the pod ended does nothing to its successor": {
			do: func(w *world) {
				w.node("n1", cards(16))
				_, undo := w.reserve("p", "n1", 4)
				w.Forget("p")
				w.reserve("p", "n1", 5)
				undo()
			},
			want: map[string]string{"n1": "5/16 | a 5/16 p:5"},
		},
		"a bind that was repeated is undone when both calls failed": {
			do: func(w *world) {
				w.node("n1", cards(16))
				_, undo1 := w.reserve("p", "n1", 4)
				_, undo2 := w.reserve("p", "n1", 4)
				undo2()
				undo2()
				w.want("n1", "4/16 | a 4/16 p:4") // the first call may succeed yet
				undo1()
			},
			want: map[string]string{"n1": "0/16 | a 0/16"},
		},
		"a pod observed although its reservation was undone": {
			do: func(w *world) {
				w.node("n1", cards(16))
				g, undo := w.reserve("p", "n1", 4)
				undo()
				w.observe("p", "n1", 4, g.Device)
				undo()
			},
			want: map[string]string{"n1": "4/16 | a 4/16 p:4"},
		},
		"a reserved pod observed without a verified grant keeps its device": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.reserve("p", "n1", 4)
				w.observe("p", "n1", 4, "")
			},
			want: map[string]string{"n1": "4/16 | a 4/16 p:4"},
		},
		"a placed pod whose annotation is destroyed keeps its device": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.confirm("p", "n1", 4, "a")
				w.observe("p", "n1", 4, "")
			},
			want: map[string]string{"n1": "4/16 | a 4/16 p:4!"},
		},
		"the node corrects two pods that kubelet served in the other order": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.reserve("p", "n1", 12)
				w.reserve("q", "n1", 12)
				w.observe("p", "n1", 12, "a")
				w.observe("q", "n1", 12, "b")
				w.confirm("p", "n1", 12, "b")
				w.want("n1", "24/32 | a 0/16 | b 12/16 p:12! | ? q:12") // for a moment
				w.confirm("q", "n1", 12, "a")
			},
			want: map[string]string{"n1": "24/32 | a 12/16 q:12! | b 12/16 p:12!"},
		},
		"an old grant that a user writes back moves nothing": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.observe("p", "n1", 12, "a")
				w.confirm("p", "n1", 12, "b")
				w.observe("p", "n1", 12, "a")
			},
			want: map[string]string{"n1": "12/32 | a 0/16 | b 12/16 p:12!"},
		},
		"a grant of another extender wins over the reservation here": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.reserve("p", "n1", 12)
				w.observe("p", "n1", 12, "b")
			},
			want: map[string]string{"n1": "12/32 | a 0/16 | b 12/16 p:12"},
		},
		"a pod seen on another node than reserved": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.node("n2", cards(16))
				_, undo := w.reserve("p", "n1", 4)
				w.observe("p", "n2", 4, "")
				undo()
			},
			want: map[string]string{"n1": "0/16 | a 0/16", "n2": "4/16 | a 0/16 | ? p:4"},
		},
		"a pod with nodeName set by hand, until the node places it": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.observe("p", "n1", 4, "")
				w.want("n1", "4/32 | a 0/16 | b 0/16 | ? p:4")
				w.confirm("p", "n1", 4, "b")
			},
			want: map[string]string{"n1": "4/32 | a 0/16 | b 4/16 p:4!"},
		},
		"observed again and again": {
			do: func(w *world) {
				w.node("n1", cards(16))
				for range 3 {
					w.confirm("p", "n1", 4, "a")
				}
			},
			want: map[string]string{"n1": "4/16 | a 4/16 p:4!"},
		},
		"a pod observed before its node": {
			do: func(w *world) {
				w.observe("p", "n1", 4, "b")
				w.want("n1", "unknown")
				w.node("n1", cards(16, 16))
			},
			want: map[string]string{"n1": "4/32 | a 0/16 | b 4/16 p:4"},
		},
		"a node that leaves and returns": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.confirm("p", "n1", 4, "a")
				w.confirm("q", "n1", 5, "b")
				w.DeleteNode("n1")
				w.want("n1", "unknown")
				w.Forget("q")
				w.confirm("r", "n1", 6, "b")
				w.node("n1", cards(16, 16))
			},
			want: map[string]string{"n1": "10/32 | a 4/16 p:4! | b 6/16 r:6!"},
		},
		"a node that no longer publishes the resource": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.confirm("p", "n1", 4, "a")
				w.SetNode("n1", nil)
			},
			want: map[string]string{"n1": "unknown"},
		},
		"a reservation survives the absence of its node": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.reserve("p", "n1", 4)
				w.DeleteNode("n1")
				w.node("n1", cards(16))
			},
			want: map[string]string{"n1": "4/16 | a 4/16 p:4"},
		},
		"a card is added": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.confirm("p", "n1", 12, "a")
				w.node("n1", cards(16, 32))
				w.reserve("q", "n1", 20)
			},
			want: map[string]string{"n1": "32/48 | a 12/16 p:12! | b 20/32 q:20"},
		},
		"a card is lost under its pod and comes back": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.confirm("p", "n1", 12, "b")
				w.node("n1", cards(16))
				w.want("n1", "12/16 | a 0/16 | ? p:12!")
				w.node("n1", cards(16, 16))
			},
			want: map[string]string{"n1": "12/32 | a 0/16 | b 12/16 p:12!"},
		},
		"cards change places": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.confirm("p", "n1", 12, "b")
				s := cards(16, 16)
				s[0].ID, s[1].ID = "b", "a"
				w.node("n1", s)
			},
			want: map[string]string{"n1": "12/32 | b 12/16 p:12! | a 0/16"},
		},
		"a card shrinks under its pods": {
			do: func(w *world) {
				w.node("n1", cards(16, 8))
				w.confirm("p", "n1", 12, "a")
				w.node("n1", cards(8, 8))
				w.reserve("q", "n1", 1)
			},
			want: map[string]string{"n1": "13/16 | a 12/8 p:12! | b 1/8 q:1"},
		},
		"an unhealthy card keeps its pods and takes no new ones, until it recovers": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.confirm("p", "n1", 4, "a")
				w.node("n1", broken(cards(16, 16), 0))
				w.reserve("q", "n1", 4)
				w.want("n1", "8/32 | a 4/16 p:4! | b 4/16 q:4")
				w.node("n1", cards(16, 16))
				w.reserve("r", "n1", 12)
			},
			want: map[string]string{"n1": "20/32 | a 16/16 p:4! r:12 | b 4/16 q:4"},
		},
		"a repeated bind after the card became unhealthy gets another one": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.reserve("p", "n1", 12)
				w.node("n1", broken(cards(16, 16), 0))
				if g, _ := w.reserve("p", "n1", 12); g.Device != "b" {
					w.t.Errorf("granted %q, want b", g.Device)
				}
			},
			want: map[string]string{"n1": "12/32 | a 0/16 | b 12/16 p:12"},
		},
		"a repeated bind finds no other card: the reservation stays as it was": {
			do: func(w *world) {
				w.node("n1", cards(16, 8))
				w.reserve("p", "n1", 12)
				w.node("n1", broken(cards(16, 8), 0))
				_, _, err := w.Reserve(pod("p"), time.Time{}, "n1", asks(12))
				if !errors.Is(err, accel.ErrNoFit) {
					w.t.Errorf("error %v, want ErrNoFit", err)
				}
			},
			want: map[string]string{"n1": "12/24 | a 12/16 p:12 | b 0/8"},
		},
		"a StatefulSet pod re-created under its name counts beside the old one": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.Observe(Holding{Pod: accel.PodRef{UID: "old", Namespace: "ns", Name: "web-0"}, Node: "n1", Resource: gcu, Units: 12,
					Device: "a", Confirmed: true})
				g, _, err := w.Reserve(accel.PodRef{UID: "new", Namespace: "ns", Name: "web-0"}, time.Time{}, "n1", asks(12))
				if err != nil || g.Device != "b" {
					w.t.Errorf("Reserve = %+v, %v; want device b", g, err)
				}
				w.want("n1", "24/32 | a 12/16 old:12! | b 12/16 new:12")
				w.Forget("old")
			},
			want: map[string]string{"n1": "12/32 | a 0/16 | b 12/16 new:12"},
		},
		"equal pods in flight at once": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				for _, uid := range []string{"p", "q", "r", "s"} {
					w.reserve(uid, "n1", 8)
				}
				if _, _, err := w.Reserve(pod("t"), time.Time{}, "n1", asks(8)); !errors.Is(err, accel.ErrNoFit) {
					w.t.Errorf("a fifth: error %v, want ErrNoFit", err)
				}
			},
			want: map[string]string{"n1": "32/32 | a 16/16 p:8 q:8 | b 16/16 r:8 s:8"},
		},
		"a pod that ends before it was observed": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.reserve("p", "n1", 8)
				w.Forget("p")
				w.Forget("p")
				w.Forget("never seen")
			},
			want: map[string]string{"n1": "0/16 | a 0/16"},
		},
		"a holding of no units is one that ended": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.observe("p", "n1", 4, "a")
				w.observe("p", "n1", 0, "a")
				w.observe("q", "n1", -4, "a")
			},
			want: map[string]string{"n1": "0/16 | a 0/16"},
		},
		"foreign pods beyond the size": {
			do: func(w *world) {
				w.node("n1", cards(16, 16))
				w.confirm("p", "n1", 16, "a")
				w.observe("q", "n1", 8, "a")
				w.reserve("r", "n1", 1)
			},
			want: map[string]string{"n1": "25/32 | a 16/16 p:16! | b 1/16 r:1 | ? q:8"},
		},
		"absurd amounts cannot wrap around": {
			do: func(w *world) {
				w.node("n1", cards(16))
				for i := range 4 {
					w.observe(fmt.Sprint("p", i), "n1", math.MaxInt64, "a")
				}
				if _, _, err := w.Reserve(pod("q"), time.Time{}, "n1", asks(1)); !errors.Is(err, accel.ErrNoFit) {
					w.t.Errorf("error %v, want ErrNoFit", err)
				}
				for i := range 4 {
					w.Forget(fmt.Sprint("p", i))
				}
			},
			want: map[string]string{"n1": "0/16 | a 0/16"},
		},
		"an inventory with mistakes is used as far as it goes": {
			do: func(w *world) {
				s := cards(16, 16, -4, 8)
				s[1].ID, s[3].ID = "a", ""
				w.SetNode("n1", []accel.Inventory{
					{Resource: gcu, Shares: s},
					{Resource: gcu, Shares: cards(99)},
				})
				w.SetNode("", inventory(cards(16)))
				w.reserve("p", "n1", 16)
				if _, _, err := w.Reserve(pod("q"), time.Time{}, "n1", asks(1)); !errors.Is(err, accel.ErrNoFit) {
					w.t.Errorf("error %v, want ErrNoFit", err)
				}
			},
			want: map[string]string{"n1": "16/16 | a 16/16 p:16 | c 0/0", "": "unknown"},
		},
		"holdings that name nothing are ignored": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.Observe(Holding{Node: "n1", Resource: gcu, Units: 1})
				w.Observe(Holding{Pod: pod("p"), Resource: gcu, Units: 1})
				w.Observe(Holding{Pod: pod("p"), Node: "n1", Units: 1})
			},
			want: map[string]string{"n1": "0/16 | a 0/16"},
		},
		"a deleted node is forgotten when its last pod ends": {
			do: func(w *world) {
				w.node("n1", cards(16))
				w.confirm("p", "n1", 4, "a")
				w.DeleteNode("n1")
				w.DeleteNode("n1")
				w.DeleteNode("never seen")
				w.Forget("p")
				if len(w.state.nodes.byResource) != 0 || len(w.state.pods.byUID) != 0 {
					w.t.Errorf("left: %v, %v", w.state.nodes.byResource, w.state.pods.byUID)
				}
			},
			want: map[string]string{"n1": "unknown"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			tc.do(w)
			for node, books := range tc.want {
				w.want(node, books)
			}
			// Nothing changes any more: no reservation expires that became a
			// pod, and a node that publishes the same again is the same.
			for node := range tc.want {
				if u, ok := w.Node(gcu, node); ok {
					w.SetNode(node, publishedAgain(u))
				}
			}
			for node, books := range tc.want {
				w.want(node, books)
			}
		})
	}
}

func publishedAgain(u NodeUsage) []accel.Inventory {
	in := accel.Inventory{Resource: gcu, Unit: u.Unit}
	for _, d := range u.Devices {
		in.Shares = append(in.Shares, d.Share)
	}
	return []accel.Inventory{in}
}

func TestCheck(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("empty", cards(16, 16))
	w.node("used", cards(16, 16))
	w.confirm("p", "used", 12, "a")
	w.confirm("q", "used", 6, "b")
	w.node("large", cards(32))
	w.node("no cards", nil)
	w.node("large one broken", broken(cards(8, 32), 1))
	w.node("all broken", broken(cards(16), 0))
	w.node("shrunk", cards(16))
	w.confirm("r", "shrunk", 12, "a")
	w.node("shrunk", cards(8))
	w.SetNode("other resource", []accel.Inventory{{Resource: "other", Shares: cards(16)}})
	w.observe("s", "only a pod", 4, "a")

	tests := map[string]struct {
		res  accel.Resource
		need accel.Units
		want map[string]Verdict
	}{
		"4 units": {gcu, 4, map[string]Verdict{
			"empty":            {Rating: -12},
			"used":             {Rating: 0},
			"large":            {Rating: -28},
			"no cards":         {Code: accel.LargerThanDevice, Rating: place.NoRating},
			"large one broken": {Rating: -4},
			"all broken":       {Code: accel.NoDeviceFits, Rating: place.NoRating},
			"shrunk":           {Code: accel.NoDeviceFits, Rating: place.NoRating},
			"other resource":   {Code: accel.NodeUnknown, Rating: place.NoRating},
			"only a pod":       {Code: accel.NodeUnknown, Rating: place.NoRating},
			"never seen":       {Code: accel.NodeUnknown, Rating: place.NoRating},
		}},
		"12 units": {gcu, 12, map[string]Verdict{
			"used":             {Code: accel.NoDeviceFits, Rating: place.NoRating},
			"large one broken": {Code: accel.NoDeviceFits, Rating: place.NoRating},
			"shrunk":           {Code: accel.LargerThanDevice, Rating: place.NoRating},
		}},
		"20 units": {gcu, 20, map[string]Verdict{
			"empty":            {Code: accel.LargerThanDevice, Rating: place.NoRating},
			"large":            {Rating: -12},
			"large one broken": {Code: accel.NoDeviceFits, Rating: place.NoRating},
		}},
		"an absurd request": {gcu, math.MaxInt64, map[string]Verdict{
			"large": {Code: accel.LargerThanDevice, Rating: place.NoRating},
		}},
		"nothing": {gcu, 0, map[string]Verdict{
			"empty": {}, "all broken": {}, "never seen": {},
		}},
		"another resource": {"other", 16, map[string]Verdict{
			"other resource": {Rating: 0}, "empty": {Code: accel.NodeUnknown, Rating: place.NoRating},
		}},
		"a resource that nobody has": {"none", 1, map[string]Verdict{"empty": {Code: accel.NodeUnknown, Rating: place.NoRating}}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var nodes []string
			for n := range tc.want {
				nodes = append(nodes, n)
			}
			out := make([]Verdict, len(nodes))
			req := asks(tc.need)
			req.Resource = tc.res
			w.Check(req, nodes, out)
			for i, n := range nodes {
				if out[i] != tc.want[n] {
					t.Errorf("%s: %+v, want %+v", n, out[i], tc.want[n])
				}
			}
		})
	}

	t.Run("slices of different lengths", func(t *testing.T) {
		out := []Verdict{{Rating: -1}, {Rating: -1}}
		w.Check(asks(4), []string{"used"}, out)
		if want := (Verdict{Rating: 0}); out[0] != want || out[1].Rating != -1 {
			t.Errorf("out = %+v", out)
		}
		w.Check(asks(4), []string{"used", "empty"}, out[:1])
		w.Check(asks(4), nil, nil)
	})
	t.Run("more nodes than one turn", func(t *testing.T) {
		nodes := make([]string, 3*checkChunk+1)
		for i := range nodes {
			nodes[i] = []string{"used", "never seen"}[i%2]
		}
		out := make([]Verdict, len(nodes))
		w.Check(asks(4), nodes, out)
		want := []Verdict{{Rating: 0}, {Code: accel.NodeUnknown, Rating: place.NoRating}}
		for i := range out {
			if out[i] != want[i%2] {
				t.Fatalf("node %d: %+v", i, out[i])
			}
		}
	})
	t.Run("spread rates the other way round", func(t *testing.T) {
		w := newWorld(t, Options{Policy: place.Spread})
		w.node("n1", cards(16, 8))
		out := make([]Verdict, 1)
		w.Check(asks(4), []string{"n1"}, out)
		if want := (Verdict{Rating: 12}); out[0] != want {
			t.Errorf("%+v, want %+v", out[0], want)
		}
		if g, _ := w.reserve("p", "n1", 4); g.Device != "a" {
			t.Errorf("granted %q, want a", g.Device)
		}
	})
}

func TestGrant(t *testing.T) {
	w := newWorld(t, Options{})
	s := cards(16, 32)
	s[0].Index, s[1].Index = 3, 5
	w.node("n1", s)
	created := w.clock.Add(-time.Hour)
	g, _, err := w.Reserve(pod("p"), created, "n1", asks(20))
	if err != nil {
		t.Fatal(err)
	}
	want := accel.Grant{Resource: gcu, Node: "n1", Device: "b", Index: 5, DeviceUnits: 32, Units: 20, At: w.clock.UTC()}
	if !reflect.DeepEqual(g, want) {
		t.Errorf("grant %+v, want %+v", g, want)
	}

	again := func(when string) {
		t.Helper()
		w.clock = w.clock.Add(time.Second)
		if g, _, err := w.Reserve(pod("p"), created, "n1", asks(20)); err != nil || !reflect.DeepEqual(g, want) {
			t.Errorf("again, %s: %+v, %v; want %+v", when, g, err, want)
		}
	}
	again("while reserved")
	w.observe("p", "n1", 20, "b")
	again("once observed")
	w.confirm("p", "n1", 20, "b")
	want.Confirmed = true
	again("once confirmed")
	w.want("n1", "20/48 | a 0/16 | b 20/32 p:20!")

	// A pod of before this ledger's time: when it was granted is not known.
	w.Observe(Holding{Pod: pod("q"), Node: "n1", Resource: gcu, Units: 4, Device: "a", Created: created})
	g, _, err = w.Reserve(pod("q"), created, "n1", asks(4))
	if want := (accel.Grant{Resource: gcu, Node: "n1", Device: "a", Index: 3, DeviceUnits: 16, Units: 4, At: created}); err != nil ||
		!reflect.DeepEqual(g, want) {
		t.Errorf("grant %+v, %v; want %+v", g, err, want)
	}
}

func TestGrantTimesAscend(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16))
	var last time.Time
	for i := range 4 {
		g, _ := w.reserve(fmt.Sprint("p", i), "n1", 1)
		if !g.At.After(last) {
			t.Errorf("grant %d is of %v, the one before of %v", i, g.At, last)
		}
		last = g.At
		if i == 1 {
			w.clock = w.clock.Add(-time.Hour) // stepped back
		}
	}
}

func TestReserveRefused(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16))
	w.node("n2", cards(16))
	w.SetNode("other resource", []accel.Inventory{{Resource: "other", Shares: cards(16)}})
	w.reserve("reserved", "n2", 4)
	w.confirm("running", "n2", 4, "a")
	w.observe("unplaced", "n1", 4, "")
	w.observe("early", "late node", 4, "a")
	before := []string{w.show("n1"), w.show("n2")}

	tests := map[string]struct {
		pod  accel.PodRef
		node string
		req  accel.Request
		err  error
		text string
	}{
		"no UID":                          {accel.PodRef{Namespace: "ns", Name: "p"}, "n1", asks(1), nil, "ns/p: it has no UID"},
		"nothing asked":                   {pod("p"), "n1", accel.Request{Resource: gcu}, ErrNothingAsked, "ns/p"},
		"less than nothing asked":         {pod("p"), "n1", asks(-1), ErrNothingAsked, "ns/p"},
		"unknown node":                    {pod("p"), "n9", asks(1), ErrNodeUnknown, "n9"},
		"no such resource on the node":    {pod("p"), "other resource", asks(1), ErrNodeUnknown, string(gcu)},
		"a node that has only pods yet":   {pod("p"), "late node", asks(1), ErrNodeUnknown, "late node"},
		"reserved on another node":        {pod("reserved"), "n1", asks(4), ErrHeldElsewhere, "on node n2"},
		"running on another node":         {pod("running"), "n1", asks(4), ErrHeldElsewhere, "on node n2"},
		"bound here, its card not known":  {pod("unplaced"), "n1", asks(4), ErrHeldElsewhere, "unknown"},
		"bound to a node not known yet":   {pod("early"), "late node", asks(4), ErrHeldElsewhere, "unknown"},
		"more than the node has anywhere": {pod("p"), "n1", asks(17), accel.ErrNoFit, "17 units"},
		"more than anybody has":           {pod("p"), "n1", asks(math.MaxInt64), accel.ErrNoFit, "at most 16"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			g, undo, err := w.Reserve(tc.pod, time.Time{}, tc.node, tc.req)
			if err == nil || tc.err != nil && !errors.Is(err, tc.err) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("Reserve = %+v, %v; want %v that says %q", g, err, tc.err, tc.text)
			}
			undo()
			if after := []string{w.show("n1"), w.show("n2")}; !reflect.DeepEqual(after, before) {
				t.Errorf("the books changed: %q, before %q", after, before)
			}
		})
	}
}

func TestExpire(t *testing.T) {
	w := newWorld(t, Options{ReservationTTL: 10 * time.Second})
	w.node("n1", cards(16, 16))
	expire := func(want int, books string) {
		t.Helper()
		if got := w.Expire(); got != want {
			t.Errorf("Expire = %d, want %d", got, want)
		}
		w.want("n1", books)
	}
	_, undo := w.reserve("p", "n1", 4)
	w.reserve("q", "n1", 5)
	w.reserve("r", "n1", 6)
	w.observe("q", "n1", 5, "a")
	expire(0, "15/32 | a 15/16 p:4 q:5 r:6 | b 0/16")
	w.clock = w.clock.Add(9 * time.Second)
	w.reserve("r", "n1", 6) // asked for again: waits 10 s from here
	expire(0, "15/32 | a 15/16 p:4 q:5 r:6 | b 0/16")
	w.clock = w.clock.Add(time.Second)
	expire(1, "11/32 | a 11/16 q:5 r:6 | b 0/16")
	undo()
	w.observe("p", "n1", 4, "a") // its watch event was late, and nothing is lost
	expire(0, "15/32 | a 15/16 p:4 q:5 r:6 | b 0/16")
	w.clock = w.clock.Add(9 * time.Second)
	expire(1, "9/32 | a 9/16 p:4 q:5 | b 0/16")
	w.clock = w.clock.Add(24 * time.Hour)
	expire(0, "9/32 | a 9/16 p:4 q:5 | b 0/16")
}

func TestSeveralResources(t *testing.T) {
	const chips accel.Resource = "example.com/chips"
	w := newWorld(t, Options{})
	both := []accel.Inventory{
		{Resource: gcu, Unit: "1", Shares: cards(16)},
		{Resource: chips, Shares: cards(2, 2)},
	}
	w.SetNode("n1", both)
	ask := asks(2)
	ask.Resource = chips
	w.reserve("p", "n1", 8)
	_, undoChips, err := w.Reserve(pod("p"), time.Time{}, "n1", ask)
	if err != nil {
		t.Fatal(err)
	}
	chipsOf := func() accel.Units {
		t.Helper()
		w.check()
		u, ok := w.Node(chips, "n1")
		if !ok {
			t.Fatal("the node has no chips")
		}
		return u.Used
	}
	if got := chipsOf(); got != 2 {
		t.Errorf("%d chips used, want 2", got)
	}
	undoChips()
	if got := chipsOf(); got != 0 {
		t.Errorf("%d chips used after undo, want 0", got)
	}
	w.want("n1", "8/16 | a 8/16 p:8") // undo is of one resource

	w.Observe(Holding{Pod: pod("p"), Node: "n1", Resource: chips, Units: 1, Device: "b", Confirmed: true})
	w.observe("p", "n1", 8, "a")
	w.SetNode("n1", both[:1]) // no chips any more
	if _, ok := w.Node(chips, "n1"); ok {
		t.Error("the node still has chips")
	}
	w.want("n1", "8/16 | a 8/16 p:8")
	w.SetNode("n1", both)
	if got := chipsOf(); got != 1 {
		t.Errorf("%d chips used after the resource returned, want 1", got)
	}
	w.Forget("p")
	if got := chipsOf(); got != 0 {
		t.Errorf("%d chips used after the pod ended, want 0", got)
	}
	w.want("n1", "0/16 | a 0/16")
}

func TestNodes(t *testing.T) {
	w := newWorld(t, Options{})
	for _, name := range []string{"n2", "n10", "n1"} {
		w.node(name, broken(cards(16, 8), 1))
	}
	w.observe("early", "n0", 4, "a")
	at := func(minutes int) time.Time { return w.clock.Add(time.Duration(minutes) * time.Minute) }
	for _, h := range []Holding{
		{Pod: accel.PodRef{UID: "3", Namespace: "b", Name: "x"}, Units: 1, Device: "a", Created: at(1)},
		{Pod: accel.PodRef{UID: "2", Namespace: "a", Name: "y"}, Units: 2, Device: "a", Created: at(1), Confirmed: true},
		{Pod: accel.PodRef{UID: "1", Namespace: "z", Name: "z"}, Units: 3, Device: "a", Created: at(0)},
		{Pod: accel.PodRef{UID: "4", Namespace: "a", Name: "y"}, Units: 4, Device: "lost", Created: at(2)},
	} {
		h.Node, h.Resource = "n1", gcu
		w.Observe(h)
	}
	pod := func(uid, ns, name string, units accel.Units, minutes int, device accel.DeviceID, confirmed bool) PodUsage {
		return PodUsage{
			Pod: accel.PodRef{UID: uid, Namespace: ns, Name: name}, Units: units, Created: at(minutes),
			Confirmed: confirmed, Device: device,
		}
	}
	s := broken(cards(16, 8), 1)
	empty := func(name string) NodeUsage {
		return NodeUsage{Name: name, Unit: "1", Total: 24, Devices: []DeviceUsage{{Share: s[0]}, {Share: s[1]}}}
	}
	n1 := empty("n1")
	n1.Used = 10
	n1.Devices[0].Used = 6
	n1.Devices[0].Pods = []PodUsage{
		pod("1", "z", "z", 3, 0, "a", false),
		pod("2", "a", "y", 2, 1, "a", true),
		pod("3", "b", "x", 1, 1, "a", false),
	}
	n1.Unplaced = []PodUsage{pod("4", "a", "y", 4, 2, "lost", false)}
	want := []NodeUsage{n1, empty("n10"), empty("n2")}
	got := slices.Collect(w.Nodes(gcu))
	if !reflect.DeepEqual(got, want) {
		t.Errorf("Nodes\n got %+v\nwant %+v", got, want)
	}
	if one, ok := w.Node(gcu, "n1"); !ok || !reflect.DeepEqual(one, n1) {
		t.Errorf("Node(n1) = %+v, %t; want %+v", one, ok, n1)
	}
	// A snapshot is the reader's own.
	got[0].Devices[0].Pods[0].Units = 99
	got[0].Devices[0].Share.Units = 99
	if again := slices.Collect(w.Nodes(gcu)); !reflect.DeepEqual(again, want) {
		t.Errorf("a change to a snapshot shows in the next: %+v", again)
	}
	if got := slices.Collect(w.Nodes("none")); len(got) != 0 {
		t.Errorf("Nodes of an unknown resource = %+v", got)
	}
}

// TestDisplaced: kubelet gives no unit twice, so of more pods than a device has units
// for those lose their place that have none of it: first those that are gone, then those
// that kubelet gave nothing yet, the youngest first.
func TestHolds(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16, 16, 16))
	w.node("n2", cards(16))
	w.observe("planned", "n1", 4, "a")
	w.confirm("held", "n1", 4, "b")
	w.observe("unplaced", "n1", 4, "")
	w.confirm("lost", "n1", 4, "z")
	reserved, _ := w.reserve("reserved", "n1", 4)
	several := Holding{Pod: pod("several"), Node: "n1", Resource: gcu, Units: 4, Confirmed: true}
	several.SetDevices([]accel.DeviceID{"a", "c"})
	w.Observe(several)
	w.Observe(Holding{Pod: pod("gone"), Node: "n1", Resource: gcu, Units: 4, Device: "a", Ending: true, Gone: true})
	for name, tt := range map[string]struct {
		pod, node string
		resource  accel.Resource
		device    accel.DeviceID
		want      bool
	}{
		"planned":                              {"planned", "n1", gcu, "a", true},
		"confirmed":                            {"held", "n1", gcu, "b", true},
		"on a device that the node lost":       {"lost", "n1", gcu, "z", true},
		"the first of several devices":         {"several", "n1", gcu, "a", true},
		"the second of several devices":        {"several", "n1", gcu, "c", true},
		"another device":                       {"several", "n1", gcu, "b", false},
		"another node":                         {"planned", "n2", gcu, "a", false},
		"another resource":                     {"planned", "n1", "a.example/other", "a", false},
		"an unknown pod":                       {"none", "n1", gcu, "a", false},
		"on no known device":                   {"unplaced", "n1", gcu, "", false},
		"reserved, and not seen bound yet":     {"reserved", "n1", gcu, reserved.Device, false},
		"gone, with containers that still run": {"gone", "n1", gcu, "a", false},
	} {
		if got := Holds(w.Ledger, tt.pod, tt.node, tt.resource, tt.device); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestDisplaced(t *testing.T) {
	confirmed := func(h *Holding) { h.Confirmed = true }
	gone := func(h *Holding) { h.Confirmed, h.Gone, h.Ending = true, true, true }
	type pods []func(*Holding)
	for name, tt := range map[string]struct {
		pods pods // of 4 units each, on a device of 8, the oldest first
		want string
	}{
		"all fit":               {pods{nil, gone}, "8/8 | a 8/8 1:4 2:4!"},
		"the youngest":          {pods{nil, nil, nil}, "12/8 | a 8/8 1:4 2:4 | ? 3:4"},
		"none that has units":   {pods{confirmed, nil, confirmed}, "12/8 | a 8/8 1:4! 3:4! | ? 2:4"},
		"those gone first":      {pods{gone, nil, confirmed}, "12/8 | a 8/8 2:4 3:4! | ? 1:4!"},
		"as many as there are":  {pods{gone, nil, confirmed, confirmed}, "16/8 | a 8/8 3:4! 4:4! | ? 1:4! 2:4"},
		"a fault is not hidden": {pods{confirmed, confirmed, confirmed}, "12/8 | a 12/8 1:4! 2:4! 3:4!"},
	} {
		w := newWorld(t, Options{})
		w.node("n1", cards(8))
		for i, change := range tt.pods {
			h := Holding{Pod: pod(strconv.Itoa(i + 1)), Node: "n1", Resource: gcu, Units: 4,
				Device: "a", Created: w.clock.Add(time.Duration(i) * time.Second)}
			if change != nil {
				change(&h)
			}
			w.Observe(h)
		}
		if got := w.show("n1"); got != tt.want {
			t.Errorf("%s: got %s, want %s", name, got, tt.want)
		}
	}
}

// TestInventoryIsCopied: a caller that reuses its slice does no harm.
func TestInventoryIsCopied(t *testing.T) {
	w := newWorld(t, Options{})
	s := cards(16)
	w.node("n1", s)
	s[0].Units = 4
	w.want("n1", "0/16 | a 0/16")
	w.node("n1", s)
	w.want("n1", "0/4 | a 0/4")
}

func TestDefaults(t *testing.T) {
	l := New(Options{ReservationTTL: -1})
	if l.rules.ttl != DefaultReservationTTL || l.rules.policies[""] != place.Binpack {
		t.Errorf("ttl %v, policy %v", l.rules.ttl, l.rules.policies[""].Name())
	}
	before := time.Now()
	l.SetNode("n1", inventory(cards(16)))
	g, _, err := l.Reserve(pod("p"), before, "n1", asks(1))
	if err != nil || g.At.Before(before.Round(0)) || g.At.After(time.Now()) {
		t.Errorf("Reserve = %+v, %v", g, err)
	}
	if n := l.Expire(); n != 0 {
		t.Errorf("Expire = %d right after the reservation", n)
	}
}
