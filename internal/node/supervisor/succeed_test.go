package supervisor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/handover"
)

// beside makes a daemon with the state folder of d, of that identity.
func (d *daemon) beside(id handover.Identity) *daemon {
	d.t.Helper()
	other := prepare(d.t, "")
	for _, old := range []string{other.dir + "/state"} {
		text, err := os.ReadFile(other.file)
		if err != nil {
			d.t.Fatal(err)
		}
		if err := os.WriteFile(other.file, []byte(strings.ReplaceAll(string(text), old, d.dir+"/state")), 0o600); err != nil {
			d.t.Fatal(err)
		}
	}
	other.s.o.Self = id
	return other
}

func pod(id string) handover.Identity { return handover.Identity{Group: "divvy-system", ID: id} }

// firstPod starts a daemon.
func firstPod(t *testing.T) *daemon {
	t.Helper()
	d := prepare(t, "")
	d.s.o.Self = pod("first")
	d.start()
	d.agent(0)
	return d
}

func (d *daemon) says(path, text string) {
	d.t.Helper()
	eventually(d.t, path+" says "+text, func() bool { return strings.Contains(d.get(path), text) })
}

func TestPodTakesOver(t *testing.T) {
	first := firstPod(t)
	second := first.beside(pod("second"))
	second.start()
	now := second.agent(0)
	eventually(t, "the first has left", func() bool { return first.agent(0).did() == "yielded, passed to b.sock, left" })
	eventually(t, "the second is renewed", func() bool { return now.did() == "renewed [enflame.com/gcu-memory]" })
	if string(now.from.Memory["of"]) != `"what was before"` || now.from.Sockets["enflame.com/gcu-memory"] != "a.sock" {
		t.Errorf("the second got %+v", now.from)
	}
	second.says("/readyz", "log level info")
	first.says("/readyz", "another divvy-node has taken over from this one")
	first.says("/healthz", "ok")
	// It goes on once the second has ended, and gives way to the next pod.
	second.cancel()
	first.agent(1)
	first.says("/readyz", "log level info")
	third := first.beside(pod("third"))
	third.start()
	third.agent(0)
	eventually(t, "the first has left again", func() bool { return strings.HasSuffix(first.agent(1).did(), "left") })
}

// A process that has handed over does not ask for the node again, also where a full disk
// keeps the lock's file from saying so.
func TestFullDiskDuringAHandover(t *testing.T) {
	first := firstPod(t)
	second := first.beside(pod("second"))
	second.start()
	second.agent(0)
	first.says("/readyz", "another divvy-node has taken over from this one")
	if err := os.Truncate(filepath.Join(first.dir, "state", handover.LockName), 0); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * askInterval)
	for _, d := range []*daemon{first, second} {
		d.mu.Lock()
		if n := len(d.agents); n != 1 {
			t.Errorf("%s has started %d agents", d.s.o.Self.ID, n)
		}
		d.mu.Unlock()
	}
	second.cancel()
	first.agent(1)
}

// A daemon whose lock was removed lets no other take the node beside it.
func TestRemovedLock(t *testing.T) {
	first := firstPod(t)
	lock := filepath.Join(first.dir, "state", handover.LockName)
	if err := os.Remove(lock); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lock is there again", func() bool { _, err := os.Stat(lock); return err == nil })
	second := first.beside(pod("second"))
	second.start()
	second.agent(0)
	eventually(t, "the first has left", func() bool { return first.agent(0).did() == "yielded, passed to b.sock, left" })
}

// A new version that does not work leaves the node to the previous one, with what it has
// put into quarantine meanwhile.
func TestSuccessorCannotServe(t *testing.T) {
	first := firstPod(t)
	second := first.beside(pod("second"))
	second.s.servingLimit = 50 * time.Millisecond
	second.serving = func(config.NodeConfig) error {
		second.s.quarantine.Adopt(nil)
		second.s.quarantine.Add(accel.Quarantine{Device: "GCU-0", Vendor: "enflame", Cause: "library"})
		return errors.New("kubelet does not watch it")
	}
	second.start()
	select {
	case err := <-second.ended:
		if err == nil || !strings.Contains(err.Error(), "take over from the running divvy-node") ||
			!strings.Contains(err.Error(), "kubelet does not watch it") {
			t.Errorf("it ended with %v", err)
		}
		second.ended <- nil
	case <-time.After(soon):
		t.Fatal("it goes on")
	}
	now := first.agent(1)
	if now.from.Sockets["enflame.com/gcu-memory"] != "a.sock" {
		t.Errorf("the first goes on with %+v", now.from)
	}
	if _, there := first.s.quarantine.Of("GCU-0"); !there || now.from.Quarantine != nil {
		t.Errorf("the first goes on with %v in quarantine, and the agent with %v", first.s.quarantine.All(), now.from.Quarantine)
	}
	eventually(t, "what yielded has left", func() bool { return first.agent(0).did() == "yielded, passed to b.sock, left" })
	first.says("/readyz", "log level info")
	// And it can be asked again.
	third := first.beside(pod("third"))
	third.start()
	third.agent(0)
	third.says("/readyz", "log level info")
}

func TestSuccessorEndsWhileItTakesOver(t *testing.T) {
	first := firstPod(t)
	second := first.beside(pod("second"))
	var asked atomic.Bool
	second.serving = func(config.NodeConfig) error {
		asked.Store(true)
		return errors.New("not yet")
	}
	second.start()
	eventually(t, "it is about to serve", asked.Load)
	second.cancel()
	first.agent(1)
	first.says("/readyz", "log level info")
}

func TestPredecessorEndsWhileItHandsOver(t *testing.T) {
	first := firstPod(t)
	second := first.beside(pod("second"))
	var asked, proceed atomic.Bool
	second.serving = func(config.NodeConfig) error {
		asked.Store(true)
		if !proceed.Load() {
			return errors.New("not yet")
		}
		return nil
	}
	second.start()
	eventually(t, "the second is about to serve", asked.Load)
	first.cancel()
	proceed.Store(true)
	eventually(t, "the first has left in order", func() bool { return first.agent(0).did() == "yielded, passed to b.sock, left" })
	second.says("/readyz", "log level info")
}

func TestPodOfAnotherNamespaceWaits(t *testing.T) {
	first := firstPod(t)
	for name, id := range map[string]handover.Identity{
		`it belongs to "divvy-system"`: {Group: "elsewhere", ID: "x"},
		"this one belongs to no group": {},
	} {
		other := first.beside(id)
		other.start()
		other.says("/readyz", name)
		other.says("/healthz", "ok")
		other.cancel()
	}
	if first.count() != 1 || first.agent(0).did() != "" {
		t.Error("the first was touched")
	}
}

// noDevices is a backend whose library is not there.
type noDevices struct{ fakeBackend }

func (*noDevices) Discover(context.Context) (backend.Found, error) {
	return backend.Found{}, errors.New("libefml.so: no such file")
}

func TestSuccessorWithoutDevicesWaits(t *testing.T) {
	first := firstPod(t)
	second := first.beside(pod("second"))
	second.s.open = func(config.NodeConfig) (vendors.Set, error) { return vendors.Set{"enflame": &noDevices{}}, nil }
	second.start()
	second.says("/readyz", "this one cannot take over")
	second.says("/readyz", "libefml.so: no such file")
	if first.agent(0).did() != "" {
		t.Error("the first was touched")
	}
	// Without another one it serves what there is.
	first.cancel()
	second.agent(0)
}

// The previous release does not listen. Its DaemonSet deletes its pod once the new
// one is ready.
func TestReadyBesideEarlierRelease(t *testing.T) {
	for name, owner := range map[string]string{"of the same DaemonSet": "divvy-node", "of another one": "another"} {
		t.Run(name, func(t *testing.T) {
			d := prepare(t, "")
			seat, err := handover.Open(d.dir+"/state", handover.Identity{})
			if err != nil {
				t.Fatal(err)
			}
			defer seat.Close()
			if held, err := seat.Take(); !held {
				t.Fatal(err)
			}
			objects := map[string]string{"old": owner, "new": "divvy-node"}
			client := fake.NewClientset()
			for uid, controller := range objects {
				p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: uid, UID: "uid-" + types.UID(uid),
					OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: controller, UID: types.UID(controller),
						Controller: new(true)}}}}
				if _, err := client.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			d.s.client, d.s.o.Self = client, pod("uid-new")
			d.start()
			d.says("/readyz", "does not hand over")
			if owner == "divvy-node" {
				d.says("/readyz", "ok")
			} else {
				eventually(t, "it has looked for the pod twice", func() bool {
					lists := 0
					for _, a := range client.Actions() {
						if a.Matches("list", "pods") {
							lists++
						}
					}
					return lists > 1
				})
				d.says("/readyz", "does not hand over")
			}
			seat.Close()
			d.agent(0)
			d.says("/readyz", "log level info")
		})
	}
}

func TestConfigurationChangesWhileWaiting(t *testing.T) {
	first := firstPod(t)
	second := first.beside(handover.Identity{})
	second.start()
	second.says("/readyz", "this one belongs to no group")
	text, err := os.ReadFile(second.file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(second.file, append(text, "injection: cdi\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the change has arrived", func() bool {
		second.mu.Lock()
		defer second.mu.Unlock()
		return len(second.open) > 1
	})
	first.cancel()
	if got := second.agent(0).config.Injection; got != config.InjectCDI {
		t.Errorf("it runs with injection %q", got)
	}
}

// Processes of one host may have one address for both.
func TestAddressInUseWhileWaiting(t *testing.T) {
	first := firstPod(t)
	second := first.beside(pod("second"))
	text, err := os.ReadFile(second.file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(second.file, []byte(strings.ReplaceAll(string(text), second.listen, first.listen)), 0o600); err != nil {
		t.Fatal(err)
	}
	second.s.o.Self = handover.Identity{}
	second.start()
	eventually(t, "it waits", func() bool { waiting, why := second.s.state.isWaiting(); return waiting && why != nil })
	first.cancel()
	second.agent(0)
	second.listen = first.listen
	second.says("/readyz", "log level info")
}

func TestEditHandsOver(t *testing.T) {
	d := prepare(t, "")
	d.start()
	d.agent(0)
	d.write("injection: cdi\n")
	next := d.agent(1)
	eventually(t, "the first has left", func() bool { return d.agent(0).did() == "yielded, passed to b.sock, left" })
	eventually(t, "the second is renewed", func() bool { return next.did() == "renewed [enflame.com/gcu-memory]" })
	if next.from.Sockets["enflame.com/gcu-memory"] != "a.sock" {
		t.Errorf("the second got %+v", next.from)
	}
}

// paused counts the discoveries of a backend.
type paused struct {
	fakeBackend
	asked chan struct{}
}

func (b *paused) Discover(ctx context.Context) (backend.Found, error) {
	b.asked <- struct{}{}
	return b.fakeBackend.Discover(ctx)
}

// A process that waits for the node looks again when a pause begins, since a discovery is what
// takes the library out of it.
func TestPauseWhileWaitingForTheNode(t *testing.T) {
	b := &paused{asked: make(chan struct{})}
	s := &supervisor{operator: newOperator(), open: func(config.NodeConfig) (vendors.Set, error) { return vendors.Set{"nvidia": b}, nil }}
	p := s.prepare(t.Context(), config.NodeConfig{})
	defer p.release()
	<-b.asked
	s.operator.pause.Set(accel.Health{Unhealthy: true, Cause: "driver-upgrade", Reason: "an upgrade"})
	select {
	case <-b.asked:
	case <-time.After(soon):
		t.Error("the library is kept during the pause")
	}
}
