package extender

import (
	"bytes"
	"context"
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
func (e *Extender) choose(ctx context.Context, args filterArgs, requests []accel.Request, verdicts []ledger.Verdict, r *filterResult) {
	uid := string(args.pod.UID)
	if len(requests) != 1 || uid == "" || !mayBind(ctx) {
		return
	}
	if len(r.fits) == 0 || len(r.fits) > 1 && (!e.config.ChooseNode || args.prefers) {
		e.attempts.forget(uid)
		e.config.Ledger.Withdraw(uid)
		return
	}
	pod := cluster.Pod{Ref: refOf(args.pod), Created: args.pod.CreationTimestamp.Time, Requests: requests}
	if failed := e.attempts.begin(pod, e.config.Now(), e.config.Ledger.Expects); failed && len(r.fits) > 1 {
		e.config.Ledger.Withdraw(uid)
		return
	}
	best := r.fits[0]
	for _, i := range r.fits[1:] {
		if verdicts[i].Rating > verdicts[best].Rating || verdicts[i].Rating == verdicts[best].Rating && args.names[i] < args.names[best] {
			best = i
		}
	}
	asked := cluster.AttemptOf(args.pod)
	// A name of its own: as it came it is a part of the text of all names.
	node := strings.Clone(args.names[best])
	if !e.config.Ledger.Expect(ledger.Expected{Pod: pod.Ref, Created: pod.Created, Request: requests[0], Attempt: asked}, node) {
		return // another pod was faster: kube-scheduler gets all nodes that had room
	}
	// After that, so that the watch cannot have shown the pod in between.
	if known, ok := e.config.Cluster.Pod(pod.Ref.Namespace, pod.Ref.Name); ok && known.Ref.UID == uid {
		e.config.Ledger.Unbound(uid, node, asked)
	}
	if len(r.fits) > 1 {
		r.fits = append(r.fits[:0], best)
		// Why it does not fit on others is for a pod that finds no node.
		clear(r.refusals)
		r.refusals = r.refusals[:0]
	}
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

// argsAffinity is whether a pod's affinity has preferences.
type argsAffinity struct {
	NodeAffinity, PodAffinity, PodAntiAffinity struct {
		Preferred notEmpty `json:"preferredDuringSchedulingIgnoredDuringExecution"`
	}
}

func (a *argsAffinity) prefers() bool {
	return bool(a.NodeAffinity.Preferred || a.PodAffinity.Preferred || a.PodAntiAffinity.Preferred)
}

// notEmpty is whether a list has something in it.
type notEmpty bool

// UnmarshalJSON keeps nothing of the list.
func (n *notEmpty) UnmarshalJSON(data []byte) error {
	inside := bytes.TrimSpace(bytes.Trim(data, "[]"))
	*n = notEmpty(len(inside) > 0 && !bytes.Equal(inside, []byte("null")))
	return nil
}

// argsSpread is whether a pod's topologySpreadConstraints have one that is a
// preference. A name or label that is that very word only costs time.
type argsSpread bool

// UnmarshalJSON looks for the word that makes a constraint a preference.
func (s *argsSpread) UnmarshalJSON(data []byte) error {
	*s = argsSpread(bytes.Contains(data, []byte(`"ScheduleAnyway"`)))
	return nil
}
