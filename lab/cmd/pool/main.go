// Command pool shows GPUs of a remote pool in a cluster without any: a real
// Kubernetes, the webhooks that turn a few lines of a pod into all that the
// pool's client needs, and the client at work. Only the pool's servers and the
// client are stand-ins.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/show"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

const introduction = `A cluster without a GPU, on a real Kubernetes that runs on this machine, and a
pool of GPUs somewhere else. Pods get shares of the pool's GPUs by writing three
resource names and three annotations. Stand-ins are the pool's servers, which
check the token and keep the books of 6 GPUs, and the pool's client, which leases
from them and runs the pod's command.

`

func main() {
	err := show.Play("pool", introduction, stage.Options{
		Topology: stage.Guide, MemoryUnit: "1", Values: []string{show.PoolValues, show.NoCardsValues},
		Unlabelled: true, Namespace: show.PoolNamespace,
	}, (*show.Show).Pool)
	if err != nil {
		fmt.Fprintln(os.Stderr, "pool:", err)
		os.Exit(1)
	}
}
