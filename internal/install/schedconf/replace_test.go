package schedconf

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// replaced is divvy-scheduler as the chart runs it in the place of kube-scheduler.
var replaced = Extender{Resources: []string{"enflame.com/gcu-memory"}, Weight: 200, Program: &Program{
	Image: "ghcr.io/divvy-gpu/divvy-scheduler-MINOR:v1.2.3", Key: []byte("a key for planned allocations, of no cluster"),
	Args: []string{"--resources=enflame.com/gcu-memory", "--policy=binpack"},
}}

const keyFile = "/etc/kubernetes/divvy/grant-key"

// changed returns a node with a manifest or a configuration that was edited.
func (n *node) changed(old, changed string) *node {
	n.manifest = bytes.Replace(n.manifest, []byte(old), []byte(changed), 1)
	for name, data := range n.files {
		n.files[name] = bytes.Replace(data, []byte(old), []byte(changed), 1)
	}
	return n
}

// TestGoldenReplaced compares what is made of kubeadm's manifests of each version that there is a
// divvy-scheduler for, which differ in the image alone.
func TestGoldenReplaced(t *testing.T) {
	for name, node := range map[string]func(*testing.T, version) *node{"plain": kubeadm, "existing": configured} {
		for _, v := range programs {
			t.Run(name+" "+v.String(), func(t *testing.T) {
				n := node(t, v)
				before := n.clone()
				c := n.wire(t, replaced)
				if len(c.Files) != 2 || c.Files[1].Path != keyFile || c.Files[1].Mode != 0o600 {
					t.Fatalf("files: %+v", c.Files)
				}
				golden := filepath.Join("testdata", "replaced", name)
				for suffix, content := range map[string][]byte{
					"-" + v.String() + ".manifest.yaml": n.manifest, ".config.yaml": c.Files[0].Content,
				} {
					asGolden(t, golden+suffix, content)
				}
				if bytes.Contains(n.manifest, replaced.Program.Key) {
					t.Error("the key is in the manifest, which is readable through the API server")
				}
				comesBack(t, before, n)
			})
		}
	}
}

// TestReplacedFromOtherModes changes between the modes in both directions; the original comes back
// byte for byte.
func TestReplacedFromOtherModes(t *testing.T) {
	before := configured(t, newest)
	n := before.clone()
	n.wire(t, secured)
	calls := n.clone()
	n.wire(t, replaced)
	if strings.Contains(string(n.files[newFile]), "gcushare-scheduler") {
		t.Error("the configuration still has the extender")
	}
	direct := before.clone()
	direct.wire(t, replaced)
	same(t, direct, n)

	n.wire(t, secured)
	delete(n.files, keyFile) // as the caller does with files that are not named any more
	same(t, calls, n)
	n.unwire(t, before.manifest)
	same(t, before, n)
}

// TestReplacedFollows has the image and the flags changed: kubelet has to restart the pod for each, and
// the schedulers are told apart. A new key is read while the scheduler runs, which accepts the
// previous one for a while.
func TestReplacedFollows(t *testing.T) {
	n := kubeadm(t, newest)
	before := n.clone()
	n.wire(t, replaced)
	seen := []string{hashOf(t, n)}
	e, program := replaced, *replaced.Program
	e.Program, program.Key = &program, []byte("another key for planned allocations, of no cluster")
	if c := n.wire(t, e); len(c.Files) != 1 || hashOf(t, n) != seen[0] || !bytes.Equal(n.files[keyFile], program.Key) {
		t.Errorf("another key: %d files, hash %s", len(c.Files), hashOf(t, n))
	}
	for _, change := range []func(*Program){
		func(p *Program) { p.Image = "example.com/divvy-scheduler-MINOR:v2" },
		func(p *Program) { p.Args = append(slices.Clone(p.Args), "--choose-node=false") },
	} {
		e, program := replaced, *replaced.Program
		e.Program = &program
		change(&program)
		n.wire(t, e)
		if hash := hashOf(t, n); slices.Contains(seen, hash) {
			t.Errorf("the pod has the hash %s again", hash)
		} else {
			seen = append(seen, hash)
		}
	}
	// Other edits of the manifest stay, also a container in front of it.
	const beside = "  containers:\n  - image: example.com/proxy\n    name: proxy\n"
	n.changed("  containers:\n", beside)
	n.changed("cpu: 100m", "cpu: 200m").wire(t, replaced)
	n.unwire(t, before.manifest)
	same(t, before.changed("cpu: 100m", "cpu: 200m").changed("  containers:\n", beside), n)
}

func hashOf(t *testing.T, n *node) string {
	t.Helper()
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict(n.manifest, &pod); err != nil {
		t.Fatal(err)
	}
	return HashOf(pod.Annotations)
}

// TestReplacedElection takes what kube-scheduler's flags and configuration say of its election.
func TestReplacedElection(t *testing.T) {
	for name, tc := range map[string]struct {
		old, changed string
		want         []string
		note         string
	}{
		"defaults": {"    - --leader-elect-lease-duration=30s # slow disks\n", "", []string{"--leader-elect",
			"--leader-elect-name=kube-scheduler", "--leader-elect-namespace=kube-system", "--leader-elect-duration=15s"}, ""},
		"another Lease": {"--leader-elect-lease-duration=30s", "--leader-elect-resource-name=mine",
			[]string{"--leader-elect-name=mine", "--leader-elect-duration=15s"}, ""},
		"without an election": {"--leader-elect=true", "--leader-elect=false",
			[]string{"--leader-elect", "--leader-elect-name=kube-scheduler", "--leader-elect-duration=30s"},
			"kube-scheduler has no leader election; divvy-scheduler elects by the Lease kube-system/kube-scheduler."},
	} {
		t.Run(name, func(t *testing.T) {
			n := kubeadm(t, newest).changed(tc.old, tc.changed)
			c := n.wire(t, replaced)
			var pod corev1.Pod
			if err := yaml.UnmarshalStrict(n.manifest, &pod); err != nil {
				t.Fatal(err)
			}
			args := pod.Spec.Containers[0].Args
			own, rest := args[:slices.Index(args, "--")], args[slices.Index(args, "--")+1:]
			for _, want := range append(tc.want, "--leader-elect-shared") {
				if !slices.Contains(own, want) {
					t.Errorf("%q lacks %s", own, want)
				}
			}
			if slices.ContainsFunc(rest, func(f string) bool {
				return strings.HasPrefix(f, "--config") || strings.HasPrefix(f, "--leader-elect=")
			}) {
				t.Errorf("divvy-scheduler would refuse %q", rest)
			}
			if tc.note != "" && !slices.Contains(c.Notes, tc.note) {
				t.Errorf("notes %q lack %q", c.Notes, tc.note)
			}
		})
	}
}

func TestCannotBeReplaced(t *testing.T) {
	program := func(change func(*Program)) Extender {
		e, p := replaced, *replaced.Program
		change(&p)
		e.Program = &p
		return e
	}
	for name, tc := range map[string]struct {
		node *node
		e    Extender
		want string
	}{
		"a version that there is none for": {kubeadm(t, 34), replaced,
			"kube-scheduler is 1.34, and divvy-scheduler exists for 1.35, 1.36, 1.37 only; set scheduler.mode=extender"},
		"a wrapper": {kubeadm(t, newest).changed("    - kube-scheduler\n", "    - /go-runner\n    - kube-scheduler\n"), replaced,
			"kube-scheduler is started by /go-runner"},
		"a network of its own": {kubeadm(t, newest).changed("hostNetwork: true", "hostNetwork: false"), replaced, "hostNetwork: true"},
		"a Lease elsewhere": {kubeadm(t, newest).changed("--leader-elect=true", "--leader-elect-resource-namespace=other"), replaced,
			"the Lease for leader election is in namespace other and the pod in kube-system"},
		"a Lease for too long": {kubeadm(t, newest).changed("lease-duration=30s", "lease-duration=90s"), replaced, "is 90s"},
		"an unknown duration":  {kubeadm(t, newest).changed("lease-duration=30s", "lease-duration=$(A)"), replaced, "environment variable"},
		"no kubeconfig": {configured(t, newest).changed(`  kubeconfig: "/etc/kubernetes/scheduler.conf"`, "  qps: 50"), replaced,
			existing + ": clientConnection.kubeconfig is missing"},
		"a configuration that cannot be read": {configured(t, newest).changed("profiles:", "\tprofiles:"), replaced, existing},
		"an extender for all pods": {configured(t, newest).changed(
			"    managedResources:\n      - name: example.com/disk\n        ignoredByScheduler: true\n", ""), replaced,
			"the extender http://127.0.0.1:9998/storage is called for all pods"},
		"an extender for the resource": {configured(t, newest).changed("example.com/disk", "enflame.com/gcu-memory"), replaced,
			"the extender http://127.0.0.1:9998/storage manages a resource of Divvy's"},
		"no image":    {kubeadm(t, newest), program(func(p *Program) { p.Image = "" }), "the image of divvy-scheduler is missing"},
		"no key":      {kubeadm(t, newest), program(func(p *Program) { p.Key = []byte("\n") }), "signs planned allocations"},
		"no resource": {kubeadm(t, newest), Extender{Program: replaced.Program}, "no resources"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Wire(tc.node.input(), tc.e); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
	n := kubeadm(t, newest)
	n.wire(t, replaced)
	const named = "container: kube-scheduler"
	for _, edit := range [][2]string{{named, "container: other"}, {"was:", "is:"}, {named, "{"}} {
		edited := n.clone().changed(edit[0], edit[1])
		for what, err := range map[string]error{
			"Wire":    func() error { _, err := Wire(edited.input(), replaced); return err }(),
			"Unwire":  func() error { _, _, err := Unwire(edited.input(), nil); return err }(),
			"Inspect": func() error { _, err := Inspect(edited.input()); return err }(),
		} {
			if err == nil || !strings.Contains(err.Error(), AnnotationReplaced+" was edited") {
				t.Errorf("%s, %s edited: error %v", what, edit[0], err)
			}
		}
	}
}
