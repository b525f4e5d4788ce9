package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/usage"
	"github.com/divvy-gpu/divvy/internal/node/usagefile"
)

// fakeMeter is a vendor's library: what is in use of each device, and by which processes.
type fakeMeter struct {
	fakeBackend

	mu    sync.Mutex
	found map[accel.DeviceID]backend.Measured
	errs  map[accel.DeviceID]error
	asked []string
}

func (m *fakeMeter) Measure(_ context.Context, id accel.DeviceID) (backend.Measured, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked = append(m.asked, string(id))
	return m.found[id], m.errs[id]
}

// calls returns the devices that were measured since the last call.
func (m *fakeMeter) calls() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := strings.Join(m.asked, " ")
	m.asked = nil
	return out
}

// simplePass attributes process 100+n to the container whose id is "id-<n>".
type simplePass struct {
	containers []usage.Container
	pods       usage.Pods
}

func (s *simplePass) Pass(ctx context.Context, backends map[string]backend.Meter, devices []usage.Device, containers []usage.Container,
	pods usage.Pods) (out []wire.DeviceUsage) {
	s.containers, s.pods = containers, pods
	for _, d := range devices {
		row := wire.DeviceUsage{Vendor: d.Vendor, Device: d.ID, Index: d.Index, MemoryBytes: d.MemoryBytes}
		m, err := backends[d.Vendor].Measure(ctx, d.ID)
		if err != nil {
			row.Problem = err.Error()
			out = append(out, row)
			continue
		}
		row.UsedBytes = m.UsedBytes
		rest := m.UsedBytes
		for _, c := range containers {
			if c.Device != d.ID {
				continue
			}
			one := wire.ContainerUsage{Namespace: c.Namespace, Pod: c.Pod, PodUID: c.PodUID, Container: c.Name, Resource: c.Resource,
				UsedBytes: new(uint64(0))}
			if c.Bytes > 0 {
				one.AllocatedBytes = new(c.Bytes)
			}
			for _, p := range m.Processes {
				name := usage.ContainerName{Namespace: c.Namespace, Pod: c.Pod, Name: c.Name}
				if pods.ByContainer[fmt.Sprint("id-", p.PID-100)] == name {
					one.Processes, one.UsedBytes, one.Utilization = one.Processes+1, p.Memory, p.Utilization
				}
			}
			if one.UsedBytes != nil {
				rest -= *one.UsedBytes
			}
			row.Containers = append(row.Containers, one)
		}
		row.UnknownBytes = rest
		out = append(out, row)
	}
	return out
}

const gb = uint64(1 << 30)

// running says that the containers of the pod run, with ids of their own.
func running(p *corev1.Pod, ids ...string) {
	p.Status.Phase = corev1.PodRunning
	for i, c := range p.Spec.Containers {
		p.Status.ContainerStatuses = append(p.Status.ContainerStatuses,
			corev1.ContainerStatus{Name: c.Name, ContainerID: "containerd://" + ids[i]})
	}
}

// measuring is a world whose devices a and b are measured.
type measuring struct {
	*world
	*usageWatch
	meter    *fakeMeter
	passes   *simplePass
	registry *prometheus.Registry
	clock    time.Time
}

func newMeasuring(t *testing.T, level config.UsageMetrics) *measuring {
	t.Helper()
	m := &measuring{world: newWorld(t, "1"), registry: prometheus.NewRegistry(), passes: &simplePass{}, clock: time.Unix(1000, 0),
		meter: &fakeMeter{found: map[accel.DeviceID]backend.Measured{}, errs: map[accel.DeviceID]error{}}}
	devices := found(card(0, "a", 16), card(1, "b", 16))
	m.world.update(t.Context(), devices, nil)
	shown := newMetrics(m.registry)
	a := &Agent{o: Options{Node: thisNode, Config: config.Default(), RunDir: filepath.Join(t.TempDir(), "run"),
		Backends: map[string]backend.Backend{"enflame": m.meter, "iluvatar": fakeBackend{}}},
		records: m.world.records, metrics: shown, offerings: offerings{{parts: []*pool{m.world.pool}}},
		overuse: &overuseDesk{enabled: true}}
	a.o.Config.Usage = config.Usage{Enabled: true, Interval: config.Duration(20 * time.Millisecond), Metrics: level,
		Overuse: config.Overuse{ContextAllowanceMiB: map[string]int{"enflame": 0}}}
	a.cdi = newCDIWriter(a.o.Config, a.o.Limits)
	a.discoveries = newDiscoveries(a.o.Backends)
	a.discoveries.note("enflame", devices, nil)
	a.discoveries.note("iluvatar", found(card(0, "x", 16)), nil)
	m.usageWatch = newUsageWatch(a)
	m.usageWatch.passer = m.passes
	m.usageWatch.now = func() time.Time { return m.clock }
	return m
}

// admitted lets kubelet take up pods.
func (m *measuring) admits(pods ...*corev1.Pod) {
	m.t.Helper()
	m.see(pods...)
	for _, p := range pods {
		if _, err := m.admit(p); err != nil {
			m.t.Fatal(err)
		}
	}
	m.lists()
}

// lists lets the loop ask kubelet.
func (m *measuring) lists() {
	m.t.Helper()
	if _, err := m.world.refresh(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
}

// shows makes a pass and compares the metrics of measured use.
func (m *measuring) shows(what, want string) wire.UsageReport {
	m.t.Helper()
	r, over := m.usageWatch.pass(m.t.Context())
	m.usageWatch.metrics.show(r, over)
	var got []string
	families, err := m.registry.Gather()
	if err != nil {
		m.t.Fatal(err)
	}
	for _, f := range families {
		name := f.GetName()
		if !strings.Contains(name, "_used_bytes") && !strings.Contains(name, "_allocated_bytes") &&
			!strings.Contains(name, "_utilization_") && !strings.Contains(name, "_unattributed_") {
			continue
		}
		for _, one := range f.GetMetric() {
			line := strings.TrimSuffix(strings.TrimPrefix(name, "divvy_node_"), "_bytes")
			for _, l := range one.GetLabel() {
				if !slices.Contains([]string{"vendor", "resource", "index"}, l.GetName()) {
					line += " " + l.GetValue()
				}
			}
			value := one.GetGauge().GetValue()
			if strings.HasSuffix(name, "_bytes") {
				value /= float64(gb)
			}
			if value != 0 || !strings.Contains(name, "_unattributed_") {
				got = append(got, fmt.Sprint(line, " ", value))
			}
		}
	}
	if diff := cmp.Diff(strings.Fields(strings.ReplaceAll(want, "\n", " ")), strings.Fields(strings.Join(got, " "))); diff != "" {
		m.t.Errorf("%s (-want +got):\n%s\nall:\n%s", what, diff, strings.Join(got, "\n"))
	}
	return r
}

// TestUsageMetrics: each level has its series, none of what is not known, and they end with the
// container.
func TestUsageMetrics(t *testing.T) {
	devices := "device_memory_unattributed a unknown 1 device_memory_used a 7 device_memory_used b 0"
	tests := map[config.UsageMetrics]struct{ both, one, none string }{
		config.UsageMetricsNone: {devices, devices, "device_memory_used a 0 device_memory_used b 0"},
		config.UsageMetricsContainer: {
			`container_memory_allocated c0 a ns one 4 container_memory_allocated c0 a ns two 3 container_memory_allocated c1 a ns one 2
			container_memory_used c0 a ns one 5 container_memory_used c0 a ns two 1 container_memory_used c1 a ns one 0
			container_utilization_ratio c0 a ns one 0.5 container_utilization_ratio c0 a ns two 0.25 ` + devices,
			`container_memory_allocated c0 a ns one 4 container_memory_allocated c0 a ns two 3 container_memory_allocated c1 a ns one 2
			container_memory_used c0 a ns one 5 container_memory_used c1 a ns one 0
			container_utilization_ratio c0 a ns one 0.5
			device_memory_unattributed a unknown 2 device_memory_used a 7 device_memory_used b 0`,
			"device_memory_used a 0 device_memory_used b 0",
		},
		config.UsageMetricsNamespace: {
			devices + ` namespace_memory_allocated a ns 9 namespace_memory_used a ns 6 namespace_utilization_ratio a ns 0.75`,
			"device_memory_unattributed a unknown 2 device_memory_used a 7 device_memory_used b 0 namespace_memory_allocated a ns 9",
			"device_memory_used a 0 device_memory_used b 0",
		},
	}
	for level, tt := range tests {
		t.Run(string(level), func(t *testing.T) {
			m := newMeasuring(t, level)
			one, two := newPod("one", 4, 2), newPod("two", 3)
			m.admits(m.grantTo(one, "a", 1), m.grantTo(two, "a", 2))
			running(one, "id-1", "id-2")
			running(two, "id-3")
			first := backend.Process{PID: 101, Memory: new(5 * gb), Utilization: new(0.5)}
			m.meter.found["a"] = backend.Measured{UsedBytes: 7 * gb, Processes: []backend.Process{first,
				{PID: 103, Memory: new(gb), Utilization: new(0.25)}}}
			m.shows("all is known", tt.both)
			m.meter.found["a"] = backend.Measured{UsedBytes: 7 * gb, Processes: []backend.Process{first, {PID: 103}}}
			if level != config.UsageMetricsNone {
				m.shows("the use of a process is not known", tt.one)
			}
			m.remove(one)
			m.remove(two)
			m.lists()
			m.meter.found["a"] = backend.Measured{}
			m.shows("the containers have ended", tt.none)
			m.meter.errs["a"] = errors.New("GPU is lost")
			r := m.shows("a device cannot be measured", "device_memory_used b 0")
			if r.Node != thisNode || len(r.Devices) != 2 || r.Devices[0].Problem != "GPU is lost" || r.Devices[1].Problem != "" {
				t.Errorf("%+v", r)
			}
			if n := testutil.ToFloat64(m.usageWatch.metrics.errors.WithLabelValues("enflame")); n != 1 {
				t.Errorf("%v errors", n)
			}
			m.usageWatch.metrics.show(wire.UsageReport{}, nil)
			if n, err := testutil.GatherAndCount(m.registry, "divvy_node_device_memory_used_bytes"); n != 0 || err != nil {
				t.Errorf("%d series at the end, %v", n, err)
			}
		})
	}
}

// TestUsageOfIdleDevices: a device without containers and processes is measured once a minute
// after four passes, and in each again as soon as a container or a process comes.
func TestUsageOfIdleDevices(t *testing.T) {
	m := newMeasuring(t, config.UsageMetricsNone)
	step := func(what, want string) wire.UsageReport {
		t.Helper()
		r, _ := m.usageWatch.pass(t.Context())
		if got := m.meter.calls(); got != want {
			t.Errorf("%s: measured %q, want %q", what, got, want)
		}
		m.clock = m.clock.Add(15 * time.Second)
		return r
	}
	m.lists()
	m.meter.found["b"] = backend.Measured{UsedBytes: gb, Processes: []backend.Process{{PID: 7, Memory: new(gb)}}}
	for range idlePasses {
		step("a is idle for less than four passes", "a b")
	}
	m.meter.found["a"] = backend.Measured{UsedBytes: 9 * gb}
	for range 3 {
		if r := step("a is idle", "b"); len(r.Devices) != 2 || r.Devices[0].UsedBytes != 0 {
			t.Errorf("the last of an idle device is not in the report: %+v", r)
		}
	}
	if r := step("a minute is over", "a b"); r.Devices[0].UsedBytes != 9*gb {
		t.Errorf("%+v", r)
	}
	m.admits(m.grantTo(newPod("one", 4), "a", 1))
	step("a container holds something", "a b")
	m.remove(m.admitted[0])
	m.lists()
	m.meter.errs["a"] = errors.New("hung")
	for range 6 {
		step("what is not known is not idle", "a b")
	}
	m.meter.errs["a"] = fmt.Errorf("mode: %w", errors.ErrUnsupported)
	for range idlePasses {
		step("what cannot be measured", "a b")
	}
	step("what cannot be measured is not asked each time", "b")
	if n := testutil.ToFloat64(m.usageWatch.metrics.errors.WithLabelValues("enflame")); n != 6 {
		t.Errorf("%v errors, want the six that hung", n)
	}
}

// TestUsageContainers: what is handed to a pass.
func TestUsageContainers(t *testing.T) {
	m := newMeasuring(t, config.UsageMetricsNone)
	one := newPod("one", 2)
	one.Spec.InitContainers = []corev1.Container{container("i0", 1), container("s0", 1)}
	one.Spec.InitContainers[1].RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
	const hash = "0123456789abcdef0123456789abcdef"
	static, ended := newPod("static", 1), newPod("ended", 1)
	static.Annotations[hashAnnotation], static.Annotations[mirrorAnnotation] = hash, hash
	m.admits(m.grantTo(one, "a", 1), m.grantTo(static, "b", 2), m.grantTo(ended, "b", 3))
	running(one, "id-1")
	running(static, "id-5")
	ended.Status.Phase = corev1.PodSucceeded
	state := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	one.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "i0", ContainerID: "cri-o://id-2", State: state},
		{Name: "s0", ContainerID: "cri-o://id-3", State: state}}
	one.Status.EphemeralContainerStatuses = []corev1.ContainerStatus{{Name: "debug", ContainerID: "docker://id-4"}, {Name: "none"}}
	m.usageWatch.pass(t.Context())
	type held = usage.Container
	want := []held{
		{Namespace: "ns", Pod: "one", PodUID: "uid-one", Name: "c0", Resource: gcuMemory, Device: "a", Bytes: 2 * gb},
		{Namespace: "ns", Pod: "one", PodUID: "uid-one", Name: "i0", Resource: gcuMemory, Device: "a", Bytes: gb},
		{Namespace: "ns", Pod: "one", PodUID: "uid-one", Name: "s0", Resource: gcuMemory, Device: "a", Bytes: gb},
		{Namespace: "ns", Pod: "static", PodUID: hash, Name: "c0", Resource: gcuMemory, Device: "b", Bytes: gb},
	}
	if diff := cmp.Diff(want, m.passes.containers); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	name := func(pod, c string) usage.ContainerName {
		return usage.ContainerName{Namespace: "ns", Pod: pod, Name: c}
	}
	pods := usage.Pods{
		ByUID: map[string]usage.PodName{"uid-one": {Namespace: "ns", Name: "one"}, hash: {Namespace: "ns", Name: "static"},
			"uid-ended": {Namespace: "ns", Name: "ended"}},
		ByContainer: map[string]usage.ContainerName{"id-1": name("one", "c0"), "id-2": name("one", "i0"), "id-3": name("one", "s0"),
			"id-4": name("one", "debug"), "id-5": name("static", "c0")},
	}
	if diff := cmp.Diff(pods, m.passes.pods); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	// The init container has ended.
	one.Status.InitContainerStatuses[0].State = corev1.ContainerState{}
	m.usageWatch.pass(t.Context())
	if diff := cmp.Diff(slices.Concat(want[:1], want[2:]), m.passes.containers); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCgroupUID(t *testing.T) {
	const hash = "0123456789abcdef0123456789abcdef"
	tests := map[string]struct {
		annotations map[string]string
		want        string
	}{
		"a pod":               {nil, "uid-p"},
		"a mirror pod":        {map[string]string{hashAnnotation: hash, mirrorAnnotation: hash}, hash},
		"a hash alone":        {map[string]string{hashAnnotation: hash}, "uid-p"},
		"the UID of another":  {map[string]string{hashAnnotation: "uid-q", mirrorAnnotation: "uid-q"}, "uid-p"},
		"not the mirror's":    {map[string]string{hashAnnotation: hash, mirrorAnnotation: "x"}, "uid-p"},
		"two that are empty":  {map[string]string{hashAnnotation: "", mirrorAnnotation: ""}, "uid-p"},
		"a hash in old style": {map[string]string{hashAnnotation: strings.ToUpper(hash), mirrorAnnotation: strings.ToUpper(hash)}, "uid-p"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := newPod("p")
			maps.Copy(p.Annotations, tt.annotations)
			object, err := strip(p) // what a pass reads has come through it
			if err != nil {
				t.Fatal(err)
			}
			if got := cgroupUID(object.(*corev1.Pod)); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

// TestUsageDevices: a device that is cut into partitions is measured by them, and vendors that
// cannot be measured have no rows.
func TestUsageDevices(t *testing.T) {
	m := newMeasuring(t, config.UsageMetricsNone)
	parent, part, broken := card(0, "gpu", 16), card(accel.PartitionIndex(0, 1), "mig", 8), card(1, "broken", -1)
	parent.Partitioned, part.Parent = true, "gpu"
	m.discoveries.note("enflame", found(part, broken, parent), nil)
	want := []usage.Device{
		{Vendor: "enflame", ID: "broken", Index: 1}, {Vendor: "enflame", ID: "mig", Index: part.Index, MemoryBytes: 8 * gb},
	}
	if diff := cmp.Diff(want, m.list()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"iluvatar"}, m.unable); diff != "" {
		t.Errorf("vendors that cannot (-want +got):\n%s", diff)
	}
}

// privateProc is a proc file system in which the daemon is in a PID namespace of its own.
func privateProc(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	put(t, root, map[string]string{"self/ns/of": "", "self/status": "NSpid:\t4242\t1\n"})
	if err := os.Symlink("pid:[4026532000]", filepath.Join(root, "self/ns/pid")); err != nil {
		t.Fatal(err)
	}
	return root
}

func TestUsageWithoutHostPIDs(t *testing.T) {
	m := newMeasuring(t, config.UsageMetricsNone)
	m.lists()
	m.usageWatch.passer = usage.NewMeter(privateProc(t), t.TempDir())
	lines := []string{}
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, line string) { lines = append(lines, line) }, funcr.Options{}))
	for range 3 {
		r, over := m.usageWatch.pass(ctx)
		m.usageWatch.metrics.show(r, over)
		if len(r.Devices) != 2 || !strings.Contains(r.Devices[0].Problem, "hostPID") ||
			!strings.Contains(r.Devices[1].Problem, "does not see") {
			t.Fatalf("%+v", r)
		}
	}
	if len(lines) != 1 || !strings.Contains(lines[0], "hostPID") {
		t.Errorf("logged %q, want one line", lines)
	}
	if got := m.meter.calls(); got != "" {
		t.Errorf("measured %s", got)
	}
	if n, err := testutil.GatherAndCount(m.registry, "divvy_node_device_memory_used_bytes"); n != 0 || err != nil {
		t.Errorf("%d series of what is not known, %v", n, err)
	}
}

// blockedPass never ends by itself.
type blockedPass struct{ began, ended chan struct{} }

func (p *blockedPass) Pass(ctx context.Context, _ map[string]backend.Meter, _ []usage.Device, _ []usage.Container, _ usage.Pods,
) []wire.DeviceUsage {
	p.began <- struct{}{}
	<-ctx.Done()
	p.ended <- struct{}{}
	return nil
}

// TestUsageRun: passes begin when it is known who holds what, the report is in the file while
// they go on, and all is gone at the end. A pass that hangs is ended after an interval.
func TestUsageRun(t *testing.T) {
	m := newMeasuring(t, config.UsageMetricsNone)
	m.usageWatch.now = time.Now
	m.world.records.asked = false // of kubelet
	lines := make(chan string, 100)
	ctx, stop := context.WithCancel(klog.NewContext(t.Context(), funcr.New(func(_, line string) { lines <- line }, funcr.Options{})))
	defer stop()
	ended := make(chan struct{})
	go func() { defer close(ended); m.usageWatch.run(ctx) }()
	if line := <-lines; !strings.Contains(line, "iluvatar") {
		t.Errorf("logged %s, want the vendor that cannot be measured", line)
	}
	eventually(t, "there is a file", func() bool {
		_, err := usagefile.Read(m.dirOfReport(), time.Now())
		return err != nil && strings.Contains(err.Error(), "first pass")
	})
	if got := m.meter.calls(); got != "" {
		t.Errorf("measured %s before kubelet was asked", got)
	}
	m.lists()
	eventually(t, "there is a report", func() bool {
		r, err := usagefile.Read(m.dirOfReport(), time.Now())
		return err == nil && len(r.Devices) == 2
	})
	eventually(t, "there are more passes", func() bool { return strings.Count(m.meter.calls(), "b") > 0 })
	stop()
	<-ended
	if _, err := usagefile.Read(m.dirOfReport(), time.Now()); err == nil || !strings.Contains(err.Error(), "not measured") {
		t.Errorf("after the end: %v", err)
	}
	if n, err := testutil.GatherAndCount(m.registry, "divvy_node_device_memory_used_bytes"); n != 0 || err != nil {
		t.Errorf("%d series after the end, %v", n, err)
	}
}

func TestUsagePassThatHangs(t *testing.T) {
	m := newMeasuring(t, config.UsageMetricsNone)
	m.lists()
	blocked := &blockedPass{make(chan struct{}, 10), make(chan struct{}, 10)}
	m.usageWatch.passer, m.usageWatch.now = blocked, time.Now
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); m.usageWatch.run(ctx) }()
	<-blocked.began
	<-blocked.ended // without stop: the interval is over
	<-blocked.began
	// The pool decides and kubelet is asked meanwhile.
	m.lists()
	stop()
	<-ended
}

func (m *measuring) dirOfReport() string { return m.usageWatch.dir }

// TestUsageOfAnAgent: off, nothing of it is there; on, it ends with the agent.
func TestUsageOfAnAgent(t *testing.T) {
	for _, enabled := range []bool{false, true} {
		s := newStage(t)
		s.config.Usage.Enabled, s.runDir = enabled, filepath.Join(s.dir, "run")
		s.vendors["nvidia"].set(nil, gpuDevice(0, "a"))
		s.vendors["iluvatar"].set(nil, gpuDevice(0, "x"))
		meter := &fakeMeter{}
		s.dressed = map[string]backend.Backend{"nvidia": struct {
			*vendorBackend
			backend.Meter
		}{s.vendors["nvidia"], meter}}
		a, stop := s.play()
		eventually(t, "it publishes", func() bool {
			_, ok := a.publisher.before("nvidia.com/gpu")
			return ok
		})
		files := func() int {
			entries, err := os.ReadDir(s.runDir)
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			return len(entries)
		}
		if enabled {
			eventually(t, "there is a file", func() bool { return files() == 1 })
		} else if files() > 0 {
			t.Error("there is a file, and use is not measured")
		}
		n, err := testutil.GatherAndCount(s.registry, "divvy_node_usage_errors_total")
		if err != nil || (n == 1) != enabled {
			t.Errorf("enabled %t: %d counters of errors, %v", enabled, n, err)
		}
		stop()
		if n := files(); n > 0 {
			t.Errorf("enabled %t: %d files are left", enabled, n)
		}
		if families, err := s.registry.Gather(); err != nil || len(families) > 0 {
			t.Errorf("enabled %t: %d families of metrics are left, %v", enabled, len(families), err)
		}
	}
}
