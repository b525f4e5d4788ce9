package extender

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// withPolicy starts a replica with the policy, over two nodes with a card each.
func (w *replicated) withPolicy(n int) *instance {
	w.t.Helper()
	w.t.Setenv("POD_NAME", fmt.Sprint("replica-", n))
	return start(w.t, kube.Clients{Kubernetes: w.server.Client(nil)}, func(o *Options) {
		o.GrantKeyFile, o.Election.Enabled, o.Election.Namespace, o.Election.Duration = w.key, true, release, time.Second
		o.Placement.Policy, o.Placement.Demand = fragmentation.Name, `[{"units":12,"cpu":"1","share":1}]`
	})
}

// rates asks how good the nodes are, node-a and node-b unless others are named, for a
// pod that asks for so many units.
func (i *instance) rates(units string, annotations map[string]string, names ...string) string {
	i.t.Helper()
	p := pod("asks")
	p.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceName(racingMemory): resource.MustParse(units)}
	p.Annotations = annotations
	if len(names) == 0 {
		names = []string{"node-a", "node-b"}
	}
	var scores extenderv1.HostPriorityList
	i.post("prioritize", extenderv1.ExtenderArgs{Pod: p, NodeNames: &names}, &scores)
	text := ""
	for _, s := range scores {
		text += fmt.Sprintf("%s %d ", s.Host, s.Score)
	}
	return strings.TrimSpace(text)
}

// shows waits until the metrics have a line.
func (i *instance) shows(want string) {
	i.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		_, body := i.get(i.metrics + "/metrics")
		if strings.Contains(body, "\n"+want+"\n") {
			return
		}
		if time.Now().After(deadline) {
			i.t.Fatalf("the metrics lack %s:\n%s", want, body)
		}
	}
}

// The whole program, twice: it is ready when it has prices, answers by them, and
// both replicas have learned from every pod on a node once, so that one goes on where the
// other ends.
func TestFragmentationOverHTTP(t *testing.T) {
	w := newReplicated(t, "waits")
	client := w.server.Client(nil).CoreV1()
	// placed is a pod on a node that publishes nothing.
	placed := func(name string) *v1.Pod {
		p := pod(name)
		p.UID, p.Spec.NodeName = types.UID("uid-"+name), "elsewhere"
		return p
	}
	for _, name := range []string{"p", "q"} {
		if _, err := client.Pods("team").Create(t.Context(), placed(name), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for name, units := range map[string]accel.Units{"node-a": 14, "node-b": 16, "node-c": 16, "node-d": 16} {
		text, err := wire.EncodeInventory([]accel.Inventory{{Resource: racingMemory,
			Unit: "1", Shares: []accel.Share{{Units: units, Device: accel.Device{ID: accel.DeviceID(name), NUMANode: accel.NoNUMA}}}}})
		if err != nil {
			t.Fatal(err)
		}
		node := &v1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"enflame.com/gcushare": "true"},
				Annotations: map[string]string{wire.InventoryAnnotation: text}},
			Status: v1.NodeStatus{Allocatable: v1.ResourceList{v1.ResourceCPU: resource.MustParse("8"),
				v1.ResourceMemory: resource.MustParse("8Gi")}},
		}
		if _, err := client.Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	beside := pod("beside")
	beside.UID, beside.Spec.NodeName = "uid-beside", "node-d"
	beside.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("7500m")}}

	first := w.withPolicy(0)
	first.leads()
	first.ready("")
	const seen = `divvy_extender_demand_seen_pods_total{resource="enflame.com/gcu-memory"} `
	first.shows(seen + "2")
	first.shows(`divvy_extender_price_changes_total{resource="enflame.com/gcu-memory"} 1`)
	const byDemand, fullest = "node-a 9 node-b 10", "node-a 10 node-b 9"
	for range 3 { // kube-scheduler asks again
		if got := first.rates("4", nil); got != byDemand {
			t.Errorf("rated %s, want %s: 10 free units are no room for the 12 that are expected", got, byDemand)
		}
	}
	if got := first.rates("4", map[string]string{wire.PolicyAnnotation: "binpack"}); got != fullest {
		t.Errorf("by binpack rated %s, want %s", got, fullest)
	}
	names := []string{"node-a", "node-b"}
	wrong := pod("wrong")
	wrong.Annotations = map[string]string{wire.PolicyAnnotation: "tetris"}
	var filtered extenderv1.ExtenderFilterResult
	first.post("filter", extenderv1.ExtenderArgs{Pod: wrong, NodeNames: &names}, &filtered)
	const sentence = `annotation divvy.dev/placement-policy: "tetris" is not a placement policy; use one of binpack, spread, fragmentation`
	if got := filtered.FailedAndUnresolvableNodes["node-b"]; got != sentence {
		t.Errorf("refused with %q, want %q", got, sentence)
	}

	second := w.withPolicy(1)
	second.shows(seen + "2")
	for _, one := range []*v1.Pod{placed("r"), beside} {
		if _, err := client.Pods("team").Create(t.Context(), one, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range []*instance{first, second} {
		i.shows(seen + "4")
	}
	// With 500 millicores left, the card of node-d is no room for what is expected
	// anyway, so the pod takes nothing away there.
	const alike, lost = "node-c 10 node-d 10", "node-c 9 node-d 10"
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
		got := first.rates("12", nil, "node-c", "node-d")
		if got == lost {
			break
		}
		if got != alike || time.Now().After(deadline) {
			t.Fatalf("with the CPU of node-d taken rated %s, want %s", got, lost)
		}
	}
	if err := first.end(); err != nil {
		t.Error(err)
	}
	second.leads()
	second.shows(seen + "4")
	if got := second.rates("4", map[string]string{wire.PolicyAnnotation: "binpack"}); got != fullest {
		t.Errorf("by binpack rated %s, want %s", got, fullest)
	}
	if err := second.end(); err != nil {
		t.Error(err)
	}
}

// Each mistake of the expected demand names the flag and the entry.
func TestDemandMistakes(t *testing.T) {
	o := DefaultOptions()
	o.TLS.Listen, o.Placement.Demand = "", `[{"share":1},{"units":8}]`
	if err := o.Validate(); err == nil || !strings.HasPrefix(err.Error(), "--demand: entry 1: units: ") ||
		!strings.Contains(err.Error(), "\n--demand: entry 2: share: ") {
		t.Errorf("the flag is not named: %v", err)
	}
}
