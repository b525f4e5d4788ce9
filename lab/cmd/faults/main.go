// Command faults breaks cards of three vendors under running pods on a real
// Kubernetes: a critical error on a GPU, a health bit on a chip, a card that is
// lost. Running pods stay, new pods avoid the card, and it is offered again once
// it is well. The time to each is printed.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/divvy-gpu/divvy/lab/internal/show"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

// namespace is for the show's pods alone.
const namespace = "divvy-faults"

func run(ctx context.Context, out io.Writer) (err error) {
	fmt.Fprint(out, `Cards of three vendors break under running pods, on a real Kubernetes that runs
on this machine. Only the cards are not real: 2 NVIDIA GPUs, 2 Iluvatar boards
of 2 chips and 2 GCUs, simulated.

`)
	s, err := stage.SetUp(ctx, stage.Options{
		Topology: show.Mixed, MemoryUnit: "1", Values: []string{show.MixedValues},
		Label: show.Present, Namespace: namespace, Out: out,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	f := show.New("faults", s, out)
	if err := f.Faults(ctx); err != nil {
		return fmt.Errorf("the show could not go on after %d checks: %w", f.Checks.Made(), errors.Join(err, f.Checks.Err()))
	}
	return f.End()
}
