package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/node/limits/install"
	"github.com/divvy-gpu/divvy/internal/node/runtimesetup"
	"github.com/divvy-gpu/divvy/internal/node/usage"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// limitWatch finds out in each pass whether containers can be limited, and whether the limits of
// those that run hold. All belongs to the goroutine of run but the desk.
type limitWatch struct {
	o    LimitOptions
	desk *limitDesk
	// limiters are the backends of vendors of which a resource has limits.
	limiters map[string]limiter
	// parts are those of all resources, hostRoot is where the host's root is seen.
	parts       []*pool
	hostRoot    string
	cdiDir      string
	discoveries *discoveries
	records     *records
	// setup returns what was found of the node's container runtime; it may be nil.
	setup func() *runtimesetup.Report
	// install installs the hook; it is install.Install.
	install func(context.Context, install.Options) (string, error)
	lost    *prometheus.CounterVec
	// changed is called when containers can be limited now, or cannot any more, and found after
	// each pass.
	changed, found func()
	node           func(events.Kind, string)
	pod            func(*corev1.Pod, events.Kind, string)
	now            func() time.Time

	watch limits.Watch
	// preparing is held by prepare, which a discovery calls too. It guards installed.
	preparing sync.Mutex
	// installed are the hooks that a test run succeeded of, by vendor.
	installed map[string]installedHook
	// problems and unread are what was logged last.
	logged struct{ problems, unread logging.Changes }
}

// limiter is what a backend must be so that its devices can have limits.
type limiter interface {
	backend.Limiter
	backend.Meter
}

// installedHook is a hook on the host; driver is the version of the driver of the test run.
type installedHook struct{ path, driver string }

// newLimitWatch makes the goroutine's state for an agent, whose resources are known; nil where
// no resource has limits.
func newLimitWatch(a *Agent) *limitWatch {
	o := a.o.Limits
	w := &limitWatch{
		o: o, desk: a.cdi.limits, limiters: map[string]limiter{},
		parts:    slices.Collect(a.offerings.parts(func(*offering, *pool) bool { return true })),
		hostRoot: a.o.Config.DriverRoot, cdiDir: a.o.Config.CDIDir, discoveries: a.discoveries, records: a.records, setup: a.o.Setup,
		install: install.Install, lost: defs.NodeIsolationLost.NewCounters(),
		changed: a.signals.withdraw.raise, found: a.signals.wake.raise, node: a.tell, pod: a.tellPod, now: time.Now,
		installed: map[string]installedHook{},
	}
	for _, p := range w.parts {
		if l, ok := p.backend.(limiter); ok && a.cdi.limits.resources[p.Resource] {
			w.limiters[p.config.Vendor] = l
		}
	}
	for vendor, b := range a.o.Backends {
		if l, ok := b.(limiter); ok && w.desk.claims.of(vendor) {
			w.limiters[vendor] = l
			w.changed = func() { a.signals.withdraw.raise(); a.claims.redescribe() }
			w.found = func() { a.signals.wake.raise(); a.claims.refresh() }
		}
	}
	if len(w.limiters) == 0 {
		return nil
	}
	a.metrics.register(w.lost)
	a.cdi.limits.prepare = w.prepare
	return w
}

// run makes passes until ctx ends.
func (w *limitWatch) run(ctx context.Context) {
	w.desk.passes(ctx, w.discoveries, w.records, w.parts, w.now, w.pass)
}

func (w *limitWatch) procRoot() string {
	return w.o.procRoot(w.hostRoot)
}

func (w *limitWatch) cgroupRoot() string {
	return w.o.cgroupRoot(w.hostRoot)
}

func (w *limitWatch) recordDir() string {
	return filepath.Join(w.hostRoot, limits.RecordDir)
}

// prepare finds out whether containers of a vendor's devices can be limited, and installs the
// hook. Its error is for people.
func (w *limitWatch) prepare(ctx context.Context, vendor string, found backend.Found) error {
	if w.limiters[vendor] == nil {
		return nil
	}
	w.preparing.Lock()
	defer w.preparing.Unlock()
	controller, hook, err := w.hook(ctx, vendor, found)
	if hook == "" {
		delete(w.installed, vendor)
	}
	if w.desk.offer(vendor, hook, controller) {
		if hook == "" {
			// Nothing is promised to containers that start from now on.
			w.desk.end()
			w.desk.attest(w.records, w.parts)
		}
		w.changed()
	}
	return err
}

// hook returns the hook of a vendor on the host. With an error, it is "" if containers cannot be
// limited, and the one so far if that is not known.
func (w *limitWatch) hook(ctx context.Context, vendor string, found backend.Found) (controller, hook string, err error) {
	for _, p := range w.parts {
		if p.config.Vendor == vendor && w.desk.resources[p.Resource] && (p.limit == nil || !p.inject.onlyCDI()) {
			return "", "", fmt.Errorf("resource %s: isolation driver needs injection %s or %s, with specifications of Divvy, alone",
				p.Resource, config.InjectCDI, config.InjectCDIAnnotations)
		}
	}
	if controller, err = limits.Controller(w.procRoot(), w.cgroupRoot()); err != nil {
		return "", "", err
	}
	before := w.installed[vendor]
	if err := w.limiters[vendor].Limitable(ctx); errors.Is(err, errors.ErrUnsupported) {
		return "", "", err
	} else if err != nil {
		// It may be over before the next container starts, and if not, the hook fails.
		return controller, before.path, err
	}
	// It is a stat of the file and no test run while nothing has changed.
	if before.path != "" && before.driver == found.Driver {
		if _, err := os.Stat(filepath.Join(w.hostRoot, before.path)); err == nil {
			return controller, before.path, nil
		}
	}
	o := install.Options{Program: install.DefaultProgram, HostRoot: w.hostRoot, Dir: install.DefaultDir,
		DriverRoot: w.desk.driverRoot(vendor)}
	if hook, err = w.install(ctx, o); err != nil {
		return "", "", err
	}
	w.installed[vendor] = installedHook{hook, found.Driver}
	klog.FromContext(ctx).Info("Installed the hook that limits device memory", "path", hook, "driver", found.Driver)
	if err := install.Tidy(o, hook, w.cdiDir); err != nil {
		klog.FromContext(ctx).Error(err, "Former hooks stay on the host")
	}
	return controller, hook, nil
}

// pass examines all devices, sets missing limits again, and reports what has changed.
func (w *limitWatch) pass(ctx context.Context) {
	pods := w.records.pods.Cached()
	seen, err := w.see(pods)
	w.logged.unread.Log(ctx, err, "Could not read all records of memory limits")
	_, vendors, _ := w.discoveries.all()
	own, ownErr := w.ownGroup()
	losses, running := map[accel.DeviceID][]limits.Loss{}, map[accel.DeviceID][]limits.Container{}
	var problems []error
	for _, vendor := range slices.Sorted(maps.Keys(w.limiters)) {
		found := vendors[vendor].found
		problem := vendors[vendor].err
		if problem == nil {
			problem = w.prepare(ctx, vendor, found)
		}
		problem = cmp.Or(problem, w.open())
		problems = append(problems, problem)
		for _, d := range found.Devices {
			if d.Parent != "" || !w.offers(vendor, d) {
				continue
			}
			one := limits.Device{ID: d.ID, Problem: cmp.Or(problem, ownErr)}
			if one.Problem == nil {
				one.Problem = w.limiters[vendor].KeepsLimits(ctx, d.ID)
			}
			if one.Problem == nil {
				one.Problem = limits.Probe(ctx, w.limiters[vendor], d.ID, own)
			}
			one.Containers = w.containers(ctx, vendor, d.ID, seen)
			one.Processes, one.Unlisted = w.processes(ctx, vendor, d.ID, seen)
			var repairs []limits.Repair
			losses[d.ID], repairs = limits.Judge(one, seen.records)
			running[d.ID] = one.Containers
			for _, r := range repairs {
				w.repair(ctx, vendor, r, seen, pods)
			}
		}
	}
	if ctx.Err() != nil {
		return // what was cut short proves nothing, and is no loss
	}
	w.logged.problems.Log(ctx, errors.Join(problems...), "Device memory cannot be limited")
	status := reportLosses(ctx, &w.watch, losses, w.now(), w.lost, w.node)
	w.desk.ran(running)
	w.desk.set(status, w.now())
	w.desk.attest(w.records, w.parts)
	w.found()
}

// open returns why containers get devices without a limit by the node's container runtime.
func (w *limitWatch) open() error {
	if w.setup == nil {
		return nil
	}
	report := w.setup()
	if report == nil {
		return nil
	}
	for _, f := range report.Findings {
		if f.Kind == wire.OpenEnvironment {
			return errors.New(f.What)
		}
	}
	return nil
}

// offers reports whether a resource with limits is made of a device, or claims with limits share it.
func (w *limitWatch) offers(vendor string, d accel.Device) bool {
	return w.desk.claims.chip(vendor, d.ID) || slices.ContainsFunc(w.parts, func(p *pool) bool {
		return p.config.Vendor == vendor && w.desk.resources[p.Resource] && slices.ContainsFunc(see(p, (*alloc.Engine).Inventory).Shares,
			func(s accel.Share) bool { return s.ID == d.ID })
	})
}

// ownGroup is the folder of the control group of this process.
func (w *limitWatch) ownGroup() (string, error) {
	text, err := os.ReadFile(filepath.Join(w.procRoot(), "self/cgroup"))
	if err != nil {
		return "", fmt.Errorf("own control group: %w", err)
	}
	path, err := cgroup.Unified(string(text))
	if err != nil {
		return "", err
	}
	return limits.OwnGroup(path, w.cgroupRoot(), "/sys/fs/cgroup")
}

// seen is what a pass has seen of the node's containers.
type seen struct {
	held    []usage.Container
	names   usage.Pods
	groups  []cgroup.Group
	records []limits.Record
	// hidden is why the groups are not known.
	hidden error
}

func (w *limitWatch) see(pods []*corev1.Pod) (s seen, err error) {
	s.held, s.names = heldBy(w.records, w.parts, pods), podNames(pods)
	uids := map[string]bool{}
	for _, c := range s.held {
		uids[c.PodUID] = true
	}
	if len(uids) > 0 {
		s.groups, s.hidden = cgroup.Groups(w.cgroupRoot(), func(uid string) bool { return uids[uid] })
	}
	s.records, err = limits.ReadRecords(w.recordDir(), w.cgroupRoot())
	return s, err
}

// containers returns the containers that hold something of a device and run, with their limits.
func (w *limitWatch) containers(ctx context.Context, vendor string, id accel.DeviceID, s seen) []limits.Container {
	held := map[usage.ContainerName]uint64{}
	for _, c := range s.held {
		if c.Device == id {
			held[usage.ContainerName{Namespace: c.Namespace, Pod: c.Pod, Name: c.Name}] += limitMiB(c.Bytes) * limits.MiB
		}
	}
	var out []limits.Container
	for _, g := range s.groups {
		name := s.names.ByContainer[g.Owner.Container]
		bytes, ok := held[name]
		if !ok {
			continue
		}
		i := slices.IndexFunc(out, func(c limits.Container) bool { return c.ID == g.Owner.Container })
		if i < 0 {
			i = len(out)
			out = append(out, limits.Container{Name: limits.Name{Namespace: name.Namespace, Pod: name.Pod, Container: name.Name},
				ID: g.Owner.Container, Bytes: bytes})
		}
		read := limits.ReadLimit{}
		if read.Group, read.Err = limits.NewGroup(w.cgroupRoot(), g.Path); read.Err == nil && bytes > 0 {
			var limit backend.MemoryLimit
			limit, read.Err = w.limiters[vendor].Limit(ctx, id, read.Group.Dir)
			read.Bytes = limit.Bytes
		}
		out[i].Groups = append(out[i].Groups, read)
	}
	return out
}

// processes returns the processes that use a device.
func (w *limitWatch) processes(ctx context.Context, vendor string, id accel.DeviceID, s seen) ([]limits.Process, error) {
	if s.hidden != nil {
		return nil, s.hidden
	}
	return programs(ctx, w.limiters[vendor], id, w.procRoot(), w.cgroupRoot())
}

// programs returns the processes that use a device, with the containers that they are in.
func programs(ctx context.Context, m backend.Meter, id accel.DeviceID, procRoot, cgroupRoot string) ([]limits.Process, error) {
	if err := usage.HostPIDs(procRoot); err != nil {
		return nil, err
	}
	measured, err := m.Measure(ctx, id)
	if err != nil {
		return nil, err
	}
	owners := usage.Owners(procRoot, cgroupRoot)
	var out []limits.Process
	for _, p := range measured.Processes {
		all, err := owners(p.PID)
		if err != nil {
			if _, gone := cgroup.ReadProcess(procRoot, p.PID); gone != nil {
				continue // it has ended meanwhile
			}
			return nil, err
		}
		one := limits.Process{PID: p.PID}
		if len(all) > 0 {
			// A container may have made the groups below its own, and named them as it likes.
			one.Container, one.PodUID = all[0].Container, all[0].PodUID
		} else if comm, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(p.PID), "comm")); err == nil {
			one.Program = strings.TrimSpace(string(comm))
		}
		out = append(out, one)
	}
	return out, nil
}

// repair sets a limit again. That it was lost is recorded first, so that it is not forgotten
// when this process ends in between.
func (w *limitWatch) repair(ctx context.Context, vendor string, r limits.Repair, s seen, pods []*corev1.Pod) {
	log := klog.FromContext(ctx).WithValues("device", r.Device, "container", r.Name)
	for _, record := range s.records {
		if record.Device == r.Device && record.Owner() == r.ID && record.Lost.IsZero() {
			record.Lost = w.now().UTC().Truncate(time.Second)
			if err := record.Write(w.recordDir()); err != nil {
				log.Error(err, "Could not record that a memory limit was lost; it stays as it is")
				return
			}
		}
	}
	if err := limits.Set(ctx, w.limiters[vendor], r.Device, r.Group, r.Bytes); err != nil {
		log.Error(err, "Could not set a memory limit again")
		return
	}
	log.Info("Set a memory limit again", "mib", r.Bytes/limits.MiB)
	i := slices.IndexFunc(pods, func(p *corev1.Pod) bool { return p.Namespace == r.Namespace && p.Name == r.Pod })
	if i >= 0 {
		w.pod(pods[i], events.IsolationRepaired, fmt.Sprintf("container %s had no memory limit on device %s, or another one than "+
			"its allocation; it is %d MiB again", r.Container, r.Device, r.Bytes/limits.MiB))
	}
}
