// divvy-hook bounds the device memory of a container before its first program starts.
// Container runtimes run it on the host, for containers whose CDI devices say so.
package main

import (
	"context"
	"os"

	"github.com/divvy-gpu/divvy/internal/app/hook"
)

func main() {
	os.Exit(hook.Main(context.Background(), os.Args[1:], hook.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr}))
}
