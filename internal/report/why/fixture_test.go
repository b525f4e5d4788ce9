package why

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const memory = "enflame.com/gcu-memory"

var taken = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// builder makes a snapshot.
type builder struct {
	tb testing.TB
	Snapshot
	inventories map[string]*accel.Inventory
	signer      *wire.Signer
}

func newBuilder(tb testing.TB) *builder {
	tb.Helper()
	signer, err := wire.NewSigner([]byte(strings.Repeat("k", wire.MinKeyBytes)))
	if err != nil {
		tb.Fatal(err)
	}
	return &builder{tb: tb, Snapshot: Snapshot{Taken: taken, MayDelete: func(string) bool { return true }},
		inventories: map[string]*accel.Inventory{}, signer: signer}
}

// node adds a node with devices of these units; change may change its inventory.
func (b *builder) node(name string, units []accel.Units, change ...func(*accel.Inventory)) *v1.Node {
	in := &accel.Inventory{Resource: memory, Unit: "1", Several: true}
	for i, u := range units {
		in.Shares = append(in.Shares, accel.Share{Units: u, Device: accel.Device{
			Index: i, ID: deviceID(name, i), Model: "S60", MemoryBytes: int64(u) << 30, NUMANode: accel.NoNUMA,
		}})
	}
	for _, f := range change {
		f(in)
	}
	b.inventories[name] = in
	var sum accel.Units
	for _, s := range in.Shares {
		if !s.Health.Unhealthy {
			sum += s.Units - s.Withheld
		}
	}
	text, err := wire.EncodeInventory([]accel.Inventory{*in})
	if err != nil {
		b.tb.Fatal(err)
	}
	b.Nodes = append(b.Nodes, v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"enflame.com/gcushare": "true"},
			Annotations: map[string]string{wire.InventoryAnnotation: text}},
		Status: v1.NodeStatus{
			Allocatable: v1.ResourceList{
				v1.ResourceCPU: resource.MustParse("32"), v1.ResourceMemory: resource.MustParse("64Gi"),
				v1.ResourceEphemeralStorage: resource.MustParse("100Gi"), v1.ResourcePods: resource.MustParse("110"),
				memory: *resource.NewQuantity(int64(sum), resource.DecimalSI),
			},
			Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}},
		},
	})
	return &b.Nodes[len(b.Nodes)-1]
}

func deviceID(node string, i int) accel.DeviceID {
	return accel.DeviceID(fmt.Sprintf("%s-%d", node, i))
}

// pod adds a pod that requests units; 0 for none.
func (b *builder) pod(name string, units int64) *v1.Pod {
	r := v1.ResourceList{v1.ResourceCPU: resource.MustParse("1")}
	limits := v1.ResourceList{}
	if units > 0 {
		r[memory] = *resource.NewQuantity(units, resource.DecimalSI)
		limits[memory] = *resource.NewQuantity(units, resource.DecimalSI)
	}
	b.Pods = append(b.Pods, v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: types.UID("uid-" + name),
			CreationTimestamp: metav1.NewTime(taken.Add(-14 * time.Minute))},
		Spec: v1.PodSpec{SchedulerName: "default-scheduler", Containers: []v1.Container{{
			Name: "main", Resources: v1.ResourceRequirements{Requests: r, Limits: limits},
		}}},
		Status: v1.PodStatus{Phase: v1.PodPending},
	})
	return &b.Pods[len(b.Pods)-1]
}

// on adds a pod that runs on devices of a node.
func (b *builder) on(name, node string, units int64, devices ...int) *v1.Pod {
	p := b.pod(name, units)
	p.Spec.NodeName, p.Status.Phase = node, v1.PodRunning
	in := b.inventories[node]
	g := accel.Grant{Resource: memory, Node: node, Units: accel.Units(units), At: taken.Add(-time.Hour), Confirmed: true}
	for k, i := range devices {
		s := in.Shares[i]
		if k == 0 {
			g.Device, g.Index, g.DeviceUnits = s.ID, s.Index, s.Units
			continue
		}
		g.More = append(g.More, accel.GrantedDevice{Device: s.ID, Index: s.Index, DeviceUnits: s.Units})
	}
	if len(devices) > 0 {
		text, err := b.signer.EncodeGrant(string(p.UID), g)
		if err != nil {
			b.tb.Fatal(err)
		}
		p.Annotations = map[string]string{wire.GrantAnnotation: text}
	}
	return p
}

// waiting adds a pod that kube-scheduler could not place.
func (b *builder) waiting(name string, units int64, message string) *v1.Pod {
	p := b.pod(name, units)
	p.Status.Conditions = []v1.PodCondition{{
		Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: v1.PodReasonUnschedulable, Message: message,
	}}
	return p
}

func annotate(p *v1.Pod, key, value string) {
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[key] = value
}

func ownedBy(p *v1.Pod, kind, name string) {
	yes, version := true, "apps/v1"
	if kind == "Job" {
		version = "batch/v1"
	}
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: version, Kind: kind, Name: name, Controller: &yes}}
}
