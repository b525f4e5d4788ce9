package main

import (
	"fmt"
	"strings"
)

// name is a name that Divvy reads or writes on objects of the API.
type name struct {
	// text is the name; "*" stands for any end.
	text string
	// on is what carries it, by who writes it; both for people.
	on, by  string
	meaning string
}

// nameTable holds all of them. The test finds in the code what is not in it.
var nameTable = []struct {
	title string
	names []name
}{
	{"Annotations", []name{
		{"divvy.dev/inventory", "Node", "divvy-node", "the node's devices and their units, by resource; what the extender plans with"},
		{"divvy.dev/quarantine", "Node", "divvy-node", "the devices in quarantine, with since when and why, and what became of the last " +
			"request; [quarantine.md](../quarantine.md)"},
		{"divvy.dev/device-request", "Node", "kubectl divvy device",
			"a request to put devices into quarantine or to release them; divvy-node acts on it and removes it"},
		{"divvy.dev/node-setup", "Node", "divvy-node", "how containers get NVIDIA's GPUs, why, and what an administrator should look at; " +
			"[doctor.md](../doctor.md#node-setup)"},
		{"divvy.dev/claim-drivers", "Node", "divvy-node", "how devices are published for ResourceClaims, and which are left out; " +
			"[doctor.md](../doctor.md#claim-devices)"},
		{"divvy.dev/memory-overuse", "Node", "divvy-node", "the pods that use more memory of a device than their allocation; only while " +
			"there are some, [usage.md](../usage.md#overuse)"},
		{"divvy.dev/ending", "Node", "divvy-node", "the pods that are gone while their containers still run, and what they hold; only " +
			"while there are some, [node.md](../node.md#pods-that-are-gone-before-their-containers)"},
		{"divvy.dev/counts", "Node", "divvy-node", "the resources in the node's status that show a number of devices, such as " +
			"`enflame.com/gcu-count`; uninstalling takes them off"},
		{"divvy.dev/labels", "Node", "divvy-node", "the keys of the labels that Divvy wrote on the node; uninstalling takes them off"},
		{"divvy.dev/grant", "Pod", "divvy-extender, corrected by divvy-node",
			"which devices serve the pod, signed; [concepts.md](../concepts.md)"},
		{"divvy.dev/held", "Pod", "divvy-node", "the whole devices and time slices that the pod holds, for people"},
		{"divvy.dev/devices", "Pod", "users", "over how many devices of a node the pod is spread, each with an equal part of what its " +
			"containers ask for; [devices.md](../devices.md)"},
		{"divvy.dev/use-models", "Pod", "users", "product names, joined by commas: the pod takes no other device; `*` at the end stands " +
			"for any end"},
		{"divvy.dev/avoid-models", "Pod", "users", "product names that the pod does not take"},
		{"divvy.dev/use-devices", "Pod", "users", "uuids, joined by commas: the pod takes no other device"},
		{"divvy.dev/avoid-devices", "Pod", "users", "uuids of devices that the pod does not take"},
		{"divvy.dev/isolation", "Pod", "users", "the least tier of isolation that the pod's devices must have: `none`, `cooperative`, " +
			"`driver` or `hardware`; [isolation.md](../isolation.md)"},
		{"divvy.dev/compute-percent", "Pod", "users", "the share of a device's multiprocessors for each container of the pod, 1 to 100, " +
			"in place of its share of the memory; only on devices of isolation `cooperative`, [isolation.md](../isolation.md)"},
		{"divvy.dev/placement-policy", "Pod", "users", "the placement policy for this pod; [devices.md](../devices.md#another-policy)"},
		{"divvy.dev/units-as-claims", "Pod", "divvy-extender", "which units of which containers became which claim, JSON; the template " +
			"of the claim is created from it, [dra.md](../dra.md#pods-that-request-units-of-memory)"},
		{"divvy.dev/retry", "Pod", "divvy-extender", "when the extender made kube-scheduler look again at a pod that waits; the time is " +
			"for people, [extender.md](../extender.md#pods-that-wait)"},
		{"enflame.com/gcu-device-*", "Pod", "divvy-extender, divvy-node", "GCUShare's annotations: `id` and `memory` of the device, " +
			"`memory-request`, `assign-time`, `assigned`; for people and scripts, nothing is decided by them"},
		{"divvy.dev/scheduler-config-hash", "the static pod of kube-scheduler", "divvy-control schedconf",
			"digest of the configuration that the manifest names: kubelet restarts a static pod when the manifest changes"},
		{"divvy.dev/scheduler-config-before", "the static pod of kube-scheduler", "divvy-control schedconf",
			"the flags that others were put in the place of, a JSON list"},
		{"divvy.dev/scheduler-replaced", "the static pod of divvy-scheduler", "divvy-control schedconf",
			"the fields of kube-scheduler's container that were replaced; [replacing-kube-scheduler.md](../replacing-kube-scheduler.md)"},
		{"divvy.dev/scheduler-program-hash", "the static pod of divvy-scheduler", "divvy-control schedconf",
			"digest of its image and flags"},
		{"divvy.dev/scheduler-rolled-back", "Lease `divvy-schedconf`", "divvy-control schedconf",
			"which change of a kube-scheduler a node took back, for the other nodes; JSON"},
		{"divvy.dev/rotate", "Secret of certificates", "an administrator", "`cert ...` or `ca ...`: make a new one now"},
		{"divvy.dev/pool-source", "Secret", "divvy-control webhook", "which secret this is a copy of, namespace/name"},
		{"divvy.dev/pool-source-version", "Secret", "divvy-control webhook", "the source's resourceVersion when it was copied"},
		{"divvy.dev/pool-source-hash", "Secret", "divvy-control webhook", "SHA-256 of the source's type and data"},
		{"auto-management/bitfusion", "Pod", "users", "how the pod uses the remote pool; [pool.md](../pool.md)"},
		{"auto-management/status", "Pod", "divvy-control webhook", "`injected` once the pod is converted"},
		{"bitfusion-client/*", "Pod", "users", "`os`, `version`, `filter`, `entrypoint` and `home` of the pool's client; " +
			"[pool.md](../pool.md)"},
	}},
	{"Taints", []name{
		{"divvy.dev/unhealthy", "Device of a ResourceSlice", "divvy-node", "the device is unhealthy; the value is the cause, " +
			"[dra.md](../dra.md)"},
		{"divvy.dev/in-use-by-plugin", "Device of a ResourceSlice", "divvy-node",
			"containers still hold units or the device as the device plugin gave them"},
	}},
	{"Labels", []name{
		{"divvy.dev/enabled", "Node", "an administrator", "`true`: divvy-node runs there; `false`: it does not, whatever other labels say"},
		{"enflame.com/gcushare", "Node", "an administrator",
			"`true`: divvy-node runs there, where a resource of Enflame is offered; the guide's label"},
		{"nvidia.com/gpu.present", "Node", "an administrator, NVIDIA's feature discovery or divvy-node",
			"`true`: divvy-node runs there, where a resource of NVIDIA is offered"},
		{"iluvatar.com/gpu.present", "Node", "an administrator or divvy-node",
			"`true`: divvy-node runs there, where a resource of Iluvatar is offered"},
		{"divvy.dev/config", "Node", "an administrator", "which of the named configurations holds on the node"},
		{"nvidia.com/device-plugin.config", "Node", "an administrator",
			"the same, as in NVIDIA's device plugin; `divvy.dev/config` takes precedence"},
		{"divvy.dev/enflame.*", "Node", "divvy-node", "`present`, `count`, `model`, `memory`, `driver` and `isolation` of the node's " +
			"Enflame " +
			"cards; [labels.md](../labels.md)"},
		{"divvy.dev/iluvatar.*", "Node", "divvy-node", "the same of Iluvatar GPUs"},
		{"divvy.dev/nvidia.*", "Node", "divvy-node", "the same of NVIDIA GPUs"},
		{"enflame.com/gcu.*", "Node", "divvy-node", "labels as the vendor's feature discovery writes them; [labels.md](../labels.md)"},
		{"iluvatar.com/*", "Node", "divvy-node", "labels as the vendor's feature discovery writes them; [labels.md](../labels.md)"},
		{"nvidia.com/*", "Node", "divvy-node", "labels as the vendor's feature discovery writes them: `gpu.*`, `cuda.*`, `mig.*`; " +
			"[labels.md](../labels.md)"},
		{"divvy.dev/pool", "Namespace; Pod", "an administrator; divvy-control webhook",
			"of a namespace, `allowed`: its pods may use the remote pool; of a pod, `true`: it was converted"},
		{"divvy.dev/allocation-path", "Node", "divvy-node", "`dra` or `both` on nodes that serve ResourceClaims; [dra.md](../dra.md)"},
		{"divvy.dev/memory-units", "Namespace; Pod, ResourceClaimTemplate", "an administrator; divvy-extender",
			"`claims`: of a namespace, new pods get claims in place of units of memory; of a pod, it did; of a template, it is " +
				"of such claims"},
		{"divvy.dev/managed-by", "Secret", "divvy-control webhook", "`divvy-pool`: a copy that Divvy keeps"},
		{"divvy.dev/pool-import", "Secret", "kubectl divvy pool import", "`true`: made by the import"},
	}},
	{"Conditions", []name{
		{"divvy.dev/TookTheLead", "Pod of the extender", "divvy-extender", "which replica leads, and since when: a new leader reads pods " +
			"at least as new as the write of this condition before it answers; [extender.md](../extender.md)"},
		{"divvy.dev/Waits", "Pod", "divvy-extender", "why the pod waits where kube-scheduler's sums hide it; there until the pod has a " +
			"node, [why.md](../why.md#the-condition-of-the-pod)"},
		{"DivvyMemoryOveruse", "Node", "divvy-node", "whether a container uses more memory of a device than its allocation; there while " +
			"use is measured, [usage.md](../usage.md#overuse)"},
		{"DivvyIsolationLost", "Node", "divvy-node", "whether the configured isolation does not hold on a device; there while a " +
			"resource has `isolation: driver` or `cooperative`"},
	}},
	{"Resources", []name{
		{"enflame.com/gcu-memory", "Pod, Node", "users; kubelet", "units of memory of an Enflame card"},
		{"enflame.com/gcu-count", "Node", "divvy-node", "number of Enflame cards, for people"},
		{"enflame.com/gcu", "Pod, Node", "users; kubelet", "whole Enflame cards"},
		{"enflame.com/drs-gcu-*", "Pod, Node", "users; kubelet", "DRS instances of Enflame cards by profile; [drs.md](../drs.md)"},
		{"nvidia.com/gpu", "Pod, Node", "users; kubelet", "whole NVIDIA GPUs, or turns on them"},
		{"nvidia.com/gpu.shared", "Pod, Node", "users; kubelet", "turns on NVIDIA GPUs, where the resource is renamed"},
		{"nvidia.com/gpu-memory", "Pod, Node", "users; kubelet", "units of memory of an NVIDIA GPU"},
		{"iluvatar.com/gpu", "Pod, Node", "users; kubelet", "Iluvatar boards or chips, or turns on them"},
		{"iluvatar.com/gpu-memory", "Pod, Node", "users; kubelet", "units of memory of an Iluvatar GPU"},
		{"bitfusion.io/gpu", "Pod, Node", "divvy-control webhook; kubelet", "hundredths of a GPU of the remote pool"},
		{"bitfusion.io/gpu-*", "Pod", "users", "`bitfusion.io/gpu-amount`, `-percent` and `-memory`: what a pod asks of the remote pool"},
	}},
	{"Kinds of CDI devices", []name{
		{"nvidia.divvy.dev/gpu", "CDI specification", "divvy-node", "NVIDIA's GPUs by uuid; [nvidia.md](../nvidia.md)"},
		{"divvy.dev/gpu-mps", "CDI specification", "divvy-node", "kind of the CDI devices that make a container a client of MPS, " +
			"`<GPU>.<percent>.<MiB>`; [isolation.md](../isolation.md#shares-of-compute-and-memory-with-mps)"},
		{"divvy.dev/gpu-memory", "CDI specification", "divvy-node",
			"limits of a container's memory on a GPU: `<uuid>.<MiB>`, or `<uuid>.max`"},
	}},
	{"API versions and webhooks", []name{
		{"config.divvy.dev/v1alpha1", "configuration file", "users, the chart", "of [divvy-node's configuration](configuration.md)"},
		{"pool.divvy.dev/v1alpha1", "catalog file", "users, the chart",
			"of the catalog of the pool's clients; [pool-catalog.md](../pool-catalog.md)"},
		{"divvy.dev/v1", "output", "kubectl divvy why", "of explanations, kind `PodExplanation`; [why.md](../why.md#json)"},
		{"validation.bitfusion.io-cfg", "ValidatingWebhookConfiguration", "the chart", "the pool's validation"},
		{"divvy.dev/grant/v1", "signature", "divvy-extender, divvy-node",
			"the purpose of the signature of an allocation, so that it is valid for nothing else"},
	}},
}

// names writes the table.
func names(_ string, w *strings.Builder) error {
	w.WriteString("Names of resources are those of the examples; `sharedResources` of the chart may name others.\n" +
		"[security.md](../security.md) describes who may write the annotations.\n")
	for _, group := range nameTable {
		fmt.Fprintf(w, "\n## %s\n\n", group.title)
		table(w, "name", "on", "written by", "meaning")
		for _, n := range group.names {
			row(w, code(n.text), n.on, n.by, n.meaning)
		}
	}
	return nil
}
