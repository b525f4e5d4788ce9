package demos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Play is the program of a demo: it prints the introduction, sets the lab up
// and lets the demo play on it, all on standard output, until the demo ends or
// the program is told to. The error is nil only when nothing differed.
func Play(name, introduction string, o testenv.Options, play func(*Demo, context.Context) error) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	o.Out = os.Stdout
	fmt.Fprint(o.Out, introduction)
	on, err := testenv.SetUp(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, on.Close()) }()
	s := New(name, on, o.Out)
	if err := play(s, ctx); err != nil {
		return fmt.Errorf("the demo could not continue after %d checks: %w", s.Checks.Made(), errors.Join(err, s.Checks.Err()))
	}
	return s.End()
}
