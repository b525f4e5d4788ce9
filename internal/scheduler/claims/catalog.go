package claims

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const (
	// maxSelectors is for how many different requests it is remembered which devices of a slice
	// they select, and how nodes are rated.
	maxSelectors = 32
	// selectFor bounds how long one pod's selectors may take. New ones are evaluated for all devices
	// once, a tenth of a second for 8000 on a quiet machine. What was found out by then is remembered,
	// so that the next attempt gets further; until then pods are spread.
	selectFor = 2 * time.Second
)

// Catalog is what the DRA drivers of Divvy publish. It keeps what it made of a slice while the slice
// stays the same object, as it does in the cache of an informer. It is safe for concurrent use.
type Catalog struct {
	selectors Selectors

	mu sync.Mutex // guards what follows
	// published is by slice, and nodes are of the pools that are complete, by name.
	published map[*resourceapi.ResourceSlice]*published
	nodes     []node
	// owner is the position of a device's node, and idle what nodes were rated of which claims hold
	// nothing, by their position, for a policy and a demand. Both are of the nodes as they are.
	owner map[structured.DeviceID]int
	idle  map[string][]outcome
	// asks are what demands ask for as units, by their keys; nil for one that cannot be expressed so.
	asks map[string]*unitAsk
	// hosts are by position, and held is what claims held, both as Rank saw them last for a policy that learns.
	hosts []Host
	held  *structured.AllocatedState
}

// NewCatalog returns an empty one.
func NewCatalog() *Catalog {
	return &Catalog{selectors: NewSelectors(), idle: map[string][]outcome{}, asks: map[string]*unitAsk{}}
}

// node is a node with the devices that it publishes.
type node struct {
	name  string
	pools []pool
}

// pool is what one driver publishes of a node.
type pool struct {
	slices   []*published
	counters []resourceapi.CounterSet
}

// published is what a slice has.
type published struct {
	devices []device
	// selected is which of the devices a request selects, by its key.
	selected map[string][]bool
}

// device is a device of one capacity: its memory, or its time slices.
type device struct {
	id       structured.DeviceID
	api      *resourceapi.Device
	capacity resourceapi.QualifiedName
	total    int64
	// resource is one of Resources whose units the device has, "" for none, and model what is told apart among its
	// devices.
	resource accel.Resource
	model    string
	// shared is true where several requests may have parts, the rest is for such a device: what a
	// request has that names no amount, and the least, the most and the step of one that does.
	shared                       bool
	byDefault, least, most, step int64
	// free is false for a device that takes no new claims.
	free bool
}

// read takes the slices over. The caller holds the lock.
func (c *Catalog) read(all []*resourceapi.ResourceSlice) {
	ours, same := 0, true
	for _, s := range all {
		if !wire.IsDriver(s.Spec.Driver) || s.Spec.NodeName == nil {
			continue
		}
		ours++
		if _, known := c.published[s]; !known {
			same = false
			break
		}
	}
	if same && ours == len(c.published) {
		return
	}
	type name struct{ driver, pool string }
	next, pools := make(map[*resourceapi.ResourceSlice]*published, len(all)), map[name][]*resourceapi.ResourceSlice{}
	for _, s := range all {
		if !wire.IsDriver(s.Spec.Driver) || s.Spec.NodeName == nil {
			continue
		}
		of := name{s.Spec.Driver, s.Spec.Pool.Name}
		pools[of] = append(pools[of], s)
		if next[s] = c.published[s]; next[s] == nil {
			next[s] = publishedIn(s)
		}
	}
	nodes := map[string]*node{}
	for _, parts := range pools {
		newest := slices.MaxFunc(parts, func(a, b *resourceapi.ResourceSlice) int {
			return int(min(max(a.Spec.Pool.Generation-b.Spec.Pool.Generation, -1), 1))
		}).Spec.Pool
		parts = slices.DeleteFunc(parts, func(s *resourceapi.ResourceSlice) bool { return s.Spec.Pool.Generation != newest.Generation })
		if int64(len(parts)) != newest.ResourceSliceCount {
			continue // it is being written, and kube-scheduler allocates nothing of it
		}
		var p pool
		for _, s := range parts {
			p.slices = append(p.slices, next[s])
			p.counters = append(p.counters, s.Spec.SharedCounters...)
		}
		on := *parts[0].Spec.NodeName
		if nodes[on] == nil {
			nodes[on] = &node{name: on}
		}
		nodes[on].pools = append(nodes[on].pools, p)
	}
	c.published, c.nodes, c.hosts = next, c.nodes[:0], nil
	c.owner, c.idle, c.asks = map[structured.DeviceID]int{}, map[string][]outcome{}, map[string]*unitAsk{}
	for i, name := range slices.Sorted(maps.Keys(nodes)) {
		c.nodes = append(c.nodes, *nodes[name])
		for _, p := range c.nodes[i].pools {
			for _, s := range p.slices {
				for j := range s.devices {
					c.owner[s.devices[j].id] = i
				}
			}
		}
	}
}

func publishedIn(s *resourceapi.ResourceSlice) *published {
	p := &published{selected: map[string][]bool{}}
	for i := range s.Spec.Devices {
		p.devices = append(p.devices, deviceOf(s, &s.Spec.Devices[i]))
	}
	return p
}

// deviceOf returns a device that is not free where it is of another kind than the drivers publish.
func deviceOf(s *resourceapi.ResourceSlice, of *resourceapi.Device) device {
	d := device{
		id: structured.MakeDeviceID(s.Spec.Driver, s.Spec.Pool.Name, of.Name), api: of,
		shared: of.AllowMultipleAllocations != nil && *of.AllowMultipleAllocations,
		free:   len(of.Capacity) == 1 && len(of.BindingConditions) == 0 && !slices.ContainsFunc(of.Taints, keepsAway),
	}
	for name, capacity := range of.Capacity {
		d.capacity, d.total = name, capacity.Value.Value()
		d.byDefault, d.most, d.step = d.total, d.total, 1
		policy := capacity.RequestPolicy
		if policy == nil {
			continue
		}
		if policy.Default != nil {
			d.byDefault = policy.Default.Value()
		}
		if valid := policy.ValidRange; valid != nil {
			if valid.Min != nil {
				d.least = valid.Min.Value()
			}
			if valid.Max != nil {
				d.most = valid.Max.Value()
			}
			if valid.Step != nil {
				d.step = max(valid.Step.Value(), 1)
			}
		}
		d.free = d.free && len(policy.ValidValues) == 0
	}
	if d.capacity == wire.MemoryCapacity && len(of.ConsumesCounters) == 0 {
		d.resource, d.model = ResourceOf(s.Spec.Driver), text(of, wire.DeviceType)+" "+text(of, wire.DeviceModel)
	}
	return d
}

// text is an attribute of a device, "" for none.
func text(d *resourceapi.Device, attribute resourceapi.QualifiedName) string {
	if value := d.Attributes[attribute].StringValue; value != nil {
		return *value
	}
	return ""
}

func keepsAway(t resourceapi.DeviceTaint) bool { return t.Effect != resourceapi.DeviceTaintEffectNone }

// selects returns which devices of a slice a request selects.
func (c *Catalog) selects(ctx context.Context, p *published, r *request) ([]bool, error) {
	if selected, known := p.selected[r.key]; known {
		return selected, nil
	}
	selected := make([]bool, len(p.devices))
	for i := range p.devices {
		d := &p.devices[i]
		matches := true
		for _, expression := range r.selectors {
			var err error
			if matches, err = c.selectors.Match(ctx, expression, d.id.Driver.String(), d.api); err != nil {
				return nil, fmt.Errorf("selector %s and device %s: %w", expression, d.id, err)
			}
			if !matches {
				break
			}
		}
		selected[i] = matches
	}
	if len(p.selected) >= maxSelectors {
		clear(p.selected)
	}
	p.selected[r.key] = selected
	return selected, nil
}
