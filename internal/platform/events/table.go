package events

import corev1 "k8s.io/api/core/v1"

// Components that make events, as an event's source names them.
const (
	Node    = "divvy-node"
	Extend  = "divvy-extender"
	Webhook = "divvy-webhook"
	Pool    = "divvy-pool"
	// Schedconf wires kube-scheduler.
	Schedconf = "divvy-schedconf"
)

// Kind is an event that a program may make.
type Kind struct {
	// Reason is the one word that people and scripts look for.
	Reason string
	// Type is Normal or Warning.
	Type string
	// On are the kinds of objects that it is made on.
	On string
	// By is the component that makes it.
	By string
	// Meaning says when it is made and what to do, for the reference.
	Meaning string
}

// all is filled by define, in the order of the table.
var all []Kind

// All returns the table.
func All() []Kind { return append([]Kind(nil), all...) }

func define(k Kind) Kind {
	all = append(all, k)
	return k
}

// Events of the node's daemon.
var (
	DeviceUnhealthy = define(Kind{
		"DeviceUnhealthy", corev1.EventTypeWarning, "Node, and Pods that hold the device", Node,
		"No new pods are placed on a device: its units are withdrawn. The message gives the reason. Running pods continue; their owner " +
			"must check whether they still work. [health.md](../health.md) lists causes and remedies.",
	})
	DeviceQuarantined = define(Kind{
		"DeviceQuarantined", corev1.EventTypeWarning, "Node", Node,
		"No new pods are placed on a device until an administrator releases it, because it had an error that requires a reset or a " +
			"replacement, or was quarantined by hand. The message gives the reason, the time and the command. See " +
			"[quarantine.md](../quarantine.md).",
	})
	DeviceReleased = define(Kind{
		"DeviceReleased", corev1.EventTypeNormal, "Node", Node,
		"An administrator released a device from quarantine. New pods are placed on it once it is healthy; if it still has the error, it " +
			"is quarantined again.",
	})
	DeviceRequestRejected = define(Kind{
		"DeviceRequestRejected", corev1.EventTypeWarning, "Node", Node,
		"A request to quarantine or release a device was rejected. The message gives the reason; `kubectl divvy device` prints the same.",
	})
	DeviceRecovered = define(Kind{
		"DeviceRecovered", corev1.EventTypeNormal, "Node", Node,
		"A device recovered, and new pods can be placed on it again.",
	})
	DeviceNotOffered = define(Kind{
		"DeviceNotOffered", corev1.EventTypeWarning, "Node", Node,
		"A device works and is not offered as it is set up, such as a MIG device that is a part of its GPU instance. The " +
			"message gives the remedy.",
	})
	PartitionsChanged = define(Kind{
		"PartitionsChanged", corev1.EventTypeNormal, "Node", Node,
		"The profiles of the node's MIG devices or DRS instances changed, and with them the resources that it offers.",
	})
	ResourceNotOffered = define(Kind{
		"ResourceNotOffered", corev1.EventTypeWarning, "Node", Node,
		"A resource cannot be offered as configured. The message gives the reason: a missing library, a list too long for kubelet, pods " +
			"that hold units of another size, MIG devices that differ with migStrategy `single`, or a state file or CDI specification " +
			"that cannot be written. [node.md](../node.md) " +
			"describes what is withheld meanwhile.",
	})
	ResourceAbsent = define(Kind{
		"ResourceAbsent", corev1.EventTypeNormal, "Node", Node,
		"The node has no device for a configured resource. No action is needed if one configuration serves nodes of all kinds.",
	})
	AllocationRefused = define(Kind{
		"AllocationRefused", corev1.EventTypeWarning, "Node", Node,
		"An allocation for a container was rejected. The message gives the reason. The pod has failed, with kubelet's own event " +
			"`UnexpectedAdmissionError` and the same text; its controller creates a new one.",
	})
	ClaimNotPrepared = define(Kind{
		"ClaimNotPrepared", corev1.EventTypeWarning, "Pod", Node,
		"The devices of the pod's ResourceClaims cannot be prepared. The message gives the reason: the device and what holds it, or what " +
			"is wrong with the claims and what would be right. Kubelet repeats its request every 60 to 90 seconds, with its own event " +
			"`FailedPrepareDynamicResources`.",
	})
	ClaimMisused = define(Kind{
		"ClaimMisused", corev1.EventTypeWarning, "Pod", Node,
		"A container started with other devices than those of its ResourceClaims, because kubelet does not ask for claims that are " +
			"prepared for another pod. The message gives the other container and the remedy: the same requests in both, or claims of " +
			"their own.",
	})
	GrantCorrected = define(Kind{
		"GrantCorrected", corev1.EventTypeNormal, "Pod", Node,
		"Kubelet allocated another device than the scheduler had planned. The annotations of the pod were corrected; no action is needed.",
	})
	GrantMissing = define(Kind{
		"GrantMissing", corev1.EventTypeWarning, "Pod", Node,
		"The pod holds units without a planned allocation, because it bypassed the extender: its node was set by hand, or kube-scheduler " +
			"does not call the extender (run `kubectl divvy doctor`). The node has recorded its allocation.",
	})
	GrantInvalid = define(Kind{
		"GrantInvalid", corev1.EventTypeWarning, "Pod", Node,
		"The pod's planned allocation was not written by Divvy for this pod, this node and this resource: it was copied, edited, or " +
			"signed with a key that is no longer known. The node has replaced it with the actual allocation.",
	})
	GrantNotWritten = define(Kind{
		"GrantNotWritten", corev1.EventTypeWarning, "Pod", Node,
		"The annotations with the allocation of the pod were rejected. The message gives the reason: the annotations would be too large, " +
			"or an admission policy or webhook of the cluster forbids the change. The pod runs, and the node retries with a backoff of " +
			"up to one minute. Until then, a pod that the extender did not place is counted on its node but on no device.",
	})
	DeviceMemoryOverused = define(Kind{
		"DeviceMemoryOverused", corev1.EventTypeWarning, "Pod", Node,
		"A container uses more memory of a device than its allocation. The message gives both amounts. The pod can be evicted if the " +
			"administrator has enabled that: request what it needs, see [usage.md](../usage.md#overuse).",
	})
	DeviceMemoryOveruseEnded = define(Kind{
		"DeviceMemoryOveruseEnded", corev1.EventTypeNormal, "Pod", Node,
		"A container that used more memory of a device than its allocation uses no more than that now.",
	})
	IsolationLost = define(Kind{
		"IsolationLost", corev1.EventTypeWarning, "Node", Node,
		"The isolation that the configuration says for a device, `driver` or `cooperative`, does not hold. The message gives the reason " +
			"and what to do. The device states no isolation meanwhile, so pods that require it are not placed on it.",
	})
	IsolationRepaired = define(Kind{
		"IsolationRepaired", corev1.EventTypeWarning, "Pod", Node,
		"The memory limit of a container was missing or differed from its allocation, and was set again. The container may hold " +
			"more than its allocation; its device states no isolation until the container has ended.",
	})
	ConfigurationReloaded = define(Kind{
		"ConfigurationReloaded", corev1.EventTypeNormal, "Node", Node,
		"A new configuration is in use.",
	})
	ConfigurationRejected = define(Kind{
		"ConfigurationRejected", corev1.EventTypeWarning, "Node", Node,
		"A new configuration is invalid. The message lists all errors; the previous configuration stays in use.",
	})
)

// Events of the extender.
var (
	NeverFits = define(Kind{
		"NeverFits", corev1.EventTypeWarning, "Pod", Extend,
		"No candidate node has a device as large as the pod's request, so neither waiting nor preemption helps. Request less: all " +
			"containers of a pod share one device. The condition `divvy.dev/Waits` of the pod then has the reason `LargerThanDevice`.",
	})
	IsolationNotStated = define(Kind{
		"IsolationNotStated", corev1.EventTypeWarning, "Pod", Extend,
		"No candidate node has a device with the isolation that the pod requires by `divvy.dev/isolation`. The message says which nodes " +
			"state what. The pod stays pending and is placed once a node states the tier: `kubectl divvy doctor` says why one does " +
			"not. See [isolation.md](../isolation.md).",
	})
	NoDeviceFits = define(Kind{
		"NoDeviceFits", corev1.EventTypeWarning, "Pod", Extend,
		"The pod waits because no device has as much free as it requests, although the sum over the devices of a node is enough. Said " +
			"once, and in the condition `divvy.dev/Waits` of the pod. `kubectl divvy why` lists what would admit it: see " +
			"[why.md](../why.md).",
	})
	HeldAsOther = define(Kind{
		"HeldAsOther", corev1.EventTypeWarning, "Pod", Extend,
		"The pod waits because devices that have enough are allocated as another resource, whole or as time slices, and kubelet does not " +
			"offer their memory meanwhile. Said once, and in the condition `divvy.dev/Waits` of the pod. `kubectl divvy why` names the " +
			"pods that hold them: see [why.md](../why.md).",
	})
	SeveralResources = define(Kind{
		"SeveralResources", corev1.EventTypeWarning, "Pod", Extend,
		"The pod requests several shared resources of mode memory, so it fits on no node. Split it into several pods.",
	})
	MemoryOveruseEvicted = define(Kind{
		"MemoryOveruseEvicted", corev1.EventTypeWarning, "Pod", Extend,
		"The pod used more memory of a device than its allocation for longer than `extender.eviction.gracePeriod`, and is evicted. The " +
			"message gives used and allocated memory, the device and the beginning. Request more memory, or limit what the program uses. " +
			"See [usage.md](../usage.md#eviction).",
	})
	MemoryOveruseNotEvicted = define(Kind{
		"MemoryOveruseNotEvicted", corev1.EventTypeWarning, "Pod", Extend,
		"The pod would be evicted because of memory overuse, but is not. The message gives the reason: a PodDisruptionBudget or several, " +
			"the limit of evictions per node and hour, an exempt namespace, a static pod or a critical priority. See " +
			"[usage.md](../usage.md#eviction).",
	})
)

// RequestRefused is the event of annotations that cannot be followed.
var RequestRefused = define(Kind{
	"RequestRefused", corev1.EventTypeWarning, "Pod", Extend,
	"The annotations with which the pod selects devices are invalid. The message gives the key and valid values: see " +
		"[devices.md](../devices.md). The pod fits on no node; the annotations of a pending pod can be changed.",
})

// Events of the webhooks of the remote pool.
var (
	CatalogReloaded = define(Kind{
		"CatalogReloaded", corev1.EventTypeNormal, "the webhook's own Pod", Webhook,
		"A new catalog of clients is in use.",
	})
	CatalogRejected = define(Kind{
		"CatalogRejected", corev1.EventTypeWarning, "the webhook's own Pod", Webhook,
		"A new catalog is invalid. The message lists its errors; the previous catalog stays in use.",
	})
	PoolCredentialsMissing = define(Kind{
		"PoolCredentialsMissing", corev1.EventTypeWarning, "Pod", Pool,
		"The pod waits for the pool's credentials, which were not imported yet. Import them with `kubectl divvy pool import`.",
	})
	PoolNotAllowed = define(Kind{
		"PoolNotAllowed", corev1.EventTypeWarning, "Pod", Pool,
		"The pod's namespace is not allowed to use the pool. An administrator can label it, see " +
			"[pool-credentials.md](../pool-credentials.md).",
	})
	PoolCredentialsFailed = define(Kind{
		"PoolCredentialsFailed", corev1.EventTypeWarning, "Pod", Pool,
		"The pool's credentials could not be copied into the pod's namespace. The message gives the reason; the copy is retried.",
	})
)

// Events of what wires kube-scheduler to the extender, once for each change.
var (
	SchedulerWired = define(Kind{
		"SchedulerWired", corev1.EventTypeNormal, "Node", Schedconf,
		"kube-scheduler on this control-plane node calls the extender, or divvy-scheduler runs in its place, and is healthy.",
	})
	SchedulerRolledBack = define(Kind{
		"SchedulerRolledBack", corev1.EventTypeWarning, "Node", Schedconf,
		"kube-scheduler was not healthy with a changed configuration, which was rolled back. The message gives the reason; " +
			"[scheduler.md](../scheduler.md) describes what to do.",
	})
	SchedulerUnwired = define(Kind{
		"SchedulerUnwired", corev1.EventTypeNormal, "Node", Schedconf,
		"kube-scheduler on this control-plane node runs with its original configuration.",
	})
)
