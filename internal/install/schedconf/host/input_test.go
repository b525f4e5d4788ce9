package host

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// TestInstallTwice: the second changes nothing, and the first kept what it was
// given to keep.
func TestInstallTwice(t *testing.T) {
	w := newWorld(t)
	must(t, os.Chmod(w.manifest, 0o640))
	clean := w.tree()
	r, err := w.host().Install(t.Context(), extender(resourceA), InstallOptions{})
	must(t, err)
	if !r.Changed {
		t.Error("the first changed nothing")
	}
	w.wantWired(resourceA)
	wired := w.tree()
	if got, want := wired[BackupFile], clean["manifests/kube-scheduler.yaml"]; got != want {
		t.Errorf("the backup is %q", got)
	}
	for _, name := range []string{"manifests/kube-scheduler.yaml", BackupFile} {
		if !strings.HasPrefix(wired[name], "-rw-r-----\n") {
			t.Errorf("%s has another mode than the original: %.11s", name, wired[name])
		}
	}
	disk := &failing{at: never}
	w.disk = disk
	r, err = w.host().Install(t.Context(), extender(resourceA), InstallOptions{})
	must(t, err)
	if r.Changed || disk.step != 0 {
		t.Errorf("the second changed %t, in %d steps", r.Changed, disk.step)
	}
	w.wantTree(wired)
	must(t, w.uninstall())
	w.wantTree(clean)
	r, err = w.host().Uninstall(t.Context(), UninstallOptions{})
	if err != nil || r.Changed {
		t.Errorf("uninstalled twice: %t, %v", r.Changed, err)
	}
	w.wantTree(clean)
}

// TestDiskFails at each step with an error of the system: the node is as it was,
// or the change is complete; the error names the file and what to do; and once the
// disk is well, everything works.
func TestDiskFails(t *testing.T) {
	for cause, hint := range map[error]string{syscall.ENOSPC: "free some space", syscall.EROFS: "mount it writable",
		syscall.EACCES: "owner of the file"} {
		t.Run(cause.Error(), func(t *testing.T) {
			hinted := 0
			for at := 0; ; at++ {
				w := newWorld(t)
				clean := w.tree()
				disk := &failing{Disk: Disk{hasty: true}, at: at, how: refused,
					err: &os.PathError{Op: "write", Path: w.dir + "/x", Err: cause}, each: w.wantOriginalKept}
				w.disk = disk
				err := w.install(resourceA)
				w.wantOriginalKept()
				if disk.step <= at {
					break
				}
				if pod, _, _ := w.running(); pod.Annotations == nil && err == nil {
					t.Errorf("step %d: nothing was done, and there is no error", at)
				}
				if err != nil {
					if !errors.Is(err, cause) || !strings.Contains(err.Error(), w.dir) {
						t.Errorf("step %d: the error is %v", at, err)
					}
					if strings.Contains(err.Error(), hint) {
						hinted++
					}
				}
				w.disk = Disk{hasty: true}
				must(t, w.install(resourceA))
				w.wantWired(resourceA)
				must(t, w.uninstall())
				w.wantTree(clean)
				if t.Failed() {
					t.Fatalf("at step %d, with %v", at, err)
				}
			}
			if hinted < 4 {
				t.Errorf("%d errors alone say what to do", hinted)
			}
		})
	}
}

// TestDiskFailsForGood: a folder that is read-only from the beginning is as it was.
func TestDiskFailsForGood(t *testing.T) {
	w := newWorld(t)
	clean := w.tree()
	w.disk = readOnly{}
	err := w.install(resourceA)
	if !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "mount it writable") || !strings.Contains(err.Error(), w.dir) {
		t.Errorf("the error is %v", err)
	}
	w.wantTree(clean)
	must(t, w.uninstall()) // nothing is to be done
}

// readOnly refuses every change.
type readOnly struct{ Disk }

func (readOnly) refuse(op, name string) error {
	return &os.PathError{Op: op, Path: name, Err: syscall.EROFS}
}

func (r readOnly) Write(name string, _ []byte, _ Attributes) error { return r.refuse("open", name) }

func (r readOnly) Rename(from, _ string) error { return r.refuse("rename", from) }

func (r readOnly) Remove(name string) error {
	if _, err := os.Lstat(name); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return r.refuse("remove", name)
}

// TestOwner: kube-scheduler reads its configuration as the user that it runs as.
func TestOwner(t *testing.T) {
	w := newWorld(t)
	w.make(w.manifest, strings.Replace(kubeadm, "  hostNetwork: true\n",
		"  hostNetwork: true\n  securityContext: {runAsUser: 2001, runAsGroup: 2002}\n", 1), 0o600)
	owners := &owners{Disk: Disk{hasty: true}, of: map[string]Attributes{}}
	w.disk = owners
	must(t, w.install(resourceA))
	path := filepath.Join(w.dir, schedconf.ConfigFile)
	if a := owners.of[path]; a.UID != 2001 || a.GID != 2002 {
		t.Errorf("the configuration belongs to %d:%d", a.UID, a.GID)
	}
	w.make(path, "parallelism: 3\n"+mustRead(t, path), 0o644)
	delete(owners.of, path)
	must(t, w.uninstall())
	if a := owners.of[path]; a.UID != 2001 || a.GID != 2002 {
		t.Errorf("the configuration that stays belongs to %d:%d", a.UID, a.GID)
	}
}

func mustRead(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}

// owners notes who owns what is written; to give files away takes a privilege.
type owners struct {
	Disk

	of map[string]Attributes
}

func (o *owners) Write(name string, data []byte, a Attributes) error {
	o.of[name] = a
	a.UID, a.GID = os.Geteuid(), os.Getegid()
	return o.Disk.Write(name, data, a)
}

func (o *owners) Rename(from, to string) error {
	o.of[to] = o.of[from]
	return o.Disk.Rename(from, to)
}

// TestOtherFileSystem: the manifests are on another file system than the rest.
func TestOtherFileSystem(t *testing.T) {
	for refuses, check := range map[string]func(*world, error){
		"no such resource": func(w *world, err error) { must(t, err); w.wantWired(resourceA) },
		resourceA: func(w *world, err error) {
			rolledBack(w, err)
			if data, err := os.ReadFile(w.manifest); err != nil || string(data) != kubeadm {
				t.Errorf("the manifest is not the original: %v", err)
			}
		},
	} {
		w := newWorld(t)
		clean := w.tree()
		w.disk = twoDisks{}
		w.refuses = func(config string) bool { return strings.Contains(config, refuses) }
		check(w, w.install(resourceA))
		must(t, w.uninstall())
		w.wantTree(clean)
	}
}

// twoDisks cannot rename from one folder to another.
type twoDisks struct{ Disk }

func (d twoDisks) Rename(from, to string) error {
	if filepath.Dir(from) != filepath.Dir(to) {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: syscall.EXDEV}
	}
	return d.Disk.Rename(from, to)
}

// TestLinkedManifest: the file behind the link is replaced, and the link stays.
func TestLinkedManifest(t *testing.T) {
	w := newWorld(t)
	target := filepath.Join(w.dir, "elsewhere", "scheduler.yaml")
	must(t, os.MkdirAll(filepath.Dir(target), 0o755))
	must(t, os.Rename(w.manifest, target))
	must(t, os.Symlink("../elsewhere/scheduler.yaml", w.manifest))
	clean := w.tree()
	must(t, w.install(resourceA))
	w.wantWired(resourceA)
	if link, err := os.Readlink(w.manifest); err != nil || link != "../elsewhere/scheduler.yaml" {
		t.Errorf("the link is %q, %v", link, err)
	}
	must(t, w.uninstall())
	w.wantTree(clean)

	must(t, os.Mkdir(filepath.Join(w.dir, "own"), 0o755))
	h, err := New(Config{Manifest: w.manifest, Dir: filepath.Join(w.dir, "own"), Scheduler: w, Visible: []string{}})
	must(t, err)
	if _, err := h.Install(t.Context(), extender(), InstallOptions{}); !errors.Is(err, errInvisible) ||
		!strings.Contains(err.Error(), target) {
		t.Errorf("a link to what is not mounted: %v", err)
	}
}

// TestRefusals are inputs with which nothing may be changed.
func TestRefusals(t *testing.T) {
	tests := map[string]struct {
		change func(*world)
		want   string
		is     error
	}{
		"no manifest": {
			change: func(w *world) { must(w.t, os.Remove(w.manifest)) },
			want:   "scheduler.mode=dedicated", is: ErrNoManifest,
		},
		"an empty manifest": {change: func(w *world) { w.make(w.manifest, " \n", 0o600) }, want: "is empty"},
		"a folder": {change: func(w *world) { must(w.t, os.Remove(w.manifest)); must(w.t, os.Mkdir(w.manifest, 0o755)) },
			want: "not a regular file"},
		"a link to nowhere": {
			change: func(w *world) { must(w.t, os.Remove(w.manifest)); must(w.t, os.Symlink("/nowhere/x", w.manifest)) },
			want:   "no kube-scheduler on this node",
		},
		"not YAML": {change: func(w *world) { w.make(w.manifest, "{a: [", 0o600) }, want: "kube-scheduler.yaml"},
		"not a pod": {change: func(w *world) {
			w.make(w.manifest,
				"kind: Service\napiVersion: v1\nmetadata: {name: a}\n", 0o600)
		}, want: "kube-scheduler.yaml"},
		"an unreachable API server": {change: func(w *world) { w.away = errors.New("connection refused") },
			want: "nothing was changed"},
		"somebody else's backup": {change: func(w *world) { w.make(filepath.Join(w.dir, BackupFile), "kind: Pod\n", 0o600) },
			want: "it may be the original of GCUShare's config manager or of an administrator"},
		"somebody else's configuration": {change: func(w *world) {
			w.make(filepath.Join(w.dir, "scheduler-extender-config-v1.23+.yaml"),
				"a: b\n", 0o600)
		}, want: "exists but was not written by Divvy"},
		"a journal that is no JSON": {change: func(w *world) { w.make(filepath.Join(w.dir, JournalFile), "{", 0o600) },
			want: "was edited"},
		"a journal of a later version": {change: func(w *world) { w.make(filepath.Join(w.dir, JournalFile), `{"version":2}`, 0o600) },
			want: "has version 2"},
		"a journal with another file": {change: func(w *world) {
			w.make(filepath.Join(w.dir, JournalFile), `{"version":1,"files":["/none/passwd"]}`, 0o600)
		}, want: "which is not a file of Divvy"},
		"an existing file that is away": {change: func(w *world) {
			w.make(w.manifest, strings.Replace(kubeadm, "    - --leader", "    - --config=/etc/none.yaml\n    - --leader", 1), 0o600)
		}, want: "/etc/none.yaml"},
		"a manifest that nobody may see": {change: func(w *world) { w.disk = unreadable{} }, want: "permission denied"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			test.change(w)
			before := map[string]string{}
			if name != "a link to nowhere" && name != "a folder" {
				before = w.tree()
			}
			err := w.install(resourceA)
			if err == nil || !strings.Contains(err.Error(), test.want) || test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("the error is %v, want %q", err, test.want)
			}
			if len(before) > 0 {
				w.wantTree(before)
			}
		})
	}
}

// unreadable has a manifest of another user.
type unreadable struct{ Disk }

func (u unreadable) ReadFile(name string) ([]byte, error) {
	if filepath.Base(name) == "kube-scheduler.yaml" {
		return nil, &os.PathError{Op: "open", Path: name, Err: syscall.EACCES}
	}
	return u.Disk.ReadFile(name)
}

// TestForeignBackupStays: uninstalling does not remove what somebody else keeps.
func TestForeignBackupStays(t *testing.T) {
	w := newWorld(t)
	w.make(filepath.Join(w.dir, BackupFile), "kind: Pod\n", 0o600)
	before := w.tree()
	must(t, w.uninstall())
	w.wantTree(before)
}

// TestLostJournal: the files of a wired scheduler are taken over.
func TestLostJournal(t *testing.T) {
	for name, then := range map[string]func(*world){
		"change": func(w *world) {
			must(t, w.install(resourceB))
			w.wantWired(resourceB)
		},
		"nothing": func(*world) {},
	} {
		w := newWorld(t)
		clean := w.tree()
		must(t, w.install(resourceA))
		must(t, os.Remove(filepath.Join(w.dir, JournalFile)))
		then(w)
		must(t, w.uninstall())
		if diff := cmp.Diff(clean, w.tree()); diff != "" {
			t.Errorf("%s: files (-want +got):\n%s", name, diff)
		}
	}
}

// TestGCUShareIsTakenOver: its files have the names of ours. Installing takes them
// over, and uninstalling goes back to before GCUShare; where Divvy never wired the
// node, what GCUShare did stays.
func TestGCUShareIsTakenOver(t *testing.T) {
	w := newWorld(t)
	clean := w.tree()
	config := filepath.Join(w.dir, "scheduler-extender-config-v1.23+.yaml")
	gcushare := strings.NewReplacer(
		"    - --leader-elect=true\n", "    - --leader-elect=true\n    - --config="+config+"\n",
		"    volumeMounts:\n", "    volumeMounts:\n    - mountPath: "+config+
			"\n      name: scheduler-policy-config\n      readOnly: true\n",
		"  volumes:\n", "  volumes:\n  - hostPath:\n      path: "+config+"\n      type: FileOrCreate\n    name: scheduler-policy-config\n",
	).Replace(kubeadm)
	w.make(w.manifest, gcushare, 0o600)
	w.make(filepath.Join(w.dir, BackupFile), kubeadm, 0o600)
	// Left over from a kube-scheduler before 1.23.
	w.make(filepath.Join(w.dir, "scheduler-extender-config.json"), `{"kind": "Policy", "apiVersion": "v1"}`, 0o644)
	w.make(config, `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  kubeconfig: /etc/kubernetes/scheduler.conf
extenders:
- urlPrefix: http://127.0.0.1:32766/gcushare-scheduler
  filterVerb: filter
  bindVerb: bind
  nodeCacheCapable: true
  managedResources:
  - {name: enflame.com/gcu-memory, ignoredByScheduler: false}
  ignorable: false
`, 0o644)
	before := w.tree()
	must(t, w.uninstall())
	w.wantTree(before)
	must(t, w.install(resourceB))
	w.wantWired(resourceB)
	must(t, w.uninstall())
	if pod, config, err := w.running(); err != nil || config != "" || len(pod.Annotations) > 0 {
		t.Errorf("afterwards it runs with %q, %v, %v", config, pod.Annotations, err)
	}
	w.wantTree(clean)
}

// TestMovedAway: who stops kube-scheduler by moving its manifest out of kubelet's
// folder finds it where it was put, whatever runs meanwhile.
func TestMovedAway(t *testing.T) {
	for name, run := range map[string]func(*world) error{
		"install": func(w *world) error { return w.install(resourceA) }, "uninstall": (*world).uninstall,
	} {
		for _, wired := range []bool{false, true} {
			w := newWorld(t)
			if wired {
				must(t, w.install(resourceA))
			}
			data, err := os.ReadFile(w.manifest)
			must(t, err)
			moved := filepath.Join(w.dir, "kube-scheduler.yaml")
			must(t, os.Rename(w.manifest, moved))
			if err := run(w); (name == "install" || wired) && !errors.Is(err, ErrNoManifest) {
				t.Errorf("%s, wired %t: the error is %v", name, wired, err)
			}
			if now, err := os.ReadFile(moved); err != nil || !bytes.Equal(now, data) {
				t.Errorf("%s, wired %t: the manifest that was moved away: %v\n%s", name, wired, err, now)
			}
			must(t, os.Rename(moved, w.manifest))
			must(t, w.install(resourceA))
			w.wantWired(resourceA)
		}
	}
}

// TestManifestMoves: another program writes the manifest in the moment before it is
// replaced; what it wrote is what is wired, and comes back.
func TestManifestMoves(t *testing.T) {
	w := newWorld(t)
	edited := strings.Replace(kubeadm, "cpu: 100m", "cpu: 150m", 1)
	w.disk = &meddling{path: filepath.Join(w.dir, StagingFile), do: func(n int) {
		if n == 1 {
			w.make(w.manifest, edited, 0o600)
		}
	}}
	must(t, w.install(resourceA))
	w.wantWired(resourceA)
	if data, err := os.ReadFile(filepath.Join(w.dir, BackupFile)); err != nil || string(data) != edited {
		t.Errorf("the backup is not what the other program wrote: %v\n%s", err, data)
	}
	must(t, w.uninstall())
	if data, err := os.ReadFile(w.manifest); err != nil || string(data) != edited {
		t.Errorf("the manifest is not what the other program wrote: %v\n%s", err, data)
	}

	t.Run("always", func(t *testing.T) {
		w := newWorld(t)
		w.disk = &meddling{path: filepath.Join(w.dir, StagingFile), do: func(n int) {
			w.make(w.manifest, strings.Replace(kubeadm, "cpu: 100m", "cpu: "+strings.Repeat("1", n+1)+"m", 1), 0o600)
		}}
		if err := w.install(resourceA); !errors.Is(err, errMoved) {
			t.Errorf("the error is %v", err)
		}
		if pod, _, err := w.running(); err != nil || pod.Annotations != nil {
			t.Errorf("the manifest was changed: %v, %v", pod.Annotations, err)
		}
	})
}

// meddling lets another program act after a file was put in place.
type meddling struct {
	Disk

	path string
	n    int
	do   func(n int)
}

func (m *meddling) Rename(from, to string) error {
	err := m.Disk.Rename(from, to)
	if to == m.path {
		m.n++
		m.do(m.n)
	}
	return err
}

// TestEditedSince: what somebody changed in a wired manifest stays when Divvy's
// part is taken out.
func TestEditedSince(t *testing.T) {
	w := newWorld(t)
	must(t, w.install(resourceA))
	data, err := os.ReadFile(w.manifest)
	must(t, err)
	w.make(w.manifest, strings.Replace(string(data), "cpu: 100m", "cpu: 150m", 1), 0o600)
	must(t, w.install(resourceA))
	w.wantWired(resourceA)
	must(t, w.uninstall())
	want := map[string]string{"manifests/kube-scheduler.yaml": "-rw-------\n" + strings.Replace(kubeadm, "cpu: 100m", "cpu: 150m", 1)}
	got := w.tree()
	if diff := cmp.Diff(want["manifests/kube-scheduler.yaml"], got["manifests/kube-scheduler.yaml"]); diff != "" {
		t.Errorf("manifest (-want +got):\n%s", diff)
	}
	if len(got) != 3 {
		t.Errorf("files were left: %v", slices.Sorted(maps.Keys(got)))
	}
}

// TestConfigurationEditedSince: a configuration of ours that somebody edited stays,
// without the extender, since the scheduler goes on using it.
func TestConfigurationEditedSince(t *testing.T) {
	w := newWorld(t)
	must(t, w.install(resourceA))
	path := filepath.Join(w.dir, schedconf.ConfigFile)
	data, err := os.ReadFile(path)
	must(t, err)
	w.make(path, string(data)+"parallelism: 3\n", 0o644)
	must(t, w.install(resourceA))
	w.wantWired(resourceA)
	for range 2 {
		must(t, w.uninstall())
		_, config, err := w.running()
		must(t, err)
		if !strings.Contains(config, "parallelism: 3") || strings.Contains(config, "gcushare") {
			t.Errorf("the configuration is\n%s", config)
		}
	}
	if got := slices.Sorted(maps.Keys(w.tree())); len(got) != 4 {
		t.Errorf("files were left: %v", got)
	}
	must(t, w.install(resourceB))
	w.wantWired(resourceB)
}

// TestHeld: what was rolled back is not tried again for ever, and is tried when
// something changes or somebody asks.
func TestHeld(t *testing.T) {
	w := newWorld(t)
	refused := resourceA
	w.refuses = func(config string) bool { return strings.Contains(config, refused) }
	rolledBack(w, w.install(resourceA))
	awaits := w.awaits.Load()
	w.now = w.now.Add(24 * time.Hour)
	var held *HeldError
	if err := w.install(resourceA); !errors.As(err, &held) || !held.Next.IsZero() || w.awaits.Load() != awaits {
		t.Errorf("again after a crash: %v, %d questions", err, w.awaits.Load()-awaits)
	}
	if !strings.Contains(held.Error(), "no such plugin") {
		t.Errorf("the error does not say what the scheduler said: %v", held)
	}
	// Somebody else's change of the manifest is another input.
	w.make(w.manifest, strings.Replace(kubeadm, "cpu: 100m", "cpu: 150m", 1), 0o600)
	rolledBack(w, w.install(resourceA))
	// Another wish as well.
	must(t, w.install(resourceB))
	w.wantWired(resourceB)
	rolledBack(w, w.install(resourceA))
	w.wantWired(resourceB)
	if s, err := w.host().Status(); err != nil || s.Failure == nil {
		t.Errorf("status with a change that was rolled back: %+v, %v", s, err)
	}
	must(t, w.install(resourceB)) // it is wished no more
	if s, err := w.host().Status(); err != nil || s.Failure != nil {
		t.Errorf("status without: %+v, %v", s, err)
	}
	rolledBack(w, w.install(resourceA))
	refused = "nothing"
	if err := w.install(resourceA); !errors.As(err, &held) {
		t.Errorf("the same again: %v", err)
	}
	_, err := w.host().Install(t.Context(), extender(resourceA), InstallOptions{Again: true})
	must(t, err)
	w.wantWired(resourceA)
	if s, err := w.host().Status(); err != nil || s.Failure != nil || !s.Wired {
		t.Errorf("status: %+v, %v", s, err)
	}
}

// TestSlowSchedulerIsTriedAgain, with longer and longer pauses, and then no more.
func TestSlowSchedulerIsTriedAgain(t *testing.T) {
	w := newWorld(t)
	slow := &slowScheduler{world: w}
	install := func() error {
		h, err := New(Config{Manifest: w.manifest, Dir: w.dir, Scheduler: slow, Now: func() time.Time { return w.now }})
		must(t, err)
		_, err = h.Install(t.Context(), extender(resourceA), InstallOptions{})
		return err
	}
	var held *HeldError
	for i, pause := range []time.Duration{2 * time.Minute, 10 * time.Minute, time.Hour, 0} {
		rolledBack(w, install())
		if err := install(); !errors.As(err, &held) {
			t.Fatalf("attempt %d at once: %v", i+2, err)
		}
		if want := w.now.Add(pause); pause > 0 && !held.Next.Equal(want) || pause == 0 && !held.Next.IsZero() {
			t.Errorf("after attempt %d the next is at %s, want %s later", i+1, held.Next, pause)
		}
		w.now = held.Next
	}
}

// TestClockGoesBack: a failure of a future that was corrected does not hold for years.
func TestClockGoesBack(t *testing.T) {
	w := newWorld(t)
	slow := &slowScheduler{world: w}
	h, err := New(Config{Manifest: w.manifest, Dir: w.dir, Scheduler: slow, Now: func() time.Time { return w.now }})
	must(t, err)
	install := func() error {
		_, err := h.Install(t.Context(), extender(resourceA), InstallOptions{})
		return err
	}
	rolledBack(w, install())
	w.now = w.now.AddDate(-3, 0, 0)
	var back *RolledBackError
	if err := install(); !errors.As(err, &back) {
		t.Errorf("three years before it failed: %v", err)
	}
	var held *HeldError
	if err := install(); !errors.As(err, &held) || held.Next.After(w.now.Add(time.Hour)) {
		t.Errorf("and then: %v", err)
	}
}

// slowScheduler is not in time with what is wired.
type slowScheduler struct{ *world }

func (s *slowScheduler) Await(ctx context.Context, want Want) error {
	if want.Hash != "" {
		return &UnhealthyError{Problem: "after 1m0s: it runs but is not healthy"}
	}
	return s.world.Await(ctx, want)
}

// TestAPIServerGoesAway while kube-scheduler starts: the change stays, and the next
// run finds out what became of it.
func TestAPIServerGoesAway(t *testing.T) {
	w := newWorld(t)
	leaving := &leavingServer{world: w}
	h, err := New(Config{Manifest: w.manifest, Dir: w.dir, Scheduler: leaving})
	must(t, err)
	_, err = h.Install(t.Context(), extender(resourceA), InstallOptions{})
	if !errors.Is(err, errAway) {
		t.Fatalf("the error is %v", err)
	}
	if s, err := h.Status(); err != nil || !s.Pending || !s.Wired {
		t.Errorf("status: %+v, %v", s, err)
	}
	r, err := w.host().Install(t.Context(), extender(resourceA), InstallOptions{})
	if err != nil || !r.Changed {
		t.Errorf("afterwards: %t, %v", r.Changed, err)
	}
	w.wantWired(resourceA)
}

var errAway = errors.New("the API server is away")

type leavingServer struct{ *world }

func (leavingServer) Await(context.Context, Want) error { return errAway }

// TestTwoAtOnce: one waits for the other, also when both are processes.
func TestTwoAtOnce(t *testing.T) {
	w := newWorld(t)
	unlock, err := Disk{}.Lock(w.dir, false)
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*lockPoll)
	defer cancel()
	if _, err := w.host().Install(ctx, extender(), InstallOptions{}); !errors.Is(err, ErrLocked) {
		t.Errorf("beside another: %v", err)
	}
	must(t, unlock())
	var wait sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wait.Go(func() { errs[i] = w.install(resourceA) })
	}
	wait.Wait()
	must(t, errors.Join(errs...))
	w.wantWired(resourceA)
}

// TestWatched: an uninstall is not undone behind its back.
func TestWatched(t *testing.T) {
	w := newWorld(t)
	clean := w.tree()
	must(t, w.install(resourceA))
	unlock, err := w.host().Watching()
	must(t, err)
	if err := w.uninstall(); !errors.Is(err, ErrWatched) {
		t.Errorf("while it is watched: %v", err)
	}
	w.wantWired(resourceA)
	// One that ends soon is waited for.
	ended := make(chan error, 1)
	time.AfterFunc(2*lockPoll, func() { ended <- unlock() })
	_, err = w.host().Uninstall(t.Context(), UninstallOptions{WatchEnds: time.Minute})
	must(t, errors.Join(err, <-ended))
	w.wantTree(clean)
	must(t, w.install(resourceA))
	unlock, err = w.host().Watching()
	must(t, err)
	// One that stays keeps the watch from it.
	r, err := w.host().Uninstall(t.Context(), UninstallOptions{Stay: func(ctx context.Context, _ Result) error {
		w.wantTree(clean)
		ctx, cancel := context.WithTimeout(ctx, 2*lockPoll)
		defer cancel()
		if _, err := w.host().Install(ctx, extender(), InstallOptions{}); !errors.Is(err, ErrLocked) {
			t.Errorf("the watch comes in between: %v", err)
		}
		return nil
	}})
	if err != nil || !r.Changed {
		t.Errorf("with stay: %t, %v", r.Changed, err)
	}
	must(t, unlock())
	must(t, w.install(resourceA))
	must(t, w.uninstall())
	w.wantTree(clean)
}

func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]Config{
		"relative":          {Manifest: "kube-scheduler.yaml"},
		"manifest's folder": {Manifest: "/etc/kubernetes/manifests/a.yaml", Dir: "/etc/kubernetes/manifests"},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
