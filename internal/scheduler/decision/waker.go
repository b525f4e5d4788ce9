package decision

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// Waker makes kube-scheduler ask again about a pod that waits. *cluster.Binder is
// one.
type Waker interface {
	Wake(ctx context.Context, pod accel.PodRef) error
}

// waker makes kube-scheduler ask again about pods that wait once they fit.
type waker struct {
	waiting *waiting
	api     Waker // nil for none
	ledger  Ledger
	cluster Cluster
	ready   func() error
	woken   *prometheus.CounterVec // by result
}

// answered notes what was said about a pod. A caller that is not believed may have made up
// the pod.
func (w *waker) answered(q *Question, requests []accel.Request, fits int) {
	uid := string(q.Pod.UID)
	if w.api == nil || len(requests) != 1 || fits > 0 && !w.waiting.has(uid) || !q.Believed {
		return
	}
	if fits > 0 {
		w.waiting.fitted(uid)
		return
	}
	w.waiting.refused(refOf(q.Pod), requests[0])
}

func (w *waker) run(ctx context.Context) {
	if w.api == nil {
		return
	}
	ticker := time.NewTicker(wakeEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			w.wakeSome(ctx)
		}
	}
}

// wakeSome is one turn of run. One goroutine at a time may call it.
func (w *waker) wakeSome(ctx context.Context) {
	asks := w.waiting.some(asksAtOnce)
	if len(asks) == 0 || w.ready() != nil {
		return
	}
	// Pods that are gone must not keep others from being remembered.
	for _, ref := range w.waiting.quiet(pruneAtOnce) {
		w.stillWaits(ref)
	}
	nodes := w.cluster.Offering()
	verdicts := make([]ledger.Verdict, len(nodes))
	left := wakeAtOnce
	for _, ask := range asks {
		freed := w.ledger.Counts().Freed // before the check, which then knows of it
		w.ledger.Check(w.waiting.head(ask), nodes, verdicts)
		var room []string
		for i, v := range verdicts {
			if v.Code == accel.Fits {
				room = append(room, nodes[i])
			}
		}
		pods := w.waiting.due(ask, room, left)
		if len(room) == 0 && left > 0 {
			if lowest, some := w.ledger.LowestPriority(ask.request.Resource); some {
				pods = w.waiting.evictor(ask, freed, lowest)
			}
		}
		for _, pod := range pods {
			left--
			if !w.wake(ctx, pod) {
				return
			}
		}
	}
}

// stillWaits forgets the pod if it does not wait any more, as far as the cluster state shows.
func (w *waker) stillWaits(ref accel.PodRef) bool {
	known, ok := w.cluster.Pod(ref.Namespace, ref.Name)
	if !ok || known.Ref.UID != ref.UID || known.Node != "" || known.Ended || known.Ending {
		w.waiting.forget(ref.UID)
		return false
	}
	return true
}

// wake is false when the API server is not there for now.
func (w *waker) wake(ctx context.Context, ref accel.PodRef) bool {
	if !w.stillWaits(ref) {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, wakeTimeout)
	defer cancel()
	err := w.api.Wake(ctx, ref)
	log := klog.FromContext(ctx)
	switch {
	case err == nil:
		w.woken.WithLabelValues(wokenOK).Inc()
		log.V(2).Info("Free capacity for a pending pod; requested another scheduling attempt", "pod", ref.String())
	case errors.Is(err, cluster.ErrPodGone):
		w.waiting.forget(ref.UID)
		w.woken.WithLabelValues(wokenGone).Inc()
	default:
		w.woken.WithLabelValues(wokenFailed).Inc()
		log.Error(err, "Could not request another scheduling attempt for a pending pod", "pod", ref.String())
		return false
	}
	return true
}
