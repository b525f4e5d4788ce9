// Command pool shows GPUs of a remote pool in a cluster without any: a real
// Kubernetes, the webhooks that turn a few lines of a pod into all that the
// pool's client needs, and the client at work. Only the pool's servers and the
// client are stand-ins.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const introduction = `A cluster without a GPU, on a real Kubernetes that runs on this machine, and a
pool of GPUs somewhere else. Pods get shares of the pool's GPUs by writing three
resource names and three annotations. Stand-ins are the pool's servers, which
check the token and keep the books of 6 GPUs, and the pool's client, which leases
from them and runs the pod's command.

`

func main() {
	err := demos.Play("pool", introduction, testenv.Options{
		Topology: testenv.Guide, MemoryUnit: "1", Values: []string{demos.PoolValues, demos.NoCardsValues},
		Unlabelled: true, Namespace: demos.PoolNamespace,
	}, (*demos.Demo).RemotePool)
	if err != nil {
		fmt.Fprintln(os.Stderr, "pool:", err)
		os.Exit(1)
	}
}
