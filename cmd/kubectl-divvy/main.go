// kubectl-divvy is what a person uses: "kubectl divvy inspect" shows which pods
// hold how much of which device, "kubectl divvy why" why a pod waits, "kubectl divvy
// ui" both on a page, "kubectl divvy
// doctor" what is wrong with the installation, "kubectl divvy device" takes devices out of service and puts them
// back, "kubectl divvy pool" brings in and checks the token of a remote
// pool, "kubectl divvy simulate" compares placement policies on a workload,
// and plans moves of pods.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/divvy-gpu/divvy/internal/app/kubectl"
	"github.com/divvy-gpu/divvy/internal/app/plugin"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := plugin.Command().ExecuteContext(ctx); err != nil {
		// Some have said all in what they printed.
		if text := err.Error(); text != "" {
			fmt.Fprintln(os.Stderr, "error:", text)
		}
		os.Exit(kubectl.ExitCode(err)) //nolint:gocritic // the one exit of the program; stop has nothing left to do
	}
}
