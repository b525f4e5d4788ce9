package why

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"mvdan.cc/sh/v3/shell"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// changeOf is the change of a kind, which must be there.
func changeOf(t *testing.T, e *Explanation, kind ChangeKind) *Change {
	t.Helper()
	i := slices.IndexFunc(e.Changes, func(c Change) bool { return c.Kind == kind })
	if i < 0 {
		t.Fatalf("no change of kind %s in %+v", kind, e.Changes)
	}
	return &e.Changes[i]
}

func noChangeOf(t *testing.T, e *Explanation, kind ChangeKind) {
	t.Helper()
	for _, c := range e.Changes {
		if c.Kind == kind {
			t.Errorf("a change %q of kind %s", c.Text, kind)
		}
	}
}

// TestHostileNames: a name that an object cannot have is in no command.
func TestHostileNames(t *testing.T) {
	const evil = "x; touch /tmp/owned; #"
	check := func(t *testing.T, e Explanation) {
		t.Helper()
		for _, c := range e.Changes {
			for _, command := range c.Commands {
				if strings.Contains(command, "touch") {
					t.Errorf("command %q", command)
				}
			}
		}
		if len(e.Changes) == 0 {
			t.Error("no changes")
		}
	}
	base := func() (*builder, *v1.Pod) {
		b := newBuilder(t)
		b.node("gcu-1", []accel.Units{16})
		b.on("old", "gcu-1", 12, 0)
		p := b.waiting("train", 8, insufficient)
		return b, p
	}
	for _, kind := range []string{"StatefulSet", "ReplicaSet", "Job", "Deployment/web"} {
		t.Run(kind, func(t *testing.T) {
			b, p := base()
			ownedBy(p, kind, evil)
			check(t, explainTrain(b, nil))
			p.Labels = map[string]string{"pod-template-hash": "5f"}
			ownedBy(p, kind, evil+"-5f")
			p.Spec.NodeSelector = map[string]string{"zone": "b"}
			check(t, explainTrain(b, nil))
		})
	}
	t.Run("container", func(t *testing.T) {
		b, p := base()
		ownedBy(p, "StatefulSet", "web")
		p.Spec.Containers[0].Name = evil
		check(t, explainTrain(b, nil))
	})
	t.Run("holder", func(t *testing.T) {
		b, _ := base()
		b.Pods[0].Name = evil
		check(t, explainTrain(b, nil))
	})
	t.Run("pod", func(t *testing.T) {
		b, p := base()
		p.Name = evil
		check(t, New(&b.Snapshot).Pod(p))
	})
	t.Run("node", func(t *testing.T) {
		b := newBuilder(t)
		b.node(evil, []accel.Units{16}).Spec.Unschedulable = true
		b.waiting("train", 8, insufficient)
		check(t, explainTrain(b, nil))
	})
	t.Run("taint", func(t *testing.T) {
		b := newBuilder(t)
		b.node("gcu-1", []accel.Units{16}).Spec.Taints = []v1.Taint{{Key: "--kubeconfig", Value: evil, Effect: v1.TaintEffectNoSchedule}}
		b.waiting("train", 8, insufficient)
		e := explainTrain(b, nil)
		if c := changeOf(t, &e, ChangeNode); len(c.Commands) > 0 {
			t.Errorf("commands %q", c.Commands)
		}
	})
	t.Run("suspended job", func(t *testing.T) {
		b := newBuilder(t)
		check(t, explainTrain(b, &Owner{Kind: "job", Namespace: "team-a", Name: evil, Suspended: true}))
	})
}

// TestKubectl: every argument reaches the program as it is.
func TestKubectl(t *testing.T) {
	want := []string{"kubectl", "a b", "$(touch x)", "`touch x`", "it's", "x;y", "", "a\nb", "k=v", "*", "~"}
	got, err := shell.Fields(kubectl(want[1:]...), nil)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

// TestForeignController: a controller of another group is not taken for Kubernetes' own of the
// same kind.
func TestForeignController(t *testing.T) {
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16})
	p := b.waiting("train", 20, insufficient)
	ownedBy(p, "StatefulSet", "train")
	p.OwnerReferences[0].APIVersion = "apps.kruise.io/v1"
	e := explainTrain(b, nil)
	c := changeOf(t, &e, ChangeRequest)
	if e.Owner != "statefulset.apps.kruise.io/train" || len(c.Commands) > 0 {
		t.Errorf("owner %q, commands %q", e.Owner, c.Commands)
	}
}

// TestReplace: the pod is in a file before it is deleted, and the answer says so.
func TestReplace(t *testing.T) {
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16})
	b.waiting("train", 20, insufficient)
	e := explainTrain(b, nil)
	check := func(c *Change) {
		t.Helper()
		if len(c.Commands) != 2 || !strings.HasSuffix(c.Commands[0], " > train.json") ||
			c.Commands[1] != "kubectl replace --force -f train.json" {
			t.Errorf("commands %q", c.Commands)
		}
		if notes := strings.Join(e.Notes, "\n"); !strings.Contains(notes, "kubectl create -f train.json") {
			t.Errorf("notes %q", notes)
		}
	}
	check(changeOf(t, &e, ChangeRequest))
	// A pod that kubelet rejected goes to any node then, with no planned allocation.
	b = newBuilder(t)
	goldenCases[RejectedByKubelet].make(b)
	e = explainTrain(b, nil)
	c := changeOf(t, &e, ChangeRequest)
	check(c)
	if p := carryOut(t, &b.Snapshot, c).Pod("team-a", "train"); p.Spec.NodeName != "" || p.Annotations[wire.GrantAnnotation] != "" {
		t.Errorf("%+v is still of its node", p)
	}
}

// TestRestarts: a change of a template that restarts pods which run says so, and is not
// verified.
func TestRestarts(t *testing.T) {
	for _, running := range []int{0, 2} {
		b := newBuilder(t)
		b.Pods = make([]v1.Pod, 0, 4)
		b.node("gcu-1", []accel.Units{16, 16, 16})
		for i := range running {
			ownedBy(b.on(fmt.Sprint("train-", i), "gcu-1", 4, i), "StatefulSet", "train")
		}
		ownedBy(b.on("other", "gcu-1", 4, 2), "StatefulSet", "other")
		p := b.waiting("train", 20, insufficient)
		ownedBy(p, "StatefulSet", "train")
		e := explainTrain(b, nil)
		c := changeOf(t, &e, ChangeRequest)
		if says := strings.Contains(c.Text, "restarts its 2 running pods"); says != (running > 0) || c.Verified == says {
			t.Errorf("%d run: %+v", running, c)
		}
	}
}

// TestHeldBack: a change of a template that its controller does not roll out says so, and is not
// verified.
func TestHeldBack(t *testing.T) {
	partition := func(n int32) *appsv1.StatefulSet {
		return &appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{UpdateStrategy: appsv1.StatefulSetUpdateStrategy{
			RollingUpdate: &appsv1.RollingUpdateStatefulSetStrategy{Partition: &n}}}}
	}
	for name, tt := range map[string]struct {
		kind string
		obj  runtime.Object
		err  error
		want string
	}{
		"rolled out":         {"Deployment", &appsv1.Deployment{}, nil, ""},
		"paused":             {"Deployment", &appsv1.Deployment{Spec: appsv1.DeploymentSpec{Paused: true}}, nil, "is paused"},
		"not known":          {"Deployment", nil, nil, ""},
		"may not be read":    {"Deployment", nil, errors.New("forbidden"), "is not known: forbidden"},
		"no partition":       {"StatefulSet", partition(0), nil, ""},
		"a partition":        {"StatefulSet", partition(3), nil, "only to pods from number 3 on"},
		"no rolling update":  {"StatefulSet", &appsv1.StatefulSet{}, nil, ""},
		"without a template": {"Job", nil, errors.New("not asked for"), ""},
	} {
		b := newBuilder(t)
		b.node("gcu-1", []accel.Units{16})
		p := b.waiting("train", 20, insufficient)
		ownedBy(p, tt.kind, "train-5d")
		if tt.kind == "Deployment" {
			p.OwnerReferences[0].Kind, p.Labels = "ReplicaSet", map[string]string{"pod-template-hash": "5d"}
		}
		b.Controller = func(string, string, string) (runtime.Object, error) { return tt.obj, tt.err }
		e := explainTrain(b, nil)
		c := changeOf(t, &e, ChangeRequest)
		if c.Verified != (tt.want == "") || !strings.Contains(c.Text, tt.want) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// TestLabels: a label is offered where the node has none of its key and a person may set it.
func TestLabels(t *testing.T) {
	for _, tt := range []struct {
		key, value, has string
		offered         bool
	}{
		{"zone", "b", "", true},
		{"zone", "b", "a", false},
		{"example.com/pool", "b", "", true},
		{v1.LabelHostname, "gcu-1", "", false},
		{v1.LabelHostname, "gcu-1", "gcu-2", false},
		{v1.LabelTopologyZone, "b", "", false},
		{"kubernetes.io/arch", "arm64", "", false},
		{"cloud.k8s.io/x", "b", "", false},
		{"nvidia.com/gpu.product", "A100", "", false},
		{"enflame.com/gcu.model", "S60", "", false},
		{"iluvatar.com/gpu.present", "true", "", true},
		{labelEnabled, "true", "", true},
	} {
		b := newBuilder(t)
		n := b.node("gcu-1", []accel.Units{16})
		if tt.has != "" {
			n.Labels[tt.key] = tt.has
		}
		b.waiting("train", 8, insufficient).Spec.NodeSelector = map[string]string{tt.key: tt.value}
		e := explainTrain(b, nil)
		if !tt.offered {
			noChangeOf(t, &e, ChangeNode)
			continue
		}
		if c := changeOf(t, &e, ChangeNode); c.Commands[0] != "kubectl label node gcu-1 "+tt.key+"="+tt.value {
			t.Errorf("commands %q", c.Commands)
		}
	}
}

// TestNodeLabelOfVendor: a node that has the vendor's label with another value keeps it.
func TestNodeLabelOfVendor(t *testing.T) {
	for _, value := range []string{"", "false"} {
		b := newBuilder(t)
		goldenCases[NodeNotLabelled].make(b)
		if value != "" {
			b.Nodes[0].Labels["enflame.com/gcushare"] = value
		}
		e := explainTrain(b, nil)
		if c := changeOf(t, &e, ChangeNode); len(c.Commands) > 0 != (value == "") {
			t.Errorf("%q: commands %q", value, c.Commands)
		}
	}
}

// TestTaintsThatStay: taints that a controller sets are neither removed nor tolerated.
func TestTaintsThatStay(t *testing.T) {
	for key, stays := range map[string]bool{
		"dedicated": false, "nvidia.com/gpu": false,
		"ToBeDeletedByClusterAutoscaler": true, "DeletionCandidateOfClusterAutoscaler": true, "karpenter.sh/disrupted": true,
		"node-role.kubernetes.io/control-plane": true, "node.cilium.io/agent-not-ready": true,
		"node.cloudprovider.kubernetes.io/uninitialized": true, "node.kubernetes.io/memory-pressure": true,
	} {
		b := newBuilder(t)
		n := b.node("gcu-1", []accel.Units{16})
		n.Spec.Taints = []v1.Taint{{Key: key, Effect: v1.TaintEffectNoSchedule}}
		p := b.waiting("train", 8, insufficient)
		e := explainTrain(b, nil)
		if stays {
			noChangeOf(t, &e, ChangeNode)
			noChangeOf(t, &e, ChangeAnnotation)
		} else {
			changeOf(t, &e, ChangeNode)
			changeOf(t, &e, ChangeAnnotation)
		}
		more := slices.ContainsFunc(e.Changes, func(c Change) bool { return c.Kind == ChangeMoreNodes })
		if passes := stays && !strings.HasPrefix(key, "node-role"); more != passes {
			t.Errorf("%s: another node is offered: %v", key, more)
		}
		// A node that a controller removes is not uncordoned either.
		n.Spec.Unschedulable = true
		p.Spec.Tolerations = []v1.Toleration{{Key: key, Operator: v1.TolerationOpExists}}
		e = explainTrain(b, nil)
		if uncordons := len(e.Changes) > 0 && e.Changes[0].Kind == ChangeNode; uncordons != !isHandled(n.Spec.Taints[0]) {
			t.Errorf("%s: uncordoned: %v", key, uncordons)
		}
	}
}

// TestMarkup: names and messages of others cannot control a terminal.
func TestMarkup(t *testing.T) {
	const markup = "\x1b[2J\x07\u009b\u202e\u2028\U000e0001\n"
	yes := true
	for _, running := range []bool{false, true} {
		b := newBuilder(t)
		b.node("gcu-1"+markup, []accel.Units{16}, func(in *accel.Inventory) { in.Shares[0].Model = "S60" + markup + "<b>" })
		old := b.on("old"+markup, "gcu-1"+markup, 12, 0)
		old.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Controller: &yes,
			Kind: "StatefulSet" + markup, Name: "o" + markup}}
		p := b.waiting("train"+markup, 20, "0/1 nodes are available: 1 evil"+markup+"line.")
		annotate(p, "divvy.dev/use-models", "L600"+markup+",<script>")
		p.OwnerReferences = old.OwnerReferences
		if running {
			p.Spec.NodeName, p.Status.Phase, p.Status.Reason = "gcu-1"+markup, v1.PodFailed, "UnexpectedAdmissionError"
		}
		for _, units := range []int64{8, 20} {
			setUnits(p, units)
			e := New(&b.Snapshot).Pod(p)
			var out bytes.Buffer
			if err := Print(&out, &e); err != nil {
				t.Fatal(err)
			}
			if err := PrintLines(&out, []Explanation{e}); err != nil {
				t.Fatal(err)
			}
			var doc bytes.Buffer
			if err := PrintJSON(&doc, []Explanation{e}, false); err != nil {
				t.Fatal(err)
			}
			if strings.ContainsAny(doc.String(), "\x1b\x07\u009b\u202e\u2028") {
				t.Errorf("JSON %q", &doc)
			}
			var again Explanation
			if err := json.Unmarshal(doc.Bytes(), &again); err != nil || again.Pod != e.Pod ||
				again.Causes[0].Detail != e.Causes[0].Detail {
				t.Errorf("%v, %+v, want %+v", err, again, e)
			}
			if strings.ContainsAny(out.String(), "\x1b\x07\u009b\u202e") || strings.Contains(out.String(), "\nline") {
				t.Errorf("%q", &out)
			}
		}
	}
}
