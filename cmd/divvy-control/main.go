// divvy-control holds the parts of Divvy that serve the control plane, one
// subcommand each.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/divvy-gpu/divvy/internal/app/control"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := control.Command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "divvy-control:", err)
		os.Exit(1) //nolint:gocritic // the one exit of the program; stop has nothing left to do
	}
}
