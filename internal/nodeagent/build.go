package nodeagent

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	defs "github.com/divvy-gpu/divvy/internal/metrics"
	"github.com/divvy-gpu/divvy/internal/sharing"
)

// build makes the resources that are configured, and those that a state file
// tells of: containers may hold something of them.
func (a *Agent) build(ctx context.Context) ([]*offering, error) {
	var names []accel.Resource
	for _, r := range a.o.Config.Resources {
		names = append(names, accel.Resource(r.Name))
	}
	stored, err := sharing.Stored(a.o.Config.StateDir)
	if err != nil {
		return nil, err
	}
	for _, name := range stored {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	sockets := deviceplugin.SocketNames(names...)
	var out []*offering
	for i, name := range names {
		r := &offering{name: name, found: make(chan struct{})}
		r.server = deviceplugin.NewServer(filepath.Join(a.o.Config.KubeletDir, "device-plugins"), sockets[i], name, timed{r, a})
		if i < len(a.o.Config.Resources) {
			err = a.configure(ctx, r, &a.o.Config.Resources[i])
		}
		if err == nil {
			err = a.leftovers(ctx, r)
		}
		if err != nil {
			return nil, err
		}
		if len(r.parts) == 0 {
			continue
		}
		a.recall(ctx, r)
		a.metrics.register(defs.NodeRegistrations.NewCounterFunc(prometheus.Labels{"resource": string(name)},
			func() float64 { return float64(r.server.Registrations()) }))
		a.metrics.resource(name)
		out = append(out, r)
	}
	return out, nil
}

// configure makes the part that is configured.
func (a *Agent) configure(ctx context.Context, r *offering, c *config.Resource) error {
	if a.o.Backends[c.Vendor] == nil {
		return fmt.Errorf("resource %s: there is no backend for vendor %q", c.Name, c.Vendor)
	}
	r.vendor, r.count, r.configured = c.Vendor, c.CountResource, true
	switch c.Mode {
	case config.ModeMemory:
		unit, err := sharing.ParseMemoryUnit(c.MemoryUnit)
		if err != nil {
			return fmt.Errorf("resource %s: %w", c.Name, err)
		}
		return a.addMemory(ctx, r, func(p *memoryPool) { p.wanted, p.selector = unit, selectorOf(c.Devices) })
	case config.ModeExclusive, config.ModeTimeSlicing:
		return a.addSlots(ctx, r, func(p *slotPool) { p.rules = rulesOf(c) })
	default:
		return fmt.Errorf("resource %s: there is no mode %q", c.Name, c.Mode)
	}
}

// leftovers makes parts of what the resource was before, as long as containers
// may hold something of that.
func (a *Agent) leftovers(ctx context.Context, r *offering) error {
	why := "the node does not offer it any more"
	if r.configured {
		why = "the node offers it in another way now"
	}
	log := klog.FromContext(ctx).WithValues("resource", r.name)
	memory, slots := sharing.NewStore(a.o.Config.StateDir, r.name), sharing.NewSlotStore(a.o.Config.StateDir, r.name)
	var isMemory, isSlots bool
	if r.configured {
		_, isMemory = r.parts[0].(*memoryPool)
		isSlots = !isMemory
	}
	if !isMemory && memory.Exists() {
		state, _, err := memory.Load()
		switch {
		case err != nil:
			log.Error(err, "Cannot read what containers may hold of a resource that is not configured")
		case len(state.Ranges) == 0:
		default:
			// Files of before there were several vendors do not name it.
			if r.vendor == "" {
				r.vendor = vendorOf(state.Vendor)
			}
			if err := a.addMemory(ctx, r, func(p *memoryPool) { p.draining = why }); err != nil {
				return err
			}
		}
	}
	if !isSlots && slots.Exists() {
		state, _, err := slots.Load()
		if err != nil {
			log.Error(err, "Cannot read what containers may hold of a resource that is not configured")
			return nil
		}
		if r.vendor == "" {
			r.vendor = state.Vendor
		}
		if err := a.addSlots(ctx, r, func(p *slotPool) { p.draining = why }); err != nil {
			return err
		}
	}
	return nil
}

// vendorOf is the vendor that a state file names: the first release, which wrote
// no name, had one.
func vendorOf(name string) string {
	if name == "" {
		return "enflame"
	}
	return name
}

func (a *Agent) addMemory(ctx context.Context, r *offering, set func(*memoryPool)) error {
	inject, err := newInjector(&a.o.Config, r.vendor, r.name)
	if err != nil {
		return err
	}
	p := &memoryPool{
		resource: r.name, inject: inject, vendor: r.vendor, backend: a.o.Backends[r.vendor],
		store: sharing.NewStore(a.o.Config.StateDir, r.name), records: a.records, tenant: a.tenants.join(r.name, r.vendor),
		grant:   func(pod *corev1.Pod) (accel.Grant, bool) { return a.grantOf(pod, r.name) },
		metrics: a.metrics, changed: a.wakeUp, withdrawn: a.withdrawn, event: a.tell,
		ending: func() []accel.DeviceID { return a.endings.held(r.name) },
	}
	set(p)
	p.specify = a.specifier(p, r.vendor, inject)
	p.sink = shelf{r, len(r.parts)}
	p.foreign = r.foreignTo(p)
	r.add(p)
	return p.open(ctx)
}

func (a *Agent) addSlots(ctx context.Context, r *offering, set func(*slotPool)) error {
	inject, err := newInjector(&a.o.Config, r.vendor, r.name)
	if err != nil {
		return err
	}
	p := &slotPool{
		resource: r.name, inject: inject, vendor: r.vendor, backend: a.o.Backends[r.vendor],
		store: sharing.NewSlotStore(a.o.Config.StateDir, r.name), records: a.records, tenant: a.tenants.join(r.name, r.vendor),
		promised: func(pods []*corev1.Pod) map[accel.DeviceID]bool { return a.promised(r.vendor, pods) },
		metrics:  a.metrics, changed: a.wakeUp, withdrawn: a.withdrawn, event: a.tell,
	}
	set(p)
	p.specify = a.specifier(p, r.vendor, inject)
	p.sink = shelf{r, len(r.parts)}
	p.foreign = r.foreignTo(p)
	r.add(p)
	return p.open(ctx)
}

// promised returns the devices of a vendor that waiting pods were granted by
// memory. The caller holds records.turn.
func (a *Agent) promised(vendor string, pods []*corev1.Pod) map[accel.DeviceID]bool {
	out := map[accel.DeviceID]bool{}
	for _, p := range a.partsOf(vendor) {
		if m, ok := p.(*memoryPool); ok {
			maps.Copy(out, m.promised(pods))
		}
	}
	return out
}

// timed is an offering whose answers to kubelet are timed, and whose refusals are
// counted.
type timed struct {
	*offering
	agent *Agent
}

// Prefer implements deviceplugin.Allocator.
func (t timed) Prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	start := time.Now()
	ids, err := t.offering.Prefer(ctx, available, must, size)
	t.observe(ctx, "prefer", start, err)
	return ids, err
}

// Allocate implements deviceplugin.Allocator.
func (t timed) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	start := time.Now()
	answer, err := t.offering.Allocate(ctx, ids)
	t.observe(ctx, "allocate", start, err)
	return answer, err
}

func (t timed) observe(ctx context.Context, question string, since time.Time, err error) {
	t.agent.metrics.latency.WithLabelValues(string(t.name), question).Observe(time.Since(since).Seconds())
	t.agent.noteRefusal(ctx, t.name, err)
}
