package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Main runs the tests of a package on the lab that o describes and puts the lab
// back as it was; DIVVY_E2E_KEEP=1 leaves everything for a look at it. Begin is
// called before the tests; its context ends when the tests are to stop. End
// removes what the tests leave. Main returns the exit code for TestMain.
func Main(tests interface{ Run() int }, o Options, begin func(context.Context, *Env), end func(context.Context) error) int {
	// Interrupted, the tests stop at their next wait, and the lab is put back.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	keep := os.Getenv("DIVVY_E2E_KEEP") != ""
	o.Undo, o.Out = !keep, os.Stderr
	code := 1
	s, err := SetUp(ctx, o)
	if err == nil {
		begin(ctx, s)
		code = tests.Run()
		err = ctx.Err()
		if !keep {
			ctx := context.WithoutCancel(ctx)
			err = errors.Join(err, end(ctx), s.Restore(ctx, os.Stderr))
		}
		err = errors.Join(err, s.Close())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests on the lab:", err)
		code = max(code, 1)
	}
	return code
}
