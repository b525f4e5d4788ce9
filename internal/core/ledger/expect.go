package ledger

import (
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// settle is for how long after a question about a pod the watch may still show how an
// earlier attempt to place it ended: kube-scheduler may try again before it sees itself
// what it wrote.
const settle = time.Second

// Attempt is what the status of a pod that has no node says of the attempts to place
// it. kube-scheduler changes it when an attempt fails.
type Attempt struct {
	// Version is the pod's resource version as a number, 0 where it is none.
	Version uint64
	// Outcome stands for the pod's condition PodScheduled: it differs when that differs.
	Outcome uint64
}

// Expected is a pod that kube-scheduler was given one node for.
type Expected struct {
	Pod     accel.PodRef
	Created time.Time
	Request accel.Request
	// Attempt is what the question showed.
	Attempt Attempt
}

// An expectation is what a reservation that waits for its bind knows of it.
type expectation struct {
	attempt Attempt
	// seen is true once the watch has shown the pod.
	seen bool
}

// Expect reserves devices of the node for a pod, because kube-scheduler was given no
// other node for it: it assumes the pod there, asks about the next pods before it
// binds this one, and may wait for volumes or plugins in between. The reservation
// takes the place of an earlier one of Expect, and lasts until Reserve takes it over,
// Withdraw is called, Unbound shows that the attempt has failed, the pod is forgotten,
// or Options.MaxBindDelay is over. Until Unbound is called for it, it is short: the pod
// may not exist.
//
// It returns false, and nothing is reserved, where the pod does not fit on the node.
func (l *Ledger) Expect(e Expected, nodeName string) bool {
	req := e.Request
	req.Pod = e.Pod.UID
	ask, policy, err := l.rules.ask(req)
	if err != nil || ask.Devices == 0 || e.Pod.UID == "" {
		return false
	}
	expireTiers(l)
	l.mu.Lock()
	defer l.mu.Unlock()
	s := &l.state
	h := s.pods.on(e.Pod.UID, req.Resource)
	if h != nil && !h.expects() {
		return h.Node == nodeName // a bind was faster
	}
	if h != nil && !h.holds(nodeName, &ask) {
		s.pods.drop(h)
		h = nil
	}
	if h == nil {
		n := s.nodes.publishing(req.Resource, nodeName)
		if n == nil {
			return false
		}
		chosen, err := s.choose(n, &req, &ask, policy)
		if err != nil {
			return false
		}
		h = s.hold(e.Pod, e.Created, n, chosen, &req)
	}
	h.reservation.since = l.rules.now()
	h.reservation.expected = &expectation{attempt: e.Attempt}
	return true
}

// Withdraw ends what is expected of a pod, as kube-scheduler was not given one node for
// it any more. It reports whether anything was.
func (l *Ledger) Withdraw(podUID string) bool {
	if !l.Expects(podUID) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state.pods.dropAll(podUID, (*holding).expects)
}

// Expects reports whether a bind of the pod is expected.
func (l *Ledger) Expects(podUID string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.state.pods.expected(podUID) != nil
}

// Unbound says what the watch shows of a pod that has no node, and which node it is
// nominated for, "" for none. An attempt has failed when the condition PodScheduled
// is another one than in the question, or when the node that the pod was nominated
// for during the attempt is taken back. What changes within settle after the question
// may be the end of an attempt before, and counts as such. kube-scheduler that ends in
// the middle of an attempt changes nothing: what is expected stays until the next one
// asks.
func (l *Ledger) Unbound(podUID, nominated string, a Attempt) {
	if !l.Expects(podUID) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.state.pods.expected(podUID)
	if h == nil {
		return
	}
	e := h.reservation.expected
	e.seen = true
	if a.Version <= e.attempt.Version && a.Version != 0 {
		return // the question was of that version, or of a newer one
	}
	failed := a.Outcome != e.attempt.Outcome || nominated == "" && l.state.nominations.confirmed(podUID, h.Node)
	e.attempt.Outcome = a.Outcome
	if failed && l.rules.now().Sub(h.reservation.since) >= settle {
		l.state.pods.dropAll(podUID, (*holding).expects)
	}
}
