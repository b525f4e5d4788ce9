// Package scheduler is the part of the program divvy-scheduler that is the same for all minors of
// Kubernetes: its options, and how the plugin, the ledger and the election are put together.
// What starts kube-scheduler itself is in a module for each minor.
package scheduler

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	kubescheduler "k8s.io/kube-scheduler/config/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/app/about"
	"github.com/divvy-gpu/divvy/internal/app/extender"
	"github.com/divvy-gpu/divvy/internal/app/flags"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/scheduler/plugin"
)

// Options are those of the extender, and where kube-scheduler's are.
type Options struct {
	extender.Options

	// Config is a file with a KubeSchedulerConfiguration.
	Config string
}

// DefaultOptions returns the defaults.
func DefaultOptions() Options { return Options{Options: extender.DefaultOptions()} }

// AddFlags adds a flag for every option.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs)
	fs.StringVar(&o.Config, "scheduler-config", o.Config,
		"file with the KubeSchedulerConfiguration, whose profiles enable the plugin "+plugin.Name+
			"; flags of kube-scheduler may follow after --")
}

// Command returns the program's command, of a version of Kubernetes. What runs gets the flags of
// kube-scheduler.
func Command(kubernetes string, run func(context.Context, Options, []string) error) *cobra.Command {
	o := DefaultOptions()
	var rest []string
	c := flags.Program(&cobra.Command{
		Use:   "divvy-scheduler [flags] [-- flags of kube-scheduler]",
		Short: "kube-scheduler with a plugin that places pods on shared devices",
		Long: "Run kube-scheduler with the plugin " + plugin.Name + ", which places pods on shared devices, and report the " +
			"allocations of all devices." + flags.EnvironmentHelp,
		SilenceUsage:  true,
		SilenceErrors: true,
	}, &o, &o.Log, nil, func(ctx context.Context, _ io.Writer) error { return run(ctx, o, rest) })
	c.Args = func(_ *cobra.Command, args []string) error { rest = args; return nil }
	apis := slices.DeleteFunc(extender.APIs(), func(a version.API) bool { return a.Use == version.Serves })
	about.Version(c, slices.Concat([]version.API{
		{Use: version.Serves, Name: "kube-scheduler", Versions: []string{kubernetes}},
		{Use: version.Reads, Name: kubescheduler.GroupName, Versions: []string{kubescheduler.SchemeGroupVersion.Version}},
	}, apis)...)
	return c
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	err := o.Options.Validate()
	if o.Config == "" {
		err = errors.Join(err, flags.Mistake("scheduler-config", fmt.Errorf("must name a file, with for example\n%s", Example)))
	}
	return err
}

// Example is a configuration with all that the plugin needs.
const Example = `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
profiles:
- schedulerName: divvy-scheduler
  plugins:
    multiPoint: {enabled: [{name: Divvy}]}
    postFilter: {disabled: [{name: "*"}], enabled: [{name: Divvy}, {name: DynamicResources}, {name: DefaultPreemption}]}
    bind: {disabled: [{name: "*"}], enabled: [{name: Divvy}, {name: DefaultBinder}]}
`

// Scheduler is kube-scheduler, of any minor, with the plugin in it.
type Scheduler interface {
	// Cached is a pod as the cache shows it by which nodes are filtered; nil for none.
	Cached(pod *v1.Pod) (*v1.Pod, error)
	// Follow starts what keeps the cache and returns when it is complete.
	Follow(ctx context.Context) error
	// Schedule places pods until ctx ends.
	Schedule(ctx context.Context) error
}

// Program is the program without kube-scheduler.
type Program struct {
	embedded  *extender.Embedded
	core      *plugin.Core
	claims    func() fwk.ResourceClaimTracker
	activator *plugin.Activator
	binds     gate
	scheduler chan Scheduler // has the scheduler once it follows
}

// New puts it together.
func New(o Options) (*Program, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	p := &Program{activator: plugin.NewActivator(), scheduler: make(chan Scheduler, 1)}
	var err error
	if p.embedded, err = extender.Embed(o.Options, "divvy-scheduler", extender.Embedding{
		Waker: p.activator, Quiesce: p.binds.close, CatchUp: p.catchUp,
	}); err != nil {
		return nil, err
	}
	narrowed := metrics.ExtenderNarrowedFailed.NewCounter()
	if err := p.embedded.Register(narrowed); err != nil {
		return nil, err
	}
	p.core, err = plugin.New(plugin.Config{
		Inside: p.embedded.Inside(), Activator: p.activator, Resources: p.embedded.Resources(), Policy: p.embedded.Policy(),
		ChooseNode: o.Placement.ChooseNode, Lead: p.lead, Narrowed: narrowed.Inc,
	})
	if err != nil {
		return nil, err
	}
	p.claims = p.core.Claims
	return p, nil
}

// Core makes the plugins.
func (p *Program) Core() *plugin.Core { return p.core }

// Manages reports whether a resource is shared.
func (p *Program) Manages(resource string) bool {
	return slices.Contains(p.embedded.Resources(), accel.Resource(resource))
}

// errLost ends the process: the queue of a scheduler that stopped cannot be started again.
var errLost = errors.New("another replica may lead by now; the program exits so that it restarts as a standby")

// Run schedules while this replica leads, and follows until then. It returns an error when the
// lead is lost.
func (p *Program) Run(ctx context.Context, s Scheduler) error {
	return p.embedded.Run(ctx, func(ctx context.Context) error {
		if err := s.Follow(ctx); err != nil {
			return ended(ctx, fmt.Errorf("follow the cluster: %w", err))
		}
		p.scheduler <- s
		leads, err := p.embedded.Await(ctx)
		if err != nil {
			return ended(ctx, err)
		}
		running, stop := context.WithCancelCause(ctx)
		var waiting sync.WaitGroup
		defer waiting.Wait()
		defer stop(nil)
		waiting.Go(func() { p.activator.Run(running) })
		waiting.Go(func() {
			for {
				leading, changed := leads()
				if !leading {
					stop(errLost)
					return
				}
				select {
				case <-changed:
				case <-running.Done():
					return
				}
			}
		})
		p.core.LearnPlaced(running)
		klog.FromContext(ctx).Info("Scheduling")
		err = s.Schedule(running)
		if cause := context.Cause(running); errors.Is(cause, errLost) {
			return cause
		}
		return ended(ctx, err)
	})
}

// ended is nil where the program was to end.
func ended(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return nil
}

// catchUpEvery is how often catchUp looks.
const catchUpEvery = 5 * time.Millisecond

// catchUp returns nil when the scheduler's cache has what the ledger has: one handler feeds it
// with all pods in the order of their changes, so with this one's own it has all before. Claims are compared.
func (p *Program) catchUp(ctx context.Context, client kubernetes.Interface, namespace, name string) error {
	var s Scheduler
	select {
	case s = <-p.scheduler:
		p.scheduler <- s
	case <-ctx.Done():
		return fmt.Errorf("wait for the scheduler's cache: %w", context.Cause(ctx))
	}
	own, err := client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("read pod %s/%s: %w", namespace, name, err)
	}
	seen := func(context.Context) (bool, error) {
		cached, err := s.Cached(own)
		if err != nil || cached == nil {
			return false, nil //nolint:nilerr // it is not there yet
		}
		order, err := resourceversion.CompareResourceVersion(cached.ResourceVersion, own.ResourceVersion)
		return err == nil && order >= 0, err
	}
	if err := wait.PollUntilContextCancel(ctx, catchUpEvery, true, seen); err != nil {
		return fmt.Errorf("wait until the scheduler's cache has the newest change of pod %s/%s: %w", namespace, name, err)
	}
	claims := p.claims()
	if claims == nil {
		return nil
	}
	return awaitClaims(ctx, client, claims.Get)
}

// lead bounds a bind.
func (p *Program) lead(ctx context.Context) (context.Context, context.CancelFunc, error) {
	done, err := p.binds.enter()
	if err != nil {
		return nil, nil, err
	}
	bounded, cancel, err := p.embedded.Lead(ctx)
	if err != nil {
		done()
		return nil, nil, err
	}
	return bounded, func() { cancel(); done() }, nil
}

// gate counts binds. The zero value is open.
type gate struct {
	mu     sync.Mutex
	closed bool
	inside int
	empty  chan struct{} // is closed when it is closed and none is inside
}

var errClosing = errors.New("the scheduler is shutting down")

func (g *gate) enter() (leave func(), err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil, errClosing
	}
	g.inside++
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.inside--; g.closed && g.inside == 0 {
			close(g.empty)
		}
	}, nil
}

// close lets none in any more, and waits until none is inside.
func (g *gate) close(ctx context.Context) {
	g.mu.Lock()
	if !g.closed {
		g.closed, g.empty = true, make(chan struct{})
		if g.inside == 0 {
			close(g.empty)
		}
	}
	empty := g.empty
	g.mu.Unlock()
	select {
	case <-empty:
	case <-ctx.Done():
	}
}
