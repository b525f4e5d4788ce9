package ledger

import (
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// asked is a pod of 8 units that kube-scheduler asks about, at version 10 and with no
// attempt that failed.
func asked(uid string) Expected {
	return Expected{Pod: pod(uid), Request: asks(8), Attempt: Attempt{Version: 10}}
}

// seen is what the watch shows of it.
var seen = Attempt{Version: 10}

func (w *world) expect(e Expected, node string) {
	w.t.Helper()
	if !w.Expect(e, node) {
		w.t.Fatalf("pod %s does not fit on %s", e.Pod, node)
	}
	w.Unbound(e.Pod.UID, node, seen)
}

// fits checks for which pods the node has 8 units on a card.
func (w *world) fits(want bool, pods ...string) {
	w.t.Helper()
	for _, uid := range pods {
		req := asks(8)
		req.Pod = uid
		out := make([]Verdict, 1)
		if w.Check(req, []string{"n1"}, out); (out[0].Code == accel.Fits) != want {
			w.t.Errorf("pod %s fits: %t", uid, !want)
		}
	}
}

// What filter promised a pod is reserved for it until its bind, for as long as that
// takes, and not for longer than kube-scheduler tries.
func TestExpect(t *testing.T) {
	const delay = 10 * time.Minute
	tests := map[string]func(w *world){
		"it waits for a bind that takes long": func(w *world) {
			w.clock = w.clock.Add(delay - time.Second)
			w.Expire()
			w.fits(false, "second")
			w.fits(true, "first")
			if _, _, err := w.Reserve(pod("second"), time.Time{}, "n1", asks(8)); err == nil {
				w.t.Error("another pod got it")
			}
			g, undo := w.reserve("first", "n1", 8)
			if !g.At.Equal(w.clock.UTC()) || g.Device != "a" {
				w.t.Errorf("the grant is %+v", g)
			}
			if w.Counts().Expected != 0 || w.Counts().Reservations != 1 {
				w.t.Errorf("%d binds are expected, and %d under way", w.Counts().Expected, w.Counts().Reservations)
			}
			undo()
			w.fits(true, "second")
		},
		"it ends at last": func(w *world) {
			w.clock = w.clock.Add(delay)
			if n := w.Expire(); n != 1 || w.Counts().Expected != 0 {
				w.t.Errorf("%d ended, %d are left", n, w.Counts().Expected)
			}
			w.fits(true, "second")
		},
		"asked again it has its time again": func(w *world) {
			w.clock = w.clock.Add(delay - time.Second)
			w.expect(asked("first"), "n1")
			w.clock = w.clock.Add(delay - time.Second)
			w.Expire()
			w.fits(false, "second")
		},
		"asked again for another node": func(w *world) {
			w.node("n2", cards(8))
			w.expect(asked("first"), "n2")
			w.fits(true, "second")
			w.want("n2", "8/8 | a 8/8 first:8")
		},
		"withdrawn": func(w *world) {
			freed := w.Counts().Freed
			if !w.Withdraw("first") || w.Withdraw("first") || w.Counts().Freed == freed {
				w.t.Error("it was not withdrawn once")
			}
			w.fits(true, "second")
		},
		"the pod is gone": func(w *world) {
			w.Forget("first")
			w.fits(true, "second")
		},
		"the pod is bound elsewhere": func(w *world) {
			w.node("n2", cards(8))
			w.observe("first", "n2", 8, "a")
			w.fits(true, "second")
			if w.Counts().Expected != 0 {
				w.t.Error("its bind is still expected")
			}
		},
		"a bind to another node takes it along": func(w *world) {
			w.node("n2", cards(8))
			w.reserve("first", "n2", 8)
			w.fits(true, "second")
		},
		"a pod that was observed is not expected": func(w *world) {
			w.observe("first", "n1", 8, "a")
			if !w.Expect(asked("first"), "n1") || w.Expect(asked("first"), "n2") || w.Counts().Expected != 0 {
				w.t.Error("a pod that runs is expected")
			}
		},
		"it is reserved for no other pod": func(w *world) {
			if w.Expect(asked("second"), "n1") || w.Expects("second") {
				w.t.Error("two pods are expected on one card")
			}
			high := asked("high")
			high.Request.Priority = 1000
			if w.Expect(high, "n1") {
				w.t.Error("a pod that kube-scheduler assumes on the node counts for all others")
			}
		},
		"a card that breaks in between": func(w *world) {
			w.node("n1", broken(cards(8, 8), 0))
			if g, _ := w.reserve("first", "n1", 8); g.Device != "b" {
				w.t.Errorf("the grant is %+v", g)
			}
		},
		"a card that another replica gave away in between": func(w *world) {
			w.observe("other", "n1", 4, "a")
			if _, _, err := w.Reserve(pod("first"), time.Time{}, "n1", asks(8)); err == nil {
				w.t.Error("the card is beyond its size")
			}
			w.want("n1", "4/8 | a 4/8 other:4")
		},
		"a pod that nobody saw is not expected for long": func(w *world) {
			w.Expect(asked("first"), "n1")
			w.clock = w.clock.Add(planTTL - 1)
			w.Expire()
			w.fits(false, "second")
			w.clock = w.clock.Add(1)
			w.Expire()
			w.fits(true, "second")
		},
		"a pod that is seen after the question": func(w *world) {
			w.Expect(asked("first"), "n1")
			w.Unbound("first", "", Attempt{Version: 9})
			w.clock = w.clock.Add(delay - time.Second)
			w.Expire()
			w.fits(false, "second")
		},
		"its reservation has a time of its own": func(w *world) {
			w.clock = w.clock.Add(2 * DefaultReservationTTL)
			w.Expire()
			w.reserve("first", "n1", 8)
			w.clock = w.clock.Add(DefaultReservationTTL)
			if w.Expire() != 1 {
				w.t.Error("the reservation of a bind stays for longer than before")
			}
		},
		"what is expected is asked of no API server": func(w *world) {
			w.clock = w.clock.Add(time.Minute)
			if unseen := w.Unseen(time.Second, 10); len(unseen) != 0 || w.Release("first", 0) {
				w.t.Errorf("%v", unseen)
			}
		},
		"nothing is expected of a pod without a name or a request": func(w *world) {
			w.Withdraw("first")
			none := asked("none")
			none.Request.Containers = nil
			if w.Expect(Expected{Request: asks(8)}, "n1") || w.Expect(none, "n1") || w.Expect(asked("lost"), "n9") ||
				w.Counts().Expected != 0 {
				w.t.Error("it is")
			}
		},
	}
	for name, do := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{MaxBindDelay: delay})
			w.node("n1", cards(8))
			w.expect(asked("first"), "n1")
			w.want("n1", "8/8 | a 8/8 first:8")
			w.fits(false, "second")
			w.fits(true, "first")
			do(w)
			w.check()
		})
	}
}

// kube-scheduler says that it gave a pod up by the pod's status. Everything else that
// the watch shows of a pod means nothing.
func TestUnbound(t *testing.T) {
	type change struct {
		nominated string
		attempt   Attempt
		later     time.Duration
	}
	failed := Attempt{Version: 11, Outcome: 1}
	for name, tc := range map[string]struct {
		nominated string // before
		changes   []change
		kept      bool
	}{
		"nothing new":   {changes: []change{{attempt: Attempt{Version: 10}, later: settle}}, kept: true},
		"an annotation": {changes: []change{{attempt: Attempt{Version: 11}, later: settle}}, kept: true},
		"an outcome":    {changes: []change{{attempt: failed, later: settle}}},
		"an outcome from before the question": {changes: []change{{attempt: Attempt{Version: 9, Outcome: 1}, later: settle}},
			kept: true},
		"versions that are no numbers":  {changes: []change{{attempt: Attempt{Outcome: 1}, later: settle}}},
		"the end of the attempt before": {changes: []change{{attempt: failed, later: settle - 1}}, kept: true},
		"the same said again": {changes: []change{{attempt: failed}, {attempt: Attempt{Version: 12, Outcome: 1},
			later: time.Minute}}, kept: true},
		"and then its own end": {changes: []change{{attempt: failed}, {attempt: Attempt{Version: 12, Outcome: 2},
			later: time.Minute}}},
		"nominated for the node": {changes: []change{{nominated: "n1", attempt: Attempt{Version: 11}, later: settle}},
			kept: true},
		"nominated, and then not any more": {changes: []change{{nominated: "n1", attempt: Attempt{Version: 11}},
			{attempt: Attempt{Version: 12}, later: time.Minute}}},
		"not nominated for another node anymore": {nominated: "n2", changes: []change{{attempt: Attempt{Version: 11}, later: settle}},
			kept: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			w.node("n1", cards(8))
			w.node("n2", cards(8))
			if tc.nominated != "" {
				w.Nominate("p", tc.nominated, asks(8))
			}
			w.expect(asked("p"), "n1")
			for _, c := range tc.changes {
				w.clock = w.clock.Add(c.later)
				w.Unbound("p", c.nominated, c.attempt)
				w.Nominate("p", c.nominated, asks(8))
			}
			if w.Expects("p") != tc.kept {
				t.Errorf("the bind is expected: %t", w.Expects("p"))
			}
			w.check()
		})
	}
	w := newWorld(t, Options{})
	w.Unbound("stranger", "", failed)
	w.check()
}

// A pod whose bind has no known outcome does not compete with its own reservation, and
// once it is known to have no node, nothing is reserved for it.
func TestRelease(t *testing.T) {
	w := newWorld(t, Options{})
	w.node("n1", cards(8))
	_, undo := w.reserve("first", "n1", 8)
	w.fits(true, "first")
	w.fits(false, "second")
	w.clock = w.clock.Add(10 * time.Second)
	if w.Release("first", 11*time.Second) {
		t.Error("a bind may still be under way")
	}
	w.reserve("first", "n1", 8) // a second bind
	if w.Release("first", 10*time.Second) || len(w.Unseen(10*time.Second, 1)) != 0 {
		t.Error("the second bind is under way")
	}
	w.clock = w.clock.Add(10 * time.Second)
	freed := w.Counts().Freed
	if len(w.Unseen(10*time.Second, 1)) != 1 || !w.Release("first", 10*time.Second) || w.Counts().Freed == freed {
		t.Error("the reservation is not dropped")
	}
	w.fits(true, "second")
	undo()
	w.observe("second", "n1", 8, "a")
	if w.Release("second", 0) {
		t.Error("a pod that runs was released")
	}
	w.want("n1", "8/8 | a 8/8 second:8")
}
