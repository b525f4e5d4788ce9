package simulate

import (
	"context"
	"runtime"
	"sync"
)

// Parallel calls do for 0 to n-1 in as many goroutines as the program has
// processors, and returns the results in order. The first error ends what has
// not begun; it is the one returned.
func Parallel[T any](ctx context.Context, n int, do func(ctx context.Context, i int) (T, error)) ([]T, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := make([]T, n)
	next := make(chan int)
	var wait sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		wait.Go(func() {
			for i := range next {
				var err error
				if out[i], err = do(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
feed:
	for i := range n {
		select {
		case next <- i:
		case <-ctx.Done():
			break feed
		}
	}
	close(next)
	wait.Wait()
	return out, context.Cause(ctx)
}
