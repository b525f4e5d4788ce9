package claims

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const driver = "enflame.divvy.dev"

// gcu is a device of so many GiB of which claims may have parts.
func gcu(name string, gib int64) resourceapi.Device {
	return resourceapi.Device{
		Name: name, AllowMultipleAllocations: ptr.To(true),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{wire.DeviceType: {StringValue: ptr.To("gcu")}},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.MemoryCapacity: {
			Value: *resource.NewQuantity(gib<<30, resource.BinarySI),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: resource.NewQuantity(gib<<30, resource.BinarySI),
				ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: resource.NewQuantity(1<<20, resource.BinarySI),
					Step: resource.NewQuantity(1<<20, resource.BinarySI)},
			},
		}},
	}
}

// whole is a device that one claim has.
func whole(name string, gib int64) resourceapi.Device {
	d := gcu(name, gib)
	d.AllowMultipleAllocations = nil
	d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.MemoryCapacity: {
		Value: *resource.NewQuantity(gib<<30, resource.BinarySI)}}
	return d
}

// slots is a device of so many time slices.
func slots(name string, count int64) resourceapi.Device {
	d := gcu(name, 1)
	d.Attributes[wire.DeviceType] = resourceapi.DeviceAttribute{StringValue: ptr.To("slots")}
	one := resource.NewQuantity(1, resource.DecimalSI)
	d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{wire.SlotsCapacity: {
		Value: *resource.NewQuantity(count, resource.DecimalSI),
		RequestPolicy: &resourceapi.CapacityRequestPolicy{Default: one,
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: one, Step: one}},
	}}
	return d
}

func tainted(d resourceapi.Device, effect resourceapi.DeviceTaintEffect) resourceapi.Device {
	d.Taints = []resourceapi.DeviceTaint{{Key: "divvy.dev/unhealthy", Effect: effect}}
	return d
}

// draws has a device draw on counters of a set.
func draws(d resourceapi.Device, set string, counters ...string) resourceapi.Device {
	d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: set, Counters: counted(counters...)}}
	return d
}

func counted(names ...string) map[string]resourceapi.Counter {
	out := map[string]resourceapi.Counter{}
	for _, name := range names {
		out[name] = resourceapi.Counter{Value: resource.MustParse("1")}
	}
	return out
}

// slice is the only one of a node's pool.
func slice(node string, devices ...resourceapi.Device) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: resourceapi.ResourceSliceSpec{
		Driver: driver, NodeName: &node, Devices: devices,
		Pool: resourceapi.ResourcePool{Name: node + "/enflame", Generation: 1, ResourceSliceCount: 1},
	}}
}

// held is what claims hold: "node/device" as a whole, or with an amount of the capacity.
func held(t *testing.T, what map[string]string) *structured.AllocatedState {
	t.Helper()
	state := &structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection()}
	for name, amount := range what {
		node, device, ok := strings.Cut(name, "/")
		if !ok {
			t.Fatalf("%s names no device", name)
		}
		id := structured.MakeDeviceID(driver, node+"/enflame", device)
		if amount == "" {
			state.AllocatedDevices.Insert(id)
			continue
		}
		capacity := resourceapi.QualifiedName(wire.MemoryCapacity)
		if !strings.HasSuffix(amount, "i") {
			capacity = wire.SlotsCapacity
		}
		state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id,
			map[resourceapi.QualifiedName]resource.Quantity{capacity: resource.MustParse(amount)}))
	}
	return state
}

var errNoClass = errors.New("not found")

// class selects devices of the type that is its name.
func class(name string) (*resourceapi.DeviceClass, error) {
	if name == "missing" {
		return nil, errNoClass
	}
	return &resourceapi.DeviceClass{Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
		CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf("device.driver == %q && device.attributes[%q].type == %q",
			driver, driver, name)}}}}}, nil
}

// asks is a request for so many devices of a class, with an amount of a capacity unless it is "".
func asks(class string, count int64, capacity resourceapi.QualifiedName, amount string) resourceapi.DeviceRequest {
	exactly := &resourceapi.ExactDeviceRequest{DeviceClassName: class, Count: count,
		AllocationMode: resourceapi.DeviceAllocationModeExactCount}
	if amount != "" {
		exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
			capacity: resource.MustParse(amount)}}
	}
	return resourceapi.DeviceRequest{Name: class, Exactly: exactly}
}

func memory(amount string) resourceapi.DeviceRequest {
	return asks("gcu", 1, wire.MemoryCapacity, amount)
}

func selecting(r resourceapi.DeviceRequest, expression string) resourceapi.DeviceRequest {
	r.Exactly.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}
	return r
}

// Short names for what tests hand over.
type (
	offered = []*resourceapi.ResourceSlice
	asked   = []resourceapi.DeviceRequest
	all     = []*resourceapi.ResourceClaim
	holds   = map[string]string
)

func claim(requests ...resourceapi.DeviceRequest) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: requests}}}
}

func TestRank(t *testing.T) {
	other := slice("other", gcu("a", 16))
	other.Spec.Driver = "gpu.nvidia.com"
	incomplete := slice("incomplete", gcu("a", 16))
	incomplete.Spec.Pool.ResourceSliceCount = 2
	old, renewed := slice("renewed", gcu("a", 16)), slice("renewed", whole("b", 4))
	renewed.Spec.Pool.Generation = 2
	overlapping := slice("n", draws(gcu("a", 16), "a", "chip0"), draws(slots("a-slots", 4), "a", "chip0"))
	overlapping.Spec.Pool.ResourceSliceCount = 2
	sets := slice("n")
	sets.Name, sets.Spec.Pool, sets.Spec.SharedCounters = "sets", overlapping.Spec.Pool, []resourceapi.CounterSet{
		{Name: "a", Counters: counted("chip0")}}
	binding := gcu("a", 16)
	binding.BindingConditions = []string{"x"}
	two := func(a, b string) []*resourceapi.ResourceSlice {
		return offered{slice(a, gcu("a", 16), gcu("b", 16)), slice(b, gcu("a", 16), gcu("b", 16))}
	}
	for name, test := range map[string]struct {
		slices []*resourceapi.ResourceSlice
		held   map[string]string
		asks   []resourceapi.DeviceRequest
		spread bool
		want   string // nodes, the best first
	}{
		"equal nodes by name": {slices: two("y", "x"), asks: asked{memory("2Gi")}, want: "x y"},
		"the fullest device": {
			slices: two("x", "y"), held: holds{"y/b": "10Gi"}, asks: asked{memory("2Gi")}, want: "y x",
		},
		"the fullest that suffices": {
			slices: two("x", "y"), held: holds{"y/b": "10Gi", "x/a": "4Gi"}, asks: asked{memory("8Gi")}, want: "x y",
		},
		"the emptiest": {
			slices: two("x", "y"), held: holds{"x/a": "1Gi", "x/b": "1Gi"}, asks: asked{memory("2Gi")}, spread: true, want: "y x",
		},
		"what fits exactly": {
			slices: two("x", "y"), held: holds{"x/a": "", "x/b": "1Mi", "y/a": ""}, asks: asked{memory("16Gi")}, want: "y",
		},
		"amounts are rounded up": {
			slices: offered{slice("x", gcu("a", 1))}, held: holds{"x/a": "1023Mi"}, asks: asked{memory("1048577")},
		},
		"without an amount it is all": {
			slices: offered{slice("x", gcu("a", 16), gcu("b", 8)), slice("y", gcu("a", 16))},
			held:   holds{"x/a": "1Gi", "y/a": "1Gi"}, asks: asked{memory("")}, want: "x",
		},
		"different devices": {
			slices: offered{slice("x", gcu("a", 16)), slice("y", gcu("a", 16), gcu("b", 8))},
			asks:   asked{asks("gcu", 2, wire.MemoryCapacity, "2Gi")}, want: "y",
		},
		"two requests on one device": {
			slices: offered{slice("x", gcu("a", 16)), slice("y", gcu("a", 8))}, asks: asked{memory("8Gi"), memory("8Gi")},
			want: "x",
		},
		"a part of a whole device": {
			slices: offered{slice("x", whole("a", 16)), slice("y", whole("a", 16))}, held: holds{"x/a": ""},
			asks: asked{memory("2Gi")}, want: "y",
		},
		"larger than a whole device": {slices: offered{slice("x", whole("a", 16))}, asks: asked{memory("17Gi")}},
		"time slices": {
			slices: offered{slice("x", slots("a", 4)), slice("y", slots("a", 4)), slice("z", gcu("a", 4))},
			held:   holds{"x/a": "4", "y/a": "3"}, asks: asked{asks("slots", 1, "", "")}, want: "y",
		},
		"a capacity that it has not": {slices: two("x", "y"), asks: asked{asks("gcu", 1, wire.SlotsCapacity, "1")}},
		"tainted devices": {
			slices: offered{slice("x", tainted(gcu("a", 16), resourceapi.DeviceTaintEffectNoSchedule)),
				slice("y", tainted(gcu("a", 16), resourceapi.DeviceTaintEffectNone))},
			asks: asked{memory("2Gi")}, want: "y",
		},
		"binding conditions": {slices: offered{slice("x", binding)}, asks: asked{memory("2Gi")}},
		// kube-scheduler allocates such a device only with DRADeviceBindingConditions.
		"binding conditions of one of two devices": {
			slices: offered{slice("x", binding, gcu("b", 16)), slice("y", gcu("a", 16), gcu("b", 16))},
			asks:   asked{asks("gcu", 2, wire.MemoryCapacity, "2Gi")}, want: "y",
		},
		"another driver":               {slices: offered{other}, asks: asked{memory("2Gi")}},
		"a pool that is being written": {slices: offered{incomplete}, asks: asked{memory("2Gi")}},
		"the newest generation":        {slices: offered{old, renewed}, asks: asked{memory("8Gi")}},
		"overlapping devices, free": {
			slices: offered{overlapping, sets}, asks: asked{asks("slots", 1, "", "")}, want: "n",
		},
		"overlapping devices, in use": {
			slices: offered{overlapping, sets}, held: holds{"n/a": "1Gi"}, asks: asked{asks("slots", 1, "", "")},
		},
		"overlapping devices, shared": {
			slices: offered{overlapping, sets}, held: holds{"n/a": "1Gi"}, asks: asked{memory("1Gi")}, want: "n",
		},
		"overlapping devices, asked for both": {
			slices: offered{overlapping, sets}, asks: asked{memory("1Gi"), asks("slots", 1, "", "")},
		},
		"a selector of the request": {
			slices: offered{slice("x", gcu("a", 16)), slice("y", gcu("a", 32))},
			asks:   asked{selecting(memory("1Gi"), fmt.Sprintf("device.capacity[%q].memory.isGreaterThan(quantity('16Gi'))", driver))},
			want:   "y",
		},
	} {
		t.Run(name, func(t *testing.T) {
			demand, err := DemandOf(all{claim(test.asks...)}, class)
			if err != nil || !demand.Counted {
				t.Fatalf("demand %+v, %v", demand, err)
			}
			policy := place.Binpack
			if test.spread {
				policy = place.Spread
			}
			catalog := NewCatalog()
			for range 2 { // what is remembered changes nothing
				rated, err := catalog.Rank(t.Context(), State{Slices: test.slices, Held: held(t, test.held)}, demand, policy)
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, r := range rated {
					got = append(got, r.Node)
				}
				if strings.Join(got, " ") != test.want {
					t.Fatalf("nodes %v, want %s", got, test.want)
				}
			}
		})
	}
}

// A slice that is another object is read again, and one that is gone is forgotten.
func TestCatalogFollowsSlices(t *testing.T) {
	catalog := NewCatalog()
	demand, err := DemandOf(all{claim(memory("8Gi"))}, class)
	if err != nil {
		t.Fatal(err)
	}
	for i, step := range []struct {
		slices []*resourceapi.ResourceSlice
		want   int
	}{
		{offered{slice("x", gcu("a", 16)), slice("y", gcu("a", 16))}, 2},
		{offered{slice("x", gcu("a", 16)), slice("y", gcu("a", 4))}, 1},
		{offered{slice("y", gcu("a", 4))}, 0},
		{nil, 0},
	} {
		rated, err := catalog.Rank(t.Context(), State{Slices: step.slices, Held: held(t, nil)}, demand, place.Binpack)
		if err != nil || len(rated) != step.want || len(catalog.published) != len(step.slices) {
			t.Errorf("step %d: %v, %v; %d slices are kept", i, rated, err, len(catalog.published))
		}
	}
}

// Selectors that fail rate nothing: kube-scheduler says what is wrong with them.
func TestSelectorsThatFail(t *testing.T) {
	for _, expression := range []string{"device.attributes['x'].y == 'z'", "device.", "true && 'text'"} {
		demand, err := DemandOf(all{claim(selecting(memory("1Gi"), expression))}, class)
		if err != nil {
			t.Fatal(err)
		}
		catalog, of := NewCatalog(), offered{slice("x", gcu("a", 16))}
		rated, err := catalog.Rank(t.Context(), State{Slices: of, Held: held(t, nil)}, demand, place.Binpack)
		if err == nil || !strings.Contains(err.Error(), expression) {
			t.Errorf("%s: %v, %v", expression, rated, err)
		}
	}
}

// What is remembered of selectors does not grow with the requests.
func TestSelectorsAreForgotten(t *testing.T) {
	catalog, of := NewCatalog(), slice("x", gcu("a", 16))
	for i := range 3 * maxSelectors {
		demand, err := DemandOf(all{claim(selecting(memory("1Gi"), fmt.Sprintf("%d > 0", i+1)))}, class)
		if err != nil {
			t.Fatal(err)
		}
		rated, err := catalog.Rank(t.Context(), State{Slices: offered{of}, Held: held(t, nil)}, demand, place.Binpack)
		if err != nil || len(rated) != 1 || len(catalog.published[of].selected) > maxSelectors {
			t.Fatalf("request %d: %v, %v, %d are remembered", i, rated, err, len(catalog.published[of].selected))
		}
	}
}

func TestDemand(t *testing.T) {
	allocated := claim(memory("1Gi"))
	allocated.Status.Allocation = &resourceapi.AllocationResult{}
	admin := memory("1Gi")
	admin.Exactly.AdminAccess = ptr.To(true)
	every := memory("1Gi")
	every.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	constrained := claim(memory("1Gi"))
	constrained.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("a/b"))}}
	for name, test := range map[string]struct {
		claims   []*resourceapi.ResourceClaim
		requests int
		counted  bool
	}{
		"no claims": {counted: true},
		"two claims": {
			claims: all{claim(memory("1Gi")), claim(memory("1Gi"), memory(""))}, requests: 3, counted: true,
		},
		"one that is allocated": {claims: all{allocated, claim(memory("1Gi"))}, requests: 1},
		"administrative access": {claims: all{claim(admin)}},
		"all devices of a node": {claims: all{claim(every, memory("1Gi"))}, requests: 1},
		"alternatives": {
			claims: all{claim(resourceapi.DeviceRequest{Name: "x", FirstAvailable: []resourceapi.DeviceSubRequest{{}}})},
		},
		"a constraint among devices": {claims: all{constrained}, requests: 1},
	} {
		demand, err := DemandOf(test.claims, class)
		if err != nil || len(demand.requests) != test.requests || demand.Counted != test.counted || demand.Empty() != (test.requests == 0) {
			t.Errorf("%s: %+v, %v", name, demand, err)
		}
	}
	if _, err := DemandOf(all{claim(asks("missing", 1, "", ""))}, class); !errors.Is(err, errNoClass) ||
		!strings.Contains(err.Error(), "device class missing") {
		t.Errorf("a class that does not exist: %v", err)
	}
}

// One pod in a cluster of 1000 nodes, of which a tenth is in use.
func BenchmarkRank(b *testing.B) {
	const nodes, devices = 1000, 8
	var published []*resourceapi.ResourceSlice
	state := &structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
		AggregatedCapacity: structured.NewConsumedCapacityCollection()}
	for n := range nodes {
		name := fmt.Sprintf("node-%04d", n)
		var of []resourceapi.Device
		for d := range devices {
			of = append(of, gcu(fmt.Sprintf("gcu-%d", d), 80))
			if n < nodes/10 {
				state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(
					structured.MakeDeviceID(driver, name+"/enflame", fmt.Sprintf("gcu-%d", d)),
					map[resourceapi.QualifiedName]resource.Quantity{wire.MemoryCapacity: resource.MustParse("40Gi")}))
			}
		}
		published = append(published, slice(name, of...))
	}
	demand, err := DemandOf(all{claim(memory("2Gi"))}, class)
	if err != nil {
		b.Fatal(err)
	}
	catalog := NewCatalog()
	for b.Loop() {
		rated, err := catalog.Rank(b.Context(), State{Slices: published, Held: state}, demand, place.Binpack)
		if err != nil || len(rated) != nodes || !slices.Contains([]string{"node-0000"}, rated[0].Node) {
			b.Fatalf("%d nodes, %v", len(rated), err)
		}
	}
}

// Nodes that were rated before are rated as by a catalog that has seen none, whatever claims hold
// meanwhile, for other amounts, numbers of devices and policies.
func TestRememberedRatings(t *testing.T) {
	of := offered{slice("x", gcu("a", 16), gcu("b", 8)), slice("y", gcu("a", 16)), slice("z", whole("a", 16))}
	requests := asked{memory("2Gi"), memory("4Gi"), memory("16Gi"), memory(""), asks("gcu", 2, wire.MemoryCapacity, "2Gi")}
	catalog := NewCatalog()
	for _, held := range []*structured.AllocatedState{
		held(t, nil), held(t, holds{"x/a": "12Gi", "z/a": ""}), held(t, nil), held(t, holds{"y/a": "15Gi"}),
	} {
		for _, request := range requests {
			demand, err := DemandOf(all{claim(request)}, class)
			if err != nil {
				t.Fatal(err)
			}
			for _, policy := range place.Policies() {
				got, err := catalog.Rank(t.Context(), State{Slices: of, Held: held}, demand, policy)
				if err != nil {
					t.Fatal(err)
				}
				want, err := NewCatalog().Rank(t.Context(), State{Slices: of, Held: held}, demand, policy)
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("%+v with %v by %s: %v, want %v; %v", request.Exactly, held, policy.Name(), got, want, err)
				}
			}
		}
	}
}
