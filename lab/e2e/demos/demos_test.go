//go:build e2e

// Package demos runs the demos that take long on a lab of their own, on which the other
// tests do not wait for them. It needs root.
//
//	go test -tags e2e -count=1 ./e2e/demos
package demos

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// lab is set once by TestMain; begun is when the tests began.
var (
	lab   *testenv.Env
	begun = time.Now()
)

func TestMain(m *testing.M) {
	code := testenv.Main(m, testenv.Options{
		Topology: demos.Mixed, MemoryUnit: "1", Values: []string{demos.MixedValues}, Label: demos.Present, Namespace: "divvy-demos",
	}, func(_ context.Context, s *testenv.Env) { lab = s }, func(context.Context) error { return nil })
	if code != 0 {
		os.Exit(code)
	}
}

// run runs a demo and checks what it found. It puts the cards back after it.
func run(t *testing.T, name string, out io.Writer, play func(*demos.Demo, context.Context) error) {
	t.Helper()
	ctx := t.Context()
	hardware, err := lab.Cards(demos.Mixed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		err := errors.Join(lab.Pods.DeleteAll(ctx), lab.Node.Label(ctx, testenv.ConfigLabel, ""), lab.SetHardware(ctx, hardware),
			lab.ReleaseDevices(ctx))
		if err != nil {
			t.Errorf("after the demo: %v", err)
		}
	})
	s := demos.New(name, lab, out)
	if err := errors.Join(play(s, ctx), s.Checks.Err()); err != nil {
		t.Fatal(err)
	}
}

// TestVendors is `make demo-vendors` from the point at which the daemon runs.
func TestVendors(t *testing.T) {
	run(t, "vendors", t.Output(), (*demos.Demo).VendorsAtWork)
}

// TestFaults is the short form of `make faults`.
func TestFaults(t *testing.T) {
	var printed strings.Builder
	run(t, "faults", io.MultiWriter(t.Output(), &printed),
		func(s *demos.Demo, ctx context.Context) error { return s.Faults(ctx, true) })
	if err := lab.CLI.CheckShown("docs/demo.md", "make faults", printed.String()); err != nil {
		t.Error(err)
	}
}

// TestZNothingIsRejected: Divvy's accounts asked for nothing that they may not do. Go runs
// the tests of a package in the order of its files; this one is the last.
func TestZNothingIsRejected(t *testing.T) {
	if err := lab.Rights(t.Context(), begun, false, []string{"divvy-system/divvy-node", "divvy-system/divvy-extender"}, nil); err != nil {
		t.Error(err)
	}
}
