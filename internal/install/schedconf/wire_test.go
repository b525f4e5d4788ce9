package schedconf

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

// manifest returns a node whose scheduler's container has the fields given, in
// YAML, indented by four.
func manifest(image, fields string) *node {
	return &node{files: map[string][]byte{}, manifest: []byte(`apiVersion: v1
kind: Pod
metadata:
  name: kube-scheduler
spec:
  containers:
  - name: kube-scheduler
    image: ` + image + "\n" + fields + `  hostNetwork: true
`)}
}

const image131 = "registry.k8s.io/kube-scheduler:v1.31.4"

// commandOf returns the words that start the scheduler.
func (n *node) commandOf(t *testing.T) []string {
	t.Helper()
	p, err := readPod("", n.manifest)
	if err != nil {
		t.Fatal(err)
	}
	return p.command.words()
}

// shapes are manifests that differ from kubeadm's, with the command that becomes
// of theirs.
var shapes = map[string]struct {
	node *node
	want []string
}{
	"a command of one word": {
		manifest(image131, "    command: [kube-scheduler]\n"),
		[]string{"kube-scheduler", "--config=" + newFile},
	},
	"flags in args": {
		manifest(image131, "    command:\n    - /usr/local/bin/kube-scheduler\n    args:\n    - --v=2\n"),
		[]string{"/usr/local/bin/kube-scheduler", "--config=" + newFile, "--v=2"},
	},
	"flags for the image's own program": {
		manifest(image131, "    args: [\"--v=2\", --leader-elect]\n"),
		[]string{"--config=" + newFile, "--v=2", "--leader-elect"},
	},
	"neither command nor args": {
		manifest(image131, ""),
		[]string{"--config=" + newFile},
	},
	"a wrapper for logs": {
		manifest(image131, "    command:\n    - /go-runner\n    - --log-file=/var/log/kube-scheduler.log\n    - "+
			"/usr/local/bin/kube-scheduler\n    - --v=2\n    - --\n    - rest\n"),
		[]string{"/go-runner", "--log-file=/var/log/kube-scheduler.log", "/usr/local/bin/kube-scheduler", "--config=" + newFile,
			"--v=2", "--", "rest"},
	},
	"line ends of Windows and a byte order mark": {
		&node{files: map[string][]byte{},
			manifest: []byte("\ufeff" +
				strings.ReplaceAll(string(manifest(image131, "    command:\n    - kube-scheduler\n    - --v=2\n").manifest),
					"\n", "\r\n"))},
		[]string{"kube-scheduler", "--config=" + newFile, "--v=2"},
	},
	"JSON": {
		&node{files: map[string][]byte{},
			manifest: []byte(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"kube-scheduler"},"spec":{"containers":[{"name":"s",` +
				`"image":"` + image131 + `","command":["kube-scheduler","--v=2"]}]}}`)},
		[]string{"kube-scheduler", "--config=" + newFile, "--v=2"},
	},
	"JSON with everything, laid out": {
		&node{files: map[string][]byte{}, manifest: []byte(`{
	"apiVersion": "v1",
	"kind": "Pod",
	"metadata": {
		"annotations": {},
		"name": "kube-scheduler"
	},
	"spec": {
		"containers": [
			{
				"name": "s",
				"image": "` + image131 + `",
				"command": [
					"kube-scheduler",
					"--v=2"
				],
				"volumeMounts": [
					{"name": "k", "mountPath": "/k"}
				]
			}
		],
		"volumes": [{"name": "k", "hostPath": {"path": "/k"}}]
	}
}
`)},
		[]string{"kube-scheduler", "--config=" + newFile, "--v=2"},
	},
	"comments, anchors and fields that are not known": {
		&node{files: map[string][]byte{}, manifest: []byte(`# by hand
kind: Pod
apiVersion: v1
x-defaults: &small {cpu: 100m}   # not Kubernetes'
metadata: # who
  annotations:
    # keep
    example.com/a: "yes"
  name: kube-scheduler
spec:
  containers:
    - name: other
      image: example.com/other:1.2
      resources: {requests: *small}
    # the scheduler
    -   image: ` + image131 + `
        resources: {requests: *small}
        command: [ "kube-scheduler" , "--feature-gates=A=true,B=false" ] # one line
        name: kube-scheduler
        somethingNew: [1, 2]

  volumes: []
`)},
		[]string{"kube-scheduler", "--config=" + newFile, "--feature-gates=A=true,B=false"},
	},
}

const newFile = "/etc/kubernetes/scheduler-extender-config-v1.23+.yaml"

func TestShapesOfManifests(t *testing.T) {
	for name, tt := range shapes {
		t.Run(name, func(t *testing.T) {
			n := tt.node.clone()
			before := n.clone()
			n.wire(t, unsecured)
			if diff := cmp.Diff(tt.want, n.commandOf(t)); diff != "" {
				t.Errorf("command (-want +got):\n%s", diff)
			}
			// Every line that was there is there still, but those that the command or
			// an empty collection was in, and the layout of JSON.
			text := strings.TrimPrefix(string(before.manifest), "\ufeff")
			for line := range strings.Lines(text) {
				if text[0] != '{' && !strings.Contains(string(n.manifest), strings.TrimSpace(line)) && !strings.ContainsAny(line, "[{") &&
					!strings.Contains(line, "kube-scheduler") {
					t.Errorf("line %q is gone:\n%s", line, n.manifest)
				}
			}
			other := n.clone()
			n.unwire(t, before.manifest)
			same(t, before, n)
			other.unwire(t, nil)
			if !sameYAML(t, before.manifest, other.manifest) {
				t.Errorf("without the original it became\n%s", other.manifest)
			}
		})
	}
}

// sameYAML compares two texts by what they hold; empty collections count as
// missing.
func sameYAML(t *testing.T, a, b []byte) bool {
	t.Helper()
	var x, y any
	if err := errors.Join(yaml.Unmarshal(a, &x), yaml.Unmarshal(b, &y)); err != nil {
		t.Fatal(err)
	}
	return cmp.Equal(prune(x), prune(y))
}

func prune(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, e := range v {
			if v[k] = prune(e); v[k] == nil {
				delete(v, k)
			}
		}
		if len(v) == 0 {
			return nil
		}
	case []any:
		if len(v) == 0 {
			return nil
		}
		for i := range v {
			v[i] = prune(v[i])
		}
	}
	return v
}

func TestFlagsOfManyForms(t *testing.T) {
	const file = "/srv/s.yaml"
	config := []byte("apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n")
	mounts := "    volumeMounts: [{name: s, mountPath: /srv}]\n  volumes: [{name: s, hostPath: {path: /srv}}]\n"
	tests := map[string]struct{ command, want string }{
		"with an equals sign": {`[kube-scheduler, "--config=/srv/s.yaml", --v=2]`, "kube-scheduler|--config=NEW|--v=2"},
		"in two words":        {`[kube-scheduler, --config, /srv/s.yaml, -v, "2"]`, "kube-scheduler|--config|NEW|-v|2"},
		"twice": {`[kube-scheduler, --config=/srv/old.yaml, --config=/srv/s.yaml]`,
			"kube-scheduler|--config=/srv/old.yaml|--config=NEW"},
		"a switch in between": {`[kube-scheduler, --leader-elect, --config, /srv/s.yaml]`, "kube-scheduler|--leader-elect|--config|NEW"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := manifest(image131, "    command: "+tt.command+"\n"+mounts)
			n.files[file] = config
			before := n.clone()
			n.wire(t, unsecured)
			// The folder is mounted, but not that of our file.
			want := strings.Split(strings.ReplaceAll(tt.want, "NEW", newFile), "|")
			if diff := cmp.Diff(want, n.commandOf(t)); diff != "" {
				t.Errorf("command (-want +got):\n%s", diff)
			}
			if want := `divvy.dev/scheduler-config-before: '["--config=` + file + `"]'`; !strings.Contains(string(n.manifest), want) {
				t.Errorf("no %s in\n%s", want, n.manifest)
			}
			n.unwire(t, before.manifest)
			same(t, before, n)
		})
	}
}

func TestUnderscoresInFlags(t *testing.T) {
	n := manifest(image131, "    command: [kube-scheduler, --leader_elect=false, --kube_api_qps, \"7\"]\n")
	n.wire(t, unsecured)
	for _, want := range []string{"leaderElect: false", "qps: 7"} {
		if !strings.Contains(string(n.files[newFile]), want) {
			t.Errorf("no %q in\n%s", want, n.files[newFile])
		}
	}
}

// TestCarriedOver names all flags that a configuration puts out of force.
func TestCarriedOver(t *testing.T) {
	tests := map[string]struct {
		flags string
		want  string // without the extenders and the comment
		notes int
	}{
		"none": {"", "leaderElection:\n  leaderElect: true\n", 0},
		"all": {
			"--kubeconfig=/k --kube-api-content-type=application/json --kube-api-qps=1.5 --kube-api-burst=3 --leader-elect=false " +
				"--leader-elect-lease-duration=1m --leader-elect-renew-deadline=50s --leader-elect-retry-period=5s " +
				"--leader-elect-resource-lock=leases --leader-elect-resource-name=n --leader-elect-resource-namespace=ns " +
				"--profiling=false --contention-profiling --secure-port=10259 --feature-gates=X=true --v=4 --authentication-kubeconfig=/a",
			`clientConnection:
  kubeconfig: /k
  contentType: application/json
  qps: 1.5
  burst: 3
leaderElection:
  leaderElect: false
  leaseDuration: 1m
  renewDeadline: 50s
  retryPeriod: 5s
  resourceLock: leases
  resourceName: "n"
  resourceNamespace: ns
enableProfiling: false
enableContentionProfiling: true
`, 1,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := manifest(image131, "    command: [\"kube-scheduler\""+flowList(tt.flags)+"]\n")
			c := n.wire(t, unsecured)
			if len(c.Notes) != tt.notes {
				t.Errorf("notes: %q", c.Notes)
			}
			_, body, _ := strings.Cut(string(c.Files[0].Content), "kind: KubeSchedulerConfiguration\n")
			body, _, _ = strings.Cut(body, "extenders:\n")
			if diff := cmp.Diff(tt.want, body); diff != "" {
				t.Errorf("configuration (-want +got):\n%s", diff)
			}
			if c.Files[0].Mode != 0o644 {
				t.Errorf("mode %o for a file without a key", c.Files[0].Mode)
			}
		})
	}
}

func flowList(flags string) string {
	var b strings.Builder
	for f := range strings.FieldsSeq(flags) {
		fmt.Fprintf(&b, ", %q", f)
	}
	return b.String()
}

func TestMountsThatAreThereAreUsed(t *testing.T) {
	tests := map[string]struct {
		mounts, wantFlag string
		wantVolumes      int
	}{
		"none": {"", newFile, 1},
		"the folder": {
			"    volumeMounts: [{name: e, mountPath: /etc/kubernetes}]\n  volumes: [{name: e, hostPath: {path: /etc/kubernetes, type: " +
				"Directory}}]\n", newFile, 1,
		},
		"the folder elsewhere": {
			"    volumeMounts: [{name: e, mountPath: /conf/}]\n  volumes: [{name: e, hostPath: {path: /etc/kubernetes/}}]\n",
			"/conf/scheduler-extender-config-v1.23+.yaml", 1,
		},
		"a part of the whole node": {
			"    volumeMounts: [{name: e, mountPath: /conf, subPath: etc/kubernetes}]\n  volumes: [{name: e, hostPath: {path: /}}]\n",
			"/conf/scheduler-extender-config-v1.23+.yaml", 1,
		},
		"another folder in the place": {
			"    volumeMounts: [{name: e, mountPath: /etc/kubernetes}]\n  volumes: [{name: e, emptyDir: {}}]\n",
			"/etc/divvy-scheduler/scheduler-extender-config-v1.23+.yaml", 2,
		},
		"the folder, with another one in front of it": {
			"    volumeMounts: [{name: e, mountPath: /etc}, {name: x, mountPath: /etc/kubernetes}]\n  volumes: [{name: e, hostPath: " +
				"{path: /etc}}, {name: x, emptyDir: {}}]\n",
			"/divvy-scheduler/scheduler-extender-config-v1.23+.yaml", 3,
		},
		"a volume of our name": {
			"    volumeMounts: [{name: divvy-scheduler-config, mountPath: /x}]\n  volumes: [{name: divvy-scheduler-config, hostPath: " +
				"{path: /x}}]\n", newFile, 2,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := manifest(image131, "    command: [kube-scheduler]\n"+tt.mounts)
			before := n.clone()
			n.wire(t, unsecured)
			if got := n.commandOf(t)[1]; got != "--config="+tt.wantFlag {
				t.Errorf("flag %s, want --config=%s", got, tt.wantFlag)
			}
			p, err := readPod("", n.manifest)
			if err != nil {
				t.Fatal(err)
			}
			if volumes := p.doc.at("spec", "volumes"); len(volumes.Content) != tt.wantVolumes {
				t.Errorf("%d volumes, want %d", len(volumes.Content), tt.wantVolumes)
			}
			n.unwire(t, nil)
			if !sameYAML(t, before.manifest, n.manifest) {
				t.Errorf("it became\n%s", n.manifest)
			}
		})
	}
}

func TestVersions(t *testing.T) {
	tests := map[string]struct {
		image, version string
		want, err      string
	}{
		"a tag": {image: "registry.k8s.io/kube-scheduler:v1.31.4", want: "1.31"},
		"Amazon": {image: "602401143452.dkr.ecr.us-west-2.amazonaws.com/eks/kube-scheduler:v1.31.4-eks-1-31-8",
			want: "1.31"},
		"VMware":                 {image: "projects.registry.vmware.com/tkg/kube-scheduler:v1.31.5_vmware.1", want: "1.31"},
		"a build's plus":         {image: "rancher/hardened-kubernetes:v1.30.1+rke2r1", want: "1.30"},
		"a port of the registry": {image: "registry.example.com:5000/kube-scheduler:1.30", want: "1.30"},
		"a digest beside the tag": {image: "\"r.example.com:5000/" +
			"kube-scheduler:v1.29.0@sha256:0123456789012345678901234567890123456789012345678901234567890123\"", want: "1.29"},
		"only a digest":                {image: "r.example.com/kube-scheduler@sha256:01", err: "has no version tag"},
		"a port and no tag":            {image: "r.example.com:5000/kube-scheduler", err: "has no version tag"},
		"a tag without a version":      {image: "kube-scheduler:latest", err: `"latest" names none`},
		"no image":                     {image: "\"\"", err: "has no version tag"},
		"given":                        {image: "kube-scheduler:latest", version: "v1.33.1", want: "1.33"},
		"given, and more than the tag": {image: "kube-scheduler:v1.20.0", version: "1.33", want: "1.33"},
		"too old": {image: "kube-scheduler:v1.28.9",
			err: "kube-scheduler v1.28.9 is too old: 1.29 or newer is required"},
		"newer than any that is known":  {image: "kube-scheduler:v1.52.0", want: "1.52"},
		"another major version":         {image: "kube-scheduler:v2.1.0", err: "is not a known version of Kubernetes; known versions are"},
		"a number that is no version":   {image: "kube-scheduler:20240101", err: "names none"},
		"an image that is not a string": {image: "{}", err: "image of the container is not a text"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := manifest(tt.image, "    command: [kube-scheduler]\n")
			n.version = tt.version
			s, err := Inspect(n.input())
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil || s.Version != tt.want {
				t.Errorf("version %q, %v; want %s", s.Version, err, tt.want)
			}
		})
	}
	n := manifest("kube-scheduler:latest", "    command: [kube-scheduler]\n")
	if _, err := Wire(n.input(), unsecured); !errors.Is(err, ErrVersion) {
		t.Errorf("error %v is not ErrVersion", err)
	}
}

func TestAnEntryIsBroughtUpToDate(t *testing.T) {
	for _, v := range []version{oldest, 31, newest} {
		for name, n := range map[string]*node{"plain": kubeadm(t, v), "existing": configured(t, v)} {
			t.Run(v.String()+" "+name, func(t *testing.T) {
				before := n.clone()
				n.wire(t, unsecured)
				first := n.clone()
				n.wire(t, secured)
				direct := before.clone()
				direct.wire(t, secured)
				same(t, direct, n)
				if bytes.Equal(first.manifest, n.manifest) {
					t.Error("the manifest is the same, so that kubelet would not restart the scheduler")
				}
				n.unwire(t, before.manifest)
				same(t, before, n)
			})
		}
	}
}

// TestGCUShareIsReplaced lets the scheduler be one that GCUShare's config manager
// wired, whose file has the name of ours.
func TestGCUShareIsReplaced(t *testing.T) {
	n := kubeadm(t, 31).withConfig(newFile, []byte(`apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  kubeconfig: /etc/kubernetes/scheduler.conf
extenders:
- urlPrefix: "http://127.0.0.1:32766/gcushare-scheduler"
  filterVerb: filter
  bindVerb: bind
  enableHTTPS: false
  nodeCacheCapable: true
  managedResources:
  - name: enflame.com/gcu-memory
    ignoredByScheduler: false
  ignorable: false
`))
	pristine := kubeadm(t, 31)
	s, err := Inspect(n.input())
	if err != nil || !s.Wired {
		t.Fatalf("GCUShare's extender is not known: %+v, %v", s, err)
	}
	want := []string{
		"enableHTTPS is false, but should be true", "httpTimeout is missing",
		"managedResources is enflame.com/gcu-memory, but should be enflame.com/gcu-memory, nvidia.com/gpu-memory",
		"preemptVerb is missing", "prioritizeVerb is missing", "tlsConfig is missing",
		"urlPrefix is http://127.0.0.1:32766/gcushare-scheduler, but should be https://10.96.0.77:32765/gcushare-scheduler",
		"weight is missing",
	}
	if diff := cmp.Diff(want, s.Differences(secured)); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
	same(t, n.clone(), func() *node { n.unwire(t, pristine.manifest); return n }())
	n.wire(t, secured)
	if got := string(n.files[newFile]); strings.Count(got, "urlPrefix") != 1 || !strings.Contains(got, "/v1\n") ||
		!strings.Contains(got, "leaderElect: true") || strings.Contains(got, "32766") {
		t.Errorf("it became\n%s", got)
	}
	n.unwire(t, pristine.manifest)
	if got := n.commandOf(t); strings.Contains(strings.Join(got, " "), "--config") {
		t.Errorf("the command is %q", got)
	}
	if _, there := n.files[newFile]; there {
		t.Error("the file is there still")
	}
}

// TestFormerFiles lets the scheduler be wired under a name of before, and a file of
// GCUShare's config manager be left over.
func TestFormerFiles(t *testing.T) {
	n := configured(t, 31)
	before := n.clone()
	n.wire(t, secured)
	const former = "/etc/kubernetes/scheduler-extender-config.yaml"
	n.manifest = bytes.ReplaceAll(n.manifest, []byte(newFile), []byte(former))
	n.files[former] = n.files[newFile]
	delete(n.files, newFile)
	n.files["/etc/kubernetes/scheduler-extender-config.json"] = []byte(`{"kind": "Policy", "apiVersion": "v1"}`)
	wired := n.clone()
	n.wire(t, secured)
	same(t, wired, n)
	comesBack(t, before, n)
}

func TestWhatOthersEditStays(t *testing.T) {
	edit := func(from, to string) func(*node) {
		return func(n *node) {
			if !bytes.Contains(n.manifest, []byte(from)) {
				panic("nothing to edit: " + from)
			}
			n.manifest = bytes.Replace(n.manifest, []byte(from), []byte(to), 1)
		}
	}
	file := func(name, from, to string) func(*node) {
		return func(n *node) { n.files[name] = bytes.Replace(n.files[name], []byte(from), []byte(to), 1) }
	}
	flagEdit := edit("    - --leader-elect=true\n", "    - --leader-elect=true # hm\n    - --v=5\n")
	tests := map[string]struct {
		node *node
		edit func(*node)
		// wired is expected to be in the configuration after the next Wire, and
		// unwired in the manifest after Unwire.
		wired, unwired string
		kept           bool
	}{
		"a flag and a comment": {kubeadm(t, 31), flagEdit, "", "--leader-elect=true # hm\n    - --v=5\n", false},
		"a label": {configured(t, 31), edit("    tier: control-plane\n", "    tier: control-plane\n    x: \"y\"\n"),
			"", "    x: \"y\"\n", false},
		"a flag that the configuration holds": {
			kubeadm(t, 31), edit("--kube-api-burst=200", "--kube-api-burst=300"), "burst: 300", "--kube-api-burst=300", false,
		},
		"the configuration that ours is a copy of": {
			configured(t, 31), file(existing, "percentageOfNodesToScore: 60", "percentageOfNodesToScore: 70"),
			"percentageOfNodesToScore: 70",
			"--config=" + existing, false,
		},
		"our configuration": {
			configured(t, 31), file(newFile, "percentageOfNodesToScore: 60", "percentageOfNodesToScore: 80"),
			"percentageOfNodesToScore: 80",
			"--config=" + newFile, true,
		},
		"our configuration without one before": {
			kubeadm(t, 31), file(newFile, "enableProfiling: false", "enableProfiling: true"), "enableProfiling: true",
			"--config=" + newFile, true,
		},
		"a comment in our configuration": {kubeadm(t, 31), file(newFile, "extenders:", "# mine\nextenders:"), "# mine", "status: {}",
			false},
		"our configuration is gone": {
			configured(t, 31), func(n *node) { delete(n.files, newFile) }, "percentageOfNodesToScore: 60", "--config=" + existing, false,
		},
		"its original is gone": {
			configured(t, 31), func(n *node) { delete(n.files, existing) }, "percentageOfNodesToScore: 60", "--config=" + newFile, true,
		},
		"another configuration in the place of the one before": {
			configured(t, 31), func(n *node) {
				n.manifest = bytes.Replace(n.manifest, []byte("--config="+newFile), []byte("--config=/etc/kubernetes/scheduler.conf"), 1)
				n.files["/etc/kubernetes/scheduler.conf"] = []byte("kind: KubeSchedulerConfiguration\napiVersion: " +
					"kubescheduler.config.k8s.io/v1\nparallelism: 3\n")
			}, "parallelism: 3", "--config=/etc/kubernetes/scheduler.conf", false,
		},
		"another configuration": {
			kubeadm(t, 31), func(n *node) {
				n.manifest = bytes.Replace(n.manifest, []byte("--config="+newFile), []byte("--config=/etc/kubernetes/scheduler.conf"), 1)
				n.files["/etc/kubernetes/scheduler.conf"] = []byte("kind: KubeSchedulerConfiguration\napiVersion: " +
					"kubescheduler.config.k8s.io/v1\nparallelism: 3\n")
			}, "parallelism: 3", "--config=/etc/kubernetes/scheduler.conf", false,
		},
		"the annotations are gone": {
			kubeadm(t, 31), func(n *node) {
				before, after, _ := bytes.Cut(n.manifest, []byte("  annotations:\n"))
				_, after, _ = bytes.Cut(after, []byte("\n"))
				n.manifest = slices.Concat(before, after)
			}, "", "status: {}", false,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := tt.node
			original := bytes.Clone(n.manifest)
			n.wire(t, secured)
			tt.edit(n)

			again := n.clone()
			again.wire(t, secured)
			if !strings.Contains(string(again.files[newFile]), tt.wired) {
				t.Errorf("no %q in the configuration:\n%s", tt.wired, again.files[newFile])
			}
			if got := strings.Count(string(again.files[newFile]), "gcushare-scheduler"); got != 1 {
				t.Errorf("%d entries of ours", got)
			}

			n.unwire(t, original)
			if !strings.Contains(string(n.manifest), tt.unwired) {
				t.Errorf("no %q in the manifest:\n%s", tt.unwired, n.manifest)
			}
			data, there := n.files[newFile]
			if there != tt.kept || strings.Contains(string(data), "gcushare-scheduler") {
				t.Errorf("our configuration is there: %v, want %v; it is\n%s", there, tt.kept, data)
			}
			if strings.Contains(string(n.manifest), "divvy.dev/") || !tt.kept && strings.Contains(string(n.manifest), volumeName) {
				t.Errorf("something of ours is left:\n%s", n.manifest)
			}
			if tt.kept {
				n.wire(t, secured)
			}
		})
	}
}

func TestInspect(t *testing.T) {
	n := configured(t, 31)
	want := State{
		Version:    "1.31",
		ConfigPath: existing, ConfigFile: existing, APIVersion: "kubescheduler.config.k8s.io/v1",
		Profiles: []string{"default-scheduler", "packed"}, OtherExtenders: []string{"http://127.0.0.1:9998/storage"},
	}
	inspect := func() State {
		t.Helper()
		s, err := Inspect(n.input())
		if err != nil {
			t.Fatal(err)
		}
		s.entry = nil
		return s
	}
	compare := cmp.Comparer(func(a, b State) bool { return fmt.Sprintf("%+v", a) == fmt.Sprintf("%+v", b) })
	if got := inspect(); !cmp.Equal(want, got, compare) {
		t.Errorf("before: %+v, want %+v", got, want)
	}
	n.wire(t, secured)
	got := inspect()
	once := secured
	once.Weight = 1 // which none stands for
	if diff := cmp.Diff(&once, got.Extender); diff != "" {
		t.Errorf("extender (-want +got):\n%s", diff)
	}
	want.Wired, want.Extender = true, got.Extender
	want.ConfigPath, want.ConfigFile = newFile, newFile
	if !cmp.Equal(want, got, compare) {
		t.Errorf("wired: %+v, want %+v", got, want)
	}
	n.files[newFile] = bytes.Replace(n.files[newFile], []byte("bindVerb: bind"), []byte("bindVerb: tie"), 1)
	s, err := Inspect(n.input())
	if err != nil {
		t.Fatal(err)
	}
	if d := s.Differences(secured); !s.Edited || !cmp.Equal(d, []string{"bindVerb is tie, but should be bind"}) {
		t.Errorf("edited %v, differences %q", s.Edited, d)
	}
	other := secured
	other.CA = []byte("x")
	if d := s.Differences(other); len(d) != 2 || d[1] != "tlsConfig.caData differs" {
		t.Errorf("differences %q", d)
	}
	other.CA, other.Weight = secured.CA, 125
	if d := s.Differences(other); len(d) != 2 || d[1] != "weight is 1, but should be 125" {
		t.Errorf("differences %q", d)
	}
	n.wire(t, other)
	if s, err = Inspect(n.input()); err != nil || s.Extender.Weight != 125 || len(s.Differences(other)) != 0 {
		t.Errorf("%v, weight %d, differences %q", err, s.Extender.Weight, s.Differences(other))
	}
	plain, err := Inspect(kubeadm(t, 30).input())
	if err != nil || plain.Wired || plain.ConfigPath != "" {
		t.Errorf("%+v, %v", plain, err)
	}
	if d := plain.Differences(secured); !cmp.Equal(d, []string{"kube-scheduler does not call the extender"}) {
		t.Errorf("differences %q", d)
	}
}

func TestTheOrderOfResourcesDoesNotMatter(t *testing.T) {
	n := kubeadm(t, 31)
	n.wire(t, secured)
	other := secured
	other.Resources = slices.Clone(secured.Resources)
	slices.Reverse(other.Resources)
	if c, err := Wire(n.input(), other); err != nil || len(c.Files) > 0 {
		t.Errorf("%d files, %v", len(c.Files), err)
	}
}

func TestAWiredManifestIsNoOriginal(t *testing.T) {
	n := kubeadm(t, 31)
	before := n.clone()
	n.wire(t, secured)
	n.unwire(t, n.clone().manifest)
	same(t, before, n)
}

func TestANewerScheduler(t *testing.T) {
	n := kubeadm(t, 38)
	c := n.wire(t, secured)
	if notes := strings.Join(c.Notes, " "); !strings.Contains(notes, "kube-scheduler 1.38 is newer than the latest known version") {
		t.Errorf("notes: %s", notes)
	}
}

func TestTheFileBelongsToTheScheduler(t *testing.T) {
	n := manifest(image131, "    command: [kube-scheduler]\n    securityContext: {runAsGroup: 7}\n  securityContext: {runAsUser: 6, "+
		"runAsGroup: 5}\n")
	c, err := Wire(n.input(), secured)
	if err != nil {
		t.Fatal(err)
	}
	if f := c.Files[0]; f.UID != 6 || f.GID != 7 || f.Mode != 0o600 {
		t.Errorf("%d:%d, mode %o", f.UID, f.GID, f.Mode)
	}
}
