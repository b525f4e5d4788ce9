package extender

import (
	"context"
	"crypto/tls"
	"fmt"
	"math"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
	"github.com/divvy-gpu/divvy/internal/scheduler/leader"
)

const (
	// holdBeyond is how much longer than a Lease a bind waits for a leader, and maxHold
	// the longest: kube-scheduler waits 10 s for an answer.
	holdBeyond = 1500 * time.Millisecond
	maxHold    = 9 * time.Second
	// unfinished is how long a bind may be under way, with the question what became of it.
	unfinished = 2 * decision.BindTimeout
	// unfinishedAtOnce is how many reservations of an earlier lead are dropped: all.
	unfinishedAtOnce = math.MaxInt
)

// newElection returns this replica's part in the election; nil without one.
func (p *program) newElection() (*leader.Elector, error) {
	e := p.options.Election
	if !e.Enabled {
		return nil, nil //nolint:nilnil // documented
	}
	return leader.New(leader.Config{
		Client:    p.clients.Kubernetes,
		Namespace: e.namespace(), Name: e.Name,
		Pod: p.replica.pod, Address: p.replica.address,
		Duration: e.Duration, Shared: e.Shared,
		CatchUp: p.catchUp,
	})
}

// elect takes part in the election until the program ends. Where it goes on answering
// reviews for a while, the Lease is given up before, as soon as the last bind is done: it
// begins no other.
func (p *program) elect(ctx context.Context) error {
	return p.untilEnding(ctx, p.quiesce, p.election.Run)
}

// untilEnding runs something until the program is to end and last has returned, whose context
// ends after shutdownTimeout.
func (p *program) untilEnding(ctx context.Context, last func(context.Context), run func(context.Context) error) error {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer stop()
	waiting.Go(func() {
		select {
		case <-p.ending:
		case <-ctx.Done():
		case <-running.Done():
			return
		}
		bounded, cancel := context.WithTimeout(running, shutdownTimeout)
		defer cancel()
		last(bounded)
		stop()
	})
	return run(running)
}

// catchUp returns nil when this replica may answer: its ledger has all that the
// replicas before it bound, and no reservation is left of a time when it led itself
// and another may have bound other pods since.
func (p *program) catchUp(ctx context.Context) error {
	if err := p.books.CatchUp(ctx, p.clients, p.options.Election.namespace(), p.replica.pod); err != nil {
		return err
	}
	// What is younger may be under way, and keeps its device until it is seen.
	for _, ref := range p.ledger.Unseen(unfinished, unfinishedAtOnce) {
		p.ledger.Forget(ref.UID)
	}
	if e := p.options.embedding; e != nil {
		return e.CatchUp(ctx, p.clients.Kubernetes, p.options.Election.namespace(), p.replica.pod)
	}
	return nil
}

// leading reports whether this replica answers; always without election.
func (p *program) leading() bool { return p.election == nil || p.election.Leading() }

// withElection completes what the extender needs to know of other replicas.
func (p *program) withElection(c extender.Config) extender.Config {
	if p.election == nil {
		return c
	}
	c.Election, c.Hold = p.election, min(p.options.Election.Duration+holdBeyond, maxHold)
	if p.certs != nil {
		c.Forward = p.newForward()
	}
	return c
}

// newForward returns how this replica reaches the one that leads: over TLS, by the
// certificate with which kube-scheduler may bind, which all replicas publish.
func (p *program) newForward() http.RoundTripper {
	return &http.Transport{
		DialTLSContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			own, err := p.certs.ClientCertificate()
			if err != nil {
				return nil, err
			}
			dialer := tls.Dialer{
				// One on a node that is gone refuses nothing.
				NetDialer: &net.Dialer{Timeout: time.Second},
				Config: &tls.Config{
					MinVersion: tls.VersionTLS12,
					ServerName: p.options.TLS.serverName(),
					// Those of the moment: connections are made anew when CAs change.
					RootCAs:      p.certs.ClientCAs(),
					Certificates: []tls.Certificate{*own},
				},
			}
			connection, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, fmt.Errorf("reach the leader: %w", err)
			}
			return connection, nil
		},
		MaxIdleConnsPerHost: 100,
		IdleConnTimeout:     time.Minute,
		DisableCompression:  true,
	}
}
