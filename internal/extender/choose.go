package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"strings"
	"sync"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/ledger"
	"github.com/divvy-gpu/divvy/internal/kube"
)

// choose leaves of the nodes with room the one that the policy rates best, of equal
// ones the first by name. kube-scheduler then rates no nodes, by itself or by asking
// a second time, which would take longer than all else that the extender adds to the
// placement of a pod; and what it knows of nodes besides devices does not overrule
// the policy.
//
// Nothing is chosen for a pod that prefers nodes itself, nor for one that was asked
// about a moment ago: if kube-scheduler did not take the node, it knows of something
// that stands against it, so it hears of all nodes the next time.
//
// Until the bind comes, room for the pod is kept on the node, as kube-scheduler asks
// about the next pods before. Only who may bind can cause that; everybody else gets
// the names of all nodes.
func (e *Extender) choose(ctx context.Context, args filterArgs, requests []accel.Request, verdicts []ledger.Verdict, r *filterResult) {
	uid := string(args.pod.UID)
	if !e.config.ChooseNode || len(requests) != 1 || len(r.fits) < 2 || uid == "" || args.prefers || !mayBind(ctx) {
		return
	}
	pod := kube.Pod{Ref: refOf(args.pod), Created: args.pod.CreationTimestamp.Time, Requests: requests}
	if !e.chosen.first(pod) {
		return
	}
	best := r.fits[0]
	for _, i := range r.fits[1:] {
		if verdicts[i].Rating > verdicts[best].Rating || verdicts[i].Rating == verdicts[best].Rating && args.names[i] < args.names[best] {
			best = i
		}
	}
	// A name of its own: as it came it is a part of the text of all names.
	e.config.Ledger.Expect(uid, strings.Clone(args.names[best]), requests[0])
	r.fits = append(r.fits[:0], best)
	// Why others refuse is for a pod that finds no node.
	clear(r.refusals)
	r.refusals = r.refusals[:0]
}

// maxChosen bounds what is remembered of pods between two questions.
const maxChosen = 10_000

// chosenPods are pods for which a node was chosen and that were not asked about or
// bound since, by UID. Forgetting them costs a pod that kube-scheduler cannot place
// one more attempt.
type chosenPods struct {
	mu   sync.Mutex
	pods map[string]kube.Pod
}

// first notes that a node is chosen for the pod. It reports false, and forgets the
// pod, where that was noted before.
func (c *chosenPods) first(pod kube.Pod) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, noted := c.pods[pod.Ref.UID]; noted {
		delete(c.pods, pod.Ref.UID)
		return false
	}
	if c.pods == nil || len(c.pods) >= maxChosen {
		c.pods = map[string]kube.Pod{}
	}
	c.pods[pod.Ref.UID] = pod
	return true
}

// pod returns the pod as kube-scheduler showed it when the node was chosen.
func (c *chosenPods) pod(ref accel.PodRef) (kube.Pod, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pod, noted := c.pods[ref.UID]
	return pod, noted && pod.Ref == ref
}

// forget takes a pod out.
func (c *chosenPods) forget(uid string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pods, uid)
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

var (
	_ json.Unmarshaler = (*notEmpty)(nil)
	_ json.Unmarshaler = (*argsSpread)(nil)
)
