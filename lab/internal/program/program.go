// Package program is what the main functions of the lab's commands have in common.
package program

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/klog/v2"
)

// Run calls run with the arguments and the standard output of the process, and a context
// that SIGINT and SIGTERM cancel. It returns the exit code: 0 after help was asked for, 1
// after any other error, which it writes to standard error after the program's name. What
// client-go logs is discarded: an API server that restarts or ends is expected here, and
// each of its watches would be told of.
func Run(name string, run func(ctx context.Context, args []string, out io.Writer) error) (code int) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return 0
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	return 1
}
