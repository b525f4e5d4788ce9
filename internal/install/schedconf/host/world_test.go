package host

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}

// world is a control-plane node in a temporary folder, with a kubelet and a
// scheduler that do what the files say.
type world struct {
	t        *testing.T
	dir      string // /etc/kubernetes
	manifest string
	original []byte
	disk     FS
	now      time.Time
	// refuses says which configuration kube-scheduler ends by itself with.
	refuses func(config string) bool
	// away is the error of an API server that does not answer.
	away error
	// awaits counts the questions for the scheduler. What keeps two from asking at once is
	// the lock of a file, which the race detector does not see.
	awaits atomic.Int64
}

// kubeadm is what kubeadm 1.37 writes, but for the folder.
const kubeadm = `apiVersion: v1
kind: Pod
metadata:
  labels:
    component: kube-scheduler
    tier: control-plane
  name: kube-scheduler
  namespace: kube-system
spec:
  containers:
  - command:
    - kube-scheduler
    - --authentication-kubeconfig=/etc/kubernetes/scheduler.conf
    - --authorization-kubeconfig=/etc/kubernetes/scheduler.conf
    - --bind-address=127.0.0.1
    - --kubeconfig=/etc/kubernetes/scheduler.conf
    - --leader-elect=true
    image: registry.k8s.io/kube-scheduler:v1.37.1
    imagePullPolicy: IfNotPresent
    livenessProbe:
      httpGet:
        host: 127.0.0.1
        path: /livez
        port: probe-port
        scheme: HTTPS
    name: kube-scheduler
    ports:
    - containerPort: 10259
      name: probe-port
      protocol: TCP
    resources:
      requests:
        cpu: 100m
    volumeMounts:
    - mountPath: /etc/kubernetes/scheduler.conf
      name: kubeconfig
      readOnly: true
  hostNetwork: true
  volumes:
  - hostPath:
      path: /etc/kubernetes/scheduler.conf
      type: FileOrCreate
    name: kubeconfig
status: {}
`

func newWorld(t *testing.T) *world {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "kubernetes")
	w := &world{
		t: t, dir: dir, manifest: filepath.Join(dir, "manifests", "kube-scheduler.yaml"), original: []byte(kubeadm),
		disk: Disk{hasty: true},
		now:  time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC), refuses: func(string) bool { return false },
	}
	w.make(filepath.Join(dir, "manifests", "etcd.yaml"), "kind: Pod\n", 0o600)
	w.make(filepath.Join(dir, "scheduler.conf"), "kind: Config\n", 0o600)
	w.make(w.manifest, kubeadm, 0o600)
	return w
}

func (w *world) make(path, content string, mode fs.FileMode) {
	w.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), mode),
		os.Chmod(path, mode)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) host() *Host {
	w.t.Helper()
	h, err := New(Config{Manifest: w.manifest, Dir: w.dir, Scheduler: w, FS: w.disk, Now: func() time.Time { return w.now }})
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

// extender is what kube-scheduler is to ask; resources tell one from another.
func extender(resources ...string) schedconf.Extender {
	if len(resources) == 0 {
		resources = []string{"enflame.com/gcu-memory"}
	}
	return schedconf.Extender{URL: "http://127.0.0.1:32766/gcushare-scheduler", Resources: resources}
}

// Check implements Scheduler.
func (w *world) Check(context.Context, Want) error { return w.away }

// Await implements Scheduler: kubelet has taken what is on the disk.
func (w *world) Await(_ context.Context, want Want) error {
	w.awaits.Add(1)
	if w.away != nil {
		return w.away
	}
	pod, config, err := w.running()
	if err != nil {
		return &UnhealthyError{Problem: err.Error()}
	}
	if got := schedconf.HashOf(pod.Annotations); got != want.Hash {
		return &UnhealthyError{Problem: fmt.Sprintf("the pod has hash %q and %q is wanted", got, want.Hash)}
	}
	if w.refuses(config) {
		return &UnhealthyError{Problem: "it exited with code 1, repeatedly", Crashed: true, Log: "no such plugin"}
	}
	return nil
}

// running returns the pod of the manifest on the disk, and the configuration that
// its scheduler reads.
func (w *world) running() (*corev1.Pod, string, error) {
	data, err := os.ReadFile(w.manifest)
	if err != nil {
		return nil, "", err
	}
	pod := &corev1.Pod{}
	if err := yaml.UnmarshalStrict(data, pod); err != nil {
		return nil, "", fmt.Errorf("kubelet cannot read the manifest: %w", err)
	}
	for _, arg := range slices.Concat(pod.Spec.Containers[0].Command, pod.Spec.Containers[0].Args) {
		path, ok := strings.CutPrefix(strings.Replace(arg, "--scheduler-config=", "--config=", 1), "--config=")
		if !ok {
			continue
		}
		config, err := os.ReadFile(path)
		if err != nil {
			return nil, "", fmt.Errorf("kubelet cannot mount the configuration: %w", err)
		}
		var object map[string]any
		if err := yaml.UnmarshalStrict(config, &object); err != nil {
			return nil, "", fmt.Errorf("kube-scheduler cannot read its configuration: %w", err)
		}
		return pod, string(config), nil
	}
	return pod, "", nil
}

// tree is every file below the folder, with its mode and content.
func (w *world) tree() map[string]string {
	w.t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(w.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(w.dir, path)
		out[name] = info.Mode().String() + "\n" + string(data)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return out
}

func (w *world) wantTree(want map[string]string) {
	w.t.Helper()
	if diff := cmp.Diff(want, w.tree()); diff != "" {
		w.t.Errorf("files (-want +got):\n%s", diff)
	}
}

// wantWired checks that the scheduler on the disk asks about these resources.
func (w *world) wantWired(resources ...string) {
	w.t.Helper()
	pod, config, err := w.running()
	if err != nil {
		w.t.Errorf("kube-scheduler does not run: %v", err)
		return
	}
	if pod.Annotations[schedconf.AnnotationHash] == "" {
		w.t.Error("the manifest is not wired")
	}
	for _, resource := range resources {
		if !strings.Contains(config, resource) {
			w.t.Errorf("the configuration does not name %s:\n%s", resource, config)
		}
	}
	var left []string
	for name := range w.tree() {
		if strings.Contains(filepath.Base(name), ".divvy-") || name == StagingFile {
			left = append(left, name)
		}
	}
	if len(left) > 0 {
		w.t.Errorf("these files were left: %v", left)
	}
}

// wantOriginalKept checks that no moment leaves the original without a copy, and
// kubelet with a file that it would take for another pod.
func (w *world) wantOriginalKept() {
	w.t.Helper()
	found := false
	for _, path := range []string{w.manifest, filepath.Join(w.dir, BackupFile)} {
		data, err := os.ReadFile(path)
		found = found || err == nil && bytes.Equal(data, w.original)
	}
	if !found {
		w.t.Errorf("the original is neither in %s nor in %s", w.manifest, BackupFile)
	}
	entries, err := os.ReadDir(filepath.Dir(w.manifest))
	if err != nil {
		w.t.Fatal(err)
	}
	var visible []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			visible = append(visible, e.Name())
		}
	}
	if !slices.Equal(visible, []string{"etcd.yaml", "kube-scheduler.yaml"}) {
		w.t.Errorf("kubelet sees %v", visible)
	}
	if _, _, err := w.running(); err != nil {
		w.t.Errorf("kube-scheduler could not start in this moment: %v", err)
	}
}

func (w *world) install(resources ...string) error {
	_, err := w.host().Install(w.t.Context(), extender(resources...), InstallOptions{})
	return err
}

func (w *world) uninstall() error {
	_, err := w.host().Uninstall(w.t.Context(), UninstallOptions{})
	return err
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// errPower is what everything returns after the power went.
var errPower = errors.New("the power is off")

// failing is a disk that fails at one of its steps, those that change something.
type failing struct {
	Disk

	at   int // the step that fails, counted from 0
	step int
	how  string
	err  error // of the step; then the disk goes on
	off  bool
	// each is called after every step that was done.
	each func()
	// durable are the names and contents of folders when they were synced last.
	durable map[string]map[string]string
}

// The ways in which a step fails.
const (
	half    = "in the middle of it"  // of a write, half; nothing of the others
	forgot  = "before it is durable" // it is done, and what was not synced is lost
	refused = "with an error"        // and the machine goes on
)

// do does a step, or fails.
func (f *failing) do(run, part func() error) error {
	if f.off {
		return errPower
	}
	f.step++
	if f.step-1 != f.at {
		err := run()
		if f.each != nil {
			f.each()
		}
		return err
	}
	switch f.how {
	case refused:
		if part != nil {
			_ = part() // what a full disk took
		}
		return f.err
	case half:
		if part != nil {
			_ = part() // it fails anyway
		}
	case forgot:
		_ = run() // it fails anyway
		f.forget()
	}
	f.off = true
	return errPower
}

// remember notes what of a folder is durable.
func (f *failing) remember(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	if f.durable == nil {
		f.durable = map[string]map[string]string{}
	}
	files := map[string]string{}
	for _, e := range entries {
		if data, err := os.ReadFile(filepath.Join(dir, e.Name())); err == nil {
			files[e.Name()] = string(data)
		}
	}
	f.durable[dir] = files
}

// forget makes folders what they were when they were synced last.
func (f *failing) forget() {
	for dir, files := range f.durable {
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue
		}
		for _, e := range entries {
			if _, kept := files[e.Name()]; !kept && !e.IsDir() {
				_ = os.Remove(filepath.Join(dir, e.Name()))
			}
		}
		for name, content := range files {
			path := filepath.Join(dir, name)
			if now, err := os.ReadFile(path); err != nil || string(now) != content {
				_ = os.WriteFile(path, []byte(content), 0o600)
			}
		}
	}
}

func (f *failing) ReadFile(name string) ([]byte, error) {
	if f.off {
		return nil, errPower
	}
	return f.Disk.ReadFile(name)
}

func (f *failing) Write(name string, data []byte, a Attributes) error {
	return f.do(func() error { return f.Disk.Write(name, data, a) }, func() error { return f.Disk.Write(name, data[:len(data)/2], a) })
}

func (f *failing) Rename(from, to string) error {
	return f.do(func() error { return f.Disk.Rename(from, to) }, nil)
}

func (f *failing) Remove(name string) error {
	if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) && !f.off {
		return nil // no step
	}
	return f.do(func() error { return f.Disk.Remove(name) }, nil)
}

func (f *failing) Sync(dir string) error {
	return f.do(func() error {
		f.remember(dir)
		return f.Disk.Sync(dir)
	}, nil)
}
