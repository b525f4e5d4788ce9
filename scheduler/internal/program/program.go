// Package program is the program divvy-scheduler: kube-scheduler with the plugin compiled in. It
// is compiled once for each minor of Kubernetes, against the libraries of that minor.
package program

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	_ "k8s.io/component-base/logs/json/register"          // the JSON log format
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // the version metric
	"k8s.io/component-base/version"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/config"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/kubernetes/pkg/scheduler"

	divvy "github.com/divvy-gpu/divvy/internal/app/scheduler"
	"github.com/divvy-gpu/divvy/internal/scheduler/plugin"
)

// Main runs the program with the arguments of the process and further plugins, and returns its
// exit status.
func Main(plugins ...app.Option) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := Command(plugins...).ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "divvy-scheduler:", err)
		return 1
	}
	return 0
}

// Command returns the program's command.
func Command(plugins ...app.Option) *cobra.Command {
	return divvy.Command(version.Get().GitVersion, func(ctx context.Context, o divvy.Options, kubeSchedulerFlags []string) error {
		return Run(ctx, o, kubeSchedulerFlags, plugins...)
	})
}

// Run schedules until ctx ends, or an error occurs that cannot be recovered from.
func Run(ctx context.Context, o divvy.Options, kubeSchedulerFlags []string, plugins ...app.Option) error {
	p, err := divvy.New(o)
	if err != nil {
		return err
	}
	opts, err := parse(o.Config, kubeSchedulerFlags)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	cc, sched, err := app.Setup(ctx, opts, append(plugins, app.WithPlugin(plugin.Name, p.Core().Factory))...)
	if err != nil {
		return fmt.Errorf("kube-scheduler: %w", err)
	}
	if err := check(sched, cc.ComponentConfig.Extenders, p.Manages); err != nil {
		return fmt.Errorf("%s: %w", o.Config, err)
	}
	return p.Run(ctx, &kubeScheduler{cc, sched})
}

// parse reads the flags of kube-scheduler. The election is the program's own.
func parse(file string, arguments []string) (*options.Options, error) {
	opts := options.NewOptions()
	fs := pflag.NewFlagSet("kube-scheduler", pflag.ContinueOnError)
	for _, set := range opts.Flags.FlagSets {
		fs.AddFlagSet(set)
	}
	if err := fs.Parse(arguments); err != nil {
		return nil, fmt.Errorf("flags after --: %w", err)
	}
	if extra := fs.Args(); len(extra) > 0 {
		return nil, fmt.Errorf("arguments after --: %q: only flags of kube-scheduler may follow", extra[0])
	}
	for _, name := range []string{"config", "leader-elect"} {
		if fs.Changed(name) {
			return nil, fmt.Errorf("flags after --: --%s must be a flag before --: --scheduler-config and --leader-elect", name)
		}
	}
	for name, value := range map[string]string{"config": file, "leader-elect": "false"} {
		if err := fs.Set(name, value); err != nil {
			return nil, fmt.Errorf("flags of kube-scheduler: --%s: %w", name, err)
		}
	}
	if err := opts.ComponentGlobalsRegistry.Set(); err != nil {
		return nil, fmt.Errorf("flags after --: %w", err)
	}
	opts.ComponentGlobalsRegistry.AddMetrics()
	return opts, nil
}

// kubeScheduler implements divvy.Scheduler.
type kubeScheduler struct {
	config    *config.CompletedConfig
	scheduler *scheduler.Scheduler
}

func (k *kubeScheduler) Cached(pod *v1.Pod) (*v1.Pod, error) { return k.scheduler.Cache.GetPod(pod) }

// Follow keeps the caches of a replica that does not lead warm: Schedule starts the same informers,
// which has no effect then.
func (k *kubeScheduler) Follow(ctx context.Context) error {
	k.config.InformerFactory.Start(ctx.Done())
	k.config.InformerFactory.WaitForCacheSync(ctx.Done())
	if k.config.DynInformerFactory != nil {
		k.config.DynInformerFactory.Start(ctx.Done())
		k.config.DynInformerFactory.WaitForCacheSync(ctx.Done())
	}
	if err := k.scheduler.WaitForHandlersSync(ctx); err != nil {
		return fmt.Errorf("wait for the caches: %w", err)
	}
	return nil
}

func (k *kubeScheduler) Schedule(ctx context.Context) error {
	err := app.Run(ctx, k.config, k.scheduler)
	if err == nil {
		err = errors.New("kube-scheduler ended")
	}
	return err
}
