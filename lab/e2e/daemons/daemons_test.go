//go:build e2e

// Package daemons tests one divvy-node after the other on one node, as processes that
// are ended and killed at any moment: on the lab's real API server and kubelet's real
// device manager, with simulated devices. It leaves the lab's cluster alone and needs
// no root.
//
//	go test -tags e2e -count=1 ./e2e/daemons
package daemons

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/kubelet"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

const (
	nodeName  = "node-1"
	namespace = "team"
	memory    = "enflame.com/gcu-memory"
	whole     = "enflame.com/gcu"
	slice     = "enflame.com/gcu.shared"
	// patience is how long something that is bound to come may take where every
	// processor is busy with other tests.
	patience = 3 * time.Minute
)

var (
	rounds = flag.Int("rounds", 8, "how often a daemon is replaced")
	seed   = flag.Uint64("seed", 1, "what the random moments begin with")
)

// What the tests run, built once by TestMain.
var (
	programs controlplane.Programs
	daemon   string
	library  string
)

func TestMain(m *testing.M) {
	flag.Parse()
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	code, err := run(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	if code != 0 || err != nil {
		os.Exit(1)
	}
}

func run(m *testing.M) (code int, err error) {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "divvy-daemons-")
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if programs, err = controlplane.Build(ctx, dir, os.DevNull, os.Stderr); err != nil {
		return 1, err
	}
	lab, err := layout.LabDir()
	if err != nil {
		return 1, err
	}
	daemon = filepath.Join(dir, "divvy-node")
	if err := build.RunGo(ctx, filepath.Dir(lab), []string{"CGO_ENABLED=1", "CGO_CFLAGS=-g -O2 -Wno-deprecated-declarations"}, nil,
		"build", "-buildvcs=false", "-trimpath", "-tags", "netgo,osusergo", "-ldflags", "-extldflags=-Wl,-z,lazy", "-o", daemon,
		"./cmd/divvy-node"); err != nil {
		return 1, err
	}
	if library, err = vendorsim.Build(ctx, vendorsim.Enflame, dir); err != nil {
		return 1, err
	}
	return m.Run(), nil
}

// node is a node with its API server and kubelet. It implements kubelet.Server.
type node struct {
	*testing.T
	dir     string
	plane   *controlplane.ControlPlane
	client  kubernetes.Interface
	kubelet *kubelet.Kubelet
	started int

	mu   sync.Mutex
	pods map[types.UID]*corev1.Pod
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "dd") //nolint:usetesting // a socket's path has 107 characters at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	n := &node{T: t, dir: dir, pods: map[types.UID]*corev1.Pod{}}
	if n.plane, err = controlplane.Start(t.Context(), programs.BinDir, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.plane.Stop(); err != nil {
			t.Error(err)
		}
	})
	if n.client, err = n.plane.Client(); err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}},
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if n.kubelet, err = kubelet.New(kubelet.Options{
		Log: textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(io.Discard))), Dir: dir, Node: nodeName, Server: n,
	}); err != nil {
		t.Fatal(err)
	}
	if err := n.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.kubelet.Stop(); err != nil {
			t.Error(err)
		}
	})
	n.write(filepath.Base(library), read(t, library))
	n.hardware(0)
	n.write("key", []byte("a key that only this node's daemons know"))
	return n
}

// hardware sets how long each call of the vendor's library takes.
func (n *node) hardware(delay time.Duration) {
	n.Helper()
	topology := vendorsim.Topology{Library: vendorsim.Library{Calls: vendorsim.Calls{Delay: delay}}, Cards: vendorsim.GCUs(6, 16<<10)}
	if err := topology.Write(filepath.Join(n.dir, vendorsim.TopologyName)); err != nil {
		n.Fatal(err)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func (n *node) write(name string, data []byte) {
	n.Helper()
	if err := os.WriteFile(filepath.Join(n.dir, name), data, 0o600); err != nil {
		n.Fatal(err)
	}
}

// Pods implements kubelet.Server.
func (n *node) Pods() []*corev1.Pod { return nil }

// Update implements kubelet.Server.
func (n *node) Update(uid types.UID, change func(*corev1.Pod)) {
	n.mu.Lock()
	pod := n.pods[uid]
	n.mu.Unlock()
	if pod == nil {
		return
	}
	api := n.client.CoreV1().Pods(namespace)
	now, err := api.Get(context.Background(), pod.Name, metav1.GetOptions{})
	if err == nil {
		change(now)
		now.ResourceVersion = ""
		_, err = api.UpdateStatus(context.Background(), now, metav1.UpdateOptions{})
	}
	if err != nil {
		n.Errorf("status of pod %s: %v", pod.Name, err)
	}
}

// Remove implements kubelet.Server.
func (n *node) Remove(uid types.UID) {
	n.mu.Lock()
	pod := n.pods[uid]
	delete(n.pods, uid)
	n.mu.Unlock()
	if pod == nil {
		return
	}
	if err := n.client.CoreV1().Pods(namespace).Delete(context.Background(), pod.Name,
		metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		n.Errorf("delete pod %s: %v", pod.Name, err)
	}
}

// process is a daemon that runs.
type process struct {
	*controlplane.Process
	url string
}

// start starts the daemon of another pod.
func (n *node) start() *process {
	n.Helper()
	n.started++
	return n.startAs(fmt.Sprintf("divvy-node-%02d", n.started))
}

// startAs starts the daemon of the pod with that UID, again if it had ended.
func (n *node) startAs(name string) *process {
	n.Helper()
	ports, err := controlplane.FreePorts(1)
	if err != nil {
		n.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", ports[0])
	n.write(name+".yaml", fmt.Appendf(nil, `apiVersion: config.divvy.dev/v1alpha1
kind: NodeConfig
kubeletDir: %[1]s
stateDir: %[1]s/state
cdiDir: %[1]s/cdi
driverRoot: %[1]s
grantKeyFile: %[1]s/key
listen: %[2]s
libraries: {enflame: %[1]s/%[3]s}
resources:
- {name: %[4]s, vendor: enflame, mode: memory, memoryUnit: "1", devices: {indexes: [0, 1]}}
- {name: %[5]s, vendor: enflame, mode: exclusive, devices: {indexes: [2, 3]}}
- {name: %[6]s, vendor: enflame, mode: timeSlicing, replicas: 4, devices: {indexes: [4, 5]}}
`, n.dir, address, filepath.Base(library), memory, whole, slice))
	p, err := controlplane.StartProcess(name, daemon, filepath.Join(n.dir, name+".log"), []string{"POD_NAMESPACE=divvy-system",
		"POD_UID=" + name},
		"--node-name="+nodeName, "--kubeconfig="+n.plane.Kubeconfig(), "--config="+filepath.Join(n.dir, name+".yaml"))
	if err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() {
		if err := p.Stop(patience); err != nil {
			n.Error(err)
		}
		if n.Failed() {
			n.Logf("%s:\n%s", name, p.LogTail(40))
		}
	})
	return &process{Process: p, url: "http://" + address}
}

// ready returns what the daemon's probe says.
func (p *process) ready(ctx context.Context) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/readyz", http.NoBody)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close() //nolint:errcheck // read
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = errors.New(strings.TrimSpace(string(text)))
	}
	return err
}

// awaitReady waits until a daemon serves the node and kubelet has its units.
func (n *node) awaitReady(p *process) {
	n.Helper()
	n.eventually(func() error {
		if err := p.ready(n.Context()); err != nil {
			return err
		}
		return n.offered()
	})
}

func (n *node) offered() error {
	for name, want := range map[corev1.ResourceName]int64{memory: 32, whole: 2, slice: 8} {
		if _, got := n.kubelet.Capacity(name); got != want {
			return fmt.Errorf("kubelet offers %d of %s, want %d", got, name, want)
		}
	}
	return nil
}

func (n *node) eventually(check func() error) {
	n.Helper()
	if err := poll.Until(n.Context(), patience, "the node", func(context.Context) error { return check() }); err != nil {
		n.Fatal(err)
	}
}

// load creates and ends pods on the node, so few that each finds a device.
type load struct {
	*node
	random  *rand.Rand
	alive   map[corev1.ResourceName][]*corev1.Pod
	number  int
	stopped atomic.Bool
	work    sync.WaitGroup

	admitted atomic.Int64
	mu       sync.Mutex
	rejected []string
	wrong    error
}

func (n *node) load() *load {
	l := &load{node: n, random: rand.New(rand.NewPCG(*seed, 0)), alive: map[corev1.ResourceName][]*corev1.Pod{}}
	l.work.Go(func() {
		for !l.stopped.Load() {
			err := l.next()
			if err == nil {
				err = l.recount()
			}
			if err != nil {
				l.mu.Lock()
				l.wrong = err
				l.mu.Unlock()
				return
			}
		}
	})
	n.Cleanup(l.stop)
	return l
}

func (l *load) stop() {
	l.stopped.Store(true)
	l.work.Wait()
}

// outcome returns how many pods were admitted, what kubelet said of others, and what
// is wrong for good.
func (l *load) outcome() (admitted int64, rejected []string, wrong error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.admitted.Load(), slices.Clone(l.rejected), l.wrong
}

// next admits one pod, in place of one that ends where there are enough.
func (l *load) next() error {
	l.number++
	kind := []corev1.ResourceName{memory, whole, slice}[l.number%3]
	for most := map[corev1.ResourceName]int{memory: 3, whole: 1, slice: 5}[kind]; len(l.alive[kind]) >= most; {
		i := l.random.IntN(len(l.alive[kind]))
		l.kubelet.Remove(l.alive[kind][i])
		l.alive[kind] = slices.Delete(l.alive[kind], i, i+1)
	}
	spec := corev1.PodSpec{NodeName: nodeName, Containers: []corev1.Container{container("app", kind, 1)}}
	if kind == memory {
		spec.Containers = []corev1.Container{container("app", kind, 1+l.random.Int64N(3)), container("side", kind, 1)}
		if l.random.IntN(2) == 0 {
			spec.InitContainers = []corev1.Container{container("init", kind, 4)}
		}
	}
	pod, err := l.client.CoreV1().Pods(namespace).Create(context.Background(),
		&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%05d", l.number)}, Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	l.node.mu.Lock()
	l.node.pods[pod.UID] = pod
	l.node.mu.Unlock()
	if err := l.kubelet.Add(pod); err != nil {
		l.mu.Lock()
		l.rejected = append(l.rejected, fmt.Sprintf("%s of %s: %v", pod.Name, kind, err))
		l.mu.Unlock()
		l.kubelet.Remove(pod)
		time.Sleep(20 * time.Millisecond) // as no scheduler sends one at once again
		return nil
	}
	if err := l.kubelet.Run(pod); err != nil {
		return err
	}
	l.alive[kind] = append(l.alive[kind], pod)
	l.admitted.Add(1)
	return nil
}

func container(name string, what corev1.ResourceName, amount int64) corev1.Container {
	list := corev1.ResourceList{what: *resource.NewQuantity(amount, resource.DecimalSI)}
	return corev1.Container{Name: name, Image: "none", Resources: corev1.ResourceRequirements{Limits: list, Requests: list}}
}

// recount checks that no unit, device or slice is held by two pods, and that no pod
// with memory is on two devices.
func (l *load) recount() error {
	saved, err := state.NewStore(filepath.Join(l.dir, "state"), alloc.ID{Resource: memory, Kind: alloc.Memory}).Load()
	if err != nil {
		return err
	}
	if saved == nil {
		saved = &alloc.State{}
	}
	layout, err := sharing.NewLayout(saved.Ranges)
	if err != nil {
		return err
	}
	for kind, pods := range l.alive {
		owner := map[string]types.UID{}
		for _, pod := range pods {
			device := map[string]bool{}
			for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
				ids := l.kubelet.IDs(pod.UID, c.Name, kind)
				if want := c.Resources.Limits[kind]; int64(len(ids)) != want.Value() {
					return fmt.Errorf("container %s of %s has %v, wants %d of %s", c.Name, pod.Name, ids, want.Value(), kind)
				}
				for _, id := range ids {
					if other, taken := owner[id]; taken && other != pod.UID {
						return fmt.Errorf("%s of %s is held by two pods, one is %s", id, kind, pod.Name)
					}
					owner[id] = pod.UID
					if kind == memory {
						d, _ := layout.Device(id)
						device[string(d)] = true
					}
				}
			}
			if kind == memory && (len(device) != 1 || device[""]) {
				return fmt.Errorf("pod %s is on the devices %v", pod.Name, device)
			}
		}
	}
	return nil
}

// flows waits until some more pods of each kind were admitted.
func (l *load) flows() {
	l.Helper()
	seen := l.admitted.Load()
	l.eventually(func() error {
		now, rejected, wrong := l.outcome()
		if wrong == nil && now < seen+6 {
			return fmt.Errorf("%d pods were admitted since; the last that were rejected: %v", now-seen, rejected[max(0, len(rejected)-2):])
		}
		return nil
	})
	if _, _, wrong := l.outcome(); wrong != nil {
		l.Fatal(wrong)
	}
}

// kubeletWaited is what a daemon logs that has taken over.
var kubeletWaited = regexp.MustCompile(`kubeletWaited="?([0-9.a-zµ]+)`)

// TestRollingUpdate replaces the daemon as a DaemonSet with maxSurge does: the next one
// is started, and the one before is ended once the next is ready.
func TestRollingUpdate(t *testing.T) {
	n := newNode(t)
	now := n.start()
	n.awaitReady(now)
	l := n.load()
	l.flows()
	var waited []time.Duration
	for range *rounds {
		next := n.start()
		n.awaitReady(next)
		if err := now.ready(t.Context()); err == nil {
			t.Error("both are ready")
		}
		match := kubeletWaited.FindStringSubmatch(next.LogTail(1000))
		if match == nil {
			t.Fatalf("%s did not take over", next.Name())
		}
		d, err := time.ParseDuration(match[1])
		if err != nil {
			t.Fatal(err)
		}
		waited = append(waited, d)
		if err := now.Stop(patience); err != nil {
			t.Fatal(err)
		}
		now = next
		l.flows()
	}
	l.stop()
	admitted, rejected, _ := l.outcome()
	t.Logf("%d updates, %d pods admitted, %d rejected; kubelet waited %v", *rounds, admitted, len(rejected), waited)
	for _, what := range rejected {
		t.Error(what)
	}
}

// TestKilledAtAnyMoment kills one of two daemons at a random moment of the handover.
// What is left serves the node, nothing is given out twice, and pods are rejected at
// most while kubelet has no device plugin.
func TestKilledAtAnyMoment(t *testing.T) {
	n := newNode(t)
	random := rand.New(rand.NewPCG(*seed, 1))
	now := n.start()
	n.awaitReady(now)
	l := n.load()
	l.flows()
	count := map[string]int{}
	for range *rounds {
		next := n.start()
		moment := time.Duration(random.Int64N(int64(600 * time.Millisecond)))
		select {
		case <-t.Context().Done():
			return
		case <-time.After(moment):
		}
		if random.IntN(2) == 0 {
			count["successors killed"]++
			if err := next.Kill(); err != nil {
				t.Fatal(err)
			}
			n.awaitReady(now)
		} else {
			count["predecessors killed"]++
			if err := now.Kill(); err != nil {
				t.Fatal(err)
			}
			n.awaitReady(next)
			now = next
		}
		l.flows()
	}
	l.stop()
	admitted, rejected, _ := l.outcome()
	t.Logf("%v, %d pods admitted, %d rejected", count, admitted, len(rejected))
	for _, what := range rejected {
		if !slices.ContainsFunc([]string{"no healthy devices present", "Insufficient", "OutOf", "Unavailable", "connection",
			"has been stopped", "EOF", "Canceled"},
			func(s string) bool { return strings.Contains(what, s) }) {
			t.Error(what)
		}
	}
}

// TestCrash kills the daemon and starts it again, as kubelet does with a container, and
// prints how long kubelet has no unit of it then. A slow library makes no difference:
// a pod that comes before it has answered waits.
func TestCrash(t *testing.T) {
	for name, delay := range map[string]time.Duration{"a quick library": 0,
		"a library that takes 100 ms for each call": 100 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			now := n.start()
			n.awaitReady(now)
			l := n.load()
			l.flows()
			n.hardware(delay)
			var registered, admitted []time.Duration
			for range *rounds {
				if err := now.Kill(); err != nil {
					t.Fatal(err)
				}
				n.eventually(func() error {
					if _, units := n.kubelet.Capacity(memory); units > 0 {
						return errors.New("kubelet has not noticed that the daemon was killed")
					}
					return nil
				})
				before, _, _ := l.outcome()
				begun := time.Now()
				now = n.startAs(now.Name())
				n.eventually(n.offered)
				registered = append(registered, time.Since(begun).Round(time.Millisecond))
				n.eventually(func() error {
					if after, _, _ := l.outcome(); after == before {
						return errors.New("no pod was admitted since")
					}
					return nil
				})
				admitted = append(admitted, time.Since(begun).Round(time.Millisecond))
				n.awaitReady(now)
			}
			l.flows()
			l.stop()
			slices.Sort(registered)
			slices.Sort(admitted)
			t.Logf("from the start of the process: kubelet has every resource after %v (median), %v (slowest); the first pod is admitted "+
				"after %v, %v",
				registered[len(registered)/2], registered[len(registered)-1], admitted[len(admitted)/2], admitted[len(admitted)-1])
		})
	}
}
