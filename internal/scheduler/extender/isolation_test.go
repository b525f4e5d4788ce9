package extender

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// isolatedPod requires a tier.
func isolatedPod(tier string, units int64) *v1.Pod {
	pod := newPod("p", units)
	pod.Annotations = map[string]string{wire.IsolationAnnotation: tier}
	return pod
}

// states makes a node publish cards of 16 units at these tiers, attested now.
func (w *world) states(node string, tiers ...accel.Tier) {
	units := make([]accel.Units, len(tiers))
	for i := range units {
		units[i] = 16
	}
	inv := cards(gcuMemory, node, units...)
	for i, tier := range tiers {
		inv.Shares[i].Isolation = accel.Isolation{Memory: tier}
		if tier != accel.TierNone {
			inv.Shares[i].Isolation.Attested = w.clock
		}
	}
	w.ledger.SetNode(node, []accel.Inventory{inv})
}

func TestRequiredIsolation(t *testing.T) {
	const none = "isolation driver required, device states none"
	for name, tt := range map[string]struct {
		tier   string
		units  int64
		fit    []string
		failed extenderv1.FailedNodesMap
		event  string
	}{
		"none is no requirement": {tier: "none", units: 9, fit: []string{"plain", "mps", "limits", "mixed"}},
		"cooperative": {tier: "cooperative", units: 9, fit: []string{"mps", "limits", "mixed"},
			failed: extenderv1.FailedNodesMap{"plain": "isolation cooperative required, device states none"}},
		"driver": {tier: "driver", units: 9, fit: []string{"limits"}, failed: extenderv1.FailedNodesMap{
			"plain": none, "mps": "isolation driver required, device states cooperative",
			"mixed": "isolation driver required, devices state cooperative and none"}},
		"hardware": {tier: "hardware", units: 9, failed: extenderv1.FailedNodesMap{
			"plain": "isolation hardware required, device states none", "mps": "isolation hardware required, device states cooperative",
			"limits": "isolation hardware required, device states driver",
			"mixed":  "isolation hardware required, devices state cooperative and none"},
			event: "IsolationNotStated: the pod requires isolation hardware, and none of the 4 candidate nodes that offer " +
				"enflame.com/gcu-memory has a device that states it: driver on limits; cooperative on mps, mixed; none on plain"},
		"a device of the tier that is too small": {tier: "driver", units: 20, failed: extenderv1.FailedNodesMap{
			"plain": none, "mps": "isolation driver required, device states cooperative",
			"mixed": "isolation driver required, devices state cooperative and none", "limits": noRoom},
			event: "NeverFits: the pod requests 20 units of enflame.com/gcu-memory on one device; of the 4 candidate nodes that offer it" +
				", 1 have no device of that size, " +
				"3 have no device that states isolation driver (cooperative on mps, mixed; none on plain)"},
	} {
		t.Run(name, func(t *testing.T) {
			var told []string
			w := newWorld(t, func(c *Config) {
				c.Tell = func(_ accel.PodRef, kind events.Kind, message string) { told = append(told, kind.Reason+": "+message) }
			})
			w.states("plain", accel.TierNone)
			w.states("mps", accel.TierCooperative)
			w.states("limits", accel.TierDriver)
			w.states("mixed", accel.TierNone, accel.TierCooperative)
			nodes := []string{"plain", "mps", "limits", "mixed"}
			got := w.filter(extenderv1.ExtenderArgs{Pod: isolatedPod(tt.tier, tt.units), NodeNames: &nodes})
			if diff := cmp.Diff(tt.fit, append([]string(nil), *got.NodeNames...)); diff != "" {
				t.Errorf("nodes that fit (-want +got):\n%s", diff)
			}
			if len(got.FailedNodes) != 0 || len(got.FailedAndUnresolvableNodes) != len(tt.failed) {
				t.Errorf("failed %q, unresolvable %q", got.FailedNodes, got.FailedAndUnresolvableNodes)
			}
			for node, reason := range tt.failed {
				if got.FailedAndUnresolvableNodes[node] != reason {
					t.Errorf("%s: %q, want %q", node, got.FailedAndUnresolvableNodes[node], reason)
				}
			}
			if diff := cmp.Diff(tt.event, strings.Join(told, "\n")); diff != "" {
				t.Errorf("event (-want +got):\n%s", diff)
			}
		})
	}
}

// The message is short however many nodes there are.
func TestIsolationEventNamesFewNodes(t *testing.T) {
	var told string
	w := newWorld(t, func(c *Config) { c.Tell = func(_ accel.PodRef, _ events.Kind, message string) { told = message } })
	var nodes []string
	for i := range 200 {
		nodes = append(nodes, fmt.Sprintf("node-%03d", i))
		w.states(nodes[i], accel.TierNone)
	}
	w.states(nodes[199], accel.TierCooperative)
	w.filter(extenderv1.ExtenderArgs{Pod: isolatedPod("driver", 1), NodeNames: &nodes})
	const want = ": cooperative on node-199; none on node-000, node-001, node-002 and 196 more"
	if !strings.HasSuffix(told, want) {
		t.Errorf("the event is %q, want it to end in %q", told, want)
	}
}

// A node that stops to attest is left out a minute later, without another inventory; bind says
// the same.
func TestIsolationNotAttestedAnyMore(t *testing.T) {
	w := newWorld(t)
	w.states("limits", accel.TierDriver)
	pod := w.add(isolatedPod("driver", 4))
	w.clock = w.clock.Add(accel.MaxAttestationAge)
	if got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"limits"}}); len(*got.NodeNames) != 1 {
		t.Fatalf("after a minute: %+v", got)
	}
	w.clock = w.clock.Add(time.Second)
	got := w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"limits"}})
	const want = "isolation driver required, device states none"
	if got.FailedAndUnresolvableNodes["limits"] != want {
		t.Errorf("later: %+v", got)
	}
	if text := w.bind(pod, "limits"); !strings.Contains(text, want) {
		t.Errorf("bind: %q", text)
	}
	w.states("limits", accel.TierDriver)
	if text := w.bind(pod, "limits"); text != "" {
		t.Errorf("bind after another attestation: %q", text)
	}
}

// A container whose limit would be no larger than a context is rejected before the pod is bound.
func TestBelowAContext(t *testing.T) {
	var told []string
	w := newWorld(t, func(c *Config) {
		c.Tell = func(_ accel.PodRef, kind events.Kind, message string) { told = append(told, kind.Reason+": "+message) }
	})
	inv := cards(gcuMemory, "limits", 16, 16)
	inv.Least = 2
	w.ledger.SetNode("limits", []accel.Inventory{inv})
	nodes := []string{"limits"}
	got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("p", 1), NodeNames: &nodes})
	const reason = "a container requests no more of enflame.com/gcu-memory than the context of a process takes"
	if got.FailedAndUnresolvableNodes["limits"] != reason {
		t.Errorf("unresolvable %q", got.FailedAndUnresolvableNodes)
	}
	want := []string{"NeverFits: " + reason + " on each of the 1 candidate nodes that offer it; request more for it"}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if got := w.filter(extenderv1.ExtenderArgs{Pod: newPod("q", 2), NodeNames: &nodes}); len(got.FailedAndUnresolvableNodes) > 0 {
		t.Errorf("2 units: %q", got.FailedAndUnresolvableNodes)
	}
}
