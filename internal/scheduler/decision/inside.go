package decision

import (
	"context"
	"iter"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Inside decides for a scheduler in the same process. Such a scheduler says when an attempt
// to place a pod begins and how it ends, so nothing of that is guessed. It is safe for
// concurrent use.
type Inside struct {
	decider *Decider
	ledger  *ledger.Ledger
}

// NewInside returns the decider's, whose ledger this is.
func NewInside(d *Decider, l *ledger.Ledger) *Inside { return &Inside{decider: d, ledger: l} }

// Cycle is one attempt to place a pod that asks for one resource. All its answers are of one
// moment. It is safe for concurrent use.
type Cycle struct {
	inside   *Inside
	question Question
	request  accel.Request
	survey   *ledger.Survey
	offered  int
	no       rejected
	noRoom   string
}

// Begin begins an attempt to place the pod on one of so many nodes. The cycle is nil for a pod
// that asks for nothing of ours. The error says why no node can serve the pod; it is about the
// pod itself where it is a *RejectedError.
func (i *Inside) Begin(pod *v1.Pod, nodes int) (*Cycle, error) {
	d := i.decider
	requests, mistake := kube.RequestsOf(pod, d.config.Resources)
	if len(requests) == 0 {
		return nil, nil //nolint:nilnil // documented
	}
	if err := d.config.Ready(); err != nil {
		return nil, err
	}
	c := &Cycle{inside: i, question: Question{Pod: pod, Believed: true}, offered: nodes}
	if len(requests) > 1 || mistake != nil {
		return nil, &RejectedError{d.reject(&c.question, requests, nodes, mistake)}
	}
	if d.config.Capacity {
		kube.AddPeak(pod, requests)
	}
	c.request = requests[0]
	c.survey = ledger.SurveyOf(i.ledger, c.request)
	c.noRoom = reasonOf(d.config.Cluster, c.request, accel.NoDeviceFits, "")
	known := 0
	for name, v := range c.survey.Nodes() {
		code := v.Code
		if code != accel.NodeUnknown && onlyOne(d.config.Cluster, c.request, name) {
			code = accel.Unservable
		}
		c.no.add(code, name)
		known++
	}
	c.no.counts[accel.NodeUnknown] += max(0, nodes-known)
	d.metrics.of(requests).filtered(c.no.counts[accel.Fits], &c.no.counts)
	return c, nil
}

// RejectedError says why a pod is rejected whatever the nodes have.
type RejectedError struct{ reason string }

func (e *RejectedError) Error() string { return e.reason }

// Pod is the pod that is placed.
func (c *Cycle) Pod() accel.PodRef { return refOf(c.question.Pod) }

// Request is what it asks.
func (c *Cycle) Request() accel.Request { return c.request }

// Ranked are the nodes with room for the pod, the best first.
func (c *Cycle) Ranked() iter.Seq[string] {
	return func(yield func(string) bool) {
		for name := range c.survey.Ranked() {
			if !onlyOne(c.inside.decider.config.Cluster, c.request, name) && !yield(name) {
				return
			}
		}
	}
}

// Bound is the node on which the pod may be bound already, as the outcome of an earlier bind is
// not known; "" for most.
func (c *Cycle) Bound() string {
	return ledger.Bound(c.inside.ledger, string(c.question.Pod.UID), c.request.Resource)
}

// Refuse says why the pod does not fit on a node, if so. With an overlay it is what would be
// without some pods, and with others.
func (c *Cycle) Refuse(node string, o ledger.Overlay) (r Refusal, refused bool) {
	d := c.inside.decider
	v := ledger.WhatIf(c.inside.ledger, c.survey, node, o)
	if v.Code != accel.NodeUnknown && onlyOne(d.config.Cluster, c.request, node) {
		v.Code = accel.Unservable
	}
	r = Refusal{Node: node, Unresolvable: v.Code.Unresolvable()}
	switch v.Code {
	case accel.Fits:
		return Refusal{}, false
	case accel.NotIsolated:
		r.Reason = accel.WhyNotIsolated(c.request.Selection.Isolation, v.Stated)
	case accel.NoDeviceFits:
		r.Reason = c.noRoom
		// A node that the pod is nominated to must not be called hopeless while what it waits
		// for is under way: kube-scheduler would evict pods elsewhere.
		r.Unresolvable = len(o.Removed)+len(o.Added) == 0 && node != c.question.Pod.Status.NominatedNodeName &&
			!ledger.MayEvict(c.inside.ledger, c.survey, node)
	default:
		r.Reason = reasonOf(d.config.Cluster, c.request, v.Code, node)
	}
	return r, true
}

// Victims returns which of some pods must go so that the pod fits on a node: see ledger.Victims.
func (c *Cycle) Victims(node string, of []ledger.Candidate) []string {
	return ledger.Victims(c.inside.ledger, c.survey, node, of)
}

// Occupants are the pods, by node, that hold something of the resource.
func (c *Cycle) Occupants() map[string][]accel.PodRef {
	return ledger.Occupants(c.inside.ledger, c.survey)
}

// Current reports whether a node is as it was when the attempt began.
func (c *Cycle) Current(node string) bool {
	return ledger.Current(c.inside.ledger, c.survey, node)
}

// Counted reports whether a pod that is nominated to a node counts there for this attempt.
func (c *Cycle) Counted(podUID, node string) bool {
	return ledger.Counted(c.inside.ledger, c.survey, podUID, node)
}

// Requests is what another pod asks of the resource of this attempt, if anything.
func (c *Cycle) Requests(pod *v1.Pod) (accel.Request, bool) {
	requests, mistake := kube.RequestsOf(pod, []accel.Resource{c.request.Resource})
	if len(requests) != 1 || mistake != nil {
		return accel.Request{}, false
	}
	return requests[0], true
}

// Scores rates nodes from 0 to 10 against each other, as Decider.Rate does.
func (c *Cycle) Scores(nodes []string) []int64 {
	c.inside.decider.metrics.of([]accel.Request{c.request}).rated.Inc()
	scores := make([]int64, len(nodes))
	for i, name := range nodes {
		scores[i] = c.survey.At(name).Rating
	}
	place.Scores(scores)
	return scores
}

// RoomIsComing reports whether the pod is nominated to a node on which there will be room by
// itself. Then nothing needs to be evicted. gone reports whether kube-scheduler knows that a pod,
// by its UID, has left that node: the watch of the ledger may be behind.
func (c *Cycle) RoomIsComing(gone func(podUID string) bool) bool {
	node := c.question.Pod.Status.NominatedNodeName
	return node != "" && c.survey.At(node).Code == accel.NoDeviceFits && c.inside.ledger.MakesRoom(c.request, node, gone)
}

// Evictions reports whether evicting pods of lower priority may help, on whichever node.
func (c *Cycle) Evictions() bool { return c.no.counts[accel.Fits] > 0 || c.survey.Lower() }

// Hold reserves what the pod gets on a node until undo, or until some time after Bind.
func (c *Cycle) Hold(node string) (accel.Grant, func(), error) {
	pod := c.question.Pod
	grant, undo, err := ledger.Hold(c.inside.ledger, refOf(pod), pod.CreationTimestamp.Time, node, c.request)
	if err == nil {
		c.inside.decider.waker.answered(&c.question, []accel.Request{c.request}, 1)
		c.decided(node)
	}
	return grant, undo, err
}

// Waits says that the pod waits unless it is held: it is tried again when there is room. It is for
// attempts that are not said to have failed.
func (c *Cycle) Waits() {
	c.inside.decider.waker.answered(&c.question, []accel.Request{c.request}, 0)
}

// Failed says that the pod was placed nowhere: it is tried again when there is room.
func (c *Cycle) Failed() {
	d := c.inside.decider
	c.Waits()
	c.decided("")
	if c.no.counts[accel.Fits] > 0 {
		return
	}
	var tiers statedTiers
	if c.no.counts[accel.NotIsolated] > 0 {
		nodes := map[string]accel.TierSet{}
		var names []string
		for name, v := range c.survey.Nodes() {
			if v.Code == accel.NotIsolated {
				nodes[name], names = v.Stated, append(names, name)
			}
		}
		slices.Sort(names)
		for _, name := range names {
			tiers.add(name, c.request.Selection.Isolation, nodes[name])
		}
	}
	if kind, why := neverFits(c.request, &c.no.counts, &tiers); why != "" && !d.said(&c.question, kind) {
		d.tell(&c.question, kind, why)
	}
}

// Bind binds the pod with what Hold reserved. Where the error is a cluster.ErrOutcomeUnknown, the
// reservation must stay: it ends when the outcome is known.
func (c *Cycle) Bind(ctx context.Context, grant *accel.Grant) error {
	d := c.inside.decider
	ledger.Begin(c.inside.ledger, string(c.question.Pod.UID), c.request.Resource)
	signer, err := d.config.Signer()
	if err == nil {
		err = d.write(ctx, signer, c.Pod(), grant)
	}
	d.metrics.binds([]accel.Request{c.request}, err)
	return err
}

// decided records the decision, so that it can be explained.
func (c *Cycle) decided(chosen string) {
	r := c.inside.decider.config.Recorder
	if r == nil {
		return
	}
	d := history.Decision{
		Pod: history.PodOf(c.Pod()), At: r.Now(), Request: history.RequestOf(&c.request), Offered: c.offered,
		Fits: c.no.counts[accel.Fits], Chosen: chosen, Rejected: c.no.history(),
	}
	d.Candidates = r.candidates(&c.request, func(yield func(string, int64) bool) {
		for name := range c.Ranked() {
			if !yield(name, c.survey.At(name).Rating) {
				return
			}
		}
	})
	r.Log.Decided(&d)
}
