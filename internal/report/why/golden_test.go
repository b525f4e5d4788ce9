package why

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

var update = flag.Bool("update", false, "write the golden files again")

const insufficient = "0/1 nodes are available: 1 Insufficient enflame.com/gcu-memory. preemption: 0/1 nodes are available: " +
	"1 No preemption victims found for incoming pod."

var dedicated = []v1.Taint{{Key: "dedicated", Value: "infer", Effect: v1.TaintEffectNoSchedule}}

// goldenCases has a minimal cluster for each code, whose first cause it is. fixed takes away
// what the case is about: the first cause must be another one then.
var goldenCases = map[Code]struct {
	make  func(b *builder)
	owner *Owner
	fixed func(b *builder)
}{
	Suspended: {
		make:  func(b *builder) { b.node("gcu-1", []accel.Units{16}) },
		owner: &Owner{Kind: "job", Namespace: "team-a", Name: "train", Suspended: true, Wanted: 1},
	},
	NotCreated: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.Events = []v1.Event{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a"}, Reason: "FailedCreate",
				InvolvedObject: v1.ObjectReference{Kind: "ReplicaSet", Name: "web-7d9"},
				Message: "Error creating: pods \"web-7d9-x\" is forbidden: exceeded quota: gcu, requested: " +
					"requests.enflame.com/gcu-memory=8, used: requests.enflame.com/gcu-memory=16, " +
					"limited: requests.enflame.com/gcu-memory=20"}}
		},
		owner: &Owner{Kind: "deployment", Namespace: "team-a", Name: "web", Wanted: 3},
	},
	Gated: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.pod("train", 8).Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
		},
		fixed: func(b *builder) { b.Pods[0].Spec.SchedulingGates = nil },
	},
	RejectedByKubelet: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.on("train", "gcu-1", 8, 0)
			p.Status.Phase, p.Status.Reason = v1.PodFailed, "UnexpectedAdmissionError"
			p.Status.Message = "Pod was rejected: Allocate failed due to no device has 8 units free, which is unexpected"
		},
		fixed: func(b *builder) { b.Pods[0].Status.Reason = "Evicted" },
	},
	Topology: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.on("train", "gcu-1", 8, 0)
			p.Status.Phase, p.Status.Reason = v1.PodFailed, "TopologyAffinityError"
			p.Status.Message = "Pod was rejected: Resources cannot be allocated with Topology locality"
			ownedBy(p, "Job", "train")
		},
		fixed: func(b *builder) { b.Pods[0].Status.Reason = "Evicted" },
	},
	StartingUp: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.on("train", "gcu-1", 8, 0)
			p.Status.Phase = v1.PodPending
			p.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "main", State: v1.ContainerState{
				Waiting: &v1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "Back-off pulling image \"train:1\""}}}}
		},
		fixed: func(b *builder) { b.Pods[0].Status.Phase = v1.PodRunning },
	},
	ForeignScheduler: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.waiting("train", 8, "").Spec.SchedulerName = "volcano"
		},
		fixed: func(b *builder) { b.Pods[0].Spec.SchedulerName = "default-scheduler" },
	},
	UnknownScheduler: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.pod("train", 8).Spec.SchedulerName = "my-scheduler"
		},
		fixed: func(b *builder) { b.Pods[0].CreationTimestamp = metav1.NewTime(taken.Add(-30 * time.Second)) },
	},
	ExtenderDown: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.waiting("train", 8, "Post \"https://127.0.0.1:32765/gcushare-scheduler/filter\": dial tcp 127.0.0.1:32765: "+
				"connect: connection refused")
		},
		fixed: func(b *builder) { b.Pods[0].Status.Conditions[0].Message = "" },
	},
	SeveralResources: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, "0/1 nodes are available: 1 the pod requests enflame.com/gcu-memory and nvidia.com/gpu-memory: "+
				"a pod can have only one shared resource, request the others in separate pods.")
			p.Spec.Containers[0].Resources.Requests["nvidia.com/gpu-memory"] = resource.MustParse("4")
			b.Nodes[0].Status.Allocatable["nvidia.com/gpu-memory"] = resource.MustParse("40")
		},
		fixed: func(b *builder) { delete(b.Pods[0].Spec.Containers[0].Resources.Requests, "nvidia.com/gpu-memory") },
	},
	AnnotationWrong: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			annotate(b.waiting("train", 8, ""), wire.PolicyAnnotation, "tightest")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.PolicyAnnotation, "spread") },
	},
	NotDivisible: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{8, 8})
			annotate(b.waiting("train", 9, ""), wire.CountAnnotation, "2")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.CountAnnotation, "3") },
	},
	ForeignName: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 0, "0/1 nodes are available: 1 Insufficient nvidia.com/gpumem.")
			p.Spec.Containers[0].Resources.Requests["nvidia.com/gpumem"] = resource.MustParse("3000")
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Allocatable["nvidia.com/gpumem"] = resource.MustParse("4000") },
	},
	Misspelt: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 0, "0/1 nodes are available: 1 Insufficient enflame.com/gcu-memroy.")
			p.Spec.Containers[0].Resources.Requests["enflame.com/gcu-memroy"] = resource.MustParse("8")
			p.Spec.Containers[0].Resources.Limits["enflame.com/gcu-memroy"] = resource.MustParse("8")
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Allocatable["enflame.com/gcu-memroy"] = resource.MustParse("8") },
	},
	NoSuchResource: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 0, "0/1 nodes are available: 1 Insufficient enflame.com/gcu.")
			p.Spec.Containers[0].Resources.Requests["enflame.com/gcu"] = resource.MustParse("1")
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Allocatable["enflame.com/gcu"] = resource.MustParse("1") },
	},
	UnitMismatch: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{48, 48})
			b.waiting("train", 20480, insufficient)
		},
		fixed: func(b *builder) {
			b.Pods[0].Spec.Containers[0].Resources.Requests[memory] = resource.MustParse("20")
		},
	},
	LargerThanDevice: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{40, 40, 40})
			b.waiting("train", 45, "0/1 nodes are available: 1 insufficient GCU Memory in one gcu device.")
		},
		fixed: func(b *builder) {
			b.Pods[0].Spec.Containers[0].Resources.Requests[memory] = resource.MustParse("40")
		},
	},
	TooFewDevices: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16})
			annotate(b.waiting("train", 24, ""), wire.CountAnnotation, "3")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.CountAnnotation, "2") },
	},
	SelectionEmpty: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16})
			p := b.waiting("train", 8, "")
			annotate(p, wire.AvoidModelsAnnotation, "L600,S60")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.AvoidModelsAnnotation, "L600") },
	},
	IsolationNotStated: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			annotate(b.waiting("train", 8, ""), wire.IsolationAnnotation, "driver")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.IsolationAnnotation, "none") },
	},
	CapacityReserved: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("urgent", 16, "")
			p.Status.NominatedNodeName = "gcu-1"
			priority := int32(1000)
			p.Spec.Priority = &priority
			b.waiting("train", 8, "0/1 nodes are available: 1 insufficient GCU Memory in one gcu device.")
		},
		fixed: func(b *builder) { b.Pods[0].Status.NominatedNodeName = "" },
	},
	Ending: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.on("old", "gcu-1", 12, 0)
			at := metav1.NewTime(taken.Add(25 * time.Second))
			p.DeletionTimestamp = &at
			b.waiting("train", 8, insufficient)
		},
		fixed: func(b *builder) { b.Pods[0].DeletionTimestamp = nil },
	},
	HeldAsOther: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16}, func(in *accel.Inventory) {
				in.Shares[1].Health = accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + "enflame.com/gcu"}
			})
			b.on("old", "gcu-1", 12, 0)
			b.waiting("train", 8, insufficient)
			p := b.pod("whole", 0)
			p.Spec.NodeName, p.Status.Phase = "gcu-1", v1.PodRunning
			annotate(p, wire.HeldAnnotation, `{"enflame.com/gcu":["gcu-1-1"]}`)
		},
		fixed: func(b *builder) { b.Pods = b.Pods[1:] },
	},
	UnhealthyDevice: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16}, func(in *accel.Inventory) {
				in.Shares[1].Health = accel.Health{Unhealthy: true, Reason: "temperature 105 °C", Cause: "over-temperature"}
			})
			b.on("old", "gcu-1", 12, 0)
			b.waiting("train", 8, insufficient)
		},
		fixed: func(b *builder) { b.Pods = b.Pods[1:] },
	},
	NoDeviceFits: {
		make: func(b *builder) {
			b.node("gcu-2", []accel.Units{16, 20, 16, 20})
			b.on("a", "gcu-2", 8, 1)
			b.on("b", "gcu-2", 8, 3)
			b.on("c", "gcu-2", 12, 0)
			b.node("gcu-3", []accel.Units{20, 20, 20})
			ownedBy(b.on("eval-3", "gcu-3", 8, 0), "StatefulSet", "eval")
			b.on("eval-4", "gcu-3", 8, 1)
			b.on("eval-5", "gcu-3", 9, 2)
			b.node("gcu-6", []accel.Units{20}).Spec.Unschedulable = true
			b.node("gcu-7", []accel.Units{20}).Spec.Taints = dedicated
			ownedBy(b.waiting("train-0", 20, "0/4 nodes are available: 1 node(s) had untolerated taint {dedicated: infer}, "+
				"1 node(s) were unschedulable, 2 insufficient GCU Memory in one gcu device."), "StatefulSet", "train")
		},
		fixed: func(b *builder) {
			b.Pods[len(b.Pods)-1].Spec.Containers[0].Resources.Requests[memory] = resource.MustParse("8")
		},
	},
	InsufficientCapacity: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16})
			b.on("a", "gcu-1", 12, 0)
			b.on("b", "gcu-1", 14, 1)
			b.waiting("train", 8, insufficient)
		},
		fixed: func(b *builder) { b.Pods = b.Pods[1:] },
	},
	OldRelease: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16}, func(in *accel.Inventory) { in.Several = false })
			annotate(b.waiting("train", 8, ""), wire.CountAnnotation, "2")
		},
		fixed: func(b *builder) { delete(b.Pods[0].Annotations, wire.CountAnnotation) },
	},
	NotRegistered: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Status.Allocatable[memory] = resource.MustParse("0")
			b.waiting("train", 8, insufficient)
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Allocatable[memory] = resource.MustParse("16") },
	},
	InventoryBroken: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Annotations[wire.InventoryAnnotation] = "{}"
			b.waiting("train", 8, "0/1 nodes are available: 1 the inventory of the node is invalid.")
		},
		fixed: func(b *builder) { delete(b.Nodes[0].Annotations, wire.InventoryAnnotation) },
	},
	DaemonMissing: {
		make: func(b *builder) {
			delete(b.node("gcu-1", []accel.Units{16}).Annotations, wire.InventoryAnnotation)
			b.waiting("train", 8, "0/1 nodes are available: 1 the node offers no enflame.com/gcu-memory.")
		},
		fixed: func(b *builder) { b.Nodes[0].Labels, b.Nodes[0].Status.Allocatable = nil, nil },
	},
	NodeNotLabelled: {
		make: func(b *builder) {
			n := b.node("gcu-1", []accel.Units{16})
			n.Annotations, n.Labels = nil, map[string]string{"enflame.com/gcu.model": "S60"}
			delete(n.Status.Allocatable, memory)
			b.waiting("train", 8, insufficient)
		},
		fixed: func(b *builder) { b.Nodes[0].Labels = nil },
	},
	Disabled: {
		make: func(b *builder) {
			n := b.node("gcu-1", []accel.Units{16})
			n.Annotations, n.Labels[labelEnabled] = nil, "false"
			delete(n.Status.Allocatable, memory)
			b.waiting("train", 8, insufficient)
		},
		fixed: func(b *builder) { delete(b.Nodes[0].Labels, labelEnabled) },
	},
	CPUOrMemory: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Status.Allocatable[v1.ResourceCPU] = resource.MustParse("500m")
			b.waiting("train", 8, "0/1 nodes are available: 1 Insufficient cpu.")
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Allocatable[v1.ResourceCPU] = resource.MustParse("1") },
	},
	Ephemeral: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, "0/1 nodes are available: 1 Insufficient ephemeral-storage.")
			p.Spec.Containers[0].Resources.Requests[v1.ResourceEphemeralStorage] = resource.MustParse("101Gi")
		},
		fixed: func(b *builder) {
			b.Nodes[0].Status.Allocatable[v1.ResourceEphemeralStorage] = resource.MustParse("200Gi")
		},
	},
	Pods: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Status.Allocatable[v1.ResourcePods] = resource.MustParse("1")
			b.on("old", "gcu-1", 4, 0)
			b.waiting("train", 8, "0/1 nodes are available: 1 Too many pods.")
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Allocatable[v1.ResourcePods] = resource.MustParse("2") },
	},
	Ports: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.on("old", "gcu-1", 4, 0).Spec.Containers[0].Ports = []v1.ContainerPort{{HostPort: 8080}}
			p := b.waiting("train", 8, "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports.")
			p.Spec.Containers[0].Ports = []v1.ContainerPort{{HostPort: 8080}}
		},
		fixed: func(b *builder) { b.Pods[1].Spec.Containers[0].Ports[0].HostPort = 8081 },
	},
	Spread: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, "0/1 nodes are available: 1 node(s) didn't match pod topology spread constraints.")
			p.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{WhenUnsatisfiable: v1.DoNotSchedule}}
		},
		fixed: func(b *builder) { b.Pods[0].Status.Conditions[0].Message = "" },
	},
	PodAffinity: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Spec.Unschedulable = true
			b.on("old", "gcu-1", 12, 0)
			b.waiting("train", 8, "0/2 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules, "+
				"1 node(s) were unschedulable.")
		},
		fixed: func(b *builder) { b.Pods[1].Status.Conditions[0].Message = "" },
	},
	Volume: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, "0/1 nodes are available: persistentvolumeclaim \"data\" not found. not found.")
			p.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: v1.VolumeSource{
				PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
		},
		fixed: func(b *builder) { b.Pods[0].Status.Conditions[0].Message = "" },
	},
	Claim: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, "0/1 nodes are available: waiting for dynamic resource controller to create the "+
				"resourceclaim \"x\". no new claims to deallocate, preemption: 0/1 nodes are available: "+
				"1 Preemption is not helpful for scheduling.")
			p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "x"}}
		},
		fixed: func(b *builder) { b.Pods[0].Status.Conditions[0].Message = "" },
	},
	Selector: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.")
			p.Spec.NodeSelector = map[string]string{"zone": "b"}
			ownedBy(p, "ReplicaSet", "train-5f")
			p.Labels = map[string]string{"pod-template-hash": "5f"}
		},
		fixed: func(b *builder) { b.Nodes[0].Labels["zone"] = "b" },
	},
	Affinity: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.waiting("train", 8, "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.")
			p.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
				NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{
					{Key: "zone", Operator: v1.NodeSelectorOpIn, Values: []string{"b"}}}}}}}}
		},
		fixed: func(b *builder) { b.Nodes[0].Labels["zone"] = "b" },
	},
	Taint: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Spec.Taints = dedicated
			b.waiting("train", 8, "0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: infer}.")
		},
		fixed: func(b *builder) {
			b.Nodes[0].Spec.Taints = []v1.Taint{{Key: "dedicated", Value: "infer", Effect: v1.TaintEffectPreferNoSchedule}}
		},
	},
	Cordoned: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Spec.Unschedulable = true
			b.waiting("train", 8, "0/1 nodes are available: 1 node(s) were unschedulable.")
		},
		fixed: func(b *builder) { b.Nodes[0].Spec.Unschedulable = false },
	},
	NodeNotReady: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Status.Conditions[0].Status = v1.ConditionFalse
			b.waiting("train", 8, "0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/not-ready: }.")
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Conditions[0].Status = v1.ConditionTrue },
	},
	Stale: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Status.Conditions[0].Status = v1.ConditionUnknown
			b.waiting("train", 8, "0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }.")
		},
		fixed: func(b *builder) { b.Nodes[0].Status.Conditions[0].Status = v1.ConditionTrue },
	},
	PreemptNever: {}, LowPriority: {}, // beside another cause: TestBesideAnother
	Backoff: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.waiting("train", 8, insufficient)
		},
		fixed: func(b *builder) { b.Nodes[0].Spec.Unschedulable = true },
	},
	Unknown: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Spec.Unschedulable = true
			b.waiting("train", 8, "0/1 nodes are available: 1 node(s) are on the wrong side of the moon.")
		},
		fixed: func(b *builder) { b.Pods[0].Status.Conditions[0].Message = "" },
	},
}

func explainTrain(b *builder, o *Owner) Explanation {
	x := New(&b.Snapshot)
	if o != nil {
		return x.Owner(o)
	}
	p := b.Snapshot.Pod("team-a", "train")
	if p == nil {
		p = b.Snapshot.Pod("team-a", "train-0")
	}
	return x.Pod(p)
}

func TestGolden(t *testing.T) {
	for _, code := range Codes() {
		t.Run(string(code), func(t *testing.T) {
			c, ok := goldenCases[code]
			if !ok {
				t.Fatal("no case")
			}
			if c.make == nil {
				return
			}
			b := newBuilder(t)
			c.make(b)
			e := explainTrain(b, c.owner)
			hasCode := len(e.Causes) > 0 && e.Causes[0].Code == code
			if quoted(code) { // they stand beside what nodes say
				for _, cause := range e.Causes {
					hasCode = hasCode || cause.Code == code
				}
			}
			if !hasCode {
				t.Errorf("causes %+v, want %s first", e.Causes, code)
			}
			checkGolden(t, string(code), &e)
			if c.fixed == nil {
				return
			}
			c.fixed(b)
			for _, cause := range explainTrain(b, c.owner).Causes {
				if cause.Code == code {
					t.Errorf("still %s once it is fixed: %+v", code, cause)
				}
			}
		})
	}
}

func checkGolden(t *testing.T, name string, e *Explanation) {
	t.Helper()
	var out bytes.Buffer
	if err := Print(&out, e); err != nil {
		t.Fatal(err)
	}
	out.WriteString("\n")
	if err := PrintJSON(&out, []Explanation{*e}, false); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(file, out.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out.String()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
	if strings.Contains(out.String(), "%!") {
		t.Errorf("a format is wrong:\n%s", &out)
	}
}

// TestBesideAnother: priorities explain why the cause of nodes is not resolved by preemption.
func TestBesideAnother(t *testing.T) {
	for _, tt := range []struct {
		code     Code
		waiting  int32
		holder   int32
		policy   v1.PreemptionPolicy
		holdings int64
	}{
		{PreemptNever, 10, 0, v1.PreemptNever, 12},
		{LowPriority, 0, 10, v1.PreemptLowerPriority, 12},
	} {
		t.Run(string(tt.code), func(t *testing.T) {
			b := newBuilder(t)
			b.node("gcu-1", []accel.Units{16})
			b.on("old", "gcu-1", tt.holdings, 0).Spec.Priority = &tt.holder
			p := b.waiting("train", 8, insufficient)
			p.Spec.Priority, p.Spec.PreemptionPolicy = &tt.waiting, &tt.policy
			e := explainTrain(b, nil)
			if n := len(e.Causes); n != 2 || e.Causes[1].Code != tt.code {
				t.Errorf("causes %+v, want insufficientCapacity and %s", e.Causes, tt.code)
			}
			checkGolden(t, string(tt.code), &e)
			same := int32(0)
			b.Pods[0].Spec.Priority, b.Pods[1].Spec.Priority = &same, &same
			if e := explainTrain(b, nil); len(e.Causes) != 1 {
				t.Errorf("causes %+v of equal priorities, want one", e.Causes)
			}
		})
	}
}
