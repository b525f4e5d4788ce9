package wiring

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/install/schedconf/host"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// States of the node, as the metrics name them.
const (
	stateWired      = "wired"
	stateWaiting    = "waiting"
	stateRolledBack = "rolled-back"
	stateUnhealthy  = "unhealthy"
	stateFailed     = "failed"
)

const (
	// quietFor is how long files must not change before they are looked at:
	// whoever writes one often writes more.
	quietFor = 300 * time.Millisecond
	// firstRetry and lastRetry bound the pauses after what did not go well.
	firstRetry, lastRetry = 2 * time.Second, 30 * time.Second
	drainTimeout          = 2 * time.Second
)

// node is what a watcher works on. *host.Host is one.
type node interface {
	Install(ctx context.Context, e schedconf.Extender, o host.InstallOptions) (host.Result, error)
}

type watcher struct {
	node     node
	extender func(context.Context) (schedconf.Extender, error)
	tell     func(ctx context.Context, k events.Kind, message string)
	resync   time.Duration

	states  *prometheus.GaugeVec
	changes *prometheus.CounterVec
	rounds  *prometheus.CounterVec

	mu    sync.Mutex
	state string
	err   error // why the state is not wired
}

func newWatcher(registry prometheus.Registerer) (*watcher, error) {
	w := &watcher{
		states: metrics.SchedconfState.NewGauges(), changes: metrics.SchedconfChanges.NewCounters(),
		rounds: metrics.SchedconfRounds.NewCounters(),
		state:  stateWaiting, err: errors.New("starting"),
	}
	for _, state := range []string{stateWired, stateWaiting, stateRolledBack, stateUnhealthy, stateFailed} {
		w.states.WithLabelValues(state)
		w.rounds.WithLabelValues(state)
	}
	for _, result := range []string{stateWired, stateRolledBack} {
		w.changes.WithLabelValues(result)
	}
	if err := errors.Join(registry.Register(w.states), registry.Register(w.changes), registry.Register(w.rounds)); err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	return w, nil
}

func (w *watcher) ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state == stateWired {
		return nil
	}
	return fmt.Errorf("%s: %w", w.state, w.err)
}

func (w *watcher) current() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

// run wires the node, and again after each value of changed, until ctx ends.
func (w *watcher) run(ctx context.Context, changed <-chan struct{}) {
	pause := firstRetry
	for {
		w.round(ctx)
		next := w.resync
		if w.ready() == nil {
			pause = firstRetry
		} else {
			next = min(pause, w.resync)
			if w.current() != stateWaiting { // what is waited for comes by itself
				pause = min(2*pause, lastRetry)
			}
		}
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-changed:
			timer.Stop()
			pause = firstRetry
		case <-timer.C:
		}
	}
}

func (w *watcher) round(ctx context.Context) {
	var r host.Result
	e, err := w.extender(ctx)
	if err == nil {
		r, err = w.node.Install(ctx, e, host.InstallOptions{})
	}
	switch {
	case ctx.Err() != nil:
		return // it was stopped, which says nothing of the node
	case unreachable(err) && w.current() == stateWired:
		klog.FromContext(ctx).V(4).Info("The API server is unavailable; using the last known state", "reason", err.Error())
		return
	}
	state := stateOf(err)
	w.rounds.WithLabelValues(state).Inc()
	w.set(ctx, state, err)
	var rolledBack *host.RolledBackError
	switch {
	case errors.As(err, &rolledBack):
		w.changes.WithLabelValues(stateRolledBack).Inc()
		w.tell(ctx, events.SchedulerRolledBack, err.Error())
	case err == nil && r.Changed:
		for _, note := range r.Notes {
			klog.FromContext(ctx).Info("Wired", "note", note)
		}
		w.changes.WithLabelValues(stateWired).Inc()
		w.tell(ctx, events.SchedulerWired, wiredMessage(e))
	}
}

// unreachable reports whether an error is that the API server did not answer, or
// not for itself.
func unreachable(err error) bool {
	var network net.Error
	return errors.As(err, &network) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsServiceUnavailable(err) ||
		apierrors.IsInternalError(err) || apierrors.IsTooManyRequests(err) || utilnet.IsConnectionRefused(err) ||
		utilnet.IsConnectionReset(err)
}

func stateOf(err error) string {
	var waiting *waitingError
	var rolledBack *host.RolledBackError
	var held *host.HeldError
	var notNow *host.NotNowError
	var unhealthy *host.UnhealthyError
	switch {
	case err == nil:
		return stateWired
	case errors.As(err, &waiting), errors.As(err, &notNow) && notNow.Failure == nil:
		return stateWaiting
	case errors.As(err, &rolledBack), errors.As(err, &held), notNow != nil:
		return stateRolledBack
	case errors.As(err, &unhealthy):
		return stateUnhealthy
	}
	return stateFailed
}

func (w *watcher) set(ctx context.Context, state string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.states.Reset()
	for _, s := range []string{stateWired, stateWaiting, stateRolledBack, stateUnhealthy, stateFailed} {
		w.states.WithLabelValues(s).Set(metrics.Bool(s == state))
	}
	if state != w.state || err != nil && (w.err == nil || err.Error() != w.err.Error()) {
		if err == nil {
			klog.FromContext(ctx).Info("kube-scheduler is configured and healthy")
		} else {
			klog.FromContext(ctx).Info("kube-scheduler is not configured as expected", "state", state, "reason", err.Error())
		}
	}
	w.state, w.err = state, err
}

// Watch installs, and again whenever something changes, until ctx ends. It looks every resync
// although nothing seems to have changed, and serves probes and the metrics of the registry on
// listen, unless that is "".
func Watch(ctx context.Context, n Node, s Source, listen string, resync time.Duration, registry *prometheus.Registry) error {
	namespace, _, _ := strings.Cut(s.Service, "/")
	h, err := n.open(newTurn(n.Client, namespace, n.Name, n.Timeout))
	if err != nil {
		return err
	}
	w, err := newWatcher(registry)
	if err != nil {
		return err
	}
	w.node, w.resync, w.tell = h, resync, n.tell
	w.extender = func(ctx context.Context) (schedconf.Extender, error) { return s.desired(ctx, n.Client, h) }
	limits := limit.New(limit.Config{})
	if err := registry.Register(limits); err != nil {
		return fmt.Errorf("metrics: %w", err)
	}
	klog.FromContext(ctx).Info("Starting", "version", version.String("divvy-schedconf"), "node", n.Name, "manifest", n.Manifest,
		"resources", s.Resources)
	changed := make(chan struct{}, 1)
	folders := slices.Compact(slices.Sorted(slices.Values(append(n.folders(), s.folders()...))))
	return serve.Program{
		Parts: []func(context.Context) error{
			func(ctx context.Context) error { return watchFiles(ctx, folders, changed) },
			func(ctx context.Context) error { return hold(ctx, h) },
			func(ctx context.Context) error { w.run(ctx, changed); return nil },
		},
		Limits:  limits,
		Servers: probes(listen, registry, w.ready),
		Drain:   drainTimeout,
	}.Run(ctx)
}

func probes(address string, registry prometheus.Gatherer, ready func() error) []serve.Server {
	handler := serve.NewProbes(nil, ready, registry)
	return []serve.Server{{Name: serve.Probes, Address: address, For: "probes", HTTP: serve.NewServer(handler)}}
}

// hold tells others that this node is watched.
func hold(ctx context.Context, h *host.Host) error {
	for {
		unlock, err := h.Watching()
		if err == nil {
			<-ctx.Done()
			return unlock()
		}
		// The folder may come yet, and an uninstall may be looking.
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(firstRetry):
		}
	}
}

// watchFiles sends a value after files in the folders changed and are quiet
// again. A folder that cannot be watched is looked at with every resync.
func watchFiles(ctx context.Context, dirs []string, changed chan<- struct{}) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch files: %w", err)
	}
	defer watcher.Close() //nolint:errcheck // nothing is lost
	for _, dir := range dirs {
		if err := watcher.Add(dir); err != nil {
			klog.FromContext(ctx).Info("A folder cannot be watched; its changes are noticed at the next check", "folder", dir,
				"reason", err.Error())
		}
	}
	var quiet <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case event, ok := <-watcher.Events:
			if !ok {
				return errors.New("watch files: no more events")
			}
			if host.IsTemporary(event.Name) {
				continue // else each change that fails would be the reason for the next
			}
			quiet = time.After(quietFor)
		case err := <-watcher.Errors:
			klog.FromContext(ctx).Error(err, "File events were lost; checking all files")
			quiet = time.After(quietFor)
		case <-quiet:
			quiet = nil
			select {
			case changed <- struct{}{}:
			default: // one is waiting already
			}
		}
	}
}

// UninstallAndStay uninstalls, tries again until that succeeds, and then keeps the lock and
// stays ready until ctx ends.
func UninstallAndStay(ctx context.Context, n Node, listen string, out io.Writer) error {
	h, err := n.open(nil)
	if err != nil {
		return err
	}
	var problem atomic.Pointer[error]
	set := func(err error) { problem.Store(&err) }
	set(errors.New("the configuration of kube-scheduler is still being restored"))
	ready := func() error { return *problem.Load() }
	work := func(ctx context.Context) error {
		for pause := firstRetry; ; pause = min(2*pause, lastRetry) {
			_, err := h.Uninstall(ctx, host.UninstallOptions{Stay: func(ctx context.Context, r host.Result) error {
				n.restored(ctx, r, out)
				set(nil)
				<-ctx.Done()
				return nil
			}})
			if ctx.Err() != nil {
				return nil //nolint:nilerr // it was stopped, and undoes nothing of what it did
			}
			klog.FromContext(ctx).Error(err, "Could not restore the configuration of kube-scheduler; retrying", "pause", pause)
			set(err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(pause):
			}
		}
	}
	return serve.Program{
		Parts:   []func(context.Context) error{work},
		Servers: probes(listen, metrics.Registry(metrics.Schedconf, nil), ready),
		Drain:   drainTimeout,
	}.Run(ctx)
}
