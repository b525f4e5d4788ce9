package agent

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/mps"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// serving is a world whose devices a and b have MPS. The service is the test.
type serving struct {
	*world
	*mpsWatch
	agent   *Agent
	backend *fakeMeter
	host    string
	report  mps.Report
	clock   time.Time
	told    []string
	// given are the CDI devices that the last container got.
	given []backend.CDIDevice
}

func newServing(t *testing.T) *serving {
	t.Helper()
	m := &serving{world: newWorld(t, "1"), host: t.TempDir(), clock: time.Unix(1000, 0), backend: &fakeMeter{}}
	for _, dir := range []string{"proc/self/ns", "proc/41", "cdi"} {
		if err := os.MkdirAll(filepath.Join(m.host, dir), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("pid:[4026531836]", filepath.Join(m.host, "proc/self/ns/pid")); err != nil {
		t.Fatal(err)
	}
	m.put("comm", "python\n")
	m.put("stat", "41 (python) S 1 41 41 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 0 0\n")
	m.put("cgroup", "0::/user.slice\n")
	devices := found(card(0, "a", 16), card(1, "b", 16))
	a := &Agent{o: Options{Node: thisNode, Config: config.Default(), Backends: map[string]backend.Backend{"enflame": m.backend}},
		records: m.world.records, metrics: newMetrics(prometheus.NewRegistry()), offerings: offerings{{parts: []*pool{m.world.pool}}}}
	a.o.Config.DriverRoot = m.host
	a.o.Config.Resources = []config.Resource{{Name: string(gcuMemory), Isolation: config.IsolationCooperative}}
	a.o.Config.Vendors = map[string]config.Vendor{"enflame": {DriverRoot: "/driver"}}
	a.o.Config.CDIDir, a.o.Config.KubeletDir = filepath.Join(m.host, "cdi"), m.host
	a.cdi = newCDIWriter(a.o.Config, LimitOptions{})
	a.discoveries = newDiscoveries(a.o.Backends)
	a.discoveries.note("enflame", devices, nil)
	p := m.world.pool
	p.backend, p.tier, p.inject = m.backend, accel.TierCooperative, injector{ways: []config.Injection{config.InjectCDI}}
	p.specify = a.cdi.specifier(p, config.Vendor{})
	p.limit = func(ids []accel.DeviceID, units accel.Units, percent int) (_ []backend.CDIDevice, err error) {
		m.given, err = a.cdi.limit(p, ids, units, percent)
		return m.given, err
	}
	m.agent, m.mpsWatch = a, newMPSWatch(t.Context(), a, nil)
	m.mpsWatch.now = func() time.Time { return m.clock }
	m.mpsWatch.node = func(k events.Kind, text string) { m.told = append(m.told, k.Reason+": "+text) }
	m.world.update(t.Context(), devices, nil)
	m.report.Devices = map[accel.DeviceID]*mps.DeviceReport{}
	for _, id := range []accel.DeviceID{"a", "b"} {
		m.report.Devices[id] = &mps.DeviceReport{Exclusive: true}
	}
	return m
}

// put writes a file of process 41.
func (m *serving) put(name, text string) {
	m.t.Helper()
	if err := os.WriteFile(filepath.Join(m.host, "proc/41", name), []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// passes makes passes, each after one of the service, and returns what is stated of device a
// and why it is no more.
func (m *serving) passes(n int) (accel.Isolation, string) {
	m.t.Helper()
	for range n {
		m.clock = m.clock.Add(15 * time.Second)
		m.report.Time = m.clock
		m.write()
		m.pass(m.t.Context())
	}
	i, err := m.desk.isolation("a")
	for _, s := range see(m.world.pool, (*alloc.Engine).Inventory).Shares {
		if s.ID == "a" && s.Isolation != i {
			m.t.Errorf("the inventory states %+v, the last pass found %+v", s.Isolation, i)
		}
	}
	if err != nil {
		return i, err.Error()
	}
	return i, ""
}

func (m *serving) write() {
	m.t.Helper()
	if err := os.MkdirAll(m.mpsWatch.dir, 0o750); err != nil {
		m.t.Fatal(err)
	}
	if err := mps.WriteReport(m.mpsWatch.dir, m.report); err != nil {
		m.t.Fatal(err)
	}
}

func (m *serving) wantTier(what string, passes int, tier accel.Tier, why string) {
	m.t.Helper()
	got, reason := m.passes(passes)
	if got.Memory != tier || got.Compute != tier || !strings.Contains(reason, why) || (why == "") != (reason == "") {
		m.t.Errorf("%s: isolation is %+v because %s, want %q because %s", what, got, reason, tier, why)
	}
}

func TestMPSTierIsStatedWhileItIsProven(t *testing.T) {
	m := newServing(t)
	if _, err := m.desk.isolation("a"); err == nil {
		t.Error("a tier is stated before the first pass")
	}
	m.wantTier("the first pass", 1, accel.TierCooperative, "")
	if i, _ := m.desk.isolation("a"); i.Backend != "mps2" || !i.Attested.Equal(m.clock) {
		t.Errorf("isolation is %+v", i)
	}
	want := mps.Wish{Devices: []accel.DeviceID{"a", "b"}, DriverRoot: "/driver"}
	if got, err := mps.ReadWish(m.mpsWatch.dir); err != nil || !cmp.Equal(got, want) {
		t.Errorf("the service is to do %+v, %v", got, err)
	}

	m.report.Devices["a"].Servers = []mps.Server{{PID: 40, State: "FAULT", Clients: []int{41}}}
	m.wantTier("a fault", 1, accel.TierNone, "MPS server 40 is in state FAULT")
	if i, err := m.desk.isolation("b"); err != nil || i.Memory != accel.TierCooperative {
		t.Errorf("the other device: %+v, %v", i, err)
	}
	m.report.Devices["a"].Servers[0].State = "ACTIVE"
	m.wantTier("one pass without the fault", 1, accel.TierNone, "in one pass only")
	m.wantTier("two passes without the fault", 1, accel.TierCooperative, "")

	m.report.Devices["a"].Exclusive = false
	m.wantTier("another compute mode", 1, accel.TierNone, "EXCLUSIVE_PROCESS")
	m.report.Devices["a"].Exclusive = true
	m.wantTier("the mode again", 2, accel.TierCooperative, "")

	m.backend.found = map[accel.DeviceID]backend.Measured{"a": {Processes: []backend.Process{{PID: 41}}}}
	m.wantTier("a client", 2, accel.TierCooperative, "")
	m.report.Devices["a"].Servers = nil
	m.wantTier("a process that has just ended to be a client", 1, accel.TierCooperative, "")
	m.wantTier("a process without MPS", 1, accel.TierNone, "process 41 (python) uses the device without MPS")
	m.backend.found = nil
	m.wantTier("without the process", 2, accel.TierCooperative, "")

	m.report.Devices["a"].Problem = "it has ended"
	m.wantTier("no daemon", 1, accel.TierNone, "it has ended")
	m.report.Devices["a"].Problem = ""
	m.wantTier("the daemon again", 2, accel.TierCooperative, "")
	m.clock = m.clock.Add(time.Hour)
	m.pass(t.Context())
	if _, err := m.desk.isolation("a"); err == nil || err.Error() != mps.ErrNotRunning.Error() {
		t.Errorf("without the service: %v", err)
	}
	if n := len(m.told); n != 6 || !strings.HasPrefix(m.told[0], "IsolationLost: device a: MPS server 40") {
		t.Errorf("%d events: %q", n, m.told)
	}
}

// TestMPSOfStrangers: a process without MPS counts from the first pass on, and one in a pod is none of
// the driver's, whatever its name is.
func TestMPSOfStrangers(t *testing.T) {
	pod := "0::/kubepods-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-" + strings.Repeat("a", 64) + ".scope\n"
	for name, tt := range map[string]struct {
		comm, group, want string
	}{
		"of the host":             {"python\n", "0::/user.slice\n", "process 41 (python) uses the device without MPS"},
		"of the driver":           {"Xorg\n", "0::/system.slice/display.service\n", ""},
		"of a pod, with its name": {"Xorg\n", pod, "process 41 (of pod 11111111-2222-3333-4444-555555555555) uses the device without MPS"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newServing(t)
			m.put("comm", tt.comm)
			m.put("cgroup", tt.group)
			m.backend.found = map[accel.DeviceID]backend.Measured{"a": {Processes: []backend.Process{{PID: 41}}}}
			tier := accel.TierNone
			if tt.want == "" {
				tier = accel.TierCooperative
			}
			m.wantTier(name, 1, tier, tt.want)
		})
	}
}

// TestMPSIsNotWantedWithoutClients: a GPU whose containers are no clients keeps its compute mode.
func TestMPSIsNotWantedWithoutClients(t *testing.T) {
	m := newServing(t)
	m.world.pool.limit = nil
	m.wantTier("without specifications", 1, accel.TierNone, "needs injection cdi or cdiAnnotations")
	if got, err := mps.ReadWish(m.mpsWatch.dir); err != nil || len(got.Devices) > 0 {
		t.Errorf("the service is to do %+v, %v", got, err)
	}
}

func TestMPSIsNotSetUp(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(m *serving)
		want   string
	}{
		"another injection": {func(m *serving) { m.world.pool.inject.ways = []config.Injection{config.InjectEnvironment} },
			"resource enflame.com/gcu-memory: isolation cooperative needs injection cdi or cdiAnnotations"},
		"MIG mode": {func(m *serving) {
			devices := found(card(0, "a", 16), card(1, "b", 16))
			devices.Devices[0].Partitioned = true
			m.discoveries.note("enflame", devices, nil)
		}, "the GPU is in MIG mode"},
		"processes that are not known": {func(m *serving) {
			m.backend.errs = map[accel.DeviceID]error{"a": errors.New("hung")}
		}, "are not known: hung"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newServing(t)
			tt.change(m)
			m.wantTier(name, 1, accel.TierNone, tt.want)
		})
	}
}

// TestMPSIsNotWantedAnyMore: the service stops what no resource needs.
func TestMPSIsNotWantedAnyMore(t *testing.T) {
	m := newServing(t)
	m.passes(1)
	m.agent.cdi.mps = newMPSDesk(config.Default())
	if w := newMPSWatch(t.Context(), m.agent, nil); w != nil {
		t.Error("passes are made without a resource")
	}
	if got, err := mps.ReadWish(m.mpsWatch.dir); err != nil || len(got.Devices) > 0 {
		t.Errorf("the service is to do %+v, %v", got, err)
	}
}

// allocated returns the CDI device of mpsKind that the container of a pod gets.
func (m *serving) allocated(pod *corev1.Pod) (cdispecs.Device, error) {
	m.t.Helper()
	m.world.see(m.grantTo(pod, "a", 1))
	if _, err := m.admit(pod); err != nil {
		return cdispecs.Device{}, err
	}
	if len(m.given) != 1 || m.given[0].Kind != mpsKind {
		m.t.Fatalf("CDI devices are %v", m.given)
	}
	one, ok := readCDI(filepath.Join(m.host, "cdi", cdiFile(mpsKind)+".yaml")).devices[m.given[0].Name]
	if !ok {
		m.t.Fatalf("%s is not described", m.given[0].Name)
	}
	return one, nil
}

func TestMPSClient(t *testing.T) {
	m := newServing(t)
	one, err := m.allocated(newPod("trainer", 4))
	if err != nil {
		t.Fatal(err)
	}
	options := func(access string) []string { return []string{access, "nosuid", "nodev", "rbind", "rprivate"} }
	want := cdispecs.Device{Name: "a.25.4096", ContainerEdits: cdispecs.ContainerEdits{
		Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/run/nvidia-mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
			"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M"},
		Mounts: []*cdispecs.Mount{
			{HostPath: "/run/divvy/mps/a/pipe", ContainerPath: "/run/nvidia-mps", Options: options("ro")},
			{HostPath: "/run/divvy/mps/shm", ContainerPath: "/dev/shm", Options: options("rw")},
		}}}
	if diff := cmp.Diff(want, one); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	own := newPod("own", 2)
	own.Annotations = map[string]string{wire.ComputeAnnotation: "70"}
	if one, err = m.allocated(own); err != nil || one.Name != "a.70.2048" {
		t.Errorf("a share of its own: %s, %v", one.Name, err)
	}
	// The folder is empty after the host has started again.
	if _, err := m.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(m.host, "cdi", cdiFile(mpsKind)+".yaml")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	m.agent.cdi.wanted[m.world.pool] = nil
	m.world.update(t.Context(), found(card(0, "a", 16), card(1, "b", 16)), nil)
	for _, name := range []string{"a.25.4096", "a.70.2048", "a.6.1024", "b.100.16384"} {
		if _, ok := readCDI(file).devices[name]; !ok {
			t.Errorf("%s is not described", name)
		}
	}
}

// TestMPSNamesOfEndedContainers: a name that a pod has requested goes when no container has it, and
// those that containers can get by their memory stay.
func TestMPSNamesOfEndedContainers(t *testing.T) {
	m := newServing(t)
	file := filepath.Join(m.host, "cdi", cdiFile(mpsKind)+".yaml")
	var pods []*corev1.Pod
	for _, percent := range []string{"70", "71", "72"} {
		pod := newPod("p"+percent, 2)
		pod.Annotations = map[string]string{wire.ComputeAnnotation: percent}
		if _, err := m.allocated(pod); err != nil {
			t.Fatal(err)
		}
		pods = append(pods, pod)
	}
	end := func(pod *corev1.Pod) {
		t.Helper()
		m.world.remove(pod)
		if _, err := m.refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		m.world.sync(t.Context())
	}
	// The engine knows of the first one that it runs, and kubelet alone of the last one.
	end(pods[1])
	end(pods[2])
	checkpoint := func(text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(m.host, "device-plugins"), 0o750); err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(m.host, "device-plugins", kubeletCheckpoint), text)
	}
	const byMemory = 32
	now := time.Now()
	for _, step := range []struct {
		what, checkpoint string
		after            time.Duration
		names            int
		fails            bool
	}{
		{"the first look", checkpointOf(t), 0, byMemory + 3, false},
		{"names that were given a moment ago", checkpointOf(t), forgetAfter - time.Second, byMemory + 3, false},
		{"a checkpoint that cannot be read", "[1]", forgetAfter, byMemory + 3, true},
		{"ended containers", checkpointOf(t, &pluginapi.ContainerAllocateResponse{
			CdiDevices: []*pluginapi.CDIDevice{{Name: "nvidia.com/gpu=a"}, {Name: mpsKind + "=a.72.2048"}}}),
			2 * forgetAfter, byMemory + 2, false},
		{"one container", checkpointOf(t), 3 * forgetAfter, byMemory + 1, false},
	} {
		checkpoint(step.checkpoint)
		if err := m.agent.cdi.forget(now.Add(step.after)); (err != nil) != step.fails {
			t.Errorf("%s: %v", step.what, err)
		}
		m.world.sync(t.Context())
		if got := readCDI(file).devices; len(got) != step.names {
			t.Errorf("%s: the file has %d names, want %d: %v", step.what, len(got), step.names, slices.Sorted(maps.Keys(got)))
		}
	}
}

// A pod that the watch does not show is looked up once, for its share and for the tier it requires.
func TestMPSAsksOnce(t *testing.T) {
	m := newServing(t)
	pod := m.grantTo(newPod("late", 4), "a", 1)
	m.world.see(pod)
	source := &countedPods{podSource: m.world.records.pods}
	m.world.records.pods = source
	if _, err := m.world.Allocate(t.Context(), m.world.idsOf("a")[:4]); err != nil {
		t.Fatal(err)
	}
	if source.asked != 1 {
		t.Errorf("the API server was asked %d times, want 1", source.asked)
	}
}

// countedPods is a podSource whose watch shows no pod, and which counts questions.
type countedPods struct {
	podSource
	asked int
}

func (*countedPods) Cached() []*corev1.Pod { return nil }
func (p *countedPods) Fresh(ctx context.Context) ([]*corev1.Pod, error) {
	p.asked++
	return p.podSource.Fresh(ctx)
}

func TestMPSShareIsRejected(t *testing.T) {
	m := newServing(t)
	pod := newPod("wrong", 4)
	pod.Annotations = map[string]string{wire.ComputeAnnotation: "all"}
	if _, err := m.allocated(pod); err == nil || !strings.Contains(err.Error(), `"all" is not a percentage from 1 to 100`) {
		t.Errorf("%v", err)
	}
	pods := []*corev1.Pod{newPod("x", 4), newPod("y", 4)}
	pods[0].Annotations = map[string]string{wire.ComputeAnnotation: "10"}
	if _, err := samePercent(pods); err == nil || !strings.Contains(err.Error(), "differ") {
		t.Errorf("%v", err)
	}
	slices.Reverse(pods)
	if _, err := samePercent(pods[:1]); err != nil {
		t.Error(err)
	}
}
