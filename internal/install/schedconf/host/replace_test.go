package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// TestReplace: divvy-scheduler takes the place of kube-scheduler, an update that is not healthy is
// rolled back but for its key, and in the end no file differs from before.
func TestReplace(t *testing.T) {
	w := newWorld(t)
	before := w.tree()
	h := w.host()
	e := extender()
	e.Program = &schedconf.Program{Image: "example.com/divvy-scheduler-" + schedconf.Minor + ":v1",
		Key: []byte("a key for planned allocations, of no cluster"), Args: []string{"--policy=spread"}}
	diff, _, err := h.Plan(e, false)
	if err != nil || !strings.Contains(diff, "+    image: example.com/divvy-scheduler-1.") ||
		strings.Contains(diff, string(e.Program.Key)) {
		t.Errorf("plan: %v\n%s", err, diff)
	}
	if r, err := h.Install(t.Context(), e, InstallOptions{}); err != nil || !r.Changed {
		t.Fatalf("changed %v: %v", r.Changed, err)
	}
	if r, err := h.Install(t.Context(), e, InstallOptions{}); err != nil || r.Changed {
		t.Errorf("a second time: changed %v: %v", r.Changed, err)
	}
	if key := w.tree()[schedconf.KeyFile]; key != "-rw-------\n"+string(e.Program.Key) {
		t.Errorf("the key is %q", key)
	}
	replaced := w.tree()
	delete(replaced, filepath.Base(JournalFile))

	next := *e.Program
	next.Image, next.Key = "example.com/divvy-scheduler-"+schedconf.Minor+":v2", []byte("another key for planned allocations")
	w.refuses = func(string) bool {
		pod, _, err := w.running()
		return err == nil && strings.HasSuffix(pod.Spec.Containers[0].Image, ":v2")
	}
	e.Program = &next
	var back *RolledBackError
	if _, err := h.Install(t.Context(), e, InstallOptions{}); !errors.As(err, &back) || back.Back != nil {
		t.Fatalf("an image that is not healthy: %v", err)
	}
	after := w.tree()
	delete(after, filepath.Base(JournalFile))
	replaced[schedconf.KeyFile] = "-rw-------\n" + string(next.Key)
	for name, content := range replaced {
		if after[name] != content {
			t.Errorf("%s is not what it was:\n%s", name, after[name])
		}
	}
	if s, err := h.Status(); err != nil || s.Program != "example.com/divvy-scheduler-1.37:v1" || !s.Wired || s.Failure == nil {
		t.Errorf("status: %+v, %v", s, err)
	}
	// A new key arrives while the change is held, and starts no other attempt.
	next.Key = []byte("a third key for planned allocations")
	var held *HeldError
	if _, err := h.Install(t.Context(), e, InstallOptions{}); !errors.As(err, &held) ||
		!strings.Contains(err.Error(), "`divvy-control schedconf install` with --replace-image, --replace-flag and --grant-key-file") {
		t.Errorf("after it was rolled back: %v", err)
	}
	if key := w.tree()[schedconf.KeyFile]; key != "-rw-------\n"+string(next.Key) {
		t.Errorf("while a change is held, the key is %q", key)
	}
	if _, err := h.Uninstall(t.Context(), UninstallOptions{}); err != nil {
		t.Fatal(err)
	}
	w.wantTree(before)
}

// TestKeyOfNoProgram: without divvy-scheduler there is no key, and a journal that earlier releases accept.
func TestKeyOfNoProgram(t *testing.T) {
	for name, tc := range map[string]struct {
		back func(*world) error
	}{
		"to the extender": {func(w *world) error { return w.install(resourceA) }},
		"to the manifest before, and to the extender": {func(w *world) error {
			w.make(w.manifest, kubeadm, 0o600)
			return w.install(resourceA)
		}},
		"by a program that kept the key": {func(w *world) error {
			if err := w.install(resourceA); err != nil {
				return err
			}
			key := filepath.Join(w.dir, schedconf.KeyFile)
			w.make(key, "key", 0o600)
			journal := filepath.Join(w.dir, JournalFile)
			data, err := os.ReadFile(journal)
			if err != nil {
				return err
			}
			w.make(journal, strings.Replace(string(data), `"files": [`, `"files": [`+strconv.Quote(key)+",", 1), 0o600)
			return w.install(resourceA)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			must(t, w.replace())
			must(t, tc.back(w))
			w.wantNoKey()
			w.wantWired(resourceA)
			must(t, w.replace())
			if _, there := w.tree()[schedconf.KeyFile]; !there {
				t.Error("replaced again, there is no key")
			}
		})
	}
	t.Run("rolled back", func(t *testing.T) {
		w := newWorld(t)
		w.refuses = func(string) bool {
			pod, _, err := w.running()
			return err == nil && pod.Annotations[schedconf.AnnotationProgram] != ""
		}
		var back *RolledBackError
		if err := w.replace(); !errors.As(err, &back) {
			t.Errorf("an image that is not healthy: %v", err)
		}
		w.wantNoKey()
	})
}

// replace runs divvy-scheduler in place of kube-scheduler.
func (w *world) replace() error {
	e := extender(resourceA)
	e.Program = &schedconf.Program{Image: "example.com/divvy-scheduler:v1", Key: []byte("key")}
	_, err := w.host().Install(w.t.Context(), e, InstallOptions{})
	return err
}

// wantNoKey checks that no file is the key's, and that the journal names none.
func (w *world) wantNoKey() {
	w.t.Helper()
	for name, content := range w.tree() {
		if filepath.Dir(name) == schedconf.KeyDir || name == JournalFile && strings.Contains(content, schedconf.KeyFile) {
			w.t.Errorf("left: %s\n%s", name, content)
		}
	}
	if _, err := os.Stat(filepath.Join(w.dir, schedconf.KeyDir)); !errors.Is(err, fs.ErrNotExist) {
		w.t.Errorf("the folder of the key: %v", err)
	}
}

// TestWantOfReplaced: its health is what its readiness probe asks, and another program is another
// pod although its configuration is the same.
func TestWantOfReplaced(t *testing.T) {
	manifest := strings.Replace(kubeadm, "    livenessProbe:",
		"    readinessProbe: {httpGet: {host: 127.0.0.1, path: /readyz, port: 10259, scheme: HTTPS}}\n    livenessProbe:", 1)
	want := func(image string) Want {
		t.Helper()
		c, err := schedconf.Wire(schedconf.Input{Manifest: []byte(manifest)}, schedconf.Extender{
			Resources: []string{"enflame.com/gcu-memory"}, Program: &schedconf.Program{Image: image, Key: []byte("key")}})
		if err != nil {
			t.Fatal(err)
		}
		var pod corev1.Pod
		if err := yaml.UnmarshalStrict(c.Manifest, &pod); err != nil {
			t.Fatal(err)
		}
		w, err := WantOf(c.Manifest)
		if err != nil || w.Hash != schedconf.HashOf(pod.Annotations) {
			t.Fatalf("%+v: %v", w, err)
		}
		return w
	}
	one, other := want("example.com/s:1"), want("example.com/s:2")
	if one.Hash == other.Hash {
		t.Error("another image has the same hash")
	}
	if one.Health != "http://"+schedconf.ReplacedAddress+"/readyz" {
		t.Errorf("its health is asked at %s", one.Health)
	}
}

// taken is a Turn by which another node had to take the change back.
type taken struct{ Turn }

func (taken) Take(context.Context, string) error {
	return &NotNowError{Node: "other", Failure: &Failure{Reason: "it exited"}}
}

// TestAdviceOfReplaced: a command that tries a change at once has the flags without which it restores kube-scheduler.
func TestAdviceOfReplaced(t *testing.T) {
	w := newWorld(t)
	h, err := New(Config{Manifest: w.manifest, Dir: w.dir, Scheduler: w, FS: w.disk, Turn: taken{}})
	must(t, err)
	e := extender()
	if _, err := h.Install(t.Context(), e, InstallOptions{}); err == nil ||
		!strings.Contains(err.Error(), "(`divvy-control schedconf install` tries it immediately)") {
		t.Errorf("mode extender: %v", err)
	}
	e.Program = &schedconf.Program{Image: "example.com/divvy-scheduler:v1", Key: []byte("key")}
	if _, err := h.Install(t.Context(), e, InstallOptions{}); err == nil || !strings.Contains(err.Error(), "(`divvy-control schedconf "+
		"install` with --replace-image, --replace-flag and --grant-key-file as in the DaemonSet divvy-schedconf tries it immediately)") {
		t.Errorf("mode replace: %v", err)
	}
}
