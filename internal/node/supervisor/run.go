package supervisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/node/handover"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/node/runtimesetup"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

// Run runs agents on what the source delivers until ctx ends or one of them fails. self is who
// this process is in a handover, and setup returns what was found of the node's container
// runtime.
func Run(ctx context.Context, source *nodeconfig.Source, node string, self handover.Identity, clients kube.Clients, log Log,
	setup func() *runtimesetup.Report) error {
	s := newSupervisor(node, self, clients.Kubernetes, log)
	s.process.MustRegister(clients.Requests)
	s.setup = setup
	return follow(ctx, source, s)
}

// follow runs the supervisor on what the source delivers until ctx ends or one
// of them fails.
func follow(ctx context.Context, source *nodeconfig.Source, s *supervisor) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var work sync.WaitGroup
	updates := make(chan nodeconfig.Update)
	work.Go(func() {
		err := source.Run(ctx, func(u nodeconfig.Update) {
			select {
			case updates <- u:
			case <-ctx.Done():
			}
		})
		if err != nil {
			cancel(err)
		}
	})
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	work.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hangup:
				klog.FromContext(ctx).Info("Reading the configuration again, as SIGHUP asks")
				source.Reload()
			}
		}
	})
	err := s.run(ctx, updates)
	cancel(err)
	work.Wait()
	if cause := context.Cause(ctx); err == nil && !errors.Is(cause, context.Canceled) {
		err = cause
	}
	return err
}

// Log is what of the log a configuration changes.
type Log struct {
	Output *logging.Output
	Level  *slog.LevelVar
}

// set makes the log as a configuration says. An error does not keep the lines
// from the console.
func (l Log) set(file, level string) error {
	to, err := logging.ParseLevel(level)
	if err != nil {
		return err
	}
	l.Level.Set(to)
	logging.SetVerbosity(to)
	if err := l.Output.CopyTo(file); err != nil {
		return fmt.Errorf("close the log file: %w", err)
	}
	return nil
}
