// Package nodeagent is the node daemon: it watches the node's devices, offers
// their units to kubelet, answers which units a container gets, publishes the
// inventory, and writes back to the pods what kubelet really gave them.
//
// Ownership of truth: which unit ids a container holds is known by kubelet and
// asked of it (pod-resources API); which device an id belongs to is known by
// the layout in the state file. Annotations are written from these two and
// never decide about anything that is handed out already.
package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/wire"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/podresources"
	"github.com/divvy-gpu/divvy/internal/sharing"
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

// Options are what an Agent needs. All are required.
type Options struct {
	Config   config.NodeConfig
	Node     string
	Client   kubernetes.Interface
	Keys     *kube.Keyring
	Backends map[string]backend.Backend // by vendor
	Registry prometheus.Registerer
}

// Agent is the node daemon. Ready and Alive may be called while Run runs.
type Agent struct {
	o         Options
	offers    []offer
	kubelet   *podresources.Client
	pods      *nodePods
	publisher *publisher
	corrector *corrector
	recorder  record.EventRecorder
	events    record.EventBroadcaster
	wake      chan struct{}
	// specified are the CDI specifications on disk, by resource; only the loop
	// reads and writes it. The devices' ids would not do: a device that was not
	// found yet has no specification, and a driver may number its files anew.
	specified map[accel.Resource]map[string]*cdiSpec

	mu        sync.Mutex // guards what follows
	turned    time.Time  // the last turn of the loop
	published error
	corrected error
}

// offer is one resource with its server.
type offer struct {
	pool   *pool
	server *deviceplugin.Server
	count  string // resource that shows the number of devices, or ""
}

// New builds the agent; it starts nothing. Close it if Run is not called.
func New(ctx context.Context, o Options) (*Agent, error) {
	kubelet, err := podresources.NewClient(filepath.Join(o.Config.KubeletDir, "pod-resources", "kubelet.sock"))
	if err != nil {
		return nil, err
	}
	a := &Agent{
		o:         o,
		kubelet:   kubelet,
		wake:      make(chan struct{}, 1),
		specified: map[accel.Resource]map[string]*cdiSpec{},
		turned:    time.Now(),
		published: errors.New("the inventory was not published yet"),
		corrected: errors.New("kubelet was not asked yet who holds what"),
		events:    record.NewBroadcaster(record.WithContext(ctx)),
	}
	a.recorder = a.events.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "divvy-node", Host: o.Node})
	m := newMetrics(o.Registry)
	a.pods = newNodePods(o.Client, o.Node, a.wakeUp)
	a.publisher = newPublisher(o.Client, o.Node, m, a.wakeUp)
	a.corrector = &corrector{node: o.Node, client: o.Client, keys: o.Keys, metrics: m, event: a.tell, unwritable: map[string]bool{}}
	for _, r := range o.Config.Resources {
		one, err := a.offer(ctx, r, m)
		if err != nil {
			return nil, errors.Join(err, kubelet.Close())
		}
		a.offers = append(a.offers, one)
	}
	return a, nil
}

func (a *Agent) offer(ctx context.Context, r config.Resource, m *metrics) (offer, error) {
	unit, err := sharing.ParseMemoryUnit(r.MemoryUnit)
	if err != nil {
		return offer{}, err
	}
	b, ok := a.o.Backends[r.Vendor]
	if !ok {
		return offer{}, fmt.Errorf("resource %s: there is no backend for vendor %q", r.Name, r.Vendor)
	}
	resource := accel.Resource(r.Name)
	p := &pool{
		resource:  resource,
		wanted:    unit,
		injection: a.o.Config.Injection,
		backend:   b,
		store:     sharing.NewStore(a.o.Config.StateDir, resource),
		kubelet:   a.kubelet,
		pods:      a.pods,
		grant:     func(pod *corev1.Pod) (accel.Grant, bool) { return a.grantOf(pod, resource) },
		metrics:   m,
		changed:   a.wakeUp,
		event:     a.tell,
	}
	server := deviceplugin.NewServer(filepath.Join(a.o.Config.KubeletDir, "device-plugins"), resource, p)
	p.sink = server
	a.o.Registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Namespace: "divvy", Subsystem: "node", Name: "registrations_total",
		Help:        "Registrations that kubelet accepted.",
		ConstLabels: prometheus.Labels{"resource": r.Name},
	}, func() float64 { return float64(server.Registrations()) }))
	if err := p.open(ctx); err != nil {
		return offer{}, err
	}
	return offer{pool: p, server: server, count: r.CountResource}, nil
}

// grantOf returns the grant that the extender, or this program, signed for the
// pod on this node.
func (a *Agent) grantOf(pod *corev1.Pod, resource accel.Resource) (accel.Grant, bool) {
	value, ok := pod.Annotations[wire.GrantAnnotation]
	if !ok {
		return accel.Grant{}, false
	}
	g, err := a.o.Keys.DecodeGrant(string(pod.UID), value)
	return g, err == nil && g.Node == a.o.Node && g.Resource == resource
}

// tell records an event on the node.
func (a *Agent) tell(kind, reason, message string) {
	a.recorder.Event(&corev1.ObjectReference{Kind: "Node", Name: a.o.Node, UID: "", APIVersion: "v1"}, kind, reason, message)
}

// wakeUp makes the loop turn soon. It never blocks.
func (a *Agent) wakeUp() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// Run works until ctx ends and returns once all that it started has stopped.
func (a *Agent) Run(ctx context.Context) error {
	defer a.kubelet.Close() //nolint:errcheck // nothing is lost
	a.events.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: a.o.Client.CoreV1().Events("")})
	defer a.events.Shutdown()
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() { a.pods.Run(ctx) })
	work.Go(func() { a.publisher.Run(ctx) })
	work.Go(func() { a.o.Keys.Run(ctx, a.wakeUp) })
	for vendor, b := range a.o.Backends {
		work.Go(func() { a.watch(ctx, vendor, b) })
	}
	for _, o := range a.offers {
		work.Go(func() {
			if err := o.server.Run(ctx); err != nil {
				klog.FromContext(ctx).Error(err, "Serving kubelet ended", "resource", o.pool.resource)
			}
		})
	}
	a.loop(ctx)
	return nil
}

// watch follows the devices of one vendor for all resources made of them.
func (a *Agent) watch(ctx context.Context, vendor string, b backend.Backend) {
	log := klog.FromContext(ctx).WithValues("vendor", vendor)
	backend.Watch(ctx, b, time.Duration(a.o.Config.HealthInterval), backend.Recovery{}, func(found backend.Found, err error) {
		if err != nil {
			log.Error(err, "No device can be asked for now; waiting")
		} else {
			log.Info("Found devices", "devices", len(found.Devices), "faults", len(found.Faults), "driver", found.Driver)
		}
		for _, f := range found.Faults {
			log.Error(f.Err, "A device cannot be used", "index", f.Index)
		}
		for _, o := range a.offers {
			if o.pool.backend == b {
				o.pool.update(ctx, found, err)
			}
		}
	})
}

// loop brings the API server's books in line with the node, again and again.
func (a *Agent) loop(ctx context.Context) {
	tick := time.NewTicker(reconcileInterval)
	defer tick.Stop()
	var told string
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-a.wake:
			select {
			case <-ctx.Done():
				return
			case <-time.After(settle):
			}
			// What woke the loop in the meantime is served by this turn.
			select {
			case <-a.wake:
			default:
			}
		}
		err := a.turn(ctx)
		if text := fmt.Sprint(err); err != nil && text != told && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Bringing the books in line failed; trying again")
			told = text
		} else if err == nil {
			told = ""
		}
	}
}

// turn publishes and corrects once.
func (a *Agent) turn(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stalled/2)
	defer cancel()
	var corrected error
	for _, o := range a.offers {
		corrected = errors.Join(corrected, a.corrector.reconcile(ctx, o.pool))
	}
	published := a.publish(ctx)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.turned, a.published, a.corrected = time.Now(), published, corrected
	return errors.Join(published, corrected)
}

func (a *Agent) publish(ctx context.Context) error {
	var inventory []accel.Inventory
	counts := map[string]int{}
	for _, o := range a.offers {
		if !o.pool.known() {
			return errors.New("the inventory is not known yet")
		}
		one := o.pool.inventory()
		inventory = append(inventory, one)
		if o.count != "" {
			counts[o.count] = o.pool.present()
		}
		if err := a.specify(o.pool, one.Shares); err != nil {
			return err
		}
	}
	return a.publisher.publish(ctx, inventory, counts)
}

// specify writes the CDI specifications of a resource's devices when there are
// others than before.
func (a *Agent) specify(p *pool, shares []accel.Share) error {
	if a.o.Config.Injection != config.InjectCDI {
		return nil
	}
	specs := specsOf(p.backend, shares)
	if reflect.DeepEqual(a.specified[p.resource], specs) {
		return nil
	}
	if err := writeCDI(a.o.Config.CDIDir, specs); err != nil {
		return err
	}
	a.specified[p.resource] = specs
	return nil
}

// Ready returns nil while the node's units can be given to pods: the devices
// are known, kubelet watches them, the inventory is published and what pods
// hold is known. Otherwise it says what is missing.
func (a *Agent) Ready() error {
	var missing []error
	if _, err := a.o.Keys.Signer(); err != nil {
		missing = append(missing, err)
	}
	for _, o := range a.offers {
		missing = append(missing, o.pool.ready(), o.server.Ready())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(append(missing, a.published, a.corrected)...)
}

// Alive returns an error when the program hangs: the loop stands still, or the
// plugin's own socket does not answer. What the world outside lacks is not a
// reason to be restarted.
func (a *Agent) Alive(ctx context.Context) error {
	a.mu.Lock()
	age := time.Since(a.turned)
	a.mu.Unlock()
	if age > stalled {
		return fmt.Errorf("the loop stands still since %v", age.Round(time.Second))
	}
	for _, o := range a.offers {
		if err := o.server.Alive(ctx); err != nil {
			return fmt.Errorf("%s: %w", o.pool.resource, err)
		}
	}
	return nil
}
