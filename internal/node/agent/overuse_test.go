package agent

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/overuse"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// TestOveruseFound: after four passes there are an event, a series and an entry of the list,
// and all of it ends.
func TestOveruseFound(t *testing.T) {
	m := newMeasuring(t, config.UsageMetricsContainer)
	pod := newPod("p", 4)
	m.admits(m.grantTo(pod, "a", 1))
	running(pod, "id-1")
	pod.Status.ContainerStatuses[0].State.Running = &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(time.Unix(0, 0))}
	var reported []string
	m.usageWatch.overuse.event = func(pod *corev1.Pod, k events.Kind, message string) {
		reported = append(reported, fmt.Sprintf("%s %s: %s", pod.Name, k.Reason, message))
	}
	pass := func(used uint64) {
		t.Helper()
		m.clock = m.clock.Add(15 * time.Second)
		bytes := used * gb
		m.meter.found["a"] = backend.Measured{UsedBytes: bytes, Processes: []backend.Process{{PID: 101, Memory: &bytes}}}
		m.usageWatch.metrics.show(m.usageWatch.pass(t.Context()))
	}
	series := func() int {
		t.Helper()
		n, err := testutil.GatherAndCount(m.registry, "divvy_node_container_overuse")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for range 3 {
		pass(6)
	}
	if len(reported) > 0 || series() > 0 {
		t.Fatalf("after three passes: %q", reported)
	}
	pass(6)
	last := m.usageWatch.overuse.desk.get()
	proven := last.proven(m.clock)
	if len(proven) != 1 || proven[0].Container.PodUID != "uid-p" || *proven[0].Container.UsedBytes != 6*gb || proven[0].Device != "a" {
		t.Errorf("episodes: %+v", proven)
	}
	if series() != 1 {
		t.Error("there is no series")
	}
	// Passes that come no more prove nothing.
	if proven := last.proven(m.clock.Add(time.Hour)); len(proven) > 0 {
		t.Errorf("an hour later: %+v", proven)
	}
	pass(4)
	const device = " of enflame device 0 (a); its allocation of enflame.com/gcu-memory is 4096 MiB"
	want := []string{
		"p DeviceMemoryOverused: Container c0 uses 6144 MiB" + device, "p DeviceMemoryOveruseEnded: Container c0 uses 4096 MiB" + device,
	}
	if diff := cmp.Diff(want, reported); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if last := m.usageWatch.overuse.desk.get(); len(last.current) > 0 || series() > 0 {
		t.Errorf("after its end: %+v", last.current)
	}
}

func TestNamespaceOveruse(t *testing.T) {
	registry := prometheus.NewRegistry()
	u := newUsageMetrics(newMetrics(registry), config.UsageMetricsNamespace)
	u.show(wire.UsageReport{}, []overuse.Episode{episode("p", 6), episode("q", 6)})
	want := `# HELP divvy_node_namespace_overuse Containers of a namespace that use more memory of a device than their allocation.
# TYPE divvy_node_namespace_overuse gauge
divvy_node_namespace_overuse{device="a",index="0",namespace="ns",resource="enflame.com/gcu-memory"} 2
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "divvy_node_namespace_overuse",
		"divvy_node_container_overuse"); err != nil {
		t.Error(err)
	}
}

// episode is that of a container which uses as many GB of its 4.
func episode(pod string, used uint64) overuse.Episode {
	return overuse.Episode{
		Vendor: "enflame", Device: "a", Since: time.Unix(900, 0), Peak: (used - 4) * gb, Assured: true,
		Container: wire.ContainerUsage{Namespace: "ns", Pod: pod, PodUID: "uid-" + pod, Container: "c0", Resource: gcuMemory,
			AllocatedBytes: new(4 * gb), UsedBytes: new(used * gb)},
	}
}

func TestStartOf(t *testing.T) {
	at := func(name string, seconds int64) corev1.ContainerStatus {
		return corev1.ContainerStatus{Name: name,
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(time.Unix(seconds, 0))}}}
	}
	pod := newPod("p", 1)
	pod.Status.InitContainerStatuses = []corev1.ContainerStatus{at("init", 30)}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{at("a", 10), at("b", 20), {Name: "waits"}}
	for name, want := range map[string]int64{"a": 10, "init": 30, "": 30, "waits": -1, "none": -1} {
		got, runs := startOf(pod, name)
		if runs != (want >= 0) || runs && got.Unix() != want {
			t.Errorf("container %q started at %v, %v; want %d", name, got, runs, want)
		}
	}
	if _, runs := startOf(nil, ""); runs {
		t.Error("a pod that is gone runs")
	}
}

// TestOverusePublished: each step publishes what differs, and nothing else.
func TestOverusePublished(t *testing.T) {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode}, Status: corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}})
	now := time.Unix(1000, 0)
	publisher := newPublisher(client, thisNode, newMetrics(prometheus.NewRegistry()), func() {})
	node := func() *corev1.Node {
		t.Helper()
		n, err := client.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	on, off := &overuseDesk{enabled: true}, &overuseDesk{}
	long := make([]overuse.Episode, 10)
	for i := range long {
		long[i] = episode(fmt.Sprint("p", i), 6)
	}
	unproven := episode("p", 6)
	unproven.Since = time.Time{}
	measured := episode("p", 6)
	measured.Assured = false
	set := func(episodes ...overuse.Episode) func() {
		return func() {
			on.set(lastPass{at: now, until: now.Add(90 * time.Second), current: episodes, conclusive: true})
		}
	}
	const over, within, unknown = "True ContainersOverAllocation", "False ContainersWithinAllocation", "Unknown UseNotMeasured"
	for _, step := range []struct {
		what      string
		desk      *overuseDesk
		do        func()
		patches   int
		pods      []string
		condition string
	}{
		{"not measured", off, nil, 0, nil, ""},
		{"before the first pass", on, nil, 0, nil, ""},
		{"a pass", on, set(), 1, nil, within},
		{"another pass", on, set(), 0, nil, within},
		{"overuse", on, set(episode("p", 6)), 2, []string{"uid-p c0 a 6"}, over},
		{"more overuse", on, set(episode("p", 7)), 0, []string{"uid-p c0 a 6"}, over},
		{"a minute later", on, func() { now = now.Add(wire.OveruseRefresh); set(episode("p", 7))() }, 1, []string{"uid-p c0 a 7"},
			over},
		{"two pods", on, set(episode("p", 7), episode("o", 6)), 2, []string{"uid-o c0 a 6", "uid-p c0 a 7"}, over},
		{"a minute without a pass", on, func() { now = now.Add(wire.OveruseRefresh) }, 0, []string{"uid-o c0 a 6", "uid-p c0 a 7"}, over},
		{"passes have stopped", on, func() { now = now.Add(wire.OveruseRefresh) }, 2, nil, unknown},
		{"a pass that measures nothing", on, func() { on.set(lastPass{at: now, until: now.Add(time.Minute)}) }, 0, nil, unknown},
		{"an allowance that is not configured", on, set(measured), 1, nil, over},
		{"a pass that proves nothing", on, set(unproven), 0, nil, over},
		{"many", on, set(long...), 2, []string{"uid-p0 c0 a 6", "uid-p1 c0 a 6", "uid-p2 c0 a 6", "uid-p3 c0 a 6", "uid-p4 c0 a 6",
			"uid-p5 c0 a 6", "uid-p6 c0 a 6", "uid-p7 c0 a 6", "uid-p8 c0 a 6", "uid-p9 c0 a 6"}, over},
		{"another daemon that measures", &overuseDesk{enabled: true}, nil, 1, nil, over},
		{"the end", on, set(), 1, nil, within},
		{"measured no more", off, nil, 1, nil, ""},
	} {
		if step.do != nil {
			step.do()
		}
		if err := publisher.objects.Replace([]any{must(stripNode(node()))}, ""); err != nil {
			t.Fatal(err)
		}
		client.ClearActions()
		if err := step.desk.publish(t.Context(), publisher, now); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		patches := 0
		for _, action := range client.Actions() {
			if _, ok := action.(kubetesting.PatchAction); ok {
				patches++
			}
		}
		n := node()
		list, err := wire.DecodeOveruse(n.Annotations[wire.OveruseAnnotation])
		if err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		var pods []string
		for _, p := range list.Pods {
			pods = append(pods, fmt.Sprint(p.Pod.UID, " ", p.Container, " ", p.Device, " ", p.UsedBytes/gb))
		}
		condition := ""
		if c := findCondition(n.Status.Conditions, wire.OveruseCondition); c != nil {
			condition = fmt.Sprint(c.Status, " ", c.Reason)
		}
		if diff := cmp.Diff(step.pods, pods); diff != "" || patches != step.patches || condition != step.condition {
			t.Errorf("%s: %d patches, want %d; condition %q, want %q; list (-want +got):\n%s", step.what, patches, step.patches, condition,
				step.condition, diff)
		}
		if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady }) {
			t.Fatalf("%s: kubelet's condition is gone", step.what)
		}
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func TestOveruseCondition(t *testing.T) {
	var many []overuse.Episode
	for i := range 9 {
		many = append(many, episode(fmt.Sprint("p", i), 6))
	}
	many[1].Container.Container = ""
	now := time.Unix(9, 0)
	const first = "more memory in use than allocated: ns/p0/c0 on enflame device 0, ns/p1 on enflame device 0, "
	last := lastPass{current: many, until: now.Add(1)}
	if got := conditionOf(last, now).Message; !strings.HasPrefix(got, first) || !strings.HasSuffix(got, ", 1 more") {
		t.Errorf("message: %s", got)
	}
	before := metav1.NewTime(time.Unix(5, 0))
	shown := &corev1.NodeCondition{Status: corev1.ConditionTrue, LastTransitionTime: before}
	next, ok := conditionPatch(wire.OveruseCondition, conditionOf(last, now), shown, now).(corev1.NodeCondition)
	if !ok || next.LastTransitionTime != before || next.LastHeartbeatTime.Unix() != 9 {
		t.Errorf("another message is a transition: %+v", next)
	}
}

func withheldOf(in accel.Inventory) (out []accel.Units) {
	for _, s := range in.Shares {
		out = append(out, s.Withheld)
	}
	return out
}

// TestWithholdAfterAStart: what is published stays until a daemon that has just started can
// know.
func TestWithholdAfterAStart(t *testing.T) {
	inventory := func(unit string, withheld ...accel.Units) accel.Inventory {
		in := accel.Inventory{Resource: gcuMemory, Unit: unit}
		for i, n := range withheld {
			in.Shares = append(in.Shares, accel.Share{Device: accel.Device{ID: accel.DeviceID(fmt.Sprint("d", i))}, Units: 8, Withheld: n})
		}
		return in
	}
	for name, tt := range map[string]struct {
		desk      *overuseDesk
		published accel.Inventory
		want      []accel.Units
	}{
		"it stays":              {&overuseDesk{withholds: true}, inventory("1", 3), []accel.Units{3, 0}},
		"of a larger device":    {&overuseDesk{withholds: true}, inventory("1", 30), []accel.Units{8, 0}},
		"of another unit":       {&overuseDesk{withholds: true}, inventory("0.1", 3), []accel.Units{0, 0}},
		"nothing was published": {&overuseDesk{withholds: true}, accel.Inventory{}, []accel.Units{0, 0}},
		"it does not withhold":  {&overuseDesk{}, inventory("1", 3), []accel.Units{0, 0}},
		"it knows":              {&overuseDesk{withholds: true, last: lastPass{settled: true}}, inventory("1", 3), []accel.Units{0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			in := inventory("1", 0, 0)
			tt.desk.withhold(&in, func(r accel.Resource) (accel.Inventory, bool) {
				return tt.published, r == tt.published.Resource
			})
			if diff := cmp.Diff(tt.want, withheldOf(in)); diff != "" {
				t.Errorf("withheld (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWithhold(t *testing.T) {
	inventory := func(resource accel.Resource, unit string, units accel.Units) accel.Inventory {
		share := func(id accel.DeviceID) accel.Share {
			return accel.Share{Device: accel.Device{ID: id, MemoryBytes: 16 << 30}, Units: units}
		}
		return accel.Inventory{Resource: resource, Unit: unit, Shares: []accel.Share{share("a"), share("b")}}
	}
	unproven := episode("q", 5)
	unproven.Since, unproven.Peak = time.Time{}, 1
	measured := episode("p", 6)
	measured.Assured = false
	for name, tt := range map[string]struct {
		inventory accel.Inventory
		episodes  []overuse.Episode
		want      []accel.Units
	}{
		"nothing is over":           {inventory(gcuMemory, "1", 16), nil, []accel.Units{0, 0}},
		"the excess":                {inventory(gcuMemory, "1", 16), []overuse.Episode{episode("p", 6)}, []accel.Units{2, 0}},
		"parts of units":            {inventory(gcuMemory, "1", 16), []overuse.Episode{episode("p", 6), unproven}, []accel.Units{3, 0}},
		"smaller units":             {inventory(gcuMemory, "0.1", 160), []overuse.Episode{episode("p", 6)}, []accel.Units{20, 0}},
		"sixths of a card":          {inventory(gcuMemory, "1/6", 6), []overuse.Episode{episode("p", 7)}, []accel.Units{2, 0}},
		"no more than there are":    {inventory(gcuMemory, "1", 16), []overuse.Episode{episode("p", 30)}, []accel.Units{16, 0}},
		"a measured allowance":      {inventory(gcuMemory, "1", 16), []overuse.Episode{measured}, []accel.Units{0, 0}},
		"another resource":          {inventory("other/memory", "1", 16), []overuse.Episode{episode("p", 6)}, []accel.Units{0, 0}},
		"one not counted in memory": {inventory(gcuMemory, "", 1), []overuse.Episode{episode("p", 6)}, []accel.Units{0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			d := &overuseDesk{withholds: true}
			d.set(lastPass{current: tt.episodes, settled: true})
			engines := tt.inventory.Shares
			published := inventory(tt.inventory.Resource, tt.inventory.Unit, 16)
			published.Shares[0].Withheld = 9
			d.withhold(&tt.inventory, func(accel.Resource) (accel.Inventory, bool) { return published, true })
			if diff := cmp.Diff(tt.want, withheldOf(tt.inventory)); diff != "" || engines[0].Withheld != 0 {
				t.Errorf("withheld (-want +got):\n%s\nthe engine's own: %+v", diff, engines[0])
			}
		})
	}
}
