package claims

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceslice/tracker"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/dra"
)

// Claims with constraints and alternatives, and of all devices, as users write them in spec.devices.
const (
	oneGPU     = `requests: [{name: one, exactly: {deviceClassName: gpu}}]`
	linkedPair = `
requests: [{name: pair, exactly: {deviceClassName: gpu, count: 2}}]
constraints: [{matchAttribute: nvidia.divvy.dev/linkGroup}]`
	pairOfOneRoot = `
requests: [{name: pair, exactly: {deviceClassName: gpu, count: 2}}]
constraints: [{matchAttribute: resource.kubernetes.io/pcieRoot}]`
	linkedOrAny = `
requests:
- name: pair
  firstAvailable: [{name: linked, deviceClassName: gpu, count: 2}, {name: any, deviceClassName: gpu, count: 2}]
constraints: [{matchAttribute: nvidia.divvy.dev/linkGroup, requests: [pair/linked]}]`
	chipsOfOneBoard = `
requests: [{name: chips, exactly: {deviceClassName: chip, count: 2, capacity: {requests: {memory: 8Gi}}}}]
constraints: [{matchAttribute: iluvatar.divvy.dev/boardID}]`
	chipsOfTwoBoards = `
requests: [{name: chips, exactly: {deviceClassName: chip, count: 2, capacity: {requests: {memory: 8Gi}}}}]
constraints: [{distinctAttribute: iluvatar.divvy.dev/boardID}]`
	boardOrChips = `
requests:
- name: devices
  firstAvailable:
  - {name: board, deviceClassName: board}
  - {name: chips, deviceClassName: chip, count: 2, capacity: {requests: {memory: 8Gi}}}
constraints: [{matchAttribute: iluvatar.divvy.dev/boardID}]`
)

// one asks for one device, and all for all devices of a type, with so much memory of each unless it is "".
func one(class, memory string) string {
	return fmt.Sprintf("requests: [{name: r, exactly: {deviceClassName: %s%s}}]", class, amount(memory))
}

func every(class, memory string) string {
	return fmt.Sprintf("requests: [{name: r, exactly: {deviceClassName: %s, allocationMode: All%s}}]", class, amount(memory))
}

func amount(memory string) string {
	if memory == "" {
		return ""
	}
	return ", capacity: {requests: {memory: " + memory + "}}"
}

// linkedGPUs is a node with five GPUs, of which 0 and 2 are linked, as are 1 and 3, and of which 0 and 1
// are below one PCIe root complex, and 2 and 3 below another.
func linkedGPUs(t *testing.T) *node {
	t.Helper()
	devices := chips(5, false)
	roots := map[string]string{}
	for i := range devices {
		devices[i].PCI = fmt.Sprintf("0000:1%d:00.0", i)
		if i < 4 {
			roots[devices[i].PCI] = fmt.Sprintf("pci0000:%d0", i/2)
		}
	}
	n := newNode(t, "nvidia", gates{true, true, true}, devices, whole)
	n.facts = dra.Facts{PCIeRoots: roots, Links: []accel.Link{{A: "u0", B: "u2", Score: accel.LinkLane + accel.LinkNode},
		{A: "u1", B: "u3", Score: accel.LinkLane + accel.LinkNode}, {A: "u0", B: "u4", Score: accel.LinkNode}}}
	n.publish(t)
	return n
}

// boards is a node with two boards of two chips.
func boards(t *testing.T) *node {
	t.Helper()
	return newNode(t, "iluvatar", gates{true, true, true}, chips(4, true), whole, memory)
}

// partitioned is a node with a whole GPU, and one that is divided into two MIG devices.
func partitioned(t *testing.T) *node {
	t.Helper()
	devices := chips(2, false)
	devices[1].Partitioned = true
	for i := range 2 {
		p := devices[1]
		p.Index, p.ID, p.Parent, p.Profile = accel.PartitionIndex(1, i), accel.DeviceID(fmt.Sprint("m", i)), devices[1].ID, "3g.20gb"
		p.Partitioned = false
		devices = append(devices, p)
	}
	undivided, mig := whole, alloc.Config{ID: alloc.ID{Resource: "mig", Kind: alloc.Slots}}
	undivided.Chooses = func(c sharing.Card) bool { return c.Profile == "" && !c.Partitioned }
	mig.Chooses = func(c sharing.Card) bool { return c.Profile != "" }
	return newNode(t, "nvidia", gates{true, true, true}, devices, undivided, mig)
}

// sliced is a node with two GPUs, by memory and in time slices.
func sliced(t *testing.T) *node {
	t.Helper()
	return newNode(t, "nvidia", gates{true, true, true}, chips(2, false), memory, slots)
}

// TestForms: what kube-scheduler makes of claims with constraints and alternatives, and of those for all devices.
func TestForms(t *testing.T) {
	tests := map[string]struct {
		node func(*testing.T) *node
		// claims are asked for one after the other; each answer has what it gets.
		claims []string
		want   []string
	}{
		"linked pairs": {linkedGPUs, []string{linkedPair, linkedPair, linkedPair}, []string{"gpu-u0 0 gpu-u2 0", "gpu-u1 0 gpu-u3 0", ""}},
		"no pair that is not linked": {linkedGPUs, []string{oneGPU, linkedPair, linkedPair},
			[]string{"gpu-u0 0", "gpu-u1 0 gpu-u3 0", ""}},
		"pairs of one root complex": {linkedGPUs, []string{oneGPU, pairOfOneRoot, pairOfOneRoot},
			[]string{"gpu-u0 0", "gpu-u2 0 gpu-u3 0", ""}},
		"a linked pair or any": {linkedGPUs, []string{linkedOrAny, oneGPU, linkedOrAny, oneGPU},
			[]string{"gpu-u0 0 gpu-u2 0", "gpu-u1 0", "gpu-u3 0 gpu-u4 0", ""}},
		"two chips of one board": {boards, []string{one("chip", "9Gi"), chipsOfOneBoard, chipsOfOneBoard, chipsOfOneBoard},
			[]string{"chip-u0 9663676416", "chip-u2 8589934592 chip-u3 8589934592", "chip-u2 8589934592 chip-u3 8589934592", ""}},
		"two chips of two boards": {boards, []string{chipsOfTwoBoards, one("board", ""), chipsOfTwoBoards},
			[]string{"chip-u0 8589934592 chip-u2 8589934592", "", "chip-u0 8589934592 chip-u2 8589934592"}},
		"a board or two of its chips": {boards, []string{one("chip", "1Mi"), boardOrChips, boardOrChips, boardOrChips},
			[]string{"chip-u0 1048576", "board-u2 0", "chip-u0 8589934592 chip-u1 8589934592", ""}},
		"all chips, with parts of each": {boards,
			[]string{every("chip", "8Gi"), every("board", ""), every("chip", "8Gi"), every("chip", "8Gi")},
			[]string{"chip-u0 8589934592 chip-u1 8589934592 chip-u2 8589934592 chip-u3 8589934592", "",
				"chip-u0 8589934592 chip-u1 8589934592 chip-u2 8589934592 chip-u3 8589934592", ""}},
		"all boards": {boards, []string{every("board", ""), every("board", ""), every("chip", "1Mi"), one("chip", "1Mi")},
			[]string{"board-u0 0 board-u2 0", "", "", ""}},
		"all chips while a board is in use": {boards, []string{one("board", ""), every("chip", "1Mi"), every("board", "")},
			[]string{"board-u0 0", "", ""}},
		"all boards while a chip is in use": {boards, []string{one("chip", "1Mi"), every("board", ""), one("board", "")},
			[]string{"chip-u0 1048576", "", "board-u2 0"}},
		"all GPUs while one is used in slices": {sliced,
			[]string{one("slots", ""), every("gpu", "1Mi"), every("slots", ""), one("gpu", "1Mi")},
			[]string{"gpu-u0-slots 1", "", "gpu-u0-slots 1 gpu-u1-slots 1", ""}},
		"all MIG devices": {partitioned, []string{every("mig", ""), every("gpu", ""), every("mig", "")},
			[]string{"mig-m0 0 mig-m1 0", "gpu-u0 0", ""}},
		"all of a type that the node has not": {sliced, []string{every("mig", "")}, []string{""}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := tt.node(t)
			for i, devices := range tt.claims {
				if got, err := n.serve(t, n.created(t, devices)); got != tt.want[i] || err != nil {
					t.Errorf("claim %d has %q, %v; want %q", i, got, err, tt.want[i])
				}
			}
		})
	}
}

// TestAllOfUnhealthy: a claim for all devices waits while one is unhealthy, unless it tolerates that.
func TestAllOfUnhealthy(t *testing.T) {
	devices := chips(2, false)
	devices[0].Health = accel.Health{Unhealthy: true, Cause: "ecc"}
	n := newNode(t, "enflame", gates{true, true, true}, devices, memory)
	if got, err := n.serve(t, n.created(t, every("gcu", "1Mi"))); got != "" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
	tolerates := n.created(t, every("gcu", "1Mi"))
	tolerates.Spec.Devices.Requests[0].Exactly.Tolerations = []resourceapi.DeviceToleration{{Key: dra.UnhealthyTaint,
		Operator: resourceapi.DeviceTolerationOpExists}}
	if got, err := n.serve(t, tolerates); got != "gcu-u0 1048576 gcu-u1 1048576" || err != nil {
		t.Errorf("with a toleration: %q, %v", got, err)
	}
}

// TestMostDevices: a claim gets as many devices as a result has, and kube-scheduler rejects one for more.
func TestMostDevices(t *testing.T) {
	const most = resourceapi.AllocationResultsMaxSize
	count := func(n int) string {
		return fmt.Sprintf("requests: [{name: r, exactly: {deviceClassName: gcu, count: %d, capacity: {requests: {memory: 1Gi}}}}]", n)
	}
	two := func(a, b int) string {
		return fmt.Sprintf(`requests: [{name: a, exactly: {deviceClassName: gcu, count: %d}},
			{name: b, exactly: {deviceClassName: gcu, count: %d}}]`, a, b)
	}
	or := func(a, b int) string {
		return fmt.Sprintf(`requests: [{name: r, firstAvailable: [{name: a, deviceClassName: gcu, count: %d},
			{name: b, deviceClassName: gcu, count: %d}]}]`, a, b)
	}
	tests := map[string]struct {
		devices int
		claim   string
		parts   int // 0 for a claim that is rejected
	}{
		"32 devices":                  {most + 1, count(most), most},
		"33 devices":                  {most + 1, count(most + 1), 0},
		"32 devices, of two requests": {most + 1, two(most/2, most/2), most},
		"33 devices, of two requests": {most + 1, two(most/2, most/2+1), 0},
		"all devices, which are 32":   {most, every("gcu", "1Gi"), most},
		"all devices, which are 33":   {most + 1, every("gcu", "1Gi"), 0},
		"33 devices, or else 32":      {most + 1, or(most+1, most), most},
		"34 devices, or else 33":      {most + 2, or(most+2, most+1), 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, "enflame", gates{true, true, true}, chips(tt.devices, false), memory)
			claim := n.created(t, tt.claim)
			got, err := n.serve(t, claim)
			if tt.parts == 0 {
				if err == nil || !strings.Contains(err.Error(), "exceeds the claim limit of 32") || got != "" {
					t.Errorf("got %q, %v", got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			held, _ := n.engine.Claims.Get(alloc.ClaimKey{Vendor: n.vendor, UID: string(claim.UID)})
			var names []string
			for _, part := range held.Parts {
				names = append(names, part.Device)
			}
			slices.Sort(names)
			if names = slices.Compact(names); len(names) != tt.parts {
				t.Errorf("%d devices are held: %s", len(names), got)
			}
		})
	}
}

// taint makes slices those that kube-scheduler reads with DeviceTaintRules.
func (n *node) taint(t *testing.T, rules ...*resourceapi.DeviceTaintRule) {
	t.Helper()
	var objects []runtime.Object
	for _, s := range n.slices {
		objects = append(objects, s)
	}
	for _, r := range rules {
		objects = append(objects, r)
	}
	factory := informers.NewSharedInformerFactory(fake.NewClientset(objects...), 0)
	found, err := tracker.StartTracker(t.Context(), tracker.Options{EnableDeviceTaintRules: true,
		SliceInformer: factory.Resource().V1().ResourceSlices(), TaintInformer: factory.Resource().V1().DeviceTaintRules()})
	if err != nil {
		t.Fatal(err)
	}
	factory.Start(t.Context().Done())
	if !cache.WaitForCacheSync(t.Context().Done(), found.HasSynced) {
		t.Fatal("the informers have not synced")
	}
	if n.slices, err = found.ListPatchedResourceSlices(); err != nil {
		t.Fatal(err)
	}
	found.Stop()
}

// TestTaintRules: a rule of an administrator keeps new claims from a device of the node, unless they
// tolerate the taint. The node accepts what kube-scheduler allocates.
func TestTaintRules(t *testing.T) {
	const key = "example.com/repair"
	schedule, execute := resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute
	exists, equal := resourceapi.DeviceTolerationOpExists, resourceapi.DeviceTolerationOpEqual
	tests := map[string]struct {
		effect    resourceapi.DeviceTaintEffect
		tolerates []resourceapi.DeviceToleration
		want      string // what two claims get, each of a whole device
	}{
		"none":       {resourceapi.DeviceTaintEffectNone, nil, "gcu-u0 gcu-u1"},
		"NoSchedule": {schedule, nil, "gcu-u1 -"},
		"NoExecute":  {execute, nil, "gcu-u1 -"},
		"NoSchedule, tolerated": {schedule, []resourceapi.DeviceToleration{{Key: key, Operator: exists, Effect: schedule}},
			"gcu-u0 gcu-u1"},
		"NoExecute, tolerated": {execute, []resourceapi.DeviceToleration{{Key: key, Operator: equal, Value: "fan", Effect: execute}},
			"gcu-u0 gcu-u1"},
		"NoExecute, tolerated for a time": {execute, []resourceapi.DeviceToleration{{Key: key, Operator: exists, Effect: execute,
			TolerationSeconds: ptr.To[int64](60)}}, "gcu-u0 gcu-u1"},
		"NoExecute, NoSchedule is tolerated": {execute, []resourceapi.DeviceToleration{{Key: key, Operator: exists, Effect: schedule}},
			"gcu-u1 -"},
		"NoSchedule, another value is tolerated": {schedule, []resourceapi.DeviceToleration{{Key: key, Operator: equal, Value: "x"}},
			"gcu-u1 -"},
		"NoSchedule, another taint is tolerated": {schedule, []resourceapi.DeviceToleration{{Key: dra.UnhealthyTaint, Operator: exists}},
			"gcu-u1 -"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, "enflame", gates{true, true, true}, chips(2, false), memory)
			n.taint(t, &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "repair"}, Spec: resourceapi.DeviceTaintRuleSpec{
				DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: ptr.To(wire.Driver("enflame")),
					Pool: ptr.To(dra.PoolName("node", "enflame")), Device: ptr.To("gcu-u0")},
				Taint: resourceapi.DeviceTaint{Key: key, Value: "fan", Effect: tt.effect}}})
			var got []string
			for range 2 {
				request := ofType("gcu")
				request.Tolerations = tt.tolerates
				claim := n.schedule(t, request)
				if claim == nil {
					got = append(got, "-")
					continue
				}
				held, err := n.hold(claim)
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, held.Parts[0].Device)
			}
			if strings.Join(got, " ") != tt.want {
				t.Errorf("the claims get %s, want %s", strings.Join(got, " "), tt.want)
			}
		})
	}
}

// TestSchedulerWithoutGates: kube-scheduler may have a gate off that the API server has on. It then
// allocates fewer devices, or an unhealthy one, which the node rejects; never a device that is in use.
func TestSchedulerWithoutGates(t *testing.T) {
	all := gates{true, true, true}
	for name, g := range map[string]gates{"DRAConsumableCapacity": {false, true, true}, "DRAPartitionableDevices": {true, false, true},
		"DRADeviceTaints": {true, true, false}, "all of them": {}} {
		t.Run(name, func(t *testing.T) {
			allocated, unhealthy := 0, 0
			for seed := range uint64(6) {
				rng := rand.New(rand.NewPCG(seed, 2))
				vendor := []string{"nvidia", "iluvatar", "enflame"}[seed%3]
				devices := chips(2+2*rng.IntN(2), vendor == "iluvatar")
				devices[rng.IntN(len(devices))].Health = accel.Health{Unhealthy: true, Reason: "ECC", Cause: "ecc"}
				// The first resource chooses all devices, the other ones but the last two: those have one form.
				few := func(w alloc.Config) alloc.Config {
					w.Chooses = func(c sharing.Card) bool { return c.Index < len(devices)-2 }
					return w
				}
				n := newNode(t, vendor, all, devices, memory, few(whole), few(slots))
				n.switchScheduler(g)
				for range 100 {
					if len(n.claims) > 0 && rng.IntN(3) == 0 {
						n.release(rng.IntN(len(n.claims)))
						continue
					}
					claim := n.schedule(t, n.anyRequests(rng)...)
					if claim == nil {
						continue
					}
					_, err := n.hold(claim)
					switch {
					case err == nil:
						allocated++
					case !g.taints && strings.Contains(err.Error(), "is unhealthy: "):
						unhealthy++ // its pod waits, and the claim keeps the allocation until the pod is deleted
					default:
						t.Fatalf("seed %d: kube-scheduler allocates %+v, and the node rejects it: %v", seed,
							claim.Status.Allocation.Devices.Results, err)
					}
				}
			}
			t.Logf("%d claims were allocated, and %d got an unhealthy device", allocated, unhealthy)
			if allocated < 30 || (unhealthy > 0) == g.taints {
				t.Errorf("%d claims were allocated, and %d got an unhealthy device", allocated, unhealthy)
			}
		})
	}
}

// TestSchedulerWithoutGate: what each gate that kube-scheduler lacks takes from claims.
func TestSchedulerWithoutGate(t *testing.T) {
	n := newNode(t, "enflame", gates{true, true, true}, chips(1, false), memory)
	n.switchScheduler(gates{false, true, true})
	if got, err := n.serve(t, n.created(t, one("gcu", "1Gi"))); err == nil || !strings.Contains(err.Error(), "DRAConsumableCapacity") {
		t.Errorf("without shares, 1Gi: %q, %v", got, err)
	}
	for i, want := range []string{"gcu-u0 0", ""} {
		if got, err := n.serve(t, n.created(t, one("gcu", ""))); got != want || err != nil {
			t.Errorf("without shares, claim %d has %q, %v; want %q", i, got, err, want)
		}
	}
	n = boards(t)
	n.switchScheduler(gates{true, false, true})
	for _, class := range []string{"board", "chip"} {
		if got, err := n.serve(t, n.created(t, one(class, ""))); got != "" || err != nil {
			t.Errorf("without counters a %s is allocated: %q, %v", class, got, err)
		}
	}
}
