package extender

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

const (
	// probeEvery is how often a replica that follows asks the leader whether it answers,
	// and probeTimeout how long the leader may take. A leader that was cut off is known
	// after the sum of both; until then a question of kube-scheduler's may wait for it.
	probeEvery   = 200 * time.Millisecond
	probeTimeout = 300 * time.Millisecond
)

// errSilent is in the error of a request to a leader that does not answer. Why it does
// not is in the log only: kube-scheduler writes the error of an attempt into the pod's
// status whenever its text changes, and a text with ports would in each attempt.
var errSilent = errors.New("it does not respond")

// link is the connection of a replica that follows to the leader. It is up until a
// probe fails. A leader that was not probed yet counts as up. It is safe for
// concurrent use.
type link struct {
	mu      sync.Mutex
	address string
	// up ends, by down, when a probe of the leader at address fails.
	up   context.Context //nolint:containedctx // requests end with it
	down context.CancelCauseFunc
}

// to returns a context that ends with ctx, and with the link to the leader at the
// address. The error wraps errSilent where the link is down.
func (l *link) to(ctx context.Context, address string) (context.Context, context.CancelFunc, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow(address)
	if l.up.Err() != nil {
		return nil, nil, context.Cause(l.up)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	up := l.up
	stop := context.AfterFunc(up, func() { cancel(context.Cause(up)) })
	return ctx, func() { stop(); cancel(nil) }, nil
}

// probed notes the outcome of a probe of the leader at the address, and reports whether
// the link went down by it.
func (l *link) probed(address string, err error) (down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.follow(address)
	switch down = err != nil && l.up.Err() == nil; {
	case err != nil:
		l.down(errSilent)
	case l.up.Err() != nil:
		l.up, l.down = context.WithCancelCause(context.Background())
	}
	return down
}

// follow begins with another leader. l.mu is held.
func (l *link) follow(address string) {
	if l.up == nil || l.address != address {
		l.address = address
		l.up, l.down = context.WithCancelCause(context.Background())
	}
}

// watch probes the leader while this replica follows, until the context ends.
// Without it, requests to a leader that was cut off end by their own timeouts only.
func (p *replica) watch(ctx context.Context) {
	if p.election == nil || p.forward == nil {
		return
	}
	log := klog.FromContext(ctx)
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for {
		if address, _ := p.election.Leader(); address != "" && !p.election.Leading() {
			err := p.probe(ctx, address)
			if ctx.Err() == nil && p.link.probed(address, err) {
				log.Info("The leader does not respond", "leader", address, "reason", err.Error())
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (p *replica) probe(ctx context.Context, address string) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/healthz", http.NoBody)
	if err != nil {
		return err
	}
	response, err := p.forward.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // nothing of it matters
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("/healthz: %s", response.Status)
	}
	return nil
}
