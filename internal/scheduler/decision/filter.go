package decision

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/cause"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/events"
)

// Filter answers which of the nodes have a device with room for the pod, or which of
// them is the best: see choose. A pod that asks for nothing of ours passes everywhere.
// The answer is reset first.
func (d *Decider) Filter(ctx context.Context, q *Question, a *Answer) {
	a.Reset()
	requests, asked, mistake := d.check(q, a)
	if len(requests) > 1 || mistake != nil {
		a.refuseAll(q.Nodes, d.reject(q, requests, len(q.Nodes), mistake))
		return
	}
	var no rejected
	var texts [codes]string // that are the same for all nodes
	var tiers statedTiers
	for i, name := range q.Nodes {
		code := accel.Fits
		if asked {
			code = a.verdicts[i].Code
			if code != accel.NodeUnknown && onlyOne(d.config.Cluster, requests[0], name) {
				code = accel.Unservable
			}
		}
		no.add(code, name)
		if code == accel.Fits {
			a.Fits = append(a.Fits, i)
			continue
		}
		reason := ""
		if code == accel.NodeUnknown {
			reason = d.config.Cluster.Problem(name)
		}
		switch {
		case reason != "":
		case code == accel.NotIsolated:
			reason = tiers.add(name, requests[0].Selection.Isolation, a.verdicts[i].Stated)
		case int(code) < len(texts) && code != accel.Unservable:
			if texts[code] == "" {
				texts[code] = reasonOf(d.config.Cluster, requests[0], code, name)
			}
			reason = texts[code]
		default:
			reason = reasonOf(d.config.Cluster, requests[0], code, name)
		}
		a.Refusals = append(a.Refusals, Refusal{Node: name, Reason: reason, Unresolvable: code.Unresolvable()})
	}
	d.metrics.of(requests).filtered(len(a.Fits), &no.counts)
	d.waker.answered(q, requests, len(a.Fits))
	d.noteNominated(q, a, asked)
	if len(a.Fits) == 0 && asked {
		if kind, why := neverFits(requests[0], &no.counts, &tiers); why != "" && !d.said(q, kind) {
			d.tell(q, kind, why)
		}
	}
	if log := klog.FromContext(ctx).V(4); log.Enabled() {
		log.Info("Filtered", "pod", klog.KObj(q.Pod), "fit", len(a.Fits), "refused", len(a.Refusals))
	}
	r := d.config.Recorder
	if r == nil || !asked || !q.Believed {
		d.choose(q, requests, a)
		return
	}
	fits := len(a.Fits)
	best, n := a.best(q) // choose leaves one
	d.choose(q, requests, a)
	r.decided(q, &requests[0], a, &no, fits, best[:n])
}

// reject counts and says why a pod is rejected on all of so many nodes: it asks for several
// resources, or in a way that cannot be followed.
func (d *Decider) reject(q *Question, requests []accel.Request, nodes int, mistake error) (reason string) {
	if len(requests) > 1 {
		reason = severalResources(requests)
		d.metrics.several.refused.Inc()
		d.metrics.several.several.Add(float64(nodes))
		d.tell(q, events.SeveralResources, reason)
		return reason
	}
	reason = mistaken(mistake)
	counts := [codes]int{accel.Unservable: nodes}
	d.metrics.of(requests).filtered(0, &counts)
	d.tell(q, events.RequestRefused, reason)
	return reason
}

// Rate rates the nodes from 0 to 10, in the memory of the answer.
func (d *Decider) Rate(q *Question, a *Answer) []int64 {
	requests, asked, _ := d.check(q, a)
	d.metrics.of(requests).rated.Inc()
	scores := sized(&a.scores, len(q.Nodes))
	clear(scores)
	if !asked {
		return scores
	}
	for i := range scores {
		scores[i] = a.verdicts[i].Rating
	}
	place.Scores(scores)
	return scores
}

// refuseAll rejects a pod that no eviction can help.
func (a *Answer) refuseAll(nodes []string, reason string) {
	for _, name := range nodes {
		a.Refusals = append(a.Refusals, Refusal{Node: name, Reason: reason, Unresolvable: true})
	}
}

// said reports whether a condition of the pod says the same as an event: it outlives the
// memory of a process.
func (d *Decider) said(q *Question, kind events.Kind) bool {
	reason := cause.IsolationNotStated.Reason()
	if kind.Reason == events.NeverFits.Reason {
		reason = cause.LargerThanDevice.Reason()
	}
	known, ok := d.config.Cluster.Pod(q.Pod.Namespace, q.Pod.Name)
	return ok && known.Ref.UID == string(q.Pod.UID) && known.Said.Reason == reason
}
