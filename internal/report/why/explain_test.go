package why

import (
	"fmt"
	"math/rand"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	placement "github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// TestNeverVerifiedBesideUnjudged: what kube-scheduler may refuse for reasons that are not
// judged here is never called verified.
func TestNeverVerifiedBesideUnjudged(t *testing.T) {
	terms := []v1.PodAffinityTerm{{TopologyKey: v1.LabelHostname,
		LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}}}
	for name, hinder := range map[string]func(b *builder, p *v1.Pod){
		"spread": func(_ *builder, p *v1.Pod) {
			p.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{WhenUnsatisfiable: v1.DoNotSchedule, TopologyKey: "zone"}}
		},
		"affinity": func(_ *builder, p *v1.Pod) {
			p.Spec.Affinity = &v1.Affinity{PodAffinity: &v1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms}}
		},
		"anti-affinity": func(_ *builder, p *v1.Pod) {
			p.Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: terms}}
		},
		"anti-affinity of another pod": func(b *builder, p *v1.Pod) {
			p.Labels = map[string]string{"app": "x"}
			b.Pods[0].Spec.NodeName = b.Nodes[0].Name
			b.Pods[0].Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: terms}}
		},
		"volume": func(_ *builder, p *v1.Pod) {
			p.Spec.Volumes = []v1.Volume{{VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{}}}}
		},
		"claim": func(_ *builder, p *v1.Pod) { p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "x"}} },
		"a label that only the extender knows": func(_ *builder, p *v1.Pod) {
			p.Status.Conditions[0].Message = "0/3 nodes are available: 3 the node is not labelled pool=gpu."
		},
		"a reason that is not known": func(_ *builder, p *v1.Pod) {
			p.Status.Conditions[0].Message = "0/3 nodes are available: 3 node(s) are reserved by another plugin."
		},
	} {
		t.Run(name, func(t *testing.T) {
			changes := 0
			for seed := range int64(100) {
				b := randomCluster(t, seed)
				if len(b.Pods) < 2 {
					continue
				}
				p := b.Snapshot.Pod("team-a", "train")
				hinder(b, p)
				e := New(&b.Snapshot).Pod(p)
				for _, c := range e.Changes {
					changes++
					if c.Verified {
						t.Fatalf("seed %d: %q is verified", seed, c.Text)
					}
				}
				if len(e.Changes) > 0 && !strings.Contains(strings.Join(e.Notes, "\n"), "No change is verified, because") {
					t.Fatalf("seed %d: notes %q do not say why", seed, e.Notes)
				}
			}
			if changes == 0 {
				t.Error("no changes were given")
			}
		})
	}
}

// TestRights: without nodes, or without the pods of other namespaces, nothing is judged, and
// the answer says what is missing.
func TestRights(t *testing.T) {
	for _, source := range []string{SourceNodes, SourcePods} {
		b := newBuilder(t)
		b.node("gcu-1", []accel.Units{16})
		b.waiting("train", 20, "0/2 nodes are available: 1 node(s) were unschedulable, 1 insufficient GCU Memory in one gcu device.")
		b.Failed = []Failure{{source, "nodes is forbidden: User \"ann\" cannot list resource"}}
		e := explainTrain(b, nil)
		var got []Code
		for _, c := range e.Causes {
			got = append(got, c.Code)
		}
		if !e.Partial || len(e.Changes) > 0 || !slices.Equal(got, []Code{NoDeviceFits, Cordoned}) {
			t.Errorf("%s: partial %v, causes %v, changes %v", source, e.Partial, got, e.Changes)
		}
		if notes := strings.Join(e.Notes, "\n"); !strings.Contains(notes, "The "+source+" could not be read") {
			t.Errorf("%s: notes %q", source, e.Notes)
		}
	}
	// What the pod itself says needs no rights.
	b := newBuilder(t)
	b.pod("train", 8).Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "x"}}
	b.Failed = []Failure{{SourceNodes, "forbidden"}}
	if e := explainTrain(b, nil); e.Partial || e.Causes[0].Code != Gated {
		t.Errorf("%+v, want gated", e)
	}
}

// TestWholeDevices: kube-scheduler alone decides about whole devices, by sums.
func TestWholeDevices(t *testing.T) {
	const whole = "enflame.com/gcu"
	b := newBuilder(t)
	for _, name := range []string{"gcu-1", "gcu-2"} {
		b.node(name, []accel.Units{16}).Status.Allocatable[whole] = resource.MustParse("4")
	}
	set := func(p *v1.Pod, n string) {
		p.Spec.Containers[0].Resources.Requests[whole] = resource.MustParse(n)
		p.Spec.Containers[0].Resources.Limits[whole] = resource.MustParse(n)
	}
	set(b.on("a", "gcu-1", 0), "1")
	set(b.on("b", "gcu-2", 0), "2")
	set(b.waiting("train", 0, "0/2 nodes are available: 2 Insufficient enflame.com/gcu."), "4")
	e := explainTrain(b, nil)
	if e.Causes[0].Code != InsufficientCapacity || e.Causes[0].Detail != "no node has 4 of enflame.com/gcu free" {
		t.Errorf("causes %+v", e.Causes)
	}
	var texts []string
	for _, c := range e.Changes {
		if texts = append(texts, c.Text); !c.Verified {
			t.Errorf("%q is not verified", c.Text)
		}
	}
	want := []string{"request 3 instead of 4", "end team-a/a (1 unit)", "add a node like gcu-1"}
	if !slices.Equal(texts, want) {
		t.Errorf("changes %q, want %q", texts, want)
	}
}

// TestOtherPeoplesPods: without the right to delete a pod there is no command for it.
func TestOtherPeoplesPods(t *testing.T) {
	b := newBuilder(t)
	goldenCases[InsufficientCapacity].make(b)
	b.MayDelete = func(string) bool { return false }
	e := explainTrain(b, nil)
	i := slices.IndexFunc(e.Changes, func(c Change) bool { return c.Kind == ChangeEnd })
	if i < 0 || len(e.Changes[i].Commands) > 0 || e.Changes[i].By == "" {
		t.Errorf("changes %+v, want one that ends pods, without commands", e.Changes)
	}
}

// TestLearningPolicy: a policy that only the extender has does not keep a pod from fitting.
func TestLearningPolicy(t *testing.T) {
	b := newBuilder(t)
	goldenCases[Backoff].make(b)
	b.Pods[0].Annotations = map[string]string{wire.PolicyAnnotation: placement.Fragmentation}
	if e := explainTrain(b, nil); len(e.Causes) != 1 || e.Causes[0].Code != Backoff {
		t.Errorf("causes %+v, want %s", e.Causes, Backoff)
	}
}

// TestOwner: of several pods, the oldest that waits is explained.
func TestOwner(t *testing.T) {
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16})
	of := func(p *v1.Pod) *v1.Pod {
		p.Labels = map[string]string{"pod-template-hash": "5f"}
		ownedBy(p, "ReplicaSet", "web-5f")
		return p
	}
	of(b.on("web-a", "gcu-1", 12, 0))
	of(b.waiting("web-b", 8, insufficient)).CreationTimestamp = metav1.NewTime(taken)
	of(b.waiting("web-c", 8, insufficient))
	b.waiting("other", 8, insufficient).CreationTimestamp = metav1.NewTime(taken.Add(-time.Hour))
	o := &Owner{Kind: "deployment", Namespace: "team-a", Name: "web", Wanted: 3}
	if e := explainTrain(b, o); e.Pod.Name != "web-c" || e.Owner != "deployment/web" || e.State != StateWaits {
		t.Errorf("%+v, want web-c", e)
	}
	b.Pods = b.Pods[:1]
	o.Wanted = 1
	if e := explainTrain(b, o); e.State != StateRuns {
		t.Errorf("%+v, want it to run", e)
	}
}

func TestReasons(t *testing.T) {
	for _, tt := range []struct {
		message string
		want    []Code
	}{
		{"", nil},
		{insufficient, []Code{InsufficientCapacity}},
		{"0/5 nodes are available: 2 Insufficient cpu, 3 node(s) had untolerated taint(s). preemption: 0/5 nodes are available: " +
			"5 Preemption is not helpful for scheduling.", []Code{CPUOrMemory, Taint}},
		{"0/2 nodes are available: 1 insufficient GCU Memory in 2 gcu devices, 1 no device that divvy.dev/use-models with " +
			"divvy.dev/avoid-models allows.", []Code{NoDeviceFits, SelectionEmpty}},
		{"0/2 nodes are available: 1 the pod requests a, b and c: a pod can have only one shared resource, request the others in " +
			"separate pods, 1 Too many pods.", []Code{SeveralResources, Pods}},
		{"0/1 nodes are available: 1 isolation driver required, device states none.", []Code{IsolationNotStated}},
		{"0/1 nodes are available: 1 fewer than 3 devices that are large enough and allowed for the pod.", []Code{TooFewDevices}},
		{"0/1 nodes are available: 1 the extender does not support divvy.dev/placement-policy \"x\".", []Code{PolicyUnknown}},
		{"0/1 nodes are available: 1 divvy-node on this node does not support several devices per pod; upgrade it.", []Code{OldRelease}},
		{"0/1 nodes are available: 1 insufficient cpu or memory for a pod with a device.", []Code{CPUOrMemory}},
		{"0/1 nodes are available: 1 the node is not labelled a=b or c=d.", []Code{NodeNotLabelled}},
		{"0/1 nodes are available: 1 node(s) had volume node affinity conflict.", []Code{Volume}},
		{"0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules.", []Code{PodAffinity}},
		{"0/1 nodes are available: 1 node(s) didn't match scheduler-enforced node affinity.", []Code{Unknown}},
		{"0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.", []Code{Affinity}},
		{"0/3 nodes are available: 1 node(s) did not have enough free storage, 1 node(s) had no available disk, 1 node(s) unavailable " +
			"due to one or more pvc(s) bound to non-existent pv(s).", []Code{Volume, Volume, Volume}},
		{"0/1 nodes are available: 1 node(s) didn't match Pod's required features.", []Code{Unknown}},
		{"something else entirely", []Code{Unknown}},
	} {
		var got []Code
		for _, r := range reasonsOf(tt.message) {
			got = append(got, r.code)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%q: %v, want %v", tt.message, got, tt.want)
		}
	}
}

// BenchmarkExplain explains one pod of 5000 nodes with 8 devices each, after the lists have
// arrived. It takes no longer than 2 s on a quiet machine.
func BenchmarkExplain(b *testing.B) {
	one := []v1.Taint{{Key: "dedicated", Effect: v1.TaintEffectNoSchedule}}
	for _, bench := range []struct {
		name    string
		units   int64
		perNode int
		change  func(s *Snapshot)
	}{
		{"no device fits", 14, 4, nil},
		{"several must end", 16, 4, nil},
		{"larger than any device", 17, 4, nil},
		{"a taint that no pod tolerates", 17, 4, func(s *Snapshot) {
			for i := range s.Nodes {
				s.Nodes[i].Spec.Taints = one
			}
		}},
		{"a taint of its own on each node", 17, 4, func(s *Snapshot) {
			for i := range s.Nodes {
				s.Nodes[i].Spec.Taints = []v1.Taint{{Key: "dedicated", Value: s.Nodes[i].Name, Effect: v1.TaintEffectNoSchedule}}
			}
		}},
		{"a cordon and a taint on each node, and a selector", 17, 4, func(s *Snapshot) {
			for i := range s.Nodes {
				s.Nodes[i].Spec.Taints, s.Nodes[i].Spec.Unschedulable = one, true
			}
			s.Pod("team-a", "train").Spec.NodeSelector = map[string]string{v1.LabelArchStable: "arm64"}
		}},
		{"13 pods on each node have all CPU", 14, 13, func(s *Snapshot) {
			for i := range s.Nodes {
				s.Nodes[i].Status.Allocatable[v1.ResourceCPU] = resource.MustParse("13")
			}
		}},
		{"12 pods on each node", 16, 12, nil},
		{"12 pods on each node, several devices", 64, 12, func(s *Snapshot) {
			annotate(s.Pod("team-a", "train"), wire.CountAnnotation, "4")
		}},
		{"12 pods on each node, larger than any device", 17, 12, nil},
		{"13 pods on each node, several devices", 64, 13, func(s *Snapshot) {
			annotate(s.Pod("team-a", "train"), wire.CountAnnotation, "4")
		}},
		{"whole devices, 13 pods on each node", 16, 13, wholeDevices},
		{"anti-affinity of all pods", 14, 4, func(s *Snapshot) {
			for i := range s.Pods[:len(s.Pods)-1] {
				s.Pods[i].Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
					RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{{LabelSelector: &metav1.LabelSelector{
						MatchLabels: map[string]string{"app": s.Pods[i].Name}}}}}}
			}
		}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			s := large(b, bench.units, bench.perNode)
			if bench.change != nil {
				bench.change(s)
			}
			b.ResetTimer()
			before := processorTime(b)
			for b.Loop() {
				e := New(s).Pod(s.Pod("team-a", "train"))
				if len(e.Causes) == 0 {
					b.Fatal("no cause")
				}
			}
			b.ReportMetric((processorTime(b)-before).Seconds()/float64(b.N), "cpu-s/op")
		})
	}
}

// processorTime is what the process has had of processors: beside other programs it says more
// than the clock.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// wholeDevices makes all pods request whole devices, of which each node has 24.
func wholeDevices(s *Snapshot) {
	const whole = "enflame.com/gcu"
	for i := range s.Nodes {
		s.Nodes[i].Status.Allocatable[whole] = resource.MustParse("24")
	}
	for i := range s.Pods {
		p := &s.Pods[i]
		amount := resource.MustParse("1")
		if p.Spec.NodeName == "" {
			amount = p.Spec.Containers[0].Resources.Requests[memory]
		}
		p.Spec.Containers[0].Resources.Requests = v1.ResourceList{whole: amount}
		p.Spec.Containers[0].Resources.Limits = v1.ResourceList{whole: amount}
		p.Annotations = nil
	}
}

// large is a cluster of 5000 nodes with perNode pods each, and a pod that waits.
func large(tb testing.TB, units int64, perNode int) *Snapshot {
	tb.Helper()
	const nodes = 5000
	rng := rand.New(rand.NewSource(1))
	c := newBuilder(tb)
	c.Pods = make([]v1.Pod, 0, nodes*perNode+1)
	for i := range nodes {
		name := fmt.Sprintf("n%04d", i)
		c.node(name, []accel.Units{16, 16, 16, 16, 16, 16, 16, 16})
		for k := range perNode {
			// Of two devices each, so that none is empty.
			units := int64(6 + 2*rng.Intn(4))
			if perNode > 4 {
				units = 4
			}
			c.on(fmt.Sprintf("p%d-%d", i, k), name, units, 2*k%8, (2*k+1)%8)
		}
	}
	c.waiting("train", units, "0/5000 nodes are available: 5000 insufficient GCU Memory in one gcu device.")
	return &c.Snapshot
}

// TestSchedulersOwnAffinity: a node that an argument of kube-scheduler closes fits by all that the API
// has. It is neither said that the pod fits there, nor is a change verified.
func TestSchedulersOwnAffinity(t *testing.T) {
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16})
	b.node("gcu-2", []accel.Units{16}).Spec.Unschedulable = true
	b.waiting("train", 8,
		"0/2 nodes are available: 1 node(s) were unschedulable, 1 node(s) didn't match scheduler-enforced node affinity.")
	e := explainTrain(b, nil)
	if len(e.Causes) != 1 || e.Causes[0].Code != Unknown || e.Waiting.Helps {
		t.Errorf("%+v, %+v", e.Causes, e.Waiting)
	}
	for _, c := range e.Changes {
		if c.Verified {
			t.Errorf("%q is verified", c.Text)
		}
	}
}
