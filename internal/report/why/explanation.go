package why

import (
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// Code names a cause. Codes are stable.
type Code string

// The codes.
const (
	Suspended            Code = "suspended"
	Gated                Code = "gated"
	NotCreated           Code = "notCreated"
	ForeignScheduler     Code = "foreignScheduler"
	UnknownScheduler     Code = "unknownScheduler"
	ExtenderDown         Code = "extenderDown"
	ForeignName          Code = "foreignName"
	Misspelt             Code = "misspelt"
	NoSuchResource       Code = "noSuchResource"
	UnitMismatch         Code = "unitMismatch"
	NodeNotLabelled      Code = "nodeNotLabelled"
	Disabled             Code = "disabled"
	DaemonMissing        Code = "daemonMissing"
	OldRelease           Code = "oldRelease"
	InventoryBroken      Code = "inventoryBroken"
	NotRegistered        Code = "notRegistered"
	UnhealthyDevice      Code = "unhealthyDevice"
	HeldAsOther          Code = "heldAsOther"
	NoDeviceFits         Code = "noDeviceFits"
	InsufficientCapacity Code = "insufficientCapacity"
	LargerThanDevice     Code = "largerThanDevice"
	TooFewDevices        Code = "tooFewDevices"
	BelowContext         Code = "belowContext"
	NotDivisible         Code = "notDivisible"
	SelectionEmpty       Code = "selectionEmpty"
	IsolationNotStated   Code = "isolationNotStated"
	AnnotationWrong      Code = "annotationWrong"
	SeveralResources     Code = "severalResources"
	CPUOrMemory          Code = "cpuOrMemory"
	Ephemeral            Code = "ephemeral"
	Pods                 Code = "pods"
	Ports                Code = "ports"
	Taint                Code = "taint"
	Selector             Code = "selector"
	Affinity             Code = "affinity"
	Cordoned             Code = "cordoned"
	NodeNotReady         Code = "nodeNotReady"
	Stale                Code = "stale"
	CapacityReserved     Code = "capacityReserved"
	Ending               Code = "ending"
	Backoff              Code = "backoff"
	LowPriority          Code = "lowPriority"
	PreemptNever         Code = "preemptNever"
	Spread               Code = "spread"
	PodAffinity          Code = "podAffinity"
	Volume               Code = "volume"
	Claim                Code = "claim"
	RejectedByKubelet    Code = "rejectedByKubelet"
	Topology             Code = "topology"
	StartingUp           Code = "startingUp"
	Unknown              Code = "unknown"
	PoolRejected         Code = "poolRejected"
	PoolQuota            Code = "poolQuota"
	SecretMissing        Code = "secretMissing"
	VersionUnknown       Code = "versionUnknown"
	ForeignBound         Code = "foreignBound"
	GrantInvalid         Code = "grantInvalid"
	SchedulerNotWired    Code = "schedulerNotWired"
	KeyMissing           Code = "keyMissing"
	DeviceLost           Code = "deviceLost"
	Budget               Code = "budget"
	StartupTaint         Code = "startupTaint"
	PolicyUnknown        Code = "policyUnknown"
	SelectionMistake     Code = "selectionMistake"
	AtMaximum            Code = "atMaximum"
	BackingOff           Code = "backingOff"
	DriverMissing        Code = "driverMissing"
	ListTooLong          Code = "listTooLong"
	NotAdmitted          Code = "notAdmitted"
	GangIncomplete       Code = "gangIncomplete"
)

// Codes returns all codes, in the order in which causes are listed: what hinders a pod
// wherever it would go, then what devices lack, then what keeps it off nodes.
func Codes() []Code { return slices.Clone(codes) }

var codes = []Code{
	Suspended, NotAdmitted, Gated, PoolQuota, VersionUnknown, PoolRejected, NotCreated, ForeignBound, GrantInvalid, RejectedByKubelet,
	Topology, DeviceLost, SecretMissing, StartingUp, GangIncomplete, ForeignScheduler, UnknownScheduler, KeyMissing, ExtenderDown,
	SchedulerNotWired, SeveralResources, PolicyUnknown, AnnotationWrong, NotDivisible, ForeignName, Misspelt, NoSuchResource,
	UnitMismatch, SelectionMistake, LargerThanDevice, TooFewDevices, BelowContext, SelectionEmpty, IsolationNotStated, CapacityReserved,
	Ending, HeldAsOther, UnhealthyDevice, NoDeviceFits, InsufficientCapacity, OldRelease, ListTooLong, DriverMissing, NotRegistered,
	InventoryBroken, DaemonMissing, NodeNotLabelled, Disabled, CPUOrMemory, Ephemeral, Pods, Ports, Spread, PodAffinity, Volume, Claim,
	Selector, Affinity, Taint, StartupTaint, Cordoned, NodeNotReady, Stale, PreemptNever, LowPriority, Budget, AtMaximum, BackingOff,
	Backoff, Unknown,
}

func (c Code) rank() int { return slices.Index(codes, c) }

// State is what a pod does.
type State string

// The states.
const (
	StateWaits      State = "waits"
	StateGated      State = "gated"
	StateNotCreated State = "notCreated"
	StateStarting   State = "starting"
	StateFailed     State = "failed"
	StateRuns       State = "runs"
)

// Explanation says why one pod waits.
type Explanation struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	// Pod is namespace and name; the name is empty where no pod was made.
	Pod   Object `json:"pod"`
	Owner string `json:"owner,omitempty"`
	State State  `json:"state"`
	// Since is when the state began, Taken when the cluster was read.
	Since   time.Time `json:"since,omitzero"`
	Taken   time.Time `json:"taken"`
	Request *Request  `json:"request,omitempty"`
	// Causes has the one that matters most first.
	Causes []Cause `json:"causes"`
	// Nodes are those that offer the resource, or all where the pod requests none.
	Nodes   []Node  `json:"nodes,omitempty"`
	Waiting Waiting `json:"waiting"`
	// Changes has the cheapest first.
	Changes    []Change    `json:"changes"`
	Autoscaler *Autoscaler `json:"autoscaler,omitempty"`
	Notes      []string    `json:"notes,omitempty"`
	// Partial is true where rights or the dump lack what is needed to judge nodes.
	Partial bool `json:"partial,omitempty"`
}

// Object is a namespace and a name.
type Object struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// Request is what the pod requests of an extended resource.
type Request struct {
	Resource accel.Resource `json:"resource"`
	Units    accel.Units    `json:"units"`
	// Bytes is 0 where units are not memory, or their size differs between nodes.
	Bytes   uint64 `json:"bytes,omitempty"`
	Devices int    `json:"devices"`
}

// Cause is one reason why the pod waits.
type Cause struct {
	Code Code `json:"code"`
	// Object is what the cause is about: "Pod team-a/train-0", "3 nodes".
	Object string `json:"object,omitempty"`
	// Nodes are the nodes that it is about.
	Nodes []string `json:"nodes,omitempty"`
	// Detail is a clause without a full stop.
	Detail string `json:"detail"`
	// Evidence is quoted from API objects.
	Evidence []string `json:"evidence,omitempty"`
}

// Node says what one node lacks.
type Node struct {
	Name string `json:"name"`
	// Code is the first thing that is missing; empty for a node that fits.
	Code Code `json:"code,omitempty"`
	// LargestFree is the most free units of one device, Sum what kube-scheduler counts
	// as free.
	LargestFree accel.Units `json:"largestFree"`
	Sum         accel.Units `json:"sum"`
	Missing     string      `json:"missing,omitempty"`
}

// Waiting says whether waiting helps.
type Waiting struct {
	Helps bool      `json:"helps"`
	Until time.Time `json:"until,omitzero"`
	Why   string    `json:"why"`
}

// ChangeKind is a kind of changes.
type ChangeKind string

// The kinds; their order is their cost.
const (
	ChangeWait       ChangeKind = "wait"
	ChangeNode       ChangeKind = "node"
	ChangeAnnotation ChangeKind = "annotation"
	ChangeRequest    ChangeKind = "request"
	ChangeEnd        ChangeKind = "endPods"
	ChangeMoreNodes  ChangeKind = "moreNodes"
)

var changeKinds = []ChangeKind{ChangeWait, ChangeNode, ChangeAnnotation, ChangeRequest, ChangeEnd, ChangeMoreNodes}

// Change is something that would admit the pod.
type Change struct {
	Kind ChangeKind `json:"kind"`
	// Cost orders changes, lower is cheaper.
	Cost int    `json:"cost"`
	Text string `json:"text"`
	// By is "administrator" for a change of the cluster.
	By   string `json:"by,omitempty"`
	Node string `json:"node,omitempty"`
	// Devices are the indexes of the devices on Node that the pod would get.
	Devices []string `json:"devices,omitempty"`
	// Commands carry the change out, each a line for a shell; none where a person
	// decides, or may not.
	Commands []string `json:"commands,omitempty"`
	// Patch has the commands that are patches of objects, in the same order. A pod that is
	// created again is none.
	Patch []Patch `json:"patch,omitempty"`
	// Verified is true where the change was applied to a copy, and the pod admitted.
	Verified bool `json:"verified"`

	// unsure is true where it also does what the copy does not show.
	unsure bool
	// until is when the pods of a ChangeWait are gone, at the latest; stuck is what is wrong
	// with one that should be gone, "" for none.
	until time.Time
	stuck string
}

// Autoscaler says what a cluster autoscaler makes of the pod.
type Autoscaler struct {
	Sees bool   `json:"sees"`
	Why  string `json:"why"`
}
