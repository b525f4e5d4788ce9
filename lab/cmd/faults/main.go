// Command faults breaks cards of three vendors under running pods on a real
// Kubernetes: an error on a GPU, a health bit on a chip, a card that is lost, a
// card about which no call returns, drivers that stall, an error that a GPU does
// not recover from. Running pods stay, new pods avoid the card, and it is offered
// again once it is well, or released. Then folders of the daemon are full,
// read-only, emptied and removed. The time to each is printed.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const introduction = `Cards of three vendors break under running pods, on a real Kubernetes that runs
on this machine. Only the cards are not real: 2 NVIDIA GPUs, 2 Iluvatar boards
of 2 chips and 2 GCUs, simulated.

`

func main() {
	err := demos.Play("faults", introduction, testenv.Options{
		Topology: demos.Mixed, MemoryUnit: "1", Values: []string{demos.MixedValues},
		Label: demos.Present, Namespace: "divvy-faults",
	}, func(s *demos.Demo, ctx context.Context) error { return s.Faults(ctx, false) })
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}
