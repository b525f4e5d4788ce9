package extender

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/pflag"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/eviction"
)

func TestDefaultsAreValid(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "divvy-system")
	o := DefaultOptions()
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	s := o.Placement.parse(&mistakes{})
	if s.policy != place.Binpack {
		t.Errorf("policy %s", s.policy.Name())
	}
	want := map[accel.Resource]cluster.Labels{"enflame.com/gcu-memory": {{Key: "enflame.com/gcushare", Value: "true"}}}
	if diff := cmp.Diff(want, s.labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
}

// All mistakes are told at once, each with its flag.
func TestValidate(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	t.Setenv("POD_NAME", "")
	err := Options{
		Server: flags.Server{Listen: "32766", MetricsListen: ":metrics", ShutdownDelay: -1, Log: flags.Log{Level: "loud", Format: "xml"}},
		Placement: Placement{
			Policy: "best", Resources: []string{"gcu-memory", "a.example/x", "a.example/x", "a.example/b c"}, NodeLabel: "gcushare",
		},
		ReservationTTL: 1, Election: Election{Enabled: true}, ClaimUnits: []string{"gcu-memory=enflame:1", "a.example/x=acme:1"},
		Eviction: Eviction{Enabled: true, Grace: time.Second, MaxPerHour: 61, Exempt: []string{"kube-system", "Kube/System"}},
	}.Validate()
	if err == nil {
		t.Fatal("options full of mistakes are valid")
	}
	want := []string{
		`--listen: "32766": must be host:port, where the host may be empty`,
		`--metrics-listen: ":metrics": the port must be a number up to 65535`,
		`--shutdown-delay: -1ns: must not be negative`,
		`--log-level: log level "loud": must be one of error, warn, info, debug, trace`,
		`--log-format: log format "xml": must be one of text, json`,
		`--claim-units: reviews are served over TLS; set --tls-listen`,
		`--claim-units: "gcu-memory": must be an extended resource, domain/name`,
		`--claim-units: "a.example/x=acme:1": vendor "acme" is not known; use resource=vendor:size`,
		`--grant-key-file: must name a file`,
		`--resources: "gcu-memory": must be an extended resource, domain/name`,
		`--resources: a.example/x is named twice`,
		`--resources: "a.example/b c": name part must consist of`,
		`--policy: unknown placement policy "best"; use one of binpack, spread, fragmentation`,
		`--node-label: node label "gcushare": must be key=value`,
		`--reservation-ttl: 1ns: must be at least 15s`,
		`--max-bind-delay: 0s: must be from 5s to 24h0m0s`,
		`--leader-elect-name: must not be empty`,
		`--leader-elect-namespace: is required if POD_NAMESPACE is not set`,
		`--leader-elect: POD_NAME must be set to the name of this pod`,
		`--leader-elect-duration: 0s: must be whole seconds, from 1s to 1m0s`,
		`--eviction-grace-period: 1s: must be from 30s to 24h0m0s`,
		`--eviction-max-per-hour: 61: must be from 1 to 60`,
		`--eviction-exempt-namespaces: "Kube/System": a lowercase RFC 1123 label`,
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(want) {
		t.Fatalf("%d mistakes told, want %d:\n%v", len(lines), len(want), err)
	}
	for i := range want {
		if !strings.HasPrefix(lines[i], want[i]) {
			t.Errorf("mistake %d: %s\nwant %s", i, lines[i], want[i])
		}
	}

	// What TLS needs is asked for where there is TLS.
	o := DefaultOptions()
	o.TLS.Listen, o.TLS.Service, o.TLS.Secret, o.TLS.ClientSecret, o.TLS.Overlap = ":9401", "", "", "", -1
	tlsMistakes := o.Validate()
	for _, want := range []string{
		"--tls-listen: :9401 is the address of --metrics-listen",
		"--tls-namespace: is required if POD_NAMESPACE is not set; --tls-listen= disables TLS",
		"--tls-service: must not be empty", "--tls-secret: must not be empty", "--tls-overlap: -1ns: must be from 0 to 8760h0m0s",
	} {
		if tlsMistakes == nil || !slices.Contains(strings.Split(tlsMistakes.Error(), "\n"), want) {
			t.Errorf("%q is not told:\n%v", want, tlsMistakes)
		}
	}
	o = DefaultOptions()
	o.TLS.Namespace, o.TLS.Listen, o.TLS.ClientSecret = "divvy-system", o.Listen, o.TLS.Secret
	if err := o.Validate(); err == nil || err.Error() != "--tls-listen: :32766 is the address of --listen\n"+
		"--tls-client-secret: divvy-extender-certs is the Secret of the CA, whose keys kube-scheduler must not see" {
		t.Errorf("two mistakes of TLS: %v", err)
	}
	o = DefaultOptions()
	o.TLS.Listen = ""
	if err := o.Validate(); err != nil {
		t.Errorf("without TLS and a namespace: %v", err)
	}

	o.MetricsListen = o.Listen
	if err := o.Validate(); err == nil || err.Error() != "--metrics-listen: :32766 is the address of --listen" {
		t.Errorf("the same address twice: %v", err)
	}
	o = DefaultOptions()
	o.TLS.Listen, o.Placement.Resources = "", nil
	if err := o.Validate(); err == nil || err.Error() != "--resources: must name at least one" {
		t.Errorf("no resources: %v", err)
	}
}

// Settings of eviction count only where it is enabled, and the extender's own namespace is
// always exempt.
func TestEvictionOptions(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "divvy-system")
	o := DefaultOptions()
	o.Eviction.Grace = time.Second
	if err := o.Validate(); err != nil || o.Eviction.Enabled {
		t.Errorf("it is off by default, and then %v", err)
	}
	o = DefaultOptions()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse([]string{"--evict-memory-overuse", "--eviction-grace-period=5m", "--eviction-max-per-hour=1",
		"--eviction-exempt-namespaces=a,b"}); err != nil {
		t.Fatal(err)
	}
	want := eviction.Settings{Grace: 5 * time.Minute, MaxPerHour: 1, Exempt: []string{"a", "b", "divvy-system"}}
	if diff := cmp.Diff(want, o.Eviction.settings()); diff != "" || o.Validate() != nil {
		t.Errorf("%v (-want +got):\n%s", o.Validate(), diff)
	}
}

// A flag wins over its environment variable, and that over the default.
func TestEnvironment(t *testing.T) {
	o := DefaultOptions()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse([]string{"--policy=spread"}); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DIVVY_POLICY": "binpack", "DIVVY_LOG_LEVEL": "debug", "DIVVY_RESOURCES": "a.example/x,b.example/y"}
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	if err := flags.FromEnvironment(fs, lookup, nil); err != nil {
		t.Fatal(err)
	}
	want := DefaultOptions()
	want.Placement.Policy, want.Log.Level, want.Placement.Resources = "spread", "debug", []string{"a.example/x", "b.example/y"}
	if diff := cmp.Diff(want, o, cmpopts.IgnoreUnexported(Options{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	env = map[string]string{"DIVVY_RESERVATION_TTL": "long", "DIVVY_LEADER_ELECT": "perhaps"}
	err := flags.FromEnvironment(fs, lookup, nil)
	if err == nil || !strings.Contains(err.Error(), "environment variable DIVVY_LEADER_ELECT") ||
		!strings.Contains(err.Error(), "environment variable DIVVY_RESERVATION_TTL") {
		t.Errorf("error %v, want both variables in it", err)
	}
}

// One extender manages the memory of all vendors, each resource on the labelled
// nodes.
func TestSeveralResources(t *testing.T) {
	o := DefaultOptions()
	o.TLS.Listen = ""
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse([]string{"--resources", "enflame.com/gcu-memory,nvidia.com/gpu-memory", "--resources", "iluvatar.com/gpu-memory",
		"--node-label", "a=b,c=d"}); err != nil {
		t.Fatal(err)
	}
	err := o.Validate()
	s := o.Placement.parse(&mistakes{})
	want := []accel.Resource{"enflame.com/gcu-memory", "nvidia.com/gpu-memory", "iluvatar.com/gpu-memory"}
	if err != nil || !slices.Equal(s.resources, want) {
		t.Fatalf("resources %v, %v; want %v", s.resources, err, want)
	}
	for _, r := range want {
		if got := s.labels[r].String(); got != "a=b or c=d" {
			t.Errorf("%s needs the label %q", r, got)
		}
	}
}
