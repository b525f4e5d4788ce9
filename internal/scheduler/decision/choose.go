package decision

import (
	"strings"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// choose leaves of the nodes with room the one that the policy rates best, of equal
// ones the first by name. kube-scheduler then rates no nodes, by itself or by asking
// a second time, which would take longer than all else that the extender adds to the
// placement of a pod; and what it knows of nodes besides devices does not overrule
// the policy.
//
// Nothing is chosen for a pod that prefers nodes itself, nor for one whose attempt with
// a chosen node has failed: something that kube-scheduler knows stands against that
// node, so it gets all of them. The same question has the same answer until then.
//
// Capacity for the pod is reserved on the node until its bind, wherever the answer names
// one node only: kube-scheduler asks about the next pods before it binds this one. Only
// a caller that may bind can cause that; others get the names of all nodes.
func (d *Decider) choose(q *Question, requests []accel.Request, r *Answer) {
	uid := string(q.Pod.UID)
	if len(requests) != 1 || uid == "" || !q.Believed {
		return
	}
	if len(r.Fits) == 0 || len(r.Fits) > 1 && (!d.config.ChooseNode || q.Prefers) {
		d.attempts.forget(uid)
		d.config.Ledger.Withdraw(uid)
		return
	}
	pod := cluster.Pod{Ref: refOf(q.Pod), Created: q.Pod.CreationTimestamp.Time, Requests: requests}
	if failed := d.attempts.begin(pod, d.config.Now(), d.config.Ledger.Expects); failed && len(r.Fits) > 1 {
		d.config.Ledger.Withdraw(uid)
		return
	}
	best := r.Fits[0]
	for _, i := range r.Fits[1:] {
		if r.better(q, i, best) {
			best = i
		}
	}
	asked := cluster.AttemptOf(q.Pod)
	// A name of its own: as it came it is a part of the text of all names.
	node := strings.Clone(q.Nodes[best])
	if !d.config.Ledger.Expect(ledger.Expected{Pod: pod.Ref, Created: pod.Created, Request: requests[0], Attempt: asked}, node) {
		return // another pod was faster: kube-scheduler gets all nodes that had room
	}
	// After that, so that the watch cannot have shown the pod in between.
	if known, ok := d.config.Cluster.Pod(pod.Ref.Namespace, pod.Ref.Name); ok && known.Ref.UID == uid {
		d.config.Ledger.Unbound(uid, node, asked)
	}
	if len(r.Fits) > 1 {
		r.Fits = append(r.Fits[:0], best)
		// Why it does not fit on others is for a pod that finds no node.
		clear(r.Refusals)
		r.Refusals = r.Refusals[:0]
	}
}

// better reports whether the policy rates the i-th node above the j-th, or equal and it is the
// first by name.
func (a *Answer) better(q *Question, i, j int) bool {
	if vi, vj := a.verdicts[i].Rating, a.verdicts[j].Rating; vi != vj {
		return vi > vj
	}
	return q.Nodes[i] < q.Nodes[j]
}

const (
	// maxAttempts bounds what is remembered of pods between two questions.
	maxAttempts = 10_000
	// oneAttempt is for how long questions about a pod count as one attempt to place
	// it, unless it is known to have failed. kube-scheduler makes one attempt at a time
	// and waits 10 s for an answer; within those a replica that follows may have asked
	// twice.
	oneAttempt = 10 * time.Second
)

// attempts are pods for which one node was named and that were not bound since, by
// UID. Forgetting them costs a pod that kube-scheduler cannot place one more attempt.
type attempts struct {
	mu   sync.Mutex
	pods map[string]attempt
}

type attempt struct {
	pod   cluster.Pod
	since time.Time
	// failed is true once an attempt with a chosen node did not lead to a bind.
	failed bool
}

// begin notes that the pod is asked about. It reports whether an attempt with one node
// has failed: nothing is expected any more, since its bind failed or kube-scheduler gave
// up, or kube-scheduler asks again after a while.
func (a *attempts) begin(pod cluster.Pod, now time.Time, expects func(podUID string) bool) (failed bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	one, asked := a.pods[pod.Ref.UID]
	if !asked {
		if a.pods == nil || len(a.pods) >= maxAttempts {
			a.pods = map[string]attempt{}
		}
		a.pods[pod.Ref.UID] = attempt{pod: pod, since: now}
		return false
	}
	if !one.failed && (now.Sub(one.since) >= oneAttempt || !expects(pod.Ref.UID)) {
		one.failed = true
		a.pods[pod.Ref.UID] = one
	}
	return one.failed
}

// pod returns the pod as kube-scheduler showed it when the node was named.
func (a *attempts) pod(ref accel.PodRef) (cluster.Pod, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	one, noted := a.pods[ref.UID]
	return one.pod, noted && one.pod.Ref == ref
}

func (a *attempts) forget(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.pods, uid)
}
