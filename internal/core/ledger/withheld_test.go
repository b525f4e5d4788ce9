package ledger

import (
	"errors"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// withholding are the shares with so many units of each withheld.
func withholding(shares []accel.Share, units ...accel.Units) []accel.Share {
	for i, u := range units {
		shares[i].Withheld = u
	}
	return shares
}

// code checks what Check says of a request on n1, and that Reserve says the same.
func (w *world) code(req accel.Request, want accel.ReasonCode) {
	w.t.Helper()
	out := make([]Verdict, 1)
	w.Check(req, []string{"n1"}, out)
	if out[0].Code != want {
		w.t.Errorf("%d units: code %d, want %d", req.Peak(), out[0].Code, want)
	}
	req.Pod = "probe"
	_, undo, err := w.Reserve(pod("probe"), time.Time{}, "n1", req)
	defer undo()
	got := accel.Fits
	if nf := (*accel.NoFitError)(nil); errors.As(err, &nf) {
		got = nf.Code
	} else if err != nil {
		w.t.Fatal(err)
	}
	if got != want {
		w.t.Errorf("%d units: reserved with code %d, want %d", req.Peak(), got, want)
	}
}

func TestWithheld(t *testing.T) {
	for name, do := range map[string]func(w *world){
		"they are withheld from new pods": func(w *world) {
			w.node("n1", withholding(cards(16), 6))
			w.confirm("p", "n1", 8, "a")
			w.code(asks(2), accel.Fits)
			w.code(asks(3), accel.NoDeviceFits)
			w.code(asks(16), accel.NoDeviceFits) // the overuse may end
			w.code(asks(17), accel.LargerThanDevice)
			w.code(on(2, 4), accel.TooFewDevices)
			_, _, err := w.Reserve(pod("q"), time.Time{}, "n1", asks(3))
			if nf := (*accel.NoFitError)(nil); !errors.As(err, &nf) || nf.Largest != 2 {
				w.t.Errorf("error %v, want 2 free units on the freest", err)
			}
			w.want("n1", "8/16 | a 8/16 p:8!")
		},
		"pods keep what they have beside more than the rest": func(w *world) {
			w.node("n1", cards(16))
			w.confirm("p", "n1", 12, "a")
			w.node("n1", withholding(cards(16), 8))
			w.want("n1", "12/16 | a 12/16 p:12!")
			w.code(asks(1), accel.NoDeviceFits)
			w.observe("q", "n1", 2, "a") // by hand
			w.want("n1", "14/16 | a 14/16 p:12! q:2")
			w.Forget("p")
			w.code(asks(6), accel.Fits)
			w.code(asks(7), accel.NoDeviceFits)
		},
		"they come and go": func(w *world) {
			w.node("n1", cards(16))
			w.code(asks(16), accel.Fits)
			w.node("n1", withholding(cards(16), 1))
			w.code(asks(16), accel.NoDeviceFits)
			w.node("n1", cards(16))
			w.code(asks(16), accel.Fits)
		},
		"a device is as full as what it withholds": func(w *world) {
			w.node("n1", withholding(cards(16, 16, 16), 12, 0, 14))
			if g, undo := w.reserve("p", "n1", 4); g.Device != "a" {
				w.t.Errorf("4 units are on %q, want a, where they fit best", g.Device)
			} else if undo(); g.DeviceUnits != 16 {
				w.t.Errorf("the device has %d units, want 16", g.DeviceUnits)
			}
			if g, _ := w.reserve("p", "n1", 5); g.Device != "b" {
				w.t.Errorf("5 units are on %q, want b", g.Device)
			}
			w.code(on(3, 12), accel.NoDeviceFits)
			w.code(on(3, 6), accel.Fits)
		},
		"more than there are, and less than none": func(w *world) {
			w.node("n1", withholding(cards(16, 8), 20, -3))
			u, _ := w.Node(gcu, "n1")
			a, b := u.Devices[0], u.Devices[1]
			if u.Used != 0 || a.Withheld != 16 || a.Used != 0 || b.Withheld != 0 || b.Used != 0 {
				w.t.Errorf("usage %+v", u)
			}
			w.code(asks(8), accel.Fits)
			w.code(asks(9), accel.NoDeviceFits)
		},
		"a victim frees its own units alone": func(w *world) {
			w.node("n1", withholding(cards(16), 6))
			w.placed("n1", "x:8@a")
			if got := w.victims(of("p", 100, 10), "n1", "x"); got != "x" {
				w.t.Errorf("for 10 units: victims %q, want x", got)
			}
			if got := w.victims(of("p", 100, 11), "n1", "x"); got != "" {
				w.t.Errorf("for 11 units: victims %q, but they free too little", got)
			}
		},
		"the device whose victims free enough": func(w *world) {
			w.node("n1", withholding(cards(16, 16), 6))
			w.placed("n1", "x:16@a", "y:16@b!50")
			if got := w.victims(of("p", 100, 12), "n1", "x"); got != "y +1" {
				w.t.Errorf("victims %q, want y", got)
			}
		},
		"kube-scheduler proposes none, as it counts them": func(w *world) {
			w.node("n1", withholding(cards(16), 8))
			w.placed("n1", "x:8@a")
			if got := w.victims(of("p", 100, 8), "n1"); got != "x +1" {
				w.t.Errorf("victims %q, want x", got)
			}
		},
		"no victim is for what only Divvy counts": func(w *world) {
			w.node("n1", withholding(cards(16, 16), 16))
			w.placed("n1", "x:16@a", "y:8@b", "z:8@b!1")
			if got := w.victims(of("p", 100, 8), "n1", "z", "y", "x"); got != "y" {
				w.t.Errorf("victims %q, want y", got)
			}
		},
		"freed units are for the nominated pod, without those that are withheld": func(w *world) {
			w.node("n1", withholding(cards(16), 3))
			w.placed("n1", "x:12@a")
			if got := w.victims(of("p", 100, 12), "n1", "x"); got != "x" {
				w.t.Fatalf("victims %q, want x", got)
			}
			w.Nominate("p", "n1", of("p", 100, 12))
			w.Forget("x")
			w.code(of("q", 50, 1), accel.Fits)
			w.code(of("q", 50, 2), accel.NoDeviceFits)
			if g, _, err := w.Reserve(pod("p"), time.Time{}, "n1", of("p", 100, 12)); err != nil || g.Device != "a" {
				w.t.Errorf("grant %+v, %v", g, err)
			}
		},
		"a pod that ends frees what is not withheld": func(w *world) {
			w.node("n1", withholding(cards(16), 6))
			w.placed("n1", "x:8@a~")
			if !w.MakesRoom(of("p", 100, 10), "n1", nil) || w.MakesRoom(of("p", 100, 11), "n1", nil) {
				w.t.Error("10 units fit once it has ended, and no more")
			}
		},
		"an expected pod goes elsewhere, one that is being bound does not": func(w *world) {
			w.node("n1", cards(8, 8, 8))
			w.expect(asked("first"), "n1")
			w.reserve("bound", "n1", 8)
			w.node("n1", withholding(cards(8, 8, 8), 1, 1))
			if g, _ := w.reserve("first", "n1", 8); g.Device != "c" {
				w.t.Errorf("the expected pod is on %q, want c", g.Device)
			}
			if g, _ := w.reserve("bound", "n1", 8); g.Device != "b" {
				w.t.Errorf("the other one is on %q, want b", g.Device)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{})
			do(w)
			w.check()
		})
	}
}

// A pod fits only where each of its containers has as much as one must have there.
func TestLeast(t *testing.T) {
	w := newWorld(t, Options{})
	publish := func(least accel.Units) {
		w.SetNode("n1", []accel.Inventory{{Resource: gcu, Unit: "1", Several: true, Least: least, Shares: cards(16, 16)}})
	}
	publish(0)
	w.code(asks(1), accel.Fits)
	publish(3)
	w.code(asks(2), accel.TooSmall)
	w.code(asks(3), accel.Fits)
	w.code(asks(17), accel.LargerThanDevice)
	w.code(on(2, 4), accel.TooSmall)
	w.code(on(2, 6), accel.Fits)
	two := func(first, second accel.Units) accel.Request {
		req := asks(first)
		req.Containers = append(req.Containers, accel.ContainerRequest{Name: "b", Kind: accel.AppContainer, Units: second})
		return req
	}
	w.code(two(4, 2), accel.TooSmall)
	w.code(two(3, 3), accel.Fits) // remembered apart, although the sum is the same
	publish(2)
	w.code(two(4, 2), accel.Fits)
}

// No pod is evicted for one that has less than a container must have there.
func TestLeastAndEviction(t *testing.T) {
	w := newWorld(t, Options{})
	w.SetNode("n1", []accel.Inventory{{Resource: gcu, Unit: "1", Several: true, Least: 3, Shares: cards(16)}})
	w.placed("n1", "x:16@a")
	for units, want := range map[accel.Units]string{2: "", 3: "x"} {
		if got := w.victims(of("p", 100, units), "n1", "x"); got != want {
			t.Errorf("for %d units %q has to go, want %q", units, got, want)
		}
	}
}
