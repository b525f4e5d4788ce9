package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// counted is a ledger that notes what it is told of CPU and memory.
type counted struct {
	*ledger.Ledger
	nodes, pods map[string]string
	observed    []ledger.Holding
}

func (c *counted) Observe(h ledger.Holding) {
	c.observed = append(c.observed, h)
	c.Ledger.Observe(h)
}

func (c *counted) SetCapacity(node string, cpu, memory int64) {
	c.nodes[node] = fmt.Sprintf("%dm %dMi", cpu, memory)
}

func (c *counted) Charge(uid, node string, cpu, memory int64) {
	c.pods[uid] = fmt.Sprintf("%s %dm %dMi", node, cpu, memory)
}

func (c *counted) Forget(uid string) {
	delete(c.pods, uid)
	c.Ledger.Forget(uid)
}

func (c *counted) want(t *testing.T, pods string) {
	t.Helper()
	var got []string
	for _, uid := range slices.Sorted(maps.Keys(c.pods)) {
		got = append(got, uid+": "+c.pods[uid])
	}
	if got := strings.Join(got, "; "); got != pods {
		t.Errorf("pods %q, want %q", got, pods)
	}
}

func TestCapacity(t *testing.T) {
	c := &counted{Ledger: ledger.New(ledger.Options{}), nodes: map[string]string{}, pods: map[string]string{}}
	b := NewState(Config{Ledger: c, Capacity: c, Resources: []accel.Resource{gcuMemory}})
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Status: v1.NodeStatus{Allocatable: v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("7500m"), v1.ResourceMemory: resource.MustParse("16777217Ki"),
	}}}
	ok(b.Nodes().Replace([]any{node}, "1"))
	node = node.DeepCopy()
	node.Name = "b"
	node.Status.Allocatable = nil
	ok(b.Nodes().Add(node))
	if c.nodes["a"] != "7500m 16384Mi" || c.nodes["b"] != "0m 0Mi" {
		t.Errorf("nodes %v", c.nodes)
	}

	pod := func(uid, node, cpu string) *v1.Pod {
		p := podSpec(nil, []v1.Container{{Name: "c", Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
			v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse("1Mi"),
		}}}})
		p.ObjectMeta = metav1.ObjectMeta{Namespace: "team", Name: uid, UID: types.UID(uid)}
		p.Spec.NodeName = node
		return p
	}
	ended := pod("ended", "a", "1")
	ended.Status.Phase = v1.PodSucceeded
	ok(b.Pods().Replace([]any{pod("p", "a", "1"), pod("waits", "", "1"), pod("none", "b", "0"), ended}, "1"))
	c.want(t, "none: b 0m 1Mi; p: a 1000m 1Mi")

	ok(b.Pods().Update(pod("p", "a", "2"))) // resized
	ok(b.Pods().Add(pod("q", "b", "3")))
	ok(b.Pods().Update(pod("waits", "a", "1")))
	c.want(t, "none: b 0m 1Mi; p: a 2000m 1Mi; q: b 3000m 1Mi; waits: a 1000m 1Mi")

	done := pod("q", "b", "3")
	done.Status.Phase = v1.PodFailed
	ok(b.Pods().Update(done))
	ok(b.Pods().Delete(pod("none", "b", "0")))
	c.want(t, "p: a 2000m 1Mi; waits: a 1000m 1Mi")

	// What a list does not have is gone.
	ok(b.Pods().Replace([]any{pod("r", "a", "1"), pod("waits", "a", "1")}, "2"))
	c.want(t, "r: a 1000m 1Mi; waits: a 1000m 1Mi")
	if len(b.others) != 2 {
		t.Errorf("the books remember %v", b.others)
	}

	// A pod that asks for a device has its amounts in its request.
	wants := pod("w", "", "4")
	wants.Spec.Containers = append(wants.Spec.Containers, container("d", "4"))
	ok(b.Pods().Add(wants))
	if got, _ := b.Pod("team", "w"); len(got.Requests) != 1 || got.Requests[0].CPU != 4000 || got.Requests[0].Memory != 1 {
		t.Errorf("the request is %+v", got.Requests)
	}
	c.want(t, "r: a 1000m 1Mi; waits: a 1000m 1Mi")
	wants.Spec.NodeName = "a"
	ok(b.Pods().Update(wants))
	if n := len(c.observed); n != 1 || c.observed[0].CPU != 4000 || c.observed[0].Memory != 1 {
		t.Errorf("the ledger was told of %+v", c.observed)
	}
}

// Without a policy that asks for it, pods of others leave nothing behind.
func TestNobodyCountsCapacity(t *testing.T) {
	f := newFixture(t)
	pod := podSpec(nil, []v1.Container{container("a", "")})
	pod.ObjectMeta = metav1.ObjectMeta{Namespace: "team", Name: "p", UID: "p"}
	pod.Spec.NodeName = "a"
	f.ok(f.books.Pods().Replace([]any{pod}, "1"))
	f.ok(f.books.Pods().Update(pod))
	if len(f.books.others)+len(f.books.pods) != 0 {
		t.Errorf("the books remember %v and %v", f.books.others, f.books.pods)
	}
	f.ok(f.books.Nodes().Add(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}}))
}

// A grant of several devices books the same part on each of them.
func TestGrantOfSeveralDevicesIsBooked(t *testing.T) {
	f := newFixture(t)
	f.ok(f.books.Nodes().Add(f.node("a", 16, 16, 16)))
	pod := podSpec(nil, []v1.Container{container("c", "12")})
	pod.ObjectMeta = metav1.ObjectMeta{Namespace: "team", Name: "p", UID: "p"}
	pod.Spec.NodeName = "a"
	signer, err := wire.NewSigner(testKey)
	f.ok(err)
	value, err := signer.EncodeGrant("p", accel.Grant{
		Resource: gcuMemory, Node: "a", Device: "a-0", DeviceUnits: 16, Units: 12, At: time.Unix(1, 0),
		More: []accel.GrantedDevice{{Device: "a-2", Index: 2, DeviceUnits: 16}},
	})
	f.ok(err)
	// What the annotation says by now does not matter: it may be changed any time.
	pod.Annotations = map[string]string{wire.GrantAnnotation: value, wire.CountAnnotation: "3"}
	f.ok(f.books.Pods().Add(pod))
	f.want("a: 6 0 6")
	if b := f.books; b.Several("a", gcuMemory) {
		t.Error("a node that does not say so gives several devices")
	}
	node := f.node("a", 16, 16, 16)
	inv, err := wire.DecodeInventory(node.Annotations[wire.InventoryAnnotation])
	f.ok(err)
	inv[0].Several = true
	node.Annotations[wire.InventoryAnnotation], err = wire.EncodeInventory(inv)
	f.ok(err)
	f.ok(f.books.Nodes().Update(node))
	if !f.books.Several("a", gcuMemory) || f.books.Several("a", "other") || f.books.Several("b", gcuMemory) {
		t.Error("which node gives several devices was not read")
	}
	f.ok(f.books.Pods().Delete(pod))
	f.want("a: 0 0 0")
}
