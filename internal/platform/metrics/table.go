package metrics

import "github.com/prometheus/client_golang/prometheus"

// Labels that several metrics have.
var (
	labelResource = Label{"resource", "name of the extended resource, such as `enflame.com/gcu-memory`"}
	labelDevice   = Label{"device", "the device's uuid"}
	labelIndex    = Label{"index", "the device's number on its node"}
	labelNode     = Label{"node", "the node's name"}
	labelVendor   = Label{"vendor", "the vendor's name, such as `enflame`"}
)

// answerBuckets are bounds of answers that kube-scheduler and the API server wait
// for: 0.1 ms to 2.4 s.
var answerBuckets = prometheus.ExponentialBuckets(0.0001, 2.5, 12)

// Metrics of all programs.
var (
	BuildInfo = define(Metric{
		Name: "divvy_build_info", Type: Gauge, Programs: []string{everywhere},
		Help: "Always 1; the labels say what runs.",
		Labels: []Label{
			{"program", "`divvy-node`, `divvy-node-pool`, `divvy-extender`, `divvy-webhook` or `divvy-schedconf`"},
			{"version", "the release"}, {"commit", "the commit it was built from"}, {"go", "the release of Go that compiled it"},
		},
	})
	APIRequests = define(Metric{
		Name: "divvy_api_requests_total", Type: Counter, Programs: []string{Node, Extender, Webhook, Schedconf},
		Help: "Requests to the API server by what was asked and the status of the answer.",
		Labels: []Label{
			{"verb", "`get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`"},
			{"resource", "such as `pods` or `pods/binding`; `other` for what is no resource"},
			{"code", "HTTP status of the answer; `error` when there was none"},
		},
		Absent: "until the first request",
	})
	APIRequestDuration = define(Metric{
		Name: "divvy_api_request_duration_seconds", Type: Histogram, Programs: []string{Node, Extender, Webhook, Schedconf},
		Help:    "Time from a request to the API server to the head of its answer.",
		Labels:  []Label{{"verb", "as above"}, {"resource", "as above"}},
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		Absent:  "until the first request",
	})
	HTTPRejected = define(Metric{
		Name: "divvy_http_rejected_total", Type: Counter, Programs: []string{everywhere},
		Help: "Connections and requests that were rejected or closed because a bound on the memory of clients was reached.",
		Labels: []Label{
			{"port", "the server: `plain`, `tls`, `metrics` or `probes`"},
			{"bound", "`connection` (not accepted), `request` (answered with 503), `bytes` (no memory for a body or an answer) or " +
				"`displaced` (closed for a client that holds less)"},
		},
		Absent: "until the port is served",
	})
	HTTPHeld = define(Metric{
		Name: "divvy_http_held_bytes", Type: Gauge, Programs: []string{everywhere},
		Help:   "Memory that connections, requests and unread answers count with.",
		Labels: []Label{{"budget", "`reserved` (callers that have a reserve) or `shared` (all others)"}},
	})
	Events = define(Metric{
		Name: "divvy_events_total", Type: Counter, Programs: []string{Node, Extender, Webhook},
		Help: "Kubernetes events by result.",
		Labels: []Label{
			{"reason", "the event's reason, see events.md"},
			{"outcome", "`told` (sent), `repeated` (an identical event was sent before) or `dropped` (rate limit exceeded)"},
		},
		Absent: "until the first event",
	})
)

// Metrics of the extender.
var (
	ExtenderRequests = define(Metric{
		Name: "divvy_extender_requests_total", Type: Counter, Programs: []string{Extender},
		Help:   "Requests of kube-scheduler by verb and result.",
		Labels: []Label{{"verb", "`filter`, `preempt`, `prioritize` or `bind`"}, {"result", "`ok` or `error`"}},
	})
	ExtenderRequestDuration = define(Metric{
		Name: "divvy_extender_request_duration_seconds", Type: Histogram, Programs: []string{Extender},
		Help:   "Time to answer a request of kube-scheduler, from its header to the answer.",
		Labels: []Label{{"verb", "`filter`, `preempt`, `prioritize` or `bind`"}}, Buckets: answerBuckets,
	})
	ExtenderRequestsInFlight = define(Metric{
		Name: "divvy_extender_requests_in_flight", Type: Gauge, Programs: []string{Extender},
		Help:   "Requests of kube-scheduler that are being answered.",
		Labels: []Label{{"verb", "`filter`, `preempt`, `prioritize` or `bind`"}},
	})
	ExtenderDecisions = define(Metric{
		Name: "divvy_extender_decisions_total", Type: Counter, Programs: []string{Extender},
		Help: "Decisions about pods by resource and outcome.",
		Labels: []Label{
			{"verb", "`filter`, `preempt`, `prioritize` or `bind`"},
			{"resource", "the requested resource; `none` or `several` if the pod requests no managed resource or several"},
			{"outcome", "filter: `fits` (on a node at least) or `refused` (by all nodes); preempt: `evicts` (on a node at least) or " +
				"`spares` (on none); prioritize: `rated`; bind: `bound` or `failed`"},
		},
	})
	ExtenderNodeVerdicts = define(Metric{
		Name: "divvy_extender_node_verdicts_total", Type: Counter, Programs: []string{Extender},
		Help: "Nodes checked by filter, by verdict.",
		Labels: []Label{
			{"resource", "as in divvy_extender_decisions_total"},
			{"verdict", "`fits`, `nodeUnknown`, `noDeviceFits`, `largerThanDevice` or `severalResources`"},
		},
	})
	ExtenderBindErrors = define(Metric{
		Name: "divvy_extender_bind_errors_total", Type: Counter, Programs: []string{Extender},
		Help:   "Binds that failed, by cause.",
		Labels: []Label{{"cause", "`noFit`, `nodeUnknown`, `podGone`, `heldElsewhere`, `outcomeUnknown` or `other`"}},
	})
	ExtenderPanics = define(Metric{
		Name: "divvy_extender_panics_total", Type: Counter, Programs: []string{Extender},
		Help: "Requests that failed because of an internal error.",
	})
	ExtenderWaiting = define(Metric{
		Name: "divvy_extender_waiting_pods", Type: Gauge, Programs: []string{Extender},
		Help: "Pods that fitted on no node and have not been offered a node since.",
	})
	ExtenderWoken = define(Metric{
		Name: "divvy_extender_woken_pods_total", Type: Counter, Programs: []string{Extender},
		Help:   "Pending pods for which another scheduling attempt was requested, because capacity became free.",
		Labels: []Label{{"result", "`ok`, `gone` (the pod was deleted) or `failed`"}},
	})
	ExtenderReasons = define(Metric{
		Name: "divvy_extender_pod_reasons_total", Type: Counter, Programs: []string{Extender},
		Help:   "Writes of the condition that says why a pod waits.",
		Labels: []Label{{"result", "`said`, `removed`, `gone` (the pod was deleted) or `failed`"}},
	})
	ExtenderEvictions = define(Metric{
		Name: "divvy_extender_evictions_total", Type: Counter, Programs: []string{Extender},
		Help: "Pods over their memory allocation for longer than the grace period, by outcome.",
		Labels: []Label{{"outcome", "`evicted`, `budget` (a PodDisruptionBudget does not allow it), `severalBudgets`, `gone` (the pod " +
			"was deleted) or `failed`, each attempt; `exempt` or `rateLimit`, once for each pod and overuse"}},
		Absent: "without eviction",
	})
	ExtenderReady = define(Metric{
		Name: "divvy_extender_ready", Type: Gauge, Programs: []string{Extender},
		Help: "1 while this replica is ready, else 0.",
	})
	ExtenderLeader = define(Metric{
		Name: "divvy_extender_leader", Type: Gauge, Programs: []string{Extender},
		Help: "1 while this replica is the leader, and always without leader election; else 0.",
	})
	ExtenderTerms = define(Metric{
		Name: "divvy_extender_terms_total", Type: Counter, Programs: []string{Extender},
		Help: "Number of times that this replica became the leader.", Absent: "without election",
	})
	ExtenderForwarded = define(Metric{
		Name: "divvy_extender_forwarded_total", Type: Counter, Programs: []string{Extender},
		Help:   "Requests received while this replica was not the leader, by where they were served.",
		Labels: []Label{{"result", "`leader`, `here` (this replica became the leader meanwhile) or `failed` (no leader in time)"}},
		Absent: "until the first such request",
	})
	ExtenderDemandSeen = define(Metric{
		Name: "divvy_extender_demand_seen_pods_total", Type: Counter, Programs: []string{Extender},
		Help:   "Pods observed by the policy `fragmentation`, each once.",
		Labels: []Label{labelResource},
	})
	ExtenderDemandPods = define(Metric{
		Name: "divvy_extender_demand_pods", Type: Gauge, Programs: []string{Extender},
		Help: "Pods that the policy `fragmentation` counts, as of the last renewal: those expected and those seen, of which older ones " +
			"count less than one.",
		Labels: []Label{labelResource}, Absent: "until the weights were updated",
	})
	ExtenderDemandKinds = define(Metric{
		Name: "divvy_extender_demand_kinds", Type: Gauge, Programs: []string{Extender},
		Help:   "Kinds of pods that the tables of the policy `fragmentation` were made of.",
		Labels: []Label{labelResource}, Absent: "until the weights were updated",
	})
	ExtenderPriceRenewals = define(Metric{
		Name: "divvy_extender_price_renewals_total", Type: Counter, Programs: []string{Extender},
		Help:   "Updates of the weights of the policy `fragmentation`.",
		Labels: []Label{labelResource},
	})
	ExtenderPriceTables = define(Metric{
		Name: "divvy_extender_price_tables_total", Type: Counter, Programs: []string{Extender},
		Help:   "Updates that recomputed the tables of the policy, because demand or devices had changed.",
		Labels: []Label{labelResource},
	})
	ExtenderPriceChanges = define(Metric{
		Name: "divvy_extender_price_changes_total", Type: Counter, Programs: []string{Extender},
		Help:   "Updates that may have changed node scores; 0 while the policy has too few observations and places as `binpack`.",
		Labels: []Label{labelResource},
	})
	ExtenderPriceRenewalSeconds = define(Metric{
		Name: "divvy_extender_price_renewal_seconds", Type: Gauge, Programs: []string{Extender},
		Help:   "Duration of the last update of the weights, during which no request waits.",
		Labels: []Label{labelResource}, Absent: "until the weights were updated",
	})
	ExtenderPriceAge = define(Metric{
		Name: "divvy_extender_price_age_seconds", Type: Gauge, Programs: []string{Extender},
		Help:   "Time since the last update of the weights, usually at most 10 s.",
		Labels: []Label{labelResource}, Absent: "until the weights were updated",
	})
	ExtenderReservations = define(Metric{
		Name: "divvy_extender_reservations", Type: Gauge, Programs: []string{Extender},
		Help: "Pods that were given a device and have not been seen bound yet.",
	})
	ExtenderExpected = define(Metric{
		Name: "divvy_extender_expected_pods", Type: Gauge, Programs: []string{Extender},
		Help: "Pods for which filter named one node and capacity is reserved there until their bind.",
	})
	ExtenderOldestHeld = define(Metric{
		Name: "divvy_extender_oldest_held_reservation_seconds", Type: Gauge, Programs: []string{Extender},
		Help: "Age of the oldest reservation of divvy-scheduler whose pod waits for volumes or for the other pods of its group; " +
			"0 for none.",
	})
	ExtenderNarrowedFailed = define(Metric{
		Name: "divvy_extender_narrowed_attempts_failed_total", Type: Counter, Programs: []string{Extender},
		Help:   "Attempts of divvy-scheduler that failed on the one node that was named, and were followed by one over all nodes.",
		Absent: "outside of divvy-scheduler",
	})
	ExtenderBooksNodes = define(Metric{
		Name: "divvy_extender_books_nodes", Type: Gauge, Programs: []string{Extender},
		Help:   "Nodes in the ledger.",
		Labels: []Label{{"state", "`good`, or `broken` when their inventory does not count"}},
	})
	ExtenderBooksPods = define(Metric{
		Name: "divvy_extender_books_pods", Type: Gauge, Programs: []string{Extender},
		Help:   "Pods in the ledger that request a shared resource.",
		Labels: []Label{{"state", "`waiting` for a node, `granted` a device, or `ungranted` on a node"}},
	})
	ExtenderDeviceUnits = define(Metric{
		Name: "divvy_extender_device_units", Type: Gauge, Programs: []string{Extender},
		Help:   "Units that a device is cut into.",
		Labels: []Label{labelNode, labelResource, labelDevice, labelIndex}, Absent: "without devices, and with --metrics-devices=false",
	})
	ExtenderDeviceUnitsUsed = define(Metric{
		Name: "divvy_extender_device_units_used", Type: Gauge, Programs: []string{Extender},
		Help:   "Units of a device that are allocated to pods.",
		Labels: []Label{labelNode, labelResource, labelDevice, labelIndex}, Absent: "as above",
	})
	ExtenderDeviceUnitsFree = define(Metric{
		Name: "divvy_extender_device_units_free", Type: Gauge, Programs: []string{Extender},
		Help:   "Units of a device that new pods can get, 0 while the device is unhealthy or given out as another resource.",
		Labels: []Label{labelNode, labelResource, labelDevice, labelIndex}, Absent: "as above",
	})
	ExtenderDeviceUnitsWithheld = define(Metric{
		Name: "divvy_extender_device_units_withheld", Type: Gauge, Programs: []string{Extender},
		Help:   "Units of a device that are withheld from new pods, because containers use more of its memory than their allocations.",
		Labels: []Label{labelNode, labelResource, labelDevice, labelIndex},
		Absent: "for devices of which no units are withheld, and with --metrics-devices=false",
	})
	ExtenderNodeUnits = define(Metric{
		Name: "divvy_extender_node_units", Type: Gauge, Programs: []string{Extender},
		Help:   "Units of all devices of a node.",
		Labels: []Label{labelNode, labelResource}, Absent: "without nodes",
	})
	ExtenderNodeUnitsUsed = define(Metric{
		Name: "divvy_extender_node_units_used", Type: Gauge, Programs: []string{Extender},
		Help:   "Units that pods on a node hold, also those whose device is not known or was lost.",
		Labels: []Label{labelNode, labelResource}, Absent: "without nodes",
	})
	ExtenderNodeUnitBytes = define(Metric{
		Name: "divvy_extender_node_unit_bytes", Type: Gauge, Programs: []string{Extender},
		Help:   "Size of one unit on a node in bytes.",
		Labels: []Label{labelNode, labelResource},
		Absent: "without nodes, and for units that are a part of a card if the node's cards differ in memory",
	})
	ExtenderNamespaceUnitsUsed = define(Metric{
		Name: "divvy_extender_namespace_units_used", Type: Gauge, Programs: []string{Extender},
		Help:   "Units that the pods of a namespace hold on a node.",
		Labels: []Label{{"namespace", "the pods' namespace"}, labelNode, labelResource}, Absent: "without pods that hold units",
	})
)

// Metrics of the node's daemon.
var (
	NodeDeviceUnits = define(Metric{
		Name: "divvy_node_device_units", Type: Gauge, Programs: []string{Node},
		Help:   "Units that a device is cut into.",
		Labels: []Label{labelResource, labelDevice, labelIndex}, Absent: "without devices",
	})
	NodeDeviceUnitsHeld = define(Metric{
		Name: "divvy_node_device_units_held", Type: Gauge, Programs: []string{Node},
		Help:   "Units of a device that containers hold, as reported by kubelet.",
		Labels: []Label{labelResource, labelDevice, labelIndex}, Absent: "without devices",
	})
	NodeDeviceHealthy = define(Metric{
		Name: "divvy_node_device_healthy", Type: Gauge, Programs: []string{Node},
		Help:   "1 while a device takes new pods of the resource, else 0.",
		Labels: []Label{labelResource, labelDevice, labelIndex}, Absent: "without devices",
	})
	NodeIsolationTier = define(Metric{
		Name: "divvy_node_isolation_tier", Type: Gauge, Programs: []string{Node},
		Help: "1 for the tier that isolates the memory of a device, as it was last attested.",
		Labels: []Label{labelResource, labelDevice,
			{"tier", "`cooperative`, `driver` or `hardware`, see [isolation.md](../isolation.md)"}},
		Absent: "for devices at tier none",
	})
	NodeDeviceUnhealthy = define(Metric{
		Name: "divvy_node_device_unhealthy", Type: Gauge, Programs: []string{Node},
		Help: "1 for each device that is unhealthy, by cause.",
		Labels: []Label{labelVendor, labelDevice, labelIndex,
			{"cause", "a cause of [health.md](../health.md); `unknown` where there is none"}},
		Absent: "while all devices are healthy",
	})
	NodeDeviceHealthChanges = define(Metric{
		Name: "divvy_node_device_health_changes_total", Type: Counter, Programs: []string{Node},
		Help:   "Changes of a device's health, by what it became.",
		Labels: []Label{labelVendor, {"to", "`healthy` or `unhealthy`"}},
	})
	NodeDeviceQuarantined = define(Metric{
		Name: "divvy_node_device_quarantined", Type: Gauge, Programs: []string{Node},
		Help: "1 for each device in quarantine, which takes no pods until it is released, also for one that is not there any more.",
		Labels: []Label{labelVendor, labelDevice, labelIndex,
			{"cause", "a cause of [health.md](../health.md), or `administrator`"}},
		Absent: "while no device is in quarantine",
	})
	NodeQuarantineUnsaved = define(Metric{
		Name: "divvy_node_quarantine_unsaved", Type: Gauge, Programs: []string{Node},
		Help: "1 while the list of devices in quarantine cannot be written to the state folder: a restart would undo the last changes; " +
			"else 0.",
	})
	NodeAllocations = define(Metric{
		Name: "divvy_node_allocations_total", Type: Counter, Programs: []string{Node},
		Help: "Containers that got devices or units.", Labels: []Label{labelResource},
	})
	NodeRefusals = define(Metric{
		Name: "divvy_node_refusals_total", Type: Counter, Programs: []string{Node},
		Help: "Allocations that were rejected, by reason.",
		Labels: []Label{labelResource, {"reason", "`noRoom`, `held` (kubelet chose what another container holds), `unknownID` (kubelet " +
			"chose ids that name no device, or several), " +
			"`notOffered` (the resource takes no new pods), `tooMany` (of a shared device), `kubelet` (it did not report the " +
			"allocations), `isolation` (the device does not have the tier that the pod requires, or the pod gets around it) or `other`"}},
	})
	NodeCorrections = define(Metric{
		Name: "divvy_node_corrections_total", Type: Counter, Programs: []string{Node},
		Help: "Pods whose planned allocation was corrected to what kubelet allocated, by cause.",
		Labels: []Label{labelResource, {"kind", "`moved` (it named another device), `missing` (there was none: the pod came past the " +
			"extender) or " +
			"`invalid` (its signature, node or resource is wrong)"}},
	})
	NodeConfirmations = define(Metric{
		Name: "divvy_node_confirmations_total", Type: Counter, Programs: []string{Node},
		Help: "Pods whose planned allocation matched what kubelet allocated, and was confirmed.", Labels: []Label{labelResource},
	})
	NodeMixedPods = define(Metric{
		Name: "divvy_node_mixed_pods", Type: Gauge, Programs: []string{Node},
		Help: "Pods whose containers hold units of several devices; always 0.", Labels: []Label{labelResource},
		Absent: "without a resource of mode memory",
	})
	NodeRegistrations = define(Metric{
		Name: "divvy_node_registrations_total", Type: Counter, Programs: []string{Node},
		Help: "Registrations that kubelet accepted.", Labels: []Label{labelResource},
	})
	NodeAnswerDuration = define(Metric{
		Name: "divvy_node_answer_duration_seconds", Type: Histogram, Programs: []string{Node},
		Help:    "Time to answer a call of kubelet, which admits no other pod meanwhile.",
		Labels:  []Label{labelResource, {"question", "`prefer` (GetPreferredAllocation) or `allocate` (Allocate)"}},
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
		Absent:  "until kubelet asks the first time",
	})
	NodeClaimPreparations = define(Metric{
		Name: "divvy_node_claim_preparations_total", Type: Counter, Programs: []string{Node},
		Help: "Requests of kubelet to prepare the ResourceClaims of a pod, by result.",
		Labels: []Label{labelVendor, {"result", "`ok`, or why it was rejected: `held` (by another claim or by a container without a " +
			"claim), `notOffered` (the device is unhealthy or not offered), `other`, or another reason of " +
			"`divvy_node_refusals_total`"}},
		Absent: "unless `allocationPath` is `dra` or `both`",
	})
	NodeClaimPreparationDuration = define(Metric{
		Name: "divvy_node_claim_preparation_duration_seconds", Type: Histogram, Programs: []string{Node},
		Help:    "Time to answer a request to prepare the ResourceClaims of a pod; it includes the wait for a holder that leaves.",
		Labels:  []Label{labelVendor},
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 25},
		Absent:  "until kubelet asks the first time",
	})
	NodeLibraryCallDuration = define(Metric{
		Name: "divvy_node_library_call_duration_seconds", Type: Histogram, Programs: []string{Node},
		Help: "Time that a call of a vendor's library took; the wait for events is left out.",
		Labels: []Label{labelVendor, {"call", "the library's function, such as `nvmlDeviceGetMemoryInfo`; `load` for finding and " +
			"loading it"}},
		Buckets: []float64{.0001, .001, .01, .1, 1, 5, 30},
		Absent:  "until the library was loaded",
	})
	NodeLibraryCallsHung = define(Metric{
		Name: "divvy_node_library_calls_hung_total", Type: Counter, Programs: []string{Node},
		Help:   "Calls of a vendor's library that did not answer in time; the last of them may still run.",
		Labels: []Label{labelVendor, {"call", "as above"}}, Absent: "until one hung",
	})
	NodeLibraryAvailable = define(Metric{
		Name: "divvy_node_library_available", Type: Gauge, Programs: []string{Node},
		Help:   "1 while the vendor's library answers, else 0.",
		Labels: []Label{labelVendor},
	})
	NodeResourceOffered = define(Metric{
		Name: "divvy_node_resource_offered", Type: Gauge, Programs: []string{Node},
		Help: "1 while a resource is offered as configured, 0 while something is in the way: no devices, or pods that hold units of " +
			"another size.",
		Labels: []Label{labelResource},
	})
	NodeReady = define(Metric{
		Name: "divvy_node_ready", Type: Gauge, Programs: []string{Node},
		Help: "1 while pods of this node can be given devices, else 0.",
	})
	NodeConfigReloads = define(Metric{
		Name: "divvy_node_config_reloads_total", Type: Counter, Programs: []string{Node},
		Help: "Changes of the configuration.", Labels: []Label{{"result", "`applied` or `rejected`"}},
	})
	NodeConfigStale = define(Metric{
		Name: "divvy_node_config_stale", Type: Gauge, Programs: []string{Node},
		Help: "1 while the configuration cannot be used and the one before is, else 0.",
	})
	NodePodResourcesErrors = define(Metric{
		Name: "divvy_node_pod_resources_errors_total", Type: Counter, Programs: []string{Node},
		Help: "Questions to kubelet's pod-resources API that failed.",
	})
	NodePatchErrors = define(Metric{
		Name: "divvy_node_patch_errors_total", Type: Counter, Programs: []string{Node},
		Help: "Writes to the API server that failed.",
	})
)

// Metrics of measured use, of the node's daemon.
var (
	NodeContainerMemoryUsed = define(Metric{
		Name: "divvy_node_container_memory_used_bytes", Type: Gauge, Programs: []string{Node},
		Help: "Device memory that the processes of a container use.", Labels: labelsOfUsage(labelPod, labelContainer),
		Absent: "unless `usage.metrics` is `container`, and where the vendor's library does not report it",
	})
	NodeContainerMemoryAllocated = define(Metric{
		Name: "divvy_node_container_memory_allocated_bytes", Type: Gauge, Programs: []string{Node},
		Help: "Device memory that is allocated to a container.", Labels: labelsOfUsage(labelPod, labelContainer),
		Absent: "unless `usage.metrics` is `container`, and for whole devices and time slices, which bound no memory",
	})
	NodeContainerUtilization = define(Metric{
		Name: "divvy_node_container_utilization_ratio", Type: Gauge, Programs: []string{Node},
		Help:   "Part of the device's compute time that the processes of a container had lately, from 0 to 1.",
		Labels: labelsOfUsage(labelPod, labelContainer),
		Absent: "unless `usage.metrics` is `container`, and where the vendor's library does not report it",
	})
	NodeNamespaceMemoryUsed = define(Metric{
		Name: "divvy_node_namespace_memory_used_bytes", Type: Gauge, Programs: []string{Node},
		Help: "Device memory that the containers of a namespace use.", Labels: labelsOfUsage(),
		Absent: "unless `usage.metrics` is `namespace`, and where it is not known of one of the containers",
	})
	NodeNamespaceMemoryAllocated = define(Metric{
		Name: "divvy_node_namespace_memory_allocated_bytes", Type: Gauge, Programs: []string{Node},
		Help: "Device memory that is allocated to the containers of a namespace.", Labels: labelsOfUsage(),
		Absent: "unless `usage.metrics` is `namespace`, and for whole devices and time slices, which bound no memory",
	})
	NodeNamespaceUtilization = define(Metric{
		Name: "divvy_node_namespace_utilization_ratio", Type: Gauge, Programs: []string{Node},
		Help: "Part of the device's compute time that the containers of a namespace had lately.", Labels: labelsOfUsage(),
		Absent: "unless `usage.metrics` is `namespace`, and where it is not known of one of the containers",
	})
	NodeContainerOveruse = define(Metric{
		Name: "divvy_node_container_overuse", Type: Gauge, Programs: []string{Node},
		Help:   "1 for a container that uses more memory of a device than its allocation; container is empty for the sum of its pod.",
		Labels: labelsOfUsage(labelPod, labelContainer), Absent: "unless `usage.metrics` is `container`, and for all other containers",
	})
	NodeNamespaceOveruse = define(Metric{
		Name: "divvy_node_namespace_overuse", Type: Gauge, Programs: []string{Node},
		Help: "Containers of a namespace that use more memory of a device than their allocation.", Labels: labelsOfUsage(),
		Absent: "unless `usage.metrics` is `namespace`, and where there are none",
	})
	NodeDeviceMemoryUsed = define(Metric{
		Name: "divvy_node_device_memory_used_bytes", Type: Gauge, Programs: []string{Node},
		Help: "Memory of a device that is in use, by processes and by the driver.", Labels: []Label{labelVendor, labelDevice, labelIndex},
		Absent: "unless `usage.enabled` is set, and while the vendor's library does not report it",
	})
	NodeDeviceMemoryUnattributed = define(Metric{
		Name: "divvy_node_device_memory_unattributed_bytes", Type: Gauge, Programs: []string{Node},
		Help: "Memory of a device that is used by no container that holds something of it.",
		Labels: []Label{labelVendor, labelDevice, labelIndex, {"kind", "`system` (processes outside of pods), `foreign` (pods that hold " +
			"nothing of the device) or `unknown` (the driver, and processes whose container or use is not known)"}},
		Absent: "as above",
	})
	NodeUsageErrors = define(Metric{
		Name: "divvy_node_usage_errors_total", Type: Counter, Programs: []string{Node},
		Help: "Measurements of a device's use that failed.", Labels: []Label{labelVendor}, Absent: "unless `usage.enabled` is set",
	})
	NodeIsolationLost = define(Metric{
		Name: "divvy_node_isolation_lost_total", Type: Counter, Programs: []string{Node},
		Help: "Times that the memory of a device was found not to be limited for all that use it.",
		Labels: []Label{{"cause", "`driver`, `limit-missing`, `limit-different`, `limit-unreadable`, `started-without-limit`, " +
			"`limit-was-lost`, `process-without-limit`, `processes-unknown`, `mps-daemon`, `mps-fault` or `compute-mode`"}},
		Absent: "unless a resource has `isolation: driver` or `cooperative`",
	})
	NodeUsagePassDuration = define(Metric{
		Name: "divvy_node_usage_pass_duration_seconds", Type: Histogram, Programs: []string{Node},
		Help: "Time of a pass over all devices.", Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		Absent: "unless `usage.enabled` is set",
	})
)

// Labels of the metrics of measured use.
var (
	labelPod       = Label{"pod", "the pod's name"}
	labelContainer = Label{"container", "the container's name; empty for processes of which only the pod is known"}
)

// labelsOfUsage are those of what is used of a device by a namespace or a part of it.
func labelsOfUsage(more ...Label) []Label {
	return append([]Label{labelResource, labelDevice, labelIndex, {"namespace", "the pods' namespace"}}, more...)
}

// Metrics of the certificates that a program makes for itself.
var (
	CertificateExpiry = define(Metric{
		Name: "divvy_certificate_expiry_timestamp_seconds", Type: Gauge, Programs: []string{Extender, Webhook},
		Help: "When what is served expires, in seconds since 1970.", Labels: []Label{{"kind", "`certificate` or `ca`"}},
		Absent: "until there is a certificate",
	})
	CertificateRotations = define(Metric{
		Name: "divvy_certificate_rotations_total", Type: Counter, Programs: []string{Extender, Webhook},
		Help:   "Certificates and CAs that this replica put in the place of others.",
		Labels: []Label{{"kind", "`certificate` or `ca`"}},
	})
	CertificateFailures = define(Metric{
		Name: "divvy_certificate_failures_total", Type: Counter, Programs: []string{Extender, Webhook},
		Help: "Passes over the certificates that failed and were tried again.",
	})
	CABundleWrites = define(Metric{
		Name: "divvy_ca_bundle_writes_total", Type: Counter, Programs: []string{Extender, Webhook},
		Help:   "Times that this replica wrote the CA to where callers read it.",
		Labels: []Label{{"configuration", "name of the webhook configuration"}}, Absent: "until the first write",
	})
)

// Metrics of the webhooks of the remote pool.
var (
	WebhookReviews = define(Metric{
		Name: "divvy_webhook_reviews_total", Type: Counter, Programs: []string{Extender, Webhook},
		Help: "Admission reviews by webhook and result.",
		Labels: []Label{{"webhook", "`mutate` or `validate`; of the extender `config`, `scheduler`, `units` or `claims`"},
			{"result", "`converted`, `allowed`, `denied`, `bad` (no review that could be answered) or `error`"}},
	})
	WebhookReviewDuration = define(Metric{
		Name: "divvy_webhook_review_duration_seconds", Type: Histogram, Programs: []string{Extender, Webhook},
		Help:   "Time to answer an admission review, from its header to the answer.",
		Labels: []Label{{"webhook", "as above"}}, Buckets: answerBuckets, Absent: "until the first review",
	})
	WebhookReady = define(Metric{
		Name: "divvy_webhook_ready", Type: Gauge, Programs: []string{Webhook}, Help: "1 while answers are right, else 0.",
	})
	WebhookCatalogReloads = define(Metric{
		Name: "divvy_webhook_catalog_reloads_total", Type: Counter, Programs: []string{Webhook},
		Help: "Changes of the catalog's file.", Labels: []Label{{"result", "`accepted` or `rejected`"}},
	})
	WebhookCatalogClients = define(Metric{
		Name: "divvy_webhook_catalog_clients", Type: Gauge, Programs: []string{Webhook}, Help: "Clients in the catalog that is in use.",
	})
	WebhookCatalogStale = define(Metric{
		Name: "divvy_webhook_catalog_stale", Type: Gauge, Programs: []string{Webhook},
		Help: "1 while the catalog's file cannot be used and the one before is, else 0.",
	})
	PoolCredentialChanges = define(Metric{
		Name: "divvy_pool_credential_changes_total", Type: Counter, Programs: []string{Webhook},
		Help:   "Copies of the pool's secrets in namespaces of pods that this replica changed.",
		Labels: []Label{{"result", "`made`, `updated`, `removed` or `failed`"}},
	})
	PoolCredentialCopies = define(Metric{
		Name: "divvy_pool_credential_copies", Type: Gauge, Programs: []string{Webhook},
		Help: "Copies of the pool's secrets that there are, in all namespaces.",
	})
)

// Metrics of the pool's part on each node.
var (
	PoolUnits = define(Metric{
		Name: "divvy_pool_units", Type: Gauge, Programs: []string{PoolNode}, Help: "Units that this node offers; 100 are one GPU.",
	})
	PoolRegistrations = define(Metric{
		Name: "divvy_pool_registrations_total", Type: Counter, Programs: []string{PoolNode}, Help: "Registrations that kubelet accepted.",
	})
	PoolRegistered = define(Metric{
		Name: "divvy_pool_registered", Type: Gauge, Programs: []string{PoolNode}, Help: "1 while kubelet knows the units, else 0.",
	})
)

// Metrics of what wires kube-scheduler to the extender, one program on each
// control-plane node.
var (
	SchedconfState = define(Metric{
		Name: "divvy_schedconf_state", Type: Gauge, Programs: []string{Schedconf},
		Help: "1 for the state that the node's kube-scheduler is in, 0 for the others.",
		Labels: []Label{{"state", "`wired`, `waiting` (for the extender or the API server), `rolled-back`, `unhealthy` (wired, but " +
			"kube-scheduler is not well) or `failed`"}},
	})
	SchedconfChanges = define(Metric{
		Name: "divvy_schedconf_changes_total", Type: Counter, Programs: []string{Schedconf},
		Help:   "Times that kube-scheduler was given another manifest, by what became of it.",
		Labels: []Label{{"result", "`wired` or `rolled-back`"}},
	})
	SchedconfRounds = define(Metric{
		Name: "divvy_schedconf_rounds_total", Type: Counter, Programs: []string{Schedconf},
		Help:   "Times that files, Service and kube-scheduler were looked at, by the state that was found.",
		Labels: []Label{{"state", "as above"}},
	})
)
