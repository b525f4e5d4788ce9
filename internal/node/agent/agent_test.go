package agent

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/nodelabels"
	"github.com/divvy-gpu/divvy/internal/node/quarantine"
	"github.com/divvy-gpu/divvy/internal/node/usage"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

// vendorBackend is a vendor whose devices the test changes.
type vendorBackend struct {
	gpuBackend
	name string
	// asking is held during Discover.
	asking sync.Mutex

	mu    sync.Mutex
	found backend.Found
	err   error
}

func (b *vendorBackend) Vendor() string { return b.name }

func (b *vendorBackend) Discover(context.Context) (backend.Found, error) {
	b.asking.Lock()
	defer b.asking.Unlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.found, b.err
}

func (b *vendorBackend) set(err error, devices ...accel.Device) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.found, b.err = backend.Found{Driver: "1.2.3", Devices: devices}, err
}

func (b *vendorBackend) Labels(backend.Sharing) map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return map[string]string{b.name + ".com/gpu.present": "true"}
}

// stage is where agents of a test play.
type stage struct {
	t        *testing.T
	dir      string
	client   *fake.Clientset
	registry *prometheus.Registry
	vendors  map[string]*vendorBackend
	config   config.NodeConfig
	// quarantine is that of the next agent; nil for one of its own.
	quarantine *quarantine.List
	// dressed are backends that are used in the place of those of vendors.
	dressed map[string]backend.Backend
	runDir  string
}

func newStage(t *testing.T) *stage {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent") //nolint:usetesting // a socket's path has 107 characters at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	for _, sub := range []string{"device-plugins", "pod-resources"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	writeFile(t, filepath.Join(dir, "key"), "0123456789abcdef0123456789abcdef")
	s := &stage{
		t: t, dir: dir, registry: prometheus.NewRegistry(), config: config.Default(),
		client: kubetest.CopyWatched(fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode,
			Labels: map[string]string{"iluvatar.com/gpu.present": "theirs"}}})),
		vendors: map[string]*vendorBackend{"nvidia": {name: "nvidia"}, "iluvatar": {name: "iluvatar"}},
	}
	s.config.KubeletDir, s.config.StateDir, s.config.CDIDir = dir, filepath.Join(dir, "state"), filepath.Join(dir, "cdi")
	s.config.HealthInterval = config.Duration(100 * time.Millisecond)
	s.config.Resources = []config.Resource{
		{Name: "nvidia.com/gpu", Vendor: "nvidia", Mode: config.ModeExclusive},
		{Name: "nvidia.com/gpu-memory", Vendor: "nvidia", Mode: config.ModeMemory, MemoryUnit: "1"},
		{Name: "iluvatar.com/gpu", Vendor: "iluvatar", Mode: config.ModeTimeSlicing, Replicas: 2},
	}
	return s
}

// play runs an agent until the returned function is called.
func (s *stage) play() (*Agent, func()) {
	s.t.Helper()
	backends := map[string]backend.Backend{}
	for name, b := range s.vendors {
		backends[name] = b
	}
	maps.Copy(backends, s.dressed)
	ctx, cancel := context.WithCancel(context.Background())
	a, err := New(ctx, Options{
		Config: s.config, Node: thisNode, Client: s.client, Keys: kube.NewKeyring(filepath.Join(s.dir, "key")),
		Backends: backends, Registry: s.registry, Quarantine: s.quarantine, RunDir: s.runDir,
	})
	if err != nil {
		cancel()
		s.t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		if err := a.Run(ctx); err != nil {
			s.t.Error(err)
		}
	})
	stop := sync.OnceFunc(func() { cancel(); running.Wait() })
	s.t.Cleanup(stop)
	return a, stop
}

func (s *stage) labels() map[string]string {
	node, err := s.client.CoreV1().Nodes().Get(s.t.Context(), thisNode, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return node.Labels
}

// A new configuration is a new agent in the same process: nothing of the one
// before may be left.
func TestAgentCanBeMadeAgain(t *testing.T) {
	s := newStage(t)
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	for range 3 {
		a, stop := s.play()
		eventually(t, "it publishes", func() bool {
			_, ok := a.publisher.before("nvidia.com/gpu")
			return ok
		})
		stop()
		families, err := s.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		if len(families) != 0 {
			t.Fatalf("%d families of metrics are left, the first is %s", len(families), families[0].GetName())
		}
	}
}

// Who starts a goroutine waits for it: a new agent must not come up while the one
// before still asks the vendor's library.
func TestRunLeavesNothingBehind(t *testing.T) {
	s := newStage(t)
	slow := s.vendors["nvidia"]
	slow.set(nil, gpuDevice(0, "a"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	a, stop := s.play()
	eventually(t, "it publishes", func() bool {
		_, ok := a.publisher.before("nvidia.com/gpu")
		return ok
	})
	slow.asking.Lock()
	time.Sleep(5 * time.Duration(s.config.HealthInterval)) // Discover waits now
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		stop()
	}()
	select {
	case <-stopped:
		t.Error("Run returned during a call of the vendor's library")
	case <-time.After(500 * time.Millisecond):
	}
	slow.asking.Unlock()
	<-stopped
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	for _, one := range []string{"agent.(*Agent)", "agent.(*publisher)", "agent.(*nodePods)", "backend.Watch", "deviceplugin.(*Server)",
		"cache.(*Reflector)"} {
		if strings.Contains(string(stacks), one) {
			t.Errorf("%s still runs:\n%s", one, stacks)
		}
	}
}

// One configuration serves nodes of all kinds: a vendor that has nothing on this
// one is not waited for.
func TestReadinessDoesNotMissAVendorThatIsNotThere(t *testing.T) {
	s := newStage(t)
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
	s.vendors["iluvatar"].set(&backend.UnavailableError{Vendor: "iluvatar", Err: errors.New("no libixml.so")})
	a, stop := s.play()
	eventually(t, "only kubelet is missing", func() bool {
		err := a.Ready()
		return err != nil && strings.Contains(err.Error(), "nvidia.com/gpu: kubelet is not listening") &&
			!strings.Contains(err.Error(), "iluvatar")
	})
	stop()
	// Where no vendor has anything, all are missed.
	s.vendors["nvidia"].set(&backend.UnavailableError{Vendor: "nvidia", Err: errors.New("no libnvidia-ml.so.1")})
	s.config.StateDir = filepath.Join(s.dir, "fresh")
	a, _ = s.play()
	eventually(t, "both are missed", func() bool {
		err := a.Ready()
		return err != nil && strings.Contains(err.Error(), "no libixml.so") && strings.Contains(err.Error(), "no libnvidia-ml.so.1")
	})
	if err := a.Alive(t.Context()); err != nil {
		t.Errorf("what the world outside lacks is no reason to be restarted: %v", err)
	}
	s.vendors["nvidia"].set(&backend.UnavailableError{Vendor: "nvidia",
		Err: &backend.RestartNeededError{Reason: "the driver is another one than at the start"}})
	eventually(t, "a restart is asked for", func() bool {
		err := a.Alive(t.Context())
		return err != nil && strings.Contains(err.Error(), "divvy-node must be restarted")
	})
}

func TestLabelsFollowTheDevices(t *testing.T) {
	s := newStage(t)
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"), gpuDevice(1, "b"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	_, stop := s.play()
	want := map[string]string{
		"divvy.dev/nvidia.present": "true", "divvy.dev/nvidia.count": "2", "divvy.dev/nvidia.model": "G",
		"divvy.dev/nvidia.memory": "40960", "divvy.dev/nvidia.driver": "1.2.3", "nvidia.com/gpu.present": "true",
		"divvy.dev/iluvatar.present": "true", "divvy.dev/iluvatar.count": "1", "divvy.dev/iluvatar.model": "G",
		"divvy.dev/iluvatar.memory": "40960", "divvy.dev/iluvatar.driver": "1.2.3",
		"divvy.dev/iluvatar.isolation": "none",   // what is shared of NVIDIA is not known without kubelet
		"iluvatar.com/gpu.present":     "theirs", // as somebody else has set it
	}
	eventually(t, "the labels are there", func() bool { return cmp.Equal(want, s.labels()) })
	node, err := s.client.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if owned := node.Annotations[nodelabels.OwnedAnnotation]; strings.Contains(owned, "iluvatar.com/") ||
		!strings.Contains(owned, "nvidia.com/gpu.present") {
		t.Errorf("taken for ours: %s", owned)
	}
	stop()
	s.config.Labels = config.LabelNone
	_, _ = s.play()
	eventually(t, "only what is somebody else's is left", func() bool {
		return cmp.Equal(map[string]string{"iluvatar.com/gpu.present": "theirs"}, s.labels())
	})
}

func TestHealthIsToldOncePerDevice(t *testing.T) {
	ctx := t.Context()
	whole := newSlotWorld(t, t.TempDir(), exclusive)
	slices := newSlotWorld(t, t.TempDir(), fourTimes)
	var node, pods []string
	h := &healthReporter{
		metrics: whole.metrics, pods: whole, unhealthy: map[string]map[accel.DeviceID]accel.Health{},
		node: func(kind events.Kind, message string) { node = append(node, kind.Reason+": "+message) },
		pod:  func(p *corev1.Pod, kind events.Kind, _ string) { pods = append(pods, p.Name+" "+kind.Reason) },
		claimed: func([]*corev1.Pod) []usage.Container {
			one := func(pod, device string) usage.Container {
				return usage.Container{Namespace: "ns", Pod: pod, Device: accel.DeviceID(device)}
			}
			return []usage.Container{one("claimant", "a"), one("claimant", "a"), one("claimant", "c"), one("other", "b"), one("gone", "a")}
		},
	}
	whole.pods = []*corev1.Pod{newPod("holder"), newPod("other"), newPod("claimant")}
	whole.gives("holder", "a")
	// The first device is there for units and for claims, the second for units, and the third for claims.
	report := func(first, third accel.Device) {
		for _, w := range []*slotWorld{whole, slices} {
			w.found(first, gpuDevice(1, "b"))
		}
		for range 3 {
			h.report(ctx, "nvidia", []*pool{whole.pool, slices.pool}, []accel.Device{first, third, third})
		}
	}
	a, c := gpuDevice(0, "a"), gpuDevice(2, "c")
	report(a, c)
	ill := sick(a)
	report(ill, c)
	ill.Health.Reason += "; well again, and trusted once it was so for 10s"
	report(ill, c)
	report(a, c)
	report(a, sick(c))
	report(a, c)
	if diff := cmp.Diff([]string{
		"DeviceUnhealthy: nvidia device 0 (a) is unhealthy; no new pods are placed on it: XID 79",
		"DeviceRecovered: nvidia device 0 (a) is healthy again; new pods can be placed on it",
		"DeviceUnhealthy: nvidia device 2 (c) is unhealthy; no new pods are placed on it: XID 79",
		"DeviceRecovered: nvidia device 2 (c) is healthy again; new pods can be placed on it",
	}, node); diff != "" {
		t.Errorf("events of the node (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"claimant DeviceUnhealthy", "holder DeviceUnhealthy", "claimant DeviceUnhealthy"}, pods); diff != "" {
		t.Errorf("events of pods (-want +got):\n%s", diff)
	}
}

func TestCDISpecificationsOfOthersAndOfOldAreNotOurs(t *testing.T) {
	s := newStage(t)
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	if err := os.MkdirAll(s.config.CDIDir, 0o750); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"divvy-old.com-gpu.json", "nvidia.yaml"} {
		writeFile(t, filepath.Join(s.config.CDIDir, name), "{}")
	}
	s.config.Vendors = map[string]config.Vendor{
		"nvidia":   {Injection: []config.Injection{config.InjectCDI}},
		"iluvatar": {Injection: []config.Injection{config.InjectCDI}, CDIKind: "iluvatar.com/toolkit"},
	}
	files := func() string {
		entries, err := os.ReadDir(s.config.CDIDir)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, e := range entries {
			out = append(out, e.Name())
		}
		return strings.Join(out, " ")
	}
	writeFile(t, filepath.Join(s.config.CDIDir, "divvy-claim-nvidia-uid.json"), "{}")
	a, stop := s.play()
	eventually(t, "the specification is written", func() bool { return strings.Contains(files(), "divvy-nvidia.com-gpu") })
	stop()
	if got := files(); !strings.Contains(got, "divvy-old.com-gpu.json") {
		t.Errorf("%s: a file was removed that containers may have been given names of", got)
	}
	if err := a.cdi.tidy(); err != nil || !strings.Contains(files(), "old") {
		t.Errorf("%v, left are %s; the memory resource waits for kubelet and may be of the old kind", err, files())
	}
	for p, kinds := range a.cdi.wanted {
		if kinds == nil {
			a.cdi.wanted[p] = cdiKinds{}
		}
	}
	if err := a.cdi.tidy(); err != nil {
		t.Fatal(err)
	}
	if got := files(); strings.Contains(got, "old") || !strings.Contains(got, "nvidia.yaml") ||
		!strings.Contains(got, "divvy-nvidia.com-gpu") || !strings.Contains(got, "divvy-claim-nvidia-uid.json") {
		t.Errorf("left are %s", got)
	}
}

// TestStateOfOthersThatCannotBeRead: the daemon starts all the same.
func TestStateOfOthersThatCannotBeRead(t *testing.T) {
	s := newStage(t)
	s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
	s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
	for _, name := range []string{"units-old.com_memory.json", "slots-old.com_gpu.json"} {
		if err := os.MkdirAll(filepath.Join(s.config.StateDir, name), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	a, _ := s.play()
	eventually(t, "it publishes", func() bool {
		_, ok := a.publisher.before("nvidia.com/gpu")
		return ok
	})
}

// TestFolderThatWasRemovedUnderAMount: nothing but a new mount helps, so the
// daemon asks to be restarted. A working folder that was removed is like such a
// mount.
func TestFolderThatWasRemovedUnderAMount(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	t.Chdir(dir)
	w := newSlotWorld(t, ".", exclusive)
	w.found(gpuDevice(0, "a"))
	a := &Agent{
		metrics: w.metrics, discoveries: newDiscoveries(nil),
		offerings: offerings{{name: gpu, parts: []*pool{w.pool}, server: deviceplugin.NewServer(dir, "none", gpu, w.pool)}},
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	w.found(gpuDevice(0, "a"), gpuDevice(1, "b"))
	a.progress.note(nil, nil, a.offerings.observe(w.metrics))
	var removed *atomicfile.RemovedError
	if err := a.Alive(t.Context()); !errors.As(err, &removed) {
		t.Errorf("alive: %v, want that the folder was removed", err)
	}
	if got, want := w.list(), "a|b"; got != want {
		t.Errorf("kubelet is told %s, want %s", got, want)
	}
}
