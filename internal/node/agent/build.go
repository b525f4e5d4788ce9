package agent

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/state"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// build makes the resources that are configured, and those that a state file
// tells of: containers may hold something of them.
func (a *Agent) build(ctx context.Context) ([]*offering, error) {
	var names []accel.Resource
	for _, r := range a.o.Config.Resources {
		names = append(names, accel.Resource(r.Name))
	}
	stored, err := state.Stored(a.o.Config.StateDir)
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
		a.metrics.register(defs.NodeRegistrations.NewCounterFunc(prometheus.Labels{"resource": string(name)},
			func() float64 { return float64(r.server.Registrations()) }))
		a.metrics.resource(name)
		out = append(out, r)
	}
	if err := a.engine(out); err != nil {
		return nil, err
	}
	for _, r := range out {
		a.recall(ctx, r)
	}
	return out, nil
}

// configure makes the pool that is configured.
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
		return a.add(ctx, r, alloc.Config{ID: alloc.ID{Kind: alloc.Memory}, Unit: unit, Chooses: selectorOf(c.Devices).matches})
	case config.ModeExclusive, config.ModeTimeSlicing:
		return a.add(ctx, r, alloc.Config{ID: alloc.ID{Kind: alloc.Slots}, Cut: cutOf(c), Chooses: selectorOf(c.Devices).matches})
	default:
		return fmt.Errorf("resource %s: there is no mode %q", c.Name, c.Mode)
	}
}

// leftovers makes pools of what the resource was before, as long as containers
// may hold something of that.
func (a *Agent) leftovers(ctx context.Context, r *offering) error {
	why := "the node does not offer it any more"
	if r.configured {
		why = "the node offers it in another way now"
	}
	for _, kind := range []alloc.Kind{alloc.Memory, alloc.Slots} {
		if r.configured && r.parts[0].Kind == kind {
			continue
		}
		id := alloc.ID{Resource: r.name, Kind: kind}
		saved, err := state.NewStore(a.o.Config.StateDir, id).Load()
		switch {
		case err != nil:
			klog.FromContext(ctx).Error(err, "Cannot read what containers may hold of a resource that is not configured",
				"resource", r.name)
			continue
		case saved == nil, kind == alloc.Memory && len(saved.Ranges) == 0:
			continue
		}
		if r.vendor == "" {
			r.vendor = saved.Vendor
			// Files of before there were several vendors do not name it.
			if kind == alloc.Memory {
				r.vendor = vendorOf(saved.Vendor)
			}
		}
		if err := a.add(ctx, r, alloc.Config{ID: id, Draining: why}); err != nil {
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

// add makes a pool of the resource.
func (a *Agent) add(ctx context.Context, r *offering, c alloc.Config) error {
	inject, err := newInjector(&a.o.Config, r.vendor, r.name)
	if err != nil {
		return err
	}
	c.Resource, c.Vendor = r.name, r.vendor
	p := &pool{
		ID: c.ID, config: c, inject: inject, backend: a.o.Backends[r.vendor],
		store: state.NewStore(a.o.Config.StateDir, c.ID), records: a.records,
		metrics: a.metrics, sink: shelf{r, len(r.parts)}, changed: a.wakeUp, withdrawn: a.withdrawn, event: a.tell,
	}
	p.specify = a.specifier(p, r.vendor, inject)
	p.load(ctx)
	r.add(p)
	return nil
}

// engine makes the engine of the pools of all resources.
func (a *Agent) engine(all []*offering) error {
	var pools []alloc.Config
	for _, r := range all {
		a.records.resources = append(a.records.resources, r.name)
		for _, p := range r.parts {
			pools = append(pools, p.config)
		}
	}
	var err error
	a.records.owner.engine, err = alloc.New(pools...)
	return err
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
