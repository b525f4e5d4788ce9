// Command vendors shows cards of three vendors on one node of a real Kubernetes,
// served by one divvy-node: the numbers of the README of Iluvatar's device
// plugin, the steps of an article on NVIDIA's, GCUs whole and by memory at one
// time, labels, and memory of all three shared through the extender.
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
		fmt.Fprintln(os.Stderr, "vendors:", err)
		os.Exit(1)
	}
}

// namespace is for the show's pods alone.
const namespace = "divvy-vendors"

func run(ctx context.Context, out io.Writer) (err error) {
	fmt.Fprint(out, `One node with cards of three vendors, and one daemon that serves them all, on a
real Kubernetes that runs on this machine. Only the cards are not real: device
nodes and libraries that report 2 NVIDIA GPUs, 2 Iluvatar boards of 2 chips and
2 GCUs stand in for them.

`)
	s, err := stage.SetUp(ctx, stage.Options{
		Topology: show.Mixed, MemoryUnit: "1", Values: []string{show.MixedValues},
		Label: show.Present, Unlabelled: true, Namespace: namespace, Out: out,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	v := show.New("vendors", s, out)
	if err := v.Vendors(ctx); err != nil {
		return fmt.Errorf("the show could not go on after %d checks: %w", v.Checks.Made(), errors.Join(err, v.Checks.Err()))
	}
	return v.End()
}
