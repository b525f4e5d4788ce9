package testenv

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// pollInterval is the pause between two questions.
const pollInterval = 100 * time.Millisecond

// Poll asks until the answer is nil, for no longer than timeout. Its error says
// what was waited for and the last answer.
func Poll(ctx context.Context, timeout time.Duration, what string, ask func(context.Context) error) error {
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var last error
	for {
		err := ask(waiting)
		if err == nil {
			return nil
		}
		// An answer that was cut off says less than the one before it.
		if last == nil || waiting.Err() == nil {
			last = err
		}
		if errors.Is(err, product.ErrHopeless) {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		select {
		case <-waiting.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("wait for %s: not after %v: %w", what, timeout, last)
		case <-time.After(pollInterval):
		}
	}
}
