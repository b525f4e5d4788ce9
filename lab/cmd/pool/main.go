// Command pool shows GPUs of a remote pool in a cluster without any: a real
// Kubernetes, the webhooks that turn a few lines of a pod into all that the
// pool's client needs, and the client at work. Only the pool's servers and the
// client are stand-ins.
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
		fmt.Fprintln(os.Stderr, "pool:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer) (err error) {
	fmt.Fprint(out, `A cluster without a GPU, on a real Kubernetes that runs on this machine, and a
pool of GPUs somewhere else. Pods get shares of the pool's GPUs by writing three
resource names and three annotations. Stand-ins are the pool's servers, which
check the token and keep the books of 6 GPUs, and the pool's client, which leases
from them and runs the pod's command.

`)
	s, err := stage.SetUp(ctx, stage.Options{
		Topology: stage.Guide, MemoryUnit: "1", Values: []string{show.PoolValues, show.NoCardsValues},
		Unlabelled: true, Namespace: show.PoolNamespace, Out: out,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	v := show.New("pool", s, out)
	if err := v.Pool(ctx); err != nil {
		return fmt.Errorf("the show could not go on after %d checks: %w", v.Checks.Made(), errors.Join(err, v.Checks.Err()))
	}
	return v.End()
}
