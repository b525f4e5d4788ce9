package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/progress"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Quiet times between two restarts.
const (
	minQuiet = 3 * time.Second
	maxQuiet = 9 * time.Second
)

// disturb restarts parts of the cluster until ctx ends: all ways in random
// order, then all again. It returns how often it did each.
func disturb(ctx context.Context, all func() []testenv.Restart, rng *rand.Rand, out io.Writer) (done map[string]int, err error) {
	done = map[string]int{}
	started := time.Now()
	for {
		restarts := all()
		rng.Shuffle(len(restarts), func(i, j int) { restarts[i], restarts[j] = restarts[j], restarts[i] })
		for _, restart := range restarts {
			quiet := minQuiet + time.Duration(rng.Int64N(int64(maxQuiet-minQuiet)))
			select {
			case <-ctx.Done():
				return done, nil
			case <-time.After(quiet):
			}
			begun := time.Now()
			// One that has begun is finished, so that everything is up at the end.
			if err := restart.Do(context.WithoutCancel(ctx)); err != nil {
				return done, fmt.Errorf("%s: %w", restart.Name, err)
			}
			done[restart.Name]++
			fmt.Fprintf(out, "  %6s  %s; all up again after %s\n", progress.Elapsed(time.Since(started)), restart.Name,
				progress.Elapsed(time.Since(begun)))
		}
	}
}
