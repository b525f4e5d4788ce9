package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// learned is what a Learner was told, in order.
type learned []string

func (l *learned) Learn(r accel.Request) {
	*l = append(*l, fmt.Sprintf("%d by %d %dm", r.Peak(), r.Devices, r.CPU))
}

func (l *learned) LearnBeside(_ accel.Resource, cpu, memory int64) {
	*l = append(*l, fmt.Sprintf("beside %dm %dMi", cpu, memory))
}

// want checks what was told since it was asked last.
func (l *learned) want(t *testing.T, want ...string) {
	t.Helper()
	if got := strings.Join(*l, ", "); got != strings.Join(want, ", ") {
		t.Errorf("told of %s, want %s", got, strings.Join(want, ", "))
	}
	*l = nil
}

// comer is a pod that asks for CPU, and for units of a card unless they are "".
func comer(uid, node, cpu, units string, age time.Duration) *v1.Pod {
	amounts := v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu)}
	if units != "" {
		amounts[v1.ResourceName(gcuMemory)] = resource.MustParse(units)
	}
	p := podSpec(nil, []v1.Container{{Name: "c", Resources: v1.ResourceRequirements{Requests: amounts}}})
	p.ObjectMeta = metav1.ObjectMeta{Namespace: "team", Name: uid, UID: types.UID(uid),
		CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).Add(-age))}
	p.Spec.NodeName = node
	return p
}

func owned(p *v1.Pod, kind string) *v1.Pod {
	p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: "o", Controller: ptr.To(true)}}
	return p
}

func ended(p *v1.Pod) *v1.Pod {
	p = p.DeepCopy()
	p.Status.Phase = v1.PodSucceeded
	return p
}

// Every pod is told of once, when it is on a node: whatever happens to it, whatever is
// listed again, and in the order in which they came.
func TestLearn(t *testing.T) {
	var l learned
	books := ledger.New(ledger.Options{})
	b := NewState(Config{Ledger: books, Capacity: books, Learner: &l, Resources: []accel.Resource{gcuMemory}})
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	annotated := func(p *v1.Pod, key, value string) *v1.Pod {
		p.Annotations = map[string]string{key: value}
		return p
	}
	list := []any{
		comer("new", "", "1", "4", time.Second), comer("old", "a", "2", "6", time.Hour), ended(comer("done", "a", "3", "8", time.Minute)),
		comer("beside", "a", "4", "", 2*time.Hour), comer("elsewhere", "bare", "5", "", 0), owned(comer("daemon", "a", "6", "", 0),
			"DaemonSet"),
		owned(comer("mirror", "a", "7", "", 0), "Node"), owned(comer("set", "a", "8", "1", 0), "DaemonSet"), comer("waits", "", "9", "", 0),
		owned(comer("replica", "", "1", "2", 3*time.Hour), "ReplicaSet"),
		annotated(comer("wrong", "", "1", "3", 0), wire.CountAnnotation, "2"), // 3 by 2
	}
	ok(b.Pods().Replace(list, "1"))
	l.want(t) // what the nodes publish is not known yet
	text, err := wire.EncodeInventory([]accel.Inventory{{Resource: gcuMemory,
		Unit: "1", Shares: []accel.Share{{Units: 16, Device: accel.Device{ID: "U", NUMANode: accel.NoNUMA}}}}})
	ok(err)
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{wire.InventoryAnnotation: text}}}
	bare := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "bare"}}
	ok(b.Nodes().Replace([]any{node, bare}, "1"))
	l.want(t, "beside 4000m 0Mi", "6 by 0 2000m", "8 by 0 3000m")

	// The same again, in every way.
	ok(b.Pods().Replace(list, "2"))
	ok(b.Nodes().Replace([]any{node, bare}, "2"))
	ok(b.Pods().Update(comer("new", "", "1", "4", time.Second)))
	ok(b.Pods().Update(comer("beside", "a", "4", "", 2*time.Hour)))
	l.want(t)
	ok(b.Pods().Update(comer("new", "a", "1", "4", time.Second)))
	l.want(t, "4 by 0 1000m")
	ok(b.Pods().Update(comer("new", "a", "1", "4", time.Second)))
	ok(b.Pods().Update(ended(comer("new", "a", "1", "4", time.Second))))
	ok(b.Pods().Update(ended(comer("done", "a", "3", "8", time.Minute))))
	ok(b.Pods().Delete(ended(comer("beside", "a", "4", "", 2*time.Hour))))
	b.KeyChanged()
	l.want(t)

	// New ones, one of them by the name of another.
	ok(b.Pods().Add(annotated(comer("two", "", "1", "8", 0), wire.CountAnnotation, "2")))
	ok(b.Pods().Update(annotated(comer("two", "a", "1", "8", 0), wire.CountAnnotation, "2")))
	again := comer("again", "a", "1", "7", 0)
	again.Name = "old"
	ok(b.Pods().Add(again))
	ok(b.Pods().Add(annotated(comer("wrong too", "a", "1", "3", 0), wire.CountAnnotation, "2")))
	ok(b.Pods().Update(comer("waits", "a", "9", "", 0)))
	ok(b.Pods().Update(owned(comer("daemon2", "a", "6", "", 0), "DaemonSet")))
	l.want(t, "8 by 2 1000m", "7 by 0 1000m", "beside 9000m 0Mi")
	if len(b.learning.early) != 0 {
		t.Errorf("%d pods are kept back", len(b.learning.early))
	}
}

// Where CPU is not counted, pods without a device say nothing.
func TestLearnWithoutCapacity(t *testing.T) {
	var l learned
	b := NewState(Config{Ledger: ledger.New(ledger.Options{}), Learner: &l, Resources: []accel.Resource{gcuMemory}})
	for _, err := range []error{
		b.Nodes().Replace(nil, "1"),
		b.Pods().Replace([]any{comer("p", "a", "1", "4", 0), comer("q", "a", "1", "", 0)}, "1"),
		b.Pods().Add(comer("r", "a", "1", "5", 0)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	l.want(t, "4 by 0 0m", "5 by 0 0m")
}

// A controller whose pods cannot be placed, or fail and are replaced for ever, says no
// more than one whose pods run.
func TestLearnFromPodsThatRun(t *testing.T) {
	of := func(uid, node, owner string, phase v1.PodPhase) *v1.Pod {
		p := owned(comer(uid, node, "1", "4", 0), "ReplicaSet")
		p.OwnerReferences[0].UID, p.Status.Phase = types.UID(owner), phase
		return p
	}
	one, two := "4 by 0 0m", []string{"4 by 0 0m", "4 by 0 0m"}
	tests := map[string]struct {
		run  func(b *State) error
		want []string
	}{
		"pods that are created and deleted unbound": {run: func(b *State) error {
			var errs []error
			for i := range 1000 {
				p := of(fmt.Sprint("p", i), "", "rs", v1.PodPending)
				p.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "example.com/wait"}}
				errs = append(errs, b.Pods().Add(p), b.Pods().Delete(p))
			}
			return errors.Join(errs...)
		}},
		"pods that fail and are replaced": {run: func(b *State) error {
			var errs []error
			for i := range 1000 {
				uid := fmt.Sprint("p", i)
				errs = append(errs, b.Pods().Add(of(uid, "", "rs", v1.PodPending)), b.Pods().Update(of(uid, "a", "rs", v1.PodPending)),
					b.Pods().Update(of(uid, "a", "rs", v1.PodFailed)))
			}
			return errors.Join(errs...)
		}, want: []string{one}},
		"two of a controller, one of which fails": {run: func(b *State) error {
			return errors.Join(b.Pods().Add(of("p", "a", "rs", v1.PodRunning)), b.Pods().Add(of("q", "a", "rs", v1.PodRunning)),
				b.Pods().Update(of("q", "a", "rs", v1.PodFailed)), b.Pods().Add(of("r", "a", "rs", v1.PodRunning)))
		}, want: two},
		"another controller": {run: func(b *State) error {
			return errors.Join(b.Pods().Add(of("p", "a", "rs", v1.PodRunning)), b.Pods().Update(of("p", "a", "rs", v1.PodFailed)),
				b.Pods().Add(of("q", "a", "other", v1.PodRunning)))
		}, want: two},
		"pods of a job that succeed": {run: func(b *State) error {
			return errors.Join(b.Pods().Add(of("p", "a", "job", v1.PodRunning)), b.Pods().Update(of("p", "a", "job", v1.PodSucceeded)),
				b.Pods().Add(of("q", "a", "job", v1.PodRunning)))
		}, want: two},
		"pods without a controller": {run: func(b *State) error {
			p := comer("p", "a", "1", "4", 0)
			p.Status.Phase = v1.PodFailed
			return errors.Join(b.Pods().Add(comer("p", "a", "1", "4", 0)), b.Pods().Update(p), b.Pods().Add(comer("q", "a", "1", "4", 0)))
		}, want: two},
		"what had failed before the books were opened": {run: func(b *State) error {
			b.podsSynced = false
			list := []any{of("new", "a", "rs", v1.PodRunning)}
			for i := range 100 {
				p := of(fmt.Sprint("p", i), "a", "rs", v1.PodFailed)
				p.CreationTimestamp = metav1.NewTime(p.CreationTimestamp.Add(-time.Hour))
				list = append(list, p)
			}
			return b.Pods().Replace(list, "2")
		}, want: []string{one}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			var l learned
			b := NewState(Config{Ledger: ledger.New(ledger.Options{}), Learner: &l, Resources: []accel.Resource{gcuMemory}})
			if err := errors.Join(b.Nodes().Replace(nil, "1"), b.Pods().Replace(nil, "1"), tc.run(b)); err != nil {
				t.Fatal(err)
			}
			l.want(t, tc.want...)
			if len(b.learning.failures) > 1 {
				t.Errorf("failures are remembered: %v", b.learning.failures)
			}
		})
	}
}
