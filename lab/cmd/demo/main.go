// Command demo shows Divvy on a real Kubernetes that it brings up on this machine. It says
// what happens and why, and checks everything that it shows.
//
//	demo guide      four pods share two cards by memory, as in the GCUShare guide
//	demo vendors    cards of three vendors on one node, served by one daemon
//	demo pool       GPUs of a remote pool in a cluster without any
//	demo install    an administrator's day: install, look, change, remove
//	demo faults     cards and folders break under running pods, and recover
//	demo mig        NVIDIA GPUs whole and cut into MIG devices on one node
//	demo limits     memory that the driver limits, and overuse where it does not
//	demo dra        ResourceClaims of three vendors beside extended resources, and a node's way there and back
//	demo why        ten pods that wait for ten reasons, and what admits each
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// one is a demo.
type one struct {
	introduction string
	environment  testenv.Options
	play         func(*demos.Demo, context.Context) error
}

var all = map[string]one{
	"guide": {
		introduction: `Four pods share the memory of two cards, on a real Kubernetes that runs on this
machine: API server, scheduler, kubelet and containers are the real ones. Only
the cards are not: device nodes /dev/gcu0 to gcu7 and a library that reports 8
cards of 16 GB stand in for them.

`,
		environment: testenv.Options{Topology: testenv.Guide, MemoryUnit: "1", Namespace: "gcushare-demo"},
		play:        (*demos.Demo).Guide,
	},
	"vendors": {
		introduction: `One node with cards of three vendors, and one daemon that serves them all, on a
real Kubernetes that runs on this machine. Only the cards are not real: device
nodes and libraries that report 2 NVIDIA GPUs, 2 Iluvatar boards of 2 chips and
2 GCUs stand in for them.

`,
		environment: testenv.Options{
			Topology: demos.Mixed, MemoryUnit: "1", Values: []string{demos.MixedValues},
			Label: demos.Present, Unlabelled: true, Namespace: "divvy-vendors",
		},
		play: (*demos.Demo).Vendors,
	},
	"pool": {
		introduction: `A cluster without a GPU, on a real Kubernetes that runs on this machine, and a
pool of GPUs somewhere else. Pods get shares of the pool's GPUs by writing three
resource names and three annotations. Stand-ins are the pool's servers, which
check the token and keep the books of 6 GPUs, and the pool's client, which leases
from them and runs the pod's command.

`,
		environment: testenv.Options{
			Topology: testenv.Guide, MemoryUnit: "1", Values: []string{demos.PoolValues, demos.NoCardsValues},
			Unlabelled: true, Namespace: demos.PoolNamespace,
		},
		play: (*demos.Demo).RemotePool,
	},
	"install": {
		introduction: `An administrator's day, on a real Kubernetes that runs on this machine, whose
kube-scheduler is a static pod as kubeadm makes it: install, look, change, remove.
Stand-ins are the 8 cards and the vendor's library.

`,
		environment: testenv.Options{Bare: true, Namespace: "gcushare"},
		play:        (*demos.Demo).Install,
	},
	"faults": {
		introduction: `Cards of three vendors break under running pods, on a real Kubernetes that runs
on this machine. Only the cards are not real: 2 NVIDIA GPUs, 2 Iluvatar boards
of 2 chips and 2 GCUs, simulated.

`,
		environment: testenv.Options{
			Topology: demos.Mixed, MemoryUnit: "1", Values: []string{demos.MixedValues},
			Label: demos.Present, Namespace: "divvy-faults",
		},
		play: func(s *demos.Demo, ctx context.Context) error { return s.Faults(ctx, false) },
	},
	"mig": {
		introduction: `NVIDIA GPUs whole and cut into MIG devices on one node, on a real Kubernetes that
runs on this machine. Only the GPUs are not real: 3 A100 of 40 GB, simulated.

`,
		environment: testenv.Options{
			Topology: demos.MIG, MemoryUnit: "1", Values: []string{demos.MIGValues}, Label: demos.Present, Namespace: "divvy-mig",
		},
		play: (*demos.Demo).MIG,
	},
	"limits": {
		introduction: `Pods that share a card and try to use more of its memory than their allocation, on
a real Kubernetes that runs on this machine. Cards and drivers are simulated: an
NVIDIA driver that limits the memory of control groups, and one of Enflame's that
does not. Control groups are the kernel's.

`,
		environment: testenv.Options{
			Topology: demos.Mixed, MemoryUnit: "1", Values: []string{demos.MixedValues}, Label: demos.Present, Namespace: "divvy-limits",
		},
		play: (*demos.Demo).Limits,
	},
	"dra": {
		introduction: `Pods get devices of three vendors by ResourceClaims and by extended resources on one
node, on a real Kubernetes that runs on this machine. Only the cards are not real: 3
NVIDIA GPUs, 2 Iluvatar boards of 2 chips and 2 GCUs, simulated.

`,
		environment: testenv.Options{
			Topology: demos.DRATopology, MemoryUnit: "1", Values: []string{demos.MixedValues, demos.DRAValues}, Label: demos.Present,
			Namespace: "divvy-dra",
		},
		play: (*demos.Demo).DRA,
	},
	"why": {
		introduction: `Ten pods wait for ten reasons, on a real Kubernetes that runs on this machine.
kubectl divvy why explains each and prints a command; executed as it is printed, it
lets the pod run within 30 s. Only the cards are not real: 8 of 16 GB, simulated.

`,
		environment: testenv.Options{Topology: testenv.Guide, MemoryUnit: "1", Namespace: "divvy-why"},
		play:        (*demos.Demo).Why,
	},
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 1 {
		if d, ok := all[args[0]]; ok {
			return demos.Play(args[0], d.introduction, d.environment, d.play)
		}
	}
	return fmt.Errorf("say which: guide, vendors, pool, install, faults, mig, limits, dra or why")
}
