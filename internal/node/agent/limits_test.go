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
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/node/limits/install"
	"github.com/divvy-gpu/divvy/internal/node/runtimesetup"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

const (
	trainerUID = "0a1b2c3d-0000-4000-8000-000000000001"
	trainerID  = "3f0c9a1be4d27586a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718"
	trainerCG  = "/kubepods/pod" + trainerUID + "/" + trainerID
)

// limitingBackend is a vendor whose driver has limits.
type limitingBackend struct {
	fakeMeter
	limits, charges      map[string]uint64 // of device a, by folder
	limitable, forgetful error
}

func (b *limitingBackend) Limitable(context.Context) error                   { return b.limitable }
func (b *limitingBackend) KeepsLimits(context.Context, accel.DeviceID) error { return b.forgetful }

func (b *limitingBackend) SetLimit(_ context.Context, id accel.DeviceID, group string, bytes uint64) error {
	b.limits[string(id)+group] = bytes
	return nil
}

func (b *limitingBackend) ClearLimit(_ context.Context, id accel.DeviceID, group string) error {
	delete(b.limits, string(id)+group)
	return nil
}

func (b *limitingBackend) Limit(_ context.Context, id accel.DeviceID, group string) (backend.MemoryLimit, error) {
	bytes, ok := b.limits[string(id)+group]
	if !ok {
		return backend.MemoryLimit{}, backend.ErrNoLimit
	}
	return backend.MemoryLimit{Bytes: bytes, UsedBytes: b.charges[string(id)+group]}, nil
}

// limiting is a world whose devices a and b have limits.
type limiting struct {
	*world
	*limitWatch
	backend  *limitingBackend
	host     string
	registry *prometheus.Registry
	clock    time.Time
	told     []string
	writer   *cdiWriter
	agent    *Agent
	// refuse is why the hook cannot be installed.
	refuse error
}

func newLimiting(t testing.TB, unit string, set ...func(*alloc.Config)) *limiting {
	t.Helper()
	m := &limiting{world: newWorld(t, unit, set...), host: t.TempDir(), registry: prometheus.NewRegistry(), clock: time.Unix(1000, 0),
		backend: &limitingBackend{limits: map[string]uint64{}, charges: map[string]uint64{}}}
	m.put("sys/fs/cgroup/cgroup.controllers", "dmem")
	m.put("sys/fs/cgroup/own/cgroup.events", "")
	m.put("proc/self/cgroup", "0::/own\n")
	m.put("hook", "")
	for _, dir := range []string{"proc/self/ns", "cdi"} {
		if err := os.MkdirAll(filepath.Join(m.host, dir), 0o750); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("pid:[4026531836]", filepath.Join(m.host, "proc/self/ns/pid")); err != nil {
		t.Fatal(err)
	}
	devices := found(card(0, "a", 16), card(1, "b", 16))
	a := &Agent{o: Options{Node: thisNode, Config: config.Default(), Backends: map[string]backend.Backend{"enflame": m.backend}},
		records: m.world.records, metrics: newMetrics(m.registry), offerings: offerings{{parts: []*pool{m.world.pool}}}}
	a.o.Config.DriverRoot = m.host
	a.o.Config.Resources = []config.Resource{{Name: string(gcuMemory), Isolation: config.IsolationDriver}}
	a.o.Config.Vendors = map[string]config.Vendor{"enflame": {DriverRoot: "/driver"}}
	a.o.Config.CDIDir = filepath.Join(m.host, "cdi")
	a.cdi = newCDIWriter(a.o.Config, a.o.Limits)
	m.writer, m.agent = a.cdi, a
	a.discoveries = newDiscoveries(a.o.Backends)
	a.discoveries.note("enflame", devices, nil)
	p := m.world.pool
	p.backend, p.inject = m.backend, injector{ways: []config.Injection{config.InjectCDI}}
	p.specify = a.cdi.specifier(p, config.Vendor{})
	p.limit = func(ids []accel.DeviceID, units accel.Units, percent int) ([]backend.CDIDevice, error) {
		return a.cdi.limit(p, ids, units, percent)
	}
	m.limitWatch = newLimitWatch(a)
	m.limitWatch.install = func(context.Context, install.Options) (string, error) { return "/hook", m.refuse }
	m.limitWatch.now = func() time.Time { return m.clock }
	m.limitWatch.changed = func() { p.sync(t.Context()) }
	m.limitWatch.node = func(k events.Kind, text string) { m.told = append(m.told, k.Reason+": "+text) }
	m.limitWatch.pod = func(pod *corev1.Pod, k events.Kind, text string) {
		m.told = append(m.told, pod.Name+" "+k.Reason+": "+text)
	}
	m.world.update(t.Context(), devices, nil)
	return m
}

func (m *limiting) put(name, text string) {
	m.t.Helper()
	file := filepath.Join(m.host, name)
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// passes makes passes, and returns the tier of device a and why it is no other.
func (m *limiting) passes(n int) (accel.Tier, string) {
	m.t.Helper()
	for range n {
		m.clock = m.clock.Add(15 * time.Second)
		m.pass(m.t.Context())
	}
	i, err := m.desk.isolation("a")
	for _, s := range see(m.world.pool, (*alloc.Engine).Inventory).Shares {
		if s.ID == "a" && s.Isolation != i {
			m.t.Errorf("the inventory states %+v, the last pass found %+v", s.Isolation, i)
		}
	}
	return i.Memory, fmt.Sprint(err)
}

// starts runs a container that holds 4 units of device a, after the hook if one is given.
func (m *limiting) starts(hooked bool) string {
	m.t.Helper()
	pod := newPod("trainer", 4)
	pod.UID = types.UID(trainerUID)
	m.world.see(m.grantTo(pod, "a", 1))
	if _, err := m.admit(pod); err != nil {
		m.t.Fatal(err)
	}
	running(pod, trainerID)
	if _, err := m.refresh(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
	m.put("sys/fs/cgroup"+trainerCG+"/cgroup.procs", "42\n")
	dir := filepath.Join(m.host, "sys/fs/cgroup", trainerCG)
	if hooked {
		inode, err := cgroup.Inode(dir)
		if err != nil {
			m.t.Fatal(err)
		}
		m.backend.limits["a"+dir] = 4 << 30
		r := limits.Record{Container: trainerID, Group: trainerCG, Inode: inode, Device: "a", Bytes: 4 << 30}
		if err := r.Write(filepath.Join(m.host, limits.RecordDir)); err != nil {
			m.t.Fatal(err)
		}
	}
	return dir
}

func (m *limiting) wantTier(what string, passes int, tier accel.Tier, why string) {
	m.t.Helper()
	if got, reason := m.passes(passes); got != tier || !strings.Contains(reason, why) {
		m.t.Errorf("%s: tier is %q because %s, want %q because %s", what, got, reason, tier, why)
	}
}

func TestLimitedContainer(t *testing.T) {
	m := newLimiting(t, "1")
	m.wantTier("the first pass", 1, accel.TierDriver, "nil")
	dir := m.starts(true)
	m.wantTier("a container with its limit", 1, accel.TierDriver, "nil")
	if i, _ := m.desk.isolation("a"); i.Backend != "dmem" || !i.Attested.Equal(m.clock) {
		t.Errorf("isolation is %+v", i)
	}
	delete(m.backend.limits, "a"+dir)
	m.wantTier("a limit that was removed", 1, accel.TierNone, "has no limit and should have 4096 MiB")
	if m.backend.limits["a"+dir] != 4<<30 {
		t.Errorf("the limit was not set again: %v", m.backend.limits)
	}
	m.wantTier("a limit that was set again", 3, accel.TierNone, "was without its limit at 1970-01-01T00:17:25Z")
	want := []string{"trainer IsolationRepaired: container c0 had no memory limit on device a, or another one than its allocation; " +
		"it is 4096 MiB again", "IsolationLost: device a: container ns/trainer/c0: has no limit and should have 4096 MiB"}
	if diff := cmp.Diff(want, m.told[:min(2, len(m.told))]); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if n := testutil.ToFloat64(m.lost.WithLabelValues("limit-missing")); n != 1 {
		t.Errorf("counted %v losses", n)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	m.wantTier("a container that has ended", 1, accel.TierNone, "one pass only")
	m.wantTier("and later", 1, accel.TierDriver, "nil")
}

func TestNotLimited(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(m *limiting)
		why    string
		// hook is true if new containers are limited nevertheless.
		hook bool
	}{
		"a container from before":   {func(m *limiting) { m.starts(false) }, "started without a limit", true},
		"an old driver":             {func(m *limiting) { m.backend.limitable = errors.New("driver 595") }, "driver 595", false},
		"no persistence":            {func(m *limiting) { m.backend.forgetful = errors.New("persistence is off") }, "persistence", true},
		"no hook":                   {func(m *limiting) { m.refuse = errors.New("noexec") }, "noexec", false},
		"another injection":         {func(m *limiting) { m.world.pool.limit = nil }, "needs injection cdi", false},
		"an unknown process":        {foreign, "no limit bounds a process of the host (python3)", true},
		"processes that are hidden": {func(m *limiting) { _ = os.RemoveAll(filepath.Join(m.host, "proc/self/ns")) }, "PID namespace", true},
		"an open runtime": {func(m *limiting) {
			m.setup = func() *runtimesetup.Report {
				return &runtimesetup.Report{Findings: []wire.SetupFinding{
					{Kind: wire.ConflictingCDI, What: "two files"}, {Kind: wire.OpenEnvironment, What: "any container gets"}}}
			}
		}, "any container gets", true},
		"no controller": {func(m *limiting) { m.put("sys/fs/cgroup/cgroup.controllers", "cpu") },
			"neither the controller dmem", false},
		"no control group of its own": {func(m *limiting) { m.put("proc/self/cgroup", "0::/gone\n") }, "own control group", true},
	} {
		t.Run(name, func(t *testing.T) {
			m := newLimiting(t, "1")
			tt.change(m)
			m.wantTier(name, 3, accel.TierNone, tt.why)
			if m.world.pool.limit == nil {
				return
			}
			if names, err := m.limit([]accel.DeviceID{"a"}, 1, 0); err != nil || (len(names) == 1) != tt.hook {
				t.Errorf("limits of a new container: %v, %v, want one %v", names, err, tt.hook)
			}
		})
	}
}

// foreign makes a process of the host use device a.
func foreign(m *limiting) {
	m.backend.found = map[accel.DeviceID]backend.Measured{"a": {Processes: []backend.Process{{PID: 7}}}}
	m.put("proc/7/stat", "7 (python3) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 100 0 0\n")
	m.put("proc/7/cgroup", "0::/user.slice\n")
	m.put("proc/7/comm", "python3\n")
}

func TestLimitDevices(t *testing.T) {
	for name, tt := range map[string]struct {
		unit    string
		devices int
	}{
		"described beforehand": {"1", 32},
		"too many of them":     {"0.01", 1},
		"parts of a MiB":       {"0.1", 320},
		"described one by one": {"0.001", 1},
		"sixths of a card":     {"1/6", 12},
	} {
		t.Run(name, func(t *testing.T) {
			m := newLimiting(t, tt.unit)
			file := filepath.Join(m.host, "cdi/divvy-divvy.dev-gpu-memory.yaml")
			if n := len(readCDI(file).devices); n != 0 {
				t.Errorf("%d devices before containers can be limited", n)
			}
			m.passes(1)
			ids := m.idsOf("a")[:3]
			answer, err := m.Allocate(t.Context(), ids)
			if err != nil {
				t.Fatal(err)
			}
			mib := m.config.Unit.Bytes(3, 16<<30) >> 20
			want := fmt.Sprintf("a.%d", mib)
			if last := answer.CdiDevices[len(answer.CdiDevices)-1].Name; last != limitKind+"="+want || len(answer.CdiDevices) != 2 {
				t.Errorf("the container gets %v, want %s last", answer.CdiDevices, want)
			}
			devices := readCDI(file).devices
			if len(devices) != tt.devices {
				t.Errorf("%d devices are described, want %d", len(devices), tt.devices)
			}
			hooks := devices[want].ContainerEdits.Hooks
			if len(hooks) != 1 || hooks[0].HookName != "createRuntime" || hooks[0].Path != "/hook" || *hooks[0].Timeout != 10 ||
				strings.Join(hooks[0].Args, " ") != fmt.Sprintf("/hook limit --device=a --hard-mib=%d --driver-root=/driver", mib) {
				t.Errorf("hooks are %+v", hooks)
			}
			m.refuse = errors.New("noexec")
			m.installed = map[string]installedHook{}
			m.passes(1)
			m.sync(t.Context())
			if _, there := readCDI(file).devices[want]; !there {
				t.Error("a container with a limit cannot start again while the hook cannot be installed")
			}
		})
	}
}

// Devices are offered after it is known whether containers can be limited.
func TestLimitsBeforeTheFirstOffer(t *testing.T) {
	m := newLimiting(t, "1")
	for range 2 {
		m.desk.await(t.Context(), "enflame", found(card(0, "a", 16)))
		m.refuse = errors.New("asked twice")
	}
	if names, err := m.limit([]accel.DeviceID{"a"}, 1, 0); err != nil || len(names) != 1 {
		t.Errorf("limits of a container before the first pass: %v, %v", names, err)
	}
	newLimitDesk(LimitOptions{}, config.NodeConfig{}).await(t.Context(), "enflame", found())
}

func TestIsolationCondition(t *testing.T) {
	lost := limits.Status{Losses: []limits.Loss{{Cause: limits.CauseDriver, Reason: "persistence mode is off"}}}
	for name, tt := range map[string]struct {
		status map[accel.DeviceID]limits.Status
		age    time.Duration
		want   corev1.ConditionStatus
		text   string
	}{
		"no devices":   {nil, 0, corev1.ConditionFalse, "holds on all devices"},
		"holds":        {map[accel.DeviceID]limits.Status{"a": {}}, time.Minute, corev1.ConditionFalse, "holds on all devices"},
		"not examined": {map[accel.DeviceID]limits.Status{"a": {}}, 61 * time.Second, corev1.ConditionTrue, "could not be examined"},
		"lost": {map[accel.DeviceID]limits.Status{"a": {}, "b": lost, "c": lost}, 0, corev1.ConditionTrue,
			"b: persistence mode is off, c: persistence"},
	} {
		if c := isolationCondition(tt.status, tt.age); c.Status != tt.want || !strings.Contains(c.Message, tt.text) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// A container has the limit of its start when it starts again, also if its resource has none any
// more.
func TestLimitsOfARunningContainerStay(t *testing.T) {
	m := newLimiting(t, "1")
	m.passes(1)
	file := filepath.Join(m.host, "cdi/divvy-divvy.dev-gpu-memory.yaml")
	if len(readCDI(file).devices) != 32 {
		t.Fatalf("%d devices are described, want 32", len(readCDI(file).devices))
	}
	other := &pool{ID: m.ID}
	w := cdiWriterIn(filepath.Join(m.host, "cdi"))
	w.wanted[other] = cdiKinds{}
	w.wanted[other].put(limitKind, cdispecs.Device{Name: "c.1024", ContainerEdits: cdispecs.ContainerEdits{Env: []string{"A=b"}}})
	if err := w.ensure(limitKind); err != nil {
		t.Fatal(err)
	}
	if n := len(readCDI(file).devices); n != 33 {
		t.Errorf("%d devices are described after the resource has no limits any more, want 33", n)
	}
}

// Kubelet gives a container its names again after the host has started, when the folder of CDI
// specifications is empty.
func TestLimitsOfHeldAmounts(t *testing.T) {
	m := newLimiting(t, "0.01")
	m.passes(1)
	m.starts(true)
	file := filepath.Join(m.host, "cdi/divvy-divvy.dev-gpu-memory.yaml")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	m.sync(t.Context())
	if _, there := readCDI(file).devices["a.40"]; !there {
		t.Errorf("the amount that a container holds is not described: %v", slices.Sorted(maps.Keys(readCDI(file).devices)))
	}
}

// A pass that was cut short, and a library that does not answer for a moment, take the tier and
// not the hook, which fails by itself.
func TestHookStaysWhileTheLibraryIsAway(t *testing.T) {
	m := newLimiting(t, "1")
	m.wantTier("at first", 1, accel.TierDriver, "nil")
	m.backend.limitable = errors.New("not initialised")
	m.wantTier("without the library", 1, accel.TierNone, "not initialised")
	if names, err := m.limit([]accel.DeviceID{"a"}, 1, 0); err != nil || len(names) != 1 {
		t.Errorf("limits of a container meanwhile: %v, %v", names, err)
	}
	m.backend.limitable = fmt.Errorf("driver 595: %w", errors.ErrUnsupported)
	m.pass(t.Context())
	if names, err := m.limit([]accel.DeviceID{"a"}, 1, 0); err != nil || len(names) != 0 {
		t.Errorf("limits of a container that the driver cannot have: %v, %v", names, err)
	}
}

// A limit in which no process could start is rejected, if it is known what a context takes; the
// inventory says so to the scheduler.
func TestLimitBelowAContext(t *testing.T) {
	r := config.Resource{Name: string(gcuMemory), Vendor: "enflame", Isolation: config.IsolationDriver}
	m := newLimiting(t, "0.1", func(c *alloc.Config) { c.LeastBytes = leastBytes(&r, map[string]int{"enflame": 512}) })
	m.passes(1)
	p := m.world.pool
	if got := see(p, (*alloc.Engine).Inventory).Least; got != 6 {
		t.Errorf("the inventory states at least %d units, want 6", got)
	}
	if bytes := leastBytes(&r, nil); bytes != 0 {
		t.Errorf("at least %d bytes, and it is not known what a context takes", bytes)
	}
	r.Isolation = config.IsolationCooperative
	if bytes := leastBytes(&r, map[string]int{"enflame": 512}); bytes != 0 {
		t.Errorf("at least %d bytes without limits in the driver", bytes)
	}
	for units, want := range map[accel.Units]string{5: "the limit of 512 MiB of device a would leave no memory beside the context", 6: ""} {
		m.writer.limits.contexts = map[string]int{"enflame": 512}
		_, err := p.limit([]accel.DeviceID{"a"}, units, 0)
		if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%d units: %v, want %q", units, err, want)
		}
		m.writer.limits.contexts = nil
		if _, err := p.limit([]accel.DeviceID{"a"}, units, 0); err != nil {
			t.Errorf("%d units, and it is not known what a context takes: %v", units, err)
		}
	}
}

// A daemon that starts states what the one before it has published until its first pass.
func TestTierOfADaemonThatStarts(t *testing.T) {
	m := newLimiting(t, "1")
	before := accel.Inventory{Resource: gcuMemory, Shares: []accel.Share{
		{Device: accel.Device{ID: "a"}, Isolation: accel.Isolation{Memory: accel.TierDriver, Backend: "misc", Attested: time.Unix(990, 0)}},
		{Device: accel.Device{ID: "b"}},
	}}
	published := func(accel.Resource) (accel.Inventory, bool) { return before, true }
	tier := func() accel.Tier { return see(m.world.pool, (*alloc.Engine).Inventory).Shares[0].Isolation.Memory }
	m.desk.carry(m.world.pool, published)
	if tier() != accel.TierDriver {
		t.Errorf("device a is at tier %s at the start", tier())
	}
	m.backend.limitable = errors.New("not initialised")
	m.passes(1)
	m.desk.carry(m.world.pool, published)
	if tier() != accel.TierNone {
		t.Errorf("device a is at tier %s after a pass that found a loss", tier())
	}
}

// The first pass counts at once, so it must not be made while a discovery has ended and the parts
// do not have its devices yet, as while the hook is installed.
func TestFirstPassAwaitsTheParts(t *testing.T) {
	m := newLimiting(t, "1")
	begins := func(limit time.Duration) bool {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		return awaitRecords(ctx, m.discoveries, m.world.records, time.Hour, time.Now)
	}
	if begins(3 * usageStart) {
		t.Error("it begins before the parts have the devices")
	}
	m.discoveries.told("enflame")
	if !begins(time.Minute) {
		t.Error("it does not begin when they have them")
	}
}

// What a container uses of a device whose limits are proven is what the driver has charged to it;
// elsewhere it is what the library lists of its processes.
func TestUseByTheDriversAccounting(t *testing.T) {
	m := newLimiting(t, "1")
	m.agent.overuse = &overuseDesk{}
	m.agent.o.Config.Usage = config.Usage{Enabled: true, Interval: config.Duration(time.Minute)}
	u := newUsageWatch(m.agent)
	m.passes(1)
	dir := m.starts(true)
	m.put("sys/fs/cgroup"+trainerCG+"/deeper/cgroup.procs", "43\n")
	m.backend.found = map[accel.DeviceID]backend.Measured{"a": {UsedBytes: 5 << 30}} // no process is listed
	used := func() (container, unknown uint64) {
		t.Helper()
		report, _ := u.pass(t.Context())
		row := report.Devices[0]
		if len(row.Containers) != 1 || row.Containers[0].UsedBytes == nil {
			t.Fatalf("containers of device a: %+v", row)
		}
		return *row.Containers[0].UsedBytes >> 30, row.UnknownBytes >> 30
	}
	for _, group := range []string{dir, dir + "/deeper"} { // the driver reports that of the limit for groups below
		m.backend.limits["a"+group], m.backend.charges["a"+group] = 4<<30, 3<<30
	}
	want := func(what string, container, unknown uint64) {
		t.Helper()
		if c, un := used(); c != container || un != unknown {
			t.Errorf("%s: the container uses %d GiB and %d are unknown, want %d and %d", what, c, un, container, unknown)
		}
	}
	want("before the limit was proven", 0, 5)
	m.wantTier("a container with its limit", 1, accel.TierDriver, "nil")
	want("with its limit", 3, 2)
	m.backend.charges["a"+dir+"/deeper"] = 1 << 30
	want("groups that do not agree", 0, 5)
	m.backend.charges["a"+dir+"/deeper"] = 3 << 30
	m.backend.limits["a"+dir] = 2 << 30
	want("another limit", 0, 5)
	m.backend.limits["a"+dir] = 4 << 30
	want("its limit again", 3, 2)
	m.backend.forgetful = errors.New("persistence is off")
	m.passes(1)
	want("a device that lost the tier", 0, 5)
}
