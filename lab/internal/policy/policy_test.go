package policy

import (
	"maps"
	"strings"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	celconfig "k8s.io/apiserver/pkg/apis/cel"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"

	"github.com/divvy-gpu/divvy/internal/testing/charttest"
)

const chart = "../../../charts/divvy/"

// load returns a policy of the chart, rendered with more values.
func load(t *testing.T, name string, set ...string) admissionregistrationv1.ValidatingAdmissionPolicy {
	t.Helper()
	text, err := charttest.Render(t.Context(), set...)
	if err != nil {
		t.Fatal(err)
	}
	var policy admissionregistrationv1.ValidatingAdmissionPolicy
	document(t, text, "ValidatingAdmissionPolicy", name, &policy)
	return policy
}

// validator compiles the policy as the API server does.
func validator(t *testing.T, policy admissionregistrationv1.ValidatingAdmissionPolicy) plugincel.ConditionEvaluator {
	t.Helper()
	compiler, err := plugincel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	if err != nil {
		t.Fatal(err)
	}
	var variables []plugincel.NamedExpressionAccessor
	for _, v := range policy.Spec.Variables {
		variables = append(variables, &validating.Variable{Name: v.Name, Expression: v.Expression})
	}
	compiler.CompileAndStoreVariables(variables, plugincel.OptionalVariableDeclarations{HasAuthorizer: true}, environment.StoredExpressions)
	var conditions []plugincel.ExpressionAccessor
	for _, v := range policy.Spec.Validations {
		conditions = append(conditions, &validating.ValidationCondition{Expression: v.Expression, Message: v.Message})
	}
	e := compiler.CompileCondition(conditions, plugincel.OptionalVariableDeclarations{HasAuthorizer: true}, environment.StoredExpressions)
	if errs := e.CompilationErrors(); len(errs) > 0 {
		t.Fatalf("the policy does not compile: %v", errs)
	}
	return e
}

func node(name string, labels, annotations map[string]string) *corev1.Node {
	return &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: annotations},
	}
}

func pod(on string, labels, annotations map[string]string) *corev1.Pod {
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", Labels: labels, Annotations: annotations},
		Spec:       corev1.PodSpec{NodeName: on},
	}
}

func with(m map[string]string, pairs ...string) map[string]string {
	out := maps.Clone(m)
	if out == nil {
		out = map[string]string{}
	}
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i]] = pairs[i+1]
	}
	return out
}

func without(m map[string]string, keys ...string) map[string]string {
	out := maps.Clone(m)
	for _, k := range keys {
		delete(out, k)
	}
	return out
}

// TestDaemonChangesNothingButItsOwn: a daemon whose node was taken over can
// touch that node's devices and no more.
func TestDaemonChangesNothingButItsOwn(t *testing.T) {
	labels := map[string]string{
		"kubernetes.io/hostname": "a", "divvy.dev/config": "training", "nvidia.com/gpu.deploy.device-plugin": "true",
		"nvidia.com/gpu.count": "2", "enflame.com/gcushare": "true",
	}
	annotations := map[string]string{"node.alpha.kubernetes.io/ttl": "0", "divvy.dev/inventory": "old",
		"divvy.dev/labels": "nvidia.com/gpu.count"}
	before := node("a", labels, annotations)
	relabel := func(l map[string]string) runtime.Object { return node("a", l, annotations) }
	note := func(a map[string]string) runtime.Object { return node("a", labels, a) }
	asked := note(with(annotations, "divvy.dev/device-request", "r"))
	podLabels := map[string]string{"app": "x"}
	podNotes := map[string]string{"divvy.dev/grant": "g", "other.example/x": "1"}
	podBefore := pod("a", podLabels, podNotes)
	other := pod("a", podLabels, podNotes)
	other.Spec.Containers = []corev1.Container{{Name: "c", Image: "evil"}}
	taint := node("a", labels, annotations)
	taint.Spec.Unschedulable = true

	tests := map[string]struct {
		old, new runtime.Object
		on       string // the node of the pod that the token is bound to, or "Node" and the node that it is bound to
		allowed  bool
	}{
		"nothing":                        {before, before, "a", true},
		"an inventory":                   {before, note(with(annotations, "divvy.dev/inventory", "new")), "a", true},
		"the quarantine":                 {before, note(with(annotations, "divvy.dev/quarantine", "new")), "a", true},
		"a request that it has answered": {asked, note(with(annotations, "divvy.dev/quarantine", "new")), "a", true},
		"a request of its own":           {before, asked, "a", false},
		"a request that it changes":      {asked, note(with(annotations, "divvy.dev/device-request", "s")), "a", false},
		"a request on a pod": {pod("a", nil, map[string]string{"divvy.dev/device-request": "r"}), pod("a", nil, nil),
			"a", false},
		"a label of Divvy":        {before, relabel(with(labels, "divvy.dev/nvidia.count", "2")), "a", true},
		"the path of its devices": {before, relabel(with(labels, "divvy.dev/allocation-path", "dra")), "a", true},
		"labels of feature discovery": {before,
			relabel(with(labels, "nvidia.com/gpu.present", "true", "nvidia.com/cuda.driver-version.full", "550", "nvidia.com/gpu.count",
				"3")), "a", true},
		"labels of Iluvatar's": {before,
			relabel(with(labels, "iluvatar.com/gpu.product", "BI-V150", "iluvatar.com/ix.driver-version.full",
				"4.1.0", "iluvatar.com/cuda.runtime-version.full", "10.2")), "a", true},
		"labels of Enflame's": {before,
			relabel(with(labels, "enflame.com/gcu.count", "2", "enflame.com/gcu.driver-version", "1.2.3")), "a", true},
		"a label that is no longer true": {before, relabel(without(labels, "nvidia.com/gpu.count")), "a", true},
		"labels and their note in one": {before, node("a", without(labels, "nvidia.com/gpu.count"),
			without(annotations, "divvy.dev/labels")), "a", true},
		"the first labels of a node": {node("a", nil, nil), node("a", map[string]string{"divvy.dev/nvidia.present": "true"},
			map[string]string{"divvy.dev/labels": "x"}), "a", true},
		"another node": {node("b", nil, nil), node("b", nil, map[string]string{"divvy.dev/inventory": "x"}),
			"a", false},
		"with a token of no node":        {before, before, "", false},
		"with a token bound to the node": {before, before, "Node a", false},
		"its own name":                   {before, relabel(with(labels, "kubernetes.io/hostname", "b")), "a", false},
		"a role":                         {before, relabel(with(labels, "node-role.kubernetes.io/control-plane", "")), "a", false},
		"which configuration it has":     {before, relabel(with(labels, "divvy.dev/config", "other")), "a", false},
		"whether it runs":                {before, relabel(with(labels, "divvy.dev/enabled", "true")), "a", false},
		"whether it shares":              {before, relabel(without(labels, "enflame.com/gcushare")), "a", false},
		"what the operator deploys":      {before, relabel(with(labels, "nvidia.com/gpu.deploy.device-plugin", "false")), "a", false},
		"the operator's workload": {before, relabel(with(labels, "nvidia.com/gpu.workload.config", "vm-passthrough")),
			"a", false},
		"how GPUs are partitioned":             {before, relabel(with(labels, "nvidia.com/mig.config", "all-1g.5gb")), "a", false},
		"whether they can be":                  {before, relabel(with(labels, "nvidia.com/mig.capable", "true")), "a", true},
		"NVIDIA's choice of a configuration":   {before, relabel(with(labels, "nvidia.com/device-plugin.config", "x")), "a", false},
		"an annotation of somebody else":       {before, note(with(annotations, "node.alpha.kubernetes.io/ttl", "1")), "a", false},
		"an annotation of somebody else, away": {before, note(without(annotations, "node.alpha.kubernetes.io/ttl")), "a", false},
		"a specification":                      {before, taint, "a", false},
		"Divvy's annotations of pods":          {before, note(with(annotations, "divvy.dev/grant", "x")), "a", false},
		"an annotation like Divvy's":           {before, note(with(annotations, "divvy.dev/config", "x")), "a", false},
		"a pod's devices": {
			podBefore, pod("a", podLabels, with(podNotes, "divvy.dev/held", "{}", "divvy.dev/grant", "h", "enflame.com/gcu-device-id",
				"1")), "a", true,
		},
		"a pod's first annotation":     {pod("a", nil, nil), pod("a", nil, map[string]string{"divvy.dev/held": "{}"}), "a", true},
		"a pod of another node":        {pod("b", nil, nil), pod("b", nil, map[string]string{"divvy.dev/held": "{}"}), "a", false},
		"a pod of no node":             {pod("", nil, nil), pod("", nil, map[string]string{"divvy.dev/held": "{}"}), "a", false},
		"Divvy's annotations of nodes": {podBefore, pod("a", podLabels, with(podNotes, "divvy.dev/inventory", "x")), "a", false},
		"a pod's labels":               {podBefore, pod("a", with(podLabels, "nvidia.com/gpu.count", "1"), podNotes), "a", false},
		"a pod's other annotations":    {podBefore, pod("a", podLabels, with(podNotes, "other.example/x", "2")), "a", false},
		"a pod's image":                {podBefore, other, "a", false},
	}
	policy := load(t, "divvy-node")
	conditions := validator(t, policy)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			refused := evaluate(t, policy, conditions, tt.old, tt.new, tt.on)
			if tt.allowed != (len(refused) == 0) {
				t.Errorf("allowed %t, want %t; refused for: %q", len(refused) == 0, tt.allowed, refused)
			}
		})
	}
}

// refusals evaluates a policy's validations, and returns the messages of those that
// do not hold, or the expressions of these messages.
func refusals(t *testing.T, validations []admissionregistrationv1.Validation, conditions plugincel.ConditionEvaluator,
	versioned *admission.VersionedAttributes, gvr schema.GroupVersionResource, gvk schema.GroupVersionKind,
) (refused []string) {
	t.Helper()
	request := plugincel.CreateAdmissionRequest(versioned.Attributes, metav1.GroupVersionResource(gvr), metav1.GroupVersionKind(gvk))
	results, _, err := conditions.ForInput(t.Context(), versioned, request, plugincel.OptionalVariableBindings{}, nil,
		celconfig.RuntimeCELCostBudget)
	if err != nil {
		t.Fatal(err)
	}
	for i, result := range results {
		if result.Error != nil {
			t.Errorf("%s: %v", validations[i].Expression, result.Error)
		} else if result.EvalResult.Value() != true {
			refused = append(refused, validations[i].Message+validations[i].MessageExpression)
		}
	}
	return refused
}

// evaluate returns the messages of the validations that fail.
func evaluate(t *testing.T, policy admissionregistrationv1.ValidatingAdmissionPolicy, conditions plugincel.ConditionEvaluator,
	before, after runtime.Object, tokenNode string,
) (refused []string) {
	t.Helper()
	gvk := after.GetObjectKind().GroupVersionKind()
	gvr := schema.GroupVersionResource{Version: "v1", Resource: strings.ToLower(gvk.Kind) + "s"}
	who := &user.DefaultInfo{Name: "system:serviceaccount:divvy-system:divvy-node", Extra: map[string][]string{}}
	node, ofNode := strings.CutPrefix(tokenNode, "Node ")
	if node != "" {
		who.Extra["authentication.kubernetes.io/node-name"] = []string{node}
		if !ofNode {
			who.Extra["authentication.kubernetes.io/pod-name"] = []string{"divvy-node-x"}
		}
	}
	object, err := meta.Accessor(after)
	if err != nil {
		t.Fatal(err)
	}
	attributes := admission.NewAttributesRecord(after, before, gvk, object.GetNamespace(), object.GetName(), gvr, "", admission.Update, nil,
		false, who)
	versioned := &admission.VersionedAttributes{Attributes: attributes, VersionedKind: gvk, VersionedObject: admission.NewLazyObject(after),
		VersionedOldObject: admission.NewLazyObject(before)}
	return refusals(t, policy.Spec.Validations, conditions, versioned, gvr, gvk)
}
