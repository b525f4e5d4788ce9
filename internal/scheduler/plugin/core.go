package plugin

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/scheduler/claims"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// Name is the plugin's in the configuration of kube-scheduler.
const Name = "Divvy"

// Config is what a Core needs. All of it is required but where said.
type Config struct {
	Inside *decision.Inside
	// Activator is the one that Inside wakes pods by.
	Activator *Activator
	// Resources are those that are shared.
	Resources []accel.Resource
	// Policy rates nodes for pods with ResourceClaims.
	Policy place.Policy
	// ChooseNode names one node where the pod leaves the choice to the policy.
	ChooseNode bool
	// Lead bounds what is done by the time in which this process may act; nil where there is
	// no election.
	Lead func(ctx context.Context) (context.Context, context.CancelFunc, error)
	// Narrowed counts attempts with one node that failed; nil for no count.
	Narrowed func()
}

// Core is what the plugins of all profiles of a process share. It is safe for concurrent use.
type Core struct {
	config    Config
	failed    failed
	rehearsal rehearsal
	catalog   *claims.Catalog
	learning  learning                             // nil where the policy does not learn
	manager   atomic.Pointer[fwk.SharedDRAManager] // the profiles share it
}

// New checks the configuration.
func New(c Config) (*Core, error) {
	if c.Inside == nil || c.Activator == nil || c.Policy == nil || len(c.Resources) == 0 {
		return nil, errors.New("the plugin's configuration is incomplete")
	}
	if c.Narrowed == nil {
		c.Narrowed = func() {}
	}
	core := &Core{config: c, catalog: claims.NewCatalog()}
	if policy, learns := c.Policy.(learning); learns {
		core.learning = policy
		policy.Follow(claims.Resources(), core.catalog.Each)
	}
	return core, nil
}

// Factory makes the plugin of one profile.
func (c *Core) Factory(_ context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	if unknown, ok := args.(*runtime.Unknown); ok && len(unknown.Raw) > 0 && string(unknown.Raw) != "null" && string(unknown.Raw) != "{}" {
		return nil, fmt.Errorf("plugin %s: pluginConfig has arguments, and there are none: use the flags of divvy-scheduler", Name)
	}
	if handle.APIDispatcher() != nil {
		// A status of the pod that waits to be written there would race with the bind.
		return nil, fmt.Errorf("plugin %s does not support the feature gate SchedulerAsyncAPICalls: write --feature-gates="+
			"SchedulerAsyncAPICalls=false", Name)
	}
	informers := handle.SharedInformerFactory()
	core := informers.Core().V1()
	c.config.Activator.use(handle, core.Pods().Lister())
	if manager := handle.SharedDRAManager(); manager != nil {
		c.manager.Store(&manager)
	}
	return &Plugin{core: c, handle: handle, pods: core.Pods().Lister(), claims: core.PersistentVolumeClaims().Lister(),
		pdbs: informers.Policy().V1().PodDisruptionBudgets().Lister()}, nil
}

// Claims are the ResourceClaims as kube-scheduler's DynamicResources knows them; nil where it is off, and
// before Factory.
func (c *Core) Claims() fwk.ResourceClaimTracker {
	if manager := c.manager.Load(); manager != nil {
		return (*manager).ResourceClaims()
	}
	return nil
}

// maxFailed bounds what is remembered of pods between two attempts.
const maxFailed = 10_000

// failed are pods of which an attempt with one node has failed, by UID. Forgetting them costs
// one more attempt.
type failed struct {
	mu   sync.Mutex
	pods map[string]struct{}
}

func (f *failed) add(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.pods == nil || len(f.pods) >= maxFailed {
		f.pods = map[string]struct{}{}
	}
	f.pods[uid] = struct{}{}
}

func (f *failed) has(uid string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, has := f.pods[uid]
	return has
}

func (f *failed) forget(uid string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pods, uid)
}

const (
	// againAfter is when a pod is tried again whose attempt with one node failed: it is back in
	// the queue by then. An attempt that is still under way would be followed after a backoff.
	againAfter = 5 * time.Millisecond
	// maxAgain is how many may wait for that; others are tried again after a backoff.
	maxAgain = 1000
)

// Activator has pods tried again, by kube-scheduler's queue alone: nothing is written. Until a
// plugin is made it wakes none.
type Activator struct {
	mu     sync.Mutex // guards what follows; Activate is called without it
	handle fwk.PodActivator
	pods   corelisters.PodLister
	again  chan *v1.Pod
}

// NewActivator returns one.
func NewActivator() *Activator { return &Activator{again: make(chan *v1.Pod, maxAgain)} }

// use takes the handle of one of the profiles: they share the queue.
func (a *Activator) use(handle fwk.PodActivator, pods corelisters.PodLister) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.handle == nil {
		a.handle, a.pods = handle, pods
	}
}

// lister returns nil until a plugin is made.
func (a *Activator) lister() corelisters.PodLister {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pods
}

// Wake implements decision.Waker. It must not be called with a lock that a queueing hint takes.
func (a *Activator) Wake(ctx context.Context, ref accel.PodRef) error {
	a.mu.Lock()
	handle, pods := a.handle, a.pods
	a.mu.Unlock()
	if handle == nil {
		return errors.New("the scheduler has not started")
	}
	pod, err := pods.Pods(ref.Namespace).Get(ref.Name)
	if apierrors.IsNotFound(err) || err == nil && string(pod.UID) != ref.UID {
		return fmt.Errorf("pod %s: %w", ref, cluster.ErrPodGone)
	}
	if err != nil {
		return fmt.Errorf("look up pod %s: %w", ref, err)
	}
	activate(ctx, handle, pod)
	return nil
}

func activate(ctx context.Context, handle fwk.PodActivator, pods ...*v1.Pod) {
	named := make(map[string]*v1.Pod, len(pods))
	for _, pod := range pods {
		named[pod.Namespace+"/"+pod.Name] = pod
	}
	handle.Activate(klog.FromContext(ctx), named)
}

// soon has a pod tried again whose attempt is about to end.
func (a *Activator) soon(ctx context.Context, handle fwk.PodActivator, pod *v1.Pod) {
	select {
	case a.again <- pod:
	default:
		activate(ctx, handle, pod)
	}
}

// Run ends with the context.
func (a *Activator) Run(ctx context.Context) {
	for {
		var pods []*v1.Pod
		select {
		case <-ctx.Done():
			return
		case pod := <-a.again:
			pods = append(pods, pod)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(againAfter):
		}
		for range len(a.again) {
			pods = append(pods, <-a.again)
		}
		a.mu.Lock()
		handle := a.handle
		a.mu.Unlock()
		activate(ctx, handle, pods...)
	}
}
