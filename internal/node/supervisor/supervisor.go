// Package supervisor runs divvy-node's agent: it waits for the node or takes it over from another
// process, makes a new agent for each configuration, and hands the node over.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/handover"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/node/quarantine"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// keepInterval is how often it is looked whether the lock's file is still there.
const keepInterval = time.Second

// nodeAgent is the node agent as the supervisor needs it.
type nodeAgent interface {
	Run(context.Context) error
	Ready() error
	Alive(context.Context) error

	// The steps of a handover, as agent.Agent has them.
	Yield() agent.Handoff
	Pass(sockets map[accel.Resource]string) error
	Leave(ctx context.Context) (unnoticed []accel.Resource)
	Serving() (sockets map[accel.Resource]string, err error)
	Renew(resources []accel.Resource)
}

// supervisor runs one agent after the other, each made from one configuration.
// Probes, metrics and the lock on the node outlive the agents.
//
// A new agent in place of a changed one is the decision of
// docs/design/008-configuration-sources.md: it takes the way that a restart of
// the program takes, which is tested anyway, instead of a second way for every
// key of the configuration.
type supervisor struct {
	o      Options
	client kubernetes.Interface
	// open and build make the parts of an agent.
	open  func(config.NodeConfig) (vendors.Set, error)
	build func(context.Context, config.NodeConfig, vendors.Set, prometheus.Registerer, agent.Handoff) (nodeAgent, error)

	// servingLimit is how long a new agent may take until kubelet watches its lists.
	servingLimit time.Duration

	operator *operator
	// quarantine outlives agents: another configuration repairs no device.
	quarantine *quarantine.List

	process *prometheus.Registry // metrics that outlive agents
	reloads *prometheus.CounterVec
	library libraryMetrics
	events  *events.Recorder
	limits  *limit.Limiter
	// profiles are those of the node's partitions, and refused is when they could not be
	// offered last.
	profiles *profiles
	refused  time.Time
	// retired is true from when this process has handed over until it has the node
	// again. The lock's file says so as well, unless the disk is full.
	retired bool
	// stale is true while the configuration that was read last is not in use.
	stale atomic.Bool

	state state
}

// running is an agent that runs.
type running struct {
	nodeAgent
	config config.NodeConfig
	// profiles are those that the agent offers beside what config names.
	profiles map[string][]string
	registry *prometheus.Registry
	cancel   context.CancelFunc
	// release closes the backends, once.
	release func() error
	// ended has Run's error once everything of the agent has stopped and the
	// backends are closed.
	ended chan error
}

func newSupervisor(o Options) *supervisor {
	client, node := o.Clients.Kubernetes, o.Node
	s := &supervisor{
		o: o, client: client,
		process:      metrics.Registry(metrics.Node, nil),
		limits:       limit.New(limit.Config{}),
		reloads:      metrics.NodeConfigReloads.NewCounters(),
		library:      newLibraryMetrics(),
		events:       events.NewRecorder(context.Background(), client, events.Node, node),
		servingLimit: servingLimit, operator: newOperator(),
		profiles: newProfiles(),
	}
	s.state.since = time.Now()
	s.open = func(c config.NodeConfig) (vendors.Set, error) {
		return vendors.Open(c, s.library.observer, s.operator.pauses(c))
	}
	// The keys outlive the agents: grants that were signed with the key before
	// the current one are around for a while.
	keys := map[string]*kube.Keyring{}
	s.build = func(ctx context.Context, c config.NodeConfig, b vendors.Set, r prometheus.Registerer, h agent.Handoff) (nodeAgent, error) {
		if keys[c.GrantKeyFile] == nil {
			keys[c.GrantKeyFile] = kube.NewKeyring(c.GrantKeyFile)
		}
		return agent.New(ctx, agent.Options{
			Config: vendors.WithFatalCauses(c), Node: node, Client: client, Keys: keys[c.GrantKeyFile], Backends: b, Registry: r,
			Events:     s.events,
			Quarantine: s.quarantine, Handoff: h, Pauses: s.operator.pauses(c), Setup: s.o.Setup, Limits: s.o.Limits,
			Discovered: func(vendor string, found backend.Found, err error) {
				s.profiles.discovered(vendor, found, err, time.Now())
			},
		})
	}
	s.process.MustRegister(s.limits, s.reloads, s.library.duration, s.library.hung, s.events,
		metrics.NodeReady.NewGaugeFunc(nil, func() float64 { return metrics.Bool(s.state.Ready() == nil) }),
		metrics.NodeConfigStale.NewGaugeFunc(nil, func() float64 { return metrics.Bool(s.stale.Load()) }))
	for _, result := range []string{applied, rejected} {
		s.reloads.WithLabelValues(result) // so that both are there from the start
	}
	return s
}

// The results of a reload.
const (
	applied  = "applied"
	rejected = "rejected"
)

// run takes configurations until ctx ends or an agent fails. It returns once
// everything has stopped.
func (s *supervisor) run(ctx context.Context, updates <-chan nodeconfig.Update) error {
	var first nodeconfig.Update
	select {
	case <-ctx.Done():
		return nil
	case first = <-updates:
	}
	log := klog.FromContext(ctx)
	c := first.Config
	if err := s.o.Log.set(c.LogFile, c.LogLevel); err != nil {
		return err
	}
	log.Info("Starting", "version", version.Version, "commit", version.Commit, "node", s.o.Node, "configuration", first.Files)
	warn(ctx, append(first.Warnings, vendors.UnknownCauses(first.Config)...))

	s.events.Start()
	defer s.events.Shutdown()
	var work sync.WaitGroup
	defer work.Wait()
	operating, cancel := context.WithCancel(ctx)
	defer cancel()
	work.Go(func() { s.operator.run(operating, s.client, s.o.Node) })
	for {
		seat, err := handover.Open(c.StateDir, s.o.Self)
		if err != nil {
			return err
		}
		c, err = s.serve(ctx, seat, c, updates)
		seat.Close()
		if !errors.Is(err, errHandedOver) {
			return err
		}
		s.retired = true
	}
}

// errHandedOver ends serve because another process has taken over.
var errHandedOver = errors.New("another divvy-node has taken over")

// serve waits for the node and serves it until ctx ends, an agent fails or another
// process has taken over. It returns the configuration that was read last.
func (s *supervisor) serve(ctx context.Context, seat *handover.Seat, c config.NodeConfig,
	updates <-chan nodeconfig.Update) (config.NodeConfig, error) {
	probes, stop, err := s.listen(ctx, c.Listen)
	free, takeErr := seat.Take()
	if takeErr != nil || err != nil && free {
		stop()
		return c, errors.Join(err, takeErr)
	}
	defer func() { stop() }()
	got, err := s.claim(ctx, seat, c, updates)
	if err != nil {
		if ctx.Err() != nil {
			err = nil
		}
		return c, err
	}
	c = got.config
	if probes == nil { // the process before had the address
		if probes, stop, err = s.listen(ctx, c.Listen); err != nil {
			return c, errors.Join(err, got.release())
		}
	}
	now, err := s.begin(ctx, got)
	if err != nil {
		if errors.Is(err, context.Canceled) && ctx.Err() != nil {
			err = nil
		}
		return c, err
	}
	if err := seat.Listen(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "The next divvy-node has to wait until this one ends")
	}
	keep := time.NewTicker(keepInterval)
	defer keep.Stop()
	var told logging.Changes
	for {
		select {
		case <-ctx.Done():
			return c, s.stop(now)
		case <-keep.C:
			err := seat.Keep(ctx)
			if errors.Is(err, handover.ErrTaken) {
				return c, errors.Join(err, s.stop(now))
			}
			told.Log(ctx, err, "The lock of the node cannot be kept")
			if now, err = s.adopt(ctx, now); err != nil {
				return c, err
			}
		case err := <-probes:
			return c, errors.Join(err, s.stop(now))
		case err := <-now.ended:
			if err == nil && ctx.Err() == nil {
				err = errors.New("the node agent ended by itself")
			}
			return c, err
		case u := <-updates:
			if now, err = s.update(ctx, now, u); err != nil {
				return c, err
			}
			c = now.config
		case request := <-seat.Requests():
			if now, err = s.handOver(ctx, now, request); now == nil {
				return c, err
			}
			if err := seat.Listen(ctx); err != nil {
				klog.FromContext(ctx).Error(err, "The next divvy-node has to wait until this one ends")
			}
		}
	}
}

// listen serves probes and metrics until stop. The error of the server is in failed.
func (s *supervisor) listen(ctx context.Context, address string) (failed <-chan error, stop func(), err error) {
	l, err := serve.Listen(ctx, "probes and metrics", address)
	if err != nil {
		return nil, func() {}, err
	}
	gather := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return s.gatherer().Gather() })
	probes := serve.NewProbes(s.state.Alive, s.state.Ready, gather, s.details)
	server := serve.Server{Name: serve.Probes, Listener: l, HTTP: serve.NewServer(probes)}
	ended, served := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(served)
		ended <- server.Serve(s.limits)
	}()
	return ended, func() {
		_ = errors.Join(server.HTTP.Close(), l.Close()) // a probe that is cut off is asked again
		<-served
	}, nil
}

// details is what /readyz says beside whether the node is ready.
func (s *supervisor) details() string {
	if s.o.Setup == nil {
		return ""
	}
	return s.o.Setup().String()
}

// update goes over to another configuration and returns what runs then: the
// agent before if the new one cannot be used. An error means that nothing runs.
func (s *supervisor) update(ctx context.Context, now *running, u nodeconfig.Update) (*running, error) {
	log := klog.FromContext(ctx)
	if u.Err != nil {
		s.reject(ctx, u.Err)
		return now, nil //nolint:nilerr // it was told, and what runs goes on
	}
	warn(ctx, append(u.Warnings, vendors.UnknownCauses(u.Config)...))
	c := keep(ctx, now.config, u.Config)
	if err := s.o.Log.set(c.LogFile, c.LogLevel); err != nil {
		log.Error(err, "Changing the log")
	}
	if u.Asked && reflect.DeepEqual(now.config, c) {
		s.stale.Store(false)
		log.Info("The configuration was read again; it is the one in use", "files", u.Files)
		return now, nil
	}
	if quietly(now.config, c) {
		now.config = c
		s.accept(ctx, u.Files)
		return now, nil
	}
	b, err := s.open(c)
	if err != nil {
		s.reject(ctx, err)
		return now, nil
	}
	log.Info("The configuration changed; going over to it", "files", u.Files)
	next, refused, err := s.goOver(ctx, now, c, s.profiles.wanted(time.Now()), b)
	if refused == nil {
		s.accept(ctx, u.Files)
		return next, nil
	}
	s.reject(ctx, refused)
	if err := s.o.Log.set(now.config.LogFile, now.config.LogLevel); err != nil {
		log.Error(err, "Changing the log")
	}
	return next, err
}

// goOver replaces an agent by one of another configuration or with other profiles, and
// returns what runs then: if that one cannot be used, for the reason refused, one as
// before. An error means that nothing runs.
func (s *supervisor) goOver(ctx context.Context, now *running, c config.NodeConfig, profiles map[string][]string, b vendors.Set,
) (next *running, refused, err error) {
	left := s.yield(now)
	next, refused = s.replace(ctx, now, left, c, profiles, b)
	if refused == nil {
		return next, nil, nil
	}
	if b, err = s.open(now.config); err == nil {
		next, err = s.replace(ctx, now, left, now.config, now.profiles, b)
	}
	if err != nil {
		return nil, refused, errors.Join(fmt.Errorf("go back to the configuration before: %w", err), s.stop(now))
	}
	return next, refused, nil
}

// quietly reports whether the change is one that no agent sees.
func quietly(before, after config.NodeConfig) bool {
	after.LogFile, after.LogLevel = before.LogFile, before.LogLevel
	return reflect.DeepEqual(before, after)
}

// keep returns c with the keys as they are that hold for the life of the
// process, and says which of them should have changed.
func keep(ctx context.Context, before, c config.NodeConfig) config.NodeConfig {
	for _, k := range []struct {
		name string
		old  string
		now  *string
		why  string
	}{
		{"listen", before.Listen, &c.Listen, "probes may be asked at the old address"},
		{"stateDir", before.StateDir, &c.StateDir, "the lock and what pods hold are in the old folder"},
	} {
		if *k.now != k.old {
			klog.FromContext(ctx).Info("A change of the configuration takes effect when divvy-node is restarted", "key", k.name,
				"now", k.old, "then", *k.now, "because", k.why)
			*k.now = k.old
		}
	}
	return c
}

// start makes an agent and runs it, until its cancel is called. The backends are its
// own from then on. profiles are offered beside what the configuration names.
func (s *supervisor) start(ctx context.Context, c config.NodeConfig, profiles map[string][]string, b vendors.Set, h agent.Handoff,
) (*running, error) {
	r := &running{
		config: c, profiles: profiles, registry: prometheus.NewRegistry(), ended: make(chan error, 1), release: sync.OnceValue(b.Close),
	}
	var err error
	ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if r.nodeAgent, err = s.build(ctx, nodeconfig.WithProfiles(c, profiles), b, r.registry, h); err != nil {
		r.cancel()
		return nil, errors.Join(err, r.release())
	}
	go func() {
		err := r.Run(ctx)
		r.ended <- errors.Join(err, r.release())
	}()
	s.state.set(r)
	return r, nil
}

// stop ends what runs and waits for it.
func (s *supervisor) stop(r *running) error {
	s.state.set(nil)
	r.cancel()
	return <-r.ended
}

// gatherer has the metrics of the process and of the agent that runs.
func (s *supervisor) gatherer() prometheus.Gatherer {
	if r, _ := s.state.now(); r != nil {
		return prometheus.Gatherers{s.process, r.registry}
	}
	return s.process
}

func warn(ctx context.Context, warnings []string) {
	for _, w := range warnings {
		klog.FromContext(ctx).Info("Warning about the configuration", "warning", w)
	}
}

func (s *supervisor) accept(ctx context.Context, files []string) {
	klog.FromContext(ctx).Info("The new configuration is in use", "files", files)
	s.stale.Store(false)
	s.reloads.WithLabelValues(applied).Inc()
	s.tell(events.ConfigurationReloaded, "the new configuration is in use: "+strings.Join(files, ", "))
}

func (s *supervisor) reject(ctx context.Context, err error) {
	klog.FromContext(ctx).Error(err, "The new configuration is invalid; keeping the previous one")
	s.stale.Store(true)
	s.reloads.WithLabelValues(rejected).Inc()
	s.tell(events.ConfigurationRejected, "the new configuration is invalid, the previous one stays in use: "+
		strings.Join(strings.Fields(err.Error()), " "))
}

// tell records an event on the node.
func (s *supervisor) tell(kind events.Kind, message string) {
	s.events.Tell(events.OnNode(s.o.Node), kind, message)
}
