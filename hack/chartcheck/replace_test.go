package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/divvy-gpu/divvy/internal/app/extender"
	"github.com/divvy-gpu/divvy/internal/app/schedconf"
	"github.com/divvy-gpu/divvy/internal/app/scheduler"
)

// TestReplace: with scheduler.mode replace, the programs accept their flags, the key is mounted
// without a right to read Secrets, and the extender only reports.
func TestReplace(t *testing.T) {
	all := installed(t, rendered(t, "--set", "scheduler.mode=replace,extender.policy=fragmentation,extender.chooseNode=false",
		"--set-json", `extender.demand=[{"units":8,"share":1}]`))
	pod := one[*appsv1.DaemonSet](t, all, "divvy-schedconf").Spec.Template.Spec
	if len(pod.Containers) != 1 {
		t.Errorf("it has %d containers: there is no extender for the proxy", len(pod.Containers))
	}
	c := container(t, pod, "schedconf")
	watch, _, err := schedconf.Command().Find([]string{"watch"})
	if err != nil {
		t.Fatal(err)
	}
	if err := watch.Flags().Parse(c.Args[2:]); err != nil {
		t.Fatalf("divvy-control schedconf watch: %v", err)
	}
	flags, err := watch.Flags().GetStringArray("replace-flag")
	if err != nil {
		t.Fatal(err)
	}
	o, set := scheduler.DefaultOptions(), pflag.NewFlagSet("", pflag.ContinueOnError)
	o.AddFlags(set)
	if err := set.Parse(flags); err != nil {
		t.Fatalf("divvy-scheduler: %v", err)
	}
	o.TLS.Listen, o.Config = "", "/etc/kubernetes/config.yaml" // as schedconf sets them
	if err := o.Validate(); err != nil {
		t.Errorf("divvy-scheduler: %v", err)
	}
	if p := o.Placement; p.Policy != "fragmentation" || p.ChooseNode || p.Demand == "" ||
		!slices.Equal(p.Resources, []string{"enflame.com/gcu-memory"}) {
		t.Errorf("divvy-scheduler places by %+v", p)
	}
	key, err := watch.Flags().GetString("grant-key-file")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return strings.HasPrefix(key, m.MountPath+"/") }) {
		t.Errorf("%s is not mounted", key)
	}
	for _, rule := range one[*rbacv1.Role](t, all, "divvy-schedconf").Rules {
		if slices.Contains(rule.Resources, "secrets") {
			t.Errorf("divvy-schedconf may read Secrets: %v", rule)
		}
	}
	for _, rule := range one[*rbacv1.ClusterRole](t, all, "divvy-extender").Rules {
		if slices.Contains(rule.Resources, "pods/binding") {
			t.Error("the extender may bind pods")
		}
	}
	e := extender.DefaultOptions()
	set = pflag.NewFlagSet("", pflag.ContinueOnError)
	e.AddFlags(set)
	pod = one[*appsv1.Deployment](t, all, "divvy-extender").Spec.Template.Spec
	if err := set.Parse(container(t, pod, "extender").Args[1:]); err != nil {
		t.Fatal(err)
	}
	if !e.ReportsOnly {
		t.Error("the extender places pods as well")
	}
}
