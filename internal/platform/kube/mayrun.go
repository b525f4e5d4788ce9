package kube

import v1 "k8s.io/api/core/v1"

// MayRun reports whether containers of a pod may run, by what its status says last.
// Kubelet says that all have ended before it lets a pod go or calls it ended;
// another may do so while they run. A pod of which kubelet has said nothing yet has
// started none.
func MayRun(pod *v1.Pod) bool {
	ended := pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
	for _, statuses := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range statuses {
			state := &statuses[i].State
			// One that waits will be started, unless its pod has ended.
			if state.Running != nil || !ended && state.Terminated == nil {
				return true
			}
		}
	}
	return false
}
