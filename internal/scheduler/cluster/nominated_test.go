package cluster

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// nominated makes the pod wait for a node.
func nominated(pod *v1.Pod, priority int32, node string) *v1.Pod {
	pod.Spec.Priority, pod.Status.NominatedNodeName = &priority, node
	return pod
}

// What a pod is nominated to is kept for it, until it is nominated to something
// else, is bound, or is gone.
func TestNominatedPods(t *testing.T) {
	low := func(units accel.Units) accel.Request {
		return accel.Request{Resource: gcuMemory, Pod: "low", Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer,
			Units: units}}}
	}
	for name, after := range map[string]func(*fixture) error{
		"cleared":    func(f *fixture) error { return f.books.Pods().Update(nominated(waitingPod("p", "u1", "12"), 100, "")) },
		"elsewhere":  func(f *fixture) error { return f.books.Pods().Update(nominated(waitingPod("p", "u1", "12"), 100, "b")) },
		"gone":       func(f *fixture) error { return f.books.Pods().Delete(nominated(waitingPod("p", "u1", "12"), 100, "a")) },
		"re-created": func(f *fixture) error { return f.books.Pods().Update(waitingPod("p", "u2", "12")) },
		"listed anew without it": func(f *fixture) error {
			return f.books.Pods().Replace([]any{waitingPod("other", "u3", "12")}, "1")
		},
		"ended": func(f *fixture) error {
			p := nominated(waitingPod("p", "u1", "12"), 100, "a")
			p.Status.Phase = v1.PodFailed
			return f.books.Pods().Update(p)
		},
		"bound elsewhere": func(f *fixture) error {
			return f.books.Pods().Update(nominated(boundPod("p", "u1", "12", "b"), 100, "a"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.ok(f.books.Nodes().Add(f.node("a", 16)))
			f.ok(f.books.Pods().Add(nominated(waitingPod("p", "u1", "12"), 100, "a")))
			fits := func() bool {
				out := make([]ledger.Verdict, 1)
				f.ledger.Check(low(8), []string{"a"}, out)
				return out[0].Code == accel.Fits
			}
			if fits() {
				t.Fatal("what is kept for the nominated pod is there for one of lower priority")
			}
			f.ok(after(f))
			if !fits() {
				t.Error("it is still kept")
			}
		})
	}
}

// A pod's priority and that it is ending are in the books, so that the least
// important is evicted, and nobody for whom one goes anyway.
func TestVictims(t *testing.T) {
	f := newFixture(t)
	f.ok(f.books.Nodes().Add(f.node("a", 16, 16)))
	first, second := f.grant(boundPod("first", "u1", "16", "a"), testKey, 0), f.grant(boundPod("second", "u2", "16", "a"), testKey, 1)
	f.ok(f.books.Pods().Add(nominated(first, 50, "")))
	f.ok(f.books.Pods().Add(nominated(second, 60, "")))
	evict := func(want string) {
		t.Helper()
		req := accel.Request{Resource: gcuMemory, Pod: "high", Priority: 100,
			Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: 12}}}
		got := f.ledger.Evict(req, []ledger.Proposal{{Node: "a", Victims: []string{"u2", "u1"}}})
		if len(got[0].Victims) != 1 || got[0].Victims[0] != want {
			t.Errorf("victims %v, want %s", got[0].Victims, want)
		}
	}
	evict("u1")

	// kube-scheduler refuses an answer that names a pod which it does not know.
	gone := with(f.grant(boundPod("gone", "u3", "4", "b"), testKey, 0), v1.PodRunning, stateRuns)
	f.ok(f.books.Nodes().Add(f.node("b", 4)))
	f.ok(f.books.Pods().Add(gone))
	f.ok(f.books.Pods().Delete(gone))
	req := accel.Request{Resource: gcuMemory, Pod: "high", Priority: 100,
		Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: 4}}}
	if !f.ledger.MakesRoom(req, "b", nil) {
		t.Error("the room of a pod whose containers still run is not on its way")
	}
	if got := f.ledger.Evict(req, []ledger.Proposal{{Node: "b", Victims: []string{"cpu"}}})[0]; len(got.Victims) != 1 ||
		got.Victims[0] != "cpu" {
		t.Errorf("victims %v, want the one that was proposed", got.Victims)
	}

	second = second.DeepCopy()
	second.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	f.ok(f.books.Pods().Update(second))
	evict("u2")
}
