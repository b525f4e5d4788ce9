package claims

import (
	"context"
	"iter"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// perResource is a policy that learns what pods usually ask for, of each resource by itself.
type perResource interface {
	For(resource accel.Resource) place.Policy
}

// Resources are the kinds of units that claims are expressed in for a policy that learns: the memory of
// each vendor's devices, in units of wire.MemoryStep.
func Resources() []accel.Resource {
	out := make([]accel.Resource, len(accel.Vendors))
	for i := range accel.Vendors {
		out[i] = ResourceOf(wire.Driver(accel.Vendors[i].Name))
	}
	return out
}

// ResourceOf is the one of Resources that a driver's devices have units of.
func ResourceOf(driver string) accel.Resource {
	return accel.Resource(driver + "/" + wire.MemoryCapacity)
}

// unitAsk is what claims ask for in units of a resource, as pods ask for units of an extended resource.
type unitAsk struct {
	resource accel.Resource
	place.Ask
}

// Request is what claims ask for as a request of units of one of Resources. ok is false where they
// cannot be expressed so: several requests, what is not counted, devices that overlap with others, time
// slices, an amount that differs between devices, or selectors that select some devices of a model.
func (c *Catalog) Request(ctx context.Context, all []*resourceapi.ResourceSlice, d Demand) (r accel.Request, ok bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, selectFor)
	defer cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read(all)
	a, err := c.ask(ctx, &d)
	if a == nil || err != nil {
		return accel.Request{}, false, err
	}
	return accel.Request{
		Resource: a.resource, Devices: a.Devices, CPU: a.CPU, Memory: a.Memory, Selection: a.Only,
		Containers: []accel.ContainerRequest{{Kind: accel.AppContainer, Units: a.Units * accel.Units(a.Devices)}},
	}, true, nil
}

// ask returns what claims ask for as units, nil where it cannot be expressed so. The caller holds the lock.
func (c *Catalog) ask(ctx context.Context, d *Demand) (*unitAsk, error) {
	if !d.Counted || len(d.requests) != 1 {
		return nil, nil //nolint:nilnil // it is no error
	}
	known, ok := c.asks[d.key]
	if !ok {
		var err error
		if known, err = c.express(ctx, &d.requests[0]); err != nil {
			return nil, err
		}
		if len(c.asks) >= maxAsks {
			clear(c.asks)
		}
		c.asks[d.key] = known
	}
	if known == nil {
		return nil, nil //nolint:nilnil // as above
	}
	a := *known
	a.CPU, a.Memory = d.CPU, d.Memory
	return &a, nil
}

// maxAsks is for how many different demands it is remembered what they are in units.
const maxAsks = 1024

// express looks at all devices that a request selects.
func (c *Catalog) express(ctx context.Context, r *request) (*unitAsk, error) {
	type model struct {
		resource accel.Resource
		name     string
	}
	const some, others = 1, 2 // devices of a model that are selected, or not
	found := map[model]uint8{}
	a := &unitAsk{Ask: place.Ask{Devices: r.count}}
	same := r.count > 0
	for d, selected := range c.devices(ctx, r) {
		if selected.err != nil {
			return nil, selected.err
		}
		if !selected.is {
			found[model{d.resource, d.model}] |= others
			continue
		}
		found[model{d.resource, d.model}] |= some
		if a.resource == "" {
			a.resource = d.resource
		}
		same = same && d.resource != "" && d.resource == a.resource
		if need, ok := r.need(d); ok && same {
			units := accel.Units((need + wire.MemoryStep - 1) / wire.MemoryStep)
			same = a.Units == 0 || a.Units == units
			a.Units = units
		}
	}
	var names []string
	all := true
	for m, which := range found {
		switch {
		case m.resource != a.resource:
		case which == some|others:
			same = false
		case which == some:
			names = append(names, m.name)
		default:
			all = false
		}
	}
	if !same || a.Units <= 0 {
		return nil, nil //nolint:nilnil // as in ask
	}
	if !all {
		slices.Sort(names)
		a.Only = &accel.Selection{UseModels: names}
	}
	return a, nil
}

// selection is whether a request selects a device.
type selection struct {
	is  bool
	err error
}

// devices returns all devices with whether a request selects them. It ends with the first error.
func (c *Catalog) devices(ctx context.Context, r *request) iter.Seq2[*device, selection] {
	return func(yield func(*device, selection) bool) {
		for i := range c.nodes {
			for _, p := range c.nodes[i].pools {
				for _, of := range p.slices {
					selected, err := c.selects(ctx, of, r)
					if err != nil {
						yield(nil, selection{err: err})
						return
					}
					for j := range of.devices {
						if !yield(&of.devices[j], selection{is: selected[j]}) {
							return
						}
					}
				}
			}
		}
	}
}

// rate rates a node by all that claims have left there of the resource. The sheet is filled with it.
func (a *unitAsk) rate(n *node, host Host, policy place.Policy, s *sheet) (rating int64, fits bool) {
	s.chosen, rating, fits = policy.Choose(s.offer(n, a.resource, host), &a.Ask, s.chosen)
	return rating, fits
}

// offer returns a node as policies see it, with the devices that have units of the resource. It is valid until
// the next one.
func (s *sheet) offer(n *node, resource accel.Resource, host Host) *place.Node {
	s.slots = s.slots[:0]
	at := -1
	for _, p := range n.pools {
		for _, of := range p.slices {
			for j := range of.devices {
				at++
				if d := &of.devices[j]; d.resource == resource {
					s.slots = append(s.slots, place.Slot{
						ID: accel.DeviceID(d.api.Name), Index: at, Model: d.model, Unhealthy: !d.free,
						Total: accel.Units(d.total / wire.MemoryStep), Free: accel.Units(s.left[at] / wire.MemoryStep),
					})
				}
			}
		}
	}
	s.node = place.Node{Slots: s.slots, CPU: host.CPU, Memory: host.Memory, Cores: host.Cores}
	return &s.node
}

// look remembers a state for Each. The caller holds the lock.
func (c *Catalog) look(of State) {
	c.hosts, c.held = c.hosts[:0], of.Held
	for i := range c.nodes {
		host := uncounted
		if of.Hosts != nil {
			host = of.Hosts(c.nodes[i].name)
		}
		c.hosts = append(c.hosts, host)
	}
}

// Each returns the nodes that have units of a resource, by name, as Rank saw them last; none before that.
// A node is valid until the next one. The catalog must not be used meanwhile.
func (c *Catalog) Each(resource accel.Resource) iter.Seq2[string, *place.Node] {
	return func(yield func(string, *place.Node) bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		var s sheet
		for i, host := range c.hosts {
			n := &c.nodes[i]
			s.start(n, c.held)
			if of := s.offer(n, resource, host); len(of.Slots) > 0 && !yield(n.name, of) {
				return
			}
		}
	}
}
