package main

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	yaml "go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/testing/charttest"
)

const (
	root     = "../.."
	chartDir = root + "/charts/divvy"
)

// helm is the program that `make verify-chart` uses.
var helm = charttest.Helm

// renderings are what helm made of arguments that name no file of a test's own: half of the
// tests look at every file of values.
var renderings = map[string][]byte{}

// rendered returns the text of all objects with values that are set as helm's
// command line sets them. It must not be changed.
func rendered(t *testing.T, set ...string) []byte {
	t.Helper()
	key := strings.Join(set, "\n")
	if text, ok := renderings[key]; ok {
		return text
	}
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	text, err := template(t.Context(), program, chartDir, set)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(key, os.TempDir()) {
		renderings[key] = text
	}
	return text
}

// objects decodes what was rendered, and refuses fields that do not exist.
func objects(t *testing.T, text []byte) []runtime.Object {
	t.Helper()
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme,
		json.SerializerOptions{Yaml: true, Strict: true})
	var out []runtime.Object
	for document := range bytes.SplitSeq(text, []byte("\n---\n")) {
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		out = append(out, object)
	}
	return out
}

// one returns the only object of a type with that name.
func one[T runtime.Object](t *testing.T, all []runtime.Object, name string) T {
	t.Helper()
	var found []T
	for _, o := range all {
		if typed, ok := o.(T); ok && nameOf(t, o) == name {
			found = append(found, typed)
		}
	}
	if len(found) != 1 {
		t.Fatalf("there are %d %T named %s", len(found), *new(T), name)
	}
	return found[0]
}

func nameOf(t *testing.T, o runtime.Object) string {
	t.Helper()
	object, err := meta.Accessor(o)
	if err != nil {
		t.Fatal(err)
	}
	return object.GetName()
}

// valuesFiles are the ready-made ones, and none for the defaults.
func valuesFiles(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob(root + "/examples/values/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d files of values, %v", len(files), err)
	}
	out := map[string][]string{"defaults": nil, "replicas": {"--set", "extender.replicas=2"}}
	for _, f := range files {
		out[strings.TrimSuffix(filepath.Base(f), ".yaml")] = []string{"--values", f}
	}
	return out
}

// podSpecs returns the pods' specifications, by the name of their owner.
func podSpecs(all []runtime.Object) map[string]corev1.PodTemplateSpec {
	out := map[string]corev1.PodTemplateSpec{}
	for _, o := range all {
		switch w := o.(type) {
		case *appsv1.DaemonSet:
			out[w.Name] = w.Spec.Template
		case *appsv1.Deployment:
			out[w.Name] = w.Spec.Template
		}
	}
	return out
}

// TestNodeUpdateStrategy: a new pod of the daemon runs beside the old one, unless the
// values ask for the other way. Kubernetes accepts one of the two numbers.
func TestNodeUpdateStrategy(t *testing.T) {
	tests := map[string]struct {
		set                   []string
		surge, maxUnavailable string
	}{
		"by default":                   {nil, "1", "0"},
		"several at once":              {[]string{"--set", "node.maxSurge=10%"}, "10%", "0"},
		"maxUnavailable of old values": {[]string{"--set", "node.maxUnavailable=3"}, "", "3"},
		"a percentage":                 {[]string{"--set", "node.maxUnavailable=20%"}, "", "20%"},
		"no percentage":                {[]string{"--set", "node.maxUnavailable=0%"}, "1", "0"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d := one[*appsv1.DaemonSet](t, objects(t, rendered(t, tt.set...)), "divvy-node")
			update := d.Spec.UpdateStrategy.RollingUpdate
			surge := ""
			if update.MaxSurge != nil {
				surge = update.MaxSurge.String()
			}
			if surge != tt.surge || update.MaxUnavailable.String() != tt.maxUnavailable {
				t.Errorf("maxSurge %q, maxUnavailable %q", surge, update.MaxUnavailable.String())
			}
			env := map[string]string{}
			for _, e := range d.Spec.Template.Spec.Containers[0].Env {
				if e.ValueFrom != nil && e.ValueFrom.FieldRef != nil {
					env[e.Name] = e.ValueFrom.FieldRef.FieldPath
				}
			}
			if env["POD_NAMESPACE"] != "metadata.namespace" || env["POD_UID"] != "metadata.uid" {
				t.Errorf("environment %v: a new pod would wait until the old one has ended", env)
			}
		})
	}
}

// TestObjectsHaveOnlyFieldsThatExist: the API server refuses others, or drops
// them in silence.
func TestObjectsHaveOnlyFieldsThatExist(t *testing.T) {
	for name, set := range valuesFiles(t) {
		t.Run(name, func(t *testing.T) {
			if got := len(objects(t, rendered(t, set...))); got < 8 {
				t.Errorf("only %d objects", got)
			}
		})
	}
}

// TestEveryValueHasAnEffect: a value that a template reads under another name
// does nothing.
func TestEveryValueHasAnEffect(t *testing.T) {
	var values map[string]any
	data, err := os.ReadFile(chartDir + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(data, &values); err != nil {
		t.Fatal(err)
	}
	// What a value is set to, where its type does not tell what is allowed, and
	// what else has to be set for it to matter.
	other := map[string]string{
		"memoryUnit":                            `"0.1"`,
		"sharedResources":                       `[{"name":"a.example/b","vendor":"enflame"}]`,
		"image.pullPolicy":                      `"Never"`,
		"image.pullSecrets":                     `[{"name":"s"}]`,
		"node.nodeSelector":                     `{"a":"b"}`,
		"node.tolerations":                      `[]`,
		"node.affinity":                         `{"podAffinity":{}}`,
		"node.injection":                        `"cdi"`,
		"node.allocationPath":                   `"dra"`,
		"deviceClasses.extendedResourceNames":   `{"gcu.enflame.divvy.dev":"enflame.com/gcu"}`,
		"node.vendors":                          `{"enflame":{"deviceIDs":"index"}}`,
		"node.labels":                           `"none"`,
		"node.configs":                          `{"a":{"logLevel":"debug"}}`,
		"node.libraries":                        `{"enflame":"/x"}`,
		"node.healthInterval":                   `"9s"`,
		"node.usage.interval":                   `"9s"`,
		"node.usage.metrics":                    `"container"`,
		"node.logLevel":                         `"debug"`,
		"node.hostMountPropagation":             `"HostToContainer"`,
		"node.extraEnv":                         `[{"name":"A","value":"b"}]`,
		"node.podAnnotations":                   `{"a":"b"}`,
		"node.resources":                        `{"limits":{"cpu":"7"}}`,
		"node.mps.resources":                    `{"limits":{"cpu":"7"}}`,
		"node.gpuOperator.timeout":              `"9s"`,
		"extender.managedResources":             `["a.example/b"]`,
		"extender.policy":                       `"spread"`,
		"extender.demand":                       `[{"units":8,"share":1}]`,
		"extender.weight":                       `7`,
		"extender.chooseNode":                   `false`,
		"extender.listenAddress":                `"127.0.0.1"`,
		"extender.tls.listenAddress":            `"127.0.0.1"`,
		"extender.tls.overlap":                  `"1h"`,
		"scheduler.mode":                        `"dedicated"`,
		"scheduler.form":                        `"extender"`,
		"scheduler.minor":                       `"1.36"`,
		"scheduler.profile":                     `{"percentageOfNodesToScore":50}`,
		"scheduler.webhook.failurePolicy":       `"Ignore"`,
		"scheduler.nodeSelector":                `{"a":"b"}`,
		"scheduler.tolerations":                 `[]`,
		"scheduler.affinity":                    `{"podAffinity":{}}`,
		"scheduler.resources":                   `{"limits":{"cpu":"7"}}`,
		"scheduler.podAnnotations":              `{"a":"b"}`,
		"schedconf.hostPaths":                   `["/opt/a"]`,
		"schedconf.kubeVersion":                 `"v1.31.4"`,
		"schedconf.timeout":                     `"9m"`,
		"schedconf.settle":                      `"9s"`,
		"schedconf.listenAddress":               `"::1"`,
		"schedconf.logLevel":                    `"debug"`,
		"schedconf.nodeSelector":                `{"a":"b"}`,
		"schedconf.tolerations":                 `[]`,
		"schedconf.extraEnv":                    `[{"name":"A","value":"b"}]`,
		"schedconf.resources":                   `{"limits":{"cpu":"7"}}`,
		"schedconf.podAnnotations":              `{"a":"b"}`,
		"schedconf.proxy.port":                  `32700`,
		"schedconf.proxy.resources":             `{"limits":{"cpu":"7"}}`,
		"extender.allowBindFrom":                `["10.0.0.0/8"]`,
		"extender.eviction.gracePeriod":         `"9m"`,
		"extender.eviction.exemptNamespaces":    `["a"]`,
		"extender.logLevel":                     `"debug"`,
		"extender.runAsUser":                    `7`,
		"extender.nodeSelector":                 `{"a":"b"}`,
		"extender.tolerations":                  `[]`,
		"extender.affinity":                     `{"nodeAffinity":null}`,
		"extender.extraEnv":                     `[{"name":"A","value":"b"}]`,
		"extender.podAnnotations":               `{"a":"b"}`,
		"extender.resources":                    `{"limits":{"cpu":"7"}}`,
		"extender.image.tag":                    `"t"`,
		"extender.replicas":                     `3`,
		"extender.leaseDuration":                `"4s"`,
		"extender.maxBindDelay":                 `"20m"`,
		"metrics.serviceMonitor.labels":         `{"a":"b"}`,
		"metrics.serviceMonitor.interval":       `"30s"`,
		"metrics.prometheusRule.labels":         `{"a":"b"}`,
		"metrics.dashboard.labels":              `{"a":"b"}`,
		"pool.catalog":                          `"a: b"`,
		"pool.client.pullPolicy":                `"Never"`,
		"pool.credentials.namespaceSelector":    `{}`,
		"pool.ignoredNamespaces":                `["a"]`,
		"pool.webhook.failurePolicy.mutating":   `"Ignore"`,
		"pool.webhook.failurePolicy.validating": `"Ignore"`,
		"pool.webhook.logLevel":                 `"debug"`,
		"pool.webhook.nodeSelector":             `{"a":"b"}`,
		"pool.webhook.tolerations":              `[]`,
		"pool.webhook.affinity":                 `{"podAffinity":{}}`,
		"pool.webhook.resources":                `{"limits":{"cpu":"7"}}`,
		"pool.webhook.podAnnotations":           `{"a":"b"}`,
		"pool.webhook.extraEnv":                 `[{"name":"A","value":"b"}]`,
		"pool.node.logLevel":                    `"debug"`,
		"pool.node.nodeSelector":                `{"a":"b"}`,
		"pool.node.tolerations":                 `[]`,
		"pool.node.maxUnavailable":              `3`,
		"pool.node.resources":                   `{"limits":{"cpu":"7"}}`,
		"pool.node.podAnnotations":              `{"a":"b"}`,
		"pool.node.extraEnv":                    `[{"name":"A","value":"b"}]`,
		"networkPolicy.apiServer.cidrs":         `["10.0.0.0/8"]`,
		"networkPolicy.apiServer.ports":         `[8443]`,
		"networkPolicy.kubeScheduler":           `["10.0.0.0/8"]`,
		"networkPolicy.prometheus":              `[{"podSelector":{}}]`,
		"node.gpuOperator.driverRoot":           `"/x/y"`,
		"node.gpuOperator.validationsDir":       `"/x/z"`,
		"uninstall.moreResources":               `["acme.com/x"]`,
		"uninstall.resources":                   `{"limits":{"cpu":"7"}}`,
	}
	plugin := []string{"--set", "scheduler.mode=dedicated,scheduler.form=plugin", "--set-json", `scheduler.minor="1.35"`}
	basis := map[string][]string{"scheduler.": {"--set", "scheduler.mode=dedicated,scheduler.form=extender"},
		"scheduler.form": {"--set", "scheduler.mode=dedicated"}, "scheduler.minor": plugin,
		"scheduler.pluginImage.": plugin,
		"node.gpuOperator.":      {"--set", "node.gpuOperator.enabled=true"}, "pool.": {"--set", "pool.enabled=true"},
		"metrics.serviceMonitor.": {"--set", "metrics.serviceMonitor.enabled=true"},
		"metrics.prometheusRule.": {"--set", "metrics.prometheusRule.enabled=true"},
		"metrics.dashboard.":      {"--set", "metrics.dashboard.enabled=true"},
		"node.usage.":             {"--set", "node.usage.enabled=true"},
		"node.mps.":               cooperative,
		"deviceClasses.":          claims,
		"claims.":                 claims,
		"extender.eviction.":      {"--set", evicting},
		"networkPolicy.":          {"--set", "networkPolicy.enabled=true"}, "podDisruptionBudget.": {"--set", "pool.enabled=true"},
		"extender.eviction.enabled": {"--set", "node.usage.enabled=true,node.usage.overuse.contextAllowanceMiB.enflame=0"},
		"extender.leaderElection":   {"--set", "extender.replicas=1"}}
	plain := map[string]string{}
	var walk func(path string, value any)
	walk = func(path string, value any) {
		text, known := other[path]
		if inner, ok := value.(map[string]any); ok && !known {
			for key, v := range inner {
				walk(strings.TrimPrefix(path+"."+key, "."), v)
			}
			return
		}
		if !known {
			switch v := value.(type) {
			case bool:
				text = fmt.Sprint(!v)
			case int:
				text = fmt.Sprint(v + 1)
			case string:
				text = fmt.Sprintf("%q", "/another")
				if !strings.HasPrefix(v, "/") {
					text = `"another"`
				}
			default:
				t.Errorf("%s: the test does not know what to set it to", path)
				return
			}
		}
		var base []string
		for _, prefix := range slices.Sorted(maps.Keys(basis)) { // the longest last
			if strings.HasPrefix(path, prefix) && path != "scheduler.mode" &&
				(path != prefix+"enabled" || prefix == "podDisruptionBudget.") {
				base = basis[prefix]
			}
		}
		key := strings.Join(base, " ")
		if plain[key] == "" {
			plain[key] = keyless(rendered(t, base...))
		}
		if keyless(rendered(t, append(slices.Clone(base), "--set-json", path+"="+text)...)) == plain[key] {
			t.Errorf("%s=%s changes nothing", path, text)
		}
	}
	walk("", values)
}

// keyless is the text without the key of the grants, which is a new one each
// time.
func keyless(text []byte) string {
	var out []string
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "  key: ") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}

// TestProgramsHaveProbesAndMetrics, with the question that matters: whether the
// program does its work, and not whether some file is there.
func TestProgramsHaveProbesAndMetrics(t *testing.T) {
	specs := podSpecs(installed(t, rendered(t, "--set", "pool.enabled=true,schedconf.listenAddress=0.0.0.0")))
	if len(specs) != 5 {
		t.Fatalf("%d workloads", len(specs))
	}
	for name, spec := range specs {
		c := spec.Spec.Containers[0]
		for probe, path := range map[*corev1.Probe]string{c.LivenessProbe: "/healthz", c.ReadinessProbe: "/readyz"} {
			if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != path {
				t.Errorf("%s has no probe that asks for %s", name, path)
			}
		}
		if spec.Annotations["prometheus.io/scrape"] != "true" || spec.Annotations["prometheus.io/path"] != "/metrics" {
			t.Errorf("%s does not say where its metrics are: %v", name, spec.Annotations)
		}
	}
}

// TestSelectorsOfPartsDiffer: pods of one part must not be counted as those of
// another.
func TestSelectorsOfPartsDiffer(t *testing.T) {
	all := objects(t, rendered(t, "--set", "pool.enabled=true"))
	parts := map[string]map[string]string{}
	for name, spec := range podSpecs(all) {
		parts[name] = spec.Labels
	}
	matches := func(selector *metav1.LabelSelector, of map[string]string) bool {
		s, err := metav1.LabelSelectorAsSelector(selector)
		if err != nil {
			t.Fatal(err)
		}
		return s.Matches(labels.Set(of))
	}
	selectors := map[string]*metav1.LabelSelector{}
	for _, o := range all {
		switch o := o.(type) {
		case *appsv1.DaemonSet:
			selectors[o.Name+" DaemonSet"] = o.Spec.Selector
		case *appsv1.Deployment:
			selectors[o.Name+" Deployment"] = o.Spec.Selector
		case *policyv1.PodDisruptionBudget:
			selectors[o.Name+" budget"] = o.Spec.Selector
		case *corev1.Service:
			owner := strings.Replace(o.Name, "bwki-webhook-svc", "bitfusion-webhook-deployment", 1)
			selectors[owner+" Service"] = &metav1.LabelSelector{MatchLabels: o.Spec.Selector}
		}
	}
	if len(selectors) != 11 {
		t.Errorf("%d selectors", len(selectors))
	}
	for what, selector := range selectors {
		for name, of := range parts {
			if own := strings.HasPrefix(what, name+" "); matches(selector, of) != own {
				t.Errorf("%s selects pods of %s: %t", what, name, !own)
			}
		}
	}
}

// TestEveryVolumeIsMounted, and every mount has its volume: one that is
// forgotten is seen on some node at last.
func TestEveryVolumeIsMounted(t *testing.T) {
	cases := valuesFiles(t)
	cases["everything"] = []string{"--set", "node.gpuOperator.enabled=true,node.ixConfigMap=ix-config,node.existingConfigMap=mine"}
	cases["pool"] = []string{"--set", "pool.enabled=true,pool.existingCatalog=mine"}
	cases["no logs"] = []string{"--set", "node.logDir=,extender.logDir="}
	cases["claims"] = claims
	for name, set := range cases {
		for owner, spec := range podSpecs(objects(t, rendered(t, set...))) {
			volumes, mounts := map[string]bool{}, map[string]bool{}
			for _, v := range spec.Spec.Volumes {
				if volumes[v.Name] {
					t.Errorf("%s: %s has two volumes %s", name, owner, v.Name)
				}
				volumes[v.Name] = true
			}
			for _, c := range slices.Concat(spec.Spec.InitContainers, spec.Spec.Containers) {
				paths := map[string]bool{}
				for _, m := range c.VolumeMounts {
					mounts[m.Name] = true
					if paths[m.MountPath] {
						t.Errorf("%s: %s mounts two volumes at %s", name, c.Name, m.MountPath)
					}
					paths[m.MountPath] = true
				}
			}
			if diff := cmp.Diff(volumes, mounts); diff != "" {
				t.Errorf("%s: %s: volumes and mounts differ (-volumes +mounts):\n%s", name, owner, diff)
			}
		}
	}
}

// TestEveryObjectIsInTheReleasesNamespace, whichever that is, or in the pool's.
func TestEveryObjectIsInTheReleasesNamespace(t *testing.T) {
	for _, o := range objects(t,
		rendered(t, "--namespace", "elsewhere", "--set", "extender.replicas=2,pool.enabled=true,pool.namespace=gpus",
			"--set", "node.configs.a.allocationPath=dra")) {
		object, err := meta.Accessor(o)
		if err != nil {
			t.Fatal(err)
		}
		kind := o.GetObjectKind().GroupVersionKind().Kind
		wide := strings.HasPrefix(kind, "Cluster") || strings.HasPrefix(kind, "ValidatingAdmissionPolicy") ||
			strings.HasSuffix(kind, "WebhookConfiguration") || kind == "Namespace" || kind == "FlowSchema" || kind == "DeviceClass"
		want := "elsewhere"
		switch {
		case object.GetLabels()["app.kubernetes.io/name"] == "bitfusion-webhook":
			want = "gpus"
		case object.GetName() == "divvy-uninstall" && object.GetNamespace() == "gpus": // what it may do there
			want = "gpus"
		case object.GetName() == "divvy-schedconf-pods": // where kube-scheduler is
			want = metav1.NamespaceSystem
		case object.GetName() == "divvy-schedconf-events": // where events of nodes are
			want = metav1.NamespaceDefault
		}
		if wide != (object.GetNamespace() == "") || !wide && object.GetNamespace() != want {
			t.Errorf("%s %s is in namespace %q", kind, object.GetName(), object.GetNamespace())
		}
		if kind == "Namespace" && object.GetName() != "gpus" {
			t.Errorf("namespace %s is made", object.GetName())
		}
		if binding, ok := o.(*rbacv1.ClusterRoleBinding); ok && binding.Subjects[0].Namespace != want {
			t.Errorf("%s binds an account of namespace %q", binding.Name, binding.Subjects[0].Namespace)
		}
	}
}

// TestAccountsMayDoWhatTheyMustAndNoMore. Whoever adds a right here says in
// docs/security.md why.
func TestAccountsMayDoWhatTheyMustAndNoMore(t *testing.T) {
	all := objects(t, rendered(t, "--set", "pool.enabled=true"))
	rights := func(rules []rbacv1.PolicyRule) []string {
		var out []string
		for _, r := range rules {
			if len(r.NonResourceURLs) > 0 || slices.Contains(r.APIGroups, "*") {
				t.Errorf("a rule that is not about resources of one group: %v", r)
			}
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					right := verb + " " + strings.TrimPrefix(strings.Join(r.APIGroups, ",")+"/"+resource, "/")
					if len(r.ResourceNames) > 0 {
						right += " " + strings.Join(r.ResourceNames, ",")
					}
					out = append(out, right)
				}
			}
		}
		slices.Sort(out)
		return out
	}
	for name, want := range map[string][]string{
		"divvy-node": {
			"create events", "list nodes", "list pods", "patch events", "patch nodes", "patch nodes/status", "patch pods", "watch nodes",
			"watch pods",
		},
		"bitfusion-webhook-deployment": slices.Sorted(slices.Values(slices.Concat(
			[]string{"create events", "create secrets"},
			each([]string{"list", "watch"}, "namespaces", "nodes", "pods", "resourcequotas"),
			each([]string{"get", "list", "watch", "update", "delete"}, "secrets "+strings.Join(poolSecrets, ",")),
			each([]string{"get", "list", "watch", "patch"}, "admissionregistration.k8s.io/mutatingwebhookconfigurations bwki-webhook-cfg",
				"admissionregistration.k8s.io/validatingwebhookconfigurations validation.bitfusion.io-cfg"),
		))),
		"divvy-extender": slices.Sorted(slices.Values(slices.Concat(
			[]string{"create events", "create pods/binding", "patch pods/status", "get pods", "list nodes", "list pods", "watch nodes",
				"watch pods"},
			each([]string{"get", "list", "watch", "patch"}, "admissionregistration.k8s.io/validatingwebhookconfigurations divvy-config"),
		))),
		"divvy-uninstall": slices.Sorted(slices.Values(slices.Concat(
			[]string{"list nodes", "patch nodes", "patch nodes/status"},
			[]string{"delete admissionregistration.k8s.io/mutatingwebhookconfigurations bwki-webhook-cfg"},
			[]string{"delete admissionregistration.k8s.io/validatingwebhookconfigurations divvy-config,validation.bitfusion.io-cfg"},
			each([]string{"list", "delete"}, "secrets "+strings.Join(poolSecrets, ",")),
		))),
		"divvy-uninstall-after": {"list nodes", "patch nodes/status"},
	} {
		if diff := cmp.Diff(want, rights(one[*rbacv1.ClusterRole](t, all, name).Rules)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	for _, o := range all {
		role, ok := o.(*rbacv1.Role)
		if !ok {
			continue
		}
		want, known := map[string][]string{
			"bwki/bitfusion-webhook-deployment": each([]string{"get", "list", "update", "watch"}, "secrets bwki-webhook-certs"),
			"divvy-system/divvy-extender": slices.Concat(
				[]string{"get configmaps divvy-node,divvy-node-configs", "create coordination.k8s.io/leases"},
				each([]string{"get", "update"}, "coordination.k8s.io/leases divvy-extender"),
				each([]string{"get", "list", "patch", "watch"}, "configmaps divvy-extender-ca"),
				each([]string{"get", "list", "update", "watch"}, "secrets divvy-extender-certs,divvy-extender-client")),
			"divvy-system/divvy-schedconf": slices.Concat(each([]string{"get", "update"}, "coordination.k8s.io/leases divvy-schedconf"),
				each([]string{"list", "watch"}, "discovery.k8s.io/endpointslices"),
				[]string{"get configmaps divvy-extender-ca", "get secrets divvy-extender-client", "get services divvy-extender"}),
			"kube-system/divvy-schedconf-pods": {"get pods"},
			"default/divvy-schedconf-events":   {"create events"},
			"bwki/divvy-uninstall": slices.Concat(
				[]string{"list pods"}, each([]string{"get", "delete"}, "apps/deployments bitfusion-webhook-deployment")),
			"divvy-system/divvy-uninstall": slices.Concat(
				[]string{"list pods", "get apps/daemonsets divvy-uninstall-node,divvy-uninstall-scheduler",
					"delete coordination.k8s.io/leases divvy-extender,divvy-scheduler"},
				each([]string{"get", "delete"}, "apps/daemonsets divvy-node,divvy-schedconf,bitfusion-device-plugin",
					"apps/deployments divvy-extender")),
		}[role.Namespace+"/"+role.Name]
		slices.Sort(want)
		if diff := cmp.Diff(want, rights(role.Rules)); !known || diff != "" {
			t.Errorf("role %s (-want +got):\n%s", nameOf(t, o), diff)
		}
	}
}

// poolSecrets are the names of the pool's secrets.
var poolSecrets = []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}

// each are all verbs for all resources.
func each(verbs []string, resources ...string) []string {
	var out []string
	for _, r := range resources {
		for _, v := range verbs {
			out = append(out, v+" "+r)
		}
	}
	return out
}

// TestDaemonStaysOffNodesWithoutDevices: one that finds nothing there is never
// ready.
func TestDaemonStaysOffNodesWithoutDevices(t *testing.T) {
	for name, tt := range map[string]struct {
		set   []string
		nodes map[string]bool // a label, and whether a node with it alone gets the daemon
	}{
		"defaults": {nil, map[string]bool{
			"": false, "enflame.com/gcushare=true": true, "divvy.dev/enabled=true": true, "nvidia.com/gpu.present=true": false,
			"enflame.com/gcushare=false": false,
		}},
		"mixed": {[]string{"--values", root + "/examples/values/mixed.yaml"}, map[string]bool{
			"": false, "enflame.com/gcushare=true": true, "nvidia.com/gpu.present=true": true, "iluvatar.com/gpu.present=true": true,
			"nvidia.com/gpu.present=true,divvy.dev/enabled=false": false,
		}},
		"a label of one's own": {[]string{"--set", "node.nodeSelector.pool=gpu"}, map[string]bool{
			"": false, "pool=gpu": true, "enflame.com/gcushare=true": false, "pool=gpu,divvy.dev/enabled=false": false,
		}},
		"the GPU operator's nodes": {[]string{"--values", root + "/examples/values/gpu-operator.yaml"}, map[string]bool{
			"": false, "nvidia.com/gpu.present=true,nvidia.com/gpu.deploy.client=true": true, "divvy.dev/enabled=true": false,
			"nvidia.com/gpu.present=true,nvidia.com/gpu.deploy.client=paused-for-driver-upgrade": false,
			"nvidia.com/gpu.present=true": false,
		}},
		"the nodes of an older GPU operator": {
			[]string{"--values", root + "/examples/values/gpu-operator.yaml", "--set", "node.gpuOperator.clientLabel=false"},
			map[string]bool{"": false, "nvidia.com/gpu.present=true": true, "divvy.dev/enabled=true": false},
		},
		"narrowed by an affinity": {
			[]string{"--set-json",
				`node.affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":` +
					`[{"matchExpressions":[{"key":"zone","operator":"Exists"}]}]}}}`},
			map[string]bool{"enflame.com/gcushare=true": false, "enflame.com/gcushare=true,zone=a": true, "zone=a": false},
		},
		"old files": {
			[]string{"--set-json", `node.configs={"old":"version: v1\nflags: {migStrategy: none}\n"}`,
				"--set", "node.ixConfigMap=ix-config"},
			map[string]bool{"nvidia.com/gpu.present=true": true, "iluvatar.com/gpu.present=true": true, "enflame.com/gcushare=true": true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			spec := one[*appsv1.DaemonSet](t, objects(t, rendered(t, tt.set...)), "divvy-node").Spec.Template.Spec
			for labels, want := range tt.nodes {
				node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{}}}
				for label := range strings.SplitSeq(labels, ",") {
					key, value, _ := strings.Cut(label, "=")
					node.Labels[key] = value
				}
				got, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: spec}).Match(node)
				if err != nil {
					t.Fatal(err)
				}
				if got != want {
					t.Errorf("a node labelled %q gets a daemon: %t", labels, got)
				}
			}
		})
	}
}

// TestConfigurationChangesRestartNoDaemon: what the daemon reads again by itself
// is in no part of its pods.
func TestConfigurationChangesRestartNoDaemon(t *testing.T) {
	before := podSpecs(objects(t, rendered(t, "--set", "node.configs.a.logLevel=debug")))["divvy-node"]
	for _, c := range before.Spec.Containers {
		for _, m := range c.VolumeMounts {
			if m.SubPath != "" {
				t.Errorf("kubelet brings no change to %s, which is mounted by a path inside its volume", m.MountPath)
			}
		}
	}
	for _, set := range []string{
		"memoryUnit=\"0.1\"", "node.injection=\"cdi\"", "node.healthInterval=\"9s\"", "node.labels=\"none\"", "node.logLevel=\"debug\"",
		`node.vendors={"enflame":{"health":{"ignore":["all"]}}}`, `node.configs={"a":{"logLevel":"info"},"b":{"labels":"none"}}`,
		`sharedResources=[{"name":"enflame.com/gcu","vendor":"enflame","mode":"exclusive"},{"name":"enflame.com/gcu-memory",` +
			`"vendor":"enflame"}]`,
	} {
		after := podSpecs(objects(t, rendered(t, "--set", "node.configs.a.logLevel=debug", "--set-json", set)))["divvy-node"]
		if diff := cmp.Diff(before, after); diff != "" {
			t.Errorf("%s changes the pods:\n%s", set, diff)
		}
	}
}

// TestDaemonAcceptsItsConfiguration, on every node: what the values say, with
// each of the named configurations over it.
func TestDaemonAcceptsItsConfiguration(t *testing.T) {
	for name, set := range valuesFiles(t) {
		t.Run(name, func(t *testing.T) {
			all := objects(t, rendered(t, set...))
			if name == "pool" {
				for _, o := range installed(t, rendered(t, set...)) {
					if n := nameOf(t, o); strings.HasPrefix(n, "divvy-") {
						t.Errorf("a cluster without devices gets a %s %s", o.GetObjectKind().GroupVersionKind().Kind, n)
					}
				}
				return
			}
			base := filepath.Join(t.TempDir(), "config.yaml")
			write(t, base, one[*corev1.ConfigMap](t, all, "divvy-node").Data["config.yaml"])
			named := map[string]string{"": ""}
			for _, o := range all {
				if m, ok := o.(*corev1.ConfigMap); ok && m.Name == "divvy-node-configs" {
					maps.Copy(named, m.Data)
				}
			}
			if name == "mixed" && len(named) < 3 {
				t.Errorf("named configurations: %v", slices.Collect(maps.Keys(named)))
			}
			for which, text := range named {
				files := []string{base}
				if which != "" {
					files = append(files, filepath.Join(t.TempDir(), which))
					write(t, files[1], text)
				}
				loaded, err := nodeconfig.Load(files, nodeconfig.Overrides{}, accel.VendorNames())
				if err != nil {
					t.Errorf("configuration %q: %v", which, err)
				}
				if len(loaded.Warnings) > 0 {
					t.Errorf("configuration %q: %v", which, loaded.Warnings)
				}
				if loaded.Config.DriverRoot != "/host" {
					t.Errorf("configuration %q: the host's files are looked for in %q", which, loaded.Config.DriverRoot)
				}
			}
		})
	}
}

// TestDurationsAreThoseOfTheDaemon: the chart takes none that divvy-node refuses,
// and the bounds that divvy-node names.
func TestDurationsAreThoseOfTheDaemon(t *testing.T) {
	data, err := os.ReadFile(chartDir + "/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Definitions map[string]struct{ Pattern string }
	}
	if err := yaml.Unmarshal(data, &schema); err != nil {
		t.Fatal(err)
	}
	durations := []string{"", "0", "s", "5", "-1s"}
	for _, unit := range []string{"ns", "us", "ms", "s", "m", "h"} {
		for _, n := range []string{"0", "0.05", "0.5", "1", "1.5", "9", "23", "24", "25", "59", "60", "61", "99", "100", "600", "601",
			"1439", "1440", "1441", "3599", "3600", "3601", "86399", "86400", "86401", "3600001", "86400001"} {
			durations = append(durations, n+unit, "1h"+n+unit, "23h"+n+unit, "24h"+n+unit, "59m"+n+unit, "60m"+n+unit, "1440m"+n+unit)
		}
	}
	for definition, tt := range map[string]struct {
		set  func(*v1alpha1.NodeConfig, v1alpha1.Duration)
		good []string
	}{
		"healthInterval": {
			func(c *v1alpha1.NodeConfig, d v1alpha1.Duration) { c.HealthInterval = d },
			[]string{"100ms", "0.5s", "1.5s", "5s", "3600s", "1m", "59m59s", "60m", "1h"},
		},
		"usageInterval": {
			func(c *v1alpha1.NodeConfig, d v1alpha1.Duration) { c.Usage.Interval = d },
			[]string{"5s", "5.5s", "15s", "60s", "99.5s", "599s", "600s", "1m", "9m59s", "10m", "10m0s"},
		},
		"recoverAfter": {
			func(c *v1alpha1.NodeConfig, d v1alpha1.Duration) {
				c.Vendors = map[string]v1alpha1.Vendor{"nvidia": {Health: v1alpha1.Health{RecoverAfter: &d}}}
			},
			[]string{"0s", "10s", "1.5s", "5m", "1h", "1h30m", "23h59m59s", "1440m", "86400s", "24h"},
		},
	} {
		pattern := regexp.MustCompile(schema.Definitions[definition].Pattern)
		for _, text := range slices.Concat(durations, tt.good) {
			c := v1alpha1.Default()
			d, err := time.ParseDuration(text)
			tt.set(&c, v1alpha1.Duration(d))
			daemon := err == nil && len(v1alpha1.Validate(c, accel.VendorNames())) == 0
			chart := pattern.MatchString(text)
			if chart && !daemon {
				t.Errorf("%s: the chart takes %q, and divvy-node does not", definition, text)
			}
			if slices.Contains(tt.good, text) && !(chart && daemon) {
				t.Errorf("%s: %q is refused by the chart (%t) or by divvy-node (%t)", definition, text, !chart, !daemon)
			}
		}
	}
}

// TestExtenderManagesMemoryAndNothingElse: kube-scheduler counts the rest by
// itself, and a cluster without memory sharing needs no extender.
func TestExtenderManagesMemoryAndNothingElse(t *testing.T) {
	args := func(set ...string) []string {
		spec, ok := podSpecs(objects(t, rendered(t, set...)))["divvy-extender"]
		if !ok {
			return nil
		}
		return spec.Spec.Containers[0].Args
	}
	for name, tt := range map[string]struct{ values, want string }{
		"nvidia": {"nvidia", "--resources=nvidia.com/gpu-memory"},
		"mixed":  {"mixed", "--resources=nvidia.com/gpu-memory,iluvatar.com/gpu-memory,enflame.com/gcu-memory"},
	} {
		if got := args("--values", root+"/examples/values/"+tt.values+".yaml"); !slices.Contains(got, tt.want) {
			t.Errorf("%s: no %s in %v", name, tt.want, got)
		}
	}
	if got := args("--set", "node.configs.a.resources[0].name=a.example/b,node.configs.a.resources[0].vendor=nvidia"); !slices.Contains(got,
		"--resources=enflame.com/gcu-memory,a.example/b") {
		t.Errorf("a named configuration: %v", got)
	}
	for _, o := range objects(t, rendered(t, "--values", root+"/examples/values/gpu-operator.yaml")) {
		if nameOf(t, o) == "divvy-extender" {
			t.Errorf("there is a %s of an extender that has nothing to do", reflect.TypeOf(o))
		}
	}
}

// TestChartNamesImagesOfItsRelease: a release's images have its git tag, which is the
// version with a v, so a checkout of that tag installs them without further values.
func TestChartNamesImagesOfItsRelease(t *testing.T) {
	data, err := os.ReadFile(chartDir + "/Chart.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var about struct{ Version string }
	if err := yaml.Unmarshal(data, &about); err != nil {
		t.Fatal(err)
	}
	image := one[*appsv1.DaemonSet](t, objects(t, rendered(t)), "divvy-node").Spec.Template.Spec.Containers[0].Image
	if want := "ghcr.io/divvy-gpu/divvy-node:v" + about.Version; image != want {
		t.Errorf("the chart installs %s, and the release pushes %s", image, want)
	}
}

// TestArticleIsFollowedWithoutOperator: readers of the article on NVIDIA's device
// plugin have installed driver and toolkit by hand. What docs/gpu-operator.md gives
// them for its fifth step offers their GPUs and waits for no operator.
func TestArticleIsFollowedWithoutOperator(t *testing.T) {
	page, err := os.ReadFile(root + "/docs/gpu-operator.md")
	if err != nil {
		t.Fatal(err)
	}
	step := regexp.MustCompile(`(?m)^\| 5\. .*?-f (examples/values/\S+\.yaml)`).FindSubmatch(page)
	if step == nil {
		t.Fatal("docs/gpu-operator.md has no step 5 that names a file of values")
	}
	spec := one[*appsv1.DaemonSet](t, objects(t, rendered(t, "--values", root+"/"+string(step[1]))), "divvy-node").Spec.Template.Spec
	for _, c := range spec.InitContainers {
		t.Errorf("with %s the daemon waits in %s: %v", step[1], c.Name, c.Args)
	}
}

// TestGPUOperatorIsWaitedFor before the daemon starts, and what it mounts later
// is seen.
func TestGPUOperatorIsWaitedFor(t *testing.T) {
	all := objects(t, rendered(t, "--values", root+"/examples/values/gpu-operator.yaml"))
	spec := one[*appsv1.DaemonSet](t, all, "divvy-node").Spec.Template.Spec
	if len(spec.InitContainers) != 1 {
		t.Fatalf("%d init containers", len(spec.InitContainers))
	}
	wait := spec.InitContainers[0]
	for _, want := range []string{"wait", "--vendor=nvidia", "--toolkit", "--validations=/run/nvidia/validations", "--timeout=5m"} {
		if !slices.Contains(wait.Args, want) {
			t.Errorf("no %s in %v", want, wait.Args)
		}
	}
	sees := func(c corev1.Container) int {
		return slices.IndexFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/host/run/nvidia" })
	}
	if sees(wait) >= 0 || wait.SecurityContext.Privileged != nil {
		t.Error("what only waits for files can use the driver")
	}
	daemon := spec.Containers[0]
	if at := sees(daemon); at < 0 {
		t.Error("the daemon does not see the operator's driver")
	} else if m := daemon.VolumeMounts[at]; !m.ReadOnly || m.MountPropagation == nil ||
		*m.MountPropagation != corev1.MountPropagationHostToContainer {
		t.Errorf("the daemon mounts the driver as %+v", m)
	}
	if got := one[*corev1.ConfigMap](t, all, "divvy-node").Data["config.yaml"]; !strings.Contains(got, "driverRoot: /run/nvidia/driver") {
		t.Errorf("the driver's root is not in\n%s", got)
	}
	if len(podSpecs(objects(t, rendered(t)))["divvy-node"].Spec.InitContainers) != 0 {
		t.Error("without the operator something is waited for")
	}
}

// TestGoodAndBadValues are those that `make verify-chart` checks.
func TestGoodAndBadValues(t *testing.T) {
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	if err := run(context.Background(), program, []string{chartDir}, &bytes.Buffer{}); err != nil {
		t.Error(err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
