package doors

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

// shown is what the API server shows of an event; nil is nothing.
type shown struct {
	resource      fwk.EventResource
	action        fwk.ActionType
	before, after any
}

// What the plugin says to kube-scheduler's queue of an event.
const (
	queues = "Queue"
	skips  = "QueueSkip"
	unseen = "" // the event is none of those that it registers
)

// hints is what it says of one.
func (p *compiled) hints(tb testing.TB, pod *v1.Pod, event *shown) string {
	tb.Helper()
	if event == nil {
		return unseen
	}
	registered, err := p.divvy.EventsToRegister(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	said := unseen
	for _, r := range registered {
		if !framework.MatchClusterEvents(r.Event, fwk.ClusterEvent{Resource: event.resource, ActionType: event.action}) {
			continue
		}
		hint, err := r.QueueingHintFn(klog.Background(), pod, event.before, event.after)
		if err != nil {
			tb.Fatal(err)
		}
		if hint == fwk.Queue {
			return queues
		}
		said = skips
	}
	return said
}

// changed returns a copy.
func changed[T interface{ DeepCopy() T }](object T, change func(T)) T {
	object = object.DeepCopy()
	change(object)
	return object
}

// TestWakes has a pod wait at both doors, lets something happen, and looks which of them has it tried again:
// kube-scheduler's queue by the plugin's hint, where the API server shows it, and the loop that both have,
// which follows the ledger. kube-scheduler tries a pod that an extender rejected again on any event.
func TestWakes(t *testing.T) {
	low := podOf("low-0", 6, 1, 1)
	low.Spec.NodeName = "node-a"
	plain := newPod("plain")
	plain.Spec.NodeName = "node-a"
	waits := newPod("p", 12)
	node := func(inventory string) *v1.Node {
		n := &v1.Node{}
		n.Name = "node-b"
		if inventory != "" {
			n.Annotations = map[string]string{wire.InventoryAnnotation: inventory}
		}
		return n
	}
	offers := func(b *books, units ...accel.Units) {
		b.ledger.SetNode("node-b", []accel.Inventory{decisiontest.Cards(memory, "node-b-", units...)})
	}
	holds := func(b *books, pod *v1.Pod, gone bool, device accel.DeviceID) {
		b.ledger.Observe(ledger.Holding{Pod: decisiontest.PodOf(pod).Ref, Node: "node-a", Resource: memory, Units: 6, Device: device,
			Confirmed: true, Gone: gone, Ending: gone})
	}
	forgets := func(pod *v1.Pod) func(*books) { return func(b *books) { b.ledger.Forget(string(pod.UID)) } }
	other := newPod("other", 12)
	nominated := changed(other, func(p *v1.Pod) { p.Status.NominatedNodeName = "node-b" })
	deleted := func(pod *v1.Pod) *shown { return &shown{fwk.Pod, fwk.Delete, pod, nil} }
	nothing := func(*books) {}
	for name, tc := range map[string]struct {
		pod *v1.Pod
		// before is how the ledger is when the pod is rejected.
		before func(*books)
		shown  *shown
		ledger func(*books)
		hint   string
		loop   bool
	}{
		"a pod that held units is gone": {shown: deleted(low), ledger: forgets(low), hint: queues, loop: true},
		"it is gone and its containers run": {
			shown: deleted(low), ledger: func(b *books) { holds(b, low, true, "node-a-0") }, hint: queues,
		},
		"then they end": {before: func(b *books) { holds(b, low, true, "node-a-0") }, ledger: forgets(low), hint: unseen,
			loop: true},
		"a pod without units is gone":       {shown: deleted(plain), ledger: nothing, hint: skips},
		"a pod that waited as well is gone": {shown: deleted(other), ledger: nothing, hint: skips},
		"a pod that is nominated is gone": {
			before: func(b *books) {
				offers(b, 16)
				requests, _ := kube.RequestsOf(nominated, []accel.Resource{memory})
				b.ledger.Nominate(string(nominated.UID), "node-b", requests[0])
			},
			shown: deleted(nominated), ledger: forgets(nominated), hint: queues, loop: true,
		},
		"a reservation ends without a bind": {
			before: func(b *books) {
				offers(b, 16)
				requests, _ := kube.RequestsOf(other, []accel.Resource{memory})
				if _, _, err := b.ledger.Reserve(decisiontest.PodOf(other).Ref, now, "node-b", requests[0]); err != nil {
					b.told = append(b.told, err.Error())
				}
			},
			ledger: forgets(other), hint: unseen, loop: true,
		},
		"a pod turns out to be on another device": {
			shown:  &shown{fwk.Pod, fwk.UpdatePodLabel, low, changed(low, func(p *v1.Pod) { p.Annotations = map[string]string{"x": "y"} })},
			ledger: func(b *books) { holds(b, low, false, "node-a-1") }, hint: skips, loop: true,
		},
		"a node with devices appears": {
			shown: &shown{fwk.Node, fwk.Add, nil, node("x")}, ledger: func(b *books) { offers(b, 16) }, hint: queues, loop: true,
		},
		"a node with too small devices appears": {
			shown: &shown{fwk.Node, fwk.Add, nil, node("x")}, ledger: func(b *books) { offers(b, 8) }, hint: queues,
		},
		"a node without devices appears": {shown: &shown{fwk.Node, fwk.Add, nil, node("")}, ledger: nothing, hint: skips},
		"a node publishes more": {
			before: func(b *books) { offers(b, 8) },
			shown:  &shown{fwk.Node, fwk.UpdateNodeAnnotation, node("x"), node("y")},
			ledger: func(b *books) { offers(b, 8, 16) }, hint: queues, loop: true,
		},
		"another annotation of a node": {
			shown: &shown{fwk.Node, fwk.UpdateNodeAnnotation, node("x"), changed(node("x"), func(n *v1.Node) { n.Annotations["x"] = "y" })},
			hint:  skips, ledger: nothing,
		},
		"a label of a node with devices": {
			shown: &shown{fwk.Node, fwk.UpdateNodeLabel, node("x"), changed(node("x"), func(n *v1.Node) {
				n.Labels = map[string]string{"x": "y"}
			})},
			hint: queues, ledger: nothing,
		},
		"a condition of a node": {shown: &shown{fwk.Node, fwk.UpdateNodeCondition, node("x"), node("x")}, hint: unseen, ledger: nothing},
		"the pod requests otherwise": {
			shown: &shown{fwk.Pod, fwk.UpdatePodLabel, waits, changed(waits, func(p *v1.Pod) {
				p.Annotations = map[string]string{wire.CountAnnotation: "2"}
			})},
			hint: queues, ledger: nothing,
		},
		"the pod is said to wait": {shown: &shown{fwk.Pod, fwk.UpdatePodLabel, waits, waits.DeepCopy()}, hint: skips, ledger: nothing},
		"another pod is bound":    {shown: &shown{fwk.Pod, fwk.Add, nil, low}, hint: unseen, ledger: nothing},
		"units come free that are too few": {
			before: func(b *books) { offers(b, 8) }, shown: &shown{fwk.Node, fwk.UpdateNodeAnnotation, node("x"), node("y")},
			ledger: func(b *books) { offers(b, 10) }, hint: queues,
		},
		"a pod that may evict others, and units come free that are too few": {
			pod: important(newPod("p", 16)), before: func(b *books) { holds(b, podOf("third", 6, 1, 1), false, "node-a-0") },
			shown: deleted(low), ledger: forgets(low), hint: queues, loop: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			client() // not of this test's time
			synctest.Test(t, func(t *testing.T) {
				pod := tc.pod
				if pod == nil {
					pod = waits
				}
				// Each device of node-a has 10 units that are free; node-b has no devices.
				c := &cluster{clock: time.Now, waits: pod}
				c.node("node-a", nil, 16, 16)
				c.runs(podOf("low-0", 6, 1, 1), "node-a", 0)
				c.runs(podOf("low-1", 6, 1, 2), "node-a", 1)
				inside := c.plugin(t, true, false)
				for name, d := range map[string]door{"the extender": c.extender(t, true), "the plugin": inside} {
					b := d.state()
					b.cluster.Add(pod)
					if tc.before != nil {
						tc.before(b)
					}
					if fits, _ := d.filter(t, pod); len(fits) > 0 {
						t.Fatalf("%s: the pod fits on %v", name, fits)
					}
					d.fails(t, pod)
					go b.extender.Decider().Run(t.Context())
					time.Sleep(10 * time.Second)
					synctest.Wait()
					if len(b.woken)+len(b.told) > 0 {
						t.Fatalf("%s: before anything happens, %v are woken and %q is said", name, b.woken, b.told)
					}
					tc.ledger(b)
					time.Sleep(time.Second)
					synctest.Wait()
					if got := slices.Equal(b.woken, []string{pod.Name}); got != tc.loop || !got && len(b.woken) > 0 {
						t.Errorf("%s: the loop wakes %v", name, b.woken)
					}
				}
				if got := inside.hints(t, pod, tc.shown); got != tc.hint {
					t.Errorf("the hint is %q, want %q", got, tc.hint)
				}
			})
		})
	}
}
