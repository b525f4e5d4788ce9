package policy

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	"k8s.io/apiserver/pkg/authentication/user"
)

const (
	webhookAccount = "system:serviceaccount:bwki:bitfusion-webhook-deployment"
	poolSecret     = "bitfusion-client-secret-ca.crt"
	poolCopy       = "divvy.dev/managed-by=divvy-pool"
)

// poolMatcher is what the API server asks before it calls the pool's webhooks. An
// error refuses the pod, as both fail closed.
func poolMatcher(t *testing.T) matchconditions.Matcher {
	t.Helper()
	text, err := os.ReadFile(filepath.FromSlash(chart + "files/pool-pods.cel"))
	if err != nil {
		t.Fatal(err)
	}
	conditions := []admissionregistrationv1.MatchCondition{{Name: "pod-of-the-pool", Expression: string(text)}}
	return matcherOf(t, conditions, admissionregistrationv1.Fail)
}

// isAsked reports whether the webhooks are called for a new pod.
func isAsked(t *testing.T, matcher matchconditions.Matcher, p *corev1.Pod) bool {
	t.Helper()
	gvk := schema.GroupVersionKind{Version: "v1", Kind: "Pod"}
	attributes := admission.NewAttributesRecord(p, nil, gvk, "default", p.Name,
		schema.GroupVersionResource{Version: "v1", Resource: "pods"},
		"", admission.Create, nil, false, &user.DefaultInfo{Name: "somebody"})
	result := matcher.Match(t.Context(), &admission.VersionedAttributes{Attributes: attributes, VersionedKind: gvk,
		VersionedObject: admission.NewLazyObject(p)}, nil, nil)
	if result.Error != nil {
		t.Fatalf("the pod would be refused: %v", result.Error)
	}
	return result.Matches
}

func quantities(names ...corev1.ResourceName) corev1.ResourceList {
	out := corev1.ResourceList{}
	for _, n := range names {
		out[n] = resource.MustParse("1")
	}
	return out
}

// TestWebhooksAreAskedAboutPodsOfThePoolAlone, so that no other pod can be stopped
// by them, whatever it lacks (V1).
func TestWebhooksAreAskedAboutPodsOfThePoolAlone(t *testing.T) {
	of := func(annotations map[string]string, containers, inits []corev1.Container) *corev1.Pod {
		p := pod("", nil, annotations)
		p.Spec.Containers, p.Spec.InitContainers = containers, inits
		return p
	}
	asking := func(limits, requests corev1.ResourceList) corev1.Container {
		return corev1.Container{Name: "c", Resources: corev1.ResourceRequirements{Limits: limits, Requests: requests}}
	}
	plain, cpu := corev1.Container{Name: "c"}, asking(quantities("cpu"), quantities("cpu", "memory", "nvidia.com/gpu"))
	always := corev1.ContainerRestartPolicyAlways
	sidecar := asking(quantities("bitfusion.io/gpu-amount"), nil)
	sidecar.RestartPolicy = &always
	tests := map[string]struct {
		pod   *corev1.Pod
		asked bool
	}{
		"nothing at all":         {&corev1.Pod{}, false},
		"no containers":          {of(nil, nil, nil), false},
		"a plain pod":            {of(nil, []corev1.Container{plain}, nil), false},
		"an empty list of inits": {of(map[string]string{}, []corev1.Container{plain}, []corev1.Container{}), false},
		"other resources":        {of(map[string]string{"a": "b"}, []corev1.Container{cpu, plain}, []corev1.Container{cpu}), false},
		"a name like the pool's": {of(map[string]string{"x.auto-management/bitfusion": "all"},
			[]corev1.Container{asking(quantities("bitfusion.iox/gpu", "x.bitfusion.io/gpu"), nil)}, nil), false},
		"an annotation as a value":   {of(map[string]string{"a": "auto-management/bitfusion"}, []corev1.Container{plain}, nil), false},
		"the annotation":             {of(map[string]string{"auto-management/bitfusion": "none"}, []corev1.Container{plain}, nil), true},
		"the status":                 {of(map[string]string{"auto-management/status": "injected"}, []corev1.Container{plain}, nil), true},
		"limits without annotation":  {of(nil, []corev1.Container{plain, asking(quantities("bitfusion.io/gpu-amount"), nil)}, nil), true},
		"requests alone":             {of(nil, []corev1.Container{asking(nil, quantities("bitfusion.io/gpu-percent"))}, nil), true},
		"the resource by hand":       {of(nil, []corev1.Container{asking(quantities("bitfusion.io/gpu"), nil)}, nil), true},
		"an unknown key of the pool": {of(nil, []corev1.Container{asking(quantities("bitfusion.io/gpu-number"), nil)}, nil), true},
		"an init container": {of(nil, []corev1.Container{plain},
			[]corev1.Container{plain, asking(nil, quantities("bitfusion.io/gpu-memory"))}), true},
		"a sidecar": {of(nil, []corev1.Container{plain}, []corev1.Container{sidecar}), true},
	}
	matcher := poolMatcher(t)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := isAsked(t, matcher, tt.pod); got != tt.asked {
				t.Errorf("asked: %t, want %t", got, tt.asked)
			}
		})
	}
}

// TestLargePodsAreNotTooMuchToAskAbout: an expression that costs too much refuses
// the pod.
func TestLargePodsAreNotTooMuchToAskAbout(t *testing.T) {
	large := pod("", nil, map[string]string{})
	for i := range 1000 {
		large.Annotations[fmt.Sprintf("example.com/annotation-%d", i)] = "value"
	}
	many := corev1.ResourceList{}
	for i := range 20 {
		many[corev1.ResourceName(fmt.Sprintf("example.com/a-resource-with-a-long-name-%d", i))] = resource.MustParse("1")
	}
	for i := range 300 {
		c := corev1.Container{Name: fmt.Sprintf("c%d", i), Image: "i", Resources: corev1.ResourceRequirements{Limits: many, Requests: many}}
		large.Spec.Containers = append(large.Spec.Containers, c)
		large.Spec.InitContainers = append(large.Spec.InitContainers, c)
	}
	if isAsked(t, poolMatcher(t), large) {
		t.Error("the webhooks are asked about a pod that is not of the pool")
	}
}

func secret(namespace, name, label string, typ corev1.SecretType) *corev1.Secret {
	s := &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Type:       typ,
	}
	if label != "" {
		s.Labels = map[string]string{"divvy.dev/managed-by": "divvy-pool"}
	}
	return s
}

// TestWebhookWritesNoSecretsButItsCopies: RBAC lets it create any, and a secret of
// some types is filled with the token of an account (P4).
func TestWebhookWritesNoSecretsButItsCopies(t *testing.T) {
	const opaque = corev1.SecretTypeOpaque
	ours := secret("team", poolSecret, poolCopy, opaque)
	theirs := secret("team", poolSecret, "", opaque)
	certificate := secret("bwki", "bwki-webhook-certs", "", opaque)
	token := secret("team", poolSecret, poolCopy, corev1.SecretTypeServiceAccountToken)
	token.Annotations = map[string]string{"kubernetes.io/service-account.name": "admin"}
	generated := secret("team", "", poolCopy, opaque)
	generated.GenerateName = "bitfusion-secret"
	tests := map[string]struct {
		old, new *corev1.Secret
		allowed  bool
	}{
		"a copy":                                {nil, ours, true},
		"a copy of the single secret":           {nil, secret("team", "bitfusion-secret", poolCopy, opaque), true},
		"a copy without a type":                 {nil, secret("team", "bitfusion-client-secret-servers.conf", poolCopy, ""), true},
		"a copy that changes":                   {ours, ours, true},
		"a copy that goes":                      {ours, nil, true},
		"a copy without its mark":               {nil, theirs, false},
		"a secret of somebody else":             {theirs, theirs, false},
		"a secret of somebody else, marked":     {theirs, ours, false},
		"a secret of somebody else, taken away": {theirs, nil, false},
		"a copy that loses its mark":            {ours, theirs, false},
		"another secret":                        {nil, secret("team", "other", poolCopy, opaque), false},
		"another secret, taken away":            {secret("team", "other", poolCopy, opaque), nil, false},
		"a secret whose name is made up":        {nil, generated, false},
		"the token of an account":               {nil, token, false},
		"a login to a registry":                 {nil, secret("team", poolSecret, poolCopy, corev1.SecretTypeDockerConfigJson), false},
		"a token to join nodes":                 {nil, secret("team", poolSecret, poolCopy, corev1.SecretTypeBootstrapToken), false},
		"a secret in the place of the source":   {nil, secret("kube-system", poolSecret, poolCopy, opaque), false},
		"the source": {secret("kube-system", poolSecret, poolCopy, opaque),
			secret("kube-system", poolSecret, poolCopy, opaque), false},
		"its certificate":            {certificate, certificate, true},
		"its certificate, made anew": {nil, certificate, true},
		"its certificate as a token": {nil, secret("bwki", "bwki-webhook-certs", "", corev1.SecretTypeServiceAccountToken),
			false},
		"its certificate elsewhere":             {nil, secret("team", "bwki-webhook-certs", "", opaque), false},
		"a copy in its own namespace":           {nil, secret("bwki", poolSecret, poolCopy, opaque), true},
		"another secret in its own namespace":   {nil, secret("bwki", "other", poolCopy, opaque), false},
		"another secret in its own, taken away": {secret("bwki", "other", "", opaque), nil, false},
		"somebody's secret in its own namespace": {secret("bwki", poolSecret, "", opaque), secret("bwki", poolSecret, poolCopy, opaque),
			false},
	}
	policy := load(t, "bitfusion-webhook-deployment", "--set", "pool.enabled=true")
	if c := policy.Spec.MatchConditions; len(c) != 1 || c[0].Expression != "request.userInfo.username == '"+webhookAccount+"'" {
		t.Errorf("the policy is about %v", c)
	}
	conditions := validator(t, policy)
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			refused := write(t, policy, conditions, tt.old, tt.new)
			if tt.allowed != (len(refused) == 0) {
				t.Errorf("allowed %t, want %t; refused for: %q", len(refused) == 0, tt.allowed, refused)
			}
		})
	}
}

// write returns the messages of the validations that a write of the webhook fails.
func write(t *testing.T, policy admissionregistrationv1.ValidatingAdmissionPolicy, conditions plugincel.ConditionEvaluator, before,
	after *corev1.Secret) (refused []string) {
	t.Helper()
	gvk := schema.GroupVersionKind{Version: "v1", Kind: "Secret"}
	gvr := schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	operation, about := admission.Update, after
	var oldObject, object runtime.Object
	versioned := &admission.VersionedAttributes{VersionedKind: gvk}
	if before != nil {
		oldObject, versioned.VersionedOldObject = before, admission.NewLazyObject(before)
	} else {
		operation = admission.Create
	}
	if after != nil {
		object, versioned.VersionedObject = after, admission.NewLazyObject(after)
	} else {
		operation, about = admission.Delete, before
	}
	versioned.Attributes = admission.NewAttributesRecord(object, oldObject, gvk, about.Namespace, about.Name, gvr, "", operation, nil,
		false, &user.DefaultInfo{Name: webhookAccount})
	return refusals(t, policy.Spec.Validations, conditions, versioned, gvr, gvk)
}
