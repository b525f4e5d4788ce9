package claims

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	resourceinternal "k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install" // registers slices, their defaults and conversions
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/registry/resource/resourceclaim"
	strategy "k8s.io/kubernetes/pkg/registry/resource/resourceslice"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	ranking "github.com/divvy-gpu/divvy/internal/scheduler/claims"
)

// gates are those that decide about the fields of slices.
type gates struct{ shares, counters, taints bool }

// store returns the slices of a pool of a node as an API server with those gates keeps them.
func store(t *testing.T, node, vendor string, pool resourceslice.Pool, g gates) []*resourceapi.ResourceSlice {
	t.Helper()
	featuregatetesting.SetFeatureGatesDuringTest(t, utilfeature.DefaultFeatureGate, featuregatetesting.FeatureOverrides{
		features.DRAConsumableCapacity: g.shares, features.DRAPartitionableDevices: g.counters, features.DRADeviceTaints: g.taints,
	})
	var out []*resourceapi.ResourceSlice
	for i, s := range pool.Slices {
		slice := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%x-%s", i, vendor)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: wire.Driver(vendor), NodeName: ptr.To(node), Devices: s.Devices, SharedCounters: s.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: dra.PoolName(node, vendor), Generation: 1,
					ResourceSliceCount: int64(len(pool.Slices))},
			},
		}
		legacyscheme.Scheme.Default(slice)
		var internal resourceinternal.ResourceSlice
		if err := legacyscheme.Scheme.Convert(slice, &internal, nil); err != nil {
			t.Fatal(err)
		}
		rest.FillObjectMetaSystemFields(&internal)
		ctx := genericapirequest.WithRequestInfo(genericapirequest.WithNamespace(genericapirequest.NewContext(), ""),
			&genericapirequest.RequestInfo{APIGroup: "resource.k8s.io",
				APIVersion: "v1", Resource: "resourceslices"})
		if err := rest.BeforeCreate(strategy.Strategy, ctx, &internal); err != nil {
			t.Fatal(err)
		}
		var stored resourceapi.ResourceSlice
		if err := legacyscheme.Scheme.Convert(&internal, &stored, nil); err != nil {
			t.Fatal(err)
		}
		out = append(out, &stored)
	}
	return out
}

// node is a node in the eyes of the scheduler and of its engine.
type node struct {
	name   string
	vendor string
	facts  dra.Facts
	engine *alloc.Engine
	slices []*resourceapi.ResourceSlice
	// gates are those of the API server, and scheduler those of kube-scheduler.
	gates, scheduler gates

	claims []*resourceapi.ResourceClaim
	serial int
	cache  *cel.Cache
	// catalog is divvy-scheduler's.
	catalog *ranking.Catalog
	// classes selects devices by type.
	classes classes
}

type classes map[string]*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return nil, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	if class := c[name]; class != nil {
		return class, nil
	}
	return nil, fmt.Errorf("there is no class %s", name)
}

// features are what kube-scheduler has with the gates.
func (n *node) features() structured.Features {
	return structured.Features{AdminAccess: true, PrioritizedList: true, ConsumableCapacity: n.scheduler.shares,
		PartitionableDevices: n.scheduler.counters, DeviceTaints: n.scheduler.taints, DeviceBindingAndStatus: n.scheduler.taints}
}

// allocated is the state that kube-scheduler gathers from claims.
func (n *node) allocated() structured.AllocatedState {
	state := structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection()}
	for _, c := range n.claims {
		for _, r := range c.Status.Allocation.Devices.Results {
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			if r.ShareID == nil {
				state.AllocatedDevices.Insert(id)
				continue
			}
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
		}
	}
	return state
}

// claim returns a new claim that asks for nothing yet.
func (n *node) claim() *resourceapi.ResourceClaim {
	n.serial++
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("c", n.serial),
		UID: types.UID(fmt.Sprint("uid-", n.serial))}}
}

// created returns a new claim with this spec.devices as the API server keeps it.
func (n *node) created(t *testing.T, devices string) *resourceapi.ResourceClaim {
	t.Helper()
	claim := n.claim()
	if err := yaml.UnmarshalStrict([]byte(devices), &claim.Spec.Devices); err != nil {
		t.Fatal(err)
	}
	legacyscheme.Scheme.Default(claim)
	var internal resourceinternal.ResourceClaim
	if err := legacyscheme.Scheme.Convert(claim, &internal, nil); err != nil {
		t.Fatal(err)
	}
	ctx := genericapirequest.WithRequestInfo(genericapirequest.WithNamespace(genericapirequest.NewContext(), claim.Namespace),
		&genericapirequest.RequestInfo{APIGroup: "resource.k8s.io", APIVersion: "v1", Resource: "resourceclaims"})
	if err := rest.BeforeCreate(resourceclaim.NewStrategy(nil, nil), ctx, &internal); err != nil {
		t.Fatal(err)
	}
	var stored resourceapi.ResourceClaim
	if err := legacyscheme.Scheme.Convert(&internal, &stored, nil); err != nil {
		t.Fatal(err)
	}
	return &stored
}

// schedule allocates a claim as kube-scheduler does; it is nil if no device is free.
func (n *node) schedule(t *testing.T, requests ...resourceapi.ExactDeviceRequest) *resourceapi.ResourceClaim {
	t.Helper()
	claim := n.claim()
	for i := range requests {
		r := requests[i]
		r.AllocationMode, r.Count = resourceapi.DeviceAllocationModeExactCount, max(r.Count, 1)
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: fmt.Sprint("r", i), Exactly: &r})
	}
	allocation, err := n.find(t, claim)
	if err != nil && !errors.Is(err, structured.ErrFailedAllocationOnNode) && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	if n.scheduler == n.gates {
		n.rated(t, claim, allocation != nil)
	}
	return n.write(claim, allocation)
}

// find returns the allocation that kube-scheduler finds for a claim, nil for none.
func (n *node) find(t *testing.T, claim *resourceapi.ResourceClaim) (*resourceapi.AllocationResult, error) {
	t.Helper()
	allocator, err := structured.NewAllocator(t.Context(), n.features(), n.allocated(), n.classes, n.slices, n.cache)
	if err != nil {
		t.Fatal(err)
	}
	results, err := allocator.Allocate(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.name}},
		[]*resourceapi.ResourceClaim{claim})
	if err != nil || len(results) == 0 {
		return nil, err
	}
	return &results[0], nil
}

// write gives a claim the allocation, and returns it; nil if there is none.
func (n *node) write(claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult) *resourceapi.ResourceClaim {
	if allocation == nil {
		return nil
	}
	claim.Status.Allocation = allocation
	n.claims = append(n.claims, claim)
	return claim
}

// serve allocates and prepares a claim, and returns what it gets: the device and the bytes or slots of each
// result, "" for none.
func (n *node) serve(t *testing.T, claim *resourceapi.ResourceClaim) (string, error) {
	t.Helper()
	allocation, err := n.find(t, claim)
	if err != nil || n.write(claim, allocation) == nil {
		return "", err
	}
	held, err := n.hold(claim)
	return amounts(held), err
}

// release forgets the claim of that position.
func (n *node) release(i int) {
	n.engine.Claims.Release(alloc.ClaimKey{Vendor: n.vendor, UID: string(n.claims[i].UID)})
	n.claims = slices.Delete(n.claims, i, i+1)
}

// amounts are the devices of a claim with the bytes or slots of each.
func amounts(held alloc.Claim) string {
	var out []string
	for _, part := range held.Parts {
		out = append(out, fmt.Sprint(part.Device, " ", part.Bytes+int64(part.Slots)))
	}
	return strings.Join(out, " ")
}

// rated checks that divvy-scheduler's count of what claims hold agrees with what kube-scheduler
// allocates: for one request it is the same, and for several it finds no node that has not the devices.
func (n *node) rated(t *testing.T, claim *resourceapi.ResourceClaim, allocated bool) {
	t.Helper()
	demand, err := ranking.DemandOf([]*resourceapi.ResourceClaim{claim}, n.classes.Get)
	if err != nil {
		t.Fatal(err)
	}
	state := n.allocated()
	if n.catalog == nil {
		n.catalog = ranking.NewCatalog()
	}
	rated, err := n.catalog.Rank(t.Context(), ranking.State{Slices: n.slices, Held: &state}, demand, place.Binpack)
	if err != nil {
		t.Fatal(err)
	}
	fits, asked := len(rated) > 0, claim.Spec.Devices.Requests
	if fits && !allocated || !fits && allocated && len(asked) == 1 && len(asked[0].Exactly.Tolerations) == 0 {
		t.Fatalf("the count says that the node fits: %t; kube-scheduler allocates devices: %t; requests %+v of %+v", fits, allocated,
			asked, state)
	}
}

// hold prepares a claim.
func (n *node) hold(claim *resourceapi.ResourceClaim) (alloc.Claim, error) {
	read, err := dra.Read(claim, n.vendor, dra.PoolName(n.name, n.vendor))
	if err != nil {
		return read, err
	}
	return n.engine.Claims.Hold(read)
}

func ofType(name string) resourceapi.ExactDeviceRequest {
	return resourceapi.ExactDeviceRequest{DeviceClassName: name}
}

func with(name string, capacity resourceapi.QualifiedName, amount string) resourceapi.ExactDeviceRequest {
	r := ofType(name)
	r.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
		capacity: resource.MustParse(amount)}}
	return r
}

// newNode returns a node whose claims get devices in these ways.
func newNode(t *testing.T, vendor string, g gates, devices []accel.Device, ways ...alloc.Config) *node {
	t.Helper()
	e, err := alloc.New()
	if err != nil {
		t.Fatal(err)
	}
	e.Claims.Serve(vendor, ways...)
	e.Claims.Discover(vendor, alloc.Discovery{Devices: devices})
	n := &node{name: "node", vendor: vendor, facts: dra.Facts{Driver: "1.2.3"}, engine: e, gates: g, classes: classes{}}
	n.switchScheduler(g)
	for _, name := range []string{"gpu", "gcu", "chip", "board", "mig", "drs", "slots"} {
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
		class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf(
			"device.driver == %q && device.attributes[%q].type == %q", wire.Driver(vendor), wire.Driver(vendor), name)}}}
		n.classes[name] = class
	}
	n.publish(t)
	return n
}

// switchScheduler starts kube-scheduler with these gates.
func (n *node) switchScheduler(g gates) {
	n.scheduler, n.cache = g, cel.NewCache(100, cel.Features{EnableConsumableCapacity: g.shares})
}

// publish stores the slices as they are to be.
func (n *node) publish(t *testing.T) {
	t.Helper()
	pool := dra.Pool(n.vendor, n.engine.Claims.Devices(n.vendor), n.facts,
		dra.Stored{Counters: n.gates.counters, Taints: n.gates.taints, Shares: n.gates.shares})
	n.slices = store(t, n.name, n.vendor, pool, n.gates)
}

var (
	whole  = alloc.Config{ID: alloc.ID{Resource: "whole", Kind: alloc.Slots}}
	memory = alloc.Config{ID: alloc.ID{Resource: "memory", Kind: alloc.Memory}}
	slots  = alloc.Config{ID: alloc.ID{Resource: "slots", Kind: alloc.Slots}, Cut: alloc.Cut{SplitBoards: true,
		Replicas: func(sharing.Card) int { return 3 }}}
)

func chips(n int, board bool) []accel.Device {
	var out []accel.Device
	for i := range n {
		d := accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("u", i)), Model: "M", MemoryBytes: 16<<30 + 12345, NUMANode: i % 2}
		if board {
			d.Board, d.Chip = fmt.Sprint("u", i-i%2), i%2
		}
		out = append(out, d)
	}
	return out
}

// TestModes: what kube-scheduler makes of the slices.
func TestModes(t *testing.T) {
	all := gates{true, true, true}
	type ask []resourceapi.ExactDeviceRequest
	of := func(vendor string, g gates, devices []accel.Device, ways ...alloc.Config) func(*testing.T) *node {
		return func(t *testing.T) *node {
			t.Helper()
			return newNode(t, vendor, g, devices, ways...)
		}
	}
	tests := map[string]struct {
		node func(*testing.T) *node
		// claims are asked for one after the other; each answer has the device and the
		// bytes or slots, "" for none.
		claims []ask
		want   []string
	}{
		"whole devices": {of("nvidia", all, chips(2, false), whole),
			[]ask{{ofType("gpu")}, {ofType("gpu")}, {ofType("gpu")}}, []string{"gpu-u0 0", "gpu-u1 0", ""}},
		"parts of a device until it is full": {of("enflame", all, chips(1, false), memory),
			[]ask{{with("gcu", "memory", "10Gi")}, {with("gcu", "memory", "6Gi")}, {with("gcu", "memory", "1")}},
			[]string{"gcu-u0 10737418240", "gcu-u0 6442450944", ""}},
		"rounded up to the step": {of("enflame", all, chips(1, false), memory),
			[]ask{{with("gcu", "memory", "107374182400m")}, {with("gcu", "memory", "1073741825")}},
			[]string{"gcu-u0 108003328", "gcu-u0 1074790400"}},
		"one byte more than a device": {of("enflame", all, chips(1, false), memory),
			[]ask{{with("gcu", "memory", "17179869185")}, {with("gcu", "memory", "17179869184")}}, []string{"", "gcu-u0 17179869184"}},
		"one byte more than is left": {of("enflame", all, chips(1, false), memory),
			[]ask{{with("gcu", "memory", "1Mi")}, {with("gcu", "memory", "17178820609")}, {with("gcu", "memory", "17178820608")}},
			[]string{"gcu-u0 1048576", "", "gcu-u0 17178820608"}},
		"one byte more than a whole device": {of("nvidia", all, chips(1, false), whole),
			[]ask{{with("gpu", "memory", "17179869185")}, {with("gpu", "memory", "17179869184")}}, []string{"", "gpu-u0 0"}},
		// The reviews reject 0, but they may be off.
		"nothing is the least": {of("enflame", all, chips(1, false), memory),
			[]ask{{with("gcu", "memory", "0")}, {with("gcu", "memory", "1")}}, []string{"gcu-u0 1048576", "gcu-u0 1048576"}},
		"nothing of a whole device is all of it": {of("nvidia", all, chips(1, false), whole),
			[]ask{{with("gpu", "memory", "0")}, {with("gpu", "memory", "0")}}, []string{"gpu-u0 0", ""}},
		"slots": {of("nvidia", all, chips(1, false), slots),
			[]ask{{with("slots", "slots", "4")}, {with("slots", "slots", "0")}, {with("slots", "slots", "1500m")}, {ofType("slots")}},
			[]string{"", "gpu-u0-slots 1", "gpu-u0-slots 2", ""}},
		"a whole number of steps is not rounded": {of("enflame", all, chips(1, false), memory),
			[]ask{{with("gcu", "memory", "3Mi")}, {with("gcu", "memory", "3145729")}}, []string{"gcu-u0 3145728", "gcu-u0 4194304"}},
		"no amount is all of it": {of("enflame", all, chips(1, false), memory),
			[]ask{{ofType("gcu")}, {with("gcu", "memory", "1Mi")}}, []string{"gcu-u0 17179869184", ""}},
		"all of it does not fit beside a part": {of("enflame", all, chips(1, false), memory),
			[]ask{{with("gcu", "memory", "1Mi")}, {ofType("gcu")}}, []string{"gcu-u0 1048576", ""}},
		"more than a device": {of("enflame", all, chips(2, false), memory), []ask{{with("gcu", "memory", "17Gi")}}, []string{""}},
		"slices or memory": {of("nvidia", all, chips(1, false), memory, slots),
			[]ask{{ofType("slots")}, {with("gpu", "memory", "1Gi")}, {with("slots", "slots", "2")}, {ofType("slots")}},
			[]string{"gpu-u0-slots 1", "", "gpu-u0-slots 2", ""}},
		"a board or its chips": {of("iluvatar", all, chips(4, true), whole, memory),
			[]ask{{with("chip", "memory", "1Gi")}, {ofType("board")}, {ofType("board")}, {with("chip", "memory", "16Gi")}},
			[]string{"chip-u0 1073741824", "board-u2 0", "", "chip-u1 17179869184"}},
		"without counters one form": {of("iluvatar", gates{true, false, true}, chips(2, true), whole, memory),
			[]ask{{ofType("chip")}, {ofType("board")}}, []string{"", "board-u0 0"}},
		"without shares whole devices": {of("enflame", gates{false, true, true}, chips(2, false), memory),
			[]ask{{ofType("gcu")}, {ofType("gcu")}, {ofType("gcu")}}, []string{"gcu-u0 0", "gcu-u1 0", ""}},
		"two parts in one claim": {of("enflame", all, chips(2, false), memory),
			[]ask{{with("gcu", "memory", "10Gi"), with("gcu", "memory", "10Gi")}}, []string{"gcu-u0 10737418240 gcu-u1 10737418240"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := tt.node(t)
			for i, requests := range tt.claims {
				got := ""
				if claim := n.schedule(t, requests...); claim != nil {
					held, err := n.hold(claim)
					if err != nil {
						t.Fatalf("claim %d: %v", i, err)
					}
					got = amounts(held)
				}
				if got != tt.want[i] {
					t.Errorf("claim %d has %q, want %q", i, got, tt.want[i])
				}
			}
		})
	}
}

// TestIll: no device that is unhealthy or in use without a claim is allocated.
func TestIll(t *testing.T) {
	for name, g := range map[string]gates{"taints": {true, true, true}, "no taints": {true, true, false}} {
		t.Run(name, func(t *testing.T) {
			devices := chips(2, false)
			devices[0].Health = accel.Health{Unhealthy: true, Reason: "it is hot", Cause: "over temperature"}
			n := newNode(t, "enflame", g, devices, memory)
			if c := n.schedule(t, ofType("gcu")); c == nil || c.Status.Allocation.Devices.Results[0].Device != "gcu-u1" {
				t.Errorf("got %+v", c)
			}
			if c := n.schedule(t, ofType("gcu")); c != nil {
				t.Errorf("the unhealthy device is allocated: %+v", c)
			}
			ill := ofType("gcu")
			ill.Tolerations = []resourceapi.DeviceToleration{{Key: dra.UnhealthyTaint, Operator: resourceapi.DeviceTolerationOpExists}}
			c := n.schedule(t, ill)
			if (c != nil) != g.taints {
				t.Fatalf("a claim that tolerates it: %+v", c)
			}
			if c != nil {
				if _, err := n.hold(c); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// anyRequests are one or two requests of any devices, with amounts only where kube-scheduler accepts them.
func (n *node) anyRequests(rng *rand.Rand) (requests []resourceapi.ExactDeviceRequest) {
	for range 1 + rng.IntN(2) {
		r := ofType([]string{"gpu", "gcu", "chip", "board", "slots"}[rng.IntN(5)])
		if r.DeviceClassName == "gpu" || r.DeviceClassName == "gcu" {
			r = ofType(map[string]string{"nvidia": "gpu", "iluvatar": "chip", "enflame": "gcu"}[n.vendor])
		}
		if n.scheduler.shares && rng.IntN(3) > 0 {
			if r.DeviceClassName == "slots" {
				r = with("slots", wire.SlotsCapacity, fmt.Sprint(1+rng.IntN(3)))
			} else {
				r = with(r.DeviceClassName, wire.MemoryCapacity, fmt.Sprint(1+rng.Int64N(17<<30)))
			}
		}
		r.Count = int64(1 + rng.IntN(2))
		requests = append(requests, r)
	}
	return requests
}

// TestEngineAgrees: the engine accepts every allocation of kube-scheduler, with every set of
// gates, and rejects it while the device is held otherwise.
func TestEngineAgrees(t *testing.T) {
	allocated, released := 0, 0
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			g := gates{seed&1 == 0, seed&2 == 0, seed&4 == 0}
			vendor := []string{"nvidia", "iluvatar", "enflame"}[seed%3]
			ways := []alloc.Config{whole, memory, slots}
			rng.Shuffle(len(ways), func(i, j int) { ways[i], ways[j] = ways[j], ways[i] })
			n := newNode(t, vendor, g, chips(2+rng.IntN(5), vendor == "iluvatar"), ways[:1+rng.IntN(3)]...)
			for range 150 {
				if len(n.claims) > 0 && rng.IntN(3) == 0 {
					n.release(rng.IntN(len(n.claims)))
					released++
					continue
				}
				claim := n.schedule(t, n.anyRequests(rng)...)
				if claim == nil {
					continue
				}
				if _, err := n.hold(claim); err != nil {
					t.Fatalf("kube-scheduler allocates %+v, and the node rejects it: %v", claim.Status.Allocation.Devices.Results, err)
				}
				allocated++
			}
		})
	}
	t.Logf("%d claims were allocated, %d released", allocated, released)
	if allocated < 300 || released < 100 {
		t.Errorf("too few claims: %d allocated, %d released", allocated, released)
	}
}

// TestLimits: the API server takes as many devices as there may be, with taints.
func TestLimits(t *testing.T) {
	devices := chips(65, false)
	for i := range devices {
		devices[i].Health = accel.Health{Unhealthy: true, Cause: strings.Repeat("x", 100)}
		devices[i].Model, devices[i].ID = strings.Repeat("模型", 50), accel.DeviceID(fmt.Sprintf("GPU-%s-%d", strings.Repeat("A_", 40), i))
	}
	n := newNode(t, "nvidia", gates{true, true, true}, devices, memory, slots)
	if len(n.slices) != 12 {
		t.Errorf("%d slices", len(n.slices))
	}
	n.name = strings.Repeat("n", 63) + strings.Repeat("."+strings.Repeat("m", 62), 3) // too long for the name of a pool
	n.publish(t)
	if len(n.slices) != 12 {
		t.Errorf("%d slices of a node with a long name", len(n.slices))
	}
}
