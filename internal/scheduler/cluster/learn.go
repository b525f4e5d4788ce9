package cluster

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

// learn tells the Learner of a pod that is seen on a node for the first time. Pods that
// wait, or that a scheduling gate holds back, say nothing of what is placed. b.mu is
// held.
//
// What the API server had when the books were opened is told when all of it was
// read, as a pod without a device counts by what its node publishes.
func (b *Books) learn(p *slimPod) {
	switch {
	case b.config.Learner == nil || p.comesWithNode || p.Node == "":
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
		b.noteFailure(p)
	}
	b.unlearned = nil
}

func (b *Books) tell(p *slimPod) {
	if b.replaces(p) {
		return
	}
	switch {
	case len(p.Requests) == 0:
		for _, resource := range b.nodes[p.Node].counted {
			b.config.Learner.LearnBeside(resource, p.cpu, p.memory)
		}
	case len(p.Requests) == 1 && p.Mistake == nil:
		b.config.Learner.Learn(p.Requests[0])
	}
}

// maxFailures bounds the owners of pods that failed and were not replaced.
const maxFailures = 10_000

// noteFailure notes that a pod failed on its node: its owner makes another, which is
// no further demand. b.mu is held.
func (b *Books) noteFailure(p *slimPod) {
	if !p.failed || p.owner == "" || p.Node == "" || b.config.Learner == nil {
		return
	}
	if len(b.failures) >= maxFailures {
		clear(b.failures)
	}
	b.failures[p.owner]++
}

// replaces reports whether the pod takes the place of one that failed; each is
// replaced once. b.mu is held.
func (b *Books) replaces(p *slimPod) bool {
	if p.owner == "" || b.failures[p.owner] == 0 {
		return false
	}
	if b.failures[p.owner]--; b.failures[p.owner] == 0 {
		delete(b.failures, p.owner)
	}
	return true
}
