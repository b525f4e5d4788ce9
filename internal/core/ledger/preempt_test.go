package ledger

import (
	"cmp"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// placed books pods that run, from "uid:units@device" with what follows: "!" and
// a priority, "~" for one that is ending, "~~" for one that is gone but for its
// containers, "#" and when it was created.
func (w *world) placed(node string, pods ...string) {
	w.t.Helper()
	for _, text := range pods {
		var h Holding
		rest, gone := strings.CutSuffix(text, "~~")
		rest, ending := strings.CutSuffix(rest, "~")
		rest, created, _ := strings.Cut(rest, "#")
		rest, priority, _ := strings.Cut(rest, "!")
		uid, rest, _ := strings.Cut(rest, ":")
		units, device, _ := strings.Cut(rest, "@")
		number := func(s string) (n int64) {
			if s != "" {
				if _, err := fmt.Sscan(s, &n); err != nil {
					w.t.Fatalf("%s: %v", text, err)
				}
			}
			return n
		}
		h = Holding{
			Pod: pod(uid), Node: node, Resource: gcu, Units: accel.Units(number(units)), Device: accel.DeviceID(device),
			Confirmed: device != "", Priority: int32(number(priority)), Ending: ending ||
				gone, Gone: gone, Created: time.Unix(number(created), 0),
		}
		w.Observe(h)
	}
}

// of is what a pod of that name and priority asks.
func of(uid string, priority int32, units accel.Units) accel.Request {
	req := asks(units)
	req.Pod, req.Priority = uid, priority
	return req
}

func several(req accel.Request, devices int) accel.Request {
	req.Devices = devices
	return req
}

// victims asks about one node and prints the answer: the victims in order, and
// "+" and how many of them were not proposed.
func (w *world) victims(req accel.Request, node string, proposed ...string) string {
	w.t.Helper()
	e := w.Evict(req, []Proposal{{Node: node, Victims: proposed}})[0]
	out := strings.Join(e.Victims, " ")
	if e.Others > 0 {
		out += fmt.Sprintf(" +%d", e.Others)
	}
	return out
}

func TestEvict(t *testing.T) {
	const high = 100
	tests := map[string]struct {
		cards    []accel.Share
		pods     []string
		req      accel.Request
		proposed []string
		want     string
	}{
		"the one pod that frees a card, where the sum takes two that free none": {
			cards: cards(16, 16),
			pods:  []string{"big:8@a#1", "kept:4@a!100", "s1:4@b#2", "s2:4@b#3", "s3:4@b#4", "s4:4@b#5"},
			req:   of("p", high, 12), proposed: []string{"s3", "s4"}, want: "big +1",
		},
		"of the proposed ones those of one card": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a", "y:12@b#2", "z:4@b#3"},
			req:   of("p", high, 12), proposed: []string{"y", "x"}, want: "y",
		},
		"nothing frees a card": {
			cards: cards(16, 16),
			pods:  []string{"k1:6@a!100", "s1:8@a", "k2:6@b!200", "s2:8@b"},
			req:   of("p", high, 12), proposed: []string{"s1", "s2"}, want: "",
		},
		"the same priority is none to evict": {
			cards: cards(16),
			pods:  []string{"k:16@a!100"},
			req:   of("p", high, 12), proposed: []string{"k"}, want: "",
		},
		"a proposal with a pod of higher priority is not followed": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a", "k:16@b!101"},
			req:   of("p", high, 12), proposed: []string{"k", "x"}, want: "",
		},
		"a card that is too small or broken is not freed": {
			cards: broken(cards(8, 16, 16), 1),
			pods:  []string{"x:8@a", "y:16@b", "z:16@c!50"},
			req:   of("p", high, 12), proposed: []string{"x"}, want: "z x +1",
		},
		"more than any card has": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a", "y:16@b"},
			req:   of("p", high, 20), proposed: []string{"x", "y"}, want: "",
		},
		"the fewest go, though of a higher priority": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a!50", "y:8@b!1", "z:8@b!2"},
			req:   of("p", high, 16), proposed: []string{"x", "z", "y"}, want: "x",
		},
		"of equally many those of lower priority": {
			cards: cards(16, 16),
			pods:  []string{"x:8@a!3", "v:8@a!3", "y:8@b!1", "z:8@b!2"},
			req:   of("p", high, 16), proposed: []string{"x", "v", "z", "y"}, want: "z y",
		},
		"of equally many on one card those of lower priority, though they free less": {
			cards: cards(16),
			pods:  []string{"x:7@a!3", "y:5@a!1", "z:4@a!2"},
			req:   of("p", high, 9), proposed: []string{"x", "z", "y"}, want: "z y",
		},
		"the fewest of one priority": {
			cards: cards(16, 16),
			pods:  []string{"x:8@a", "y:8@a", "z:12@b", "v:4@b"},
			req:   of("p", high, 12), proposed: []string{"x", "y", "z"}, want: "z",
		},
		"of equally many the smallest that is enough": {
			cards: cards(16),
			pods:  []string{"x:9@a", "y:5@a", "z:2@a"},
			req:   of("p", high, 4), proposed: []string{"x", "y"}, want: "y",
		},
		"of equal ones the youngest": {
			cards: cards(16, 16),
			pods:  []string{"x:8@a#10", "y:8@a#20", "z:16@b!100"},
			req:   of("p", high, 8), proposed: []string{"x", "y"}, want: "y",
		},
		"one that is ending costs nothing": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a!90~", "y:16@b"},
			req:   of("p", high, 12), proposed: []string{"y"}, want: "y",
		},
		"one that is ending is taken of those proposed": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a!90~", "y:16@b"},
			req:   of("p", high, 12), proposed: []string{"x", "y"}, want: "x",
		},
		"one that is gone cannot be evicted, and makes room by itself": {
			cards: cards(16, 16),
			pods:  []string{"x:12@a~~", "y:4@a", "z:16@b"},
			req:   of("p", high, 16), proposed: []string{"z"}, want: "z",
		},
		"one that is gone is no victim beside others": {
			cards: cards(16, 16),
			pods:  []string{"x:12@a~~", "y:4@a", "k:16@b!100"},
			req:   of("p", high, 16), proposed: []string{"cpu"}, want: "y cpu +1",
		},
		"room that comes by itself leaves a proposal as it is": {
			cards: cards(16),
			pods:  []string{"x:12@a~~", "y:4@a"},
			req:   of("p", high, 12), proposed: []string{"y"}, want: "y",
		},
		"a pod that holds none of it is evicted for something else": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a", "y:16@b!20"},
			req:   of("p", high, 12), proposed: []string{"y", "cpu", "x"}, want: "cpu x",
		},
		"the devices are there, so the proposal is for something else": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a"},
			req:   of("p", high, 12), proposed: []string{"x", "cpu"}, want: "x cpu",
		},
		"others stand where their priority says": {
			cards: cards(16, 16),
			pods:  []string{"cpu:1@b!60", "big:12@a!50", "k:4@a!100", "s1:8@b!10", "s2:7@b!100"},
			req:   of("p", high, 12), proposed: []string{"cpu", "s1"}, want: "big +1",
		},
		"a pod of no known device makes no room": {
			cards: cards(16),
			pods:  []string{"k:14@a!100", "x:4@"},
			req:   of("p", high, 4), proposed: []string{"x"}, want: "",
		},
		"the sum over the node has to be enough as well": {
			cards: broken(cards(16, 16), 1),
			pods:  []string{"x:12@a", "y:8@b#2", "z:4@b#1"},
			req:   of("p", high, 8), proposed: []string{"x", "z", "y"}, want: "x y",
		},
		"several cards": {
			cards: cards(16, 16, 16),
			pods:  []string{"x:16@a", "y:16@b!100", "z:16@c"},
			req:   several(of("p", high, 24), 2), proposed: []string{"x", "z"}, want: "x z",
		},
		"several cards, one of them is free": {
			cards: cards(16, 16, 16),
			pods:  []string{"x:16@a", "z:16@c"},
			req:   several(of("p", high, 24), 2), proposed: []string{"x", "z"}, want: "x",
		},
		"several cards that cannot be freed": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a", "y:16@b!100"},
			req:   several(of("p", high, 24), 2), proposed: []string{"x"}, want: "",
		},
		"only a card that the pod takes": {
			cards: cards(16, 16),
			pods:  []string{"x:16@a", "y:16@b!50"},
			req: func() accel.Request {
				r := of("p", high, 12)
				r.Selection = &accel.Selection{UseIDs: []string{"b"}}
				return r
			}(), proposed: []string{"x"}, want: "y +1",
		},
		"none is proposed, as the sum is enough, and no card is": {
			cards: cards(16, 16), pods: []string{"x:8@a!5", "y:8@b!7"}, req: of("p", high, 12), want: "x +1",
		},
		"none is proposed, and two cards are asked for": {
			cards: cards(16, 16, 16), pods: []string{"x:8@a!5", "y:8@b!7"}, req: several(of("p", high, 32), 2), want: "x +1",
		},
		"none is proposed, and a card has room": {
			cards: cards(16, 16), pods: []string{"x:8@a"}, req: of("p", high, 12), want: "",
		},
		"none is proposed, and the containers of a pod are still to end": {
			cards: cards(16, 16), pods: []string{"x:8@a~~", "y:8@b"}, req: of("p", high, 12), want: "",
		},
		"none is proposed, and no pod is of lower priority": {
			cards: cards(16, 16), pods: []string{"x:8@a!100", "y:8@b!200"}, req: of("p", high, 12), want: "",
		},
		"none is proposed, and priorities are below zero": {
			cards: cards(16, 16), pods: []string{"x:8@a!-10", "y:8@b!-20"}, req: of("p", -5, 12), want: "y +1",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			w.node("n1", tc.cards)
			w.placed("n1", tc.pods...)
			if got := w.victims(tc.req, "n1", tc.proposed...); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			w.show("n1")
		})
	}

	t.Run("nodes that are not there, and requests that nobody serves", func(t *testing.T) {
		w := newWorld(t, Options{})
		w.node("n1", cards(16))
		w.placed("n1", "x:16@a")
		w.observe("y", "only a pod", 16, "a")
		for _, tc := range []struct {
			req  accel.Request
			node string
		}{{of("p", 1, 12), "n9"}, {of("p", 1, 12), "only a pod"}, {of("p", 1, 0), "n1"}, {several(of("p", 1, 7), 2), "n1"}} {
			if got := w.victims(tc.req, tc.node, "x"); got != "" {
				t.Errorf("%+v on %s: %q", tc.req, tc.node, got)
			}
		}
	})
	t.Run("a pod that is bound in this moment is no other victim, but may be proposed", func(t *testing.T) {
		w := newWorld(t, Options{})
		w.node("n1", cards(16))
		w.reserve("x", "n1", 16)
		if got := w.victims(of("p", 1, 12), "n1", "cpu"); got != "" {
			t.Errorf("got %q", got)
		}
		if got := w.victims(of("p", 1, 12), "n1", "x"); got != "x" {
			t.Errorf("proposed: got %q", got)
		}
	})
}

// stock are the victims that kube-scheduler proposes for the sum of the units: it
// takes all pods of lower priority away and puts back, the most important first,
// each with which the pod still fits (defaultpreemption, SelectVictimsOnNode).
func stock(slots []place.Slot, need accel.Units, pods []occupant) []int {
	var free accel.Units
	for _, s := range slots {
		if !s.Unhealthy {
			free += s.Total
		}
	}
	order := make([]int, len(pods))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(pods[b].priority, pods[a].priority), pods[a].created.Compare(pods[b].created))
	})
	var out []int
	for _, v := range order {
		var units accel.Units
		for _, p := range pods[v].parts {
			units += p.units
		}
		if free-units >= need {
			free -= units
			continue
		}
		out = append(out, v)
	}
	return out
}

// TestMakeRoomIsTheLeastHarm holds the search against all subsets of the pods, and
// against what kube-scheduler would propose.
func TestMakeRoomIsTheLeastHarm(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 6))
	found, fewer, useless := 0, 0, 0
	for round := range 4000 {
		slots := make([]place.Slot, 1+r.IntN(3))
		for i := range slots {
			slots[i] = place.Slot{ID: accel.DeviceID(rune('a' + i)), Index: i, Total: 16, Free: 16, Unhealthy: r.IntN(8) == 0}
		}
		pods := make([]occupant, r.IntN(9))
		for v := range pods {
			slot := r.IntN(len(slots))
			pods[v] = occupant{
				uid: fmt.Sprint("p", v), priority: int32(r.IntN(3)), created: time.Unix(int64(r.IntN(100)), 0), ending: r.IntN(8) == 0,
				violates: r.IntN(4) == 0, parts: []part{{slot, accel.Units(1 + r.IntN(8))}},
			}
			if len(slots) > 1 && r.IntN(5) == 0 {
				pods[v].parts = append(pods[v].parts, part{(slot + 1) % len(slots), pods[v].parts[0].units})
			}
			for _, p := range pods[v].parts {
				slots[p.slot].Free -= p.units
			}
		}
		ask := place.Ask{Units: accel.Units(4 + r.IntN(12)), Devices: 1 + r.IntN(2)}
		victims, room, ok := makeRoom(slots, &ask, pods)

		best, possible := harm{}, false
		for set := range uint(1) << len(pods) {
			if enough(slots, &ask, pods, set) {
				if h := harmOf(pods, set); !possible || h.compareCoarse(best) < 0 {
					best, possible = h, true
				}
			}
		}
		if ok != possible {
			t.Fatalf("round %d: %+v for %+v on %+v: room %v, but all subsets say %v", round, ask, pods, slots, ok, possible)
		}
		if !ok {
			continue
		}
		found++
		var set uint
		for _, v := range victims {
			set |= 1 << v
		}
		if len(room) != ask.Devices || !enough(slots, &ask, pods, set) {
			t.Fatalf("round %d: %v make no room for %+v among %+v on %+v", round, victims, ask, pods, slots)
		}
		for _, v := range victims {
			if !pods[v].ending && enough(slots, &ask, pods, set&^(1<<v)) && slots2(slots, &ask, pods, set&^(1<<v), room) {
				t.Fatalf("round %d: %d of %v could stay: %+v among %+v on %+v", round, v, victims, ask, pods, slots)
			}
		}
		if got := harmOf(pods, set); got.compareCoarse(best) != 0 {
			t.Fatalf("round %d: harm %+v, the least is %+v: %v for %+v among %+v on %+v", round, got, best, victims, ask, pods, slots)
		}
		if proposed := stock(slots, ask.Units*accel.Units(ask.Devices), pods); len(proposed) > 0 {
			var all uint
			for _, v := range proposed {
				all |= 1 << v
			}
			if !enough(slots, &ask, pods, all) {
				useless++
			}
			if len(victims) < len(proposed) {
				fewer++
			}
		}
	}
	if found < 1000 || useless < 100 || fewer < 30 {
		t.Errorf("too few cases of interest: %d with room, %d where what is proposed frees nothing, %d with fewer victims", found, useless,
			fewer)
	}
}

// compareCoarse leaves out what makeRoom decides ties by.
func (h harm) compareCoarse(o harm) int {
	h.freed, o.freed, h.others, o.others, h.sum, o.sum = 0, 0, 0, 0, 0, 0
	return h.compare(o)
}

func harmOf(pods []occupant, set uint) (h harm) {
	for v := range pods {
		if set&(1<<v) == 0 || pods[v].ending {
			continue
		}
		if h.pods == 0 || pods[v].priority > h.priority {
			h.priority = pods[v].priority
		}
		if h.pods++; pods[v].violates {
			h.violations++
		}
	}
	return h
}

func freeAfter(slots []place.Slot, pods []occupant, set uint) []accel.Units {
	free := make([]accel.Units, len(slots))
	for i := range slots {
		free[i] = slots[i].Free
	}
	for ; set != 0; set &= set - 1 {
		for _, p := range pods[bits.TrailingZeros(set)].parts {
			free[p.slot] += p.units
		}
	}
	return free
}

func enough(slots []place.Slot, ask *place.Ask, pods []occupant, set uint) bool {
	n := 0
	for i, free := range freeAfter(slots, pods, set) {
		if !slots[i].Unhealthy && slots[i].Total >= ask.Units && free >= ask.Units {
			n++
		}
	}
	return n >= ask.Devices
}

// slots2 is enough on the slots that were chosen.
func slots2(slots []place.Slot, ask *place.Ask, pods []occupant, set uint, room []int) bool {
	free := freeAfter(slots, pods, set)
	return !slices.ContainsFunc(room, func(i int) bool { return free[i] < ask.Units })
}

func TestNominated(t *testing.T) {
	check := func(w *world, req accel.Request, node string) accel.ReasonCode {
		out := make([]Verdict, 1)
		w.Check(req, []string{node}, out)
		return out[0].Code
	}
	fits := func(w *world, req accel.Request, want bool) {
		w.t.Helper()
		code := check(w, req, "n1")
		if (code == accel.Fits) != want || !want && code != accel.NoDeviceFits {
			w.t.Errorf("%s of priority %d for %d units: code %d, fits should be %t", req.Pod, req.Priority, req.Peak(), code, want)
		}
		// What Check says, Reserve does.
		_, undo, err := w.Reserve(pod(req.Pod), time.Time{}, "n1", req)
		if (err == nil) != want {
			w.t.Errorf("%s of priority %d for %d units: reserved with %v, fits should be %t", req.Pod, req.Priority, req.Peak(), err, want)
		}
		undo()
	}
	tests := map[string]func(w *world){
		"freed memory is kept for the pod it was freed for": func(w *world) {
			w.node("n1", cards(16))
			w.placed("n1", "x:16@a")
			if got := w.victims(of("p", 100, 12), "n1", "x"); got != "x" {
				w.t.Fatal(got)
			}
			w.Nominate("p", "n1", of("p", 100, 12))
			w.Forget("x")
			fits(w, of("q", 50, 8), false)
			fits(w, of("q", 50, 4), true) // beside it
			fits(w, of("q", 100, 8), false)
			fits(w, of("q", 101, 8), true)
			fits(w, of("p", 100, 12), true)
		},
		"a nomination that is cleared frees it": func(w *world) {
			w.node("n1", cards(16))
			w.Nominate("p", "n1", of("p", 100, 12))
			fits(w, of("q", 50, 8), false)
			w.Nominate("p", "", of("p", 100, 12))
			fits(w, of("q", 50, 8), true)
		},
		"a nomination whose pod is gone frees it": func(w *world) {
			w.node("n1", cards(16))
			w.Nominate("p", "n1", of("p", 100, 12))
			w.Forget("p")
			fits(w, of("q", 50, 8), true)
		},
		"a nomination to another node": func(w *world) {
			w.node("n1", cards(16))
			w.node("n2", cards(16))
			w.Nominate("p", "n1", of("p", 100, 12))
			w.Nominate("p", "n2", of("p", 100, 12))
			fits(w, of("q", 50, 8), true)
			if code := check(w, of("q", 50, 8), "n2"); code != accel.NoDeviceFits {
				w.t.Errorf("code %d on n2", code)
			}
		},
		"a pod that runs is not counted twice": func(w *world) {
			w.node("n1", cards(16))
			w.Nominate("p", "n1", of("p", 100, 8))
			if _, _, err := w.Reserve(pod("p"), time.Time{}, "n1", of("p", 100, 8)); err != nil {
				w.t.Fatal(err)
			}
			fits(w, of("q", 50, 8), true)
			w.observe("p", "n1", 8, "a")
			fits(w, of("q", 50, 8), true)
			w.Forget("p")
			fits(w, of("q", 50, 16), true)
		},
		"it is kept where pods are ending, also when no plan is known": func(w *world) {
			w.node("n1", cards(16, 16))
			w.placed("n1", "x:8@a~", "k:6@a!100", "y:10@b")
			w.Nominate("p", "n1", of("p", 100, 10))
			fits(w, of("q", 50, 2), true)  // on b
			fits(w, of("q", 50, 6), true)  // on b
			w.placed("n1", "z:6@b")        // b is full
			fits(w, of("q", 50, 2), false) // the rest of a
		},
		"where it is not known which, none is kept": func(w *world) {
			w.node("n1", cards(16))
			w.placed("n1", "x:8@a")
			w.Nominate("p", "n1", of("p", 100, 12))
			fits(w, of("q", 50, 8), true)
		},
		"a card that broke is not the one that is kept": func(w *world) {
			w.node("n1", cards(16, 16))
			w.placed("n1", "x:16@a", "y:16@b")
			w.victims(of("p", 100, 12), "n1", "x")
			w.Nominate("p", "n1", of("p", 100, 12))
			w.node("n1", broken(cards(16, 16), 0))
			w.Forget("y")
			fits(w, of("q", 50, 8), false)
		},
		"the plan holds until the nomination is seen, and not for long": func(w *world) {
			w.node("n1", cards(16))
			w.placed("n1", "x:16@a")
			w.victims(of("p", 100, 12), "n1", "x")
			w.Nominate("p", "", of("p", 100, 12)) // older news
			w.Forget("x")
			fits(w, of("q", 50, 8), false)
			w.clock = w.clock.Add(planTTL)
			fits(w, of("q", 50, 8), true)
			if got := w.Counts().Nominations; got != 1 {
				w.t.Errorf("%d nominations before they were looked through", got)
			}
			w.Expire()
			if got := w.Counts().Nominations; got != 0 {
				w.t.Errorf("%d nominations after", got)
			}
		},
		"a node that kube-scheduler did not choose is free at once": func(w *world) {
			w.node("n1", cards(16))
			w.node("n2", cards(16))
			w.placed("n1", "x:16@a")
			w.placed("n2", "y:16@a")
			w.Evict(of("p", 100, 12), []Proposal{{Node: "n1", Victims: []string{"x"}}, {Node: "n2", Victims: []string{"y"}}})
			w.Forget("x")
			fits(w, of("q", 50, 8), false)
			w.Nominate("p", "n2", of("p", 100, 12))
			fits(w, of("q", 50, 8), true)
		},
		"two of one priority do not wait for each other": func(w *world) {
			w.node("n1", cards(16))
			w.Nominate("p", "n1", of("p", 100, 12))
			w.Nominate("q", "n1", of("q", 100, 12))
			fits(w, of("q", 100, 12), false)
			fits(w, of("p", 100, 12), true)
		},
		"two of them keep a card each": func(w *world) {
			w.node("n1", cards(16, 16))
			w.Nominate("p", "n1", of("p", 100, 12))
			w.Nominate("q", "n1", of("q", 90, 12))
			fits(w, of("r", 50, 8), false)
			fits(w, of("r", 95, 8), true)
			fits(w, of("q", 90, 12), true)
		},
		"several cards are kept": func(w *world) {
			w.node("n1", cards(16, 16, 16))
			w.Nominate("p", "n1", several(of("p", 100, 24), 2))
			fits(w, of("q", 50, 16), true)
			w.placed("n1", "x:16@c")
			fits(w, of("q", 50, 8), false)
			fits(w, of("q", 50, 4), true)
		},
		"what is kept for one is not freed for another": func(w *world) {
			w.node("n1", cards(16, 16))
			w.placed("n1", "x:16@a", "y:16@b")
			w.victims(of("p", 100, 12), "n1", "x")
			w.placed("n1", "x:16@a~")
			w.Forget("x")
			if got := w.victims(of("q", 100, 12), "n1", "y"); got != "y" {
				w.t.Errorf("for the second: %q", got)
			}
		},
		"a node that is gone and comes back": func(w *world) {
			w.node("n1", cards(16))
			w.Nominate("p", "n1", of("p", 100, 12))
			w.DeleteNode("n1")
			w.node("n1", cards(16))
			fits(w, of("q", 50, 8), false)
		},
	}
	for name, do := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			do(w)
			for uid := range w.state.nominations.pods {
				w.Forget(uid)
			}
			if diff := gocmp.Diff(newNominations(), w.state.nominations, gocmp.AllowUnexported(nominations{}),
				cmpopts.IgnoreFields(nominations{},
					"seq")); diff != "" {
				t.Errorf("left of the nominations (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMakesRoom(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16))
	w.placed("n1", "x:8@a!50~", "y:8@a!200~")
	for _, tc := range []struct {
		req  accel.Request
		node string
		want bool
	}{
		{of("p", 100, 8), "n1", true},
		{of("p", 100, 12), "n1", false}, // y is no victim
		{of("p", 300, 16), "n1", true},
		{of("p", 40, 8), "n1", false},
		{of("p", 300, 17), "n1", false},
		{of("p", 100, 8), "n9", false},
	} {
		if got := w.MakesRoom(tc.req, tc.node, nil); got != tc.want {
			t.Errorf("priority %d, %d units on %s: %t", tc.req.Priority, tc.req.Peak(), tc.node, got)
		}
	}
	// y has left, and no watch has shown it yet.
	for priority, want := range map[int32]bool{300: true, 100: false} {
		if got := w.MakesRoom(of("p", priority, 16), "n1", func(uid string) bool { return uid == pod("y").UID }); got != want {
			t.Errorf("priority %d beside a pod that has left: %t", priority, got)
		}
	}
}

func TestLowestPriority(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(16))
	w.node("n2", cards(16))
	lowest := func(want int32, some bool) {
		t.Helper()
		if got, ok := w.LowestPriority(gcu); got != want || ok != some {
			t.Errorf("%d, %t; want %d, %t", got, ok, want, some)
		}
	}
	of := func(uid, node string, priority int32) {
		w.Observe(Holding{Pod: pod(uid), Node: node, Resource: gcu, Units: 4, Device: "a", Priority: priority})
	}
	lowest(0, false)
	of("a", "n1", 5)
	of("b", "n2", -10)
	lowest(-10, true)
	of("b", "n1", -10) // moved
	of("a", "n1", -20) // as told again
	lowest(-20, true)
	w.Forget("a")
	lowest(-10, true)
	w.Forget("b")
	lowest(0, false)
	if _, ok := w.LowestPriority("example.com/other"); ok {
		t.Error("a resource that nobody holds")
	}
}
