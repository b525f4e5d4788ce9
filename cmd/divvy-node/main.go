// divvy-node runs on every node that has accelerators: it offers them to the
// node's pods.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/divvy-gpu/divvy/internal/app/node"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := node.Command("divvy-node").ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "divvy-node:", err)
		os.Exit(node.ExitCode(err)) //nolint:gocritic // the one exit of the program; stop has nothing left to do
	}
}
