package agent

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
)

// offering is one extended resource of the node with its socket. It joins the
// lists of its parts for kubelet and passes kubelet's questions to the part that
// is configured.
type offering struct {
	name   accel.Resource
	vendor string
	server *deviceplugin.Server
	// count is the resource that shows the number of devices, or "".
	count string
	// parts are fixed. The first is as configured, unless the resource is not
	// configured any more; the others are those that containers still hold
	// something of.
	parts      []*pool
	configured bool
	// released is true once it was told that nobody holds anything of a resource
	// that is not configured. Only the agent's loop uses it.
	released bool
	// found is closed by once when the devices are known.
	found chan struct{}
	once  sync.Once

	mu sync.Mutex
	// lists are what the parts offer, nil for nothing yet.
	lists [][]deviceplugin.Unit
}

// offerings are all of the node's resources.
type offerings []*offering

// parts are those of all resources that are chosen.
func (all offerings) parts(chosen func(*offering, *pool) bool) iter.Seq[*pool] {
	return func(yield func(*pool) bool) {
		for _, r := range all {
			for _, p := range r.parts {
				if chosen(r, p) && !yield(p) {
					return
				}
			}
		}
	}
}

func ofKind(kind alloc.Kind) func(*offering, *pool) bool {
	return func(_ *offering, p *pool) bool { return p.Kind == kind }
}

// any reports whether a part of a resource is such.
func (all offerings) any(is func(*pool) bool) bool {
	return slices.ContainsFunc(all, func(r *offering) bool { return slices.ContainsFunc(r.parts, is) })
}

// sync makes all resources tell kubelet what they offer.
func (all offerings) sync(ctx context.Context) {
	for _, r := range all {
		for _, p := range r.parts {
			p.sync(ctx)
		}
	}
}

// release forgets what nobody holds any more of resources that are not
// configured or were configured otherwise.
func (all offerings) release(ctx context.Context) error {
	var failed []error
	for _, r := range all {
		drained := true
		for _, p := range r.parts {
			if !p.status().Drained {
				drained = false
			} else if err := p.store.Remove(); err != nil {
				failed = append(failed, err)
			}
		}
		if !r.configured && !r.released && drained {
			r.released = true
			klog.FromContext(ctx).Info("No container holds units of an unconfigured resource any longer", "resource", r.name)
		}
	}
	return errors.Join(failed...)
}

// shelf is where one part of a resource puts its units.
type shelf struct {
	offering *offering
	part     int
}

// SetUnits implements unitSink.
func (s shelf) SetUnits(units []deviceplugin.Unit) error {
	r := s.offering
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.lists[s.part]
	r.lists[s.part] = units
	all := units
	if len(r.lists) > 1 {
		all = slices.Concat(r.lists...)
		level(all)
	}
	if err := r.server.SetUnits(all); err != nil {
		r.lists[s.part] = before
		return err
	}
	return nil
}

// level takes the NUMA nodes from all units when some have none, as those of
// memory: kubelet, when it restarts, fails a running pod whose units have none
// as soon as any other unit of the resource has some and its topology manager
// is strict. It costs the alignment of new pods until the others are given back.
func level(units []deviceplugin.Unit) {
	if !slices.ContainsFunc(units, func(u deviceplugin.Unit) bool { return len(u.NUMANodes) == 0 }) {
		return
	}
	for i := range units {
		units[i].NUMANodes = nil
	}
}

// Prefer implements deviceplugin.Allocator.
func (r *offering) Prefer(ctx context.Context, available, must []string, size int) ([]string, error) {
	if err := r.awaitDiscovery(ctx); err != nil {
		return nil, err
	}
	return r.parts[0].Prefer(ctx, available, must, size)
}

// Allocate implements deviceplugin.Allocator.
func (r *offering) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	if err := r.awaitDiscovery(ctx); err != nil {
		return nil, err
	}
	return r.parts[0].Allocate(ctx, ids)
}

// discoveryLimit is how long a question of kubelet waits for the first discovery.
const discoveryLimit = 5 * time.Second

// offerEarly lets kubelet know the units of the state files, before the devices are
// found. A vendor's library may take seconds to load, and kubelet rejects every pod
// that arrives while a resource has no device plugin. What it asks meanwhile waits
// for the discovery.
func (r *offering) offerEarly() {
	for _, p := range r.parts {
		if units := see(p, (*alloc.Engine).Early); units != nil {
			_ = p.offer(units) // after the discovery its error is reported
		}
	}
}

// discovered notes that the parts have the result of a discovery.
func (r *offering) discovered() { r.once.Do(func() { close(r.found) }) }

// awaitDiscovery waits until the devices are known.
func (r *offering) awaitDiscovery(ctx context.Context) error {
	select {
	case <-r.found:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(discoveryLimit):
		return errors.New("the devices were not found yet; divvy-node has just started")
	}
}
