package why

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// Claims are what pods claim, and what nodes offer to ResourceClaims.
type Claims struct {
	// Claims are those of all namespaces.
	Claims  []resourceapi.ResourceClaim
	Classes []resourceapi.DeviceClass
	Slices  []resourceapi.ResourceSlice
	// Selects evaluates an expression of CEL on a device of a driver. It is set where there are classes.
	Selects func(expression, driver string, d *resourceapi.Device) (bool, error)
}

// SourceClaims is missing from answers about pods that wait for devices by ResourceClaims.
const SourceClaims = "ResourceClaims, DeviceClasses and ResourceSlices"

func (c *Claims) claim(namespace, name string) *resourceapi.ResourceClaim {
	i := slices.IndexFunc(c.Claims, func(o resourceapi.ResourceClaim) bool { return o.Namespace == namespace && o.Name == name })
	if i < 0 {
		return nil
	}
	return &c.Claims[i]
}

func (c *Claims) class(name string) *resourceapi.DeviceClass {
	i := slices.IndexFunc(c.Classes, func(o resourceapi.DeviceClass) bool { return o.Name == name })
	if i < 0 {
		return nil
	}
	return &c.Classes[i]
}

// classOf returns the class that turns an extended resource into claims, nil for none.
func (c *Claims) classOf(name v1.ResourceName) *resourceapi.DeviceClass {
	i := slices.IndexFunc(c.Classes, func(o resourceapi.DeviceClass) bool {
		return o.Spec.ExtendedResourceName != nil && *o.Spec.ExtendedResourceName == string(name)
	})
	if i < 0 {
		return nil
	}
	return &c.Classes[i]
}

// explainClaims says what the claims of a pod wait for. Of what kube-scheduler looks at, it judges
// selectors, taints, counts and amounts, each request by itself: neither constraints nor the
// nodes that the rest of the pod allows.
func (d *diagnosis) explainClaims() {
	p, c := d.a.pod, &d.snapshot.Claims
	units, err := wire.ClaimedUnitsOf(p.Annotations)
	if err != nil {
		d.e.Notes = append(d.e.Notes, fmt.Sprintf("Which units became claims cannot be read: %v.", err))
	}
	for _, u := range units {
		d.e.Notes = append(d.e.Notes,
			fmt.Sprintf("The claim %s is in place of units that the pod requested, by container: %s.", u.Claim, u))
	}
	if len(c.Claims)+len(c.Classes) == 0 { // they could not be read, or a dump has none
		d.snapshot.noteSource(d.e, SourceClaims)
		return
	}
	for i := range p.Spec.ResourceClaims {
		one := &p.Spec.ResourceClaims[i]
		template := one.ResourceClaimTemplateName
		name, _, err := resourceclaim.Name(p, one)
		switch {
		case err != nil && template != nil:
			d.claimCause(podText(p), fmt.Sprintf("the claim %s is not created from the ResourceClaimTemplate %s yet; "+
				"check that the template exists", one.Name, *template))
		case name == nil: // the pod needs none
		default:
			object := "ResourceClaim " + p.Namespace + "/" + *name
			claim := c.claim(p.Namespace, *name)
			switch {
			case claim == nil && template == nil:
				d.claimCause(object, "the claim does not exist; create it")
			case claim == nil: // it is about to be
			case claim.Status.Allocation == nil:
				for k := range claim.Spec.Devices.Requests {
					d.explainDevices(object, &claim.Spec.Devices.Requests[k])
				}
			default:
				d.explainAllocated(object, claim)
			}
		}
	}
	for _, name := range sortedNames(d.a.requests) {
		if class := c.classOf(name); class != nil && !d.snapshot.offered(name) && d.a.requests[name] > 0 {
			d.explainDevices(podText(p), &resourceapi.DeviceRequest{Name: string(name), Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class.Name, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: d.a.requests[name],
			}})
		}
	}
}

func (d *diagnosis) claimCause(object, detail string) {
	d.lacksClaim = true
	d.e.Causes = append(d.e.Causes, Cause{Code: Claim, Object: object, Detail: detail})
}

// explainAllocated says what keeps a pod from a claim that has its devices.
func (d *diagnosis) explainAllocated(object string, claim *resourceapi.ResourceClaim) {
	if len(claim.Status.ReservedFor) >= resourceapi.ResourceClaimReservedForMaxSize {
		d.claimCause(object, fmt.Sprintf("%d pods use the claim, and no more can", len(claim.Status.ReservedFor)))
		return
	}
	selector := claim.Status.Allocation.NodeSelector
	if selector == nil {
		return
	}
	on, err := nodeaffinity.NewNodeSelector(selector)
	if err != nil {
		return
	}
	var nodes []string
	for i := range d.snapshot.Nodes {
		if n := &d.snapshot.Nodes[i]; on.Match(n) {
			nodes = append(nodes, n.Name)
		}
	}
	fits := slices.ContainsFunc(d.nodes, func(j judged) bool { return slices.Contains(nodes, j.n.Name) && j.fits() })
	if !fits {
		d.claimCause(object, "its devices are on node "+strings.Join(nodes, ", ")+", on which the rest of the pod does not fit")
	}
}

// explainDevices says why no devices are free for a request of a claim that has none yet.
func (d *diagnosis) explainDevices(object string, r *resourceapi.DeviceRequest) {
	if r.Exactly != nil {
		d.explainRequestOf(object, r.Name, r.Exactly)
		return
	}
	for i := range r.FirstAvailable { // none of them can be had
		s := &r.FirstAvailable[i]
		d.explainRequestOf(object, r.Name+"/"+s.Name, &resourceapi.ExactDeviceRequest{DeviceClassName: s.DeviceClassName,
			Selectors: s.Selectors, AllocationMode: s.AllocationMode, Count: s.Count, Tolerations: s.Tolerations, Capacity: s.Capacity})
	}
}

// offer is a device that the selectors of a request allow.
type offer struct {
	driver, pool, node string
	device             *resourceapi.Device
	// taint is one that the request does not tolerate, "" for none.
	taint string
	// free is how much of the capacity is left, by name. taken is by whom the device is held whole, "" if
	// it is not.
	free  map[resourceapi.QualifiedName]resource.Quantity
	taken string
	// holders have it, or a part of it.
	holders []holding
}

func (o *offer) String() string {
	if o.node == "" {
		return o.device.Name
	}
	return o.device.Name + " on node " + o.node
}

func (d *diagnosis) explainRequestOf(object, name string, r *resourceapi.ExactDeviceRequest) {
	class := d.snapshot.Claims.class(r.DeviceClassName)
	if class == nil {
		var names []string
		for _, c := range d.snapshot.Claims.Classes {
			names = append(names, c.Name)
		}
		detail := fmt.Sprintf("the request %s names the DeviceClass %s, which does not exist", name, r.DeviceClassName)
		if near := nearest(r.DeviceClassName, names); near != "" {
			detail += "; the nearest name is " + near
		}
		d.claimCause(object, detail)
		return
	}
	if r.AdminAccess != nil && *r.AdminAccess {
		return // it needs nothing free
	}
	offers, err := d.snapshot.Claims.offers(slices.Concat(class.Spec.Selectors, r.Selectors), r.Tolerations)
	if err != nil {
		d.claimCause(object, fmt.Sprintf("a selector of the request %s cannot be evaluated: %v", name, err))
		return
	}
	of := fmt.Sprintf("request %s, class %s: ", name, class.Name)
	if len(offers) == 0 {
		d.claimCause(object, of+"no node publishes a device that the selectors allow")
		return
	}
	var tainted, taken, small, free []string
	matching, available := map[string]int{}, map[string]int{} // by node, "" for devices of no node
	for i := range offers {
		o := &offers[i]
		matching[o.node]++
		switch lacks := o.lacks(r.Capacity); {
		case o.taint != "":
			tainted = append(tainted, fmt.Sprintf("%s has the taint %s", o, o.taint))
		case o.taken != "":
			taken = append(taken, fmt.Sprintf("%s is held by %s", o, o.taken))
		case lacks != "":
			small = append(small, fmt.Sprintf("%s has %s", o, lacks))
		default:
			free = append(free, o.String())
			available[o.node]++
		}
	}
	all := r.AllocationMode == resourceapi.DeviceAllocationModeAll
	for node := range matching {
		have, want := available[node], max(int(r.Count), 1)
		if node != "" {
			have += available[""]
		}
		if all {
			want = matching[node]
			if node != "" {
				want += matching[""]
			}
		}
		if have >= want {
			return // whatever keeps the pod waiting is not this
		}
	}
	detail := of + "of " + count(len(offers), "device") + ", none is free"
	switch {
	case len(free) > 0 && all:
		detail = of + "all of a node are required, and free are " + listed(free, 3)
	case len(free) > 0:
		detail = fmt.Sprintf("%s%d are required on one node, and free are %s", of, max(int(r.Count), 1), listed(free, 3))
	}
	// Those with the most left come first.
	if why := slices.Concat(small, taken, tainted); len(why) > 0 {
		detail += ": " + listed(why, 3)
	}
	d.claimCause(object, detail)
	d.claimChanges(object, offers, r)
}

// lacks says how much of a capacity is free where a request needs more, "" where it is enough.
func (o *offer) lacks(need *resourceapi.CapacityRequirements) string {
	for name, free := range o.free {
		whole := o.device.Capacity[name].Value
		want := whole // what a request gets that names no amount
		if p := o.device.Capacity[name].RequestPolicy; p != nil && p.Default != nil {
			want = *p.Default
		}
		if need != nil {
			if q, ok := need.Requests[name]; ok {
				want = q
			}
		}
		if free.Cmp(want) < 0 {
			return fmt.Sprintf("%s of %s %s free, %s is requested", free.String(), whole.String(), name, want.String())
		}
	}
	return ""
}

// offers returns the devices that selectors allow, with what is free of them, the most first.
func (c *Claims) offers(selectors []resourceapi.DeviceSelector, tolerations []resourceapi.DeviceToleration) ([]offer, error) {
	var out []offer
	held := c.held()
	pools := map[string][]resourceapi.Device{}
	for i := range c.Slices {
		s := &c.Slices[i].Spec
		pools[s.Driver+"/"+s.Pool.Name] = append(pools[s.Driver+"/"+s.Pool.Name], s.Devices...)
	}
	for i := range c.Slices {
		s := &c.Slices[i].Spec
		for k := range s.Devices {
			o := offer{driver: s.Driver, pool: s.Pool.Name, device: &s.Devices[k]}
			if s.NodeName != nil {
				o.node = *s.NodeName
			}
			matches := true
			for _, selector := range selectors {
				if selector.CEL == nil || !matches {
					continue
				}
				var err error
				if matches, err = c.Selects(selector.CEL.Expression, s.Driver, o.device); err != nil {
					return nil, err
				}
			}
			if !matches {
				continue
			}
			o.use(held, pools[s.Driver+"/"+s.Pool.Name], tolerations)
			out = append(out, o)
		}
	}
	slices.SortStableFunc(out, func(a, b offer) int {
		x, y := a.free[wire.MemoryCapacity], b.free[wire.MemoryCapacity]
		return cmp.Or(y.Cmp(x), cmp.Compare(a.node, b.node))
	})
	return out, nil
}

// holding is what a claim has of a device.
type holding struct {
	claim  *resourceapi.ResourceClaim
	result *resourceapi.DeviceRequestAllocationResult
}

func (h holding) claimText() string { return "claim " + h.claim.Namespace + "/" + h.claim.Name }

func (h holding) String() string {
	text := h.claimText()
	if pods := h.pods(); len(pods) > 0 {
		text += " of pod " + pods[0]
	}
	return text
}

// pods are the names of the pods that the claim is reserved for.
func (h holding) pods() (names []string) {
	for _, user := range h.claim.Status.ReservedFor {
		if user.Resource == "pods" {
			names = append(names, user.Name)
		}
	}
	return names
}

// held is what claims have, by driver, pool and device.
func (c *Claims) held() map[string][]holding {
	out := map[string][]holding{}
	for i := range c.Claims {
		claim := &c.Claims[i]
		if claim.Status.Allocation == nil {
			continue
		}
		for k := range claim.Status.Allocation.Devices.Results {
			r := &claim.Status.Allocation.Devices.Results[k]
			if r.AdminAccess != nil && *r.AdminAccess {
				continue
			}
			key := r.Driver + "/" + r.Pool + "/" + r.Device
			out[key] = append(out[key], holding{claim, r})
		}
	}
	return out
}

// use notes what claims have of the device, and of others of its pool that are the same hardware.
func (o *offer) use(held map[string][]holding, beside []resourceapi.Device, tolerations []resourceapi.DeviceToleration) {
	for _, taint := range o.device.Taints {
		if !slices.ContainsFunc(tolerations, func(t resourceapi.DeviceToleration) bool { return resourceclaim.ToleratesTaint(t, taint) }) &&
			taint.Effect != resourceapi.DeviceTaintEffectNone {
			o.taint = taint.Key
			if taint.Value != "" {
				o.taint += "=" + taint.Value
			}
		}
	}
	of := func(device string) []holding { return held[o.driver+"/"+o.pool+"/"+device] }
	shared := o.device.AllowMultipleAllocations != nil && *o.device.AllowMultipleAllocations
	if o.holders = of(o.device.Name); len(o.holders) > 0 && !shared {
		o.taken = o.holders[0].String()
	}
	for i := range beside {
		if other := &beside[i]; other.Name != o.device.Name && o.taken == "" && drawTogether(o.device, other) && len(of(other.Name)) > 0 {
			o.holders = of(other.Name)
			o.taken = o.holders[0].String() + " as " + other.Name
		}
	}
	if o.taken != "" {
		return
	}
	o.free = map[resourceapi.QualifiedName]resource.Quantity{}
	for name, capacity := range o.device.Capacity {
		left := capacity.Value.DeepCopy()
		for _, h := range o.holders {
			left.Sub(h.result.ConsumedCapacity[name])
		}
		o.free[name] = left
	}
}

// drawTogether reports whether two devices draw on one counter: they are made of the same hardware.
func drawTogether(a, b *resourceapi.Device) bool {
	for _, x := range a.ConsumesCounters {
		for _, y := range b.ConsumesCounters {
			for counter := range x.Counters {
				if _, both := y.Counters[counter]; both && x.CounterSet == y.CounterSet {
					return true
				}
			}
		}
	}
	return false
}

// claimChanges are what would free a device for a request, or fit it into what is free. They are not
// verified: what else the pod needs of the node is not judged.
func (d *diagnosis) claimChanges(object string, offers []offer, r *resourceapi.ExactDeviceRequest) {
	var most resource.Quantity
	var end *holding
	var on string
	for i := range offers {
		o := &offers[i]
		if o.taint != "" {
			continue
		}
		if left := o.free[wire.MemoryCapacity]; left.Cmp(most) > 0 {
			most = left
		}
		for k := range o.holders {
			h := &o.holders[k]
			if end != nil || o.taken == "" && !o.enoughWithout(h, r.Capacity) || o.taken != "" && len(o.holders) > 1 {
				continue
			}
			end, on = h, o.String()
		}
	}
	if !most.IsZero() && r.Capacity != nil && r.Count <= 1 {
		d.e.Changes = append(d.e.Changes, Change{Kind: ChangeRequest, Text: fmt.Sprintf("request at most %s of memory in %s; a claim "+
			"cannot be changed, so create it and the pod again", most.String(), object)})
	}
	if end == nil {
		return
	}
	change := Change{Kind: ChangeEnd, Text: fmt.Sprintf("end the pods that use %s, which holds %s", end.claimText(), on)}
	names := end.pods()
	if namespace := end.claim.Namespace; len(names) > 0 && named(append(names, namespace)...) && d.snapshot.MayDelete != nil &&
		d.snapshot.MayDelete(namespace) {
		change.Commands = []string{kubectl(append([]string{"delete", "pod", "-n", namespace}, names...)...)}
	}
	d.e.Changes = append(d.e.Changes, change)
}

// enoughWithout reports whether a shared device has what a request needs without what a claim has.
func (o *offer) enoughWithout(h *holding, need *resourceapi.CapacityRequirements) bool {
	without := *o
	without.free = map[resourceapi.QualifiedName]resource.Quantity{}
	for name, free := range o.free {
		left := free.DeepCopy()
		left.Add(h.result.ConsumedCapacity[name])
		without.free[name] = left
	}
	return without.lacks(need) == ""
}
