package why

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// replica makes a pod one of a Deployment.
func replica(p *v1.Pod, of string) *v1.Pod {
	p.Labels = map[string]string{"app": of, "pod-template-hash": "5f"}
	ownedBy(p, "ReplicaSet", of+"-5f")
	return p
}

// plans are clusters with what is asked of them: moves for the pods that wait, or for a node.
var plans = map[string]struct {
	make func(b *builder)
	node string
}{
	"admit": {make: func(b *builder) {
		b.node("gcu-1", []accel.Units{16, 16})
		b.node("gcu-2", []accel.Units{16})
		replica(b.on("web-5f-a", "gcu-1", 6, 0), "web")
		replica(b.on("batch-5f-b", "gcu-1", 12, 1), "batch")
		replica(b.on("web-5f-c", "gcu-2", 8, 0), "web")
		ownedBy(b.waiting("train-0", 16, insufficient), "StatefulSet", "train")
		b.waiting("small", 3, insufficient)
	}},
	"chain": {make: func(b *builder) {
		b.node("gcu-1", []accel.Units{16})
		b.node("gcu-2", []accel.Units{12})
		b.node("gcu-3", []accel.Units{8})
		replica(b.on("big-5f-a", "gcu-1", 10, 0), "big")
		replica(b.on("mid-5f-b", "gcu-2", 5, 0), "mid")
		b.on("solo", "gcu-3", 2, 0)
		ownedBy(b.waiting("train-0", 16, insufficient), "StatefulSet", "train")
	}},
	"sameNode": {make: func(b *builder) {
		b.node("gcu-1", []accel.Units{16, 16})
		replica(b.on("web-5f-a", "gcu-1", 6, 0), "web")
		p := b.on("db-0", "gcu-1", 8, 1)
		ownedBy(p, "StatefulSet", "db")
		b.waiting("train-0", 16, insufficient)
	}},
	"several": {make: func(b *builder) {
		b.node("gcu-1", []accel.Units{16})
		b.node("gcu-2", []accel.Units{16})
		b.node("gcu-3", []accel.Units{16})
		replica(b.on("web-5f-a", "gcu-1", 4, 0), "web")
		replica(b.on("web-5f-b", "gcu-2", 6, 0), "web")
		replica(b.on("web-5f-c", "gcu-3", 5, 0), "web")
		b.waiting("train-0", 16, insufficient)
		b.waiting("train-1", 16, insufficient)
		b.waiting("train-2", 16, insufficient)
	}},
	"none": {make: func(b *builder) {
		b.node("gcu-1", []accel.Units{16})
		b.node("gcu-2", []accel.Units{16})
		b.on("solo", "gcu-1", 6, 0)
		p := replica(b.on("web-5f-a", "gcu-2", 8, 0), "web")
		b.Budgets = []policyv1.PodDisruptionBudget{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "web"},
			Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: p.Labels}}}}
		b.waiting("train-0", 12, insufficient)
	}},
	"nothing": {make: func(b *builder) { b.node("gcu-1", []accel.Units{16}) }},
	"empty": {node: "gcu-1", make: func(b *builder) {
		b.node("gcu-1", []accel.Units{16, 16})
		b.node("gcu-2", []accel.Units{16})
		b.node("gcu-3", []accel.Units{16})
		replica(b.on("web-5f-a", "gcu-1", 6, 0), "web")
		replica(b.on("batch-5f-b", "gcu-1", 12, 1), "batch")
		replica(b.on("front-5f-d", "gcu-1", 0), "front")
		ownedBy(b.on("agent", "gcu-1", 0), "DaemonSet", "agent")
		replica(b.on("web-5f-c", "gcu-2", 8, 0), "web")
	}},
	"notEmpty": {node: "gcu-1", make: func(b *builder) {
		b.node("gcu-1", []accel.Units{16})
		b.node("gcu-2", []accel.Units{16})
		ownedBy(b.on("epoch", "gcu-1", 6, 0), "Job", "train")
	}},
}

func planOf(t *testing.T, name string) (*builder, Plan) {
	t.Helper()
	c := plans[name]
	b := newBuilder(t)
	b.Pods = make([]v1.Pod, 0, 10) // so that pointers stay
	c.make(b)
	x := New(&b.Snapshot)
	if c.node == "" {
		return b, x.Admit()
	}
	p, err := x.Empty(c.node)
	if err != nil {
		t.Fatal(err)
	}
	return b, p
}

func TestPlanOutput(t *testing.T) {
	for name := range plans {
		t.Run(name, func(t *testing.T) {
			_, p := planOf(t, name)
			var out bytes.Buffer
			if err := p.Print(&out); err != nil {
				t.Fatal(err)
			}
			out.WriteString("\n")
			if err := p.PrintJSON(&out); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join("testdata", "plan-"+name+".golden")
			if *update {
				if err := os.WriteFile(path, out.Bytes(), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(want), out.String()); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
			_, again := planOf(t, name)
			one, _ := json.Marshal(p)
			other, _ := json.Marshal(again)
			if !bytes.Equal(one, other) {
				t.Error("a second plan of the same cluster is another one")
			}
		})
	}
}

// TestRules: what keeps a pod from being moved.
func TestRules(t *testing.T) {
	tests := map[Rule]func(b *builder, p *v1.Pod){
		"":               func(*builder, *v1.Pod) {},
		RuleNode:         func(_ *builder, p *v1.Pod) { ownedBy(p, "DaemonSet", "agent") },
		RuleNoController: func(_ *builder, p *v1.Pod) { p.OwnerReferences = nil },
		RuleController:   func(_ *builder, p *v1.Pod) { ownedBy(p, "Job", "train") },
		RuleSystem: func(_ *builder, p *v1.Pod) {
			critical := int32(criticalPriority)
			p.Spec.Priority = &critical
		},
		RuleEnding: func(_ *builder, p *v1.Pod) { at := metav1.NewTime(taken); p.DeletionTimestamp = &at },
		RuleBudget: func(b *builder, _ *v1.Pod) {
			b.Budgets = []policyv1.PodDisruptionBudget{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a"},
				Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{}}}}
		},
		RuleAnnotated: func(_ *builder, p *v1.Pod) { annotate(p, "karpenter.sh/do-not-disrupt", "true") },
		RuleNotJudged: func(_ *builder, p *v1.Pod) {
			p.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{WhenUnsatisfiable: v1.DoNotSchedule}}
		},
		RuleToleratesCordon: func(_ *builder, p *v1.Pod) { p.Spec.Tolerations = []v1.Toleration{{Operator: v1.TolerationOpExists}} },
		RuleUnknownDevice:   func(_ *builder, p *v1.Pod) { delete(p.Annotations, wire.GrantAnnotation) },
	}
	for _, rule := range append(Rules(), "") {
		t.Run(string(rule), func(t *testing.T) {
			b := newBuilder(t)
			b.Pods = make([]v1.Pod, 0, 4)
			b.node("gcu-1", []accel.Units{16})
			b.node("gcu-2", []accel.Units{16})
			p := replica(b.on("web-5f-a", "gcu-1", 6, 0), "web")
			b.on("solo", "gcu-2", 6, 0)
			b.waiting("train-0", 16, insufficient)
			tests[rule](b, p)
			plan := New(&b.Snapshot).Admit()
			if moved := len(plan.Moves) == 1; moved != (rule == "") || moved != plan.Reached {
				t.Errorf("moves %+v, reached %v", plan.Moves, plan.Reached)
			}
			if rule != "" && rule != RuleNoController && !cmp.Equal(plan.Unmoved, []Unmoved{{RuleNoController, 1}, {rule, 1}}) &&
				!cmp.Equal(plan.Unmoved, []Unmoved{{rule, 1}, {RuleNoController, 1}}) {
				t.Errorf("not moved %+v", plan.Unmoved)
			}
			if rule != "" && (len(plan.Left) != 1 || plan.Left[0].Code != LeftNotMovable) {
				t.Errorf("left %+v", plan.Left)
			}
		})
	}
}

// TestLeft: why no plan helps.
func TestLeft(t *testing.T) {
	tests := map[LeftCode]func(b *builder){
		LeftNotJudged: func(b *builder) { b.waiting("train-0", 12, "").Spec.SchedulerName = "volcano" },
		"": func(b *builder) {
			b.waiting("train-0", 12, "0/2 nodes are available: 2 node(s) had volume node affinity conflict.")
		},
		LeftNoNode: func(b *builder) { b.waiting("train-0", 17, "") },
		LeftNotMovable: func(b *builder) {
			p := b.waiting("train-0", 16, "")
			low := int32(-1)
			p.Spec.Priority = &low
		},
		LeftInsufficientCapacity: func(b *builder) {
			b.waiting("train-0", 16, "")
		},
		LeftNoPlace: func(b *builder) { b.waiting("train-0", 12, "") },
	}
	for code, change := range tests {
		t.Run(string(code), func(t *testing.T) {
			b := newBuilder(t)
			b.Pods = make([]v1.Pod, 0, 6)
			b.node("gcu-1", []accel.Units{16})
			b.node("gcu-2", []accel.Units{16})
			replica(b.on("web-5f-a", "gcu-1", 9, 0), "web")
			replica(b.on("web-5f-b", "gcu-2", 9, 0), "web")
			change(b)
			plan := New(&b.Snapshot).Admit()
			if code == "" { // quoted from kube-scheduler
				code = LeftNotJudged
			}
			if len(plan.Left) != 1 || plan.Left[0].Code != code || plan.Reached || len(plan.Moves) > 0 {
				t.Errorf("left %+v, %d moves", plan.Left, len(plan.Moves))
			}
		})
	}
}

func TestEmptyUnknownNode(t *testing.T) {
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16})
	if _, err := New(&b.Snapshot).Empty("gcu-9"); err == nil || err.Error() != `the cluster has no node "gcu-9"` {
		t.Error(err)
	}
}
