package show

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

// Play is the program of a show: it prints the introduction, sets the stage up
// and lets the show play on it, all on standard output, until the show ends or
// the program is told to. The error is nil only when nothing differed.
func Play(name, introduction string, o stage.Options, play func(*Show, context.Context) error) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	o.Out = os.Stdout
	fmt.Fprint(o.Out, introduction)
	on, err := stage.SetUp(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, on.Close()) }()
	s := New(name, on, o.Out)
	if err := play(s, ctx); err != nil {
		return fmt.Errorf("the show could not go on after %d checks: %w", s.Checks.Made(), errors.Join(err, s.Checks.Err()))
	}
	return s.End()
}
