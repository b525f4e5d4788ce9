package decision

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Recorder is a ledger whose decisions are kept. It is safe for concurrent use.
type Recorder struct {
	*ledger.Ledger
	// Log keeps them.
	Log *history.Log
	// Now is the clock.
	Now func() time.Time
}

// Forget is the ledger's, and notes what the pod held, or that it waits no longer.
func (r *Recorder) Forget(podUID string) {
	held := ledger.HeldBy(r.Ledger, podUID)
	for _, g := range held {
		r.Log.Ended(r.placement(g.Pod, &g.Grant))
	}
	if len(held) == 0 {
		r.Log.Gone(podUID, r.Now())
	}
	r.Ledger.Forget(podUID)
}

func (r *Recorder) placement(pod accel.PodRef, g *accel.Grant) *history.Placement {
	p := &history.Placement{Pod: history.PodOf(pod), At: r.Now(), Node: g.Node, Resource: g.Resource, Units: g.Units,
		Devices: []history.Device{{Index: g.Index, ID: g.Device}}}
	for _, d := range g.More {
		p.Devices = append(p.Devices, history.Device{Index: d.Index, ID: d.Device})
	}
	return p
}

// bound notes which devices a pod got.
func (r *Recorder) bound(pod accel.PodRef, g *accel.Grant) {
	if r != nil {
		r.Log.Bound(r.placement(pod, g))
	}
}

// holds is where a pod is whose bind had no known outcome, or was another replica's.
func (r *Recorder) holds(pod accel.PodRef, node string) *history.Placement {
	held := ledger.HeldBy(r.Ledger, pod.UID)
	if len(held) == 0 {
		return &history.Placement{Pod: history.PodOf(pod), Node: node} // its devices are not known
	}
	p := r.placement(pod, &held[0].Grant)
	p.At = held[0].At.UTC()
	return p
}

// best are the positions of the candidates that are better than all others.
func (a *Answer) best(q *Question) (best [history.MaxCandidates]int, n int) {
	for _, i := range a.Fits {
		if n == len(best) && !a.better(q, i, best[len(best)-1]) {
			continue
		}
		at := min(n, len(best)-1)
		for ; at > 0 && a.better(q, i, best[at-1]); at-- {
			best[at] = best[at-1]
		}
		best[at], n = i, min(n+1, len(best))
	}
	return best, n
}

// rejected are the nodes on which a pod does not fit, by reason.
type rejected struct {
	counts [codes]int
	named  [codes][history.MaxNamed]string
}

func (r *rejected) add(code accel.ReasonCode, node string) {
	if int(code) >= len(r.counts) {
		return
	}
	if n := r.counts[code]; n < history.MaxNamed {
		r.named[code][n] = node
	}
	r.counts[code]++
}

// history is the same as it is kept.
func (r *rejected) history() (out []history.Rejected) {
	for code := range codes {
		if n := r.counts[code]; n > 0 && code != accel.Fits {
			// Nodes that were counted without a look at them have no names.
			named := slices.DeleteFunc(r.named[code][:min(n, history.MaxNamed)], func(name string) bool { return name == "" })
			out = append(out, history.Rejected{Code: codeName(code), Nodes: n, Named: named})
		}
	}
	return out
}

// candidates are the first of some nodes, with their ratings, as they were for a request.
func (r *Recorder) candidates(request *accel.Request, nodes iter.Seq2[string, int64]) (out []history.Candidate) {
	ask, policy, err := ledger.AskOf(r.Ledger, *request)
	if err != nil {
		return nil
	}
	var n place.Node
	for name, rating := range nodes {
		if ledger.View(r.Ledger, *request, name, &n) {
			out = append(out, history.CandidateOf(name, rating, &n, &ask, policy))
		}
		if len(out) == history.MaxCandidates {
			break
		}
	}
	return out
}

// decided notes an answer, in which the pod fits on so many nodes, of which these are best.
func (r *Recorder) decided(q *Question, request *accel.Request, a *Answer, no *rejected, fits int, best []int) {
	d := history.Decision{
		Pod: history.PodOf(refOf(q.Pod)), At: r.Now(), Request: history.RequestOf(request), Offered: len(q.Nodes), Fits: fits,
	}
	if len(q.Nodes) <= history.MaxOnly {
		d.Only = q.Nodes
	}
	if len(a.Fits) == 1 {
		d.Chosen = q.Nodes[a.Fits[0]]
	}
	d.Rejected = no.history()
	d.Candidates = r.candidates(request, func(yield func(string, int64) bool) {
		for _, i := range best {
			if !yield(q.Nodes[i], a.verdicts[i].Rating) {
				return
			}
		}
	})
	r.Log.Decided(&d)
}

// UnknownDecisionError says why a decision cannot be explained.
type UnknownDecisionError struct{ reason string }

func (e *UnknownDecisionError) Error() string { return e.reason }

// History returns what is kept; nil for nothing.
func (d *Decider) History() *history.Log {
	if d.config.Recorder == nil {
		return nil
	}
	return d.config.Recorder.Log
}

// Explain explains the last decision about a pod. The error is an *UnknownDecisionError
// where none is known.
func (d *Decider) Explain(namespace, name string) (history.Explanation, error) {
	r := d.config.Recorder
	if r == nil {
		return history.Explanation{}, errors.New("decisions are not kept")
	}
	e := r.Log.About(namespace, name)
	if e.Decision == nil {
		return history.Explanation{}, &UnknownDecisionError{d.whyUnknown(namespace, name, e.Bound)}
	}
	known, exists := d.config.Cluster.Pod(namespace, name)
	if e.Bound == nil && exists && known.Ref.UID == e.Decision.Pod.UID && known.Node != "" {
		e.Bound = r.holds(known.Ref, known.Node)
	}
	request := e.Decision.Request.Request(e.Decision.Pod.UID)
	ask, policy, err := ledger.AskOf(r.Ledger, request)
	if err != nil {
		return history.Explanation{}, fmt.Errorf("explain the decision about pod %s/%s: %w", namespace, name, err)
	}
	out := history.Explain(e, policy, ask)
	if exists && known.Ref.UID != e.Decision.Pod.UID {
		out.Notes = append(out.Notes, "the pod was created again since; this is about the one before it")
	}
	return out, nil
}

// whyUnknown says what is known of a pod of which no decision is kept.
func (d *Decider) whyUnknown(namespace, name string, bound *history.Placement) string {
	extent := d.History().Extent()
	since := extent.Started
	until := "the start of this replica"
	if extent.Dropped > 0 {
		since, until = extent.Since, "the oldest decision that is kept"
	}
	when := fmt.Sprintf("%s, %s", since.Format(time.RFC3339), until)
	pod, known := d.config.Cluster.Pod(namespace, name)
	switch {
	case bound != nil:
		return fmt.Sprintf("pod %s/%s was bound to node %s at %s, and the question before that was answered before %s, or by "+
			"another replica", namespace, name, bound.Node, bound.At.Format(time.RFC3339), when)
	case !known:
		return fmt.Sprintf("no decision about pod %s/%s was made since %s, and no pod of that name requests a shared resource", namespace,
			name, when)
	case pod.Node == "":
		return fmt.Sprintf("kube-scheduler has not asked about pod %s/%s since %s; kubectl divvy why -n %s %s explains why it waits",
			namespace, name, when, namespace, name)
	}
	return fmt.Sprintf("pod %s/%s is on node %s; it was placed before %s, or by another replica, whose decisions are not known here",
		namespace, name, pod.Node, when)
}

// Held is what pods hold on devices that are known; nil where decisions are not kept.
func (d *Decider) Held() []history.Placement {
	if d.config.Recorder == nil {
		return nil
	}
	var out []history.Placement
	for _, resource := range d.config.Resources {
		for u := range d.config.Recorder.Nodes(resource) {
			at := map[string]int{} // by UID
			for i := range u.Devices {
				for _, p := range u.Devices[i].Pods {
					if _, known := at[p.Pod.UID]; !known {
						at[p.Pod.UID] = len(out)
						out = append(out, history.Placement{Pod: history.PodOf(p.Pod), At: p.Created.UTC(), Node: u.Name,
							Resource: resource})
					}
					h := &out[at[p.Pod.UID]]
					h.Units += p.Units
					h.Devices = append(h.Devices, history.Device{Index: u.Devices[i].Index, ID: u.Devices[i].ID})
				}
			}
		}
	}
	return out
}
