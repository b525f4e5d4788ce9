package why

import (
	"context"
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	dracel "k8s.io/dynamic-resource-allocation/cel"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

const gcuDriver = "enflame.divvy.dev"

// claimsOf are what two nodes offer, and what the claims held have: "name device amount pod".
func claimsOf(held ...string) Claims {
	gcu := func(name string, taints ...resourceapi.DeviceTaint) resourceapi.Device {
		kind, shared := "gcu", true
		return resourceapi.Device{Name: name, AllowMultipleAllocations: &shared, Taints: taints,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: &kind}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("16Gi")}}}
	}
	drawing := func(name, kind string, chips ...string) resourceapi.Device {
		d := resourceapi.Device{Name: name,
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": {StringValue: &kind}}}
		consumes := resourceapi.DeviceCounterConsumption{CounterSet: "board", Counters: map[string]resourceapi.Counter{}}
		for _, chip := range chips {
			consumes.Counters[chip] = resourceapi.Counter{Value: resource.MustParse("1")}
		}
		d.ConsumesCounters = []resourceapi.DeviceCounterConsumption{consumes}
		return d
	}
	slice := func(driver, node string, devices ...resourceapi.Device) resourceapi.ResourceSlice {
		return resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: node}, Devices: devices}}
	}
	class := func(name, driver, kind string) resourceapi.DeviceClass {
		return resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: fmt.Sprintf(
				"device.driver == '%s' && device.attributes['%[1]s'].type == '%s'", driver, kind)}}}}}
	}
	old := "iluvatar.com/gpu"
	board := class("board.iluvatar.divvy.dev", "iluvatar.divvy.dev", "board")
	board.Spec.ExtendedResourceName = &old
	compiled := dracel.NewCache(10, dracel.Features{EnableConsumableCapacity: true})
	c := Claims{
		Selects: func(expression, driver string, d *resourceapi.Device) (bool, error) {
			result := compiled.GetOrCompile(expression)
			if result.Error != nil {
				return false, result.Error
			}
			matches, _, err := result.DeviceMatches(context.Background(), dracel.Device{Driver: driver, Attributes: d.Attributes})
			return matches, err
		},
		Classes: []resourceapi.DeviceClass{class("gcu.enflame.divvy.dev", gcuDriver, "gcu"), board,
			class("chip.iluvatar.divvy.dev", "iluvatar.divvy.dev", "chip")},
		Slices: []resourceapi.ResourceSlice{
			slice(gcuDriver, "a", gcu("gcu-0"), gcu("gcu-1")),
			slice(gcuDriver, "b", gcu("gcu-2", resourceapi.DeviceTaint{Key: "divvy.dev/unhealthy", Value: "lost",
				Effect: resourceapi.DeviceTaintEffectNoSchedule})),
			slice("iluvatar.divvy.dev", "a", drawing("board-0", "board", "chip0", "chip1"), drawing("chip-0", "chip", "chip0"),
				drawing("chip-1", "chip", "chip1")),
		},
	}
	for _, text := range held {
		f := strings.Fields(text)
		driver, node := gcuDriver, "a"
		result := resourceapi.DeviceRequestAllocationResult{Request: "r", Pool: node, Device: f[1]}
		if f[2] != "-" {
			result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(f[2])}
		} else {
			driver = "iluvatar.divvy.dev"
		}
		result.Driver = driver
		claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team-b", Name: f[0]}}
		claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{result}}}
		claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: f[3]}}
		c.Claims = append(c.Claims, claim)
	}
	return c
}

// wants is a claim of team-a that has nothing yet.
func wants(name string, request resourceapi.ExactDeviceRequest) resourceapi.ResourceClaim {
	claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &request}}
	return claim
}

func gcuMemory(amount string) resourceapi.ExactDeviceRequest {
	return resourceapi.ExactDeviceRequest{DeviceClassName: "gcu.enflame.divvy.dev", Capacity: &resourceapi.CapacityRequirements{
		Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(amount)}}}
}

func TestPodWaitsForClaim(t *testing.T) {
	selecting := gcuMemory("1Gi")
	selecting.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{
		Expression: `device.attributes["enflame.divvy.dev"].type == "other"`}}}
	broken := gcuMemory("1Gi")
	broken.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.attributes[`}}}
	tolerant := []resourceapi.DeviceToleration{{Operator: resourceapi.DeviceTolerationOpExists}}
	tests := map[string]struct {
		held    []string
		request resourceapi.ExactDeviceRequest
		// missing leaves the claim out, template has it made of one.
		missing, template bool
		want              string // in the first cause, "" for one that kube-scheduler's message is
		changes           []string
		commands          string
	}{
		"too little memory is free": {
			held: []string{"x gcu-0 10Gi p", "y gcu-1 12Gi q"}, request: gcuMemory("8Gi"),
			want: "request r, class gcu.enflame.divvy.dev: of 3 devices, none is free: gcu-0 on node a has 6Gi of 16Gi memory free, " +
				"8Gi is requested, gcu-1 on node a has 4Gi of 16Gi memory free, 8Gi is requested, gcu-2 on node b has the taint " +
				"divvy.dev/unhealthy=lost",
			changes: []string{"request at most 6Gi of memory in ResourceClaim team-a/mine; a claim cannot be changed, so create it and " +
				"the pod again", "end the pods that use claim team-b/x, which holds gcu-0 on node a"},
			commands: "kubectl delete pod -n team-b p",
		},
		"the rest has a taint": {
			held: []string{"x gcu-0 16Gi p", "y gcu-1 16Gi q"}, request: gcuMemory("2Gi"),
			want:    "gcu-2 on node b has the taint divvy.dev/unhealthy=lost",
			changes: []string{"end the pods that use claim team-b/x"}, commands: "kubectl delete pod -n team-b p",
		},
		"what is free is enough": {request: gcuMemory("8Gi")},
		"all of it is requested": {held: []string{"x gcu-0 1Gi p", "y gcu-1 1Gi q"},
			request: resourceapi.ExactDeviceRequest{DeviceClassName: "gcu.enflame.divvy.dev"},
			want:    "has 15Gi of 16Gi memory free, 16Gi is requested"},
		"a board without one of its chips": {
			held: []string{"x chip-1 - p"}, request: resourceapi.ExactDeviceRequest{DeviceClassName: "board.iluvatar.divvy.dev"},
			want:     "board-0 on node a is held by claim team-b/x of pod p as chip-1",
			changes:  []string{"end the pods that use claim team-b/x"},
			commands: "kubectl delete pod -n team-b p",
		},
		"one of two chips": {
			held: []string{"x chip-1 - p"}, request: resourceapi.ExactDeviceRequest{DeviceClassName: "chip.iluvatar.divvy.dev", Count: 2},
			want: "2 are required on one node, and free are chip-0 on node a: chip-1 on node a is held by claim team-b/x of pod p",
		},
		"one on each of two nodes": {
			held:    []string{"x gcu-0 16Gi p"},
			request: resourceapi.ExactDeviceRequest{DeviceClassName: "gcu.enflame.divvy.dev", Count: 2, Tolerations: tolerant},
			want: "2 are required on one node, and free are gcu-1 on node a, gcu-2 on node b: gcu-0 on node a has 0 of 16Gi memory free, " +
				"16Gi is requested",
		},
		"all of one node": {held: []string{"x gcu-0 1Gi p"}, request: resourceapi.ExactDeviceRequest{
			DeviceClassName: "gcu.enflame.divvy.dev", AllocationMode: resourceapi.DeviceAllocationModeAll, Tolerations: tolerant}},
		"all of a node but one": {held: []string{"x gcu-0 1Gi p"}, request: resourceapi.ExactDeviceRequest{
			DeviceClassName: "gcu.enflame.divvy.dev", AllocationMode: resourceapi.DeviceAllocationModeAll},
			want: "all of a node are required, and free are gcu-1 on node a: gcu-0 on node a has 15Gi of 16Gi memory free, " +
				"16Gi is requested, gcu-2 on node b has the taint divvy.dev/unhealthy=lost"},
		"no such class": {request: resourceapi.ExactDeviceRequest{DeviceClassName: "gcu.enflame.divy.dev"},
			want: "names the DeviceClass gcu.enflame.divy.dev, which does not exist; the nearest name is gcu.enflame.divvy.dev"},
		"no such device":           {request: selecting, want: "no node publishes a device that the selectors allow"},
		"a selector that is wrong": {request: broken, want: "a selector of the request r cannot be evaluated"},
		"no such claim":            {missing: true, want: "the claim does not exist; create it"},
		"no such template": {missing: true, template: true,
			want: "the claim devices is not created from the ResourceClaimTemplate mine yet; check that the template exists"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			b.node("a", nil)
			p := b.waiting("train", 0, "0/1 nodes are available: 1 cannot allocate all claims.")
			mine := "mine"
			p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "devices", ResourceClaimName: &mine}}
			if tc.template {
				p.Spec.ResourceClaims[0] = v1.PodResourceClaim{Name: "devices", ResourceClaimTemplateName: &mine}
			}
			b.Claims = claimsOf(tc.held...)
			if !tc.missing {
				b.Claims.Claims = append(b.Claims.Claims, wants(mine, tc.request))
			}
			if !b.MayClaim(p) {
				t.Error("the snapshot need not have the claims of the pod")
			}
			e := New(&b.Snapshot).Pod(p)
			if len(e.Causes) != 1 || e.Causes[0].Code != Claim {
				t.Fatalf("causes are %+v, want one about the claim", e.Causes)
			}
			got := e.Causes[0].Detail
			if tc.want == "" && got != "kube-scheduler: 1 cannot allocate all claims" || !strings.Contains(got, tc.want) {
				t.Errorf("the cause is %q, want %q", got, tc.want)
			}
			var texts, commands []string
			for _, c := range e.Changes {
				texts, commands = append(texts, c.Text), append(commands, c.Commands...)
				if c.Verified {
					t.Errorf("the change %q is verified", c.Text)
				}
			}
			for _, want := range tc.changes {
				if !strings.Contains(strings.Join(texts, "\n"), want) {
					t.Errorf("changes are %q, want %q", texts, want)
				}
			}
			if got := strings.Join(commands, "\n"); tc.commands != "" && got != tc.commands {
				t.Errorf("commands are %q, want %q", got, tc.commands)
			}
			if tc.want != "" && e.Waiting.Helps {
				t.Errorf("waiting is said to help: %+v", e.Waiting)
			}
		})
	}
}

// TestOldPodWaitsForClaim: kube-scheduler turns an extended resource that no node offers into a claim.
func TestOldPodWaitsForClaim(t *testing.T) {
	b := newBuilder(t)
	b.node("a", nil)
	p := b.waiting("old", 0, "0/1 nodes are available: 1 cannot allocate all claims.")
	p.Spec.Containers[0].Resources.Requests["iluvatar.com/gpu"] = resource.MustParse("1")
	p.Spec.Containers[0].Resources.Limits["iluvatar.com/gpu"] = resource.MustParse("1")
	b.Claims = claimsOf("x board-0 - p")
	if !b.MayClaim(p) {
		t.Error("the snapshot need not have the claims of the pod")
	}
	e := New(&b.Snapshot).Pod(p)
	i := -1
	for k := range e.Causes {
		if e.Causes[k].Code == Claim {
			i = k
		}
		if e.Causes[k].Code == NoSuchResource {
			t.Errorf("the resource is said to be unknown: %+v", e.Causes[k])
		}
	}
	if i < 0 || !strings.Contains(e.Causes[i].Detail, "board-0 on node a is held by claim team-b/x of pod p") {
		t.Errorf("causes are %+v, want one about the claim", e.Causes)
	}
}

// TestClaimOfUnits: a pod says which of its claims are in the place of units.
func TestClaimOfUnits(t *testing.T) {
	for annotation, want := range map[string]string{
		`[{"resource": "enflame.com/gcu-memory", "containers": [{"name": "main", "units": 8}], "claim": "units", "devices": {}}]`: "The " +
			"claim units is in place of units that the pod requested, by container: enflame.com/gcu-memory: main 8.",
		"{": "Which units became claims cannot be read: annotation divvy.dev/units-as-claims: ",
	} {
		b := newBuilder(t)
		b.node("a", nil)
		p := b.waiting("train", 0, "0/1 nodes are available: 1 cannot allocate all claims.")
		p.Annotations = map[string]string{wire.UnitsAnnotation: annotation}
		mine := "mine"
		p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "units", ResourceClaimName: &mine}}
		b.Claims = claimsOf("x gcu-0 16Gi p", "y gcu-1 16Gi q")
		b.Claims.Claims = append(b.Claims.Claims, wants(mine, gcuMemory("8Gi")))
		e := New(&b.Snapshot).Pod(p)
		if len(e.Causes) != 1 || e.Causes[0].Code != Claim || !strings.Contains(strings.Join(e.Notes, "\n"), want) {
			t.Errorf("causes are %+v, notes %q, want %q", e.Causes, e.Notes, want)
		}
	}
}

func TestClaimsNotRead(t *testing.T) {
	b := newBuilder(t)
	b.node("a", nil)
	p := b.waiting("train", 0, "0/1 nodes are available: 1 cannot allocate all claims.")
	mine := "mine"
	p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "devices", ResourceClaimName: &mine}}
	b.Failed = []Failure{{Source: SourceClaims, Reason: "forbidden"}}
	e := New(&b.Snapshot).Pod(p)
	if len(e.Causes) != 1 || e.Causes[0].Detail != "kube-scheduler: 1 cannot allocate all claims" ||
		!strings.Contains(strings.Join(e.Notes, "\n"), "The ResourceClaims, DeviceClasses and ResourceSlices could not be read") {
		t.Errorf("causes are %+v, notes %q", e.Causes, e.Notes)
	}
}

func TestClaimNotPrepared(t *testing.T) {
	b := newBuilder(t)
	b.node("a", nil)
	p := b.pod("train", 0)
	p.Spec.NodeName = "a"
	b.Events = []v1.Event{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a"}, Type: v1.EventTypeWarning,
		Reason: events.ClaimNotPrepared.Reason, Message: "the devices of claim mine cannot be prepared: held by claim other",
		InvolvedObject: v1.ObjectReference{Kind: "Pod", Name: "train"}}}
	e := New(&b.Snapshot).Pod(p)
	if len(e.Causes) != 1 || e.Causes[0].Code != Claim || !strings.Contains(e.Causes[0].Detail, "held by claim other") {
		t.Errorf("causes are %+v", e.Causes)
	}
}
