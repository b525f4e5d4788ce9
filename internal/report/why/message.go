package why

import (
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/cause"
)

// reason is one part of kube-scheduler's message: "2 Insufficient cpu".
type reason struct {
	text string
	code Code // Unknown for one that no known filter gives
}

// reasonCodes maps parts of reasons to codes, the first that matches. Those of the
// extender come first: they name devices.
var reasonCodes = []struct {
	part string
	code Code
}{
	{"a pod can have only one shared resource", SeveralResources},
	{"divided equally", NotDivisible},
	{"annotation divvy.dev/", AnnotationWrong},
	{"the extender does not support", PolicyUnknown},
	{"than the context of a process takes", BelowContext},
	{"devices that are large enough and allowed", TooFewDevices},
	{"no device that", SelectionEmpty},
	{"isolation ", IsolationNotStated},
	{"the node is not labelled", NodeNotLabelled},
	{"the inventory of the node is invalid", InventoryBroken},
	{"the node offers no", NoSuchResource},
	{"does not support several devices", OldRelease},
	{"insufficient cpu or memory for a pod with a device", CPUOrMemory},
	{" in one ", NoDeviceFits},
	{"insufficient ", NoDeviceFits},
	{"connection refused", ExtenderDown},
	{"context deadline exceeded", ExtenderDown},
	{"Client.Timeout exceeded", ExtenderDown},
	{"gcushare-scheduler/", ExtenderDown},

	{"Insufficient cpu", CPUOrMemory},
	{"Insufficient memory", CPUOrMemory},
	{"Insufficient ephemeral-storage", Ephemeral},
	{"Too many pods", Pods},
	{"Insufficient ", InsufficientCapacity},
	{"free ports", Ports},
	{"were unschedulable", Cordoned},
	{"were not ready", NodeNotReady},
	{"node.kubernetes.io/unschedulable", Cordoned},
	{"node.kubernetes.io/not-ready", NodeNotReady},
	{"node.kubernetes.io/unreachable", Stale},
	{"untolerated taint", Taint},
	{"topology spread constraints", Spread},
	// Its affinity is an argument of kube-scheduler's plugin, which no object of the API has.
	{"scheduler-enforced", Unknown},
	{"volume node affinity", Volume},
	{"free storage", Volume},
	{"available disk", Volume},
	{"pvc(s)", Volume},
	{"PersistentVolumeClaim", Volume},
	{"persistentvolumeclaim", Volume},
	{"PersistentVolume", Volume},
	{"volume", Volume},
	{"resourceclaim", Claim},
	{"ResourceClaim", Claim},
	{"cannot allocate all claims", Claim},
	{"pod affinity", PodAffinity},
	{"anti-affinity", PodAffinity},
	{"node affinity", Affinity},
	{"node selector", Selector},
	{"didn't match the requested node name", Selector},
}

// reasonsOf splits kube-scheduler's message into reasons.
func reasonsOf(message string) []reason {
	var out []reason
	for _, text := range cause.Reasons(message) {
		out = append(out, reason{text, codeOf(text)})
	}
	return out
}

func codeOf(text string) Code {
	for _, r := range reasonCodes {
		if strings.Contains(text, r.part) {
			return r.code
		}
	}
	return Unknown
}

// quoted are the codes that are only ever quoted from kube-scheduler.
func quoted(c Code) bool {
	return slices.Contains([]Code{Spread, PodAffinity, Volume, Claim, ExtenderDown, Unknown}, c)
}
