package plugin

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

func TestHintsOfNodes(t *testing.T) {
	node := func(inventory string, change ...func(*v1.Node)) *v1.Node {
		n := &v1.Node{}
		n.Annotations = map[string]string{}
		if inventory != "" {
			n.Annotations[wire.InventoryAnnotation] = inventory
		}
		for _, f := range change {
			f(n)
		}
		return n
	}
	cpu := func(n *v1.Node) { n.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("4")} }
	label := func(n *v1.Node) { n.Labels = map[string]string{"a": "b"} }
	other := func(n *v1.Node) { n.Annotations["example.com/other"] = "x" }
	for name, tc := range map[string]struct {
		before, after *v1.Node
		want          fwk.QueueingHint
	}{
		"a node without devices appears": {nil, node(""), fwk.QueueSkip},
		"a node with devices appears":    {nil, node("x"), fwk.Queue},
		"it publishes devices":           {node(""), node("x"), fwk.Queue},
		"it publishes others":            {node("x"), node("y"), fwk.Queue},
		"it publishes none any more":     {node("x"), node(""), fwk.Queue},
		"another annotation":             {node("x"), node("x", other), fwk.QueueSkip},
		"a label":                        {node("x"), node("x", label), fwk.Queue},
		"a label without devices":        {node(""), node("", label), fwk.QueueSkip},
		"more CPU":                       {node("x"), node("x", cpu), fwk.Queue},
	} {
		var before any
		if tc.before != nil {
			before = tc.before
		}
		if got, err := (&Plugin{}).nodeChanged(klog.Logger{}, nil, before, tc.after); got != tc.want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestHintsOfPods(t *testing.T) {
	p := &Plugin{core: &Core{config: Config{Resources: []accel.Resource{decisiontest.Memory}}}}
	waiting, holder, plain := decisiontest.NewPod("waiting", 4), decisiontest.NewPod("holder", 4), decisiontest.NewPod("plain")
	holder.Spec.NodeName = "node-a"
	nominated := decisiontest.NewPod("nominated", 4)
	nominated.Status.NominatedNodeName = "node-a"
	asksOtherwise := waiting.DeepCopy()
	asksOtherwise.Annotations = map[string]string{wire.CountAnnotation: "2"}
	labelled := waiting.DeepCopy()
	labelled.Labels = map[string]string{"a": "b"}
	for name, tc := range map[string]struct {
		before, after any
		want          fwk.QueueingHint
	}{
		"a pod that held units is gone": {holder, nil, fwk.Queue},
		"a nominated pod is gone":       {nominated, nil, fwk.Queue},
		"a pod that waited is gone":     {decisiontest.NewPod("other", 4), nil, fwk.QueueSkip},
		"a pod without units is gone":   {plain, nil, fwk.QueueSkip},
		"the pod is gone itself":        {waiting, nil, fwk.QueueSkip},
		"another pod changes":           {holder, holder, fwk.QueueSkip},
		"the pod requests otherwise":    {waiting, asksOtherwise, fwk.Queue},
		"the pod has another label":     {waiting, labelled, fwk.QueueSkip},
		"it is not known which":         {nil, nil, fwk.Queue},
	} {
		if got, err := p.podChanged(klog.Logger{}, waiting, tc.before, tc.after); got != tc.want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	if _, status := p.SignPod(t.Context(), waiting); status.IsSuccess() {
		t.Error("a pod that requests devices was signed")
	}
	if fragments, status := p.SignPod(t.Context(), plain); !status.IsSuccess() || len(fragments) > 0 {
		t.Errorf("another pod: %v, %v", fragments, status)
	}
}

func TestTolerates(t *testing.T) {
	node := &v1.Node{Spec: v1.NodeSpec{Taints: []v1.Taint{{Key: "k", Value: "v", Effect: v1.TaintEffectNoSchedule}}}}
	for name, tc := range map[string]struct {
		tolerations []v1.Toleration
		want        bool
	}{
		"none":           {nil, false},
		"equal":          {[]v1.Toleration{{Key: "k", Value: "v"}}, true},
		"another value":  {[]v1.Toleration{{Key: "k", Value: "w"}}, false},
		"exists":         {[]v1.Toleration{{Key: "k", Operator: v1.TolerationOpExists}}, true},
		"all":            {[]v1.Toleration{{Operator: v1.TolerationOpExists}}, true},
		"another effect": {[]v1.Toleration{{Operator: v1.TolerationOpExists, Effect: v1.TaintEffectNoExecute}}, false},
		"second":         {[]v1.Toleration{{Key: "x"}, {Key: "k", Value: "v"}}, true},
	} {
		if got := mayRun(&v1.Pod{Spec: v1.PodSpec{Tolerations: tc.tolerations}}, node); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
