package wiring

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
)

// leases returns a client of an API server with the Lease that the chart makes. As
// that does, and the fake one does not, it refuses to update what was changed since.
func leases() kubernetes.Interface {
	var mu sync.Mutex
	version := 1
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "divvy-system", Name: turnLease, ResourceVersion: "1"}}
	client := fake.NewClientset()
	client.PrependReactor("get", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		return true, lease.DeepCopy(), nil
	})
	client.PrependReactor("update", "leases", func(a clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		to := a.(clienttesting.UpdateAction).GetObject().(*coordinationv1.Lease).DeepCopy()
		if to.ResourceVersion != lease.ResourceVersion {
			return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "leases"}, turnLease, errors.New("changed since"))
		}
		version++
		to.ResourceVersion = strconv.Itoa(version)
		lease = to
		return true, lease.DeepCopy(), nil
	})
	return client
}

// cluster has control-plane nodes in folders, all with the same manifest.
type cluster struct {
	t      *testing.T
	client kubernetes.Interface

	mu sync.Mutex
	// refuses says that kube-scheduler ends by itself when it is wired.
	refuses bool
	// starting are the nodes whose scheduler starts, tried those on which a wired one did.
	starting map[string]bool
	tried    []string
}

// scheduler is that of a node.
type scheduler struct {
	*cluster

	node string
}

func (*scheduler) Check(context.Context, host.Want) error { return nil }

func (s *scheduler) Await(_ context.Context, want host.Want) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if want.Hash == "" || !s.refuses && slices.Contains(s.tried, s.node) {
		return nil
	}
	if s.starting[s.node] = true; len(s.starting) > 1 {
		s.t.Errorf("these start at the same time: %v", s.starting)
	}
	s.mu.Unlock()
	time.Sleep(10 * time.Millisecond)
	s.mu.Lock()
	delete(s.starting, s.node)
	s.tried = append(s.tried, s.node)
	if s.refuses {
		return &host.UnhealthyError{Problem: "it ended with code 1, repeatedly", Crashed: true}
	}
	return nil
}

// disk is that of a node, in a folder.
type disk struct {
	host.Disk

	root string
}

func (d disk) ReadFile(name string) ([]byte, error)          { return d.Disk.ReadFile(d.root + name) }
func (d disk) Stat(name string) (host.Attributes, error)     { return d.Disk.Stat(d.root + name) }
func (d disk) Rename(from, to string) error                  { return d.Disk.Rename(d.root+from, d.root+to) }
func (d disk) Remove(name string) error                      { return d.Disk.Remove(d.root + name) }
func (d disk) Sync(dir string) error                         { return d.Disk.Sync(d.root + dir) }
func (d disk) Lock(dir string, s bool) (func() error, error) { return d.Disk.Lock(d.root+dir, s) }

func (d disk) Resolve(name string) (string, error) {
	path, err := d.Disk.Resolve(d.root + name)
	return strings.TrimPrefix(path, d.root), err
}

func (d disk) Write(name string, data []byte, a host.Attributes) error {
	return d.Disk.Write(d.root+name, data, a)
}

func (c *cluster) add(name string) *host.Host {
	c.t.Helper()
	root, err := filepath.EvalSymlinks(c.t.TempDir())
	if err != nil {
		c.t.Fatal(err)
	}
	const text = "apiVersion: v1\nkind: Pod\nmetadata: {name: kube-scheduler, namespace: kube-system}\nspec:\n  containers:\n" +
		"  - name: kube-scheduler\n    image: registry.k8s.io/kube-scheduler:v1.34.1\n    command: [kube-scheduler]\n"
	manifest := filepath.Join(root, host.DefaultManifest)
	if err := errors.Join(os.MkdirAll(filepath.Dir(manifest), 0o755), os.WriteFile(manifest, []byte(text), 0o600)); err != nil {
		c.t.Fatal(err)
	}
	h, err := host.New(host.Config{
		Scheduler: &scheduler{c, name}, FS: disk{root: root}, Turn: newTurn(c.client, "divvy-system", name, time.Minute),
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return h
}

var wanted = schedconf.Extender{URL: "http://127.0.0.1:32766/gcushare-scheduler", Resources: []string{"enflame.com/gcu-memory"}}

// TestOneAfterTheOther: the nodes of a cluster that is installed into all want to
// change their scheduler at once.
func TestOneAfterTheOther(t *testing.T) {
	c := &cluster{t: t, client: leases(), starting: map[string]bool{}}
	var wait sync.WaitGroup
	for i := range 3 {
		h := c.add(fmt.Sprint("node-", i))
		wait.Go(func() {
			for {
				_, err := h.Install(t.Context(), wanted, host.InstallOptions{})
				var notNow *host.NotNowError
				if err == nil {
					break
				}
				if !errors.As(err, &notNow) || notNow.Failure != nil || stateOf(err) != stateWaiting {
					t.Errorf("node %d: %v", i, err)
					break
				}
				time.Sleep(time.Millisecond)
			}
			if r, err := h.Install(t.Context(), wanted, host.InstallOptions{}); err != nil || r.Changed {
				t.Errorf("node %d, again: %t, %v", i, r.Changed, err)
			}
		})
	}
	wait.Wait()
	lease, err := c.client.CoordinationV1().Leases("divvy-system").Get(t.Context(), turnLease, metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity != nil || len(lease.Annotations) > 0 {
		t.Errorf("in the end the Lease is %+v, %v", lease, err)
	}
}

// TestStopsAtTheFirst: kube-scheduler does not start with what it is given. One
// node tries, and the others go on placing pods.
func TestStopsAtTheFirst(t *testing.T) {
	c := &cluster{t: t, client: leases(), starting: map[string]bool{}, refuses: true}
	first, second := c.add("first"), c.add("second")
	var back *host.RolledBackError
	if _, err := first.Install(t.Context(), wanted, host.InstallOptions{}); !errors.As(err, &back) {
		t.Fatalf("the error is %v", err)
	}
	var notNow *host.NotNowError
	if _, err := second.Install(t.Context(), wanted, host.InstallOptions{}); !errors.As(err, &notNow) ||
		!strings.Contains(err.Error(), "rolled back on node first") {
		t.Errorf("the second node: %v", err)
	}
	if s, err := second.Status(); err != nil || s.Wired || s.Pending || !slices.Equal(c.tried, []string{"first"}) {
		t.Errorf("it was tried on %v; the second is %+v, %v", c.tried, s, err)
	}
	// An administrator has mended what the files do not show.
	c.refuses, c.tried = false, nil
	if _, err := first.Install(t.Context(), wanted, host.InstallOptions{Again: true}); err != nil {
		t.Errorf("the first node: %v", err)
	}
	if _, err := second.Install(t.Context(), wanted, host.InstallOptions{}); err != nil {
		t.Errorf("the second node: %v", err)
	}
}

// TestTurn: what stops at the first node, and what does not.
func TestTurn(t *testing.T) {
	client := leases()
	now := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	node := func(name string) *turn {
		turn := newTurn(client, "divvy-system", name, time.Minute)
		turn.now = func() time.Time { return now }
		return turn
	}
	a, b := node("a"), node("b")
	take := func(by *turn, outcome, wantNode, wantReason string) {
		t.Helper()
		err := by.Take(t.Context(), outcome)
		var notNow *host.NotNowError
		if wantNode == "" {
			if err != nil {
				t.Errorf("%s is refused: %v", by.node, err)
			}
			return
		}
		if !errors.As(err, &notNow) || notNow.Node != wantNode || (notNow.Failure != nil) != (wantReason != "") ||
			!strings.Contains(err.Error(), wantReason) {
			t.Errorf("%s is told %v, want node %s and %q", by.node, err, wantNode, wantReason)
		}
	}
	done := func(by *turn, failure *host.Failure) {
		t.Helper()
		if err := by.Done(t.Context(), failure); err != nil {
			t.Error(err)
		}
	}
	take(a, "x", "", "")
	take(a, "x", "", "") // after a restart
	take(b, "x", "a", "")
	done(b, nil) // it is not b's
	take(b, "x", "a", "")
	failure := &host.Failure{Outcome: "x", Reason: "no such plugin", At: now}
	done(a, failure)
	take(b, "x", "a", "no such plugin")
	take(a, "x", "", "") // its own journal holds it
	done(a, failure)
	take(b, "y", "", "") // another change
	done(b, nil)
	take(b, "x", "a", "no such plugin")
	done(a, nil) // it went well there
	take(b, "x", "", "")
	// b is switched off. Whatever its clock said, a has seen it for long enough.
	take(a, "x", "b", "")
	now = now.Add(a.longest - time.Second)
	take(a, "x", "b", "")
	now = now.Add(time.Second)
	take(a, "x", "", "")
	failure.At = now
	done(a, failure)
	now = now.Add(rolledBackFor - time.Second)
	take(b, "x", "a", "no such plugin")
	now = now.Add(time.Second)
	take(b, "x", "", "")
	if state := stateOf(&host.NotNowError{Node: "a", Failure: failure}); state != stateRolledBack {
		t.Errorf("the state is %s", state)
	}
}

// TestNoLease: a scheduler is wired also where nobody keeps turns.
func TestNoLease(t *testing.T) {
	client := fake.NewClientset()
	turn := newTurn(client, "divvy-system", "a", time.Minute)
	if err := errors.Join(turn.Take(t.Context(), "x"), turn.Done(t.Context(), nil)); err != nil {
		t.Errorf("without a Lease: %v", err)
	}
	client.PrependReactor("*", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection refused")
	})
	if turn.Take(t.Context(), "x") == nil || turn.Done(t.Context(), nil) == nil {
		t.Error("an API server that is away says yes")
	}
}
