package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/divvy-gpu/divvy/internal/app/webhook"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// pooled renders the chart with the pool.
func pooled(t *testing.T, set ...string) []runtime.Object {
	t.Helper()
	return objects(t, rendered(t, append([]string{"--set", "pool.enabled=true"}, set...)...))
}

const webhooks = "bitfusion-webhook-deployment"

// TestWithoutThePoolNothingOfItIsRendered, whatever else is said about it.
func TestWithoutThePoolNothingOfItIsRendered(t *testing.T) {
	plain := keyless(rendered(t))
	if strings.Contains(plain, "bitfusion") || strings.Contains(plain, "bwki") {
		t.Error("there is something of the pool")
	}
	if diff := cmp.Diff(plain, keyless(rendered(t, "--set", "pool.namespace=x,pool.totalGPUMemory=16000,pool.catalog=a: "+
		"b,pool.existingCatalog=c,pool.node.units=7"))); diff != "" {
		t.Errorf("values of the pool change something:\n%s", diff)
	}
}

// TestThePoolLeavesTheRestAlone: who adds the pool to an installation restarts
// nothing.
func TestThePoolLeavesTheRestAlone(t *testing.T) {
	before, after := installed(t, []byte(keyless(rendered(t)))), objects(t, []byte(keyless(rendered(t, "--set", "pool.enabled=true"))))
	for _, o := range before {
		if !slices.ContainsFunc(after, func(other runtime.Object) bool { return cmp.Equal(o, other) }) {
			t.Errorf("%s %s differs", o.GetObjectKind().GroupVersionKind().Kind, nameOf(t, o))
		}
	}
}

// TestCatalogIsTheBuiltInOne: the chart and the programs know the same clients,
// and those of the examples are understood.
func TestCatalogIsTheBuiltInOne(t *testing.T) {
	const key = "bitfusion-client-config.yaml"
	got := one[*corev1.ConfigMap](t, pooled(t), "bwki-bitfusion-client-configmap").Data
	// objects splits the text of all objects, and takes the last line's end away.
	if diff := cmp.Diff(map[string]string{key: strings.TrimSuffix(string(pool.DefaultCatalogYAML()), "\n")}, got); diff != "" {
		t.Errorf("charts/divvy/files/pool-catalog.yaml is not internal/pool/default-catalog.yaml (-built in +chart):\n%s", diff)
	}
	file := root + "/examples/catalog/rgpu.yaml"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	got = one[*corev1.ConfigMap](t, pooled(t, "--set-file", "pool.catalog="+file), "bwki-bitfusion-client-configmap").Data
	if diff := cmp.Diff(strings.TrimSuffix(string(text), "\n"), got[key]); diff != "" {
		t.Errorf("a catalog of one's own (-file +chart):\n%s", diff)
	}
	c, err := pool.DecodeCatalog([]byte(got[key]))
	if err != nil {
		t.Fatal(err)
	}
	client, err := c.Find("rgpu-1.0", "any")
	if err != nil {
		t.Fatal(err)
	}
	// What docs/pool-catalog.md shows.
	command, args, _, err := client.Wrap(pool.Request{Amount: 1, Percent: 50, Units: 50}, nil, []string{"python", "x.py"}, nil)
	if diff := cmp.Diff([]string{"/bitfusion/rgpu/bin/rgpu", "attach", "--gpus", "1", "--share", "50", "--", "python", "x.py"},
		append(command, args...)); err != nil || diff != "" {
		t.Errorf("the example's command: %v (-want +got)\n%s", err, diff)
	}
	// A map in a file of values, as well as a text.
	got = one[*corev1.ConfigMap](t,
		pooled(t, "--set-json",
			`pool.catalog={"apiVersion":"pool.divvy.dev/v1alpha1","kind":"ClientCatalog","clients":[{"version":"450","os":"x",`+
				`"root":"/bitfusion/a","command":"bitfusion"}]}`), "bwki-bitfusion-client-configmap").Data
	if c, err := pool.DecodeCatalog([]byte(got[key])); err != nil || len(c.Clients) != 1 {
		t.Errorf("a catalog as a map: %v, %v", c, err)
	}
	for _, o := range pooled(t, "--set", "pool.existingCatalog=mine") {
		if nameOf(t, o) == "bwki-bitfusion-client-configmap" {
			t.Error("a catalog is made beside the administrator's")
		}
	}
}

// TestWebhooksCannotStopTheCluster: they are called for new pods of the pool and
// nothing else, never in the namespaces that they need to come up, and dry runs
// work (V1, S5, P3, W32).
func TestWebhooksCannotStopTheCluster(t *testing.T) {
	all := pooled(t, "--namespace", "elsewhere", "--set", "pool.namespace=gpus")
	condition, err := os.ReadFile(chartDir + "/files/pool-pods.cel")
	if err != nil {
		t.Fatal(err)
	}
	mutating := one[*admissionv1.MutatingWebhookConfiguration](t, all, "bwki-webhook-cfg").Webhooks
	validating := one[*admissionv1.ValidatingWebhookConfiguration](t, all, "validation.bitfusion.io-cfg").Webhooks
	if len(mutating) != 1 || len(validating) != 1 {
		t.Fatalf("%d and %d webhooks", len(mutating), len(validating))
	}
	m, v := mutating[0], validating[0]
	if m.Name != "bwkimua.bitfusion.io" || v.Name != "bwkival.bitfusion.io" {
		t.Errorf("names: %s, %s", m.Name, v.Name)
	}
	if m.ReinvocationPolicy == nil || *m.ReinvocationPolicy != admissionv1.IfNeededReinvocationPolicy {
		t.Error("a container that another webhook adds is missed")
	}
	// They differ in nothing but these.
	m.Name, m.ReinvocationPolicy, m.ClientConfig = v.Name, nil, v.ClientConfig
	if diff := cmp.Diff(v, admissionv1.ValidatingWebhook{
		Name: m.Name, ClientConfig: m.ClientConfig, Rules: m.Rules, FailurePolicy: m.FailurePolicy, MatchPolicy: m.MatchPolicy,
		NamespaceSelector: m.NamespaceSelector, ObjectSelector: m.ObjectSelector, SideEffects: m.SideEffects,
		TimeoutSeconds: m.TimeoutSeconds, AdmissionReviewVersions: m.AdmissionReviewVersions, MatchConditions: m.MatchConditions,
	}); diff != "" {
		t.Errorf("the two are called for different pods (-validating +mutating):\n%s", diff)
	}
	if *v.FailurePolicy != admissionv1.Fail || *v.SideEffects != admissionv1.SideEffectClassNone ||
		*v.MatchPolicy != admissionv1.Equivalent || *v.TimeoutSeconds > 10 {
		t.Errorf("failure %s, side effects %s, match %s, %d s", *v.FailurePolicy, *v.SideEffects, *v.MatchPolicy, *v.TimeoutSeconds)
	}
	if diff := cmp.Diff([]string{"v1"}, v.AdmissionReviewVersions); diff != "" {
		t.Errorf("versions: %s", diff)
	}
	if len(v.MatchConditions) != 1 || v.MatchConditions[0].Expression != strings.TrimSpace(string(condition)) {
		t.Errorf("the condition is not files/pool-pods.cel, which lab/internal/policy tests: %v", v.MatchConditions)
	}
	namespaced := admissionv1.NamespacedScope
	if diff := cmp.Diff([]admissionv1.RuleWithOperations{{
		Operations: []admissionv1.OperationType{admissionv1.Create},
		Rule:       admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}, Scope: &namespaced},
	}}, v.Rules); diff != "" {
		t.Errorf("rules: %s", diff)
	}
	selector, err := metav1.LabelSelectorAsSelector(v.NamespaceSelector)
	if err != nil {
		t.Fatal(err)
	}
	for namespace, want := range map[string]bool{"default": true, "kube-system": false, "kube-public": false, "kube-node-lease": false,
		"gpus": false, "elsewhere": false} {
		if got := selector.Matches(labels.Set{"kubernetes.io/metadata.name": namespace}); got != want {
			t.Errorf("called for pods of namespace %s: %t", namespace, got)
		}
	}
	for failure, set := range map[string]string{"mutating": "pool.webhook.failurePolicy.mutating=Ignore",
		"validating": "pool.webhook.failurePolicy.validating=Ignore"} {
		all := pooled(t, "--set", set)
		m := one[*admissionv1.MutatingWebhookConfiguration](t, all, "bwki-webhook-cfg").Webhooks[0].FailurePolicy
		v := one[*admissionv1.ValidatingWebhookConfiguration](t, all, "validation.bitfusion.io-cfg").Webhooks[0].FailurePolicy
		if (*m == admissionv1.Ignore) != (failure == "mutating") || (*v == admissionv1.Ignore) != (failure == "validating") {
			t.Errorf("%s: %s, %s", set, *m, *v)
		}
	}
}

// TestWebhooksAreReached: configuration, service, port and certificate agree, and
// a second replica remains when a node is drained.
func TestWebhooksAreReached(t *testing.T) {
	all := pooled(t)
	service := one[*corev1.Service](t, all, "bwki-webhook-svc")
	deployment := one[*appsv1.Deployment](t, all, webhooks)
	for path, config := range map[string]admissionv1.WebhookClientConfig{
		"/mutate":   one[*admissionv1.MutatingWebhookConfiguration](t, all, "bwki-webhook-cfg").Webhooks[0].ClientConfig,
		"/validate": one[*admissionv1.ValidatingWebhookConfiguration](t, all, "validation.bitfusion.io-cfg").Webhooks[0].ClientConfig,
	} {
		s := config.Service
		if s == nil || s.Name != service.Name || s.Namespace != service.Namespace || *s.Path != path ||
			*s.Port != service.Spec.Ports[0].Port {
			t.Errorf("%s: %+v", path, s)
		}
		if len(config.CABundle) > 0 {
			t.Errorf("%s: the chart writes a CA over that of the webhooks", path)
		}
	}
	c := deployment.Spec.Template.Spec.Containers[0]
	at := slices.IndexFunc(c.Ports, func(p corev1.ContainerPort) bool { return p.Name == service.Spec.Ports[0].TargetPort.StrVal })
	if at < 0 || c.Ports[at].ContainerPort != 8443 || service.Spec.Ports[0].Port != 443 {
		t.Errorf("ports %v, service %v", c.Ports, service.Spec.Ports)
	}
	if *deployment.Spec.Replicas != 2 || deployment.Spec.Strategy.RollingUpdate.MaxUnavailable.IntValue() != 0 {
		t.Errorf("replicas %d, %v", *deployment.Spec.Replicas, deployment.Spec.Strategy)
	}
	budget := one[*policyv1.PodDisruptionBudget](t, all, webhooks).Spec
	if budget.MaxUnavailable == nil || budget.MaxUnavailable.IntValue() != 1 {
		t.Errorf("budget: %v", budget)
	}
	affinity := deployment.Spec.Template.Spec.Affinity
	if affinity == nil || affinity.PodAntiAffinity == nil ||
		len(affinity.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution) != 1 {
		t.Fatalf("affinity: %v", affinity)
	}
	preferred := affinity.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution[0]
	apart, err := metav1.LabelSelectorAsSelector(preferred.PodAffinityTerm.LabelSelector)
	if err != nil || !apart.Matches(labels.Set(deployment.Spec.Template.Labels)) {
		t.Errorf("replicas do not avoid each other: %v, %v", apart, err)
	}
	if data := one[*corev1.Secret](t, all, "bwki-webhook-certs"); len(data.Data)+len(data.StringData) > 0 {
		t.Error("the chart writes over the certificate at every upgrade")
	}
}

// TestWebhookUnderstandsItsFlags, as the chart writes them.
func TestWebhookUnderstandsItsFlags(t *testing.T) {
	all := pooled(t, "--set", "pool.totalGPUMemory=16000,pool.webhook.logLevel=debug")
	c := one[*appsv1.Deployment](t, all, webhooks).Spec.Template.Spec.Containers[0]
	if c.Args[0] != "webhook" {
		t.Fatalf("arguments: %v", c.Args)
	}
	o := webhook.DefaultOptions()
	fs := pflag.NewFlagSet("webhook", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse(c.Args[1:]); err != nil {
		t.Fatal(err)
	}
	if fs.NArg() > 0 {
		t.Errorf("words that are no flags: %v", fs.Args())
	}
	// The file is that of a container; it need not be here.
	o.CatalogFile = ""
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
	if o.TotalGPUMemory != "16000" || o.Namespace != "bwki" || o.NamespaceSelector != `{"matchLabels":{"divvy.dev/pool":"allowed"}}` {
		t.Errorf("options: %+v", o)
	}
	if o := webhook.DefaultOptions(); !slices.Contains(c.Args, "--service="+o.Service) || !slices.Contains(c.Args, "--secret="+o.Secret) ||
		!slices.Contains(c.Args, "--mutating-config="+o.MutatingConfig) ||
		!slices.Contains(c.Args, "--validating-config="+o.ValidatingConfig) {
		t.Errorf("names differ from the program's own: %v", c.Args)
	}
	for _, a := range one[*appsv1.Deployment](t, pooled(t), webhooks).Spec.Template.Spec.Containers[0].Args {
		if strings.HasPrefix(a, "--total-gpu-memory") {
			t.Errorf("%s hides the variable TOTAL_GPU_MEMORY", a)
		}
	}
}

// TestPodsOfThePoolHaveNoPrivilege: the original's plugin is privileged on the
// node's network with the cluster's keys mounted, its webhook is root with the
// rights of cluster-admin (D7, D8, P4, P14).
func TestPodsOfThePoolHaveNoPrivilege(t *testing.T) {
	specs := podSpecs(pooled(t))
	yes, no := true, false
	for _, name := range []string{webhooks, "bitfusion-device-plugin"} {
		spec := specs[name].Spec
		if spec.HostNetwork || spec.HostPID || spec.HostIPC || spec.SecurityContext == nil || spec.SecurityContext.SeccompProfile == nil ||
			spec.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("%s: %+v", name, spec.SecurityContext)
		}
		for _, c := range spec.Containers {
			want := &corev1.SecurityContext{
				AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
				Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			}
			if diff := cmp.Diff(want, c.SecurityContext); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
			if c.Resources.Limits.Memory().IsZero() || c.Resources.Requests.Memory().IsZero() {
				t.Errorf("%s: no limits", name)
			}
		}
	}
	plugin, deployment := specs["bitfusion-device-plugin"].Spec, specs[webhooks].Spec
	if len(plugin.Volumes) != 1 || plugin.Volumes[0].HostPath == nil ||
		plugin.Volumes[0].HostPath.Path != "/var/lib/kubelet/device-plugins" {
		t.Errorf("volumes of the plugin: %+v", plugin.Volumes)
	}
	if plugin.AutomountServiceAccountToken == nil || *plugin.AutomountServiceAccountToken {
		t.Error("the plugin speaks to no API server and has a token for it")
	}
	// What the restricted standard asks besides: not root, and volumes of a few
	// kinds.
	if s := deployment.SecurityContext; s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.RunAsUser == nil || *s.RunAsUser == 0 {
		t.Errorf("the webhooks' user: %+v", s)
	}
	for _, v := range deployment.Volumes {
		if v.ConfigMap == nil {
			t.Errorf("volume of the webhooks: %+v", v)
		}
	}
	namespace := one[*corev1.Namespace](t, pooled(t), "bwki")
	if namespace.Labels["pod-security.kubernetes.io/enforce"] != "restricted" {
		t.Errorf("labels of the namespace: %v", namespace.Labels)
	}
	for _, set := range []string{"pool.createNamespace=false", "pool.namespace=divvy-system"} {
		for _, o := range pooled(t, "--set", set) {
			if _, ok := o.(*corev1.Namespace); ok {
				t.Errorf("%s: the namespace is made", set)
			}
		}
	}
}

// TestUnitsAreOfferedOnEveryNode, tainted or not (D8).
func TestUnitsAreOfferedOnEveryNode(t *testing.T) {
	spec := one[*appsv1.DaemonSet](t, pooled(t), "bitfusion-device-plugin").Spec.Template.Spec
	if diff := cmp.Diff(map[string]string{"kubernetes.io/os": "linux"}, spec.NodeSelector); diff != "" || spec.Affinity != nil {
		t.Errorf("nodes are left out: %s, %v", diff, spec.Affinity)
	}
	for _, effect := range []corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute} {
		taint := &corev1.Taint{Key: "example.com/x", Value: "y", Effect: effect}
		if !slices.ContainsFunc(spec.Tolerations, func(tol corev1.Toleration) bool {
			return tol.Operator == corev1.TolerationOpExists && tol.Key == "" && (tol.Effect == "" || tol.Effect == taint.Effect)
		}) {
			t.Errorf("a taint of effect %s keeps it away", effect)
		}
	}
	if got := spec.Containers[0].VolumeMounts; len(got) != 1 || got[0].MountPath != "/var/lib/kubelet/device-plugins" {
		t.Errorf("mounts: %v", got)
	}
}
