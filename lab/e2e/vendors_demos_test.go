//go:build e2e

package e2e

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
)

// play runs a demo on cards of three vendors and checks what it found.
func play(t *testing.T, name string, out io.Writer, run func(*demos.Demo, context.Context) error) {
	t.Helper()
	ctx := beginMixed(t)
	s := demos.New(name, lab, out)
	must(t, errors.Join(run(s, ctx), s.Checks.Err()))
}

// TestVendors is `make demo-vendors` from the point at which the daemon runs.
func TestVendors(t *testing.T) {
	play(t, "vendors", t.Output(), (*demos.Demo).VendorsAtWork)
}

// TestFaults is the short form of `make faults`.
func TestFaults(t *testing.T) {
	var printed strings.Builder
	play(t, "faults", io.MultiWriter(t.Output(), &printed),
		func(s *demos.Demo, ctx context.Context) error { return s.Faults(ctx, true) })
	must(t, lab.CLI.CheckShown("docs/demo.md", "make faults", printed.String()))
}
