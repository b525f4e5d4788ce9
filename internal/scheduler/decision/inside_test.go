package decision

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// Both doors name the same nodes and give the same reasons.
func TestInsideSaysWhatFilterSays(t *testing.T) {
	for _, units := range []int64{1, 8, 9, 16, 17} {
		for _, annotations := range []map[string]string{
			nil, {wire.CountAnnotation: "2"}, {wire.AvoidDevicesAnnotation: "b0"}, {wire.IsolationAnnotation: "hardware"},
			{wire.PolicyAnnotation: "spread"}, {wire.PolicyAnnotation: "nonsense"}, {wire.CountAnnotation: "many"},
		} {
			w := newWorld(t)
			w.cluster.Single = map[string]bool{"node-b": true}
			pod := newPod("p", units*2)
			pod.Annotations = annotations
			q := Question{Pod: pod, Nodes: []string{"node-a", "node-b", "node-c"}, Believed: true}
			var a Answer
			w.decider.Filter(t.Context(), &q, &a)
			inside := NewInside(w.decider, w.ledger)
			cycle, err := inside.Begin(pod, len(q.Nodes))
			if rejected := new(RejectedError); errors.As(err, &rejected) {
				if len(a.Refusals) != 3 || a.Refusals[0].Reason != err.Error() || !a.Refusals[0].Unresolvable {
					t.Errorf("%d units, %v: the attempt is rejected: %v, filter says %v", units, annotations, err, a.Refusals)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			var fits []string
			for _, i := range a.Fits {
				fits = append(fits, q.Nodes[i])
			}
			ranked := slices.Sorted(cycle.Ranked())
			if !slices.Equal(ranked, fits) {
				t.Errorf("%d units, %v: the attempt has %v, filter %v", units, annotations, ranked, fits)
			}
			for _, r := range a.Refusals {
				got, refused := cycle.Refuse(r.Node, ledger.Overlay{})
				// Where evicting all others would not help, a scheduler that asks inside is told so.
				got.Unresolvable = got.Unresolvable && r.Unresolvable
				if !refused || got != r {
					t.Errorf("%d units, %v: the attempt says %+v, %t, filter %+v", units, annotations, got, refused, r)
				}
			}
		}
	}
}

func TestInsideHoldsUntilTheBindEnds(t *testing.T) {
	w := newWorld(t)
	pod := w.add(newPod("p", 8))
	inside := NewInside(w.decider, w.ledger)
	cycle, err := inside.Begin(pod, 2)
	if err != nil {
		t.Fatal(err)
	}
	grant, undo, err := cycle.Hold("node-b")
	if err != nil || grant.Device != "b0" {
		t.Fatal(grant, err)
	}
	if cycle.Bound() != "" {
		t.Error("no bind has begun")
	}
	w.cluster.BindError = func(context.Context, accel.PodRef, string) error { return cluster.ErrOutcomeUnknown }
	if err := cycle.Bind(t.Context(), &grant); !errors.Is(err, cluster.ErrOutcomeUnknown) {
		t.Fatal(err)
	}
	again, err := inside.Begin(pod, 2)
	if err != nil {
		t.Fatal(err)
	}
	if node := again.Bound(); node != "node-b" {
		t.Errorf("while the outcome is unknown the pod may be on node-b alone, not %q", node)
	}
	if other, _, err := again.Hold("node-a"); err == nil {
		t.Errorf("it got %+v as well", other)
	}
	same, undoAgain, err := again.Hold("node-b")
	if err != nil || same.Device != grant.Device || !same.At.Equal(grant.At) {
		t.Errorf("the next attempt has %+v, %v", same, err)
	}
	w.cluster.BindError = nil
	if err := again.Bind(t.Context(), &same); err != nil {
		t.Fatal(err)
	}
	undoAgain()
	undo()
	if c := w.ledger.Counts(); c.Reservations != 0 {
		t.Errorf("left: %+v", c)
	}
	if cycle, err := inside.Begin(newPod("plain"), 2); cycle != nil || err != nil {
		t.Errorf("a pod that requests nothing: %v, %v", cycle, err)
	}
	w.notReady = errors.New("not yet")
	if _, err := inside.Begin(pod, 2); !errors.Is(err, w.notReady) {
		t.Errorf("before it is ready: %v", err)
	}
}

// BenchmarkInside is an attempt of a scheduler in the same process that places the pod on the node
// that is rated best, with a record of the decision. All pods stay, so that each attempt finds one
// node changed.
func BenchmarkInside(b *testing.B) {
	for _, nodes := range []int{1000, 5000} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			w := newWorld(b)
			w.decider.config.Recorder = &Recorder{Ledger: w.ledger, Log: history.NewLog(w.clock), Now: w.decider.config.Now}
			for i := range nodes {
				name := fmt.Sprintf("node-%06d", i)
				w.ledger.SetNode(name, []accel.Inventory{cards(gcuMemory, name, 16, 16, 16, 16, 16, 16, 16, 16)})
			}
			inside := NewInside(w.decider, w.ledger)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				pod := newPod("p", 4)
				pod.UID = types.UID(fmt.Sprint("uid-", i))
				cycle, err := inside.Begin(pod, nodes)
				if err != nil {
					b.Fatal(err)
				}
				for name := range cycle.Ranked() {
					if _, _, err := cycle.Hold(name); err != nil {
						b.Fatal(err)
					}
					break
				}
			}
		})
	}
}
