package extender

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
)

const (
	// slotsOfBinders is how many requests of callers that may bind are answered at once. A
	// kube-scheduler sends one at a time.
	slotsOfBinders = 4
	// largeBody is from where on their bodies have a slot of their own, so that a few of the
	// largest do not take the memory of the process, and do not hold up those of usual size.
	// 5000 names and a pod are half as much.
	largeBody = 256 << 10
	// othersWait is how long other callers wait for their only slot. It stays taken for
	// othersPause times as long as the answer took.
	othersWait  = 2 * time.Second
	othersPause = 3
)

// slots bounds how many requests are decoded and answered at once, which takes memory that is
// many times that of their bodies. Bodies are read before a slot is taken and answers
// are written after it was released, so slow clients hold none.
type slots struct {
	binders, large, others *semaphore.Weighted
	wait                   time.Duration // of others
}

func newSlots() *slots {
	return &slots{binders: semaphore.NewWeighted(slotsOfBinders), large: semaphore.NewWeighted(1), others: semaphore.NewWeighted(1),
		wait: othersWait}
}

// take waits for a slot. The caller calls release.
//
// Callers that may not bind share one, for a quarter of one processor's time.
func (s *slots) take(ctx context.Context, body int) (release func(), err error) {
	if mayBind(ctx) {
		of := s.binders
		if body > largeBody {
			of = s.large
		}
		if err := of.Acquire(ctx, 1); err != nil {
			return nil, context.Cause(ctx)
		}
		return func() { of.Release(1) }, nil
	}
	bounded, cancel := context.WithTimeout(ctx, s.wait)
	defer cancel()
	if err := s.others.Acquire(bounded, 1); err != nil {
		return nil, fmt.Errorf("callers that may not bind are served one at a time: %w", limit.ErrBusy)
	}
	began := time.Now()
	return func() {
		time.AfterFunc(othersPause*time.Since(began), func() { s.others.Release(1) })
	}, nil
}
