package extender

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// Config is what an Extender needs. All of it is required but where said.
type Config struct {
	// Config is for what is decided. Its Ready says whether this replica could answer if it
	// led; the first of its Resources is what inspect shows unless asked otherwise.
	decision.Config
	// Election says which of several replicas answers; nil where there is one.
	Election Election
	// Forward reaches the replica that leads; nil where replicas do not reach each
	// other, and a request of one that does not lead waits until it does.
	Forward http.RoundTripper
	// Hold is how long a bind waits for a leader. It is below what kube-scheduler waits
	// for an answer.
	Hold time.Duration
	// Version is what /version answers.
	Version string
	// BindFrom are addresses besides those of the extender's own host that may
	// ask for a bind.
	BindFrom []netip.Prefix
	// BindTimeout bounds a bind, 0 for decision.BindTimeout.
	BindTimeout time.Duration
}

// Extender holds what the handlers share. It is safe for concurrent use.
type Extender struct {
	config   Config
	decider  *decision.Decider
	metrics  *metrics
	binds    *keyedLock
	callers  callers
	replica  replica
	reports  reports
	explains explanations
	slots    *slots
}

// New checks the configuration.
func New(c Config) (*Extender, error) {
	if c.BindTimeout == 0 {
		c.BindTimeout = decision.BindTimeout
	}
	m, err := newMetrics(c.Registry)
	if err != nil {
		return nil, fmt.Errorf("metrics of the extender: %w", err)
	}
	e := &Extender{config: c, metrics: m, binds: newKeyedLock(), callers: callers{bindFrom: c.BindFrom}, slots: newSlots()}
	e.replica = replica{
		election: c.Election, forward: c.Forward, state: c.Ready, patience: c.Hold, callers: &e.callers, forwarded: m.forwarded,
		held: make(chan struct{}, maxHeld),
	}
	decides := c.Config
	if c.Ready != nil { // else New says so
		decides.Ready = e.replica.ready
	}
	if e.decider, err = decision.New(decides); err != nil {
		return nil, err
	}
	whole := new(limit.Reports[any]) // one for both, which take half of a processor together
	e.reports = reports{ledger: c.Ledger, cluster: c.Cluster, resources: slices.Clone(c.Resources), ready: e.replica.ready, whole: whole}
	e.explains = explanations{decider: e.decider, ready: e.replica.ready, whole: whole}
	return e, nil
}

// Decider is what decides.
func (e *Extender) Decider() *decision.Decider { return e.decider }

// Lead bounds what is done in ctx by the time in which this replica may act.
func (e *Extender) Lead(ctx context.Context) (context.Context, context.CancelFunc, error) {
	return e.replica.lead(ctx)
}

// Run wakes pods that wait, and probes the leader while another replica leads, until
// the context ends. Without it, requests to a leader that was cut off end by their own
// timeouts only.
func (e *Extender) Run(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { e.decider.Run(ctx) })
	group.Go(func() { e.replica.watch(ctx) })
	group.Wait()
}
