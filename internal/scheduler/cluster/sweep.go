package cluster

import (
	"context"
	"errors"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

const (
	// sweepEvery is how often reservations are checked.
	sweepEvery = time.Second
	// unseenFor is how long the watch may take to show a bound pod before the
	// API server is asked about it, for up to verifyAtOnce pods a time.
	unseenFor    = 1500 * time.Millisecond
	verifyAtOnce = 50
)

// Sweeper drops the reservations of pods that are not confirmed as bound.
type Sweeper struct {
	Ledger *ledger.Ledger
	State  *State
	Binder *Binder
	// BindLimit is how long a bind may be under way, with the question what became of it.
	BindLimit time.Duration
}

// Run checks reservations until ctx ends.
func (s Sweeper) Run(ctx context.Context) {
	ticker := time.NewTicker(sweepEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			s.verify(ctx)
			s.State.Settle()
			if n := s.Ledger.Expire(); n > 0 {
				klog.FromContext(ctx).Info("Dropped reservations of pods that were not observed as bound", "count", n)
			}
		}
	}
}

// verify asks the API server about pods that were bound and that the watch has
// not shown since: a pod that was deleted while the watch was away, as it is
// when the API server restarts, is in no list and no event, and neither is one whose
// bind came to nothing.
func (s Sweeper) verify(ctx context.Context) {
	for _, ref := range s.Ledger.Unseen(unseenFor, verifyAtOnce) {
		lookup, cancel := context.WithTimeout(ctx, time.Second)
		pod, err := s.Binder.Get(lookup, ref.Namespace, ref.Name)
		cancel()
		switch {
		case errors.Is(err, ErrPodGone), err == nil && (pod.Ref.UID != ref.UID || pod.Ended):
			s.Ledger.Forget(ref.UID)
			klog.FromContext(ctx).Info("Dropped the reservation of a deleted pod", "pod", ref.String())
		case err != nil:
			return // the API server is away: nothing is known, and nothing is bound meanwhile
		case pod.Node == "" && s.Ledger.Release(ref.UID, s.BindLimit+time.Second): // as old when it was read
			klog.FromContext(ctx).Info("Dropped the reservation of a pod that was not bound", "pod", ref.String())
		}
	}
}
