package program

import (
	"bytes"
	"os"
	"strings"
	"testing"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/events"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/component-base/version"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler"
	frameworkruntime "k8s.io/kubernetes/pkg/scheduler/framework/runtime"
	"k8s.io/kubernetes/pkg/scheduler/profile"

	divvy "github.com/divvy-gpu/divvy/internal/app/scheduler"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
	"github.com/divvy-gpu/divvy/internal/scheduler/plugin"
	"github.com/divvy-gpu/divvy/internal/testing/decisiontest"
)

const header = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"

func TestAConfigurationThatCannotWorkIsRefused(t *testing.T) {
	good := "  plugins:\n    multiPoint: {enabled: [{name: Divvy}]}\n" +
		"    postFilter: {disabled: [{name: \"*\"}], enabled: [{name: Divvy}, {name: DefaultPreemption}]}\n" +
		"    bind: {disabled: [{name: \"*\"}], enabled: [{name: Divvy}, {name: DefaultBinder}]}\n"
	for name, tc := range map[string]struct {
		text string
		want []string // nothing: it is accepted
	}{
		"the example":  {text: divvy.Example},
		"two profiles": {text: header + "profiles:\n- schedulerName: one\n" + good + "- schedulerName: two\n" + good},
		"no plugin": {text: header + "profiles:\n- schedulerName: one\n",
			want: []string{"profile one", "does not enable the plugin Divvy", "multiPoint: {enabled: [{name: Divvy}]}"}},
		"one profile of two without it": {text: header + "profiles:\n- schedulerName: one\n" + good + "- schedulerName: two\n",
			want: []string{"profile two", "does not enable the plugin Divvy"}},
		"multiPoint alone": {text: header + "profiles:\n- schedulerName: one\n  plugins:\n    multiPoint: {enabled: [{name: Divvy}]}\n",
			want: []string{"DefaultPreemption comes before Divvy in postFilter", "DefaultBinder comes before Divvy in bind"}},
		"without reserve": {text: header + "profiles:\n- schedulerName: one\n" + good + "    reserve: {disabled: [{name: Divvy}]}\n",
			want: []string{"missing in reserve"}},
		"an extender": {text: divvy.Example + "extenders:\n- urlPrefix: http://localhost:1\n  filterVerb: filter\n" +
			"  managedResources: [{name: enflame.com/gcu-memory}]\n", want: []string{"http://localhost:1", "remove it from extenders"}},
		"an extender for all": {text: divvy.Example + "extenders:\n- urlPrefix: http://localhost:2\n  filterVerb: filter\n",
			want: []string{"http://localhost:2", "is called for all pods"}},
		"an extender for others": {text: divvy.Example + "extenders:\n- urlPrefix: http://localhost:3\n  filterVerb: filter\n" +
			"  managedResources: [{name: example.com/other}]\n"},
		"schedconf's, of kube-scheduler's flags":                 {text: wired(t, "plain")},
		"schedconf's, of two profiles and an extender of others": {text: wired(t, "existing")},
		"arguments": {text: divvy.Example + "  pluginConfig: [{name: Divvy, args: {speed: high}}]\n", want: []string{"there are none"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := try(t, tc.text)
			if err == nil {
				if len(tc.want) > 0 {
					t.Fatalf("it was accepted; want %q", tc.want)
				}
				return
			}
			if len(tc.want) == 0 {
				t.Fatal(err)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v\nlacks %q", err, want)
				}
			}
		})
	}
}

// wired is a configuration that "divvy-control schedconf" wrote for divvy-scheduler in the place of
// kube-scheduler.
func wired(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile("../../../internal/install/schedconf/testdata/replaced/" + name + ".config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// The gate adds what factories see before anything else of it exists: see plugin.Core.Factory.
func TestAsynchronousAPICallsAreRefused(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.SchedulerAsyncAPICalls, true)
	if err := try(t, divvy.Example); err == nil || !strings.Contains(err.Error(), "--feature-gates=SchedulerAsyncAPICalls=false") {
		t.Errorf("with the gate on: %v", err)
	}
}

// try makes a scheduler of a configuration and checks it.
func try(t *testing.T, text string) error {
	t.Helper()
	l := ledger.New(ledger.Options{})
	known := decisiontest.NewCluster()
	decider, err := decision.New(decision.Config{Ledger: l, Cluster: known, Binder: known, Signer: decisiontest.NewKeys(t).Signer,
		Ready: func() error { return nil }, Resources: []accel.Resource{memory}})
	if err != nil {
		t.Fatal(err)
	}
	core, err := plugin.New(plugin.Config{Inside: decision.NewInside(decider, l), Activator: plugin.NewActivator(),
		Policy: place.Binpack, Resources: []accel.Resource{memory}})
	if err != nil {
		t.Fatal(err)
	}
	client := fake.NewClientset()
	c := profiles(t, text)
	s, err := scheduler.New(t.Context(), client, informers.NewSharedInformerFactory(client, 0), nil,
		profile.NewRecorderFactory(events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})),
		scheduler.WithProfiles(c.Profiles...), scheduler.WithExtenders(c.Extenders...),
		scheduler.WithFrameworkOutOfTreeRegistry(frameworkruntime.Registry{plugin.Name: core.Factory}))
	if err != nil {
		return err
	}
	return check(s, c.Extenders, func(resource string) bool { return resource == string(memory) })
}

// The libraries of Kubernetes put flags of their own beside the program's.
func TestTheCommandReadsItsFlags(t *testing.T) {
	c := Command()
	c.SetArgs([]string{"--tls-listen=", "--kubeconfig=/none"})
	if err := c.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "--scheduler-config") {
		t.Errorf("%v", err)
	}
}

func TestTheVersionNamesKubernetes(t *testing.T) {
	var out bytes.Buffer
	c := Command()
	c.SetOut(&out)
	c.SetArgs([]string{"--version"})
	err := c.ExecuteContext(t.Context())
	if want := "serves kube-scheduler " + version.Get().GitVersion; err != nil || !strings.Contains(out.String(), want) {
		t.Errorf("%v: %s, want %q", err, out.String(), want)
	}
}

func TestFlagsAfterTheDashes(t *testing.T) {
	for _, tc := range []struct{ argument, want string }{
		{"--secure-port=0", ""},
		{"--leader-elect", "--leader-elect must be a flag before --"},
		{"--config=/x", "--config must be a flag before --"},
		{"--nonsense", "unknown flag"},
		{"word", "only flags of kube-scheduler may follow"},
		{"--feature-gates=Nonsense=on", "flags after --"}, // the last one: gates are the process's
	} {
		_, err := parse("/etc/config", []string{tc.argument})
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %v, want %q", tc.argument, err, tc.want)
		}
	}
}
