package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/limits"
)

// LimitOptions say how containers get limits in the driver. The zero value is for hosts that
// are real.
type LimitOptions struct {
	// ProcRoot and CgroupRoot replace the host's /proc and /sys/fs/cgroup, for the hook too.
	// They are for hosts that are simulated.
	ProcRoot, CgroupRoot string
}

const (
	// limitInterval is the time between two passes over the limits.
	limitInterval = 15 * time.Second
	// limitKind is the kind of the CDI devices that limit a container, and nothing else.
	limitKind = "divvy.dev/gpu-memory"
	// maxLimitNames is how many such devices are described beforehand. With more of them,
	// each is described when a container gets it.
	maxLimitNames = 2000
	// awaitLimits is how long a discovery waits until it is known whether containers can be limited.
	awaitLimits = 4 * time.Second
	// hookTimeout is how long a container runtime waits for the hook, in seconds.
	hookTimeout = 10
)

// Reasons of the node's condition.
const (
	reasonIsolationLost  = "LimitsNotProven"
	reasonIsolationHolds = "LimitsProven"
)

// limitDesk has what the last pass over the limits has found, for kubelet's questions and for
// the agent's loop. It is safe for concurrent use.
type limitDesk struct {
	o LimitOptions
	// resources are those with limits, by their configuration.
	resources map[accel.Resource]bool
	// driverRoot returns where the driver of a vendor is on the host.
	driverRoot func(vendor string) string
	// prepare finds out whether containers of a vendor's devices can be limited; nil where no
	// resource has limits. It is set before the first use.
	prepare func(ctx context.Context, vendor string, found backend.Found) error

	mu sync.Mutex
	// hook is the program on the host, by vendor, while containers can be limited. All is
	// guarded by mu.
	hooks map[string]string
	// backend is the controller of control groups that has the limits.
	backend string
	status  map[accel.DeviceID]limits.Status
	// passed is when the last pass ended, the zero time before the first one.
	passed time.Time
}

func newLimitDesk(o LimitOptions, c config.NodeConfig) *limitDesk {
	d := &limitDesk{o: o, resources: map[accel.Resource]bool{}, hooks: map[string]string{},
		driverRoot: func(vendor string) string { return cmp.Or(c.Vendors[vendor].DriverRoot, "/") }}
	for _, r := range c.Resources {
		if r.Isolation == config.IsolationDriver {
			d.resources[accel.Resource(r.Name)] = true
		}
	}
	return d
}

// await finds out whether containers of a vendor's devices can be limited, before they are
// offered for the first time: a container that started without a limit would keep its device
// from being attested for as long as it runs.
func (d *limitDesk) await(ctx context.Context, vendor string, found backend.Found) {
	d.mu.Lock()
	hook := d.hooks[vendor]
	d.mu.Unlock()
	if d.prepare != nil && hook == "" {
		bounded, cancel := context.WithTimeout(ctx, awaitLimits)
		defer cancel()
		_ = d.prepare(bounded, vendor, found) // the next pass reports it
	}
}

// offer notes the hook of a vendor, "" while containers cannot be limited, and reports whether
// that changed.
func (d *limitDesk) offer(vendor, hook, controller string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	changed := d.hooks[vendor] != hook
	d.hooks[vendor], d.backend = hook, cmp.Or(controller, d.backend)
	return changed
}

// set takes in a pass.
func (d *limitDesk) set(status map[accel.DeviceID]limits.Status, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status, d.passed = status, now
}

// carry makes the engine state what the node has published of a pool until the first pass, or
// each start of the daemon would take the tier from all devices. What was published too long
// ago counts for nothing.
func (d *limitDesk) carry(p *pool, published func(accel.Resource) (accel.Inventory, bool)) {
	d.mu.Lock()
	passed := !d.passed.IsZero()
	d.mu.Unlock()
	if !d.resources[p.Resource] || p.Kind != alloc.Memory || passed {
		return
	}
	before, ok := published(p.Resource)
	if !ok {
		return
	}
	stated := map[accel.DeviceID]accel.Isolation{}
	for _, s := range before.Shares {
		if s.Isolation.Memory == accel.TierDriver {
			stated[s.ID] = s.Isolation
		}
	}
	e, done := p.records.owner.use()
	defer done()
	e.Attest(p.ID, stated)
}

// end says that there are no more passes, so that nothing is proven.
func (d *limitDesk) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status, d.passed = nil, time.Time{}
}

// isolation returns what the node states of the memory of a device whose resource has limits,
// and why it is not TierDriver.
func (d *limitDesk) isolation(id accel.DeviceID) (accel.Isolation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s, ok := d.status[id]
	switch {
	case !ok:
		return accel.Isolation{}, errors.New("the limits of the device's memory were not examined yet")
	case len(s.Losses) > 0:
		return accel.Isolation{}, errors.New(s.Losses[0].Reason)
	case s.Attested.IsZero():
		return accel.Isolation{}, errors.New("the limits of the device's memory held in one pass only so far")
	}
	return accel.Isolation{Memory: accel.TierDriver, Backend: d.backend, Attested: s.Attested.UTC().Truncate(time.Second)}, nil
}

// device returns the CDI device that gives a container a limit of a device, in MiB, or that
// clears one if mib is 0; false while containers cannot be limited.
func (d *limitDesk) device(vendor string, id accel.DeviceID, mib uint64) (cdispecs.Device, bool) {
	d.mu.Lock()
	hook := d.hooks[vendor]
	d.mu.Unlock()
	if hook == "" {
		return cdispecs.Device{}, false
	}
	args := []string{hook, "limit", "--device=" + string(id)}
	if mib == 0 {
		args = append(args, "--max")
	} else {
		args = append(args, "--hard-mib="+strconv.FormatUint(mib, 10))
	}
	args = append(args, "--driver-root="+d.driverRoot(vendor))
	for _, root := range []struct{ flag, value string }{
		{"--proc-root=", d.o.ProcRoot}, {"--cgroup-root=", d.o.CgroupRoot},
	} {
		if root.value != "" {
			args = append(args, root.flag+root.value)
		}
	}
	return cdispecs.Device{Name: limitName(id, mib), ContainerEdits: cdispecs.ContainerEdits{Hooks: []*cdispecs.Hook{
		{HookName: "createRuntime", Path: hook, Args: args, Timeout: new(hookTimeout)},
	}}}, true
}

// limitName is the name of the CDI device.
func limitName(id accel.DeviceID, mib uint64) string {
	if mib == 0 {
		return string(id) + ".max"
	}
	return fmt.Sprintf("%s.%d", id, mib)
}

// limitMiB is the limit for an allocation in bytes: whole MiB, and never more than the
// allocation.
func limitMiB(bytes uint64) uint64 { return bytes / limits.MiB }

// limited reports whether containers of a pool get CDI devices of limitKind for a device: a
// limit for a part of its memory, or one that clears it for the whole device and for time slices.
func (d *limitDesk) limited(p *pool, device accel.Device) bool {
	return len(d.resources) > 0 && device.Parent == "" && !device.Partitioned && (p.Kind == alloc.Slots || d.resources[p.Resource])
}

// devices returns the CDI devices for all amounts that containers of a pool can get of a
// device, or nil while containers cannot be limited.
func (d *limitDesk) devices(p *pool, device accel.Device) []cdispecs.Device {
	amounts := []uint64{0}
	if p.Kind == alloc.Memory {
		amounts = nil
		for n := range p.config.Unit.Units(device.MemoryBytes) {
			amounts = append(amounts, limitMiB(p.config.Unit.Bytes(n+1, device.MemoryBytes)))
		}
	}
	var out []cdispecs.Device
	for _, mib := range slices.Compact(amounts) {
		if mib == 0 && p.Kind == alloc.Memory {
			continue // a unit of less than a MiB
		}
		one, ok := d.device(p.config.Vendor, device.ID, mib)
		if !ok {
			return nil
		}
		out = append(out, one)
	}
	return out
}

// specifyLimits adds the CDI devices of limits for the devices of a pool to what the pool wants:
// all that containers can get, unless those of the node are too many. Otherwise, and while
// containers cannot be limited, it adds those that are on the disk: a container that has one
// must not start again without its limit. The caller holds mu.
func (w *cdiWriter) specifyLimits(p *pool, devices []accel.Device, mine cdiKinds) {
	total := 0
	for other, kinds := range w.wanted {
		if other != p {
			total += len(kinds[limitKind])
		}
	}
	all := map[accel.DeviceID][]cdispecs.Device{}
	for _, d := range devices {
		w.known[d.ID] = d
		if w.limits.limited(p, d) && parser.ValidateDeviceName(limitName(d.ID, 1)) == nil {
			all[d.ID] = w.limits.devices(p, d)
			total += len(all[d.ID])
		}
	}
	if len(all) == 0 {
		return
	}
	file := w.onDisk(limitKind).devices
	for id, some := range all {
		if len(some) > 0 && total <= maxLimitNames {
			for _, one := range some {
				mine.put(limitKind, one)
			}
			continue
		}
		for name, one := range file {
			if limitOf(name) == id {
				mine.put(limitKind, w.renewed(p, id, one))
			}
		}
	}
	// The folder is empty after the host has started again, and kubelet gives containers the names
	// that they had.
	held := see(p, func(e *alloc.Engine, id alloc.ID) []alloc.ContainerShare { return e.Containers(id, nil) })
	for _, c := range held {
		if _, ok := all[c.Chip]; !ok {
			continue
		}
		if one, ok := w.limits.device(p.config.Vendor, c.Chip, limitMiB(c.Bytes)); ok {
			mine.put(limitKind, one)
		}
	}
}

// limitOf is the device that a CDI device of limitKind is about.
func limitOf(name string) accel.DeviceID {
	return accel.DeviceID(name[:max(strings.LastIndexByte(name, '.'), 0)])
}

// renewed returns a CDI device that was on the disk as it is to be now. The caller holds mu.
func (w *cdiWriter) renewed(p *pool, id accel.DeviceID, before cdispecs.Device) cdispecs.Device {
	text := before.Name[len(id)+1:]
	mib, err := strconv.ParseUint(text, 10, 64)
	if err != nil && text != "max" {
		return before
	}
	if now, ok := w.limits.device(p.config.Vendor, id, mib); ok {
		return now
	}
	return before
}

// limit returns the names of the CDI devices that limit a container to so many units of each
// device, and makes sure that they are described. It returns none while containers cannot be
// limited: the node then states that nothing is promised.
func (w *cdiWriter) limit(p *pool, ids []accel.DeviceID, units accel.Units) ([]backend.CDIDevice, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []backend.CDIDevice
	for _, id := range ids {
		d, ok := w.known[id]
		if !ok || !w.limits.limited(p, d) {
			continue
		}
		mib := uint64(0)
		if p.Kind == alloc.Memory {
			bytes := p.config.Unit.Bytes(units, d.MemoryBytes)
			if mib = limitMiB(bytes); mib == 0 {
				return nil, fmt.Errorf("%d bytes of device %s are less than a limit can be, 1 MiB", bytes, id)
			}
		}
		one, ok := w.limits.device(p.config.Vendor, id, mib)
		if !ok {
			return nil, nil
		}
		if !sameYAML(w.onDisk(limitKind).devices[one.Name], one) {
			if w.wanted[p] == nil {
				return nil, errors.New("the devices were not described yet; divvy-node has just started")
			}
			w.wanted[p].put(limitKind, one)
			if err := w.ensure(limitKind); err != nil {
				return nil, fmt.Errorf("write the CDI specification of %s: %w", limitKind, err)
			}
		}
		names = append(names, backend.CDIDevice{Kind: limitKind, Name: one.Name})
	}
	return names, nil
}

// publish writes the node's condition.
func (d *limitDesk) publish(ctx context.Context, p *publisher, now time.Time) error {
	node, err := p.current()
	if err != nil {
		return err
	}
	if len(d.resources) == 0 {
		return p.publishCondition(ctx, node, wire.IsolationCondition, nil, now)
	}
	d.mu.Lock()
	passed, status := d.passed, d.status
	d.mu.Unlock()
	if passed.IsZero() {
		return nil // the condition is as an earlier run left it
	}
	return p.publishCondition(ctx, node, wire.IsolationCondition, isolationCondition(status, now.Sub(passed)), now)
}

// isolationCondition returns the condition without its type and times. age is that of the pass.
func isolationCondition(status map[accel.DeviceID]limits.Status, age time.Duration) *corev1.NodeCondition {
	if age > accel.MaxAttestationAge {
		return &corev1.NodeCondition{Status: corev1.ConditionTrue, Reason: reasonIsolationLost,
			Message: "the limits of the devices' memory could not be examined for more than " + accel.MaxAttestationAge.String()}
	}
	var lost []string
	for _, id := range slices.Sorted(maps.Keys(status)) {
		if losses := status[id].Losses; len(losses) > 0 {
			lost = append(lost, fmt.Sprintf("%s: %s", id, losses[0].Reason))
		}
	}
	if len(lost) == 0 {
		return &corev1.NodeCondition{Status: corev1.ConditionFalse, Reason: reasonIsolationHolds,
			Message: "every container has had its memory limit since its start"}
	}
	return &corev1.NodeCondition{Status: corev1.ConditionTrue, Reason: reasonIsolationLost,
		Message: "the memory of devices is not limited for all that use it: " + shortList(lost)}
}
