package ledger

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// randomWorld has a few nodes with pods of several priorities, some ending, gone, nominated or
// reserved.
func randomWorld(t testing.TB, r *rand.Rand) (w *world, nodes, pods []string) {
	t.Helper()
	w = newWorld(t, Options{})
	for n := range 2 + r.IntN(5) {
		name := fmt.Sprint("n", n)
		units := make([]accel.Units, 1+r.IntN(4))
		for i := range units {
			units[i] = accel.Units(4 + 4*r.IntN(3))
		}
		shares := cards(units...)
		if r.IntN(4) == 0 {
			broken(shares, r.IntN(len(shares)))
		}
		w.node(name, shares)
		nodes = append(nodes, name)
		for p := range r.IntN(5) {
			uid := fmt.Sprintf("%s-p%d", name, p)
			kind := []string{"", "", "", "~", "~~"}[r.IntN(5)]
			w.placed(name, fmt.Sprintf("%s:%d@%c!%d%s", uid, 1+r.IntN(4), 'a'+rune(r.IntN(len(units))), r.IntN(3), kind))
			pods = append(pods, uid)
		}
		if r.IntN(3) == 0 {
			w.Nominate("nominated-"+name, name, of("nominated-"+name, int32(r.IntN(3)), accel.Units(1+r.IntN(4))))
		}
		if r.IntN(3) == 0 {
			uid := "reserved-" + name
			if _, _, err := w.Reserve(pod(uid), time.Time{}, name, of(uid, 1, accel.Units(1+r.IntN(3)))); err == nil {
				pods = append(pods, uid)
			}
		}
	}
	return w, append(nodes, "unknown"), pods
}

func randomRequest(r *rand.Rand) accel.Request {
	devices := 1 + r.IntN(2)
	uid := []string{"new", "reserved-n0", "nominated-n1"}[r.IntN(3)]
	return several(of(uid, int32(r.IntN(4)), accel.Units((1+r.IntN(8))*devices)), devices)
}

func TestASurveySaysWhatCheckSays(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 1))
		w, nodes, _ := randomWorld(t, r)
		for range 3 { // what is remembered of one request is used for the next
			req := randomRequest(r)
			want := make([]Verdict, len(nodes))
			w.Check(req, nodes, want)
			s := SurveyOf(w.Ledger, req)
			var fit []int
			for i, name := range nodes {
				if got := s.At(name); got != want[i] {
					t.Fatalf("seed %d: %+v on %s: the survey says %+v, Check %+v", seed, req, name, got, want[i])
				}
				if want[i].Code == accel.Fits {
					fit = append(fit, i)
				}
			}
			slices.SortFunc(fit, func(a, b int) int {
				return cmp.Or(cmp.Compare(want[b].Rating, want[a].Rating), cmp.Compare(nodes[a], nodes[b]))
			})
			var ranked []string
			for _, i := range fit {
				ranked = append(ranked, nodes[i])
			}
			if got := slices.Collect(s.Ranked()); !slices.Equal(got, ranked) || s.Fits() != len(ranked) {
				t.Fatalf("seed %d: ranked %v (%d fit), want %v", seed, got, s.Fits(), ranked)
			}
		}
	}
}

func TestWhatIfIsTheVerdictWithoutThosePods(t *testing.T) {
	var differ int
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 2))
		w, nodes, pods := randomWorld(t, r)
		req := randomRequest(r)
		s := SurveyOf(w.Ledger, req)
		node := nodes[r.IntN(len(nodes)-1)]
		var o Overlay
		for _, uid := range pods {
			h := w.state.pods.on(uid, gcu)
			if h.Node == node && !h.Gone && h.Pod.UID != req.Pod && r.IntN(2) == 0 {
				o.Removed = append(o.Removed, uid)
			}
		}
		got := WhatIf(w.Ledger, s, node, o)
		may := MayEvict(w.Ledger, s, node)
		lower := true
		for _, uid := range o.Removed {
			lower = lower && w.state.pods.on(uid, gcu).Priority < req.Priority
		}
		before := s.At(node)
		for _, uid := range o.Removed {
			w.Forget(uid)
		}
		want := make([]Verdict, 1)
		w.Check(req, []string{node}, want)
		if before.Code.Unresolvable() {
			want[0] = before
		}
		if got != want[0] {
			t.Fatalf("seed %d: %+v on %s without %v: WhatIf says %+v, Check afterwards %+v", seed, req, node, o.Removed, got, want[0])
		}
		if s.At(node) != before {
			t.Fatalf("seed %d: the survey changed", seed)
		}
		if before.Code == accel.NoDeviceFits && got.Code == accel.Fits && lower {
			differ++
			if !may {
				t.Fatalf("seed %d: evicting %v on %s makes room, and MayEvict denies it", seed, o.Removed, node)
			}
		}
	}
	if differ < 20 {
		t.Errorf("only %d of the random cases were evictions that make room", differ)
	}
}

func TestWhatIfDoesNotMixTwoMoments(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n", cards(8))
	w.placed("n", "a:4@a!1", "b:4@a!1")
	s := SurveyOf(w.Ledger, of("new", 2, 4))
	w.Forget("a")
	if v := WhatIf(w.Ledger, s, "n", Overlay{}); v.Code != accel.NoDeviceFits {
		t.Errorf("without an overlay the survey's verdict counts, got %+v", v)
	}
	if v := WhatIf(w.Ledger, s, "n", Overlay{Removed: []string{"b"}}); v.Code != accel.NoDeviceFits {
		t.Errorf("a room that came otherwise must not be taken for that of a victim, got %+v", v)
	}
}

func TestWhatIfPlacesAddedPodsFirst(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n", cards(8))
	s := SurveyOf(w.Ledger, of("new", 0, 4))
	added := func(units accel.Units) Overlay { return Overlay{Added: []accel.Request{of("other", 9, units)}} }
	if v := WhatIf(w.Ledger, s, "n", added(4)); v.Code != accel.Fits {
		t.Errorf("beside a pod of 4 of 8 units 4 fit, got %+v", v)
	}
	if v := WhatIf(w.Ledger, s, "n", added(5)); v.Code != accel.NoDeviceFits {
		t.Errorf("beside a pod of 5 of 8 units 4 do not fit, got %+v", v)
	}
	w.Nominate("other", "n", of("other", 9, 5))
	if s := SurveyOf(w.Ledger, of("new", 0, 4)); !Counted(w.Ledger, s, "other", "n") || Counted(w.Ledger, s, "other", "m") {
		t.Error("a nominated pod is counted on its node, and only there")
	}
}

func TestASurveyOfWhatCannotBeServed(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n", cards(8))
	req := of("new", 0, 4)
	req.Policy = "nonsense"
	s := SurveyOf(w.Ledger, req)
	if v := s.At("n"); v.Code != accel.Unservable || s.Fits() != 0 || MayEvict(w.Ledger, s, "n") {
		t.Errorf("got %+v", v)
	}
	req = of("new", 0, 4)
	req.Resource = "example.com/other"
	if v := SurveyOf(w.Ledger, req).At("n"); v.Code != accel.NodeUnknown {
		t.Errorf("a resource that no node publishes: got %+v", v)
	}
}

func TestAHeldReservationEndsOnlyAfterItsBindBegan(t *testing.T) {
	w := newWorld(t, Options{ReservationTTL: time.Minute})
	w.node("n", cards(8))
	grant, undo, err := Hold(w.Ledger, pod("a"), time.Time{}, "n", asks(8))
	if err != nil || grant.Device != "a" {
		t.Fatal(grant, err)
	}
	since := w.clock
	w.clock = w.clock.Add(time.Hour)
	w.Expire()
	if w.Release("a", 0) || len(w.Unseen(0, 9)) != 0 {
		t.Error("no bind of it began")
	}
	if c := w.Counts(); c.Reservations != 1 || !c.HeldSince.Equal(since) {
		t.Errorf("counts %+v", c)
	}
	if node := Bound(w.Ledger, "a", gcu); node != "" {
		t.Errorf("no bind began, yet the pod is bound to %s", node)
	}
	Begin(w.Ledger, "a", gcu)
	if node := Bound(w.Ledger, "a", gcu); node != "n" {
		t.Errorf("the bind is on its way to n, not to %q", node)
	}
	again, undoAgain, err := Hold(w.Ledger, pod("a"), time.Time{}, "n", asks(8))
	if err != nil || again.Device != grant.Device || !again.At.Equal(grant.At) {
		t.Fatalf("the next attempt gets the same grant, not %+v, %v", again, err)
	}
	undoAgain()
	if c := w.Counts(); c.Reservations != 1 || !c.HeldSince.IsZero() {
		t.Errorf("the first bind may still be under way: %+v", c)
	}
	w.clock = w.clock.Add(time.Minute)
	if w.Expire() != 1 {
		t.Error("a minute after the bind began it ends")
	}
	undo() // nothing to undo
	for range 1000 {
		_, undo, err := Hold(w.Ledger, pod("b"), time.Time{}, "n", asks(8))
		if err != nil {
			t.Fatal(err)
		}
		undo()
	}
	if c := w.Counts(); c.Reservations != 0 {
		t.Errorf("counts %+v", c)
	}
}

// BenchmarkSurvey5000x8 is one survey of 5000 nodes between two of which another pod is bound,
// and the best node of it; of a kind of request that was asked for before, and of a new one.
func BenchmarkSurvey5000x8(b *testing.B) {
	l, names := clusterOf(b, 5000, podsPerNode, place.Binpack)
	for _, kind := range []string{"known", "new"} {
		b.Run(kind, func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				l.Observe(Holding{Pod: pod("x"), Node: names[i%len(names)], Resource: gcu, Units: 1, Device: deviceOf(i%len(names), 0)})
				req := asks(filterNeed)
				if kind == "new" {
					req.Selection = &accel.Selection{AvoidIDs: []string{fmt.Sprint(i)}}
				}
				for range SurveyOf(l, req).Ranked() {
					break
				}
			}
		})
	}
}

// BenchmarkWhatIf is one question of a dry run: a node with one of its pods removed.
func BenchmarkWhatIf(b *testing.B) {
	l, names := clusterOf(b, 100, 8, place.Binpack)
	req := of("new", 1, filterNeed)
	s := SurveyOf(l, req)
	o := Overlay{Removed: []string{l.state.nodes.byResource[gcu].node(names[0]).pods[0].Pod.UID}}
	b.ReportAllocs()
	for b.Loop() {
		WhatIf(l, s, names[0], o)
	}
}
