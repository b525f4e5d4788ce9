package kube

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// comesWithNode reports whether the pod is there because its node is: one of a
// DaemonSet, or one that kubelet runs from a file. Such pods say nothing of what
// will be asked for next.
func comesWithNode(pod *v1.Pod) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner != nil && (owner.Kind == "DaemonSet" || owner.Kind == "Node")
}

// learn tells the Learner of a pod that was not seen before. b.mu is held.
//
// What the API server had when the books were opened is told when all of it was
// read, as a pod without a device counts by what its node publishes.
func (b *Books) learn(p *slimPod) {
	switch {
	case b.config.Learner == nil || p.comesWithNode:
	case !b.nodesSynced || !b.podsSynced:
		b.unlearned = append(b.unlearned, p)
	default:
		b.tell(p)
	}
}

// learnRead tells of the pods that were there before the books, once all nodes
// and pods were read: the oldest first, as if each had been seen coming. b.mu is
// held.
func (b *Books) learnRead() {
	if !b.nodesSynced || !b.podsSynced {
		return
	}
	slices.SortStableFunc(b.unlearned, func(p, q *slimPod) int { return p.Created.Compare(q.Created) })
	for _, p := range b.unlearned {
		b.tell(p)
	}
	b.unlearned = nil
}

func (b *Books) tell(p *slimPod) {
	switch {
	case len(p.Requests) == 0:
		for _, resource := range b.nodes[p.Node].counted {
			b.config.Learner.LearnBeside(resource, p.cpu, p.memory)
		}
	case len(p.Requests) == 1 && p.Mistake == nil:
		b.config.Learner.Learn(p.Requests[0])
	}
}
