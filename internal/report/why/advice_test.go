package why

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

func priority(p *v1.Pod, n int32) *v1.Pod {
	p.Spec.Priority = &n
	return p
}

// TestAnotherNode: a node like one of the cluster has another name and other devices.
func TestAnotherNode(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(p *v1.Pod)
		helps  bool
	}{
		"any":          {func(*v1.Pod) {}, true},
		"by model":     {func(p *v1.Pod) { annotate(p, wire.UseModelsAnnotation, "S60") }, true},
		"by device":    {func(p *v1.Pod) { annotate(p, wire.UseDevicesAnnotation, "gcu-1-0") }, false},
		"by host name": {func(p *v1.Pod) { p.Spec.NodeSelector = map[string]string{v1.LabelHostname: "gcu-1"} }, false},
		"by node name": {func(p *v1.Pod) {
			p.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
				NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchFields: []v1.NodeSelectorRequirement{
					{Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{"gcu-1"}}}}}}}}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			b.node("gcu-1", []accel.Units{16}).Labels[v1.LabelHostname] = "gcu-1"
			b.on("old", "gcu-1", 12, 0)
			ownedBy(b.on("daemon", "gcu-1", 4, 0), "DaemonSet", "daemon")
			tt.change(b.waiting("train", 8, insufficient))
			e := explainTrain(b, nil)
			if !tt.helps {
				noChangeOf(t, &e, ChangeMoreNodes)
				return
			}
			if c := changeOf(t, &e, ChangeMoreNodes); !c.Verified {
				t.Errorf("%+v", c)
			}
			setUnits(b.Snapshot.Pod("team-a", "train"), 16) // the DaemonSet's pod is on the new node, too
			e = explainTrain(b, nil)
			noChangeOf(t, &e, ChangeMoreNodes)
		})
	}
}

// TestNominated: pods that others leave a node for count, unless theirs is the lower priority.
func TestNominated(t *testing.T) {
	for _, tt := range []struct {
		name               string
		nominated, waiting int32
		counts             bool
	}{
		{"higher", 10, 0, true}, {"equal", 0, 0, true}, {"lower", 0, 10, false},
	} {
		for _, what := range []v1.ResourceName{v1.ResourceCPU, "enflame.com/gcu", "port"} {
			t.Run(tt.name+" "+string(what), func(t *testing.T) {
				b := newBuilder(t)
				b.Pods = make([]v1.Pod, 0, 2)
				n := b.node("gcu-1", []accel.Units{16})
				n.Status.Allocatable[v1.ResourceCPU] = resource.MustParse("3")
				n.Status.Allocatable["enflame.com/gcu"] = resource.MustParse("1")
				want := CPUOrMemory
				pods := []*v1.Pod{priority(b.waiting("urgent", 0, ""), tt.nominated), priority(b.waiting("train", 0, ""), tt.waiting)}
				for _, p := range pods {
					r := p.Spec.Containers[0].Resources
					switch what {
					case v1.ResourceCPU:
						r.Requests[what] = resource.MustParse("2")
					case "port":
						want = Ports
						p.Spec.Containers[0].Ports = []v1.ContainerPort{{HostPort: 8080}}
					default:
						want = CapacityReserved
						r.Requests[what], r.Limits[what] = resource.MustParse("1"), resource.MustParse("1")
					}
				}
				pods[0].Status.NominatedNodeName = "gcu-1"
				pods[1].Status.NominatedNodeName = "gcu-1" // itself never counts
				if !tt.counts {
					want = Backoff
				}
				if e := explainTrain(b, nil); len(e.Causes) == 0 || e.Causes[0].Code != want {
					t.Errorf("causes %+v, want %s", e.Causes, want)
				}
			})
		}
	}
}

// TestOtherSchedulers: what another scheduler makes of a change is not known, of whole devices
// either.
func TestOtherSchedulers(t *testing.T) {
	for _, tt := range []struct {
		scheduler string
		whole     bool
		verified  bool
	}{
		{"default-scheduler", true, true}, {"my-kube-scheduler", true, true}, {"volcano", true, false}, {"volcano", false, false},
	} {
		b := newBuilder(t)
		b.node("gcu-1", []accel.Units{16})
		p := b.waiting("train", 9, insufficient)
		annotate(p, wire.CountAnnotation, "2")
		if tt.whole {
			b.Nodes[0].Status.Allocatable["enflame.com/gcu"] = resource.MustParse("1")
			two := v1.ResourceList{"enflame.com/gcu": resource.MustParse("2")}
			p.Spec.Containers[0].Resources = v1.ResourceRequirements{Requests: two, Limits: two}
			p.Annotations = nil
		}
		p.Spec.SchedulerName = tt.scheduler
		e := explainTrain(b, nil)
		if len(e.Changes) == 0 {
			t.Errorf("%+v: no changes", tt)
		}
		for _, c := range e.Changes {
			if c.Verified != tt.verified {
				t.Errorf("%+v: %+v", tt, c)
			}
		}
	}
	// Waiting is up to it as well, and so it is where no scheduler has looked at the pod.
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16}).Status.Allocatable["enflame.com/gcu"] = resource.MustParse("1")
	p := b.pod("train", 0)
	p.Spec.Containers[0].Resources.Requests["enflame.com/gcu"] = resource.MustParse("1")
	for _, name := range []string{"volcano", "my-scheduler"} {
		p.Spec.SchedulerName = name
		if e := explainTrain(b, nil); e.Waiting.Helps {
			t.Errorf("%s: %+v", name, e.Waiting)
		}
	}
}

// TestEnding: waiting helps until the pods that must end on the change's node are gone, and not
// where they should be gone already.
func TestEnding(t *testing.T) {
	end := func(p *v1.Pod, in time.Duration) *v1.Pod {
		at, grace := metav1.NewTime(taken.Add(in)), int64(30)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &at, &grace
		return p
	}
	for name, tt := range map[string]struct {
		make  func(b *builder)
		helps bool
		until time.Duration
		node  string
		why   string
	}{
		"of this node, not of another": {func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.node("gcu-2", []accel.Units{16})
			end(b.on("a", "gcu-1", 12, 0), 20*time.Second)
			end(b.on("b", "gcu-2", 2, 0), time.Hour)
			b.on("c", "gcu-2", 12, 0)
		}, true, 50 * time.Second, "gcu-1", "pods that are ending free enough"},
		"of a controller, which may create it again": {func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			ownedBy(end(b.on("a", "gcu-1", 12, 0), time.Second), "StatefulSet", "a")
		}, true, 31 * time.Second, "gcu-1",
			"pods that are ending free enough, unless pods that their controllers create again get it first"},
		"overdue": {func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			end(b.on("a", "gcu-1", 12, 0), -time.Hour)
		}, false, 0, "gcu-1", "team-a/a has been terminating since 2026-03-01T10:59:30Z; check kubelet and finalizers"},
		"overdue on one of two nodes": {func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.node("gcu-2", []accel.Units{16})
			end(b.on("a", "gcu-1", 12, 0), -time.Hour)
			end(b.on("b", "gcu-2", 12, 0), time.Second)
		}, true, 31 * time.Second, "gcu-2", "pods that are ending free enough"},
		"overdue, and another that is not enough alone": {func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			end(b.on("a", "gcu-1", 12, 0), -time.Hour)
			end(b.on("b", "gcu-1", 2, 0), time.Second)
		}, false, 0, "gcu-1", "team-a/a has been terminating since 2026-03-01T10:59:30Z; check kubelet and finalizers"},
		"not enough": {func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			end(b.on("a", "gcu-1", 2, 0), time.Second)
			b.on("b", "gcu-1", 12, 0)
		}, false, 0, "", "pods that are ending do not free enough"},
		"nothing": {func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.on("b", "gcu-1", 12, 0)
		}, false, 0, "", "nothing is ending; it helps only if pods end by themselves"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			b.Pods = make([]v1.Pod, 0, 4)
			tt.make(b)
			b.waiting("train", 8, insufficient)
			e := explainTrain(b, nil)
			want := Waiting{Helps: tt.helps, Why: tt.why}
			if tt.until > 0 {
				want.Until = taken.Add(tt.until)
			}
			if e.Waiting != want {
				t.Errorf("waiting %+v, want %+v", e.Waiting, want)
			}
			if tt.node == "" {
				noChangeOf(t, &e, ChangeWait)
				return
			}
			if c := changeOf(t, &e, ChangeWait); c.Verified != (tt.helps && !strings.Contains(tt.why, "again")) || c.Node != tt.node {
				t.Errorf("%+v", c)
			}
		})
	}
}

// TestOwnerWithEndedPods: pods that have ended neither count nor are chosen, unless there are
// no others.
func TestOwnerWithEndedPods(t *testing.T) {
	b := newBuilder(t)
	b.Pods = make([]v1.Pod, 0, 4)
	b.node("gcu-1", []accel.Units{16})
	o := &Owner{Kind: "job", Namespace: "team-a", Name: "train", Wanted: 1}
	fail := func(name string, age time.Duration) {
		p := b.on(name, "gcu-1", 4, 0)
		ownedBy(p, "Job", "train")
		p.Status.Phase, p.CreationTimestamp = v1.PodFailed, metav1.NewTime(taken.Add(-age))
	}
	fail("train-old", 2*time.Hour)
	fail("train-new", time.Hour)
	if e := explainTrain(b, o); e.Pod.Name != "train-new" || e.State != StateFailed {
		t.Errorf("%s, %s, want the newest that failed", e.Pod.Name, e.State)
	}
	b.Events = []v1.Event{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a"}, Reason: "FailedCreate", Message: "exceeded quota",
		InvolvedObject: v1.ObjectReference{Kind: "Job", Name: "train"}}}
	if e := explainTrain(b, o); e.State != StateNotCreated || !strings.HasPrefix(e.Causes[0].Detail, "0 of 1 pod exist") {
		t.Errorf("%+v, want none to be created", e)
	}
	ownedBy(b.on("train-runs", "gcu-1", 4, 0), "Job", "train")
	if e := explainTrain(b, o); e.Pod.Name != "train-runs" || e.State != StateRuns {
		t.Errorf("%s, %s, want the one that runs", e.Pod.Name, e.State)
	}
}

// TestFailedCreate: only events of what creates the owner's pods are about it.
func TestFailedCreate(t *testing.T) {
	for _, tt := range []struct {
		owner, kind, name string
		about             bool
	}{
		{"job", "Job", "web", true},
		{"job", "Job", "web-2", false},
		{"job", "StatefulSet", "web", false},
		{"statefulset", "StatefulSet", "web", true},
		{"statefulset", "StatefulSet", "web-b", false},
		{"deployment", "ReplicaSet", "web-7d9f8", true},
		{"deployment", "ReplicaSet", "web-api-7d9f8", false},
		{"deployment", "ReplicaSet", "web-", false},
		{"deployment", "ReplicaSet", "web-api", false}, // no hash has vowels
		{"deployment", "StatefulSet", "web-7d9f8", false},
		{"deployment", "ReplicaSet", "web", false},
	} {
		b := newBuilder(t)
		b.Events = []v1.Event{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a"}, Reason: "FailedCreate", Message: "quota",
			InvolvedObject: v1.ObjectReference{Kind: tt.kind, Name: tt.name}}}
		o := &Owner{Kind: tt.owner, Namespace: "team-a", Name: "web", Wanted: 1}
		if got := b.Snapshot.failedCreate(o); len(got) > 0 != tt.about {
			t.Errorf("%+v: %q", tt, got)
		}
	}
}

// TestDeletedWhileWaiting: a pod that waits and is being deleted waits, and says so.
func TestDeletedWhileWaiting(t *testing.T) {
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16})
	at := metav1.NewTime(taken)
	b.waiting("train", 8, insufficient).DeletionTimestamp = &at
	e := explainTrain(b, nil)
	var out bytes.Buffer
	if err := Print(&out, &e); err != nil {
		t.Fatal(err)
	}
	if e.State != StateWaits || !strings.Contains(out.String(), "WAITING HELPS  no: the pod is being deleted.\n") {
		t.Errorf("%s:\n%s", e.State, &out)
	}
	e.Waiting.Why = ""
	out.Reset()
	if err := Print(&out, &e); err != nil || strings.Contains(out.String(), "WAITING HELPS") {
		t.Errorf("%v:\n%s", err, &out)
	}
}

// TestEndPods: pods of the pod's own controller do not end for it, one that is recreated may
// take the devices again, and of as many pods those that stay away come first.
func TestEndPods(t *testing.T) {
	b := newBuilder(t)
	b.Pods = make([]v1.Pod, 0, 6)
	b.node("gcu-1", []accel.Units{16})
	ownedBy(b.on("train-1", "gcu-1", 12, 0), "StatefulSet", "train")
	ownedBy(b.waiting("train", 8, insufficient), "StatefulSet", "train")
	e := explainTrain(b, nil)
	noChangeOf(t, &e, ChangeEnd)

	b.node("gcu-2", []accel.Units{16})
	ownedBy(priority(b.on("other", "gcu-2", 12, 0), 7), "StatefulSet", "other")
	e = explainTrain(b, nil)
	if c := changeOf(t, &e, ChangeEnd); c.Verified || c.Text !=
		"end team-a/other (12 units; its priority is higher, 7; statefulset/other recreates it)" {
		t.Errorf("%+v", c)
	}
	if !slices.ContainsFunc(e.Notes, func(n string) bool { return strings.Contains(n, "PodDisruptionBudgets") }) {
		t.Errorf("notes %q", e.Notes)
	}

	b.node("gcu-3", []accel.Units{16})
	priority(b.on("bare", "gcu-3", 12, 0), 9)
	e = explainTrain(b, nil)
	if c := changeOf(t, &e, ChangeEnd); !c.Verified || !strings.HasPrefix(c.Text, "end team-a/bare ") {
		t.Errorf("%+v", c)
	}
}

// TestEndPodsWithoutDevices: pods that hold the CPU or the ports that the pod lacks may end for it,
// those of the system may not.
func TestEndPodsWithoutDevices(t *testing.T) {
	cpu := func(p *v1.Pod, n string) *v1.Pod {
		p.Spec.Containers[0].Resources.Requests[v1.ResourceCPU] = resource.MustParse(n)
		return p
	}
	for name, tt := range map[string]struct {
		make func(b *builder)
		want string
	}{
		"the smallest that is enough is not the only one": {func(b *builder) {
			cpu(b.on("web", "gcu-1", 0), "20")
			cpu(b.on("db", "gcu-1", 0), "12")
		}, "end team-a/db (12 cpu)"},
		"of many": {func(b *builder) {
			for i := range 14 {
				cpu(b.on(fmt.Sprint("small-", i), "gcu-1", 0), "500m")
			}
			cpu(b.on("large", "gcu-1", 0), "25")
		}, "end team-a/large (25 cpu)"},
		"of many, with a device": {func(b *builder) {
			for i := range 14 {
				cpu(b.on(fmt.Sprint("small-", i), "gcu-1", 0), "500m")
			}
			cpu(b.on("large", "gcu-1", 0), "20")
			cpu(b.on("holder", "gcu-1", 12, 0), "5")
		}, "end team-a/holder (12 units)"},
		"of the system": {func(b *builder) {
			cpu(b.on("dns", "gcu-1", 0), "20").Namespace = "kube-system"
			priority(cpu(b.on("critical", "gcu-1", 0), "12"), 2_000_000_000)
		}, ""},
		"a port": {func(b *builder) {
			port := []v1.ContainerPort{{HostPort: 8080}}
			b.on("web", "gcu-1", 0).Spec.Containers[0].Ports = port
			b.on("other", "gcu-1", 0)
			b.Snapshot.Pod("team-a", "train").Spec.Containers[0].Ports = port
		}, "end team-a/web (1 cpu)"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			b.Pods = make([]v1.Pod, 0, 20)
			b.node("gcu-1", []accel.Units{16})
			b.waiting("train", 8, insufficient)
			tt.make(b)
			e := explainTrain(b, nil)
			if tt.want == "" {
				noChangeOf(t, &e, ChangeEnd)
				return
			}
			if c := changeOf(t, &e, ChangeEnd); c.Text != tt.want || !c.Verified {
				t.Errorf("%+v", c)
			}
		})
	}
}

// TestNodesWithSeveralHindrances: where one change is not enough for any node, those that open one
// together are found, in an order in which each can be carried out.
func TestNodesWithSeveralHindrances(t *testing.T) {
	taint := func(n *v1.Node, keys ...string) {
		for _, key := range keys {
			n.Spec.Taints = append(n.Spec.Taints, v1.Taint{Key: key, Value: "x", Effect: v1.TaintEffectNoSchedule})
		}
	}
	const arch = "kubernetes.io/arch"
	for name, tt := range map[string]struct {
		make func(n *v1.Node, p *v1.Pod)
		want []string
	}{
		"two taints": {func(n *v1.Node, _ *v1.Pod) { taint(n, "a", "b") },
			[]string{"tolerate taint a=x:NoSchedule and b=x:NoSchedule"}},
		"two taints, one of the system": {func(n *v1.Node, _ *v1.Pod) { taint(n, "a", "node-role.kubernetes.io/control-plane") }, nil},
		"a taint of a cordoned node": {func(n *v1.Node, _ *v1.Pod) {
			taint(n, "a", "b")
			n.Spec.Unschedulable = true
		}, []string{"remove taint b=x:NoSchedule of gcu-1, and remove taint a=x:NoSchedule of gcu-1, and uncordon gcu-1"}},
		"a label that no person sets": {func(_ *v1.Node, p *v1.Pod) { p.Spec.NodeSelector = map[string]string{arch: "arm64", "zone": "b"} },
			[]string{"drop kubernetes.io/arch and zone from the node selector"}},
		"such a label, of a cordoned node": {func(n *v1.Node, p *v1.Pod) {
			p.Spec.NodeSelector = map[string]string{arch: "arm64"}
			n.Spec.Unschedulable = true
		}, []string{"uncordon gcu-1, and drop kubernetes.io/arch from the node selector"}},
		"an affinity, and a selector": {func(_ *v1.Node, p *v1.Pod) {
			p.Spec.NodeSelector = map[string]string{arch: "arm64"}
			zoned := []v1.NodeSelectorRequirement{{Key: "zone", Operator: v1.NodeSelectorOpExists}}
			affinityOf(p).NodeAffinity = &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
				NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: zoned}}}}
		}, []string{"drop kubernetes.io/arch from the node selector and the required node affinity"}},
		"the affinity of a DaemonSet": {func(_ *v1.Node, p *v1.Pod) {
			p.Spec.NodeSelector = map[string]string{arch: "arm64"}
			ownedBy(p, "DaemonSet", "train")
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			n := b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, insufficient)
			tt.make(n, p)
			e := explainTrain(b, nil)
			var got []string
			for _, c := range e.Changes {
				if c.Kind == ChangeMoreNodes {
					continue
				}
				got = append(got, c.Text)
				after := carryOut(t, &b.Snapshot, &c)
				if w := newWorld(after); len(w.unhindered(w.newAsk(after.Pod("team-a", "train")))) == 0 {
					t.Errorf("%q does not open the node", c.Text)
				}
				if after, all := applyPatches(t, &b.Snapshot, &c); all && len(after.Nodes[0].Spec.Taints) > 0 && c.Kind == ChangeNode {
					t.Errorf("%q: the patches leave %v", c.Text, after.Nodes[0].Spec.Taints)
				}
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}

// TestPair: two changes together are found on whichever node they admit the pod.
func TestPair(t *testing.T) {
	for _, tt := range []struct {
		units int64
		taint bool
		want  string
	}{
		{20, false, "uncordon gcu-3, and spread over 2 devices (10 each)"},
		{13, false, "uncordon gcu-3, and request 12 instead of 13"}, // 13 has no equal parts
		{13, true, "remove taint dedicated=gcu-3:NoSchedule of gcu-3, and request 12 instead of 13"},
	} {
		b := newBuilder(t)
		b.node("gcu-1", []accel.Units{16}).Spec.Taints = []v1.Taint{{Key: "karpenter.sh/disrupted", Effect: v1.TaintEffectNoSchedule}}
		b.node("gcu-2", []accel.Units{8}).Spec.Unschedulable = true
		n := b.node("gcu-3", []accel.Units{12, 12})
		if n.Spec.Unschedulable = !tt.taint; tt.taint {
			n.Spec.Taints = []v1.Taint{{Key: "dedicated", Value: n.Name, Effect: v1.TaintEffectNoSchedule}}
		}
		b.waiting("train", tt.units, insufficient)
		e := explainTrain(b, nil)
		if len(e.Changes) == 0 || e.Changes[0].Text != tt.want {
			t.Errorf("%+v, want %q", e.Changes, tt.want)
		}
	}
}

// TestPreemptionBySum: pods of lower priority are not preempted by kube-scheduler while the sum is enough.
func TestPreemptionBySum(t *testing.T) {
	for _, units := range []int64{8, 9} {
		b := newBuilder(t)
		b.Pods = make([]v1.Pod, 0, 3)
		b.node("gcu-1", []accel.Units{16, 16})
		b.on("a", "gcu-1", 12, 0)
		b.on("b", "gcu-1", 12, 1)
		priority(b.waiting("train", units, insufficient), 100)
		e := explainTrain(b, nil)
		says := slices.ContainsFunc(e.Notes, func(n string) bool {
			return strings.Contains(n, "kube-scheduler does not preempt them where the sum")
		})
		if says != (units == 8) {
			t.Errorf("%d units: notes %q", units, e.Notes)
		}
	}
}
