package extender

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// important is a pod that may have others evicted.
func important(pod *v1.Pod, nominated string) *v1.Pod {
	priority := int32(1000)
	pod.Spec.Priority, pod.Status.NominatedNodeName = &priority, nominated
	return pod
}

// running books pods on cards of a node, "uid units card".
func (w *world) running(node string, pods ...string) {
	w.tb.Helper()
	for _, text := range pods {
		var uid, card string
		var units accel.Units
		if _, err := fmt.Sscan(text, &uid, &units, &card); err != nil {
			w.tb.Fatal(text, err)
		}
		w.ledger.Observe(ledger.Holding{
			Pod: accel.PodRef{UID: uid, Namespace: "team", Name: uid}, Node: node, Resource: gcuMemory, Units: units,
			Device: accel.DeviceID(card), Confirmed: true,
		})
	}
}

func meta(violations int64, uids ...string) *extenderv1.MetaVictims {
	v := &extenderv1.MetaVictims{NumPDBViolations: violations}
	for _, uid := range uids {
		v.Pods = append(v.Pods, &extenderv1.MetaPod{UID: uid})
	}
	return v
}

// preempt asks as kube-scheduler does and prints the answer: "node: victims
// (violations)".
func (w *world) preempt(args extenderv1.ExtenderPreemptionArgs) string {
	w.tb.Helper()
	var result extenderv1.ExtenderPreemptionResult
	w.ask("/preempt", args, &result)
	if result.NodeNameToMetaVictims == nil {
		w.tb.Error("the answer has no NodeNameToMetaVictims")
	}
	var out []string
	for node, v := range result.NodeNameToMetaVictims {
		line := node + ":"
		for _, p := range v.Pods {
			line += " " + p.UID
		}
		out = append(out, fmt.Sprintf("%s (%d)", line, v.NumPDBViolations))
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

func TestPreempt(t *testing.T) {
	tests := map[string]struct {
		pod     *v1.Pod
		victims map[string]*extenderv1.MetaVictims
		want    string
	}{
		"reduced, and a node that cannot be helped is dropped": {
			pod:     important(newPod("p", 12), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a1", "a2", "a3"), "node-b": meta(0, "b1")},
			want:    "node-a: a1 (0)",
		},
		"the one that frees a card, instead of those proposed": {
			pod:     important(newPod("p", 12), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a2", "a3")},
			want:    "node-a: a1 (1)",
		},
		"at most as many violations as were told": {
			pod:     important(newPod("p", 12), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(3, "a1", "a2", "a3")},
			want:    "node-a: a1 (1)",
		},
		"several nodes": {
			pod:     important(newPod("p", 6), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a1"), "node-b": meta(0, "b1"), "node-c": meta(0, "c1")},
			want:    "node-a: a1 (0); node-b: b1 (0)",
		},
		"nobody is of lower priority": {
			pod:     newPod("p", 12),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a1")},
			want:    "",
		},
		"a pod that asks for nothing of ours": {
			pod:     important(newPod("p"), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(2, "a1", "a2"), "node-c": meta(0, "c1")},
			want:    "node-a: a1 a2 (2); node-c: c1 (0)",
		},
		"no nodes": {pod: important(newPod("p", 12), ""), victims: map[string]*extenderv1.MetaVictims{}, want: ""},
		"no victims, as the sum is enough": {
			pod:     important(newPod("p", 6), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0)},
			want:    "node-a: a0 (1)",
		},
		"no victims, beside a node with some": {
			pod:     important(newPod("p", 6), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0), "node-b": meta(0, "b1"), "node-c": meta(0)},
			want:    "node-a: a0 (1); node-b: b1 (0)",
		},
		"no victims, and nobody is of lower priority": {
			pod:     newPod("p", 6),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0)},
			want:    "",
		},
		"no victims, and a card has room": {
			pod:     important(newPod("p", 4), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0)},
			want:    "",
		},
		"no victims, for a pod that asks for nothing of ours": {
			pod:     important(newPod("p"), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0), "node-b": meta(0, "b1")},
			want:    "node-a: (0); node-b: b1 (0)",
		},
		"victims that are named twice": {
			pod:     important(newPod("p", 12), ""),
			victims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a1", "a1")},
			want:    "node-a: a1 (0)",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.running("node-a", "a1 8 a0", "a0 4 a0", "a2 4 a1", "a3 4 a1", "a4 8 a1")
			w.running("node-b", "b1 8 b0")
			before := fmt.Sprint(w.used("node-a"), w.used("node-b"))
			if got := w.preempt(extenderv1.ExtenderPreemptionArgs{Pod: tc.pod, NodeNameToMetaVictims: tc.victims}); got != tc.want {
				t.Errorf("answered %q, want %q", got, tc.want)
			}
			whole := map[string]*extenderv1.Victims{}
			for node, of := range tc.victims {
				whole[node] = &extenderv1.Victims{NumPDBViolations: of.NumPDBViolations}
				for _, p := range of.Pods {
					victim := newPod(p.UID, 4)
					victim.UID = types.UID(p.UID)
					whole[node].Pods = append(whole[node].Pods, victim)
				}
			}
			if got := w.preempt(extenderv1.ExtenderPreemptionArgs{Pod: tc.pod, NodeNameToVictims: whole}); got != tc.want {
				t.Errorf("whole pods: answered %q, want %q", got, tc.want)
			}
			if after := fmt.Sprint(w.used("node-a"), w.used("node-b")); after != before {
				t.Errorf("the books changed from %s to %s", before, after)
			}
		})
	}

	t.Run("a node that gives a pod one device is left out, and keeps nothing", func(t *testing.T) {
		w := newWorld(t)
		w.cluster.Single = map[string]bool{"node-a": true}
		w.running("node-a", "a1 16 a0", "a2 16 a1")
		pod := important(newPod("p", 16), "")
		pod.Annotations = map[string]string{wire.CountAnnotation: "2"}
		if got := w.preempt(extenderv1.ExtenderPreemptionArgs{Pod: pod,
			NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a1", "a2")}}); got != "" {
			t.Errorf("answered %q", got)
		}
		if n := w.ledger.Counts().Nominations; n != 0 {
			t.Errorf("room is kept for %d pods", n)
		}
	})
	t.Run("several shared resources", func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.Resources = append(c.Resources, otherMem) })
		w.running("node-a", "a1 16 a0", "a2 16 a1")
		pod := important(newPod("p", 12), "")
		pod.Spec.Containers = append(pod.Spec.Containers, newContainer("other", otherMem, 1))
		if got := w.preempt(extenderv1.ExtenderPreemptionArgs{Pod: pod,
			NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a1")}}); got != "" {
			t.Errorf("answered %q", got)
		}
	})
}

// TestFreedMemoryIsNotGivenAway goes through a whole preemption: what was freed is
// there for the pod it was freed for and for nobody of lower priority.
func TestFreedMemoryIsNotGivenAway(t *testing.T) {
	w := newWorld(t)
	w.running("node-a", "a1 16 a0", "a2 16 a1")
	w.running("node-b", "b1 8 b0")
	fits := func(pod *v1.Pod) bool {
		return len(*w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"node-a"}}).NodeNames) == 1
	}
	high, low := w.add(important(newPod("high", 12), "")), w.add(newPod("low", 8))
	if got := w.preempt(extenderv1.ExtenderPreemptionArgs{Pod: high,
		NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{"node-a": meta(0, "a2", "a1")}}); got != "node-a: a1 (0)" &&
		got != "node-a: a2 (0)" {
		t.Fatalf("answered %q", got)
	}
	w.ledger.Forget("a1")
	w.ledger.Forget("a2")
	w.running("node-a", "a2 16 a1") // it was one of the two
	if fits(low) {
		t.Error("filter gives freed memory to a pod of lower priority, before the nomination is seen")
	}
	high.Status.NominatedNodeName = "node-a"
	request := podOf(high).Requests[0]
	w.ledger.Nominate(string(high.UID), "node-a", request)
	w.clock = w.clock.Add(time.Hour)
	if fits(low) {
		t.Error("filter gives freed memory to a pod of lower priority")
	}
	mustContain(t, w.bind(low, "node-a"), "no device has enough free units")
	if !fits(high) {
		t.Error("filter refuses the pod for which memory was freed")
	}
	if got := w.bind(high, "node-a"); got != "" {
		t.Errorf("bind: %s", got)
	}
	w.show(high)
	if got := fmt.Sprint(w.used("node-a")); got != "[12 16]" {
		t.Errorf("used: %s", got)
	}
}

// TestNobodyElseIsEvictedWhenRoomIsComing: kube-scheduler's watch may be ahead of
// the extender's.
func TestNobodyElseIsEvictedWhenRoomIsComing(t *testing.T) {
	proposal := map[string]*extenderv1.MetaVictims{"node-b": meta(0, "b1")}
	for name, tc := range map[string]struct {
		// asked are the nodes that filter is asked about before.
		asked  []string
		before func(w *world)
		after  func(w *world)
		want   string
	}{
		"the victim is gone a moment after filter": {asked: []string{"node-a"}, after: func(w *world) { w.ledger.Forget("a1") }},
		"the victim is still going":                {asked: []string{"node-a"}, before: ending("a1", 16, "a0")},
		"among all nodes":                          {asked: []string{"node-b", "node-a"}, before: ending("a1", 16, "a0")},
		"the victim was not evicted":               {asked: []string{"node-a"}, want: "node-b: b1 (0)"},
		"the nominated node is none any more":      {asked: []string{"node-b"}, before: ending("a1", 16, "a0"), want: "node-b: b1 (0)"},
		"the nominated node was none the last time": {asked: []string{"node-b"}, after: func(w *world) { w.ledger.Forget("a1") },
			want: "node-b: b1 (0)"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.running("node-a", "a1 16 a0", "a2 16 a1")
			w.running("node-b", "b1 8 b0")
			pod := important(newPod("p", 6), "node-a")
			// What was asked in an earlier turn does not count.
			w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"node-a"}})
			if tc.before != nil {
				tc.before(w)
			}
			w.filter(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &tc.asked})
			if tc.after != nil {
				tc.after(w)
			}
			if got := w.preempt(extenderv1.ExtenderPreemptionArgs{Pod: pod, NodeNameToMetaVictims: proposal}); got != tc.want {
				t.Errorf("answered %q, want %q", got, tc.want)
			}
			// It is asked once for each answer of filter.
			if got := w.preempt(extenderv1.ExtenderPreemptionArgs{Pod: pod, NodeNameToMetaVictims: proposal}); got != "node-b: b1 (0)" {
				t.Errorf("asked again without filter: answered %q", got)
			}
		})
	}
}

func ending(uid string, units accel.Units, card accel.DeviceID) func(w *world) {
	return func(w *world) {
		w.ledger.Observe(ledger.Holding{
			Pod: accel.PodRef{UID: uid, Namespace: "team", Name: uid}, Node: "node-a", Resource: gcuMemory, Units: units, Device: card,
			Confirmed: true, Ending: true,
		})
	}
}

func TestPreemptRefuses(t *testing.T) {
	pod, err := json.Marshal(newPod("p", 12))
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t)
	for name, tc := range map[string]struct{ body, want string }{
		"empty":       {"", "empty"},
		"not JSON":    {"hello", "not valid JSON"},
		"an array":    {"[]", "not an object"},
		"null":        {"null", "not a JSON object"},
		"no pod":      {`{"NodeNameToMetaVictims":{}}`, "no Pod"},
		"no victims":  {`{"Pod":` + string(pod) + `}`, "names no victims"},
		"wrong type":  {`{"Pod":` + string(pod) + `,"NodeNameToMetaVictims":[]}`, "NodeNameToMetaVictims"},
		"a null node": {`{"Pod":` + string(pod) + `,"NodeNameToMetaVictims":{"n":null}}`, `node "n" has no list of victims`},
		"a null pod":  {`{"Pod":` + string(pod) + `,"NodeNameToMetaVictims":{"n":{"Pods":[null]}}}`, `victim 0 on node "n" has no UID`},
		"a pod of no UID": {`{"Pod":` + string(pod) + `,"NodeNameToVictims":{"n":{"Pods":[{"metadata":{"name":"x"}}]}}}`,
			`victim 0 on node "n" has no UID`},
		"too many pods": {
			`{"Pod":` + string(pod) + `,"NodeNameToMetaVictims":{"n":{"Pods":[` + strings.Repeat(`{"UID":"u"},`, maxVictims) +
				`{"UID":"u"}]}}}`,
			"more than 10000 victims on one node",
		},
	} {
		t.Run(name, func(t *testing.T) {
			status, answer := w.post("/preempt", []byte(tc.body))
			if status != http.StatusBadRequest {
				t.Errorf("status %d", status)
			}
			mustContain(t, string(answer), `"Error":"`)
			var text struct{ Error string }
			if err := json.Unmarshal(answer, &text); err != nil {
				t.Fatal(err)
			}
			mustContain(t, text.Error, tc.want)
		})
	}
	t.Run("not ready", func(t *testing.T) {
		w := newWorld(t)
		w.notReady = errors503{}
		if status, answer := w.post("/preempt", []byte(`{"Pod":{},"NodeNameToMetaVictims":{}}`)); status != http.StatusServiceUnavailable {
			t.Errorf("status %d: %s", status, answer)
		}
	})
}

type errors503 struct{}

func (errors503) Error() string { return "the books are being read" }

// What preempt plans holds room for a pod, so it is not for anybody to ask.
func TestPreemptIsForWhoMayBind(t *testing.T) {
	e := newWorld(t, func(c *Config) { c.BindFrom = []netip.Prefix{} }).extender
	for address, may := range map[string]bool{"127.0.0.1:1": true, "192.0.2.7:1": false} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://extender"+Prefix+"/preempt",
			strings.NewReader(`{"Pod":{"metadata":{"name":"p"}},"NodeNameToMetaVictims":{"n":{"Pods":[{"UID":"u"}]}}}`))
		if err != nil {
			t.Fatal(err)
		}
		r.RemoteAddr = address
		answer := recorder{header: http.Header{}}
		e.Handler().ServeHTTP(&answer, r)
		if got := answer.status == http.StatusOK; got != may {
			t.Errorf("from %s: status %d, %s", address, answer.status, answer.body)
		}
	}
}

type recorder struct {
	header http.Header
	status int
	body   []byte
}

func (r *recorder) Header() http.Header    { return r.header }
func (r *recorder) WriteHeader(status int) { r.status = status }
func (r *recorder) Write(b []byte) (int, error) {
	r.body = append(r.body, b...)
	return len(b), nil
}
