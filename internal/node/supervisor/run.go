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

	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/handover"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/node/runtimesetup"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

// Options are what agents are run with, beside the configuration.
type Options struct {
	// Node is the name of this node's object.
	Node string
	// Self is who this process is in a handover.
	Self    handover.Identity
	Clients kube.Clients
	Log     Log
	// Setup returns what was found of the node's container runtime; it may be nil.
	Setup func() *runtimesetup.Report
	// Limits say how containers get limits in the driver.
	Limits agent.LimitOptions
}

// Run runs agents on what the source delivers until ctx ends or one of them fails.
func Run(ctx context.Context, source *nodeconfig.Source, o Options) error {
	s := newSupervisor(o)
	s.process.MustRegister(o.Clients.Requests)
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
