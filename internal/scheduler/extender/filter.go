package extender

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// filter answers which of the nodes have a device with room for the pod, or which of
// them is the best: see choose. A pod that asks for nothing of ours passes everywhere.
func (e *Extender) filter(ctx context.Context, body, out []byte) ([]byte, error) {
	scratch := takeScratch()
	defer scratch.giveBack()
	args, requests, verdicts, mistake, err := e.check(ctx, body, scratch)
	if err != nil {
		return nil, err
	}
	switch {
	case len(requests) > 1:
		reason := severalResources(requests)
		e.metrics.several.refused.Inc()
		e.metrics.several.several.Add(float64(len(args.names)))
		e.tell(ctx, args.pod, events.SeveralResources, reason)
		return appendFilterResult(out, args, refuseAll(args.names, reason)), nil
	case mistake != nil:
		reason := mistaken(mistake)
		counts := [codes]int{accel.Unservable: len(args.names)}
		e.metrics.of(requests).filtered(0, &counts)
		e.tell(ctx, args.pod, events.RequestRefused, reason)
		return appendFilterResult(out, args, refuseAll(args.names, reason)), nil
	}
	result := &scratch.result
	var counts [codes]int
	var texts [codes]string // that are the same for all nodes
	var tiers statedTiers
	for i, name := range args.names {
		code := accel.Fits
		if len(requests) > 0 {
			code = verdicts[i].Code
			if code != accel.NodeUnknown && onlyOne(e.config.Cluster, requests[0], name) {
				code = accel.Unservable
			}
		}
		if int(code) < len(counts) {
			counts[code]++
		}
		if code == accel.Fits {
			result.fits = append(result.fits, i)
			continue
		}
		reason := ""
		if code == accel.NodeUnknown {
			reason = e.config.Cluster.Problem(name)
		}
		switch {
		case reason != "":
		case code == accel.NotIsolated:
			reason = tiers.add(name, requests[0].Selection.Isolation, verdicts[i].Stated)
		case int(code) < len(texts) && code != accel.Unservable:
			if texts[code] == "" {
				texts[code] = reasonOf(e.config.Cluster, requests[0], code, name)
			}
			reason = texts[code]
		default:
			reason = reasonOf(e.config.Cluster, requests[0], code, name)
		}
		result.refusals = append(result.refusals, refusal{node: name, reason: reason, unresolvable: code.Unresolvable()})
	}
	e.metrics.of(requests).filtered(len(result.fits), &counts)
	e.waker.answered(ctx, args.pod, requests, len(result.fits))
	e.noteNominated(ctx, args, verdicts)
	if len(result.fits) == 0 && len(requests) > 0 {
		if kind, why := neverFits(requests[0], &counts, &tiers); why != "" {
			e.tell(ctx, args.pod, kind, why)
		}
	}
	if log := klog.FromContext(ctx).V(4); log.Enabled() {
		log.Info("Filtered", "pod", klog.KObj(args.pod), "fit", len(result.fits), "refused", len(result.refusals))
	}
	e.choose(ctx, args, requests, verdicts, result)
	return appendFilterResult(out, args, *result), nil
}

// prioritize rates the nodes from 0 to 10.
func (e *Extender) prioritize(ctx context.Context, body, out []byte) ([]byte, error) {
	scratch := takeScratch()
	defer scratch.giveBack()
	args, requests, verdicts, _, err := e.check(ctx, body, scratch)
	if err != nil {
		return nil, err
	}
	e.metrics.of(requests).rated.Inc()
	scores := sized(&scratch.scores, len(args.names))
	clear(scores)
	for i := range verdicts {
		scores[i] = verdicts[i].Rating
	}
	if verdicts != nil {
		place.Scores(scores)
	}
	return appendPriorities(out, args.names, scores), nil
}

// check decodes the question and asks the ledger, if the pod asks for one
// resource: verdicts[i] is for requests[0] on args.names[i]. There are none for
// a pod that asks for nothing of ours, for several resources, or in a way that
// cannot be followed, which mistake says. They and the names are in the scratch
// memory.
func (e *Extender) check(ctx context.Context, body []byte, scratch *scratch) (args filterArgs, requests []accel.Request,
	verdicts []ledger.Verdict, mistake, err error) {
	if err := e.replica.ready(); err != nil {
		return filterArgs{}, nil, nil, nil, err
	}
	if args, err = decodeFilterArgs(body, &scratch.names); err != nil {
		return filterArgs{}, nil, nil, nil, err
	}
	requests, mistake = kube.RequestsOf(args.pod, e.config.Resources)
	if e.config.Capacity {
		kube.AddPeak(args.pod, requests)
	}
	if len(requests) == 1 && mistake == nil {
		verdicts = sized(&scratch.verdicts, len(args.names))
		if mayBind(ctx) {
			e.config.Ledger.Check(requests[0], args.names, verdicts)
		} else {
			// Any client that reaches the port could make up requests, each of which would be
			// rated and remembered.
			e.config.Ledger.Fits(requests[0], args.names, verdicts)
		}
	}
	return args, requests, verdicts, mistake, nil
}

// refuseAll rejects a pod that no eviction can help.
func refuseAll(nodes []string, reason string) filterResult {
	r := filterResult{refusals: make([]refusal, len(nodes))}
	for i, name := range nodes {
		r.refusals[i] = refusal{node: name, reason: reason, unresolvable: true}
	}
	return r
}

func refOf(pod *v1.Pod) accel.PodRef {
	return accel.PodRef{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name}
}
