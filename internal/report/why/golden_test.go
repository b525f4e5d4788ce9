package why

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/pool"
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
			b.failedCreate("Error creating: pods \"web-7d9-x\" is forbidden: exceeded quota: gcu, requested: " +
				"requests.enflame.com/gcu-memory=8, used: requests.enflame.com/gcu-memory=16, " +
				"limited: requests.enflame.com/gcu-memory=20")
		},
		owner: webOwner,
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
			annotate(b.waiting("train", 8, ""), wire.UseModelsAnnotation, "S60,,L600")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.UseModelsAnnotation, "S60,L600") },
	},
	PolicyUnknown: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			annotate(b.waiting("train", 8, ""), wire.PolicyAnnotation, "tightest")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.PolicyAnnotation, "spread") },
	},
	SelectionMistake: {
		make: func(b *builder) {
			b.node("gpu-1", []accel.Units{40, 40}, func(in *accel.Inventory) {
				in.Shares[0].Model, in.Shares[1].Model = "A100-SXM4-40GB", "A100-SXM4-40GB"
			})
			annotate(b.waiting("train", 8, "0/1 nodes are available: 1 no device that divvy.dev/use-models allows."),
				wire.UseModelsAnnotation, "A100-SMX4-40GB")
		},
		fixed: func(b *builder) { annotate(&b.Pods[0], wire.UseModelsAnnotation, "A100-SXM4-40GB") },
	},
	NotAdmitted: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.workload("job-train-1", "Job", "train", metav1.Condition{Type: "QuotaReserved", Status: metav1.ConditionFalse,
				Reason: "Pending",
				Message: "couldn't assign flavors to pod set main: insufficient unused quota for enflame.com/gcu-memory in flavor s60, " +
					"24 more needed"})
			b.Queues.Place = func(*Workload) (Place, error) { return Place{InClusterQueue: 3, InLocalQueue: 1}, nil }
		},
		owner: &Owner{Kind: "job", Namespace: "team-a", Name: "train", Suspended: true, Wanted: 1},
		fixed: func(b *builder) { b.Queues.Workloads[0].OwnerReferences[0].Name = "other" },
	},
	GangIncomplete: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.group(GroupPlugins, `{"minMember": 3}`)
			for _, name := range []string{"train-b", "train"} {
				b.waiting(name, 4, "0/1 nodes are available: 1 pre-filter pod train cannot find enough sibling pods.").Labels =
					map[string]string{labelPodGroup: "train"}
			}
		},
		fixed: func(b *builder) { b.waiting("train-c", 4, "").Labels = b.Pods[0].Labels },
	},
	PoolQuota: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.failedCreate("Error creating: pods \"web-7d9-x\" is forbidden: exceeded quota: pool, requested: " +
				"requests.bitfusion.io/gpu=100, used: requests.bitfusion.io/gpu=150, limited: requests.bitfusion.io/gpu=200")
		},
		owner: webOwner,
		fixed: func(b *builder) {
			b.Events[0].Message = strings.ReplaceAll(b.Events[0].Message, "bitfusion.io/gpu", "cpu")
		},
	},
	VersionUnknown: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.failedCreate("Error creating: admission webhook \"bwkimua.bitfusion.io\" denied the request: " + b.denied("999", "ubuntu18"))
		},
		owner: webOwner,
		fixed: func(b *builder) { b.Events[0].Message = "Error creating: another" },
	},
	PoolRejected: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.failedCreate("Error creating: admission webhook \"bwkival.bitfusion.io\" denied the request: namespace \"team-a\" is not " +
				"allowed to use the pool, so its credentials (bitfusion-client-secret-ca.crt) are not copied there; an administrator can " +
				"allow it with: kubectl label namespace team-a divvy.dev/pool=allowed")
		},
		owner: webOwner,
		fixed: func(b *builder) {
			b.Events[0].Message = strings.ReplaceAll(b.Events[0].Message, "bitfusion.io", "example.com")
		},
	},
	SecretMissing: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			p := b.on("train", "gcu-1", 0)
			p.Status.Phase, p.Labels = v1.PodPending, map[string]string{pool.ConvertedLabel: "true"}
			b.about(p, "PoolCredentialsMissing",
				"Secret kube-system/bitfusion-client-secret-ca.crt does not exist, so it cannot be copied "+
					"to this namespace; create it from the pool's token with: kubectl divvy pool import TOKEN.tar -n kube-system")
		},
		fixed: func(b *builder) { b.Events = nil },
	},
	ForeignBound: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.on("old", "gcu-1", 12, 0)
			for _, name := range []string{"train-a", "train-b", "train"} {
				p := b.on(name, "gcu-1", 8)
				p.Spec.SchedulerName = "volcano"
				p.Status.Phase, p.Status.Reason = v1.PodFailed, "UnexpectedAdmissionError"
				p.Status.Message = "Pod was rejected: Allocate failed due to no device has 8 units free, which is unexpected"
				p.Labels = map[string]string{"pod-template-hash": "5f"}
				ownedBy(p, "ReplicaSet", "train-5f")
			}
		},
		fixed: func(b *builder) {
			granted := b.on("other", "gcu-1", 8, 0).Annotations
			b.Snapshot.Pod("team-a", "train").Annotations = granted
		},
	},
	GrantInvalid: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.node("gcu-2", []accel.Units{16})
			p := b.on("train", "gcu-1", 8, 0)
			p.Spec.NodeName = "gcu-2"
			p.Status.Phase, p.Status.Reason = v1.PodFailed, "UnexpectedAdmissionError"
			p.Status.Message = "Pod was rejected: Allocate failed due to the planned allocation is for another node, which is unexpected"
		},
		fixed: func(b *builder) { b.Pods[0].Spec.NodeName = "gcu-1" },
	},
	DeviceLost: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16}, func(in *accel.Inventory) {
				in.Shares[0].Health = accel.Health{Unhealthy: true, Reason: "temperature 105 °C", Cause: "over-temperature"}
			})
			p := b.on("train", "gcu-1", 8, 0)
			b.about(p, "DeviceUnhealthy", "enflame device 0 (gcu-1-0), which the pod holds, is unhealthy: temperature 105 °C")
		},
		fixed: func(b *builder) {
			g := b.on("other", "gcu-1", 8, 1)
			b.Pods[0].Annotations = g.Annotations
		},
	},
	KeyMissing: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16})
			b.waiting("train", 8, "Post \"https://127.0.0.1:32765/gcushare-scheduler/filter\": dial tcp 127.0.0.1:32765: "+
				"connect: connection refused")
			p := b.pod("divvy-extender-x", 0)
			p.Namespace, p.Labels = "divvy-system", map[string]string{labelName: nameExtender}
			p.Status.ContainerStatuses = []v1.ContainerStatus{{State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{
				Reason: "CreateContainerConfigError", Message: "secret \"divvy-grant-key\" not found"}}}}
		},
		fixed: func(b *builder) { b.Pods[1].Status.ContainerStatuses = nil },
	},
	StartupTaint: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Spec.Taints = []v1.Taint{{
				Key: "startup-taint.cluster-autoscaler.kubernetes.io/divvy", Effect: v1.TaintEffectNoSchedule}}
			b.waiting("train", 8, "0/1 nodes are available: 1 node(s) had untolerated taint(s).")
		},
		fixed: func(b *builder) { b.Nodes[0].Spec.Taints[0].Key = "example.com/divvy" },
	},
	DriverMissing: {
		make: func(b *builder) {
			delete(b.node("gcu-1", []accel.Units{16}).Annotations, wire.InventoryAnnotation)
			b.waiting("train", 8, "0/1 nodes are available: 1 the node offers no enflame.com/gcu-memory.")
			b.ofNode("gcu-1", "enflame.com/gcu-memory: libefml.so not found; looked in /usr/lib for libefml.so")
		},
		fixed: func(b *builder) { b.Events = nil },
	},
	ListTooLong: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16}).Status.Allocatable[memory] = resource.MustParse("0")
			b.waiting("train", 8, insufficient)
			b.ofNode("gcu-1", "enflame.com/gcu-memory: the list of 400000 units takes 6400000 bytes and kubelet accepts 4194304 at most; "+
				"choose a larger memoryUnit or fewer replicas")
		},
		fixed: func(b *builder) { b.Events = nil },
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
	BelowContext: {
		make: func(b *builder) {
			b.node("gcu-1", []accel.Units{16, 16}, func(in *accel.Inventory) { in.Least = 3 })
			b.waiting("train", 2, "0/1 nodes are available: 1 "+accel.WhyTooSmall(memory)+".")
		},
		fixed: func(b *builder) {
			b.Pods[0].Spec.Containers[0].Resources.Requests[memory] = resource.MustParse("3")
		},
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
	// beside another cause: TestBesideAnother
	PreemptNever: {}, LowPriority: {}, Budget: {}, AtMaximum: {}, BackingOff: {}, SchedulerNotWired: {},
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

var webOwner = &Owner{Kind: "deployment", Namespace: "team-a", Name: "web", Wanted: 3}

// failedCreate adds the event of a controller that could not create pods.
func (b *builder) failedCreate(message string) {
	b.Events = append(b.Events, v1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a"}, Reason: "FailedCreate",
		InvolvedObject: v1.ObjectReference{Kind: "ReplicaSet", Name: "web-7d9"}, Message: message})
}

// about adds an event about a pod, ofNode one of divvy-node about its node.
func (b *builder) about(p *v1.Pod, reason, message string) {
	b.Events = append(b.Events, v1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace}, Type: v1.EventTypeWarning, Reason: reason,
		InvolvedObject: v1.ObjectReference{Kind: "Pod", Name: p.Name, UID: p.UID}, Message: message})
}

func (b *builder) ofNode(node, message string) {
	b.Events = append(b.Events, v1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}, Reason: "ResourceNotOffered",
		InvolvedObject: v1.ObjectReference{Kind: "Node", Name: node}, Message: message})
}

// workload adds a Workload of Kueue of a controller or pod.
func (b *builder) workload(name, kind, owner string, conditions ...metav1.Condition) *Workload {
	w := Workload{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, CreationTimestamp: metav1.NewTime(taken.Add(-time.Hour))}}
	version := "v1"
	if kind == "Job" {
		version = "batch/v1"
	}
	w.OwnerReferences = []metav1.OwnerReference{{APIVersion: version, Kind: kind, Name: owner}}
	w.Spec.QueueName, w.Status.Conditions = "team-a", conditions
	b.Queues.Workloads = append(b.Queues.Workloads, w)
	return &b.Queues.Workloads[len(b.Queues.Workloads)-1]
}

// group adds a PodGroup named train, as an API server has it.
func (b *builder) group(group, spec string) {
	var o unstructured.Unstructured
	if err := o.UnmarshalJSON([]byte(`{"apiVersion":"` + group +
		`/v1","kind":"PodGroup","metadata":{"namespace":"team-a","name":"train"},` +
		`"spec":` + spec + `}`)); err != nil {
		b.tb.Fatal(err)
	}
	b.Add(&o)
}

// denied is what the pool's webhook says of a version of the client.
func (b *builder) denied(version, os string) string {
	_, err := pool.DefaultCatalog().Find(version, os)
	if err == nil {
		b.tb.Fatalf("the catalog has client %s for %s", version, os)
	}
	return err.Error()
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

// TestBesideAnother: what stands beside the cause of nodes: why preemption and the autoscaler do
// not resolve it, or what is behind it.
func TestBesideAnother(t *testing.T) {
	priority := func(p *v1.Pod, n int32) { p.Spec.Priority = &n }
	for code, tt := range map[Code]struct{ make, fixed func(b *builder) }{
		PreemptNever: {
			func(b *builder) {
				b.full()
				priority(&b.Pods[1], 10)
				never := v1.PreemptNever
				b.Pods[1].Spec.PreemptionPolicy = &never
			},
			func(b *builder) { priority(&b.Pods[0], 10) },
		},
		LowPriority: {
			func(b *builder) { b.full(); priority(&b.Pods[0], 10) },
			func(b *builder) { priority(&b.Pods[0], 0) },
		},
		Budget: {
			func(b *builder) {
				b.full()
				priority(&b.Pods[1], 10)
				b.Pods[0].Labels = map[string]string{"app": "old"}
				b.Budgets = []policyv1.PodDisruptionBudget{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "keep"},
					Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: b.Pods[0].Labels}}}}
			},
			func(b *builder) { b.Budgets[0].Status.DisruptionsAllowed = 1 },
		},
		AtMaximum: {
			func(b *builder) {
				b.full()
				b.about(&b.Pods[1], "NotTriggerScaleUp", "pod didn't trigger scale-up: 1 max node group size reached")
			},
			func(b *builder) { b.Events[0].Message = "pod didn't trigger scale-up: 1 Insufficient cpu" },
		},
		BackingOff: {
			func(b *builder) {
				b.full()
				b.about(&b.Pods[1], "NotTriggerScaleUp", "pod didn't trigger scale-up: 1 in backoff after failed scale-up")
			},
			func(b *builder) { b.Events = nil },
		},
		SchedulerNotWired: {
			func(b *builder) {
				goldenCases[ForeignBound].make(b)
				for name, namespace := range map[string]string{"kube-scheduler-cp": "kube-system", "divvy-schedconf-x": "divvy-system"} {
					p := b.pod(name, 0)
					p.Namespace, p.Labels = namespace, map[string]string{"component": "kube-scheduler"}
					if namespace == "divvy-system" {
						p.Labels = map[string]string{labelName: nameSchedconf}
					}
					p.Status.Phase = v1.PodRunning
				}
			},
			func(b *builder) { annotate(b.Snapshot.Pod("kube-system", "kube-scheduler-cp"), annotationWired, "x") },
		},
	} {
		t.Run(string(code), func(t *testing.T) {
			b := newBuilder(t)
			tt.make(b)
			e := explainTrain(b, nil)
			if n := len(e.Causes); n != 2 || e.Causes[1].Code != code {
				t.Errorf("causes %+v, want two, the second %s", e.Causes, code)
			}
			checkGolden(t, string(code), &e)
			tt.fixed(b)
			if e := explainTrain(b, nil); len(e.Causes) != 1 {
				t.Errorf("causes %+v once it is fixed, want one", e.Causes)
			}
		})
	}
}

// full adds a node on which pod train does not fit because of pod old.
func (b *builder) full() {
	b.node("gcu-1", []accel.Units{16})
	b.on("old", "gcu-1", 12, 0)
	b.waiting("train", 8, insufficient)
}

// TestTheKeyOfADedicatedScheduler: its pods need the key as the extender's do.
func TestTheKeyOfADedicatedScheduler(t *testing.T) {
	b := newBuilder(t)
	b.node("gcu-1", []accel.Units{16})
	b.waiting("train", 8, "Post \"http://127.0.0.1:32766/gcushare-scheduler/filter\": dial tcp 127.0.0.1:32766: "+
		"connect: connection refused")
	p := b.pod("divvy-scheduler-x", 0)
	p.Namespace, p.Labels = "divvy-system", map[string]string{labelName: nameScheduler}
	p.Status.ContainerStatuses = []v1.ContainerStatus{{State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{
		Reason: "CreateContainerConfigError", Message: "secret \"divvy-grant-key\" not found"}}}}
	e := explainTrain(b, nil)
	if !slices.ContainsFunc(e.Causes, func(c Cause) bool { return c.Code == KeyMissing && strings.Contains(c.Object, p.Name) }) {
		t.Errorf("the causes are %+v", e.Causes)
	}
}
