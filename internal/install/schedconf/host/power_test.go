package host

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
)

// story is something that happens on a node until the power goes.
type story struct {
	// prepare makes the node what it is before, on a disk that works.
	prepare func(*world)
	// run is interrupted.
	run func(*world) error
	// refuses is the resource that kube-scheduler ends with, also later.
	refuses string
	// again is the resource that is installed after it, and installed checks the
	// node then.
	again     string
	installed func(*world, error)
}

const (
	resourceA = "enflame.com/gcu-memory"
	resourceB = "nvidia.com/gpu-memory"
)

func rolledBack(w *world, err error) {
	w.t.Helper()
	var back *RolledBackError
	var held *HeldError
	if !errors.As(err, &back) && !errors.As(err, &held) || back != nil && back.Back != nil {
		w.t.Errorf("install says %v, want that it was rolled back", err)
	}
}

var stories = map[string]story{
	"install": {
		run:   func(w *world) error { return w.install(resourceA) },
		again: resourceA,
		installed: func(w *world, err error) {
			must(w.t, err)
			w.wantWired(resourceA)
		},
	},
	"change": {
		prepare: func(w *world) { must(w.t, w.install(resourceA)) },
		run:     func(w *world) error { return w.install(resourceB) },
		again:   resourceB,
		installed: func(w *world, err error) {
			must(w.t, err)
			w.wantWired(resourceB)
		},
	},
	"install that is rolled back": {
		run:     func(w *world) error { return w.install(resourceA) },
		refuses: resourceA,
		again:   resourceA,
		installed: func(w *world, err error) {
			rolledBack(w, err)
			if data, err := os.ReadFile(w.manifest); err != nil || !bytes.Equal(data, w.original) {
				w.t.Errorf("the manifest is not the original: %v\n%s", err, data)
			}
		},
	},
	"change that is rolled back": {
		prepare: func(w *world) { must(w.t, w.install(resourceA)) },
		run:     func(w *world) error { return w.install(resourceB) },
		refuses: resourceB,
		again:   resourceB,
		installed: func(w *world, err error) {
			rolledBack(w, err)
			w.wantWired(resourceA)
		},
	},
	"kubeadm upgrade": {
		prepare: func(w *world) {
			must(w.t, w.install(resourceA))
			w.original = []byte(strings.ReplaceAll(kubeadm, "v1.37.1", "v1.37.2"))
			w.make(w.manifest, string(w.original), 0o600)
		},
		run:   func(w *world) error { return w.install(resourceA) },
		again: resourceA,
		installed: func(w *world, err error) {
			must(w.t, err)
			w.wantWired(resourceA)
		},
	},
	"from divvy-scheduler to the extender": {
		prepare: func(w *world) { must(w.t, w.replace()) },
		run:     func(w *world) error { return w.install(resourceA) },
		again:   resourceA,
		installed: func(w *world, err error) {
			must(w.t, err)
			w.wantWired(resourceA)
			w.wantNoKey()
		},
	},
	"uninstall": {
		prepare: func(w *world) { must(w.t, w.install(resourceA)) },
		run:     func(w *world) error { return w.uninstall() },
		again:   resourceA,
		installed: func(w *world, err error) {
			must(w.t, err)
			w.wantWired(resourceA)
		},
	},
}

// TestPowerLoss lets the power go at each step of each story, in each way, and then
// installs or uninstalls. In every moment the original has a copy, kubelet sees
// whole files alone, and kube-scheduler could start.
func TestPowerLoss(t *testing.T) {
	for name, s := range stories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			interrupt(t, s, never, half, "uninstall")
			for _, how := range []string{half, forgot} {
				steps := 0
				for at := 0; ; at++ {
					finished := false
					for _, then := range []string{"install", "uninstall"} {
						finished = interrupt(t, s, at, how, then)
					}
					if finished {
						break
					}
					steps++
				}
				// Less would mean that the steps are not seen.
				if steps < 6 {
					t.Errorf("the power went %s in %d steps alone", how, steps)
				}
			}
		})
	}
}

// never is no step.
const never = -1

// interrupt plays a story once, and reports whether it came to its end before the
// step at which the power goes.
func interrupt(t *testing.T, s story, at int, how, then string) bool {
	t.Helper()
	w := newWorld(t)
	clean := w.tree()
	if s.prepare != nil {
		s.prepare(w)
		clean["manifests/kube-scheduler.yaml"] = "-rw-------\n" + string(w.original)
	}
	w.refuses = func(config string) bool { return s.refuses != "" && strings.Contains(config, s.refuses) }
	disk := &failing{Disk: Disk{hasty: true}, at: at, how: how}
	if at == never {
		disk.each = w.wantOriginalKept
	}
	for _, dir := range []string{w.dir, w.dir + "/manifests"} {
		disk.remember(dir)
	}
	w.disk = disk
	err := s.run(w)
	if disk.off && !errors.Is(err, errPower) {
		t.Errorf("power off %s step %d: the error is %v", how, at, err)
	}
	if !disk.off && at != never && at <= disk.step-1 {
		t.Errorf("step %d of %d did not fail", at, disk.step)
	}
	w.disk = Disk{hasty: true}
	w.wantOriginalKept()
	switch then {
	case "install":
		s.installed(w, w.install(s.again))
	case "uninstall":
		must(t, w.uninstall())
		w.wantTree(clean)
	}
	if t.Failed() {
		t.Fatalf("the power went %s step %d, then %s", how, at, then)
	}
	return !disk.off
}

// TestPowerLossTwice: the power goes at the same step twice in an upgrade; the
// backup before it stays one of ours all the time.
func TestPowerLossTwice(t *testing.T) {
	for at := 0; ; at++ {
		w := newWorld(t)
		must(t, w.install(resourceA))
		finished := false
		for _, version := range []string{"v1.37.2", "v1.37.2", "v1.37.3"} {
			w.original = []byte(strings.ReplaceAll(kubeadm, "v1.37.1", version))
			if data, err := os.ReadFile(w.manifest); err != nil || !bytes.Contains(data, []byte(version)) {
				w.make(w.manifest, string(w.original), 0o600)
			}
			disk := &failing{Disk: Disk{hasty: true}, at: at, how: half}
			w.disk = disk
			err := w.install(resourceA)
			finished = !disk.off
			if disk.off && !errors.Is(err, errPower) {
				t.Errorf("step %d, with %s: the error is %v", at, version, err)
			}
		}
		w.disk = Disk{hasty: true}
		if err := w.install(resourceA); err != nil {
			t.Errorf("step %d: afterwards: %v", at, err)
		}
		w.wantWired(resourceA)
		must(t, w.uninstall())
		if data, err := os.ReadFile(w.manifest); err != nil || !bytes.Equal(data, w.original) {
			t.Errorf("step %d: the manifest is not the last original: %v", at, err)
		}
		if finished || t.Failed() {
			break
		}
	}
}

// TestEditedAfterPowerLoss: the power goes while the configuration is changed, and
// somebody edits the manifest before the next start. The configuration is still one
// that follows what it is made of.
func TestEditedAfterPowerLoss(t *testing.T) {
	for _, then := range []string{"install", "uninstall"} {
		for at := 0; ; at++ {
			w := newWorld(t)
			clean := w.tree()
			must(t, w.install(resourceA))
			disk := &failing{Disk: Disk{hasty: true}, at: at, how: half}
			w.disk = disk
			err := w.install(resourceB)
			if disk.off != errors.Is(err, errPower) {
				t.Fatalf("step %d: the error is %v", at, err)
			}
			w.disk = Disk{hasty: true}
			data, err := os.ReadFile(w.manifest)
			must(t, err)
			w.make(w.manifest, strings.Replace(string(data), "cpu: 100m", "cpu: 150m", 1), 0o600)
			if then == "install" {
				must(t, w.install(resourceB))
				w.wantWired(resourceB)
				if s, err := w.host().Status(); err != nil || s.Edited || s.Pending {
					t.Errorf("step %d: status: %+v, %v", at, s, err)
				}
				data, err := os.ReadFile(w.manifest)
				must(t, err)
				if bytes.Contains(data, []byte("edited-")) {
					t.Errorf("step %d: the configuration is taken for one that somebody edited:\n%s", at, data)
				}
			}
			must(t, w.uninstall())
			clean["manifests/kube-scheduler.yaml"] = strings.Replace("-rw-------\n"+kubeadm, "cpu: 100m", "cpu: 150m", 1)
			w.wantTree(clean)
			if !disk.off || t.Failed() {
				if t.Failed() {
					t.Errorf("at step %d, then %s", at, then)
				}
				break
			}
		}
	}
}
