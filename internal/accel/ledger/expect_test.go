package ledger

import (
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/accel"
)

func TestExpect(t *testing.T) {
	now := time.Unix(1000, 0)
	l := New(Options{Now: func() time.Time { return now }})
	const res = accel.Resource("enflame.com/gcu-memory")
	inv := accel.Inventory{Resource: res, Unit: "1", Shares: []accel.Share{{Units: 8, Device: accel.Device{ID: "d0", Model: "S60"}}}}
	l.SetNode("node", []accel.Inventory{inv})
	ask := func(pod string) accel.Request {
		return accel.Request{Resource: res, Pod: pod, Containers: []accel.ContainerRequest{{Name: "main", Units: 8}}}
	}
	fits := func(pod string) bool {
		out := make([]Verdict, 1)
		l.Check(ask(pod), []string{"node"}, out)
		return out[0].Code == accel.Fits
	}
	l.Expect("first", "node", ask("first"))
	if !fits("first") || fits("second") {
		t.Errorf("room for the pod that is expected: %t, for another: %t", fits("first"), fits("second"))
	}
	now = now.Add(planTTL - time.Nanosecond)
	if fits("second") {
		t.Error("the room was not kept until the end")
	}
	// Expected again, it has its time again.
	l.Expect("first", "node", ask("first"))
	now = now.Add(planTTL - time.Nanosecond)
	if fits("second") || l.Nominations() != 1 {
		t.Errorf("the time did not begin anew; room is kept for %d pods", l.Nominations())
	}
	now = now.Add(time.Nanosecond)
	l.Expire()
	if !fits("second") || l.Nominations() != 0 {
		t.Errorf("the room is not free after a while; it is kept for %d pods", l.Nominations())
	}
	// A bind takes the room, and nothing is kept beside it.
	l.Expect("first", "node", ask("first"))
	if _, _, err := l.Reserve(accel.PodRef{UID: "second"}, now, "node", ask("second")); err == nil {
		t.Error("another pod got the room")
	}
	if _, _, err := l.Reserve(accel.PodRef{UID: "first"}, now, "node", ask("first")); err != nil {
		t.Error(err)
	}
	if l.Nominations() != 0 {
		t.Errorf("room is kept for %d pods beside what is held", l.Nominations())
	}
	// What the API server says of a pod stands.
	l.Nominate("third", "node", ask("third"))
	l.Expect("third", "node", ask("third"))
	now = now.Add(planTTL)
	if l.Expire(); l.Nominations() != 1 {
		t.Error("a nomination has ended")
	}
	l.Expect("", "node", ask(""))
	l.Expect("none", "node", accel.Request{Resource: res, Pod: "none"})
	if l.Nominations() != 1 {
		t.Errorf("room is kept for %d pods, want 1", l.Nominations())
	}
}
