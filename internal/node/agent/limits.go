package agent

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/node/usage"
)

// LimitOptions say how containers get limits in the driver. The zero value is for hosts that
// are real.
type LimitOptions struct {
	// ProcRoot and CgroupRoot replace the host's /proc and /sys/fs/cgroup, for the hook too.
	// They are for hosts that are simulated.
	ProcRoot, CgroupRoot string
}

// procRoot is the host's /proc, for a host whose root is seen there.
func (o LimitOptions) procRoot(hostRoot string) string {
	return cmp.Or(o.ProcRoot, filepath.Join(hostRoot, "proc"))
}

// cgroupRoot is where the host's control groups are, like procRoot.
func (o LimitOptions) cgroupRoot(hostRoot string) string {
	return cmp.Or(o.CgroupRoot, filepath.Join(hostRoot, "sys/fs/cgroup"))
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
	proof
	o LimitOptions
	// driverRoot returns where the driver of a vendor is on the host.
	driverRoot func(vendor string) string
	// prepare finds out whether containers of a vendor's devices can be limited; nil where no
	// resource has limits. It is set before the first use.
	prepare func(ctx context.Context, vendor string, found backend.Found) error
	// hook is the program on the host, by vendor, while containers can be limited. It is guarded
	// by mu.
	hooks map[string]string
	// contexts is how much memory the context of a process takes, in MiB, by vendor, as far as it
	// is configured.
	contexts map[string]int
	// claims say which claims have limits; nil until New has built the claim desk.
	claims *claimLimits
	// running are the containers of the last pass, by device; guarded by mu. What it has is not changed.
	running map[accel.DeviceID][]limits.Container
}

func newLimitDesk(o LimitOptions, c config.NodeConfig) *limitDesk {
	return &limitDesk{o: o, proof: newProof(c, config.IsolationDriver), hooks: map[string]string{},
		contexts:   c.Usage.Overuse.ContextAllowanceMiB,
		driverRoot: func(vendor string) string { return cmp.Or(c.Vendors[vendor].DriverRoot, "/") }}
}

// besideContext returns why a limit leaves no memory beside the context of a process; nil where it does.
func (d *limitDesk) besideContext(vendor string, id accel.DeviceID, mib uint64) error {
	context := uint64(max(d.contexts[vendor], 0))
	if mib > context {
		return nil
	}
	return alloc.Reject(alloc.Isolation, "the limit of %d MiB of device %s would leave no memory beside the context of a "+
		"process, which takes %d MiB by contextAllowanceMiB; request more", mib, id, context)
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
	d.hooks[vendor], d.stated.Backend = hook, cmp.Or(controller, d.stated.Backend)
	return changed
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

// ran takes in the containers of a pass.
func (d *limitDesk) ran(running map[accel.DeviceID][]limits.Container) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running = running
}

// charged returns what the driver has charged to the containers of a device whose limits are
// proven, in bytes: of those that had their limit in the last pass. One whose control groups do not
// agree on an amount, or have ended, is not among them.
func (d *limitDesk) charged(ctx context.Context, l backend.Limiter, id accel.DeviceID) map[usage.ContainerName]uint64 {
	if _, err := d.isolation(id); err != nil {
		return nil
	}
	d.mu.Lock()
	running := d.running[id]
	d.mu.Unlock()
	out := map[usage.ContainerName]uint64{}
	for i := range running {
		c := &running[i]
		if bytes, ok := chargedTo(ctx, l, id, c); ok {
			out[usage.ContainerName{Namespace: c.Namespace, Pod: c.Pod, Name: c.Container}] = bytes
		}
	}
	return out
}

// chargedTo returns the amount of a container, if it has a limit: the groups below that of a limit
// have its amount.
func chargedTo(ctx context.Context, l backend.Limiter, id accel.DeviceID, c *limits.Container) (bytes uint64, ok bool) {
	if c.Bytes == 0 {
		return 0, false
	}
	for i := range c.Groups {
		read, err := l.Limit(ctx, id, c.Groups[i].Group.Dir)
		if err != nil || read.Bytes != c.Bytes || i > 0 && read.UsedBytes != bytes {
			return 0, false
		}
		bytes = read.UsedBytes
	}
	return bytes, len(c.Groups) > 0
}

// kind implements sized.
func (*limitDesk) kind() string { return limitKind }

// limited implements sized: containers of a pool get CDI devices of limitKind for a device, a
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

// renewed implements sized.
func (d *limitDesk) renewed(p *pool, device accel.Device, before cdispecs.Device) cdispecs.Device {
	text := before.Name[len(device.ID)+1:]
	mib, err := strconv.ParseUint(text, 10, 64)
	if err != nil && text != "max" {
		return before
	}
	if now, ok := d.device(p.config.Vendor, device.ID, mib); ok {
		return now
	}
	return before
}

// of implements sized.
func (d *limitDesk) of(p *pool, device accel.Device, mib uint64, _ int) (cdispecs.Device, bool) {
	return d.device(p.config.Vendor, device.ID, mib)
}
