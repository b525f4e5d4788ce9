package v1alpha1

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var vendors = []string{"enflame", "iluvatar", "nvidia"}

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
- name: nvidia.com/gpu
  vendor: nvidia
  mode: timeSlicing
  devices:
    models: ["NVIDIA A100*"]
    ids: [GPU-1]
    indexes: [0, 1]
    except: {indexes: [7]}
  splitBoards: true
  replicas: 4
  replicasFor: [{devices: {indexes: [0]}, replicas: 8}]
  failRequestsGreaterThanOne: true
  allocation: packed
labels: divvy
gpuOperator: true
allocationPath: dra
usage: {enabled: true, interval: 1m, metrics: container, overuse: {withhold: true, contextAllowanceMiB: {nvidia: 512, enflame: 0}}}
vendors:
  nvidia:
    driverRoot: /run/nvidia/driver
    devRoot: /
    injection: [volumeMounts, cdi]
    deviceIDs: index
    cdiKind: nvidia.com/gpu
    cdiHookPath: /opt/nvidia-cdi-hook
    cdiDisableHooks: [enable-cuda-compat]
    cdiFeatureFlags: [disable-ipc-discoverer]
    health:
      ignore: [default, xid-48]
      heed: [xid-94]
      recoverAfter: 0s
      neverRecover: ["ecc-*"]
`), "node.yaml", vendors)
	if err != nil {
		t.Fatal(err)
	}
	want := NodeConfig{
		APIVersion: APIVersion, Kind: Kind, DriverRoot: "/host", KubeletDir: "/k", StateDir: "/s", CDIDir: "/c",
		LogFile: "/l", LogLevel: "debug", Listen: "127.0.0.1:1", GrantKeyFile: "/g", Injection: InjectCDI,
		Usage: Usage{Enabled: true, Interval: Duration(time.Minute), Metrics: UsageMetricsContainer,
			Overuse: Overuse{Withhold: true, ContextAllowanceMiB: map[string]int{"nvidia": 512, "enflame": 0}}},
		HealthInterval: Duration(90 * time.Second), Libraries: map[string]string{"enflame": "/opt/libefml.so"},
		Resources: []Resource{{Name: "example.com/mem", Vendor: "enflame", Mode: ModeMemory,
			MemoryUnit: "0.01", CountResource: "example.com/count"}, {
			Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: ModeTimeSlicing, SplitBoards: true,
			Devices: &DeviceSelector{Models: []string{"NVIDIA A100*"}, IDs: []string{"GPU-1"}, Indexes: []int{0, 1},
				Except: &DeviceSelector{Indexes: []int{7}}},
			Replicas: 4, ReplicasFor: []ReplicaRule{{Devices: DeviceSelector{Indexes: []int{0}}, Replicas: 8}},
			FailRequestsGreaterThanOne: true, Allocation: PackedAllocation,
		}},
		Labels: LabelDivvy, GPUOperator: true, AllocationPath: PathDRA,
		Vendors: map[string]Vendor{"nvidia": {
			DriverRoot: "/run/nvidia/driver", DevRoot: "/", Injection: []Injection{InjectVolumeMounts, InjectCDI},
			DeviceIDs: "index", CDIKind: "nvidia.com/gpu",
			CDIHookPath: "/opt/nvidia-cdi-hook", CDIDisableHooks: []string{"enable-cuda-compat"},
			CDIFeatureFlags: []string{"disable-ipc-discoverer"},
			Health: Health{Ignore: []string{"default", "xid-48"}, Heed: []string{"xid-94"}, RecoverAfter: new(Duration(0)),
				NeverRecover: []string{"ecc-*"}},
		}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	text, err := Encode(got)
	if err != nil {
		t.Fatal(err)
	}
	again, err := Parse(text, "encoded", vendors)
	if err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	if diff := cmp.Diff(got, again); diff != "" {
		t.Errorf("what Encode wrote reads as something else (-want +got):\n%s\n%s", diff, text)
	}
}

func TestEncodeWritesWhatDiffersFromTheDefaults(t *testing.T) {
	c := Default()
	c.LogLevel = "debug"
	c.Vendors = map[string]Vendor{"nvidia": {Health: Health{Ignore: []string{}}}}
	got, err := Encode(c)
	if err != nil {
		t.Fatal(err)
	}
	want := head + `logLevel: debug
vendors:
    nvidia:
        health:
            ignore: []
resources:
    - name: enflame.com/gcu-memory
      vendor: enflame
      mode: memory
      memoryUnit: "1"
      countResource: enflame.com/gcu-count
`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseReportsAllMistakesAtOnce(t *testing.T) {
	tests := map[string]struct {
		text string
		want []string
	}{
		"unknown keys, wrong types and wrong values together": {
			text: head + "colour: blue\nhealthInterval: often\ninjection: magic\nresources:\n- name: gcu\n  vendor: acme\n  memoryUnit: " +
				"\"2\"\n  size: 1\n",
			want: []string{
				`line 3: unknown key "colour"`,
				`line 4: "often" is not a duration`,
				`line 10: unknown key "size"`,
				`injection: "magic" is not known; use one of environment, deviceNodes, cdi, cdiAnnotations`,
				`resources[0].name: "gcu" is not the name of an extended resource`,
				`resources[0].vendor: "acme" is not known; use one of enflame, iluvatar, nvidia`,
				`resources[0].memoryUnit: "2" is not known; use one of 1, 0.1, 0.01, 0.001, 1/6`,
			},
		},
		"another version": {text: "apiVersion: v1\nkind: Pod\n", want: []string{`apiVersion: "v1" is not served`,
			`kind: "Pod" is not known`}},
		"not YAML":        {text: "a: [", want: []string{"line 1: did not find expected node content"}},
		"two documents":   {text: head + "---\n" + head, want: []string{"more than one YAML document"}},
		"a list":          {text: "- a\n", want: []string{"line 1: cannot unmarshal", "apiVersion:"}},
		"a relative path": {text: head + "stateDir: here\n", want: []string{`stateDir: "here" is not an absolute path`}},
		"no port":         {text: head + "listen: localhost\n", want: []string{`listen: "localhost" is not host:port`}},
		"port zero":       {text: head + "listen: \":0\"\n", want: []string{`listen: "0" is not a port`}},
		"a tiny interval of usage": {text: head + "usage: {enabled: true, interval: 1s}\n",
			want: []string{"usage.interval: 1s is out of range; use 5s to 10m0s"}},
		"a long interval of usage": {text: head + "usage: {interval: 11m}\n", want: []string{"usage.interval: 11m0s is out of range"}},
		"a detail of usage": {text: head + "usage: {metrics: pod}\n",
			want: []string{`usage.metrics: "pod" is not known; use one of none, namespace, container`}},
		"no detail of usage":  {text: head + "usage: {metrics: [pod]}\n", want: []string{"where a text is expected"}},
		"usage without a key": {text: head + "usage: true\n", want: []string{"where keys are expected"}},
		"an allowance of another vendor": {text: head + "usage: {overuse: {contextAllowanceMiB: {acme: 1}}}\n",
			want: []string{`usage.overuse.contextAllowanceMiB: "acme" is not known`}},
		"an allowance that is no number": {text: head + "usage: {overuse: {contextAllowanceMiB: {nvidia: 512Mi}}}\n",
			want: []string{"512Mi"}},
		"a negative allowance": {text: head + "usage: {overuse: {contextAllowanceMiB: {nvidia: -1}}}\n",
			want: []string{"usage.overuse.contextAllowanceMiB.nvidia: -1 is out of range; use 0 to 1048576"}},
		"a key of usage":  {text: head + "usage: {level: pod}\n", want: []string{`unknown key "level"`}},
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

func TestReadFileNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.yaml")
	if _, err := ReadFile(path); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), path) {
		t.Errorf("missing file: %v", err)
	}
	if err := os.WriteFile(path, make([]byte, maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFile(path); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("huge file: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(head + "vendors: {nvidia: {health: {recoverAfter: 1s}}}\nresources: [{name: n.com/g, vendor: nvidia, mode: timeSlicing, " +
		"replicas: 2, devices: {indexes: [1], except: {ids: [a]}}}]")
	f.Add(head)
	f.Add("a: &a [*a]")
	f.Add(head + "resources: [{replicas: 1.5, devices: &d {indexes: [0.5], except: *d}}]")
	f.Add(head + "resources: [{}]")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := Parse([]byte(text), "fuzz", vendors)
		if err == nil && len(c.Resources) == 0 {
			t.Error("accepted a configuration without resources")
		}
		if err != nil {
			return
		}
		encoded, err := Encode(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(encoded, "encoded", vendors)
		if err != nil {
			t.Fatalf("%v in what Encode wrote:\n%s", err, encoded)
		}
		if twice, err := Encode(again); err != nil || !bytes.Equal(twice, encoded) {
			t.Errorf("encoded twice, it differs: %v\n%s\n%s", err, encoded, twice)
		}
	})
}
