package main

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/app/extender"
)

// TestPlacement: the extender takes the demand that the chart gives to it, and
// kube-scheduler, wired or of Divvy's own, heeds it as the policy needs.
func TestPlacement(t *testing.T) {
	example := []string{"--values", root + "/examples/values/enflame.yaml", "--values", root + "/examples/values/fragmentation.yaml"}
	args := func(all []string, flag string) string {
		for _, a := range all {
			if value, ok := strings.CutPrefix(a, "--"+flag+"="); ok {
				return value
			}
		}
		return "none"
	}
	tests := map[string]struct {
		set    []string
		weight int
	}{
		"by default":     {nil, 1},
		"spread":         {[]string{"--set", "extender.policy=spread"}, 1},
		"fragmentation":  {example, 200},
		"another weight": {slices.Concat(example, []string{"--set", "extender.weight=20"}), 20},
		"of binpack":     {[]string{"--set", "extender.weight=30"}, 30},
		"with several models": {slices.Concat(example,
			[]string{"--set-json", `extender.demand=[{"units":1000000,"models":["S60","S*"],"avoidModels":["T4"],"share":0.5}]`}), 200},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			all := objects(t, rendered(t, tt.set...))
			spec := one[*appsv1.DaemonSet](t, all, "divvy-schedconf").Spec.Template.Spec
			if got := args(container(t, spec, "schedconf").Args, "weight"); got != strconv.Itoa(tt.weight) {
				t.Errorf("kube-scheduler is given the weight %s, want %d", got, tt.weight)
			}
			o := extender.DefaultOptions()
			flags := pflag.NewFlagSet("extender", pflag.ContinueOnError)
			o.AddFlags(flags)
			t.Setenv("POD_NAMESPACE", "divvy-system")
			t.Setenv("POD_NAME", "divvy-extender-0")
			given := container(t, one[*appsv1.Deployment](t, all, "divvy-extender").Spec.Template.Spec, "extender").Args
			if err := flags.Parse(given[1:]); err != nil {
				t.Fatal(err)
			}
			if err := o.Validate(); err != nil {
				t.Error(err)
			}
			if expects := o.Placement.Policy == "fragmentation"; expects != (o.Placement.Demand != "") {
				t.Errorf("the policy is %s, the demand %q", o.Placement.Policy, o.Placement.Demand)
			}
			own := dedicated(t, slices.Concat(tt.set, []string{"--set", "scheduler.form=extender"})...)
			config := one[*corev1.ConfigMap](t, own, "divvy-scheduler").Data["config.yaml"]
			if want := "\n  weight: " + strconv.Itoa(tt.weight) + "\n"; !strings.Contains(config, want) {
				t.Errorf("Divvy's own scheduler lacks %q:\n%s", want, config)
			}
		})
	}
}
