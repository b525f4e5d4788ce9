package main

import (
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	schedulerv1 "k8s.io/kube-scheduler/config/v1"

	"github.com/divvy-gpu/divvy/internal/app/extender"
	"github.com/divvy-gpu/divvy/internal/app/scheduler"
)

// dedicated is the chart with a scheduler of its own, and what is set besides.
func dedicated(t *testing.T, set ...string) []runtime.Object {
	t.Helper()
	return installed(t, rendered(t, append([]string{"--set", "scheduler.mode=dedicated"}, set...)...))
}

// container returns the one of that name.
func container(t *testing.T, spec corev1.PodSpec, name string) corev1.Container {
	t.Helper()
	i := slices.IndexFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("there is no container %s", name)
	}
	return spec.Containers[i]
}

// TestSchedulerAcceptsItsConfiguration, and asks the extender beside it about what
// the extender manages.
func TestSchedulerAcceptsItsConfiguration(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := schedulerv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	strict := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	all := dedicated(t, "--values", root+"/examples/values/mixed.yaml",
		"--set", "scheduler.form=extender,scheduler.name=cards,scheduler.profile.percentageOfNodesToScore=50")
	object, _, err := strict.Decode([]byte(one[*corev1.ConfigMap](t, all, "divvy-scheduler").Data["config.yaml"]), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, ok := object.(*schedulerv1.KubeSchedulerConfiguration)
	if !ok {
		t.Fatalf("it is a %T", object)
	}
	if l := config.LeaderElection; l.LeaderElect == nil || !*l.LeaderElect || l.ResourceNamespace != "divvy-system" ||
		l.ResourceName != "divvy-scheduler" || l.ResourceLock != "leases" {
		t.Errorf("election: %+v", l)
	}
	if len(config.Profiles) != 1 || *config.Profiles[0].SchedulerName != "cards" || *config.Profiles[0].PercentageOfNodesToScore != 50 {
		t.Errorf("profiles: %+v", config.Profiles)
	}
	if len(config.Extenders) != 1 {
		t.Fatalf("extenders: %+v", config.Extenders)
	}
	e := config.Extenders[0]
	if e.URLPrefix != "http://127.0.0.1:32766/gcushare-scheduler" || e.FilterVerb != "filter" || e.PrioritizeVerb != "prioritize" ||
		e.BindVerb != "bind" ||
		!e.NodeCacheCapable || e.Ignorable || e.EnableHTTPS {
		t.Errorf("extender: %+v", e)
	}
	var managed []string
	for _, r := range e.ManagedResources {
		managed = append(managed, r.Name)
		if r.IgnoredByScheduler {
			t.Errorf("%s is not counted on nodes", r.Name)
		}
	}
	args := container(t, one[*appsv1.Deployment](t, all, "divvy-scheduler").Spec.Template.Spec, "extender").Args
	if want := "--resources=" + strings.Join(managed, ","); !slices.Contains(args, want) ||
		!slices.Contains(args, "--scheduler-name=cards") {
		t.Errorf("the extender manages something else than %s: %v", want, args)
	}
}

// TestExtenderUnderstandsItsFlags, in every mode.
func TestExtenderUnderstandsItsFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "divvy-system")
	t.Setenv("POD_NAME", "divvy-extender-x")
	for name, tt := range map[string]struct {
		deployment string
		set        []string
		elects     bool
	}{
		"extender": {"divvy-extender",
			[]string{"--set", "extender.replicas=1,extender.listenAddress=::1,extender.allowBindFrom={10.0.0.0/8}," +
				"extender.tls.listenAddress=10.0.0.1"}, false},
		"elected": {"divvy-extender", []string{"--set", "extender.replicas=2"}, true},
		"dedicated": {"divvy-scheduler",
			[]string{"--set", "scheduler.mode=dedicated,scheduler.form=extender,extender.replicas=2,extender.logDir=/var/log/x," +
				"extender.allowBindFrom={10.0.0.0/8}"}, true},
		"dedicated, one replica": {"divvy-scheduler",
			[]string{"--set", "scheduler.mode=dedicated,scheduler.form=extender,scheduler.replicas=1,extender.replicas=1," +
				"extender.leaseDuration=7s,extender.maxBindDelay=20m"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			args := container(t, one[*appsv1.Deployment](t, objects(t, rendered(t, tt.set...)), tt.deployment).Spec.Template.Spec,
				"extender").Args
			o := extender.DefaultOptions()
			fs := pflag.NewFlagSet("extender", pflag.ContinueOnError)
			o.AddFlags(fs)
			if err := fs.Parse(args[1:]); err != nil || args[0] != "extender" || fs.NArg() > 0 {
				t.Fatalf("%v: %v", args, err)
			}
			if err := o.Validate(); err != nil {
				t.Error(err)
			}
			if o.Election.Enabled != tt.elects || o.TLS.Listen == "" {
				t.Errorf("options %+v", o)
			}
			if strings.Contains(name, "one replica") && (o.Election.Duration != 7*time.Second || o.MaxBindDelay != 20*time.Minute) {
				t.Errorf("durations %s and %s", o.Election.Duration, o.MaxBindDelay)
			}
			if tt.deployment == "divvy-scheduler" && (o.TLS.MutatingConfig != "divvy-scheduler" || o.TLS.ClientSecret == "" ||
				o.TLS.ConfigMap != "" || len(o.AllowBindFrom) > 0 || o.Log.File != "") {
				t.Errorf("options beside a scheduler %+v", o)
			}
		})
	}
}

// TestPluginUnderstandsItsFlags: those of Divvy, then those of kube-scheduler.
func TestPluginUnderstandsItsFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "divvy-system")
	t.Setenv("POD_NAME", "divvy-scheduler-x")
	all := dedicated(t, "--set-json", `scheduler={"mode":"dedicated","form":"plugin","minor":"1.36"}`)
	c := container(t, one[*appsv1.Deployment](t, all, "divvy-scheduler").Spec.Template.Spec, "scheduler")
	o := scheduler.DefaultOptions()
	fs := pflag.NewFlagSet("scheduler", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse(c.Args); err != nil {
		t.Fatalf("%v: %v", c.Args, err)
	}
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
	mounted := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == path.Dir(o.Config) })
	if !mounted || !o.Election.Enabled || o.TLS.MutatingConfig != "divvy-scheduler" {
		t.Errorf("options %+v, mounts %+v", o, c.VolumeMounts)
	}
	if want := []string{"--authentication-skip-lookup=true"}; !slices.Equal(fs.Args(), want) {
		t.Errorf("flags of kube-scheduler %q, want %q", fs.Args(), want)
	}
}

// TestModesShareNothingButTheService: who changes the mode gets one extender that
// is reached under the same name, and none of the other mode's parts.
func TestModesShareNothingButTheService(t *testing.T) {
	names := func(all []runtime.Object) map[string]bool {
		out := map[string]bool{}
		for _, o := range all {
			out[o.GetObjectKind().GroupVersionKind().Kind+" "+nameOf(t, o)] = true
		}
		return out
	}
	own := dedicated(t)
	usual, other := names(installed(t, rendered(t))), names(own)
	for _, name := range []string{"Deployment divvy-extender", "DaemonSet divvy-schedconf", "ServiceAccount divvy-extender",
		"ConfigMap divvy-extender-ca"} {
		if !usual[name] || other[name] {
			t.Errorf("%s: %t with mode extender, %t with mode dedicated", name, usual[name], other[name])
		}
	}
	for _, name := range []string{"Deployment divvy-scheduler", "ConfigMap divvy-scheduler", "MutatingWebhookConfiguration divvy-scheduler",
		"PodDisruptionBudget divvy-scheduler"} {
		if usual[name] || !other[name] {
			t.Errorf("%s: %t with mode extender, %t with mode dedicated", name, usual[name], other[name])
		}
	}
	pods := one[*appsv1.Deployment](t, own, "divvy-scheduler").Spec.Template
	service := one[*corev1.Service](t, own, "divvy-extender")
	for key, value := range service.Spec.Selector {
		if pods.Labels[key] != value {
			t.Errorf("the Service asks for %s=%s of pods labelled %v", key, value, pods.Labels)
		}
	}
	webhook := one[*admissionv1.MutatingWebhookConfiguration](t, own, "divvy-scheduler").Webhooks[0]
	if s := webhook.ClientConfig.Service; s.Name != service.Name || *s.Port != 32765 || webhook.ClientConfig.CABundle != nil ||
		webhook.NamespaceSelector != nil {
		t.Errorf("webhook %+v", webhook.ClientConfig)
	}
	for _, volume := range pods.Spec.Volumes {
		if volume.HostPath != nil {
			t.Errorf("volume %s is of the host", volume.Name)
		}
	}
	var roles []string
	for _, o := range own {
		switch o := o.(type) {
		case *rbacv1.ClusterRoleBinding:
			if o.Subjects[0].Name == "divvy-scheduler" {
				roles = append(roles, o.RoleRef.Name)
			}
		case *rbacv1.RoleBinding:
			if o.Subjects[0].Name == "divvy-scheduler" {
				roles = append(roles, o.Namespace+"/"+o.RoleRef.Name)
			}
		}
	}
	slices.Sort(roles)
	want := []string{"divvy-extender", "divvy-system/divvy-extender", "divvy-system/divvy-scheduler", "system:kube-scheduler",
		"system:volume-scheduler"}
	if diff := cmp.Diff(want, roles); diff != "" {
		t.Errorf("roles of the scheduler's account (-want +got):\n%s", diff)
	}
}

// TestSchedulerIsTheClustersVersion, whatever a provider adds to it.
func TestSchedulerIsTheClustersVersion(t *testing.T) {
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	for version, want := range map[string]struct{ image, live, ready string }{
		"v1.30.4-gke.1348000": {"registry.k8s.io/kube-scheduler:v1.30.4", "/healthz", "/healthz"},
		"v1.33.1-eks-7f6f3c1": {"registry.k8s.io/kube-scheduler:v1.33.1", "/livez", "/readyz"},
		"v1.34.0+k3s1":        {"registry.k8s.io/kube-scheduler:v1.34.0", "/livez", "/readyz"},
	} {
		text, err := output(t.Context(), program, "template", "divvy", chartDir, "--namespace", "divvy-system", "--kube-version", version,
			"--set", "scheduler.mode=dedicated")
		if err != nil {
			t.Fatal(err)
		}
		c := container(t, one[*appsv1.Deployment](t, objects(t, text), "divvy-scheduler").Spec.Template.Spec, "kube-scheduler")
		if c.Image != want.image || c.LivenessProbe.HTTPGet.Path != want.live || c.ReadinessProbe.HTTPGet.Path != want.ready {
			t.Errorf("%s: image %s, probes %s and %s", version, c.Image, c.LivenessProbe.HTTPGet.Path, c.ReadinessProbe.HTTPGet.Path)
		}
	}
	c := container(t, one[*appsv1.Deployment](t,
		dedicated(t, "--set", "scheduler.form=extender,scheduler.image.registry=example.com/mirror,scheduler.image.tag=v1.31.0"),
		"divvy-scheduler").Spec.Template.Spec, "kube-scheduler")
	if c.Image != "example.com/mirror/kube-scheduler:v1.31.0" {
		t.Errorf("image %s", c.Image)
	}
}

// TestFormOfTheScheduler: which program the pods run, by the cluster's version.
func TestFormOfTheScheduler(t *testing.T) {
	program, err := helm()
	if err != nil {
		t.Fatal(err)
	}
	const own, other = "ghcr.io/divvy-gpu/divvy-scheduler-", "registry.k8s.io/kube-scheduler:"
	for name, tt := range map[string]struct{ version, set, image, fails string }{
		"the default":                 {version: "v1.36.2", image: own + "1.36:"},
		"the default, before them":    {version: "v1.34.9", image: other + "v1.34.9"},
		"extender":                    {version: "v1.36.2", set: "form=extender", image: other + "v1.36.2"},
		"auto, the oldest":            {version: "v1.35.4-gke.1348000", set: "form=auto", image: own + "1.35:"},
		"auto, the newest":            {version: "v1.37.1+k3s1", set: "form=auto", image: own + "1.37:"},
		"auto, one after the newest":  {version: "v1.38.0", set: "form=auto", image: own + "1.37:"},
		"auto, two after the newest":  {version: "v1.39.0", set: "form=auto", image: other + "v1.39.0"},
		"auto, one before the oldest": {version: "v1.34.9", set: "form=auto", image: other + "v1.34.9"},
		"auto, another minor":         {version: "v1.37.1", set: "form=auto,scheduler.minor=1.36", image: own + "1.36:"},
		"plugin":                      {version: "v1.36.2", set: "form=plugin", image: own + "1.36:"},
		"plugin, of no version": {version: "v1.34.2", set: "form=plugin",
			fails: "there is no divvy-scheduler for Kubernetes v1.34.2"},
		"plugin, of no version, but named": {version: "v1.34.2", set: "form=plugin,scheduler.minor=1.35", image: own + "1.35:"},
		"a mirror": {version: "v1.36.2", set: "form=plugin,scheduler.pluginImage.repository=mirror/s,scheduler.pluginImage.tag=v9",
			image: "ghcr.io/divvy-gpu/mirror/s-1.36:v9"},
		"a minor that is not built": {version: "v1.36.2", set: "form=plugin,scheduler.minor=1.34", fails: "/scheduler/minor"},
	} {
		t.Run(name, func(t *testing.T) {
			args := []string{"template", "divvy", chartDir, "--namespace", "divvy-system", "--kube-version", tt.version,
				"--set", "scheduler.mode=dedicated"}
			if tt.set != "" {
				args = append(args, "--set-string", "scheduler."+tt.set)
			}
			text, err := output(t.Context(), program, args...)
			if tt.fails != "" {
				if err == nil || !strings.Contains(err.Error(), tt.fails) {
					t.Fatalf("%v, want an error with %q", err, tt.fails)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			all := objects(t, text)
			spec := one[*appsv1.Deployment](t, all, "divvy-scheduler").Spec.Template.Spec
			config := one[*corev1.ConfigMap](t, all, "divvy-scheduler").Data["config.yaml"]
			if inside := strings.HasPrefix(tt.image, other); inside != strings.Contains(config, "extenders:") {
				t.Errorf("%s runs with the configuration\n%s", tt.image, config)
			}
			if last := spec.Containers[len(spec.Containers)-1]; !strings.HasPrefix(last.Image, tt.image) {
				t.Errorf("image %s, want %s", last.Image, tt.image)
			}
		})
	}
}

// TestPluginsProfile: the values' profile is kept, and the plugin is where it must be.
func TestPluginsProfile(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := schedulerv1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	all := dedicated(t, "--set", "scheduler.form=plugin,scheduler.minor=1.36,extender.policy=fragmentation,"+
		"scheduler.profile.percentageOfNodesToScore=50,scheduler.profile.plugins.multiPoint.enabled[0].name=Other,"+
		"scheduler.profile.plugins.score.disabled[0].name=ImageLocality")
	strict := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	object, _, err := strict.Decode([]byte(one[*corev1.ConfigMap](t, all, "divvy-scheduler").Data["config.yaml"]), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	config, ok := object.(*schedulerv1.KubeSchedulerConfiguration)
	if !ok || len(config.Profiles) != 1 {
		t.Fatalf("it is %+v", object)
	}
	if l := config.LeaderElection.LeaderElect; l == nil || *l {
		t.Error("kube-scheduler elects a leader beside the program's own election")
	}
	weight := int32(200)
	want := schedulerv1.Plugins{
		MultiPoint: schedulerv1.PluginSet{Enabled: []schedulerv1.Plugin{{Name: "Divvy", Weight: &weight}, {Name: "Other"}}},
		PostFilter: schedulerv1.PluginSet{
			Enabled:  []schedulerv1.Plugin{{Name: "Divvy"}, {Name: "DynamicResources"}, {Name: "DefaultPreemption"}},
			Disabled: []schedulerv1.Plugin{{Name: "*"}}},
		Bind: schedulerv1.PluginSet{Enabled: []schedulerv1.Plugin{{Name: "Divvy"}, {Name: "DefaultBinder"}},
			Disabled: []schedulerv1.Plugin{{Name: "*"}}},
		Score: schedulerv1.PluginSet{Disabled: []schedulerv1.Plugin{{Name: "ImageLocality"}}},
	}
	if diff := cmp.Diff(&want, config.Profiles[0].Plugins); diff != "" || *config.Profiles[0].PercentageOfNodesToScore != 50 {
		t.Errorf("profile (-want +got):\n%s", diff)
	}
}
