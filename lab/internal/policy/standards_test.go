package policy

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/pod-security-admission/api"
	standards "k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/testing/charttest"
)

// templates returns the pods of a rendered chart by the name of their owner.
func templates(t *testing.T, set ...string) map[string]corev1.PodTemplateSpec {
	t.Helper()
	text, err := charttest.Render(t.Context(), set...)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]corev1.PodTemplateSpec{}
	for document := range strings.SplitSeq(string(text), "\n---\n") {
		var head metav1.PartialObjectMetadata
		if err := yaml.Unmarshal([]byte(document), &head); err != nil {
			t.Fatal(err)
		}
		var template corev1.PodTemplateSpec
		switch head.Kind {
		case "DaemonSet", "Deployment":
			var w appsv1.Deployment
			err = yaml.Unmarshal([]byte(document), &w)
			template = w.Spec.Template
		case "Job":
			var w batchv1.Job
			err = yaml.Unmarshal([]byte(document), &w)
			template = w.Spec.Template
		default:
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		out[head.Name] = template
	}
	return out
}

// needs are the checks of the restricted standard that a part does not pass, at most.
// Every other part passes all. docs/security.md gives the reasons.
var needs = map[string][]string{
	// The vendor's library opens the devices.
	"divvy-node": {
		"privileged", "allowPrivilegeEscalation != false", "unrestricted capabilities", "restricted volume types", "runAsNonRoot != true",
		"runAsUser=0", "seccompProfile",
	},
	// The node's network and a log folder of the host, by default; neither is a must.
	"divvy-extender": {"host namespaces", "restricted volume types", "runAsNonRoot != true", "runAsUser=0"},
	// The node's network, where that is asked for.
	"divvy-scheduler": {"host namespaces"},
	// kubelet's folder for device plugins, whose sockets belong to root.
	"bitfusion-device-plugin": {"restricted volume types", "runAsNonRoot != true", "runAsUser=0"},
	// Files in /etc/kubernetes, and kube-scheduler's port on the node's loopback.
	"divvy-schedconf": {"host namespaces", "probe or lifecycle host", "restricted volume types", "runAsNonRoot != true",
		"runAsUser=0"},
	"divvy-uninstall-scheduler": {"host namespaces", "probe or lifecycle host", "restricted volume types", "runAsNonRoot != true",
		"runAsUser=0"},
	// What the daemon left on the host.
	"divvy-uninstall-node": {"restricted volume types", "runAsNonRoot != true", "runAsUser=0", "seLinuxOptions"},
	"divvy-uninstall-logs": {"restricted volume types", "runAsNonRoot != true", "runAsUser=0", "seLinuxOptions"},
}

// TestPodSecurityStandards: all parts but those that touch a node pass the restricted
// standard of Kubernetes, and those fail no check that they need not.
func TestPodSecurityStandards(t *testing.T) {
	evaluator, err := standards.NewEvaluator(standards.DefaultChecks(), nil)
	if err != nil {
		t.Fatal(err)
	}
	failed := map[string][]string{}
	for name, set := range map[string][]string{
		"defaults":  nil,
		"pool":      {"--set", "pool.enabled=true"},
		"operator":  {"--set", "node.gpuOperator.enabled=true"},
		"dedicated": {"--set", "scheduler.mode=dedicated"},
		"exposed":   {"--set", "scheduler.mode=dedicated,scheduler.hostNetwork=true,pool.enabled=true,uninstall.removeLogs=true"},
		// What docs/security.md says for namespaces that are restricted.
		"restricted":           {"--set", "pool.enabled=true", "--values", chart + "../../examples/values/restricted.yaml"},
		"restricted dedicated": {"--set", "scheduler.mode=dedicated"},
	} {
		all := templates(t, set...)
		if len(all) < 4 {
			t.Errorf("%s: only %d workloads", name, len(all))
		}
		for owner, template := range all {
			allowed := needs[owner]
			if strings.HasPrefix(name, "restricted") && (owner == "divvy-extender" || owner == "divvy-scheduler") {
				allowed = nil
			}
			for _, r := range evaluator.EvaluatePod(api.LevelVersion{Level: api.LevelRestricted, Version: api.LatestVersion()},
				&template.ObjectMeta, &template.Spec) {
				if r.Allowed {
					continue
				}
				failed[owner] = append(failed[owner], r.ForbiddenReason)
				if !slices.Contains(allowed, r.ForbiddenReason) {
					t.Errorf("%s: %s does not pass the restricted standard: %s (%s)", name, owner, r.ForbiddenReason, r.ForbiddenDetail)
				}
			}
		}
	}
	for owner, checks := range needs {
		for _, check := range checks {
			if !slices.Contains(failed[owner], check) {
				t.Errorf("%s passes the check %q and need not be excepted", owner, check)
			}
		}
	}
}
