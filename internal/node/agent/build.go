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
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/limits"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// build makes the resources that are configured, and those that a state file
// tells of: containers may hold something of them.
func (a *Agent) build(ctx context.Context) ([]*offering, error) {
	var names []accel.Resource
	var configured []*config.Resource
	for i := range a.o.Config.Resources {
		if r := &a.o.Config.Resources[i]; a.o.Config.PathOf(r) == config.PathPlugin {
			configured, names = append(configured, r), append(names, accel.Resource(r.Name))
		}
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
		if i < len(configured) {
			err = a.configured(ctx, r, configured[i])
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
	var pools []alloc.Config
	for _, r := range out {
		a.records.resources = append(a.records.resources, r.name)
		for _, p := range r.parts {
			pools = append(pools, p.config)
		}
	}
	if a.records.owner.engine, err = alloc.New(pools...); err != nil {
		return nil, err
	}
	for _, r := range out {
		a.recall(ctx, r)
	}
	return out, nil
}

// configured makes the pool that is configured.
func (a *Agent) configured(ctx context.Context, r *offering, c *config.Resource) error {
	if a.o.Backends[c.Vendor] == nil {
		return fmt.Errorf("resource %s: there is no backend for vendor %q", c.Name, c.Vendor)
	}
	r.vendor, r.count, r.configured = c.Vendor, c.CountResource, true
	chosen, forClaims := chooserOf(c, a.o.Config.Vendors[c.Vendor].Partitions()), claimsChooser(&a.o.Config, c.Vendor)
	made := alloc.Config{Chooses: func(card sharing.Card) bool { return chosen(card) && !forClaims(card) }}
	switch c.Mode {
	case config.ModeMemory:
		unit, err := sharing.ParseMemoryUnit(c.MemoryUnit)
		if err != nil {
			return fmt.Errorf("resource %s: %w", c.Name, err)
		}
		made.Kind, made.Unit = alloc.Memory, unit
		made.LeastBytes = leastBytes(c, a.o.Config.Usage.Overuse.ContextAllowanceMiB)
	case config.ModeExclusive, config.ModeTimeSlicing:
		made.Kind, made.Cut = alloc.Slots, cutOf(c)
	default:
		return fmt.Errorf("resource %s: there is no mode %q", c.Name, c.Mode)
	}
	if err := a.add(ctx, r, made); err != nil {
		return err
	}
	if c.Isolation != "" {
		tier, err := accel.ParseTier(string(c.Isolation))
		if err != nil {
			return fmt.Errorf("resource %s: %w", c.Name, err)
		}
		r.parts[0].tier = tier
	}
	return nil
}

// leastBytes is the least memory of a device that a container can have of a resource whose memory
// is limited, where it is known what a context takes: a limit is whole MiB, and must be larger.
func leastBytes(c *config.Resource, contexts map[string]int) uint64 {
	context := contexts[c.Vendor]
	if c.Isolation != config.IsolationDriver || context <= 0 {
		return 0
	}
	return uint64(context+1) * limits.MiB
}

// leftovers makes pools of what the resource was before, as long as containers
// may hold something of that.
func (a *Agent) leftovers(ctx context.Context, r *offering) error {
	why := "the node does not offer it any more"
	switch {
	case slices.ContainsFunc(a.o.Config.Resources, func(c config.Resource) bool {
		return c.Name == string(r.name) && a.o.Config.PathOf(&c) == config.PathDRA
	}):
		why = "the node offers its devices to resource claims"
	case r.configured:
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
			if r.vendor == "" && kind == alloc.Memory {
				r.vendor = "enflame" // the first release, which wrote no name, had one vendor
			}
		}
		if err := a.add(ctx, r, alloc.Config{ID: id, Draining: why}); err != nil {
			return err
		}
	}
	return nil
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
		metrics: a.metrics, sink: shelf{r, len(r.parts)}, changed: a.signals.wake.raise, withdrawn: a.signals.withdraw.raise, event: a.tell,
	}
	if p.specify = a.cdi.specifier(p, a.o.Config.Vendors[r.vendor]); p.specify != nil {
		p.limit = func(ids []accel.DeviceID, units accel.Units, percent int) ([]backend.CDIDevice, error) {
			return a.cdi.limit(p, ids, units, percent)
		}
	}
	p.load(ctx)
	r.parts, r.lists = append(r.parts, p), append(r.lists, nil)
	return nil
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

// observe counts a rejection too, and tells the users of the node once of each reason: the pod
// has an event of kubelet's with the text.
func (t timed) observe(ctx context.Context, question string, since time.Time, err error) {
	a, resource := t.agent, string(t.name)
	a.metrics.latency.WithLabelValues(resource, question).Observe(time.Since(since).Seconds())
	if err == nil || ctx.Err() != nil {
		return // kubelet does not wait any more
	}
	reason := string(alloc.ReasonOf(err))
	a.metrics.refused.WithLabelValues(resource, reason).Inc()
	a.events.Once(events.OnNode(a.o.Node), events.AllocationRefused, resource+" "+reason,
		fmt.Sprintf("allocation of %s for a container was rejected: %v", resource, err))
}
