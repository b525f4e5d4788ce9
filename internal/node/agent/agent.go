// Package agent is the node daemon: it watches the node's devices, offers
// them to kubelet, answers which of them a container gets, publishes the
// inventory and the node's labels, and writes back to the pods what kubelet
// really gave them.
//
// A resource of the node is offered whole, by time slices or by units of memory,
// and several resources may be made of the same devices: what containers hold of
// one is withdrawn from the others.
//
// Ownership of truth: which unit ids a container holds is known by kubelet and
// asked of it (pod-resources API), once for all resources; which device an id
// belongs to is known by the state files. Annotations are written from these two
// and never decide about anything that is handed out already.
//
// An Agent can be stopped and another one made in the same process, which is how
// a new configuration takes effect: all that matters is in the state files and
// with kubelet.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/podresources"
	"github.com/divvy-gpu/divvy/internal/node/quarantine"
	"github.com/divvy-gpu/divvy/internal/node/runtimesetup"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	defs "github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// Intervals of the agent's loop.
const (
	// settle is how long a change is left alone before it is acted on: kubelet
	// records what it handed out just after it was answered, and changes come
	// in bursts.
	settle = 150 * time.Millisecond
	// reconcileInterval is the longest time between two questions to kubelet,
	// since it does not tell when a container gives its units back.
	reconcileInterval = 2 * time.Second
	// stalled is how old the last turn of the loop may be before the program
	// counts as hung.
	stalled = 2 * time.Minute
)

// Options are what an Agent needs.
type Options struct {
	Config   config.NodeConfig
	Node     string
	Client   kubernetes.Interface
	Keys     *kube.Keyring
	Backends map[string]backend.Backend // by vendor
	// Registry gets the agent's metrics, until Run returns.
	Registry prometheus.Registerer
	// Events makes the agent's events; nil for a recorder of its own.
	Events *events.Recorder
	// Quarantine has the devices that take no pods until they are released; nil for
	// one that ends with the agent.
	Quarantine *quarantine.List
	// Discovered is called with the outcome of each discovery that changed something,
	// from a goroutine for each vendor; nil for no call.
	Discovered func(vendor string, found backend.Found, err error)
	// Pauses keep the library of a vendor out of the process while they are set, by
	// vendor; the backends have the same.
	Pauses map[string]*backend.Pause
	// Setup returns what was found of the node's container runtime; it may be nil, and return
	// nil.
	Setup func() *runtimesetup.Report
	// RunDir is the folder of the report of measured use; empty for usagefile.Dir.
	RunDir string
	// Limits say how containers get limits in the driver.
	Limits LimitOptions
	// Handoff is the state of the predecessor, whose sockets kubelet still watches. All
	// else is required.
	Handoff Handoff
}

// Agent is the node daemon. Ready and Alive may be called while Run runs.
type Agent struct {
	o           Options
	offerings   offerings
	records     *records
	kubelet     *podresources.Client
	pods        *nodePods
	publisher   *publisher
	corrector   *corrector
	annotator   *annotator
	health      *healthReporter
	quarantine  *quarantineDesk
	metrics     *metrics
	events      *events.Recorder
	signals     signals
	cdi         *cdiWriter
	endings     *endings
	overuse     *overuseDesk
	claims      *claimDesk
	phases      phases
	discoveries *discoveries
	progress    progress
}

// phases are what ends at different times of a handover: watching follows the devices and serves
// claims, deciding updates the API server. Kubelet is served until Run ends.
type phases struct{ watching, deciding *phase }

// signals wake the agent's goroutines: wake makes the loop turn soon, withdraw makes all
// resources tell kubelet what they offer, at once, and learned has what pods hold written
// into them.
type signals struct{ wake, withdraw, learned signal }

// signal wakes the goroutine that receives from it.
type signal chan struct{}

// raise never blocks: a signal that was not seen yet is enough.
func (s signal) raise() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// progress is what the loop has come to. It is safe for concurrent use.
type progress struct {
	mu        sync.Mutex
	turned    time.Time // the last turn of the loop
	published error
	asked     error // of kubelet who holds what
	// removed is the folder that comes back with a new mount only, nil for none.
	removed *atomicfile.RemovedError
}

func (p *progress) note(published, asked error, removed *atomicfile.RemovedError) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turned, p.published, p.asked, p.removed = time.Now(), published, asked, removed
}

// stuck returns why a restart would help.
func (p *progress) stuck() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.removed != nil {
		return p.removed
	}
	if age := time.Since(p.turned); age > stalled {
		return fmt.Errorf("the loop stands still since %v", age.Round(time.Second))
	}
	return nil
}

// New builds the agent; it starts nothing. Close it if Run is not called.
func New(ctx context.Context, o Options) (*Agent, error) {
	kubelet, err := podresources.NewClient(filepath.Join(o.Config.KubeletDir, "pod-resources", "kubelet.sock"))
	if err != nil {
		return nil, err
	}
	if o.Quarantine == nil {
		o.Quarantine = quarantine.New()
	}
	if o.Handoff.Quarantine != nil {
		o.Quarantine.Restore(o.Handoff.Quarantine)
	}
	m := newMetrics(o.Registry)
	a := &Agent{
		o:           o,
		kubelet:     kubelet,
		metrics:     m,
		signals:     signals{make(signal, 1), make(signal, 1), make(signal, 1)},
		cdi:         newCDIWriter(o.Config, o.Limits),
		events:      o.Events,
		phases:      phases{newPhase(), newPhase()},
		discoveries: newDiscoveries(o.Backends),
	}
	a.progress.note(errors.New("the inventory was not published yet"), alloc.ErrNotAsked, nil)
	if a.events == nil {
		a.events = events.NewRecorder(ctx, o.Client, events.Node, o.Node)
		m.register(a.events)
	}
	a.overuse = &overuseDesk{enabled: o.Config.Usage.Enabled,
		withholds: o.Config.Usage.Enabled && o.Config.Usage.Overuse.Withhold}
	a.endings = newEndings(filepath.Join(o.Config.DriverRoot, "sys/fs/cgroup"))
	a.pods = newNodePods(o.Client, o.Node, a.signals.wake.raise)
	a.pods.objects.gone = a.endings.gone
	a.records = &records{kubelet: kubelet, pods: a.pods, metrics: m, owner: &owner{}, planned: a.planned, endings: a.endings}
	a.publisher = newPublisher(o.Client, o.Node, m, a.signals.wake.raise)
	a.corrector = &corrector{node: o.Node, pods: newPodWriter(o.Client, m, a.tellPod), keys: o.Keys, metrics: m, event: a.tellPod,
		written: cache.NewExpiring()}
	a.annotator = &annotator{newPodWriter(o.Client, m, a.tellPod)}
	a.health = &healthReporter{metrics: m, name: o.Node, node: a.tell, pods: a.pods,
		unhealthy: map[string]map[accel.DeviceID]accel.Health{},
		pod:       a.tellPod}
	a.quarantine = &quarantineDesk{node: o.Node, list: o.Quarantine, discoveries: a.discoveries, metrics: m, event: a.tell}
	m.quarantine(o.Quarantine.All(), o.Quarantine.Sync())
	for vendor := range o.Backends {
		m.vendor(vendor)
	}
	if a.offerings, err = a.build(ctx); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	a.claims = newClaimDesk(ctx, a)
	a.records.claimed, a.health.claimed, a.cdi.limits.claims = a.claims.containers, a.claims.containers, a.claims.limits
	return a, nil
}

// Close lets go of what New has taken; Run does it by itself.
func (a *Agent) Close() error {
	a.metrics.close()
	if a.o.Events == nil {
		a.events.Shutdown()
	}
	return a.kubelet.Close()
}

// planned returns the allocation that the extender, or this program, signed for
// the pod on this node; nil for none.
func (a *Agent) planned(pod *corev1.Pod) *accel.Grant {
	value, ok := pod.Annotations[wire.GrantAnnotation]
	if !ok {
		return nil
	}
	g, err := a.o.Keys.DecodeGrant(string(pod.UID), value)
	if err != nil || g.Node != a.o.Node {
		return nil
	}
	return &g
}

// tell records an event on the node.
func (a *Agent) tell(kind events.Kind, message string) {
	a.events.Tell(events.OnNode(a.o.Node), kind, message)
}

// tellPod records an event on a pod.
func (a *Agent) tellPod(pod *corev1.Pod, kind events.Kind, message string) {
	a.events.Tell(pod, kind, message)
}

// Run works until ctx ends, or until it has left (see Yield), and returns once all
// that it started has stopped and its metrics and sockets are gone.
func (a *Agent) Run(ctx context.Context) error {
	defer a.Close() //nolint:errcheck // nothing is lost
	if a.o.Events == nil {
		a.events.Start()
	}
	var work sync.WaitGroup
	defer work.Wait()
	for _, r := range a.offerings {
		if a.o.Backends[r.vendor] == nil {
			// It is served for the sake of those who hold something of it.
			for _, p := range r.parts {
				p.update(ctx, backend.Found{}, fmt.Errorf("the vendor %q is not configured any more", r.vendor))
			}
			r.discovered()
		}
		r.offerEarly()
		work.Go(func() {
			if err := r.server.Run(ctx); err != nil {
				klog.FromContext(ctx).Error(err, "Serving kubelet ended", "resource", r.name)
			}
		})
	}
	for _, d := range a.cdi.describers {
		work.Go(func() { d.run(ctx) })
	}
	measured, limited := newUsageWatch(a), newLimitWatch(a)
	served := newMPSWatch(ctx, a, limited)
	work.Go(func() { a.claims.serve(ctx) })
	work.Go(func() {
		a.phases.watching.run(ctx, func(ctx context.Context) {
			var watches sync.WaitGroup
			defer watches.Wait()
			if measured != nil {
				watches.Go(func() { measured.run(ctx) })
			}
			if limited != nil {
				watches.Go(func() { limited.run(ctx) })
			}
			if served != nil {
				watches.Go(func() { served.run(ctx) })
			}
			watches.Go(func() { a.claims.run(ctx) })
			for vendor, b := range a.o.Backends {
				watches.Go(func() { a.watch(ctx, vendor, b) })
			}
		})
	})
	a.phases.deciding.run(ctx, func(ctx context.Context) {
		var work sync.WaitGroup
		defer work.Wait()
		work.Go(func() { a.pods.Run(ctx) })
		work.Go(func() { a.publisher.Run(ctx) })
		work.Go(func() { a.o.Keys.Run(ctx, a.signals.wake.raise) })
		work.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-a.signals.withdraw:
					a.offerings.sync(ctx)
					a.claims.refresh()
				}
			}
		})
		work.Go(func() { a.describePods(ctx) })
		a.loop(ctx)
	})
	return nil
}

// watch follows the devices of one vendor for all resources made of them.
func (a *Agent) watch(ctx context.Context, vendor string, b backend.Backend) {
	log := klog.FromContext(ctx).WithValues("vendor", vendor)
	health := a.o.Config.Vendors[vendor].Health
	recovery := backend.Recovery{After: time.Duration(config.DefaultRecoverAfter), Never: health.NeverRecover, Quarantine: a.o.Quarantine,
		Pause: a.o.Pauses[vendor]}
	if health.RecoverAfter != nil {
		recovery.After = time.Duration(*health.RecoverAfter)
	}
	backend.Watch(ctx, b, time.Duration(a.o.Config.HealthInterval), recovery, func(found backend.Found, err error) {
		if err != nil {
			log.Error(err, "Devices are unavailable; waiting")
		} else {
			log.Info("Found devices", "devices", len(found.Devices), "faults", len(found.Faults), "driver", found.Driver)
		}
		for _, f := range found.Faults {
			log.Error(f.Err, "A device cannot be used", "index", accel.IndexText(f.Index))
			if f.Cause == accel.CauseNotOffered {
				a.events.Once(events.OnNode(a.o.Node), events.DeviceNotOffered, string(f.ID),
					fmt.Sprintf("%s device %s (%s) is not offered: %v",
						vendor, accel.IndexText(f.Index), f.ID, f.Err))
			}
		}
		for _, f := range found.Unasked {
			log.Error(f.Err, "A device does not respond; using its last state for now", "index", accel.IndexText(f.Index), "for",
				backend.Patience)
		}
		a.discoveries.note(vendor, found, err)
		if a.o.Discovered != nil {
			a.o.Discovered(vendor, found, err)
		}
		a.metrics.available.WithLabelValues(vendor).Set(defs.Bool(err == nil && !found.Silent))
		if err == nil && len(found.Devices) > 0 {
			a.cdi.await(ctx, vendor)
			a.cdi.limits.await(ctx, vendor, found)
		}
		a.claims.discovered(vendor, found, err)
		for _, r := range a.offerings {
			if r.vendor == vendor {
				for _, p := range r.parts {
					p.update(ctx, found, err)
				}
				r.discovered()
			}
		}
		a.discoveries.told(vendor)
		a.signals.wake.raise() // also where no resource is made of the devices
	})
}

// Ready returns nil while the node's devices can be given to pods: they are
// known, kubelet watches them, the inventory is published and what pods hold is
// known. Otherwise it says what is missing. A vendor that has nothing on this
// node is not missed where another one has: one configuration serves nodes of
// all kinds.
func (a *Agent) Ready() error {
	var missing []error
	if _, err := a.o.Keys.Signer(); err != nil {
		missing = append(missing, err)
	}
	present := slices.ContainsFunc(a.offerings, func(r *offering) bool { return r.configured && !r.parts[0].status().Absent })
	for _, r := range a.offerings {
		if status := r.parts[0].status(); r.configured && !(present && status.Absent) {
			missing = append(missing, status.Problem, r.server.Ready())
		}
	}
	a.progress.mu.Lock()
	defer a.progress.mu.Unlock()
	return errors.Join(append(missing, a.claims.ready(), a.progress.published, a.progress.asked)...)
}

// Alive returns an error when a restart would help: the loop stands still, the
// plugin's own socket does not answer, or a vendor's library asks for it. What
// the world outside lacks is not a reason to be restarted.
func (a *Agent) Alive(ctx context.Context) error {
	if err := cmp.Or(a.discoveries.restart(), a.progress.stuck()); err != nil {
		return err
	}
	for _, r := range a.offerings {
		if err := r.server.Alive(ctx); err != nil {
			return fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return nil
}
