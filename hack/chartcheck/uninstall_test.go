package main

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// hookOf is when helm makes an object beside those of the release, "" for one of
// the release.
func hookOf(t *testing.T, o runtime.Object) string {
	t.Helper()
	object, err := meta.Accessor(o)
	if err != nil {
		t.Fatal(err)
	}
	return object.GetAnnotations()["helm.sh/hook"]
}

// installed are the objects that are there while Divvy is installed.
func installed(t *testing.T, text []byte) []runtime.Object {
	t.Helper()
	return slices.DeleteFunc(objects(t, text), func(o runtime.Object) bool { return hookOf(t, o) != "" })
}

// TestUninstallingLeavesNothingOfItself: every object of it is one that helm deletes
// when it has succeeded, in both parts, and none is there without it.
func TestUninstallingLeavesNothingOfItself(t *testing.T) {
	for name, set := range everyPart {
		for _, o := range objects(t, rendered(t, set...)) {
			object, err := meta.Accessor(o)
			if err != nil {
				t.Fatal(err)
			}
			if _, policy := o.(metav1.Object); !policy || o.GetObjectKind().GroupVersionKind().Kind == "NetworkPolicy" {
				continue
			}
			ours := strings.HasPrefix(object.GetName(), "divvy-uninstall")
			if hook := hookOf(t, o); ours != strings.Contains(hook, "delete") {
				t.Errorf("%s with %s: its hook is %q", nameOf(t, o), name, hook)
			}
			if policy := object.GetAnnotations()["helm.sh/hook-delete-policy"]; ours && policy != "before-hook-creation,hook-succeeded" {
				t.Errorf("%s with %s: helm deletes it on %q", nameOf(t, o), name, policy)
			}
		}
	}
	if text := string(rendered(t,
		"--set", "uninstall.enabled=false,networkPolicy.enabled=true,uninstall.removeLogs=true")); strings.Contains(text, "helm.sh/hook") ||
		strings.Contains(text, "name: divvy-uninstall") {
		t.Error("something of uninstalling is rendered without it")
	}
	for _, o := range objects(t, rendered(t, "--set", "uninstall.nodeStatus=false")) {
		if hookOf(t, o) == "post-delete" {
			t.Errorf("%s is made after the release was deleted, for nothing", nameOf(t, o))
		}
	}
}

// TestUninstallingFindsEveryProgram: what a release has of workloads, webhook
// configurations and Leases, the Job deletes before helm does.
func TestUninstallingFindsEveryProgram(t *testing.T) {
	for name, set := range everyPart {
		all := objects(t, rendered(t, set...))
		args := one[*batchv1.Job](t, all, "divvy-uninstall").Spec.Template.Spec.Containers[0].Args
		for _, o := range all {
			if hookOf(t, o) != "" {
				continue
			}
			kind := strings.ToLower(o.GetObjectKind().GroupVersionKind().Kind)
			object, err := meta.Accessor(o)
			if err != nil {
				t.Fatal(err)
			}
			want := "--remove=" + strings.Join(slices.DeleteFunc([]string{kind, object.GetNamespace(), object.GetName()},
				func(s string) bool { return s == "" }), "/")
			if object.GetName() == "divvy-schedconf" {
				want = "--scheduler-daemon=divvy-schedconf"
			}
			switch kind {
			case "daemonset", "deployment", "mutatingwebhookconfiguration", "validatingwebhookconfiguration":
				if !slices.Contains(args, want) {
					t.Errorf("with %s: %s is missing in %q", name, want, args)
				}
			}
		}
	}
}

// TestUninstallingFindsTheLeasesOfEveryMode: programs made them, also those of a
// scheduler.mode of before an upgrade, so helm does not know them.
func TestUninstallingFindsTheLeasesOfEveryMode(t *testing.T) {
	for name, set := range everyPart {
		args := one[*batchv1.Job](t, objects(t, rendered(t, set...)), "divvy-uninstall").Spec.Template.Spec.Containers[0].Args
		for _, lease := range []string{"divvy-extender", "divvy-scheduler"} {
			if want := "--remove=lease/divvy-system/" + lease; !slices.Contains(args, want) {
				t.Errorf("with %s: %s is missing in %q", name, want, args)
			}
		}
	}
}

// TestHostsAreCleanedWhereADaemonRan: on each node that the daemon runs on, and on
// those that it does not run on any more.
func TestHostsAreCleanedWhereADaemonRan(t *testing.T) {
	matches := func(spec corev1.PodSpec, labels map[string]string) bool {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: labels}}
		ok, err := nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: spec}).Match(node)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	}
	linux := func(labels map[string]string) map[string]string {
		labels["kubernetes.io/os"] = "linux"
		return labels
	}
	for name, tc := range map[string]struct {
		set    []string
		labels map[string]string
		want   bool
	}{
		"a node that shares":            {nil, map[string]string{"enflame.com/gcushare": "true"}, true},
		"a node by Divvy's own label":   {nil, map[string]string{"divvy.dev/enabled": "true"}, true},
		"a node that shared before":     {nil, map[string]string{"divvy.dev/enflame.present": "true"}, true},
		"a node that was taken out":     {nil, map[string]string{"divvy.dev/nvidia.present": "true", "divvy.dev/enabled": "false"}, true},
		"a node that has nothing to do": {nil, map[string]string{}, false},
		"a label of one's own":          {[]string{"--set", "node.nodeSelector.pool=gcu"}, map[string]string{"pool": "gcu"}, true},
		"another label than one's own": {[]string{"--set", "node.nodeSelector.pool=gcu"},
			map[string]string{"enflame.com/gcushare": "true"}, false},
		"any node with the pool": {[]string{"--set", "pool.enabled=true"}, map[string]string{}, true},
	} {
		spec := one[*appsv1.DaemonSet](t, objects(t, rendered(t, tc.set...)), "divvy-uninstall-node").Spec.Template.Spec
		if got := matches(spec, linux(tc.labels)); got != tc.want {
			t.Errorf("%s: %t, want %t", name, got, tc.want)
		}
	}
}
