//go:build e2e

// Package e2e tests Divvy on a real Kubernetes: the lab. It brings the lab up,
// or uses the one that is up, and leaves it as it was. It needs root.
//
//	go test -tags e2e -count=1 ./e2e/...
package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/show"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

const namespace = "divvy-e2e"

// The lab and what reads its books; set once by TestMain. Tests run one after
// the other: they share the cards.
var (
	lab     *stage.Stage
	auditor *audit.Auditor
)

func TestMain(m *testing.M) {
	// Interrupted, the tests stop at their next wait, and the lab is put back.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code, err := run(ctx, m)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "e2e:", err)
		code = max(code, 1)
	}
	if code != 0 {
		os.Exit(code)
	}
}

func run(ctx context.Context, m *testing.M) (code int, err error) {
	// DIVVY_E2E_KEEP=1 leaves everything for a look at it.
	keep := os.Getenv("DIVVY_E2E_KEEP") != ""
	s, err := stage.SetUp(ctx, stage.Options{
		Topology: stage.Guide, MemoryUnit: guide.unit, Values: []string{show.PoolValues},
		Namespace: namespace, Undo: !keep, Out: os.Stderr,
	})
	if err != nil {
		return 1, err
	}
	defer func() {
		if !keep {
			ctx := context.WithoutCancel(ctx)
			err = errors.Join(err, s.In(show.PoolNamespace).RemoveNamespace(ctx), s.Restore(ctx, os.Stderr))
		}
		err = errors.Join(err, s.Close())
	}()
	lab, auditor = s, audit.New(s)
	context.AfterFunc(ctx, func() { interrupted.Store(true) })
	return m.Run(), ctx.Err()
}
