package schedconf

import (
	"bytes"
	"flag"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the golden files anew")

// node is a control-plane node: its files, and the scheduler's manifest.
type node struct {
	manifest []byte
	files    map[string][]byte
	version  string
}

func (n *node) input() Input {
	return Input{
		Manifest: n.manifest, ManifestPath: "kube-scheduler.yaml", Version: n.version,
		ReadFile: func(name string) ([]byte, error) {
			data, ok := n.files[name]
			if !ok {
				return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
			}
			return data, nil
		},
	}
}

func (n *node) apply(c Change, remove []string) {
	for _, f := range c.Files {
		n.files[f.Path] = f.Content
	}
	n.manifest = c.Manifest
	for _, name := range remove {
		delete(n.files, name)
	}
}

func (n *node) clone() *node {
	return &node{bytes.Clone(n.manifest), maps.Clone(n.files), n.version}
}

// wire wires the node, and fails the test unless a second run changes nothing.
func (n *node) wire(t *testing.T, e Extender) Change {
	t.Helper()
	c, err := Wire(n.input(), e)
	if err != nil {
		t.Fatal(err)
	}
	n.apply(c, nil)
	again, err := Wire(n.input(), e)
	if err != nil {
		t.Fatalf("a second run: %v", err)
	}
	if !bytes.Equal(again.Manifest, n.manifest) || len(again.Files) > 0 {
		t.Errorf("a second run changes the manifest or writes %d files:\n%s", len(again.Files),
			cmp.Diff(string(n.manifest), string(again.Manifest)))
	}
	s, err := Inspect(n.input())
	if err != nil {
		t.Fatal(err)
	}
	if d := s.Differences(e); !s.Wired || d != nil {
		t.Errorf("wired %v, differs from what is wanted: %q", s.Wired, d)
	}
	return c
}

// unwire takes it back.
func (n *node) unwire(t *testing.T, original []byte) Change {
	t.Helper()
	c, remove, err := Unwire(n.input(), original)
	if err != nil {
		t.Fatal(err)
	}
	n.apply(c, remove)
	again, more, err := Unwire(n.input(), original)
	if err != nil {
		t.Fatalf("a second run: %v", err)
	}
	if !bytes.Equal(again.Manifest, n.manifest) || len(again.Files)+len(more) > 0 {
		t.Errorf("a second run changes something")
	}
	return c
}

// same fails the test unless two nodes hold the same.
func same(t *testing.T, want, got *node) {
	t.Helper()
	if diff := cmp.Diff(string(want.manifest), string(got.manifest)); diff != "" {
		t.Errorf("manifest (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(want.files, got.files); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

// comesBack takes out of a node what was put in, with the original manifest and without it, and
// fails the test unless it is as before.
func comesBack(t *testing.T, before, n *node) {
	t.Helper()
	other := n.clone()
	n.unwire(t, before.manifest)
	same(t, before, n)
	other.unwire(t, nil)
	same(t, before, other)
}

// asGolden fails the test unless a golden file has the content; with -update it writes the file.
func asGolden(t *testing.T, file string, content []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(content)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// secured is the extender as the chart runs it. The certificates are not real.
var secured = Extender{
	URL:        "https://10.96.0.77:32765/gcushare-scheduler",
	ServerName: "divvy-extender.divvy-system.svc",
	CA:         []byte("-----BEGIN CERTIFICATE-----\nQ0E=\n-----END CERTIFICATE-----\n"),
	ClientCert: []byte("-----BEGIN CERTIFICATE-----\nQ0VSVA==\n-----END CERTIFICATE-----\n"),
	ClientKey:  []byte("-----BEGIN PRIVATE KEY-----\nS0VZ\n-----END PRIVATE KEY-----\n"),
	Resources:  []string{"enflame.com/gcu-memory", "nvidia.com/gpu-memory"},
	Timeout:    10 * time.Second,
}

// unsecured is the extender of GCUShare's guide.
var unsecured = Extender{URL: "http://127.0.0.1:32766/gcushare-scheduler", Resources: []string{"enflame.com/gcu-memory"}}

func input(t *testing.T, name string, replacements ...string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "input", name))
	if err != nil {
		t.Fatal(err)
	}
	return []byte(strings.NewReplacer(replacements...).Replace(string(data)))
}

// kubeadm returns a node of a version, without a configuration.
func kubeadm(t *testing.T, v version) *node {
	t.Helper()
	return &node{manifest: input(t, "kubeadm.yaml", "VERSION", v.String()+".4"),
		files: map[string][]byte{"/etc/kubernetes/scheduler.conf": nil}}
}

const existing = "/etc/kubernetes/scheduler-config.yaml"

// withConfig lets the scheduler of a node use a configuration.
func (n *node) withConfig(name string, data []byte) *node {
	for _, r := range [][2]string{
		{"    - --feature-gates", "    - --config=" + name + "\n    - --feature-gates"},
		{"    volumeMounts:\n", "    volumeMounts:\n    - {mountPath: " + name + ", name: own-config, readOnly: true}\n"},
		{"  volumes:\n", "  volumes:\n  - {name: own-config, hostPath: {path: " + name + "}}\n"},
	} {
		n.manifest = bytes.Replace(n.manifest, []byte(r[0]), []byte(r[1]), 1)
	}
	n.files[name] = data
	return n
}

// configured returns a node of a version whose scheduler has two profiles and an
// extender of somebody else.
func configured(t *testing.T, v version) *node {
	t.Helper()
	return kubeadm(t, v).withConfig(existing, input(t, "existing.yaml"))
}

// TestGolden compares what is made, with and without a configuration that is there
// already, with golden files. lab/internal/schedulerversions reads those as each
// version of kube-scheduler does; for all of them they are the same.
func TestGolden(t *testing.T) {
	made := map[string]bool{}
	for name, node := range map[string]func(*testing.T, version) *node{"plain": kubeadm, "existing": configured} {
		t.Run(name, func(t *testing.T) {
			n := node(t, newest)
			before := n.clone()
			c := n.wire(t, secured)
			if len(c.Files) != 1 || c.Files[0].Mode != 0o600 {
				t.Fatalf("files: %+v", c.Files)
			}
			file := c.Files[0]
			golden := filepath.Join("testdata", "golden", name)
			for suffix, content := range map[string][]byte{".manifest.yaml": n.manifest, ".config.yaml": file.Content} {
				made[golden+suffix] = true
				asGolden(t, golden+suffix, content)
			}
			for v := oldest; v <= newest; v++ {
				other := node(t, v)
				if c := other.wire(t, secured); len(c.Files) != 1 || !bytes.Equal(c.Files[0].Content, file.Content) {
					t.Errorf("for kube-scheduler %v it is another configuration", v)
				}
			}
			comesBack(t, before, n)
		})
	}
	files, err := filepath.Glob("testdata/golden/*")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(made)), files); diff != "" && !t.Failed() {
		t.Errorf("golden files (-made +there):\n%s", diff)
	}
}

// TestFormerLayout lets the files be those that the releases wrote which edited them as text,
// so that the layout of the original was kept: they stay as they are, and the original comes
// back byte for byte.
func TestFormerLayout(t *testing.T) {
	before := configured(t, newest)
	n := before.clone()
	for name, to := range map[string]func([]byte){
		"existing.manifest.yaml": func(data []byte) { n.manifest = data },
		"existing.config.yaml":   func(data []byte) { n.files[newFile] = data },
	} {
		data, err := os.ReadFile(filepath.Join("testdata", "former", name))
		if err != nil {
			t.Fatal(err)
		}
		to(data)
	}
	former := n.clone()
	n.wire(t, secured)
	same(t, former, n)

	changed := n.clone()
	changed.wire(t, unsecured)
	if bytes.Equal(changed.manifest, former.manifest) {
		t.Error("another extender did not change the manifest")
	}
	for _, n := range []*node{n, changed} {
		n.unwire(t, before.manifest)
		same(t, before, n)
	}
}
