// Command vendors shows cards of three vendors on one node of a real Kubernetes,
// served by one divvy-node: the numbers of the README of Iluvatar's device
// plugin, the steps of an article on NVIDIA's, GCUs whole and by memory at one
// time, labels, and memory of all three shared through the extender.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const introduction = `One node with cards of three vendors, and one daemon that serves them all, on a
real Kubernetes that runs on this machine. Only the cards are not real: device
nodes and libraries that report 2 NVIDIA GPUs, 2 Iluvatar boards of 2 chips and
2 GCUs stand in for them.

`

func main() {
	err := demos.Play("vendors", introduction, testenv.Options{
		Topology: demos.Mixed, MemoryUnit: "1", Values: []string{demos.MixedValues},
		Label: demos.Present, Unlabelled: true, Namespace: "divvy-vendors",
	}, (*demos.Demo).Vendors)
	if err != nil {
		fmt.Fprintln(os.Stderr, "vendors:", err)
		os.Exit(1)
	}
}
