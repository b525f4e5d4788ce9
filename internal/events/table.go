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
		"A device takes no new pods: its units are withdrawn, with the reason. Running pods go on; whether they still work is for their owner to see. [health.md](../health.md) lists causes and remedies.",
	})
	DeviceQuarantined = define(Kind{
		"DeviceQuarantined", corev1.EventTypeWarning, "Node", Node,
		"A device takes no new pods until an administrator releases it, with the reason, since when, and the command: it had an error after which it must be reset or replaced, or was put into quarantine by hand. See [quarantine.md](../quarantine.md).",
	})
	DeviceReleased = define(Kind{
		"DeviceReleased", corev1.EventTypeNormal, "Node", Node,
		"An administrator released a device from quarantine. It takes pods once it is well; if it still has the error, it is put into quarantine again.",
	})
	DeviceRequestRejected = define(Kind{
		"DeviceRequestRejected", corev1.EventTypeWarning, "Node", Node,
		"A request to release a device or to put it into quarantine cannot be carried out, with the reason; `kubectl divvy device` prints the same.",
	})
	DeviceRecovered = define(Kind{
		"DeviceRecovered", corev1.EventTypeNormal, "Node", Node,
		"A device takes pods again.",
	})
	ResourceNotOffered = define(Kind{
		"ResourceNotOffered", corev1.EventTypeWarning, "Node", Node,
		"A resource cannot be offered as configured, with the reason: no library, no room in kubelet's list, pods that hold units of another size, or a state file or CDI specification that cannot be written. [node.md](../node.md) says what is withheld meanwhile.",
	})
	ResourceAbsent = define(Kind{
		"ResourceAbsent", corev1.EventTypeNormal, "Node", Node,
		"The node has no device that a configured resource could be made of. Nothing to do where one configuration serves nodes of all kinds.",
	})
	AllocationRefused = define(Kind{
		"AllocationRefused", corev1.EventTypeWarning, "Node", Node,
		"Kubelet asked for devices for a container and was refused, with the reason. The pod that it was for has kubelet's own event `UnexpectedAdmissionError` with the same text, and has failed; its controller makes a new one.",
	})
	GrantCorrected = define(Kind{
		"GrantCorrected", corev1.EventTypeNormal, "Pod", Node,
		"Kubelet gave the pod another device than the scheduler's side had planned. The books say so now; nothing to do.",
	})
	GrantMissing = define(Kind{
		"GrantMissing", corev1.EventTypeWarning, "Pod", Node,
		"The pod holds units and came without a grant, past the extender: its node was named by hand, or kube-scheduler does not ask the extender (run `kubectl divvy doctor`). The node has written what it holds.",
	})
	GrantInvalid = define(Kind{
		"GrantInvalid", corev1.EventTypeWarning, "Pod", Node,
		"The pod's grant was not written by Divvy for this pod, this node and this resource: it was copied, edited, or signed with a key that is not known any more. The node has replaced it by what the pod holds.",
	})
	GrantNotWritten = define(Kind{
		"GrantNotWritten", corev1.EventTypeWarning, "Pod", Node,
		"The annotations that say what the pod holds were rejected, with the reason: the pod has no room for more, or an admission policy or webhook of the cluster forbids the change. The pod runs, and the node tries again, at last once a minute. A pod that the extender did not place is counted on its node, on no device, until then.",
	})
	ConfigurationReloaded = define(Kind{
		"ConfigurationReloaded", corev1.EventTypeNormal, "Node", Node,
		"A new configuration is in use.",
	})
	ConfigurationRejected = define(Kind{
		"ConfigurationRejected", corev1.EventTypeWarning, "Node", Node,
		"A new configuration cannot be used, with all its mistakes; the one before stays in use.",
	})
)

// Events of the extender.
var (
	NeverFits = define(Kind{
		"NeverFits", corev1.EventTypeWarning, "Pod", Extend,
		"No node that kube-scheduler asked about has a device as large as the pod's request; waiting and evicting pods cannot help. Ask for less: all containers of a pod share one device.",
	})
	SeveralResources = define(Kind{
		"SeveralResources", corev1.EventTypeWarning, "Pod", Extend,
		"The pod asks for several shared resources of mode memory and is refused everywhere. Split it.",
	})
)

// RequestRefused is the event of annotations that cannot be followed.
var RequestRefused = define(Kind{
	"RequestRefused", corev1.EventTypeWarning, "Pod", Extend,
	"The annotations by which the pod chooses devices cannot be followed, with the key and what would be right: see [devices.md](../devices.md). The pod is refused everywhere; annotations of a waiting pod can be changed.",
})

// Events of the webhooks of the remote pool.
var (
	CatalogReloaded = define(Kind{
		"CatalogReloaded", corev1.EventTypeNormal, "the webhook's own Pod", Webhook,
		"A new catalog of clients is in use.",
	})
	CatalogRejected = define(Kind{
		"CatalogRejected", corev1.EventTypeWarning, "the webhook's own Pod", Webhook,
		"A new catalog cannot be used, with its mistakes; the one before stays in use.",
	})
	PoolCredentialsMissing = define(Kind{
		"PoolCredentialsMissing", corev1.EventTypeWarning, "Pod", Pool,
		"The pod waits for the pool's credentials, which nobody has brought in: `kubectl divvy pool import`.",
	})
	PoolNotAllowed = define(Kind{
		"PoolNotAllowed", corev1.EventTypeWarning, "Pod", Pool,
		"The pod's namespace may not use the pool. An administrator labels it, see [pool-credentials.md](../pool-credentials.md).",
	})
	PoolCredentialsFailed = define(Kind{
		"PoolCredentialsFailed", corev1.EventTypeWarning, "Pod", Pool,
		"The pool's credentials could not be copied into the pod's namespace, with the reason; it is tried again.",
	})
)

// Events of what wires kube-scheduler to the extender, once for each change.
var (
	SchedulerWired = define(Kind{
		"SchedulerWired", corev1.EventTypeNormal, "Node", Schedconf,
		"kube-scheduler of this control-plane node asks the extender and is well.",
	})
	SchedulerRolledBack = define(Kind{
		"SchedulerRolledBack", corev1.EventTypeWarning, "Node", Schedconf,
		"kube-scheduler was not well with a changed configuration, with the reason, and runs with the one before again. [scheduler.md](../scheduler.md) says what to do.",
	})
	SchedulerUnwired = define(Kind{
		"SchedulerUnwired", corev1.EventTypeNormal, "Node", Schedconf,
		"kube-scheduler of this control-plane node runs as it did before Divvy.",
	})
)
