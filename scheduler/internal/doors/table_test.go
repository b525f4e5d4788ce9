package doors

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
	clusterstate "github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/plugin"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

// outcome is what a door says and does about one pod.
type outcome struct {
	// Fits are the nodes on which it fits, and Why is why it fits on none of the others: "!" before
	// what no eviction helps.
	Fits []string
	Why  map[string]string
	// Chosen is the node that is named where the policy chooses, and Scores are those of all that fit.
	Chosen string
	Scores map[string]int64
	// Devices are those of the bind, Error is why there is none, and Reserved what it leaves in the ledger.
	Devices, Error string
	Reserved       int
	// Victims are by node.
	Victims map[string][]string
	// Told are the events, Explained is the decision that is kept.
	Told      []string
	Explained history.Decision
}

// door is one of the two.
type door interface {
	filter(tb testing.TB, pod *v1.Pod) (fits []string, why map[string]string)
	score(tb testing.TB, pod *v1.Pod, nodes []string) map[string]int64
	bind(tb testing.TB, pod *v1.Pod, node string) error
	evicts(tb testing.TB, pod *v1.Pod) map[string][]string
	// fails ends an attempt without a node.
	fails(tb testing.TB, pod *v1.Pod)
	state() *books
}

func (b *books) state() *books { return b }

// ----- the extender

func (a *asked) filter(tb testing.TB, pod *v1.Pod) (fits []string, why map[string]string) {
	tb.Helper()
	var result extenderv1.ExtenderFilterResult
	names := a.names
	a.ask(tb, "/filter", extenderv1.ExtenderArgs{Pod: pod, NodeNames: &names}, &result)
	why = map[string]string{}
	for node, reason := range result.FailedNodes {
		why[node] = reason
	}
	for node, reason := range result.FailedAndUnresolvableNodes {
		why[node] = "!" + reason
	}
	if result.NodeNames != nil && len(*result.NodeNames) > 0 {
		fits = *result.NodeNames
	}
	return fits, why
}

func (a *asked) score(tb testing.TB, pod *v1.Pod, nodes []string) map[string]int64 {
	tb.Helper()
	var result extenderv1.HostPriorityList
	a.ask(tb, "/prioritize", extenderv1.ExtenderArgs{Pod: pod, NodeNames: &nodes}, &result)
	out := map[string]int64{}
	for _, host := range result {
		out[host.Host] = host.Score
	}
	return out
}

func (a *asked) bind(tb testing.TB, pod *v1.Pod, node string) error {
	tb.Helper()
	var result extenderv1.ExtenderBindingResult
	a.ask(tb, "/bind", extenderv1.ExtenderBindingArgs{PodName: pod.Name, PodNamespace: pod.Namespace, PodUID: pod.UID, Node: node}, &result)
	if result.Error != "" {
		return fmt.Errorf("%s", result.Error)
	}
	return nil
}

// evicts asks about all nodes without victims, as kube-scheduler after 1.37 does where the sum is enough.
func (a *asked) evicts(tb testing.TB, pod *v1.Pod) map[string][]string {
	tb.Helper()
	question := extenderv1.ExtenderPreemptionArgs{Pod: pod, NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{}}
	for _, node := range a.names {
		question.NodeNameToMetaVictims[node] = &extenderv1.MetaVictims{}
	}
	var answer extenderv1.ExtenderPreemptionResult
	a.ask(tb, "/preempt", question, &answer)
	out := map[string][]string{}
	for node, v := range answer.NodeNameToMetaVictims {
		for _, p := range v.Pods {
			out[node] = append(out[node], strings.TrimPrefix(p.UID, "uid-"))
		}
		slices.Sort(out[node])
	}
	return out
}

func (*asked) fails(testing.TB, *v1.Pod) {} // it is not told

// ----- the plugin

func (p *compiled) filter(tb testing.TB, pod *v1.Pod) (fits []string, why map[string]string) {
	tb.Helper()
	var statuses map[string]*fwk.Status
	p.last, fits, statuses = p.attempt(tb, pod)
	why = map[string]string{}
	for node, status := range statuses {
		if status.Plugin() != plugin.Name {
			continue // it is not named
		}
		if why[node] = status.Message(); status.Code() == fwk.UnschedulableAndUnresolvable {
			why[node] = "!" + status.Message()
		}
	}
	return fits, why
}

func (p *compiled) score(tb testing.TB, pod *v1.Pod, nodes []string) map[string]int64 {
	tb.Helper()
	state, _, _ := p.attempt(tb, pod)
	var infos []fwk.NodeInfo
	for _, name := range nodes {
		info, err := p.snapshot.NodeInfos().Get(name)
		if err != nil {
			tb.Fatal(err)
		}
		infos = append(infos, info)
	}
	if status := p.RunPreScorePlugins(tb.Context(), state, pod, infos); !status.IsSuccess() {
		tb.Fatal(status)
	}
	scores, status := p.RunScorePlugins(tb.Context(), state, pod, infos)
	if !status.IsSuccess() {
		tb.Fatal(status)
	}
	out := map[string]int64{}
	for _, s := range scores {
		out[s.Name] = s.TotalScore / 10 // of 100, not of 10
	}
	return out
}

func (p *compiled) bind(tb testing.TB, pod *v1.Pod, node string) error {
	tb.Helper()
	state := p.last
	status := p.RunReservePluginsReserve(tb.Context(), state, pod, node)
	if status.IsSuccess() {
		status = p.RunBindPlugins(tb.Context(), state, pod, node)
	}
	if status.IsSuccess() {
		p.RunPostBindPlugins(tb.Context(), state, pod, node)
		return nil
	}
	p.RunReservePluginsUnreserve(tb.Context(), state, pod, node)
	return status.AsError()
}

func (p *compiled) fails(tb testing.TB, pod *v1.Pod) {
	tb.Helper()
	p.divvy.PostFilter(tb.Context(), p.last, pod, framework.NewNodeToStatus(nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable)))
}

func (p *compiled) evicts(tb testing.TB, pod *v1.Pod) map[string][]string {
	tb.Helper()
	state, _, why := p.attempt(tb, pod)
	out := map[string][]string{}
	for node, v := range p.victims(tb, state, pod, why, nil) {
		out[node] = namesOf(v)
	}
	return out
}

// through takes a pod through a door: what is said of it, and then a bind to the node that is chosen, if
// one is.
func through(tb testing.TB, all, chooses door, pod *v1.Pod) (o outcome) {
	tb.Helper()
	o.Fits, o.Why = all.filter(tb, pod)
	slices.Sort(o.Fits)
	if len(o.Fits) > 0 {
		o.Scores = all.score(tb, pod, o.Fits)
	} else {
		o.Victims = all.evicts(tb, pod)
	}
	b := chooses.state()
	b.cluster.Add(pod)
	if one, _ := chooses.filter(tb, pod); len(one) != 1 {
		chooses.fails(tb, pod)
	} else {
		o.Chosen = one[0]
		if err := chooses.bind(tb, pod, o.Chosen); err != nil {
			o.Error = err.Error()
		}
	}
	key := pod.Namespace + "/" + pod.Name
	if value := b.cluster.Annotations[key][wire.GrantAnnotation]; value != "" {
		grant, err := b.keys.DecodeGrant(string(pod.UID), value)
		if err != nil {
			tb.Fatal(err)
		}
		o.Devices = string(grant.Device)
		for _, more := range grant.More {
			o.Devices += "+" + string(more.Device)
		}
	}
	o.Reserved, o.Told = b.ledger.Counts().Reservations, b.told
	o.Explained = b.explained(tb, pod)
	return o
}

// explained reads what is kept of a pod, without what differs by nature.
func (b *books) explained(tb testing.TB, pod *v1.Pod) (d history.Decision) {
	tb.Helper()
	r := httptest.NewRequestWithContext(tb.Context(), http.MethodGet, inspect.ExplainRoute+"/"+pod.Namespace+"/"+pod.Name, http.NoBody)
	w := httptest.NewRecorder()
	b.extender.Reports().ServeHTTP(w, r)
	if w.Code == http.StatusNotFound {
		return d
	}
	var e history.Explanation
	if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil {
		tb.Fatalf("%s: %v", w.Body, err)
	}
	return e.Decision
}

// isolated gives the devices of a node a tier.
func isolated(tier accel.Tier) func(*accel.Inventory) {
	return func(inv *accel.Inventory) {
		for i := range inv.Shares {
			inv.Shares[i].Isolation = accel.Isolation{Memory: tier, Attested: now}
		}
	}
}

func annotated(key, value string, amounts ...int64) *v1.Pod {
	pod := newPod("p", amounts...)
	pod.Annotations = map[string]string{key: value}
	return pod
}

func important(pod *v1.Pod) *v1.Pod {
	priority := int32(100)
	pod.Spec.Priority = &priority
	return pod
}

// TestBothDoors takes pods through both, and compares all that is said, done and kept. Each row says
// beside what it wants of either: the node, the devices, or a part of a reason, of an error or of an event,
// or the victims.
func TestBothDoors(t *testing.T) {
	// node-a has devices of 16, 16, node-b of 8; low pods hold 6 of each of node-a's.
	usual := func(c *cluster) {
		c.node("node-a", nil, 16, 16)
		c.node("node-b", nil, 8)
		c.runs(podOf("low-0", 6, 1, 1), "node-a", 0)
		c.runs(podOf("low-1", 6, 1, 2), "node-a", 1)
	}
	for name, tc := range map[string]struct {
		cluster func(*cluster)
		pod     *v1.Pod
		before  func(*books)
		want    []string
	}{
		"the fullest device that has room": {pod: newPod("p", 10), want: []string{"node-a", "node-a-0"}},
		"the node that is filled":          {pod: newPod("p", 8), want: []string{"node-b", "node-b-0"}},
		"several containers":               {pod: newPod("p", 4, 6), want: []string{"node-a"}},
		"spread":                           {pod: annotated(wire.PolicyAnnotation, "spread", 4), want: []string{"node-a"}},
		"a policy that is none":            {pod: annotated(wire.PolicyAnnotation, "nonsense", 4), want: []string{"nonsense"}},
		"a number that is none":            {pod: annotated(wire.CountAnnotation, "many", 4), want: []string{wire.CountAnnotation}},
		"two devices":                      {pod: annotated(wire.CountAnnotation, "2", 20), want: []string{"node-a-0+node-a-1"}},
		"more devices than a node has":     {pod: annotated(wire.CountAnnotation, "3", 12), want: []string{"NeverFits"}},
		"not on a device":                  {pod: annotated(wire.AvoidDevicesAnnotation, "node-a-0", 10), want: []string{"node-a-1"}},
		"larger than any device":           {pod: newPod("p", 17), want: []string{"NeverFits", "!"}},
		"no device has room":               {pod: newPod("p", 12), want: []string{"insufficient GCU Memory in one gcu device"}},
		"the least of its priority goes":   {pod: important(newPod("p", 12)), want: []string{"victims node-a: low-0"}},
		"a node that gives one device": {pod: annotated(wire.CountAnnotation, "2", 20),
			before: func(b *books) { b.cluster.Single = map[string]bool{"node-a": true} }, want: []string{"several devices"}},
		"a node without devices": {cluster: func(c *cluster) {
			c.node("node-a", nil, 8)
			c.node("node-z", nil, 8)
			delete(c.offers, "node-z")
		}, pod: newPod("p", 8), want: []string{"node-a-0", "node-z"}},
		"a device that is sick": {cluster: func(c *cluster) {
			c.node("node-a", func(inv *accel.Inventory) { inv.Shares[0].Device.Health.Unhealthy = true }, 8, 16)
		}, pod: newPod("p", 8), want: []string{"node-a-1"}},
		"a tier": {cluster: func(c *cluster) {
			c.node("node-a", isolated(accel.TierNone), 16)
			c.node("node-b", isolated(accel.TierDriver), 16)
		}, pod: annotated(wire.IsolationAnnotation, "driver", 8),
			want: []string{"node-b-0", "isolation driver required, device states none"}},
		"a tier that none has": {cluster: func(c *cluster) {
			c.node("node-a", isolated(accel.TierNone), 16)
			c.node("node-b", isolated(accel.TierDriver), 16)
		}, pod: annotated(wire.IsolationAnnotation, "hardware", 8), want: []string{"IsolationNotStated", "driver on node-b"}},
		"a tier, with victims": {cluster: func(c *cluster) {
			c.node("node-a", isolated(accel.TierNone), 16)
			c.node("node-b", isolated(accel.TierDriver), 16)
			c.runs(podOf("low-0", 16, 1, 1), "node-a", 0)
			c.runs(podOf("low-1", 16, 1, 1), "node-b", 0)
		}, pod: important(annotated(wire.IsolationAnnotation, "driver", 8)), want: []string{"victims node-b: low-1"}},
		"two devices, with victims": {pod: important(annotated(wire.CountAnnotation, "2", 24)),
			want: []string{"victims node-a: low-0 low-1"}},
		"another is nominated": {cluster: func(c *cluster) {
			c.node("node-a", nil, 8)
			other := important(newPod("other", 6))
			other.Status.NominatedNodeName = "node-a"
			c.pods = append(c.pods, other)
		}, pod: newPod("p", 4), want: []string{"insufficient GCU Memory"}},
		"another is being bound": {pod: newPod("p", 8), before: func(b *books) {
			other := newPod("other", 8)
			requests, _ := kube.RequestsOf(other, []accel.Resource{memory})
			if _, _, err := b.ledger.Reserve(decisiontest.PodOf(other).Ref, now, "node-b", requests[0]); err != nil {
				b.told = append(b.told, err.Error())
			}
		}, want: []string{"node-a", "node-b insufficient"}},
		"the largest amount":     {pod: newPod("p", math.MaxInt64), want: []string{"NeverFits"}},
		"amounts beyond numbers": {pod: newPod("p", math.MaxInt64, math.MaxInt64), want: []string{"NeverFits"}},
		"a name of a megabyte":   {pod: annotated(wire.AvoidDevicesAnnotation, strings.Repeat("x", 1<<20), 4), want: []string{"!"}},
		"characters of no name":  {pod: annotated(wire.PolicyAnnotation, "\x00\n\u202e", 4), want: []string{"RequestRefused"}},
		"a bind that is rejected": {pod: newPod("p", 8), before: func(b *books) {
			b.cluster.BindError = bindFails(clusterstate.ErrPodGone)
		}, want: []string{"node-b", "error"}},
		"a bind of which the outcome is unknown": {pod: newPod("p", 8), before: func(b *books) {
			b.cluster.BindError = bindFails(clusterstate.ErrOutcomeUnknown)
		}, want: []string{"node-b", "error", "reserved"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := &cluster{}
			if tc.cluster == nil {
				tc.cluster = usual
			}
			tc.cluster(c)
			prepared := func(d door) door {
				if tc.before != nil {
					tc.before(d.state())
				}
				return d
			}
			outside := through(t, prepared(c.extender(t, false)), prepared(c.extender(t, true)), tc.pod)
			inside := through(t, prepared(c.plugin(t, false, false)), prepared(c.plugin(t, true, false)), tc.pod)
			byNature(&outside, &inside)
			if diff := gocmp.Diff(outside, inside); diff != "" {
				t.Errorf("the extender (-) and the plugin (+) differ:\n%s", diff)
			}
			text := outside.text()
			for _, want := range tc.want {
				if !strings.Contains(text, want) {
					t.Errorf("both say %q, which lacks %q", text, want)
				}
			}
		})
	}
}

// byNature takes out what differs by nature: docs/scheduler-plugin.md.
func byNature(outside, inside *outcome) {
	outside.Explained.Only = nil                // the framework is asked about all nodes
	for i := range outside.Explained.Rejected { // nodes without devices it counts without looking at them
		if r := &outside.Explained.Rejected[i]; r.Code == "nodeUnknown" {
			r.Named = nil
		}
	}
	inside.Error = strings.TrimPrefix(inside.Error, `running Bind plugin "`+plugin.Name+`": `)
	for node, reason := range inside.Why {
		// Only there it is known that evicting all others would not help.
		if outside.Why[node] == strings.TrimPrefix(reason, "!") {
			inside.Why[node] = outside.Why[node]
		}
	}
}

// text is all of it, to look for parts in.
func (o *outcome) text() string {
	text := fmt.Sprintln(o.Fits, o.Chosen, o.Devices, o.Told)
	for _, node := range slices.Sorted(maps.Keys(o.Why)) {
		text += fmt.Sprintln(node, o.Why[node])
	}
	for node, victims := range o.Victims {
		text += fmt.Sprintf("victims %s: %s\n", node, strings.Join(victims, " "))
	}
	if o.Error != "" {
		text += "error " + o.Error
	}
	if o.Reserved > 0 {
		text += " reserved"
	}
	return text
}

func bindFails(err error) func(context.Context, accel.PodRef, string) error {
	return func(context.Context, accel.PodRef, string) error { return err }
}
