package why

import (
	"regexp"
	"slices"
	"strings"
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
	{"the extender does not support", AnnotationWrong},
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
	{"volume node affinity", Volume},
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

var counted = regexp.MustCompile(`^[0-9]+ `)

// reasonsOf splits kube-scheduler's message into reasons. What it says of preemption is
// left out.
func reasonsOf(message string) []reason {
	text := message
	if _, rest, ok := strings.Cut(text, "nodes are available: "); ok {
		text = rest
	}
	for _, after := range []string{" preemption: ", " no new claims to deallocate", " still not schedulable"} {
		text, _, _ = strings.Cut(text, after)
	}
	text = strings.TrimSuffix(strings.TrimSpace(text), ".")
	if text == "" {
		return nil
	}
	var out []reason
	add := func(s string) { out = append(out, reason{s, codeOf(s)}) }
	if !counted.MatchString(text) {
		add(text)
		return out
	}
	// A reason may have commas in it; the next one begins with a number.
	for part := range strings.SplitSeq(text, ", ") {
		if counted.MatchString(part) || len(out) == 0 {
			add(part)
			continue
		}
		last := &out[len(out)-1]
		*last = reason{last.text + ", " + part, codeOf(last.text + ", " + part)}
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
