package policy

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/testing/charttest"
)

// document returns the only rendered object of a kind with that name.
func document(t *testing.T, text []byte, kind, name string, into any) {
	t.Helper()
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var head metav1.PartialObjectMetadata
		if err := yaml.Unmarshal(doc, &head); err != nil {
			t.Fatal(err)
		}
		if head.Kind == kind && head.Name == name {
			if err := yaml.UnmarshalStrict(doc, into); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Fatalf("the chart renders no %s %s", kind, name)
}

func renderedDedicated(t *testing.T) []byte {
	t.Helper()
	text, err := charttest.Render(t.Context(), "--set", "scheduler.mode=dedicated", "--values", "../../../examples/values/mixed.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// matcherOf compiles conditions as the API server does when they are stored.
func matcherOf(t *testing.T, conditions []admissionregistrationv1.MatchCondition,
	policy admissionregistrationv1.FailurePolicyType) matchconditions.Matcher {
	t.Helper()
	var all []plugincel.ExpressionAccessor
	for _, c := range conditions {
		all = append(all, &matchconditions.MatchCondition{Name: c.Name, Expression: c.Expression})
	}
	compiler := plugincel.NewConditionCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	e := compiler.CompileCondition(all, plugincel.OptionalVariableDeclarations{HasAuthorizer: true}, environment.StoredExpressions)
	if errs := e.CompilationErrors(); len(errs) > 0 {
		t.Fatalf("a condition does not compile: %v", errs)
	}
	return matchconditions.NewMatcher(e, &policy, "webhook", "admit", "w")
}

// TestSchedulersWebhookIsAskedAboutPodsOfSharedMemoryAlone, so that no other pod can
// be stopped by it.
func TestSchedulersWebhookIsAskedAboutPodsOfSharedMemoryAlone(t *testing.T) {
	var config admissionregistrationv1.MutatingWebhookConfiguration
	document(t, renderedDedicated(t), "MutatingWebhookConfiguration", "divvy-scheduler", &config)
	matcher := matcherOf(t, config.Webhooks[0].MatchConditions, admissionregistrationv1.Fail)
	of := func(scheduler string, containers, inits []corev1.Container) *corev1.Pod {
		p := pod("", nil, nil)
		p.Spec.SchedulerName, p.Spec.Containers, p.Spec.InitContainers = scheduler, containers, inits
		return p
	}
	asking := func(limits, requests corev1.ResourceList) []corev1.Container {
		return []corev1.Container{{Name: "a"}, {Name: "c", Resources: corev1.ResourceRequirements{Limits: limits, Requests: requests}}}
	}
	const memory, byDefault = "nvidia.com/gpu-memory", corev1.DefaultSchedulerName
	for name, tt := range map[string]struct {
		pod   *corev1.Pod
		asked bool
	}{
		"nothing at all": {&corev1.Pod{}, false},
		"a plain pod":    {of(byDefault, asking(nil, nil), nil), false},
		"other resources": {of(byDefault, asking(quantities("cpu", "nvidia.com/gpu"), quantities("cpu")),
			asking(quantities("cpu"), nil)), false},
		"a name like it": {of(byDefault, asking(quantities("nvidia.com/gpu-memory2", "x.nvidia.com/gpu-memory"), nil), nil),
			false},
		"a limit":                     {of(byDefault, asking(quantities(memory), nil), nil), true},
		"a request":                   {of(byDefault, asking(nil, quantities(memory)), nil), true},
		"another vendor's":            {of(byDefault, asking(quantities("enflame.com/gcu-memory"), nil), nil), true},
		"an init container":           {of(byDefault, asking(nil, nil), asking(quantities(memory), nil)), true},
		"no scheduler":                {of("", asking(quantities(memory), nil), nil), true},
		"this one by its name":        {of("divvy-scheduler", asking(quantities(memory), nil), nil), false},
		"another one":                 {of("volcano", asking(quantities(memory), nil), nil), false},
		"no containers but inits yet": {of(byDefault, nil, asking(quantities(memory), nil)), true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := isAsked(t, matcher, tt.pod); got != tt.asked {
				t.Errorf("asked: %t, want %t", got, tt.asked)
			}
		})
	}

	// An expression that costs too much would refuse the pod.
	large, many := of(byDefault, nil, nil), corev1.ResourceList{}
	for i := range 20 {
		many[corev1.ResourceName(fmt.Sprintf("example.com/a-resource-with-a-long-name-%d", i))] = resource.MustParse("1")
	}
	for range 300 {
		large.Spec.Containers = append(large.Spec.Containers, asking(many, many)[1])
		large.Spec.InitContainers = append(large.Spec.InitContainers, asking(many, many)[1])
	}
	if isAsked(t, matcher, large) {
		t.Error("it is asked about a large pod that is not concerned")
	}
}

// TestConfigWebhookIsAskedAboutChangesOfTheConfigurationAlone: not about notes on
// it, and not about other ConfigMaps.
func TestConfigWebhookIsAskedAboutChangesOfTheConfigurationAlone(t *testing.T) {
	var config admissionregistrationv1.ValidatingWebhookConfiguration
	document(t, renderedDedicated(t), "ValidatingWebhookConfiguration", "divvy-config", &config)
	matcher := matcherOf(t, config.Webhooks[0].MatchConditions, admissionregistrationv1.Ignore)
	configMap := func(name, note string, data map[string]string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: name,
			Annotations: map[string]string{"note": note}}, Data: data}
	}
	one, other := map[string]string{"config.yaml": "a"}, map[string]string{"config.yaml": "b"}
	for name, tt := range map[string]struct {
		before, after *corev1.ConfigMap
		asked         bool
	}{
		"the configuration":       {configMap("divvy-node", "", one), configMap("divvy-node", "", other), true},
		"named ones":              {configMap("divvy-node-configs", "", one), configMap("divvy-node-configs", "", other), true},
		"the first named one":     {configMap("divvy-node-configs", "", nil), configMap("divvy-node-configs", "", one), true},
		"the last named one":      {configMap("divvy-node-configs", "", one), configMap("divvy-node-configs", "", nil), true},
		"a note":                  {configMap("divvy-node", "", one), configMap("divvy-node", "x", one), false},
		"another ConfigMap":       {configMap("divvy-extender-ca", "", one), configMap("divvy-extender-ca", "", other), false},
		"nothing that ever was":   {configMap("divvy-node-configs", "", nil), configMap("divvy-node-configs", "x", nil), false},
		"one whose name is alike": {configMap("divvy-nodes", "", one), configMap("divvy-nodes", "", other), false},
	} {
		t.Run(name, func(t *testing.T) {
			gvk := schema.GroupVersionKind{Version: "v1", Kind: "ConfigMap"}
			attributes := admission.NewAttributesRecord(tt.after, tt.before, gvk, "divvy-system", tt.after.Name,
				schema.GroupVersionResource{Version: "v1", Resource: "configmaps"},
				"", admission.Update, nil, false, &user.DefaultInfo{Name: "somebody"})
			result := matcher.Match(t.Context(), &admission.VersionedAttributes{
				Attributes: attributes, VersionedKind: gvk, VersionedObject: admission.NewLazyObject(tt.after),
				VersionedOldObject: admission.NewLazyObject(tt.before),
			}, nil, nil)
			if result.Error != nil {
				t.Fatal(result.Error)
			}
			if result.Matches != tt.asked {
				t.Errorf("asked: %t, want %t", result.Matches, tt.asked)
			}
		})
	}
}

// TestClassesWebhookIsAskedAboutExtendedResourcesAlone: other changes of classes, and classes of other
// drivers, do not depend on it.
func TestClassesWebhookIsAskedAboutExtendedResourcesAlone(t *testing.T) {
	text, err := charttest.Render(t.Context(), "--set", "node.allocationPath=dra,claims.admission.enabled=true")
	if err != nil {
		t.Fatal(err)
	}
	var config admissionregistrationv1.ValidatingWebhookConfiguration
	document(t, text, "ValidatingWebhookConfiguration", "divvy-config", &config)
	i := slices.IndexFunc(config.Webhooks, func(w admissionregistrationv1.ValidatingWebhook) bool {
		return w.Name == "classes.claims.divvy.dev"
	})
	matcher := matcherOf(t, config.Webhooks[i].MatchConditions, admissionregistrationv1.Ignore)
	class := func(name, extended string, selectors ...string) *resourceapi.DeviceClass {
		c := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
		if extended != "" {
			c.Spec.ExtendedResourceName = &extended
		}
		for _, s := range selectors {
			c.Spec.Selectors = append(c.Spec.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: s}})
		}
		return c
	}
	const ours, other, name = "gpu.nvidia.divvy.dev", "gpu.nvidia.com", "nvidia.com/gpu"
	for what, tt := range map[string]struct {
		before, after *resourceapi.DeviceClass
		asked         bool
	}{
		"created":                      {nil, class(ours, name), true},
		"created by another name":      {nil, class("fast", name, "true", "device.driver == 'nvidia.divvy.dev'"), true},
		"created without a resource":   {nil, class(ours, "", "true"), false},
		"another driver's":             {nil, class(other, name, "device.driver == 'gpu.nvidia.com'"), false},
		"another driver's, of all":     {nil, class(other, name), false},
		"it gets a resource":           {class(ours, ""), class(ours, name), true},
		"it gets another":              {class(ours, "a.example/b"), class(ours, name), true},
		"it loses its resource":        {class(ours, name), class(ours, ""), false},
		"it gets selectors":            {class(ours, name), class(ours, name, "true"), false},
		"another driver's gets a name": {class(other, ""), class(other, name), false},
	} {
		t.Run(what, func(t *testing.T) {
			gvk := resourceapi.SchemeGroupVersion.WithKind("DeviceClass")
			versioned := &admission.VersionedAttributes{VersionedKind: gvk, VersionedObject: admission.NewLazyObject(tt.after)}
			op, before := admission.Create, runtime.Object(nil)
			if tt.before != nil {
				op, before = admission.Update, tt.before
				versioned.VersionedOldObject = admission.NewLazyObject(tt.before)
			}
			versioned.Attributes = admission.NewAttributesRecord(tt.after, before, gvk, "", tt.after.Name,
				schema.GroupVersionResource{Group: gvk.Group, Version: gvk.Version, Resource: "deviceclasses"}, "", op, nil, false,
				&user.DefaultInfo{Name: "admin"})
			result := matcher.Match(t.Context(), versioned, nil, nil)
			if result.Error != nil {
				t.Fatal(result.Error)
			}
			if result.Matches != tt.asked {
				t.Errorf("asked: %t, want %t", result.Matches, tt.asked)
			}
		})
	}
}
