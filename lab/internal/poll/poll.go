// Package poll waits by asking again and again.
package poll

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// ErrHopeless marks an answer that waiting does not change.
var ErrHopeless = errors.New("it will not change")

// pauses between two questions: short ones first, for what is almost there.
var pauses = wait.Backoff{Duration: 10 * time.Millisecond, Factor: 2, Steps: 10, Cap: 100 * time.Millisecond}

// Until asks until the answer is nil or hopeless, for no longer than timeout. Its error
// says what was waited for and the last answer.
func Until(ctx context.Context, timeout time.Duration, what string, ask func(context.Context) error) error {
	waiting, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var last error
	err := pauses.DelayFunc().Until(waiting, true, true, func(ctx context.Context) (bool, error) {
		err := ask(ctx)
		// An answer that was cut off says less than the one before it.
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if errors.Is(err, ErrHopeless) {
			return false, err
		}
		return err == nil, nil
	})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrHopeless):
		return fmt.Errorf("wait for %s: %w", what, err)
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("wait for %s: not after %v: %w", what, timeout, last)
}
