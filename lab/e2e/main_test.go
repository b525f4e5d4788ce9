//go:build e2e

// Package e2e tests Divvy on a real Kubernetes: the lab. It brings the lab up,
// or uses the one that is up, and leaves it as it was. It needs root.
//
//	go test -tags e2e -count=1 ./e2e/...
package e2e

import (
	"context"
	"os"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const namespace = "divvy-e2e"

// The lab and what reads its books; set once by TestMain. Tests run one after
// the other: they share the cards.
var (
	lab     *testenv.Env
	auditor *audit.Auditor
)

func TestMain(m *testing.M) {
	code := testenv.Main(m, testenv.Options{Topology: testenv.Guide, MemoryUnit: guide.unit, Values: []string{demos.PoolValues},
		Namespace: namespace},
		func(ctx context.Context, s *testenv.Env) {
			lab, auditor = s, audit.New(s)
			context.AfterFunc(ctx, func() { interrupted.Store(true) })
		},
		func(ctx context.Context) error { return lab.In(demos.PoolNamespace).Pods.RemoveNamespace(ctx) })
	if code != 0 {
		os.Exit(code)
	}
}
