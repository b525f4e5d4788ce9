package cluster

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// scheduled sets what kube-scheduler said last of an attempt to place the pod.
func scheduled(pod *v1.Pod, version, reason, message string) *v1.Pod {
	pod.ResourceVersion = version
	pod.Status.Conditions = []v1.PodCondition{
		{Type: v1.PodReady, Status: v1.ConditionFalse, Message: version},
		{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: reason, Message: message},
	}
	return pod
}

// What filter promised a pod is reserved until kube-scheduler writes that the attempt
// has failed; no other change of the pod ends it.
func TestAttempts(t *testing.T) {
	waiting := func() *v1.Pod { return waitingPod("p", "u1", "12") }
	for name, tc := range map[string]struct {
		after *v1.Pod
		kept  bool
	}{
		"an annotation": {func() *v1.Pod {
			p := scheduled(waiting(), "11", "Unschedulable", "0/1 nodes")
			p.Annotations = map[string]string{"divvy.dev/retry": "now"}
			return p
		}(), true},
		"what was said before":     {scheduled(waiting(), "9", "Unschedulable", "0/2 nodes"), true},
		"another reason":           {scheduled(waiting(), "11", "SchedulerError", "0/1 nodes"), false},
		"another message":          {scheduled(waiting(), "11", "Unschedulable", "binding volumes: context deadline exceeded"), false},
		"a version that is opaque": {scheduled(waiting(), "x", "Unschedulable", "binding volumes: context deadline exceeded"), false},
		"bound":                    {boundPod("p", "u1", "12", "b"), false},
		"ended": {func() *v1.Pod {
			p := waiting()
			p.Status.Phase = v1.PodFailed
			return p
		}(), false},
		"re-created": {waitingPod("p", "u2", "12"), false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			now := time.Unix(1000, 0)
			f.ledger = ledger.New(ledger.Options{Now: func() time.Time { return now }})
			f.books.config.Ledger = f.ledger
			f.ok(f.books.Nodes().Add(f.node("a", 16)))
			f.ok(f.books.Nodes().Add(f.node("b", 16)))
			pod := scheduled(waiting(), "10", "Unschedulable", "0/1 nodes")
			f.ok(f.books.Pods().Add(pod))
			known, ok := f.books.Pod("team", "p")
			if !ok {
				t.Fatal("the books do not know the pod")
			}
			if !f.ledger.Expect(ledger.Expected{Pod: known.Ref, Request: known.Requests[0], Attempt: AttemptOf(pod)}, "a") {
				t.Fatal("it does not fit")
			}
			now = now.Add(time.Second)
			f.ok(f.books.Pods().Update(tc.after))
			if got := f.ledger.Expects("u1"); got != tc.kept {
				t.Errorf("its bind is expected: %t", got)
			}
			out := make([]ledger.Verdict, 1)
			other := accel.Request{Resource: gcuMemory,
				Pod: "other", Containers: []accel.ContainerRequest{{Name: "c", Kind: accel.AppContainer, Units: 8}}}
			if f.ledger.Check(other, []string{"a"}, out); (out[0].Code == accel.Fits) == tc.kept {
				t.Errorf("another pod: code %d", out[0].Code)
			}
		})
	}
}
