package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/overuse"
	"github.com/divvy-gpu/divvy/internal/node/usage"
	"github.com/divvy-gpu/divvy/internal/node/usagefile"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

const (
	// idlePasses is after how many passes without containers and processes a device is
	// measured only every idleInterval.
	idlePasses   = 4
	idleInterval = time.Minute
	// usageStart is how often it is looked whether the first pass may begin.
	usageStart = 250 * time.Millisecond
)

// passer is usage.Meter as it is needed here.
type passer interface {
	Pass(ctx context.Context, backends map[string]backend.Meter, devices []usage.Device, containers []usage.Container,
		pods usage.Pods) []wire.DeviceUsage
}

// usageWatch measures what is in use of the node's devices, pass after pass. All but the
// metrics belongs to the goroutine of run: neither the agent's loop nor kubelet waits for it.
type usageWatch struct {
	node   string
	config config.Usage
	// dir is the folder of the report.
	dir    string
	passer passer
	// meters are the backends that can measure, by vendor.
	meters      map[string]*watchedMeter
	unable      []string // vendors that cannot
	discoveries *discoveries
	records     *records
	parts       []*pool
	limits      *limitDesk
	metrics     *usageMetrics
	overuse     *overuseWatch
	now         func() time.Time

	devices map[accel.DeviceID]*measuredDevice
	told    logging.Changes // of what devices have for problems
	unsaved logging.Changes
}

// measuredDevice is a device over the passes.
type measuredDevice struct {
	last wire.DeviceUsage
	at   time.Time // of last
	// idle counts the passes in a row that found no container and no process.
	idle int
}

// watchedMeter is a backend whose outcomes are noted. It is safe for concurrent use.
type watchedMeter struct {
	backend.Meter
	failed func()

	mu   sync.Mutex
	idle map[accel.DeviceID]bool // devices that were found without processes in this pass
}

// Measure implements backend.Meter. A device that the library cannot measure at all is no
// failure, and is not worth a call in each pass.
func (m *watchedMeter) Measure(ctx context.Context, id accel.DeviceID) (backend.Measured, error) {
	got, err := m.Meter.Measure(ctx, id)
	unable := errors.Is(err, errors.ErrUnsupported)
	if err != nil && !unable && !errors.Is(ctx.Err(), context.Canceled) {
		m.failed()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.idle[id] = unable || err == nil && len(got.Processes) == 0
	return got, err
}

// outcome returns the devices that were found without processes, and forgets them.
func (m *watchedMeter) outcome() map[accel.DeviceID]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	idle := m.idle
	m.idle = map[accel.DeviceID]bool{}
	return idle
}

// newUsageWatch makes the goroutine's state for an agent, whose resources are known; nil where
// use is not measured.
func newUsageWatch(a *Agent) *usageWatch {
	c := a.o.Config
	if !c.Usage.Enabled {
		return nil
	}
	u := &usageWatch{
		node: a.o.Node, config: c.Usage, dir: cmp.Or(a.o.RunDir, usagefile.Dir),
		passer: usage.NewMeter(filepath.Join(c.DriverRoot, "proc"), filepath.Join(c.DriverRoot, "sys/fs/cgroup")),
		meters: map[string]*watchedMeter{}, discoveries: a.discoveries, records: a.records,
		parts:   slices.Collect(a.offerings.parts(func(*offering, *pool) bool { return true })),
		limits:  a.cdi.limits,
		metrics: newUsageMetrics(a.metrics, c.Usage.Metrics), overuse: newOveruseWatch(a), now: time.Now,
		devices: map[accel.DeviceID]*measuredDevice{},
	}
	for _, vendor := range slices.Sorted(maps.Keys(a.o.Backends)) {
		meter, ok := a.o.Backends[vendor].(backend.Meter)
		if !ok {
			u.unable = append(u.unable, vendor)
			continue
		}
		failed := u.metrics.errors.WithLabelValues(vendor).Inc
		u.meters[vendor] = &watchedMeter{Meter: meter, failed: failed, idle: map[accel.DeviceID]bool{}}
	}
	return u
}

// run makes passes until ctx ends. What it showed ends with it.
func (u *usageWatch) run(ctx context.Context) {
	log := klog.FromContext(ctx)
	for _, vendor := range u.unable {
		log.Info("The use of the vendor's devices cannot be measured", "vendor", vendor)
	}
	file, err := usagefile.Create(u.dir, time.Duration(u.config.Interval), u.now())
	if err != nil {
		log.Error(err, "The report of measured use is missing for kubectl divvy inspect")
	} else {
		defer func() {
			if err := file.Remove(); err != nil {
				log.Error(err, "The last report of measured use stays")
			}
		}()
	}
	defer u.metrics.show(wire.UsageReport{}, nil)
	defer u.overuse.desk.set(lastPass{})
	if !u.await(ctx) {
		return
	}
	tick := time.NewTicker(time.Duration(u.config.Interval))
	defer tick.Stop()
	for {
		report, over := u.pass(ctx)
		if ctx.Err() != nil {
			return
		}
		u.metrics.show(report, over)
		if file != nil {
			u.unsaved.Log(ctx, file.Write(report), "The report of measured use is missing for kubectl divvy inspect")
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// await waits until it is known which containers hold what: before that, all that processes
// use would be a stranger's. It waits one interval for devices, since a library may hang. It is
// false when ctx has ended.
func (u *usageWatch) await(ctx context.Context) bool {
	return awaitRecords(ctx, u.discoveries, u.records, time.Duration(u.config.Interval), u.now)
}

// awaitRecords waits until it is known which containers hold what, and an interval at most until
// the parts have the devices. It is false when ctx has ended.
func awaitRecords(ctx context.Context, d *discoveries, r *records, interval time.Duration, now func() time.Time) bool {
	for since := now(); ; {
		if (d.untold() == nil || now().Sub(since) >= interval) && r.listed() && r.pods.Synced() {
			return true
		}
		if !sleep(ctx, usageStart) {
			return false
		}
	}
}

// pass measures the devices that are due, and returns the report of all and the episodes of
// overuse.
func (u *usageWatch) pass(ctx context.Context) (wire.UsageReport, []overuse.Episode) {
	start := u.now()
	all := u.list()
	pods := u.records.pods.Cached()
	containers := heldBy(u.records, u.parts, pods)
	var due []usage.Device
	for _, d := range all {
		held := slices.ContainsFunc(containers, func(c usage.Container) bool { return c.Device == d.ID })
		if u.isDue(d, held, start) {
			due = append(due, d)
		}
	}
	meters := make(map[string]backend.Meter, len(u.meters))
	for vendor, m := range u.meters {
		meters[vendor] = m
	}
	bounded, cancel := context.WithTimeout(ctx, time.Duration(u.config.Interval))
	defer cancel()
	rows := u.passer.Pass(bounded, meters, due, containers, podNames(pods))
	for i := range rows {
		if l, ok := u.meters[rows[i].Vendor].Meter.(backend.Limiter); ok && len(rows[i].Containers) > 0 {
			usage.Charge(&rows[i], u.limits.charged(bounded, l, rows[i].Device))
		}
	}
	end := u.now()
	u.metrics.duration.WithLabelValues().Observe(end.Sub(start).Seconds())
	idle := map[accel.DeviceID]bool{}
	for _, m := range u.meters {
		maps.Copy(idle, m.outcome())
	}
	for _, row := range rows {
		if d := u.devices[row.Device]; d != nil {
			d.last, d.at = row, start
			d.idle++
			if !idle[row.Device] || len(row.Containers) > 0 {
				d.idle = 0
			}
		}
	}
	report := wire.UsageReport{Node: u.node, Time: end, Devices: []wire.DeviceUsage{}}
	var problems []error
	for _, d := range all {
		if row := u.devices[d.ID]; !row.at.IsZero() {
			report.Devices = append(report.Devices, row.last)
			problems = append(problems, problemOf(row.last))
		}
	}
	u.told.Log(ctx, errors.Join(problems...), "The use of devices cannot be measured; trying again")
	if ctx.Err() != nil {
		return report, nil // the pass was cut off
	}
	return report, u.overuse.look(rows, u.models(), pods, start)
}

// models are the models of all devices.
func (u *usageWatch) models() map[accel.DeviceID]string {
	out := map[accel.DeviceID]string{}
	names, of, _ := u.discoveries.all()
	for _, vendor := range names {
		for _, d := range of[vendor].found.Devices {
			out[d.ID] = d.Model + " " + d.Profile // contexts on partitions may be smaller
		}
	}
	return out
}

func problemOf(d wire.DeviceUsage) error {
	if d.Problem == "" {
		return nil
	}
	return fmt.Errorf("%s device %s: %s", d.Vendor, accel.IndexText(d.Index), d.Problem)
}

// isDue reports whether a device is measured in this pass; held is true when a container holds
// something of it.
func (u *usageWatch) isDue(d usage.Device, held bool, now time.Time) bool {
	one := u.devices[d.ID]
	if one == nil {
		one = &measuredDevice{}
		u.devices[d.ID] = one
	}
	return held || one.idle < idlePasses || now.Sub(one.at) >= idleInterval
}

// list returns the devices that can be measured, by vendor and index, and forgets the others.
// A device that is cut into partitions is measured by those.
func (u *usageWatch) list() []usage.Device {
	names, of, _ := u.discoveries.all()
	out := []usage.Device{}
	for _, vendor := range names {
		if u.meters[vendor] == nil {
			continue
		}
		cut := map[accel.DeviceID]bool{}
		for _, d := range of[vendor].found.Devices {
			cut[d.Parent] = true
		}
		for _, d := range of[vendor].found.Devices {
			if !cut[d.ID] {
				out = append(out, usage.Device{Vendor: vendor, ID: d.ID, Index: d.Index, MemoryBytes: uint64(max(d.MemoryBytes, 0))})
			}
		}
	}
	slices.SortStableFunc(out, func(a, b usage.Device) int {
		return cmp.Or(cmp.Compare(a.Vendor, b.Vendor), cmp.Compare(a.Index, b.Index))
	})
	maps.DeleteFunc(u.devices, func(id accel.DeviceID, _ *measuredDevice) bool {
		return !slices.ContainsFunc(out, func(d usage.Device) bool { return d.ID == id })
	})
	return out
}

// heldBy returns what containers hold of the parts by kubelet's last list, which names pods
// without their UIDs: they are those that the watch had delivered before the list. It adds what they
// have of claims.
func heldBy(r *records, parts []*pool, pods []*corev1.Pod) []usage.Container {
	uids := map[alloc.PodKey]string{}
	for _, pod := range r.before() {
		if !terminal(pod) {
			uids[keyOf(pod)] = cgroupUID(pod)
		}
	}
	running := initializing(r, pods)
	out := []usage.Container{}
	for _, p := range parts {
		e, done := p.records.owner.use()
		shares := e.Containers(p.ID, running)
		done()
		for _, s := range shares {
			if uid, known := uids[s.PodKey]; known {
				out = append(out, usage.Container{Namespace: s.Namespace, Pod: s.Name, PodUID: uid, Name: s.Container, Resource: p.Resource,
					Device: s.Chip, Bytes: s.Bytes})
			}
		}
	}
	if r.claimed != nil {
		out = append(out, r.claimed(pods)...)
	}
	return out
}

// initializing returns the pods of which an init container runs; the engine knows which of
// these are sidecars.
func initializing(r *records, pods []*corev1.Pod) (out []alloc.Initializing) {
	for _, pod := range pods {
		for i := range pod.Status.InitContainerStatuses {
			s := &pod.Status.InitContainerStatuses[i]
			if s.State.Running != nil {
				value := r.values([]*corev1.Pod{pod})[0]
				out = append(out, alloc.Initializing{Pod: &value, Container: s.Name})
			}
		}
	}
	return out
}

// podNames are the pods by what control groups name them with, and their containers, of all
// kinds, by what the container runtime names them with.
func podNames(pods []*corev1.Pod) usage.Pods {
	out := usage.Pods{ByUID: map[string]usage.PodName{}, ByContainer: map[string]usage.ContainerName{}}
	for _, pod := range pods {
		out.ByUID[cgroupUID(pod)] = usage.PodName{Namespace: pod.Namespace, Name: pod.Name}
		for _, statuses := range [][]corev1.ContainerStatus{
			pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses,
		} {
			for i := range statuses {
				// "containerd://<id>"
				if _, id, ok := strings.Cut(statuses[i].ContainerID, "://"); ok && id != "" {
					out.ByContainer[id] = usage.ContainerName{Namespace: pod.Namespace, Pod: pod.Name, Name: statuses[i].Name}
				}
			}
		}
	}
	return out
}

// Annotations of the mirror pod of a static pod.
const (
	mirrorAnnotation = "kubernetes.io/config.mirror"
	hashAnnotation   = "kubernetes.io/config.hash"
)

// cgroupUID is the UID that is in the names of the pod's control groups: that of a static pod is
// the hash of its manifest, which its mirror pod has in annotations. Users write annotations as
// well: kubelet runs no pod that has both, and the hash cannot be the UID of another pod.
func cgroupUID(pod *corev1.Pod) string {
	if hash := pod.Annotations[hashAnnotation]; hash == pod.Annotations[mirrorAnnotation] && manifestHash.MatchString(hash) {
		return hash
	}
	return string(pod.UID)
}

// manifestHash is the form of the hashes of manifests.
var manifestHash = regexp.MustCompile("^[0-9a-f]{32}$")
