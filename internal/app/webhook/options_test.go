package webhook

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/pool/admission"
)

func TestDefaultsAreValid(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "bwki")
	t.Setenv("POD_NAME", "webhook-1")
	o := DefaultOptions()
	settings, err := o.admission()
	if err := errors.Join(err, o.Validate()); err != nil {
		t.Fatal(err)
	}
	want := admission.Settings{
		ClientImage:       "docker.io/bitfusiondeviceplugin/bitfusion-client:0.4",
		IgnoredNamespaces: []string{"kube-system", "kube-public", "bwki"},
	}
	if diff := cmp.Diff(want, settings); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	names := []string{"bwki-webhook-svc.bwki.svc", "bwki-webhook-svc.bwki", "bwki-webhook-svc"}
	if diff := cmp.Diff(names, o.dnsNames()); diff != "" {
		t.Errorf("the certificate's names (-want +got):\n%s", diff)
	}
	if selector, err := parseSelector(o.NamespaceSelector); err != nil || selector.String() != "divvy.dev/pool=allowed" {
		t.Errorf("selector %s, %v", selector, err)
	}
}

// All mistakes are told at once, each with its flag.
func TestValidate(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	err := Options{
		Server:  flags.Server{Listen: "8443", MetricsListen: ":metrics", ShutdownDelay: -1, Log: flags.Log{Level: "loud", Format: "xml"}},
		Service: "1svc", Secret: "", MutatingConfig: "A", ValidatingConfig: "b_c",
		SourceNamespace: "kube.system", IgnoredNamespaces: []string{"ok", "Not"}, TotalGPUMemory: "16Gi", ClientImage: "a b",
		ClientPullPolicy: "Sometimes", NamespaceSelector: "",
	}.Validate()
	if err == nil {
		t.Fatal("options full of mistakes are valid")
	}
	want := []string{
		`--listen: "8443": must be host:port, where the host may be empty`,
		`--metrics-listen: ":metrics": the port must be a number up to 65535`,
		`--shutdown-delay: -1ns: must not be negative`,
		`--log-level: log level "loud": must be one of error, warn, info, debug, trace`,
		`--log-format: log format "xml": must be one of text, json`,
		`--namespace: is required if POD_NAMESPACE is not set`,
		`--service: "1svc": a DNS-1035 label must`,
		`--secret: must not be empty`,
		`--mutating-config: "A": a lowercase RFC 1123 subdomain must`,
		`--validating-config: "b_c": a lowercase RFC 1123 subdomain must`,
		`--source-namespace: "kube.system": must not contain dots`,
		`--ignored-namespaces: "Not": a lowercase RFC 1123 label must`,
		`--total-gpu-memory: "16Gi": must be a whole number of MB`,
		`--client-image: "a b": must not contain blanks`,
		`--client-pull-policy: "Sometimes": must be Always, IfNotPresent, Never or empty`,
		`--namespace-selector: must not be empty; {} selects all namespaces`,
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
	o := DefaultOptions()
	o.Namespace, o.MetricsListen = "bwki", o.Listen
	if err := o.Validate(); err == nil || err.Error() != "--metrics-listen: :8443 is the address of --listen" {
		t.Errorf("the same address twice: %v", err)
	}
}

// Defects W14 and P8: the memory of one GPU was read at each pod; an empty text
// or a mistake stopped the handler, and 16000M was taken for 16000 TB.
func TestTotalGPUMemory(t *testing.T) {
	tests := map[string]struct {
		want int64
		err  string
	}{
		"":          {0, ""},
		"0":         {0, ""},
		"16000":     {16000, ""},
		"\t16000\n": {16000, ""},
		"16000M": {0,
			`"16000M": must be a whole number of MB (10^6 bytes) of one GPU, without a unit, such as 16000; if 16000M bytes are meant, ` +
				`write 16000`},
		"16Gi":                 {0, "if 16Gi bytes are meant, write 17179"},
		"16G":                  {0, "write 16000"},
		"1e3":                  {0, "without a unit, such as 16000"},
		"16000.5":              {0, "must be a whole number"},
		"-1":                   {0, "from 0 to 10000000"},
		"17179869184":          {0, "from 0 to 10000000"},
		"99999999999999999999": {0, "must be a whole number"},
		"much":                 {0, `"much": must be a whole number`},
	}
	for text, tt := range tests {
		got, err := parseTotal(text)
		if got != tt.want || (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%q: %d, %v; want %d, %q", text, got, err, tt.want, tt.err)
		}
	}
}

func TestNamespaceSelector(t *testing.T) {
	allowed, other := labels.Set{"divvy.dev/pool": "allowed"}, labels.Set{"team": "a"}
	tests := map[string]struct {
		allowed, other bool
		err            string
	}{
		"divvy.dev/pool=allowed": {true, false, ""},
		"team in (a,b)":          {false, true, ""},
		"{}":                     {true, true, ""},
		`{"matchLabels":{"divvy.dev/pool":"allowed"}}`:                    {true, false, ""},
		`{"matchExpressions":[{"key":"team","operator":"DoesNotExist"}]}`: {true, false, ""},
		"":                                      {err: "{} selects all namespaces"},
		"divvy.dev/pool=allowed=x":              {err: "must be labels such as divvy.dev/pool=allowed"},
		`{"matchLabel":{"a":"b"}}`:              {err: `unknown field "matchLabel"`},
		`{"matchExpressions":[{"key":"team"}]}`: {err: "must be a label selector"},
		`{} {}`:                                 {err: "text after it"},
		`{`:                                     {err: "must be a label selector"},
	}
	for text, tt := range tests {
		s, err := parseSelector(text)
		if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %v, want %q", text, err, tt.err)
			continue
		}
		if err == nil && (s.Matches(allowed) != tt.allowed || s.Matches(other) != tt.other) {
			t.Errorf("%s selects %t %t, want %t %t", text, s.Matches(allowed), s.Matches(other), tt.allowed, tt.other)
		}
	}
}

// A flag wins over its variable, that over the original's, and that over the
// default.
func TestEnvironment(t *testing.T) {
	o := DefaultOptions()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	o.AddFlags(fs)
	if err := fs.Parse([]string{"--client-pull-policy=Always"}); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{
		"DIVVY_CLIENT_PULL_POLICY": "Never", "DIVVY_CLIENT_IMAGE": "a/b:1", "TOTAL_GPU_MEMORY": "16000",
		"DIVVY_IGNORED_NAMESPACES": "kube-system,other", "DIVVY_NAMESPACE": "pool", "DIVVY_LOG_LEVEL": "debug",
		"DIVVY_NAMESPACE_SELECTOR": `{"matchLabels":{"a":"b"}}`,
	}
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	if err := flags.FromEnvironment(fs, lookup, theirVariables); err != nil {
		t.Fatal(err)
	}
	settings, err := o.admission()
	if err := errors.Join(err, o.Validate()); err != nil {
		t.Fatal(err)
	}
	want := admission.Settings{
		TotalMemoryMB: 16000, ClientImage: "a/b:1", ClientPullPolicy: corev1.PullAlways,
		IgnoredNamespaces: []string{"kube-system", "other", "pool"},
	}
	if diff := cmp.Diff(want, settings); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if selector, err := parseSelector(o.NamespaceSelector); err != nil || selector.String() != "a=b" || o.Log.Level != "debug" {
		t.Errorf("selector %s, %v, log level %s", selector, err, o.Log.Level)
	}

	env = map[string]string{"DIVVY_SHUTDOWN_DELAY": "long"}
	if err := flags.FromEnvironment(fs, lookup, theirVariables); err == nil ||
		!strings.Contains(err.Error(), "environment variable DIVVY_SHUTDOWN_DELAY") {
		t.Errorf("error %v", err)
	}
}
