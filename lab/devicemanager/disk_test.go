package devicemanager

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// diskFault is something that happens to a folder of divvy-node while it runs.
type diskFault struct {
	folder string
	// inflict and end change the folder at a path, before prepares it for the
	// daemon, after clears it away.
	before, inflict, end, after func(path string) error
	// withheld is in the reason why a card that is new takes no pods meanwhile; ""
	// where the daemon gets over the fault by itself.
	withheld string
}

// A file in the place of a folder, in which no user can make files.
var replaced = diskFault{
	inflict: func(path string) error {
		return errors.Join(os.Rename(path, path+".away"), os.WriteFile(path, nil, 0o600))
	},
	end: func(path string) error { return errors.Join(os.Remove(path), os.Rename(path+".away", path)) },
}

// Mounts are for root alone; others skip these.
var (
	readOnly = diskFault{
		inflict: func(path string) error {
			if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil {
				return err
			}
			return unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
		},
		end: func(path string) error { return unix.Unmount(path, 0) },
		after: func(path string) error {
			if err := unix.Unmount(path, unix.MNT_DETACH); !errors.Is(err, unix.EINVAL) { // not mounted any more
				return err
			}
			return nil
		},
	}
	full = diskFault{
		before: func(path string) error {
			info, err := os.Stat(path)
			if err != nil {
				return err
			}
			return unix.Mount("tmpfs", path, "tmpfs", 0, fmt.Sprintf("size=64k,mode=%o", info.Mode().Perm()))
		},
		inflict: func(path string) error {
			f, err := os.Create(filepath.Join(path, "filling"))
			for err == nil {
				_, err = f.Write(make([]byte, 4096))
			}
			if errors.Is(err, unix.ENOSPC) {
				err = nil
			}
			return errors.Join(err, f.Close())
		},
		end:   func(path string) error { return os.Remove(filepath.Join(path, "filling")) },
		after: func(path string) error { return unix.Unmount(path, unix.MNT_DETACH) },
	}
)

var lost = diskFault{inflict: lose}

// lose removes a folder at once: the daemon may write to it at any moment, and a folder
// that gets a new file while its files are removed is not empty.
func lose(path string) error {
	away := path + ".lost"
	return errors.Join(os.Rename(path, away), os.RemoveAll(away))
}

// play calls a function of the fault that may be nil.
func (f diskFault) play(t *testing.T, n *node, what func(string) error) {
	t.Helper()
	if what == nil {
		return
	}
	err := what(filepath.Join(n.dir, f.folder))
	if errors.Is(err, unix.EPERM) {
		t.Skip("mounting takes root: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (f diskFault) of(folder, withheld string) diskFault {
	f.folder, f.withheld = folder, withheld
	return f
}

// TestDiskFaults: whatever happens to a folder, kubelet learns of a card that
// fails, pods on other cards start, and what is published is up to date. Only a
// card that is new is withheld, and only while what it needs cannot be written.
func TestDiskFaults(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]diskFault{
		"state folder replaced by a file": replaced.of("state", "save unit state"),
		"state folder read-only":          readOnly.of("state", "read-only file system"),
		"state folder full":               full.of("state", "no space left on device"),
		"state folder lost":               lost.of("state", ""),
		"CDI folder read-only":            readOnly.of("cdi", "write the CDI specification of enflame.com/gcu"),
		"CDI folder full":                 full.of("cdi", "write the CDI specification of enflame.com/gcu"),
		"CDI folder lost":                 lost.of("cdi", ""),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := prepareNode(t, "1", vendorsim.GCUs(5, 16<<10))
			n.setCards(n.topology.Cards[:4]...)
			n.configure = func(c *config.NodeConfig) {
				c.Resources = []config.Resource{memoryUnits, whole}
				c.Injection = config.InjectCDI
			}
			for _, folder := range []string{"state", "cdi"} {
				if err := os.Mkdir(filepath.Join(n.dir, folder), map[string]os.FileMode{"state": 0o750, "cdi": 0o755}[folder]); err != nil {
					t.Fatal(err)
				}
			}
			fault.play(t, n, fault.before)
			if fault.after != nil {
				t.Cleanup(func() { n.stop(); fault.play(t, n, fault.after) })
			}
			n.kubelet.start()
			n.startAgent()
			n.awaitOffer()

			pods := []*corev1.Pod{n.bind(0, "memory", app(4))}
			n.admit(pods...)
			n.converged()
			n.shows(gcuWhole, 3)
			pods = append(pods, n.start("whole", of(gcuWhole, 1)))
			n.shows(gcuMemory, 48)
			before := n.snapshot(pods)

			files := map[string][]string{
				"state": {"units-enflame.com_gcu-memory.json", "slots-enflame.com_gcu.json"}, "cdi": {"divvy-enflame.com-gcu.yaml"},
			}[fault.folder]
			fault.play(t, n, fault.inflict)
			if fault.withheld == "" {
				// All is there again although nothing has changed.
				for _, file := range files {
					eventually(t, soon, func() error {
						_, err := os.Stat(filepath.Join(n.dir, fault.folder, file))
						return err
					})
				}
			}
			// What is given out changes the state.
			pods = append(pods, n.start("during", of(gcuWhole, 1)))
			n.shows(gcuMemory, 32)
			cards := vendorsim.GCUs(5, 16<<10)
			cards[3].Unhealthy = true
			n.setCards(cards...)
			if fault.withheld == "" {
				n.shows(gcuWhole, 3)
				n.shows(gcuMemory, 32)
			} else {
				n.shows(gcuWhole, 2)
				n.shows(gcuMemory, 16)
				eventually(t, soon, func() error { return n.toldOf(fault.withheld) })
			}
			for _, r := range []accel.Resource{gcuMemory, gcuWhole} {
				eventually(t, soon, func() error {
					for i, want := range map[int]string{3: "the library calls it unhealthy", 4: fault.withheld} {
						got := n.sharesOf(r)[n.card(i)]
						if got.Health.Unhealthy != (want != "") || i == 4 && !strings.Contains(got.Health.Reason, want) || got.ID == "" {
							return fmt.Errorf("the inventory of %s shows card %d as %+v", r, i, got)
						}
					}
					return nil
				})
			}
			beside := n.bind(0, "beside", app(4))
			n.admit(beside)
			if got := n.kubelet.env(beside.UID, "app0")["ENFLAME_VISIBLE_DEVICES"]; got != "0" {
				t.Errorf("a pod that was granted card 0 meanwhile got %q", got)
			}
			cards[3].Unhealthy = false
			n.setCards(cards...)
			if fault.withheld != "" {
				n.shows(gcuWhole, 3)
				n.shows(gcuMemory, 32)
			}

			fault.play(t, n, fault.end)
			n.shows(gcuWhole, 4)
			n.shows(gcuMemory, 48)
			n.awaitOffer()
			n.converged()
			n.same(before+n.snapshot(pods[2:]), pods)
			for folder, want := range map[string]os.FileMode{"state": 0o750, "cdi": 0o755} {
				if info, err := os.Stat(filepath.Join(n.dir, folder)); err != nil || info.Mode().Perm() != want {
					t.Errorf("folder %s: %v, %v; want mode %v", folder, info, err, want)
				}
			}
			// Nothing was lost that another life of the daemon needs.
			n.restartAgent()
			n.awaitOffer()
			n.shows(gcuWhole, 4)
			n.shows(gcuMemory, 48)
			n.converged()
			last := n.bind(4, "last", app(16))
			n.admit(last)
			n.on(4, last)
		})
	}
}

// toldOf returns nil when readiness tells of the text.
func (n *node) toldOf(text string) error {
	if err := n.agent.Ready(); err == nil || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("ready: %w, want %q", errUnexpected(err), text)
	}
	return nil
}

// TestRestartWithStateThatCannotBeRead: what containers hold is recovered from
// kubelet and from the grants, also where the disk takes no new file.
func TestRestartWithStateThatCannotBeRead(t *testing.T) {
	t.Parallel()
	for name, harm := range map[string]func(path string) error{
		"empty":   func(path string) error { return os.Truncate(path, 0) },
		"garbage": func(path string) error { return os.WriteFile(path, []byte("\x00\xff{]"), 0o600) },
		"a folder": func(path string) error {
			return errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "inside"), 0o700))
		},
		"not there": os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := offer(t, vendorsim.GCUs(5, 16<<10), memoryUnits, whole)
			pods := []*corev1.Pod{n.bind(2, "two", app(4, 3)), n.bind(1, "one", app(5))}
			n.admit(pods...)
			n.converged()
			pods = append(pods, n.start("whole", of(gcuWhole, 1)))
			n.shows(gcuWhole, 3)
			before := n.snapshot(pods)
			held := n.kubelet.held(pods[2].UID, "app0", gcuWhole)
			n.stop()
			for _, file := range []string{"units-enflame.com_gcu-memory.json", "slots-enflame.com_gcu.json"} {
				if err := harm(filepath.Join(n.dir, "state", file)); err != nil {
					t.Fatal(err)
				}
			}
			n.startAgent()
			n.awaitOffer()
			n.shows(gcuWhole, 3)
			n.shows(gcuMemory, 64)
			n.converged()
			n.same(before, pods)
			if got := n.kubelet.held(pods[2].UID, "app0", gcuWhole); strings.Join(got, " ") != strings.Join(held, " ") {
				t.Errorf("the pod holds %v, held %v", got, held)
			}
			// The card that is given out as a whole is not given out by memory.
			next := n.bind(-1, "next", app(16))
			n.admit(next)
			if d, err := n.where(next); err != nil || d == accel.DeviceID(held[0]) {
				t.Errorf("a new pod is on %s (%v), which another has as a whole", d, err)
			}
		})
	}
}
