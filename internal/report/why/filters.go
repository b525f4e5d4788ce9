package why

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	placement "github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// ask is a pod, or a changed copy of it, as the filters see it.
type ask struct {
	pod      *v1.Pod
	requests amounts
	affinity nodeaffinity.RequiredNodeAffinity
	selector nodeaffinity.RequiredNodeAffinity
	// shared is what it requests of a resource that the extender decides about; without a
	// name for none.
	shared accel.Request
	// mistake is why the request cannot be served by any node, nil for none.
	mistake error
	several []accel.Request
}

// newAsk reads a pod.
func (w *world) newAsk(p *v1.Pod) *ask {
	a := &ask{pod: p, requests: requestsOf(p), affinity: nodeaffinity.NewRequiredNodeAffinity(nil, p.Spec.Affinity),
		selector: nodeaffinity.NewRequiredNodeAffinity(p.Spec.NodeSelector, nil)}
	requests, err := kube.RequestsOf(p, w.memory)
	a.mistake = err
	if len(requests) > 1 {
		a.several = requests
	}
	if len(requests) > 0 {
		a.shared = requests[0]
	}
	if a.shared.Policy == placement.Fragmentation {
		a.shared.Policy = "" // it is the extender's alone, and the same fits
	}
	return a
}

// resource is the extended resource that the pod is about: the shared one, else the first
// that it requests; "" for none.
func (a *ask) resource() v1.ResourceName {
	if a.shared.Resource != "" {
		return v1.ResourceName(a.shared.Resource)
	}
	for _, name := range slices.Sorted(maps.Keys(a.requests)) {
		if strings.Contains(string(name), "/") && a.requests[name] > 0 {
			return name
		}
	}
	return ""
}

// peak is how much of the resource the pod requests.
func (a *ask) peak() accel.Units {
	if a.shared.Resource != "" {
		return a.shared.Peak()
	}
	return accel.Units(a.requests[a.resource()])
}

// after are the pods nominated to a node that kube-scheduler counts as if they were on it:
// those of no lower priority.
func (a *ask) after(n *nodeView) []placedPod {
	var out []placedPod
	for _, p := range n.nominated {
		self := p.Namespace == a.pod.Namespace && p.Name == a.pod.Name
		if !self && corev1helpers.PodPriority(p.Pod) >= corev1helpers.PodPriority(a.pod) {
			out = append(out, p)
		}
	}
	return out
}

// free is what kube-scheduler counts as free of a resource for the pod.
func (a *ask) free(n *nodeView, r v1.ResourceName) int64 {
	free := n.free(r)
	for _, p := range a.after(n) {
		free -= p.requests[r]
	}
	return free
}

// hindrance is why kube-scheduler's own filters keep the pod off a node.
type hindrance struct {
	code Code
	text string
	// taint is that of a code Taint or StartupTaint; missing and resource are what is short.
	taint    *v1.Taint
	resource v1.ResourceName
	missing  int64
}

// hindrances are those of a node that do not come from the resource that the pod is about.
func (a *ask) hindrances(n *nodeView) []hindrance {
	var out []hindrance
	out = appendReadiness(out, a, n)
	if a.pod.Spec.NodeName != "" && a.pod.Spec.NodeName != n.Name {
		return append(out, hindrance{code: Selector, text: "spec.nodeName " + a.pod.Spec.NodeName})
	}
	if ok, _ := a.selector.Match(n.Node); !ok {
		out = append(out, hindrance{code: Selector, text: "node selector " + labels.Set(missingLabels(a.pod, n.Node)).String()})
	}
	if ok, _ := a.affinity.Match(n.Node); !ok {
		out = append(out, hindrance{code: Affinity, text: "required node affinity"})
	}
	about := a.resource()
	for _, name := range slices.Sorted(maps.Keys(a.requests)) {
		want := a.requests[name]
		if name == about || want <= 0 || want <= a.free(n, name) {
			continue
		}
		h := hindrance{code: CPUOrMemory, resource: name, missing: want - a.free(n, name)}
		h.text = fmt.Sprintf("insufficient %s (%s short)", name, quantity(name, h.missing))
		switch {
		case name == v1.ResourcePods:
			h.code, h.text = Pods, fmt.Sprintf("pod limit reached (%d)", n.allocatable[name])
		case name == v1.ResourceEphemeralStorage:
			h.code = Ephemeral
		case name != v1.ResourceCPU && name != v1.ResourceMemory:
			h.code = InsufficientCapacity
			if n.allocatable[name] == 0 {
				h.code, h.text = NoSuchResource, "offers no "+string(name)
			}
		}
		out = append(out, h)
	}
	if port := a.takenPort(n); port != "" {
		out = append(out, hindrance{code: Ports, text: "host port " + port + " is in use"})
	}
	return out
}

// appendReadiness appends what the node's state and taints say.
func appendReadiness(out []hindrance, a *ask, n *nodeView) []hindrance {
	cordoned := n.Spec.Unschedulable
	notReady, stale := false, false
	for i := range n.Status.Conditions {
		if c := &n.Status.Conditions[i]; c.Type == v1.NodeReady {
			notReady, stale = c.Status == v1.ConditionFalse, c.Status == v1.ConditionUnknown
		}
	}
	tolerates := func(t *v1.Taint) bool {
		return corev1helpers.TolerationsTolerateTaint(klog.Logger{}, a.pod.Spec.Tolerations, t, false)
	}
	unschedulable := v1.Taint{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule}
	var taints []hindrance
	for i := range n.Spec.Taints {
		t := &n.Spec.Taints[i]
		if t.Effect == v1.TaintEffectPreferNoSchedule || tolerates(t) {
			continue
		}
		switch t.Key {
		case v1.TaintNodeUnschedulable:
			cordoned = true
		case v1.TaintNodeNotReady:
			notReady = true
		case v1.TaintNodeUnreachable:
			stale = true
		default:
			code := Taint
			if isStartup(*t) {
				code = StartupTaint
			}
			taints = append(taints, hindrance{code: code, text: "taint " + taintText(t), taint: t})
		}
	}
	if stale {
		out = append(out, hindrance{code: Stale, text: "kubelet does not report, so the node's inventory may be outdated"})
	} else if notReady {
		out = append(out, hindrance{code: NodeNotReady, text: "not ready"})
	}
	if cordoned && !tolerates(&unschedulable) {
		out = append(out, hindrance{code: Cordoned, text: "cordoned"})
	}
	return append(out, taints...)
}

func taintText(t *v1.Taint) string {
	text := t.Key
	if t.Value != "" {
		text += "=" + t.Value
	}
	return text + ":" + string(t.Effect)
}

// missingLabels are those of the pod's nodeSelector that the node lacks.
func missingLabels(p *v1.Pod, n *v1.Node) map[string]string {
	out := map[string]string{}
	for k, v := range p.Spec.NodeSelector {
		if have, ok := n.Labels[k]; !ok || have != v {
			out[k] = v
		}
	}
	return out
}

// takenPort returns a host port of the pod that a pod of the node uses, "" for none.
func (a *ask) takenPort(n *nodeView) string {
	wanted := hostPorts(a.pod)
	if len(wanted) == 0 {
		return ""
	}
	for _, p := range slices.Concat(n.pods, a.after(n)) {
		for _, taken := range hostPorts(p.Pod) {
			for _, want := range wanted {
				same := cmp.Or(want.HostIP, "0.0.0.0") == cmp.Or(taken.HostIP, "0.0.0.0") ||
					cmp.Or(want.HostIP, "0.0.0.0") == "0.0.0.0" || cmp.Or(taken.HostIP, "0.0.0.0") == "0.0.0.0"
				if same && want.HostPort == taken.HostPort &&
					cmp.Or(want.Protocol, v1.ProtocolTCP) == cmp.Or(taken.Protocol, v1.ProtocolTCP) {
					return fmt.Sprint(want.HostPort)
				}
			}
		}
	}
	return ""
}

func hostPorts(p *v1.Pod) []v1.ContainerPort {
	var out []v1.ContainerPort
	for i := range p.Spec.InitContainers {
		if c := &p.Spec.InitContainers[i]; kube.IsSidecar(c) {
			out = appendPorts(out, c)
		}
	}
	for i := range p.Spec.Containers {
		out = appendPorts(out, &p.Spec.Containers[i])
	}
	return out
}

func appendPorts(out []v1.ContainerPort, c *v1.Container) []v1.ContainerPort {
	for _, port := range c.Ports {
		if port.HostPort > 0 {
			out = append(out, port)
		}
	}
	return out
}

// unjudged are the things of a pod that kube-scheduler looks at and this package does not.
// A change of a pod with any of them is not verified.
func (w *world) unjudged(p *v1.Pod) []string {
	var out []string
	for _, c := range p.Spec.TopologySpreadConstraints {
		if c.WhenUnsatisfiable != v1.ScheduleAnyway {
			out = append(out, "topology spread constraints")
			break
		}
	}
	if a := p.Spec.Affinity; a != nil && (a.PodAffinity != nil && len(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 ||
		a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0) {
		out = append(out, "affinity between pods")
	} else if w.repelled(p) {
		out = append(out, "anti-affinity of other pods")
	}
	if slices.ContainsFunc(p.Spec.Volumes, func(v v1.Volume) bool {
		s := &v.VolumeSource
		return s.EmptyDir == nil && s.HostPath == nil && s.ConfigMap == nil && s.Secret == nil && s.DownwardAPI == nil && s.Projected == nil
	}) {
		out = append(out, "volumes")
	}
	if len(p.Spec.ResourceClaims) > 0 {
		out = append(out, "resource claims")
	}
	if _, of := w.snapshot.gangOf(p); of {
		out = append(out, "the other pods of its group")
	}
	return out
}

// repelled reports whether the required anti-affinity of a pod on a node may be about p. Of
// its namespaces it looks at none, which may call a change unverified that is right.
func (w *world) repelled(p *v1.Pod) bool {
	return slices.ContainsFunc(w.repelling, func(s *metav1.LabelSelector) bool { return mayMatch(s, p.Labels) })
}

// mayMatch reports whether a selector matches labels. One that cannot be parsed is about all.
// Most selectors of a large cluster are about other labels, and need not be parsed.
func mayMatch(s *metav1.LabelSelector, of map[string]string) bool {
	if s != nil {
		for key, value := range s.MatchLabels {
			if have, has := of[key]; !has || have != value {
				return false
			}
		}
	}
	parsed, err := metav1.LabelSelectorAsSelector(s)
	return err != nil || parsed.Matches(labels.Set(of))
}

// appendRepelling appends the selectors of the required anti-affinity of a pod on a node.
func appendRepelling(out []*metav1.LabelSelector, p *v1.Pod) []*metav1.LabelSelector {
	a := p.Spec.Affinity
	if a == nil || a.PodAntiAffinity == nil || p.Spec.NodeName == "" {
		return out
	}
	for _, term := range a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution {
		out = append(out, term.LabelSelector)
	}
	return out
}
