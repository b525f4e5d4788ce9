package plugin

import (
	"iter"

	"github.com/go-logr/logr"
	v1 "k8s.io/api/core/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	fwk "k8s.io/kube-scheduler/framework"
)

// maxLooks is how many nodes are looked at for one to name.
const maxLooks = 64

// leavesChoice reports whether the policy alone may say where the pod goes: the pod has no
// wishes that kube-scheduler weighs, and nothing that only filters know.
func (p *Plugin) leavesChoice(pod *v1.Pod) bool {
	spec := &pod.Spec
	if pod.Status.NominatedNodeName != "" || len(spec.TopologySpreadConstraints) > 0 {
		return false
	}
	if a := spec.Affinity; a != nil {
		if a.PodAffinity != nil || a.PodAntiAffinity != nil ||
			a.NodeAffinity != nil && len(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0 {
			return false
		}
	}
	for _, containers := range [][]v1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			for _, port := range containers[i].Ports {
				if port.HostPort != 0 {
					return false
				}
			}
		}
	}
	for i := range spec.Volumes {
		switch v := &spec.Volumes[i]; {
		case v.Ephemeral != nil:
			return false
		case v.PersistentVolumeClaim != nil:
			claim, err := p.claims.PersistentVolumeClaims(pod.Namespace).Get(v.PersistentVolumeClaim.ClaimName)
			if err != nil || claim.Spec.VolumeName == "" {
				return false
			}
		}
	}
	return true
}

// choose returns the node to name in this attempt: of those in the order of the policy, the first on
// which the pod may run as far as can be seen at once, "" for none. kube-scheduler's own filters decide.
func (p *Plugin) choose(cs fwk.CycleState, pod *v1.Pod, ranked iter.Seq[string]) string {
	if !p.core.config.ChooseNode || inGroup(cs) || p.core.failed.has(string(pod.UID)) || !p.leavesChoice(pod) {
		return ""
	}
	requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{})
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	looks := 0
	for name := range ranked {
		if looks++; looks > maxLooks {
			break
		}
		info, err := p.handle.SnapshotSharedLister().NodeInfos().Get(name)
		if err != nil || info.Node() == nil {
			continue
		}
		if match, err := affinity.Match(info.Node()); err != nil || !match {
			continue
		}
		if mayRun(pod, info.Node()) && hasRoom(requests, info) {
			return name
		}
	}
	return ""
}

// mayRun reports whether the pod tolerates the node.
func mayRun(pod *v1.Pod, node *v1.Node) bool {
	taints := node.Spec.Taints
	if node.Spec.Unschedulable {
		taints = append(taints[:len(taints):len(taints)], v1.Taint{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule})
	}
	_, untolerated := corev1helpers.FindMatchingUntoleratedTaint(logr.Discard(), taints, pod.Spec.Tolerations,
		func(t *v1.Taint) bool { return t.Effect != v1.TaintEffectPreferNoSchedule }, true)
	return !untolerated
}

// hasRoom reports whether the node has the sums that the pod requests.
func hasRoom(requests v1.ResourceList, info fwk.NodeInfo) bool {
	has, used := info.GetAllocatable(), info.GetRequested()
	if len(info.GetPods())+1 > has.GetAllowedPodNumber() {
		return false
	}
	for name, quantity := range requests {
		var need, left int64
		switch name {
		case v1.ResourceCPU:
			need, left = quantity.MilliValue(), has.GetMilliCPU()-used.GetMilliCPU()
		case v1.ResourceMemory:
			need, left = quantity.Value(), has.GetMemory()-used.GetMemory()
		case v1.ResourceEphemeralStorage:
			need, left = quantity.Value(), has.GetEphemeralStorage()-used.GetEphemeralStorage()
		default:
			need, left = quantity.Value(), has.GetScalarResources()[name]-used.GetScalarResources()[name]
		}
		if need > 0 && need > left {
			return false
		}
	}
	return true
}
