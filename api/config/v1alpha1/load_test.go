package v1alpha1

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var vendors = []string{"enflame"}

const head = "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\n"

func TestParseCompletesWithDefaults(t *testing.T) {
	got, err := Parse([]byte(head), "node.yaml", vendors)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Default(), got); diff != "" {
		t.Errorf("an empty file differs from the defaults (-want +got):\n%s", diff)
	}
}

func TestParseReadsEveryKey(t *testing.T) {
	got, err := Parse([]byte(head+`
driverRoot: /host
kubeletDir: /k
stateDir: /s
cdiDir: /c
logFile: /l
logLevel: debug
listen: 127.0.0.1:1
grantKeyFile: /g
injection: cdi
healthInterval: 1m30s
libraries: {enflame: /opt/libefml.so}
resources:
- name: example.com/mem
  vendor: enflame
  mode: memory
  memoryUnit: "0.01"
  countResource: example.com/count
`), "node.yaml", vendors)
	if err != nil {
		t.Fatal(err)
	}
	want := NodeConfig{
		APIVersion: APIVersion, Kind: Kind, DriverRoot: "/host", KubeletDir: "/k", StateDir: "/s", CDIDir: "/c",
		LogFile: "/l", LogLevel: "debug", Listen: "127.0.0.1:1", GrantKeyFile: "/g", Injection: InjectCDI,
		HealthInterval: Duration(90 * time.Second), Libraries: map[string]string{"enflame": "/opt/libefml.so"},
		Resources: []Resource{{Name: "example.com/mem", Vendor: "enflame", Mode: ModeMemory, MemoryUnit: "0.01", CountResource: "example.com/count"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseReportsAllMistakesAtOnce(t *testing.T) {
	tests := map[string]struct {
		text string
		want []string
	}{
		"unknown keys, wrong types and wrong values together": {
			text: head + "colour: blue\nhealthInterval: often\ninjection: magic\nresources:\n- name: gcu\n  vendor: acme\n  memoryUnit: \"2\"\n  size: 1\n",
			want: []string{
				`line 3: unknown key "colour"`,
				`line 4: "often" is not a duration`,
				`line 10: unknown key "size"`,
				`injection: "magic" is not known; use one of environment, deviceNodes, cdi`,
				`resources[0].name: "gcu" is not the name of an extended resource`,
				`resources[0].vendor: "acme" is not known; use one of enflame`,
				`resources[0].memoryUnit: "2" is not known; use one of 1, 0.1, 0.01, 0.001`,
			},
		},
		"another version": {text: "apiVersion: v1\nkind: Pod\n", want: []string{`apiVersion: "v1" is not served`, `kind: "Pod" is not known`}},
		"not YAML":        {text: "a: [", want: []string{"line 1: did not find expected node content"}},
		"two documents":   {text: head + "---\n" + head, want: []string{"more than one YAML document"}},
		"a list":          {text: "- a\n", want: []string{"line 1: cannot unmarshal", "apiVersion:"}},
		"a relative path": {text: head + "stateDir: here\n", want: []string{`stateDir: "here" is not an absolute path`}},
		"no port":         {text: head + "listen: localhost\n", want: []string{`listen: "localhost" is not host:port`}},
		"port zero":       {text: head + "listen: \":0\"\n", want: []string{`listen: "0" is not a port`}},
		"a tiny interval": {text: head + "healthInterval: 1ns\n", want: []string{"healthInterval: 1ns is out of range"}},
		"no resources":    {text: head + "resources: []\n", want: []string{"resources: the list is empty"}},
		"unknown library": {text: head + "libraries: {acme: /x}\n", want: []string{`libraries: "acme" is not known`}},
		"a kubernetes.io resource": {
			text: head + "resources: [{name: a.kubernetes.io/x, vendor: enflame}]\n",
			want: []string{"in a domain that Kubernetes keeps for itself"},
		},
		"two resources of one name": {
			text: head + "resources: [{name: e.com/x, vendor: enflame}, {name: e.com/x, vendor: enflame}]\n",
			want: []string{`resources[1].name: "e.com/x" is used by resources[0] already`},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(tt.text), "node.yaml", vendors)
			var mistakes *MistakesError
			if !errors.As(err, &mistakes) {
				t.Fatalf("want *MistakesError, got %v", err)
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("missing %q in:\n%v", w, err)
				}
			}
		})
	}
}

func TestLoadNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.yaml")
	if _, err := Load(path, vendors); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("missing file: %v", err)
	}
	if err := os.WriteFile(path, make([]byte, maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(path, vendors); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("huge file: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(head)
	f.Add("a: &a [*a]")
	f.Add(head + "resources: [{}]")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := Parse([]byte(text), "fuzz", vendors)
		if err == nil && len(c.Resources) == 0 {
			t.Error("accepted a configuration without resources")
		}
	})
}
