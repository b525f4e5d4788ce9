package cluster

import (
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// A node says within half a second of a pod that it went while its containers may
// have run; one whose daemon does not run says nothing.
const (
	// unseenGrace is how long a State waits for the node's word on a pod whose
	// end was missed: most ended as pods should.
	unseenGrace = 3 * time.Second
	// endingGrace is how long it waits for it on a pod that was seen to go, beside
	// the time that kubelet gives its containers to end.
	endingGrace = 5 * time.Second
	// maxGrace bounds the latter; pods may ask for years.
	maxGrace = 10 * time.Minute
)

// graceOf is how long kubelet gives the containers to end when the pod is gone from
// the API server, in seconds. That a deletion by force asks for none makes no
// difference to it.
func graceOf(pod *v1.Pod) int32 {
	seconds := int64(v1.DefaultTerminationGracePeriodSeconds)
	if s := pod.Spec.TerminationGracePeriodSeconds; s != nil {
		seconds = *s
	}
	return int32(min(max(seconds, 0), int64(maxGrace/time.Second)))
}

// endingPod is a pod that is gone from the API server, or called ended, and counts
// still: it was deleted by force, or its end was missed. It counts as long as its
// node lists it, and until the node can have done so.
type endingPod struct {
	node   string
	listed bool
	until  time.Time // when it is not listed
}

// endingList is what a node lists, as it is in the annotation and decoded.
type endingList struct {
	text string
	pods []wire.Ending
}

func (l *endingList) has(uid string) bool {
	return l != nil && slices.ContainsFunc(l.pods, func(p wire.Ending) bool { return p.Pod.UID == uid })
}

// release frees what a pod holds that is gone, once its containers are: runs says
// whether they may run, by what was seen last, and silence how long the node's word is
// waited for. s.mu is held.
func (s *State) release(pod *Pod, runs bool, silence time.Duration) {
	uid := pod.Ref.UID
	listed := s.nodes[pod.Node].ending.has(uid)
	if pod.Node == "" || !runs && !listed {
		delete(s.ending, uid)
		s.config.Ledger.Forget(uid)
		return
	}
	if e := s.ending[uid]; e != nil {
		return
	}
	s.ending[uid] = &endingPod{node: pod.Node, listed: listed, until: s.config.Now().Add(silence)}
	for _, r := range pod.Requests {
		// Without a device: it stays on the one that is known.
		s.config.Ledger.Observe(ledger.Holding{
			Pod: pod.Ref, Node: pod.Node, Resource: r.Resource, Units: r.Peak(), Created: pod.Created, CPU: r.CPU, Memory: r.Memory,
			Priority: r.Priority, Ending: true, Gone: true,
		})
	}
}

// setEnding takes in what a node lists. A list that cannot be read changes nothing.
// s.mu is held.
func (s *State) setEnding(n *slimNode) *endingList {
	old := s.nodes[n.name].ending
	if old == nil && n.ending == "" || old != nil && old.text == n.ending {
		return old
	}
	pods, err := wire.DecodeEnding(n.ending)
	if err != nil {
		s.logger.Error(err, "Ignoring the node's list of ending pods", "node", n.name)
		return old
	}
	list := &endingList{text: n.ending, pods: pods}
	s.forgetEnding(func(e *endingPod) bool { return e.node == n.name && e.listed }, list)
	for _, p := range pods {
		if live, ok := s.pods[p.Pod.String()]; ok && live.pod.Ref.UID == p.Pod.UID {
			continue // the node knows more than the watch of pods has shown; see release
		}
		if !slices.Contains(s.config.Resources, p.Resource) {
			continue
		}
		h := ledger.Holding{Pod: p.Pod, Node: n.name, Resource: p.Resource, Units: p.Units, Ending: true, Gone: true}
		if len(p.Devices) > 0 {
			h.Confirmed = true
			h.SetDevices(p.Devices)
		}
		s.config.Ledger.Observe(h)
		s.ending[p.Pod.UID] = &endingPod{node: n.name, listed: true}
	}
	if len(pods) == 0 {
		return nil
	}
	return list
}

// forgetEnding frees the ending pods that are chosen, but for those on a list. s.mu is
// held.
func (s *State) forgetEnding(chosen func(*endingPod) bool, but ...*endingList) {
	for uid, e := range s.ending {
		if chosen(e) && !slices.ContainsFunc(but, func(l *endingList) bool { return l.has(uid) }) {
			delete(s.ending, uid)
			s.config.Ledger.Forget(uid)
		}
	}
}

// Settle frees what pods hold that are gone and of which their node has said nothing
// for too long. It is to be called every second or so; its cost depends on the
// number of such pods.
func (s *State) Settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.config.Now()
	s.forgetEnding(func(e *endingPod) bool { return !e.listed && !now.Before(e.until) })
}
