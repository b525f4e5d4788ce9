package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/admission"
	plugincel "k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/cel/environment"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/nodelabels"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// countsAnnotation is the one of internal/node/agent, which does not export it.
const countsAnnotation = "divvy.dev/counts"

// request is a write that the API server asks a policy about.
type request struct {
	who         string
	resource    string // with "/" and the subresource
	before      runtime.Object
	after       runtime.Object
	wantMatched bool
}

// asked returns whether the policy looks at the request, and the validations that
// refuse it.
func asked(t *testing.T, policy admissionregistrationv1.ValidatingAdmissionPolicy, conditions plugincel.ConditionEvaluator,
	r request) (matched bool, refused []string) {
	t.Helper()
	gvk := r.after.GetObjectKind().GroupVersionKind()
	resource, sub, _ := strings.Cut(r.resource, "/")
	gvr := schema.GroupVersionResource{Version: "v1", Resource: resource}
	object, err := meta.Accessor(r.after)
	if err != nil {
		t.Fatal(err)
	}
	operation := admission.Update
	versioned := &admission.VersionedAttributes{VersionedKind: gvk, VersionedObject: admission.NewLazyObject(r.after)}
	if r.before == nil {
		operation = admission.Create
	} else {
		versioned.VersionedOldObject = admission.NewLazyObject(r.before)
	}
	if !slices.ContainsFunc(policy.Spec.MatchConstraints.ResourceRules, func(rule admissionregistrationv1.NamedRuleWithOperations) bool {
		return slices.Contains(rule.Resources, r.resource) &&
			slices.Contains(rule.Operations, admissionregistrationv1.OperationType(operation))
	}) {
		return false, nil
	}
	versioned.Attributes = admission.NewAttributesRecord(r.after, r.before, gvk, object.GetNamespace(), object.GetName(), gvr, sub,
		operation, nil, false, &user.DefaultInfo{Name: r.who, Groups: groups(r.who)})
	compiler := plugincel.NewConditionCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	var accessors []plugincel.ExpressionAccessor
	for _, c := range policy.Spec.MatchConditions {
		accessors = append(accessors, &matchconditions.MatchCondition{Name: c.Name, Expression: c.Expression})
	}
	e := compiler.CompileCondition(accessors, plugincel.OptionalVariableDeclarations{HasAuthorizer: true}, environment.StoredExpressions)
	if errs := e.CompilationErrors(); len(errs) > 0 {
		t.Fatalf("the conditions do not compile: %v", errs)
	}
	fail := admissionregistrationv1.Fail
	match := matchconditions.NewMatcher(e, &fail, "policy", "validate", policy.Name).Match(t.Context(), versioned, nil, nil)
	if match.Error != nil {
		t.Fatalf("the request would be refused: %v", match.Error)
	}
	if !match.Matches {
		return false, nil
	}
	return true, refusals(t, policy.Spec.Validations, conditions, versioned, gvr, gvk)
}

// groups are those that the API server adds to a user.
func groups(who string) []string {
	if strings.HasPrefix(who, "system:node:") {
		return []string{user.NodesGroup, user.AllAuthenticated}
	}
	return []string{user.AllAuthenticated}
}

func binding(node, uid string, annotations map[string]string) *corev1.Binding {
	return &corev1.Binding{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Binding"},
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "1", Annotations: annotations},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}
}

const (
	daemonAccount   = "system:serviceaccount:divvy-system:divvy-node"
	extenderAccount = "system:serviceaccount:divvy-system:divvy-extender"
)

// TestOnlyDivvyWritesItsAnnotations, and whoever has nothing to do with them is
// not looked at.
func TestOnlyDivvyWritesItsAnnotations(t *testing.T) {
	policy := load(t, "divvy-annotations")
	conditions := validator(t, policy)
	own := map[string]string{}
	grant := accel.Grant{Resource: "enflame.com/gcu-memory", Node: "a", Device: "GCU-1", DeviceUnits: 16, Units: 4, At: time.Unix(1, 0)}
	for key := range wire.LegacyAnnotations(grant) {
		own[key] = "1"
	}
	own[wire.GrantAnnotation], own[wire.HeldAnnotation] = "g", "d"
	own[wire.RetryAnnotation] = "t"
	nodeOwn := map[string]string{wire.InventoryAnnotation: "i", wire.QuarantineAnnotation: "q", wire.EndingAnnotation: "e",
		nodelabels.OwnedAnnotation: "l", countsAnnotation: "c", wire.SetupAnnotation: "s", wire.OveruseAnnotation: "o",
		wire.ClaimDriversAnnotation: "a"}

	t.Run("keys", func(t *testing.T) {
		keys := slices.Sorted(maps.Keys(own))
		keys = slices.Sorted(slices.Values(slices.Concat(keys, slices.Collect(maps.Keys(nodeOwn)))))
		list, _, _ := strings.Cut(policy.Spec.MatchConditions[1].Expression, "]")
		var got []string
		for key := range strings.SplitSeq(strings.TrimPrefix(list, "["), ", ") {
			got = append(got, strings.Trim(key, "'"))
		}
		slices.Sort(got)
		if diff := cmp.Diff(keys, got); diff != "" {
			t.Errorf("what Divvy writes and what the policy is about (-writes +policy):\n%s", diff)
		}
	})
	t.Run("keys one by one", func(t *testing.T) {
		for key := range own {
			for name, r := range map[string]request{
				"set":                  {"admin", "pods", pod("a", nil, nil), pod("a", nil, map[string]string{key: "x"}), true},
				"set to naught":        {"admin", "pods", pod("a", nil, nil), pod("a", nil, map[string]string{key: ""}), true},
				"changed":              {"admin", "pods", pod("a", nil, own), pod("a", nil, with(own, key, "x")), true},
				"removed":              {"admin", "pods", pod("a", nil, own), pod("a", nil, without(own, key)), true},
				"the last one":         {"admin", "pods", pod("a", nil, map[string]string{key: "x"}), pod("a", nil, nil), true},
				"created":              {"admin", "pods", nil, pod("", nil, map[string]string{key: "x"}), true},
				"bound":                {"admin", "pods/binding", nil, binding("a", "1", map[string]string{key: "x"}), true},
				"bound, as before 1.5": {"admin", "bindings", nil, binding("a", "1", map[string]string{key: "x"}), true},
				"in the status":        {"system:node:a", "pods/status", pod("a", nil, own), pod("a", nil, with(own, key, "x")), true},
			} {
				if matched, refused := asked(t, policy, conditions, r); !matched || len(refused) != 1 {
					t.Errorf("%s %s: looked at %t, refused %q", key, name, matched, refused)
				}
			}
		}
		for key := range nodeOwn {
			for name, r := range map[string]request{
				"set":           {"admin", "nodes", node("a", nil, nil), node("a", nil, map[string]string{key: "x"}), true},
				"removed":       {"admin", "nodes", node("a", nil, nodeOwn), node("a", nil, without(nodeOwn, key)), true},
				"created":       {"system:node:a", "nodes", nil, node("a", nil, map[string]string{key: "x"}), true},
				"in the status": {"system:node:a", "nodes/status", node("a", nil, nodeOwn), node("a", nil, with(nodeOwn, key, "x")), true},
			} {
				if matched, refused := asked(t, policy, conditions, r); !matched || len(refused) != 1 {
					t.Errorf("%s %s: looked at %t, refused %q", key, name, matched, refused)
				}
			}
		}
	})
	many := maps.Clone(own)
	for i := range 20_000 {
		many[fmt.Sprintf("a%d", i)] = ""
	}
	for name, r := range map[string]request{
		"the daemon":                 {daemonAccount, "pods", pod("a", nil, nil), pod("a", nil, own), false},
		"the daemon on its node":     {daemonAccount, "nodes", node("a", nil, nil), node("a", nil, nodeOwn), false},
		"the extender":               {extenderAccount, "pods/binding", nil, binding("a", "1", own), false},
		"kube-scheduler":             {"system:kube-scheduler", "pods/binding", nil, binding("a", "1", nil), false},
		"a new pod":                  {"admin", "pods", nil, pod("", nil, nil), false},
		"a new pod with other notes": {"admin", "pods", nil, pod("", nil, map[string]string{"divvy.dev/mine": "x"}), false},
		"a pod of the pool": {"admin", "pods", nil, pod("", map[string]string{pool.ConvertedLabel: "true"},
			map[string]string{pool.ModeAnnotation: "all", pool.StatusAnnotation: "injected"}), false},
		"a mirror pod": {"system:node:a", "pods", nil,
			pod("a", nil, map[string]string{corev1.MirrorPodAnnotationKey: "x"}), false},
		"kubelet's status":              {"system:node:a", "pods/status", pod("a", nil, own), pod("a", nil, own), false},
		"kubelet's status of its node":  {"system:node:a", "nodes/status", node("a", nil, nodeOwn), node("a", nil, nodeOwn), false},
		"a label of a pod with a grant": {"admin", "pods", pod("a", nil, own), pod("a", map[string]string{"a": "b"}, own), false},
		"another annotation beside":     {"admin", "pods", pod("a", nil, own), pod("a", nil, with(own, "a", "b")), false},
		"which configuration a node has": {"admin", "nodes", node("a", nil, nodeOwn),
			node("a", map[string]string{"divvy.dev/config": "x"}, nodeOwn), false},
		"a pod with very many":             {"admin", "pods", pod("a", nil, many), pod("a", nil, many), false},
		"very many, and one is Divvy's":    {"admin", "pods", pod("a", nil, nil), pod("a", nil, many), true},
		"a secret":                         {"admin", "secrets", nil, pod("", nil, own), false},
		"a pod of the release's namespace": {"system:serviceaccount:divvy-system:default", "pods", nil, pod("", nil, own), true},
	} {
		t.Run(name, func(t *testing.T) {
			matched, refused := asked(t, policy, conditions, r)
			if matched != r.wantMatched || (len(refused) > 0) != r.wantMatched {
				t.Errorf("looked at %t, want %t; refused %q", matched, r.wantMatched, refused)
			}
		})
	}
}

// TestReplacedSchedulerWritesAnnotations: with scheduler.mode replace, divvy-scheduler binds as
// kube-scheduler did, and may write annotations in no other way.
func TestReplacedSchedulerWritesAnnotations(t *testing.T) {
	const scheduler = "system:kube-scheduler"
	own := map[string]string{wire.GrantAnnotation: "g"}
	for mode, rejected := range map[string]bool{"replace": false, "extender": true} {
		policy := load(t, "divvy-annotations", "--set", "scheduler.mode="+mode)
		conditions := validator(t, policy)
		for name, r := range map[string]request{
			"bound":         {scheduler, "pods/binding", nil, binding("a", "1", own), rejected},
			"in the status": {scheduler, "pods/status", pod("a", nil, nil), pod("a", nil, own), true},
			"by another":    {"admin", "pods/binding", nil, binding("a", "1", own), true},
		} {
			if matched, refused := asked(t, policy, conditions, r); matched != r.wantMatched || (len(refused) > 0) != r.wantMatched {
				t.Errorf("%s, mode %s: looked at %t, want %t; rejected for %q", name, mode, matched, r.wantMatched, refused)
			}
		}
	}
}

// TestDeviceRequestsAreOfAdministrators: neither a kubelet nor Divvy makes one,
// though both may patch nodes.
func TestDeviceRequestsAreOfAdministrators(t *testing.T) {
	policy := load(t, "divvy-device-requests")
	conditions := validator(t, policy)
	plain := map[string]string{"a": "b"}
	asks := with(plain, wire.DeviceRequestAnnotation, "r")
	for name, tt := range map[string]struct {
		request
		rejected bool
	}{
		"an administrator": {request{"admin", "nodes", node("a", nil, plain), node("a", nil, asks), true}, false},
		"a script of the cluster": {request{"system:serviceaccount:ops:repair", "nodes", node("a", nil, nil), node("a", nil, asks),
			true}, false},
		"an administrator, another one": {request{"admin", "nodes", node("a", nil, asks),
			node("a", nil, with(asks, wire.DeviceRequestAnnotation, "s")), true}, false},
		"an administrator, withdrawn": {request{"admin", "nodes", node("a", nil, asks), node("a", nil, plain), false}, false},
		"kubelet":                     {request{"system:node:a", "nodes", node("a", nil, plain), node("a", nil, asks), true}, true},
		"kubelet, in the status":      {request{"system:node:a", "nodes/status", node("a", nil, nil), node("a", nil, asks), true}, true},
		"kubelet, when it registers":  {request{"system:node:a", "nodes", nil, node("a", nil, asks), true}, true},
		"kubelet, another one": {request{"system:node:a", "nodes", node("a", nil, asks),
			node("a", nil, with(asks, wire.DeviceRequestAnnotation, "s")), true}, true},
		"kubelet's status of its node": {request{"system:node:a", "nodes/status", node("a", nil, asks), node("a", nil, asks), false},
			false},
		"another annotation beside one": {request{"system:node:a", "nodes", node("a", nil, asks), node("a", nil, with(asks, "a", "c")),
			false}, false},
		"the daemon":                     {request{daemonAccount, "nodes", node("a", nil, plain), node("a", nil, asks), true}, true},
		"the daemon, which has answered": {request{daemonAccount, "nodes", node("a", nil, asks), node("a", nil, plain), false}, false},
		"the extender":                   {request{extenderAccount, "nodes", node("a", nil, plain), node("a", nil, asks), true}, true},
		"a pod":                          {request{"system:node:a", "pods", nil, pod("a", nil, asks), false}, false},
	} {
		t.Run(name, func(t *testing.T) {
			matched, rejections := asked(t, policy, conditions, tt.request)
			if matched != tt.wantMatched || (len(rejections) > 0) != tt.rejected {
				t.Errorf("looked at %t, want %t; rejected for %q, want %t", matched, tt.wantMatched, rejections, tt.rejected)
			}
		})
	}
}

// TestExtenderBindsOnlyWhatItGranted: with its token no other pod can be bound.
func TestExtenderBindsOnlyWhatItGranted(t *testing.T) {
	policy := load(t, "divvy-extender", "--set", "extender.managedResources={nvidia.com/gpu-memory}")
	conditions := validator(t, policy)
	signer, err := wire.NewSigner([]byte(strings.Repeat("k", wire.MinKeyBytes)))
	if err != nil {
		t.Fatal(err)
	}
	annotations := func(resource accel.Resource, node string) map[string]string {
		g := accel.Grant{Resource: resource, Node: node, Device: "GCU-1", DeviceUnits: 16, Units: 4, At: time.Unix(1, 0)}
		value, err := signer.EncodeGrant("1", g)
		if err != nil {
			t.Fatal(err)
		}
		return with(wire.LegacyAnnotations(g), wire.GrantAnnotation, value)
	}
	dedicated := load(t, "divvy-extender", "--set", "scheduler.mode=dedicated")
	dedicatedConditions := validator(t, dedicated)
	const scheduler = "system:serviceaccount:divvy-system:divvy-scheduler"
	ours := annotations("enflame.com/gcu-memory", "a")
	nobody := binding("a", "1", ours)
	nobody.UID = ""
	for name, tt := range map[string]struct {
		who     string
		binding *corev1.Binding
		matched bool
		refused string
	}{
		"a grant":                     {extenderAccount, binding("a", "1", ours), true, ""},
		"a grant of another resource": {extenderAccount, binding("a", "1", annotations("nvidia.com/gpu-memory", "a")), true, ""},
		"no grant":                    {extenderAccount, binding("a", "1", nil), true, "without a planned allocation"},
		"a grant for another node":    {extenderAccount, binding("b", "1", ours), true, "without a planned allocation"},
		"a resource of somebody else": {extenderAccount, binding("a", "1", annotations("example.com/x", "a")), true,
			"may bind only pods that request enflame.com/gcu-memory, nvidia.com/gpu-memory"},
		"an annotation of another kind": {extenderAccount, binding("a", "1", with(ours, "iam.example.com/role", "admin")), true,
			"no annotations but"},
		"a pod by its name":          {extenderAccount, nobody, true, "must bind pods by UID"},
		"another scheduler":          {"system:kube-scheduler", binding("a", "1", nil), false, ""},
		"a scheduler of Divvy's own": {scheduler, binding("a", "1", ours), true, ""},
		"its pod without a device":   {scheduler, binding("a", "1", nil), true, ""},
		"its grant for another node": {scheduler, binding("b", "1", ours), true,
			"divvy-scheduler may bind no pod without a planned allocation"},
		"its annotation": {scheduler, binding("a", "1", map[string]string{"iam.example.com/role": "admin"}), true,
			"no annotations but"},
	} {
		t.Run(name, func(t *testing.T) {
			policy, conditions := policy, conditions
			if tt.who == scheduler {
				policy, conditions = dedicated, dedicatedConditions
			}
			matched, refused := asked(t, policy, conditions, request{who: tt.who, resource: "pods/binding", after: tt.binding})
			text := strings.Join(refused, "\n")
			if matched != tt.matched || (text == "") != (tt.refused == "") || !strings.Contains(text, tt.refused) {
				t.Errorf("looked at %t, refused %q; want %t, %q", matched, refused, tt.matched, tt.refused)
			}
		})
	}
}

// TestExtenderEvictsByUID, and in no exempt namespace. The policy exists where eviction is enabled.
func TestExtenderEvictsByUID(t *testing.T) {
	enabled := []string{"--set", "node.usage.enabled=true,node.usage.overuse.contextAllowanceMiB.enflame=0,extender.eviction.enabled=true",
		"--set", "extender.eviction.exemptNamespaces={kube-system,ops}"}
	policy := load(t, "divvy-extender-eviction", enabled...)
	conditions := validator(t, policy)
	dedicated := load(t, "divvy-extender-eviction", append(enabled, "--set", "scheduler.mode=dedicated")...)
	dedicatedConditions := validator(t, dedicated)
	const scheduler = "system:serviceaccount:divvy-system:divvy-scheduler"
	eviction := func(namespace string, options *metav1.DeleteOptions) *policyv1.Eviction {
		return &policyv1.Eviction{TypeMeta: metav1.TypeMeta{APIVersion: "policy/v1", Kind: "Eviction"},
			ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: namespace}, DeleteOptions: options}
	}
	uid, version, seconds := types.UID("1"), "7", int64(0)
	byUID := &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}
	for name, tt := range map[string]struct {
		who      string
		eviction *policyv1.Eviction
		matched  bool
		rejected string
	}{
		"by UID":      {extenderAccount, eviction("team", byUID), true, ""},
		"by its name": {extenderAccount, eviction("team", nil), true, "must evict pods by UID"},
		"by another precondition": {extenderAccount, eviction("team", &metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{ResourceVersion: &version}}), true, "must evict pods by UID"},
		"at once": {extenderAccount, eviction("team", &metav1.DeleteOptions{GracePeriodSeconds: &seconds,
			Preconditions: byUID.Preconditions}), true, "may not shorten the grace period"},
		"in an exempt namespace": {extenderAccount, eviction("ops", byUID), true, "may not evict pods of an exempt namespace"},
		"in the release's namespace": {extenderAccount, eviction("divvy-system", byUID), true,
			"may not evict pods of an exempt namespace"},
		"kubectl drain":                {"admin", eviction("ops", nil), false, ""},
		"a dedicated scheduler":        {scheduler, eviction("team", byUID), true, ""},
		"a dedicated one, by its name": {scheduler, eviction("team", nil), true, "divvy-scheduler must evict pods by UID"},
	} {
		t.Run(name, func(t *testing.T) {
			policy, conditions := policy, conditions
			if tt.who == scheduler {
				policy, conditions = dedicated, dedicatedConditions
			}
			matched, rejections := asked(t, policy, conditions, request{who: tt.who, resource: "pods/eviction", after: tt.eviction})
			text := strings.Join(rejections, "\n")
			if matched != tt.matched || (text == "") != (tt.rejected == "") || !strings.Contains(text, tt.rejected) {
				t.Errorf("looked at %t, rejected %q; want %t, %q", matched, rejections, tt.matched, tt.rejected)
			}
		})
	}
}

// TestExtenderWritesOneAnnotation: through the status of a pod it makes
// kube-scheduler look again, and nothing else.
func TestExtenderWritesOneAnnotation(t *testing.T) {
	policy := load(t, "divvy-extender-retry")
	conditions := validator(t, policy)
	dedicated := load(t, "divvy-extender-retry", "--set", "scheduler.mode=dedicated")
	dedicatedConditions := validator(t, dedicated)
	const scheduler = "system:serviceaccount:divvy-system:divvy-scheduler"
	notes := map[string]string{"a": "b"}
	retry := with(notes, wire.RetryAnnotation, "2026-01-02T03:04:05Z")
	status := func(p *corev1.Pod, change func(*corev1.Pod)) *corev1.Pod { change(p); return p }
	refusedByScheduler := func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
			Reason: corev1.PodReasonUnschedulable}}
	}
	waits := func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: cluster.Waits, Status: corev1.ConditionTrue, Reason: "NoDeviceFits"}}
	}
	elsewhere := func(p *corev1.Pod) *corev1.Pod { p.Namespace = "divvy-system"; return p }
	own := func(p *corev1.Pod) *corev1.Pod { p.Spec.ServiceAccountName = "divvy-extender"; return elsewhere(p) }
	tookTheLead := func(p *corev1.Pod) {
		p.Status.Conditions = []corev1.PodCondition{{Type: cluster.TookTheLead, Status: corev1.ConditionTrue}}
	}
	for name, tt := range map[string]struct {
		who           string
		before, after *corev1.Pod
		matched       bool
		refused       string
	}{
		"it asks to look again": {extenderAccount, pod("", nil, notes), pod("", nil, retry), true, ""},
		"and once more": {extenderAccount, pod("", nil, retry), pod("", nil, with(retry, wire.RetryAnnotation, "later")), true,
			""},
		"the first annotation": {extenderAccount, pod("", nil, nil), pod("", nil, map[string]string{wire.RetryAnnotation: "t"}), true,
			""},
		"another annotation": {extenderAccount, pod("", nil, notes), pod("", nil, with(retry, "iam.example.com/role", "admin")),
			true, "may change only the pod annotation divvy.dev/retry"},
		"a grant": {extenderAccount, pod("", nil, notes), pod("", nil, with(notes, wire.GrantAnnotation, "g")), true,
			"may change only the pod annotation divvy.dev/retry"},
		"another one changed": {extenderAccount, pod("", nil, notes), pod("", nil, with(retry, "a", "c")), true,
			"may change only the pod annotation divvy.dev/retry"},
		"another one removed": {extenderAccount, pod("", nil, notes), pod("", nil, map[string]string{wire.RetryAnnotation: "t"}),
			true, "may change only the pod annotation divvy.dev/retry"},
		"a label": {extenderAccount, pod("", nil, notes), pod("", map[string]string{"app": "x"}, retry), true,
			"may not change labels and finalizers"},
		"a finalizer": {extenderAccount, pod("", nil, notes),
			status(pod("", nil, retry), func(p *corev1.Pod) { p.Finalizers = []string{"example.com/x"} }), true,
			"may not change labels and finalizers"},
		"a condition": {extenderAccount, pod("", nil, notes), status(pod("", nil, retry), refusedByScheduler), true,
			"change only the condition divvy.dev/Waits"},
		"the end of a pod": {extenderAccount, pod("", nil, notes),
			status(pod("", nil, notes), func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), true,
			"change only the condition divvy.dev/Waits"},
		"why it waits": {extenderAccount, pod("", nil, notes), status(pod("", nil, notes), waits), true, ""},
		"its own pod leads": {extenderAccount, own(pod("a", nil, notes)), own(status(pod("a", nil, notes), tookTheLead)), true,
			""},
		"another pod beside it": {extenderAccount, elsewhere(pod("a", nil, notes)),
			elsewhere(status(pod("a", nil, notes), tookTheLead)), true, "change only the condition divvy.dev/Waits"},
		"its own pod's annotation": {extenderAccount, own(pod("a", nil, notes)), own(pod("a", nil, with(notes, "x", "y"))), true,
			"change only the pod annotation"},
		"a pod that has a node": {extenderAccount, pod("a", nil, notes), pod("a", nil, retry), true, "only on pending pods"},
		"kubelet":               {"system:node:a", pod("a", nil, notes), status(pod("a", nil, notes), refusedByScheduler), false, ""},
		"kube-scheduler": {"system:kube-scheduler", pod("", nil, notes), status(pod("", nil, notes), refusedByScheduler), false,
			""},
		"a scheduler of Divvy's own": {scheduler, pod("", nil, notes), status(pod("", nil, notes), refusedByScheduler), true, ""},
		"its annotation":             {scheduler, pod("", nil, notes), pod("", nil, retry), true, ""},
		"another one of it": {scheduler, pod("", nil, notes), pod("", nil, with(retry, "x", "y")), true,
			"divvy-scheduler may change only the pod annotation"},
	} {
		t.Run(name, func(t *testing.T) {
			policy, conditions := policy, conditions
			if tt.who == scheduler {
				policy, conditions = dedicated, dedicatedConditions
			}
			matched, refused := asked(t, policy, conditions, request{who: tt.who, resource: "pods/status", before: tt.before,
				after: tt.after})
			text := strings.Join(refused, "\n")
			if matched != tt.matched || (text == "") != (tt.refused == "") || !strings.Contains(text, tt.refused) {
				t.Errorf("looked at %t, refused %q; want %t, %q", matched, refused, tt.matched, tt.refused)
			}
		})
	}
}
