package packing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
	"github.com/divvy-gpu/divvy/internal/scheduler/claims"
)

// Names of policies by which the pods' units are placed as ResourceClaims.
const (
	BinpackClaims       = "binpack-claims"
	FragmentationClaims = fragmentation.Name + "-claims"
)

// throughClaims are policies as divvy-scheduler rates nodes by for pods with claims. A prior is for units alone.
var throughClaims = []simulate.PolicyKind{
	{Name: BinpackClaims, New: same(place.Binpack), Placer: newClaimsPlacer},
	{Name: FragmentationClaims, Placer: newClaimsPlacer, New: func(*simulate.Cluster, *simulate.Workload) place.Policy {
		return learned{fragmentation.New(demand.Options{})}
	}},
}

// learned is a policy of the one resource that the claims of a simulation are of.
type learned struct{ policy *fragmentation.Policy }

func (l learned) Name() string                               { return l.policy.Name() }
func (l learned) Epoch() uint64                              { return l.policy.Epoch() }
func (l learned) For(accel.Resource) place.Policy            { return l.policy }
func (l learned) Renew(nodes iter.Seq2[string, *place.Node]) { l.policy.Renew(nodes) }

// Choose implements place.Policy. For says which policy decides.
func (l learned) Choose(n *place.Node, a *place.Ask, buf []int) (slots []int, rating int64, ok bool) {
	return l.policy.Choose(n, a, buf)
}

// The names of the devices' driver, and of the one class, in claims of a simulation.
const vendor, className = "nvidia", "gpu"

// claimsPlacer places pods by claims: divvy-scheduler's ranking names the node, and devices are allocated there in the
// order in which a node lists them, the most used first. One unit is one step of memory.
type claimsPlacer struct {
	policy  place.Policy
	catalog *claims.Catalog
	state   claims.State
	nodes   map[string]*claimedNode
	demands map[place.Ask]claims.Demand
	placed  map[string]claimedPod
}

// claimedNode is what is left of a node.
type claimedNode struct {
	claims.Host
	devices []accel.Share
	free    []accel.Units
}

// claimedPod is what a pod has.
type claimedPod struct {
	name    string // of the node
	node    *claimedNode
	ask     place.Ask
	devices []int
}

func newClaimsPlacer(c *simulate.Cluster, p place.Policy) simulate.Placer {
	d := &claimsPlacer{policy: p, catalog: claims.NewCatalog(), nodes: map[string]*claimedNode{}, demands: map[place.Ask]claims.Demand{},
		placed: map[string]claimedPod{}}
	for i := range c.Nodes {
		n := &c.Nodes[i]
		node := &claimedNode{Host: claims.Host{CPU: n.CPU, Memory: n.Memory, Cores: n.CPU}, devices: n.Devices}
		for _, of := range n.Devices {
			node.free = append(node.free, of.Units-of.Withheld)
		}
		d.nodes[n.Name] = node
		d.state.Slices = append(d.state.Slices, sliceOf(n))
	}
	d.state.Held = &structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection()}
	d.state.Hosts = func(node string) claims.Host { return d.nodes[node].Host }
	return d
}

func deviceName(i int) string { return "gpu-" + strconv.Itoa(i) }

func memory(units accel.Units) *resource.Quantity {
	return resource.NewQuantity(int64(units)*wire.MemoryStep, resource.BinarySI)
}

// sliceOf is what a node publishes of its devices.
func sliceOf(n *simulate.Node) *resourceapi.ResourceSlice {
	s := &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: wire.Driver(vendor), NodeName: &n.Name,
		Pool: resourceapi.ResourcePool{Name: n.Name, Generation: 1, ResourceSliceCount: 1}}}
	for i := range n.Devices {
		of := &n.Devices[i]
		units, kind, shared := of.Units-of.Withheld, className, true
		device := resourceapi.Device{
			Name: deviceName(i), AllowMultipleAllocations: &shared,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				wire.DeviceType: {StringValue: &kind}, wire.DeviceModel: {StringValue: &of.Model}},
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.MemoryCapacity: {
				Value: *memory(units), RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: memory(units),
					ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: memory(1), Step: memory(1)}}}},
		}
		if of.Health.Unhealthy {
			device.Taints = []resourceapi.DeviceTaint{{Key: "divvy.dev/unhealthy", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}
		s.Spec.Devices = append(s.Spec.Devices, device)
	}
	return s
}

func selector(format string, args ...any) []resourceapi.DeviceSelector {
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: fmt.Sprintf("device.attributes[%q].", wire.Driver(vendor)) + fmt.Sprintf(format, args...)}}}
}

// demand is what a pod's claim asks for.
func (d *claimsPlacer) demand(a *place.Ask) (claims.Demand, error) {
	if known, ok := d.demands[*a]; ok {
		return known, nil
	}
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: className, Count: int64(a.Devices),
		AllocationMode: resourceapi.DeviceAllocationModeExactCount,
		Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			wire.MemoryCapacity: *memory(a.Units)}}}
	if s := a.Only; s != nil {
		var quoted []string
		for _, model := range s.UseModels {
			quoted = append(quoted, strconv.Quote(model))
		}
		exactly.Selectors = selector("model in [%s]", strings.Join(quoted, ", "))
	}
	claim := &resourceapi.ResourceClaim{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{{Name: "devices", Exactly: exactly}}}}}
	of, err := claims.DemandOf([]*resourceapi.ResourceClaim{claim}, func(string) (*resourceapi.DeviceClass, error) {
		return &resourceapi.DeviceClass{Spec: resourceapi.DeviceClassSpec{Selectors: selector("type == %q", className)}}, nil
	})
	if err != nil {
		return of, fmt.Errorf("claim for %d devices: %w", a.Devices, err)
	}
	of.CPU, of.Memory = a.CPU, a.Memory
	d.demands[*a] = of
	return of, nil
}

// again repeats what ran out of time while selectors were evaluated: it has got further.
func again[T any](do func() (T, error)) (T, error) {
	for {
		out, err := do()
		if !errors.Is(err, context.DeadlineExceeded) {
			return out, err
		}
	}
}

// Place implements simulate.Placer.
func (d *claimsPlacer) Place(uid string, names []string, a *place.Ask) (bool, error) {
	ratings, err := d.rate(a)
	if err != nil {
		return false, err
	}
	best, rating := "", int64(0)
	for _, name := range names {
		r, fits := ratings[name]
		if n := d.nodes[name]; !fits || !a.FitsBeside(&place.Node{CPU: n.CPU, Memory: n.Memory}) {
			continue
		}
		if best == "" || r > rating {
			best, rating = name, r
		}
	}
	if best == "" {
		return false, nil
	}
	pod := claimedPod{name: best, node: d.nodes[best], ask: *a}
	if pod.devices = pod.node.allocate(a); len(pod.devices) != a.Devices {
		return false, fmt.Errorf("node %s was rated, and %d devices fit there instead of %d", best, len(pod.devices), a.Devices)
	}
	d.count(&pod, 1)
	d.placed[uid] = pod
	return true, d.learn(a)
}

// Remove implements simulate.Placer.
func (d *claimsPlacer) Remove(uid string) {
	pod := d.placed[uid]
	delete(d.placed, uid)
	d.count(&pod, -1)
}

// Nodes implements simulate.Placer.
func (d *claimsPlacer) Nodes() iter.Seq2[string, *place.Node] {
	return d.catalog.Each(claims.ResourceOf(wire.Driver(vendor)))
}

// rate returns the ratings of the nodes on whose devices a pod fits. One without a claim is rated by the policy, as
// the ledger's simulation does.
func (d *claimsPlacer) rate(a *place.Ask) (map[string]int64, error) {
	out := make(map[string]int64, len(d.nodes))
	if a.Devices == 0 {
		for name := range d.nodes {
			out[name] = 0
		}
		for name, n := range d.Nodes() {
			host := d.nodes[name].Host
			n.CPU, n.Memory, n.Cores = host.CPU, host.Memory, host.Cores
			_, out[name], _ = d.policy.Choose(n, a, nil)
		}
		return out, nil
	}
	of, err := d.demand(a)
	if err != nil {
		return nil, err
	}
	rated, err := again(func() ([]claims.Rated, error) { return d.catalog.Rank(context.Background(), d.state, of, d.policy) })
	for _, r := range rated {
		out[r.Node] = r.Rating
	}
	return out, err
}

// learn counts a pod with a claim, as divvy-scheduler does when it is bound.
func (d *claimsPlacer) learn(a *place.Ask) error {
	l, learns := d.policy.(learned)
	if !learns || a.Devices == 0 {
		return nil
	}
	of, err := d.demand(a)
	if err != nil {
		return err
	}
	var expressed bool
	r, err := again(func() (accel.Request, error) {
		r, ok, err := d.catalog.Request(context.Background(), d.state.Slices, of)
		expressed = ok
		return r, err
	})
	if err == nil && !expressed {
		err = errors.New("a claim of the simulation cannot be expressed in units")
	}
	if err == nil {
		l.policy.Observe(&place.Ask{Units: r.Peak() / accel.Units(r.Devices), Devices: r.Devices, CPU: r.CPU, Memory: r.Memory,
			Only: r.Selection})
	}
	return err
}

// allocate returns the devices that kube-scheduler takes: the first that fit, of which a node lists the most used first.
func (n *claimedNode) allocate(a *place.Ask) []int {
	var fit []int
	for i := range n.devices {
		if of := &n.devices[i]; n.free[i] >= a.Units && !of.Health.Unhealthy && (a.Only == nil || a.Only.Names(of.ID, of.Model)) {
			fit = append(fit, i)
		}
	}
	slices.SortStableFunc(fit, func(i, j int) int { return cmp.Compare(n.free[i], n.free[j]) })
	return fit[:min(len(fit), a.Devices)]
}

// count adds what a pod has to what is held on its node, or takes it away.
func (d *claimsPlacer) count(pod *claimedPod, sign int64) {
	n := pod.node
	if n.CPU != place.Unlimited {
		n.CPU -= sign * pod.ask.CPU
	}
	if n.Memory != place.Unlimited {
		n.Memory -= sign * pod.ask.Memory
	}
	for _, i := range pod.devices {
		n.free[i] -= accel.Units(sign) * pod.ask.Units
		held := structured.NewDeviceConsumedCapacity(structured.MakeDeviceID(wire.Driver(vendor), pod.name, deviceName(i)),
			map[resourceapi.QualifiedName]resource.Quantity{wire.MemoryCapacity: *memory(pod.ask.Units)})
		if sign > 0 {
			d.state.Held.AggregatedCapacity.Insert(held)
		} else {
			d.state.Held.AggregatedCapacity.Remove(held)
		}
	}
}
