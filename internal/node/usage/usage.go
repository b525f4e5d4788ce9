// Package usage finds out what the containers of a node use of its devices: it asks
// the vendors' libraries which processes use a device, and the kernel which container a
// process is in. Nothing that is not known counts as zero: it is reported as unknown.
//
// It decides nothing and keeps no state but a cache.
package usage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

// Container is a container that holds something of a device, by the node's records.
type Container struct {
	// Namespace, Pod and Name name the container. PodUID is the pod's UID; it may be ""
	// if Pods has the pod.
	Namespace, Pod, PodUID, Name string
	Resource                     accel.Resource
	Device                       accel.DeviceID
	// Bytes is what it holds of the device's memory, 0 if it has the device whole or by
	// time slices.
	Bytes uint64
}

// Pods is what is known of the node's pods: whose a control group is. The maps are not
// changed.
type Pods struct {
	// ByUID are pods by the UID in the name of their control group: the pod's UID, and of
	// a static pod also the hash that kubelet made (annotation kubernetes.io/config.hash).
	ByUID map[string]PodName
	// ByContainer are containers by the runtime's id, 64 hex digits without a scheme.
	ByContainer map[string]ContainerName
}

// PodName names a pod.
type PodName struct{ Namespace, Name string }

// ContainerName names a container.
type ContainerName struct{ Namespace, Pod, Name string }

// Device is a device to measure.
type Device struct {
	Vendor      string
	ID          accel.DeviceID
	Index       int
	MemoryBytes uint64
}

// Meter makes passes over devices. It is safe for concurrent use.
type Meter struct {
	proc, cgroups string

	mu sync.Mutex
	// known are the processes of the last pass that were in a container, by PID, so that
	// their groups are read once. The map is replaced, never changed; guarded by mu.
	known map[int]member
}

// NewMeter returns a Meter that reads processes below procRoot, usually /proc, and the
// host's control groups below cgroupRoot, usually /sys/fs/cgroup of the host.
func NewMeter(procRoot, cgroupRoot string) *Meter {
	return &Meter{proc: procRoot, cgroups: cgroupRoot}
}

// Pass measures the devices with the backends of their vendors and returns them in
// ascending order of vendor and index. Devices of different vendors are measured at
// the same time, those of one vendor one after the other: a call of its library that
// hangs delays these by the time that the backend allows it. Pass ends soon after ctx.
//
// A device without numbers has a Problem. devices must not have both a device and its
// partitions: its library lists the processes of all its partitions, so they would count
// twice, and as foreign to it.
//
// Each container has one row per device: if it holds the device by several resources,
// Resource is the first in ascending order, and AllocatedBytes the sum, or nil if one of
// them bounds no memory. Processes of a pod that holds the device count for the pod, in a
// row without Container and AllocatedBytes, if their container is not known or is not one
// of those that hold the device. UnknownBytes include the memory of processes that are in
// no row, and all that a container uses if that of one of its processes is not known.
func (m *Meter) Pass(ctx context.Context, backends map[string]backend.Meter, devices []Device, containers []Container, pods Pods,
) []wire.DeviceUsage {
	devices = slices.Clone(devices)
	slices.SortFunc(devices, func(a, b Device) int {
		return cmp.Or(cmp.Compare(a.Vendor, b.Vendor), cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID, b.ID))
	})
	m.mu.Lock()
	f := &finder{proc: m.proc, cgroups: m.cgroups, before: m.known, found: map[int]member{}}
	m.mu.Unlock()
	p := &pass{
		finder: f, unseen: HostPIDs(m.proc), backends: backends, pods: pods, settled: settledBefore(m.proc),
		holders: map[accel.DeviceID][]Container{}, uids: map[string]bool{},
	}
	for _, c := range containers {
		p.holders[c.Device] = append(p.holders[c.Device], c)
		p.uids[c.PodUID] = true
	}
	out := make([]wire.DeviceUsage, len(devices))
	var vendors sync.WaitGroup
	for first := 0; first < len(devices); {
		next := first + 1
		for next < len(devices) && devices[next].Vendor == devices[first].Vendor {
			next++
		}
		of, reports := devices[first:next], out[first:next]
		vendors.Go(func() {
			for i, d := range of {
				reports[i] = p.device(ctx, d)
			}
		})
		first = next
	}
	vendors.Wait()
	m.mu.Lock()
	m.known = f.found
	m.mu.Unlock()
	return out
}

// pass is one pass. Only its finder changes.
type pass struct {
	finder *finder
	// unseen is why this process does not see the host's processes, nil if it does.
	unseen   error
	backends map[string]backend.Meter
	pods     Pods
	// holders are the containers that hold a device.
	holders map[accel.DeviceID][]Container
	// uids are the UIDs of the pods of all holders.
	uids map[string]bool
	// settled is when a process must have started to have all of its context, as
	// cgroup.Process.Start; 0 for none.
	settled uint64
}

// errUnmeasured says that a vendor's library cannot measure a device at all.
var errUnmeasured = errors.New("the vendor's library does not report what is in use of this device")

// device measures one device.
func (p *pass) device(ctx context.Context, d Device) wire.DeviceUsage {
	report := wire.DeviceUsage{Vendor: d.Vendor, Device: d.ID, Index: d.Index, MemoryBytes: d.MemoryBytes}
	t := newTally(p.holders[d.ID])
	measured, err := p.measure(ctx, d)
	if err != nil {
		report.Problem, report.Containers = err.Error(), t.containers()
		return report
	}
	owners := p.finder.owners()
	for _, process := range measured.Processes {
		of, err := owners(process.PID)
		switch {
		case err != nil:
			// Its memory is in none of the sums, so it is unknown. That a process has
			// ended since the library listed it is no failure.
		case len(of) == 0:
			t.system += memory(process)
		default:
			if t.add(p.owner(of), process, p.pods) {
				report.LeastProcessBytes = p.least(report.LeastProcessBytes, process)
			}
		}
	}
	t.finish(&report, measured.UsedBytes)
	return report
}

// least returns the lesser of an amount and what a process uses, if that started long
// enough ago.
func (p *pass) least(before *uint64, process backend.Process) *uint64 {
	used := memory(process)
	if start, ok := p.finder.started(process.PID); !ok || start >= p.settled || used == 0 || before != nil && *before <= used {
		return before
	}
	return &used
}

// settlingTime is how long a process is taken to make its context in.
const settlingTime = time.Minute

// settledBefore returns the clock ticks since the machine started, less settlingTime; 0 if
// that is not known.
func settledBefore(procRoot string) uint64 {
	const ticksPerSecond = 100 // USER_HZ, of all machines that Linux shows to programs
	text, err := os.ReadFile(filepath.Join(procRoot, "uptime"))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	seconds, err := strconv.ParseFloat(first, 64)
	if err != nil || seconds <= settlingTime.Seconds() {
		return 0
	}
	return uint64((seconds - settlingTime.Seconds()) * ticksPerSecond)
}

// measure asks the backend about a device.
func (p *pass) measure(ctx context.Context, d Device) (backend.Measured, error) {
	if p.unseen != nil {
		return backend.Measured{}, p.unseen
	}
	meter := p.backends[d.Vendor]
	if meter == nil {
		return backend.Measured{}, errUnmeasured
	}
	measured, err := meter.Measure(ctx, d.ID)
	if errors.Is(err, errors.ErrUnsupported) {
		err = fmt.Errorf("%w: %w", errUnmeasured, err)
	}
	return measured, err
}

// owner returns which of the owners of a process counts: the outermost pod that is one
// of this node's, or the outermost of all. The node itself may run in a pod of another
// cluster, and a container may make groups that are named like pods.
func (p *pass) owner(of []cgroup.Owner) cgroup.Owner {
	i := slices.IndexFunc(of, func(o cgroup.Owner) bool {
		_, named := p.pods.ByUID[o.PodUID]
		return named || p.uids[o.PodUID]
	})
	return of[max(i, 0)]
}
