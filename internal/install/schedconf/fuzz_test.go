package schedconf

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"go.yaml.in/yaml/v3"
)

// seeds adds manifests and configurations of all kinds.
func seeds(f *testing.F) {
	f.Helper()
	for _, tt := range shapes {
		f.Add(tt.node.manifest, []byte("apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"), "")
	}
	kubeadm, err := os.ReadFile(filepath.Join("testdata", "input", "kubeadm.yaml"))
	if err != nil {
		f.Fatal(err)
	}
	configs, err := filepath.Glob("testdata/golden/*.config.*")
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range configs {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		m := bytes.ReplaceAll(kubeadm, []byte("VERSION"), []byte("1.31.4"))
		m = bytes.Replace(m, []byte("    - --feature-gates"),
			[]byte("    - --config=/etc/kubernetes/scheduler.conf\n    - --feature-gates"), 1)
		f.Add(m, data, "")
		f.Add(m, data, "v1.30.0")
	}
}

// FuzzWire checks on any manifest and configuration that wiring ends with a
// change that a second run has nothing to add to and that can be taken back, or
// with an error of one line.
func FuzzWire(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, manifest, config []byte, version string) {
		n := &node{manifest: manifest, version: version, files: map[string][]byte{"/etc/kubernetes/scheduler.conf": config,
			"/srv/s.yaml": config}}
		before := n.clone()
		c, err := Wire(n.input(), secured)
		if err != nil {
			if c.Manifest != nil || c.Files != nil {
				t.Errorf("a change beside the error %v", err)
			}
			return
		}
		n.apply(c, nil)
		again, err := Wire(n.input(), secured)
		if err != nil {
			t.Fatalf("a second run: %v\n%s", err, n.manifest)
		}
		if !bytes.Equal(again.Manifest, n.manifest) || len(again.Files) > 0 {
			t.Errorf("a second run changes something:\n%s\nbecomes\n%s", n.manifest, again.Manifest)
		}
		s, err := Inspect(n.input())
		if err != nil {
			t.Fatal(err)
		}
		if d := s.Differences(secured); d != nil {
			t.Errorf("differences %q", d)
		}
		back, remove, err := Unwire(n.input(), before.manifest)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range back.Files {
			if bytes.Contains(file.Content, []byte(secured.URL)) {
				t.Errorf("the extender is left in %s", file.Path)
			}
		}
		if len(back.Files) == 0 && len(remove) > 0 && !bytes.Contains(before.manifest, []byte("scheduler-extender-config")) &&
			!bytes.Contains(before.manifest, []byte("divvy")) && !bytes.Equal(back.Manifest, before.manifest) {
			t.Errorf("%q\nis not the original\n%q", back.Manifest, before.manifest)
		}
	})
}

// FuzzUnwire checks that taking the extender out without the original gives what
// reads the same as it, on any manifest.
func FuzzUnwire(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, manifest, config []byte, version string) {
		if bytes.Contains(manifest, []byte("scheduler-extender-config")) || bytes.Contains(manifest, []byte("divvy")) {
			return // what is there already would go with it
		}
		n := &node{manifest: manifest, version: version, files: map[string][]byte{"/etc/kubernetes/scheduler.conf": config,
			"/srv/s.yaml": config}}
		c, err := Wire(n.input(), unsecured)
		if err != nil {
			return
		}
		n.apply(c, nil)
		back, _, err := Unwire(n.input(), nil)
		if err != nil {
			t.Fatalf("%v\n%s", err, n.manifest)
		}
		var a, b any
		if yaml.Unmarshal(manifest, &a) != nil || yaml.Unmarshal(back.Manifest, &b) != nil {
			return
		}
		if x, y := encode(prune(a)), encode(prune(b)); x != y {
			t.Errorf("%q\nbecame\n%q", manifest, back.Manifest)
		}
	})
}

func encode(v any) string {
	data, err := yaml.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(data)
}
