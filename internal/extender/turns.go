package extender

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/divvy-gpu/divvy/internal/limit"
)

const (
	// turnsAtOnce is how many questions of callers that may bind are answered at once. A
	// kube-scheduler has one.
	turnsAtOnce = 4
	// largeBody is from where on a body takes all of these turns, so that a few of the
	// largest do not take the memory of the process. 5000 names and a pod are far
	// below.
	largeBody = 2 << 20
	// othersWait is how long others wait for their turn, and othersPause how many times as
	// long as an answer took the next one waits.
	othersWait  = 2 * time.Second
	othersPause = 3
)

// turns bounds how many questions are decoded and answered at once, in memory that is
// many times that of their bodies. Bodies are read before and answers written
// after, so that slow clients take nobody's turn.
type turns struct {
	believed, others *semaphore.Weighted
	wait             time.Duration // of others
}

func newTurns() *turns {
	return &turns{believed: semaphore.NewWeighted(turnsAtOnce), others: semaphore.NewWeighted(1), wait: othersWait}
}

// take waits for a turn. The caller calls end.
//
// Callers that may not bind are answered one at a time, for a quarter of one processor's
// time together.
func (t *turns) take(ctx context.Context, body int) (end func(), err error) {
	if believes(ctx) {
		weight := int64(1)
		if body > largeBody {
			weight = turnsAtOnce
		}
		if err := t.believed.Acquire(ctx, weight); err != nil {
			return nil, context.Cause(ctx)
		}
		return func() { t.believed.Release(weight) }, nil
	}
	bounded, cancel := context.WithTimeout(ctx, t.wait)
	defer cancel()
	if err := t.others.Acquire(bounded, 1); err != nil {
		return nil, fmt.Errorf("callers that may not bind are answered one at a time: %w", limit.ErrBusy)
	}
	began := time.Now()
	return func() {
		time.AfterFunc(othersPause*time.Since(began), func() { t.others.Release(1) })
	}, nil
}
