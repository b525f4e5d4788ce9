package devicemanager

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// Pods of all shapes get the card they were granted, as many units as their
// peak, and give them back.
func TestShapes(t *testing.T) {
	t.Parallel()
	tests := map[string][]shape{
		"one container":                       {app(4)},
		"several containers":                  {app(2, 3, 4)},
		"a container without units":           {app(0, 3)},
		"an init container, smaller":          {initial(2), app(5)},
		"an init container, larger":           {initial(9), app(2, 3)},
		"an init container, as large":         {initial(5), app(5)},
		"several init containers":             {initial(2, 6, 4), app(3, 1)},
		"an init container alone":             {initial(6), app(0)},
		"a sidecar":                           {sidecar(3), app(4)},
		"a sidecar after an init container":   {initial(7), sidecar(3), app(4)},
		"an init container after a sidecar":   {sidecar(3), initial(7), app(4)},
		"sidecars and init containers":        {initial(5), sidecar(3), initial(4), sidecar(1), app(2, 4)},
		"a sidecar alone":                     {sidecar(5), app(0)},
		"a whole card":                        {app(16)},
		"a whole card, in several containers": {initial(16), sidecar(4), app(6, 6)},
	}
	n := newNode(t, "1", vendorsim.GCUs(3, 16<<10))
	for name, shapes := range tests {
		t.Run(name, func(t *testing.T) {
			n := n.within(t)
			// On the card that no policy of its own would choose.
			pod := n.bind(2, "shaped", shapes...)
			n.admit(pod)
			n.on(2, pod)
			n.kubelet.remove(pod)
		})
	}
	after := n.bind(2, "after", app(16))
	n.admit(after)
	n.on(2, after)
}

// Equal pods in flight that kubelet takes up in another order than they were
// granted.
func TestEqualPodsInFlight(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(3, 16<<10))
	var pods []*corev1.Pod
	for i := range 12 {
		pods = append(pods, n.bind(i%3, fmt.Sprintf("pod%d", i), initial(1), app(2, 2)))
	}
	for i, pod := range slices.Backward(pods) {
		n.admit(pod)
		if d, err := n.where(pod); err != nil || d != n.card(i%3) {
			t.Fatalf("pod %s is on %s (%v), want %s", pod.Name, d, err, n.card(i%3))
		}
	}
	n.converged()
}

// Kubelet sees a pod before the agent's watch does.
func TestWatchIsLate(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(3, 16<<10))
	early := n.bind(0, "early", app(4))
	n.admit(early)
	n.on(0, early)
	release := n.api.holdWatches()
	before := n.api.listed()
	var pods []*corev1.Pod
	for i := range 6 {
		pods = append(pods, n.bind(i%3, fmt.Sprintf("pod%d", i), app(2, 1)))
	}
	for i, pod := range slices.Backward(pods) {
		n.admit(pod)
		if d, err := n.where(pod); err != nil || d != n.card(i%3) {
			t.Fatalf("pod %s is on %s (%v), want %s", pod.Name, d, err, n.card(i%3))
		}
	}
	if n.api.listed() == before {
		t.Error("the API server was not asked")
	}
	release()
	n.converged()
}

// Pods that came around the scheduler have no grant.
func TestWithoutGrant(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	granted := n.bind(0, "granted", app(10))
	// Bound, but kubelet takes up the other first: what is promised stays.
	byHand := n.bind(-1, "by-hand", app(5, 3))
	n.admit(byHand)
	n.on(1, byHand)
	n.admit(granted)
	n.on(0, granted)
	third := n.bind(-1, "third", initial(6), app(1))
	n.admit(third)
	n.on(0, third)
	n.refused(n.bind(-1, "fourth", app(9)), "requested number of devices unavailable", "Requested: 9, Available: 8")
	n.refused(n.bind(-1, "fifth", app(8, 1)), "no device of this node has enough free units", "ns/fifth")
}

// A static pod is not known to the API server when kubelet admits it; its
// mirror has another uid.
func TestStaticPod(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	granted := n.bind(0, "granted", app(16))
	static := n.pod("static", app(3, 2))
	n.admit(static)
	if d, err := n.where(static); err != nil || d != n.card(1) {
		t.Fatalf("the static pod is on %s (%v), want %s", d, err, n.card(1))
	}
	n.admit(granted)
	n.on(0, granted)
	mirror := n.pod("static", app(3, 2))
	n.api.create(mirror)
	card1 := n.inventory().Shares[1]
	eventually(t, soon, func() error { return n.annotations(n.api.get(mirror.UID), card1) })
}

// What users write into annotations moves nothing.
func TestForgedAnnotations(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", vendorsim.GCUs(2, 16<<10))
	victim := n.bind(0, "victim", app(10))
	forger := n.pod("forger", app(6, 6))
	forger.Annotations = map[string]string{
		wire.GrantAnnotation:                    victim.Annotations[wire.GrantAnnotation],
		"enflame.com/gcu-device-id":             "0",
		"enflame.com/gcu-device-memory":         "1000",
		"enflame.com/gcu-device-memory-request": "1",
		"enflame.com/gcu-device-assigned":       "true",
		"enflame.com/gcu-device-assign-time":    "1",
	}
	n.api.create(forger)
	garbage := n.pod("garbage", app(2))
	garbage.Annotations = map[string]string{
		wire.GrantAnnotation:        strings.Repeat("{", 5000),
		"enflame.com/gcu-device-id": "minus one",
	}
	n.api.create(garbage)
	n.admit(forger, victim, garbage)
	n.on(1, forger)
	n.on(0, victim)

	// Changed while it runs: put right.
	n.api.update(victim.UID, func(p *corev1.Pod) {
		p.Annotations["enflame.com/gcu-device-memory-request"] = "1"
		p.Annotations["enflame.com/gcu-device-id"] = "1"
	})
	n.api.update(forger.UID, func(p *corev1.Pod) { delete(p.Annotations, wire.GrantAnnotation) })
	n.on(0, victim)
	n.on(1, forger)
}

func TestLargerThanAnyCard(t *testing.T) {
	t.Parallel()
	n := newNode(t, "1", []vendorsim.Card{gcu(0, 16), gcu(1, 24)})
	tests := map[string]struct {
		shapes []shape
		says   []string
	}{
		"in one container": {[]shape{app(25)}, []string{"no device of this node has enough free units",
			"needs 25 units of one device, at most 24"}},
		"in several":        {[]shape{app(12, 13)}, []string{"needs 25 units of one device, at most 24"}},
		"with a sidecar":    {[]shape{sidecar(1), initial(24), app(1)}, []string{"needs 25 units of one device, at most 24"}},
		"than all together": {[]shape{app(41)}, []string{"Requested: 41, Available: 40"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := n.within(t)
			n.refused(n.bind(-1, "large", tt.shapes...), tt.says...)
		})
	}
	// Nothing of them is left.
	pods := []*corev1.Pod{n.bind(1, "pod1", app(24)), n.bind(0, "pod0", app(16))}
	n.admit(pods...)
	n.on(1, pods[0])
	n.on(0, pods[1])
}

// Units carry no NUMA node, so no policy of kubelet's topology manager mixes
// cards.
func TestTopologyManagerPolicies(t *testing.T) {
	t.Parallel()
	for _, policy := range []string{topologymanager.PolicyBestEffort, topologymanager.PolicyRestricted,
		topologymanager.PolicySingleNumaNode} {
		t.Run(policy, func(t *testing.T) {
			cards := vendorsim.GCUs(3, 16<<10)
			cards[1].NUMA, cards[2].NUMA = 1, 1
			n := prepareNode(t, "1", cards)
			n.kubelet.Policy = policy
			n.kubelet.start()
			n.startAgent()
			n.awaitReady()
			for i := range 9 {
				pod := n.bind(i%3, fmt.Sprintf("pod%d", i), initial(4), app(2, 3))
				n.admit(pod)
				if d, err := n.where(pod); err != nil || d != n.card(i%3) {
					t.Fatalf("pod %s is on %s (%v), want %s", pod.Name, d, err, n.card(i%3))
				}
			}
			n.converged()
		})
	}
}

// gcu is a card with that many GB.
func gcu(i int, gb int64) vendorsim.Card {
	c := vendorsim.GCUs(i+1, gb<<10)[i]
	return c
}

// within makes the node report to a subtest.
func (n *node) within(t *testing.T) *node {
	t.Helper()
	sub := *n
	sub.t = t
	n.pods += 1000 // uids differ from those of other subtests
	sub.pods = n.pods
	return &sub
}
