package cluster

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// ComesWithNode reports whether the pod is there because its node is: one of a
// DaemonSet, or one that kubelet runs from a file. Such pods say nothing of what
// will be asked for next.
func ComesWithNode(pod *v1.Pod) bool {
	owner := metav1.GetControllerOfNoCopy(pod)
	return owner != nil && (owner.Kind == "DaemonSet" || owner.Kind == "Node")
}

// learning is what the Learner heard of, and what it will.
type learning struct {
	learner Learner // nil for none
	// early are pods on nodes that were seen before all nodes and pods were read.
	early []*slimPod
	// failures are by the owner's UID: pods that failed and were not replaced yet.
	failures map[types.UID]int
}

// learn tells the Learner of a pod that is seen on a node for the first time. Pods that
// wait, or that a scheduling gate holds back, say nothing of what is placed. s.mu is
// held.
//
// What the API server had at the start follows when all of it was read, as a pod without
// a device counts by what its node publishes.
func (s *State) learn(p *slimPod) {
	switch {
	case s.learning.learner == nil || p.comesWithNode || p.Node == "":
	case !s.nodesSynced || !s.podsSynced:
		s.learning.early = append(s.learning.early, p)
	default:
		s.learning.tell(p, s.nodes[p.Node].counted)
	}
}

// learnRead tells the Learner of the early pods once all nodes and pods were read: the
// oldest first, as if each had been seen coming. s.mu is held.
func (s *State) learnRead() {
	if !s.nodesSynced || !s.podsSynced {
		return
	}
	slices.SortStableFunc(s.learning.early, func(p, q *slimPod) int { return p.Created.Compare(q.Created) })
	for _, p := range s.learning.early {
		s.learning.tell(p, s.nodes[p.Node].counted)
		s.learning.noteFailure(p)
	}
	s.learning.early = nil
}

// tell passes on a pod, on a node that publishes the resources.
func (l *learning) tell(p *slimPod, resources []accel.Resource) {
	switch {
	case l.replaces(p):
	case len(p.Requests) == 0:
		for _, resource := range resources {
			l.learner.LearnBeside(resource, p.cpu, p.memory)
		}
	case len(p.Requests) == 1 && p.Mistake == nil:
		l.learner.Learn(p.Requests[0])
	}
}

// maxFailures bounds the owners of pods that failed and were not replaced.
const maxFailures = 10_000

// noteFailure notes that a pod failed on its node: its owner makes another, which is
// no further demand.
func (l *learning) noteFailure(p *slimPod) {
	if !p.failed || p.owner == "" || p.Node == "" || l.learner == nil {
		return
	}
	if len(l.failures) >= maxFailures {
		clear(l.failures)
	}
	l.failures[p.owner]++
}

// replaces reports whether the pod takes the place of one that failed; each is
// replaced once.
func (l *learning) replaces(p *slimPod) bool {
	if p.owner == "" || l.failures[p.owner] == 0 {
		return false
	}
	if l.failures[p.owner]--; l.failures[p.owner] == 0 {
		delete(l.failures, p.owner)
	}
	return true
}
