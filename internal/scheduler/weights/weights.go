// Package weights runs the policy fragmentation in the extender: it learns from the cluster state
// which requests to expect, and renews the weights of free capacity beside the requests.
package weights

import (
	"context"
	"iter"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

const (
	// renewEvery is after how long weights are renewed although fewer pods came than
	// fragmentation.RenewAfter: pods go as well.
	renewEvery = 10 * time.Second
	// renewPause is the shortest time between two renewals, and renewShare how many
	// times as long as one took: so that they take a tenth of a core at most, however
	// large the cluster is and however many pods come.
	renewPause = time.Second
	renewShare = 9
	// booksPoll is how often Run asks whether the cluster state was read.
	booksPoll = 50 * time.Millisecond
)

var (
	_ ledger.PerResource = (*Policy)(nil)
	_ place.Policy       = (*Policy)(nil)
)

// Policy is the policy fragmentation: one for each resource, since units of two resources are
// not comparable; what they learn from the cluster state; and the renewal of their weights, which
// no request waits for.
type Policy struct {
	// policies are in the order of the resources.
	policies []*priced
	byName   map[accel.Resource]*priced
	// always is true where this is the policy of the cluster, and wanted once the
	// cluster or a pod requests it: before that no request needs weights.
	always bool
	wanted atomic.Bool
	// renewed is true once there was a renewal after all was read.
	renewed atomic.Bool
	// came counts pods since the last renewal, and wake holds one signal that there
	// were enough.
	came atomic.Int64
	wake chan struct{}
}

// priced is the policy for one resource.
type priced struct {
	*fragmentation.Policy
	resource accel.Resource
	nodes    func(accel.Resource) iter.Seq2[string, *place.Node] // nil for those of the ledger
	seen     atomic.Uint64                                       // pods
	last     atomic.Pointer[renewal]
}

// renewal is the outcome of the last one.
type renewal struct {
	fragmentation.Status
	at   time.Time
	took time.Duration
}

// New returns the policy for the resources. It always renews its weights if it is the policy of
// the cluster. The prior, by resource, may be nil.
func New(resources []accel.Resource, prior map[accel.Resource][]demand.Count, always bool) *Policy {
	p := &Policy{byName: map[accel.Resource]*priced{}, always: always, wake: make(chan struct{}, 1)}
	for _, r := range resources {
		one := &priced{Policy: fragmentation.New(demand.Options{Prior: prior[r]}), resource: r}
		p.policies = append(p.policies, one)
		p.byName[r] = one
	}
	p.wanted.Store(always)
	return p
}

// Follow adds resources that are not in the ledger, whose nodes the function returns. It must be called before Run.
func (p *Policy) Follow(resources []accel.Resource, nodes func(accel.Resource) iter.Seq2[string, *place.Node]) {
	for _, r := range resources {
		one := &priced{Policy: fragmentation.New(demand.Options{}), resource: r, nodes: nodes}
		p.policies = append(p.policies, one)
		p.byName[r] = one
	}
}

// Name implements place.Policy.
func (*Policy) Name() string { return fragmentation.Name }

// For implements ledger.PerResource.
func (p *Policy) For(resource accel.Resource) place.Policy {
	if one := p.byName[resource]; one != nil {
		return one
	}
	return place.Binpack
}

// Choose implements place.Policy. Nobody asks it, as For says which policy decides.
func (*Policy) Choose(n *place.Node, a *place.Ask, buf []int) (slots []int, rating int64, ok bool) {
	return place.Binpack.Choose(n, a, buf)
}

// Epoch implements place.Policy, as Choose.
func (*Policy) Epoch() uint64 { return place.Binpack.Epoch() }

// NeedsCapacity makes the extender count CPU and memory where this is the policy of
// the cluster.
func (*Policy) NeedsCapacity() bool { return true }

// Learn implements cluster.Learner.
func (p *Policy) Learn(r accel.Request) {
	one := p.byName[r.Resource]
	if one == nil {
		return
	}
	devices := max(r.Devices, 1)
	one.observe(&place.Ask{Units: r.Peak() / accel.Units(devices), Devices: devices, CPU: r.CPU, Memory: r.Memory, Only: r.Selection})
	if r.Policy == fragmentation.Name && p.wanted.CompareAndSwap(false, true) {
		p.signal() // the first pod that asks for it
	}
	p.count(one)
}

// LearnBeside implements cluster.Learner.
func (p *Policy) LearnBeside(resource accel.Resource, cpu, memory int64) {
	if one := p.byName[resource]; one != nil {
		one.observe(&place.Ask{CPU: cpu, Memory: memory})
		p.count(one)
	}
}

func (o *priced) observe(a *place.Ask) {
	o.Observe(a)
	o.seen.Add(1)
}

func (p *Policy) count(one *priced) {
	if n := p.came.Add(1); n >= fragmentation.RenewAfter || n >= fragmentation.RenewFirst && one.seen.Load() <= fragmentation.RenewAfter {
		p.signal()
	}
}

func (p *Policy) signal() {
	select {
	case p.wake <- struct{}{}:
	default: // there is one
	}
}

// Ready reports whether decisions can be made by the policy of the cluster: if that is this one,
// weights were computed, or too few pods are known to compute them.
func (p *Policy) Ready() bool { return p.renewed.Load() || !p.always }

// Run renews weights until the context ends, once the cluster state was read.
func (p *Policy) Run(ctx context.Context, l *ledger.Ledger, read func() bool) error {
	for !read() {
		if !wait(ctx, booksPoll, nil) {
			return nil
		}
	}
	for {
		pause := renewPause
		if p.wanted.Load() {
			began := time.Now()
			p.renew(ctx, l)
			pause = max(pause, renewShare*time.Since(began))
		}
		if !wait(ctx, pause, nil) || !wait(ctx, renewEvery, p.wake) {
			return nil
		}
	}
}

// wait waits for a time or for the signal, and returns false when the context ended.
func wait(ctx context.Context, d time.Duration, signal <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
	case <-signal:
	}
	return true
}

// renew renews all weights, and the ratings that the ledger remembers where they have
// changed, so that no request has to.
func (p *Policy) renew(ctx context.Context, l *ledger.Ledger) {
	p.came.Store(0)
	changed := false
	for _, one := range p.policies {
		before := one.Epoch()
		one.renew(ctx, l)
		changed = changed || one.Epoch() != before
	}
	if changed {
		l.Refresh(fragmentation.RefreshedAsks)
	}
	p.renewed.Store(true)
}

func (o *priced) renew(ctx context.Context, l *ledger.Ledger) {
	log := klog.FromContext(ctx)
	began := time.Now()
	nodes := o.nodes
	if nodes == nil {
		nodes = l.Each
	}
	o.Renew(nodes(o.resource))
	now := &renewal{Status: o.Status(), at: time.Now(), took: time.Since(began)}
	before := o.last.Swap(now)
	if before == nil {
		before = &renewal{}
	}
	switch {
	case now.Epoch > 0 && before.Epoch == 0:
		log.Info("Placing by the distribution of observed requests", "policy", fragmentation.Name, "resource", o.resource,
			"pods", int(now.Pods), "kinds", now.Kinds)
	case now.Tables != before.Tables:
		log.V(2).Info("The distribution of observed requests has changed", "resource", o.resource, "pods", int(now.Pods),
			"kinds", now.Kinds, "took", now.took.String())
	}
	if now.Err != nil && (before.Err == nil || before.Err.Error() != now.Err.Error()) {
		log.Error(now.Err, "Could not compute the weights of free capacity; all free capacity counts the same", "resource", o.resource)
	}
}
